"""The measured curve of an audited step, compared with the planned one layer by layer.

What: both curves know when each layer begins in the forward pass and ends in the backward pass. `compared_seconds`
stretches each part between two such moments to the planned time; `largest_difference` compares the highest byte of each
part, which needs no clock.
Why: an audited step is slower, and not evenly so. Stretched as a whole, a curve that is right to the byte would seem
wrong by a tenth of the peak.
Cost: linear in samples. Not covered: times within a part; layers that are called twice have one part.
"""

from __future__ import annotations

import numpy as np

from lowtide.core.measured_curve import LayerTimes, MeasuredCurve
from lowtide.report.played_step import Played


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
