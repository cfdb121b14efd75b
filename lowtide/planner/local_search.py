"""Whole fates: from shares to fates, repaired until they fit and improved while that is cheap; the timeline judges.

What: `Evaluator` plays fates and says how far they are from fitting and how long the step takes. `rounded` turns the
shares of the linear program into fates, `repair` evicts what is cheapest for its bytes until they fit, `improve`
changes one item, or two or three at once in small steps, as long as that makes the step faster.

Why: the program sees items as divisible and the link as a fluid. A handful of items out of thousands end up with shares
that are no fates, and what it calls a fit may be short of a few bytes for a moment.

Cost: a play is a millisecond for 32 layers × 11 items; every loop has a limit in plays, so that two processes with the
same step find the same fates whatever their speed. Time is a second limit, far behind.

Not covered: proving anything. Bounds come from relaxation.py.
"""

from __future__ import annotations

import itertools
import math
import operator
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from lowtide.core.fate import Fate
from lowtide.planner.relaxation import Relaxation
from lowtide.timeline.events import Timeline, run
from lowtide.timeline.memory import Lifetimes, StepArrays, floor_curve
from lowtide.timeline.step import Item, Link, Move, making_seconds, ways

Fates = tuple[Fate, ...]

SMALL = 16
"""Up to as many items, pairs of changes are tried too."""
TINY = 8
"""Up to as many, triples: without them a larger budget may give a slower plan."""
_KEEP_ABOVE = (0.98, 0.5, 0.1)
_MOST_ROUNDS = 200
MAX_TRIES = 40
"""Changes that are tried one by one before repair gives up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Fates, and what came of them."""

    fates: Fates
    excess: tuple[int, int]
    """Bytes that the host lacks, and bytes over the budget. Zeros: they fit."""
    seconds: float = 0.0
    """Of the step; 0 when they do not fit."""
    timeline: Timeline | None = None

    @property
    def fits(self) -> bool:
        return self.excess == (0, 0)

    @property
    def rank(self) -> tuple[tuple[int, int], float]:
        """Less is better."""
        return (self.excess, self.seconds)


class Evaluator:
    """Plays fates against one budget."""

    def __init__(
        self,
        arrays: StepArrays,
        link: Link,
        budget_bytes: int,
        host_bytes: int | None = None,
        *,
        deadline: float = np.inf,
    ) -> None:
        self.arrays, self.link = arrays, link
        self.budget_bytes, self.host_bytes = budget_bytes, host_bytes
        self.deadline = deadline
        """On the clock of `time.perf_counter`."""
        self.num_plays = 0
        self._plain_seconds = arrays.step.compute_seconds

    @classmethod
    def until(
        cls, seconds: float, arrays: StepArrays, link: Link, budget_bytes: int, host_bytes: int | None
    ) -> Evaluator:
        """One that is late in so many seconds."""
        return cls(arrays, link, budget_bytes, host_bytes, deadline=time.perf_counter() + seconds)

    @property
    def is_late(self) -> bool:
        return time.perf_counter() > self.deadline

    def play(self, fates: Sequence[Fate], beats: float = math.inf) -> Outcome:
        """No timing of copies needs less than the floor of the fates, so what is above the budget is not played.

        Seldom the timeline needs more than that floor (seen with two layers that run again and share their weights):
        then the fates do not fit either. `beats`: neither is played what takes as long as this with recomputing alone;
        its outcome has these seconds and no timeline.
        """
        self.num_plays += 1
        lifetimes = Lifetimes.of(self.arrays, fates)
        excess = self._distance(lifetimes)[:2]
        if excess != (0, 0):
            return Outcome(fates=tuple(fates), excess=excess)
        least = self._plain_seconds + float(lifetimes.made_seconds[lifetimes.is_made].sum())
        if least >= beats:
            return Outcome(fates=tuple(fates), excess=excess, seconds=least)
        timeline = run(self.arrays, fates, self.link, budget_bytes=self.budget_bytes, lifetimes=lifetimes)
        if timeline.peak_bytes > self.budget_bytes:
            return Outcome(fates=tuple(fates), excess=(0, timeline.peak_bytes - self.budget_bytes))
        return Outcome(fates=tuple(fates), excess=excess, seconds=timeline.step_seconds, timeline=timeline)

    def excess(self, fates: Sequence[Fate]) -> tuple[int, int]:
        """Bytes that the host lacks, and bytes over the budget at least."""
        return self.distance(fates)[:2]

    def floor(self, fates: Sequence[Fate]) -> int:
        """The least peak that these fates can have, however long compute waits."""
        return int(floor_curve(self.arrays, Lifetimes.of(self.arrays, fates)).max())

    def distance(self, fates: Sequence[Fate]) -> tuple[int, int, int]:
        """The excess, and the bytes over the budget summed over all ticks, which decides among equals."""
        return self._distance(Lifetimes.of(self.arrays, fates))

    def _distance(self, lifetimes: Lifetimes) -> tuple[int, int, int]:
        over = np.maximum(floor_curve(self.arrays, lifetimes) - self.budget_bytes, 0)
        host_bytes = int(self.arrays.nbytes[lifetimes.is_swapped].sum())
        missing = 0 if self.host_bytes is None else max(host_bytes - self.host_bytes, 0)
        return missing, int(over.max()), int(over.sum())


def rounded(items: Sequence[Item], shares: Relaxation, keep_above: float) -> Fates:
    """Keep what the program keeps at least this much of; the rest gets the larger of its other shares."""
    fates = []
    for index, item in enumerate(items):
        others = {Fate.SWAP: shares.swap[index], Fate.RECOMPUTE: shares.recompute[index]}
        open_fates = [fate for fate in (Fate.SWAP, Fate.RECOMPUTE) if fate in item.fates]
        gone = shares.swap[index] + shares.recompute[index]
        is_kept = gone <= 1 - keep_above if not item.is_retained_input else shares.keep[index] >= gone
        if not open_fates or (Fate.KEEP in item.fates and is_kept):
            fates.append(Fate.KEEP)
        else:
            fates.append(max(open_fates, key=lambda fate: others[fate]))
    return tuple(fates)


def roundings(evaluator: Evaluator, shares: Relaxation) -> list[Outcome]:
    """What came of rounding the shares at several thresholds, repaired."""
    tried = dict.fromkeys(rounded(evaluator.arrays.step.items, shares, keep_above) for keep_above in _KEEP_ABOVE)
    return [evaluator.play(repair(evaluator, fates)) for fates in tried]


def repair(evaluator: Evaluator, fates: Fates) -> Fates:
    """Evicts what is in the way at the worst tick, cheapest for its bytes first, until the fates fit.

    As much at once as that tick asks for, and where this does not help, one by one. Stops where nothing helps.
    """
    current = list(fates)
    distance = evaluator.distance(current)
    for _ in range(_MOST_ROUNDS):
        if distance[:2] == (0, 0) or evaluator.is_late:
            break
        wanted = distance[0] or distance[1]
        changes = _returns(evaluator, current) if distance[0] else _evictions(evaluator, current)
        for several in (_enough(evaluator, changes, wanted), *changes[:MAX_TRIES]):
            tried = list(current)
            for index, fate in several:
                tried[index] = fate
            now = evaluator.distance(tried)
            if now < distance:
                current, distance = tried, now
                break
        else:
            break
    return tuple(current)


def _enough(evaluator: Evaluator, changes: list[Move], wanted: int) -> Move:
    """The first changes that are worth this many bytes together, one for each item."""
    chosen: dict[int, Fate] = {}
    total = 0
    for change in changes:
        if total >= wanted:
            break
        index = change[0][0]
        if index not in chosen:
            chosen.update(change)
            total += int(evaluator.arrays.nbytes[index])
    return tuple(chosen.items())


def _evictions(evaluator: Evaluator, fates: list[Fate]) -> list[Move]:
    """Changes that take bytes off the worst tick, cheapest for their bytes first."""
    arrays = evaluator.arrays
    items = arrays.step.items
    lifetimes = Lifetimes.of(arrays, fates)
    tick = int(np.argmax(floor_curve(arrays, lifetimes)))
    changes: list[tuple[float, int, bool, Move]] = []
    is_waiting = lifetimes.is_held & (arrays.dies <= tick) & (tick < lifetimes.need)
    for index in np.flatnonzero(is_waiting).tolist():
        for way in ways(items, index):
            if way[0][1] is not Fate.KEEP:
                changes.append((_price(evaluator, way), index, _swaps(way), way))
    changes.sort(key=operator.itemgetter(0, 1, 2))
    # What is made needs room for its recipe, and keeps its inputs there.
    others: list[tuple[int, int, int, Move]] = []
    for index in np.flatnonzero(lifetimes.is_made & (lifetimes.need <= tick) & (tick < lifetimes.release)).tolist():
        form = items[index].form
        sources = items[index].inputs if form is None or fates[form] is Fate.RECOMPUTE else (form,)
        freed = sum(int(arrays.nbytes[source]) for source in sources if arrays.first_read[source] > tick)
        if freed or lifetimes.need[index] == tick:
            here = [way for way in ways(items, index) if any(fates[changed] is not fate for changed, fate in way)]
            others += [(-freed, index, number, way) for number, way in enumerate(here)]
    others.sort(key=operator.itemgetter(0, 1, 2))
    return [way for *_, way in (*changes, *others)]


def _returns(evaluator: Evaluator, fates: list[Fate]) -> list[Move]:
    """Changes of swapped items, those first that are cheapest to make again."""
    changes = []
    items = evaluator.arrays.step.items
    for index, item in enumerate(items):
        own = index if item.form_of is None else item.form_of
        if fates[index] is Fate.SWAP and (own == index or fates[own] is Fate.RECOMPUTE):
            changes += [(_price(evaluator, way), own, way) for way in ways(items, own) if not _swaps(way)]
    changes.sort(key=lambda change: (change[2][0][1] is Fate.KEEP, change[0], change[1]))
    return [way for *_, way in changes]


def _swaps(way: Move) -> bool:
    return any(fate is Fate.SWAP for _, fate in way)


def _price(evaluator: Evaluator, way: Move) -> float:
    """Seconds a byte that it frees, when nothing is hidden by anything."""
    items = evaluator.arrays.step.items
    seconds, freed = making_seconds(items, way), items[way[0][0]].nbytes
    for index, fate in way:
        if fate is Fate.SWAP:
            seconds += items[index].nbytes / evaluator.link.out_bytes_per_second
        elif fate is Fate.KEEP:
            freed -= items[index].nbytes
    return seconds / max(freed, 1)


def mixture(evaluator: Evaluator, above: Fates, below: Fates, *, from_end: bool) -> Fates:
    """The fates of `above`, with those of `below` for the first items, or the last ones: so many that it fits. `below`
    fits."""
    items = evaluator.arrays.step.items
    owner = [index if item.form_of is None else item.form_of for index, item in enumerate(items)]
    others = sorted({owner[index] for index in range(len(items)) if above[index] is not below[index]}, reverse=from_end)

    def mixed(number: int) -> Fates:
        taken = set(others[:number])
        return tuple(low if own in taken else high for own, low, high in zip(owner, below, above, strict=True))

    low, high = 0, len(others)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if evaluator.excess(mixed(middle)) == (0, 0) else (middle + 1, high)
    return mixed(low)


def improve(evaluator: Evaluator, start: Outcome, *, max_plays: int) -> Outcome:
    """Changes one item, or two, wherever that makes the step faster and fits, until nothing does."""
    best = start
    last_play = evaluator.num_plays + max_plays
    while True:
        before = best
        for move in _moves(evaluator.arrays, best):
            if evaluator.num_plays >= last_play or evaluator.is_late:
                return best
            fates = list(best.fates)
            for index, fate in move:
                fates[index] = fate
            wanted = (best.excess, best.seconds * (1 - 1e-9))
            outcome = evaluator.play(fates, beats=wanted[1] if best.fits else math.inf)
            if outcome.rank < wanted:
                best = outcome
                if len(best.fates) <= SMALL:
                    break  # pairs are many: single changes first again
        if best is before:
            return best


def _moves(arrays: StepArrays, outcome: Outcome) -> Iterator[Move]:
    items, fates = arrays.step.items, outcome.fates
    own = [index for index, item in enumerate(items) if item.form_of is None]  # a form goes with what is made from it
    singles = [way for index in own for way in ways(items, index) if any(fates[at] is not fate for at, fate in way)]

    def promise(way: Move) -> float:
        index, form = way[0][0], items[way[0][0]].form
        now = tuple((at, fates[at]) for at in ((index,) if form is None else (index, form)))
        return making_seconds(items, now) - making_seconds(items, way)

    singles.sort(key=promise, reverse=True)
    yield from singles
    for num_changes, most_items in ((2, SMALL), (3, TINY)):
        if len(own) > most_items:
            return
        for several in itertools.combinations(singles, num_changes):
            if len({way[0][0] for way in several}) == num_changes:
                yield tuple(itertools.chain.from_iterable(several))
