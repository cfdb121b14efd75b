"""Wrappers around forwards; compiled models: which parts of a model are compiled, and which forms are refused by name.

What: lowtide decides about what autograd saves. A compiled part (`torch.compile(layer)`, `layer.compile()`, a compiled
`forward`) saves what its compiler chose, and shows nothing else: it is one node. `compiled_parts` finds these.
A model that is compiled as a whole shows no layers to decide about: `refuse_compiled` finds it in every form, before
anything runs; `refuse_compiled_call` notices a call that comes out of compiled code, such as `torch.compile(model)`
after `apply`; `refuse_compiled_part` compiled functions that a forward finds elsewhere, in no module of its own.

Why modes are taken off around a compiled part (`without`): under a dispatch mode the compiler leaves code as it is, so
the part would give the bits of the eager one.

Cost: one walk over the modules; 0.1 us a call of a wrapped forward; while a plan learns, 0.1 us a frame of the stack a
saved tensor, if the compiler was imported. Not covered: compiled functions that save nothing, which run as they are.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from lowtide.errors import ConfigError
from lowtide.tensors.fsdp import is_fsdp
from lowtide.tensors.kinds import modules_of, nodes_between
from lowtide.tensors.private import (
    AROUND_COMPILED,
    COMPILED_CALL,
    COMPILED_NODE,
    COMPILER_MODULE,
    TorchDispatchMode,
    dispatch_modes,
    hide_from_compiler,
    in_compiled_code,
    is_compiled_function,
    is_compiled_module,
    is_wrapper_of_compiled,
    pop_dispatch_mode,
    push_dispatch_mode,
)

_WHY = "compiled code has no eager forward to follow"
_F = TypeVar("_F", bound=Callable[..., Any])
Around = Callable[[tuple[str, nn.Module], Callable[..., Any], tuple, dict], Any]
"""Gets a compiled part (name, module), its call, and what it was called with."""


def not_traced(function: _F) -> _F:
    """A decorator: the compiler does not look into this function, as with `torch.compiler.disable`."""
    hide_from_compiler(function, f"lowtide: the model is under a lowtide plan, and {_WHY}; remove() it first")
    return function


def never_compiled(function: _F) -> _F:
    """A decorator: the compiler looks neither into this function nor into what it calls.

    For hooks, which autograd calls wherever a tensor is saved: also in those frames of a compiled part that its
    compiler has left as they are.
    """
    hide_from_compiler(function, "lowtide: its hooks are no part of the model", with_callees=True)
    return function


# -- what is compiled --------------------------------------------------------------------------------------------------


def how_compiled(module: nn.Module) -> str | None:
    """How a module was compiled, in words; None if its call is not compiled."""
    if is_wrapper_of_compiled(module):
        return "torch.compile(module)"
    if is_compiled_module(module):
        return "module.compile()"
    if _is_compiled(getattr(type(module), "forward", None)):
        return "torch.compile on its class's forward"
    if _is_compiled(vars(module).get("forward")):
        return "torch.compile in its attribute 'forward'"
    return None


def compiled_parts(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of `model` that are compiled, by name, without those inside of another one."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if not lies_in(name, found) and how_compiled(module) is not None:
            found[name] = module
    return found


def lies_in(name: str, parts: Collection[str]) -> str | None:
    """The part of `parts` that the module `name` is inside of; None for the parts themselves and for all others."""
    return next((part for part in parts if name.startswith(f"{part}.") or (part == "" and name)), None)


def has_compiled(module: nn.Module) -> bool:
    """Whether a module is compiled, or has a part that is."""
    return any(how_compiled(each) is not None for each in modules_of(module))


def without_wrappers(forward: Any) -> Any:
    """What is inside of lowtide's own wrappers around a forward."""
    while type(forward).__module__.startswith("lowtide.") and hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
    return forward


def _is_compiled(value: Any) -> bool:
    value = without_wrappers(value)
    if isinstance(value, types.MethodType):
        value = value.__func__
    return is_compiled_function(value)


class CompiledMode(TorchDispatchMode):
    """A dispatch mode under which compiled parts stay compiled. Torch would leave them as they are; it notes that some
    mode is on beside the stack of modes, and compiles anew for it."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


# -- around a forward, or a compiled part ------------------------------------------------------------------------------


class ForwardPatch:
    """A callable that replaces `module.forward` on one instance until `undo()`: it stands in the module's `__dict__`,
    and calls the module's real forward inside whatever `around` does. Under `module.compile()` it stands in the place
    of the compiled call, outside of what is compiled.

    Why not module hooks: a wrapper unwinds by `finally`, also on KeyboardInterrupt, and it also sees
    `model.forward(...)`. No class is touched, `state_dict` is unchanged, signatures look the same (`inspect.signature`
    follows `__wrapped__`), and copies are plain: deep-copied or pickled, a module comes out with its ordinary forward.
    Not covered: `nn.DataParallel`, whose replicas share the instance dictionary (refused by `apply`).
    """

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
        self.is_active = True
        self._came_off = False
        functools.update_wrapper(self, self.original, updated=())
        module.__dict__[self.slot] = self

    @not_traced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.is_active:
            return self.original(*args, **kwargs)
        refuse_compiled_call(self.module)
        return self.around(self.original, args, kwargs)

    def undo(self) -> None:
        """Restore the module. If someone has wrapped this wrapper since, it stays in place and only passes through."""
        self.is_active = False
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

    def reapply(self) -> ForwardPatch:
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
        return (plain_forward, (self.module,))


def _same(value: Any) -> Any:
    return value


def plain_forward(module: nn.Module) -> Callable:
    """Its own forward, where somebody has replaced that."""
    return types.MethodType(type(module).forward, module)


@contextlib.contextmanager
def calls_wrapped(parts: Mapping[str, nn.Module], around: Around) -> Iterator[None]:
    """Inside, each call of a compiled part goes through `around`, outside of what is compiled."""
    patches = [
        ForwardPatch(module, functools.partial(around, (name, module)), is_below=True) for name, module in parts.items()
    ]
    try:
        yield
    finally:
        for patch in patches:
            patch.undo()


@contextlib.contextmanager
def without(modes: Collection[Any]) -> Iterator[None]:
    """Inside, these dispatch modes see nothing. One of somebody else's that was entered since keeps all as they are:
    under that one the compiler leaves code as it is, with lowtide and without."""
    taken = []
    active = dispatch_modes()
    while active and any(active[-1] is mode for mode in modes):
        taken.append(pop_dispatch_mode())
        active.pop()
    try:
        yield
    finally:
        for mode in reversed(taken):
            push_dispatch_mode(mode)


def graphs_between(outputs: Collection[torch.Tensor], stops: Collection[Any]) -> list[Any]:
    """Autograd's nodes of the compiled graphs that gave `outputs`; `stops` is that of `nodes_between`."""
    return [node for node in nodes_between(outputs, stops) if type(node).__name__ == COMPILED_NODE]


# -- what is refused ---------------------------------------------------------------------------------------------------


def refuse_compiled(model: nn.Module, call: str, *, parts: bool = False) -> None:
    """Raise ConfigError for a model that is compiled as a whole, or holds what cannot be followed as a part.

    `parts`: also for one of which a module is compiled, where the caller cannot work with that.
    """
    how = how_compiled(model)
    if how is not None:
        raise ConfigError(
            f"{call}: this model is compiled as a whole ({how}), and one compiled graph has no layers to decide about; "
            f"give lowtide the model before that, with its layers compiled: {_line_for(model)}"
        )
    compiled = compiled_parts(model)
    if parts and compiled:
        name, module = next(iter(compiled.items()))
        raise ConfigError(
            f"{call}: its module '{name}' is compiled ({how_compiled(module)}), and {_WHY}; give lowtide the model "
            "before it is compiled, or use lowtide.optimize, which runs a step"
        )
    for name, module in model.named_modules():
        if name in compiled or lies_in(name, compiled):
            if is_fsdp(module):
                raise ConfigError(
                    f"{call}: '{name}' is compiled and sharded by FSDP2, which gathers its parameters inside of what "
                    "is compiled; compile the modules inside of a sharded one instead"
                )
            continue
        what = f"its module '{name}'" if name else "this model"
        if isinstance(module, torch.jit.ScriptModule):
            raise ConfigError(
                f"{call}: {what} is compiled (torch.jit), and {_WHY}; give lowtide the model before it is compiled"
            )
        for key, value in vars(module).items():
            if _is_compiled(value):
                raise ConfigError(
                    f"{call}: {what} has a compiled function (torch.compile in its attribute '{key}'), which is no "
                    "module that lowtide could follow; compile the module around it instead: module.compile()"
                )


def _line_for(model: nn.Module) -> str:
    for name, module in model.named_modules():
        is_list = isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 1
        if is_list and len({type(child) for child in module}) == 1:
            path = name.removeprefix("_orig_mod").removeprefix(".")
            return f"`for layer in {'model.' if path else 'model'}{path}: layer.compile()`"
    return "`layer.compile()` for each of them"


@not_traced
def refuse_compiled_call(module: nn.Module) -> None:
    """Raise ConfigError if a wrapped forward of `module` was called by compiled code."""
    # Asked of torch's C code: importing the compiler would cost everybody seconds.
    if in_compiled_code():
        raise ConfigError(
            f"lowtide: {type(module).__name__} is under a lowtide plan and was compiled after that (torch.compile), "
            f"and {_WHY}; compile the layers of a model before lowtide gets it, or remove() the tide first"
        )


@not_traced
def refuse_compiled_part(where: str) -> None:
    """Raise ConfigError if what autograd saves now comes out of compiled code. `where`: the module that is running."""
    if COMPILER_MODULE not in sys.modules:
        return
    frame: Any = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == AROUND_COMPILED[0] and code.co_filename.endswith(AROUND_COMPILED[1]):
            raise ConfigError(
                f"lowtide: '{where or 'the model'}' runs compiled code (a function under torch.compile) that is no "
                "module of its own; compile the module around it instead: module.compile()"
            )
        frame = frame.f_back
