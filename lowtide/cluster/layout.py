"""How a model is spread over devices: the sizes of the groups of ranks, and the schedule.

What: `Layout` is one way; `fault` says what is wrong with it for a model and a batch, and which key says so. `layouts`
gives all ways that a `parallel` section leaves open.
Ranks stand in the order tensor, context, data, pipeline: tensor ranks are next to each other. Expert ranks are taken
from tensor x context x data.

Free sizes are looked for among: tensor, the powers of 2 within a node; context, those that leave 2,048 tokens of a
sequence to a rank; pipeline and data, divisors of the devices; expert, divisors of the number of experts; 2, 3 or 4
stages a rank where schedules leave it open; optimizer shards, all that there are.
`split_layers` says how many layers each stage has: as wanted, equally many, or so that the slowest stage is as fast as
can be, embedding and output layer counted; the two ends may then be without a layer. Of equally good splits it is the
one with the earliest stages emptiest, for those hold the most micro-batches.
Not covered: tensor ranks inside an expert, uneven groups.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lowtide.cluster.shape import ModelShape
from lowtide.config.run import SCHEDULES, ParallelConfig
from lowtide.core.fate import Fate
from lowtide.errors import ConfigError
from lowtide.pipeline.generators import MOST_FORWARDS, make_schedule
from lowtide.pipeline.live_chunks import live_mixes
from lowtide.pipeline.schedule import Schedule, layers_of_stages
from lowtide.timeline.hardware import Cluster, Hardware

_LEAST_TOKENS = 2048
_INTERLEAVES = (2, 3, 4)
_MOST_ROUNDS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Sizes in ranks, `interleave` in stages a rank."""

    tensor: int = 1
    pipeline: int = 1
    interleave: int = 1
    expert: int = 1
    context: int = 1
    data: int = 1
    optimizer_shards: int = 1
    schedule: str = "1f1b"

    @property
    def num_devices(self) -> int:
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def copies(self) -> int:
        """Of the model on the ranks of one pipeline. DualPipe feeds a pipeline from both ends, each with a copy."""
        return 2 if SCHEDULES[self.schedule].played_as else 1

    @property
    def schedule_ranks(self) -> int:
        """Of the schedule that is played. DualPipe on P ranks is, rank r and rank P - 1 - r doing the same at the same
        time, DualPipeV on P / 2 ranks with half of the micro-batches."""
        return self.pipeline // self.copies

    @property
    def played_name(self) -> str:
        return SCHEDULES[self.schedule].played_as or self.schedule

    @property
    def num_stages(self) -> int:
        return self.schedule_ranks * self.interleave

    @property
    def shared_ranks(self) -> int:
        """Ranks that have the same parameters, those of routed experts excepted."""
        return self.data * self.context * self.copies

    @property
    def expert_ranks(self) -> int:
        """Ranks that have the same routed experts."""
        return max(self.shared_ranks * self.tensor // self.expert, 1)

    @property
    def has_pairs(self) -> bool:
        return SCHEDULES[self.schedule].has_pairs

    def __str__(self) -> str:
        stages = f" x {self.interleave} stages" if self.interleave > 1 and "interleaved" in self.schedule else ""
        sizes = [f"PP {self.pipeline}{stages} {self.schedule}" if self.pipeline > 1 else "PP 1"]
        if self.pipeline == 1 and self.has_pairs:
            sizes = [f"PP 1 {self.schedule}"]
        sizes += [f"TP {self.tensor}"]
        sizes += [f"CP {self.context}"] if self.context > 1 else []
        sizes += [f"EP {self.expert}"] if self.expert > 1 else []
        return ", ".join([*sizes, f"DP {self.data}", f"ZeRO-1 over {self.optimizer_shards}"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a cluster is planned for."""

    shape: ModelShape
    sequences: int | None
    """Of a step of the optimizer, over all devices; None: `micro_batch` x `accumulation` for each data rank."""
    micro_batch: int
    """Sequences."""
    accumulation: int
    sequence_length: int
    config: ParallelConfig
    devices: int
    hardware: Hardware
    cluster: Cluster
    budget_bytes: int
    """Of each device."""
    slices_loss: bool = True
    """Whether the loss is taken in slices of rows (`memory.loss`), where one rank has all words."""
    fates: tuple[Fate, ...] = (Fate.KEEP, Fate.SWAP, Fate.RECOMPUTE)
    """That may be used."""
    optimizer: Literal["keep", "swap", "auto"] = "keep"
    """Where its state is between steps: on the device, on the host, or where the step is shorter."""

    def num_micro_batches(self, layout: Layout) -> int:
        """Of one pipeline, in the schedule that is played."""
        if self.sequences is None:
            return self.accumulation // layout.copies
        return self.sequences // (layout.data * self.micro_batch * layout.copies)

    def tokens(self, layout: Layout) -> int:
        """Of a micro-batch on one rank, without what sequence parallelism splits further."""
        return self.micro_batch * self.sequence_length // layout.context

    def residual_tokens(self, layout: Layout) -> int:
        """Of the residual stream and the norms."""
        return self.tokens(layout) // (layout.tensor if self.config.sequence_parallel else 1)

    def hand_over_bytes(self, layout: Layout) -> int:
        """Of the activations between two stages."""
        return 2 * self.residual_tokens(layout) * self.shape.hidden


Fault = tuple[str, str]
"""The key of `parallel` that makes a layout impossible, and why it does."""


def fault(layout: Layout, question: Question) -> Fault | None:
    """What is wrong first, or None."""
    return next(_faults(layout, question), None)


def _faults(layout: Layout, question: Question) -> Iterator[Fault]:
    """Each is looked for only where those before it are not there."""
    if layout.num_devices != question.devices:
        product = f"tensor {layout.tensor} x pipeline {layout.pipeline} x context {layout.context} x data {layout.data}"
        yield "data", f"{product} makes {layout.num_devices} devices, not {question.devices}; leave one of them out"
    yield from _faults_of_model(layout, question)
    yield from _faults_of_stages(layout, question)
    yield from _faults_of_batch(layout, question)


def _faults_of_model(layout: Layout, question: Question) -> Iterator[Fault]:
    tensor, shape, config = layout.tensor, question.shape, question.config
    experts = shape.experts
    key_heads = shape.heads if shape.key_rank else shape.key_heads
    if shape.heads % tensor or (key_heads % tensor and tensor % key_heads):
        yield "tensor", f"{shape.heads} heads do not divide over {tensor} tensor ranks"
    if shape.inner % tensor:
        yield "tensor", f"an MLP of {shape.inner} columns does not divide over {tensor} tensor ranks"
    parts = layout.context * (tensor if config.sequence_parallel else 1)
    if question.sequence_length % parts:
        yield "context", f"a sequence of {question.sequence_length} tokens does not divide into {parts} parts"
    if experts is None and layout.expert > 1:
        yield "expert", f"'{shape.name}' has no experts to divide over {layout.expert} ranks; remove the key"
    if experts is not None:
        if experts.num % layout.expert:
            yield "expert", f"{experts.num} experts do not divide over {layout.expert} expert ranks"
        ranks = layout.shared_ranks * tensor
        if ranks % layout.expert:
            yield "expert", f"{layout.expert} expert ranks cannot be taken from {ranks} (tensor x context x data)"
        if tensor > 1 and not config.sequence_parallel:
            yield "sequence_parallel", "experts beside tensor ranks need 'sequence_parallel: true'"
    if layout.shared_ranks % layout.optimizer_shards:
        yield (
            "optimizer_shards",
            f"{layout.optimizer_shards} shards do not divide {layout.shared_ranks} ranks with the same parameters",
        )


def _faults_of_stages(layout: Layout, question: Question) -> Iterator[Fault]:
    shape, config = question.shape, question.config
    if layout.pipeline % layout.copies:
        yield "pipeline", f"'dualpipe' needs an even number of pipeline ranks, not {layout.pipeline}"
    num_stages = layout.num_stages
    if isinstance(config.layers, tuple):
        if len(config.layers) != num_stages:
            yield "layers", f"has {len(config.layers)} numbers for {num_stages} stages"
        if sum(config.layers) != shape.num_layers:
            yield "layers", f"adds up to {sum(config.layers)} of {shape.num_layers} layers"
        if 0 in config.layers[1:-1]:
            yield "layers", "leaves a stage between the first and the last without a layer"
    elif config.layers == "even":
        try:
            layers_of_stages(shape.num_layers, num_stages)
        except ConfigError as error:
            yield "layers", str(error).removeprefix("pipeline: ")
    elif shape.num_layers < max(num_stages - 2, 1):
        yield "pipeline", f"{shape.num_layers} layers are too few for {num_stages} stages"


def _faults_of_batch(layout: Layout, question: Question) -> Iterator[Fault]:
    if question.sequences is not None and question.sequences % (layout.data * question.micro_batch * layout.copies):
        ways = layout.data * layout.copies
        yield (
            "global_batch",
            f"{question.sequences} sequences do not divide into micro-batches of {question.micro_batch} on {ways} data "
            "ranks" + (" (two copies a pipeline)" if layout.copies > 1 else ""),
        )
    if question.sequences is None and question.accumulation % layout.copies:
        yield "schedule", f"'dualpipe' needs an even number of micro-batches, not {question.accumulation}"
    per_rank = SCHEDULES[layout.schedule].stages_per_rank
    if per_rank is not None and layout.interleave != per_rank:
        yield "interleave", f"'{layout.schedule}' has {per_rank} stages a rank, not {layout.interleave}"
    if layout.schedule == "interleaved_overlap" and layout.interleave < 2:
        yield "interleave", f"'{layout.schedule}' has 2 or more stages a rank, not {layout.interleave}"
    if layout.pipeline == 1 and layout.interleave > 1:
        yield "interleave", f"1 pipeline rank has no use for {layout.interleave} stages"
    num_micro_batches = question.num_micro_batches(layout)
    if num_micro_batches < 1:
        yield "global_batch", f"{question.sequences} sequences leave a pipeline without a micro-batch"
    ranks = layout.schedule_ranks
    num_played = layout.interleave * ranks * min(num_micro_batches, _MOST_ROUNDS * ranks)
    if num_played > MOST_FORWARDS:
        yield (
            "pipeline",
            f"{ranks} pipeline ranks with {layout.interleave} stages each are {num_played} forward passes in a "
            f"schedule, of at most {MOST_FORWARDS}; lower it",
        )
    if _has_no_schedule(layout, num_micro_batches):
        try:
            _made(layout.played_name, layout.schedule_ranks, layout.interleave, num_micro_batches, 0)
        except ConfigError as error:
            yield "schedule", str(error).removeprefix("pipeline: ")


def _has_no_schedule(layout: Layout, num_micro_batches: int) -> bool:
    ranks = layout.schedule_ranks
    if layout.played_name == "dualpipev":
        return num_micro_batches < 2 * ranks
    return "interleaved" in layout.schedule and num_micro_batches % max(1, num_micro_batches // ranks) != 0


@dataclass(frozen=True)
class Schedules:
    """The schedule of a step, and a shorter one where the step is longer than it takes to show how it repeats
    itself."""

    schedule: Schedule
    shorter: Schedule | None

    @functools.cached_property
    def live(self) -> tuple[np.ndarray, ...]:
        """Of each rank: the mixes of chunks that are live at once. One row a mix, one column a stage of the rank."""
        return tuple(np.unique(live_mixes(self.schedule, rank), axis=0) for rank in range(self.schedule.num_ranks))

    def fullest(self, weights: Sequence[float]) -> list[tuple[int, ...]]:
        """Of each rank, the mix that weighs most; `weights` are those of a chunk, by stage."""
        found = []
        for rank, mixes in enumerate(self.live):
            mine = [weights[stage] for stage in self.schedule.stages_of(rank)]
            # Where weights say nothing, as for a stage without a layer, more chunks count.
            heaviest = int(np.argmax(mixes @ np.asarray(mine) + 1e-6 * mixes.sum(axis=1)))
            found.append(tuple(int(number) for number in mixes[heaviest]))
        return found


def schedules_of(layout: Layout, num_micro_batches: int) -> Schedules:
    """At most four rounds of a micro-batch for each rank, and three: the rest of a step is more of the difference."""
    ranks = layout.schedule_ranks
    per_round, num_rounds = ranks, num_micro_batches / ranks
    if "interleaved" in layout.schedule:
        rounds = max(1, num_micro_batches // ranks)
        per_round, num_rounds = num_micro_batches // rounds, rounds
    most = None if num_rounds <= _MOST_ROUNDS else _MOST_ROUNDS * per_round
    return _made(layout.played_name, ranks, layout.interleave, most or num_micro_batches, per_round if most else 0)


@functools.lru_cache(maxsize=256)
def _made(name: str, num_ranks: int, interleave: int, num_micro_batches: int, per_round: int) -> Schedules:
    """`per_round`: by how much the second schedule is shorter; 0: there is none."""
    each = interleave if "interleaved" in name else None

    def make(number: int) -> Schedule:
        return make_schedule(name, num_ranks=num_ranks, num_micro_batches=number, stages_per_rank=each)

    return Schedules(make(num_micro_batches), make(num_micro_batches - per_round) if per_round else None)


def layouts(question: Question) -> tuple[list[Layout], Fault | None]:
    """All layouts that can be; and where there are none, what is wrong with the first that has the right size."""
    judged = [(layout, fault(layout, question)) for layout in _candidates(question)]
    if found := [layout for layout, wrong in judged if wrong is None]:
        return found, None
    faults = [wrong for _, wrong in judged if wrong is not None]
    if not faults:
        written = ", ".join(f"{key} {value}" for key, value in question.config.pinned().items())
        faults = [("devices", f"no sizes with {written} multiply to {question.devices} devices; leave one of them out")]
    return [], next((wrong for wrong in faults if wrong[0] != "data"), faults[0])


def _candidates(question: Question) -> Iterator[Layout]:
    config, shape, devices = question.config, question.shape, question.devices
    pinned, node_devices = config.pinned(), question.cluster.node_devices
    powers = [1 << power for power in range(node_devices.bit_length()) if 1 << power <= node_devices]
    contexts = [1 << power for power in range(12) if question.sequence_length >> power >= _LEAST_TOKENS] or [1]

    def free(key: str, values: list[int]) -> list[int]:
        return [pinned[key]] if key in pinned else values

    tensors, contexts = free("tensor", powers), free("context", contexts)
    pipelines = free("pipeline", _divisors(devices, shape.num_layers + 2))
    for tensor, context, pipeline in itertools.product(tensors, contexts, pipelines):
        group = tensor * context * pipeline
        if "data" in pinned:
            data = pinned["data"]
        elif devices % group == 0:
            data = devices // group
        elif "tensor" in pinned and "context" in pinned and "pipeline" in pinned:
            data = max(devices // group, 1)  # to be refused with words
        else:
            continue
        experts = shape.experts.num if shape.experts else 1
        sizes = {"tensor": tensor, "context": context, "pipeline": pipeline, "data": data}
        expert_ranks = free("expert", _divisors(experts, data * context * tensor))
        schedules = _schedules(config, pipeline, has_exchange=experts > 1)
        for expert, (schedule, interleave) in itertools.product(expert_ranks, schedules):
            if expert == 1 and SCHEDULES[schedule].has_pairs and config.schedule == "auto":
                continue  # there is nothing that pairs could hide
            made = Layout(**sizes, expert=expert, schedule=schedule, interleave=interleave)
            yield dataclasses.replace(made, optimizer_shards=pinned.get("optimizer_shards", made.shared_ranks))


def _schedules(config: ParallelConfig, pipeline: int, *, has_exchange: bool) -> list[tuple[str, int]]:
    """(name, stages a rank)."""
    if config.schedule != "auto":
        names: tuple[str, ...] = (config.schedule,)
    elif pipeline == 1:
        names = ("1f1b", *(name for name, kind in SCHEDULES.items() if kind.is_for_one_rank and has_exchange))
    else:
        kinds = ((name, kind) for name, kind in SCHEDULES.items() if kind.is_searched and not kind.is_for_one_rank)
        names = tuple(name for name, kind in kinds if has_exchange or not kind.has_pairs)
    found = []
    for name in names:
        own = SCHEDULES[name].stages_per_rank
        if config.interleave is None:
            found += [(name, own)] if own is not None else [(name, each) for each in _INTERLEAVES]
        elif own in (None, config.interleave) or config.schedule != "auto":
            found.append((name, config.interleave))
    # Who writes a number of stages that no schedule has is told so.
    return found or [(names[0], config.interleave or 1)]


def _divisors(number: int, most: int) -> list[int]:
    return [divisor for divisor in range(1, min(number, most) + 1) if number % divisor == 0]


# -- which layers each stage has ---------------------------------------------------------------------------------------


def split_layers(
    costs: Sequence[float],
    num_stages: int,
    *,
    first: float = 0.0,
    last: float = 0.0,
    wanted: Literal["balanced", "even"] | tuple[int, ...] = "balanced",
) -> tuple[int, ...]:
    """Layers of each stage. `costs` are those of the layers, `first` and `last` what stands before and after them.

    What is wanted must have been checked; a balanced split needs a layer for each stage but the two at the ends."""
    if isinstance(wanted, tuple):
        return wanted
    if wanted == "even":
        return (len(costs) // num_stages,) * num_stages
    if num_stages == 1:
        return (len(costs),)
    low = max(*costs, first, last)
    high = sum(costs) + first + last
    best = _filled(costs, num_stages, first, last, high)
    assert best is not None, f"{len(costs)} layers for {num_stages} stages"
    for _ in range(50):
        middle = (low + high) / 2
        found = _filled(costs, num_stages, first, last, middle)
        if found is None:
            low = middle
        else:
            best, high = found, middle
        if high - low <= 1e-9 * high:
            break
    return best


def _filled(costs: Sequence[float], num_stages: int, first: float, last: float, most: float) -> tuple[int, ...] | None:
    """Stages filled from the last one on, none of them beyond `most`; None: the first would be."""
    counts = [0] * num_stages
    at = len(costs)
    for stage in reversed(range(num_stages)):
        left = last if stage == num_stages - 1 else first if stage == 0 else 0.0
        # Stages before this one want a layer each, the first excepted.
        reserved = max(stage - 1, 0)
        while at > reserved and left + costs[at - 1] <= most * (1 + 1e-12):
            at -= 1
            left += costs[at]
            counts[stage] += 1
        if counts[stage] == 0 and 0 < stage < num_stages - 1:
            return None
    return tuple(counts) if at == 0 else None
