"""The profile of a traced step: recipes, retained inputs that pay, bytes of every operator, layer signatures.

Bytes: `op_bytes[i]` counts the storages with born <= i < dies that are neither state nor nodes. A node is present in
[born, dies) and again from its first read to its release, and the simulator adds exactly that, by fate; so for the plan
that keeps everything, state + op_bytes + kept nodes is the live-byte curve of a plain step.

Cost: one pass over operators and nodes. Not covered: what a node's recipe is (recipes/build.py).
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from lowtide.core.profile import (
    ByteSpan,
    HiddenBytes,
    LayerCall,
    Profile,
    Site,
    StateBytes,
    StayingBytes,
    byte_curve,
    layer_of,
)
from lowtide.core.recipe import Recipe
from lowtide.loss.attach import loss_of, loss_rows_of
from lowtide.loss.layers import layer_rows_of
from lowtide.profiling.layers import layer_weights
from lowtide.profiling.step_record import NodeRecord, Trace
from lowtide.recipes.build import COLLECTIVE, build_collective_recipes, build_recipes
from lowtide.recipes.graph import Storage

_STATE = frozenset({"parameter", "buffer", "replaced", "input"})


def find_recipes(trace: Trace) -> None:
    """Write down how each node is recomputed, or why not; nodes that nothing needs leave the record."""
    targets = [(node.storage, node.version) for node in trace.nodes if not node.is_given]
    for call in trace.ops.calls:  # clocks of devices are read when the step is over
        call.seconds = trace.ops.seconds[call.index]
    alone = build_recipes(trace.ops.calls, targets)
    together = build_collective_recipes(trace.ops.calls, targets, alone)
    alone, together = (_while_gathered(_unambiguous(found, trace.ambiguous), trace) for found in (alone, together))
    for node in trace.nodes:
        index = node.storage.index
        node.recipes = (alone.get(index, "unknown producer"), together.get(index))
    by_name = {node.name: node for node in trace.nodes}
    pending = [node for node in trace.nodes if node.retained_input is None]
    starts = {name for span in trace.spans for name in span.inputs}
    pending += [node for node in trace.nodes if node.retained_input is not None and node.name in starts]
    kept = {node.storage.index for node in pending}
    while pending:
        recipes = [recipe for recipe in pending.pop().recipes if isinstance(recipe, Recipe)]
        for source in [by_name[name] for recipe in recipes for name in recipe.nodes]:
            if source.storage.index not in kept:
                kept.add(source.storage.index)
                pending.append(source)
    trace.nodes = [node for node in trace.nodes if node.storage.index in kept]


def _unambiguous(recipes: Mapping[int, Recipe | str], ambiguous: set[str]) -> Mapping[int, Recipe | str]:
    return {
        index: "input of ambiguous name" if isinstance(recipe, Recipe) and ambiguous & {*recipe.nodes} else recipe
        for index, recipe in recipes.items()
    }


def _while_gathered(recipes: Mapping[int, Recipe | str], trace: Trace) -> Mapping[int, Recipe | str]:
    """Without the recipes that read a sharded parameter at a time when it is not there as a whole.

    A node is made when autograd reads it, or when a node is made whose recipe starts from it.
    """
    gathered = {storage.name: storage.index for storage in trace.storages if storage.is_gathered}
    if not gathered:
        return recipes
    allowed = dict(recipes)
    there = {node.name: node.gathered for node in trace.nodes}
    for node in reversed(trace.nodes):  # what starts from a node comes after it
        recipe = allowed.get(node.storage.index)
        if not isinstance(recipe, Recipe):
            continue
        needed = {
            gathered[entry.name] for entry in recipe.inputs if entry.kind == "parameter" and entry.name in gathered
        }
        if not needed <= there[node.name]:
            allowed[node.storage.index] = "parameter sharded when it is read"
            continue
        for name in recipe.nodes:
            there[name] &= there[node.name]
    return allowed


def profile_of(
    trace: Trace,
    model: nn.Module,
    *,
    device: str,
    is_fake: bool,
    batch: str,
    layers: tuple[str, ...],
    state: StateBytes,
) -> Profile:
    """The profile of a traced step of `model`, whose recipes have been found."""
    end = len(trace.ops.names)
    sites = tuple(_site(node, layers, end) for node in trace.nodes)
    nodes, names = {node.storage.index for node in trace.nodes}, {site.name for site in sites}
    called = tuple(name for name in layers if any(span.name == name for span in trace.spans))
    weights, (spans, gradients) = layer_weights(model, layers), byte_spans(trace)
    layer_rows, row_wise = layer_rows_of(model)
    return Profile(
        model=type(model).__name__,
        device=device,
        is_fake=is_fake,
        batch=batch,
        layers=called,
        signatures=tuple(_signature(name, sites, trace) for name in called),
        state=state,
        num_forward_ops=trace.ops.num_forward,
        op_names=tuple(trace.ops.names),
        op_seconds=tuple(trace.ops.seconds),
        op_bytes=byte_curve(spans, end),
        op_gradient_bytes=byte_curve(gradients, end),
        nodes=sites,
        staying=_staying(trace, names, layers),
        hidden=tuple(HiddenBytes(name=s.name, nbytes=s.nbytes) for s in trace.hidden),
        calls=tuple(_layer_calls(trace, nodes, names)),
        num_collectives=sum(call.is_collective for call in trace.ops.calls),
        loss=loss_of(model),
        loss_rows=loss_rows_of(model),
        layer_rows=layer_rows,
        row_wise=row_wise,
        layer_weights=tuple(weights[name] for name in called),
    )


def _site(node: NodeRecord, layers: tuple[str, ...], end: int) -> Site:
    storage, (recipe, together) = node.storage, node.recipes
    if recipe == COLLECTIVE and isinstance(together, str):
        recipe = together  # it says which one
    return Site(
        name=node.name,
        layer=layer_of(node.name, layers),
        nbytes=storage.nbytes,
        dtype=str(node.shape.dtype).removeprefix("torch."),
        op=_short_op(storage) if storage.producer is not None else "input",
        retained_input=node.retained_input,
        born=storage.born,
        saved=node.saved,
        dies=end if storage.dies is None else storage.dies,
        reads=tuple(sorted(set(node.reads))),
        release=0 if node.retained_input is not None else node.release,
        first_sequence=node.first_sequence,
        last_sequence=node.last_sequence,
        recipe=recipe if isinstance(recipe, Recipe) else None,
        why_no_recipe=recipe if isinstance(recipe, str) else "",
        collective_recipe=together if isinstance(together, Recipe) else None,
        codec=node.codec,
    )


def _staying(trace: Trace, nodes: set[str], layers: tuple[str, ...]) -> tuple[StayingBytes, ...]:
    found: dict[str, StayingBytes] = {}
    for storage in sorted((trace.storages[index] for index in trace.staying), key=lambda s: (s.born, s.name)):
        if storage.name not in nodes:
            dtype = str(storage.dtype).removeprefix("torch.")
            entry = StayingBytes(
                name=storage.name,
                layer=layer_of(storage.name, layers),
                nbytes=storage.nbytes,
                dtype=dtype,
                reason=trace.staying[storage.index],
            )
            found.setdefault(storage.name, entry)
    return tuple(found.values())


def _short_op(storage: Storage) -> str:
    """`mul` from `model.layers.3.mlp.mul_1:2`."""
    last = storage.name.rpartition(".")[2].partition(":")[0]
    stem, _, number = last.rpartition("_")
    return stem if stem and number.isdigit() else last


def byte_spans(trace: Trace) -> tuple[list[ByteSpan], list[ByteSpan]]:
    """What a profile's `op_bytes` and `op_gradient_bytes` count."""
    end, nodes, release = len(trace.ops.names), {node.storage.index for node in trace.nodes}, dict(trace.never_read)
    spans = [(index, index + 1, nbytes) for index, nbytes in trace.ops.temporary]
    spans += trace.gathered
    for storage in trace.storages:
        if storage.kind not in _STATE and storage.index not in nodes and storage.index not in trace.off_device:
            first, dies, nbytes = _span(storage, end)
            spans.append((first, max(dies, release.get(storage.index, 0)), nbytes))
    return spans, [_span(trace.storages[index], end) for index in trace.gradients]


def _span(storage: Storage, end: int) -> ByteSpan:
    """`end`: the number of operators."""
    dies = end if storage.dies is None else min(end, storage.dies)
    return max(0, storage.born), dies, storage.nbytes


def _layer_calls(trace: Trace, nodes: set[int], names: set[str]) -> Iterator[LayerCall]:
    """What it takes to run each call of a layer again."""
    made = [
        storage
        for storage in trace.storages
        if storage.kind not in _STATE and storage.index not in nodes and storage.index not in trace.off_device
        if 0 <= storage.born < trace.ops.num_forward
    ]
    made.sort(key=lambda storage: storage.born)
    starts = [storage.born for storage in made]
    for span in trace.spans:
        first, end = span.first_op, span.end_op
        own = made[bisect.bisect_left(starts, first) : bisect.bisect_left(starts, end)]
        there = [_span(storage, end) for storage in own]
        there += [(index, index + 1, nbytes) for index, nbytes in trace.ops.temporary if first <= index < end]
        unknown = [name for name in span.inputs if name not in names]
        yield LayerCall(
            name=span.name,
            first_op=span.first_op,
            end_op=span.end_op,
            enough_op=span.enough_op,
            end_sequence=span.end_sequence - trace.ops.start_sequence,
            inputs=span.inputs,
            op_bytes=byte_curve([(begin - first, dies - first, nbytes) for begin, dies, nbytes in there], end - first),
            staying_bytes=sum(storage.nbytes for storage in own if storage.index in trace.staying),
            why_not=span.why_not
            or ("its parameters are sharded" if trace.gathered else "")
            or (f"its input '{unknown[0]}' is no node" if unknown else ""),
        )


def _signature(layer: str, sites: Sequence[Site], trace: Trace) -> str:
    """Equal for layers that saved the same things, made in the same ways."""
    digest = hashlib.sha256()
    for site in sites:
        if site.layer == layer:
            steps = [step.op for step in site.recipe.steps] if site.recipe else site.why_no_recipe
            digest.update(repr((site.name.removeprefix(layer), site.nbytes, site.dtype, steps)).encode())
    num_ops = sum(span.end_op - span.first_op for span in trace.spans if span.name == layer)
    digest.update(str(num_ops).encode())
    return digest.hexdigest()[:16]
