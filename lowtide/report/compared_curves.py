"""The measured curve of an audited step, compared with the planned one layer by layer.

What: both curves know when each layer begins in the forward pass and ends in the backward pass. `compared_seconds`
stretches each part between two such moments to the planned time; `largest_difference` compares the highest byte of each
part, which needs no clock.
Why: an audited step is slower, and not evenly so. Stretched as a whole, a curve that is right to the byte would seem
wrong by a tenth of the peak.
Cost: linear in samples. Not covered: times within a part; layers that are called twice have one part.

The memory of a step over its time, drawn with characters.

What: `curve_lines` draws the curve of a solved plan: `#` is the planned step, `.` what the plain step takes beyond
that, `-` the budget. The time axis is that of the plain step, so that both curves show the same operator in the same
column. Cost: one run of the timeline. Not covered: lanes; report/pictures.py draws those.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from lowtide.core.measured_curve import LayerTimes, MeasuredCurve
from lowtide.core.plan import Plan
from lowtide.core.profile import Profile
from lowtide.report.played_step import Curve, Played, play
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


def compared_seconds(curve: MeasuredCurve, played: Played) -> np.ndarray:
    """Seconds on the clock of the planned step at which each sample of `curve` stands."""
    counted, planned = _moments(curve, played)
    return np.interp(curve.seconds, counted, planned)


def largest_difference(curve: MeasuredCurve, played: Played) -> tuple[int, int]:
    """The most bytes by which the highest byte of a part of the step is off the predicted one, and the number of parts.
    The optimizer's step is no part."""
    counted, planned = _moments(curve, played)
    seconds, found = np.array(curve.seconds), np.array(curve.nbytes)
    starts, expected = np.array(played.starts[:-1]), np.array(played.curve.planned_bytes[:-1])
    apart, num_parts = 0, 0
    for part in range(len(counted) - 1):
        is_last = part == len(counted) - 2
        own = found[((seconds > counted[part]) | (part == 0)) & (seconds <= counted[part + 1])]
        theirs = expected[(starts >= planned[part]) & ((starts < planned[part + 1]) | is_last)]
        if len(own) and len(theirs):
            apart, num_parts = max(apart, abs(int(own.max()) - int(theirs.max()))), num_parts + 1
    return apart, num_parts


def _moments(curve: MeasuredCurve, played: Played) -> tuple[np.ndarray, np.ndarray]:
    """The same moments on both clocks, ascending."""
    turned, turn = curve.seconds[curve.num_forward - 1], played.starts[played.curve.num_forward_ticks]
    both = _in_both(curve.layers, played.layers)
    counted = [0.0, *(one.begins for one, _ in both), turned, *(one.ends for one, _ in both[::-1]), curve.seconds[-1]]
    planned = [0.0, *(other.begins for _, other in both), turn, *(other.ends for _, other in both[::-1])]
    return np.maximum.accumulate(counted), np.maximum.accumulate([*planned, played.step_seconds])


def _in_both(one: tuple[LayerTimes, ...], other: tuple[LayerTimes, ...]) -> list[tuple[LayerTimes, LayerTimes]]:
    by_name = {layer.name: layer for layer in one}
    return [(by_name[layer.name], layer) for layer in other if layer.name in by_name]
