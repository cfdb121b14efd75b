"""Whole fates: from shares to fates, repaired until they fit and improved while that is cheap; the timeline judges.

What: `Judge` plays fates and says how far they are from fitting and how long the step takes. `rounded` turns the shares
of the linear program into fates, `repair` evicts what is cheapest for its bytes until they fit, `improve` changes one
item, or two at once in small steps, as long as that makes the step faster.

Why: the program sees items as divisible and the link as a fluid. A handful of items out of thousands end up with shares
that are no fates, and what it calls a fit may be short of a few bytes for a moment.

Cost: a play is a millisecond for 32 layers × 11 items; every loop has a limit in plays, so that two processes with the
same step find the same fates whatever their speed. Time is a second limit, far behind.

Not covered: proving anything. Bounds come from program.py.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from lowtide.planner.fate import Fate
from lowtide.planner.program import Relaxation
from lowtide.timeline.events import Timeline, run
from lowtide.timeline.memory import Frame, Spans, floor_curve
from lowtide.timeline.step import Item, Link

Fates = tuple[Fate, ...]
Move = tuple[tuple[int, Fate], ...]

SMALL = 16
"""Up to as many items, pairs of changes are tried too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Fates, and what came of them."""

    fates: Fates
    excess_bytes: int
    """How far they are from fitting: device bytes over the budget, or else host bytes over theirs. 0: they fit."""
    seconds: float
    """Of the step; 0 when they do not fit."""
    timeline: Timeline | None

    @property
    def rank(self) -> tuple[int, float]:
        """Less is better."""
        return (self.excess_bytes, self.seconds)


class Judge:
    """Plays fates against one budget."""

    def __init__(
        self, frame: Frame, link: Link, budget_bytes: int, host_bytes: int | None = None, *, deadline: float = np.inf
    ) -> None:
        self.frame, self.link = frame, link
        self.budget_bytes, self.host_bytes = budget_bytes, host_bytes
        self.deadline = deadline
        """On the clock of `time.perf_counter`."""
        self.num_plays = 0

    @property
    def is_late(self) -> bool:
        return time.perf_counter() > self.deadline

    def play(self, fates: Sequence[Fate]) -> Outcome:
        """No timing of copies needs less than the floor of the fates, so what is above the budget is not played."""
        self.num_plays += 1
        peak_bytes, host_excess = self.floor(fates)
        excess_bytes = max(peak_bytes - self.budget_bytes, 0) + host_excess
        if excess_bytes:
            return Outcome(fates=tuple(fates), excess_bytes=excess_bytes, seconds=0.0, timeline=None)
        timeline = run(self.frame, fates, self.link, budget_bytes=self.budget_bytes)
        over = max(timeline.peak_bytes - self.budget_bytes, 0)
        seconds = timeline.step_seconds
        return Outcome(fates=tuple(fates), excess_bytes=over, seconds=0.0 if over else seconds, timeline=timeline)

    def floor(self, fates: Sequence[Fate]) -> tuple[int, int]:
        """The least peak that these fates can have, and the host bytes that are missing."""
        spans = Spans.of(self.frame, fates)
        host_bytes = int(self.frame.nbytes[spans.is_swapped].sum())
        missing = 0 if self.host_bytes is None else max(host_bytes - self.host_bytes, 0)
        return int(floor_curve(self.frame, spans).max()), missing


def rounded(items: Sequence[Item], shares: Relaxation, keep_above: float) -> Fates:
    """Keep what the program keeps at least this much of; the rest gets the larger of its other shares."""
    fates = []
    for index, item in enumerate(items):
        others = {Fate.SWAP: shares.swap[index], Fate.RECOMPUTE: shares.recompute[index]}
        open_fates = [fate for fate in (Fate.SWAP, Fate.RECOMPUTE) if fate in item.fates]
        gone = shares.swap[index] + shares.recompute[index]
        is_kept = gone <= 1 - keep_above if not item.is_anchor else shares.keep[index] >= gone
        if not open_fates or (Fate.KEEP in item.fates and is_kept):
            fates.append(Fate.KEEP)
        else:
            fates.append(max(open_fates, key=lambda fate: others[fate]))
    return tuple(fates)


def repair(judge: Judge, fates: Fates, *, max_flips: int = 400) -> Fates:
    """Flips items that are in the way at the worst tick, cheapest for its bytes first, until the fates fit.

    Stops where no single flip brings them nearer.
    """
    current = list(fates)
    key = judge.floor(current)
    for _ in range(max_flips):
        over = key[0] - judge.budget_bytes
        if (over <= 0 and key[1] == 0) or judge.is_late:
            break
        for index, fate in _evictions(judge, current) if over > 0 else _returns(judge, current):
            before, current[index] = current[index], fate
            now = judge.floor(current)
            if _is_nearer(judge, now, key):
                key = now
                break
            current[index] = before
        else:
            break
    return tuple(current)


def _is_nearer(judge: Judge, now: tuple[int, int], before: tuple[int, int]) -> bool:
    def distance(key: tuple[int, int]) -> tuple[int, int]:
        return (max(key[0] - judge.budget_bytes, 0) + key[1], key[0])

    return distance(now) < distance(before)


def _evictions(judge: Judge, fates: list[Fate]) -> list[tuple[int, Fate]]:
    """Changes of items that are there at the worst tick only because of their fate, cheapest for their bytes first."""
    frame = judge.frame
    spans = Spans.of(frame, fates)
    tick = int(np.argmax(floor_curve(frame, spans)))
    is_there = spans.is_held & (frame.dies <= tick) & (tick < spans.release) & (frame.first_read != tick)
    is_there |= spans.is_made & (spans.need <= tick) & (tick < spans.release)
    is_there |= spans.is_swapped & (spans.need <= tick) & (tick < spans.release)
    changes = []
    for index in np.flatnonzero(is_there).tolist():
        item = frame.step.items[index]
        for fate in item.fates:
            if fate is not fates[index]:
                seconds = _seconds(judge, item, fate) - _seconds(judge, item, fates[index])
                changes.append((seconds / max(item.nbytes, 1), index, fate))
    # Also what is made at this tick from inputs that are there only for it.
    for index in np.flatnonzero(spans.is_made & (spans.need == tick)).tolist():
        item = frame.step.items[index]
        changes += [(0.0, index, fate) for fate in item.fates if fate is not Fate.RECOMPUTE]
    changes.sort(key=lambda change: (change[0], change[1], change[2] is Fate.SWAP))
    return [(index, fate) for _, index, fate in changes]


def _returns(judge: Judge, fates: list[Fate]) -> list[tuple[int, Fate]]:
    """Changes of swapped items, those first that are cheapest to make again."""
    changes = []
    for index, item in enumerate(judge.frame.step.items):
        if fates[index] is Fate.SWAP:
            changes += [
                (_seconds(judge, item, fate) / max(item.nbytes, 1), index, fate)
                for fate in item.fates
                if fate is not Fate.SWAP
            ]
    changes.sort(key=lambda change: (change[2] is Fate.KEEP, change[0], change[1]))
    return [(index, fate) for _, index, fate in changes]


def _seconds(judge: Judge, item: Item, fate: Fate) -> float:
    """What a fate costs when nothing is hidden by anything."""
    if fate is Fate.KEEP:
        return 0.0
    if fate is Fate.RECOMPUTE:
        return item.recipe_seconds
    return item.nbytes / judge.link.out_bytes_per_second


def improve(judge: Judge, start: Outcome, *, max_plays: int) -> Outcome:
    """Changes one item, or two, wherever that makes the step faster and fits, until nothing does."""
    best = start
    last_play = judge.num_plays + max_plays
    while True:
        before = best
        for move in _moves(judge.frame, best):
            if judge.num_plays >= last_play or judge.is_late:
                return best
            fates = list(best.fates)
            for index, fate in move:
                fates[index] = fate
            outcome = judge.play(fates)
            if outcome.rank < (best.excess_bytes, best.seconds * (1 - 1e-9)):
                best = outcome
                if len(best.fates) <= SMALL:
                    break  # pairs are many: single changes first again
        if best is before:
            return best


def _moves(frame: Frame, outcome: Outcome) -> Iterator[Move]:
    items, fates = frame.step.items, outcome.fates
    singles = [(index, fate) for index, item in enumerate(items) for fate in item.fates if fate is not fates[index]]

    def promise(move: tuple[int, Fate]) -> float:
        index, fate = move
        saved = items[index].recipe_seconds if fates[index] is Fate.RECOMPUTE else 0.0
        return saved - (items[index].recipe_seconds if fate is Fate.RECOMPUTE else 0.0)

    singles.sort(key=promise, reverse=True)
    yield from ((move,) for move in singles)
    if len(items) <= SMALL:
        for one, other in itertools.combinations(singles, 2):
            if one[0] != other[0]:
                yield (one, other)
