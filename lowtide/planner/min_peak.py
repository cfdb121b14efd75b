"""The smallest peak that can be reached, however long the step takes.

What: `floor`. Where everything may be swapped and the host takes it, that is swapping all of it, and proven. Where
fates are restricted or the host is small, it is what the linear program and search find: the budget is halved between a
peak that is reached and one that is not, and each time the program says which fates are the cheapest way there.
(Asked for nothing but a small peak it would make everything again in one long chain, whose links all exist at once.)

Cost: nothing where everything may be swapped; else some programs: a second for 32 layers × 11 items.

Not covered: proof that nothing is lower in the second case, except in steps small enough for every pair of changes.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
from numpy.typing import NDArray

from lowtide.core.fate import Fate
from lowtide.planner.local_search import Evaluator, Fates, Outcome, improve, repair, roundings
from lowtide.planner.relaxation import Program, Relaxation
from lowtide.timeline.memory import StepArrays
from lowtide.timeline.step import Item, Link, Step

UNREACHABLE = 1 << 62
"""The floor where rules swap more than the host takes."""
_FEW_ITEMS = 60
"""Up to as many items, everything that was found is searched on from."""
BLOCKS = 160
"""The first points: the worst tick of as many equal pieces of the step."""
_HALVINGS = 6
# Times for a search that is about bytes: what they are to each other decides what is tried first.
_TICK_SECONDS = 1e-5
_RECIPE_SECONDS_A_BYTE = 1e-12
_LINK = Link(out_bytes_per_second=1e9, in_bytes_per_second=1e9)
_CLOSE = 0.01
"""Share of the way from the bound to the plain peak that is not worth another program."""


def floor(step: Step | StepArrays, host_bytes: int | None = None) -> tuple[int, Fates]:
    """The smallest peak that was found, and fates that reach it; `UNREACHABLE` if the host cannot take forced swaps.

    It is looked for with times that follow from bytes, so that a floor that was told of one observation is enough for
    the next one of that step.
    """
    arrays = StepArrays.of(step)
    peak_bytes, fates, is_proven = quick_floor(arrays, host_bytes)
    if is_proven:
        return peak_bytes, fates
    below_bytes = min((tick.base_bytes for tick in arrays.step.ticks), default=0)
    (missing, peak_bytes), best = _lowest(_timeless(arrays.step, below_bytes), host_bytes, fates)
    return (UNREACHABLE if missing else below_bytes + peak_bytes), best


@functools.lru_cache(maxsize=8)
def _lowest(step: Step, host_bytes: int | None, fates: Fates) -> tuple[tuple[int, int], Fates]:
    """The fates that were found to exceed a budget of nothing least, and by how much: all of their peak.

    Remembered: a refusal, its ways out, other budgets and other links ask for the floor of one step, and without times
    steps that were observed one after the other are one step.
    """
    arrays = StepArrays.of(step)
    evaluator = Evaluator(arrays, _LINK, 0, host_bytes)
    candidates = [fates, *(_all(arrays, order) for order in _ORDERS)]
    is_small = len(fates) <= _FEW_ITEMS
    candidates += _halved(evaluator, min(evaluator.excess(fates) for fates in candidates), is_small)
    if is_small:
        repaired = dict.fromkeys(repair(evaluator, fates) for fates in candidates)  # many are the same by now
        starts = [Outcome(fates=fates, excess=evaluator.excess(fates)) for fates in repaired]
        candidates = [improve(evaluator, start, max_plays=4000).fates for start in starts]
    best = min(candidates, key=evaluator.excess)
    return evaluator.excess(best), best


def _timeless(step: Step, below_bytes: int) -> Step:
    """The step with times that follow from bytes: measured ones are others each time, and so is what is cheapest.
    Without the bytes that are there all the time: what is known of them changes, and the floor above them does not."""
    ticks = tuple(
        dataclasses.replace(tick, seconds=_TICK_SECONDS, base_bytes=tick.base_bytes - below_bytes)
        for tick in step.ticks
    )
    return dataclasses.replace(step, ticks=ticks, items=tuple(map(_timeless_item, step.items)))


def _timeless_item(item: Item) -> Item:
    seconds = _TICK_SECONDS + item.nbytes * _RECIPE_SECONDS_A_BYTE
    can_make = item.form_of is not None or Fate.RECOMPUTE in item.fates
    return dataclasses.replace(item, recipe_seconds=seconds) if can_make else item


def quick_floor(arrays: StepArrays, host_bytes: int | None) -> tuple[int, Fates, bool]:
    """Swapping whatever may be: the peak, the fates, and whether this is the floor for certain."""
    items = arrays.step.items
    fates = _all(arrays, (Fate.SWAP, Fate.RECOMPUTE, Fate.KEEP))
    evaluator = Evaluator(arrays, Link(out_bytes_per_second=1.0, in_bytes_per_second=1.0), 0, host_bytes)
    missing, peak_bytes = evaluator.excess(fates)
    # Or it may be made from its smaller form, for which it is there as long as for a copy, and in no other way.
    is_proven = not missing and all(
        Fate.SWAP in item.fates
        and (item.dies > item.saved or (item.form is not None and Fate.RECOMPUTE not in items[item.form].fates))
        for item in items
        if item.reads and item.dies < item.reads[0]
    )
    return (UNREACHABLE if missing else peak_bytes), fates, is_proven


def bound_bytes(arrays: StepArrays, host_bytes: int | None) -> int:
    """No fates have a smaller peak, by the linear program. A quarter of the cost of the floor, which begins with it."""
    below_bytes = min((tick.base_bytes for tick in arrays.step.ticks), default=0)
    found = _by_shares(_timeless(arrays.step, below_bytes), host_bytes)
    if found is None or not math.isfinite(found.bound_seconds):
        return 0
    return below_bytes + int((1 - 1e-6) * found.bound_seconds)  # the solver may break rows by so much


@functools.lru_cache(maxsize=8)
def _by_shares(step: Step, host_bytes: int | None) -> Relaxation | None:
    """The shares with the smallest peak, which is their bound."""
    program = Program(step, _LINK, 0.0, host_bytes)
    return program.solve(first_points(program.arrays, program.plain), minimise_peak=True)


_ORDERS = ((Fate.RECOMPUTE, Fate.SWAP, Fate.KEEP), (Fate.KEEP, Fate.RECOMPUTE, Fate.SWAP))


def _halved(evaluator: Evaluator, excess: tuple[int, int], is_small: bool) -> list[Fates]:
    """Fates for smaller and smaller budgets, as long as they can be reached."""
    arrays, link, host_bytes = evaluator.arrays, evaluator.link, evaluator.host_bytes
    program = Program(arrays.step, link, 0.0, host_bytes)
    points = first_points(arrays, program.plain)
    least = _by_shares(arrays.step, host_bytes)
    if least is None or not math.isfinite(least.bound_seconds):
        return []
    rounded = roundings(evaluator, least) if is_small else []
    found = [outcome.fates for outcome in rounded]
    plain_bytes = float(program.plain.max())
    low = least.bound_seconds
    reached = (excess, *(outcome.excess for outcome in rounded))
    high = min([plain_bytes, *(nbytes for missing, nbytes in reached if not missing)])
    for _ in range(_HALVINGS):
        if high - low <= _CLOSE * (plain_bytes - low):
            break
        middle = (low + high) / 2
        shares = Program(arrays.step, link, middle, host_bytes).solve(points)
        if shares is None or not math.isfinite(shares.bound_seconds):
            low = middle
            continue
        best = min(
            roundings(Evaluator(arrays, link, int(middle), host_bytes), shares), key=lambda outcome: outcome.rank
        )
        found.append(best.fates)
        missing, peak_bytes = evaluator.excess(best.fates)
        if not missing:
            high = min(high, peak_bytes)
        if not best.fits:
            low = middle
    return found


def _all(arrays: StepArrays, order: tuple[Fate, ...]) -> Fates:
    return tuple(first_of(item, order) for item in arrays.step.items)


def first_of(item: Item, order: tuple[Fate, ...]) -> Fate:
    """The first of these fates that the item may have."""
    return next(fate for fate in order if fate in item.fates)


def first_points(arrays: StepArrays, curve: NDArray[np.float64]) -> set[int]:
    """The worst tick of each piece of the step, and those that it asks to be watched."""
    pieces = np.array_split(np.arange(arrays.num_ticks), BLOCKS)
    return {int(piece[np.argmax(curve[piece])]) for piece in pieces if len(piece)} | set(arrays.step.watched)
