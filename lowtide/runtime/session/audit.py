"""Audit: the exact peak of what is on the device, around any number of steps of the user's.

What: `with tide.audit() as audit: step()`, then `audit.peak_bytes`; from then on `print(tide.plan)` has it beside the
predicted peak, and a report draws the measured bytes over time (`audit.curve`) beside the predicted ones. Every storage
counts from the operator that made it until its memory is freed: parameters, gradients, optimizer state, activations,
temporaries, and the buffers that fetched activations arrive in, which no operator makes. A batch counts from the first
operator that reads it. Why: on the host and the virtual engine no allocator counts (`stats.peak_device_bytes` has no
temporaries there), and what a plan predicted is only worth something beside a measurement of the same thing.

Around what: whole steps, as they were planned: all micro-batches of a step and the optimizer's, or one forward and
backward. The curve is that of the last forward pass inside whose backward pass ran. What it leaves: the peak and the
curve. Counters, gradients, random states and results are those of steps without it.

Cost: about 7 us an operator, so it is no part of a planned step, and its steps say nothing about time: an autopilot
does not compare them. Not covered: memory inside an operator that is freed before it returns; backward passes
in another thread than the one that entered (they have no curve either); when a compiled layer begins and ends, since a
hook on it would have it compiled anew; on an accelerator, `stats.peak_device_bytes` has the allocator's own peak. Where
two forward passes come before a backward pass, the curve has the second of them.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lowtide.core.profile import LayerTimes, MeasuredCurve
from lowtide.errors import ConfigError
from lowtide.runtime.offload.scheduler import OffloadScheduler
from lowtide.tensors.compiled import has_compiled, never_compiled
from lowtide.tensors.live_bytes import LiveBytes
from lowtide.tensors.private import current_autograd_node, current_graph_task_id, next_sequence_number, sequence_number


class Audit:
    """A context in which every live byte is counted. Made by `Tide.audit` and `Autopilot.audit`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        device_type: str,
        *,
        scheduler: Callable[[], OffloadScheduler],
        layers: Callable[[], Collection[str]],
        done: Callable[[int | None, MeasuredCurve | None], None],
    ) -> None:
        """`scheduler` is that of the plan in force, `layers` are its layers. `done` gets the peak in bytes and `curve`
        when the context is left; no peak where it was left by an error, or where one plan followed another inside."""
        self._of = (model, optimizer, device_type)
        self._scheduler = scheduler
        self._layers = layers
        self._followed: list[OffloadScheduler] = []
        self._done = done
        self._recorder: _CurveRecorder | None = None
        self._hooks: list[RemovableHandle] = []
        self._live: LiveBytes | None = None

    @property
    def peak_bytes(self) -> int:
        """Most bytes on the device at once, so far; 0 before the context is entered."""
        return 0 if self._live is None else self._live.peak_bytes

    @property
    def curve(self) -> MeasuredCurve | None:
        """Bytes over time; None where no forward pass with its backward pass ran inside."""
        return None if self._recorder is None else self._recorder.curve

    @property
    def is_open(self) -> bool:
        """Whether it counts now."""
        return bool(self._followed)

    def follow(self) -> None:
        """Another plan may be in force now: count what it fetches."""
        assert self._live is not None
        scheduler = self._scheduler()
        if scheduler not in self._followed:
            self._followed.append(scheduler)
        scheduler.on_buffer = self._live.add

    def __enter__(self) -> Audit:
        """Raises ConfigError inside of another audit of the same model, and for one that was over already."""
        if self._scheduler().on_buffer is not None or self._live is not None:
            raise ConfigError("audit: one audit is open or was used already; leave it, and ask for a new one")
        model, optimizer, device_type = self._of
        self._live = LiveBytes(model=model, optimizer=optimizer, device_type=device_type)
        recorder = self._recorder = _CurveRecorder(self._live)
        self._live.on_operator = recorder.sample
        self._hooks = [model.register_forward_pre_hook(lambda *_: recorder.begin())]
        for name in self._layers():
            layer, enter = model.get_submodule(name), functools.partial(recorder.enter, name)
            if not has_compiled(layer):  # its code depends on its hooks: it would be compiled anew
                self._hooks.append(layer.register_forward_pre_hook(enter))
        self.follow()
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._live is not None
        self._live.__exit__(kind, error, trace)
        for scheduler in self._followed:
            scheduler.on_buffer = None
        for hook in self._hooks:
            hook.remove()
        self._done(self._live.peak_bytes if error is None and len(self._followed) == 1 else None, self.curve)
        self._followed.clear()


class _CurveRecorder:
    """Samples of the pass that runs now. Those of an earlier one are dropped when the next goes backward, so that an
    audit of many steps holds two passes at most."""

    def __init__(self, live: LiveBytes) -> None:
        self._live = live
        self._is_begun = False
        self._forward: list[tuple[float, int]] = []
        self._backward: list[tuple[float, int]] = []
        self._last: MeasuredCurve | None = None
        self._entered: dict[str, tuple[float, int]] = {}
        """When the forward pass of each layer began, and the number of the autograd node that came next."""
        self._open: list[str] = []
        """Layers whose backward pass is not over, in the order of forward."""
        self._left: dict[str, float] = {}

    def begin(self) -> None:
        """A forward pass of the model begins."""
        if current_graph_task_id() == -1:  # else a checkpoint runs the model again, which is part of its backward pass
            self._last = self.curve
            self._is_begun = True
            self._forward, self._backward = [], []
            self._entered, self._open, self._left = {}, [], {}

    @never_compiled
    def enter(self, name: str, *_: Any) -> None:
        """The forward pass of a layer begins."""
        is_second = name in self._entered or self._backward or current_graph_task_id() != -1
        if not self._is_begun or is_second:
            return
        self._open.append(name)
        self._entered[name] = (time.perf_counter(), next_sequence_number())

    def sample(self) -> None:
        """After an operator. Those of the optimizer, and between steps, are of no pass."""
        if not self._is_begun:
            return
        now = (time.perf_counter(), self._live.now_bytes)
        if current_graph_task_id() != -1:
            self._leave()
            self._backward.append(now)
        elif not self._backward:
            self._forward.append(now)

    def _leave(self) -> None:
        """Backward goes by falling numbers. What a second run of a layer has made has higher ones than any layer."""
        node = current_autograd_node()
        if node is None or not self._backward:
            return
        number = sequence_number(node)
        while self._open and number < self._entered[self._open[-1]][1]:
            self._left[self._open.pop()] = self._backward[-1][0]

    @property
    def curve(self) -> MeasuredCurve | None:
        """Of the last pass that went backward."""
        if not self._forward or not self._backward:
            return self._last
        samples = self._forward + self._backward
        start = samples[0][0]
        return MeasuredCurve(
            seconds=tuple(seconds - start for seconds, _ in samples),
            nbytes=tuple(nbytes for _, nbytes in samples),
            num_forward=len(self._forward),
            layers=tuple(
                LayerTimes(name=name, begins=max(begins - start, 0.0), ends=self._left[name] - start)
                for name, (begins, _) in self._entered.items()
                if name in self._left
            ),
        )
