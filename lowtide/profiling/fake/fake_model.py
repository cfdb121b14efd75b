"""A model without bytes: parameters and inputs as fake tensors, lent to the model for one trace and taken back.

Cost: none that grows with the model's bytes. Not covered: models that read numbers out of tensors (they are refused).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from lowtide.errors import ConfigError
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
    tree_leaves,
    tree_map_only,
    unset_fake_temporarily,
)

_REAL_BYTES = 2**20


def is_control(tensor: torch.Tensor) -> bool:
    is_number = tensor.is_floating_point() or tensor.is_complex()
    return not is_number and tensor.device.type == "cpu" and tensor.numel() * tensor.element_size() <= _REAL_BYTES


def has_value(tensor: torch.Tensor) -> bool:
    is_small = tensor.numel() * tensor.element_size() <= _REAL_BYTES
    return is_small and not isinstance(tensor, FakeTensor) and tensor.device.type == "cpu"


def mode_of(model: nn.Module) -> FakeTensorMode:
    """The mode in which the model was built, or a new one."""
    for parameter in model.parameters():
        if isinstance(parameter, FakeTensor):
            return parameter.fake_mode
    return FakeTensorMode(allow_non_fake_inputs=True)


def _fake(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
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
            made[id(tensor)] = _fake(tensor, mode) if real is None or not is_control(real) else real
        return made[id(tensor)]

    return tree_map_only(torch.Tensor, convert, batch)


@contextlib.contextmanager
def lent(model: nn.Module, mode: FakeTensorMode) -> Iterator[None]:
    """Inside, the model's parameters and buffers are fake; afterwards everything is what it was."""
    fakes: dict[int, torch.Tensor] = {}
    before = []
    for module in model.modules():
        attributes = {key: value for key, value in vars(module).items() if not key.startswith("_")}
        before.append((module, dict(own_parameters(module)), dict(own_buffers(module)), attributes))
    flat = [(module, flat_weights(module)) for module in model.modules() if isinstance(module, nn.RNNBase)]
    try:
        for module, parameters, buffers, _ in before:
            for held, table in ((parameters, own_parameters(module)), (buffers, own_buffers(module))):
                for name, tensor in held.items():
                    if tensor is not None:
                        if id(tensor) not in fakes:
                            fakes[id(tensor)] = _fake(tensor, mode)
                        table[name] = fakes[id(tensor)]  # type: ignore[assignment]
        for module, weights in flat:
            set_flat_weights(module, [fakes.get(id(weight), weight) for weight in weights])
        yield
    finally:
        for module, parameters, buffers, attributes in before:
            for held, table in ((parameters, own_parameters(module)), (buffers, own_buffers(module))):
                table.clear()
                table.update(held)  # type: ignore[arg-type]
            _forget_fakes(module, attributes)
        for module, weights in flat:
            set_flat_weights(module, weights)


def _forget_fakes(module: nn.Module, before: dict[str, Any]) -> None:
    """Some models put tensors away in attributes of their own: fake ones must not stay there."""
    for key, value in list(vars(module).items()):
        if key.startswith("_") or value is before.get(key):
            continue
        if any(isinstance(leaf, FakeTensor) for leaf in tree_leaves(value)):
            if key in before:
                module.__dict__[key] = before[key]
            else:
                del module.__dict__[key]


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
