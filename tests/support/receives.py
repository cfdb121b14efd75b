"""How many receive buffers a schedule needs on each rank."""

from __future__ import annotations

from lowtide.pipeline.schedule import Schedule


def peak_receives(schedule: Schedule) -> tuple[int, ...]:
    """Of each rank, the most messages that it has asked for and not begun to read: the receive buffers that it needs
    beside its live chunks."""
    peaks = []
    for row in schedule.actions:
        waiting = set()
        peak = 0
        for every in row:
            for action in every.parts:
                if action.kind.is_receive:
                    waiting.add(action.carries)
                elif not action.kind.is_transfer:
                    waiting.difference_update(schedule.needs(action))
            peak = max(peak, len(waiting))
        peaks.append(peak)
    return tuple(peaks)
