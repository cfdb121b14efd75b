"""How long each operator of an observed step takes.

`HostClock` reads the wall (operators on the host return when they are done) and the processor time of the thread, and
takes the smaller: on a machine that others use too, an observed operator may take several times what it takes in a
planned step, and a plan made from such times hides copies behind compute that is not there. `DeviceClock` puts an event
on either side of each operator and reads them all at the end. Both subtract what the dispatch mode itself adds,
measured on the spot. The roofline of a device that is not there is in cost.py.

Cost: 1 us an operator on the host, two events on a device. Not covered: time between operators.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from lowtide.recipes.graph import Call

_NUM_PROBES = 64


class Clock(Protocol):
    """Runs operators and says how long they took."""

    def run(self, func: Callable, args: tuple, kwargs: dict) -> tuple[Any, Any]:
        """The operator's output, and a mark to hand to `seconds`."""

    def seconds(self, mark: Any, call: Call) -> Any:
        """What to remember of the operator: seconds, or something that `settle` turns into seconds."""

    def settle(self, column: list[Any]) -> list[float]:
        """The seconds of all operators, once the step is over."""


class HostClock:
    """Wall time, less what the thread spent waiting for a processor that others had."""

    def __init__(self) -> None:
        tiny, view = torch.empty(1), torch.ops.aten.alias.default
        self._thread_time: Callable[[], float] = time.thread_time
        times = [self.run(view, (tiny,), {})[1] for _ in range(_NUM_PROBES)]
        if not all(times):
            # A kernel that counts in ticks: it says nothing about an operator.
            self._thread_time = time.perf_counter
            times = [self.run(view, (tiny,), {})[1] for _ in range(_NUM_PROBES)]
        self._overhead = sorted(times)[_NUM_PROBES // 2]

    def run(self, func: Callable, args: tuple, kwargs: dict) -> tuple[Any, Any]:
        busy, start = self._thread_time(), time.perf_counter()
        out = func(*args, **kwargs)
        wall = time.perf_counter() - start
        return out, min(wall, self._thread_time() - busy)

    def begin(self) -> tuple[float, float]:
        """What cannot be called here, a compiled backward, begins; for `end`, which gives the mark for `seconds`."""
        return self._thread_time(), time.perf_counter()

    def end(self, begun: tuple[float, float]) -> float:
        wall = time.perf_counter() - begun[1]
        return min(wall, self._thread_time() - begun[0])

    def seconds(self, mark: float, call: Call) -> float:
        return max(0.0, mark - self._overhead)

    def settle(self, column: list[float]) -> list[float]:
        return column


class DeviceTimer:
    """Events of one device, on the stream that the caller computes on."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> Any:
        """A timing event, recorded now."""
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def synchronize(self) -> None:
        """Wait until all events have passed."""
        torch.accelerator.synchronize(self._device)


class DeviceClock:
    """Time on the stream that each operator is enqueued on."""

    def __init__(self, timer: DeviceTimer) -> None:
        self._timer = timer
        pairs = [self.run(lambda: None, (), {})[1] for _ in range(_NUM_PROBES)]
        timer.synchronize()
        self._overhead = sorted(start.elapsed_time(end) for start, end in pairs)[_NUM_PROBES // 2] / 1e3

    def run(self, func: Callable, args: tuple, kwargs: dict) -> tuple[Any, Any]:
        start = self._timer.mark()
        out = func(*args, **kwargs)
        return out, (start, self._timer.mark())

    def begin(self) -> Any:
        return self._timer.mark()

    def end(self, begun: Any) -> Any:
        return begun, self._timer.mark()

    def seconds(self, mark: Any, call: Call) -> Any:
        return mark

    def settle(self, column: list[Any]) -> list[float]:
        self._timer.synchronize()
        return [max(0.0, start.elapsed_time(end) / 1e3 - self._overhead) for start, end in column]
