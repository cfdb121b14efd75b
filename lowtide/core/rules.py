"""Rules: patterns and the fate each one gives, and the one place where they are weighed against each other.

Precedence: `keep` wins over `recompute`, which wins over `swap`; what no rule names is kept. Among several rules of one
fate the last one written wins, so a general rule can come first and its exceptions after it.

Not covered: budgets. Rules say what a person wrote; a solver that fills in the rest writes rules too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lowtide.core.fate import Fate, Tier
from lowtide.core.json_text import OLD_NAME, build
from lowtide.core.pattern import Pattern, modules_of, nearest_names
from lowtide.errors import ConfigError

__all__ = ["Decision", "Pattern", "Rule", "Rules", "nearest_names", "unmatched_error"]

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

    def __str__(self) -> str:
        return f"{self.fate} '{self.pattern}'"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The fate of one layer, module or site, and why."""

    fate: Fate
    prefetch: int | None = None
    tier: Tier | None = None
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
        """What `to_plain` wrote. Raises `Mistake` for a value that does not fit, `ConfigError` for a bad pattern."""
        return cls(build(tuple[Rule, ...], document))


def past_error(rule: Rule, names: Sequence[str]) -> ConfigError | None:
    """The error for a range that reaches past the numbers that a model has in that place; None where none does."""
    at = f"{rule.where}: " if rule.where else ""
    segments = rule.pattern.segments
    for place, segment in enumerate(segments):
        numbers = rule.pattern.numbers_at(place, names) if segment.ranges else set()
        if numbers and max(end for _, end in segment.ranges) > max(numbers):
            every = ".".join("*" if each is segment else each.text for each in segments)
            return ConfigError(
                f"{at}pattern '{rule.pattern}' reaches past this model, whose numbers there end at {max(numbers)}; "
                f"write a range that ends there, or '{every}' for all"
            )
    return None


def unmatched_error(rule: Rule, names: Sequence[str]) -> ConfigError:
    """The error for a rule that matches nothing: where it stands, and what the user may have meant."""
    at = f"{rule.where}: " if rule.where else ""
    nearest = nearest_names(rule.pattern, names)
    hint = f"nearest: {', '.join(map(repr, nearest))}" if nearest else "print the plan to see the names"
    return ConfigError(f"{at}pattern '{rule.pattern}' matches no layer, module or op of this model; {hint}")
