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

from lowtide.catalog.graph import Call

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

    def seconds(self, mark: float, call: Call) -> float:
        return max(0.0, mark - self._overhead)

    def settle(self, column: list[float]) -> list[float]:
        return column


class DeviceClock:
    """Time on the device's own stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        pairs = [self.run(lambda: None, (), {})[1] for _ in range(_NUM_PROBES)]
        torch.get_device_module(device.type).synchronize()
        self._overhead = sorted(start.elapsed_time(end) for start, end in pairs)[_NUM_PROBES // 2] / 1e3

    def run(self, func: Callable, args: tuple, kwargs: dict) -> tuple[Any, Any]:
        start = torch.Event(self._device, enable_timing=True)
        end = torch.Event(self._device, enable_timing=True)
        start.record()
        out = func(*args, **kwargs)
        end.record()
        return out, (start, end)

    def seconds(self, mark: Any, call: Call) -> Any:
        return mark

    def settle(self, column: list[Any]) -> list[float]:
        torch.get_device_module(self._device.type).synchronize()
        return [max(0.0, start.elapsed_time(end) / 1e3 - self._overhead) for start, end in column]
