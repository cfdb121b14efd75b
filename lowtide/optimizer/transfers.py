"""The order of copies between a bucket's slot and the device, said by the engine's `record` and `wait` alone.

What: `Transfers` fetches buckets (`fetch`, `arrive`), sends them back (`send`), and frees memory when it may.
The rules:
- a copy in waits for the compute lane that freed its buffer's memory, and through it for the bucket's last copy out;
- the optimizer waits for the copy in, on the compute lane;
- a copy out waits for the compute lane that updated the bucket;
- a buffer is released only after the compute lane was told to wait for its copy out, and after that copy is known not
  to have failed;
- a slot is given back only when no copy from or to it is unfinished.
What is on its way to the device stands in `arrivals`, whoever has asked for it: a step, or a backward pass before it.
Nothing waits for the whole device. At most `num_buffers` buckets are on the device: one that is computed with, one
that arrives, one that leaves.

In place (tier 'mapped'): a bucket's memory on the device *is* its slot, which kernels reach over the link. Then there
are no copies and no buffers: the host waits for compute before it reads, and a slot is given back behind compute.

Cost: about 30 us of Python a bucket. Not covered: what to fetch and when (step.py, in_backward.py).
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable

import torch

from lowtide.engines.base import Engine, Event, Lane, block
from lowtide.optimizer.buckets import Buffer, StateBucket, StateChunk

NUM_BUFFERS = 3


class Transfers:
    """See the module's text. `on_lost(chunk, buffer)` is called when a chunk could not be written to its slots."""

    def __init__(
        self,
        engine: Engine,
        device: torch.device,
        on_lost: Callable[[StateChunk, Buffer, BaseException], None],
        num_buffers: int = NUM_BUFFERS,
        *,
        in_place: bool = False,
    ) -> None:
        self.engine = engine
        self.device = device
        self.sent_bytes = 0
        self.fetched_bytes = 0
        self.stall_seconds = 0.0
        """Time that the calling thread was blocked; what compute waits by itself the engine knows."""
        self.peak_bytes = 0
        """Most bytes of buckets on the device at a time."""
        self.held_bytes = 0
        self.num_buffers = num_buffers
        """Buckets that a step has on the device at a time."""
        self.most_held = num_buffers
        """Buckets that may be on the device at a time; more where some were fetched into memory that was free."""
        self.in_place = in_place
        """Whether kernels read and write the slots themselves."""
        self.arrivals: dict[StateChunk, tuple[Buffer, list[Event]]] = {}
        """Chunks on their way to the device, and an event behind each copy."""
        self._on_lost = on_lost
        self._leaving: deque[tuple[StateChunk, Buffer, list[Event]]] = deque()
        self._num_held = 0
        self._unsettled: Event | None = None
        """Behind all that was sent and not waited for."""

    def buffer_for(self, chunk: StateChunk) -> Buffer:
        """Device memory for a chunk, once there is room for one more; in place, that of its slots."""
        if self.in_place:
            return tuple([self.engine.in_place(slot) for slot in chunk.slots])
        while self._leaving and self._num_held >= self.most_held:
            self._retire()
        return self._held(tuple([self._allocate(slot.nbytes) for slot in chunk.slots]))

    def _held(self, buffer: Buffer) -> Buffer:
        """Count a bucket as there, until `drop`."""
        self._num_held += 1
        self.held_bytes += sum(storage.nbytes() for storage in buffer)
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        return buffer

    def has_room(self) -> bool:
        """Whether one more bucket can be fetched without waiting for one that leaves."""
        while self._leaving and self.engine.query(self._leaving[0][2][-1]):
            self._retire()
        return self._num_held < self.num_buffers

    def _allocate(self, nbytes: int) -> torch.UntypedStorage:
        try:
            return self.engine.new_buffer(nbytes, self.device)
        except torch.OutOfMemoryError:
            if not self._leaving:
                raise
        self.retire_all()
        return self.engine.new_buffer(nbytes, self.device)

    def drop(self, buffer: Buffer) -> None:
        """Count a bucket as gone that no copy touches any more; the caller lets go of it."""
        if self.in_place:
            return
        self.held_bytes -= sum(storage.nbytes() for storage in buffer)
        self._num_held -= 1

    # -- in ------------------------------------------------------------------------------------------------------------

    def fetch(self, chunk: StateChunk) -> None:
        """Start the copy of a chunk's bytes to the device, unless it never left or is on its way."""
        engine = self.engine
        if any(leaving.overlaps(chunk) for leaving, _, _ in self._leaving):
            self.retire_all()  # which may find that it could not be written, and stays
        if chunk.bucket.resident is not None or chunk in self.arrivals:
            return
        buffer, events = self.buffer_for(chunk), []
        if not self.in_place:
            engine.wait(Lane.IN, engine.record(Lane.COMPUTE))
            for slot, storage in zip(chunk.slots, buffer, strict=True):
                engine.copy_in(slot, storage)
                events.append(engine.record(Lane.IN))
            self.fetched_bytes += chunk.nbytes
        self.arrivals[chunk] = buffer, events

    def fetch_ahead(self, chunk: StateChunk) -> None:
        """Start a chunk's way to the device before its turn, if there is memory."""
        with contextlib.suppress(torch.OutOfMemoryError):
            self.fetch(chunk)

    def gather(self, bucket: StateBucket) -> torch.UntypedStorage:
        """All of a bucket's bytes on the device, behind what was sent. Blocks; for when something went wrong."""
        engine = self.engine
        (storage,) = self._held((engine.new_buffer(bucket.nbytes, self.device),))
        for event in (engine.record(Lane.COMPUTE), engine.record(Lane.OUT)):
            engine.wait(Lane.IN, event)
        engine.copy_in(bucket.slot, storage)
        event = engine.record(Lane.IN)
        engine.wait(Lane.COMPUTE, event)
        error = engine.failure(event)
        if error is not None:
            raise error
        return storage

    def arrive(self, chunk: StateChunk) -> Buffer | None:
        """A chunk that was fetched, for what compute does from now on; None for one that never left. Raises what went
        wrong in the copy."""
        if chunk not in self.arrivals:
            return None
        buffer, events = self.arrivals.pop(chunk)
        if events:
            self.stall_seconds += self.engine.wait(Lane.COMPUTE, events[-1])
        error = self._failure(events)
        if error is not None:
            self.drop(buffer)
            raise error
        return buffer

    def give_up(self, chunks: Iterable[StateChunk] | None = None) -> None:
        """Forget these chunks (None: all) that were fetched and not used; their slots have the same bytes."""
        for chunk in tuple(self.arrivals if chunks is None else chunks):
            buffer, events = self.arrivals.pop(chunk)
            if events:
                self.stall_seconds += self.engine.wait(Lane.COMPUTE, events[-1])
            self.drop(buffer)

    # -- out -----------------------------------------------------------------------------------------------------------

    def send(self, chunk: StateChunk, buffer: Buffer) -> None:
        """Start the copy of a chunk to its slots, and take over the bucket."""
        engine = self.engine
        if self.in_place:
            self._unsettled = engine.record(Lane.COMPUTE)
            return
        events = []
        for slot, storage in zip(chunk.slots, buffer, strict=True):
            engine.wait(Lane.OUT, engine.record(Lane.COMPUTE))
            engine.copy_out(storage, slot)
            events.append(engine.record(Lane.OUT))
        self.sent_bytes += chunk.nbytes
        self._leaving.append((chunk, buffer, events))
        self._unsettled = events[-1]

    def retire_all(self) -> None:
        """Release all buckets that leave: compute waits for their copies."""
        while self._leaving:
            self._retire()

    def _retire(self) -> None:
        chunk, buffer, events = self._leaving.popleft()
        self.stall_seconds += self.engine.wait(Lane.COMPUTE, events[-1])
        error = self._failure(events)
        if error is not None:
            self._on_lost(chunk, buffer, error)
            return
        self.drop(buffer)

    def _failure(self, events: list[Event]) -> BaseException | None:
        return next((error for error in map(self.engine.failure, events) if error is not None), None)

    # -- what the host sees --------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Block the caller until main memory and files have what was sent."""
        self.retire_all()
        if self._unsettled is not None:
            block(self.engine, self._unsettled)
            self._unsettled = None

    def free(self, bucket: StateBucket) -> None:
        """Give a bucket's slot back, once no copy from or to it is unfinished."""
        for lane in (Lane.COMPUTE,) if self.in_place else (Lane.IN, Lane.OUT):
            block(self.engine, self.engine.record(lane))
        self.engine.free(bucket.slot)
