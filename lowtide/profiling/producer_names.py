"""Who made which storage: one forward pass under a dispatch mode.

What: while a `Recorder` is active, every storage that an operator produces gets a name, the path of the module that
was running and the operator (`model.layers.3.mlp.mul`; a second `mul` there is `mul_1`, a second output `sdpa:1`), and
storages that are parameters in disguise (`weight.t()`, autocast casts, with or without gradients) are recognised by
where they came from. A planned step then needs none of this: it goes by position, and checks.

Cost: about 7 us an operator and two module hooks a module call; used in the first forward of a plan only.
Not covered: operator times and backward reads (the autopilot's observation); tensor subclasses other than those that
break down into plain tensors (wrappers.py), which are left to plain autograd.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from lowtide.errors import ConfigError
from lowtide.recipes.graph import updated_statistics
from lowtide.tensors.compiled import CompiledMode, compiled_parts, lies_in
from lowtide.tensors.fsdp import is_fsdp
from lowtide.tensors.kinds import ordered_storage_keys, storage_key_set, storage_keys
from lowtide.tensors.private import (
    current_fake_mode,
    dispatch_modes,
    schema_of,
)
from lowtide.tensors.wrappers import is_desugared

# A fresh storage that is still a parameter: autocast makes these. (Views of a parameter share its storage anyway.)
CASTS = frozenset({"to"})
_SHORT_NAMES = {
    "to_copy": "to",
    "native_layer_norm": "layer_norm",
    "native_batch_norm": "batch_norm",
    "cudnn_batch_norm": "batch_norm",
    "native_group_norm": "group_norm",
    "native_dropout": "dropout",
    "fused_rms_norm": "rms_norm",
    "convolution": "conv",
    "convolution_overrideable": "conv",
}


COMPILED = "compiled"
"""What stands for the operator in names of storages that a compiled part made."""


def modules_to_follow(model: nn.Module, prefix: str) -> list[tuple[str, nn.Module]]:
    """The modules of `model` that show when they run, by name: not those that are compiled, or inside of such."""
    compiled = compiled_parts(model)
    return [
        (".".join(filter(None, (prefix, name))), module)
        for name, module in model.named_modules()
        if name not in compiled and lies_in(name, compiled) is None
    ]


def op_name(packet_name: str) -> str:
    """The plain name of an operator: no leading or trailing underscores, one word for all attention kernels."""
    name = packet_name.strip("_")
    if name.startswith(("scaled_dot_product", "planning_attention")):
        return "sdpa"
    return _SHORT_NAMES.get(name, name)


_MISLED = (torch.ops.aten.linalg_pinv.atol_rtol_tensor, torch.ops.aten.linalg_lstsq.default)


def refuse_misled(func: Any, args: tuple) -> None:
    """Raises ConfigError for an operator that gives other numbers under a dispatch mode than without one.

    The pseudo-inverse and the residuals of least squares for complex numbers, in torch 2.13: below a mode a conjugated
    part is read as it lies in memory.
    """
    if func in _MISLED and args[0].is_complex():
        name = func.overloadpacket.__name__.removeprefix("linalg_")
        raise ConfigError(
            f"lowtide: torch.linalg.{name} of complex numbers gives other numbers while PyTorch lets somebody watch "
            "the operators, as lowtide does in the first forward pass; keep that part out of the model that is given "
            "to lowtide"
        )


class Recorder(CompiledMode):
    """Names storages by their producer while it is active. Keys are storage addresses: valid while storages live."""

    def __init__(self, parameter_keys: set[int]) -> None:
        super().__init__()
        self.names: dict[int, str] = {}
        self.parameter_keys = set(parameter_keys)
        self.statistics: set[int] = set()
        """Storages that a batch norm has written to, without a version that says so."""
        self.seen_ops: set[str] = set()
        self._path: list[str] = [""]
        self._counts: dict[tuple[str, str], int] = {}
        self._fake_mode: Any = None

    def __enter__(self) -> Any:
        self._fake_mode = current_fake_mode()
        return super().__enter__()

    @property
    def is_requested(self) -> bool:
        """Whether this operator only tells somebody what it would give, on fake tensors, and is none of the step's own:
        DTensor asks so the first time that it meets an operator."""
        return current_fake_mode() is not self._fake_mode

    @property
    def path(self) -> str:
        """Path of the module that is running."""
        return self._path[-1]

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if is_desugared(types):
            return NotImplemented
        kwargs = kwargs or {}
        if self.is_requested:
            return func(*args, **kwargs)
        refuse_misled(func, args)
        out = func(*args, **kwargs)
        self._note(func, args, kwargs, out)
        return out

    def _note(self, func: Any, args: tuple, kwargs: dict, out: Any) -> None:
        self.statistics |= storage_key_set(updated_statistics(func, args))
        outputs = ordered_storage_keys(out)
        if not outputs:
            return
        inputs = storage_key_set((args, kwargs))
        is_mutable = schema_of(func).is_mutable
        fresh = outputs if is_mutable else [key for key in outputs if key not in inputs]
        if not fresh:
            return
        op = op_name(func.overloadpacket.__name__)
        is_parameter = op in CASTS and bool(inputs) and inputs <= self.parameter_keys
        name = self._name(op)
        for number, key in enumerate(fresh):
            self.names[key] = f"{name}:{number}" if number else name
            if is_parameter:
                self.parameter_keys.add(key)
            elif key not in inputs:
                self.parameter_keys.discard(key)
                self.statistics.discard(key)

    def _name(self, op: str) -> str:
        path = self._path[-1]
        number = self._counts.get((path, op), 0)
        self._counts[path, op] = number + 1
        full = f"{path}.{op}" if path else op
        self.seen_ops.add(full)
        return f"{full}_{number}" if number else full

    @contextlib.contextmanager
    def following(self, model: nn.Module, prefix: str = "") -> Iterator[None]:
        """Know which module of `model` is running, through ordinary hooks that are gone afterwards."""
        hooks = []
        for name, module in modules_to_follow(model, prefix):
            # What FSDP2 does before a module runs belongs to its caller, as it does when the model itself begins.
            enter = self.here(functools.partial(self._enter, name))
            hooks.append(module.register_forward_pre_hook(enter, prepend=not is_fsdp(module)))
            hooks.append(module.register_forward_hook(self.here(self._leave), always_call=True))
        self._path = [prefix]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextlib.contextmanager
    def inside(self, path: str) -> Iterator[None]:
        """A compiled part runs. It has no hooks: they would be compiled too."""
        self._path.append(path)
        try:
            yield
        finally:
            self._path.pop()

    def name_fresh(self, keys: Iterable[int]) -> None:
        """These storages came out of the compiled part that is running."""
        for key in keys:
            self.names[key] = self._name(COMPILED)
            self.parameter_keys.discard(key)

    def _enter(self, name: str, module: nn.Module, args: Any) -> None:
        self._path.append(name)
        if is_fsdp(module):
            self.parameter_keys |= storage_keys(module)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if len(self._path) > 1:
            self._path.pop()

    def here(self, hook: Callable[..., None]) -> Callable[..., None]:
        """The hook, for where this mode is active. Hooks of a module run in every thread that calls it; the mode is of
        the thread that runs the step, and of those in which autograd runs its backward pass. (Without the name of the
        hook: a micro-batch that is taken back tells our hooks from the user's by the module that they are from.)"""

        def in_this_thread(*given: Any) -> None:
            if any(mode is self for mode in dispatch_modes()):
                hook(*given)

        return in_this_thread
