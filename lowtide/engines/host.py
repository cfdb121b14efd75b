"""The host engine: no accelerator, main memory plays the device, and the next tier is disk.

What: the `Engine` protocol over two worker lanes (OUT writes storages to the disk tier, IN reads them back) and a pool
of fetch buffers. `Lane.COMPUTE` is the calling thread: what it did is done when it records, and `wait` on it blocks.
Why: the same runtime saves resident memory on a machine without an accelerator, and every ordering decision can be
tested on real concurrent copies.
Cost: about 30 us per copy beside the transfer itself (queue, wake-up, hand-over of the interpreter lock); the workers
move bytes with that lock released. Without spare cores the kernel's part of the copies comes out of compute.

Order: a lane has one thread, which does its work in the order in which it was enqueued. A copy that is cancelled ends
before its turn; an event still completes only when everything before it has. Barriers (`wait` on OUT or IN) are entries
of the queue, so cancelling a copy never loses one.

After a fork the child must make an engine of its own: its parent's worker threads do not exist there, and both would
write to one file. Allocating, copying or waiting for unfinished work raises RuntimeError; freeing does nothing.

Not covered: NUMA placement, io_uring, compression.
"""

from __future__ import annotations

import collections
import os
import statistics
import time
import weakref
from collections.abc import Iterable, Mapping
from typing import cast

import torch

from lowtide.core.plan import Plan
from lowtide.engines.base import Engine, Event, Lane, Slot
from lowtide.engines.staging import CopyLane, Mark
from lowtide.engines.tiers.disk import BLOCK_BYTES, DiskTier
from lowtide.engines.tiers.host_buffers import BufferPool, HeapTrimmer, configure_malloc, page_fault_seconds_per_byte
from lowtide.engines.tiers.host_limit import Cap
from lowtide.tensors.view import byte_view
from lowtide.timeline.step import Link

IDLE_BUFFER_BYTES = 16 << 20
"""Unused fetch buffers kept for reuse."""
POOLED_FROM_BYTES = 256 << 10
"""Smaller buffers come from torch: the C library recycles those well."""
_PROBE_COPY_BYTES = 16 << 20
_NUM_TOUCHES = 3


class HostEngine(Engine):
    """Swap to disk on a machine whose "device" is its main memory. See the module and `Engine`.

    `directory`, `disk_budget_bytes`, `cap`: see `DiskTier`; an unusable directory is a `ConfigError`.
    """

    name = "host"
    device_type = "cpu"
    device = torch.device("cpu")
    tiers: tuple[str, ...] = ("disk",)

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        disk_budget_bytes: int | None = None,
        *,
        cap: Cap | None = None,
    ) -> None:
        self.disk = DiskTier(directory, disk_budget_bytes, cap=cap)
        self.caps: Mapping[str, Cap] = {"disk": self.disk.cap}
        self.pool = BufferPool(IDLE_BUFFER_BYTES)
        self.trimmer = HeapTrimmer()
        self.leftovers: collections.deque = collections.deque()
        self._lanes = {lane: CopyLane(lane) for lane in (Lane.OUT, Lane.IN)}
        self._fault_seconds: list[float] = []
        """Seconds a byte that the first probes of the bandwidth saw, where freed memory goes back to the system."""
        self._process_id = os.getpid()
        self._finalizer = weakref.finalize(self, _begin_close, self._lanes.values())
        self._finalizer.atexit = False

    @classmethod
    def for_plan(cls, plan: Plan, caps: Mapping[str, Cap]) -> HostEngine:
        # Without it freed activations stay resident, and a swap would save nothing that anyone can see.
        configure_malloc()
        return cls(plan.disk_path, plan.disk_budget_bytes, cap=caps.get("disk"))

    def another(self, plan: Plan) -> HostEngine:
        return HostEngine.for_plan(plan, self.caps)

    def allocate(self, nbytes: int, tier: str) -> Slot:
        assert tier == "disk", tier
        self._check_process()
        return Slot(tier, nbytes, self.disk.allocate(nbytes))

    def allocate_visible(self, nbytes: int, tier: str) -> tuple[Slot, torch.Tensor]:
        slot = self.allocate(nbytes, tier)
        return slot, torch.frombuffer(self.disk.view(slot.place, nbytes), dtype=torch.uint8)

    def part_of(self, slot: Slot, start_bytes: int, nbytes: int) -> Slot:
        assert start_bytes % BLOCK_BYTES == 0
        return Slot(slot.tier, nbytes, slot.place + start_bytes)

    def in_place(self, slot: Slot) -> torch.UntypedStorage:
        self._check_process()
        self.trimmer.check(self.pool.mapped_bytes)
        view = self.disk.view(slot.place, slot.nbytes, ahead=True)
        return torch.frombuffer(view, dtype=torch.uint8).untyped_storage()

    def free(self, slot: Slot) -> None:
        if os.getpid() == self._process_id:
            self.disk.free(slot.place, slot.nbytes)

    def new_buffer(self, nbytes: int, device: torch.device) -> torch.UntypedStorage:
        assert device.type == "cpu", device
        if nbytes < POOLED_FROM_BYTES:
            return torch.UntypedStorage(nbytes)
        self.trimmer.check(self.pool.mapped_bytes)
        return self.pool.take(nbytes)

    def copy_out(self, source: torch.UntypedStorage, slot: Slot) -> None:
        assert source.nbytes() == slot.nbytes
        self._check_process()
        self.trimmer.check(self.pool.mapped_bytes)
        disk, place = self.disk, slot.place  # a queued copy does not keep the engine alive
        self._lanes[Lane.OUT].submit(lambda: disk.write(place, source.data_ptr(), source.nbytes()))

    def copy_in(self, slot: Slot, target: torch.UntypedStorage) -> None:
        assert target.nbytes() == slot.nbytes
        self._check_process()
        disk, place = self.disk, slot.place
        self._lanes[Lane.IN].submit(lambda: disk.read(place, target.data_ptr(), target.nbytes()))

    def record(self, lane: Lane) -> Mark:
        copy = None if lane is Lane.COMPUTE else self._lanes[lane].last_copy
        return Mark(lane, (), copy, copy)

    def wait(self, lane: Lane, event: Event) -> float:
        mark = cast(Mark, event)
        if mark.job is None or mark.is_complete():
            return 0.0
        self._check_process()
        if lane is not Lane.COMPUTE:
            self._lanes[lane].submit(mark.job.settled.wait, is_copy=False)
            return 0.0
        started = time.perf_counter()
        mark.job.settled.wait()
        return time.perf_counter() - started

    def query(self, event: Event) -> bool:
        return cast(Mark, event).is_complete()

    def failure(self, event: Event) -> BaseException | None:
        copy = cast(Mark, event).copy
        return None if copy is None else copy.error

    def cancel(self, event: Event) -> bool:
        mark = cast(Mark, event)
        return mark.copy is not None and os.getpid() == self._process_id and self._lanes[mark.lane].cancel(mark)

    def memory_in_use(self) -> Mapping[str, int]:
        return {"disk": self.disk.used_bytes}

    def mark_time(self) -> float:
        return time.perf_counter()

    def seconds_between(self, start: float, end: float) -> float:
        return end - start

    def forget_free_memory(self) -> bool:
        self.pool.trim()
        return self.trimmer.restart(self.pool.mapped_bytes)

    def probe_bandwidth(self, nbytes: int) -> Link:
        """Write and read about `nbytes` each way at once. Takes two such slots of disk for the moment."""
        size = min(nbytes, _PROBE_COPY_BYTES)
        count = max(nbytes // size, 1)
        buffers = [self.new_buffer(size, torch.device("cpu")) for _ in range(2)]
        for buffer in buffers:
            byte_view(buffer).fill_(1)  # fault the pages in before the clock runs
        slots: list[Slot] = []
        try:
            slots += [self.allocate(size, "disk") for _ in range(2 * count)]
            return self._probe(slots[:count], slots[count:], *buffers)
        finally:
            for lane in (Lane.OUT, Lane.IN):
                self.wait(Lane.COMPUTE, self.record(lane))
            for slot in slots:
                self.free(slot)

    def close(self) -> None:
        """See `Engine`. In a forked child it only lets go of the child's copies."""
        if not self._finalizer.detach():
            return
        self.pool.close()
        if os.getpid() == self._process_id:
            _begin_close(self._lanes.values())
            for lane in self._lanes.values():
                lane.join()
        self.disk.close()

    def _probe(
        self, outgoing: list[Slot], incoming: list[Slot], source: torch.UntypedStorage, target: torch.UntypedStorage
    ) -> Link:
        for slot in incoming:
            self.copy_out(source, slot)
        self.wait(Lane.COMPUTE, self.record(Lane.OUT))
        started = time.perf_counter()
        for out_slot, in_slot in zip(outgoing, incoming, strict=True):
            self.copy_out(source, out_slot)
            self.copy_in(in_slot, target)
        ends: dict[Lane, float] = {}
        last = {lane: self.record(lane) for lane in self._lanes}
        for lane, copies in self._lanes.items():
            copies.submit(lambda lane=lane: ends.setdefault(lane, time.perf_counter()))  # type: ignore[misc]
        for lane, event in last.items():
            self.wait(Lane.COMPUTE, self.record(lane))
            if (error := self.failure(event)) is not None:
                raise RuntimeError(f"bandwidth probe failed: {error}")
        rates = [sum(slot.nbytes for slot in outgoing) / (ends[lane] - started) for lane in (Lane.OUT, Lane.IN)]
        if len(self._fault_seconds) < _NUM_TOUCHES:
            self._fault_seconds.append(page_fault_seconds_per_byte() if self.trimmer.works else 0.0)
        return Link(
            out_bytes_per_second=rates[0],
            in_bytes_per_second=rates[1],
            page_fault_seconds_per_byte=statistics.median(self._fault_seconds),
        )

    def _check_process(self) -> None:
        if os.getpid() != self._process_id:
            raise RuntimeError(
                f"this swap engine belongs to process {self._process_id} and this is its fork {os.getpid()}: "
                "apply lowtide after forking, or start the child with the 'spawn' method"
            )


def _begin_close(lanes: Iterable[CopyLane]) -> None:
    """Drop what has not started and let the threads end; what runs finishes."""
    for lane in lanes:
        lane.begin_close()
