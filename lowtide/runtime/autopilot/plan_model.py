"""`lowtide.plan`: a model, a batch and a budget give a plan, without a device and without a training step.

What: traces one step with fake tensors (bytes exact, times by the roofline of the hardware), then plans for the link of
that hardware. For measured times use `lowtide.observe` or `lowtide.optimize`.
Cost: a second or two for the trace, a second for the solver. Not covered: carrying the plan out (tide.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from lowtide.config.memory import MemoryConfig, check_unit, load_memory
from lowtide.core.plan import Plan
from lowtide.core.profile import Profile
from lowtide.engines.choose import memory_of_model
from lowtide.errors import ConfigError, check_function
from lowtide.loss.attach import attach_where
from lowtide.planner.advice import ACTIVATIONS, HALF_A_BATCH, LOSS, Change
from lowtide.planner.by_rules import HOST_COSTS
from lowtide.planner.plan_profile import plan_profile
from lowtide.profiling.fake.trace import trace
from lowtide.tensors.compiled import refuse_compiled
from lowtide.tensors.kinds import device_of
from lowtide.tensors.optimizers import optimizer_of
from lowtide.timeline.hardware import Hardware, known_names, load_hardware, memory_of_hardware


def plan(
    model: nn.Module,
    batch: Any,
    budget: int | str | None = None,
    *,
    memory: Any = None,
    host_budget: int | str | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    hardware: Hardware | str | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """The fastest plan for one step of `model` on `batch` whose peak of device bytes stays within `budget`.

    Traces with fake tensors: runs no training step, needs no device and no memory. `batch` is a mapping
    (`model(**batch)`), a tuple (`model(*batch)`) or a callable without arguments that returns the loss; the loss is the
    output itself, its `.loss`, or `loss(output)`. `budget` is bytes or text: "20GiB", "90%" of the device, "auto" (what
    it has less a headroom); `memory` may set limits by rules. `hardware` is a
    name (`h200`, `ascend910b`, `cpu`, ...), a TOML file, or absent: that of the model's device.
    Raises `BudgetError` when no plan fits, `ConfigError` for every other mistake.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"lowtide.plan: expected a torch.nn.Module, not {type(model).__name__}")
    check_function("lowtide.plan", "loss", loss, "a function that makes the loss of the model's output")
    check_function("lowtide.plan", "progress", progress)
    config = merged_config(memory, budget, host_budget)
    refuse_compiled(model, "lowtide.plan", parts=True)
    optimizer = optimizer_of(optimizer, "lowtide.plan")
    name = hardware_of_device(device_of(model)) if hardware is None else hardware
    chosen = name if isinstance(name, Hardware) else load_hardware(name)
    if progress is not None:
        progress("tracing one step")
    named = hardware is not None
    config, budget_bytes, line = config.settled(lambda: memory_of_hardware(chosen) if named else memory_of_model(model))
    if line and progress is not None:
        progress(line)
    with attach_where(model, **config.slices_loss):
        profile = trace(model, batch, hardware=chosen, loss=loss, optimizer=optimizer)
    how: Any = {"link": chosen.link, "costs": HOST_COSTS, "progress": progress}
    half = _half(batch)
    if half is not None:

        def halved() -> Profile:
            with attach_where(model, **config.slices_loss):
                return trace(model, half, hardware=chosen, loss=loss, optimizer=optimizer)

        how["changes"] = (Change(text=HALF_A_BATCH, helps=frozenset({ACTIVATIONS, LOSS}), profile=halved),)
    return plan_profile(profile, config, budget_bytes=budget_bytes, **how)


def _half(batch: Any) -> Any:
    """The first half of a batch of tensors; None where that is not all there is to it."""
    tensors = list(batch.values()) if isinstance(batch, Mapping) else list(batch) if isinstance(batch, tuple) else []
    if not tensors or not all(isinstance(tensor, torch.Tensor) and tensor.dim() for tensor in tensors):
        return None
    rows = {tensor.shape[0] for tensor in tensors}
    if len(rows) > 1 or min(rows) < 2:
        return None
    part = slice(min(rows) // 2)
    if isinstance(batch, Mapping):
        return {name: tensor[part] for name, tensor in batch.items()}
    return tuple(tensor[part] for tensor in batch)


def merged_config(memory: Any, budget: int | str | None, host_budget: int | str | None = None) -> MemoryConfig:
    """The `memory` section with the budgets of the call written over its own. Raises ConfigError without a budget."""
    if hasattr(budget, "param_groups"):
        raise ConfigError("memory.budget: expected a size such as 20GiB; the optimizer goes to optimizer=")
    if isinstance(budget, Mapping | MemoryConfig):
        raise ConfigError("memory.budget: expected a size such as 20GiB; a section goes to memory=, not to budget=")
    changes = {key: value for key, value in (("budget", budget), ("host_budget", host_budget)) if value is not None}
    if memory is None or isinstance(memory, Mapping):
        config = load_memory({**(memory or {}), **changes})
    else:
        config, parsed = load_memory(memory), load_memory(changes)
        config = dataclasses.replace(config, **{key: getattr(parsed, key) for key in changes})
    if not config.has_budget:
        raise ConfigError("memory.budget: a budget is needed to plan for; write e.g. budget='20GiB'")
    check_unit("memory.budget", config.budget)
    return config


def hardware_of_device(device: torch.device) -> str:
    """The name of the hardware file for a device. Raises ConfigError for one without a file."""
    if device.type in ("cpu", "meta"):
        return "cpu"
    full_name = getattr(torch.get_device_module(device.type), "get_device_name", lambda _: device.type)(device)
    squeezed = full_name.lower().replace(" ", "")
    known = known_names("devices")
    names = [name for name in known if name in squeezed]
    if not names:
        raise ConfigError(
            f"hardware: nothing is known about '{full_name}'; pass hardware= one of {', '.join(known)}, or "
            "the path of a TOML file of your own"
        )
    return max(names, key=len)
