"""The stages of a run that is trained as a pipeline: which layers a rank has, and how they take a step.

What: `RankStages` cuts the model into the stages of the run's schedule and leaves this rank those that are its own; the
model keeps its names, so that a checkpoint says `model.layers.5...` whoever has written it. A step is
`pipeline.micro_batches` micro-batches of `train.batch_size` sequences, gradients added raw and divided last.
Every rank reads the same text; only the first and the last stage look at it.
Beside `train.expert_parallel: E` there are E pipelines, which share the experts of each stage: rank r has place r // E
in its pipeline, and the ranks with the same place have the same layers, and batches of their own. With
`pipeline.overlap` the two halves of a pair hide each other's exchange of rows.
Cost: the whole model in main memory while it is cut, on every rank.
Not covered: data parallelism beside the pipeline, but for that of the experts; a budget (a plan for one micro-batch
does not know of those that are alive beside it); files of MindSpore Transformers.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist

import lowtide
from lowtide.errors import ConfigError
from lowtide.pipeline.cut_model import cut, leave, loss_function
from lowtide.pipeline.execute import Pipeline
from lowtide.pipeline.experts_transformers import find_experts
from lowtide.pipeline.generators import make_schedule
from lowtide.pipeline.overlap import Overlap
from lowtide.pipeline.schedule import layers_of_stages
from lowtide.runtime.saved.stats import Stats
from lowtide.tensors.ranks import ALONE
from lowtide.train.experts import named, split_for
from lowtide.train.ranks import Ranks
from lowtide.train.run_file import RunConfig


def check_stages(run: RunConfig, ranks: Ranks) -> None:
    """Raises `ConfigError`, on all ranks alike, for another number of ranks than the pipeline's."""
    assert run.pipeline is not None
    stages, experts = run.pipeline.stages, run.train.expert_parallel
    wanted = stages * experts
    if ranks.num_ranks != wanted:
        are = "is 1 rank" if ranks.is_alone else f"are {ranks.num_ranks} ranks"
        beside = f" and 'train.expert_parallel' {experts}" if experts > 1 else ""
        run.fail(
            "pipeline.stages",
            f"'pipeline.stages' is {stages}{beside}, but there {are}; start it with torchrun --nproc-per-node {wanted}",
        )


class RankStages:
    """What one rank has of the model, and the pipeline that it is part of. Made by all ranks at once."""

    def __init__(self, run: RunConfig, model: Any, ranks: Ranks, device: torch.device) -> None:
        assert run.pipeline is not None
        settings = run.pipeline
        schedule = make_schedule(settings.schedule, num_ranks=settings.stages, num_micro_batches=settings.micro_batches)
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        """Of the whole model."""
        num_pipelines = run.train.expert_parallel
        if num_pipelines > 1:
            with named(run):
                find_experts(model)
        try:
            layers = layers_of_stages(len(model.model.layers), schedule.num_stages)
            every = cut(model, layers)
        except ConfigError as error:
            run.fail("pipeline", str(error))
        own = schedule.stages_of(ranks.rank // num_pipelines)
        leave(
            model,
            [number for stage in own for number in layers[stage]],
            first=0 in own,
            last=schedule.num_stages - 1 in own,
        )
        self.stages: dict[int, Any] = {stage: every[stage].to(device) for stage in own}
        self.experts = split_for(run, torch.nn.ModuleList(self.stages.values()), ranks)
        """None where each rank has all experts of its layers."""
        self._group: Any = None
        if num_pipelines > 1:
            # Every rank makes every group, in the same order, as torch wants it.
            places = range(0, ranks.num_ranks, num_pipelines)
            groups = [dist.new_group([place + number for place in places]) for number in range(num_pipelines)]
            self._group = groups[ranks.rank % num_pipelines]
        self._run = run
        self._device = device
        self._schedule = schedule
        self._tides: list[Any] = []
        self._pipeline: Pipeline | None = None

    def begin(self) -> None:
        """When the weights are those to begin with: the memory section, and the pipeline."""
        run = self._run
        if run.train.precision == "bf16_autocast":
            for stage in self.stages.values():
                stage.forward = torch.autocast(self._device.type, dtype=torch.bfloat16)(stage.forward)
        may_slice = False
        if run.memory is not None:
            may_slice = run.memory.slices_loss["may"]
            memory = dataclasses.replace(run.memory, loss="plain")  # it is after the last stage, and in none
            self._tides = [
                lowtide.apply(stage, memory, engine=run.train.engine, group=ALONE) for stage in self.stages.values()
            ]
        loss = loss_function(may_slice=may_slice) if self.has_loss else None
        how: Any = {"run_pair": Overlap().run_pair} if run.pipeline is not None and run.pipeline.overlap else {}
        self._pipeline = Pipeline(self._schedule, self.stages, loss=loss, group=self._group, **how)

    @property
    def has_loss(self) -> bool:
        return self._schedule.num_stages - 1 in self.stages

    def take_passes(self, batches: list[torch.Tensor]) -> float:
        """Forward and backward of all micro-batches. The mean loss; 0 on ranks that do not have it."""
        assert self._pipeline is not None
        losses = self._pipeline.step(batches if 0 in self.stages else None, batches if self.has_loss else None)
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for loss in losses:
            total += loss
        if self.experts is not None:
            self.experts.average_gradients()
        return float(total) / len(batches)

    def reset_stats(self) -> None:
        """Begin a new count, for the next step."""
        for tide in self._tides:
            tide.reset_stats()

    @property
    def stats(self) -> Stats | None:
        """The sums over the stages of this rank, whose peaks need not come at once; None without a memory section."""
        if not self._tides:
            return None
        counts = [dataclasses.asdict(tide.stats) for tide in self._tides]
        return Stats(**{name: sum(count[name] for count in counts) for name in counts[0]})

    def close(self) -> None:
        """Leave the stages as they were cut."""
        if self._pipeline is not None:
            self._pipeline.close()
        for tide in self._tides:
            tide.remove()
        if self._run.train.precision == "bf16_autocast" and self._pipeline is not None:
            for stage in self.stages.values():
                del stage.forward
