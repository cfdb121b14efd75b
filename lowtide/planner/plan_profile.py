"""A budget in bytes and a profile give a plan.

What: `plan_profile` asks for the fastest of all that rules leave (by_rules.py, space.py), and writes it down as a
`Plan` with predictions, an account of the worst moment, and a reason for each decision.

Cost: the solver's. Not covered: what is tried (space.py), how the profile came about, and carrying the plan out.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lowtide.config.memory import MemoryConfig
from lowtide.core.decisions import OptimizerPlacement, Prediction, SiteDecision, WeightsPlacement
from lowtide.core.fate import Fate
from lowtide.core.plan import Plan
from lowtide.core.profile import Profile
from lowtide.core.rules import Pattern, Rule, Rules
from lowtide.planner.advice import Change, explained, memory_breakdown
from lowtide.planner.by_rules import NO_COSTS, HostCosts, charged, layers_by_rule, min_bytes_of, problem_of
from lowtide.planner.in_backward import WeightsInTurn, placement_of, updates_allowed, weights_allowed
from lowtide.planner.min_peak import UNREACHABLE
from lowtide.planner.place_state import StateSeconds, placed, shared_seconds, shares_allowed
from lowtide.planner.problem import decisions
from lowtide.planner.rerun_layers import call_seconds
from lowtide.planner.space import Question, Space, Way, WayPlan
from lowtide.planner.state_items import StateShares, split
from lowtide.timeline.memory import plain_curve
from lowtide.timeline.step import Item, Link
from lowtide.units import format_seconds

_WAY_OUT_SECONDS = 1.0
"""For each solution of a step with a change."""
_NO_TIME = 1.0 + 1e-9
"""Not slower than this, and nothing is to be gained."""


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
    with_suggestions: bool = True,
    with_floor: bool = True,
    changes: Sequence[Change] = (),
) -> Plan:
    """The fastest plan whose peak is at most the budget (`config.budget`, unless `budget_bytes` says otherwise).

    `costs` are those of the runtime itself. `num_micro_batches` share what the optimizer's state costs on its way,
    where `config.optimizer` lets it travel. `with_floor`: as of `plan_within`.
    Raises `BudgetError` when none fits, with the floor, and suggestions if they are wanted; `changes` are more of
    them (advice.py).
    """
    budget = config.budget if budget_bytes is None else budget_bytes
    assert isinstance(budget, int)
    how: Any = {"has_gradients": has_gradients, "time_limit_seconds": time_limit_seconds}
    how |= {"num_micro_batches": num_micro_batches, "costs": costs}
    space = space_of(profile, config, link, **how)
    if progress is not None:
        progress("looking for the fastest plan")
    if space.has_plan(budget):
        return plan_within(space, budget, with_floor=with_floor)
    error = space.refusal(budget, time_limit_seconds * with_suggestions)
    if not with_suggestions or error.floor_bytes >= UNREACHABLE:
        raise error

    def replan(other: Profile, memory: MemoryConfig) -> Plan:
        changed = space_of(other, memory, link, **{**how, "time_limit_seconds": _WAY_OUT_SECONDS})
        if not changed.has_plan(budget):
            raise changed.refusal(budget, 0.0)
        return plan_within(changed, budget, with_floor=False)

    raise explained(
        error,
        Way(space.question, layers_by_rule(profile, config)).problem,
        config,
        has_gradients=has_gradients,
        replan=replan,
        changes=changes,
    )


def space_of(
    profile: Profile,
    config: MemoryConfig,
    link: Link,
    *,
    has_gradients: bool = False,
    num_micro_batches: int = 1,
    time_limit_seconds: float = 5.0,
    costs: HostCosts = NO_COSTS,
) -> Space:
    """The plans of a step, for any budget. Nothing is looked for before somebody asks."""
    # Budgets differ from call to call; all else decides what is known of the step.
    how: Any = {"has_gradients": has_gradients, "time_limit_seconds": time_limit_seconds}
    how |= {"num_micro_batches": num_micro_batches, "costs": costs.on(profile.device)}
    return _space(_Same(profile), dataclasses.replace(config, budget=1), link, **how)


class _Same:
    """A profile as a key: no other is equal to it."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.profile is self.profile

    def __hash__(self) -> int:
        return id(self.profile)


@functools.lru_cache(maxsize=2)
def _space(
    key: _Same, config: MemoryConfig, link: Link, *, costs: HostCosts, num_micro_batches: int, **how: Any
) -> Space:
    """Remembered: other budgets of the same step follow one another (a sweep, ways out)."""
    profile = key.profile
    question = Question(
        profile=charged(profile, costs),
        config=config,
        link=link,
        layer_seconds=costs.layer_seconds,
        log_seconds=costs.op_seconds,
        shares=_shares(profile, config, link, num_micro_batches),
        num_micro_batches=num_micro_batches,
        **how,
    )
    return Space(question, shared_seconds)


def _shares(
    profile: Profile, config: MemoryConfig, link: Link, num_micro_batches: int
) -> tuple[StateShares | None, ...]:
    """What may become of the optimizer's state, and of weights."""
    if config.weights != "keep":
        return weights_allowed(profile, config, link, num_micro_batches)
    if config.optimizer == "in_backward":
        return updates_allowed(profile, config, link, num_micro_batches)
    return shares_allowed(profile, config, link, num_micro_batches)


def plan_within(space: Space, budget_bytes: int, *, with_floor: bool = True) -> Plan:
    """The fastest within the budget, which is not below the floor (`Space.has_plan`), written down.

    `with_floor`: it says what the floor is, which takes as long as the plan to find.
    """
    found, excess_seconds = space.fastest(budget_bytes)
    placement, on_its_way = placed(found, _why_there(space, found, budget_bytes))
    seconds = found.step_seconds - on_its_way.played + on_its_way.shared
    bound = space.bound_seconds(budget_bytes, found)
    gap = max(0.0, 1.0 - bound / seconds) if seconds else 0.0
    floor_bytes = space.floor_bytes if with_floor else None
    how: Any = {"gap": gap, "floor_bytes": floor_bytes, "excess_seconds": excess_seconds}
    return _plan_of(found, placement, on_its_way, budget_bytes, **how)


def _why_there(space: Space, found: WayPlan, budget_bytes: int) -> str:
    """Why the optimizer's state is where it is."""
    question = space.question
    state, optimizer = question.profile.state, question.config.optimizer
    if question.shares == (None,):
        return "none of it can move" if state.optimizer else "there is none"
    if optimizer in ("swap", "in_backward"):
        return "memory.optimizer asks for it"
    if found.way.shares is not None:
        if space.has_plan(budget_bytes, moves_state=False):
            return "its memory is worth more to activations than its copies cost"
        return "the budget asks for it"
    if found.pass_seconds <= question.seconds * _NO_TIME:
        return "everything fits"
    if space.has_plan(budget_bytes, moves_state=True):
        return "on its way it would cost more than it frees"
    return "moving it needs more than it frees"


def _plan_of(
    found: WayPlan,
    placement: OptimizerPlacement,
    on_its_way: StateSeconds,
    budget_bytes: int,
    *,
    gap: float,
    floor_bytes: int | None,
    excess_seconds: float,
) -> Plan:
    """What was found, written down."""
    config = found.way.question.config
    question, problem, timeline = found.way.question, found.problem, found.timeline
    profile, step = problem.profile, problem.step
    own_fates, _ = split(problem, found.fates)
    why_fixed = found.way.why_not_free
    reasons = {
        i: _reason(item, fate, why_fixed) for i, (item, fate) in enumerate(zip(step.items, own_fates, strict=False))
    }
    is_plain = not found.way.layers and found.way.shares is None
    how: Any = {"has_gradients": question.has_gradients, "layers": ()}
    plain_problem = problem if is_plain else problem_of(question.profile, config, **how)
    plain_bytes = plain_curve(plain_problem.step)
    num_forward = step.num_forward_ticks
    forward = timeline.curve[:num_forward]
    bases = [tick.base_bytes for tick in step.ticks[:num_forward]]
    held = (total - base + stays for total, base, stays in zip(forward, bases, problem.held, strict=True))
    again = sum(call_seconds(question.profile, name, question.layer_seconds) for name in found.way.layers)
    sites = decisions(problem, own_fates, timeline.evict_by, timeline.prefetch_at, reasons)
    codec_seconds = sum(site.codec.seconds for site in sites if site.codec is not None)
    made_seconds = timeline.recompute_seconds - codec_seconds - on_its_way.streamed
    source = "bytes traced without a device, times by roofline of" if profile.is_fake else "bytes and times observed on"
    prediction = Prediction(
        peak_bytes=timeline.peak_bytes,
        step_seconds=found.step_seconds + on_its_way.shared - on_its_way.played,
        stall_seconds=max(0.0, timeline.stall_seconds - on_its_way.stall),
        recompute_seconds=max(0.0, made_seconds) + again,
        gap=gap,
        plain_peak_bytes=int(plain_bytes.max()),
        plain_seconds=plain_problem.step.compute_seconds,
        floor_bytes=floor_bytes,
        forward_peak_bytes=int(max(forward, default=0)),
        forward_held_bytes=int(max(held, default=0)),
        check_seconds=found.check_seconds,
        codec_seconds=codec_seconds,
        optimizer_seconds=on_its_way.shared,
        page_fault_seconds=found.page_fault_seconds,
        limit_bytes=found.limit_bytes,
        swap_excess_seconds=excess_seconds,
        certainty=f"{source} {profile.device}",
    )
    shares = found.way.shares
    frees_gradients = shares is not None and shares.frees_gradients
    account = memory_breakdown(
        problem,
        plain_bytes.tolist(),
        timeline.curve,
        plain_problem,
        there=(0, 0) if shares is None else shares.there(problem, found.fates, timeline),
        has_gradients=question.has_gradients and not frees_gradients,
    )
    return Plan(
        layers=profile.layers,
        # Other storages that a recompute rule names are made again one by one.
        rules=_with_layers(config.rules(), found.way.layers),
        min_bytes=min_bytes_of(question.profile, config),
        **config.tier_limits,
        sites=(*sites, *_dropped(question, found)),
        is_solved=True,
        check=config.check,
        loss=question.profile.loss,
        loss_rows=question.profile.loss_rows,
        layer_rows=question.profile.layer_rows,
        row_wise=question.profile.row_wise,
        budget_bytes=budget_bytes,
        predicted=prediction,
        account=account,
        optimizer=None if config.optimizer == "keep" else placement,
        weights=_weights_of(found, config),
    )


def _weights_of(found: WayPlan, config: MemoryConfig) -> WeightsPlacement | None:
    if config.weights == "keep":
        return None
    moves = isinstance(found.way.shares, WeightsInTurn)
    reason = "memory.weights asks for it"
    if config.weights == "auto":
        reason = "the step is faster so, or fits" if moves else "the step is faster so"
    question = found.way.question
    return placement_of(found, question.profile, question.link, reason)


def _with_layers(rules: Rules, layers: tuple[str, ...]) -> Rules:
    """The rules as the runtime has to carry them out: of those about recompute, one for each layer that runs again."""
    own = []
    for name in layers:
        decision = rules.decide(name, is_site=False)
        where = decision.rule.where if decision.rule is not None and decision.fate is Fate.RECOMPUTE else ""
        own.append(Rule(pattern=Pattern.parse(name), fate=Fate.RECOMPUTE, where=where))
    return Rules((*rules.without_recompute().rules, *own))


def _dropped(question: Question, found: WayPlan) -> Iterator[SiteDecision]:
    """What goes with the layers that run again."""
    profile = question.profile
    there = {node.name for node in found.problem.profile.nodes}
    charged: set[str] = set()
    for node in profile.sites:
        if node.name in there:
            continue
        assert node.layer is not None
        cost = 0.0 if node.layer in charged else call_seconds(profile, node.layer, question.layer_seconds)
        charged.add(node.layer)
        yield SiteDecision.of(node, Fate.RECOMPUTE, "its layer runs again", cost_seconds=cost)


def _reason(item: Item, fate: Fate, why_fixed: str) -> str:
    if len(item.fates) == 1:
        return why_fixed
    if fate is Fate.KEEP:
        return "fits"
    if fate is Fate.SWAP:
        return "away and back while compute runs"
    return f"made again in {format_seconds(item.recipe_seconds)}"
