"""Per-instance forward wrappers: how a model comes under lowtide without an edit, and leaves again without a trace.

What: `ForwardPatch` stands in a module's own `__dict__` under `forward` and calls the module's real forward inside
whatever the runtime wants around it. Why not module hooks: a wrapper unwinds by `finally`, also on KeyboardInterrupt,
and it also sees `model.forward(...)`.

A module under `module.compile()` has a compiled call in place of its own, hooks and forward included: there the wrapper
stands in the place of that call, outside of what is compiled.

No class is touched, `state_dict` is unchanged, signatures look the same (`inspect.signature` follows `__wrapped__`),
and copies are plain: deep-copied or pickled, a patched module comes out with its ordinary forward.

`UnobservedForwards` says where the wrapped forward is never called.

Not covered: `nn.DataParallel`, whose replicas share the instance dictionary (refused by `apply`).
"""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lowtide.optimizer.groups import OwnedHook
from lowtide.tensors.compiled import not_traced, refuse_compiled_call
from lowtide.tensors.private import COMPILED_CALL, is_compiled_module, is_forward_mode, queue_callback

_MAX_NAMES = 3


class ForwardPatch:
    """A callable that replaces `module.forward` on one instance until `undo()`."""

    def __init__(
        self,
        module: nn.Module,
        around: Callable[[Callable, tuple, dict], Any],
        handle: Any = None,
        *,
        weights: Any = None,
        is_below: bool = False,
    ) -> None:
        self.module = module
        self.around: Any = around
        self.weights = weights
        """The handle of weights that this patch has come and go; None for a plan's patch."""
        self.is_below = is_below or weights is not None
        """It may stand under a plan's patch."""
        self.handle = handle
        """What the user got for the model whose patch this is; None for the patches of modules inside of it."""
        self.slot = COMPILED_CALL if is_compiled_module(module) else "forward"
        self.original = getattr(module, self.slot)
        self._own_before = module.__dict__.get(self.slot)
        self._is_active = True
        self._came_off = False
        functools.update_wrapper(self, self.original, updated=())
        module.__dict__[self.slot] = self

    @not_traced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._is_active:
            return self.original(*args, **kwargs)
        refuse_compiled_call(self.module)
        return self.around(self.original, args, kwargs)

    def undo(self) -> None:
        """Restore the module. If someone has wrapped this wrapper since, it stays in place and only passes through."""
        self._is_active = False
        if self.module.__dict__.get(self.slot) is not self:
            return
        self._came_off = True
        if self._own_before is None:
            del self.module.__dict__[self.slot]
        else:
            self.module.__dict__[self.slot] = self._own_before

    def close(self) -> None:
        """`undo`, for good: a graph that holds the module must not lead to the owner of this patch."""
        self.undo()
        self.around = self.weights = None

    def again(self) -> ForwardPatch:
        """On top once more, after `undo`: the same object where it came off, since a call of the module that is under
        way has looked `forward` up before its hooks ran."""
        patch = self if self._came_off else ForwardPatch.__new__(ForwardPatch)
        how: Any = {"weights": self.weights, "is_below": self.is_below}
        patch.__init__(self.module, self.around, self.handle, **how)  # type: ignore[misc]
        return patch

    def __reduce__(self) -> tuple:
        if self.weights is not None:
            self.weights.check_copied()
        if self._own_before is not None:
            return (_same, (self._own_before,))
        return (_plain_forward, (self.module,))


def _same(value: Any) -> Any:
    return value


def _plain_forward(module: nn.Module) -> Callable:
    return types.MethodType(type(module).forward, module)


def _patches(model: nn.Module) -> Iterator[tuple[str, ForwardPatch]]:
    """The patches that act on `model` now, with the names of their modules, from the outside in."""
    for name, module in model.named_modules():
        for slot in ("forward", COMPILED_CALL):
            patch = module.__dict__.get(slot)
            if isinstance(patch, ForwardPatch) and patch._is_active and not patch.is_below:
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
                f"the forward of {kind} ran only where lowtide steps aside (without gradients, under "
                "forward-mode derivatives, or inside a checkpoint region around it); checkpoint parts of the model "
                "instead, or leave that to lowtide"
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
