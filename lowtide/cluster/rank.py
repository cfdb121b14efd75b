"""What one pipeline rank keeps, swaps and recomputes of the chunks that are in flight on it at once.

What: `plan_rank` makes a step of them, all forwards and then all backwards, which is what a rank holds at its worst
moment, and gives it to the solver (planner/solve.py) with the rank's budget. Chunks of later stages come back first, of
one stage the oldest first. What the solver adds in time, recompute and stalls, is shared out to the stages.

More than `MOST_LAYERS` layers in flight are planned as so many, in the same share of the memory: the chunks of a stage
are alike, so what is right for a third of them in a third of the room is right for all. Temporaries and the model's
state are not divided.
Cost: 0.05 to 1 s a rank; ranks with equal loads are planned once. Not covered: a rank whose chunks in flight change
their mix of stages; the mix with the most bytes is planned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from lowtide.cluster.layer import Layer
from lowtide.core.fate import Fate
from lowtide.errors import BudgetError
from lowtide.planner.solve import solve
from lowtide.timeline.step import Item, Link, Step, Tick

MOST_LAYERS = 8
_ROOMS = 64
"""Parts of what would be kept, in which the room of a rank with more layers is counted, rounded down: ranks with almost
the same room have one plan."""
_MOST_SOLVE_SECONDS = 30.0
"""So many that only a machine that is very busy gets another plan."""
Share = Mapping[str, tuple[float, float]]
"""Saved activation -> shares of it that are swapped, and recomputed."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Layers of one stage, from first to last, as kinds of `Layer`; and what stands before or after them."""

    kinds: tuple[str, ...]
    has_embedding: bool = False
    head_seconds: float = 0.0
    """Of the forward of the output layer; 0: it is elsewhere."""
    head_bytes: int = 0
    """Of its logits."""


@dataclass(frozen=True, slots=True)
class RankAtWorst:
    """One rank at its worst moment. Equal tasks have equal plans."""

    stages: tuple[Stage, ...]
    """Of the rank, in the order of the model."""
    chunks: tuple[int, ...]
    """In flight, of each of the stages."""
    state_bytes: int
    budget_bytes: int
    fates: tuple[Fate, ...]
    """That the rules leave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRank:
    """What the solver found for a rank. Bytes are of all its chunks in flight."""

    task: RankAtWorst
    peak_bytes: int
    saved_bytes: int
    kept_bytes: int
    swapped_bytes: int = 0
    recomputed_bytes: int = 0
    recompute_seconds: tuple[float, ...]
    """Of one chunk of each stage."""
    stall_seconds: tuple[float, ...]
    gap: float = 0.0
    """Share of the time by which a better plan of the rank may be faster."""
    shares: tuple[Mapping[str, Share], ...] = field(default_factory=tuple)
    """Of each stage, by kind of layer."""


Memory = dict[RankAtWorst, PlannedRank | None]
"""Of what was solved already, for one set of layers: loads without state, in the room for what they save."""


def plan_rank(task: RankAtWorst, layers: Mapping[str, Layer], link: Link, memory: Memory) -> PlannedRank | None:
    """The fastest plan of a rank within its budget; None: there is none."""
    full_bytes = saved_bytes_of(task, task.chunks, layers)
    base_bytes = _base_bytes(task, layers)
    room_bytes = task.budget_bytes - base_bytes
    if room_bytes < 0:
        return None
    head_bytes = max(stage.head_bytes for stage in task.stages)
    if not full_bytes or (full_bytes + head_bytes <= room_bytes and Fate.KEEP in task.fates):
        return _all_kept(task, layers, full_bytes)
    chunks = _fewer(task)
    saved_bytes = saved_bytes_of(task, chunks, layers)
    if chunks != task.chunks:
        room_bytes = room_bytes * _ROOMS // full_bytes * saved_bytes // _ROOMS
    loads = replace(task, chunks=chunks, state_bytes=0, budget_bytes=room_bytes)
    if loads not in memory:
        memory[loads] = _solved(loads, layers, link)
    found = memory[loads]
    if found is None:
        return None
    scale = full_bytes / saved_bytes
    return replace(
        found,
        task=task,
        peak_bytes=base_bytes + found.peak_bytes + int((scale - 1) * found.kept_bytes),
        saved_bytes=full_bytes,
        kept_bytes=int(scale * found.kept_bytes),
        swapped_bytes=int(scale * found.swapped_bytes),
        recomputed_bytes=int(scale * found.recomputed_bytes),
    )


def _solved(loads: RankAtWorst, layers: Mapping[str, Layer], link: Link) -> PlannedRank | None:
    step, places, times = _step_of(loads, layers)
    try:
        solution = solve(step, link, loads.budget_bytes, time_limit_seconds=_MOST_SOLVE_SECONDS)
    except BudgetError:
        return None
    by_fate: Counter[Fate] = Counter()
    seconds = [0.0] * len(loads.chunks)
    for item, fate, (stage, *_) in zip(step.items, solution.fates, places, strict=True):
        by_fate[fate] += item.nbytes
        if fate is Fate.RECOMPUTE:
            seconds[stage] += item.recipe_seconds
    timeline = solution.timeline
    # Stalls and contention fall on the stages by their time.
    waits = max(0.0, timeline.step_seconds - step.compute_seconds - timeline.recompute_seconds)
    total = sum(times)
    return PlannedRank(
        task=loads,
        peak_bytes=timeline.peak_bytes,
        saved_bytes=by_fate.total(),
        kept_bytes=by_fate[Fate.KEEP],
        swapped_bytes=by_fate[Fate.SWAP],
        recomputed_bytes=by_fate[Fate.RECOMPUTE],
        recompute_seconds=tuple(each / max(number, 1) for each, number in zip(seconds, loads.chunks, strict=True)),
        stall_seconds=tuple(
            waits * time / total / max(number, 1) for time, number in zip(times, loads.chunks, strict=True)
        ),
        gap=solution.gap,
        shares=_shares(loads, layers, places, solution.fates),
    )


def least_bytes(task: RankAtWorst, layers: Mapping[str, Layer]) -> int:
    """What no plan goes below: the state and the temporaries, and what the backward of one operator reads; where
    nothing may be swapped, the input of each layer."""
    if task.fates == (Fate.KEEP,):
        return _base_bytes(task, layers) + saved_bytes_of(task, task.chunks, layers)
    inputs = 0
    if Fate.SWAP not in task.fates:
        for stage, number in zip(task.stages, task.chunks, strict=True):
            inputs += number * sum(layers[kind].retained_input_bytes for kind in stage.kinds)
    read = max((layers[kind].read_bytes for stage in task.stages for kind in stage.kinds), default=0)
    return _base_bytes(task, layers) + max(inputs, read)


def _base_bytes(task: RankAtWorst, layers: Mapping[str, Layer]) -> int:
    return task.state_bytes + max(
        (layers[kind].temporary_bytes for stage in task.stages for kind in stage.kinds), default=0
    )


def saved_bytes_of(task: RankAtWorst, chunks: tuple[int, ...], layers: Mapping[str, Layer]) -> int:
    """Of so many chunks of each stage, with everything kept."""
    return sum(
        number * sum(layers[kind].saved_bytes for kind in stage.kinds)
        for stage, number in zip(task.stages, chunks, strict=True)
    )


def _fewer(task: RankAtWorst) -> tuple[int, ...]:
    """Chunks of each stage, so few that their layers are not too many."""
    num_layers = sum(number * len(stage.kinds) for stage, number in zip(task.stages, task.chunks, strict=True))
    if num_layers <= MOST_LAYERS:
        return task.chunks
    share = MOST_LAYERS / num_layers
    return tuple(max(1, round(number * share)) if number else 0 for number in task.chunks)


def _all_kept(task: RankAtWorst, layers: Mapping[str, Layer], saved_bytes: int) -> PlannedRank:
    head_bytes = max(stage.head_bytes for stage in task.stages)
    return PlannedRank(
        task=task,
        peak_bytes=_base_bytes(task, layers) + saved_bytes + head_bytes,
        saved_bytes=saved_bytes,
        kept_bytes=saved_bytes,
        recompute_seconds=(0.0,) * len(task.stages),
        stall_seconds=(0.0,) * len(task.stages),
        shares=tuple(
            {kind: dict.fromkeys(layers[kind].nbytes, (0.0, 0.0)) for kind in stage.kinds} for stage in task.stages
        ),
    )


Block = tuple[int, int, int, str]
"""One layer of one chunk: stage, chunk, number of the layer in the stage, kind."""
Place = tuple[int, str, str]
"""Of a saved activation: the stage, the kind of layer, and its name."""


def _step_of(loads: RankAtWorst, layers: Mapping[str, Layer]) -> tuple[Step, list[Place], list[float]]:
    """Ticks and items of a rank, the place of each item, and the seconds of each stage."""
    ticks: list[Tick] = []
    seconds_of_stage = [0.0] * len(loads.chunks)

    def add(stage: int, seconds: float, nbytes: int = 0) -> None:
        ticks.append(Tick(seconds=seconds, base_bytes=nbytes))
        seconds_of_stage[stage] += seconds

    order = [(stage, chunk) for stage, number in enumerate(loads.chunks) for chunk in range(number)]
    forwards: dict[Block, int] = {}
    backwards: dict[Block, int] = {}
    for stage, chunk in order:
        for index, kind in enumerate(loads.stages[stage].kinds):
            forwards[stage, chunk, index, kind] = len(ticks)
            for op in layers[kind].ops:
                add(stage, op.times.ahead)
    num_forward = len(ticks)
    for stage, chunk in sorted(order, key=lambda entry: (-entry[0], entry[1])):
        own = loads.stages[stage]
        if own.head_seconds:
            add(stage, 3 * own.head_seconds, own.head_bytes)
        for index, kind in reversed([*enumerate(own.kinds)]):
            backwards[stage, chunk, index, kind] = len(ticks)
            for op in reversed(layers[kind].ops):
                add(stage, op.times.back)
    placed = [*_items(loads, layers, forwards, backwards)]
    items = tuple(item for _, item in placed)
    step = Step(ticks=tuple(ticks), num_forward_ticks=num_forward, items=items)
    return step, [place for place, _ in placed], seconds_of_stage


def _items(
    loads: RankAtWorst, layers: Mapping[str, Layer], forwards: Mapping[Block, int], backwards: Mapping[Block, int]
) -> Iterator[tuple[Place, Item]]:
    """Saved activations in the order in which they are saved. `forwards`, `backwards`: the first tick of each."""
    spans = {
        (block, name): (max(start + made, 0), start + saved, start + dies)
        for block, start in forwards.items()
        for name, (made, saved, dies) in layers[block[3]].spans.items()
    }
    keys = sorted(spans, key=lambda key: (spans[key][1], spans[key][0]))
    number_of = {key: number for number, key in enumerate(keys)}
    for block, name in keys:
        stage, chunk, index, kind = block
        seconds, inputs = layers[kind].recipes.get(name, (0.0, ()))
        fates = [Fate.KEEP, Fate.SWAP, *([Fate.RECOMPUTE] if inputs else [])]
        # Where rules leave nothing that can be done with it, it is kept.
        left = tuple(fate for fate in fates if fate in loads.fates) or (Fate.KEEP,)
        is_made = Fate.RECOMPUTE in left
        born, saved, dies = spans[block, name]
        reads = tuple(backwards[block] + number for number in layers[kind].reads[name])
        yield (
            (stage, kind, name),
            Item(
                name=f"stage {stage} chunk {chunk} layer {index} {name}",
                nbytes=layers[kind].nbytes[name],
                born=born,
                saved=saved,
                dies=dies,
                reads=reads,
                release=reads[-1] + 1,
                fates=left,
                recipe_seconds=seconds if is_made else 0.0,
                inputs=tuple(number_of[block, source] for source in inputs) if is_made else (),
            ),
        )


def _shares(
    loads: RankAtWorst, layers: Mapping[str, Layer], places: Sequence[Place], fates: Sequence[Fate]
) -> tuple[Mapping[str, Share], ...]:
    """Of each stage: kind of layer -> activation -> shares swapped and recomputed."""
    counts, totals = Counter(zip(places, fates, strict=True)), Counter(places)

    def share(place: Place, fate: Fate) -> float:
        return counts[place, fate] / max(totals[place], 1)

    return tuple(
        {
            kind: {
                name: (share((stage, kind, name), Fate.SWAP), share((stage, kind, name), Fate.RECOMPUTE))
                for name in layers[kind].nbytes
            }
            for kind in dict.fromkeys(described.kinds)
        }
        for stage, described in enumerate(loads.stages)
    )
