"""Streams that really queue: device operations for tests, on a machine without a device.

Work enqueued on a `SimStream` runs later, when the policy lets it or something synchronises: 'late' runs nothing before
it must, 'early' runs everything as soon as its waits allow, a number seeds a random interleaving. Within a stream order
is kept, and a wait for an event holds the stream back until the recording that it was given is reached; nothing else
orders two streams. So a wait that was forgotten lets a copy run before its data is there, or after it was overwritten.

Time is virtual: each piece of work has a duration, a stream's clock moves by it, and a wait moves the clock to the time
of the awaited recording. It depends on the waits alone, not on the policy.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Sequence

import torch

COPY_BYTES_PER_SECOND = 1e6


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
    """`DeviceOps` over ordinary memory."""

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
        return self.compute

    def new_stream(self) -> SimStream:
        self.streams.append(SimStream(self))
        return self.streams[-1]

    def new_event(self, *, timing: bool = False) -> SimEvent:
        self.num_events += 1
        return SimEvent(self, timing)

    def copy(self, stream: SimStream, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for target, source in pairs:
            assert target.numel() == source.numel()
            seconds = source.numel() / COPY_BYTES_PER_SECOND
            stream.launch(lambda target=target, source=source: target.copy_(source), seconds)

    def new_storage(self, nbytes: int, device: torch.device) -> torch.UntypedStorage:
        return torch.full((nbytes,), 255, dtype=torch.uint8).untyped_storage()

    def new_slab(self, nbytes: int) -> torch.Tensor:
        return torch.full((nbytes,), 254, dtype=torch.uint8)

    def release_slabs(self) -> None:
        pass

    def peak_bytes(self) -> int:
        return 0

    def reset_peak(self) -> None:
        pass
