"""lowtide on a pipeline schedule of torch's: rules or a budget for its stages, put-off weight gradients, and pairs.

What: `attach(schedule)` takes the rows of the schedule (torch's Schedule1F1B, ScheduleZBVZeroBubble, ...), proves them,
and has them carried out by a `Pipeline` (execute.py) on the modules of its stages. `schedule.step` and what it is given
stay: torch splits the batch, fills `losses` and merges outputs. With rules each stage follows them; with a budget all
ranks plan in the first step (budget.py). Where the schedule splits backwards, a stage does its backward once, in I, but
for the weight gradients of its linear layers, which it does in W; torch's own split walks the graph for each, and runs
a recomputed layer again both times. `run_pair=Overlap().run_pair` has the halves of a pair hide each other's exchanges.
Why not functions registered with their runtime: their stages would still hold buffers, outputs and sends of all
micro-batches to the end of the step, which a budget cannot hold.
Cost: that of `Pipeline`. Not covered: arguments of the loss (`loss_kwargs`) and skip connections, refused by name;
`schedule.eval` is torch's own. Gradients of earlier steps that were not set to None are not divided once more, as
torch does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lowtide.config.memory import MemoryConfig, load_memory
from lowtide.errors import ConfigError
from lowtide.pipeline.agree import Together
from lowtide.pipeline.budget import StagePlans, fit_stages
from lowtide.pipeline.execute import Pipeline, RunPair, one_after_the_other
from lowtide.pipeline.generators import make_schedule
from lowtide.pipeline.gradients import Tie
from lowtide.pipeline.schedule import Pair, Schedule, from_csv
from lowtide.pipeline.weight_gradients import WeightGradients
from lowtide.runtime.autopilot.plan_model import merged_config
from lowtide.runtime.session.apply import apply
from lowtide.runtime.session.tide import Tide
from lowtide.tensors.private import replace_step, restore_step, schedule_loss, schedule_micro_batches, schedule_stages
from lowtide.tensors.ranks import ALONE

_CALL = "lowtide.pipeline.attach"
_SINGLE = {"ScheduleGPipe": "gpipe", "Schedule1F1B": "1f1b"}
"""Schedules with one stage on each rank."""


def attach(
    schedule: Any,
    *,
    memory: Any = None,
    budget: int | str | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    run_pair: RunPair = one_after_the_other,
    tied: Sequence[Tie] | None = None,
    engine: Any = None,
    say: Callable[[str], None] | None = None,
    together: Any = None,
) -> AttachedSchedule:
    """On all ranks, before the first step of `schedule` (torch's Schedule1F1B, ScheduleZBVZeroBubble, ...).

    memory: rules for each stage, as for `lowtide.apply`, or a section with a budget. budget: bytes on the device of
    each rank, for all its stages. optimizer: that of all parameters of the rank, whose state counts. run_pair, tied: as
    for `Pipeline`. together: as for `fit_stages`. Undone by `remove()`. Raises ConfigError on all ranks for a mistake
    on any.
    """
    stages = schedule_stages(schedule)
    ranks = Together("attach", stages[0].group_rank, stages[0].group)

    def read() -> tuple[MemoryConfig | None, Schedule]:
        config = None if memory is None else load_memory(memory)
        if budget is not None or (config is not None and config.has_budget):
            config = merged_config(memory, budget)
        return config, _rows_of(schedule, has_pairs=run_pair is not one_after_the_other)

    config, rows = ranks.all_do("its settings", read)
    pipeline = Pipeline(
        rows,
        {stage.stage_index: stage.submod for stage in stages},
        loss=schedule_loss(schedule) if any(stage.is_last for stage in stages) else None,
        group=stages[0].group,
        weight_gradients=WeightGradients() if rows.splits_backwards else None,
        run_pair=run_pair,
        tied=tied,
        optimizer=optimizer,
    )
    if config is not None and config.has_budget:
        how = {"memory": config, "optimizer": optimizer, "engine": engine, "say": say, "together": together}
        return AttachedSchedule(schedule, pipeline, [], how)
    tides: list[Tide] = []
    try:
        if config is not None:
            how = {"engine": engine, "group": ALONE}
            own = pipeline.stages.values()
            ranks.all_do("its rules", lambda: tides.extend(apply(each, config, **how) for each in own))
    except BaseException:
        for tide in tides:
            tide.remove()
        pipeline.close()
        raise
    return AttachedSchedule(schedule, pipeline, tides, None)


def _rows_of(schedule: Any, *, has_pairs: bool) -> Schedule:
    """The actions of all ranks that compute. Raises ConfigError for what cannot be attached to."""
    name = type(schedule).__name__
    for stage in schedule_stages(schedule):
        if stage.dw_builder is not None:
            raise ConfigError(
                f"{_CALL}: stage {stage.stage_index} has a dw_builder, and attach puts weight gradients off by itself; "
                "leave dw_builder out"
            )
    rows = _read_rows(schedule, name)
    if has_pairs and not any(isinstance(every, Pair) for row in rows.actions for every in row):
        raise ConfigError(f"{_CALL}: {name} has no pairs of a forward and a backward; use ScheduleDualPipeV")
    return rows


def _read_rows(schedule: Any, name: str) -> Schedule:
    if name in _SINGLE:  # torch carries these out without rows, and what it lists for 1F1B is wrong on the last rank
        num_ranks = schedule_stages(schedule)[0].num_stages
        return make_schedule(_SINGLE[name], num_ranks=num_ranks, num_micro_batches=schedule_micro_batches(schedule))
    rows = getattr(schedule, "pipeline_order", None)
    if not rows:
        known = "Schedule1F1B, ScheduleInterleaved1F1B, ScheduleZBVZeroBubble, ScheduleDualPipeV"
        raise ConfigError(f"{_CALL}: {name} has no rows of actions to read; use one of torch's such as {known}")
    lines = (
        ",".join(str(each) for each in rows[rank] if each is not None and each.is_compute_op) for rank in sorted(rows)
    )
    return from_csv("\n".join(lines), source=name, name=name)


class AttachedSchedule:
    """What is attached to the stages of one rank."""

    def __init__(self, schedule: Any, pipeline: Pipeline, tides: list[Tide], budget: Mapping[str, Any] | None) -> None:
        """budget: how `fit_stages` is to be called."""
        self.pipeline = pipeline
        self.plans: StagePlans | None = None
        """With a budget, after the first step."""
        self._tides = tides
        self._budget = budget
        self._schedule = schedule
        self._stages = schedule_stages(schedule)
        self._torchs_step = replace_step(schedule, self._step)

    @property
    def tides(self) -> list[Tide]:
        """Of the stages, in order; empty without rules, and before the first step within a budget."""
        return self._tides if self.plans is None else list(self.plans.tides.values())

    def remove(self) -> None:
        """Leave schedule and stages as they were. Idempotent."""
        restore_step(self._schedule)
        for handle in self._tides if self.plans is None else (self.plans,):
            handle.remove()
        self.pipeline.close()

    def _step(self, *split: Any, loss_kwargs: Mapping[str, Any] | None = None) -> None:
        """One step on what torch has split: inputs, keyword arguments, targets; `losses`, and `return_outputs`."""
        inputs, keywords, targets, losses, returns_outputs = split
        if not self._stages[0].has_backward:  # schedule.eval
            self._torchs_step(*split)
            return
        if loss_kwargs:
            raise ConfigError(f"{_CALL}: loss_kwargs cannot be handed on; give the schedule a loss that has them")
        inputs = inputs if self._stages[0].is_first else None
        keywords = keywords if any(keywords) else None
        if self._budget is not None and returns_outputs:
            raise ConfigError(
                f"{_CALL}: a budget has no room for the outputs of all micro-batches; call step(..., "
                "return_outputs=False)"
            )
        if self._budget is not None and self.plans is None:
            if keywords is not None:
                raise ConfigError(
                    f"{_CALL}: a budget cannot be planned for stages with keyword arguments "
                    f"({', '.join(keywords[0])}); write rules: recompute, swap, keep"
                )
            self.plans = fit_stages(self.pipeline, inputs, targets, **self._budget)
        last = self._stages[-1]
        outputs: list[Any] = []
        hook = None
        if last.is_last and returns_outputs:
            hook = self.pipeline.stages[last.stage_index].register_forward_hook(
                lambda module, given, output: outputs.append(output)
            )
        try:
            divide_by = schedule_micro_batches(self._schedule) if self._schedule.scale_grads else 1
            found = self.pipeline.step(inputs, targets, divide_by=divide_by, keywords=keywords)
        finally:
            if hook is not None:
                hook.remove()
        last.output_chunks += outputs[-len(found) :] if found else []
        if losses is not None and found:
            losses[:] = found
