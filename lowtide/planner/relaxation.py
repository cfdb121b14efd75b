"""The linear program behind a solved plan: a relaxation of the step, so that its value is a bound no schedule beats.

What: shares `swap` and `recompute` of every item in [0, 1] (the rest is kept), and the link as a fluid, watched at a
few *points* (ticks). Memory at each point stays within the budget; the link drains what was produced and brings back
what is read, no faster than compute, recomputes and stalls give it time. Points are added where the shares turn out
not to fit, so the program stays small: `Program.solve` is called again with more of them.

Why a bound: every row is necessary. Take any real schedule, read its shares and what the link had moved by the start of
each point, and all rows hold; each says why. The value of the program is therefore at most the time of that schedule,
whatever the points are.

Cost: with n items and p points about 2 n + 7 p columns, and rows with a few entries each (linear_program.py). 32 layers
× 11 items: 0.1 s.

Not covered: the order of copies on a lane, that an item leaves whole and between ticks, and when exactly an item is
made that serves as an input of others. All of them make the real step slower, none faster: the bound stays one.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lowtide.core.fate import Fate
from lowtide.planner.linear_program import (
    Floats,
    Linear,
    Moves,
    Solved,
    Terms,
    add_up,
    merged,
    minus,
    prefix,
    transient,
)
from lowtide.timeline.memory import StepArrays, plain_curve, presence
from lowtide.timeline.step import Link, Step

_TOLERANCE = 1e-6
"""Rows may be broken by this much (scaled); the bound is lowered by as much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxation:
    """What the program says: how fast the step can be, and the shares that would do it."""

    bound_seconds: float
    """No schedule is faster. Infinite when not even shares fit: then no plan does."""
    swap: Floats
    recompute: Floats
    keep: Floats
    """One entry for each item; of a retained input that is not needed all three are 0."""


@dataclass(frozen=True, slots=True, eq=False)
class Needs:
    """When items may be needed in backward, over all fates of the others."""

    last: NDArray[np.int64]
    """By this tick: its first read; of a retained input, the last first read of what is made from it."""
    first: NDArray[np.int64]
    """Not before this tick: its first read, or that of what is made from it, and so on."""
    dependents: tuple[tuple[int, ...], ...]
    """Items that may be recomputed and are made from this one."""

    @classmethod
    def of(cls, arrays: StepArrays) -> Needs:
        items = arrays.step.items
        dependents: list[list[int]] = [[] for _ in items]
        for index, item in enumerate(items):
            if Fate.RECOMPUTE in item.fates:
                for source in item.sources:
                    dependents[source].append(index)
        last, first = arrays.first_read.copy(), arrays.first_read.copy()
        for index in arrays.dependents_first:
            if Fate.RECOMPUTE not in items[index].fates:
                continue
            for source in items[index].sources:
                first[source] = min(first[source], first[index])
        never = arrays.num_ticks
        for index, users in enumerate(dependents):
            if items[index].is_retained_input and users:
                last[index] = max((last[user] for user in users if last[user] < never), default=never)
        return cls(last=last, first=first, dependents=tuple(map(tuple, dependents)))


@dataclass(slots=True)
class _Columns:
    """Where the shares of one item are; -1 where it may not have that fate."""

    swap: int = -1
    recompute: int = -1
    """By a recipe."""
    decode: int = -1
    """From the smaller form."""
    keeps: Sequence[tuple[int, int]] = ()
    """Retained inputs only: (first point past it, column) for each end that keeping it may have."""


class Program:
    """One step, one link, one budget; solved for any set of points."""

    def __init__(self, step: Step, link: Link, budget_bytes: float, host_bytes: float | None = None) -> None:
        self.step, self.link = step, link
        self.budget_bytes, self.host_bytes = budget_bytes, host_bytes
        self.arrays = StepArrays.of(step)
        self.needs = Needs.of(self.arrays)
        self.is_retained_input = np.array([item.is_retained_input for item in step.items], dtype=bool)
        self.plain: Floats = plain_curve(self.arrays).astype(np.float64)
        visits = self.arrays.visit_bytes
        self._visiting = presence(self.arrays, self.arrays.fetch_from + 1, self.needs.last, visits)
        """Bytes of visitors that may be there before they are needed: ticks count them already."""
        seconds = self.arrays.seconds.copy()
        # Compute waits at least for visitors whose place is not free before they are needed.
        before = self.needs.last - 1
        waits = (visits > 0) & (self.arrays.fetch_from > before) & (before >= step.num_forward_ticks)
        np.add.at(seconds, before[waits], link.latency_seconds + visits[waits] / link.in_bytes_per_second)
        self.plain_seconds = float(seconds.sum())
        """With everything kept that may be: no schedule is faster."""
        self._clock = np.concatenate([[0.0], np.cumsum(seconds)])
        self._unit_bytes = float(max(self.arrays.nbytes.max(initial=1), 1))
        self._unit_seconds = max(step.compute_seconds, 1e-12) / max(len(step.ticks), 1)

    def solve(
        self,
        points: Iterable[int],
        *,
        time_limit_seconds: float = 60.0,
        reserve_bytes: float = 0.0,
        minimise_peak: bool = False,
    ) -> Relaxation | None:
        """Solves it at these ticks; None when time ran out with nothing in hand.

        `reserve_bytes` is taken from the budget: the shares then leave room for what rounding costs, but the bound is
        none. `minimise_peak` asks for the smallest peak instead, link and time being no object; the 'seconds' are
        then bytes.
        """
        ticks = sorted({self.step.num_forward_ticks, *map(int, points)})
        build = Linear()
        columns = self._shares(build, ticks)
        self._watch(build, ticks, columns, reserve_bytes, minimise_peak)
        return self._relaxation(build.solve(time_limit_seconds), columns, minimise_peak=minimise_peak)

    def _shares(self, build: Linear, ticks: list[int]) -> list[_Columns]:
        """Columns for the fates, with what each costs, and the rows that tie them together.

        Here and below, a tick is watched at the first point at or after it: `bisect_left`, which takes a tenth of the
        time of numpy's on a single number."""
        items, needs = self.step.items, self.needs
        share = self.link.compute_share
        columns: list[_Columns] = []
        later: list[int] = []
        for index, item in enumerate(items):
            entry = _Columns()
            columns.append(entry)
            if self._is_free(index):
                continue
            if Fate.SWAP in item.fates:
                # Both copies run, and compute falls behind by its share of them.
                out_bytes, back_bytes = item.nbytes + item.visit.leave_bytes, item.nbytes + item.visit.nbytes
                behind = share * (self._out_seconds(out_bytes) + self._back_seconds(back_bytes))
                entry.swap = build.column(behind, 1.0)
            if Fate.RECOMPUTE in item.fates and item.form_of is None:
                form = None if item.form is None else items[item.form]
                if form is None or Fate.RECOMPUTE in form.fates:
                    entry.recompute = build.column(item.recipe_seconds / self._unit_seconds, 1.0)
                if form is not None:
                    entry.decode = build.column(form.recipe_seconds / self._unit_seconds, 1.0)
                    later.append(index)  # its form is made, and so listed, after it
            terms = [(col, 1.0) for col in (entry.swap, entry.recompute, entry.decode) if col >= 0]
            if item.is_retained_input:
                # A kept retained input lives until the last recipe that reads it; each possible end is a share of its
                # own.
                ends = {bisect_left(ticks, int(needs.first[user]) + 1) for user in needs.dependents[index]}
                if Fate.KEEP in item.fates:
                    entry.keeps = [(end, build.column(0.0, 1.0)) for end in sorted(ends)]
                terms += [(col, 1.0) for _, col in entry.keeps]
            if len(terms) > 1 or Fate.KEEP not in item.fates:
                # Every item has one fate; a site that may not be kept has one of the others.
                forced = Fate.KEEP not in item.fates and not item.is_retained_input
                build.row(terms, 1.0 if forced else -math.inf, 1.0)
            if entry.recompute >= 0:
                self._needs_retained_inputs(build, ticks, index, columns)
        for index in later:
            self._needs_retained_inputs(build, ticks, index, columns, is_decoded=True)
        return columns

    def _is_free(self, index: int) -> bool:
        """Nothing is to be decided: a retained input of nobody, a visitor of forward, or somebody else holds it until
        backward reads it."""
        item = self.step.items[index]
        if item.is_for_forward(self.step.num_forward_ticks):
            return True
        if item.is_retained_input:
            return self.needs.last[index] == self.arrays.num_ticks
        return Fate.KEEP in item.fates and item.dies >= item.reads[0]

    def _needs_retained_inputs(
        self,
        build: Linear,
        ticks: list[int],
        index: int,
        columns: list[_Columns],
        *,
        is_decoded: bool = False,
    ) -> None:
        """What is made again needs its retained inputs held, or its form, kept at least until it can first be
        needed."""
        item, entry = self.step.items[index], columns[index]
        end = bisect_left(ticks, int(self.needs.first[index]) + 1)
        made = entry.decode if is_decoded else entry.recompute
        for source in item.inputs if not is_decoded or item.form is None else (item.form,):
            if not self.step.items[source].is_retained_input:
                continue
            held = columns[source]
            terms = [(col, 1.0) for last, col in held.keeps if last >= end]
            terms += [(col, 1.0) for col in (held.swap, held.recompute) if col >= 0]
            build.row([*terms, (made, -1.0)], 0.0, math.inf)

    def _watch(
        self,
        build: Linear,
        ticks: list[int],
        columns: list[_Columns],
        reserve_bytes: float,
        minimise_peak: bool,
    ) -> None:
        """Memory and link at the points. Bytes in `_unit_bytes`, seconds in `_unit_seconds`."""
        num = len(ticks)
        moves = Moves.of(num)
        for index, item in enumerate(self.step.items):
            entry = columns[index]
            size = item.nbytes / self._unit_bytes
            dies = bisect_left(ticks, item.dies)
            first, read = int(self.needs.first[index]), int(self.needs.last[index])
            at = bisect_left(ticks, read)
            for end, col in entry.keeps:
                moves.away[dies].append((col, -size))
                moves.away[end].append((col, size))
            gone = [(entry.swap, dies), (entry.recompute, dies)]
            made = [(entry.recompute, item.recipe_seconds, item.recipe_bytes)]
            if item.form is not None:
                form = self.step.items[item.form]
                gone.append((entry.decode, max(dies, bisect_left(ticks, form.born + 1))))
                made.append((entry.decode, form.recipe_seconds, form.recipe_bytes))
                born_at = bisect_left(ticks, form.born)
                if entry.decode >= 0 and form.recipe_bytes and born_at < num and ticks[born_at] == form.born:
                    moves.transient[born_at].append((entry.decode, form.recipe_bytes / self._unit_bytes))
            for col, seconds, transient_bytes in made:
                if col < 0:
                    continue
                # It runs in one of these ticks; which one depends on what is made from it, so each gets the time.
                for k in range(bisect_left(ticks, first + 1), min(bisect_left(ticks, read + 1), num - 1) + 1):
                    moves.extra[k].append((col, seconds / self._unit_seconds))
                if first == read and at < num and ticks[at] == read and transient_bytes:
                    moves.transient[at].append((col, transient_bytes / self._unit_bytes))
            if entry.swap >= 0:
                out = 0.0 if item.visit.nbytes else self._out_seconds(item.nbytes)
                back = self._back_seconds(item.nbytes + item.visit.nbytes)
                moves.dead[dies].append((entry.swap, out))
                moves.ready[bisect_left(ticks, item.saved + 1)].append((entry.swap, out))
                moves.needed[at].append((entry.swap, back))
                moves.extra[bisect_left(ticks, item.saved + 2)].append((entry.swap, out * self.link.compute_share))
                moves.swapped.append((entry.swap, size))
                moves.back.append((entry.swap, back))
            if item.is_retained_input or dies >= at:
                continue
            for col, start in gone:
                if col >= 0 and start < at:
                    moves.away[start].append((col, size))
                    moves.away[at].append((col, -size))
            self._early(build, ticks, index, columns, moves)
        if minimise_peak:
            self._watch_peak(build, ticks, moves)
        else:
            self._watch_flow(build, ticks, moves, self.budget_bytes - reserve_bytes)
        if self.host_bytes is not None and moves.swapped:
            # A copy lives on the next tier until the step is over.
            build.row(moves.swapped, -math.inf, self.host_bytes / self._unit_bytes)

    def _out_seconds(self, nbytes: float) -> float:
        return (self.link.latency_seconds + nbytes / self.link.out_bytes_per_second) / self._unit_seconds

    def _back_seconds(self, nbytes: float) -> float:
        return (self.link.latency_seconds + nbytes / self.link.in_bytes_per_second) / self._unit_seconds

    def _early(self, build: Linear, ticks: list[int], index: int, columns: list[_Columns], moves: Moves) -> None:
        """What another item is made from is there when that one is read, and stays until its own reads."""
        entry, item = columns[index], self.step.items[index]
        if not self.needs.dependents[index] or max(entry.swap, entry.recompute, entry.decode) < 0:
            return
        dies = bisect_left(ticks, item.dies)
        read = bisect_left(ticks, int(self.needs.last[index]))
        size, back_seconds = item.nbytes / self._unit_bytes, self._back_seconds(item.nbytes)
        levels: dict[int, list[int]] = {}
        for user in self.needs.dependents[index]:
            at = bisect_left(ticks, int(self.needs.last[user]))
            if dies <= at < read and columns[user].recompute >= 0:
                levels.setdefault(at, []).append(columns[user].recompute)
        back: dict[int, list[int]] = {col: [] for col in (entry.swap, entry.recompute, entry.decode) if col >= 0}
        for at in sorted(levels):
            for col, parts in back.items():
                part = build.column(0.0, 1.0)
                parts.append(part)
                moves.away[at].append((part, -size))
                moves.away[read].append((part, size))
                if col == entry.swap:
                    moves.needed[at].append((part, back_seconds))
                    moves.needed[read].append((part, -back_seconds))
            # Kept, or brought back so far: at least the share of what is made from it.
            terms = [(part, 1.0) for parts in back.values() for part in parts] + [(col, -1.0) for col in back]
            for user in levels[at]:
                build.row([*terms, (user, -1.0)], -1.0, math.inf)
        if levels:
            for col, parts in back.items():  # no more comes back than went away
                build.row([*((part, 1.0) for part in parts), (col, -1.0)], -math.inf, 0.0)

    def _watch_peak(self, build: Linear, ticks: list[int], moves: Moves) -> None:
        """The cost is the peak, and nothing else."""
        build.cost = [0.0] * len(build.cost)
        peak = build.column(1.0, least=-math.inf)
        before = -1
        for k, plain in enumerate(self.plain[ticks] / self._unit_bytes):
            away = build.column(least=-math.inf)
            add_up(build, away, before, moves.away[k])
            terms = [(away, -1.0), (peak, -1.0), *transient(build, moves.transient[k])]
            build.row(terms, -math.inf, -plain)
            before = away

    def _watch_flow(self, build: Linear, ticks: list[int], moves: Moves, budget_bytes: float) -> None:
        """Lanes are counted in seconds of copying: what was sent, and what was fetched, by the start of each point."""
        num_forward, share = self.step.num_forward_ticks, self.link.compute_share
        # Copying for a second frees, or brings, at least these bytes. Latency weighs most on the smallest item.
        least = min((item.nbytes for item in self.step.items if item.nbytes), default=1)
        out_density = least / self._unit_bytes / self._out_seconds(least)
        back_density = least / self._unit_bytes / self._back_seconds(least)
        away = dead = ready = needed = sent = fetched = -1
        behind: Terms = []
        # Lanes count visitors. Numpy's own numbers take several times as long.
        budget = budget_bytes / self._unit_bytes
        plain = ((self.plain - self._visiting)[ticks] / self._unit_bytes).tolist()
        times = (np.diff(self._clock[ticks], prepend=0.0) / self._unit_seconds).tolist()
        for k, tick in enumerate(ticks):
            away = prefix(build, away, moves.away[k])
            stall = build.column(1.0)
            elapsed = [(stall, -1.0), *[(col, -seconds) for col, seconds in moves.extra[k]]]
            compute = times[k]
            # Everything that is there: the plain curve, less what is away, plus what has not left yet, plus what is
            # back before it is needed, plus the transient of a recipe.
            memory = [(away, -1.0), *transient(build, moves.transient[k])]
            if tick <= num_forward:
                before_ready, before_sent = ready, sent
                dead = prefix(build, dead, moves.dead[k])
                ready = prefix(build, before_ready, moves.ready[k])
                sent, waiting = build.column(), build.column()
                memory.append((waiting, out_density))
                build.row([(waiting, 1.0), (sent, 1.0), (dead, -1.0)], 0.0, math.inf)
                # Nothing is sent before it is saved, and everything has left when backward starts.
                build.row([(sent, 1.0), (ready, -1.0)], 0.0 if tick == num_forward else -math.inf, 0.0)
                # The lane copies for no longer than time passes: compute with its contention, and stalls.
                build.row([(sent, 1.0), *minus(before_sent), *elapsed], -math.inf, compute)
                build.row([(sent, 1.0), *minus(before_sent)], 0.0, math.inf)
            if tick >= num_forward:
                before_fetched = fetched
                needed = prefix(build, needed, moves.needed[k])
                fetched = build.column()
                memory += [(fetched, back_density), (needed, -back_density)]
                if tick == num_forward:  # the first fetches start here, and can only be waited for
                    elapsed, compute = [(build.column(1.0), -1.0)], 0.0
                if share:
                    # Contention of fetches, wherever they are issued; all of it is in the cost of the share already.
                    behind.append((build.column(), 1.0))
                    elapsed.append((behind[-1][0], -1.0))
                # What is read has come back, no faster than time passes: compute, recomputes, contention, stalls.
                build.row([(fetched, 1.0), (needed, -1.0)], 0.0, math.inf)
                build.row([(fetched, 1.0), *minus(before_fetched), *elapsed], -math.inf, compute)
                build.row([(fetched, 1.0), *minus(before_fetched)], 0.0, math.inf)
            build.row(memory, -math.inf, budget - plain[k])
        if behind:
            build.row(merged([*behind, *((col, -share * back) for col, back in moves.back)]), -math.inf, 0.0)

    def _relaxation(self, solved: Solved | None, columns: list[_Columns], *, minimise_peak: bool) -> Relaxation | None:
        if solved is None:
            return None
        none = np.zeros(len(self.step.items))
        least, values = solved
        if values is None:
            return Relaxation(bound_seconds=math.inf, swap=none, recompute=none, keep=none)
        if minimise_peak:
            bound = least * self._unit_bytes
        else:
            above = least - _TOLERANCE * max(1.0, abs(least))
            bound = self.plain_seconds + max(above, 0.0) * self._unit_seconds
        swap, recompute, held = none.copy(), none.copy(), none.copy()
        for index, entry in enumerate(columns):
            swap[index] = values[entry.swap] if entry.swap >= 0 else 0.0
            by_recipe = values[entry.recompute] if entry.recompute >= 0 else 0.0
            recompute[index] += by_recipe + (values[entry.decode] if entry.decode >= 0 else 0.0)
            form = self.step.items[index].form
            if form is not None:
                recompute[form] = by_recipe  # what has no form, that is
            held[index] = sum(values[col] for _, col in entry.keeps)
        keep = np.where(self.is_retained_input, held, 1.0 - swap - recompute)
        return Relaxation(
            bound_seconds=bound,
            swap=np.clip(swap, 0, 1),
            recompute=np.clip(recompute, 0, 1),
            keep=keep,
        )
