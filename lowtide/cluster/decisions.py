"""A plan layer by layer, the same for all micro-batches: what files of other systems can say.

What: the solver treats each chunk in flight by itself, so that of a layer's activation it may keep a third and make two
thirds again. `decisions` rounds that to whole layers of a stage: the first ones make it again, the next ones swap it,
as many as cover the solver's shares.
Why safe: no fewer bytes leave the device than the solver wanted. The price is up to one layer of each activation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from lowtide.cluster.layout import schedules_of
from lowtide.cluster.rank import Share
from lowtide.cluster.search import LayoutPlan
from lowtide.core.fate import Fate

Decisions = Mapping[str, Fate]
"""Saved activation -> its fate, for those that are not kept."""


def decisions(plan: LayoutPlan) -> tuple[Decisions, ...]:
    """Of each layer of the model, in order."""
    schedule = schedules_of(plan.layout, plan.num_micro_batches).schedule
    found: list[Decisions] = []
    for stage, rank in enumerate(schedule.rank_of_stage):
        place = schedule.stages_of(rank).index(stage)
        own = plan.ranks[rank]
        found += _of_stage(own.task.stages[place].kinds, own.shares[place])
    return tuple(found)


def _of_stage(kinds: Sequence[str], shares: Mapping[str, Share]) -> list[dict[str, Fate]]:
    layers: list[dict[str, Fate]] = [{} for _ in kinds]
    for name in dict.fromkeys(name for of_kind in shares.values() for name in of_kind):
        having = [
            (layer, shares[kind][name]) for layer, kind in zip(layers, kinds, strict=True) if name in shares[kind]
        ]
        swapped, recomputed = (sum(share[which] for _, share in having) for which in (0, 1))
        num_recomputed, num_swapped = (math.ceil(number - 1e-9) for number in (recomputed, swapped))
        for layer, _ in having[:num_recomputed]:
            layer[name] = Fate.RECOMPUTE
        for layer, _ in having[num_recomputed : num_recomputed + num_swapped]:
            layer[name] = Fate.SWAP
    return layers
