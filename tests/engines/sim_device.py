"""Streams that really queue: device operations for tests, on a machine without a device.

Work enqueued on a `SimStream` runs later, when the policy lets it or something synchronises: 'late' runs nothing before
it must, 'early' runs everything as soon as its waits allow, a number seeds a random interleaving. Within a stream order
is kept, and a wait for an event holds the stream back until the recording that it was given is reached; nothing else
orders two streams. So a wait that was forgotten lets a copy run before its data is there, or after it was overwritten.

Memory is that of a caching allocator: `new_storage` takes it from the pool of the current stream, and as soon as the
storage dies the block may serve later work of that stream, which here fills it with poison. A queued copy keeps no such
storage alive.

Time is virtual: each piece of work has a duration, a stream's clock moves by it, and a wait moves the clock to the time
of the awaited recording. It depends on the waits alone, not on the policy.
"""

from __future__ import annotations

import ctypes
import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence

import torch

COPY_BYTES_PER_SECOND = 1e6
POISON = 0xFD


class _Point:
    """One recording of an event."""

    def __init__(self, stream: SimStream) -> None:
        self.stream = stream
        self.time: float | None = None


class SimStream:
    def __init__(self, device: SimDevice) -> None:
        self.device = device
        self.queue: deque[Callable[[], bool]] = deque()  # an entry returns False while it must wait
        self.now = 0.0

    def launch(self, work: Callable[[], object], seconds: float = 1e-3) -> None:
        def run() -> bool:
            work()
            self.now += seconds
            return True

        self._enqueue(run)

    def wait_event(self, event: SimEvent) -> None:
        point = event.point
        if point is None or self.device.are_waits_ignored:
            return

        def wait() -> bool:
            if point.time is None:
                return False
            self.now = max(self.now, point.time)
            return True

        wait.point = point  # type: ignore[attr-defined]
        self._enqueue(wait)

    def record(self, point: _Point) -> None:
        def reach() -> bool:
            point.time = self.now
            return True

        self._enqueue(reach)

    def synchronize(self) -> None:
        with self.device.lock:
            while self.queue:
                self.force()

    def force(self) -> None:
        """Run the next entry, and first whatever it waits for."""
        entry = self.queue[0]
        point = getattr(entry, "point", None)
        while point is not None and point.time is None:
            point.stream.force()
        assert self.advance()

    def advance(self) -> bool:
        if not self.queue or not self.queue[0]():
            return False
        self.queue.popleft()
        return True

    def _enqueue(self, entry: Callable[[], bool]) -> None:
        with self.device.lock:
            self.queue.append(entry)
            self.device.let_run()


class HostCompute(SimStream):
    """The compute stream of a model that really runs on the host: what it was given is done, and a wait blocks."""

    def wait_event(self, event: SimEvent) -> None:
        if not self.device.are_waits_ignored:
            event.synchronize()

    def launch(self, work: Callable[[], object], seconds: float = 1e-3) -> None:
        work()

    def record(self, point: _Point) -> None:
        point.time = self.now


class SimEvent:
    def __init__(self, device: SimDevice, timing: bool) -> None:
        self.device = device
        self.timing = timing
        self.point: _Point | None = None

    def record(self, stream: SimStream) -> None:
        with self.device.lock:
            self.point = _Point(stream)
            stream.record(self.point)

    def query(self) -> bool:
        with self.device.lock:
            self.device.let_run()
            return self.point is None or self.point.time is not None

    def synchronize(self) -> None:
        with self.device.lock:
            while self.point is not None and self.point.time is None:
                self.point.stream.force()

    def elapsed_time(self, end_event: SimEvent) -> float:
        assert self.timing
        assert end_event.timing
        return (end_event.point.time - self.point.time) * 1e3


class SimDevice:
    """`TorchDevice` over ordinary memory. `current` is the compute stream of all threads, to be set by tests."""

    local_cpus = None

    def __init__(self, policy: str | int = "late", *, computes_on_host: bool = False) -> None:
        self.device = torch.device("cpu")
        self.lock = threading.RLock()
        self.policy = policy
        self.chance = random.Random(policy if isinstance(policy, int) else 0)
        self.are_waits_ignored = False
        self.streams: list[SimStream] = []
        self.num_events = 0
        self.is_running = False
        self.compute = HostCompute(self) if computes_on_host else self.new_stream()
        self.current = self.compute
        self.room_bytes: int | None = None
        """What `new_storage` may give out; None = no limit."""
        self.given_bytes = 0
        self.copies_left = 10**9
        """After so many pieces `copy` fails."""
        self.is_graph = False
        self.threads: list[str] = []
        # Blocks by their address: they are there for as long as the device is, whoever holds a storage on them.
        self.blocks: dict[int, ctypes.Array] = {}

    def let_run(self) -> None:
        """As much progress as the policy wants here."""
        if self.policy == "late" or self.is_running:
            return
        self.is_running = True  # work may enqueue nothing, but an event may be queried from within
        if self.policy == "early":
            while sum(stream.advance() for stream in self.streams):
                pass
        else:
            for _ in range(self.chance.randrange(4)):
                self.chance.choice(self.streams).advance()
        self.is_running = False

    def drain(self) -> None:
        for stream in self.chance.sample(self.streams, len(self.streams)):
            stream.synchronize()

    def current_stream(self) -> SimStream:
        return self.current

    def new_stream(self) -> SimStream:
        self.streams.append(SimStream(self))
        return self.streams[-1]

    def new_event(self, *, timing: bool = False) -> SimEvent:
        self.num_events += 1
        return SimEvent(self, timing)

    def copy(self, stream: SimStream, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for target, source in pairs:
            assert target.numel() == source.numel()
            self.copies_left -= 1
            if self.copies_left < 0:
                raise RuntimeError("the device refuses to copy")
            seconds = source.numel() / COPY_BYTES_PER_SECOND
            stream.launch(self._scheduler(target, source), seconds)

    def _scheduler(self, target: torch.Tensor, source: torch.Tensor) -> Callable[[], object]:
        """The copy, holding only what is not the device's own memory."""
        to, start, nbytes = target.data_ptr(), source.data_ptr(), source.numel()
        held = [t for t in (target, source) if t.untyped_storage().data_ptr() not in self.blocks]

        def move(held: list[torch.Tensor] = held) -> None:
            ctypes.memmove(to, start, nbytes)

        return move

    def new_storage(self, nbytes: int, device: torch.device) -> torch.UntypedStorage:
        if self.room_bytes is not None and self.given_bytes + nbytes > self.room_bytes:
            raise torch.OutOfMemoryError(f"{self.given_bytes} of {self.room_bytes} given, {nbytes} more wanted")
        if not nbytes:
            return torch.UntypedStorage(0)
        block = (ctypes.c_ubyte * nbytes)()
        ctypes.memset(block, 255, nbytes)
        storage = torch.frombuffer(block, dtype=torch.uint8).untyped_storage()
        self.blocks[storage.data_ptr()] = block
        self.given_bytes += nbytes
        weakref.finalize(storage, self._take_back, block, self.current).atexit = False
        return storage

    def _take_back(self, block: ctypes.Array, owner: SimStream) -> None:
        self.given_bytes -= len(block)
        # What the stream does next may use the block.
        owner.launch(lambda: ctypes.memset(block, POISON, len(block)), 0.0)

    def new_slab(self, nbytes: int) -> torch.Tensor:
        return torch.full((nbytes,), 254, dtype=torch.uint8)

    def in_place(self, pinned: torch.Tensor) -> torch.UntypedStorage:
        start = int(pinned.storage_offset())
        return pinned.untyped_storage()[start : start + pinned.numel()]

    def enter_thread(self) -> None:
        self.threads.append(threading.current_thread().name)

    def is_capturing(self) -> bool:
        return self.is_graph

    def allocated_bytes(self, which: str) -> int | None:
        return 0

    def reset_peak(self) -> None:
        pass
