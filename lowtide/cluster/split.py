"""Which layers each stage has.

What: `split_layers` gives the number of layers of each stage, in the order of the model: as they are wanted, equally
many, or so that the slowest stage is as fast as can be, embedding and output layer counted. The first and the last
stage may then be without a layer. Of equally good splits it is the one with the earliest stages emptiest: those hold
the most micro-batches.
Cost: a few passes over the layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal


def split_layers(
    costs: Sequence[float],
    num_stages: int,
    *,
    first: float = 0.0,
    last: float = 0.0,
    wanted: Literal["balanced", "even"] | tuple[int, ...] = "balanced",
) -> tuple[int, ...]:
    """Layers of each stage. `costs` are those of the layers, `first` and `last` what stands before and after them.

    What is wanted must have been checked; a balanced split needs a layer for each stage but the two at the ends."""
    if isinstance(wanted, tuple):
        return wanted
    if wanted == "even":
        return (len(costs) // num_stages,) * num_stages
    if num_stages == 1:
        return (len(costs),)
    low = max(*costs, first, last)
    high = sum(costs) + first + last
    best = _filled(costs, num_stages, first, last, high)
    assert best is not None, f"{len(costs)} layers for {num_stages} stages"
    for _ in range(50):
        middle = (low + high) / 2
        found = _filled(costs, num_stages, first, last, middle)
        if found is None:
            low = middle
        else:
            best, high = found, middle
        if high - low <= 1e-9 * high:
            break
    return best


def _filled(costs: Sequence[float], num_stages: int, first: float, last: float, most: float) -> tuple[int, ...] | None:
    """Stages filled from the last one on, none of them beyond `most`; None: the first would be."""
    counts = [0] * num_stages
    at = len(costs)
    for stage in reversed(range(num_stages)):
        left = last if stage == num_stages - 1 else first if stage == 0 else 0.0
        # Stages before this one want a layer each, the first excepted.
        reserved = max(stage - 1, 0)
        while at > reserved and left + costs[at - 1] <= most * (1 + 1e-12):
            at -= 1
            left += costs[at]
            counts[stage] += 1
        if counts[stage] == 0 and 0 < stage < num_stages - 1:
            return None
    return tuple(counts) if at == 0 else None
