"""A budget in bytes and a profile give a plan.

What: `plan_profile` asks which fates the rules leave to each node, builds the problem, has it solved, and writes the
answer down as a `Plan` with predictions, an account of the worst moment, and a reason for each decision.

Cost: the solver's. Not covered: how the profile came about, and carrying the plan out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from lowtide.catalog.site import Profile
from lowtide.errors import BudgetError
from lowtide.planner.fate import Fate
from lowtide.planner.plan import AccountLine, Plan, Prediction
from lowtide.planner.problem import Problem, decisions, make_problem, state_bytes
from lowtide.timeline.memory import plain_curve
from lowtide.timeline.step import Item, Link
from lowtide.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from lowtide.config.native import MemoryConfig
    from lowtide.planner.solve import Solution

_ALL = (Fate.KEEP, Fate.SWAP, Fate.RECOMPUTE)


def plan_profile(
    profile: Profile,
    config: MemoryConfig,
    *,
    link: Link,
    budget_bytes: int | None = None,
    has_gradients: bool = False,
    time_limit_seconds: float = 5.0,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """The fastest plan whose peak is at most the budget (`config.budget`, unless `budget_bytes` says otherwise).

    Raises `BudgetError` when none fits, with the floor and ways out.
    """
    from lowtide.planner.solve import solve

    budget = config.budget if budget_bytes is None else budget_bytes
    assert budget is not None
    problem = problem_of(profile, config, has_gradients=has_gradients)
    try:
        solution = solve(
            problem.step,
            link,
            budget,
            host_bytes=config.host_budget,
            time_limit_seconds=time_limit_seconds,
            progress=progress,
        )
    except BudgetError as error:
        raise _with_half_a_batch(error, profile, has_gradients) from None
    return _plan_of(problem, config, solution, budget, has_gradients)


def problem_of(profile: Profile, config: MemoryConfig, *, has_gradients: bool = False) -> Problem:
    """The problem that the rules of `config` leave to the solver."""
    return make_problem(
        profile, allowed=_allowed(profile, config), min_bytes=config.min_bytes, has_gradients=has_gradients
    )


def _allowed(profile: Profile, config: MemoryConfig) -> Mapping[str, tuple[tuple[Fate, ...], str]]:
    rules = config.rules()
    free = [Fate.KEEP]
    free += [Fate.SWAP] if config.swaps_freely else []
    free += [Fate.RECOMPUTE] if config.recomputes_freely else []
    allowed: dict[str, tuple[tuple[Fate, ...], str]] = {}
    for node in profile.nodes:
        decision = rules.decide(node.name)
        if decision.rule is not None:
            allowed[node.name] = ((decision.fate,), decision.reason)
        elif len(free) < len(_ALL):
            allowed[node.name] = (tuple(free), "the rules leave no other fate")
    return allowed


def _with_half_a_batch(error: BudgetError, profile: Profile, has_gradients: bool) -> BudgetError:
    """One more way out: whatever is no model state grows with the batch."""
    fixed = state_bytes(profile, has_gradients=has_gradients)
    half = fixed + (error.floor_bytes - fixed) // 2
    hint = f"half the micro-batch: needs about {format_bytes(half)}"
    suggestions = (*error.suggestions[:2], hint)
    text = str(error).split("\n")[0]
    lines = [text, *(f"  - {suggestion}" for suggestion in suggestions)]
    return BudgetError("\n".join(lines), floor_bytes=error.floor_bytes, suggestions=suggestions)


def _plan_of(
    problem: Problem, config: MemoryConfig, solution: Solution, budget_bytes: int, has_gradients: bool
) -> Plan:
    profile, step, timeline = problem.profile, problem.step, solution.timeline
    reasons = {i: _reason(item, fate) for i, (item, fate) in enumerate(zip(step.items, solution.fates, strict=True))}
    plain = plain_curve(step)
    num_forward = step.num_forward_ticks
    forward = timeline.curve[:num_forward]
    bases = [tick.base_bytes for tick in step.ticks[:num_forward]]
    held = (total - base + stays for total, base, stays in zip(forward, bases, problem.held, strict=True))
    prediction = Prediction(
        peak_bytes=timeline.peak_bytes,
        step_seconds=timeline.step_seconds,
        stall_seconds=timeline.stall_seconds,
        recompute_seconds=timeline.recompute_seconds,
        gap=solution.gap,
        plain_peak_bytes=int(plain.max()),
        plain_seconds=step.compute_seconds,
        floor_bytes=solution.floor_bytes,
        forward_peak_bytes=int(max(forward, default=0)),
        forward_held_bytes=int(max(held, default=0)),
        certainty=_certainty(profile),
    )
    return Plan(
        layers=profile.layers,
        # What a recompute rule names is made again storage by storage; the runtime would run whole layers again.
        rules=config.rules().without_recompute(),
        min_bytes=config.min_bytes,
        host_budget_bytes=config.host_budget,
        disk_budget_bytes=config.disk_budget,
        disk_path=None if config.disk_path is None else str(config.disk_path),
        sites=decisions(problem, solution.fates, timeline.leave, timeline.fetch, reasons),
        is_solved=True,
        budget_bytes=budget_bytes,
        predicted=prediction,
        account=account(problem, plain.tolist(), timeline.curve, has_gradients=has_gradients),
    )


def _certainty(profile: Profile) -> str:
    if profile.is_fake:
        return f"bytes traced without a device, times by roofline of {profile.device}"
    return f"bytes and times observed on {profile.device}"


def _reason(item: Item, fate: Fate) -> str:
    if len(item.fates) == 1:
        return "the rules leave no other fate"
    if fate is Fate.KEEP:
        return "fits"
    if fate is Fate.SWAP:
        return "away and back while compute runs"
    return f"made again in {format_seconds(item.recipe_seconds)}"


def account(
    problem: Problem, plain: Sequence[int], planned: Sequence[int], *, has_gradients: bool = False
) -> tuple[AccountLine, ...]:
    """Where the bytes are at the worst moment, with everything kept and with the plan.

    The worst moments are two different ones. 'activations' is what changes: bytes of nodes. 'temporaries' is the rest:
    results that live for a few operators, and gradients that are on their way.
    """
    state = problem.profile.state
    columns = []
    for curve in (plain, planned):
        tick = max(range(len(curve)), key=curve.__getitem__)
        columns.append((tick, int(curve[tick])))
    fixed = state_bytes(problem.profile, has_gradients=has_gradients)
    lines = [
        AccountLine(what="weights", plain_bytes=state.parameters, planned_bytes=state.parameters),
        AccountLine(what="optimizer state", plain_bytes=state.optimizer, planned_bytes=state.optimizer),
        AccountLine(
            what="buffers and batch",
            plain_bytes=state.buffers + state.inputs,
            planned_bytes=state.buffers + state.inputs,
        ),
    ]
    gradients = tuple(_gradients_at(problem, tick, has_gradients) for tick, _ in columns)
    lines.append(AccountLine(what="gradients", plain_bytes=gradients[0], planned_bytes=gradients[1]))
    bases = tuple(problem.step.ticks[tick].base_bytes for tick, _ in columns)
    activations = tuple(total - base for (_, total), base in zip(columns, bases, strict=True))
    lines.append(AccountLine(what="activations", plain_bytes=activations[0], planned_bytes=activations[1]))
    grown = gradients if not has_gradients else (0, 0)
    rest = tuple(base - fixed - made for base, made in zip(bases, grown, strict=True))
    lines.append(AccountLine(what="head, loss, temporaries", plain_bytes=rest[0], planned_bytes=rest[1]))
    lines.append(AccountLine(what="peak", plain_bytes=columns[0][1], planned_bytes=columns[1][1]))
    return tuple(lines)


def _gradients_at(problem: Problem, tick: int, has_gradients: bool) -> int:
    profile = problem.profile
    if has_gradients:
        return profile.state.gradients
    if tick >= len(problem.starts) - 1:
        return profile.state.gradients
    return profile.op_gradient_bytes[problem.starts[tick + 1] - 1]
