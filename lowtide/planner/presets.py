"""Presets: plans for people who have no number in mind.

What: `plan_preset` makes one of three plans within the most bytes that there are (what a budget of `auto` comes to).
- fastest: the plan for all of them. Everything that fits is kept.
- smallest: the least peak that can be planned: the plan for the floor that the solver finds.
- balanced: the knee of the curve of time over memory between these two. Of a few plans between them, with bytes and
  seconds each scaled to 0 .. 1, the one with the least sum (Satopaa et al., Finding a Kneedle in a Haystack, 2011: the
  point furthest below the straight line between the ends). Where the smallest is as fast, it is the smallest.

Why a goal within a budget, and not a number: what is least depends on shapes, gradients and recipes, which change while
a model trains. Each plan is made anew for the goal, and the budget that is held is the one that the device sets.
Cost: fastest one plan, smallest two or three, balanced eight or so, the six between the ends limited to a second each.
Not covered: ends closer than `_CLOSE` (there is no knee between them).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lowtide.core.budget import Preset
from lowtide.core.plan import Plan
from lowtide.errors import BudgetError
from lowtide.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from lowtide.config.memory import Settled

_BETWEEN = (0.08, 0.16, 0.28, 0.42, 0.6, 0.8)
"""Shares of the way from the smallest peak to the fastest plan's: closer where a curve bends."""
_CLOSE = 0.002
"""Share of the step that nobody notices."""
_MOST_TRIES = 6
_SECONDS_EACH = 1.0

Make = Callable[..., Plan]
"""`plan_profile` of one profile, config and link: called with `budget_bytes`, and with limits."""


def plan_preset(preset: Preset, most_bytes: int, make: Make) -> tuple[Plan, str]:
    """The plan, and one line that says what the preset was turned into.

    Raises `BudgetError` where no plan fits `most_bytes`.
    """
    if preset == "fastest":
        plan = make(budget_bytes=most_bytes)
        return plan, f"preset fastest: the fastest plan within {format_bytes(most_bytes)}"
    smallest = _smallest(most_bytes, make)
    if preset == "smallest":
        text = f"preset smallest: peak {_peak(smallest)}, the least that can be planned"
        return smallest, text
    fastest = make(budget_bytes=most_bytes, with_suggestions=False)
    plans = [smallest, *_between(smallest, fastest, make), fastest]
    number = knee([_point(plan) for plan in plans])
    seconds = [format_seconds(_point(plan)[1]) for plan in (plans[number], smallest, fastest)]
    return plans[number], (
        f"preset balanced: peak {_peak(plans[number])}, {seconds[0]} a step: the knee of {len(plans)} plans from "
        f"{_peak(smallest)} ({seconds[1]}) to {_peak(fastest)} ({seconds[2]})"
    )


def knee(points: Sequence[tuple[int, float]]) -> int:
    """Number of the point (bytes, seconds) that is furthest below the line between the ends; of equals, the least
    bytes.

    The ends are the least bytes and the least seconds. Where no time is to be won, it is the least bytes.
    """
    low, high = min(nbytes for nbytes, _ in points), max(nbytes for nbytes, _ in points)
    fast, slow = min(seconds for _, seconds in points), max(seconds for _, seconds in points)
    if slow - fast <= _CLOSE * slow or high == low:
        return min(range(len(points)), key=lambda number: points[number][0])

    def both(number: int) -> tuple[float, int]:
        nbytes, seconds = points[number]
        return (nbytes - low) / (high - low) + (seconds - fast) / (slow - fast), nbytes

    return min(range(len(points)), key=both)


def _smallest(most_bytes: int, make: Make) -> Plan:
    """The plan for the floor: each refusal says where it is, and the last one is the user's to read."""
    budget_bytes = 1
    for _ in range(_MOST_TRIES):
        try:
            return make(budget_bytes=budget_bytes, with_suggestions=False)
        except BudgetError as error:
            # The solver may miss its own floor by a little; each try asks for more.
            budget_bytes = max(error.floor_bytes, budget_bytes + budget_bytes // 100)
            if budget_bytes > most_bytes:
                break
    return make(budget_bytes=most_bytes)


def _between(smallest: Plan, fastest: Plan, make: Make) -> list[Plan]:
    low, high = _point(smallest)[0], _point(fastest)[0]
    budgets = dict.fromkeys(low + int((high - low) * share) for share in _BETWEEN)
    found: dict[tuple[int, float], Plan] = {}
    limits: dict[str, Any] = {"time_limit_seconds": _SECONDS_EACH, "with_suggestions": False}
    for budget_bytes in (budget for budget in budgets if low < budget < high):
        try:
            plan = make(budget_bytes=budget_bytes, **limits)
        except BudgetError:
            continue  # the solver needs more time to reach the floor than it has here
        found.setdefault(_point(plan), plan)
    return list(found.values())


def _point(plan: Plan) -> tuple[int, float]:
    """Bytes and seconds."""
    assert plan.predicted is not None
    return plan.predicted.peak_bytes, plan.predicted.step_seconds + plan.predicted.check_seconds


def _peak(plan: Plan) -> str:
    return format_bytes(_point(plan)[0])


def plan_settled(settled: Settled, make: Make, say: Callable[[str], None]) -> Plan:
    """The plan for a budget in bytes, or for the preset within it; `say` hears what that was turned into."""
    if settled.preset is None:
        return make(budget_bytes=settled.budget_bytes)
    plan, line = plan_preset(settled.preset, settled.budget_bytes, make)
    say(line)
    return plan
