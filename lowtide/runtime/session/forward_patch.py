"""Which modules of a model are under lowtide, by the wrappers around their forwards (tensors/compiled.py).

`UnobservedForwards` says where the wrapped forward is never called.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lowtide.optimizer.groups import OwnedHook
from lowtide.tensors.compiled import ForwardPatch
from lowtide.tensors.private import COMPILED_CALL, is_forward_mode, queue_callback

_MAX_NAMES = 3


def _patches(model: nn.Module) -> Iterator[tuple[str, ForwardPatch]]:
    """The patches that act on `model` now, with the names of their modules, from the outside in."""
    for name, module in model.named_modules():
        for slot in ("forward", COMPILED_CALL):
            patch = module.__dict__.get(slot)
            if isinstance(patch, ForwardPatch) and patch.is_active and not patch.is_below:
                yield name, patch


def patched_module(model: nn.Module) -> str | None:
    """Name of the first module of `model` that is under lowtide already ('' is the model itself), or None."""
    return next((name for name, _ in _patches(model)), None)


def patched_part(model: nn.Module) -> str | None:
    """Name of the first module inside `model` that is under lowtide, whatever `model` itself is; or None."""
    return next((name for name, _ in _patches(model) if name), None)


def handle_of(model: nn.Module) -> Any:
    """What `lowtide.apply` or `lowtide.optimize` gave for `model`, or for what it wraps (DDP); None if it is plain."""
    return next((patch.handle for _, patch in _patches(model) if patch.handle is not None), None)


class UnobservedForwards:
    """Says when nothing happens: gradients arrive, and the forward that the function `call` wrapped was never called.

    A trainer may call a part of the module that lowtide was given (`training_step` of a Lightning module calls
    `self.model`), put another forward over the wrapped one, or run it where lowtide steps aside. A hook on each
    parameter waits for the first forward; a backward pass that ends before that warns once, by the names of the modules
    whose parameters got gradients. Cost: two Python calls a parameter when a plan is applied (about 3 us). Not covered:
    gradients that autograd does not deliver itself (FSDP2's sharded parameters), a model whose parameters all are
    frozen.
    """

    def __init__(self, model: nn.Module, call: str) -> None:
        self._model = model
        self._call = call
        self._arrived: list[str] = []
        self._is_waiting = True
        self._was_aside = False
        """The forward was called, where lowtide steps aside."""
        trained = ((name, p) for name, p in model.named_parameters() if p.requires_grad and not is_lazy(p))
        self._hooks = [
            OwnedHook(self, functools.partial(UnobservedForwards.arrived, name=name)).put_on(parameter.register_hook)
            for name, parameter in trained
        ]

    def end(self) -> None:
        """The forward was seen, or need not come any more. Idempotent."""
        if self._is_waiting:
            self.close()

    def step_aside(self) -> None:
        """The forward is called where lowtide steps aside. Where it trains with tangents, that is said."""
        self._was_aside = True
        if is_forward_mode() and torch.is_grad_enabled():
            warnings.warn(
                f"lowtide: {type(self._model).__name__} runs under forward-mode derivatives (a dual level is open), "
                "and torch gives other tangents while anybody watches its operators; so nothing of this pass is "
                "planned or moved.",
                stacklevel=2,
            )

    def close(self) -> None:
        """Take all hooks off, for good."""
        self._is_waiting = False
        for hook in self._hooks:
            hook.remove()

    def arrived(self, gradient: Any, *, name: str) -> None:
        """A parameter has got its gradient."""
        if not self._is_waiting:
            # A micro-batch was taken back in which the hooks had gone, and with everything else they came back.
            self.close()
            return
        if not self._arrived:
            queue_callback(self._tell)
        self._arrived.append(name)

    def _tell(self) -> None:
        """The backward pass is over."""
        if not self._is_waiting:
            return
        self.end()
        warnings.warn(
            f"lowtide: gradients arrived at {self._where()}, and {self._why()}, so nothing is planned or moved.",
            stacklevel=2,
        )

    def _where(self) -> str:
        modules = dict(self._model.named_modules())
        names = list(dict.fromkeys(_runs(modules, name) for name in self._arrived))
        if names == [""]:
            return f"this {type(self._model).__name__}"
        shown = " and ".join(f"'{name}' ({type(modules[name]).__name__})" for name in names[:_MAX_NAMES])
        return shown + (f" and {len(names) - _MAX_NAMES} more modules" if len(names) > _MAX_NAMES else "")

    def _why(self) -> str:
        kind = type(self._model).__name__
        now = vars(self._model).get("forward")
        if self._was_aside:
            return (
                f"the forward of {kind} ran only where lowtide steps aside (without gradients, under forward-mode "
                "derivatives, where saved-tensor hooks are disabled, or inside a checkpoint region around it); "
                "checkpoint parts of the model instead, or leave that to lowtide"
            )
        if not isinstance(now, ForwardPatch):
            by = f"{getattr(now, '__module__', '?')}.{getattr(now, '__qualname__', type(now).__qualname__)}"
            return (
                f"the forward of {kind} that {self._call} wrapped was replaced afterwards (by {by}) and not called; "
                f"call {self._call} after that"
            )
        return (
            f"the forward of {kind}, which {self._call} wrapped, was never called; give {self._call} the module whose "
            "forward runs"
        )


def _runs(modules: dict[str, nn.Module], parameter: str) -> str:
    """The outermost module below the model around a parameter that has a forward: it, or one inside it, has run."""
    path = parameter.split(".")[:-1]
    for length in range(1, len(path) + 1):
        name = ".".join(path[:length])
        if type(modules[name]).forward is not nn.Module.forward:
            return name
    return ""
