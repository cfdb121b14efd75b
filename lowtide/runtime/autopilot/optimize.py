"""The way in: a model, a budget, and the autopilot that keeps the one within the other."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lowtide.config.memory import plan_from_rules
from lowtide.engines.base import Engine
from lowtide.engines.choose import choose_engine
from lowtide.engines.device_memory import memory_of_model
from lowtide.errors import ConfigError
from lowtide.profiling.layers import find_layers, named_layers
from lowtide.runtime.autopilot.autopilot import Autopilot
from lowtide.runtime.autopilot.plan_model import merged_config
from lowtide.runtime.autopilot.plan_source import BudgetSource
from lowtide.runtime.session.checks import refuse_foreign
from lowtide.runtime.session.forward_patch import patched_module
from lowtide.runtime.session.optimizer_state import PlacedState
from lowtide.tensors.compiled import refuse_compiled
from lowtide.tensors.optimizers import optimizer_of


def optimize(
    model: nn.Module,
    *,
    budget: int | str | None = None,
    memory: Any = None,
    optimizer: torch.optim.Optimizer | None = None,
    engine: Engine | str | None = None,
    group: Any = None,
    say: Callable[[str], None] | None = None,
    strict: bool | None = None,
) -> Autopilot:
    """Train `model` within a budget. See `lowtide.optimize`."""
    wanted = merged_config(memory, budget)
    optimizer = optimizer_of(optimizer, "lowtide.optimize")
    if not isinstance(model, nn.Module):
        raise ConfigError(f"lowtide.optimize: expected a torch.nn.Module, not {type(model).__name__}")
    if patched_module(model) is not None:
        raise ConfigError("lowtide.optimize: this model is already under a lowtide plan; call remove() on it first")
    refuse_compiled(model, "lowtide.optimize")
    refuse_foreign(model, optimizer, "lowtide.optimize")
    settled = wanted.settled(lambda: memory_of_model(model, optimizer))
    config = settled.config
    if settled.line and say is not None:
        say(f"lowtide: {settled.line}")
    layers = named_layers(model, config.layers) if config.layers is not None else find_layers(model)
    bare = plan_from_rules(dataclasses.replace(config, recompute=None, swap=None), layers)
    chosen = choose_engine(engine, model, bare)
    placed = PlacedState(model, optimizer, chosen, "lowtide.optimize")
    placed.check(bare.optimizer)
    if config.optimizer == "auto" and (optimizer is None or (refusal := placed.why_not())):
        if optimizer is not None and say is not None:
            say(f"lowtide: the optimizer's state stays on the device: {refusal}")
        config = dataclasses.replace(config, optimizer="keep")
    room = None if (config.strict if strict is None else strict) else functools.partial(_room, model, optimizer)
    source = BudgetSource(model, config, chosen, preset=settled.preset, say=say)
    how: Any = {"owns_engine": chosen is not engine, "placed": placed, "group": group, "say": say, "room": room}
    return Autopilot(model, source, optimizer, chosen, **how)


def _room(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> int:
    """The most that this rank can have on the device, with what it has already."""
    return memory_of_model(model, optimizer).free_bytes
