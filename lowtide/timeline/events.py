"""A step on a clock: one compute lane, one lane for copies out, one for copies in, and how they wait for each other.

What: `run` plays one step with given fates over a link, chooses when each swapped item has to be gone (`evict_by`) and
when its fetch starts (`prefetch_at`), and says how long the step takes and how many bytes are on the device in each
tick.

The rules:
- a copy out starts when its item was saved and the lane is free, in order of `saved`;
- an item that only autograd holds stays until its `evict_by` tick. That tick is late enough for a link that is a little
  slower than planned, and early enough for the budget. If the copy is not complete by then, compute waits: the step
  gets longer, the memory does not grow;
- everything has left when backward starts;
- fetches start in order of need, each at the last tick from which it still arrives with some slack; later where memory
  has no room yet, but never after the need. At the need compute waits for a fetch that is not complete;
- an item that only visits the device (`Item.visit`) is not copied out in forward, is fetched once there is a
  place for it, and takes the lane out after its need, which nothing waits for but the end of a step whose forward has
  visitors too: what they bring has left then;
- recomputed items are made at their first need, in a chain, on the compute lane;
- a copy slows compute down by `compute_share` of its own time, charged to the tick at which it is issued.

A faster link never makes a step slower (`compute_share` aside: where a slow copy is waited for anyway, its contention
costs nothing).

Cost: about 2 ms for 32 layers of 11 items, 20 ms for 128 of 40; see `StepArrays` for many runs over one step.

Not covered: a link that both directions share, a third tier, collectives, and what really happened (a report's work).
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lowtide.core.fate import Fate
from lowtide.timeline.memory import (
    Ints,
    Lifetimes,
    StepArrays,
    earliest_evict,
    floor_curve,
    peak,
    presence,
)
from lowtide.timeline.step import Link, Step

SLACK = 0.5
"""A fetch is given this share more time than its copy takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that occupied a lane. Seconds from the start of the step."""

    lane: str
    """'compute', 'out', 'in', or 'stall' (compute waited)."""
    name: str
    """Of an item; of a tick: 'forward 12', 'backward 3'."""
    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One step, played."""

    step_seconds: float
    """All ticks, stalls, recompute and contention."""
    stall_seconds: float
    recompute_seconds: float
    contention_seconds: float
    peak_bytes: int
    peak_tick: int
    slower_bytes: int
    """Most bytes on the next tier at once: its copies live until the step is over."""
    curve: tuple[int, ...]
    """Most bytes on the device in each tick: a swapped item counts until `evict_by`, and from `prefetch_at` on."""
    evict_by: tuple[int | None, ...]
    """Swapped items: the tick before which the copy out must be complete."""
    prefetch_at: tuple[int | None, ...]
    """Swapped items: the tick at whose start the fetch is issued."""
    events: tuple[Event, ...] = ()
    """In no particular order; empty unless asked for."""


def run(
    step: Step | StepArrays,
    fates: Sequence[Fate],
    link: Link,
    *,
    budget_bytes: int | None = None,
    with_events: bool = False,
    lifetimes: Lifetimes | None = None,
) -> Timeline:
    """Play one step. A budget that cannot be kept raises nothing: `peak_bytes` is then larger. `lifetimes`: of these
    fates, if they are known."""
    arrays = StepArrays.of(step)
    lifetimes = lifetimes or Lifetimes.of(arrays, fates)
    clock = _Clock(arrays, lifetimes, link, with_events)
    curve = floor_curve(arrays, lifetimes)
    swapped = clock.swapped

    clock.play_forward(curve, budget_bytes)
    evict_ticks = np.array(clock.evict_by, np.int64)
    curve += presence(arrays, earliest_evict(arrays)[swapped], evict_ticks, arrays.nbytes[swapped])

    prefetch_ticks = clock.choose_fetches(curve, budget_bytes)
    clock.play_backward(prefetch_ticks)

    peak_bytes, peak_tick = peak(curve)
    return Timeline(
        step_seconds=clock.now,
        stall_seconds=clock.stall_seconds,
        recompute_seconds=float(lifetimes.made_seconds[lifetimes.is_made].sum()),
        contention_seconds=float(clock.contention.sum()),
        peak_bytes=peak_bytes,
        peak_tick=peak_tick,
        slower_bytes=int(arrays.nbytes[swapped].sum()),
        curve=tuple(curve.tolist()),
        evict_by=_by_item(arrays, swapped, evict_ticks),
        prefetch_at=_by_item(arrays, swapped, prefetch_ticks),
        events=tuple(clock.events),
    )


class _Clock:
    """The lanes. Positions in `swapped` stand for items: 0 is the first that was saved."""

    def __init__(self, arrays: StepArrays, lifetimes: Lifetimes, link: Link, with_events: bool) -> None:
        self.arrays = arrays
        self.lifetimes = lifetimes
        self.with_events = with_events
        self.now = 0.0
        self.stall_seconds = 0.0
        self.events: list[Event] = []
        swapped = np.flatnonzero(lifetimes.is_swapped)
        self.swapped = swapped[np.argsort(arrays.saved[swapped], kind="stable")]
        self.evict_by: list[int] = [arrays.step.num_forward_ticks] * len(swapped)
        own_bytes, visits = arrays.nbytes[self.swapped], arrays.visit_bytes[self.swapped]
        leave_bytes = arrays.leave_bytes[self.swapped]
        self.out_seconds = np.where(visits > 0, 0.0, link.latency_seconds + own_bytes / link.out_bytes_per_second)
        self.in_seconds = link.latency_seconds + (own_bytes + visits) / link.in_bytes_per_second
        leaving = link.latency_seconds + leave_bytes / link.out_bytes_per_second
        self.after_seconds = np.where(leave_bytes > 0, leaving, 0.0)
        """Of copies out in backward: of visitors, and 0 for others."""
        self.link = link
        self.contention = np.zeros(arrays.num_ticks)
        np.add.at(self.contention, arrays.saved[self.swapped] + 1, self.out_seconds * link.compute_share)
        self.made_seconds = np.zeros(arrays.num_ticks)
        made = lifetimes.is_made
        np.add.at(self.made_seconds, lifetimes.need[made], lifetimes.made_seconds[made])

    # -- forward ---------------------------------------------------------------------------------------------------

    def play_forward(self, floor: Ints, budget_bytes: int | None) -> None:
        """Tick by tick: start copies of what was saved, release what was copied, wait where memory would run out."""
        arrays = self.arrays
        num_forward = arrays.step.num_forward_ticks
        saved = arrays.saved[self.swapped].tolist()
        nbytes, copy_seconds = arrays.nbytes[self.swapped].tolist(), self.out_seconds.tolist()
        items, visitors = self.swapped.tolist(), _Visitors(self)
        durations = (arrays.seconds + self.contention)[:num_forward].tolist()
        # From this tick on only autograd holds it.
        idle = earliest_evict(arrays)[self.swapped]
        landed = [0.0] * len(saved)
        room = None if budget_bytes is None else budget_bytes - floor[:num_forward]
        coming = _Coming(arrays, idle, room)
        next_out = 0
        lane_free = 0.0
        for tick in range(num_forward):
            if tick in coming.room:
                coming.enter(tick, saved, nbytes)
                while coming.waiting:
                    position = coming.waiting[0]
                    is_early = self.now < landed[position] + copy_seconds[position]
                    if is_early and coming.has_room():
                        break
                    coming.leave(nbytes)
                    self.evict_by[position] = tick
                    self.wait_for(landed[position], items[position])
            if tick in visitors.ticks:
                visitors.come(tick)
            if self.with_events:
                self.note("compute", f"forward {tick}", self.now, self.now + durations[tick])
            self.now += durations[tick]
            while next_out < len(saved) and saved[next_out] == tick:
                start = lane_free if lane_free > self.now else self.now
                lane_free = landed[next_out] = start + copy_seconds[next_out]
                if self.with_events:
                    self.note("out", items[next_out], start, lane_free)
                next_out += 1
        if landed:
            self.wait_for(lane_free, items[-1])

    # -- backward --------------------------------------------------------------------------------------------------

    @functools.cached_property
    def fetch_order(self) -> list[int]:
        """Positions by need; among equals the one that was produced last comes first."""
        return np.lexsort((-self.swapped, -self.arrays.born[self.swapped], self.lifetimes.need[self.swapped])).tolist()

    def choose_fetches(self, curve: Ints, budget_bytes: int | None) -> Ints:
        """The tick at which each fetch is issued. Adds to `curve` what is there before it is needed."""
        arrays = self.arrays
        num_forward = arrays.step.num_forward_ticks
        order, needs = self.fetch_order, self.lifetimes.need[self.swapped].tolist()
        wanted = self._latest_ticks(order, needs)
        nbytes, dies = arrays.nbytes[self.swapped].tolist(), arrays.dies[self.swapped].tolist()
        visits, free = (arrays.visit_bytes[self.swapped] > 0).tolist(), arrays.fetch_from[self.swapped].tolist()
        chosen = np.zeros(len(order), np.int64)
        next_stop = arrays.next_stop.tolist()
        earliest = num_forward
        for position, tick in zip(order, wanted):
            need, size = needs[position], nbytes[position]
            if visits[position]:
                chosen[position] = max(tick, free[position])
                continue
            earliest = tick if tick > earliest else earliest
            # What somebody else still holds takes no room of its own.
            start = dies[position] if dies[position] > earliest else earliest
            if budget_bytes is not None and start < need:
                (too_full,) = (curve[start:need] > budget_bytes - size).nonzero()
                if len(too_full):
                    earliest = min(next_stop[start + int(too_full[-1]) + 1], need)
                    start = max(earliest, start)
            chosen[position] = earliest
            curve[start:need] += size
        return chosen

    def _latest_ticks(self, order: list[int], needs: list[int]) -> list[int]:
        """In `order`: the last tick that starts early enough for all that comes after it in the lane."""
        num_forward = self.arrays.step.num_forward_ticks
        copy_seconds, starts = (self.in_seconds * (1.0 + SLACK)).tolist(), self._nominal_starts().tolist()
        latest = [0.0] * len(order)
        following = math.inf
        for place in range(len(order) - 1, -1, -1):
            position = order[place]
            following = min(following, starts[needs[position] - num_forward]) - copy_seconds[position]
            latest[place] = following
        ticks = np.maximum(np.searchsorted(starts, latest, side="right") - 1, 0) + num_forward
        stops = self.arrays.last_stop[ticks]
        ticks = np.where(stops >= num_forward, stops, self.arrays.next_stop[ticks])
        return np.clip(ticks, num_forward, np.array(needs, np.int64)[order]).tolist()

    def _nominal_starts(self) -> np.ndarray:
        """Start of each backward tick after the start of backward, if nothing has to be waited for."""
        durations = (self.arrays.seconds + self.contention + self.made_seconds)[self.arrays.step.num_forward_ticks :]
        return np.concatenate(([0.0], np.cumsum(durations)))[: len(durations)]

    def play_backward(self, prefetch_ticks: Ints) -> None:
        """From need to need: compute can be delayed at a need only."""
        arrays = self.arrays
        num_forward = arrays.step.num_forward_ticks
        assert np.all((prefetch_ticks >= num_forward) & (prefetch_ticks <= self.lifetimes.need[self.swapped]))
        order, items, issues = self.fetch_order, self.swapped.tolist(), prefetch_ticks.tolist()
        needs = self.lifetimes.need[self.swapped].tolist()
        np.add.at(self.contention, prefetch_ticks, (self.in_seconds + self.after_seconds) * self.link.compute_share)
        starts = self._nominal_starts().tolist()
        # What waits for a place lets others pass.
        lane = sorted(order, key=issues.__getitem__) if arrays.visit_bytes.any() else order
        copy_seconds, after_seconds = self.in_seconds.tolist(), self.after_seconds.tolist()
        shift = self.now
        lane_free = out_free = 0.0
        arrived = [0.0] * len(order)
        shifts = [(num_forward, shift)]
        next_in = 0
        for position in order:
            need = needs[position]
            while next_in < len(lane) and issues[lane[next_in]] <= need:
                issued = lane[next_in]
                start = shift + starts[issues[issued] - num_forward]
                start = lane_free if lane_free > start else start
                lane_free = arrived[issued] = start + copy_seconds[issued]
                if self.with_events:
                    self.note("in", items[issued], start, lane_free)
                next_in += 1
            planned = starts[need - num_forward]
            self.now = shift + planned
            if arrived[position] > self.now:
                self.wait_for(arrived[position], items[position])
            if after_seconds[position]:
                start = out_free if out_free > self.now else self.now
                out_free = start + after_seconds[position]
                if self.with_events:
                    self.note("out", items[position], start, out_free)
            shift = self.now - planned
            shifts.append((need, shift))
        durations = (arrays.seconds + self.contention + self.made_seconds)[num_forward:]
        self.now = shift + float(durations.sum())
        if len(arrays.for_forward) and order:
            self.wait_for(out_free, items[order[-1]])
        if self.with_events:
            self._note_backward(starts, shifts)

    # -- both ------------------------------------------------------------------------------------------------------

    def wait_for(self, until: float, item: int) -> None:
        """Compute waits for a copy of this item."""
        if until <= self.now:
            return
        if self.with_events:
            self.note("stall", item, self.now, until)
        self.stall_seconds += until - self.now
        self.now = until

    def note(self, lane: str, what: str | int, start: float, end: float) -> None:
        """`what`: the name, or the item of which it is. Called some thousand times a step, so not without events."""
        name = what if isinstance(what, str) else self.arrays.step.items[what].name
        self.events.append(Event(lane=lane, name=name, start=start, end=end))

    def _note_backward(self, starts: list[float], shifts: list[tuple[int, float]]) -> None:
        """Compute events of backward, once all delays are known. What is recomputed comes before its tick."""
        arrays = self.arrays
        num_forward = arrays.step.num_forward_ticks
        made: dict[int, list[int]] = {}
        # Inputs first: a chain is made from its end.
        inputs_first = dict.fromkeys((*reversed(arrays.dependents_first), *range(len(arrays.step.items))))
        for index in inputs_first:
            if self.lifetimes.is_made[index]:
                made.setdefault(int(self.lifetimes.need[index]), []).append(index)
        place = 0
        for tick in range(num_forward, arrays.num_ticks):
            while place + 1 < len(shifts) and shifts[place + 1][0] <= tick:
                place += 1
            now = shifts[place][1] + starts[tick - num_forward]
            for index in made.get(tick, ()):
                seconds = float(self.lifetimes.made_seconds[index])
                self.note("compute", f"recompute {arrays.step.items[index].name}", now, now + seconds)
                now += seconds
            seconds = float(arrays.seconds[tick] + self.contention[tick])
            self.note("compute", f"backward {tick - num_forward}", now, now + seconds)


class _Visitors:
    """What forward reads and is elsewhere before: each is fetched once its place is free, one after the other."""

    def __init__(self, clock: _Clock) -> None:
        arrays, link = clock.arrays, clock.link
        self._clock = clock
        self._fetches: dict[int, list[int]] = {}
        self._needs: dict[int, list[int]] = {}
        self._arrived: dict[int, float] = {}
        self._lane_free = 0.0
        for index in arrays.for_forward.tolist():
            item = arrays.step.items[index]
            self._fetches.setdefault(item.visit.fetch_from, []).append(index)
            self._needs.setdefault(item.reads[0], []).append(index)
            clock.contention[item.visit.fetch_from] += link.compute_share * self._seconds(index)
        self.ticks = self._fetches.keys() | self._needs.keys()
        """Before which any is fetched or needed."""

    def _seconds(self, index: int) -> float:
        link, item = self._clock.link, self._clock.arrays.step.items[index]
        return link.latency_seconds + item.visit.nbytes / link.in_bytes_per_second

    def come(self, tick: int) -> None:
        """The tick is about to begin: fetch what has a place now, and wait for what it reads."""
        clock = self._clock
        for index in self._fetches.get(tick, ()):
            start = max(self._lane_free, clock.now)
            self._lane_free = self._arrived[index] = start + self._seconds(index)
            if clock.with_events:
                clock.note("in", index, start, self._lane_free)
        for index in self._needs.get(tick, ()):
            clock.wait_for(self._arrived[index], index)


class _Coming:
    """Items that only autograd holds by the next stop, and which of them may leave at this stop.

    Compute can wait for a copy only at a stop. So an item that becomes idle between two stops counts from the first of
    the two.
    """

    def __init__(self, arrays: StepArrays, idle: Ints, room: Ints | None) -> None:
        num_forward = arrays.step.num_forward_ticks
        stops = np.unique(np.append(arrays.next_stop[:num_forward], num_forward))
        stops = stops[stops <= num_forward]
        least = [math.inf] * (len(stops) - 1)
        if room is not None and least:
            least = np.minimum.reduceat(room[: stops[-1]], stops[:-1]).tolist()
        self.room = dict(zip(stops[:-1].tolist(), least))
        """Of each stop, the least room until the next one."""
        places = np.searchsorted(stops, idle, side="right") - 1
        self._idle: dict[int, list[int]] = {}
        for position, place in enumerate(places.tolist()):
            if 0 <= place < len(stops) - 1:
                self._idle.setdefault(int(stops[place]), []).append(position)
        self.waiting: list[int] = []
        """Idle and not yet gone, first to land first."""
        self._late: list[int] = []
        self._bytes = 0
        self._room: float = 0

    def enter(self, tick: int, saved: list[int], nbytes: list[int]) -> None:
        """The step has reached the stop `tick`."""
        self._room = self.room[tick]
        idle = self._idle.get(tick, [])
        if not idle and not self._late:
            return
        new = [*self._late, *idle]
        self._bytes += sum(nbytes[position] for position in idle)
        self._late = [position for position in new if saved[position] >= tick]
        for position in new:
            if saved[position] < tick:
                heapq.heappush(self.waiting, position)

    def has_room(self) -> bool:
        """Whether memory has room until the next stop if nothing leaves at this one."""
        return self._bytes <= self._room

    def leave(self, nbytes: list[int]) -> None:
        """The item whose copy completes first is released."""
        self._bytes -= nbytes[heapq.heappop(self.waiting)]


def _by_item(arrays: StepArrays, swapped: Ints, ticks: Ints) -> tuple[int | None, ...]:
    chosen: list[int | None] = [None] * len(arrays.step.items)
    for index, tick in zip(swapped.tolist(), ticks.tolist()):
        chosen[index] = tick
    return tuple(chosen)
