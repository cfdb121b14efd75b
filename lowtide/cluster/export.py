"""A plan for a cluster in the words of MindSpore Transformers, of Megatron-LM, or of MindSpeed on it.

What: `export` writes a file. For MindSpore Transformers it is YAML: the sizes, `offset` and chunks, and
`recompute_config` and `swap_config`, whose counts are tables [chunk][stage] where nothing is swapped, and indices of
layers where something is, because there a number means that. For Megatron-LM it is the arguments of its command; it
has no schedule in a V, so stages of one are interleaved there. MindSpeed has DualPipeV.
What they call an activation is in names.toml. Both start with what they cannot say. MindSpore Transformers has no name
for the input of a layer and for dispatched tokens; Megatron-LM's flags hold for all ranks and layers alike, so they do
as much as the fullest rank needs.

`decisions` rounds the solver's shares, which treat each chunk in flight by itself, to whole layers of a stage: the
first ones make an activation again, the next ones swap it, as many as cover the shares. No fewer bytes leave the device
than the solver wanted; the price is up to one layer of each activation.

Not covered: anything else that a run needs, such as its data and its model.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lowtide.cluster.layout import Layout, Question, schedules_of
from lowtide.cluster.rank import Share
from lowtide.cluster.search import ClusterPlan, LayoutPlan
from lowtide.config.run import SCHEDULES
from lowtide.config.source import write_file
from lowtide.core.fate import Fate
from lowtide.errors import ConfigError
from lowtide.report.export import PREFETCH
from lowtide.units import format_bytes

_NAMES: Mapping[str, Any] = tomllib.loads((Path(__file__).parent / "names.toml").read_text(encoding="utf-8"))
"""What other systems call an activation, and what their files begin with."""


def export(plan: ClusterPlan, system: str, path: Path) -> None:
    """Writes the best layout. Raises `ConfigError` where the system has no word for its schedule."""
    question, best = plan.question, plan.best
    has_mindspeed = system == "mindspeed"
    made = (
        mindformers_lines(question, best) if system == "mindformers" else megatron_lines(question, best, has_mindspeed)
    )
    title = f"# {best.layout}, planned by lowtide for {question.devices} x {question.hardware.name}."
    text = "\n".join([title, *made, ""])
    write_file(path, text, where="--export")


# -- MindSpore Transformers ----------------------------------------------------------------------------------------


def patterns_of(question: Question, name: str) -> tuple[str, ...]:
    """The parts of a layer of MindSpore Transformers whose outputs are this activation; none where it has no name."""
    qkv = _NAMES["latent_qkv" if question.shape.key_rank else "qkv"]
    if parts := _NAMES["mindformers"].get(name) or qkv.get(name):
        return tuple(parts)
    for prefix, module in _NAMES["mlps"].items():
        if name == f"{prefix}h":
            return tuple(f"{module}.{part}" for part in (("w1", "w3") if question.shape.is_gated else ("w1",)))
        if name == f"{prefix}g":
            return (f"{module}.mul",) if question.shape.is_gated else (f"{module}.w1.activation",)
    return ()


def mindformers_lines(question: Question, plan: LayoutPlan) -> Iterator[str]:
    """The file."""
    layout = plan.layout
    scheduler = SCHEDULES[layout.schedule].upstream
    if scheduler is None:
        hint = "; 'dualpipev' on half of the ranks is the same" if layout.schedule == "dualpipe" else ""
        raise ConfigError(f"--export: MindSpore Transformers has no schedule '{layout.schedule}'{hint}")
    by_layer = decisions(plan)
    is_v = scheduler == "zero_bubble_v"
    offset = _cells([count - question.shape.num_layers // layout.num_stages for count in plan.num_layers], layout, is_v)
    yield "# What this file cannot say:"
    yield from (f"# - {line}" for line in _unsaid(question, plan, by_layer))
    yield _NAMES["files"]["mindformers"].format(
        layout=layout,
        micro_batches=plan.num_micro_batches,
        splits_sequence=_word(question.config.sequence_parallel and layout.tensor > 1),
        has_shards=_word(layout.optimizer_shards > 1),
        interleaves=_word(layout.interleave > 1),
        scheduler=scheduler,
        num_layers=question.shape.num_layers,
        offset=offset if layout.interleave > 1 else offset[0],
    )
    yield from _sections(question, plan, by_layer, is_v=is_v)


def _sections(question: Question, plan: LayoutPlan, by_layer: Sequence[Decisions], *, is_v: bool) -> Iterator[str]:
    """`recompute_config` and `swap_config`."""
    recomputed, swapped = (_layers_of(question, by_layer, fate) for fate in (Fate.RECOMPUTE, Fate.SWAP))
    yield "recompute_config:"
    yield "  recompute: false"
    yield f"  select_recompute:{'' if recomputed else ' false'}"
    for pattern, layers in recomputed.items():
        value = layers if swapped else _counts(plan, layers, is_v)
        yield f"    '{_escaped(pattern)}': {value}"
    if swapped:
        yield "swap_config:"
        yield "  swap: true"
        yield "  op_swap:"
        for pattern, layers in swapped.items():
            yield f"    - op_name: '{_escaped(pattern)}'"
            yield f"      backward_prefetch: {PREFETCH}"
            yield f"      layers: {layers}"


def _layers_of(question: Question, by_layer: Sequence[Decisions], fate: Fate) -> dict[str, list[int]]:
    """Pattern -> the layers in which it has this fate."""
    found: dict[str, list[int]] = {}
    for index, layer in enumerate(by_layer):
        for name, its_fate in layer.items():
            for pattern in patterns_of(question, name) if its_fate is fate else ():
                found.setdefault(pattern, []).append(index)
    return found


def _counts(plan: LayoutPlan, layers: Sequence[int], is_v: bool) -> list[list[int]]:
    """A table [chunk][stage] that selects these layers; a cell counts from its first one on."""
    counts, start = [], 0
    for number in plan.num_layers:
        mine = [index - start for index in layers if start <= index < start + number]
        counts.append(max(mine) + 1 if mine else 0)
        start += number
    return _cells(counts, plan.layout, is_v)


def _cells(of_stage: Sequence[int], layout: Layout, is_v: bool) -> list[list[int]]:
    """[chunk][stage]. In a V the second row comes back: its first number is that of the first stage's rank."""
    ranks = layout.schedule_ranks
    rows = [list(of_stage[start : start + ranks]) for start in range(0, len(of_stage), ranks)]
    return [rows[0], rows[1][::-1]] if is_v else rows


def _unsaid(question: Question, plan: LayoutPlan, by_layer: Sequence[Decisions]) -> Iterator[str]:
    names = sorted({name for layer in by_layer for name in layer if not patterns_of(question, name)})
    for name in names:
        layers = [index for index, layer in enumerate(by_layer) if name in layer]
        yield f"'{name}' is to be swapped in layers {layers}; no part of a layer has that name, so it is kept"
    for name, makers in _NAMES["made_from"].items():
        for source in makers:
            pair = [i for i, at in enumerate(by_layer) if (at.get(source), at.get(name)) == (Fate.SWAP, Fate.RECOMPUTE)]
            if pair:
                told = f"'{source}' is swapped in layers {pair}, where '{name}' is made from it"
                yield f"{told}: there it stays on the device"
    yield "which micro-batch: the solver may treat each chunk in flight by itself; here whole layers are, rounded up"
    yield f"when: backward_prefetch is {PREFETCH} everywhere; the plan's copies follow the timeline"
    yield f"how much: the plan fits {format_bytes(question.budget_bytes)}, at {format_bytes(plan.peak_bytes)} predicted"
    if plan.layout.schedule == "dualpipev":
        yield "pairs: 'zero_bubble_v' stands for 'dualpipev'; whether a pair hides anything is up to the runtime"
    yield f"shards: the plan has {plan.layout.optimizer_shards} of the optimizer's state; here it is all or none"


def _escaped(pattern: str) -> str:
    return pattern.replace(".", "\\.")


def _word(value: bool) -> str:
    return "true" if value else "false"


# -- Megatron-LM ---------------------------------------------------------------------------------------------------


def megatron_lines(question: Question, plan: LayoutPlan, has_mindspeed: bool = False) -> Iterator[str]:
    """The arguments, one on a line."""
    layout, config = plan.layout, question.config
    is_v = layout.played_name in ("zb_v", "dualpipev")
    has_v = has_mindspeed and layout.played_name == "dualpipev"
    recomputed, offloaded, rest = _flags(decisions(plan))
    yield "# What these arguments cannot say:"
    yield "# - which layers and which ranks: they hold for all alike, so they do what the fullest rank needs"
    if rest:
        yield f"# - {', '.join(rest)}: no module of theirs drops or offloads these alone, so they are kept"
    yield f"# - how much: the plan fits {format_bytes(question.budget_bytes)} at {format_bytes(plan.peak_bytes)}"
    if layout.copies > 1:
        ranks = layout.schedule_ranks
        yield f"# - 'dualpipe': here 'dualpipev' on {ranks} ranks, each twice in data parallelism, which is the same"
    if is_v and not has_v:
        yield "# - the V of its stages: they are interleaved here, so the first rank does not have the last stage, and"
        yield "#   other numbers of chunks are in flight"
    if has_v and len(set(plan.num_layers)) > 1:
        yield f"# - the layers of each stage, {list(plan.num_layers)}: its DualPipeV deals them evenly"
    yield f"--tensor-model-parallel-size {layout.tensor}"
    if config.sequence_parallel and layout.tensor > 1:
        yield "--sequence-parallel"
    yield f"--context-parallel-size {layout.context}"
    yield f"--pipeline-model-parallel-size {layout.schedule_ranks}"
    if has_v:
        yield "--schedules-method dualpipev"
    if layout.num_stages > 1 and not has_v:
        yield f"--pipeline-model-parallel-layout '{_stages_text(plan)}'"
    if layout.has_pairs:
        yield "--moe-fb-overlap" if has_mindspeed else "--overlap-moe-expert-parallel-comm"
    if question.shape.experts is not None:
        yield f"--expert-model-parallel-size {layout.expert}"
        yield "--expert-tensor-parallel-size 1"
    yield f"--micro-batch-size {question.micro_batch}"
    yield f"--global-batch-size {plan.num_micro_batches * layout.data * layout.copies * question.micro_batch}"
    if layout.optimizer_shards > 1:
        yield "--use-distributed-optimizer"
    if recomputed:
        yield "--recompute-granularity selective"
        yield f"--recompute-modules {' '.join(recomputed)}"
    if offloaded:
        yield "--fine-grained-activation-offloading"
        yield f"--offload-modules {' '.join(offloaded)}"


def _flags(by_layer: Sequence[Decisions]) -> tuple[list[str], list[str], list[str]]:
    """Modules to recompute, modules to offload, and activations that neither reaches."""
    wanted = {
        fate: {name for layer in by_layer for name, its_fate in layer.items() if its_fate is fate}
        for fate in (Fate.RECOMPUTE, Fate.SWAP)
    }
    drops, offloads = _NAMES["recompute_modules"], _NAMES["offload_modules"]
    recomputed = [module for module, names in drops.items() if wanted[Fate.RECOMPUTE] & set(names)]
    if "moe" in recomputed and "moe_act" in recomputed:
        recomputed.remove("moe_act")  # it is within the other
    dropped = {name for module in recomputed for name in drops[module]}
    left = (wanted[Fate.SWAP] | wanted[Fate.RECOMPUTE]) - dropped
    offloaded = [module for module, names in offloads.items() if wanted[Fate.SWAP] & left & set(names)]
    reached = {name for module in offloaded for name in offloads[module]}
    return recomputed, offloaded, sorted(left - reached)


def _stages_text(plan: LayoutPlan) -> str:
    """Stages as `Et|tt|tL`: embedding, layers, loss."""
    stages = ["t" * number for number in plan.num_layers]
    stages[0] = "E" + stages[0]
    stages[-1] += "L"
    return "|".join(stages)


# -- layer by layer ----------------------------------------------------------------------------------------------------


Decisions = Mapping[str, Fate]
"""Saved activation -> its fate, for those that are not kept."""


def decisions(plan: LayoutPlan) -> tuple[Decisions, ...]:
    """Of each layer of the model, in order."""
    schedule = schedules_of(plan.layout, plan.num_micro_batches).schedule
    found: list[Decisions] = []
    for stage, rank in enumerate(schedule.rank_of_stage):
        place = schedule.stages_of(rank).index(stage)
        own = plan.ranks[rank]
        found += _of_stage(own.task.stages[place].kinds, own.shares[place])
    return tuple(found)


def _of_stage(kinds: Sequence[str], shares: Mapping[str, Share]) -> list[dict[str, Fate]]:
    layers: list[dict[str, Fate]] = [{} for _ in kinds]
    for name in dict.fromkeys(name for of_kind in shares.values() for name in of_kind):
        having = [
            (layer, shares[kind][name]) for layer, kind in zip(layers, kinds, strict=True) if name in shares[kind]
        ]
        swapped, recomputed = (sum(share[which] for _, share in having) for which in (0, 1))
        num_recomputed, num_swapped = (math.ceil(number - 1e-9) for number in (recomputed, swapped))
        for layer, _ in having[:num_recomputed]:
            layer[name] = Fate.RECOMPUTE
        for layer, _ in having[num_recomputed : num_recomputed + num_swapped]:
            layer[name] = Fate.SWAP
    return layers
