"""Sends and receives, put into a schedule of computing actions.

What: a result is sent right after the action that made it, and asked for by its reader when it is made, not before, so
that a buffer waits for no longer than it must. A result that its own rank reads (the turn of a V) is handed over.

Why it can neither swap two messages nor stand still: all transfers and all starts of actions are put in one order, by
their time on a clock, and the row of each rank is its part of that one order. So two ranks see the messages between
them in the same order, and even where every send waits for its receiver, the first transfer of the order that is
still to come is always possible.

Not covered: transfers in the middle of a pair. They stand after it, and whoever runs the pair may start them earlier.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lowtide.pipeline.clock import UNIT, play
from lowtide.pipeline.schedule import AnyAction, Schedule, made_by, receive_of, send_of


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
