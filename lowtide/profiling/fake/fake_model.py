"""A model made ready to be traced: without bytes, and without the layers that are like their neighbours.

Without bytes: parameters and inputs are fake tensors, lent to the model for one trace and taken back. Models that read
numbers out of tensors are refused.

Without layers: `find_runs` finds layers of one class, with parameters of equal names, shapes and dtypes and with equal
plain attributes (but for their own index), in a row. Of each run the first two and the last are traced; `skipping`
replaces the forward of the others, on the instance and for the time of the trace, by one that returns its input.
expand_layers.py puts their operators back.

Cost: one walk over the layers; nothing that grows with the model's bytes. Not covered: layers whose output is not one
tensor of their input's shape, which are all traced.
"""

from __future__ import annotations

import contextlib
import gc
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from lowtide.errors import ConfigError
from lowtide.tensors.compiled import ForwardPatch
from lowtide.tensors.kinds import is_plain
from lowtide.tensors.private import (
    FakeTensor,
    FakeTensorMode,
    experts_implementation,
    flat_weights,
    own_buffers,
    own_parameters,
    set_experts_implementation,
    set_flat_weights,
    tree_flatten,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
    unset_fake_temporarily,
)

_REAL_BYTES = 2**20
_NUM_TRACED = 3
_REAL_ROW_BYTES = 2**25
"""Of one row: positions of a sequence of 4 million tokens, which models look at to see whether it is one sequence."""


def _is_small(tensor: torch.Tensor) -> bool:
    is_row = tensor.numel() == max(tensor.shape, default=1)
    return tensor.numel() * tensor.element_size() <= (_REAL_ROW_BYTES if is_row else _REAL_BYTES)


def is_control(tensor: torch.Tensor) -> bool:
    is_number = tensor.is_floating_point() or tensor.is_complex()
    return not is_number and tensor.device.type == "cpu" and _is_small(tensor)


def is_fake(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor)


def has_value(tensor: torch.Tensor) -> bool:
    return _is_small(tensor) and not isinstance(tensor, FakeTensor) and tensor.device.type == "cpu"


def mode_of(model: nn.Module) -> FakeTensorMode:
    """The mode in which the model was built, or a new one."""
    for parameter in model.parameters():
        if isinstance(parameter, FakeTensor):
            return parameter.fake_mode
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    # oneDNN's backward of a recurrent layer gives one tensor twice; torch's cache of fake results makes two of it, so
    # that the second trace in a process would count more bytes than the first.
    mode.cache_enabled &= not any(isinstance(module, nn.RNNBase) for module in model.modules())
    return mode


def fake_of(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """A fake tensor of the same shape on the host."""
    if isinstance(tensor, FakeTensor):
        return tensor
    if not is_plain(tensor):
        raise ConfigError(
            f"trace: cannot trace a {type(tensor).__name__} of layout {tensor.layout}; trace the model before it is "
            "sharded or quantized, or profile it with real tensors"
        )
    with mode:
        fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(fake, requires_grad=tensor.requires_grad)
        return fake.requires_grad_(tensor.requires_grad)


def without_numbers(batch: Any, mode: FakeTensorMode) -> Any:
    """The batch in fake tensors, but for small ones of integers (tokens, masks, positions), which keep their values."""
    made: dict[int, torch.Tensor] = {}

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            is_fake = isinstance(tensor, FakeTensor) or tensor.is_meta or not is_plain(tensor)
            with unset_fake_temporarily():
                real = None if is_fake else tensor.to("cpu")
            made[id(tensor)] = fake_of(tensor, mode) if real is None or not is_control(real) else real
        return made[id(tensor)]

    return tree_map_only(torch.Tensor, convert, batch)


def lend(model: nn.Module, mode: FakeTensorMode) -> None:
    """Make the model's parameters and buffers fake. The owner of a snapshot puts them back."""
    fakes: dict[int, torch.Tensor] = {}
    for module in model.modules():
        flat = flat_weights(module) if isinstance(module, nn.RNNBase) else []
        for table in (own_parameters(module), own_buffers(module)):
            for name, tensor in table.items():
                if tensor is not None:
                    if id(tensor) not in fakes:
                        fakes[id(tensor)] = fake_of(tensor, mode)
                    table[name] = fakes[id(tensor)]  # type: ignore[assignment]
        if isinstance(module, nn.RNNBase):
            set_flat_weights(module, [fakes.get(id(weight), weight) for weight in flat])


@contextlib.contextmanager
def grouped_experts(model: nn.Module) -> Iterator[None]:
    """Inside, experts of transformers that would loop over those that were hit run as grouped products."""
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    eager = [config for config in configs.values() if experts_implementation(config) == "eager"]
    for config in eager:
        set_experts_implementation(config, "grouped_mm")
    try:
        yield
    finally:
        for config in eager:
            set_experts_implementation(config, "eager")


def fakes_alive(mode: FakeTensorMode) -> list[torch.Tensor]:
    """All fake tensors of `mode` in the process."""
    return [each for each in gc.get_objects() if type(each) is FakeTensor and each.fake_mode is mode]


def fakes_left(mode: FakeTensorMode, before: set[int]) -> str:
    """What holds fake tensors of `mode` but those of `before`, by identity, in words; empty where there are none."""
    if all(id(each) in before for each in fakes_alive(mode)):
        return ""
    gc.collect()
    left = [each for each in fakes_alive(mode) if id(each) not in before]
    holders = [holder for each in left for holder in gc.get_referrers(each) if holder is not left]
    found = dict.fromkeys(_described(holder) for holder in holders if not isinstance(holder, types.FrameType))
    return " and ".join(found) or ("a place that Python does not show" if left else "")


def _described(holder: Any) -> str:
    """A container by what holds it."""
    for owner in gc.get_referrers(holder):
        if getattr(owner, "__dict__", None) is holder:
            return f"an attribute of a {type(owner).__module__}.{type(owner).__qualname__}"
        if isinstance(owner, dict) and "__name__" in owner:
            name = next((key for key, value in owner.items() if value is holder), "?")
            return f"'{owner['__name__']}.{name}'"
    return f"a {type(holder).__module__}.{type(holder).__qualname__}"


# -- layers that are like their neighbours ----------------------------------------------------------------------------


class CannotSkipError(Exception):
    """The layers look equal but cannot stand for each other: trace all of them."""


Run = tuple[str, ...]
"""Equal layers in a row, four or more. The first two and the last are run."""


def find_runs(model: nn.Module, layers: tuple[str, ...]) -> tuple[Run, ...]:
    """The runs of more than three equal layers, in order."""
    modules = dict(model.named_modules())
    shared = _shared_parameters(model)
    runs: list[list[str]] = []
    previous: Any = None
    for name in layers:
        looks = (name.rpartition(".")[0], _looks(modules[name]))
        is_alone = any(id(parameter) in shared for parameter in modules[name].parameters())
        if previous is not None and looks == previous and not is_alone:
            runs[-1].append(name)
        else:
            runs.append([name])
        previous = None if is_alone else looks
    return tuple(tuple(run) for run in runs if len(run) > _NUM_TRACED)


def _shared_parameters(model: nn.Module) -> set[int]:
    seen: set[int] = set()
    shared: set[int] = set()
    for _, parameter in model.named_parameters(remove_duplicate=False):
        (shared if id(parameter) in seen else seen).add(id(parameter))
    return shared


def _looks(layer: nn.Module) -> tuple:
    """What must be equal for two layers to do the same work."""
    parts: list[Any] = []
    for name, module in layer.named_modules():
        parts.append((name, type(module), module.training, _plain_attributes(module)))
    tensors = [*layer.named_parameters(), *layer.named_buffers()]
    parts.extend((name, tuple(t.shape), t.dtype, t.requires_grad) for name, t in tensors)
    return tuple(parts)


def _plain_attributes(module: nn.Module) -> tuple:
    found: list[tuple[str, Any]] = []
    for key, value in vars(module).items():
        is_own_index = isinstance(value, int) and not isinstance(value, bool) and ("idx" in key or "index" in key)
        if key.startswith("_") or is_own_index:
            continue
        parts = value if isinstance(value, tuple) else (value,)
        if all(part is None or isinstance(part, bool | int | float | str | torch.dtype) for part in parts):
            found.append((key, value))
    return tuple(sorted(found, key=lambda entry: entry[0]))


@contextlib.contextmanager
def skipping(model: nn.Module, runs: tuple[Run, ...]) -> Iterator[None]:
    """Inside, the skipped layers of `runs` give their input back."""
    modules = dict(model.named_modules())
    with contextlib.ExitStack() as undo:
        for _, second, *skipped, _ in runs:
            note, stand_in = _template()
            undo.callback(modules[second].register_forward_hook(note).remove)
            for name in skipped:
                undo.callback(ForwardPatch(modules[name], stand_in, is_below=True).undo)
        yield


def _template() -> tuple[Callable, Callable]:
    """A hook that looks at the second layer's output, and a forward that gives out its input looking the same."""
    seen: list[tuple[list[Any], Any, tuple]] = []

    def note(module: nn.Module, args: Any, output: Any) -> None:
        leaves, spec = tree_flatten(output)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if len(tensors) != 1:
            raise CannotSkipError
        others = [None if isinstance(leaf, torch.Tensor) else (leaf,) for leaf in leaves]  # which hold no tensor
        seen[:] = [(others, spec, (tensors[0].shape, tensors[0].dtype))]

    def stand_in(forward: Callable, args: tuple, kwargs: dict) -> Any:
        hidden = next((leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)), None)
        if hidden is None or not seen or (hidden.shape, hidden.dtype) != seen[0][2]:
            raise CannotSkipError
        others, spec, _ = seen[0]
        return tree_unflatten([hidden if leaf is None else leaf[0] for leaf in others], spec)

    return note, stand_in
