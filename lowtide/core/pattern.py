"""Patterns: how a person names layers, modules and ops without writing every name.

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
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from lowtide.core.json_text import build
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
        """A pattern in a JSON document. Raises `Mistake` for what is no text."""
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
        return Segment(text=text, ranges=_parse_ranges(text))
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


def _parse_ranges(text: str) -> tuple[tuple[int, int], ...]:
    if not _INDEX_LIST.fullmatch(text):
        raise ValueError(f"'{text}' is not a range or a list of indices; write 0-15 or 0,2,5-7")
    ranges = []
    for piece in text.split(","):
        first, _, last = piece.partition("-")
        if last and int(last) < int(first):
            raise ValueError(f"the range '{piece}' is backwards; write {last}-{first}")
        ranges.append((int(first), int(last or first)))
    return tuple(ranges)
