"""What is on the device whatever the fates: parameters, gradients, optimizer state, and what a step of it needs.

What: bytes of unique storages. An optimizer that has not stepped yet has no state; a copy of it takes one step on fake
parameters (shapes without memory), and what it made is counted. Its state between steps and its temporaries come out.

Cost: one step of the optimizer on fake tensors, about 0.1 ms a parameter. Not covered: optimizers that look at values
(they cannot run without them): for those the state that exists is counted, and a warning says so.
"""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict, defaultdict
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily

from lowtide.catalog.live import LiveBytes, optimizer_tensors, unique_bytes
from lowtide.catalog.sharded import is_sharded, local_part
from lowtide.catalog.site import StateBytes


def state_bytes(
    model: nn.Module,
    *,
    inputs: int,
    optimizer: torch.optim.Optimizer | None,
    device_type: str | None,
    is_accelerator: bool,
) -> StateBytes:
    """The account of `model` and `optimizer`. `inputs` are the batch's bytes; `is_accelerator` says how the optimizer
    would run (torch's own run over all parameters at once there)."""
    parameters = list(model.parameters())
    known = {id(p) for p in parameters}
    held = unique_bytes(parameters, device_type)
    state, temporaries = _optimizer_bytes(optimizer, is_accelerator)
    return StateBytes(
        parameters=held,
        buffers=unique_bytes([*parameters, *(b for b in model.buffers() if id(b) not in known)], device_type) - held,
        gradients=sum(_gradient_bytes(p) for p in parameters if p.requires_grad),
        optimizer=state,
        optimizer_temporaries=temporaries,
        inputs=inputs,
    )


def _gradient_bytes(parameter: nn.Parameter) -> int:
    if is_sharded(parameter):
        return local_part(parameter).untyped_storage().nbytes()  # padded, as the gradient is
    return parameter.numel() * parameter.element_size()


def _optimizer_bytes(optimizer: torch.optim.Optimizer | None, is_accelerator: bool) -> tuple[int, int]:
    if optimizer is None:
        return 0, 0
    try:
        return _dry_run(optimizer, is_accelerator)
    except Exception as error:  # an optimizer is anybody's code
        warnings.warn(
            f"{type(optimizer).__name__} cannot step without values ({type(error).__name__}): only the state that it "
            "has now is counted; take one step first if it has none",
            stacklevel=4,
        )
        return unique_bytes(optimizer_tensors(optimizer)), 0


def _dry_run(optimizer: torch.optim.Optimizer, is_accelerator: bool) -> tuple[int, int]:
    """Bytes of the state after one step of a copy on fake parameters, and the most that the step needed beyond."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        twin, fakes = _twin(optimizer, is_accelerator)
        held = unique_bytes([*fakes, *(p.grad for p in fakes if p.grad is not None)])
        live = LiveBytes(device_type="cpu")
        live.add_all([*fakes, *(p.grad for p in fakes if p.grad is not None), *optimizer_tensors(twin)])
        with live:
            type(twin).step(twin)
        state = unique_bytes(optimizer_tensors(twin))
        return state, max(0, live.peak_bytes - held - state)


def _twin(optimizer: torch.optim.Optimizer, is_accelerator: bool) -> tuple[torch.optim.Optimizer, list[nn.Parameter]]:
    """A copy of the optimizer over fake parameters with gradients; the original and its hooks are left alone."""
    twin = type(optimizer).__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.__dict__.pop("step", None)  # schedulers wrap it on the instance, bound to the original
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        twin.__dict__[hooks] = OrderedDict()
    fakes: dict[int, nn.Parameter] = {}
    twin.param_groups = [
        {**_settings(group, is_accelerator), "params": [_fake_parameter(p, fakes) for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    twin.state = defaultdict(dict)
    for parameter, state in optimizer.state.items():
        if id(parameter) in fakes:
            twin.state[fakes[id(parameter)]] = {key: _fake_like(value) for key, value in state.items()}
    return twin, list(fakes.values())


def _settings(group: dict[str, Any], is_accelerator: bool) -> dict[str, Any]:
    if is_accelerator and group.get("foreach", False) is None and not group.get("fused"):
        return {**group, "foreach": True}
    return group


def _fake_parameter(parameter: torch.Tensor, fakes: dict[int, nn.Parameter]) -> nn.Parameter:
    if id(parameter) not in fakes:
        part = local_part(parameter)
        fake = nn.Parameter(
            torch.empty_strided(part.size(), part.stride(), dtype=parameter.dtype, device="cpu"),
            requires_grad=parameter.requires_grad,
        )
        if parameter.requires_grad:
            fake.grad = torch.empty_like(fake)
        fakes[id(parameter)] = fake
    return fakes[id(parameter)]


def _fake_like(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return copy.copy(value)
    if value.dim() == 0 and value.device.type == "cpu" and not value.is_meta:
        with unset_fake_temporarily():
            number = value.item()
        return torch.tensor(number, dtype=value.dtype)  # step counters: their value is looked at
    return torch.empty(local_part(value).size(), dtype=value.dtype, device="cpu")
