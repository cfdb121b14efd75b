"""The device's peak of planned steps, as lowtide itself saw it.

What: an allocator has one counter of its peak for the whole process, which anybody may reset at any time, and which
remembers what happened before a plan was in force. `PeakWatch` reads it where a planned step is at its largest or has
just been (at the end of the forward pass, at the end of the backward pass, before the next one begins) and keeps the
maximum. Where somebody else reset the counter the true peak may be higher; it is never taken for a reason to use more
(corrections.py).

What the loop does between the model's forward and its backward (a loss of its own, forward and backward) is apart:
`LoopWatch` reads what that takes beyond what the forward pass has left. These bytes are there at that moment of a step
only, so another plan, with its largest moment elsewhere, has them there too, and nowhere else.

Cost: three reads of a counter and one hook a step that is reviewed, two of them after a new plan, and of a model that
gives no single number two resets of the counter and another hook; nothing after that.
Not covered: somebody who resets the counter between the forward and the backward pass, and after an optimizer's step
that needs more than both; what the loop does between two forward passes that come before a backward pass (it counts as
any other excess).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lowtide.engines.base import Engine
from lowtide.runtime.autopilot.observe_call import BackwardClock
from lowtide.runtime.session.tide import Tide
from lowtide.tensors.private import queue_callback, tree_leaves


class PeakWatch:
    """`read` gives the allocator's peak since its last reset; None where there is no such counter."""

    def __init__(self, read: Callable[[], int | None]) -> None:
        self._read = read
        self.peak_bytes = 0
        """The most that was seen since `restart`."""

    def restart(self) -> None:
        """A new measurement: the counter has just been reset by us."""
        self.peak_bytes = 0

    def note(self) -> None:
        """Look at the counter."""
        now_bytes = self._read()
        if now_bytes is None:
            return
        self.peak_bytes = max(self.peak_bytes, now_bytes)

    def follow(self, output: Any) -> None:
        """A planned forward pass is over, which gave `output`: look now, and at the end of its backward passes."""
        self.note()
        root = next(
            (leaf.grad_fn for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.grad_fn), None
        )
        if root is not None:
            root.register_prehook(lambda gradients: _at_the_end(self.note))


class LoopWatch:
    """What the loop takes between a forward pass and its backward pass. Beside a `PeakWatch`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._open: object | None = None
        self.extra_bytes = 0
        """The most that was allocated at once in between, beyond what was there when the forward pass ended, and beyond
        the gradient of its output, which the observed step has too."""
        self.peak_bytes = 0
        """The same with all that was there. `PeakWatch` has not seen it."""

    def restart(self) -> None:
        """A new measurement."""
        self._open = None
        self.extra_bytes = self.peak_bytes = 0

    def follow(self, output: Any) -> None:
        """A planned forward pass is over, which gave `output`, and the peak was noted."""
        if self._open is not None:  # two forward passes: not what one step is
            self._open = None
            return
        leaves = (leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.grad_fn)
        root = next(leaves, None)
        if root is None or root.numel() == 1:
            return
        start_bytes = self._engine.device_bytes()
        if start_bytes is None:
            return
        own = self._open = object()
        gradient_bytes = root.numel() * root.element_size()
        self._engine.reset_device_peak()

        def over(gradients: Any) -> None:
            if self._open is not own:
                return
            self._open = None
            peak_bytes = self._engine.device_peak_bytes() or 0
            self.peak_bytes = max(self.peak_bytes, peak_bytes)
            self.extra_bytes = max(self.extra_bytes, peak_bytes - start_bytes - gradient_bytes)
            self._engine.reset_device_peak()

        assert root.grad_fn is not None
        root.grad_fn.register_prehook(over)


class PlanWatch:
    """What is measured of the steps of the plan in force, as long as it is compared with its prediction."""

    def __init__(self, engine: Engine) -> None:
        self.peak = PeakWatch(engine.device_peak_bytes)
        """On a device whose allocator counts."""
        self.loop = LoopWatch(engine)
        """The same, of what is between forward and backward."""
        self.clock = BackwardClock()
        """Used on the host alone."""
        self._is_host = engine.device_type == "cpu"
        self.was_smaller = False
        """A step since the measurement began was smaller than the one that was planned."""

    @property
    def highest_bytes(self) -> int:
        """The device's peak, whatever was at work."""
        return max(self.peak.peak_bytes, self.loop.peak_bytes)

    def follow(self, output: Any, tide: Tide) -> None:
        """A planned forward pass under `tide`, which is compared, gave `output`."""
        self.peak.follow(output)
        self.loop.follow(output)
        if self._is_host:
            self.clock.follow(output, lambda: tide.stats.stall_seconds)

    def begin(self, tide: Tide) -> None:
        """A new measurement, of `tide`: also of a plan that is new, since the device's counter remembers what came
        before it, the observed step too."""
        self.restart_totals(tide)
        self.was_smaller = False
        self.clock.seconds.clear()

    def restart_totals(self, tide: Tide) -> None:
        """Only the totals of `tide` and the peaks; times of steps that have run still count."""
        tide.reset_stats()
        self.peak.restart()
        self.loop.restart()


def _at_the_end(note: Callable[[], None]) -> None:
    queue_callback(note)
