"""The way in: a model, a plan, and the tide that carries it out.

What: `apply` looks at the model before it is wrapped: whether it can be, whether the rules fit, and what the user
should know. Every mistake that can be told from the model and the plan alone is told before the first step. What only
the first forward can show (operators, sites) is checked after it (wrap.py, runtime/hooks/first_forward.py).
Cost: a walk over the modules for each rule, once. Not covered: the text of a `memory` section (config/).
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lowtide.config.memory import MemoryConfig, load_memory, plan_from_rules
from lowtide.core.fate import Fate
from lowtide.core.plan import Plan
from lowtide.core.rules import Rule, past_error, unmatched_error
from lowtide.engines.base import Engine, EngineChoice
from lowtide.engines.choose import choose_engine
from lowtide.errors import ConfigError
from lowtide.loss.attach import attach_where, why_not
from lowtide.profiling.layers import find_layers, named_layers
from lowtide.profiling.observe_step import refuse_lazy
from lowtide.runtime.session.forward_patch import patched_module
from lowtide.runtime.session.optimizer_state import PlacedState
from lowtide.runtime.session.tide import Tide
from lowtide.runtime.session.wrap import matches_a_module, module_names
from lowtide.tensors.compiled import compiled_parts, lies_in, refuse_compiled
from lowtide.tensors.kinds import swapped_weights_of
from lowtide.tensors.optimizers import optimizer_of, parameters_of
from lowtide.tensors.ranks import ALONE, gather


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
    optimizer = checked(model, optimizer, "lowtide.apply", is_its_own=not moves_state)
    refuse_lazy(model, "lowtide.apply")
    plan = plan_of(model, memory)
    if plan.moves_weights and swapped_weights_of(model) is None:
        raise ConfigError(
            "lowtide.apply: this plan has weights elsewhere until their turn, which lowtide.optimize carries out; call "
            "it with the same memory section"
        )
    check_patterns(model, plan, is_part=group == ALONE)
    agree_across_ranks(plan, group)
    warn_about_checkpointing(model)
    warn_about_parts(model, plan)
    chosen = choose_engine(engine, model, plan)
    warn_about_tiers(plan, chosen)
    placed = PlacedState(optimizer, chosen, "lowtide.apply") if moves_state else None
    if placed is not None:
        placed.check(plan.optimizer)
    rows: dict[str, Any] = {"rows": plan.loss_rows, "layer_rows": plan.layer_rows, "row_wise": plan.row_wise}
    loss = attach_where(model, may=plan.loss == "sliced", must=True, **rows)
    try:
        return Tide(model, plan, optimizer, chosen, owns_engine=chosen is not engine, placed=placed, loss=loss)
    except BaseException:
        loss.close()
        raise


def checked(model: nn.Module, optimizer: Any, call: str, *, parts: bool = False, is_its_own: bool = False) -> Any:
    """The optimizer inside any wrappers. Raises ConfigError for a model that is no eager module or is under a plan
    already, and for an optimizer that has none of its parameters. `parts`: a compiled part is refused as well.
    `is_its_own`: the optimizer has been checked. In the middle of `torch.func.functional_call` other tensors play the
    model's parameters."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{call}: expected a torch.nn.Module, not {type(model).__name__}")
    under = patched_module(model)
    if under is not None:
        what = f"its module '{under}'" if under else "this model"
        raise ConfigError(f"{call}: {what} is already under a lowtide plan; call remove() on that tide first")
    if swapped_weights_of(model) is None and any(map(swapped_weights_of, model.modules())):
        raise ConfigError(f"{call}: swap_weights has a part of this model; call remove() there, and give it this model")
    if isinstance(model, nn.DataParallel):
        raise ConfigError(
            "lowtide: nn.DataParallel is not supported, its replicas cannot be told apart; use "
            "DistributedDataParallel, one process a device"
        )
    refuse_compiled(model, call, parts=parts)
    optimizer = optimizer_of(optimizer, call)
    own = {id(parameter) for parameter in model.parameters()}
    parameters = [] if optimizer is None or is_its_own else parameters_of(optimizer)
    if parameters and not any(id(parameter) in own for parameter in parameters):
        raise ConfigError(
            f"{call}: this {type(optimizer).__name__} has none of the parameters of {type(model).__name__}: it steps "
            f"{len(parameters)} others. Give the optimizer that trains the model, made from model.parameters()"
        )
    return optimizer


def plan_of(model: nn.Module, memory: Any) -> Plan:
    """The plan that `memory` asks for on this model. Raises ConfigError where it does not fit."""
    if isinstance(memory, Plan):
        named_layers(model, memory.layers)
        return memory
    config = load_memory(memory)
    layers = named_layers(model, config.layers) if config.layers is not None else find_layers(model)
    plan = plan_from_rules(config, layers)
    asked = config.slices_loss
    slices = asked["must"] or (asked["may"] and not why_not(model))
    plan = dataclasses.replace(plan, layer_rows=asked["layer_rows"], row_wise=asked["row_wise"])
    return dataclasses.replace(plan, loss="sliced", loss_rows=asked["rows"]) if slices else plan


def check_patterns(model: nn.Module, plan: Plan, *, is_part: bool = False) -> None:
    """Raise ConfigError for a rule that matches nothing, as far as that can be told before a forward, and for one that
    reaches past the model, unless it `is_part` of one whose other parts have more layers."""
    names = module_names(model)
    for rule in plan.rules.rules:
        if not is_part and (error := past_error(rule, names)) is not None:
            raise error
        if rule.fate is Fate.RECOMPUTE and rule.pattern.text == "*":
            if not plan.layers:
                raise ConfigError(
                    f"{rule.at}recompute: all needs layers, and no repeated block was found in this model; name "
                    "them with layers: [...]"
                )
            continue
        if rule.pattern.text == "*" or matches_a_module(rule, names):
            continue
        if rule.fate is Fate.RECOMPUTE:
            error = unmatched_error(rule, names)
            raise ConfigError(
                f"{error} (recompute acts on layers and modules; single operators can be kept or swapped)"
            )
        if not _may_be_an_op(rule, names):
            raise unmatched_error(rule, names)


def _may_be_an_op(rule: Rule, names: list[str]) -> bool:
    """Everything but the last part of the pattern matches a module, or there is nothing else."""
    segments = rule.pattern.segments
    if len(segments) == 1:
        return True
    if segments[-1].ranges or segments[-1].text.isdecimal():
        return False  # no operator is called by a number
    above = type(rule.pattern)(text=rule.pattern.text.rpartition(".")[0], segments=segments[:-1])
    return any(above.matches(name, is_site=False) for name in names)


def agree_across_ranks(plan: Plan, group: Any = None) -> None:
    """Raise ConfigError on every rank of `group` if its ranks were given different plans. Collective."""
    digests = gather(plan.digest(), group)
    if len(set(digests)) > 1:
        listed = ", ".join(f"rank {rank}: {digest}" for rank, digest in enumerate(digests))
        raise ConfigError(
            f"lowtide.apply: the ranks were given different memory plans ({listed}); give every rank the same rules"
        )


def warn_about_checkpointing(model: nn.Module) -> None:
    """Modules that checkpoint by themselves are left as they are; say so."""
    names = [name for name, module in model.named_modules() if getattr(module, "gradient_checkpointing", False) is True]
    if names:
        warnings.warn(
            f"lowtide: {len(names)} modules of this model already use gradient checkpointing ('{names[0]}', ...). They "
            "are left as they are, and rules act on their inputs only; switch it off to let lowtide decide "
            "(model.gradient_checkpointing_disable()).",
            stacklevel=4,
        )


def warn_about_parts(model: nn.Module, plan: Plan) -> None:
    """A rule about a part of a recomputed layer, or of a compiled module, has no effect there, and says so."""
    compiled, names, layers = [*compiled_parts(model)], module_names(model), plan.rules.rerun(plan.layers)
    why_layer = (
        "a recomputed layer holds on to nothing but its inputs. To treat its parts differently, name the modules to "
        "recompute instead of the layer."
    )
    why_compiled = "a compiled module is one node. Name the module itself, or compile only parts of it."
    for rule in plan.rules.rules:
        for wholes, why in ((() if rule.fate is Fate.RECOMPUTE else layers, why_layer), (compiled, why_compiled)):
            matched = [name for name in names if rule.pattern.matches(name, is_site=False)]
            found = {lies_in(name, wholes) for name in matched} - set(matched) if rule.pattern.text != "*" else set()
            inside = [whole for whole in wholes if whole in found]
            if inside:
                others = f" and {len(inside) - 1} more" if len(inside) > 1 else ""
                warnings.warn(
                    f"lowtide: {rule.at}{rule} has no effect inside '{inside[0]}'{others}: {why}", stacklevel=4
                )


def warn_about_tiers(plan: Plan, engine: Engine) -> None:
    """A rule may name a tier that the engine does not have; say where its activations go."""
    for rule in plan.rules.rules:
        if rule.tier is not None and rule.tier.value not in engine.tiers:
            warnings.warn(
                f"lowtide: {rule.at}engine '{engine.name}' has no tier '{rule.tier.value}'; these activations go to "
                f"'{engine.tiers[0]}'.",
                stacklevel=4,
            )
