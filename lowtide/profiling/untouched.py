"""What an observed step must leave as it was: set aside before it, put back after it.

What: `untouched` puts back what a model and its inputs reach, random states, gradients and torch's own settings.
`hooks_set_aside` and `grads_set_aside` are for the backward pass.
`to_the_end(undo)` calls a function that may be called again until it has come to its end: Python raises
KeyboardInterrupt between any two calls, in a `finally` too, and a half of what was to be put back would be missing.
`cut_graphs` leaves graphs that were there before to the backward they wait for. An input may hang on a graph of the
user's (an embedding outside of the model, its own parameters even, a hidden state of the last call). The observed
backward pass would run that graph and free it. So each tensor that has one is exchanged, for the time of the step, for
one of the same bytes whose gradient goes nowhere. Why a function of autograd and not a detached leaf: what the model
writes to in place must not be a leaf, or a view.

Cost: a walk over what model and inputs reach (tensors/snapshot.py); one node for each tensor that is cut off. Not
covered: tensors in sets, and where the walk of a snapshot does not come; tensors of subclasses.
"""

from __future__ import annotations

import contextlib
import contextvars
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from lowtide.errors import ConfigError
from lowtide.tensors.kinds import is_plain
from lowtide.tensors.modes import Modes
from lowtide.tensors.private import TENSOR_HOOKS, gradient_hooks, parametrized_weights
from lowtide.tensors.snapshot import Snapshot, take


def hooks_set_aside(tensors: Sequence[torch.Tensor]) -> contextlib.AbstractContextManager:
    """Inside, the hooks of these leaves do not run: nobody can put back all that they do, and they change no gradient
    but the leaf's own, which nobody reads."""
    return items_set_aside([hooks for each in tensors if (hooks := getattr(each, TENSOR_HOOKS[0]))])


@contextlib.contextmanager
def items_set_aside(tables: Sequence[dict]) -> Iterator[None]:
    """Inside, these dictionaries are empty."""
    before = [dict(table) for table in tables]

    def put_back() -> None:
        for table, then in zip(tables, before, strict=True):
            table.clear()
            table.update(then)

    try:
        for table in tables:
            table.clear()
        yield
    finally:
        to_the_end(put_back)


@contextlib.contextmanager
def grads_set_aside(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Inside, these tensors have no gradients."""
    before = [tensor.grad for tensor in tensors]

    def put_back() -> None:
        for tensor, grad in zip(tensors, before):
            tensor.grad = grad

    try:
        for tensor in tensors:
            tensor.grad = None
        yield
    finally:
        to_the_end(put_back)


def refuse_gradient_hooks(tensors: Iterable[torch.Tensor]) -> None:
    """Raises ConfigError for hooks that a step observed through `.backward()` would set off."""
    if any(gradient_hooks(tensor) for tensor in tensors):
        raise ConfigError(
            "observe: the model checkpoints with use_reentrant=True and its parameters have gradient hooks, which an "
            "observed step would set off; use use_reentrant=False"
        )


def apart(run: Callable[..., Any], **how: Any) -> Any:
    """`run(**how)`, and what it sets of context variables is forgotten."""
    return contextvars.copy_context().run(run, **how)


def warn(line: str) -> None:
    warnings.warn(line, stacklevel=2)


@contextlib.contextmanager
def untouched(
    model: nn.Module, inputs: Any, device: torch.device, tell: Callable[[str], None] = warn
) -> Iterator[Snapshot]:
    """What `model` and `inputs` reach, random states, gradients and torch's own settings are afterwards as before.

    `tell` is given a line for what moved on and cannot be put back. Raises ConfigError for a tensor that was written to
    where no copy of it could be made first.
    """
    # What plays a parameter under `torch.func.functional_call` may be no leaf.
    parameters = [parameter for parameter in model.parameters() if parameter.is_leaf]
    grads = [parameter.grad for parameter in parameters]
    devices = {parameter.device for parameter in parameters} | {device}
    beside = (inputs, [grad for grad in grads if grad is not None])
    before = take(model, beside=beside, called=True, devices=devices - {torch.device("meta")})
    filters = list(warnings.filters)

    def put_back() -> None:
        before.restore()
        for parameter, grad in zip(parameters, grads):
            if parameter.grad is not grad:
                parameter.grad = grad
        if warnings.filters != filters:
            warnings.filters[:] = filters  # type: ignore[index]

    try:
        with (
            Modes().again(),
            items_set_aside([parametrized_weights()]),  # with graphs that a backward pass would free
            torch.set_grad_enabled(torch.is_grad_enabled()),
            torch.autograd.set_detect_anomaly(torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        ):
            yield before
    finally:
        try:
            lost, moved = before.lost(), before.moved()
        finally:
            to_the_end(put_back)
        if moved:
            more = f" and {len(moved) - 1} more" if len(moved) > 1 else ""
            tell(
                f"lowtide: the step that lowtide looked at moved {moved[0]}{more} on, which cannot be wound back, so "
                "training goes on from there; keep the position as a number if that matters."
            )
        if not before.is_whole:
            tell(
                f"lowtide: {type(model).__name__} reaches more than 50,000 objects, and lowtide has not looked at all "
                "of them: those beyond are not put back after the step that it looked at."
            )
    if lost:
        raise ConfigError(
            f"observe: '{lost[0]}' was written to where lowtide cannot see it (below torch's dispatcher, or as a "
            "weight that comes and goes), so it cannot be put back after the observed step; write weights: keep, use "
            "lowtide.apply with rules, or write to it by torch's operators"
        )


def cut_graphs(
    before: Snapshot, like: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor
) -> tuple[Callable[[torch.Tensor], torch.Tensor], list[torch.Tensor]]:
    """Cuts off the graphs of tensors in what `before` has found, until it is restored. `like` makes what has the bytes
    of a tensor in the step.

    Returns a function that gives any tensor without its graph, and the leaves to ask gradients for: so a backward pass
    comes as far as these graphs."""
    ends: list[torch.Tensor] = []
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.grad_fn is None or not is_plain(tensor):
            return tensor
        if id(tensor) not in made:
            ends.append(torch.empty(0, requires_grad=True))
            with torch.enable_grad():
                made[id(tensor)] = (tensor, _Cut.apply(ends[-1], [like(tensor)]))
        return made[id(tensor)][1]

    before.exchange(cut)
    return cut, ends


class _Cut(torch.autograd.Function):
    """Gives out the bytes of a tensor, and takes its gradient."""

    @staticmethod
    def forward(ctx: Any, end: torch.Tensor, held: list[torch.Tensor]) -> torch.Tensor:
        return held[0].data

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[None, None]:
        return None, None


def to_the_end(undo: Callable[[], None]) -> None:
    """`undo()`, to its end. Raises what it raises; a KeyboardInterrupt only after it."""
    late: KeyboardInterrupt | None = None
    is_over = False
    while not is_over:
        try:
            undo()
            is_over = True
        except KeyboardInterrupt as interrupt:
            late = interrupt
    if late is not None:
        raise late
