"""One way out where no plan fits: half the micro-batch.

What: `with_half_a_batch` adds it to a refusal, with what it would need, where the batch can be halved and that helps.
Cost: a floor of the halved step. Not covered: what a smaller batch does to training.
"""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

from lowtide.core.profile import Profile
from lowtide.errors import BudgetError
from lowtide.planner.memory_breakdown import gradients_at
from lowtide.planner.problem import Problem, state_bytes
from lowtide.timeline.step import Step
from lowtide.units import format_bytes

if TYPE_CHECKING:
    from lowtide.config.memory import MemoryConfig

_WORTHWHILE = 0.98
"""What half a batch needs, as a share of the whole one's: above this, halving it is no way out."""


def with_half_a_batch(error: BudgetError, problem: Problem, config: MemoryConfig, has_gradients: bool) -> BudgetError:
    """One more way out, where there is one: the batch can be halved, and that needs less."""
    from lowtide.planner.min_peak import floor

    rows = batch_rows(problem.profile)
    if rows is None or rows < 2:
        return error
    half, _ = floor(half_a_batch(problem, has_gradients=has_gradients), config.host_budget)
    if half > _WORTHWHILE * error.floor_bytes:
        return error
    hint = f"half the micro-batch: needs about {format_bytes(half)}"
    suggestions = (*error.suggestions[:2], hint)
    text = str(error).split("\n")[0]
    lines = [text, *(f"  - {suggestion}" for suggestion in suggestions)]
    return BudgetError("\n".join(lines), floor_bytes=error.floor_bytes, suggestions=suggestions)


def batch_rows(profile: Profile) -> int | None:
    """The least first dimension of the tensors of the batch; None where no tensor has one."""
    rows = [int(count) for count in re.findall(r"\[(\d+)", profile.batch)]
    return min(rows, default=None)


def half_a_batch(problem: Problem, *, has_gradients: bool) -> Step:
    """The step with half of all that grows with the batch: activations, temporaries and the batch itself.

    Weights, gradients, optimizer state and the optimizer's step stay as they are. Not exact: a temporary may have the
    size of a weight.
    """
    profile, step = problem.profile, problem.step
    fixed = state_bytes(profile, has_gradients=has_gradients) - profile.state.inputs - problem.state_bytes
    ticks = []
    for number, tick in enumerate(step.ticks):
        stays = fixed if has_gradients else fixed + gradients_at(problem, number, has_gradients)
        grows = max(tick.base_bytes - stays, 0) if number < len(problem.starts) - 1 else 0  # not the optimizer's
        ticks.append(dataclasses.replace(tick, base_bytes=tick.base_bytes - grows // 2))
    own, state = step.items[: len(problem.nodes)], step.items[len(problem.nodes) :]
    items = (*(dataclasses.replace(item, nbytes=item.nbytes // 2) for item in own), *state)
    return dataclasses.replace(step, ticks=tuple(ticks), items=items)
