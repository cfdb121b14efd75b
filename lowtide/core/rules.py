"""Rules: patterns and the fate each one gives, and the one place where they are weighed against each other.

Precedence: `keep` wins over `recompute`, which wins over `swap`; what no rule names is kept. Among several rules of one
fate the last one written wins, so a general rule can come first and its exceptions after it.

Not covered: budgets. Rules say what a person wrote; a solver that fills in the rest writes rules too.

Patterns: how a person names layers, modules and ops without writing every name.

Names are dotted. A layer is `model.layers.3`, a site is `model.layers.3.mlp.mul` (the module that produced it and the
op; a second `mul` of the same module is `mul_1`).

A pattern is dotted too. Each segment is a name, a glob (`*`, `q_*`), an inclusive range (`0-15`) or a list (`0,2,5-7`),
and stands for exactly one segment of a name. A pattern may start at any segment of a name and covers the thing named
and everything below it:

    layers.0-15       the first 16 layers and everything in them
    layers.*.mlp      the mlp of every layer and everything in it
    mul               every site made by `mul` (also `mul_1`, `mul_2`, ...)
    layers.*.mlp.*    everything below the mlp of every layer, not the mlp itself
    *.mlp             an mlp that is below something

Cost: a few string comparisons for each segment of a name; the runtime asks once per site, not once per step.
Not covered: regular expressions, `**`, negation (write a `keep` rule).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from lowtide.core.fate import Fate, Tier
from lowtide.core.json_text import OLD_NAME, build
from lowtide.errors import ConfigError

_MOST_CHARACTERS = 1_000
_INDEX_LIST = re.compile(r"[0-9]{1,18}(-[0-9]{1,18})?(,[0-9]{1,18}(-[0-9]{1,18})?)*", re.ASCII)
_INDEX_CHARACTERS = re.compile(r"[0-9]*[-,][-,0-9]*", re.ASCII)
_FORBIDDEN = re.compile(r"[\s?\[\](){}^$|\\+,'\"]")
_OP_NUMBER = re.compile(r"(_[0-9]+)?(:[0-9]+)?$", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One dotted part of a pattern."""

    text: str
    ranges: tuple[tuple[int, int], ...] = ()
    """Inclusive index ranges; empty for names and globs."""
    glob: re.Pattern[str] | None = None

    def matches(self, part: str) -> bool:
        """Does this segment stand for that part of a name?"""
        if self.ranges:
            return part.isdecimal() and any(first <= int(part) <= last for first, last in self.ranges)
        if self.glob is not None:
            return self.glob.fullmatch(part) is not None
        return part == self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """A parsed pattern. Two patterns are equal when their texts are."""

    text: str
    segments: tuple[Segment, ...] = field(compare=False, repr=False)

    @classmethod
    def parse(cls, text: str, *, where: str = "") -> Pattern:
        """Parse a pattern. Raises `ConfigError` that starts with `where` (`run.yaml:4:9`) when it is malformed."""
        at = f"{where}: " if where else ""
        if not text:
            raise ConfigError(f"{at}a pattern is empty; write a name such as 'layers.0-15'")
        if len(text) > _MOST_CHARACTERS:
            what = f"has {len(text)} characters, of at most {_MOST_CHARACTERS}; write several patterns"
            raise ConfigError(f"{at}pattern '{text[:40]}...' {what}")
        segments = []
        for part in text.split("."):
            try:
                segments.append(_parse_segment(part))
            except ValueError as error:
                raise ConfigError(f"{at}pattern '{text}': {error}") from None
        return cls(text=text, segments=tuple(segments))

    @classmethod
    def from_plain(cls, text: Any) -> Pattern:
        """A pattern in a JSON document. Raises `FieldError` for what is no text."""
        return cls.parse(build(str, text))

    def matches(self, name: str, *, is_site: bool = True) -> bool:
        """Does the pattern name `name`, or something that `name` is in?

        `is_site`: the last part of `name` is an op, so that `mul` also stands for `mul_1`.
        """
        parts = name.split(".")
        last = len(parts) - 1
        for start in range(len(parts) - len(self.segments) + 1):
            if all(
                segment.matches(parts[start + offset])
                or (is_site and start + offset == last and segment.matches(base_op(parts[last])))
                for offset, segment in enumerate(self.segments)
            ):
                return True
        return False

    def numbers_at(self, place: int, names: Iterable[str]) -> set[int]:
        """The numbers that names have where segment `place` of this pattern would stand, if all before it matches."""
        before, found = self.segments[:place], set()
        for name in names:
            parts = name.split(".")
            for start in range(len(parts) - place):
                part = parts[start + place]
                if part.isdecimal() and all(one.matches(other) for one, other in zip(before, parts[start:])):
                    found.add(int(part))
        return found

    def __str__(self) -> str:
        return self.text


def base_op(op: str) -> str:
    """`mul_1` -> `mul`, `sdpa:1` -> `sdpa`."""
    return _OP_NUMBER.sub("", op) or op


def modules_of(names: Iterable[str]) -> set[str]:
    """Every proper dotted prefix of the names: what cannot be an op because something is below it."""
    above: set[str] = set()
    for name in names:
        end = name.rfind(".")
        while end > 0 and name[:end] not in above:
            above.add(name[:end])
            end = name.rfind(".", 0, end)
    return above


def nearest_names(pattern: Pattern, names: Iterable[str], n: int = 3) -> list[str]:
    """Up to `n` patterns that do match something and look most like this one.

    The parts that matched stay as written: for `layers.*.mpl` the answer is `layers.*.mlp`, not 32 names. Where an
    index is out of range, the answer has the range that exists; where one was forgotten (`layers.mlp`), a `*`.
    """
    indices: dict[tuple[str, ...], set[int]] = {}
    for name in names:
        parts = name.split(".")
        for length in (len(pattern.segments), len(pattern.segments) + 1):
            for start in range(len(parts) - length + 1):
                candidate, index = _generalise(pattern, parts[start : start + length])
                known = indices.setdefault(candidate, set())
                if index is not None:
                    known.add(index)
    texts = {".".join(candidate).replace("#", _range_text(known)) for candidate, known in indices.items()}
    scored = sorted((-difflib.SequenceMatcher(a=text, b=pattern.text).ratio(), text) for text in texts)
    return [text for score, text in scored[:n] if -score >= 0.5]


def _generalise(pattern: Pattern, window: list[str]) -> tuple[tuple[str, ...], int | None]:
    """A window of a name in the pattern's own words; `#` marks one index that the pattern does not cover."""
    if len(window) != len(pattern.segments):
        return tuple("*" if part.isdecimal() else part for part in window), None
    candidate, missed = [], None
    for segment, part in zip(pattern.segments, window, strict=True):
        if segment.matches(part):
            candidate.append(segment.text)
        elif part.isdecimal() and missed is None:
            candidate.append("#")
            missed = int(part)
        else:
            candidate.append(part)
    return tuple(candidate), missed


def _range_text(indices: set[int]) -> str:
    if not indices:
        return "#"
    return str(min(indices)) if len(indices) == 1 else f"{min(indices)}-{max(indices)}"


def _parse_segment(text: str) -> Segment:
    if not text:
        raise ValueError("nothing between two dots; write '*' for any one name")
    if _INDEX_CHARACTERS.fullmatch(text):
        return Segment(text=text, ranges=tuple(_parse_ranges(text)))
    if "**" in text:
        raise ValueError("'**' is not needed; a pattern covers everything below what it names")
    forbidden = _FORBIDDEN.search(text)
    if forbidden is not None:
        what = repr(forbidden.group())
        raise ValueError(f"{what} has no meaning in '{text}'; use names, '*', ranges (0-15) and index lists (0,2,5-7)")
    if "*" in text:
        return Segment(text=text, glob=_glob(text))
    return Segment(text=text)


def _glob(text: str) -> re.Pattern[str]:
    """`q_*a*` as an expression that is matched in one go: what a `*` has taken is never given back, so that a pattern
    of twenty of them costs no more than one. The first place where the next piece fits is as good as any later one."""
    first, *middle, last = map(re.escape, text.split("*"))
    return re.compile(first + "".join(f"(?>.*?{piece})" for piece in middle) + ".*" + last)


def _parse_ranges(text: str) -> Iterator[tuple[int, int]]:
    if not _INDEX_LIST.fullmatch(text):
        raise ValueError(f"'{text}' is not a range or a list of indices; write 0-15 or 0,2,5-7")
    for piece in text.split(","):
        first, _, last = piece.partition("-")
        if last and int(last) < int(first):
            raise ValueError(f"the range '{piece}' is backwards; write {last}-{first}")
        yield int(first), int(last or first)


# -- rules ------------------------------------------------------------------------------------------------------------


_PRECEDENCE = (Fate.KEEP, Fate.RECOMPUTE, Fate.SWAP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One line that the user wrote."""

    pattern: Pattern = field(metadata={OLD_NAME: "match"})
    fate: Fate
    prefetch: int | None = None
    """Swap only: start the fetch this many operators of the backward pass before the first reader; None: by bytes."""
    tier: Tier | None = None
    """Swap only: the tier to copy to; None is the fastest that the engine has."""
    where: str = ""
    """`run.yaml:4:9` or `memory.swap[0]`."""

    @property
    def at(self) -> str:
        """How a message about it begins."""
        return f"{self.where}: " if self.where else ""

    def __str__(self) -> str:
        return f"{self.fate} '{self.pattern}'"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The fate of one layer, module or site, and why."""

    fate: Fate
    prefetch: int | None = None
    tier: Tier | None = None
    leave: int | None = None
    """Of a solved plan (core/decisions.py)."""
    reason: str
    """One short phrase, such as `swap 'layers.*.mlp' (run.yaml:4:9)`."""
    rule: Rule | None = None
    """None when no rule matched."""


@dataclass(frozen=True, slots=True)
class Rules:
    """All rules of a plan in the order written."""

    rules: tuple[Rule, ...] = ()

    def without_recompute(self) -> Rules:
        """The fates of storages that are not recomputed: inputs of a recomputed layer, or storages of a solved plan."""
        return Rules(tuple(rule for rule in self.rules if rule.fate is not Fate.RECOMPUTE))

    def decide(self, name: str, *, is_site: bool = True) -> Decision:
        """The fate of `name`. For a layer or a module pass `is_site=False`: there `mul` must not mean `mul_1`.

        Cost: linear in the number of rules; callers remember the answer.
        """
        for fate in _PRECEDENCE:
            for rule in reversed(self.rules):
                if rule.fate is fate and rule.pattern.matches(name, is_site=is_site):
                    reason = f"{rule} ({rule.where})" if rule.where else str(rule)
                    return Decision(fate=fate, prefetch=rule.prefetch, tier=rule.tier, reason=reason, rule=rule)
        return Decision(fate=Fate.KEEP, reason="no rule names it")

    def rerun(self, layers: Iterable[str]) -> tuple[str, ...]:
        """Those of these layers that run again as a whole."""
        return tuple(name for name in layers if self.decide(name, is_site=False).fate is Fate.RECOMPUTE)

    def unmatched(self, names: Iterable[str]) -> list[Rule]:
        """Rules whose pattern matches none of the names (layers, modules and sites of the model)."""
        names = list(names)
        above = modules_of(names)
        return [
            rule
            for rule in self.rules
            if not any(rule.pattern.matches(name, is_site=name not in above) for name in names)
        ]

    @property
    def does_nothing(self) -> bool:
        """True when every activation is kept whatever the model looks like."""
        return all(rule.fate is Fate.KEEP for rule in self.rules)

    def to_plain(self) -> list[dict[str, Any]]:
        """As a list for JSON; `from_plain` gives back equal rules."""
        return [
            {
                "match": rule.pattern.text,
                "fate": rule.fate.value,
                "prefetch": rule.prefetch,
                "tier": rule.tier.value if rule.tier else None,
                "where": rule.where,
            }
            for rule in self.rules
        ]

    @classmethod
    def from_plain(cls, document: Any) -> Rules:
        """What `to_plain` wrote. Raises `FieldError` for a value that does not fit, `ConfigError` for a bad pattern."""
        return cls(build(tuple[Rule, ...], document))


def past_error(rule: Rule, names: Sequence[str]) -> ConfigError | None:
    """The error for a range that reaches past the numbers that a model has in that place; None where none does."""
    segments = rule.pattern.segments
    for place, segment in enumerate(segments):
        numbers = rule.pattern.numbers_at(place, names) if segment.ranges else set()
        if numbers and max(end for _, end in segment.ranges) > max(numbers):
            every = ".".join("*" if each is segment else each.text for each in segments)
            return ConfigError(
                f"{rule.at}pattern '{rule.pattern}' reaches past this model, whose numbers there end at "
                f"{max(numbers)}; write a range that ends there, or '{every}' for all"
            )
    return None


def unmatched_error(rule: Rule, names: Sequence[str]) -> ConfigError:
    """The error for a rule that matches nothing: where it stands, and what the user may have meant."""
    nearest = nearest_names(rule.pattern, names)
    hint = f"nearest: {', '.join(map(repr, nearest))}" if nearest else "print the plan to see the names"
    return ConfigError(f"{rule.at}pattern '{rule.pattern}' matches no layer, module or op of this model; {hint}")
