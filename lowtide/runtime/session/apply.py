"""The way in: a model, a plan, and the tide that carries it out."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lowtide.config.memory import MemoryConfig
from lowtide.core.plan import Plan
from lowtide.engines.base import EngineChoice
from lowtide.engines.choose import choose_engine
from lowtide.loss.attach import attach_where
from lowtide.runtime.session.checks import (
    agree_across_ranks,
    check_patterns,
    plan_of,
    refuse_foreign,
    refuse_unsuitable,
    warn_about_checkpointing,
    warn_about_parts_of_compiled_modules,
    warn_about_parts_of_recomputed_layers,
    warn_about_tiers,
)
from lowtide.runtime.session.optimizer_state import PlacedState
from lowtide.runtime.session.tide import Tide
from lowtide.tensors.optimizers import optimizer_of


def apply(
    model: nn.Module,
    memory: Plan | MemoryConfig | Mapping[str, Any] | str | os.PathLike[str],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    engine: EngineChoice = None,
    group: Any = None,
    moves_state: bool = True,
) -> Tide:
    """Carry out `memory` on `model` until `tide.remove()`. See `lowtide.apply`.

    `moves_state`: also of the optimizer, if the plan says so; False where the caller sees to that (runtime/autopilot).
    """
    refuse_unsuitable(model)
    plan = plan_of(model, memory)
    optimizer = optimizer_of(optimizer, "lowtide.apply")
    refuse_foreign(model, optimizer, "lowtide.apply")
    check_patterns(model, plan)
    agree_across_ranks(plan, group)
    warn_about_checkpointing(model)
    warn_about_parts_of_recomputed_layers(model, plan)
    warn_about_parts_of_compiled_modules(model, plan)
    chosen = choose_engine(engine, model, plan)
    warn_about_tiers(plan, chosen)
    placed = PlacedState(optimizer, chosen, "lowtide.apply") if moves_state else None
    if placed is not None:
        placed.check(plan.optimizer)
    loss = attach_where(model, may=plan.loss == "sliced", must=True, rows=plan.loss_rows, mlp_rows=plan.mlp_rows)
    try:
        return Tide(model, plan, optimizer, chosen, owns_engine=chosen is not engine, placed=placed, loss=loss)
    except BaseException:
        if loss is not None:
            loss.remove()
        raise
