"""The step that one call of the model begins, observed.

What: `observe_call` observes the step of a call whose loss is the model's own `.loss`, or else everything that it
returns; an `ObservedOutput` says if the first real forward gives something else.
Cost: that of profiling/observe_step.py. Not covered: what the caller does with the output before backward begins.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from lowtide.core.profile import Profile
from lowtide.profiling.observe_step import observe, refuse_iterators
from lowtide.profiling.untouched import grads_set_aside, items_set_aside
from lowtide.tensors.compiled import compiled_parts, lies_in
from lowtide.tensors.kinds import is_plain
from lowtide.tensors.modes import autocasts
from lowtide.tensors.private import (
    BACKWARD_HOOKS,
    FORWARD_HOOKS,
    are_saved_tensors_hooks_enabled,
    are_transforms_active,
    current_graph_task_id,
    disable_current_modes,
    is_forward_mode,
    tree_leaves,
)

_NUM_RUNS = 16
_RUN = 64
_FEW = 2
"""Runs that are remembered of what a module inside gives."""
_HOOKS = frozenset({*FORWARD_HOOKS, *BACKWARD_HOOKS})


def is_training() -> bool:
    """A forward pass with gradients, not under torch.func or a dual level (while anybody watches its operators, torch
    gives other tangents), not one that is run again in a backward pass, and none in which saved-tensor hooks are
    disabled."""
    is_derived = are_transforms_active() or is_forward_mode() or not are_saved_tensors_hooks_enabled()
    return torch.is_grad_enabled() and current_graph_task_id() == -1 and not is_derived


def observe_call(
    model: nn.Module,
    args: tuple,
    kwargs: dict,
    optimizer: torch.optim.Optimizer | None,
    *,
    is_inside: bool = False,
    observed: ObservedOutput | None = None,
    use: Callable[[Callable[[], Any]], Any] | None = None,
) -> Profile:
    """The profile of the step that `model(*args, **kwargs)` begins. Raises what the model raises.

    `use`: what the caller does with that call, which it is given, until its backward begins (a loss of its own); it
    gives back what the backward starts from. Absent: it calls, and starts from the model's loss or from all of it.

    `is_inside`: the call is under way, so the model's own hooks have had its inputs already, and run only once.
    `observed` is shown what the forward gives or raises.
    """
    refuse_iterators(model, args, kwargs)
    has_cache = torch.is_autocast_cache_enabled()
    inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]

    def call() -> Any:
        try:
            return model(*args, **kwargs)
        except Exception as error:
            if observed is not None:
                observed.error = error
            raise

    def pick(output: Any) -> Any:
        if use is not None:
            return output
        if observed is not None:
            observed.note(output)
        return loss_or_all(output)

    with (
        grads_set_aside([leaf for leaf in inputs if leaf.is_leaf and leaf.requires_grad]),
        _autocast_cache_left_alone(),
        # Those of its modules stay, which may change what it computes.
        items_set_aside([vars(model)[name] for name in _HOOKS] if is_inside else []),
        contextlib.nullcontext() if observed is None else observed.watching(model),
    ):
        return observe(
            model,
            call if use is None else functools.partial(use, call),
            loss=pick,
            needs_scalar=False,
            optimizer=optimizer,
            holds_casts=has_cache,
            tell=None if observed is None else observed.tell,
        )


class ObservedOutput:
    """What came out of the observed forward; what comes out of the first real one must be the same to the bit.

    Both start from the same inputs and, as far as lowtide can put it back, the same state. If they differ, there is
    more state than that. Some thousand elements of each tensor of the output are compared, once, and some of what each
    module gives, so that the first one that differs can be named. They are remembered on the host: a budget has no room
    for them on the device.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._then: list[_Sample] | None = None
        self._modules: list[_Given] = []
        """What the modules inside gave in the observed forward, in order."""
        self._now: list[_Given] = []
        self._is_told = False
        self.error: Exception | None = None
        """What the observed forward raised."""

    @property
    def is_over(self) -> bool:
        """Whether the observed forward gave something."""
        return self._then is not None

    @contextlib.contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Inside, note what the modules of `model` give. What is compiled is one module."""
        self._modules, self._now = self._now, []
        compiled = compiled_parts(model)
        inside = [
            module.register_forward_hook(functools.partial(self._note_module, name), always_call=False)
            for name, module in model.named_modules()
            if name and lies_in(name, compiled) is None and name not in compiled
        ]
        try:
            yield
        finally:
            for hook in inside:
                hook.remove()

    def _note_module(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if current_graph_task_id() == -1:  # not where it runs again
            self._now.append((name, type(module).__name__, _samples(output, _FEW)))

    def tell(self, line: str) -> None:
        """Warn of what the observed step moved on, once: that the output is another one then says no more."""
        self._is_told = True
        warnings.warn(line, stacklevel=2)

    def note(self, output: Any) -> None:
        """Remember the output of the observed forward."""
        self._then = _samples(output)

    def compare(self, output: Any) -> None:
        """Warn if this one is another."""
        if self._then is None or self._is_told or _samples(output) == self._then:
            return
        pairs = zip(self._modules, self._now)
        first = next((now for then, now in pairs if (now[0], now[2]) != (then[0], then[2])), None)
        where = "" if first is None else f", first '{first[0]}' ({first[1]})"
        warnings.warn(
            f"lowtide: from the same inputs, {self._model} gave another output than in the observed step{where}: it "
            "reads state that lowtide cannot put back, or it does not repeat itself. The observed step has moved such "
            "state on by one step.",
            stacklevel=2,
        )


_Sample = tuple[torch.dtype, bytes]
"""Some elements of one tensor. No tensor: on the host a budget would count it."""

_Given = tuple[str, str, list[_Sample]]
"""The name of a module, its class, and some elements of what it gave."""


def _samples(output: Any, num_runs: int = _NUM_RUNS) -> list[_Sample]:
    with disable_current_modes(), torch.no_grad():
        leaves = [leaf.detach() for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and is_plain(leaf)]
        dense = [leaf.view(-1) for leaf in leaves if leaf.is_contiguous() and not leaf.is_conj() and not leaf.is_neg()]
        return [(flat.dtype, b"".join(map(_bytes_of, _runs(flat, num_runs)))) for flat in dense]


def _runs(flat: torch.Tensor, num_runs: int) -> list[torch.Tensor]:
    """Stretches of a tensor, from its beginning to its end: what is strided would be copied on the device first."""
    length = flat.numel()
    if length <= num_runs * _RUN:
        return [flat]
    starts = [number * (length - _RUN) // (num_runs - 1) for number in range(num_runs)]
    return [flat[start : start + _RUN] for start in starts]


def _bytes_of(run: torch.Tensor) -> bytes:
    return run.cpu().view(torch.uint8).numpy().tobytes()


@contextlib.contextmanager
def _autocast_cache_left_alone() -> Iterator[None]:
    """Casts of weights that the observed step made would serve the real one, which then would not make its own.

    Only where the caller's autocast is on: one that the model enters forgets its casts when it leaves. A compiled part
    would be compiled anew for this switch.
    """
    is_enabled = torch.is_autocast_cache_enabled()
    if not any(autocasts()):
        yield
        return
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(is_enabled)


def loss_or_all(output: Any) -> Any:
    """Where the backward starts: the loss that the model gives, else everything it returns."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    is_loss = isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.requires_grad
    return loss if is_loss else output
