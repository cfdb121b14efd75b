"""The clocked engine: a device on which time is a number, so that a real run has an exact step time.

What: main memory plays the device and plain byte buffers play host memory, as on the virtual engine; but here every
copy takes latency plus bytes over bandwidth on its lane, and compute takes what the caller says that each operator
takes (`ClockMode`). The real runtime then runs a real model, gets the right numbers, and `clock.now` says when. The
same step on the same engine gives the same time on any machine, to the last digit: what a timeline predicted can be
compared with what the runtime did.

    engine = ClockedEngine(out_bytes_per_second=20e9, in_bytes_per_second=20e9)
    tide = lowtide.apply(model, plan, engine=engine)
    with ClockMode(engine.clock, seconds_of):
        model(**batch).loss.backward()

Cost: none is meant; this engine is for tests and for comparing plans. Not covered: lanes that share a bandwidth, a
third tier, and poison (see virtual.py): copies are done at once, only their time is not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lowtide.engines.base import Lane, Slot
from lowtide.engines.tiers.host_limit import Cap
from lowtide.errors import TierFull
from lowtide.tensors.private import TorchDispatchMode, disable_current_modes
from lowtide.tensors.view import byte_view
from lowtide.timeline.step import Link


@dataclass(slots=True)
class Clock:
    """Seconds since the engine was made. `stalled` of them compute spent waiting for copies."""

    now: float = 0.0
    stalled: float = 0.0


@dataclass(frozen=True, slots=True)
class ClockEvent:
    """Complete once the clock shows `at`."""

    at: float


class ClockMode(TorchDispatchMode):
    """Every operator inside takes `seconds_of(func, args, out)` of the clock. Views and bookkeeping should take 0."""

    def __init__(self, clock: Clock, seconds_of: Callable[[Any, tuple, Any], float]) -> None:
        super().__init__()
        self._clock = clock
        self._seconds_of = seconds_of

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._clock.now += self._seconds_of(func, args, out)
        return out


class ClockedEngine:
    """Engine protocol on main memory with a clock. `host_bytes` caps the only tier.

    Each second of copying slows compute by `compute_share` seconds, charged when the copy is issued.
    """

    name = "clocked"
    device_type = "cpu"
    device = torch.device("cpu")
    tiers: tuple[str, ...] = ("host",)

    def __init__(
        self,
        *,
        out_bytes_per_second: float,
        in_bytes_per_second: float,
        latency_seconds: float = 0.0,
        compute_share: float = 0.0,
        host_bytes: int | None = None,
    ) -> None:
        self.clock = Clock()
        self._rates = {Lane.OUT: out_bytes_per_second, Lane.IN: in_bytes_per_second}
        self._latency_seconds = latency_seconds
        self._compute_share = compute_share
        self._host_bytes = host_bytes
        self._in_use_bytes = 0
        self.leftovers: deque = deque()
        self.caps: Mapping[str, Cap] = {}
        # When the last work of a lane ends, and before when its next work may not start.
        self._ends = {Lane.OUT: 0.0, Lane.IN: 0.0}
        self._may_start = {Lane.OUT: 0.0, Lane.IN: 0.0}

    # -- memory ----------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int, tier: str) -> Slot:
        if self._host_bytes is not None and self._in_use_bytes + nbytes > self._host_bytes:
            raise TierFull(f"{tier}: {self._in_use_bytes} of {self._host_bytes} bytes in use, {nbytes} more wanted")
        self._in_use_bytes += nbytes
        return Slot(tier, nbytes, torch.UntypedStorage(nbytes))

    def allocate_visible(self, nbytes: int, tier: str) -> tuple[Slot, torch.Tensor]:
        slot = self.allocate(nbytes, tier)
        return slot, byte_view(slot.place)

    def part_of(self, slot: Slot, start_bytes: int, nbytes: int) -> Slot:
        return Slot(slot.tier, nbytes, slot.place[start_bytes : start_bytes + nbytes])

    def in_place(self, slot: Slot) -> torch.UntypedStorage:
        return slot.place

    def free(self, slot: Slot) -> None:
        assert slot.place is not None, "slot freed twice"
        self._in_use_bytes -= slot.nbytes
        slot.place = None

    def new_buffer(self, nbytes: int, device: torch.device) -> torch.UntypedStorage:
        return torch.UntypedStorage(nbytes, device=device)

    def memory_in_use(self) -> Mapping[str, int]:
        return {"host": self._in_use_bytes}

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
        self._copy(Lane.OUT, source, slot.place)

    def copy_in(self, slot: Slot, target: torch.UntypedStorage) -> None:
        self._copy(Lane.IN, slot.place, target)

    def _copy(self, lane: Lane, source: torch.UntypedStorage, target: torch.UntypedStorage) -> None:
        assert source.nbytes() == target.nbytes()
        with disable_current_modes():
            target.copy_(source)
        seconds = self._latency_seconds + source.nbytes() / self._rates[lane]
        self._ends[lane] = max(self._ends[lane], self._may_start[lane]) + seconds
        self.clock.now += self._compute_share * seconds

    def record(self, lane: Lane) -> ClockEvent:
        return ClockEvent(self.clock.now if lane is Lane.COMPUTE else self._ends[lane])

    def wait(self, lane: Lane, event: ClockEvent) -> float:
        if lane is not Lane.COMPUTE:
            self._may_start[lane] = max(self._may_start[lane], event.at)
            return 0.0
        seconds = max(0.0, event.at - self.clock.now)
        self.clock.now += seconds
        self.clock.stalled += seconds
        return seconds

    def query(self, event: ClockEvent) -> bool:
        return event.at <= self.clock.now

    def failure(self, event: ClockEvent) -> BaseException | None:
        return None

    def cancel(self, event: ClockEvent) -> bool:
        return False

    def stall_seconds(self) -> float:
        # `wait` reports them.
        return 0.0

    def mark_time(self) -> ClockEvent:
        return ClockEvent(self.clock.now)

    def seconds_between(self, start: ClockEvent, end: ClockEvent) -> float:
        return end.at - start.at

    def forget_free_memory(self) -> bool:
        return False

    def is_capturing(self) -> bool:
        return False

    def probe_bandwidth(self, nbytes: int) -> Link:
        return Link(out_bytes_per_second=self._rates[Lane.OUT], in_bytes_per_second=self._rates[Lane.IN])

    def close(self) -> None:
        return None
