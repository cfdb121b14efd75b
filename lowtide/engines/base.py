"""The interface between the runtime and whatever moves bytes.

What: about ten calls (allocate, free, new buffer, copy out, copy in, record, wait, query, memory in use, bandwidth).
Why: every ordering decision (which lane waits for which event) is made once, in `runtime/offload/scheduler.py`, in
terms of these calls. The same decisions then run on real streams, on worker threads and files, and on an adversarial
simulator that turns each forgotten wait into a wrong number.

Lanes are ordered queues of work. `Lane.COMPUTE` is where the model runs (the caller's current stream, of which there
may be several; on the host, the calling thread). `Lane.OUT` carries copies away from the device, `Lane.IN` brings them
back. A copy is enqueued on its lane and runs some time after the call returns; it reads and writes raw storages, never
tensors, so that views, dtypes and strides are no concern of an engine.

Ownership: an engine must not rely on the caller to keep `source` alive beyond what the ordering calls promise; the
runtime holds the source until the copy's event is complete or until the compute lane waits for it.

Not covered: choosing *what* to move and *when* (runtime/offload/scheduler.py), and where host bytes live (arena.py,
disk.py).
"""

from __future__ import annotations

import enum
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch

from lowtide.core.plan import Plan
from lowtide.engines.tiers.host_limit import Cap
from lowtide.timeline.step import Link

_POLL_SECONDS = 1e-4


class Lane(enum.Enum):
    """The three queues that an engine orders."""

    COMPUTE = "compute"
    OUT = "out"
    IN = "in"


@dataclass(slots=True, eq=False)
class Slot:
    """A reserved place on a slower tier. `place` is the engine's own business (an offset, a buffer, a file range)."""

    tier: str
    """'host' or 'disk'."""
    nbytes: int
    place: Any = None


Event: TypeAlias = Any
"""A point in a lane. Opaque to the runtime: only the engine that recorded it can query it or wait for it."""


class Engine(Protocol):
    """What the runtime asks of an engine. All methods are called under the runtime's lock, from any thread. Those with
    a body are right as they are for an engine whose device has no streams, no allocator of its own and no graphs."""

    name: str
    """'accelerator', 'host', or what an engine of your own calls itself."""
    device_type: str
    """The `torch.device.type` whose storages this engine moves ('cuda', 'npu', 'cpu', ...)."""
    device: torch.device
    """The one device whose storages it moves; without an index, all devices of that type."""
    tiers: tuple[str, ...]
    """Tiers it can allocate on, fastest first."""
    caps: Mapping[str, Cap]
    """What may be reserved on each tier: by this engine, and by others that `another` made."""
    leftovers: deque[tuple[Slot | None, tuple[Event, ...], torch.UntypedStorage | None]]
    """What a runtime that is gone could not give back yet: slots, and storages that must live, until the events are
    complete. The next runtime on this engine looks after them."""

    def allocate(self, nbytes: int, tier: str) -> Slot:
        """Reserve `nbytes` on `tier`. Raises `TierFull` when a cap or the disk is reached."""

    def allocate_visible(self, nbytes: int, tier: str) -> tuple[Slot, torch.Tensor]:
        """As `allocate`, in one piece, and its bytes as a uint8 tensor of main memory, valid until the slot is freed.

        The tensor shows what the last complete copy out wrote, and the next copy in brings what was written to it; who
        reads or writes it waits for the copies first. On disk it maps the file: no memory until it is read."""

    def part_of(self, slot: Slot, start_bytes: int, nbytes: int) -> Slot:
        """These bytes of a slot of `allocate_visible`, to be copied by themselves. Valid until the slot is freed, and
        never freed itself. `start_bytes` is a multiple of 4096, and what comes after the part up to the next multiple
        is undefined once the part was written."""

    def in_place(self, slot: Slot) -> torch.UntypedStorage:
        """The bytes of a slot of `allocate_visible`, or of a part of one, as memory of the device: kernels read and
        write them over the link, without a copy. On the fastest tier alone. On a host it is the file mapped anew, whose
        pages are asked for at once and leave this process with the storage. Raises ConfigError on a device that has no
        such call."""

    def free(self, slot: Slot) -> None:
        """Give a slot back. The caller promises that no copy from or to it is unfinished."""

    def new_buffer(self, nbytes: int, device: torch.device) -> torch.UntypedStorage:
        """Uninitialised device memory of `nbytes`, allocated on the compute lane."""

    def compute_stream(self) -> Any:
        """The caller's compute stream, to be compared; the engine remembers that the runtime uses it. None where there
        is only one. All other calls that speak of `Lane.COMPUTE` mean the caller's stream too."""
        return None

    def copy_out(self, source: torch.UntypedStorage, slot: Slot) -> None:
        """Enqueue on `Lane.OUT`: device bytes -> slot. `source.nbytes() == slot.nbytes`."""

    def copy_in(self, slot: Slot, target: torch.UntypedStorage) -> None:
        """Enqueue on `Lane.IN`: slot -> device bytes."""

    def record(self, lane: Lane) -> Event:
        """An event that completes when all work enqueued on `lane` so far has completed; of `Lane.COMPUTE`, on every
        stream that `compute_stream` was asked on."""

    def wait(self, lane: Lane, event: Event) -> float:
        """Work enqueued on `lane` after this call starts after `event`. Returns seconds the *caller* was blocked."""

    def query(self, event: Event) -> bool:
        """True once the event is complete. Never blocks."""

    def failure(self, event: Event) -> BaseException | None:
        """What went wrong in the last copy before a complete event, or None. A failed copy left its slot undefined."""

    def cancel(self, event: Event) -> bool:
        """Try to drop the last copy before `event` if it has not started. True if it will never run (and `event`
        counts as complete). Engines that cannot, return False."""

    def memory_in_use(self) -> Mapping[str, int]:
        """Bytes reserved now, per tier."""

    def device_bytes(self) -> int | None:
        """What the device's allocator has given out now, or None where the device has no such counter."""
        return None

    def device_peak_bytes(self) -> int | None:
        """The device allocator's own peak since `reset_device_peak`, or None where the device has no such counter."""
        return None

    def reset_device_peak(self) -> None:
        """Start a new peak measurement."""

    def stall_seconds(self) -> float:
        """Seconds that the compute lane has waited for copies so far, as far as the engine can tell by itself
        (accelerators: from event pairs around waits). Engines whose `wait` blocks the caller return 0.0 here."""
        return 0.0

    def mark_time(self) -> Event | None:
        """A moment of the caller's compute stream, for `seconds_between`. None on an engine that has no clock."""

    def seconds_between(self, start: Event, end: Event) -> float | None:
        """Between two moments of `mark_time`, or None while the device has not got to the second. Never blocks."""

    def forget_free_memory(self) -> bool:
        """Give back what it has free and keeps for reuse, so that the next step shows nothing of the one before.

        True where a step pays for what another one left. An engine whose memory is handed out by an allocator that is
        not lowtide's leaves that alone, and says False."""
        return False

    def is_capturing(self) -> bool:
        """Whether what the caller launches is only recorded, to be replayed later as a graph of the device."""
        return False

    def probe_bandwidth(self, nbytes: int) -> Link:
        """Move `nbytes` in both directions at once and report what each direction reached, and page faults cost."""

    def another(self, plan: Plan) -> Engine:
        """A new engine of this kind, on the same device, with the tiers that `plan` asks for. It shares `caps`."""

    def close(self) -> None:
        """Finish or drop all work, end threads, release files and pinned memory. Idempotent."""


def block(engine: Engine, event: Event) -> float:
    """Return when a copy is complete: on an accelerator only the compute stream waits in `wait`. Gives its seconds."""
    seconds = engine.wait(Lane.COMPUTE, event)
    while not engine.query(event):
        time.sleep(_POLL_SECONDS)
    return seconds


EngineChoice: TypeAlias = Engine | str | Callable[[Plan], Engine] | None
"""What users give as `engine=`: an engine, the name of one, a function that makes one for a plan, or None for the one
of the model's device."""
