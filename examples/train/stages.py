"""The stages of a run that is trained as a pipeline: which layers a rank has, and how they take a step.

What: `layers_of_run` deals the layers: equally many to each stage, balanced by their time in a trace (a number that
every rank and every resumed run finds again), as written, or by upstream's offset. `RankStages` cuts the model into the
stages of the run's schedule and leaves this rank those that are its own; the model keeps its names. A step is
`pipeline.micro_batches` micro-batches of `train.batch_size` sequences, gradients added raw and divided last.
Every rank reads the same text; only the first and the last stage look at it.
Beside `train.expert_parallel: E` there are E pipelines, which share the experts of each stage: rank r has place r // E
in its pipeline, and the ranks with the same place have the same layers, and batches of their own. With
`train.tensor_parallel: T`, T neighbours of them share products and the text (tensor.py). With `pipeline.overlap` the
two halves of a pair hide each other's exchange of rows.
A budget is planned for in the first step, by each rank for its own stages (pipeline/budget.py).
Cost: the whole model in main memory while it is cut, on every rank.
Not covered: data parallelism beside the pipeline, but for that of the experts.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import lowtide
from examples.train.experts import named, split_for
from examples.train.progress import PlanRecord
from examples.train.ranks import Ranks
from examples.train.tensor import check_tensor, cut_stages, ranks_of_a_stage
from lowtide.cluster.layout import split_layers
from lowtide.config.memory import MemoryConfig, plan_from_rules
from lowtide.config.run import RunConfig
from lowtide.engines.choose import choose_engine
from lowtide.errors import ConfigError
from lowtide.loss.attach import SlicedLoss
from lowtide.mindformers.follow import follow, layers_by_offset, sections_of_stages
from lowtide.pipeline.budget import StagePlans, fit_stages
from lowtide.pipeline.cut_model import cut, loss_of
from lowtide.pipeline.execute import Pipeline
from lowtide.pipeline.experts import find_experts
from lowtide.pipeline.generators import make_schedule
from lowtide.pipeline.overlap import Overlap
from lowtide.pipeline.schedule import Schedule, layers_of_stages
from lowtide.pipeline.weight_gradients import WeightGradients
from lowtide.profiling.fake.trace import trace
from lowtide.runtime.autopilot.plan_model import hardware_of_device
from lowtide.runtime.saved.stats import Stats
from lowtide.tensors.ranks import ALONE, gather
from lowtide.timeline.hardware import load_hardware


def check_stages(run: RunConfig, ranks: Ranks) -> None:
    """Raises `ConfigError`, on all ranks alike, for another number of ranks than the pipeline's."""
    assert run.pipeline is not None
    check_tensor(run)
    stages, experts, tensor = run.pipeline.stages, run.train.expert_parallel, run.train.tensor_parallel
    wanted = stages * ranks_of_a_stage(run)
    if ranks.num_ranks != wanted:
        are = "is 1 rank" if ranks.is_alone else f"are {ranks.num_ranks} ranks"
        beside = f" and 'train.expert_parallel' {experts}" if experts > 1 else ""
        beside += f" and 'train.tensor_parallel' {tensor}" if tensor > 1 else ""
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
        num_pipelines = ranks_of_a_stage(run)
        self.num_texts = num_pipelines // run.train.tensor_parallel
        """How many pipelines read other text."""
        if run.train.expert_parallel > 1:
            with named(run):
                find_experts(model)
        self._num_layers = len(model.model.layers)
        self._layers = layers = layers_of_run(run, schedule, model, device)
        others = [each for each in gather(layers, None) if each != layers]
        if others:
            run.fail("pipeline.layers", f"ranks deal the layers in other ways: {_sizes(layers)}, {_sizes(others[0])}")
        try:
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
        self._parts = cut_stages(run, model, self.stages.values(), ranks)
        self._ranks = ranks
        self._together: Any = dist.group.WORLD if num_pipelines > 1 else None
        """All ranks, where there are several pipelines."""
        self._group: Any = None
        if num_pipelines > 1:
            places = torch.arange(ranks.num_ranks).view(-1, num_pipelines)
            self._group, _ = dist.new_subgroups_by_enumeration(places.T.tolist())
        self._run = run
        self._device = device
        self._schedule = schedule
        self._tides: list[Any] = []
        self._plans: StagePlans | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._pipeline: Pipeline | None = None
        self._undo = contextlib.ExitStack()
        """Leaves the stages as they were cut."""

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """When the weights are those to begin with: the memory section, and the pipeline."""
        run = self._run
        self._optimizer = optimizer
        if run.train.precision == "bf16_autocast":
            for stage in self.stages.values():
                stage.forward = torch.autocast(self._device.type, dtype=torch.bfloat16)(stage.forward)
                self._undo.callback(delattr, stage, "forward")
        may_slice = run.memory is not None and run.memory.slices_loss["may"]
        # The optimizer has the parameters of all stages of the rank; the loss is after the last stage, and in none.
        memory = None if run.memory is None else dataclasses.replace(run.memory, optimizer="keep", loss="plain")
        if run.memory is not None and run.memory.optimizer == "swap" and run.memory.budget is None:
            self._place_state(run.memory, optimizer)
        if run.sections is not None:
            self._follow(run, memory)
        elif memory is not None and not memory.has_budget:
            for stage in self.stages.values():
                self._add(lowtide.apply(stage, memory, engine=run.train.engine, group=ALONE))
        make_loss = loss_function if self._parts is None else self._parts.loss_function
        loss = make_loss(may_slice=may_slice) if self.has_loss else None
        how: Any = {"run_pair": Overlap().run_pair} if run.pipeline is not None and run.pipeline.overlap else {}
        if self._schedule.splits_backwards:
            how["weight_gradients"] = WeightGradients()
        self._pipeline = Pipeline(self._schedule, self.stages, loss=loss, group=self._group, **how)
        self._undo.callback(self._pipeline.close)

    def _add(self, tide: Any) -> None:
        self._tides.append(self._undo.enter_context(tide))

    @property
    def layer_counts(self) -> list[int]:
        """Of each stage of the pipeline, in the order of the model."""
        return _sizes(self._layers)

    @property
    def settings(self) -> dict[str, object]:
        """What a checkpoint of these stages is to be resumed with: layers that are not dealt evenly."""
        return {} if len(set(self.layer_counts)) == 1 else {"pipeline.layers": self.layer_counts}

    def _place_state(self, memory: MemoryConfig, optimizer: torch.optim.Optimizer) -> None:
        """The state is elsewhere between steps, and comes and goes while the optimizer steps: the backward of one of
        many micro-batches in flight is no sign that the step is near."""
        own = torch.nn.ModuleList(self.stages.values())
        bare = plan_from_rules(dataclasses.replace(memory, recompute=None, swap=None, keep=()), ())
        engine = self._undo.enter_context(contextlib.closing(choose_engine(self._run.train.engine, own, bare)))
        self._undo.enter_context(lowtide.swap_optimizer(optimizer, overlap="step", engine=engine))

    def _follow(self, run: RunConfig, memory: MemoryConfig | None) -> None:
        """Files of MindSpore Transformers: each stage by the numbers that its layers have in the whole model."""
        sections = sections_of_stages(run.sections, self._schedule, self._num_layers)
        for stage, module in self.stages.items():
            how: Any = {"memory": memory, "engine": run.train.engine, "group": ALONE}
            self._add(follow(module, sections, first_layer=self._layers[stage][0], **how))

    @property
    def has_loss(self) -> bool:
        return self._schedule.num_stages - 1 in self.stages

    def take_passes(self, batches: Iterable[torch.Tensor], say: Callable[[str], None]) -> float:
        """Forward and backward of all micro-batches. The mean loss; 0 on ranks that do not have it. `say` hears of the
        plans for a budget."""
        assert self._pipeline is not None
        batches = [tokens.to(self._device) for tokens in batches] if self.has_loss or 0 in self.stages else []
        inputs = batches if self._parts is None else [self._parts.own_part(tokens) for tokens in batches]
        given = inputs if 0 in self.stages else None, batches if self.has_loss else None
        memory = self._run.memory
        if memory is not None and memory.has_budget and self._plans is None:
            own = dataclasses.replace(memory, loss="plain")
            how: Any = {"memory": own, "optimizer": self._optimizer, "engine": self._run.train.engine}
            self._plans = fit_stages(self._pipeline, *given, say=say, together=self._together, **how)
            self._undo.callback(self._plans.remove)
        losses = self._pipeline.step(*given)
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for loss in losses:
            total += loss
        if self._parts is not None:
            own = () if self.experts is None else self.experts.split.own_parameters()
            self._parts.average_gradients(self._parameters(), set(own))
        elif self.experts is not None:
            self.experts.average_gradients()
        return float(total) / self._schedule.num_micro_batches

    def _parameters(self) -> list[torch.nn.Parameter]:
        return list(torch.nn.ModuleList(self.stages.values()).parameters())

    def gradient_norm(self) -> torch.Tensor:
        """Of all stages, as one rank computes it; of several pipelines up to rounding. Collective."""
        assert self._pipeline is not None
        if self._group is None:
            return self._pipeline.gradient_norm()
        own = set() if self.experts is None else set(self.experts.split.own_parameters())
        elsewhere = self._pipeline.tied.counted_elsewhere()
        in_parts = frozenset() if self._parts is None else self._parts.cut
        num_pipelines = self._ranks.num_ranks // self._schedule.num_ranks
        return self._ranks.norm(
            (parameter.grad, 1 if parameter in own else self.num_texts if parameter in in_parts else num_pipelines)
            for parameter in self._parameters()
            if parameter.grad is not None and parameter not in elsewhere
        )

    def plan_record(self, pass_seconds: float) -> PlanRecord | None:
        """Of this rank's plans; None without a budget. `pass_seconds`: what all micro-batches took, waits and all."""
        if self._plans is None:
            return None
        predicted = [plan.predicted for plan in self._plans.plans.values() if plan.predicted is not None]
        return PlanRecord(
            digest="+".join(plan.digest() for plan in self._plans.plans.values()),
            predicted_peak_bytes=self._plans.found.peak_bytes,
            predicted_seconds=sum(self._plans.found.step_seconds.values()),
            measured_seconds=pass_seconds / self._schedule.num_micro_batches,
            predicted_stall_seconds=sum(each.stall_seconds for each in predicted),
            num_corrections=0,
        )

    @property
    def _in_force(self) -> list[Any]:
        """Tides. Those of a budget can be others after a step."""
        return self._tides if self._plans is None else list(self._plans.tides.values())

    def reset_stats(self) -> None:
        """Begin a new count, for the next step."""
        for tide in self._in_force:
            tide.reset_stats()

    @property
    def stats(self) -> Stats | None:
        """The sums over the stages of this rank, whose peaks need not come at once; None without a memory section."""
        counts = [dataclasses.asdict(tide.stats) for tide in self._in_force if tide.stats is not None]
        if not counts:
            return None
        return Stats(**{name: sum(count[name] for count in counts) for name in counts[0]})

    def close(self) -> None:
        """Leave the stages as they were cut."""
        self._undo.close()


def layers_of_run(run: RunConfig, schedule: Schedule, model: Any, device: torch.device) -> tuple[range, ...]:
    """The layers of each stage, in the order of the model. Raises `ConfigError` with its place."""
    assert run.pipeline is not None
    num_layers, wanted = len(model.model.layers), run.pipeline.layers
    if run.sections is not None and not run.sections.is_newer and run.sections.offset not in (0, None):
        if wanted != "even":
            run.fail("pipeline.layers", "'pipeline.layers' says what 'offset' says already; leave one of them out")
        return _ranges(layers_by_offset(run.sections, schedule, num_layers))
    if wanted == "even":
        try:
            return layers_of_stages(num_layers, schedule.num_stages)
        except ConfigError as error:
            run.fail("pipeline", f"{error}; or write 'pipeline.layers: balanced'")
    if isinstance(wanted, tuple):
        if (len(wanted), sum(wanted)) != (schedule.num_stages, num_layers):
            run.fail(
                "pipeline.layers",
                f"'pipeline.layers' has {len(wanted)} numbers that add up to {sum(wanted)}; '{schedule.name}' has "
                f"{schedule.num_stages} stages here, and the model {num_layers} layers",
            )
        return _ranges(wanted)
    if num_layers < schedule.num_stages:
        run.fail("pipeline", f"pipeline: {num_layers} layers are too few for {schedule.num_stages} stages")
    return _ranges(_balanced(run, schedule.num_stages, model, device))


def _ranges(sizes: Sequence[int]) -> tuple[range, ...]:
    ends = list(accumulate(sizes))
    return tuple(range(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True))


def _balanced(run: RunConfig, num_stages: int, model: Any, device: torch.device) -> list[int]:
    """Sizes of stages, of which none is empty, so that the slowest is as fast as can be."""
    tokens = torch.empty(run.train.batch_size, run.data.sequence_length, dtype=torch.int64, device="meta")
    hardware = load_hardware(hardware_of_device(device))
    profile = trace(model, {"input_ids": tokens, "labels": tokens}, hardware=hardware)
    seconds: Counter[str] = Counter()  # of `model.layers.3`, `model.embed_tokens`, ...
    for name, its_seconds in zip(profile.op_names, profile.op_seconds, strict=True):
        seconds[".".join(name.split(".")[:3] if name.startswith("model.layers.") else name.split(".")[:2])] += (
            its_seconds
        )
    layers = [seconds.pop(f"model.layers.{number}", 0.0) for number in range(len(model.model.layers))]
    first = seconds.pop("model.embed_tokens", 0.0)
    # A split may leave the two ends without a layer; here each stage is a module with some.
    sizes = [max(1, size) for size in split_layers(layers, num_stages, first=first, last=seconds.total())]
    while sum(sizes) > len(layers):
        sizes[sizes.index(max(sizes))] -= 1
    return sizes


def _sizes(layers: Sequence[range]) -> list[int]:
    return [len(each) for each in layers]


# -- what a rank has of a model that was cut -------------------------------------------------------------------------


def leave(model: Any, layers: Sequence[int], *, first: bool, last: bool) -> None:
    """Take from a model that was cut what this rank does not train: all layers but these, and the embedding or the head
    where the rank has not the `first` or the `last` stage. What is left keeps its name."""
    for number in set(range(len(model.model.layers))) - set(layers):
        model.model.layers[number] = nn.Identity()
    if not first:
        model.model.embed_tokens = None
    if not last:
        model.model.norm = nn.Identity()
        model.lm_head = None


def loss_function(*, may_slice: bool) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """`loss_of`; if it may, in slices of rows, where they save memory and keep the bits (loss/attach.py)."""
    if not may_slice:
        return loss_of
    from transformers.loss.loss_utils import ForCausalLMLoss

    loss = SlicedLoss(ForCausalLMLoss, shifts=True)
    return lambda logits, tokens: loss(logits, tokens, vocab_size=logits.shape[-1])
