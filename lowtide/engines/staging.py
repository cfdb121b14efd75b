"""Copies that need the host: lane workers, and pinned staging between a device and the disk.

What: a `CopyLane` has a thread that carries out its jobs in order; a `Job` is one copy (or wait) that cannot be put on
a stream right away, and a `Mark` a point of a lane that others wait for. `Staging` is a small ring of pinned chunks
through which bytes travel between the device and the disk: on the way out the link runs ahead of the disk by the length
of the ring, on the way in the disk runs ahead of the link.
Why: no stream can call `pwrite`, and the host engine has no streams. The job's `tail` event, recorded on the lane's
stream once the host has done its part, turns the job back into something that a stream can wait for.
Cost: two threads, started with the first job, and `2 * NUM_STAGES * STAGE_BYTES` of pinned memory, taken from the
host arena so that the cap holds. Each chunk passes through host memory twice.

A job is *settled* when the host has nothing more to do for it. Then `tail` (if the device still works) is complete as
soon as the device has done its part too. A job settles exactly once: after success, failure, or cancellation.

Not covered: direct transfer from the device to NVMe; several files or disks (see disk.py).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from lowtide.engines.base import Lane
from lowtide.engines.device_ops import TorchDevice
from lowtide.engines.tiers.disk import DiskTier
from lowtide.engines.tiers.host_limit import stay_on

STAGE_BYTES = 8 * 2**20
"""One chunk on its way to or from the disk: large enough for full disk bandwidth. To be measured on a device."""
NUM_STAGES = 4
"""Chunks per direction: one at the disk, one on the link, and slack for both."""


@dataclass(slots=True, eq=False)
class Job:
    """Something for a lane's thread to do: `work` runs there."""

    work: Callable[[], object] | None
    settled: threading.Event = field(default_factory=threading.Event)
    tail: torch.Event | None = None
    error: BaseException | None = None
    is_started: bool = False


@dataclass(slots=True, eq=False)
class Mark:
    """An engine's event: a point in a lane, either on its stream already (`raw`) or behind a job of its thread."""

    lane: Lane
    raw: tuple[torch.Event, ...]
    job: Job | None
    copy: Job | None
    """The last copy before this point, where that was a job."""
    is_cancelled: bool = False

    def device_events(self) -> tuple[torch.Event, ...]:
        """What a stream can wait for; nothing when the job has not settled, or there is no working device."""
        if self.job is None:
            return self.raw
        return (self.job.tail,) if self.job.settled.is_set() and self.job.tail is not None else ()

    def is_complete(self) -> bool:
        """Never blocks."""
        if self.is_cancelled:
            return True
        if self.job is not None and not self.job.settled.is_set():
            return False
        return all(event.query() for event in self.device_events())


class CopyLane:
    """A lane's thread, which carries out jobs first come first served, and, with `ops`, its stream."""

    def __init__(self, lane: Lane, ops: TorchDevice | None = None) -> None:
        self.lane = lane
        self.stream: Any = None if ops is None else ops.new_stream()
        self.last_copy: Job | None = None
        self._ops = ops
        self._last_job: Job | None = None
        self._jobs: deque[Job] = deque()
        self._changed = threading.Condition()
        self._is_closing = False
        self._thread: threading.Thread | None = None

    def open_job(self) -> Job | None:
        """The last job, while the host still has something to do for it."""
        if self._last_job is not None and self._last_job.settled.is_set():
            self._last_job = None
        return self._last_job

    def submit(self, work: Callable[[], object], *, is_copy: bool = True) -> None:
        """Queue a job. The thread starts with the first one."""
        job = Job(work)
        with self._changed:
            assert not self._is_closing, "copy on a closed engine"
            self._last_job = job
            if is_copy:
                self.last_copy = job
            self._jobs.append(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"lowtide-{self.lane.value}", daemon=True)
                self._thread.start()
            self._changed.notify()

    def cancel(self, mark: Mark) -> bool:
        """Keep the last copy before `mark` from starting. False if it has started. It settles when its turn comes."""
        job = mark.copy
        if job is None or mark.is_cancelled:
            return mark.is_cancelled
        with self._changed:
            if job.is_started:
                return False
            work, job.work = job.work, None  # lets go of the storages at once
            mark.is_cancelled = True
        del work  # outside the lock: this may run finalizers
        return True

    def begin_close(self) -> None:
        """Cancel what has not started; let the thread end. Jobs may wait for the other lane: close both, then join."""
        dropped = []
        with self._changed:
            self._is_closing = True
            for job in self._jobs:
                if job.work is not None:
                    job.error = RuntimeError("the swap engine was closed before this copy started")
                    dropped.append(job.work)
                    job.work = None
            self._changed.notify()

    def join(self) -> None:
        """Wait for the thread to end."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        if self._ops is not None:
            stay_on(self._ops.local_cpus)
            self._ops.enter_thread()
        while True:
            with self._changed:
                while not self._jobs and not self._is_closing:
                    self._changed.wait()
                if not self._jobs:
                    return
                job = self._jobs.popleft()
                job.is_started = True
            self._carry_out(job)
            del job

    def _carry_out(self, job: Job) -> None:
        try:
            if job.work is not None:
                job.work()
        except BaseException as error:
            job.error = error.with_traceback(None)  # its frames would keep the storages alive
        try:
            # After a failure as well: what was issued before it may still be reading the source or filling the target.
            if self._ops is not None:
                tail = self._ops.new_event()
                tail.record(self.stream)
                job.tail = tail
        except BaseException as error:
            job.error = job.error or error.with_traceback(None)
        # Before the job counts as settled: until then the runtime holds the storages too, so that their last reference
        # (and any finalizer) goes in a thread of the runtime's choice.
        job.work = None
        job.settled.set()


class _Stage:
    """One pinned chunk, and the event of the last copy from or to it."""

    def __init__(self, memory: torch.Tensor, event: torch.Event) -> None:
        self.memory = memory
        self.address = memory.data_ptr()
        self.event = event
        self.is_busy = False

    def settle(self) -> None:
        """Wait until no copy uses the chunk."""
        if self.is_busy:
            self.event.synchronize()
            self.is_busy = False


class Staging:
    """One direction's ring. Used by one worker thread only."""

    def __init__(self, ops: TorchDevice, stream: torch.Stream, disk: DiskTier, chunks: list[torch.Tensor]) -> None:
        self._ops = ops
        self._stream = stream
        self._disk = disk
        self._stages = deque(_Stage(chunk, ops.new_event()) for chunk in chunks)
        self._stage_bytes = chunks[0].numel()

    def write_out(self, source: torch.Tensor, offset: int) -> None:
        """Device to disk. Returns when the last byte is written; the source has then been read to the end."""
        # A failure leaves copies under way. They do no harm: later ones are behind them on the same stream, and so is
        # the job's tail.
        under_way: deque[tuple[_Stage, int, int]] = deque()
        for start in range(0, source.numel(), self._stage_bytes):
            if len(under_way) == len(self._stages):
                self._write_oldest(under_way, offset)
            chunk = source[start : start + self._stage_bytes]
            stage = self._next_stage()
            self._copy(stage, stage.memory[: chunk.numel()], chunk)
            under_way.append((stage, start, chunk.numel()))
        while under_way:
            self._write_oldest(under_way, offset)

    def read_in(self, offset: int, target: torch.Tensor) -> None:
        """Disk to device. Returns when the last copy is issued on the lane's stream."""
        for start in range(0, target.numel(), self._stage_bytes):
            chunk = target[start : start + self._stage_bytes]
            stage = self._next_stage()
            stage.settle()
            self._disk.read(offset + start, stage.address, chunk.numel())
            self._copy(stage, chunk, stage.memory[: chunk.numel()])

    def _next_stage(self) -> _Stage:
        stage = self._stages[0]
        self._stages.rotate(-1)
        return stage

    def _copy(self, stage: _Stage, target: torch.Tensor, source: torch.Tensor) -> None:
        stage.is_busy = True
        self._ops.copy(self._stream, [(target, source)])
        stage.event.record(self._stream)

    def _write_oldest(self, under_way: deque[tuple[_Stage, int, int]], offset: int) -> None:
        stage, start, length = under_way.popleft()
        stage.settle()
        self._disk.write(offset + start, stage.address, length)
