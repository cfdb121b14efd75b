"""A stage of ours in torch's pipeline runtime: the runtime asks it for receives, and is given nothing to send.

What: torch's runtime walks the row of this rank, and calls the functions that are registered with it for what computes.
For a receive of the row it asks the stage; this one begins it with the transport and gives the runtime no work of its
own. Sends of the row ask for nothing: a result goes as soon as it is made.
Why not the receives of `PipelineStage`: they have a buffer for each micro-batch, allocated once, of one shape.
Cost: none of its own. Not covered: what torch's own actions do with a stage that holds no outputs (they are not used).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    OVERLAP_F_B,
)

from lowtide.pipeline.schedule import Action, AnyAction, Kind, Pair, Schedule
from lowtide.tensors.private import make_schedule_runtime

Do = Callable[[AnyAction], None]
_KINDS = {
    FORWARD: Kind.FORWARD,
    FULL_BACKWARD: Kind.BACKWARD,
    BACKWARD_INPUT: Kind.BACKWARD_INPUT,
    BACKWARD_WEIGHT: Kind.BACKWARD_WEIGHT,
}


class Stage(PipelineStage):
    """Of one rank. What torch's class would hold for its own actions (buffers, caches) is never made."""

    def __init__(self, module: nn.Module, number: int, schedule: Schedule, rank: int, do: Do) -> None:
        self.submod = module
        self.stage_index, self.num_stages = number, schedule.num_stages
        self.group_rank, self.group_size = rank, schedule.num_ranks
        self.has_backward = True
        self._do = do

    def clear_runtime_states(self) -> None:
        """There are none."""

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
        self._do(Action(Kind.RECEIVE_FORWARD, self.stage_index, fwd_chunk_id))
        return []

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
        self._do(Action(Kind.RECEIVE_BACKWARD, self.stage_index, bwd_chunk_id))
        return []

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[Any]:
        return []

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[Any]:
        return []


def runtime_of(schedule: Schedule, rank: int, modules: Mapping[int, nn.Module], do: Do) -> Any:
    """Torch's runtime with the rows of `schedule`, in which `do` carries out each action of this rank but sends."""
    stages = [Stage(module, number, schedule, rank, do) for number, module in sorted(modules.items())]
    rows: Sequence[Sequence[str]] = [[str(action) for action in row] for row in schedule.actions]
    runtime = make_schedule_runtime(stages, schedule.num_micro_batches, rows)
    for kind in (*_KINDS, OVERLAP_F_B):
        runtime.register_custom_function(kind, lambda action, _: do(_ours(action)))
    return runtime


def walk(runtime: Any) -> None:
    """Carry out the row of this rank once."""
    for asked in (runtime.fwd_recv_ops, runtime.bwd_recv_ops):
        asked.clear()  # torch's own functions would take these out
    with torch.enable_grad():
        runtime.step(return_outputs=False)


def _ours(action: Any) -> AnyAction:
    if action.sub_actions:
        return Pair(*(Action(_KINDS[each.computation_type], each.stage_index, each.microbatch_index)
                      for each in action.sub_actions))  # fmt: skip
    return Action(_KINDS[action.computation_type], action.stage_index, action.microbatch_index)
