"""What one rank checks of a pipeline that it is asked to make, and what it must have in common with the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lowtide.errors import ConfigError
from lowtide.pipeline.row_counts import is_in_order
from lowtide.pipeline.schedule import Schedule
from lowtide.pipeline.tied import Place, Tie
from lowtide.pipeline.transfers import with_transfers
from lowtide.pipeline.verify import Sends, verify
from lowtide.tensors.fsdp import is_fsdp


def checked(schedule: Schedule, num_ranks: int) -> Schedule:
    """The same schedule with transfers, proven."""
    if schedule.num_ranks != num_ranks:
        raise ConfigError(
            f"pipeline: the schedule '{schedule.name}' is for {schedule.num_ranks} ranks, not {num_ranks}"
        )
    verify(schedule, sends=Sends.BUFFERED)
    if not is_in_order(schedule):
        raise ConfigError(
            f"pipeline: a stage of the schedule '{schedule.name}' adds up its weight gradients in another order than "
            "that of the micro-batches, which changes their rounding"
        )
    return schedule if schedule.has_transfers else with_transfers(schedule)


def check_stages(schedule: Schedule, rank: int, stages: Mapping[int, Any], loss: Any) -> None:
    wanted = schedule.stages_of(rank)
    if tuple(sorted(stages)) != wanted:
        words = ", ".join(map(str, sorted(stages))) or "none"
        raise ConfigError(
            f"pipeline: '{schedule.name}' has stages {', '.join(map(str, wanted)) or 'none'} on this rank, and it was "
            f"given {words}"
        )
    for stage, module in stages.items():
        if not isinstance(module, nn.Module):
            raise ConfigError(f"pipeline: stage {stage} is a {type(module).__name__}, not a torch.nn.Module")
    has_end = schedule.num_stages - 1 in wanted
    if has_end and loss is None:
        raise ConfigError(f"pipeline: this rank has the last stage, {schedule.num_stages - 1}, and no loss")
    if not has_end and loss is not None:
        raise ConfigError(
            f"pipeline: this rank has a loss, and not the last stage, {schedule.num_stages - 1}; give the loss to rank "
            f"{schedule.rank_of_stage[-1]}"
        )


def named_weights(stages: Mapping[int, nn.Module], loss: Any, last: int) -> dict[Place, torch.Tensor]:
    """What the stages of a rank train, and its loss, which is part of the last one."""
    found: dict[Place, torch.Tensor] = {}
    for stage, module in sorted(stages.items()):
        found |= {Place(stage, name): weight for name, weight in module.named_parameters()}
        if stage == last and isinstance(loss, nn.Module):
            own = set(module.parameters())
            weights = loss.named_parameters(prefix="loss")
            found |= {Place(stage, name): weight for name, weight in weights if weight not in own}
    return found


def facts_of(origins: Sequence[Any], *, takes_turns: bool) -> tuple[dict[str, object], tuple[Tie, ...] | None]:
    """What the ranks must have in common, and the ties that are known. `origins`: of each stage that was cut."""
    facts: dict[str, object] = {"ways to carry out pairs (run_pair)": "in turns" if takes_turns else "plain"}
    known = None
    for origin in origins:
        facts |= {} if origin is None else origin.facts
        known = None if origin is None else origin.ties
    return facts, known if all(origin is not None for origin in origins) else None


def words_of(ties: Sequence[Tie]) -> str:
    return "; ".join(" = ".join(map(str, tie)) for tie in ties) or "none"


def check_parallel(stages: Mapping[int, Any], *, takes_turns: bool) -> None:
    """Wrappers that expect one forward and its backward at a time."""
    for stage, module in stages.items():
        for name, each in module.named_modules():
            what = f"stage {stage}" if not name else f"'{name}' of stage {stage}"
            if isinstance(each, nn.parallel.DistributedDataParallel):
                raise ConfigError(
                    f"pipeline: {what} is in DistributedDataParallel, which exchanges the gradients of one micro-batch "
                    "when its backward ends, and here several are in flight; give the module inside, and sum gradients "
                    "over the replicas after each step"
                )
            if takes_turns and is_fsdp(each):
                raise ConfigError(
                    f"pipeline: {what} is a module of FSDP2, which takes one forward or backward at a time: in a pair "
                    "it would lose gradients; leave run_pair out, or leave the stage unsharded"
                )
