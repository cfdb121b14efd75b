"""The stages of a run that is trained as a pipeline: what of the model a rank has, and how stages take a step.

What: `layers_of_run` deals the layers; `RankStages` cuts the model into the stages of the schedule, and keeps those of
this rank. A step is `pipeline.micro_batches` micro-batches, gradients added raw and divided last.
Beside `train.expert_parallel: E` there are E pipelines, which share the experts of each stage, and read texts of their
own. With `train.tensor_parallel: T`, T neighbours of them share products, sequence and text (products.py).
Cost: the whole model in main memory while it is cut, on every rank.
Not covered: data parallelism beside the pipeline, but for that of the experts; kinds of models that `cut` does not
know.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import pad
from transformers.loss.loss_utils import ForCausalLMLoss

import lowtide
from examples.train.products import SEQUENCE, cut_stages
from examples.train.ranks import Layout
from lowtide.cluster.layout import split_layers
from lowtide.config.memory import plan_from_rules
from lowtide.config.run import RunConfig
from lowtide.engines.choose import choose_engine
from lowtide.errors import ConfigError
from lowtide.loss.attach import SlicedLoss
from lowtide.mindformers.follow import follow, layers_by_offset, sections_of_stages
from lowtide.pipeline import Overlap, Pipeline, WeightGradients, fit_stages
from lowtide.pipeline.cut_model import cut
from lowtide.pipeline.generators import make_schedule
from lowtide.pipeline.schedule import Schedule, layers_of_stages
from lowtide.profiling.fake.trace import trace
from lowtide.runtime.autopilot.plan_model import hardware_of_device
from lowtide.tensors.ranks import ALONE
from lowtide.timeline.hardware import load_hardware


class RankStages:
    """What one rank has of the model, and the pipeline that it is part of. Made by all ranks at once."""

    def __init__(self, run: RunConfig, model: Any, layout: Layout, device: torch.device) -> None:
        assert run.pipeline is not None
        settings = run.pipeline
        schedule = make_schedule(settings.schedule, num_ranks=settings.stages, num_micro_batches=settings.micro_batches)
        self._layers = layers_of_run(run, schedule, model, device)
        self.layer_counts = [len(layers) for layers in self._layers]
        """Of each stage of the pipeline, in the order of the model."""
        try:
            every = cut(model, self._layers)
        except ConfigError as error:
            run.fail("pipeline", str(error))
        self._stages: dict[int, Any] = {stage: every[stage].to(device) for stage in schedule.stages_of(layout.stage)}
        self.model = nn.ModuleList(self._stages.values())
        if run.train.expert_parallel > 1:
            layout.split_experts(run, model, self.model)
        cut_stages(run, model, self._stages.values(), layout)
        self._run, self._layout, self._device, self._schedule = run, layout, device, schedule
        self._has_loss = schedule.num_stages - 1 in self._stages
        self._tides: list[Any] = []
        self.plans: Any = None
        """For a budget, after the first step."""

    def begin(self, optimizer: torch.optim.Optimizer, undo: contextlib.ExitStack) -> None:
        """When the weights are those to begin with: the memory section, and the pipeline. `undo` leaves the stages as
        they were cut."""
        run, memory = self._run, self._run.memory
        self._optimizer, self._undo = optimizer, undo
        if run.train.precision == "bf16_autocast":
            for stage in self._stages.values():
                stage.forward = torch.autocast(self._device.type, dtype=torch.bfloat16)(stage.forward)
                undo.callback(delattr, stage, "forward")
        if memory is not None and memory.optimizer == "swap" and memory.budget is None:
            # It comes and goes while the optimizer steps: the backward of one of many micro-batches in flight is no
            # sign that the step is near.
            bare = plan_from_rules(dataclasses.replace(memory, recompute=None, swap=None, keep=()), ())
            engine = undo.enter_context(contextlib.closing(choose_engine(run.train.engine, self.model, bare)))
            undo.enter_context(lowtide.swap_optimizer(optimizer, overlap="step", engine=engine))
        # The optimizer has the parameters of all stages of the rank; the loss is after the last stage, and in none.
        rules = None if memory is None else dataclasses.replace(memory, optimizer="keep", loss="plain")
        how: Any = {"engine": run.train.engine, "group": ALONE}
        if run.sections is not None:
            # Each stage by the numbers that its layers have in the whole model.
            sections = sections_of_stages(run.sections, self._schedule, sum(self.layer_counts))
            for stage, module in self._stages.items():
                first = self._layers[stage][0]
                self._tides.append(follow(module, sections, memory=rules, first_layer=first, **how))
        elif rules is not None and not rules.has_budget:
            self._tides = [lowtide.apply(module, rules, **how) for module in self._stages.values()]
        for tide in self._tides:
            undo.enter_context(tide)
        shares_products = self._layout.sizes["product"] > 1
        may_slice = memory is not None and memory.slices_loss["may"]
        loss = loss_function(may_slice=may_slice, layout=self._layout if shares_products else None)
        how = {"run_pair": Overlap().run_pair} if run.pipeline is not None and run.pipeline.overlap else {}
        how["weight_gradients"] = WeightGradients() if self._schedule.splits_backwards else None
        how["loss"] = loss if self._has_loss else None
        self.pipeline = Pipeline(self._schedule, self._stages, group=self._layout.pipeline, **how)
        undo.callback(self.pipeline.close)

    @property
    def tides(self) -> list[Any]:
        """One for each stage of the rank. Those of a budget can be others after a step."""
        return self._tides if self.plans is None else list(self.plans.tides.values())

    def take_passes(self, batches: Iterable[torch.Tensor], say: Callable[[str], None]) -> float:
        """Forward and backward of all micro-batches. The mean loss; 0 on ranks that do not have it. `say` hears of the
        plans for a budget."""
        batches = [tokens.to(self._device) for tokens in batches] if self._has_loss or 0 in self._stages else []
        inputs = [own_part(tokens, self._layout) for tokens in batches] if 0 in self._stages else None
        given = inputs, batches if self._has_loss else None
        memory = self._run.memory
        if memory is not None and memory.has_budget and self.plans is None:
            how: Any = {"optimizer": self._optimizer, "engine": self._run.train.engine, "say": say}
            how["together"] = None if self._layout.pipeline is None else dist.group.WORLD
            self.plans = fit_stages(self.pipeline, *given, memory=dataclasses.replace(memory, loss="plain"), **how)
            self._undo.callback(self.plans.remove)
        losses = self.pipeline.step(*given)
        return float(sum(loss.double() for loss in losses)) / self._schedule.num_micro_batches


def layers_of_run(run: RunConfig, schedule: Schedule, model: Any, device: torch.device) -> Sequence[range]:
    """The layers of each stage, in the order of the model. Raises `ConfigError` with its place."""
    assert run.pipeline is not None
    num_layers, num_stages = len(model.model.layers), schedule.num_stages
    sizes: Any = run.pipeline.layers
    if run.sections is not None and not run.sections.is_newer and run.sections.offset not in (0, None):
        if sizes != "even":
            run.fail("pipeline.layers", "'pipeline.layers' says what 'offset' says already; leave one of them out")
        sizes = layers_by_offset(run.sections, schedule, num_layers)
    elif sizes == "even":
        try:
            return layers_of_stages(num_layers, num_stages)
        except ConfigError as error:
            run.fail("pipeline", f"{error}; or write 'pipeline.layers: balanced'")
    elif sizes == "balanced":
        if num_layers < num_stages:
            run.fail("pipeline", f"pipeline: {num_layers} layers are too few for {num_stages} stages")
        sizes = _balanced(run, num_stages, model, device)
    elif (len(sizes), sum(sizes)) != (num_stages, num_layers):
        written = f"'pipeline.layers' has {len(sizes)} numbers that add up to {sum(sizes)}"
        there = f"'{schedule.name}' has {num_stages} stages here, and the model {num_layers} layers"
        run.fail("pipeline.layers", f"{written}; {there}")
    return [range(start, end) for start, end in pairwise(accumulate(sizes, initial=0))]


def _balanced(run: RunConfig, num_stages: int, model: Any, device: torch.device) -> list[int]:
    """Sizes of stages, of which none is empty, so that the slowest is as fast as can be."""
    tokens = torch.empty(run.train.batch_size, run.data.sequence_length, dtype=torch.int64, device="meta")
    hardware = load_hardware(hardware_of_device(device))
    profile = trace(model, {"input_ids": tokens, "labels": tokens}, hardware=hardware)
    seconds: Counter[str] = Counter()  # of `model.layers.3`, `model.embed_tokens`, ...
    for name, its_seconds in zip(profile.op_names, profile.op_seconds, strict=True):
        depth = 3 if name.startswith("model.layers.") else 2
        seconds[".".join(name.split(".")[:depth])] += its_seconds
    layers = [seconds.pop(f"model.layers.{number}", 0.0) for number in range(len(model.model.layers))]
    first = seconds.pop("model.embed_tokens", 0.0)
    # A split may leave the two ends without a layer; here each stage is a module with some.
    sizes = [max(1, size) for size in split_layers(layers, num_stages, first=first, last=seconds.total())]
    while sum(sizes) > len(layers):
        sizes[sizes.index(max(sizes))] -= 1
    return sizes


def own_part(tokens: torch.Tensor, layout: Layout) -> torch.Tensor:
    """(B, T) -> (B, T / ranks that share products)."""
    return tokens.chunk(layout.sizes["product"], dim=SEQUENCE)[layout.product]


def loss_function(*, may_slice: bool, layout: Layout | None = None) -> Callable[[torch.Tensor, torch.Tensor], Any]:
    """Of logits and tokens: their mean loss; if it may, in slices of rows, where they save memory and keep the bits
    (loss/attach.py). `layout`: of ranks that share products. Then the logits are those of the own part of the sequence,
    and the loss what this adds to the mean of all tokens."""
    loss: Any = SlicedLoss(ForCausalLMLoss, shifts=True) if may_slice else ForCausalLMLoss

    def mean(logits: torch.Tensor, tokens: torch.Tensor) -> Any:
        how: dict[str, Any] = {"vocab_size": logits.shape[-1]}
        if layout is not None:
            # The last token has none that follows; -100 is no target.
            how["shift_labels"] = own_part(pad(tokens, (0, 1), value=-100)[:, 1:], layout).contiguous()
            how["num_items_in_batch"] = tokens.shape[0] * (tokens.shape[1] - 1)
        return loss(logits, tokens, **how)

    return mean
