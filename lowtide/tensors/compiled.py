"""Compiled models: found in every form, and refused by name.

What: lowtide decides about what autograd saves in an eager forward; a compiled one saves what its compiler chose.
`refuse_compiled` finds models and parts that are compiled already (`torch.compile(model)`, `model.compile()`, compiled
submodules, a compiled `forward`, compiled functions in attributes); `refuse_compiled_call` notices a call that comes
out of compiled code, such as `torch.compile(model)` after `apply`; `refuse_compiled_part` compiled functions that a
forward finds elsewhere.

Cost: one walk over the modules; 0.1 us a call of a wrapped forward; while a plan learns, 0.1 us a frame of the stack a
saved tensor, if the compiler was imported. Not covered: compiled functions that save nothing, which run as they are.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import torch
from torch import nn

from lowtide.errors import ConfigError
from lowtide.tensors.private import (
    AROUND_COMPILED,
    COMPILER_MODULE,
    hide_from_compiler,
    in_compiled_code,
    is_compiled_function,
    is_compiled_module,
)

_WAY_OUT = "compiled code has no eager forward to follow"


def not_traced(function: Any) -> Any:
    """A decorator: the compiler does not look into this function, as with `torch.compiler.disable`.

    That one imports the compiler, and would hide from the function that compiled code is calling it.
    """
    hide_from_compiler(function, f"lowtide: the model is under a lowtide plan, and {_WAY_OUT}; remove() it first")
    return function


def refuse_compiled(model: nn.Module, call: str) -> None:
    """Raise ConfigError for a model that is compiled, or has a part that is."""
    for name, module in model.named_modules():
        how = _how_compiled(module)
        if how is None:
            continue
        what = f"its module '{name}'" if name else "this model"
        raise ConfigError(
            f"{call}: {what} is compiled ({how}), and {_WAY_OUT}; give lowtide the model before it is compiled"
        )


@not_traced
def refuse_compiled_call(module: nn.Module) -> None:
    """Raise ConfigError if a wrapped forward of `module` was called by compiled code."""
    # Asked of torch's C code: importing the compiler would cost everybody seconds.
    if in_compiled_code():
        raise ConfigError(
            f"lowtide: {type(module).__name__} is under a lowtide plan and was compiled after that (torch.compile), "
            f"and {_WAY_OUT}; call the model itself, or remove() the tide first"
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
                f"lowtide: '{where or 'the model'}' runs compiled code (a function under torch.compile), and "
                f"{_WAY_OUT}; leave out the compiler there, or put it around the whole model without lowtide"
            )
        frame = frame.f_back


def _how_compiled(module: nn.Module) -> str | None:
    if isinstance(module, torch.jit.ScriptModule):
        return "torch.jit"
    if type(module).__name__ == "OptimizedModule":
        return "torch.compile(module)"
    if is_compiled_module(module):
        return "module.compile()"
    if _is_compiled(getattr(type(module), "forward", None)):
        return "torch.compile on its class's forward"
    for key, value in vars(module).items():
        if _is_compiled(value):
            return f"torch.compile in its attribute '{key}'"
    return None


def _is_compiled(value: Any) -> bool:
    if isinstance(value, types.MethodType):
        value = value.__func__
    return is_compiled_function(value)
