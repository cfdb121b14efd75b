"""Small questions that ranks ask each other: gather, any, all. Collective; alone they cost nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.distributed as dist

from lowtide.errors import wrong_argument
from lowtide.tensors.private import lowest_of_ranks

ALONE: Final = "alone"
"""In place of a group: no other rank runs this module, as it is with the stages of a pipeline."""


def has_company(group: Any = None) -> bool:
    """Whether there are other ranks in this process group."""
    if group is ALONE:
        return False
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1


def check_group(group: Any, call: str, name: str = "group") -> None:
    """Raises ConfigError for what is no process group; None and `ALONE` may stand for one."""
    if group is None or group is ALONE or (dist.is_available() and isinstance(group, dist.ProcessGroup)):
        return
    raise wrong_argument(call, name, "a process group, as torch.distributed.new_group makes it", group)


def gather(value: Any, group: Any) -> list[Any]:
    """What every rank of the group brings, by rank."""
    if not has_company(group):
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def any_rank(flag: bool, group: Any) -> bool:
    """Whether it is so on any rank."""
    return any(gather(flag, group))


def true_on_all(flag: bool, group_names: Sequence[str], device: torch.device) -> bool:
    """Whether it is so on every rank of these process groups, which torch knows by name."""
    seen = torch.tensor(1 if flag else 0, dtype=torch.int32, device=device)
    for name in group_names:
        seen = lowest_of_ranks(seen, name)
    return bool(seen)
