"""The race: plans that give the same bits take turns on real steps, and the fastest stays.

What: a state machine over numbers. `Race` says whose turn it is and when enough was seen; a `Lap` is one step of one
candidate, which is told when it is over and, maybe later, how long it took. `Pace` watches the winner afterwards.

How it is run: the candidate with the fewest steps is next, so that a slow minute of the machine slows all of them. The
first step of a plan is not counted, because it learns the tables; candidate 0 has learned them before. On the host
engine a step pays for heap that the plan before it gave back. There a turn is two steps, and the first of each turn is
not counted: with turns of one step the wrong plan can win (docs/LOG.md). A time is the lower median of a candidate's
steps, because a disturbance only makes a step longer. A candidate has no more turns once its fastest step is 5 % slower
than the leader's slowest, and the race is over when that is true of all others, or after 12 steps. On an accelerator
times arrive late, so the race goes on for up to two steps until the last ones are there. Several ranks must switch in
the same steps: there the number of steps is fixed, and the time of a candidate is that of its slowest rank.

Finals: after the race a plan may be made for the prices that the race has shown (planner/learned.py). It takes turns
with the winner for eight more steps at most.

Why predictions are not enough: steps that were predicted to take 1.00 to 1.05 of the plain step took up to 1.69 of it.

Cost: some additions a step. Not covered: which plans there are (planner/rivals.py), and putting them on (in_force.py).
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lowtide.units import format_seconds

MAX_STEPS = 12
"""Of all candidates together, with the steps that are not counted; see `Race.max_steps`."""
FINAL_STEPS = 8
"""More of them, if a plan comes in afterwards."""
LATE_STEPS = 2
"""More of them, on a device whose clock is read later than the step ends."""
EVERY_STEPS = 200
"""So often the winner is asked whether its steps still take what they took."""
_NUM_RECENT = 20
_DRIFT = 0.15
_CLEAR = 1.05
"""A difference between steps of more than this is not noise."""
_ENOUGH = 2
"""Counted steps of each candidate before anything is clear."""


@dataclass(slots=True)
class Race:
    """Candidates by number; 0 is the plan that was in force."""

    num_candidates: int
    is_fixed: bool = False
    """Ranks race: each must take the same turns, whatever it measures."""
    num_late: int = 0
    """Steps to wait for times that are not known yet."""
    turn_steps: int = 1
    """Steps that a candidate runs one after the other. Of several, the first is not counted."""
    turn: int = 0
    """Whose step comes next."""
    max_steps: int = field(init=False)
    """Of all candidates together: twelve, or enough for each of them to be timed twice; and those of the finals."""
    out: set[int] = field(init=False, default_factory=set)
    """Who has no more turns, whatever the others show."""
    _seconds: list[list[float]] = field(init=False)
    _pass_seconds: list[list[float]] = field(init=False)
    """The same of forward and backward alone. They decide nothing."""
    _num_steps: list[int] = field(init=False)
    """By candidate."""
    _finalists: tuple[int, ...] = field(init=False, default=())
    """Who takes turns in the finals; empty before."""
    _late_start: int = field(init=False, default=0)
    """Steps that the last candidate has missed: it came in for the finals."""
    _scheduled: int = field(init=False, default=0)
    _num_in_turn: int = field(init=False, default=0)
    """Steps of this turn that have run."""

    def __post_init__(self) -> None:
        self._seconds = [[] for _ in range(self.num_candidates)]
        self._pass_seconds = [[] for _ in range(self.num_candidates)]
        self._num_steps = [0] * self.num_candidates
        self.max_steps = MAX_STEPS
        if self.turn_steps > 1:
            self.max_steps = max(MAX_STEPS, _ENOUGH * self.turn_steps * self.num_candidates)

    @property
    def num_steps(self) -> int:
        """How many have run."""
        return sum(self._num_steps)

    def begin_finals(self, winner: int) -> None:
        """One more candidate, the last by number, takes turns with `winner` and nobody else. It goes first."""
        assert not self._finalists
        self._finalists = (winner, self.num_candidates)
        self._late_start = max(self._num_steps[winner] - 1, 0)
        self.num_candidates += 1
        self._seconds.append([])
        self._pass_seconds.append([])
        self._num_steps.append(0)
        self.max_steps = self.num_steps + FINAL_STEPS
        self._num_in_turn = 0
        self._choose()

    def lap(self) -> Lap:
        """The step that runs now."""
        if self.turn_steps > 1:
            return Lap(self, self.turn, is_counted=self._num_in_turn > 0)
        is_first = self.turn != 0 and self._num_steps[self.turn] == 0
        return Lap(self, self.turn, is_counted=not is_first)

    def is_learning(self, candidate: int) -> bool:
        """Whether it has run no step that counts."""
        return self._num_steps[candidate] < 2

    def advance(self) -> None:
        """A step is over, and with it maybe the turn."""
        self._num_steps[self._scheduled] += 1
        self._num_in_turn += 1
        if self._num_in_turn >= self.turn_steps:
            self._num_in_turn = 0
            self._choose()

    def drop(self, candidate: int) -> None:
        """It is out, whatever it has shown. In a race of ranks, candidate 0 has its turns."""
        assert candidate != 0
        self.out.add(candidate)
        self._seconds[candidate].clear()
        self._pass_seconds[candidate].clear()
        if self.turn == candidate:
            self.turn = 0
            if not self.is_fixed:
                self._scheduled = self._num_in_turn = 0

    def note(self, candidate: int, seconds: float, pass_seconds: float) -> None:
        """How long a counted step took, and its forward and backward pass."""
        if candidate not in self.out:
            self._seconds[candidate].append(seconds)
            self._pass_seconds[candidate].append(pass_seconds)

    def is_over(self, *, has_pending: bool) -> bool:
        """Whether to end now; `has_pending`: some times are not known yet."""
        last = self.max_steps + self.num_late
        if self.is_fixed:
            return self.num_steps >= last
        if len(self._contenders()) == 1:
            return True
        return self.num_steps >= (last if has_pending else self.max_steps)

    @property
    def num_counted(self) -> list[int]:
        """By candidate: how many of its steps were timed and count."""
        return [len(seconds) for seconds in self._seconds]

    @property
    def medians(self) -> list[float | None]:
        """By candidate; None of one that is out, or was not timed."""
        return [statistics.median_low(seconds) if seconds else None for seconds in self._seconds]

    @property
    def pass_medians(self) -> list[float | None]:
        """The same of forward and backward alone."""
        return [statistics.median_low(seconds) if seconds else None for seconds in self._pass_seconds]

    def _choose(self) -> None:
        runs = (self._finalists or range(self.num_candidates)) if self.is_fixed else self._contenders()
        self._scheduled = min(runs, key=lambda candidate: (self._turns_of(candidate), candidate))
        self.turn = 0 if self._scheduled in self.out else self._scheduled

    def _turns_of(self, candidate: int) -> int:
        """Its steps, as if it had been there from the start."""
        came_late = self._finalists and candidate == self._finalists[-1]
        return self._num_steps[candidate] + (self._late_start if came_late else 0)

    def _contenders(self) -> list[int]:
        """Who may still win."""
        runs = self._finalists or range(self.num_candidates)
        there = [candidate for candidate in runs if candidate not in self.out]
        if any(len(self._seconds[candidate]) < _ENOUGH for candidate in there):
            return there
        leader = fastest(self.medians)
        slowest = max(self._seconds[leader])
        return [one for one in there if one == leader or min(self._seconds[one]) <= _CLEAR * slowest]


@dataclass(frozen=True, slots=True)
class Lap:
    """One step of one candidate."""

    race: Race
    candidate: int
    is_counted: bool

    def over(self) -> None:
        """The step has run."""
        self.race.advance()

    def note(self, seconds: float, pass_seconds: float) -> None:
        """So long it took, and its forward and backward pass."""
        if self.is_counted:
            self.race.note(self.candidate, seconds, pass_seconds)


def fastest(seconds: Sequence[float | None]) -> int:
    """The number of the smallest; of equal ones the first; 0 where none is known."""
    known = [(each, number) for number, each in enumerate(seconds) if each is not None]
    return min(known)[1] if known else 0


def of_slowest_rank(by_rank: Sequence[Sequence[float | None]]) -> list[float | None]:
    """By candidate: what the slowest rank took; None where a rank does not know."""
    return [None if None in each else max(filter(None, each), default=0.0) for each in zip(*by_rank, strict=True)]


def ranking(seconds: Sequence[float | None]) -> list[int]:
    """Numbers: the winner's first, then as they came in, then those that were not timed."""
    winner = fastest(seconds)
    return sorted(range(len(seconds)), key=lambda n: (n != winner, seconds[n] is None, seconds[n] or 0.0, n))


def result_text(names: Sequence[str], seconds: Sequence[float | None]) -> str:
    """`no swap 102 ms, solver's 118 ms`: the winner first, then as they came in, then those that did not."""
    return ", ".join(
        f"{names[n]} {'not timed' if (each := seconds[n]) is None else format_seconds(each)}" for n in ranking(seconds)
    )


@dataclass(slots=True)
class Pace:
    """What a step of the winner took, and whether it still does.

    Asked every 200 steps: is the median of the last 20 more than 15 % off? Then the plans race again.
    """

    seconds: float
    num_steps: int = 0
    """Since it was asked last."""
    _recent: deque[float] = field(init=False, default_factory=lambda: deque(maxlen=_NUM_RECENT))

    def over(self) -> None:
        """Another step has run."""
        self.num_steps += 1

    def note(self, seconds: float, pass_seconds: float) -> None:
        """So long one took."""
        self._recent.append(seconds)

    def is_due(self) -> bool:
        """Whether it is time to ask. The same on all ranks."""
        return self.num_steps >= EVERY_STEPS

    def ask(self) -> bool:
        """Whether steps have become slower or faster. The next 200 begin."""
        self.num_steps = 0
        if len(self._recent) < _NUM_RECENT:
            return False
        return abs(statistics.median(self._recent) / self.seconds - 1.0) > _DRIFT


def not_in_force(plans: Mapping[str, str], digest: str) -> list[str]:
    """Of candidates by name, with the digest of each: those that are neither in force nor equal to an earlier one."""
    seen = {digest}
    found = []
    for name, each in plans.items():
        if each not in seen:
            found.append(name)
            seen.add(each)
    return found
