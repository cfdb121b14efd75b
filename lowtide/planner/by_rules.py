"""What the rules of a configuration leave to the solver: layers that run again, and for each storage some fates.

What: `layers_by_rule` are layers that a recompute rule names as such; `problem_of` is the step with these (or others)
running again, in which each storage may have the fates that its rule leaves it, or any that is free.
Cost: that of `make_problem`, linear in operators and nodes. Not covered: choosing (space.py).

`HostCosts` says what lowtide's own Python costs in a step, beside the operators that a plan asks for; `HOST_COSTS` has
the prices of a server's cores. `charged` puts those of recipes and codecs into a profile, so that solver, timeline and
prediction all see them.

Why a number of its own: the price of a recipe is the time of its operators, 0.14 ms for a norm's product of 2 MiB.
What stands around it (finding its inputs, the graph's hook, comparing fingerprints) takes as long again or longer: a
plan of many small recipes was promised a fiftieth of a step and took a tenth.

Where the figures come from: steps of 70 and of 370 ms on two cores (Llama and Qwen3-MoE, four layers; 12 to 52 recipes,
one layer that runs again), plain and planned in turn. With large tensors Python's own memory has left the cache each
time, so they are two to three times those of toy models (docs/history/LOG.md, "What swapping and recipes cost a CPU").

On an accelerator the host runs ahead of the device, so recipes and layers have no such price there; not yet measured on
a GPU. Cost: one pass over the nodes. Not covered: what each machine takes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from lowtide.config.memory import MemoryConfig
from lowtide.core.fate import Fate
from lowtide.core.profile import Profile
from lowtide.core.rules import Rule, Rules
from lowtide.planner.problem import Problem, fitting_min_bytes, make_problem
from lowtide.planner.rerun_layers import can_rerun, with_reruns
from lowtide.planner.smaller import form_of, is_form, with_codecs
from lowtide.planner.state_items import StateShares

_ALL = (Fate.KEEP, Fate.SWAP, Fate.RECOMPUTE)
NO_OTHER = "the rules leave no other fate"


def layers_by_rule(profile: Profile, config: MemoryConfig) -> tuple[str, ...]:
    """Layers that a recompute rule names as such: they run again as a whole, as they do without a budget."""
    able = set(can_rerun(profile))
    return config.rules().rerun(name for name in profile.layers if name in able)


def problem_of(
    profile: Profile,
    config: MemoryConfig,
    *,
    has_gradients: bool = False,
    layers: tuple[str, ...] | None = None,
    why_not_free: str = NO_OTHER,
    layer_seconds: float = 0.0,
    shares: StateShares | None = None,
) -> Problem:
    """The problem that the rules of `config` leave to the solver. `layers` run again; None: those that rules name.
    `why_not_free`: what is said of sites that may not have every fate. `layer_seconds`: see `HostCosts`. `shares` of
    the optimizer's state are its last items."""
    if layers is None:
        layers = layers_by_rule(profile, config)
    whole = step = with_reruns(profile, layers, more_seconds=layer_seconds)
    if shares is not None:
        step = shares.here(step, has_gradients=has_gradients)
        has_gradients &= not shares.frees_gradients
    rules = _left_rules(config, layers)
    names = {node.name for node in step.nodes if rules.decide(node.name).rule is None}
    least = min_bytes_of(profile, config)
    step = with_codecs(step, names, least, has_recipes=config.recomputes_freely)
    allowed = _allowed(step, config, rules, why_not_free)
    problem = make_problem(step, allowed=allowed, min_bytes=least, has_gradients=has_gradients)
    return problem if shares is None else shares.added_to(problem, whole)


def min_bytes_of(profile: Profile, config: MemoryConfig) -> int:
    """As written, or as it fits what the step saves."""
    return fitting_min_bytes(profile) if config.min_bytes is None else config.min_bytes


def _left_rules(config: MemoryConfig, layers: tuple[str, ...]) -> Rules:
    """What names layers that run again has been carried out."""

    def is_about_layers(rule: Rule) -> bool:
        return rule.fate is Fate.RECOMPUTE and any(rule.pattern.matches(name, is_site=False) for name in layers)

    return Rules(tuple(rule for rule in config.rules().rules if not is_about_layers(rule)))


def _allowed(
    profile: Profile, config: MemoryConfig, rules: Rules, why_not_free: str
) -> Mapping[str, tuple[tuple[Fate, ...], str]]:
    free = [Fate.KEEP]
    free += [Fate.SWAP] if config.swaps_freely else []
    free += [Fate.RECOMPUTE] if config.recomputes_freely else []
    allowed: dict[str, tuple[tuple[Fate, ...], str]] = {}
    forms = {node.name for node in profile.nodes if is_form(node)}
    for node in profile.nodes:
        decision = rules.decide(node.name)
        if decision.rule is not None:
            allowed[node.name] = ((decision.fate,), decision.reason)
        elif len(free) < len(_ALL):
            # To be made from a smaller form is a way to be kept.
            more = (Fate.RECOMPUTE,) if form_of(node.name) in forms else ()
            allowed[node.name] = ((*free, *more), why_not_free)
    return allowed


# -- what the runtime itself takes ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCosts:
    """Seconds. All zero: a runtime that takes no time, as on a virtual clock."""

    op_seconds: float = 0.0
    """For each operator of a forward pass whose recipes are proved (recipes/proof.py)."""
    recipe_seconds: float = 0.0
    """For each recipe that runs."""
    layer_seconds: float = 0.0
    """For each layer that runs again as a whole."""
    codec_seconds: float = 0.0
    """For each storage that is stored smaller, and comes back."""

    def on(self, device: str) -> HostCosts:
        """Those that show in a step on this device."""
        return self if device == "cpu" else HostCosts(op_seconds=self.op_seconds)


NO_COSTS = HostCosts()
HOST_COSTS = HostCosts(op_seconds=25e-6, recipe_seconds=0.5e-3, layer_seconds=2.5e-3, codec_seconds=0.25e-3)


def charged(profile: Profile, costs: HostCosts) -> Profile:
    """The profile of the same step, whose recipes and codecs take so much longer."""
    if not (costs.recipe_seconds or costs.codec_seconds):
        return profile
    nodes = []
    for node in profile.nodes:
        recipe, codec = node.recipe, node.codec
        if recipe is not None:
            recipe = dataclasses.replace(recipe, seconds=recipe.seconds + costs.recipe_seconds)
        if codec is not None:
            codec = dataclasses.replace(codec, seconds=codec.seconds + costs.codec_seconds)
        nodes.append(dataclasses.replace(node, recipe=recipe, codec=codec))
    return dataclasses.replace(profile, nodes=tuple(nodes))
