"""The way in: a model, a budget, and the autopilot that keeps the one within the other."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lowtide.config.memory import plan_from_rules
from lowtide.core.log import LOG
from lowtide.engines.base import Engine, EngineChoice
from lowtide.engines.choose import choose_engine, memory_of_model
from lowtide.errors import ConfigError
from lowtide.profiling.layers import find_layers, named_layers
from lowtide.runtime.autopilot.autopilot import Autopilot
from lowtide.runtime.autopilot.plan_model import merged_config
from lowtide.runtime.autopilot.planner import Planner
from lowtide.runtime.session.apply import refuse_foreign
from lowtide.runtime.session.forward_patch import patched_module
from lowtide.runtime.session.optimizer_state import PlacedState
from lowtide.runtime.session.tides import Tides
from lowtide.tensors.compiled import refuse_compiled
from lowtide.tensors.optimizers import optimizer_of
from lowtide.tensors.ranks import check_group


def optimize(
    model: nn.Module,
    budget: int | str | None = None,
    *,
    memory: Any = None,
    optimizer: torch.optim.Optimizer | None = None,
    engine: EngineChoice = None,
    group: Any = None,
    strict: bool | None = None,
    place: Callable[[Any, Engine, str], PlacedState] = PlacedState,
) -> Tides:
    """See `lowtide.optimize`. `place`: makes what keeps the optimizer's state, and weights, where plans have them."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"lowtide.optimize: expected a torch.nn.Module, not {type(model).__name__}")
    check_group(group, "lowtide.optimize")
    wanted = merged_config(memory, budget)
    optimizer = optimizer_of(optimizer, "lowtide.optimize")
    if patched_module(model) is not None:
        raise ConfigError("lowtide.optimize: this model is already under a lowtide plan; call remove() on it first")
    refuse_compiled(model, "lowtide.optimize")
    refuse_foreign(model, optimizer, "lowtide.optimize")
    settled = wanted.settled(lambda: memory_of_model(model, optimizer))
    config = settled.config
    if settled.line:
        LOG.info("lowtide: %s", settled.line)
    layers = named_layers(model, config.layers) if config.layers is not None else find_layers(model)
    bare = plan_from_rules(dataclasses.replace(config, recompute=None, swap=None), layers)
    chosen = choose_engine(engine, model, bare)
    placed = place(optimizer, chosen, "lowtide.optimize")
    placed.check(bare.optimizer)
    if config.optimizer == "auto" and (optimizer is None or (refusal := placed.why_not())):
        if optimizer is not None:
            LOG.info("lowtide: the optimizer's state stays on the device: %s", refusal)
        config = dataclasses.replace(config, optimizer="keep")
    room = None if (config.strict if strict is None else strict) else functools.partial(_room, model, optimizer)

    def autopilot(tides: Tides) -> Autopilot:
        return Autopilot(tides, Planner(model, config, chosen, group, room=room))

    how: Any = {"owns_engine": chosen is not engine, "placed": placed, "group": group}
    try:
        return Tides(model, optimizer, chosen, autopilot, call="lowtide.optimize", **how)
    except BaseException:
        placed.remove()
        raise


def _room(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> int:
    """The most that this rank can have on the device, with what it has already."""
    return memory_of_model(model, optimizer).free_bytes
