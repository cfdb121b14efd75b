"""A budget in bytes and a profile give a plan.

What: `plan_profile` asks for the fastest fates that rules leave (by_rules.py, fastest.py), and writes them down as a
`Plan` with predictions, an account of the worst moment, and a reason for each decision.

Cost: the solver's. Not covered: what is tried (fastest.py), how the profile came about, and carrying the plan out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from lowtide.core.decisions import Prediction, SiteDecision
from lowtide.core.fate import Fate
from lowtide.core.pattern import Pattern
from lowtide.core.plan import Plan
from lowtide.core.profile import Profile
from lowtide.core.rules import Rule, Rules
from lowtide.errors import BudgetError
from lowtide.planner.again import call_seconds
from lowtide.planner.by_rules import NO_OTHER, layers_by_rule, min_bytes_of
from lowtide.planner.fastest import Asked, Found
from lowtide.planner.host_costs import NO_COSTS, HostCosts, charged
from lowtide.planner.memory_breakdown import memory_breakdown
from lowtide.planner.min_peak import UNREACHABLE
from lowtide.planner.place_state import Choice, choose_placement
from lowtide.planner.problem import decisions
from lowtide.planner.state_items import StateShares, split, state_curve
from lowtide.planner.ways_out import Change, explained
from lowtide.timeline.memory import plain_curve
from lowtide.timeline.step import Item, Link
from lowtide.units import format_seconds

if TYPE_CHECKING:
    from lowtide.config.memory import MemoryConfig

_WAY_OUT_SECONDS = 1.0
"""For each solution of a step with a change."""


def plan_profile(
    profile: Profile,
    config: MemoryConfig,
    *,
    link: Link,
    budget_bytes: int | None = None,
    has_gradients: bool = False,
    num_micro_batches: int = 1,
    time_limit_seconds: float = 5.0,
    costs: HostCosts = NO_COSTS,
    progress: Callable[[str], None] | None = None,
    layers: tuple[str, ...] | None = None,
    with_ways_out: bool = True,
    changes: Sequence[Change] = (),
    weighs_touch: bool = True,
) -> Plan:
    """The fastest plan whose peak is at most the budget (`config.budget`, unless `budget_bytes` says otherwise).

    `costs` are those of the runtime itself. Where proving recipes would show, a plan without them is tried too. Where
    memory that is taken again has a price, so is one that swaps nothing, unless `weighs_touch` is False.
    `num_micro_batches` share what the optimizer's state costs on its way, where `config.optimizer` lets it travel.
    `layers`: exactly these run again as a whole, whatever rules say.
    Raises `BudgetError` when none fits, with the floor, and ways out unless nobody wants them; `changes` are more of
    them (ways_out.py).
    """
    budget = config.budget if budget_bytes is None else budget_bytes
    assert isinstance(budget, int)
    costs = costs.on(profile.device)
    log_seconds = costs.op_seconds
    asked = Asked(
        charged(profile, costs), config, link, budget, has_gradients, time_limit_seconds, progress or _say_nothing,
        layers, None, with_ways_out, weighs_touch, costs.layer_seconds,
    )  # fmt: skip
    try:
        return _made(asked, log_seconds, num_micro_batches)
    except BudgetError as error:
        if not with_ways_out or error.floor_bytes >= UNREACHABLE:
            raise
        refusal = error.with_traceback(None)  # its frames would be a cycle, and hold all that is above them

    def plan_again(other: Profile, memory: MemoryConfig) -> Plan:
        limits: Any = {"time_limit_seconds": _WAY_OUT_SECONDS, "with_ways_out": False}
        again = dataclasses.replace(asked, profile=charged(other, costs), config=memory, **limits)
        return _made(again, log_seconds, num_micro_batches)

    raise explained(
        refusal,
        asked.problem(layers_by_rule(profile, config)),
        config,
        has_gradients=has_gradients,
        plan_again=plan_again,
        changes=changes,
    )


def _made(asked: Asked, log_seconds: float, num_micro_batches: int) -> Plan:
    profile, config = asked.profile, asked.config
    if config.optimizer == "keep":
        return _plan_of(asked.fastest(log_seconds))

    def fit(shares: StateShares | None, with_ways_out: bool) -> Found:
        host_bytes = config.host_budget
        if shares is not None and host_bytes is not None:
            host_bytes -= shares.nbytes
        limits = dataclasses.replace(config, host_budget=host_bytes)
        says_more = with_ways_out and asked.with_ways_out
        return dataclasses.replace(asked, config=limits, shares=shares, with_ways_out=says_more).fastest(log_seconds)

    choice = choose_placement(profile, config, link=asked.link, num_micro_batches=num_micro_batches, fit=fit)
    return _plan_of(choice.found, choice)


def _plan_of(found: Found, choice: Choice[Found] | None = None) -> Plan:
    """What was found, written down. `choice` says what became of the optimizer's state, if anybody asked."""
    asked, problem, solution = found.asked, found.problem, found.solution
    profile, step, timeline, config = problem.profile, problem.step, solution.timeline, asked.config
    own_fates, _ = split(problem, solution.fates)
    reasons = {i: _reason(item, fate) for i, (item, fate) in enumerate(zip(step.items, own_fates, strict=False))}
    plain_problem = asked.plain_problem() if found.layers or asked.shares is not None else problem
    plain_bytes = plain_curve(plain_problem.step)
    num_forward = step.num_forward_ticks
    forward = timeline.curve[:num_forward]
    bases = [tick.base_bytes for tick in step.ticks[:num_forward]]
    held = (total - base + stays for total, base, stays in zip(forward, bases, problem.held, strict=True))
    again = sum(call_seconds(asked.profile, name, asked.layer_seconds) for name in found.layers)
    sites = decisions(problem, own_fates, timeline.evict_by, timeline.prefetch_at, reasons)
    codec_seconds = sum(site.codec.seconds for site in sites if site.codec is not None)
    made_seconds = timeline.recompute_seconds - codec_seconds - (choice.streamed_seconds if choice else 0.0)
    prediction = Prediction(
        peak_bytes=timeline.peak_bytes,
        step_seconds=found.step_seconds + (choice.seconds - choice.played_seconds if choice else 0.0),
        stall_seconds=max(0.0, timeline.stall_seconds - (choice.stall_seconds if choice else 0.0)),
        recompute_seconds=max(0.0, made_seconds) + again,
        gap=choice.gap if choice else found.gap,
        plain_peak_bytes=int(plain_bytes.max()),
        plain_seconds=plain_problem.step.compute_seconds,
        floor_bytes=choice.floor_bytes if choice else found.floor_bytes,
        forward_peak_bytes=int(max(forward, default=0)),
        forward_held_bytes=int(max(held, default=0)),
        check_seconds=found.check_seconds,
        codec_seconds=codec_seconds,
        optimizer_seconds=choice.seconds if choice else 0.0,
        touch_seconds=found.touch_seconds,
        swap_excess_seconds=found.swap_excess_seconds,
        certainty=_certainty(profile),
    )
    there = None
    if asked.shares is not None:
        there = state_curve(problem, solution.fates, timeline.evict_by, timeline.prefetch_at).tolist()
    return Plan(
        layers=profile.layers,
        # Other storages that a recompute rule names are made again one by one.
        rules=_with_layers(config.rules(), found.layers),
        min_bytes=min_bytes_of(asked.profile, config),
        host_budget_bytes=asked.host_budget_bytes,
        disk_budget_bytes=config.disk_budget,
        disk_path=None if config.disk_path is None else str(config.disk_path),
        sites=(*sites, *_dropped(asked.profile, found)),
        is_solved=True,
        check=config.check,
        loss=asked.profile.loss,
        budget_bytes=asked.budget_bytes,
        predicted=prediction,
        account=memory_breakdown(
            problem,
            plain_bytes.tolist(),
            timeline.curve,
            plain_problem,
            moving=there,
            slot_bytes=choice.slot_bytes if choice else 0,
            has_gradients=asked.has_gradients,
        ),
        optimizer=choice.placement if choice else None,
    )


def _with_layers(rules: Rules, layers: tuple[str, ...]) -> Rules:
    """The rules as the runtime has to carry them out: of those about recompute, one for each layer that runs again."""
    own = []
    for name in layers:
        decision = rules.decide(name, is_site=False)
        where = decision.rule.where if decision.rule is not None and decision.fate is Fate.RECOMPUTE else ""
        own.append(Rule(pattern=Pattern.parse(name), fate=Fate.RECOMPUTE, where=where))
    return Rules((*rules.without_recompute().rules, *own))


def _dropped(profile: Profile, found: Found) -> Iterator[SiteDecision]:
    """What goes with the layers that run again."""
    there = {node.name for node in found.problem.profile.nodes}
    charged: set[str] = set()
    for node in profile.sites:
        if node.name in there:
            continue
        assert node.layer is not None
        cost = 0.0 if node.layer in charged else call_seconds(profile, node.layer, found.asked.layer_seconds)
        charged.add(node.layer)
        yield SiteDecision(
            name=node.name,
            layer=node.layer,
            nbytes=node.nbytes,
            dtype=node.dtype,
            fate=Fate.RECOMPUTE,
            cost_seconds=cost,
            reason="its layer runs again",
        )


def _certainty(profile: Profile) -> str:
    if profile.is_fake:
        return f"bytes traced without a device, times by roofline of {profile.device}"
    return f"bytes and times observed on {profile.device}"


def _reason(item: Item, fate: Fate) -> str:
    if len(item.fates) == 1:
        return NO_OTHER
    if fate is Fate.KEEP:
        return "fits"
    if fate is Fate.SWAP:
        return "away and back while compute runs"
    return f"made again in {format_seconds(item.recipe_seconds)}"


def _say_nothing(line: str) -> None:
    pass
