"""A pipeline within a budget: each rank observes one micro-batch of its stages, plans for those in flight, and follows.

What: `fit_stages` is called by all ranks, once, with the batch of the first step. One micro-batch goes through the
stages and is observed (observe_stages.py). Then each rank plans for itself (rank_plan.py), all ranks hear of those for
which nothing fits, and each stage follows its plan from then on, with a guard (runtime/offload/spill.py) at what the
plan holds of that stage.
Why it is safe: plans move and recompute, which changes no bit.
Cost: one step of one micro-batch through all stages, and a second or a few for the solver.
Not covered: weight gradients that are put off and halves of pairs that take turns (refused by name); a micro-batch that
is larger than the one observed, or other routing of experts: the guard spills what is more than planned; the fragments
of a device's allocator.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import nn

from lowtide.config.memory import MemoryConfig, plan_from_rules
from lowtide.core.plan import Plan
from lowtide.core.profile import StateBytes
from lowtide.engines.bandwidth import cache_path, measure_link
from lowtide.engines.base import Engine
from lowtide.engines.choose import choose_engine
from lowtide.engines.device_memory import memory_of_model
from lowtide.errors import BudgetError, ConfigError, PipelineError
from lowtide.pipeline.execute import Pipeline, one_after_the_other
from lowtide.pipeline.moments import moments_of
from lowtide.pipeline.observe_stages import observe_stages
from lowtide.pipeline.rank_plan import RankPlan, RankTask, plan_rank
from lowtide.profiling.state_bytes import state_bytes
from lowtide.runtime.autopilot.plan_model import merged_config
from lowtide.runtime.session.apply import apply
from lowtide.runtime.session.forward_patch import patched_module
from lowtide.runtime.session.tide import Tide
from lowtide.tensors.live_bytes import LiveBytes, unique_bytes
from lowtide.tensors.private import tree_leaves
from lowtide.tensors.ranks import ALONE, gather
from lowtide.units import format_bytes, format_seconds

_STEADY_BYTES = 4096
"""Numbers of a step: its loss, norms, the rate. And a few for each parameter and micro-batch."""
_HEADROOM = 49
"""The guard begins to spill a fiftieth below its limit."""
Say = Callable[[str], None]
_Made = TypeVar("_Made")


def fit_stages(
    pipeline: Pipeline,
    inputs: Sequence[Any] | None = None,
    targets: Sequence[Any] | None = None,
    *,
    budget: int | str | None = None,
    memory: Any = None,
    optimizer: torch.optim.Optimizer | None = None,
    engine: Engine | str | None = None,
    say: Say | None = None,
) -> StagePlans:
    """Bring the stages of this rank under plans that hold its budget. Collective over the ranks of the pipeline.

    `inputs`, `targets`: those of the first step, as for `pipeline.step`; nothing is trained with them. `budget`: bytes
    on the device of each rank, or it stands in `memory` (a section, a mapping or a path). `optimizer`: that of all
    parameters of the rank, whose state counts. The gradients of the weights must be None or those of a step before.
    Raises ConfigError on all ranks for a mistake on any, `BudgetError` on all where some rank has no plan that fits,
    and what a stage raised; then `PipelineError` on the others.
    """
    own = nn.ModuleList(pipeline.stages.values())
    wanted = _together(pipeline, "its settings", lambda: _checked(pipeline, inputs, targets, memory, budget))
    settled = _together(pipeline, "its budget", lambda: wanted.settled(lambda: memory_of_model(own, optimizer)))
    config = settled.config
    if settled.line and say is not None:
        say(f"lowtide: rank {pipeline.rank}: {settled.line}")
    whole = plan_from_rules(dataclasses.replace(config, recompute=None, swap=None, keep=()), ())
    chosen = choose_engine(engine, own, whole)
    try:
        pipeline.try_stages(inputs)
        chunks = _together(pipeline, "the step that is observed", lambda: observe_stages(pipeline, inputs, targets))
        device = next((parameter.device for parameter in own.parameters()), torch.device("cpu"))
        task = RankTask(
            chunks=chunks,
            moments=moments_of(pipeline.schedule, pipeline.rank, pairs_at_once=False),
            state=_state_of(pipeline, own, (inputs, targets), optimizer, device),
            budget_bytes=settled.budget_bytes,
            config=_of_one_chunk(config, pipeline),
            link=measure_link(chosen, device, place=str(config.disk_path or ""), cache=cache_path()),
        )
        found = _together(pipeline, "its plan", lambda: plan_rank(task))
        return _together(
            pipeline,
            "its plan",
            lambda: StagePlans(pipeline, task, found, optimizer, chosen, owns_engine=chosen is not engine),
        ).told(say)
    except BaseException:
        if chosen is not engine:
            chosen.close()
        raise


def _together(pipeline: Pipeline, what: str, do: Callable[[], _Made]) -> _Made:
    """What `do` gives, once it has given something on all ranks. What it raises on one ends all of them."""
    error: Exception | None = None
    made: list[_Made] = []
    try:
        made.append(do())
    except Exception as raised:
        error = raised
    answers = gather(None if error is None else _Failure.of(error, pipeline.rank), pipeline.group)
    failures = [failure for failure in answers if failure is not None]
    if not failures:
        return made[0]
    # The rank that needs most says what would be enough for all.
    worst = max(failures, key=lambda failure: (not failure.is_echo, failure.floor_bytes or 0))
    if worst.floor_bytes is not None:
        raise BudgetError(f"pipeline: rank {worst.rank}: {worst.text}", floor_bytes=worst.floor_bytes) from error
    if error is not None:
        raise error
    if worst.is_mistake:
        raise ConfigError(f"{worst.text} (rank {worst.rank})")
    raise PipelineError(f"pipeline: rank {worst.rank} failed at {what}: {worst.kind}: {worst.text}")


@dataclass(frozen=True, slots=True)
class _Failure:
    """What one rank tells the others. Plain, so that it can travel."""

    rank: int
    kind: str
    text: str
    is_mistake: bool
    is_echo: bool
    """It only heard that another rank has failed."""
    floor_bytes: int | None

    @classmethod
    def of(cls, error: Exception, rank: int) -> _Failure:
        floor_bytes = error.floor_bytes if isinstance(error, BudgetError) else None
        is_echo = isinstance(error, PipelineError)
        return cls(rank, type(error).__name__, str(error), isinstance(error, ConfigError), is_echo, floor_bytes)


def _checked(
    pipeline: Pipeline, inputs: Sequence[Any] | None, targets: Sequence[Any] | None, memory: Any, budget: Any
) -> MemoryConfig:
    config = merged_config(memory, budget)
    _refuse(pipeline, config)
    if (mistake := pipeline.batch_mistake(inputs, targets)) is not None:
        raise mistake
    return config


def _refuse(pipeline: Pipeline, config: MemoryConfig) -> None:
    if pipeline.weight_gradients is not None:
        raise ConfigError(
            "pipeline: a budget cannot be planned for weight gradients that are put off: what they keep from I to W is "
            "not observed; leave weight_gradients out"
        )
    if pipeline.run_pair is not one_after_the_other:
        raise ConfigError(
            "pipeline: a budget cannot be planned for pairs whose halves take turns, which need their temporaries at "
            "the same time; leave run_pair out"
        )
    if config.preset is not None:
        raise ConfigError("memory.preset: cannot be planned for the stages of a pipeline yet; write a budget")
    if config.optimizer != "keep":
        raise ConfigError(
            f"memory.optimizer: '{config.optimizer}' cannot be planned for the stages of a pipeline; leave it out, and "
            "swap the state with lowtide.swap_optimizer"
        )
    if config.loss == "sliced":
        raise ConfigError(
            "memory.loss: 'sliced' is about a loss inside a model, and a pipeline has its own; leave it out"
        )
    for stage, module in pipeline.stages.items():
        if patched_module(module) is not None:
            raise ConfigError(f"pipeline: stage {stage} is already under a lowtide plan; call remove() on it first")


def _of_one_chunk(config: MemoryConfig, pipeline: Pipeline) -> MemoryConfig:
    """With the part of the slower tier that one chunk may fill: as many as there are share it."""
    if config.host_budget is None:
        return config
    moments = moments_of(pipeline.schedule, pipeline.rank, pairs_at_once=False)
    most = max(len(moment.running) + sum(number for _, number in moment.live) for moment in moments)
    return dataclasses.replace(config, host_budget=config.host_budget // most)


def _state_of(
    pipeline: Pipeline,
    own: nn.ModuleList,
    batch: Any,
    optimizer: torch.optim.Optimizer | None,
    device: torch.device,
) -> StateBytes:
    """What is on the device whatever the plans."""
    tokens = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    num_parameters = sum(1 for _ in own.parameters())
    steady = _STEADY_BYTES + 64 * (num_parameters + pipeline.schedule.num_micro_batches)
    state = state_bytes(
        own,
        inputs=unique_bytes(tokens, device.type) + steady,
        optimizer=optimizer,
        device_type=device.type,
        is_accelerator=device.type != "cpu",
    )
    # A weight that several stages of the rank share has a sum for each, and at the end the sum of these.
    of_stages = sum(
        parameter.numel() * parameter.element_size()
        for module in pipeline.stages.values()
        for parameter in module.parameters()
        if parameter.requires_grad
    )
    shared = of_stages - state.gradients
    return dataclasses.replace(
        state,
        gradients=of_stages,
        optimizer_temporaries=max(state.optimizer_temporaries - shared, shared),
    )


# -- follow ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSummary:
    """What one stage does, for people. Plain, so that it can travel."""

    rank: int
    stage: int
    num_live: int
    """Chunks in flight at most."""
    held_bytes: int
    """The most that each of them holds."""
    saved_bytes: int
    """What each of them saves."""
    digest: str
    seconds: float
    plain_seconds: float
    peak_bytes: int
    """Of the rank."""

    def __str__(self) -> str:
        return (
            f"lowtide: rank {self.rank}, stage {self.stage}: plan {self.digest}: of {self.num_live} in flight each "
            f"holds at most {format_bytes(self.held_bytes)} of {format_bytes(self.saved_bytes)}; micro-batch "
            f"{format_seconds(self.seconds)} for {format_seconds(self.plain_seconds)}; peak of the rank "
            f"{format_bytes(self.peak_bytes)}"
        )


class StagePlans:
    """The plans in force on the stages of a rank. Made by `fit_stages`; `remove` restores the stages exactly."""

    def __init__(
        self,
        pipeline: Pipeline,
        task: RankTask,
        found: RankPlan,
        optimizer: torch.optim.Optimizer | None,
        engine: Engine,
        *,
        owns_engine: bool,
    ) -> None:
        self.found = found
        self.budget_bytes = task.budget_bytes
        self.tides: dict[int, Tide] = {}
        self._pipeline = pipeline
        self._optimizer = optimizer
        self._engine = engine
        self._owns_engine = owns_engine
        try:
            for stage, plan in found.plans.items():
                tide = apply(pipeline.stages[stage], plan, engine=engine, group=ALONE, moves_state=False)
                self.tides[stage] = tide
                tide.set_limit(self._limit(stage, task, plan), slack_bytes=max(0, task.budget_bytes - found.peak_bytes))
        except BaseException:
            self.remove()
            raise
        self.summaries = self._summaries(task)
        """Of the stages of this rank; after `told` of all stages of the pipeline, in their order."""

    def told(self, say: Say | None) -> StagePlans:
        """All ranks hear of all plans. Collective. Gives itself back."""
        everywhere = gather(self.summaries, self._pipeline.group)
        self.summaries = sorted((each for own in everywhere for each in own), key=lambda summary: summary.stage)
        for summary in self.summaries if say is not None else ():
            assert say is not None
            say(str(summary))
        return self

    @property
    def plans(self) -> Mapping[int, Plan]:
        """Of each stage of this rank."""
        return self.found.plans

    def _limit(self, stage: int, task: RankTask, plan: Plan) -> int:
        """What the tide of a stage may count: its weights, its chunks in flight, and one that is in its forward."""
        assert plan.predicted is not None
        module = self._pipeline.stages[stage]
        weights = unique_bytes([*module.parameters(), *module.buffers()])
        weights += sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
        num_live = max(dict(moment.live)[stage] for moment in task.moments)
        state = task.state
        beside = state.parameters + state.buffers + state.optimizer + state.inputs + state.gradients
        own = max(0, plan.predicted.forward_held_bytes - beside)
        high = weights + num_live * self.found.held_bytes[stage] + own + task.budget_bytes - self.found.peak_bytes
        return high + high // _HEADROOM + 1

    def _summaries(self, task: RankTask) -> list[StageSummary]:
        return [
            StageSummary(
                rank=self._pipeline.rank,
                stage=stage,
                num_live=max(
                    dict(moment.live)[stage] + sum(which == stage for which, _ in moment.running)
                    for moment in task.moments
                ),
                held_bytes=self.found.held_bytes[stage],
                saved_bytes=chunk.profile.saved_bytes + chunk.input_bytes,
                digest=self.plans[stage].digest(),
                seconds=self.found.step_seconds[stage],
                plain_seconds=sum(chunk.profile.op_seconds),
                peak_bytes=self.found.peak_bytes,
            )
            for stage, chunk in task.chunks.items()
        ]

    @contextlib.contextmanager
    def audit(self) -> Iterator[LiveBytes]:
        """Around steps of your own: `peak_bytes` of what it gives is the exact peak of this rank on the device, without
        messages that have arrived and were not read yet."""
        own = nn.ModuleList(self._pipeline.stages.values())
        live = LiveBytes(model=own, optimizer=self._optimizer, device_type=self._engine.device_type)
        for tide in self.tides.values():
            tide.count_buffers(live.add)
        try:
            with live:
                yield live
        finally:
            for tide in self.tides.values():
                tide.count_buffers(None)

    def remove(self) -> None:
        """Leave the stages as they were. Idempotent."""
        for tide in self.tides.values():
            tide.remove()
        if self._owns_engine:
            self._engine.close()

    def __enter__(self) -> StagePlans:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()
