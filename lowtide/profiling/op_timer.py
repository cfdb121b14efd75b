"""How long each operator of an observed step takes.

`HostClock` reads the wall (operators on the host return when they are done) and the processor time of the thread, and
takes the smaller: on a machine that others use too, an observed operator may take several times what it takes in a
planned step, and a plan made from such times hides copies behind compute that is not there. `DeviceClock` puts an event
on either side of each operator and reads them all at the end. Both subtract what the dispatch mode itself adds,
measured on the spot. The roofline of a device that is not there is in cost.py.

Operators of one *kind* do the same work: one operator, on operands of the same sizes, strides and dtypes, with the same
numbers. Equal layers have them in each layer. A step that is observed is the first one as a rule, and its first layer
meets cold caches, threads that start and kernels that are chosen. So each operator takes the lower median of its kind.

Cost: 5 us an operator on the host, two events more on a device. Not covered: time between operators; a kind of which
there are fewer than three.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from lowtide.recipes.graph import Call, Value

_NUM_PROBES = 64
_ENOUGH = 3
"""Operators of one kind, of which one may be the first."""


class Clock(Protocol):
    """Runs operators and says how long they took."""

    def run(self, func: Callable, args: tuple, kwargs: dict) -> tuple[Any, Any]:
        """The operator's output, and a mark to hand to `seconds`."""

    def seconds(self, mark: Any, call: Call) -> Any:
        """What to remember of the operator: seconds, or something that `settle` turns into seconds."""

    def settle(self, column: list[Any]) -> list[float]:
        """The seconds of all operators, once the step is over."""


@dataclass(frozen=True, slots=True)
class _Timed:
    """A mark of an operator whose kind is known."""

    mark: Any
    kind: Hashable


def kind_of(call: Call) -> Hashable:
    """Equal for operators that do the same work; None for one that is like no other."""
    kind = (call.func, _form(call.args), _form(tuple(call.kwargs.items())))
    try:
        hash(kind)
    except TypeError:
        return None
    return kind


def _form(arg: Any) -> Any:
    if isinstance(arg, Value):
        return (arg.size, arg.stride, arg.dtype)
    return tuple(map(_form, arg)) if isinstance(arg, tuple | list) else arg


def steady(seconds: Sequence[float], kinds: Sequence[Hashable]) -> list[float]:
    """Each operator's time as the lower median of its kind; of a kind with fewer than three, and of None, its own."""
    members: dict[Hashable, list[float]] = {}
    for each, kind in zip(seconds, kinds, strict=True):
        members.setdefault(kind, []).append(each)
    usual = {kind: statistics.median_low(of_kind) for kind, of_kind in members.items() if len(of_kind) >= _ENOUGH}
    usual.pop(None, None)
    return [usual.get(kind, each) for each, kind in zip(seconds, kinds, strict=True)]


def _split(column: Sequence[Any]) -> tuple[list[Any], list[Hashable]]:
    """Marks and kinds. A mark of `end` has no kind."""
    timed = [mark if isinstance(mark, _Timed) else _Timed(mark, None) for mark in column]
    return [each.mark for each in timed], [each.kind for each in timed]


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

    def seconds(self, mark: float, call: Call) -> _Timed:
        return _Timed(max(0.0, mark - self._overhead), kind_of(call))

    def settle(self, column: list[Any]) -> list[float]:
        return steady(*_split(column))


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

    def seconds(self, mark: Any, call: Call) -> _Timed:
        return _Timed(mark, kind_of(call))

    def settle(self, column: list[Any]) -> list[float]:
        self._timer.synchronize()
        pairs, kinds = _split(column)
        return steady([max(0.0, start.elapsed_time(end) / 1e3 - self._overhead) for start, end in pairs], kinds)
