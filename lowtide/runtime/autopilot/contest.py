"""A race of plans: who takes part, and whose tide is whose.

What: `Contest` joins a `Race` (race.py, numbers alone) with plans and tides. One entrant is in force; the tides of the
others are put aside, and know what they learned when their turn comes again.
Cost: a tide for each plan while the race goes on. Not covered: putting plans on the model (in_force.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.core.fate import Fate
from lowtide.core.plan import Plan
from lowtide.runtime.autopilot.race import Race, fastest, ranking, result_text
from lowtide.runtime.session.tide import Tide
from lowtide.timeline.step import Link

SOLVERS = "solver's"
BEFORE = "before the correction"
LEARNED = "learned prices"


@dataclass(slots=True)
class Entrant:
    """A plan that takes part."""

    name: str
    plan: Plan
    tide: Tide | None = None
    """What carries it out; None while it has not run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How one plan came out of a race."""

    name: str
    predicted_seconds: float
    seconds: float | None
    """The lower median of its steps, on the slowest rank; None where it was not timed."""
    num_counted: int
    """Steps that this is of, on this rank."""
    is_out: bool
    """It did not fit, or failed."""


@dataclass(slots=True)
class Contest:
    """A race that is under way."""

    entrants: list[Entrant]
    """By their number in the race; the first was in force when it began."""
    race: Race
    seconds: float
    """What making the plans took."""
    number: int = 0
    """Who is in force."""
    link: Link | None = None
    """With the prices that this race has shown; None before the finals."""

    @property
    def in_force(self) -> Entrant:
        return self.entrants[self.number]

    def result(self, seconds: list[float | None]) -> tuple[int, str]:
        """The winner's number, and how the race went, in words."""
        return fastest(seconds), result_text([entrant.name for entrant in self.entrants], seconds)

    def standings(self, seconds: list[float | None]) -> tuple[Standing, ...]:
        """Of all plans: the winner first, then as they came in, then those that did not."""
        found = []
        for number, each in enumerate(self.entrants):
            assert each.plan.predicted is not None
            found.append(
                Standing(
                    name=each.name,
                    predicted_seconds=each.plan.predicted.step_seconds,
                    seconds=seconds[number],
                    num_counted=self.race.num_counted[number],
                    is_out=number in self.race.out,
                )
            )
        return tuple(found[number] for number in ranking(seconds))

    def is_new(self, plan: Plan) -> bool:
        """Whether no entrant gives its sites the same fates."""
        return all(_fates(plan) != _fates(entrant.plan) for entrant in self.entrants)

    def plans(self) -> dict[str, Plan]:
        """By name, without those that are out."""
        return {each.name: each.plan for n, each in enumerate(self.entrants) if n not in self.race.out}

    def retire(self, but: Entrant | None) -> None:
        """Take all tides off, for good; `but` stays. Graphs that are alive keep working."""
        for entrant in self.entrants:
            if entrant is not but and entrant.tide is not None:
                entrant.tide.remove()
                entrant.tide = None


def _fates(plan: Plan) -> list[tuple[str, Fate]]:
    return [(site.name, site.fate) for site in plan.sites]
