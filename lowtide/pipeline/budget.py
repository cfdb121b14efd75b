"""A pipeline within a budget: each rank observes one micro-batch of its stages, plans for those in flight, and follows.

What: `fit_stages` is called by all ranks, once, with the batch of the first step. One micro-batch goes through the
stages and is observed (observe_stages.py). Then each rank plans for itself (rank_plan.py), all ranks hear of those for
which nothing fits, and each stage follows its plan from then on, with a guard (runtime/offload/spill.py) at what the
plan holds of that stage.
Pairs whose halves take turns need room for two chunks that are computed at once (turns.py); with
`memory.optimizer: swap | auto` the optimizer's state is on the next tier between steps.
Why it is safe: plans move and recompute, which changes no bit.
Cost: one step of one micro-batch through all stages, with experts on several ranks a forward of all others, and a
second or a few for the solver.
Before a step that needs more room (a larger micro-batch than any before, more bytes of its batch, gradients that are
there already) plans are made again, on all ranks together.
Not covered: pairs that are carried out in another way than `Overlap` does (refused by name); a micro-batch with no more
elements that is longer in some dimension (a warning says so), or to whose experts come more rows than were planned for:
the guard spills what is more, if that is enough; the fragments of a device's allocator.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lowtide.config.memory import MemoryConfig, plan_from_rules
from lowtide.core.decisions import OptimizerPlacement
from lowtide.core.log import LOG
from lowtide.core.plan import Plan
from lowtide.core.profile import StateBytes
from lowtide.engines.bandwidth import cache_path, measure_link
from lowtide.engines.base import EngineChoice
from lowtide.engines.choose import choose_engine, memory_of_model
from lowtide.errors import BudgetError, ConfigError
from lowtide.optimizer.swap import OptimizerSwap
from lowtide.pipeline.agree import Together
from lowtide.pipeline.execute import Pipeline, one_after_the_other
from lowtide.pipeline.experts import averaging_bytes, trained_by
from lowtide.pipeline.live_chunks import live_chunks_of
from lowtide.pipeline.observe_stages import observe_stages, size_of, with_rows_of_all
from lowtide.pipeline.overlap import Overlap
from lowtide.pipeline.rank_plan import RankPlan, RankTask, StageChunk, plan_rank_with_state
from lowtide.pipeline.turns import with_kept_rows
from lowtide.planner.by_rules import layers_by_rule
from lowtide.planner.place_state import refuse_without_effect
from lowtide.profiling.state_bytes import state_bytes
from lowtide.runtime.autopilot.plan_model import merged_config
from lowtide.runtime.session.apply import apply
from lowtide.runtime.session.forward_patch import patched_module
from lowtide.runtime.session.optimizer_state import PlacedState
from lowtide.runtime.session.tide import Tide
from lowtide.tensors.kinds import device_of, tensors_in
from lowtide.tensors.live_bytes import LiveBytes, unique_bytes
from lowtide.tensors.modes import remembered_cast_bytes
from lowtide.tensors.ranks import ALONE, gather
from lowtide.units import format_bytes, format_seconds

_STEADY_BYTES = 4096
"""Numbers of a step: its loss, norms, the rate. And a few for each parameter and micro-batch."""
_HEADROOM = 49
"""The guard begins to spill a fiftieth below its limit."""
Say = Callable[[str], None]


def fit_stages(
    pipeline: Pipeline,
    inputs: Sequence[Any] | None = None,
    targets: Sequence[Any] | None = None,
    *,
    budget: int | str | None = None,
    memory: Any = None,
    optimizer: torch.optim.Optimizer | None = None,
    engine: EngineChoice = None,
    say: Say | None = None,
    together: Any = None,
) -> StagePlans:
    """Bring the stages of this rank under plans that hold its budget. Collective over the ranks of the pipeline.

    `inputs`, `targets`: those of the first step, as for `pipeline.step`; nothing is trained with them. `budget`: bytes
    on the device of each rank, or it stands in `memory` (a section, a mapping or a path). `optimizer`: that of all
    parameters of the rank, whose state counts. The gradients of the weights must be None or those of a step before.
    `together`: where pipelines share experts, the group of all their ranks, all of which call this; absent, that of the
    pipeline.
    Raises ConfigError on all ranks for a mistake on any, `BudgetError` on all where some rank has no plan that fits,
    and what a stage raised; then `PipelineError` on the others.
    """
    ranks = Together("fit_stages", pipeline.rank, pipeline.group if together is None else together)
    own = pipeline.modules
    wanted = ranks.all_do("its settings", lambda: _checked(pipeline, inputs, targets, memory, budget))
    settled = ranks.all_do("its budget", lambda: wanted.settled(lambda: memory_of_model(own, optimizer)))
    config, budget_bytes, line = settled
    if line and say is not None:
        say(f"lowtide: rank {pipeline.rank}: {line}")
    whole = plan_from_rules(dataclasses.replace(config, recompute=None, swap=None, keep=(), optimizer="keep"), ())
    chosen = choose_engine(engine, own, whole)
    placed = PlacedState(optimizer, chosen, "fit_stages")
    try:
        config = ranks.all_do("its settings", lambda: _with_state_that_can_move(config, placed))
        device = device_of(own)
        chunks = _chunks_of(pipeline, ranks, config, inputs, targets)
        # A weight of several stages has a sum for each, and the sum of these; pipelines average bucket by bucket.
        between = _shared_bytes(pipeline, own) + pipeline.tied.num_bytes
        if together is not None or pipeline.replicas:
            between = max(between, averaging_bytes(list(own.parameters())))
        between -= sum(chunk.gathered_bytes + chunk.whole_gradient_bytes for chunk in chunks.values())  # gone by then
        state = _state_of(pipeline, own, (inputs, targets), optimizer, chunks.values())
        if config.optimizer == "swap" and not any(gather(state.optimizer_movable, ranks.group)):
            # Of the ranks of a pipeline some may have nothing.
            refuse_without_effect(state, MemoryConfig(optimizer="swap"))
        task = RankTask(
            chunks=chunks,
            moments=live_chunks_of(
                pipeline.schedule,
                pipeline.rank,
                pairs_at_once=pipeline.run_pair is not one_after_the_other,
                puts_off=pipeline.weight_gradients is not None,
                reshards=[stage for stage, chunk in chunks.items() if chunk.away],
            ),
            num_micro_batches=pipeline.schedule.num_micro_batches,
            state=state,
            between_bytes=between,
            budget_bytes=budget_bytes,
            config=config,
            link=measure_link(chosen, device, place=str(config.disk_path or ""), cache=cache_path()),
        )
        found = ranks.all_do("its plan", lambda: plan_rank_with_state(task))
        known = _need_of(inputs, targets, device.type)
        how: Any = {"ranks": ranks, "known": known, "say": say, "closes": chosen is not engine}
        plans = ranks.all_do("its plan", lambda: StagePlans(pipeline, task, found, placed, **how))
        plans._note_shapes(inputs, is_observed=True)
        return plans.told()
    except BaseException:
        if chosen is not engine:
            chosen.close()
        raise


def _checked(
    pipeline: Pipeline,
    inputs: Sequence[Any] | None,
    targets: Sequence[Any] | None,
    memory: Any,
    budget: Any,
) -> MemoryConfig:
    config = merged_config(memory, budget)
    if (
        pipeline.run_pair is not one_after_the_other
        and getattr(pipeline.run_pair, "__func__", None) is not Overlap.run_pair
    ):
        raise ConfigError(
            "pipeline: a budget can be planned for pairs that lowtide.pipeline.Overlap carries out; of another "
            "run_pair nobody knows what is computed at the same time. Give Overlap().run_pair, or leave it out"
        )
    if pipeline.weight_gradients is not None and pipeline.weight_gradients.most_kept is not None:
        raise ConfigError(
            "pipeline: a budget cannot be planned for weight gradients that stay for later waits; leave most_kept out "
            "of WeightGradients, or write rules: recompute, swap, keep"
        )
    if config.slices_loss["must"]:
        raise ConfigError(
            "memory.loss: 'sliced' is about a loss inside a model, and a pipeline has its own; leave it out"
        )
    for key, is_asked in (("rows", config.rows is not None), ("weights", config.weights != "keep")):
        if is_asked:
            raise ConfigError(f"memory.{key}: cannot stand beside a budget for a pipeline yet; leave it out")
    for stage, module in pipeline.stages.items():
        if patched_module(module) is not None:
            raise ConfigError(f"pipeline: stage {stage} is already under a lowtide plan; call remove() on it first")
    if (mistake := pipeline.batch_mistake(inputs, targets)) is not None:
        raise mistake
    return config


def _with_state_that_can_move(config: MemoryConfig, placed: PlacedState) -> MemoryConfig:
    """`auto` is `keep` where the optimizer's state cannot move. Raises ConfigError where it was told to."""
    if config.optimizer == "in_backward":
        raise ConfigError(
            "memory.optimizer: in_backward is for one backward pass a step, and a pipeline has one for each "
            "micro-batch; write optimizer: auto"
        )
    if config.optimizer == "swap":
        placed.check(OptimizerPlacement(moved_bytes=None, reason="memory.optimizer asks for it"))
    if config.optimizer == "auto" and placed.why_not():
        return dataclasses.replace(config, optimizer="keep")
    return config


def _chunks_of(
    pipeline: Pipeline,
    ranks: Together,
    config: MemoryConfig,
    inputs: Sequence[Any] | None,
    targets: Sequence[Any] | None,
) -> dict[int, StageChunk]:
    """What the stages of this rank do with the largest micro-batch. Collective."""
    seen = ranks.all_do("the step that is observed", lambda: observe_stages(pipeline, inputs, targets))
    if any(gather(any(chunk.exchanges for chunk in seen.values()), ranks.group)):
        chunks = seen
        seen = ranks.all_do("the rows of all micro-batches", lambda: with_rows_of_all(pipeline, inputs, chunks))
    return {stage: _by_rules(chunk, config) for stage, chunk in seen.items()}


def _by_rules(chunk: StageChunk, config: MemoryConfig) -> StageChunk:
    """A layer that exchanges rows runs again where a rule says so, and keeps them from its first run."""
    if not chunk.exchanges:
        return chunk
    layers = layers_by_rule(chunk.profile, config)
    return dataclasses.replace(chunk, profile=with_kept_rows(chunk.profile, chunk.exchanges, layers))


def _state_of(
    pipeline: Pipeline,
    own: nn.ModuleList,
    batch: Any,
    optimizer: torch.optim.Optimizer | None,
    chunks: Collection[StageChunk],
) -> StateBytes:
    """What is on the device whatever the plans; `optimizer_temporaries` are those of the optimizer alone."""
    device = device_of(own)
    num_parameters = sum(1 for _ in own.parameters())
    steady = _STEADY_BYTES + 64 * (num_parameters + pipeline.schedule.num_micro_batches)
    # Of an autocast around the whole step: no stage lets go of these.
    steady += remembered_cast_bytes(own, device.type)
    state = state_bytes(
        own,
        inputs=unique_bytes(tensors_in(batch), device.type) + steady,
        optimizer=optimizer,
        device_type=device.type,
        is_accelerator=device.type != "cpu",
    )
    # Under FSDP2 what is whole stays from the first action of a stage to its last, and is gone before the optimizer.
    weights = sum(chunk.gathered_bytes for chunk in chunks)
    gradients = sum(chunk.whole_gradient_bytes for chunk in chunks)
    shared = _shared_bytes(pipeline, own)
    # DistributedDataParallel has room for its gradients from the beginning, whether it exchanges any or not.
    idle = sum(p.nbytes for each in pipeline.replicas.values() for p in trained_by(each))
    return dataclasses.replace(
        state,
        inputs=state.inputs + idle,
        parameters=state.parameters + weights,
        gradients=state.gradients + shared + gradients,
        optimizer_temporaries=max(0, state.optimizer_temporaries - shared - weights - gradients),
    )


def _shared_bytes(pipeline: Pipeline, own: nn.ModuleList) -> int:
    """Gradients that exist once more for each further stage that has the weight."""
    of_stages = [p.nbytes for module in pipeline.stages.values() for p in module.parameters() if p.requires_grad]
    return sum(of_stages) - sum(p.nbytes for p in own.parameters() if p.requires_grad)


# -- follow ----------------------------------------------------------------------------------------------------


_Need = tuple[int, int, int]
"""Of a step: elements of its largest micro-batch, 0 where its inputs are on another rank; bytes of its batch, and of
gradients that are there when it begins."""


def _need_of(
    inputs: Sequence[Any] | None, targets: Sequence[Any] | None, device_type: str, kept_bytes: int = 0
) -> _Need:
    batch_bytes = unique_bytes(tensors_in((inputs, targets)), device_type)
    return max(map(size_of, inputs or ()), default=0), batch_bytes, kept_bytes


_Shapes = list[tuple[int, ...]]
"""Of the tensors of a micro-batch."""


def _is_within(shapes: _Shapes, known: _Shapes) -> bool:
    """Whether no tensor is longer in any dimension."""
    return len(shapes) == len(known) and all(
        len(own) == len(other) and all(map(operator.le, own, other)) for own, other in zip(shapes, known)
    )


class StagePlans:
    """The plans in force on the stages of a rank. Made by `fit_stages`; `remove` restores the stages exactly."""

    def __init__(
        self,
        pipeline: Pipeline,
        task: RankTask,
        found: RankPlan,
        placed: PlacedState,
        *,
        ranks: Together,
        known: _Need,
        say: Say | None,
        closes: bool,
    ) -> None:
        """`known`: what there is room for. `closes`: the engine ends with the plans."""
        self.found = found
        self.budget_bytes = task.budget_bytes
        self.tides: dict[int, Tide] = {}
        self.summaries: dict[int, str] = {}
        """By stage, what is said of it: of this rank's; after `told` of all stages of the pipeline."""
        self._pipeline = pipeline
        self._task = task
        self._ranks = ranks
        self._say = say
        self._placed = placed
        self._engine = placed.beside
        self._owns_engine = closes
        self._known = self._next = known
        """What there is room for; and the larger of that and of what the step that begins needs."""
        self._shapes: list[_Shapes] = []
        """Of micro-batches that were observed, or warned of."""
        self._on_buffer: Callable[[torch.UntypedStorage], None] | None = None
        """Inside of an audit."""
        try:
            self._follow(found)
        except BaseException:
            self.remove()
            raise
        pipeline.plans = self

    def _follow(self, found: RankPlan) -> None:
        """In place of the plans in force, if there are any."""
        self._take_off()
        self.found, task = found, self._task
        for stage, plan in found.plans.items():
            how: Any = {"engine": self._engine, "group": ALONE, "moves_state": False}
            tide = self.tides[stage] = apply(self._pipeline.stages[stage], plan, **how)
            tide.set_limit(self._limit(stage, task, plan), slack_bytes=max(0, task.budget_bytes - found.peak_bytes))
            tide._scheduler.on_buffer = self._on_buffer
        limits = task.config.tier_limits
        self._placed.follow(Plan(layers=(), min_bytes=0, **limits, optimizer=found.optimizer))
        self.summaries = self._summaries(task)

    def told(self) -> StagePlans:
        """All ranks hear of all plans. Collective. Gives itself back."""
        everywhere = gather(self.summaries, self._pipeline.group)
        self.summaries = dict(sorted(each for own in everywhere for each in own.items()))
        if self._say is not None:
            for text in self.summaries.values():
                self._say(text)
        return self

    @property
    def optimizer_swap(self) -> OptimizerSwap | None:
        """The handle of the optimizer's state; None where all of it stays."""
        return self._placed.handle

    @property
    def plans(self) -> Mapping[int, Plan]:
        """Of each stage of this rank."""
        return self.found.plans

    # -- before each step ----------------------------------------------------------------------------------------------

    def lacks(self, inputs: Sequence[Any] | None, targets: Sequence[Any] | None, kept_bytes: int) -> int:
        """Of a step that begins: 0 if there is room for it, 1 if plans are to be made again, 2 if its stages are to be
        observed again as well. `kept_bytes`: of gradients that are there."""
        now = _need_of(inputs, targets, self._engine.device_type, kept_bytes)
        largest, batch_bytes, kept_bytes = map(max, self._known, now)
        self._next = largest, batch_bytes, kept_bytes
        self._note_shapes(inputs, is_observed=largest > self._known[0])
        return 2 if largest > self._known[0] else int(self._next != self._known)

    def _note_shapes(self, inputs: Sequence[Any] | None, *, is_observed: bool) -> None:
        """Warn of micro-batches that are longer in some dimension than those known. The largest one may be observed."""
        for number, entry in enumerate(sorted(inputs or (), key=size_of, reverse=True)):
            shapes = [tuple(each.shape) for each in tensors_in(entry)]
            if any(_is_within(shapes, known) for known in self._shapes):
                continue
            if number or not is_observed:
                words = [", ".join(str([*shape]) for shape in each) for each in (shapes, self._shapes[0])]
                LOG.warning(
                    "lowtide: pipeline: step %d has a micro-batch of shape %s, with no more elements than the one that "
                    "was observed (%s), and longer. If it needs more (attention does), the budget may be passed; give "
                    "fit_stages the micro-batches that need most",
                    *(self._pipeline.num_steps, *words),
                )
            self._shapes.append(shapes)

    def renew(self, lack: int, inputs: Sequence[Any] | None, targets: Sequence[Any] | None) -> None:
        """Make room for the step that `lacks` was asked about. Collective. `lack`: the most of any rank of the
        pipeline."""
        pipeline, ranks, task = self._pipeline, self._ranks, self._task
        if ranks.group is not pipeline.group:
            lack = max(gather(lack, ranks.group))
        if not lack:
            return
        larger, more_bytes, kept_bytes = (now - before for now, before in zip(self._next, self._known, strict=True))
        if larger:
            LOG.info(
                "lowtide: pipeline: step %d has a micro-batch of %d elements, and %d were the most so far: its stages "
                "are observed and planned again",
                *(pipeline.num_steps, self._next[0], self._known[0]),
            )
        self._known = self._next
        if lack == 2:
            self._take_off()
            chunks = _chunks_of(pipeline, ranks, task.config, inputs, targets)
            task = dataclasses.replace(task, chunks=chunks)
        state = dataclasses.replace(
            task.state,
            inputs=task.state.inputs + more_bytes,
            gradients=task.state.gradients + kept_bytes,
            # By then they are one with those of the step.
            optimizer_temporaries=max(0, task.state.optimizer_temporaries - kept_bytes),
        )
        self._task = dataclasses.replace(task, state=state, budget_bytes=self.budget_bytes)
        found = ranks.all_do("its plan", self._planned)
        ranks.all_do("its plan", lambda: self._follow(found))
        self.told()

    def _planned(self) -> RankPlan:
        """Where nothing fits any more, what needs least, with a warning; with `strict` a `BudgetError`."""
        try:
            return plan_rank_with_state(self._task)
        except BudgetError as error:
            if self._task.config.strict:
                raise
            LOG.warning(
                "lowtide: pipeline: rank %d: in step %d %s. Until then steps run under the plan that needs least, %s "
                "over the budget; write strict: true to have a BudgetError instead",
                *(self._pipeline.rank, self._pipeline.num_steps, error),
                format_bytes(error.floor_bytes - self.budget_bytes),
            )
            self._task = dataclasses.replace(self._task, budget_bytes=error.floor_bytes)
            return plan_rank_with_state(self._task)

    def _limit(self, stage: int, task: RankTask, plan: Plan) -> int:
        """What the tide of a stage may count: its weights, its chunks in flight, and one that is in its forward."""
        assert plan.predicted is not None
        module = self._pipeline.stages[stage]
        weights = unique_bytes([*module.parameters(), *module.buffers()])
        weights += sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
        # The backward of a pair may be of the same stage.
        num_live = max(
            dict(moment.live)[stage] + (len(moment.running) == 2 and (stage, False) in moment.running)
            for moment in task.moments
        )
        state = task.state
        beside = state.parameters + state.buffers + state.optimizer + state.inputs + state.gradients
        beside -= 0 if self.found.optimizer is None else self.found.optimizer.moved_bytes or 0
        own = max(0, plan.predicted.forward_held_bytes - beside)
        high = weights + num_live * self.found.held_bytes[stage] + own + task.budget_bytes - self.found.peak_bytes
        return high + high // _HEADROOM + 1

    def _summaries(self, task: RankTask) -> dict[int, str]:
        found, texts = self.found, {}
        for stage, chunk in task.chunks.items():
            num_live = max(moment.num_of(stage) for moment in task.moments)
            saved_bytes = chunk.profile.saved_bytes + chunk.input_bytes
            texts[stage] = (
                f"lowtide: rank {self._pipeline.rank}, stage {stage}: plan {found.plans[stage].digest()}: "
                f"of {num_live} in flight each holds at most {format_bytes(found.held_bytes[stage])} "
                f"of {format_bytes(saved_bytes)}; micro-batch {format_seconds(found.step_seconds[stage])} for "
                f"{format_seconds(sum(chunk.profile.op_seconds))}; peak of the rank {format_bytes(found.peak_bytes)}"
            )
        return texts

    @contextlib.contextmanager
    def audit(self) -> Iterator[LiveBytes]:
        """Around steps of your own: `peak_bytes` of what it gives is the exact peak of this rank on the device, without
        messages that have arrived and were not read yet. Where the next tier is main memory as well, state of the
        optimizer that is there counts while the optimizer steps."""
        live = LiveBytes(
            model=self._pipeline.modules, optimizer=self._placed.optimizer, device_type=self._engine.device_type
        )
        self._on_buffer = live.add
        for tide in self.tides.values():
            tide._scheduler.on_buffer = live.add
        try:
            with live:
                yield live
        finally:
            self._on_buffer = None
            for tide in self.tides.values():
                tide._scheduler.on_buffer = None

    def _take_off(self) -> None:
        for tide in self.tides.values():
            tide.remove()

    def remove(self) -> None:
        """Leave the stages as they were, on all ranks. Idempotent."""
        self._take_off()
        if self._pipeline.plans is self:
            self._pipeline.plans = None
        self._placed.remove()
        if self._owns_engine:
            self._engine.close()

    def __enter__(self) -> StagePlans:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()
