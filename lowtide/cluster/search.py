"""The fastest layout of a model over so many devices, or what a given one is like.

What: `plan_cluster` lists the layouts that the `parallel` section leaves open, bounds each from below in memory and
time, and plans them from the lowest bound on: which layers each stage has (layout.py), what each rank keeps, swaps and
recomputes of the chunks in flight there (rank.py), and how long the step takes (step.py). It stops where no bound left
is below the times of the layouts that it will show.
Bounds: first the pace of the rank that works most, with everything kept; then the schedule played with everything kept.
No layout that is left out is faster than those that are shown. A value that the section pins is never changed.

Where the optimizer's state may be elsewhere (`Question.optimizer`), each layout is there with its state on the device
and with it on the host: then a device holds three buckets of it, and each step of the optimizer waits for the link.

Cost: 1 ms a layout for its first bound, 0.1 s for the second, 0.1 to 2 s for a plan; few layouts need all three. Equal
layers are described once, equal ranks planned once.
Not covered: sizes that the module docstring of layout.py leaves out, and the size of a micro-batch, which is given.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lowtide.cluster.layer import Layer, make_layer
from lowtide.cluster.layout import Layout, Question, layouts, schedules_of, split_layers
from lowtide.cluster.rank import Memory, PlannedRank, RankAtWorst, Stage, least_bytes, plan_rank, saved_bytes_of
from lowtide.cluster.step import StageTimes, StepSeconds, least_seconds, step_seconds_of, total
from lowtide.errors import ConfigError
from lowtide.timeline.hardware import hand_over_seconds, ring_seconds
from lowtide.units import MIB, format_bytes, format_seconds

NUM_SHOWN = 5
"""Layouts in a plan: the best, and the next best."""
MOST_PLANNED = 40
"""Layouts that are planned in full, of those with the least bounds."""
WEIGHT_BYTES, GRADIENT_BYTES, MASTER_BYTES = 2, 4, 4
BUCKETS_BYTES = 3 * 128 * MIB
"""Of the optimizer's state that is elsewhere: what is on the device at once, as `swap_optimizer` has it."""
MOVES = {"keep": (False,), "swap": (True,), "auto": (False, True)}
"""Whether the optimizer's state is elsewhere, by `Question.optimizer`."""
_PLAIN_LOGIT_BYTES, _SLICED_LOGIT_BYTES, _SPREAD_LOGIT_BYTES = 14, 4, 6
"""Of one logit at the worst moment of the loss. Plain: bf16, and in fp32 its log-probability and two gradients. In
slices of rows: the logit and its gradient in bf16 (loss/cross_entropy.py). Spread over tensor ranks: bf16, and fp32
that the loss writes over, as in the systems that train so."""
_SLICES_BYTES = 4 * 64 * MIB
"""Slices that are alive at once, at most."""

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutPlan:
    """A layout with everything that was worked out for it."""

    layout: Layout
    num_micro_batches: int
    """Of the schedule that is played."""
    num_layers: tuple[int, ...]
    """Of each stage, in the order of the model."""
    seconds: StepSeconds
    full_recompute_seconds: float
    """Of the forwards and backwards of a step in which every layer runs again, whether or not that fits."""
    ceiling_seconds: float
    """Of those of a step in which everything is kept, whether or not that fits."""
    exchange_seconds: float
    """All-to-all on the rank that works most, hidden or not."""
    ranks: tuple[PlannedRank, ...]
    moved_bytes: int = 0
    """Of the optimizer's state: on the host between steps, of the rank that has most."""

    @property
    def step_seconds(self) -> float:
        return self.seconds.total

    @property
    def pipeline_seconds(self) -> float:
        """Of the forwards and backwards: the step without what follows them."""
        return self.seconds.total - self.seconds.gradients - self.seconds.optimizer

    @property
    def gain(self) -> float:
        """Over recompute of every layer, in forwards and backwards."""
        return self.full_recompute_seconds / self.pipeline_seconds - 1

    @property
    def ceiling_gain(self) -> float:
        """What no plan of this layout can exceed."""
        return self.full_recompute_seconds / self.ceiling_seconds - 1

    @property
    def peak_bytes(self) -> int:
        return max(rank.peak_bytes for rank in self.ranks)

    @property
    def gap(self) -> float:
        return max(rank.gap for rank in self.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlan:
    """What was found. The first plan is the fastest."""

    question: Question
    plans: tuple[LayoutPlan, ...]
    num_layouts: int
    num_too_large: int
    """Layouts that no plan fits."""
    num_planned: int
    bound_seconds: float | None = None
    """Where the search ended at its limit: no layout that was not planned is faster than this."""

    @property
    def best(self) -> LayoutPlan:
        return self.plans[0]


def plan_cluster(
    question: Question,
    *,
    progress: Progress | None = None,
    num_shown: int = NUM_SHOWN,
    most_planned: int = MOST_PLANNED,
) -> ClusterPlan:
    """The fastest layouts. Raises `ConfigError` where there is none, or none fits."""
    tell = progress or (lambda _: None)
    config = question.config
    tell("listing layouts")
    found, wrong = layouts(question)
    if not found:
        assert wrong is not None
        key, text = wrong
        raise ConfigError(f"{config.place_of(key)}: 'parallel.{key}': {text}")
    planner = Planner(question)
    waiting: list[tuple[float, int, str, Draft | LayoutPlan]] = []
    num_too_large = num_planned = 0
    wanted = [(layout, moves) for layout in found for moves in MOVES[question.optimizer]]
    for index, (layout, moves) in enumerate(wanted):
        if index % 100 == 0:
            tell(f"bounding layout {index + 1} of {len(wanted)}")
        draft = planner.draft(layout, moves=moves)
        if draft.least_bytes > question.budget_bytes:
            num_too_large += 1
        else:
            heapq.heappush(waiting, (draft.least_seconds, 0, f"{layout} {moves}", draft))
    plans: list[LayoutPlan] = []
    unplanned: list[float] = []
    # What comes out first has the least bound of all. A bound is made sharper, then replaced by the plan's own time; a
    # plan that comes out is faster than all that is left.
    while waiting and len(plans) < num_shown:
        bound, stage, name, entry = heapq.heappop(waiting)
        if isinstance(entry, LayoutPlan):
            plans.append(entry)
        elif stage == 0:
            tell("playing schedules for sharper bounds")
            heapq.heappush(waiting, (max(bound, planner.sharper(entry)), 1, name, entry))
        elif num_planned >= most_planned and (plans or any(isinstance(each, LayoutPlan) for *_, each in waiting)):
            unplanned.append(bound)
        else:
            num_planned += 1
            tell(f"planning layout {num_planned}, at least {format_seconds(bound)} a step")
            plan = planner.plan(entry)
            if plan is None:
                num_too_large += 1
            else:
                heapq.heappush(waiting, (plan.step_seconds, 2, name, plan))
    if not plans:
        raise _nothing_fits(question, [planner.draft(layout, moves=moves) for layout, moves in wanted])
    return ClusterPlan(
        question=question,
        plans=tuple(plans),
        num_layouts=len(wanted),
        num_too_large=num_too_large,
        num_planned=num_planned,
        bound_seconds=min(unplanned, default=None),
    )


def _nothing_fits(question: Question, drafts: list[Draft]) -> ConfigError:
    nearest = min(drafts, key=lambda draft: (draft.least_bytes, str(draft.layout)))
    states = max(task.state_bytes for task in nearest.tasks)
    needs = (
        f"needs {format_bytes(nearest.least_bytes)} at least"
        if nearest.least_bytes > question.budget_bytes
        else "has no plan that fits either"
    )
    return ConfigError(
        f"budget {format_bytes(question.budget_bytes)}: no layout of {question.devices} devices fits; the nearest, "
        f"{nearest.layout}, {needs}, of which {format_bytes(states)} are weights, gradients and optimizer; take more "
        "devices, a smaller micro-batch, or leave more of 'parallel' open"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A layout before its ranks are planned."""

    layout: Layout
    num_micro_batches: int
    stages: tuple[Stage, ...]
    times: tuple[StageTimes, ...]
    tasks: tuple[RankAtWorst, ...]
    layers: Mapping[str, Layer]
    memory: Memory
    seconds: Callable[[Sequence[StageTimes]], StepSeconds]
    """Of the step, where stages take so long."""
    moved_bytes: int
    least_bytes: int
    least_seconds: float


class Planner:
    """Plans layouts of one question, and remembers what they have in common."""

    def __init__(self, question: Question) -> None:
        share, hardware = question.cluster.compute_share, question.hardware
        reached = dataclasses.replace(
            hardware,
            flops_per_second={dtype: share * rate for dtype, rate in hardware.flops_per_second.items()},
            attention={
                kernel: (share * forward, share * backward)
                for kernel, (forward, backward) in hardware.attention.items()
            },
            memory_bytes_per_second=share * hardware.memory_bytes_per_second,
        )
        self.question = dataclasses.replace(question, hardware=reached)
        """With the rates that a whole step reaches."""
        self._known: dict[tuple[int, ...], tuple[dict[str, Layer], Memory]] = {}
        """By the ranks that share a layer."""

    def draft(self, layout: Layout, *, moves: bool = False) -> Draft:
        """Stages, bounds, and what each rank has to hold. `moves`: the optimizer's state is elsewhere."""
        question = self.question
        key = (layout.tensor, layout.context, layout.expert)
        if key not in self._known:
            kinds = dict.fromkeys(question.shape.kinds)
            self._known[key] = {kind: make_layer(question, layout, kind) for kind in kinds}, {}
        layers, memory = self._known[key]
        stages, times = self._stages(layout, layers)
        num_micro_batches = question.num_micro_batches(layout)
        schedules = schedules_of(layout, num_micro_batches)
        schedule = schedules.schedule
        saved = [sum(layers[kind].saved_bytes for kind in stage.kinds) for stage in stages]
        tasks, moved_bytes = [], 0
        for rank, chunks in enumerate(schedules.fullest(saved)):
            mine = [stages[stage] for stage in schedule.stages_of(rank)]
            state_bytes, optimizer_bytes = self._state_bytes(layout, mine, layers)
            if moves:
                moved_bytes = max(moved_bytes, optimizer_bytes)
                state_bytes -= max(optimizer_bytes - BUCKETS_BYTES, 0)
            tasks.append(
                RankAtWorst(
                    stages=tuple(mine),
                    chunks=chunks,
                    state_bytes=state_bytes,
                    budget_bytes=question.budget_bytes,
                    fates=question.fates,
                )
            )
        by_rank = ([times[stage] for stage in schedule.stages_of(rank)] for rank in range(schedule.num_ranks))
        share = question.cluster.overlap_share
        pace = max(least_seconds(mine, share, has_pairs=layout.has_pairs) for mine in by_rank)
        gradients, optimizer = self._ends(layout, stages, layers, schedule.rank_of_stage)
        link = question.hardware.link
        optimizer = max(optimizer, moved_bytes / min(link.in_bytes_per_second, link.out_bytes_per_second))
        return Draft(
            layout=layout,
            num_micro_batches=num_micro_batches,
            stages=stages,
            times=times,
            tasks=tuple(tasks),
            layers=layers,
            memory=memory,
            seconds=functools.partial(
                step_seconds_of,
                schedules,
                overlap_share=share,
                num_micro_batches=num_micro_batches,
                transfer_seconds=hand_over_seconds(
                    question.cluster,
                    question.hand_over_bytes(layout),
                    stride=layout.tensor * layout.context * layout.data,
                    ranks=layout.pipeline,
                ),
                gradients=gradients,
                optimizer=optimizer,
            ),
            moved_bytes=moved_bytes,
            least_bytes=max(least_bytes(task, layers) for task in tasks),
            least_seconds=num_micro_batches * pace + gradients + optimizer,
        )

    def sharper(self, draft: Draft) -> float:
        """A better bound than the first: with the schedule's own bubble."""
        return draft.seconds(draft.times).total

    def plan(self, draft: Draft) -> LayoutPlan | None:
        """The layout with a plan for each rank; None: one of them does not fit."""
        # The fullest rank first: where it does not fit, the others need no plan.
        held = [task.state_bytes + saved_bytes_of(task, task.chunks, draft.layers) for task in draft.tasks]
        order = sorted(range(len(draft.tasks)), key=lambda rank: -held[rank])
        by_rank: dict[int, PlannedRank] = {}
        for rank in order:
            found = plan_rank(draft.tasks[rank], draft.layers, self.question.hardware.link, draft.memory)
            if found is None:
                return None
            by_rank[rank] = found
        ranks = [by_rank[rank] for rank in range(len(draft.tasks))]
        schedules = schedules_of(draft.layout, draft.num_micro_batches)
        schedule = schedules.schedule
        times = list(draft.times)
        for rank, plan in enumerate(ranks):
            for place, stage in enumerate(schedule.stages_of(rank)):
                times[stage] = dataclasses.replace(
                    times[stage], recompute=plan.recompute_seconds[place], stall=plan.stall_seconds[place]
                )

        parts = draft.seconds(times)
        end = parts.gradients + parts.optimizer
        again = [_all_rerun(time, stage, draft.layers) for time, stage in zip(draft.times, draft.stages, strict=True)]
        busiest = max(
            range(schedule.num_ranks), key=lambda rank: sum(times[stage].plain for stage in schedule.stages_of(rank))
        )
        return LayoutPlan(
            layout=draft.layout,
            num_micro_batches=draft.num_micro_batches,
            num_layers=tuple(len(stage.kinds) for stage in draft.stages),
            seconds=parts,
            full_recompute_seconds=draft.seconds(again).total - end,
            ceiling_seconds=draft.seconds(draft.times).total - end,
            exchange_seconds=draft.num_micro_batches
            * sum(2 * times[stage].exchange for stage in schedule.stages_of(busiest)),
            ranks=tuple(ranks),
            moved_bytes=draft.moved_bytes,
        )

    # ---- parts of a draft

    def _stages(self, layout: Layout, layers: Mapping[str, Layer]) -> tuple[tuple[Stage, ...], tuple[StageTimes, ...]]:
        question, shape, hardware = self.question, self.question.shape, self.question.hardware
        tokens, residual_tokens = question.tokens(layout), question.residual_tokens(layout)
        # Reads rows of the embedding, writes them to the residual stream; gradients add up where rows were read.
        embed = hardware.op_seconds(0, 4.0 * residual_tokens * shape.hidden, "bfloat16", is_fused=True)
        columns = shape.vocabulary / layout.tensor
        head = hardware.op_seconds(2.0 * tokens * shape.hidden * columns, 0, "bfloat16")
        kinds = shape.kinds
        plain = {kind: layer.times.plain for kind, layer in layers.items()}
        costs = [plain[kind] for kind in kinds]
        counts = split_layers(costs, layout.num_stages, first=2 * embed, last=3 * head, wanted=question.config.layers)
        stages, times, start = [], [], 0
        for number, count in enumerate(counts):
            mine = kinds[start : start + count]
            start += count
            is_first, is_last = number == 0, number == len(counts) - 1
            stages.append(
                Stage(
                    kinds=mine,
                    has_embedding=is_first,
                    head_seconds=head if is_last else 0.0,
                    head_bytes=self._loss_bytes(tokens * columns, layout) if is_last else 0,
                )
            )
            extra = (embed if is_first else 0.0) + (head if is_last else 0.0)
            weight = head if is_last else embed * is_first
            ends = StageTimes(forward=extra, backward_input=extra, backward_weight=weight)
            times.append(total([*(layers[kind].times for kind in mine), ends]))
        return tuple(stages), tuple(times)

    def _loss_bytes(self, logits: float, layout: Layout) -> int:
        """Of so many logits on a rank."""
        if layout.tensor > 1:
            return int(_SPREAD_LOGIT_BYTES * logits)
        plain = int(_PLAIN_LOGIT_BYTES * logits)
        if not self.question.slices_loss:
            return plain
        return min(plain, int(_SLICED_LOGIT_BYTES * logits) + _SLICES_BYTES)

    def _parameters(
        self, layout: Layout, stages: Sequence[Stage], layers: Mapping[str, Layer]
    ) -> tuple[float, float, float]:
        """Of a rank with these stages: (those of layers, embedding and head; those of routed experts; those of its
        shards)."""
        shape = self.question.shape
        ends = [stage.has_embedding for stage in stages], [stage.head_seconds > 0 for stage in stages]
        num_embeddings = sum(map(any, ends))
        if shape.is_tied:
            num_embeddings = min(num_embeddings, 1)
        kinds = [kind for stage in stages for kind in stage.kinds]
        own: float = sum(layers[kind].parameters for kind in kinds)
        own += num_embeddings * shape.embedding_parameters / layout.tensor
        experts = sum(layers[kind].expert_parameters for kind in kinds)
        shards = layout.optimizer_shards
        return own, experts, own / shards + experts / min(shards, layout.expert_ranks)

    def _state_bytes(self, layout: Layout, stages: list[Stage], layers: Mapping[str, Layer]) -> tuple[int, int]:
        """Weights, gradients and the optimizer's state; and of these the last."""
        own, experts, sharded = self._parameters(layout, stages, layers)
        optimizer = (MASTER_BYTES + 2 * self._moment_bytes) * sharded
        return int((WEIGHT_BYTES + GRADIENT_BYTES) * (own + experts) + optimizer), int(optimizer)

    @property
    def _moment_bytes(self) -> int:
        return 4 if self.question.config.moments == "float32" else 2

    def _ends(
        self, layout: Layout, stages: tuple[Stage, ...], layers: Mapping[str, Layer], rank_of_stage: tuple[int, ...]
    ) -> tuple[float, float]:
        """Seconds of the gradients' sum and the weights' gather, and of the optimizer, on the rank that has most."""
        cluster = self.question.cluster
        gradients = optimizer = 0.0
        for rank in set(rank_of_stage):
            mine = [stage for stage, home in zip(stages, rank_of_stage, strict=True) if home == rank]
            own, experts, stepped = self._parameters(layout, mine, layers)
            # Shards: gradients are summed where their shard is, weights come back. Without, sums go to all.
            nbytes = GRADIENT_BYTES + (WEIGHT_BYTES if layout.optimizer_shards > 1 else GRADIENT_BYTES)
            exchange = ring_seconds(cluster, layout.shared_ranks, nbytes * own, stride=layout.tensor)
            exchange += ring_seconds(cluster, layout.expert_ranks, nbytes * experts, stride=layout.expert)
            traffic = GRADIENT_BYTES + WEIGHT_BYTES + 2 * (MASTER_BYTES + 2 * self._moment_bytes)
            gradients = max(gradients, exchange)
            optimizer = max(optimizer, stepped * traffic / self.question.hardware.memory_bytes_per_second)
        return gradients, optimizer


def _all_rerun(times: StageTimes, stage: Stage, layers: Mapping[str, Layer]) -> StageTimes:
    """Every layer runs its forward once more, collectives and all-to-all included."""
    again = total(layers[kind].times for kind in stage.kinds)
    return dataclasses.replace(times, recompute=again.ahead, recompute_exchange=again.exchange)
