"""What each operator of an observed step takes: its time, and the memory that it holds inside.

Time: `HostClock` reads the wall (operators on the host return when they are done) and the processor time of the thread,
and takes the smaller: on a machine that others use too, an observed operator may take several times what it takes in a
planned step, and a plan made from such times hides copies behind compute that is not there. `DeviceClock` puts an event
on either side of each operator and reads them all at the end. Both subtract what the dispatch mode itself adds,
measured on the spot. The roofline of a device that is not there is in fake/roofline.py.
Operators of one *kind* do the same work: one operator, on operands of the same sizes, strides and dtypes, with the same
numbers. Equal layers have them in each layer. A step that is observed is the first one as a rule, and its first layer
meets cold caches, threads that start and kernels that are chosen. So each operator takes the lower median of its kind.

Memory: `held_bytes` says what an operator held while it ran, beside what it is given and gives out. Many operators are
made of others (`_safe_softmax` makes a mask of its whole input), and kernels have workspace. A dispatch mode sees none
of that, and a budget is held against the allocator's count, which has it. The allocator's peak is reset before each
operator and read after it; what is beyond the bytes that are left is the operator's own. Allocators count when they are
asked, not when the device gets there, so nothing has to be waited for.

Cost: 5 us an operator on the host; two events and three calls of the allocator's statistics more on a device, which
resets the process's peak counter, as every new plan does. Not covered: time between operators; a kind of which there
are fewer than three; devices whose allocator does not count (they hold nothing), and what other threads allocate
meanwhile.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import torch

from lowtide.engines.device_ops import TorchDevice
from lowtide.recipes.graph import OpCall, Value

_NUM_PROBES = 64
_ENOUGH = 3
"""Operators of one kind, of which one may be the first."""


class Clock(Protocol):
    """Runs operators and says how long they took."""

    def run(self, func: Callable, args: tuple, kwargs: dict) -> tuple[Any, Any]:
        """The operator's output, and a mark to hand to `seconds`."""

    def seconds(self, mark: Any, call: OpCall) -> Any:
        """What to remember of the operator: seconds, or something that `settle` turns into seconds."""

    def settle(self, column: list[Any]) -> list[float]:
        """The seconds of all operators, once the step is over."""


def kind_of(call: OpCall) -> Hashable:
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


def _timed(clock: HostClock | DeviceClock, func: Callable, args: tuple, kwargs: dict) -> tuple[Any, Any]:
    """As `Clock.run`."""
    begun: Any = clock.begin()
    out = func(*args, **kwargs)
    return out, clock.end(begun)


class HostClock:
    """Wall time, less what the thread spent waiting for a processor that others had."""

    run = _timed

    def __init__(self) -> None:
        tiny, view = torch.empty(1), torch.ops.aten.alias.default
        self._thread_time: Callable[[], float] = time.thread_time
        times = [self.run(view, (tiny,), {})[1] for _ in range(_NUM_PROBES)]
        if not all(times):
            # A kernel that counts in ticks: it says nothing about an operator.
            self._thread_time = time.perf_counter
            times = [self.run(view, (tiny,), {})[1] for _ in range(_NUM_PROBES)]
        self._overhead = sorted(times)[_NUM_PROBES // 2]

    def begin(self) -> tuple[float, float]:
        """What cannot be called here, a compiled backward, begins; for `end`, which gives the mark for `seconds`."""
        return self._thread_time(), time.perf_counter()

    def end(self, begun: tuple[float, float]) -> float:
        wall = time.perf_counter() - begun[1]
        return min(wall, self._thread_time() - begun[0])

    def seconds(self, mark: float, call: OpCall) -> tuple[float, Hashable]:
        return max(0.0, mark - self._overhead), kind_of(call)

    def settle(self, column: list[Any]) -> list[float]:
        return steady([seconds for seconds, _ in column], [kind for _, kind in column])


def timing_mark(ops: TorchDevice) -> torch.Event:
    """A timing event, recorded now on the stream that the caller computes on."""
    event = ops.new_event(timing=True)
    event.record(ops.current_stream())
    return event


def seconds_between(start: torch.Event, end: torch.Event) -> float:
    """Waits until both have passed."""
    end.synchronize()
    return start.elapsed_time(end) / 1e3


class DeviceClock:
    """Time on the stream that each operator is enqueued on."""

    run = _timed

    def __init__(self, ops: TorchDevice) -> None:
        self._ops = ops
        pairs = [self.run(lambda: None, (), {})[1] for _ in range(_NUM_PROBES)]
        self._overhead = sorted(seconds_between(*pair) for pair in pairs)[_NUM_PROBES // 2]

    def begin(self) -> torch.Event:
        return timing_mark(self._ops)

    def end(self, begun: torch.Event) -> tuple[torch.Event, torch.Event]:
        return begun, timing_mark(self._ops)

    def seconds(self, mark: Any, call: OpCall) -> tuple[Any, Hashable]:
        return mark, kind_of(call)

    def settle(self, column: list[Any]) -> list[float]:
        seconds = [max(0.0, seconds_between(*pair) - self._overhead) for pair, _ in column]
        return steady(seconds, [kind for _, kind in column])


def held_bytes(ops: TorchDevice) -> int:
    """The most bytes that an operator held beyond those that it has left; the peak was reset before it ran."""
    peak_bytes, left_bytes = ops.allocated_bytes("peak"), ops.allocated_bytes("current")
    return 0 if peak_bytes is None or left_bytes is None else max(0, peak_bytes - left_bytes)
