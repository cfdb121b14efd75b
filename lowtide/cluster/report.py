"""A plan for a cluster as text for people, and as a document for programs.

What: `lines` is what `lowtide plan` prints, `document` what it prints with `--json`. Both say every assumption: the
rates of the device and of the cluster with their sources, and what a parameter costs.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from lowtide.cluster.layout import Question
from lowtide.cluster.rank import PlannedRank
from lowtide.cluster.search import GRADIENT_BYTES, MASTER_BYTES, WEIGHT_BYTES, ClusterPlan, LayoutPlan
from lowtide.cluster.step import StepSeconds
from lowtide.core.text_table import align, percent, wrapped
from lowtide.units import GIB, format_bytes, format_seconds

_PARTS = {
    "compute": "compute",
    "recompute": "recompute",
    "stall": "waiting for copies",
    "collective": "tensor and context ranks' collectives",
    "exchange": "experts' all-to-all, as far as it shows",
    "bubble": "bubble",
    "gradients": "gradients and weights between data ranks",
    "optimizer": "optimizer",
}
"""Of `StepSeconds`, in words."""
_LOSSES = {
    True: "loss in slices of rows, 4 bytes a logit; 6 where tensor ranks share the words",
    False: "plain loss, 14 bytes a logit; 6 where tensor ranks share the words",
}
_LEFT_OUT = (
    "products reach the device's rate whatever their shape; routing is even; heads for more than the next token are "
    "left out"
)


def lines(plan: ClusterPlan, width: int | None = None) -> list[str]:
    """The plan for people, in lines of at most `width` characters; None: of any length."""
    question, best = plan.question, plan.best
    told = [
        _title(question),
        *_choice(plan),
        "",
        "where the time of a step goes, on the rank that works most",
        *_time_lines(best),
        "",
        "what each pipeline rank holds at its worst moment",
        *_rank_lines(best, width),
        *_reasons(plan),
        "",
        "assumed",
        *_assumption_lines(question),
    ]
    return wrapped(told, width)


def document(plan: ClusterPlan) -> dict[str, Any]:
    """The plan for programs: plain values, bytes and seconds."""
    question = plan.question
    return {
        "model": question.shape.name,
        "num_parameters": question.shape.num_parameters,
        "devices": question.devices,
        "hardware": question.hardware.name,
        "cluster": question.cluster.name,
        "budget_bytes": question.budget_bytes,
        "loss": "sliced" if question.slices_loss else "plain",
        "num_layouts": plan.num_layouts,
        "num_too_large": plan.num_too_large,
        "num_planned": plan.num_planned,
        "unplanned_seconds": plan.bound_seconds,
        "plans": [_plan_document(entry, question) for entry in plan.plans],
        "assumptions": {key: {"value": value, "source": source} for key, value, source in _assumptions(question)},
    }


def _plan_document(plan: LayoutPlan, question: Question) -> dict[str, Any]:
    own = ("num_micro_batches", "num_layers", "step_seconds", "exchange_seconds", "ceiling_gain", "gap", "peak_bytes")
    return {name: getattr(plan, name) for name in (*own, "moved_bytes")} | {
        "layout": dataclasses.asdict(plan.layout),
        "tokens_per_second_and_device": tokens_per_second(plan, question) / question.devices,
        "parts": dataclasses.asdict(plan.seconds),
        "gain_over_full_recompute": plan.gain,
        "ranks": [_rank_document(rank) for rank in plan.ranks],
    }


def _rank_document(rank: PlannedRank) -> dict[str, Any]:
    own = {field.name: getattr(rank, field.name) for field in dataclasses.fields(rank)}
    task, shares = own.pop("task"), own.pop("shares")
    del own["gap"]  # of the plan, which has the largest
    return own | {
        "chunks_in_flight": task.chunks,
        "num_layers": [len(stage.kinds) for stage in task.stages],
        "state_bytes": task.state_bytes,
        "shares": [
            {
                kind: {name: {"swapped": swapped, "recomputed": made} for name, (swapped, made) in of_kind.items()}
                for kind, of_kind in of_stage.items()
            }
            for of_stage in shares
        ],
    }


def tokens_per_second(plan: LayoutPlan, question: Question) -> float:
    """Of the whole cluster."""
    layout = plan.layout
    sequences = plan.num_micro_batches * layout.copies * layout.data * question.micro_batch
    return sequences * question.sequence_length / plan.step_seconds


def _title(question: Question) -> str:
    sequences = f"{question.sequences:,} sequences" if question.sequences is not None else "sequences"
    return (
        f"{question.shape.name}, {question.shape.num_parameters / 1e9:,.1f} B parameters, on {question.devices:,} x "
        f"{question.hardware.name} (cluster {question.cluster.name}), {sequences} of {question.sequence_length:,} "
        f"tokens a step in micro-batches of {question.micro_batch}"
    )


def _choice(plan: ClusterPlan) -> Iterator[str]:
    question, best = plan.question, plan.best
    if plan.num_layouts == 1:
        yield f"layout, as given: {best.layout}"
    else:
        yield (
            f"fastest of {plan.num_layouts:,} layouts: {best.layout} ({plan.num_too_large:,} do not fit, "
            f"{plan.num_planned:,} planned in full, the others are slower by their bounds)"
        )
        if plan.bound_seconds is not None and plan.bound_seconds < best.step_seconds:
            yield (
                f"the search ended at its limit: no layout that was not planned takes less than "
                f"{format_seconds(plan.bound_seconds)}"
            )
    each = tokens_per_second(best, question) / question.devices
    yield (
        f"predicted: {format_seconds(best.step_seconds)} a step, {each:,.0f} tokens a second and device; peak "
        f"{format_bytes(best.peak_bytes)} of {format_bytes(question.budget_bytes)}"
    )
    if best.moved_bytes:
        yield (
            f"optimizer's state: {format_bytes(best.moved_bytes)} of a device are on the host between steps; each step "
            f"waits {format_seconds(best.seconds.optimizer)} for it"
        )
    yield (
        f"forwards and backwards gain {percent(best.gain)} over recompute of every layer; no plan of this layout gains "
        f"more than {percent(best.ceiling_gain)}"
    )


def _time_lines(plan: LayoutPlan) -> Iterator[str]:
    parts = plan.seconds
    width = max(map(len, _PARTS.values()))
    for key, words in _PARTS.items():
        seconds = getattr(parts, key)
        yield f"  {words:<{width}}  {format_seconds(max(seconds, 0.0)):>9}  {percent(seconds / parts.total):>7}"
    if plan.exchange_seconds:
        hidden = 1 - min(parts.exchange / plan.exchange_seconds, 1.0)
        yield f"  of {format_seconds(plan.exchange_seconds)} of all-to-all, {percent(hidden)} costs nothing"


def _rank_lines(plan: LayoutPlan, width: int | None) -> list[str]:
    head = ("ranks", "layers", "in flight", "state", "activations", "kept", "swapped", "recomputed", "peak")
    rows: list[tuple[str, ...]] = [head]
    for looks, alike in itertools.groupby(range(len(plan.ranks)), key=lambda rank: _looks(plan.ranks[rank])):
        first, *others = alike
        rows.append((f"{first}-{others[-1]}" if others else str(first), *looks))
    inner = None if width is None else width - 2
    return [f"  {line}" for line in align(rows, numeric=tuple(range(len(head))), width=inner)]


def _looks(rank: PlannedRank) -> tuple[str, ...]:
    """Cells of a rank, without its number."""
    saved = max(rank.saved_bytes, 1)
    return (
        "+".join(str(len(stage.kinds)) for stage in rank.task.stages),
        "+".join(map(str, rank.task.chunks)),
        f"{rank.task.state_bytes / GIB:.1f} GiB",
        f"{rank.saved_bytes / GIB:.1f} GiB",
        *(percent(nbytes / saved) for nbytes in (rank.kept_bytes, rank.swapped_bytes, rank.recomputed_bytes)),
        f"{rank.peak_bytes / GIB:.1f} GiB",
    )


def _reasons(plan: ClusterPlan) -> Iterator[str]:
    best = plan.best
    if len(plan.plans) == 1:
        return
    yield ""
    yield "the next best, and where they lose"
    for other in plan.plans[1:]:
        slower = other.step_seconds / best.step_seconds - 1
        times = f"{format_seconds(other.step_seconds)} (+{percent(slower)})"
        yield f"  {other.layout}: {times}, {_difference(best.seconds, other.seconds)}"


def _difference(best: StepSeconds, other: StepSeconds) -> str:
    """The parts in which another layout differs most from the best one."""
    changes = {key: getattr(other, key) - getattr(best, key) for key in _PARTS}
    largest = sorted(changes, key=lambda key: -abs(changes[key]))[:3]
    told = [key for key in largest if abs(changes[key]) >= 1e-3 * best.total]
    if not told:
        return "the same in every part"
    return ", ".join(
        f"{_PARTS[key]} {'+' if changes[key] > 0 else '-'}{format_seconds(abs(changes[key]))}" for key in told
    )


def _assumption_lines(question: Question) -> Iterator[str]:
    for key, value, source in _assumptions(question):
        yield f"  {key}: {value:.4g}, {source}"
    yield f"  {_LOSSES[question.slices_loss]}"
    yield f"  {_LEFT_OUT}"


def _assumptions(question: Question) -> Sequence[tuple[str, float, str]]:
    """(key, value, source) of all that a prediction rests on."""
    hardware, cluster, config = question.hardware, question.cluster, question.config
    dtypes = ("bfloat16", "float8") if config.precision == "fp8" else ("bfloat16",)
    moment = 4 if config.moments == "float32" else 2
    link = hardware.link
    values: list[tuple[str, float]] = [
        *((f"flops_per_second.{dtype}", hardware.flops_per_second[dtype]) for dtype in dtypes),
        ("attention.flash.forward", hardware.attention["flash"][0]),
        ("attention.flash.backward", hardware.attention["flash"][1]),
        ("memory_bytes_per_second", hardware.memory_bytes_per_second),
        ("link.out_bytes_per_second", link.out_bytes_per_second),
        ("link.in_bytes_per_second", link.in_bytes_per_second),
    ]
    found = [(f"{hardware.name}.{key}", value, hardware.sources.get(key, "assumed: given")) for key, value in values]
    found += [
        (f"{cluster.name}.{key}", float(getattr(cluster, key)), source) for key, source in cluster.sources.items()
    ]
    sharded = MASTER_BYTES + 2 * moment
    return [
        *found,
        ("bytes of a parameter on each rank", WEIGHT_BYTES + GRADIENT_BYTES, "bf16 weights, fp32 gradients"),
        ("bytes of a parameter in shards", sharded, f"fp32 master weights, two {config.moments} moments"),
    ]
