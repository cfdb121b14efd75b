"""Pairs of ours inside torch's own pipeline schedules, for those who train with `torch.distributed.pipelining`.

What: `attach_overlap(schedule, run_pair)` registers a function for the action OVERLAP_F_B, in which torch's runtime
does a forward and then a backward. The function does what the runtime does around both (receives, loss, the turn of a
V), and gives the two computations to `run_pair`, which may carry them out together.
Why a function of the runtime: it is the place that torch documents for it. All else stays torch's, also its memory.
Cost: none of its own.
Not covered: keyword arguments of the loss, which torch does not hand to such a function; sends inside a pair: torch's
schedules place them after it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from lowtide.errors import ConfigError
from lowtide.tensors.private import (
    await_unshard,
    make_stage_loss,
    schedule_micro_batches,
    schedule_stages,
    stage_loss,
)

Half = Callable[[], None]


def attach_overlap(schedule: Any, run_pair: Callable[[Half, Half], None]) -> None:
    """From now on the pairs of `schedule` (such as torch's ScheduleDualPipeV) are carried out by `run_pair(forward,
    backward)`. On every rank that has pairs, before its first step. Raises ConfigError for a schedule without pairs."""
    from torch.distributed.pipelining.schedules import OVERLAP_F_B

    register = getattr(schedule, "register_custom_function", None)
    if register is None:
        raise ConfigError(
            f"attach_overlap: {type(schedule).__name__} has no pairs of a forward and a backward; use ScheduleDualPipeV"
        )
    register(OVERLAP_F_B, functools.partial(_carry_out, run_pair))


def _carry_out(run_pair: Callable[[Half, Half], None], action: Any, context: Any) -> None:
    forward, backward = action.sub_actions
    schedule = context.schedule_ref
    stages = {stage.stage_index: stage for stage in schedule_stages(schedule)}
    for part, received in ((forward, schedule.fwd_recv_ops), (backward, schedule.bwd_recv_ops)):
        await_unshard(schedule, stages[part.stage_index])
        for work in received.pop((part.stage_index, part.microbatch_index), ()):
            work.wait()
    run_pair(lambda: _forward(forward, context, stages), lambda: _backward(backward, schedule, stages))


def _forward(action: Any, context: Any, stages: dict[int, Any]) -> None:
    number, micro_batch = action.stage_index, action.microbatch_index
    stage = stages[number]
    output = stage.forward_one_chunk(micro_batch, context.arg_mbs[micro_batch], context.kwarg_mbs[micro_batch])
    make_stage_loss(context.schedule_ref, stage, output, context.target_mbs, micro_batch)
    if number + 1 in stages:
        stages[number + 1].set_local_fwd_input(output, micro_batch)


def _backward(action: Any, schedule: Any, stages: dict[int, Any]) -> None:
    number, micro_batch = action.stage_index, action.microbatch_index
    stage = stages[number]
    schedule.backward_counter[number] += 1
    stage.backward_one_chunk(
        micro_batch,
        loss=stage_loss(schedule, stage, micro_batch),
        full_backward=True,
        last_backward=schedule.backward_counter[number] == schedule_micro_batches(schedule),
    )
    if number - 1 in stages:
        stages[number - 1].set_local_bwd_input(stage.get_local_bwd_output(micro_batch), micro_batch)
