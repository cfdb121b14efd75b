"""The order of copies between a bucket's slot and the device, said by the engine's `record` and `wait` alone.

What: `Transfers` fetches buckets (`fetch`, `arrive`), sends them back (`send`), and frees memory when it may.
The rules:
- a copy in waits for the compute lane that freed its buffer's memory, and through it for the bucket's last copy out;
- the optimizer waits for the copy in, on the compute lane;
- a copy out waits for the compute lane that updated the bucket;
- a buffer is released only after the compute lane was told to wait for its copy out, and after that copy is known not
  to have failed;
- a slot is given back only when no copy from or to it is unfinished.
Nothing waits for the whole device. At most `num_buffers` buckets are on the device: one that is computed with, one
that arrives, one that leaves.

In place (tier 'mapped'): a bucket's memory on the device *is* its slot, which kernels reach over the link. Then there
are no copies and no buffers: the host waits for compute before it reads, and a slot is given back behind compute.

Cost: about 30 us of Python a bucket. Not covered: what to fetch and when (step.py, in_backward.py).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from lowtide.engines.base import Engine, Event, Lane, Slot
from lowtide.optimizer.buckets import Buffer, StateBucket, StateChunk

NUM_BUFFERS = 3
_POLL_SECONDS = 1e-4


@dataclass(slots=True, eq=False)
class Arrival:
    """A chunk on its way to the device."""

    chunk: StateChunk
    buffer: Buffer
    events: list[Event]
    """One behind each copy."""


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
        self._on_lost = on_lost
        self._leaving: deque[tuple[StateChunk, Buffer, list[Event]]] = deque()
        self._num_held = 0
        self._unsettled: list[Event] = []
        self._to_free: list[tuple[Slot, tuple[Event, ...]]] = []

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

    def fetch(self, chunk: StateChunk) -> Arrival:
        """Start the copy of a chunk's bytes to the device."""
        engine = self.engine
        if any(leaving.overlaps(chunk) for leaving, _, _ in self._leaving):
            self.retire_all()
        buffer = self.buffer_for(chunk)
        if self.in_place:
            return Arrival(chunk, buffer, [])
        engine.wait(Lane.IN, engine.record(Lane.COMPUTE))
        events = []
        for slot, storage in zip(chunk.slots, buffer, strict=True):
            engine.copy_in(slot, storage)
            events.append(engine.record(Lane.IN))
        self.fetched_bytes += chunk.nbytes
        return Arrival(chunk, buffer, events)

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

    def arrive(self, arrival: Arrival) -> Buffer:
        """The bucket, for what compute does from now on. Raises what went wrong in the copy."""
        if self.in_place:
            return arrival.buffer
        self.stall_seconds += self.engine.wait(Lane.COMPUTE, arrival.events[-1])
        error = self._failure(arrival.events)
        if error is not None:
            self.drop(arrival.buffer)
            raise error
        return arrival.buffer

    def give_up(self, arrival: Arrival) -> None:
        """Forget a fetched bucket that nobody used; its slot has the same bytes."""
        if self.in_place:
            return
        self.stall_seconds += self.engine.wait(Lane.COMPUTE, arrival.events[-1])
        self.drop(arrival.buffer)

    # -- out -----------------------------------------------------------------------------------------------------------

    def send(self, chunk: StateChunk, buffer: Buffer) -> None:
        """Start the copy of a chunk to its slots, and take over the bucket."""
        engine = self.engine
        if self.in_place:
            self._unsettled.append(engine.record(Lane.COMPUTE))
            return
        events = []
        for slot, storage in zip(chunk.slots, buffer, strict=True):
            engine.wait(Lane.OUT, engine.record(Lane.COMPUTE))
            engine.copy_out(storage, slot)
            events.append(engine.record(Lane.OUT))
        self.sent_bytes += chunk.nbytes
        self._leaving.append((chunk, buffer, events))
        self._unsettled.append(events[-1])

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

    @property
    def is_settled(self) -> bool:
        return not self._unsettled

    def settle(self) -> None:
        """Block the caller until main memory and files have what was sent."""
        self.retire_all()
        for event in self._unsettled:
            while not self.engine.query(event):
                time.sleep(_POLL_SECONDS)
        self._unsettled.clear()
        self._free_what_can_be()

    def forget_complete(self) -> None:
        """Let go of what is complete by now, without blocking."""
        self._unsettled = [event for event in self._unsettled if not self.engine.query(event)]
        self._free_what_can_be()

    def free(self, bucket: StateBucket) -> None:
        """Give a bucket's slot back, as soon as no copy from or to it is unfinished."""
        lanes = (Lane.COMPUTE,) if self.in_place else (Lane.IN, Lane.OUT)
        self._to_free.append((bucket.slot, tuple(map(self.engine.record, lanes))))
        self._free_what_can_be()

    def _free_what_can_be(self) -> None:
        waiting = []
        for slot, events in self._to_free:
            if all(self.engine.query(event) for event in events):
                self.engine.free(slot)
            else:
                waiting.append((slot, events))
        self._to_free = waiting

    def close(self) -> None:
        """Settle, and give back every slot that is due."""
        self.settle()
        for _, events in self._to_free:
            for event in events:
                self.engine.wait(Lane.COMPUTE, event)
                while not self.engine.query(event):
                    time.sleep(_POLL_SECONDS)
        self._free_what_can_be()
