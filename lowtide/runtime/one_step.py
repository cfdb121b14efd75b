"""The step that one call of the model begins: observed, or timed.

What: `observe_call` observes the step of a call whose loss is the model's own `.loss`, or else everything that it
returns. `BackwardClock` times backward passes from such an output, without their stalls.
Cost: observing is described in catalog/observe.py; the clock is two hooks a step.
Not covered: what the caller does with the output before backward begins.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from lowtide.catalog.observe import observe
from lowtide.catalog.site import Profile


def is_training() -> bool:
    """A forward pass with gradients, and not one that is run again in a backward pass."""
    return torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1


def observe_call(model: nn.Module, args: tuple, kwargs: dict, optimizer: torch.optim.Optimizer | None) -> Profile:
    """The profile of the step that `model(*args, **kwargs)` begins. Raises what the model raises."""
    has_cache = torch.is_autocast_cache_enabled()
    with _autocast_cache_left_alone():
        return observe(
            model,
            lambda: model(*args, **kwargs),
            loss=_loss_or_all,
            needs_scalar=False,
            optimizer=optimizer,
            holds_casts=has_cache,
        )


@contextlib.contextmanager
def _autocast_cache_left_alone() -> Iterator[None]:
    """Casts of weights that the observed step made would serve the real one, which then would not make its own."""
    is_enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(is_enabled)


def _loss_or_all(output: Any) -> Any:
    """Where the backward starts: the loss that the model gives, else everything it returns."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    is_loss = isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.requires_grad
    return loss if is_loss else output


class BackwardClock:
    """Seconds of backward passes, in the order in which they ended."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def follow(self, output: Any, stall_seconds: Callable[[], float]) -> None:
        """Put the first backward pass from `output` on record, without what `stall_seconds` grows by meanwhile."""
        root = next((leaf.grad_fn for leaf in tree_leaves(_loss_or_all(output)) if _has_graph(leaf)), None)
        if root is None:
            return
        started: list[float] = []

        def now() -> float:
            return time.perf_counter() - stall_seconds()

        def end() -> None:
            self.seconds.append(now() - started[-1])

        def begin(gradients: Any) -> None:
            if not started:  # a graph that is retained has other backward passes
                started.append(now())
                torch.autograd.Variable._execution_engine.queue_callback(end)

        root.register_prehook(begin)


def _has_graph(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None
