"""A budget in bytes and a profile give a plan.

What: `plan_profile` asks which fates the rules leave to each node, builds the problem, has it solved, and writes the
answer down as a `Plan` with predictions, an account of the worst moment, and a reason for each decision.

A plan that swaps on the host engine has the heap returned to the system, and takes as much again in each step as the
plain step makes (`Link.touch_seconds_per_byte`): counted, 0.7 to 1.5 times that, whether it swaps much or little. So it
is a price of swapping at all, and the solver, which decides about single storages, does not see it; the race does.

Cost: the solver's. Not covered: how the profile came about, and carrying the plan out.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lowtide.core.decisions import Prediction, SiteDecision
from lowtide.core.fate import Fate
from lowtide.core.pattern import Pattern
from lowtide.core.plan import Plan
from lowtide.core.profile import Profile
from lowtide.core.rules import Rule, Rules
from lowtide.errors import BudgetError
from lowtide.planner.again import can_run_again, run_again
from lowtide.planner.deferred_state import DeferredState, with_deferred
from lowtide.planner.half_a_batch import with_half_a_batch
from lowtide.planner.host_costs import NO_COSTS, HostCosts, charged
from lowtide.planner.memory_breakdown import memory_breakdown
from lowtide.planner.min_peak import UNREACHABLE
from lowtide.planner.place_state import Choice, choose_placement
from lowtide.planner.problem import (
    Problem,
    decisions,
    fitting_min_bytes,
    make_problem,
    may_be_smaller,
    state_bytes,
    stored_form,
)
from lowtide.planner.smaller import form_of, is_form
from lowtide.planner.state_items import StateShares, in_order, split, state_curve, with_state
from lowtide.planner.ways_out import Change, explained
from lowtide.timeline.events import run
from lowtide.timeline.memory import Lifetimes, StepArrays, floor_curve, plain_curve
from lowtide.timeline.step import Item, Link
from lowtide.units import format_seconds

if TYPE_CHECKING:
    from lowtide.config.memory import MemoryConfig
    from lowtide.planner.solve import Solution

# A check that costs less than this share of the step is not worth another plan.
_CHECK_SHARE = 0.005
# What eager PyTorch's host takes to launch an operator on an accelerator. An estimate.
_LAUNCH_SECONDS = 8e-6
_WAY_OUT_SECONDS = 1.0
"""For each solution of a step with a change."""
_ALL = (Fate.KEEP, Fate.SWAP, Fate.RECOMPUTE)
_NO_OTHER = "the rules leave no other fate"


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
) -> Plan:
    """The fastest plan whose peak is at most the budget (`config.budget`, unless `budget_bytes` says otherwise).

    `costs` are those of the runtime itself. Where proving recipes would show, a plan without them is tried too.
    `num_micro_batches` share what the optimizer's state costs on its way, where `config.optimizer` lets it travel.
    `layers`: exactly these run again as a whole, whatever rules say.
    Raises `BudgetError` when none fits, with the floor, and ways out unless nobody wants them; `changes` are more of
    them (ways_out.py).
    """
    budget = config.budget if budget_bytes is None else budget_bytes
    assert isinstance(budget, int)
    costs = costs.on(profile.device)
    log_seconds = costs.op_seconds
    asked = _Asked(
        charged(profile, costs), config, link, budget, has_gradients, time_limit_seconds, progress or _say_nothing,
        layers, None, with_ways_out, costs.layer_seconds,
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


def _made(asked: _Asked, log_seconds: float, num_micro_batches: int) -> Plan:
    profile, config = asked.profile, asked.config
    if config.optimizer_state == "keep":
        return _plan_of(asked.fastest(log_seconds))

    def fit(shares: StateShares | DeferredState | None, with_ways_out: bool) -> _Found:
        host_bytes = config.host_budget
        if shares is not None and host_bytes is not None:
            host_bytes -= shares.nbytes
        limits = dataclasses.replace(config, host_budget=host_bytes)
        if isinstance(shares, DeferredState) and shares.has_link_alone:
            limits = dataclasses.replace(limits, swap="none")
        says_more = with_ways_out and asked.with_ways_out
        return dataclasses.replace(asked, config=limits, shares=shares, with_ways_out=says_more).fastest(log_seconds)

    choice = choose_placement(profile, config, link=asked.link, num_micro_batches=num_micro_batches, fit=fit)
    return _plan_of(choice.found, choice)


@dataclass(frozen=True, slots=True)
class _Found:
    """A solution, and the layers that run again under it."""

    asked: _Asked
    layers: tuple[str, ...]
    problem: Problem
    solution: Solution
    floor_bytes: int
    check_seconds: float = 0.0

    @property
    def pass_seconds(self) -> float:
        """Forward and backward, with what recipes cost to prove."""
        return self.solution.timeline.step_seconds + self.check_seconds

    @property
    def bound_seconds(self) -> float:
        return self.solution.timeline.step_seconds * (1.0 - _gap(self))


@dataclass(frozen=True, slots=True)
class _Asked:
    """What `plan_profile` was asked for."""

    profile: Profile
    config: MemoryConfig
    link: Link
    budget_bytes: int
    has_gradients: bool
    time_limit_seconds: float
    progress: Callable[[str], None]
    layers: tuple[str, ...] | None = None
    """Those that run again, and no others; None: what rules and the planner say."""
    shares: StateShares | DeferredState | None = None
    """Of the optimizer's state, what the solver may move, or what comes and goes in forward."""
    with_ways_out: bool = True
    layer_seconds: float = 0.0
    """Of lowtide's own, for each layer that runs again."""

    def fastest(self, log_seconds: float) -> _Found:
        """The best of all that may be done. Raises `BudgetError`."""
        found = self._fastest_unchecked()
        check_seconds = _check_seconds(self, found, log_seconds)
        seconds = found.solution.timeline.step_seconds
        if check_seconds > _CHECK_SHARE * seconds and self.config.recomputes_freely:
            without = self.profile.without_recipes([node.name for node in self.profile.nodes])
            with contextlib.suppress(BudgetError):
                bare = dataclasses.replace(self, profile=without).fastest(log_seconds)
                if bare.solution.timeline.step_seconds < seconds + check_seconds:
                    # The floor is that of all that may be done.
                    return dataclasses.replace(bare, floor_bytes=found.floor_bytes)
        return dataclasses.replace(found, check_seconds=check_seconds)

    def _fastest_unchecked(self) -> _Found:
        forced = layers_by_rule(self.profile, self.config) if self.layers is None else self.layers
        found: _Found | None = None
        refusal: BudgetError | None = None
        try:
            found = self._solved(forced)
        except BudgetError as error:
            refusal = error.with_traceback(None)  # its frames would be a cycle, and hold all that is above them
        # Whole layers run again, as anybody could have it: never slower than that, and never refused where that fits.
        for layers in self._ways(forced, found):
            try:
                other = self._solved(layers)
            except BudgetError as error:
                if refusal is None or error.floor_bytes < refusal.floor_bytes:
                    refusal = error.with_traceback(None)
                continue
            if found is None or other.solution.timeline.step_seconds < found.solution.timeline.step_seconds:
                found = other
        if found is not None:
            return found
        assert refusal is not None
        if not self.with_ways_out:
            raise refusal
        raise with_half_a_batch(refusal, self.problem(forced), self.config, self.has_gradients) from None

    def problem(self, layers: tuple[str, ...]) -> Problem:
        is_alone = isinstance(self.shares, DeferredState) and self.shares.has_link_alone
        why = "the optimizer's state has the link alone" if is_alone else _NO_OTHER
        how: Any = {"has_gradients": self.has_gradients, "layers": layers, "why_not_free": why}
        how["layer_seconds"] = self.layer_seconds
        kept = problem_of(self.profile, self.config, **how)
        if isinstance(self.shares, DeferredState):
            return with_deferred(kept, self.shares, has_gradients=self.has_gradients, layers=layers)
        return kept if self.shares is None else with_state(kept, self.shares)

    def plain_problem(self) -> Problem:
        """Nothing runs again, and all of the optimizer's state stays."""
        return problem_of(self.profile, self.config, has_gradients=self.has_gradients, layers=())

    def _solved(self, layers: tuple[str, ...]) -> _Found:
        from lowtide.planner.solve import solve

        problem = self.problem(layers)
        solution = solve(
            problem.step,
            self.link,
            self.budget_bytes,
            host_bytes=self.config.host_budget,
            time_limit_seconds=self.time_limit_seconds,
            progress=self.progress,
            with_ways_out=self.with_ways_out,
        )
        if isinstance(self.shares, StateShares):
            fates = in_order(problem, solution.fates)
            timeline = run(problem.step, fates, self.link, budget_bytes=self.budget_bytes)
            if timeline.peak_bytes <= self.budget_bytes and timeline.step_seconds <= solution.timeline.step_seconds:
                solution = dataclasses.replace(solution, fates=fates, timeline=timeline)
        return _Found(self, layers, problem, solution, solution.floor_bytes)

    def _ways(self, forced: tuple[str, ...], found: _Found | None) -> Iterator[tuple[str, ...]]:
        """Sets of layers that are worth solving for: where nothing fits yet, all of them; and the fewest that fit with
        everything else kept, where that is faster than what was found."""
        if self.layers is not None or not self.config.recomputes_freely or self.profile.num_collectives:
            return  # ranks that plan for themselves must issue the same collectives
        more = tuple(name for name in can_run_again(self.profile) if name not in forced)
        if not more:
            return

        def first(number: int) -> tuple[str, ...]:
            return (*forced, *more[:number])

        def needed_bytes(number: int) -> int:
            return floor_of_kept(self.problem(first(number)))

        costs = [self.again_seconds(name) for name in more]
        # What a layer costs at least decides whether any of this can be faster: no problem is built in vain.
        if found is not None and found.solution.timeline.step_seconds <= self.seconds + min(costs):
            return
        # The last layer's backward comes first: running it again may hold more than it frees.
        most = min((len(more), len(more) - 1), key=needed_bytes)
        if needed_bytes(most) > self.budget_bytes:
            if found is None:
                yield first(most)
            return
        low, high = 0, most  # `low` are not enough, `high` are
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if needed_bytes(middle) <= self.budget_bytes else (middle, high)
        if found is None or found.solution.timeline.step_seconds > self.seconds + sum(costs[:high]):
            yield first(high)

    def again_seconds(self, layer: str) -> float:
        """What running a layer once more takes."""
        calls = [call for call in self.profile.calls if call.name == layer]
        return sum(self.layer_seconds + sum(self.profile.op_seconds[call.first_op : call.end_op]) for call in calls)

    @property
    def host_budget_bytes(self) -> int | None:
        """The whole of it, as it was asked for."""
        limit = self.config.host_budget
        return limit if limit is None or self.shares is None else limit + self.shares.nbytes

    @property
    def seconds(self) -> float:
        """Of the plain step."""
        return sum(self.profile.op_seconds)


def _check_seconds(asked: _Asked, found: _Found, log_seconds: float) -> float:
    """What it costs to prove the plan's recipes in each forward pass. Nothing where it has none."""
    profile = asked.profile
    if asked.config.check != "full" or not _has_recipes(found):
        return 0.0
    host_seconds = profile.num_forward_ops * log_seconds
    if profile.device == "cpu":
        return host_seconds
    # The host runs ahead of an accelerator: only what makes it slower than the device shows.
    launches = profile.num_forward_ops * (_LAUNCH_SECONDS + log_seconds)
    return min(host_seconds, max(0.0, launches - sum(profile.op_seconds[: profile.num_forward_ops])))


def _has_recipes(found: _Found) -> bool:
    nodes, fates = found.problem.profile.nodes, found.solution.fates
    return any(
        fates[position] is Fate.RECOMPUTE
        and nodes[index].anchor is None
        and stored_form(found.problem, fates, position) is None
        for position, index in enumerate(found.problem.nodes)
    )


def floor_of_kept(problem: Problem) -> int:
    """The peak with everything kept that may be, and else swapped."""
    from lowtide.planner.min_peak import first_of

    arrays = StepArrays.of(problem.step)
    fates = [first_of(item, (Fate.KEEP, Fate.SWAP, Fate.RECOMPUTE)) for item in problem.step.items]
    return int(floor_curve(arrays, Lifetimes.of(arrays, fates)).max())


def layers_by_rule(profile: Profile, config: MemoryConfig) -> tuple[str, ...]:
    """Layers that a recompute rule names as such: they run again as a whole, as they do without a budget."""
    rules = config.rules()
    able = set(can_run_again(profile))
    return tuple(
        name for name in profile.layers if name in able and rules.decide(name, is_site=False).fate is Fate.RECOMPUTE
    )


def problem_of(
    profile: Profile,
    config: MemoryConfig,
    *,
    has_gradients: bool = False,
    layers: tuple[str, ...] | None = None,
    why_not_free: str = _NO_OTHER,
    layer_seconds: float = 0.0,
) -> Problem:
    """The problem that the rules of `config` leave to the solver. `layers` run again; None: those that rules name.
    `why_not_free`: what is said of sites that may not have every fate. `layer_seconds`: see `HostCosts`."""
    if layers is None:
        layers = layers_by_rule(profile, config)
    step = run_again(profile, layers, more_seconds=layer_seconds)
    rules = _left_rules(config, layers)
    names = {node.name for node in step.nodes if rules.decide(node.name).rule is None}
    least = _min_bytes(profile, config)
    step = may_be_smaller(step, names, least, has_recipes=config.recomputes_freely)
    allowed = _allowed(step, config, rules, why_not_free)
    return make_problem(step, allowed=allowed, min_bytes=least, has_gradients=has_gradients)


def _min_bytes(profile: Profile, config: MemoryConfig) -> int:
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


def _plan_of(found: _Found, choice: Choice[_Found] | None = None) -> Plan:
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
    again = sum(asked.again_seconds(name) for name in found.layers)
    sites = decisions(problem, own_fates, timeline.evict_by, timeline.prefetch_at, reasons)
    codec_seconds = sum(site.codec.seconds for site in sites if site.codec is not None)
    made_seconds = timeline.recompute_seconds - codec_seconds - (choice.streamed_seconds if choice else 0.0)
    touch_seconds = 0.0
    if any(site.fate is Fate.SWAP for site in sites):
        own_bytes = int(plain_bytes.max()) - state_bytes(profile, has_gradients=asked.has_gradients)
        touch_seconds = asked.link.touch_seconds_per_byte * max(0, own_bytes)
    prediction = Prediction(
        peak_bytes=timeline.peak_bytes,
        step_seconds=timeline.step_seconds
        + touch_seconds
        + (choice.seconds - choice.played_seconds if choice else 0.0),
        stall_seconds=max(0.0, timeline.stall_seconds - (choice.stall_seconds if choice else 0.0)),
        recompute_seconds=max(0.0, made_seconds) + again,
        gap=choice.gap if choice else _gap(found),
        plain_peak_bytes=int(plain_bytes.max()),
        plain_seconds=plain_problem.step.compute_seconds,
        floor_bytes=choice.floor_bytes if choice else found.floor_bytes,
        forward_peak_bytes=int(max(forward, default=0)),
        forward_held_bytes=int(max(held, default=0)),
        check_seconds=found.check_seconds,
        codec_seconds=codec_seconds,
        optimizer_seconds=choice.seconds if choice else 0.0,
        touch_seconds=touch_seconds,
        certainty=_certainty(profile),
    )
    there = None
    if isinstance(asked.shares, StateShares):
        there = state_curve(problem, solution.fates, timeline.evict_by, timeline.prefetch_at).tolist()
    return Plan(
        layers=profile.layers,
        # Other storages that a recompute rule names are made again one by one.
        rules=_with_layers(config.rules(), found.layers),
        min_bytes=_min_bytes(asked.profile, config),
        host_budget_bytes=asked.host_budget_bytes,
        disk_budget_bytes=config.disk_budget,
        disk_path=None if config.disk_path is None else str(config.disk_path),
        sites=(*sites, *_dropped(asked, found)),
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


def _gap(found: _Found) -> float:
    """The program bounds the step whose layers it was given; where the planner chose them, only the plain step does."""
    asked = found.asked
    if found.layers == layers_by_rule(asked.profile, asked.config):
        return found.solution.gap
    seconds = found.solution.timeline.step_seconds
    return (seconds - asked.seconds) / seconds if seconds else 0.0


def _with_layers(rules: Rules, layers: tuple[str, ...]) -> Rules:
    """The rules as the runtime has to carry them out: of those about recompute, one for each layer that runs again."""
    own = []
    for name in layers:
        decision = rules.decide(name, is_site=False)
        where = decision.rule.where if decision.rule is not None and decision.fate is Fate.RECOMPUTE else ""
        own.append(Rule(pattern=Pattern.parse(name), fate=Fate.RECOMPUTE, where=where))
    return Rules((*rules.without_recompute().rules, *own))


def _dropped(asked: _Asked, found: _Found) -> Iterator[SiteDecision]:
    """What goes with the layers that run again."""
    there = {node.name for node in found.problem.profile.nodes}
    charged: set[str] = set()
    for node in asked.profile.sites:
        if node.name in there:
            continue
        assert node.layer is not None
        cost = 0.0 if node.layer in charged else asked.again_seconds(node.layer)
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
        return _NO_OTHER
    if fate is Fate.KEEP:
        return "fits"
    if fate is Fate.SWAP:
        return "away and back while compute runs"
    return f"made again in {format_seconds(item.recipe_seconds)}"


def _say_nothing(line: str) -> None:
    pass
