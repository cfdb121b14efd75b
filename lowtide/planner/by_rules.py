"""What the rules of a configuration leave to the solver: layers that run again, and for each storage some fates.

What: `layers_by_rule` are layers that a recompute rule names as such; `problem_of` is the step with these (or others)
running again, in which each storage may have the fates that its rule leaves it, or any that is free.
Cost: that of `make_problem`, linear in operators and nodes. Not covered: choosing (fastest.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from lowtide.core.fate import Fate
from lowtide.core.profile import Profile
from lowtide.core.rules import Rule, Rules
from lowtide.planner.problem import Problem, fitting_min_bytes, make_problem
from lowtide.planner.rerun_layers import can_rerun, run_again
from lowtide.planner.smaller import form_of, is_form, with_codecs
from lowtide.planner.state_items import StateShares

if TYPE_CHECKING:
    from lowtide.config.memory import MemoryConfig

_ALL = (Fate.KEEP, Fate.SWAP, Fate.RECOMPUTE)
NO_OTHER = "the rules leave no other fate"


def layers_by_rule(profile: Profile, config: MemoryConfig) -> tuple[str, ...]:
    """Layers that a recompute rule names as such: they run again as a whole, as they do without a budget."""
    rules = config.rules()
    able = set(can_rerun(profile))
    return tuple(
        name for name in profile.layers if name in able and rules.decide(name, is_site=False).fate is Fate.RECOMPUTE
    )


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
    whole = step = run_again(profile, layers, more_seconds=layer_seconds)
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
    rules = config.rules()
    return Rules(tuple(rule for rule in rules.rules if not layers or not _is_about_layers(rule, layers)))


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


def _is_about_layers(rule: Rule, layers: tuple[str, ...]) -> bool:
    return rule.fate is Fate.RECOMPUTE and any(rule.pattern.matches(name, is_site=False) for name in layers)
