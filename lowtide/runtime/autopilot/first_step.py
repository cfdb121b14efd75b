"""One line after the first planned step: what it needed and took, beside what the plan had said.

What: `FirstStep` marks the start of a planned forward pass and the end of its backward pass on the compute stream;
`line` compares with the prediction. On an accelerator the peak is the allocator's. On the host nobody counts
temporaries, so that what was counted is said, and not compared. A backward pass inside of an autocast that remembers
casts of weights is warned about: plans do not count them that long.
Cost: two marks and one hook, once. Not covered: the time of the optimizer's step; a run of one step, after which
nothing looks again.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from lowtide.core.decisions import Prediction
from lowtide.core.plan_table import percent
from lowtide.engines.base import Engine, Event
from lowtide.tensors.casts import remembered_cast_bytes
from lowtide.tensors.private import queue_callback, tree_leaves
from lowtide.units import format_bytes, format_seconds


class FirstStep:
    """Of one model on autopilot."""

    def __init__(self, engine: Engine, under_budget: nn.Module | None = None) -> None:
        self._engine = engine
        self._under_budget = under_budget
        """Plans have room for casts of its weights until the forward pass is over, and not longer."""
        self._start: Event | None = None
        self._marks: tuple[Event | None, Event | None] | None = None
        """Of the first backward pass that ended: the start of its forward pass, and its end."""
        self.is_told = False
        """Nobody has to look again."""

    def begin(self) -> None:
        """A planned forward pass begins."""
        if not self.is_told and self._marks is None:
            self._start = self._engine.mark_time()

    def follow(self, output: Any) -> None:
        """It gave `output`: see its backward pass end."""
        if self.is_told or self._marks is not None:
            return
        start = self._start
        leaves = (leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor))
        root = next((leaf.grad_fn for leaf in leaves if leaf.grad_fn is not None), None)
        if root is not None:
            root.register_prehook(lambda gradients: self._begins(start))

    def _begins(self, start: Event | None) -> None:
        """Its backward pass."""
        queue_callback(lambda: self._over(start))
        model, self._under_budget = self._under_budget, None
        nbytes = 0 if model is None else remembered_cast_bytes(model, self._engine.device_type)
        if nbytes:
            warnings.warn(
                "lowtide: this backward pass began inside of torch.autocast, which holds on to its casts of weights "
                f"until its context is left, up to {format_bytes(nbytes)}. Plans count them until the forward pass is "
                "over, so steps may pass the budget by that much. Call backward() after the context, as torch advises.",
                stacklevel=2,
            )

    def _over(self, start: Event | None) -> None:
        if self._marks is None:
            self._marks = (start, self._engine.mark_time())

    def line(self, predicted: Prediction, *, peak_bytes: int | None, counted_bytes: int) -> str:
        """`peak_bytes`: the allocator's; None where there is none, and `counted_bytes` is what lowtide itself
        counted."""
        self.is_told = True
        said = format_bytes(predicted.peak_bytes)
        if peak_bytes is not None:
            parts = [f"peak {format_bytes(peak_bytes)}, predicted {said} ({_off(peak_bytes, predicted.peak_bytes)})"]
        else:
            counted = format_bytes(counted_bytes)
            parts = [f"predicted peak {said}; {counted} counted without temporaries (tide.audit() counts all)"]
        start, end = self._marks or (None, None)
        seconds = None if start is None or end is None else self._engine.seconds_between(start, end)
        if seconds is not None:
            off = _off(seconds, predicted.pass_seconds)
            taken, expected = format_seconds(seconds), format_seconds(predicted.pass_seconds)
            parts.append(f"forward and backward {taken}, predicted {expected} ({off})")
        return f"lowtide: step 1: {'; '.join(parts)}"


def _off(measured: float, predicted: float) -> str:
    share = measured / predicted - 1 if predicted else 0.0
    return f"{'+' if share >= 0 else ''}{percent(share)}"
