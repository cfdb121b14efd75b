"""How many bytes are on the device in each tick of a step, for given fates.

What: for each item its first need, its readers and its end (`Lifetimes`), and the memory curve that follows from these.
An item's presence, in half-open ticks:
- keep: [born, max(dies, release)); a retained input that no recipe reads: [born, dies), whatever its fate;
- swap: [born, max(dies, evict_by)) and [prefetch_at, release), where the two may meet;
- recompute: [born, dies) and [first need, release); where it is made from its smaller form, the first lasts until that
  form is there. A smaller form whose own fate is recompute is never there.
A recipe's inputs are needed when its result is first needed; a recomputed item is made once and held until its last
reader, recipes among them, has read it. The transient bytes of the recipes that run in one tick do not coexist, so the
largest counts; so do those of storing items smaller, in the ticks after which they could be sent. What is made again
has a fingerprint on the device, from when it was dropped until backward is over.

Why difference arrays: the curve of 5,000 items over 20,000 ticks takes a millisecond, and a solver asks for hundreds.

Not covered: when copies land (events.py); that an item recomputed while its first copy still lives takes no second
storage (it is counted twice, the safe side).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtide.core.fate import Fate
from lowtide.timeline.step import Item, Step

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ticks = Sequence[int | None]
"""A tick for each item, or None where there is none."""
_COLUMNS = ("nbytes", "born", "saved", "dies", "recipe_seconds", "recipe_bytes", "check_bytes")
"""Fields of items that `StepArrays` has by the same names."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StepArrays:
    """A step as arrays, prepared once. Everything here that takes a `Step` takes its `StepArrays` too, and is
    faster."""

    step: Step
    seconds: Floats
    base: Ints
    nbytes: Ints
    born: Ints
    saved: Ints
    dies: Ints
    first_read: Ints
    """First backward tick that reads it; the number of ticks if none does."""
    release: Ints
    recipe_seconds: Floats
    recipe_bytes: Ints
    visit_bytes: Ints
    """Of visitors that backward reads."""
    leave_bytes: Ints
    fetch_from: Ints
    check_bytes: Ints

    @classmethod
    def of(cls, step: Step | StepArrays) -> StepArrays:
        """The frame of a step."""
        if isinstance(step, StepArrays):
            return step
        num_ticks, items = len(step.ticks), step.items
        columns: dict[str, Any] = {
            name: np.array([getattr(item, name) for item in items], float if name.endswith("_seconds") else np.int64)
            for name in _COLUMNS
        }
        arrays = cls(
            step=step,
            seconds=np.array([tick.seconds for tick in step.ticks], float),
            base=np.array([tick.base_bytes for tick in step.ticks], np.int64),
            first_read=np.array([item.reads[0] if item.reads else num_ticks for item in items], np.int64),
            visit_bytes=np.array([item.visit.nbytes for item in items], np.int64),
            leave_bytes=np.array([item.visit.leave_bytes for item in items], np.int64),
            fetch_from=np.array([item.visit.fetch_from for item in items], np.int64),
            release=np.array([max(item.release, item.reads[-1] + 1 if item.reads else 0) for item in items], np.int64),
            **columns,
        )
        arrays.visit_bytes[arrays.for_forward] = 0
        # Nothing in backward reads them, so that they are there for nobody but the clock.
        arrays.first_read[arrays.for_forward] = num_ticks
        assert num_ticks > 0 and 0 <= step.num_forward_ticks <= num_ticks
        assert np.all((arrays.born >= 0) & (arrays.born <= arrays.saved) & (arrays.saved < step.num_forward_ticks))
        assert np.all((arrays.dies >= arrays.born) & (arrays.dies <= num_ticks) & (arrays.release <= num_ticks))
        assert np.all(arrays.first_read >= step.num_forward_ticks)
        return arrays

    @property
    def num_ticks(self) -> int:
        """Forward and backward."""
        return len(self.seconds)

    @functools.cached_property
    def for_forward(self) -> Ints:
        """Indices of the visitors that forward reads, in the order in which they are fetched."""
        items, num_forward = self.step.items, self.step.num_forward_ticks
        early = [index for index, item in enumerate(items) if item.is_for_forward(num_forward)]
        early.sort(key=lambda index: (items[index].visit.fetch_from, items[index].reads[0]))
        return np.array(early, np.int64)

    @functools.cached_property
    def dependents_first(self) -> tuple[int, ...]:
        """Items that have inputs, every one before its inputs."""
        return _dependents_first(self.step.items)

    @functools.cached_property
    def _stops(self) -> Ints:
        """Ticks before which copies can be waited for or started, ascending."""
        return np.array(self.step.stops or range(self.num_ticks), np.int64)

    @functools.cached_property
    def next_stop(self) -> Ints:
        """For each tick the first stop that is not before it; the number of ticks if there is none."""
        stops = self._stops
        return np.append(stops, self.num_ticks)[np.searchsorted(stops, np.arange(self.num_ticks))]

    @functools.cached_property
    def last_stop(self) -> Ints:
        """For each tick the last stop that is not after it; -1 if there is none."""
        stops = self._stops
        return np.concatenate(([-1], stops))[np.searchsorted(stops, np.arange(self.num_ticks), side="right")]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lifetimes:
    """What a choice of fates means for each item."""

    is_swapped: Bools
    """It is copied out and back."""
    is_made: Bools
    """Whether its fate is recompute."""
    is_held: Bools
    """It stays from forward to backward."""
    need: Ints
    """First tick in backward at which it must be there; the number of ticks if it need not."""
    release: Ints
    """First tick in which backward no longer needs it."""
    dies: Ints
    """First tick in which only autograd still holds it, or its smaller form."""
    made_seconds: Floats
    """What making it again takes, if it is made."""
    made_bytes: Ints
    """Bytes beyond all items while it is made again, if it is made."""
    forms: Ints
    """Smaller forms that are there: indices of their items."""

    @classmethod
    def of(cls, step: Step | StepArrays, fates: Sequence[Fate]) -> Lifetimes:
        """Follow needs from readers to the inputs of recipes, and to smaller forms."""
        arrays = StepArrays.of(step)
        items = arrays.step.items
        assert len(fates) == len(items)
        for item, fate in zip(items, fates):
            assert fate in item.fates, f"{item.name} cannot be {fate}"
        never, swap, recompute = arrays.num_ticks, Fate.SWAP, Fate.RECOMPUTE
        need, release = arrays.first_read.tolist(), arrays.release.tolist()
        decoded: list[int] = []
        for index in arrays.dependents_first:
            tick, form = need[index], items[index].form
            if fates[index] is not recompute or tick == never:
                continue
            sources = items[index].inputs
            if form is not None and fates[form] is not recompute:
                sources = (form,)
                decoded.append(index)
            for source in sources:
                # Calls of `min` and `max` would be a third of this function's time.
                need[source] = tick if tick < need[source] else need[source]
                release[source] = tick + 1 if tick >= release[source] else release[source]
        need_array = np.array(need, np.int64)
        is_needed = need_array < never
        is_swapped = np.array([fate is swap for fate in fates], bool) & is_needed
        is_made = np.array([fate is recompute for fate in fates], bool) & is_needed
        forms = np.array([items[index].form for index in decoded], np.int64)
        dies, seconds, made_bytes = arrays.dies, arrays.recipe_seconds, arrays.recipe_bytes
        if decoded:
            dies, seconds, made_bytes = dies.copy(), seconds.copy(), made_bytes.copy()
            # It stays until its form was made of it.
            dies[decoded] = np.maximum(dies[decoded], arrays.born[forms] + 1)
            seconds[decoded], made_bytes[decoded] = arrays.recipe_seconds[forms], arrays.recipe_bytes[forms]
        return cls(
            is_swapped=is_swapped,
            is_made=is_made,
            is_held=is_needed & ~is_swapped & ~is_made,
            need=need_array,
            release=np.array(release, np.int64),
            dies=dies,
            made_seconds=seconds,
            made_bytes=made_bytes,
            forms=forms,
        )


def plain_curve(step: Step | StepArrays) -> Ints:
    """Bytes on the device in each tick when everything is kept, also items that may not be kept, and no retained input
    is."""
    arrays = StepArrays.of(step)
    end = np.where(arrays.first_read < arrays.num_ticks, np.maximum(arrays.dies, arrays.release), arrays.dies)
    return arrays.base + presence(arrays, arrays.born, end, arrays.nbytes)


def curve(
    step: Step | StepArrays, fates: Sequence[Fate], *, evict_by: Ticks | None = None, prefetch_at: Ticks | None = None
) -> Ints:
    """Bytes on the device in each tick. A swapped item is there until its `evict_by` tick and from `prefetch_at` on.

    Without `evict_by` it is gone as early as it can be, without `prefetch_at` it comes back at its first need: no
    timing of copies gives less memory.
    """
    arrays = StepArrays.of(step)
    lifetimes = Lifetimes.of(arrays, fates)
    total = floor_curve(arrays, lifetimes)
    swapped = np.flatnonzero(lifetimes.is_swapped)
    num_bytes = arrays.nbytes[swapped]
    if evict_by is not None:
        total += presence(arrays, earliest_evict(arrays)[swapped], swapped_ticks(evict_by, swapped), num_bytes)
    if prefetch_at is not None:
        dies = arrays.dies[swapped]
        start = np.maximum(swapped_ticks(prefetch_at, swapped), dies)
        total += presence(arrays, start, np.maximum(lifetimes.need[swapped], dies), num_bytes)
    return total


def peak(curve: Ints) -> tuple[int, int]:
    """The most bytes of a curve, and the first tick that has them."""
    tick = int(np.argmax(curve))
    return int(curve[tick]), tick


def earliest_evict(arrays: StepArrays) -> Ints:
    """For each item: the first forward tick in which a swapped item may be off the device."""
    return np.maximum(arrays.dies, arrays.saved + 1)


def floor_curve(arrays: StepArrays, lifetimes: Lifetimes) -> Ints:
    """The curve when every copy lands at once and every fetch takes no time."""
    held, made, swapped = map(np.flatnonzero, (lifetimes.is_held, lifetimes.is_made, lifetimes.is_swapped))
    need, release, nbytes = lifetimes.need, lifetimes.release, arrays.nbytes
    end = lifetimes.dies.copy()
    end[held] = np.maximum(end[held], release[held])
    back = np.maximum(need[swapped], end[swapped])
    end[swapped] = np.maximum(end[swapped], arrays.saved[swapped] + 1)
    # What is there from its birth, what is made again, what comes back, and the fingerprints of what is made.
    total = arrays.base + presence(
        arrays,
        np.concatenate((arrays.born, need[made], back, arrays.born[made])),
        np.concatenate((end, release[made], release[swapped], np.full(len(made), arrays.step.check_until))),
        np.concatenate((nbytes, nbytes[made], nbytes[swapped], arrays.check_bytes[made])),
    )
    if not len(made):
        return total
    transient = np.zeros(arrays.num_ticks, np.int64)
    np.maximum.at(transient, need[made], lifetimes.made_bytes[made])
    np.maximum.at(transient, arrays.born[lifetimes.forms], arrays.recipe_bytes[lifetimes.forms])
    return total + transient


def presence(arrays: StepArrays, start: Ints, end: Ints, nbytes: Ints) -> Ints:
    """Bytes in each tick of things that exist in ticks `start .. end-1`; of those with `end <= start` none."""
    change = np.zeros(arrays.num_ticks + 1, np.int64)
    np.add.at(change, start, nbytes)
    np.subtract.at(change, np.maximum(start, end), nbytes)
    return np.cumsum(change)[:-1]


def swapped_ticks(ticks: Ticks, swapped: Ints) -> Ints:
    """The ticks of these items. Each of them must have one."""
    chosen = [ticks[index] for index in swapped.tolist()]
    assert all(tick is not None for tick in chosen), "every swapped item leaves and is fetched at some tick"
    return np.array(chosen, np.int64)


def _dependents_first(items: tuple[Item, ...]) -> tuple[int, ...]:
    """Depth first over sources; reversed, every item comes before what it is made from."""
    inputs_first: list[int] = []
    is_seen = [False] * len(items)
    for root, item in enumerate(items):
        if is_seen[root] or not item.sources:
            continue
        is_seen[root] = True
        stack = [(root, iter(item.sources))]
        while stack:
            index, rest = stack[-1]
            source = next((source for source in rest if not is_seen[source]), None)
            if source is None:
                stack.pop()
                if items[index].sources:
                    inputs_first.append(index)
                continue
            is_seen[source] = True
            stack.append((source, iter(items[source].sources)))
    return tuple(reversed(inputs_first))
