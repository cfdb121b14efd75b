"""What the ranks of a job agree on: one budget, one plan, one moment to correct it.

What: small collectives over Python objects; alone, each gives back what it was given. An error on one rank is an error
on all, so that nobody waits for a rank that has given up.

Cost: one `all_gather_object` a call. Not covered: ranks that do not come to the same call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from lowtide.errors import BudgetError
from lowtide.planner.plan import Plan


def _has_company(group: Any) -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1


def gather(value: Any, group: Any) -> list[Any]:
    """What every rank of the group brings, by rank."""
    if not _has_company(group):
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def smallest(budget_bytes: int, group: Any) -> int:
    """The budget that all can keep."""
    return min(gather(budget_bytes, group))


def any_rank(flag: bool, group: Any) -> bool:
    """Whether it is so on any rank."""
    return any(gather(flag, group))


def true_on_all(flag: bool, group_names: Sequence[str], device: torch.device) -> bool:
    """Whether it is so on every rank of these process groups, which torch knows by name."""
    seen = torch.tensor(1 if flag else 0, dtype=torch.int32, device=device)
    for name in group_names:
        seen = torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(seen, "min", name))
    return bool(seen)


def agreed(plan: Plan | None, error: BudgetError | None, group: Any) -> Plan:
    """The first rank's plan, if every rank found one; else the error with the highest floor, on every rank."""
    answers = gather((None if plan is None else plan.to_json(), _packed(error)), group)
    errors = [packed for _, packed in answers if packed is not None]
    if errors:
        message, floor_bytes, suggestions = max(errors, key=lambda packed: packed[1])
        raise BudgetError(message, floor_bytes=floor_bytes, suggestions=suggestions)
    if len(answers) == 1:
        assert plan is not None
        return plan
    return Plan.from_json(answers[0][0])


def _packed(error: BudgetError | None) -> tuple[str, int, tuple[str, ...]] | None:
    return None if error is None else (str(error), error.floor_bytes, error.suggestions)
