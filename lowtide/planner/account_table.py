"""What a solved plan promises, as plain text: peak, time, certainty, and where the bytes are at the worst moment.

Not covered: the rows of the layers (table.py), and what other budgets would give (the command line asks for these).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lowtide.planner.text import align
from lowtide.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from lowtide.planner.plan import AccountLine, Plan, Prediction

_NOTICED = 0.0005
"""Share of the step below which a number is not worth a word."""


def promise_lines(plan: Plan) -> list[str]:
    """Peak and time of a solved plan, and how sure they are. The first line carries on after the plan's name."""
    predicted = plan.predicted
    assert predicted is not None
    budget = "" if plan.budget_bytes is None else f" of a budget of {format_bytes(plan.budget_bytes)}"
    return [
        f"peak {format_bytes(predicted.peak_bytes)}{budget}; everything kept {format_bytes(predicted.plain_peak_bytes)}"
        f", floor {format_bytes(predicted.floor_bytes)}",
        _time_line(predicted),
        f"certainty: {predicted.certainty}",
    ]


def _time_line(predicted: Prediction) -> str:
    seconds, plain = predicted.step_seconds, predicted.plain_seconds
    more = seconds / plain - 1 if plain else 0.0
    slower = seconds - plain - predicted.stall_seconds - predicted.recompute_seconds
    slowed = f", copies slow it by {format_seconds(slower)}" if slower > _NOTICED * seconds else ""
    stalls, recompute = format_seconds(predicted.stall_seconds), format_seconds(predicted.recompute_seconds)
    return (
        f"step {format_seconds(seconds)}, {percent(more)} over {format_seconds(plain)} with everything kept: "
        f"stalls {stalls}, recompute {recompute}{slowed}; "
        f"gap {percent(predicted.gap)} (no plan is faster by more)"
    )


def account_lines(account: Sequence[AccountLine]) -> list[str]:
    """Bytes at the worst moment, before and after."""
    cells = [("at the worst moment", "everything kept", "planned")]
    for line in account:
        cells.append((line.what, _size(line.plain_bytes), _size(line.planned_bytes)))
    return align(cells, numeric=(1, 2))


def percent(share: float) -> str:
    """`4.2 %`."""
    return f"{round(100 * share, 1) + 0.0:.1f} %"  # + 0.0: no `-0.0 %`


def _size(num_bytes: int) -> str:
    return format_bytes(num_bytes) if num_bytes else "-"
