"""A schedule on a clock: when each action runs, how long the step takes, and how long each rank waits.

What: `play` runs the computing actions of a schedule with given durations. The rules:
- a rank carries out its actions in order, one at a time;
- an action starts when its rank is free and everything that it reads is there (for a pair: that both parts read);
- what it makes is there when it ends: at once on the same rank, `transfer_seconds` later on another one;
- sends and receives take no time of the rank (they run beside compute), and any number may be on the way.

Times are whatever the durations are in; whole numbers stay whole, so that formulas can be compared exactly.
Where sends and receives are written out, their places are not looked at: `verify` proves that they can be kept, and a
transfer is never on its way before its data is there.
Cost: some µs an action, and some more the first time that a schedule is played.

Not covered: links that are shared or fill up, blocking transfers, the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lowtide.pipeline.schedule import AnyAction, Kind, Pair, Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """How long the actions of any one stage take. `seconds_of(action)` is what `play` asks for; where stages differ,
    give it a function of your own."""

    forward_seconds: float
    backward_seconds: float
    backward_input_seconds: float
    backward_weight_seconds: float
    pair_seconds: float

    def seconds_of(self, action: AnyAction) -> float:
        if isinstance(action, Pair):
            return self.pair_seconds
        seconds = {
            Kind.FORWARD: self.forward_seconds,
            Kind.BACKWARD: self.backward_seconds,
            Kind.BACKWARD_INPUT: self.backward_input_seconds,
            Kind.BACKWARD_WEIGHT: self.backward_weight_seconds,
        }
        return seconds[action.kind]


UNIT = Durations(
    forward_seconds=1,
    backward_seconds=2,
    backward_input_seconds=1,
    backward_weight_seconds=1,
    pair_seconds=3,
)
"""F = I = W = 1, and a pair that hides nothing: what diagrams are drawn with."""


@dataclass(frozen=True, slots=True)
class Timed:
    """An action with its time, from the start of the step."""

    action: AnyAction
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Played:
    """One step of a pipeline."""

    rows: tuple[tuple[Timed, ...], ...]
    """Of each rank, in order."""

    @property
    def step_seconds(self) -> float:
        """From the first start on any rank to the last end."""
        return max(timed.end for row in self.rows for timed in row)

    @property
    def busy_seconds(self) -> tuple[float, ...]:
        return tuple(sum(timed.end - timed.start for timed in row) for row in self.rows)

    @property
    def bubble_seconds(self) -> tuple[float, ...]:
        """What each rank does not compute of the step. This is the published measure."""
        return tuple(self.step_seconds - busy for busy in self.busy_seconds)

    @property
    def gap_seconds(self) -> tuple[float, ...]:
        """What each rank waits between its own first and last action: the bubble where steps follow one another
        without a barrier."""
        return tuple(row[-1].end - row[0].start - busy for row, busy in zip(self.rows, self.busy_seconds))


def play(
    schedule: Schedule, seconds_of: Callable[[AnyAction], float] = UNIT.seconds_of, *, transfer_seconds: float = 0
) -> Played:
    """Play one step. The schedule must have passed `verify`, and every duration must be above 0."""
    ready: list[float | None] = [None] * schedule.num_results
    """When each result was made."""
    home = [0] * schedule.num_results
    """On which rank."""
    rows: list[list[Timed]] = [[] for _ in schedule.actions]
    waiting = [iter(row) for row in schedule.computed]
    heads = [next(row, None) for row in waiting]
    free: list[float] = [0] * schedule.num_ranks
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(waiting):
            while (head := heads[rank]) is not None:
                start = free[rank]
                for need in head.needs:
                    when = ready[need]
                    if when is None:
                        break
                    start = max(start, when if home[need] == rank else when + transfer_seconds)
                else:
                    seconds = seconds_of(head.action)
                    assert seconds > 0, f"{head.action} takes no time"
                    free[rank] = start + seconds
                    rows[rank].append(Timed(head.action, start, free[rank]))
                    for result in head.makes:
                        ready[result], home[result] = free[rank], rank
                    heads[rank] = next(row, None)
                    moved = True
                    continue
                break
    assert not any(heads), "a schedule that stands still: verify it first"
    return Played(tuple(map(tuple, rows)))
