"""The fastest fates that fit a budget, and how far from the fastest possible they may be.

What: `solve` bounds the step from below by a linear program (relaxation.py), turns its shares into fates
(local_search.py) and plays them on the timeline (timeline/events.py), which alone decides whether they fit and how long
the step takes. Small steps also get every pair of changes. Where nothing fits, the ways out are solved as well.

Why a reserve: whole items leave a little later than the fluid of the program. Solved once more for a budget that is
smaller by a few items, its shares leave room for that, and the timeline needs no stalls.

Cost: 32 layers × 11 items: half a second; 128 × 40: a few seconds. Everything is counted in plays and rounds, so that
equal steps give equal plans on every rank; the time limit only ends what takes too long.

Not covered: which tensors the items are and how they are prefetched (the plan), half the micro-batch (the caller).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from lowtide.core.fate import Fate
from lowtide.core.text_table import percent
from lowtide.errors import BudgetError
from lowtide.planner.local_search import SMALL, Evaluator, Fates, Outcome, improve, repair, roundings
from lowtide.planner.min_peak import UNREACHABLE, first_of, first_points, floor, quick_floor
from lowtide.planner.relaxation import Program, Relaxation
from lowtide.timeline.events import Timeline
from lowtide.timeline.memory import Lifetimes, StepArrays, floor_curve
from lowtide.timeline.step import Link, Move, Step, making_seconds, ways
from lowtide.units import format_bytes, format_seconds, printed_up

__all__ = ["Solution", "bound_of", "floor", "refusal", "solve"]

GOOD_GAP = 1e-3
"""No step is measured this well; looking further is not worth the time."""
_ROUNDS = 4
_RESERVES = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0)
"""Taken from the budget for rounding, in sizes of the largest item."""
_WAY_OUT_SECONDS = 2.0
_USUAL_ITEMS = 1_000
"""The time limit is for steps of up to so many items. A step of twice as many may take twice as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """Fates that fit, and how good they are."""

    fates: Fates
    timeline: Timeline
    """Of these fates under the budget."""
    bound_seconds: float
    """No schedule of this step under the same model is faster."""
    is_beaten: bool
    """It cannot be as fast as was wanted, and was not looked for further."""

    @property
    def gap(self) -> float:
        """Share of the step by which it may be slower than the fastest there is."""
        seconds = self.timeline.step_seconds
        return (seconds - self.bound_seconds) / seconds if seconds else 0.0


def solve(
    step: Step,
    link: Link,
    budget_bytes: int,
    *,
    host_bytes: int | None = None,
    time_limit_seconds: float = 5.0,
    low: tuple[int, Fates] | None = None,
    beats: float = math.inf,
) -> Solution:
    """Fates for every item such that the peak stays within the budget, at the smallest cost in time.

    `low`: a floor that is known, or as good as one, and its fates; then none is looked for.
    `beats`: of a step that cannot be faster than so many seconds no more than the bound is wanted.
    Raises `BudgetError` when no fates do, which has no ways out.
    """
    arrays = StepArrays.of(step)
    seconds = time_limit_seconds * max(1.0, len(step.items) / _USUAL_ITEMS)
    evaluator = Evaluator.until(seconds, arrays, link, budget_bytes, host_bytes)
    floor_bytes, floor_fates, is_proven = quick_floor(arrays, host_bytes) if low is None else (*low, True)
    if is_proven and floor_bytes > budget_bytes:
        raise refusal(evaluator, floor_bytes, floor_fates)
    bound, best = _best(evaluator, floor_fates, beats)
    is_beaten = bound >= beats and best.seconds != bound
    if not best.fits:
        if low is None:
            floor_bytes, floor_fates = floor(arrays, host_bytes)
        best = evaluator.play(floor_fates)
        if not best.fits:
            raise refusal(evaluator, floor_bytes, floor_fates)
    assert best.timeline is not None and best.fits
    bound = min(bound, best.seconds)
    return Solution(fates=best.fates, timeline=best.timeline, bound_seconds=bound, is_beaten=is_beaten)


def bound_of(
    arrays: StepArrays, link: Link, budget_bytes: int, host_bytes: int | None, time_limit_seconds: float
) -> float:
    """No schedule of this step within the budget is faster; that of the plain step where nothing more is known."""
    evaluator = Evaluator.until(time_limit_seconds, arrays, link, budget_bytes, host_bytes)
    bound = arrays.step.compute_seconds
    if _everything_kept(evaluator) is not None:
        return bound
    program = Program(arrays.step, link, budget_bytes, host_bytes)
    found = _rounds(evaluator, program, first_points(arrays, program.plain))
    return max([bound, *(shares.bound_seconds for shares in found)])


def _rounds(evaluator: Evaluator, program: Program, points: set[int]) -> Iterator[Relaxation]:
    """What the program says at more and more points, until its shares fit at all of them. `points` grows."""
    for _ in range(_ROUNDS):
        shares = program.solve(points, time_limit_seconds=_left(evaluator))
        if shares is None or not math.isfinite(shares.bound_seconds):
            return  # numbers that the program cannot tell apart: something fits, as what was played shows
        yield shares
        more = _violated(evaluator.arrays, program, shares, evaluator.budget_bytes) - points
        if not more or evaluator.is_late:
            return
        points |= more


def _best(evaluator: Evaluator, low_fates: Fates, beats: float = math.inf) -> tuple[float, Outcome]:
    """The bound, and the best outcome; it may not fit. `low_fates` have a small peak, if any have."""
    kept = _everything_kept(evaluator)
    if kept is not None:
        return kept.seconds, kept
    return _programmed(evaluator, [evaluator.play(low_fates), *_filled(evaluator)], beats)


def _everything_kept(evaluator: Evaluator) -> Outcome | None:
    items = evaluator.arrays.step.items
    if any(Fate.KEEP not in item.fates for item in items):
        return None
    outcome = evaluator.play((Fate.KEEP,) * len(items))
    return outcome if outcome.fits else None


def _filled(evaluator: Evaluator) -> list[Outcome]:
    """The closed form for growing amounts of eviction, repaired where it falls short."""
    arrays = evaluator.arrays
    fates: Fates = tuple(first_of(item, (Fate.KEEP, Fate.SWAP, Fate.RECOMPUTE)) for item in arrays.step.items)
    over = evaluator.excess(fates)[1]
    outcomes = []
    for factor in (1.0, 1.05, 1.15, 1.3):
        filled = closed_form(arrays, evaluator.link, over * factor, evaluator.host_bytes)
        outcomes.append(evaluator.play(repair(evaluator, filled)))
        if evaluator.is_late:
            break
    return outcomes


def _programmed(evaluator: Evaluator, pool: list[Outcome], beats: float) -> tuple[float, Outcome]:
    """The bound, and the best outcome. Everything that was played joins the pool."""
    arrays = evaluator.arrays
    program = Program(arrays.step, evaluator.link, evaluator.budget_bytes, evaluator.host_bytes)
    points = first_points(arrays, program.plain)
    bound, largest = arrays.step.compute_seconds, float(arrays.nbytes.max(initial=0))
    shares: Relaxation | None = None
    for shares in _rounds(evaluator, program, points):
        bound = max(bound, shares.bound_seconds)
        if bound >= beats:
            return bound, _least(pool)
        pool += roundings(evaluator, shares)
        if _is_good(_least(pool), bound):
            break
    for reserve in _RESERVES:
        if shares is None or _is_good(_least(pool), bound) or evaluator.is_late:
            break
        shares = program.solve(points, reserve_bytes=reserve * largest, time_limit_seconds=_left(evaluator))
        if shares is None or not math.isfinite(shares.bound_seconds):
            break
        pool += roundings(evaluator, shares)
        if shares.bound_seconds >= _least(pool).seconds:
            break  # a larger reserve costs more than rounding does
    best = _least(pool)
    if not _is_good(best, bound) and not evaluator.is_late:
        best = improve(evaluator, best, max_plays=4_000 if len(best.fates) <= SMALL else 200)
    return bound, best


def _least(outcomes: Iterable[Outcome]) -> Outcome:
    return min(outcomes, key=lambda outcome: outcome.rank)


def _is_good(outcome: Outcome, bound: float) -> bool:
    return outcome.fits and outcome.seconds - bound <= GOOD_GAP * outcome.seconds


def _left(evaluator: Evaluator) -> float:
    return max(evaluator.deadline - time.perf_counter(), 0.1)


def _violated(arrays: StepArrays, program: Program, shares: Relaxation, budget_bytes: float) -> set[int]:
    """The worst tick of each piece in which the shares do not fit even on an infinitely fast link."""
    end = np.maximum(program.needs.last, arrays.dies)
    change = np.zeros(arrays.num_ticks + 1)
    is_retained_input = program.is_retained_input
    gone = np.where(is_retained_input, -shares.keep, shares.swap + shares.recompute) * arrays.nbytes
    np.add.at(change, arrays.dies, gone)
    np.subtract.at(change, end, gone)
    curve = program.plain - np.cumsum(change)[:-1]
    worst = first_points(arrays, curve)
    return {tick for tick in worst if curve[tick] > budget_bytes * (1 + 1e-6)}


# -- a first answer without a program ----------------------------------------------------------------------------------


def closed_form(arrays: StepArrays, link: Link, evict_bytes: float, host_bytes: int | None = None) -> tuple[Fate, ...]:
    """Fates that take about `evict_bytes` off the peak between forward and backward, if fates allow.

    By water-filling: the link takes what it can send away while forward computes, those items first that are dearest
    to make again for their bytes; the rest is recomputed, cheapest first. For equal layers this is within half a
    percentage point of the linear program. Not covered: different layers (one price for all), what a recipe's inputs
    cost; the caller plays several amounts of eviction and keeps the best.
    """
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
    is_hidden = _sender(arrays, link, host_bytes)
    # Without a recipe first, then the dearest; of equal ones the first saved, which has the most time to leave.
    for index in sorted(sites, key=lambda index: (-prices[index], items[index].saved, index)):
        item = items[index]
        if left <= 0 or Fate.SWAP not in item.fates or index in must:
            continue
        if is_hidden(index):
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


def _sender(arrays: StepArrays, link: Link, host_bytes: int | None) -> Callable[[int], bool]:
    """Says whether one more item can be sent so that everything still lands before backward starts; counts it if so."""
    host_left = np.inf if host_bytes is None else host_bytes
    seconds = arrays.seconds[: arrays.step.num_forward_ticks]
    # Time of the lane that is left for what is saved at tick t or later.
    room_seconds = seconds.sum() - np.cumsum(seconds)

    def is_hidden(index: int) -> bool:
        nonlocal host_left
        item = arrays.step.items[index]
        seconds = link.latency_seconds + item.nbytes / link.out_bytes_per_second
        if item.nbytes > host_left or room_seconds[: item.saved + 1].min() < seconds:
            return False
        room_seconds[: item.saved + 1] -= seconds
        host_left -= item.nbytes
        return True

    return is_hidden


# -- what to say when nothing fits -----------------------------------------------------------------------------------


def refusal(evaluator: Evaluator, floor_bytes: int, floor_fates: Fates, time_limit_seconds: float = 0.0) -> BudgetError:
    """Says what is in the way, and tries the ways out if there is time: those that keep the budget first, then larger
    budgets."""
    arrays, budget_bytes, host_bytes = evaluator.arrays, evaluator.budget_bytes, evaluator.host_bytes
    tries: list[tuple[str, int, int | None, Fates]] = []
    if host_bytes is not None:
        tries.append(("a host budget of {host}", budget_bytes, None, quick_floor(arrays, None)[1]))
    if floor_bytes < UNREACHABLE:
        plain_bytes = evaluator.floor(tuple(first_of(item, (Fate.KEEP, *item.fates)) for item in arrays.step.items))
        for enough in dict.fromkeys((printed_up(floor_bytes), printed_up((floor_bytes + plain_bytes) // 2))):
            tries.append((f"a budget of {format_bytes(enough)}", enough, host_bytes, floor_fates))
    sentences = []
    for what, other_budget, other_host, fates in tries if time_limit_seconds else ():
        limit = min(time_limit_seconds, _WAY_OUT_SECONDS)
        retry = Evaluator.until(limit, arrays, evaluator.link, other_budget, other_host)
        _, best = _best(retry, fates)
        if best.timeline is None:
            continue
        way = what.format(host=format_bytes(printed_up(best.timeline.slower_bytes)))
        slower = best.seconds / max(arrays.step.compute_seconds, 1e-12) - 1
        sentences.append(f"{way}: {format_seconds(best.seconds)} a step, {percent(slower)} over keeping everything")
    return BudgetError(
        _what_is_in_the_way(arrays, budget_bytes, host_bytes, floor_bytes, floor_fates),
        floor_bytes=floor_bytes,
        suggestions=tuple(sentences[:3]),
        set_by=_worst(arrays, Lifetimes.of(arrays, floor_fates))[1],
    )


def _what_is_in_the_way(
    arrays: StepArrays, budget_bytes: int, host_bytes: int | None, floor_bytes: int, floor_fates: Fates
) -> str:
    if floor_bytes >= UNREACHABLE:
        return (
            f"budget {format_bytes(budget_bytes)}: rules swap more than the host budget of "
            f"{format_bytes(host_bytes or 0)} takes; raise it or swap less"
        )
    lifetimes = Lifetimes.of(arrays, floor_fates)
    tick, where = _worst(arrays, lifetimes)
    base_bytes = int(arrays.base[tick])
    there = (arrays.born <= tick) & (tick < lifetimes.dies) | (lifetimes.need <= tick) & (tick < lifetimes.release)
    there |= lifetimes.is_held & (arrays.born <= tick) & (tick < lifetimes.release)
    largest = ""
    if there.any():
        index = max(np.flatnonzero(there).tolist(), key=lambda index: arrays.nbytes[index])
        item = arrays.step.items[index]
        largest = f", the largest activation there is '{item.name}' with {format_bytes(item.nbytes)}"
    return (
        f"budget {format_bytes(budget_bytes)}: no plan fits; the least that can be reached is "
        f"{format_bytes(printed_up(floor_bytes))}, set by {where}: {format_bytes(base_bytes)} there is not activations"
        f"{largest}; raise the budget to {format_bytes(printed_up(floor_bytes))} or make the micro-batch smaller"
    )


def _worst(arrays: StepArrays, lifetimes: Lifetimes) -> tuple[int, str]:
    """The tick of the largest peak, and what runs there."""
    tick = int(np.argmax(floor_curve(arrays, lifetimes)))
    num_forward = arrays.step.num_forward_ticks
    nameless = f"forward tick {tick}" if tick < num_forward else f"backward tick {tick - num_forward}"
    return tick, arrays.step.ticks[tick].name or nameless
