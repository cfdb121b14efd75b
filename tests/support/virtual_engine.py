"""The adversarial engine: a deterministic device on which every forgotten wait becomes a wrong number.

What: main memory plays the device and plain byte buffers play the slower tiers. Copies are queued on their lane and
run as *late* as the ordering calls allow: at the wait that forces them, or when a seeded coin lets a query see them
done. Whatever real hardware may do to a careless program happens here on purpose:

- a buffer that is being filled, a slot that is reserved or freed, and the result of a racing copy hold poison
  (all bits set: NaN in every float format, -1 in every integer);
- the engine holds sources and targets only weakly, as a stream does: a source that was dropped before its copy ran
  yields poison, a target that was dropped is reported;
- a copy out that did not wait for the compute lane, or a copy in whose buffer was not yet free on the compute lane,
  reads or writes poison.

Every breach is also listed in `violations`. The correct runtime never causes one, whatever the seed.

The order of copies is proven too, whatever the bytes happened to be: each lane knows up to which entry of each lane it
is ordered (a vector clock, moved by waits, by queries that say yes, and by what the host knew when it enqueued), and
each byte range of a slot remembers the copies that used it. A copy that is not ordered after an earlier one of the same
bytes, where one of the two writes, is a violation, and so is a slot that is freed under a copy.

Cost: none is modelled here; this engine is about order, not time. Not covered: real stream timing, the pinned
allocator's reuse, driver behaviour.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from lowtide.core.plan import Plan
from lowtide.engines.base import Lane, Slot
from lowtide.engines.tiers.host_limit import Cap
from lowtide.errors import TierFull
from lowtide.tensors.private import disable_current_modes, storage_at, storage_key
from lowtide.tensors.view import byte_view
from lowtide.timeline.step import Link

_POISON = 0xFF
_COLUMN = {Lane.OUT: 0, Lane.IN: 1}


@dataclass(frozen=True, slots=True)
class VirtualEvent:
    """Complete once `lane` has run its first `index` entries. `tick` is the compute time that it vouches for."""

    lane: Lane
    index: int
    tick: int
    known: tuple[int, int] = (0, 0)
    """The entries of `Lane.OUT` and `Lane.IN` that are done when it is complete."""


@dataclass(slots=True)
class _Entry:
    """One queued piece of work: a wait for an event, or a copy."""

    wait_for: VirtualEvent | None = None
    slot: Slot | None = None
    storage: StorageWeakRef | None = None
    is_out: bool = False
    is_racing: bool = False


@dataclass(frozen=True, slots=True)
class _Use:
    """A copy that uses the bytes `start .. end - 1` of a slot: the entry `index` of a lane."""

    start: int
    end: int
    lane: Lane
    index: int
    is_write: bool


class _LaneState:
    __slots__ = ("compute_tick", "known", "queue", "total")

    def __init__(self) -> None:
        self.known = (0, 0)
        # With the number of each entry. What is first is not done; a Ctrl-C at any moment loses none, as on a device.
        self.queue: deque[tuple[int, _Entry]] = deque()
        self.total = 0
        # The newest compute time that work enqueued from now on is ordered after.
        self.compute_tick = -1


class VirtualEngine:
    """Engine protocol on main memory; deterministic for a seed. `host_bytes` / `disk_bytes` cap the two tiers,
    or `caps` that others share."""

    device_type = "cpu"
    device = torch.device("cpu")
    tiers: tuple[str, ...] = ("host", "disk")

    def __init__(
        self,
        seed: int = 0,
        *,
        host_bytes: int | None = None,
        disk_bytes: int | None = None,
        caps: Mapping[str, Cap] | None = None,
    ) -> None:
        self.name = f"virtual:{seed}"
        self.violations: list[str] = []
        self._random = random.Random(seed)
        # Some seeds never let a query succeed (copies run only when forced), some let most succeed.
        self._chance = self._random.choice((0.0, 0.1, 0.5, 0.9))
        self._lanes = {Lane.OUT: _LaneState(), Lane.IN: _LaneState()}
        self._tick = 0
        self.caps: Mapping[str, Cap] = caps or {"host": Cap(host_bytes), "disk": Cap(disk_bytes)}
        self._in_use = {"host": 0, "disk": 0}
        self._births: dict[int, tuple[StorageWeakRef, int]] = {}
        self._num_slots = 0
        self._seen = (0, 0)
        """The entries of `Lane.OUT` and `Lane.IN` that the host, and with it the compute lane, knows to be done."""
        self._uses: dict[int, list[_Use]] = {}
        """By the storage of a slot."""
        self.leftovers: deque = deque()

    def another(self, plan: Plan) -> VirtualEngine:
        seed = int(self.name.partition(":")[2])
        return VirtualEngine(seed, host_bytes=plan.host_budget_bytes, disk_bytes=plan.disk_budget_bytes, caps=self.caps)

    # -- memory ----------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int, tier: str) -> Slot:
        cap = self.caps[tier]
        if not cap.take(nbytes):
            raise TierFull(f"{tier}: {cap.taken_bytes} of {cap.most_bytes} bytes in use, {nbytes} more wanted")
        with disable_current_modes():
            slot = Slot(tier, nbytes, torch.full((nbytes,), _POISON, dtype=torch.uint8))
        self._in_use[tier] += nbytes
        self._num_slots += 1
        return slot

    def allocate_visible(self, nbytes: int, tier: str) -> tuple[Slot, torch.Tensor]:
        slot = self.allocate(nbytes, tier)
        return slot, slot.place

    def part_of(self, slot: Slot, start_bytes: int, nbytes: int) -> Slot:
        assert start_bytes % 4096 == 0
        return Slot(slot.tier, nbytes, slot.place[start_bytes : start_bytes + nbytes])

    def in_place(self, slot: Slot) -> torch.UntypedStorage:
        start = int(slot.place.storage_offset())
        return slot.place.untyped_storage()[start : start + slot.nbytes]

    def free(self, slot: Slot) -> None:
        assert slot.place is not None, "slot freed twice"
        for use in self._uses.pop(storage_key(slot.place.untyped_storage()), ()):
            if self._seen[_COLUMN[use.lane]] < use.index:
                self.violations.append(f"free: not ordered after the copy {use.lane.value} of the slot")
        with disable_current_modes():
            slot.place.fill_(_POISON)  # for whoever still looks at it
        self._in_use[slot.tier] -= slot.nbytes
        self.caps[slot.tier].give(slot.nbytes)
        self._num_slots -= 1
        slot.place = None

    def new_buffer(self, nbytes: int, device: torch.device) -> torch.UntypedStorage:
        with disable_current_modes():
            buffer = torch.full((nbytes,), _POISON, dtype=torch.uint8, device=device).untyped_storage()
        self._tick += 1
        self._births = {key: birth for key, birth in self._births.items() if not birth[0].expired()}
        self._births[storage_key(buffer)] = (StorageWeakRef(buffer), self._tick)
        return buffer

    def memory_in_use(self) -> Mapping[str, int]:
        return dict(self._in_use)

    @property
    def num_slots(self) -> int:
        """Slots that are reserved now: zero after every graph is gone, or something leaks."""
        return self._num_slots

    def device_bytes(self) -> int | None:
        return None

    def device_peak_bytes(self) -> int | None:
        return None

    def reset_device_peak(self) -> None:
        return None

    # -- lanes -----------------------------------------------------------------------------------------------------

    def compute_stream(self) -> None:
        return None

    def copy_out(self, source: torch.UntypedStorage, slot: Slot) -> None:
        assert source.nbytes() == slot.nbytes
        lane = self._lanes[Lane.OUT]
        # The compute lane moved on to produce `source` after the last compute event that this lane waited for.
        is_racing = lane.compute_tick < self._tick
        self._tick += 1
        self._enqueue(lane, _Entry(slot=slot, storage=StorageWeakRef(source), is_out=True, is_racing=is_racing))
        self._note_use(Lane.OUT, slot)

    def copy_in(self, slot: Slot, target: torch.UntypedStorage) -> None:
        assert target.nbytes() == slot.nbytes
        lane = self._lanes[Lane.IN]
        birth = self._births.pop(storage_key(target), None)
        is_racing = birth is not None and lane.compute_tick < birth[1]
        self._enqueue(lane, _Entry(slot=slot, storage=StorageWeakRef(target), is_racing=is_racing))
        self._note_use(Lane.IN, slot)

    def record(self, lane: Lane) -> VirtualEvent:
        if lane is Lane.COMPUTE:
            return VirtualEvent(lane, 0, self._tick, self._seen)
        state = self._lanes[lane]
        known = list(_later(state.known, self._seen))
        known[_COLUMN[lane]] = state.total
        return VirtualEvent(lane, state.total, state.compute_tick, (known[0], known[1]))

    def wait(self, lane: Lane, event: VirtualEvent) -> float:
        if lane is Lane.COMPUTE:
            self._force(event)
            self._seen = _later(self._seen, event.known)
            return 0.0
        state = self._lanes[lane]
        state.known = _later(state.known, event.known)
        state.compute_tick = max(state.compute_tick, event.tick)
        self._enqueue(state, _Entry(wait_for=event))
        return 0.0

    def query(self, event: VirtualEvent) -> bool:
        if not self._is_done(event):
            if self._random.random() >= self._chance:
                return False
            self._force(event)
        self._seen = _later(self._seen, event.known)
        return True

    def failure(self, event: VirtualEvent) -> BaseException | None:
        return None

    def cancel(self, event: VirtualEvent) -> bool:
        return False

    def stall_seconds(self) -> float:
        return 0.0

    def mark_time(self) -> None:
        return None  # nothing here takes as long as anywhere else

    def seconds_between(self, start: object, end: object) -> float | None:
        raise AssertionError("there is no clock")

    def forget_free_memory(self) -> bool:
        return False

    def is_capturing(self) -> bool:
        return False

    def probe_bandwidth(self, nbytes: int) -> Link:
        return Link(out_bytes_per_second=float("inf"), in_bytes_per_second=float("inf"))

    def close(self) -> None:
        for lane in self._lanes:
            self._force(self.record(lane))

    # -- the adversary ---------------------------------------------------------------------------------------------

    def _enqueue(self, state: _LaneState, entry: _Entry) -> None:
        state.queue.append((state.total + 1, entry))
        state.total += 1
        state.known = _later(state.known, self._seen)

    def _note_use(self, lane: Lane, slot: Slot) -> None:
        """The last entry of `lane` is a copy that uses `slot`: is it ordered after those before it?"""
        state, place, is_write = self._lanes[lane], slot.place, lane is Lane.OUT
        start = place.storage_offset()
        use = _Use(start, start + place.numel(), lane, state.total, is_write)
        uses = self._uses.setdefault(storage_key(place.untyped_storage()), [])
        for other in uses:
            overlaps = other.start < use.end and use.start < other.end
            is_behind = other.lane is lane or state.known[_COLUMN[other.lane]] >= other.index
            if overlaps and (is_write or other.is_write) and not is_behind:
                self.violations.append(f"copy {lane.value}: not ordered after the copy {other.lane.value} of the slot")
        uses.append(use)

    def _is_done(self, event: VirtualEvent) -> bool:
        if event.lane is Lane.COMPUTE:
            return True
        queue = self._lanes[event.lane].queue
        return not queue or queue[0][0] > event.index

    def _force(self, event: VirtualEvent) -> None:
        while not self._is_done(event):
            queue = self._lanes[event.lane].queue
            entry = queue[0][1]
            if entry.wait_for is not None:
                self._force(entry.wait_for)
            else:
                # A copy engine does its work beside the program: no mode of the program's sees it.
                with disable_current_modes():
                    self._copy(entry)
            queue.popleft()

    def _copy(self, entry: _Entry) -> None:
        assert entry.slot is not None and entry.storage is not None
        direction = "out" if entry.is_out else "in"
        place = entry.slot.place
        pointer = storage_at(entry.storage.cdata)
        if place is None:
            self.violations.append(f"copy {direction}: the slot was freed before the copy ran")
            return
        if pointer is None:
            self.violations.append(f"copy {direction}: the storage was dropped before the copy ran")
            if entry.is_out:
                place.fill_(_POISON)
            return
        # Nobody who counts operators or live bytes around the step shall see what happens on the other side.
        with disable_current_modes():
            device_bytes = byte_view(pointer)
            if entry.is_racing:
                self.violations.append(f"copy {direction}: not ordered after the compute lane")
                (place if entry.is_out else device_bytes).fill_(_POISON)
            elif entry.is_out:
                place.copy_(device_bytes)
            else:
                device_bytes.copy_(place)


@dataclass(frozen=True, slots=True)
class virtual:  # noqa: N801 it reads as the function that it is
    """An `engine=` that makes a virtual engine of this seed for each plan: `virtual(3)`. Test ids have 'virtual:3'."""

    seed: int

    @property
    def __name__(self) -> str:
        return f"virtual:{self.seed}"

    def __call__(self, plan: Plan) -> VirtualEngine:
        return VirtualEngine(self.seed, host_bytes=plan.host_budget_bytes, disk_bytes=plan.disk_budget_bytes)


def _later(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    """Where both have got to."""
    return max(a[0], b[0]), max(a[1], b[1])
