"""The memory of a step over its time: as numbers, and drawn with characters.

What: `memory_curve` runs the timeline of a solved plan on its profile again. `curve_lines` draws it: `#` is the planned
step, `.` what the plain step takes beyond that, `-` the budget.
The time axis is that of the plain step, so that both curves show the same operator in the same column. Cost: one run of
the timeline. Not covered: lanes (copies, network).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from lowtide.core.fate import Fate
from lowtide.core.plan import Plan
from lowtide.core.profile import Profile
from lowtide.planner.place_state import placed_fates, shares_of
from lowtide.planner.plan_profile import problem_of
from lowtide.planner.problem import Problem
from lowtide.planner.smaller import fates_of
from lowtide.planner.state_items import with_state
from lowtide.timeline.events import run
from lowtide.timeline.memory import plain_curve
from lowtide.timeline.step import Link
from lowtide.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from lowtide.config.memory import MemoryConfig

_WIDTH = 72
_HEIGHT = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Bytes on the device in each tick of the step."""

    seconds: tuple[float, ...]
    """How long each tick takes in the plain step."""
    num_forward_ticks: int
    plain_bytes: tuple[int, ...]
    planned_bytes: tuple[int, ...]
    budget_bytes: int | None

    def thinned(self, max_points: int) -> dict[str, list[float] | list[int]]:
        """Lists for JSON of at most `max_points` points; each has the most bytes of the ticks that it stands for."""
        num_ticks = len(self.seconds)
        starts = np.unique(np.arange(min(max_points, num_ticks)) * num_ticks // min(max_points, num_ticks))
        return {
            "start_seconds": (np.cumsum(self.seconds) - self.seconds)[starts].tolist(),
            "plain_bytes": np.maximum.reduceat(self.plain_bytes, starts).tolist(),
            "planned_bytes": np.maximum.reduceat(self.planned_bytes, starts).tolist(),
        }


def memory_curve(
    plan: Plan, profile: Profile, config: MemoryConfig, *, link: Link, has_gradients: bool = False
) -> Curve:
    """The curve of `plan`, which was solved for `profile` under the rules of `config`."""
    layers = tuple(name for name in plan.layers if plan.rules.decide(name, is_site=False).fate is Fate.RECOMPUTE)
    problem = problem_of(profile, config, has_gradients=has_gradients, layers=layers)
    plain, fates, num_ticks = plain_curve(problem.step).tolist(), _fates(plan, problem), len(problem.step.ticks)
    if plan.optimizer is not None and plan.optimizer.moved_bytes:
        shares = shares_of(profile.state, link, config.host_budget, may_stay=config.optimizer == "auto")
        assert shares is not None
        problem = with_state(problem, shares)
        fates += placed_fates(plan.optimizer, profile.state, shares)
    timeline = run(problem.step, fates, link, budget_bytes=plan.budget_bytes)
    return Curve(
        seconds=tuple(tick.seconds for tick in problem.step.ticks[:num_ticks]),
        num_forward_ticks=problem.step.num_forward_ticks,
        plain_bytes=tuple(plain),
        planned_bytes=timeline.curve[:num_ticks],
        budget_bytes=plan.budget_bytes,
    )


def _fates(plan: Plan, problem: Problem) -> list[Fate]:
    """The fate of each item. An anchor that the plan does not name is not needed, so its fate does not matter."""
    fate_of = fates_of(plan.sites)
    return [fate_of.get(item.name, item.fates[0]) for item in problem.step.items]


def curve_lines(curve: Curve) -> list[str]:
    """About 14 lines of text."""
    planned, plain = _columns(curve, curve.planned_bytes), _columns(curve, curve.plain_bytes)
    top = max(*planned, *plain)
    bottom = int(min(planned)) if min(planned) > top / 2 else 0  # from 0, the part that changes would be one line high
    row_bytes = max((top - bottom) / _HEIGHT, 1.0)
    lines = []
    for row in range(_HEIGHT, 0, -1):
        low, high = bottom + (row - 1) * row_bytes, bottom + row * row_bytes
        is_budget = curve.budget_bytes is not None and low < curve.budget_bytes <= high
        blank = "-" if is_budget else " "
        cells = (
            "#" if count > low + row_bytes / 2 else "." if other > low + row_bytes / 2 else blank
            for count, other in zip(planned, plain, strict=True)
        )
        label = format_bytes(int(high)) if row in (_HEIGHT, _HEIGHT // 2) else ""
        mark = "  budget" if is_budget else ""
        lines.append(f"{label:>10} |{''.join(cells)}{mark}".rstrip())
    lines.append(f"{format_bytes(bottom):>10} +{'-' * _WIDTH}")
    turn = min(int(_WIDTH * _share_of_forward(curve)), _WIDTH - len("backward"))
    total = format_seconds(sum(curve.seconds))
    lines.append(f"{'':>10}  {'forward'[:turn]:<{turn}}backward")
    lines.append(f"{'':>10}  #: planned  .: everything kept, {total}")
    return lines


def _share_of_forward(curve: Curve) -> float:
    total = sum(curve.seconds)
    return sum(curve.seconds[: curve.num_forward_ticks]) / total if total else 0.5


def _columns(curve: Curve, counts: tuple[int, ...]) -> list[int]:
    """The most bytes in each of `_WIDTH` equal parts of the time."""
    ends = np.cumsum(curve.seconds)
    total = float(ends[-1]) or 1.0
    first = np.minimum((ends - curve.seconds) / total * _WIDTH, _WIDTH - 1).astype(int)
    last = np.minimum(np.ceil(ends / total * _WIDTH), _WIDTH).astype(int)
    columns = [0] * _WIDTH
    for count, begin, end in zip(counts, first.tolist(), last.tolist(), strict=True):
        for column in range(begin, max(end, begin + 1)):
            columns[column] = max(columns[column], count)
    return columns
