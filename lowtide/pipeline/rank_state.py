"""Plans of the stages of a rank beside an optimizer's state that may be elsewhere between steps.

What: with `memory.optimizer: swap` all of the state that can move is on the next tier while micro-batches run, and
comes and goes through three buckets while the optimizer steps. With `auto` none of it moves where everything fits; else
`plan_rank` is asked for each of some parts of it, and the fastest step wins: that of all micro-batches, with the time
of the copies.
Why not during backward: several micro-batches are in flight, so the end of one backward is no sign that the step of the
optimizer is near, and a rank holds least when its pipeline is empty.
Cost: `plan_rank` once for `swap`, up to five times for `auto`. Not covered: parts between the ones that are tried.
"""

from __future__ import annotations

import dataclasses

from lowtide.core.decisions import OptimizerPlacement
from lowtide.core.fate import Tier
from lowtide.errors import BudgetError
from lowtide.pipeline.rank_plan import RankPlan, RankTask, plan_rank
from lowtide.planner.place_state import NUM_SLOTS, bucket_size, refuse_without_effect, shares_of
from lowtide.planner.state_items import StateShares

_PARTS = (1.0, 0.75, 0.5, 0.25)
"""Of what can move; most is tried first, since it fits if anything does."""


def plan_rank_with_state(task: RankTask) -> RankPlan:
    """The fastest that was found, with where the state is. Raises `BudgetError` where nothing fits, and `ConfigError`
    where `memory.optimizer` is `swap` and main memory has no room."""
    wanted = task.config.optimizer
    state, config = task.state, dataclasses.replace(task.config, optimizer="keep")
    temporaries = max(state.optimizer_temporaries, task.between_bytes)
    task = dataclasses.replace(task, config=config)
    kept = dataclasses.replace(task, state=dataclasses.replace(state, optimizer_temporaries=temporaries))
    if wanted == "keep":
        return plan_rank(kept)
    if wanted == "swap" and state.optimizer_movable:
        refuse_without_effect(state, task.config.host_budget)
    shares = shares_of(task.state, task.link, task.config.host_budget, may_stay=True)
    if shares is None:
        return plan_rank(kept)
    if wanted == "swap":
        return _with_moved(task, shares, len(shares.sizes), "memory.optimizer asks for it")
    found: list[RankPlan] = []
    refusals: list[BudgetError] = []
    numbers = [0, *dict.fromkeys(max(1, round(part * len(shares.sizes))) for part in _PARTS)]
    for number in numbers:
        try:
            reason = "its memory is worth more to chunks in flight than its copies cost"
            found.append(_with_moved(task, shares, number, reason) if number else plan_rank(kept))
        except BudgetError as error:
            refusals.append(error.with_traceback(None))  # its frames would be a cycle
            continue
        if number == 0 and all(plan.does_nothing for plan in found[0].plans.values()):
            break
    if not found:
        raise min(refusals, key=lambda error: error.floor_bytes)
    return min(found, key=lambda plan: _seconds(task, plan))


def _with_moved(task: RankTask, shares: StateShares, number: int, reason: str) -> RankPlan:
    """With the last `number` shares elsewhere between steps."""
    moved_bytes = sum(shares.sizes[-number:])
    state, host_bytes = task.state, task.config.host_budget
    left = dataclasses.replace(
        state,
        optimizer=state.optimizer - moved_bytes,
        # Also what stays is stepped bucket by bucket.
        optimizer_temporaries=max(shares.temporaries + shares.slot_bytes, task.between_bytes),
    )
    limits = dataclasses.replace(task.config, host_budget=None if host_bytes is None else host_bytes - moved_bytes)
    found = plan_rank(dataclasses.replace(task, state=left, config=limits))
    device = next(iter(task.chunks.values())).profile.device
    placement = OptimizerPlacement(
        moved_bytes=moved_bytes,
        resident_bytes=state.optimizer_movable - moved_bytes,
        tier=Tier.DISK if device == "cpu" else Tier.HOST,
        bucket_bytes=bucket_size(state, task.link),
        num_slots=NUM_SLOTS,
        overlap="step",
        exposed_seconds=sum(shares.streamed_seconds[-number:]),
        reason=reason,
    )
    return dataclasses.replace(found, optimizer=placement)


def _seconds(task: RankTask, plan: RankPlan) -> float:
    """Of a step, as far as plans differ."""
    exposed = 0.0 if plan.optimizer is None else plan.optimizer.exposed_seconds
    return task.num_micro_batches * sum(plan.step_seconds.values()) + exposed
