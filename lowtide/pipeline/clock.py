"""A schedule on a clock: when each action runs, how long the step takes, where sends and receives go; and its picture.

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
`picture` draws each action where it runs and as wide as it takes (a pair reads `0F3&3B1`); a rank that waits is `.`.
Cost: some µs an action, and some more the first time that a schedule is played.

Not covered: links that are shared or fill up, blocking transfers, the optimizer; transfers in the middle of a pair,
which stand after it, and whoever runs the pair may start them earlier.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lowtide.pipeline.schedule import AnyAction, Kind, Pair, Schedule, made_by, receive_of, send_of


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


# -- sends and receives, put into a schedule by its times --------------------------------------------------------------


def with_transfers(schedule: Schedule, seconds_of: Callable[[AnyAction], float] = UNIT.seconds_of) -> Schedule:
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
                result = made_by(part)
                reader = None if result is None else schedule.reader(result)
                if result is None or reader is None or reader == rank:
                    continue
                number += 1
                ordered[rank].append((timed.end, False, number, send_of(result)))
                ordered[reader].append((timed.end, False, number, receive_of(result)))
    rows = (tuple(action for *_, action in sorted(row, key=lambda entry: entry[:3])) for row in ordered)
    return replace(schedule, actions=tuple(rows))


# -- a schedule as a picture -------------------------------------------------------------------------------------------


def picture(
    schedule: Schedule, seconds_of: Callable[[AnyAction], float] = UNIT.seconds_of, *, columns: int = 120
) -> str:
    """The picture, without transfers, in lines of about `columns` characters. The schedule must have passed `verify`.
    A character stands for the same time everywhere: the longest with which every name fits into its action."""
    played = play(schedule, seconds_of)
    seconds = min((timed.end - timed.start) / (len(_name(timed.action)) + 1) for row in played.rows for timed in row)
    total = round(played.step_seconds / seconds)
    rows = [_drawn(row, seconds, total) for row in played.rows]
    heads = [f"rank {rank}  " for rank in range(schedule.num_ranks)]
    margin = max(map(len, heads))
    pages: list[str] = []
    start = 0
    while start < total:
        end = _page_end(rows, start, start + max(columns - margin, 1))
        lines = [f"{head:<{margin}}{row[start:end]}".rstrip() for head, row in zip(heads, rows)]
        if pages or end < total:
            lines.insert(0, f"{'':<{margin}}from {start * seconds:g}")
        pages.append("\n".join(lines))
        start = end
    return "\n\n".join(pages) + "\n"


def _drawn(row: Sequence[Timed], seconds: float, total: int) -> str:
    line = ""
    for timed in row:
        start, end = round(timed.start / seconds), round(timed.end / seconds)
        line = line.ljust(start, ".") + _name(timed.action).ljust(end - start - 1, "-") + " "
    return line.ljust(total, ".")


def _page_end(rows: Sequence[str], start: int, most: int) -> int:
    """The last column up to `most` at which no name is cut on any rank; `most` where there is none."""
    if most >= len(rows[0]):
        return len(rows[0])
    whole = (end for end in range(most, start, -1) if not any(row[end - 1] not in " .-" for row in rows))
    return next(whole, most)


def _name(action: AnyAction) -> str:
    return "&".join(map(str, action.parts))
