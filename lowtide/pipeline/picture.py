"""A schedule as text: one line a rank, time to the right.

What: every action stands where it runs on a clock and is as wide as it takes: its name as in torch's CSV (a pair reads
`0F3&3B1`), then `-` to its end. A rank that waits is `.`. What is wider than a page goes on below, with the time at
which it begins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lowtide.pipeline.clock import UNIT, Timed, play
from lowtide.pipeline.schedule import AnyAction, Schedule


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
