"""Other plans for the same budget, to be tried beside the solver's on real steps.

What: `rivals_of` makes at most two: the best one that swaps nothing (where the solver's plan swaps; where none fits,
one that is solved as if copies were dear) or, where the solver's plan swaps nothing because memory that is taken again
has a price, the best one that swaps; and the fewest layers that have to run again as a whole when everything else is
kept, which is what anybody gets with a line of checkpointing. Each fits the budget as the solver counts bytes.

Why these: where a plan is slower than promised, the price of the link, of memory or of many small recipes was wrong.
One has no link in it, or little, or else all of it; the other neither.

Cost: the solver's for each, and for the fewest layers one easy problem for each halving of their number, until
`seconds_each` are over. Not covered: rules about swapping or recomputing, which leave nothing to vary;
layers with collectives, since ranks that plan for themselves must issue the same ones.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from lowtide.core.fate import Fate
from lowtide.core.plan import Plan
from lowtide.core.profile import Profile
from lowtide.errors import BudgetError
from lowtide.planner.again import can_run_again
from lowtide.timeline.step import Link

if TYPE_CHECKING:
    from lowtide.config.memory import MemoryConfig

NO_SWAP = "no swap"
LESS_SWAP = "less swap"
WITH_SWAP = "with swap"
FEWEST = "fewest layers"
_DEAR = 2.0
"""Seconds of compute lost for each second of copying, as that plan has it. Measured for gpt2 on the host: about 1."""

Planner = Callable[..., Plan]
"""`plan_profile` of one profile, link and budget: called with the config, and with what differs."""


def rivals_of(
    plan: Plan, config: MemoryConfig, profile: Profile, make: Planner, link: Link, *, seconds_each: float = 3.0
) -> Iterator[tuple[str, Plan]]:
    """Names and plans, beside the solver's `plan` (and maybe equal to it). `config` has the rules for it, and `link` is
    the one that it was made for."""
    if all(site.fate is Fate.KEEP and site.codec is None for site in plan.sites):
        return  # nothing is faster
    limits = {"time_limit_seconds": seconds_each, "with_ways_out": False}
    if config.swaps_freely and _swaps(plan):
        found = _made(lambda: make(dataclasses.replace(config, swap="none"), **limits))
        if found is not None:
            yield NO_SWAP, found
        elif link.compute_share < _DEAR and config.recomputes_freely:
            dear = dataclasses.replace(link, compute_share=_DEAR)
            found = _made(lambda: make(config, link=dear, weighs_touch=False, **limits))
            if found is not None and _swapped_bytes(found) < _swapped_bytes(plan):
                yield LESS_SWAP, found
    elif config.swaps_freely and link.touch_seconds_per_byte:
        found = _made(lambda: make(config, weighs_touch=False, **limits))
        if found is not None and _swaps(found):
            yield WITH_SWAP, found
    has_no_swap_rule = config.swaps_freely or config.swap == "none"
    if has_no_swap_rule and config.recomputes_freely and not profile.num_collectives:
        whole = dataclasses.replace(config, swap="none", recompute="none")
        found = _fewest(can_run_again(profile), lambda layers: make(whole, layers=layers, **limits), seconds_each)
        if found is not None:
            yield FEWEST, found


def _fewest(layers: tuple[str, ...], make: Callable[[tuple[str, ...]], Plan], seconds: float) -> Plan | None:
    """The plan under which the first so many layers run again; None where that does not help, or takes too long."""
    end = time.perf_counter() + seconds
    # The last layer's backward comes first: running it again may hold more than it frees.
    for most in (len(layers), len(layers) - 1):
        best = _made(lambda most=most: make(layers[:most])) if most > 0 else None  # type: ignore[misc]
        if best is not None:
            break
    if best is None:
        return None
    low, high = 0, most  # `low` are not enough, `high` are
    while high - low > 1 and time.perf_counter() < end:
        middle = (low + high) // 2
        found = _made(lambda middle=middle: make(layers[:middle]))  # type: ignore[misc]
        best, low, high = (best, middle, high) if found is None else (found, low, middle)
    return best


def _made(make: Callable[[], Plan]) -> Plan | None:
    """None where no such plan fits."""
    try:
        return make()
    except BudgetError:
        return None


def _swaps(plan: Plan) -> bool:
    return any(site.fate is Fate.SWAP for site in plan.sites)


def _swapped_bytes(plan: Plan) -> int:
    return sum(site.stored_bytes for site in plan.sites if site.fate is Fate.SWAP)
