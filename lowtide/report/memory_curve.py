"""The memory of a step over its time, drawn with characters.

What: `curve_lines` draws the curve of a solved plan: `#` is the planned step, `.` what the plain step takes beyond
that, `-` the budget. The time axis is that of the plain step, so that both curves show the same operator in the same
column. Cost: one run of the timeline. Not covered: lanes; report/pictures.py draws those.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from lowtide.core.plan import Plan
from lowtide.core.profile import Profile
from lowtide.report.played_step import Curve, play
from lowtide.timeline.step import Link
from lowtide.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from lowtide.config.memory import MemoryConfig

_WIDTH = 72
_BESIDE = 20
"""Characters of a line beside the curve: a size in front, `  budget` behind."""
_HEIGHT = 12


def memory_curve(
    plan: Plan, profile: Profile, config: MemoryConfig, *, link: Link, has_gradients: bool = False
) -> Curve:
    """The curve of `plan`, which was solved for `profile` under the rules of `config`."""
    return play(plan, profile, config, link=link, has_gradients=has_gradients).curve


def curve_lines(curve: Curve, width: int | None = None) -> list[str]:
    """About 14 lines of text, of at most `width` characters."""
    wide = _WIDTH if width is None else min(_WIDTH, width - _BESIDE)
    planned, plain = (_columns(curve, counts, wide) for counts in (curve.planned_bytes, curve.plain_bytes))
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
    lines.append(f"{format_bytes(bottom):>10} +{'-' * wide}")
    turn = min(int(wide * _share_of_forward(curve)), wide - len("backward"))
    total = format_seconds(sum(curve.seconds))
    lines.append(f"{'':>10}  {'forward'[:turn]:<{turn}}backward")
    lines.append(f"{'':>10}  #: planned  .: everything kept, {total}")
    return lines


def _share_of_forward(curve: Curve) -> float:
    total = sum(curve.seconds)
    return sum(curve.seconds[: curve.num_forward_ticks]) / total if total else 0.5


def _columns(curve: Curve, counts: tuple[int, ...], wide: int) -> list[int]:
    """The most bytes in each of `wide` equal parts of the time."""
    ends = np.cumsum(curve.seconds)
    total = float(ends[-1]) or 1.0
    first = np.minimum((ends - curve.seconds) / total * wide, wide - 1).astype(int)
    last = np.minimum(np.ceil(ends / total * wide), wide).astype(int)
    columns = [0] * wide
    for count, begin, end in zip(counts, first.tolist(), last.tolist(), strict=True):
        for column in range(begin, max(end, begin + 1)):
            columns[column] = max(columns[column], count)
    return columns
