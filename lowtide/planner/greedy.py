"""Fates by water-filling: swap what the link hides, recompute what is cheapest for its bytes. No solver needed.

What: evict as many bytes as the budget asks for. Of these, the link takes what it can send away while forward computes,
those items first that are dearest to make again for their bytes; the rest is recomputed, cheapest first.

Why: for equal layers this is within half a percentage point of the linear program, and it needs nothing but numpy: a
first answer, and an independent one to compare the program with.

Cost: sorting the items, and one pass over the forward ticks for each swapped one.

Not covered: a lower bound, different layers (one price for all), what a recipe's inputs cost; the caller plays several
amounts of eviction and keeps the best.
"""

from __future__ import annotations

import numpy as np

from lowtide.core.fate import Fate
from lowtide.planner.min_peak import first_of
from lowtide.timeline.memory import StepArrays
from lowtide.timeline.step import Link, Move, making_seconds, ways


def closed_form(arrays: StepArrays, link: Link, evict_bytes: float, host_bytes: int | None = None) -> tuple[Fate, ...]:
    """Fates that take about `evict_bytes` off the peak between forward and backward, if fates allow."""
    items = arrays.step.items
    sites = [
        index
        for index, item in enumerate(items)
        if not item.is_retained_input and item.nbytes and (item.dies < item.reads[0] or Fate.KEEP not in item.fates)
    ]
    fates = [first_of(item, (Fate.KEEP, Fate.SWAP, Fate.RECOMPUTE)) for item in items]
    must = [index for index in sites if Fate.KEEP not in items[index].fates]
    left = evict_bytes - sum(items[index].nbytes for index in must)
    cheapest: dict[int, Move] = {}
    for index in sites:
        made = [way for way in ways(items, index) if way[0][1] is Fate.RECOMPUTE]
        if made:
            cheapest[index] = min(made, key=lambda way: making_seconds(items, way))
    prices = {
        index: making_seconds(items, cheapest[index]) / items[index].nbytes if index in cheapest else np.inf
        for index in sites
    }
    hidden = _Hidden(arrays, link, host_bytes)
    # Without a recipe first, then the dearest; of equal ones the first saved, which has the most time to leave.
    for index in sorted(sites, key=lambda index: (-prices[index], items[index].saved, index)):
        item = items[index]
        if left <= 0 or Fate.SWAP not in item.fates or index in must:
            continue
        if hidden.take(index):
            fates[index] = Fate.SWAP
            left -= item.nbytes
    for index in sorted(sites, key=lambda index: (prices[index], items[index].saved, index)):
        item = items[index]
        if left <= 0 or fates[index] is not Fate.KEEP:
            continue
        for changed, fate in cheapest.get(index, ()):
            fates[changed] = fate
        if fates[index] is Fate.RECOMPUTE:
            left -= item.nbytes
    for index in sites:  # what the link cannot hide comes last
        if left > 0 and fates[index] is Fate.KEEP and Fate.SWAP in items[index].fates:
            fates[index] = Fate.SWAP
            left -= items[index].nbytes
    return tuple(fates)


class _Hidden:
    """What has been sent so far, so that everything still lands before backward starts."""

    def __init__(self, arrays: StepArrays, link: Link, host_bytes: int | None) -> None:
        self.arrays, self.link = arrays, link
        self.host_left = np.inf if host_bytes is None else host_bytes
        num_forward = arrays.step.num_forward_ticks
        seconds = arrays.seconds[:num_forward]
        # Time of the lane that is left for what is saved at tick t or later.
        self.room_seconds = seconds.sum() - np.cumsum(seconds)

    def take(self, index: int) -> bool:
        """Whether this one can be sent too without a wait; counts it if so."""
        item = self.arrays.step.items[index]
        seconds = self.link.latency_seconds + item.nbytes / self.link.out_bytes_per_second
        if item.nbytes > self.host_left or self.room_seconds[: item.saved + 1].min() < seconds:
            return False
        self.room_seconds[: item.saved + 1] -= seconds
        self.host_left -= item.nbytes
        return True
