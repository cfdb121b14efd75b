"""A schedule on a clock: when each action runs, how long the step takes, and where sends and receives go.

What: `play` runs the computing actions of a schedule with given durations. The rules:
- a rank carries out its actions in order, one at a time;
- an action starts when its rank is free and everything that it reads is there (for a pair: that both parts read);
- what it makes is there when it ends: at once on the same rank, `transfer_seconds` later on another one;
- sends and receives take no time of the rank (they run beside compute), and any number may be on the way.

Times are whatever the durations are in; whole numbers stay whole, so that formulas can be compared exactly.
`with_transfers` writes sends and receives out: a result is sent right after the action that made it, and asked for when
it is made, so that no buffer waits longer than it must. All transfers and starts of actions are put in one order, by
their time on the clock, and the row of each rank is its part of that order. So two ranks see the messages between them
in the same order, and even where every send waits for its receiver, the first transfer still to come is possible.
Cost: some µs an action, and some more the first time that a schedule is played.

Not covered: links that are shared or fill up, blocking transfers, the optimizer; transfers in the middle of a pair,
which stand after it, and whoever runs the pair may start them earlier.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from lowtide.pipeline.schedule import AnyAction, Kind, Pair, Schedule


def _unit(action: AnyAction) -> float:
    """How long actions take in diagrams: F = I = W = 1, and a pair hides nothing."""
    return 3 if isinstance(action, Pair) else 2 if action.kind is Kind.BACKWARD else 1


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


def play(
    schedule: Schedule, seconds_of: Callable[[AnyAction], float] = _unit, *, transfer_seconds: float = 0
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
                action, needs, makes = head
                start = free[rank]
                for need in needs:
                    when = ready[need]
                    if when is None:
                        break
                    start = max(start, when if home[need] == rank else when + transfer_seconds)
                else:
                    seconds = seconds_of(action)
                    assert seconds > 0, f"{action} takes no time"
                    free[rank] = start + seconds
                    rows[rank].append(Timed(action, start, free[rank]))
                    for result in makes:
                        ready[result], home[result] = free[rank], rank
                    heads[rank] = next(row, None)
                    moved = True
                    continue
                break
    assert not any(heads), "a schedule that stands still: verify it first"
    return Played(tuple(map(tuple, rows)))


# -- sends and receives, put into a schedule by its times --------------------------------------------------------------


def with_transfers(schedule: Schedule, seconds_of: Callable[[AnyAction], float] = _unit) -> Schedule:
    """The same schedule with every send and receive in its place. It must have passed `verify`.

    `seconds_of` says how long actions take. Rough values do: they only move receives, and every choice is right.
    """
    assert not schedule.has_transfers
    ordered: list[list[tuple[float, bool, int, AnyAction]]] = [[] for _ in schedule.actions]
    """Of each rank: time, whether it computes (at one time, transfers come first), number, action."""
    number = 0
    for rank, row in enumerate(play(schedule, seconds_of).rows):
        for timed in row:
            number += 1
            ordered[rank].append((timed.start, True, number, timed.action))
            for part in timed.action.parts:
                result = part.makes
                reader = None if result is None else schedule.reader(result)
                if result is None or reader is None or reader == rank:
                    continue
                number += 1
                ordered[rank].append((timed.end, False, number, result.send))
                ordered[reader].append((timed.end, False, number, result.receive))
    rows = (tuple(action for *_, action in sorted(row, key=lambda entry: entry[:3])) for row in ordered)
    return replace(schedule, actions=tuple(rows))
