"""lowtide on a pipeline schedule of torch's: rules for the memory of its stages, and weight gradients that are put off.

What: `attach(schedule, memory=...)` applies the rules to each stage of the rank. Where the schedule splits backwards
(I, W), a stage does its backward once, in I, and what `lowtide.pipeline.linear` and `grouped_linear` put off in W
(weight_gradients.py); torch's own split walks the graph for each, and runs a recomputed layer again both times.
How: `dw_builder`, which torch has for that, and the forward and backward of each stage object, wrapped on the object.
Buffers, outputs and sends stay torch's.
Cost: none of its own. Not covered: budgets, which lowtide's own Pipeline plans for (`fit_stages`); pairs
(torch_schedules.py).
"""

from __future__ import annotations

import functools
from typing import Any

from lowtide.config.memory import load_memory
from lowtide.errors import ConfigError
from lowtide.pipeline.weight_gradients import WeightGradients
from lowtide.runtime.session.apply import apply
from lowtide.runtime.session.tide import Tide
from lowtide.tensors.private import schedule_stages
from lowtide.tensors.ranks import ALONE

_WRAPPED = ("forward_one_chunk", "backward_one_chunk", "dw_builder")


def attach(schedule: Any, *, memory: Any = None, engine: Any = None) -> Attached:
    """On each rank, before the first step of `schedule` (torch's Schedule1F1B, ScheduleZBVZeroBubble, ...).

    memory: rules (a mapping, or the path of a file) for each stage, as for `lowtide.apply`. Undone by `remove()`.
    Raises ConfigError for a budget, and for a stage that has a `dw_builder` of its own.
    """
    stages = schedule_stages(schedule)
    config = None if memory is None else load_memory(memory)
    if config is not None and config.has_budget:
        raise ConfigError(
            "lowtide.pipeline.attach: a budget cannot be planned for a schedule of torch's; write rules (recompute, "
            "swap), or use lowtide.pipeline.Pipeline with fit_stages"
        )
    for stage in stages:
        if stage.dw_builder is not None:
            raise ConfigError(
                f"lowtide.pipeline.attach: stage {stage.stage_index} has a dw_builder already; attach puts one of its "
                "own there. Take one of them out"
            )
    tides = [] if config is None else [apply(s.submod, config, engine=engine, group=ALONE) for s in stages]
    return Attached(stages, tides)


class Attached:
    """What is attached to the stages of one rank."""

    def __init__(self, stages: list[Any], tides: list[Tide]) -> None:
        self.tides = tides
        """Of the stages, in order; empty without rules."""
        self._stages = stages
        for stage in stages:
            _put_off(stage)

    def remove(self) -> None:
        """Leave schedule and stages as they were. Idempotent."""
        for stage in self._stages:
            for name in _WRAPPED:
                vars(stage).pop(name, None)
            stage.dw_builder = None
        for tide in self.tides:
            tide.remove()


def _put_off(stage: Any) -> None:
    """Weight gradients of a backward that the schedule splits wait for W."""
    weights = WeightGradients()
    forward, backward = stage.forward_one_chunk, stage.backward_one_chunk
    latest: list[int] = []
    """The micro-batch whose backward is under way: `dw_builder` is asked for it at its end."""

    def forward_one_chunk(fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with weights.forward((stage.stage_index, fwd_chunk_id)):
            return forward(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(bwd_chunk_id: int, *args: Any, full_backward: bool = True, **kwargs: Any) -> Any:
        latest[:] = [bwd_chunk_id]
        if full_backward:
            return backward(bwd_chunk_id, *args, full_backward=True, **kwargs)
        with weights.put_off((stage.stage_index, bwd_chunk_id)):
            return backward(bwd_chunk_id, *args, full_backward=False, **kwargs)

    stage.forward_one_chunk, stage.backward_one_chunk = forward_one_chunk, backward_one_chunk
    stage.dw_builder = lambda: functools.partial(weights.run, (stage.stage_index, latest[0]))
