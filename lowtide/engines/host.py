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
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import cast

import torch

from lowtide.core.plan import Plan
from lowtide.engines.base import Bandwidth, Event, Lane, Slot
from lowtide.engines.tiers.disk import BLOCK_BYTES, DiskTier
from lowtide.engines.tiers.host_buffers import BufferPool, HeapTrimmer, configure_malloc, page_fault_seconds_per_byte
from lowtide.engines.tiers.host_limit import Cap
from lowtide.tensors.view import byte_view

IDLE_BUFFER_BYTES = 16 << 20
"""Unused fetch buffers kept for reuse."""
POOLED_FROM_BYTES = 256 << 10
"""Smaller buffers come from torch: the C library recycles those well."""
_PROBE_COPY_BYTES = 16 << 20
_NUM_TOUCHES = 3


class _Copy:
    """One transfer. Holds its storage from enqueueing until it has run or was dropped."""

    __slots__ = ("error", "finished_at", "nbytes", "offset", "sequence", "started", "storage")

    def __init__(self, sequence: int, storage: torch.UntypedStorage, offset: int) -> None:
        self.sequence = sequence
        self.storage: torch.UntypedStorage | None = storage
        self.nbytes = storage.nbytes()
        self.offset = offset
        self.started = False
        self.error: BaseException | None = None
        self.finished_at = 0.0


class _HostEvent:
    """Complete when `lane` has finished `sequence` copies, or when its own copy was cancelled."""

    __slots__ = ("__weakref__", "cancelled", "copy", "lane", "sequence")

    def __init__(self, lane: _Lane | None, sequence: int, copy: _Copy | None) -> None:
        self.lane = lane
        self.sequence = sequence
        self.copy = copy
        self.cancelled = False

    def complete(self) -> bool:
        return self.lane is None or self.cancelled or self.lane.finished_upto >= self.sequence


class _Lane:
    """A queue of copies and barriers, in order, and how far it has come. Guarded by the copier's lock."""

    def __init__(self, lock: threading.Lock) -> None:
        self.queue: collections.deque[_Copy | _HostEvent] = collections.deque()
        self.work = threading.Condition(lock)
        self.last: _Copy | None = None
        self.issued = 0
        self.finished_upto = 0
        self._finished_ahead: set[int] = set()
        self.is_served = False

    def next_copy(self) -> _Copy | None:
        """The copy that may start now; None when there is none or a barrier is still down."""
        while self.queue:
            head = self.queue[0]
            if isinstance(head, _Copy):
                head.started = True
                return cast(_Copy, self.queue.popleft())
            if not head.complete():
                return None
            self.queue.popleft()
        return None

    def drop_all(self) -> list[_Copy]:
        """Empty the queue: its copies count as complete, and failed."""
        dropped = [entry for entry in self.queue if isinstance(entry, _Copy)]
        self.queue.clear()
        for copy in dropped:
            copy.error = RuntimeError("the swap engine was closed before this copy started")
            self.finish(copy)
        return dropped

    def finish(self, copy: _Copy) -> None:
        self._finished_ahead.add(copy.sequence)
        while self.finished_upto + 1 in self._finished_ahead:
            self.finished_upto += 1
            self._finished_ahead.remove(self.finished_upto)


class _Copier:
    """The lanes, their threads and the disk. Apart from `HostEngine`, so that a forgotten engine can be collected."""

    def __init__(self, disk: DiskTier) -> None:
        self.disk = disk
        self.lock = threading.Lock()
        self.progress = threading.Condition(self.lock)
        self.lanes = {Lane.OUT: _Lane(self.lock), Lane.IN: _Lane(self.lock)}
        self.threads: list[threading.Thread] = []
        self.closing = False

    def enqueue(self, which: Lane, storage: torch.UntypedStorage, offset: int) -> None:
        lane = self.lanes[which]
        with self.lock:
            assert not self.closing, "copy on a closed engine"
            lane.issued += 1
            lane.last = _Copy(lane.issued, storage, offset)
            lane.queue.append(lane.last)
            if not lane.is_served:
                self._start_thread(which, lane)
            lane.work.notify()

    def record(self, which: Lane) -> _HostEvent:
        if which is Lane.COMPUTE:
            return _HostEvent(None, 0, None)
        lane = self.lanes[which]
        with self.lock:
            return _HostEvent(lane, lane.issued, lane.last)

    def add_barrier(self, which: Lane, event: _HostEvent) -> None:
        with self.lock:
            if not event.complete():
                self.lanes[which].queue.append(event)

    def wait(self, event: _HostEvent) -> None:
        with self.lock:
            while not event.complete():
                self.progress.wait()

    def cancel(self, event: _HostEvent) -> bool:
        copy, lane = event.copy, event.lane
        if copy is None or lane is None:
            return False
        with self.lock:
            if event.cancelled:
                return True
            if copy.started or copy not in lane.queue:
                return False
            lane.queue.remove(copy)
            event.cancelled = True
            lane.finish(copy)
            storage, copy.storage = copy.storage, None
            self._announce()
        del storage  # outside the lock: this may run finalizers
        return True

    def close(self, join: bool = True) -> None:
        """Drop what has not started, let the rest finish, end the threads, close the file."""
        with self.lock:
            self.closing = True
            dropped = [copy for lane in self.lanes.values() for copy in lane.drop_all()]
            self._announce()
        dropped.clear()
        for thread in self.threads if join else ():
            thread.join()
        if join:
            self.disk.close()

    def _start_thread(self, which: Lane, lane: _Lane) -> None:
        work = self.disk.write if which is Lane.OUT else self.disk.read
        thread = threading.Thread(target=self._serve, args=(lane, work), name=f"lowtide-{which.value}", daemon=True)
        lane.is_served = True
        self.threads.append(thread)
        thread.start()

    def _serve(self, lane: _Lane, work: Callable[[int, int, int], None]) -> None:
        while True:
            with self.lock:
                copy = lane.next_copy()
                while copy is None:
                    if self.closing:
                        return
                    lane.work.wait()
                    copy = lane.next_copy()
            try:
                assert copy.storage is not None
                work(copy.offset, copy.storage.data_ptr(), copy.nbytes)
            except Exception as error:  # reported by failure(), never lost with the thread
                copy.error = error.with_traceback(None)
            copy.finished_at = time.perf_counter()
            # Before the copy counts as complete: until then the runtime holds the storage too, so that its last
            # reference (and any finalizer) goes in a thread of the runtime's choice.
            copy.storage = None
            with self.lock:
                lane.finish(copy)
                self._announce()
            del copy

    def _announce(self) -> None:
        """Wake the threads that wait for a copy: one has just completed. Under the lock."""
        self.progress.notify_all()
        for lane in self.lanes.values():
            if lane.queue or self.closing:
                lane.work.notify_all()


class HostEngine:
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
        self._copier = _Copier(self.disk)
        self._touched: list[float] = []
        """Seconds a byte that the first probes of the bandwidth saw, where freed memory goes back to the system."""
        self._process_id = os.getpid()
        self._finalizer = weakref.finalize(self, self._copier.close, False)
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

    def compute_stream(self) -> None:
        return None

    def copy_out(self, source: torch.UntypedStorage, slot: Slot) -> None:
        assert source.nbytes() == slot.nbytes
        self._check_process()
        self.trimmer.check(self.pool.mapped_bytes)
        self._copier.enqueue(Lane.OUT, source, slot.place)

    def copy_in(self, slot: Slot, target: torch.UntypedStorage) -> None:
        assert target.nbytes() == slot.nbytes
        self._check_process()
        self._copier.enqueue(Lane.IN, target, slot.place)

    def record(self, lane: Lane) -> Event:
        return self._copier.record(lane)

    def wait(self, lane: Lane, event: Event) -> float:
        event = cast(_HostEvent, event)
        if event.complete():
            return 0.0
        self._check_process()
        if lane is not Lane.COMPUTE:
            self._copier.add_barrier(lane, event)
            return 0.0
        started = time.perf_counter()
        self._copier.wait(event)
        return time.perf_counter() - started

    def query(self, event: Event) -> bool:
        return cast(_HostEvent, event).complete()

    def failure(self, event: Event) -> BaseException | None:
        copy = cast(_HostEvent, event).copy
        return None if copy is None else copy.error

    def cancel(self, event: Event) -> bool:
        return os.getpid() == self._process_id and self._copier.cancel(cast(_HostEvent, event))

    def memory_in_use(self) -> Mapping[str, int]:
        return {"disk": self.disk.used_bytes}

    def device_bytes(self) -> int | None:
        return None

    def device_peak_bytes(self) -> int | None:
        """None: there is no allocator to ask. The runtime's ledger and the kernel's VmHWM say it."""
        return None

    def reset_device_peak(self) -> None:
        """Nothing to reset."""

    def stall_seconds(self) -> float:
        """0.0: `wait` blocks the caller and returns the seconds."""
        return 0.0

    def mark_time(self) -> float:
        return time.perf_counter()

    def seconds_between(self, start: float, end: float) -> float:
        return end - start

    def forget_free_memory(self) -> bool:
        self.pool.trim()
        return self.trimmer.restart(self.pool.mapped_bytes)

    def is_capturing(self) -> bool:
        return False

    def probe_bandwidth(self, nbytes: int) -> Bandwidth:
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
            self._copier.close()
        else:
            self.disk.close()

    def _probe(
        self, outgoing: list[Slot], incoming: list[Slot], source: torch.UntypedStorage, target: torch.UntypedStorage
    ) -> Bandwidth:
        for slot in incoming:
            self.copy_out(source, slot)
        self.wait(Lane.COMPUTE, self.record(Lane.OUT))
        started = time.perf_counter()
        for out_slot, in_slot in zip(outgoing, incoming, strict=True):
            self.copy_out(source, out_slot)
            self.copy_in(in_slot, target)
        rates = []
        for lane in (Lane.OUT, Lane.IN):
            event = cast(_HostEvent, self.record(lane))
            self.wait(Lane.COMPUTE, event)
            if event.copy is None or event.copy.error is not None:
                raise RuntimeError(f"bandwidth probe failed: {event.copy and event.copy.error}")
            rates.append(sum(slot.nbytes for slot in outgoing) / (event.copy.finished_at - started))
        if len(self._touched) < _NUM_TOUCHES:
            self._touched.append(page_fault_seconds_per_byte() if self.trimmer.works else 0.0)
        return Bandwidth(
            out_bytes_per_second=rates[0],
            in_bytes_per_second=rates[1],
            page_fault_seconds_per_byte=statistics.median(self._touched),
        )

    def _check_process(self) -> None:
        if os.getpid() != self._process_id:
            raise RuntimeError(
                f"this swap engine belongs to process {self._process_id} and this is its fork {os.getpid()}: "
                "apply lowtide after forking, or start the child with the 'spawn' method"
            )
