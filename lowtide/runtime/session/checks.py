"""What `apply` looks at before it wraps a model: whether it can, whether the rules fit, and what the user should know.

Why: every mistake that can be told from the model and the plan alone is told before the first step. What only the first
forward can show (operators, sites) is checked after it (runtime/session/tide.py, runtime/hooks/mismatch.py).

Cost: a walk over the modules for each rule, once. Not covered: the text of a `memory` section (config/).
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

from torch import nn

from lowtide.config.memory import load_memory, plan_from_rules
from lowtide.core.fate import Fate
from lowtide.core.plan import Plan
from lowtide.core.rules import Rule, unmatched_error
from lowtide.engines.base import Engine
from lowtide.errors import ConfigError
from lowtide.loss.attach import why_not
from lowtide.profiling.layers import find_layers, named_layers
from lowtide.runtime.session.forward_patch import patched_module
from lowtide.tensors.compiled import compiled_parts, how_compiled, lies_in, refuse_compiled
from lowtide.tensors.ranks import gather


def refuse_unsuitable(model: nn.Module) -> None:
    """Raise ConfigError for what is no eager module, or is under a plan already."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"lowtide.apply: expected a torch.nn.Module, not {type(model).__name__}")
    under = patched_module(model)
    if under is not None:
        what = f"its module '{under}'" if under else "this model"
        raise ConfigError(f"lowtide.apply: {what} is already under a lowtide plan; call remove() on that tide first")
    if isinstance(model, nn.DataParallel):
        raise ConfigError(
            "lowtide.apply: nn.DataParallel is not supported, its replicas cannot be told apart; use "
            "DistributedDataParallel, one process a device"
        )
    refuse_compiled(model, "lowtide.apply")


def refuse_foreign(model: nn.Module, optimizer: Any, call: str) -> None:
    """Raise ConfigError for an optimizer that has none of the model's parameters."""
    if optimizer is None:
        return
    own = {id(parameter) for parameter in model.parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if parameters and not any(id(parameter) in own for parameter in parameters):
        raise ConfigError(
            f"{call}: this {type(optimizer).__name__} has none of the parameters of {type(model).__name__}: it steps "
            f"{len(parameters)} others. Give the optimizer that trains the model, made from model.parameters()"
        )


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
    plan = dataclasses.replace(plan, mlp_rows=asked["mlp_rows"])
    return dataclasses.replace(plan, loss="sliced", loss_rows=asked["rows"]) if slices else plan


def _module_names(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_modules() if name]


def _matches_a_module(rule: Rule, names: list[str]) -> bool:
    return any(rule.pattern.matches(name, is_site=False) for name in names)


def rules_about_ops(model: nn.Module, plan: Plan) -> list[Rule]:
    """Rules that match no module: they may still match operators, which the first forward shows."""
    names = _module_names(model)
    return [rule for rule in plan.rules.rules if not _matches_a_module(rule, names) and rule.pattern.text != "*"]


def check_patterns(model: nn.Module, plan: Plan) -> None:
    """Raise ConfigError for a rule that matches nothing, as far as that can be told before a forward."""
    names = _module_names(model)
    for rule in plan.rules.rules:
        if rule.fate is Fate.RECOMPUTE and rule.pattern.text == "*":
            if not plan.layers:
                raise ConfigError(
                    f"{_at(rule)}recompute: all needs layers, and no repeated block was found in this model; name "
                    "them with layers: [...]"
                )
            continue
        if rule.pattern.text == "*" or _matches_a_module(rule, names):
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
    above = type(rule.pattern)(text=rule.pattern.text.rpartition(".")[0], segments=segments[:-1])
    return any(above.matches(name, is_site=False) for name in names)


def _at(rule: Rule) -> str:
    return f"{rule.where}: " if rule.where else ""


def recomputed_modules(modules: dict[str, nn.Module], plan: Plan) -> list[str]:
    """Modules, outermost first, that a recompute rule names and that are neither layers nor around or in such a one."""
    rules = plan.rules
    chosen: list[str] = []
    compiled = [name for name, module in modules.items() if how_compiled(module) is not None]
    for name in modules:
        if lies_in(name, compiled):
            continue
        if not name or name in plan.layers or any(layer.startswith(name + ".") for layer in plan.layers):
            continue
        decision = rules.decide(name, is_site=False)
        if decision.fate is not Fate.RECOMPUTE or decision.rule is None:
            continue
        layer = next((layer for layer in plan.layers if name.startswith(layer + ".")), None)
        if layer is None and decision.rule.pattern.text == "*":
            continue
        if layer is not None and rules.decide(layer, is_site=False).fate is Fate.RECOMPUTE:
            continue
        if not any(name.startswith(outer + ".") for outer in chosen):
            chosen.append(name)
    return chosen


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


def warn_about_parts_of_recomputed_layers(model: nn.Module, plan: Plan) -> None:
    """A recomputed layer keeps nothing but its inputs: a rule about a part of it has no effect there, and says so."""
    recomputed = [name for name in plan.layers if plan.rules.decide(name, is_site=False).fate is Fate.RECOMPUTE]
    names = _module_names(model)
    for rule in plan.rules.rules:
        if rule.fate is Fate.RECOMPUTE or rule.pattern.text == "*":
            continue
        matched = [name for name in names if rule.pattern.matches(name, is_site=False)]
        inside = {layer for layer in recomputed for name in matched if name.startswith(layer + ".")}
        inside -= {layer for layer in inside if rule.pattern.matches(layer, is_site=False)}
        if inside:
            first = next(layer for layer in recomputed if layer in inside)
            others = f" and {len(inside) - 1} more" if len(inside) > 1 else ""
            warnings.warn(
                f"lowtide: {_at(rule)}{rule} has no effect inside '{first}'{others}: a recomputed layer holds on to "
                "nothing but its inputs. To treat its parts differently, name the modules to recompute instead of the "
                "layer.",
                stacklevel=4,
            )


def warn_about_parts_of_compiled_modules(model: nn.Module, plan: Plan) -> None:
    """A compiled module is one node: a rule about a part of it has no effect there, and says so."""
    compiled = compiled_parts(model)
    names = _module_names(model) if compiled else []
    for rule in plan.rules.rules:
        if rule.pattern.text == "*":
            continue
        inside = [
            part for name in names if rule.pattern.matches(name, is_site=False) if (part := lies_in(name, compiled))
        ]
        inside = [part for part in inside if not rule.pattern.matches(part, is_site=False)]
        if inside:
            others = f" and {len(set(inside)) - 1} more" if len(set(inside)) > 1 else ""
            warnings.warn(
                f"lowtide: {_at(rule)}{rule} has no effect inside '{inside[0]}'{others}: a compiled module is one "
                "node. Name the module itself, or compile only parts of it.",
                stacklevel=4,
            )


def warn_about_tiers(plan: Plan, engine: Engine) -> None:
    """A rule may name a tier that the engine does not have; say where its activations go."""
    for rule in plan.rules.rules:
        if rule.tier is not None and rule.tier.value not in engine.tiers:
            warnings.warn(
                f"lowtide: {_at(rule)}engine '{engine.name}' has no tier '{rule.tier.value}'; these activations go to "
                f"'{engine.tiers[0]}'.",
                stacklevel=4,
            )


def refuse_capture(model: nn.Module, engine: Engine) -> None:
    """Raise where the forward is not run but recorded, as a graph that the device replays."""
    if engine.is_capturing():
        raise ConfigError(
            f"lowtide: a graph of the device is being captured around the forward of {type(model).__name__}; a replay "
            "would copy to host memory that belongs to another step by then. Call remove() on the tide before the "
            "capture, or capture nothing that is trained under a plan."
        )


def foreign_hooks_error(hooks: tuple[Callable, Callable]) -> ConfigError:
    """For a model that is called inside saved-tensor hooks of somebody else."""
    name = f"{getattr(hooks[0], '__module__', '?')}.{getattr(hooks[0], '__qualname__', '?')}"
    return ConfigError(
        f"lowtide: the model was called inside other saved-tensor hooks ({name}). PyTorch calls only the innermost "
        "pair, so those would see nothing. Leave them out, enter them around single modules inside the model, or call "
        "tide.remove() first."
    )
