"""Per-instance forward wrappers: how a model comes under lowtide without an edit, and leaves again without a trace.

What: `ForwardPatch` stands in a module's own `__dict__` under `forward` and calls the module's real forward inside
whatever the runtime wants around it. Why not module hooks: a wrapper unwinds by `finally`, also on KeyboardInterrupt,
and it also sees `model.forward(...)`.

A module under `module.compile()` has a compiled call in place of its own, hooks and forward included: there the wrapper
stands in the place of that call, outside of what is compiled.

No class is touched, `state_dict` is unchanged, signatures look the same (`inspect.signature` follows `__wrapped__`),
and copies are plain: deep-copied or pickled, a patched module comes out with its ordinary forward.

Not covered: `nn.DataParallel`, whose replicas share the instance dictionary (refused by `apply`).
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from lowtide.tensors.compiled import not_traced, refuse_compiled_call
from lowtide.tensors.private import COMPILED_CALL, is_compiled_module


class ForwardPatch:
    """A callable that replaces `module.forward` on one instance until `undo()`."""

    def __init__(self, module: nn.Module, around: Callable[[Callable, tuple, dict], Any], handle: Any = None) -> None:
        self.module = module
        self.around = around
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

    def again(self) -> ForwardPatch:
        """On top once more, after `undo`: the same object where it came off, since a call of the module that is under
        way has looked `forward` up before its hooks ran."""
        if not self._came_off:
            return ForwardPatch(self.module, self.around, self.handle)
        self.__init__(self.module, self.around, self.handle)  # type: ignore[misc]
        return self

    def __reduce__(self) -> tuple:
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
            if isinstance(patch, ForwardPatch) and patch._is_active:
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
