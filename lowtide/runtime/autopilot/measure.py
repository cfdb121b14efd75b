"""What planned steps need and take, beside what their plan predicts; and what that says was wrong.

What: `StepWatch` measures the steps of the plan in force; `correct_memory` and `correct_times` compare that with the
prediction, and give the one correction that it asks for, in words and in numbers, or nothing.

- *The peak.* An allocator has one counter of its peak for the whole process, which anybody may reset at any time, and
  which remembers what happened before a plan was in force. It is read where a planned step is at its largest or has
  just been (at the end of the forward pass, at the end of the backward pass, before the next one begins), and the
  maximum is kept. Where other code reset the counter the true peak may be higher; it is never taken for a reason to
  use more. Devices without such a counter (the host) have no peak here.
- *The loop.* What the loop does between the model's forward and its backward (a loss of its own) is apart: these bytes
  are there at that moment of a step only, so another plan, with its largest moment elsewhere, has them there too.
- *Times.* On the host, backward passes are timed, without their stalls. If compute took at least a tenth less time than
  the profile says, there was less to hide copies behind, and the profile's times are scaled. Otherwise the link is
  slower than it was measured. The 2 % are a share of the time that the step really took, because on a busy machine
  stalls take longer too. Only one of the two is scaled after one measurement; the next step shows what is left.
- *The first step.* One line says what it needed and took. A backward pass inside of an autocast that remembers casts of
  weights is warned about: plans do not count them that long.

Cost: of the first two steps of a plan, three reads of a counter and some hooks; of a model that gives no single number
two resets of the counter and another hook; nothing after that. Not covered: other code that resets the counter between
the forward and the backward pass, and after an optimizer's step that needs more than both; what the loop does between
two forward passes that come before a backward pass (it counts as any other excess); the time of the optimizer's step;
fewer stalls or bytes than predicted.
"""

from __future__ import annotations

import dataclasses
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lowtide.core.decisions import Prediction
from lowtide.core.profile import Profile
from lowtide.core.text_table import percent
from lowtide.engines.base import Engine, Event
from lowtide.profiling.observe_call import loss_or_all
from lowtide.runtime.saved.stats import Stats
from lowtide.runtime.session.shapes import ShapePlan
from lowtide.runtime.session.tide import Tide
from lowtide.tensors.kinds import tensors_in
from lowtide.tensors.modes import remembered_cast_bytes
from lowtide.tensors.private import queue_callback
from lowtide.timeline.step import Link
from lowtide.units import format_bytes, format_seconds

_TOLERANCE = 0.02
_COMPUTE_TOLERANCE = 0.1


class StepWatch:
    """What is measured of the steps of the plan in force."""

    def __init__(self, engine: Engine, under_budget: nn.Module | None = None) -> None:
        """`under_budget`: plans have room for casts of its weights until the forward pass is over, and not longer."""
        self._engine = engine
        # A graph holds this, and must not hold the model: a model that keeps its last output would never die.
        self._under_budget = None if under_budget is None else weakref.ref(under_budget)
        self.peak_bytes = 0
        """The allocator's peak in the steps that are compared; the next two fields are apart from it."""
        self.loop_peak_bytes = 0
        """The peak between a forward pass and its backward pass."""
        self.loop_extra_bytes = 0
        """The most that was allocated at once in between, beyond what was there when the forward pass ended, and beyond
        the gradient of its output, which the observed step has too."""
        self.backward_seconds: list[float] = []
        """Of backward passes, without their stalls, in the order in which they ended. On the host alone."""
        self.was_smaller = False
        """A step since the measurement began was smaller than the one that was planned."""
        self._open_loop: object | None = None
        """Of the forward pass whose backward pass is still to come."""
        self._start: Event | None = None
        """Of the last forward pass, as long as the first step is not over."""
        self._first_marks: tuple[Event | None, Event | None] | None = None
        """Of the first backward pass that ended: the start of its forward pass, and its end."""
        self.is_first_told = False
        """The line about the first step was said."""

    @property
    def highest_bytes(self) -> int:
        """The device's peak, whatever was at work."""
        return max(self.peak_bytes, self.loop_peak_bytes)

    # -- when it begins --------------------------------------------------------------------------------------------

    def begin(self, tide: Tide) -> None:
        """A new measurement, of `tide`: also of a plan that is new, since the device's counter remembers what came
        before it, the observed step too."""
        self.restart_totals(tide)
        self.was_smaller = False
        self.backward_seconds.clear()

    def restart_totals(self, tide: Tide) -> None:
        """Only the totals of `tide` and the peaks; times of steps that have run still count."""
        tide.reset_stats()
        self.peak_bytes = self.loop_peak_bytes = self.loop_extra_bytes = 0
        self._open_loop = None

    # -- a step ----------------------------------------------------------------------------------------------------

    def begin_pass(self) -> None:
        """A planned forward pass begins."""
        if not self.is_first_told and self._first_marks is None:
            self._start = self._engine.mark_time()

    def follow(self, output: Any, tide: Tide, *, is_compared: bool) -> None:
        """A planned forward pass under `tide` gave `output`: measure until its backward pass is over."""
        is_first = not self.is_first_told and self._first_marks is None
        is_timed = is_compared and self._engine.device_type == "cpu"
        start, started = self._start, list[float]()
        root = next((leaf for leaf in tensors_in(loss_or_all(output)) if leaf.grad_fn is not None), None)
        loop_is_over = None
        if is_compared:
            self.note_peak()
            loop_is_over = self.begin_loop(root)
        if root is None or not (is_first or is_compared):
            return

        under = weakref.ref(tide)

        def now() -> float:
            tide = under()
            return time.perf_counter() - (tide.stats.stall_seconds if tide is not None else 0.0)

        def begin(gradients: Any) -> None:
            if loop_is_over is not None:
                loop_is_over()
            if is_first:
                self._warn_of_casts()
            if is_timed and not started:  # a graph that is retained has other backward passes
                started.append(now())
            queue_callback(end)

        def end() -> None:
            if is_first:
                self._first_marks = self._first_marks or (start, self._engine.mark_time())
            if is_compared:
                self.note_peak()
            if len(started) == 1:
                self.backward_seconds.append(now() - started[0])
                started.append(0.0)

        assert root.grad_fn is not None
        root.grad_fn.register_prehook(begin)

    def note_peak(self) -> None:
        """Look at the allocator's counter."""
        self.peak_bytes = max(self.peak_bytes, self._engine.device_peak_bytes() or 0)

    def begin_loop(self, root: torch.Tensor | None) -> Callable[[], None] | None:
        """A forward pass has given `root`, and the peak was noted. Returns what measures what the loop took, to be
        called when the backward pass begins; None where nothing is measured."""
        if self._open_loop is not None:  # two forward passes: not what one step is
            self._open_loop = None
            return None
        if root is None or root.numel() == 1 or (start_bytes := self._engine.device_bytes()) is None:
            return None
        own = self._open_loop = object()
        gradient_bytes = root.numel() * root.element_size()
        self._engine.reset_device_peak()

        def is_over() -> None:
            if self._open_loop is not own:
                return
            self._open_loop = None
            peak_bytes = self._engine.device_peak_bytes() or 0
            self.loop_peak_bytes = max(self.loop_peak_bytes, peak_bytes)
            self.loop_extra_bytes = max(self.loop_extra_bytes, peak_bytes - start_bytes - gradient_bytes)
            self._engine.reset_device_peak()

        return is_over

    # -- what it says ----------------------------------------------------------------------------------------------

    def note_loop(self, shape: ShapePlan) -> None:
        """What the loop does between forward and backward was measured: plans have room for it from now on."""
        if self.was_smaller:
            return
        more_bytes = self.loop_extra_bytes - shape.loop_bytes
        if more_bytes > 0:
            shape.profile = shape.profile.with_loop_bytes(more_bytes)
            shape.loop_bytes += more_bytes
            shape.has_more_loop_bytes = True

    def correction(self, shape: ShapePlan, stats: Stats, link: Link, budget_bytes: int) -> Correction | None:
        """What the last step says was wrong; None where it was as predicted."""
        predicted = shape.plan.predicted
        assert predicted is not None
        correction = None
        if self._engine.device_peak_bytes() is not None:
            # Where the loop took more, the profile has what is above the prediction there.
            peak_bytes = self.peak_bytes if shape.has_more_loop_bytes else self.highest_bytes
            correction = correct_memory(predicted, peak_bytes, budget_bytes, shape.unforeseen_bytes)
        if correction is None and not self.was_smaller:
            correction = correct_times(shape.profile, predicted, stats, self.backward_seconds, link)
        if correction is None and shape.has_more_loop_bytes:
            correction = Correction(why=f"loop: {format_bytes(shape.loop_bytes)} between forward and backward")
        return correction

    # -- the first step --------------------------------------------------------------------------------------------

    def _warn_of_casts(self) -> None:
        under_budget, self._under_budget = self._under_budget, None
        model = under_budget() if under_budget is not None else None
        nbytes = 0 if model is None else remembered_cast_bytes(model, self._engine.device_type)
        if nbytes:
            warnings.warn(
                "lowtide: this backward pass began inside of torch.autocast, which holds on to its casts of weights "
                f"until its context is left, up to {format_bytes(nbytes)}. Plans count them until the forward pass is "
                "over, so steps may pass the budget by that much. Call backward() after the context, as torch advises.",
                stacklevel=2,
            )

    def first_line(self, predicted: Prediction, *, peak_bytes: int | None, counted_bytes: int) -> str:
        """What the first step needed and took. `peak_bytes`: the allocator's; None where there is none, and
        `counted_bytes` is what lowtide itself counted."""
        self.is_first_told = True
        planned = format_bytes(predicted.peak_bytes)
        if peak_bytes is not None:
            phrases = [
                f"peak {format_bytes(peak_bytes)}, predicted {planned} ({_off(peak_bytes, predicted.peak_bytes)})"
            ]
        else:
            counted = format_bytes(counted_bytes)
            phrases = [f"predicted peak {planned}; {counted} counted without temporaries (tide.audit() counts all)"]
        start, end = self._first_marks or (None, None)
        seconds = None if start is None or end is None else self._engine.seconds_between(start, end)
        if seconds is not None:
            taken, expected = format_seconds(seconds), format_seconds(predicted.pass_seconds)
            phrases.append(f"forward and backward {taken} (slower in a first step); later ones, predicted: {expected}")
        return f"lowtide: step 1: {'; '.join(phrases)}"


def _off(measured: float, predicted: float) -> str:
    share = measured / predicted - 1 if predicted else 0.0
    return f"{'+' if share >= 0 else ''}{percent(share)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """One number that was wrong. `why` begins with 'peak', 'loop', 'compute' or 'stalls'."""

    why: str
    unforeseen_bytes: int = 0
    """To be taken from the budget, beyond what was before."""
    profile: Profile | None = None
    """In place of the old one."""
    link: Link | None = None
    """The same."""


def correct_memory(
    predicted: Prediction, peak_bytes: int, budget_bytes: int, unforeseen_bytes: int = 0
) -> Correction | None:
    """Bytes that the profile did not foresee. For devices that keep count themselves; `peak_bytes` is their count.

    `unforeseen_bytes`: what is taken from the budget already; the plan in force was made for so much less.
    A step that took less than planned corrects nothing: what it did not need another one may (an optimizer's state
    comes with its first step), and no plan is made for more than the budget.
    """
    excess = peak_bytes - predicted.peak_bytes - unforeseen_bytes
    if excess <= 0 or (excess <= _TOLERANCE * predicted.peak_bytes and peak_bytes <= budget_bytes):
        return None
    why = f"peak: {format_bytes(peak_bytes)}, not {format_bytes(predicted.peak_bytes)}"
    return Correction(why=why, unforeseen_bytes=excess)


def correct_times(
    profile: Profile, predicted: Prediction, stats: Stats, backward_seconds: Sequence[float], link: Link
) -> Correction | None:
    """More stalls than predicted: compute was faster than the profile says, or the link slower than measured.

    `backward_seconds` are backward passes without their stalls; none where they were not timed.
    """
    stall = stats.stall_seconds / stats.num_forwards
    excess = stall - predicted.stall_seconds
    expected = sum(profile.op_seconds[profile.num_forward_ops :]) + predicted.recompute_seconds
    # Stalls of an engine with a clock of its own leave less than nothing: then nothing is known of compute.
    measured = min(backward_seconds, default=0.0)
    is_known = measured > 0.0 and expected > 0.0
    share = measured / expected if is_known else 1.0
    # Of the step as it was: on a machine that is busy with other work, everything takes longer, stalls too.
    if excess <= _TOLERANCE * predicted.step_seconds * max(1.0, share) or not stats.swapped_bytes:
        return None
    if share < 1.0 - _COMPUTE_TOLERANCE:
        why = f"compute: backward in {format_seconds(measured)}, not {format_seconds(expected)}"
        return Correction(why=why, profile=profile.with_times(share))
    return _correct_link(stats, stall, excess, link)


def _correct_link(stats: Stats, stall: float, excess: float, link: Link) -> Correction:
    out_seconds = stats.swapped_bytes / stats.num_forwards / link.out_bytes_per_second
    in_seconds = stats.copied_in_bytes / stats.num_forwards / link.in_bytes_per_second
    slower = (out_seconds + in_seconds) / (out_seconds + in_seconds + excess)
    slower_link = dataclasses.replace(
        link,
        out_bytes_per_second=link.out_bytes_per_second * slower,
        in_bytes_per_second=link.in_bytes_per_second * slower,
    )
    return Correction(
        why=f"stalls: {format_seconds(stall)} a step, not {format_seconds(stall - excess)}", link=slower_link
    )
