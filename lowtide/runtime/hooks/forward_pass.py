"""Saved-tensor hooks: what autograd hands over in a forward pass, and the fate each tensor gets.

What: a `ForwardPass` is one forward pass of the model on one thread. While it is open, every tensor that autograd saves
goes through `ForwardPass.pack`, in three steps:
1. Find the entry: the n-th tensor saved in this layer has the n-th entry of the layer's table. In a first forward,
   which is observed, the entry is decided by name (first_forward.py). Later passes use no dispatch mode for it; they
   compare the tensor with the entry (dtype, number of dimensions, producing node).
2. Find out what the tensor is: one record, `Saved` (context.py), where the entry's fate needs it.
3. Carry out the entry: `_carry_out` has one line for each fate. It returns the handle; backward runs nothing but the
   handle's `open`.

Divergence: a tensor that is not the one in the table is counted. It is swapped if its whole layer is, else kept. It can
never get a wrong value: every fate but `keep` identifies bytes by a live storage and its version, not by position.

Cost: 10 us a kept tensor in forward and backward together beyond two empty saved-tensor hooks (GPT-2, 254 tensors,
processor time); the same under rules and under a solved plan. Not covered: sparse tensors and tensor subclasses
(quantized, nested), but for the two that tensors/wrappers.py takes apart; they stay as plain autograd has them.
"""

from __future__ import annotations

import contextlib
import functools
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lowtide.core.decisions import SiteDecision
from lowtide.core.fate import Fate
from lowtide.core.rules import Decision
from lowtide.recipes.proof import OperatorLog
from lowtide.runtime.hooks.context import LayerTable, Parameters, PlanContext, Saved, SavedTensorEntry, is_same_producer
from lowtide.runtime.hooks.first_forward import FirstForward
from lowtide.runtime.hooks.regions import Regions
from lowtide.runtime.offload.scheduler import Departures
from lowtide.runtime.offload.site import PrefetchQueue
from lowtide.runtime.offload.spill import Guard
from lowtide.runtime.recompute.recipe_graph import Node, RecipeGraph
from lowtide.runtime.recompute.recipe_sources import HeldSource, RecomputedSource
from lowtide.runtime.saved.handle import Kept, Shared, Wrapped
from lowtide.tensors.compiled import never_compiled, without
from lowtide.tensors.kinds import PLAIN_TYPES, is_plain, ordered_storage_keys, storage_key_set, swapped_weights_of
from lowtide.tensors.private import (
    DisableTorchDispatch,
    disable_current_modes,
    next_sequence_number,
    top_saved_tensors_hooks,
    tree_leaves,
    version_of,
)
from lowtide.tensors.view import TensorOrigin, part_of
from lowtide.tensors.wrappers import arrived, is_desugared

_MAX_RELEARNED = 3


@dataclass(slots=True)
class LayerPass:
    """One call of a layer, or of the model around its layers: how far it has come."""

    layer: LayerTable
    table: list[SavedTensorEntry] | None = None
    """What was learned of it; None while that is learned."""
    position: int = 0
    num_missed: int = 0
    recording: list[SavedTensorEntry] = field(default_factory=list)


class ForwardPass:
    """One forward pass on one thread."""

    def __init__(self, context: PlanContext, entry: LayerTable) -> None:
        self.context = context
        self.entry = entry
        self.queue = PrefetchQueue()
        self.follower = functools.partial(context.scheduler.follow, self.queue)
        """Handles call it when they are opened: it tells the queue how far backward has come."""
        self.at = LayerPass(entry)
        self._calls: Counter[tuple[str, str]] = Counter()
        """Of layers, and of modules with retained inputs, by kind and name."""
        self.departures = Departures(context.scheduler)
        self.parameters = Parameters(context.model)
        self.weights = swapped_weights_of(context.model)
        """Knows the weights that come and go; None where all stay."""
        self.first = FirstForward(context, self.parameters)
        self.regions = Regions(context, self.first, self.parameters)
        self.log: OperatorLog | None = None
        if context.logged_kinds:
            self.log = OperatorLog(context.logged_kinds)
        self.recipe_graph: RecipeGraph | None = None
        if context.nodes is not None:
            self.recipe_graph = RecipeGraph(
                context.scheduler, self._stay, context.fingerprints, self.log, weights=self.weights
            )
        self._is_compiled = False
        """A compiled part is running."""
        # One object, so that `is_innermost` can compare by identity. A graph holds it as long as it lives, so it must
        # not hold this pass, and with that the model: a model that keeps its last output would never die.
        hook = _pack if self.log is None else _pack_unlogged
        self.pack_hook = types.MethodType(hook, weakref.ref(self))

    # -- where we are ----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def inside(self, layer: LayerTable) -> Iterator[None]:
        """Tensors saved inside belong to `layer`. Its table is learned if it has none for this call."""
        outer, call = self.at, self.next_call("layer", layer.name)
        if self.context.guard is not None:
            self.context.guard.enter(layer.name, call)
        table = layer.tables.get(call)
        at = self.at = LayerPass(layer, table)
        self.parameters.forget_layer()
        try:
            with self.first.observing(layer) if table is None and not self.first.is_on else contextlib.nullcontext():
                yield
            if table is not None:
                self._compare(at, table)
            else:
                # Also an empty table: a model often saves nothing around its layers, and need not be observed again.
                layer.tables[call] = at.recording
        finally:
            self.at = outer

    def run_compiled(self, name: str, call: Callable, args: tuple, kwargs: dict) -> Any:
        """A compiled part of the model: its operators are not watched, only what it saves passes by here."""
        if self.departures.is_any:
            self.departures.keep_time(ahead=1)
        outer, self._is_compiled = self._is_compiled, True
        modes = [] if self.log is None else [self.log]
        try:
            if not self.first.is_on:
                with without(modes):
                    return call(*args, **kwargs)
            given = storage_key_set((args, kwargs))
            with self.first.inside_compiled(name, given), without(modes):
                output = call(*args, **kwargs)
            self.first.name_outputs(name, ordered_storage_keys(output), given)
            return output
        finally:
            self._is_compiled = outer

    def _compare(self, at: LayerPass, table: list[SavedTensorEntry]) -> None:
        """A pass through a layer that has a table is over. If the table did not fit, it is learned again."""
        if 0 < at.position < len(table):
            self._miss()
        if not at.num_missed:
            return
        at.layer.num_misses += 1
        if at.layer.num_misses <= _MAX_RELEARNED:
            at.layer.tables.clear()
            # Observe the whole forward again: names come from producers, which may be outside this layer.
            self.entry.tables.clear()

    def _miss(self) -> None:
        self.at.num_missed += 1
        self.context.counters.num_divergences += 1

    def _stay(self, source: RecomputedSource) -> None:
        self._miss()
        if self.context.guard is not None:
            source.stay(self.context.guard, self.queue)

    @property
    def layer(self) -> LayerTable:
        """The layer that is running, or the model around its layers."""
        return self.at.layer

    def is_innermost(self) -> bool:
        """Whether these hooks are the ones that autograd calls now (not inside someone's checkpoint region)."""
        hooks = top_saved_tensors_hooks()
        return hooks is not None and hooks[0] is self.pack_hook

    # -- the pack hook ---------------------------------------------------------------------------------------------

    @never_compiled
    def pack(self, tensor: torch.Tensor, wrapper: torch.Tensor | None = None) -> Any:
        """The handle that autograd holds instead of `tensor`. `wrapper`: what autograd saves, with `tensor` inside."""
        if type(tensor) not in PLAIN_TYPES and wrapper is None and is_desugared((type(tensor),)):
            return self._pack_wrapped(tensor)
        grad_fn = tensor.grad_fn if wrapper is None else wrapper.grad_fn
        at = self.at
        position = at.position
        at.position = position + 1
        if self.departures.is_any:
            self.departures.keep_time()
        table = at.table
        if table is None:
            with disable_current_modes():
                return self._learn(Saved(tensor, grad_fn, self.context.scheduler.engine.device))
        if position < len(table):
            entry = table[position]
            if entry.dtype is tensor.dtype and entry.num_dims == tensor.dim():
                if entry.is_simple and entry.producer is type(grad_fn) and wrapper is None:
                    is_first, guard = entry.is_counted, self.context.guard
                    if guard is None or not entry.is_activation:
                        return self._hold(tensor, is_counted=is_first, origin=entry.origin)
                    return self._keep_spillable(guard, tensor, is_counted=is_first, origin=entry.origin)
                if is_same_producer(entry.producer, type(grad_fn)):
                    return self._carry_out(Saved(tensor, grad_fn, self.context.scheduler.engine.device), entry)
        self._miss()
        return self._unknown(Saved(tensor, grad_fn, self.context.scheduler.engine.device))

    def _pack_wrapped(self, tensor: torch.Tensor) -> Any:
        """A distributed tensor, or the result of a collective: the plain tensor inside has a fate like any other."""
        if version_of(tensor) or self._is_parameter(tensor):
            # Only the wrapper counts writes, so the version of the tensor inside would not show this write.
            return self.pack(tensor, tensor)
        with disable_current_modes():
            local = arrived(tensor)
            if not is_plain(local):
                return self.pack(tensor, tensor)
            return Wrapped(tensor, self.pack(local, tensor))

    def _is_parameter(self, tensor: torch.Tensor) -> bool:
        return self.parameters.has(tensor, self.at.layer.module)

    def _learn(self, saved: Saved) -> Any:
        """Decide by name, remember the decision for this position, and carry it out."""
        entry = self.first.entry_of(saved, self.at.layer, is_output=self.regions.find(saved) is not None)
        entry.origin = TensorOrigin.of(saved.tensor)
        entry.is_simple = entry.decision.fate is Fate.KEEP and entry.node is None and entry.is_planned
        self.at.recording.append(entry)
        return self._carry_out(saved, entry)

    def _unknown(self, saved: Saved) -> Any:
        """A tensor that is not in the table: swapped if its whole layer is, else kept."""
        fallback = self.at.layer.fallback
        # Without a gradient history the cast of a frozen weight looks like a mask: keep both.
        is_unknown = saved.grad_fn is None and not self._is_compiled  # what a compiled part saves has none
        if is_unknown or saved.storage is None or self._is_parameter(saved.tensor):
            return self._keep(saved, is_counted=False)
        if fallback.fate is not Fate.SWAP or saved.storage.nbytes() < self.context.min_bytes:
            return self._keep(saved, is_counted=True, is_planned=False)
        return self._swap(saved, fallback)

    def _carry_out(self, saved: Saved, entry: SavedTensorEntry) -> Any:
        if entry.node is not None:
            return self._attach(saved, entry, entry.node)
        if entry.decision.fate is Fate.SWAP:
            return self._swap(saved, entry.decision)
        if entry.decision.fate is Fate.RECOMPUTE:
            return self._rerun(saved)
        return self._keep(saved, is_counted=entry.is_counted, is_planned=entry.is_planned)

    def _keep(self, saved: Saved, *, is_counted: bool, is_planned: bool = True) -> Any:
        """`is_counted`: the first tensor of a storage that is an activation. `is_planned`: the plan keeps it."""
        guard = self.context.guard
        if guard is None or not saved.is_movable:
            return self._hold(saved.tensor, is_counted=is_counted)
        return self._keep_spillable(guard, saved.tensor, is_counted=is_counted, is_planned=is_planned)

    def _keep_spillable(
        self,
        guard: Guard,
        tensor: torch.Tensor,
        *,
        is_counted: bool,
        is_planned: bool = True,
        origin: TensorOrigin | None = None,
    ) -> Any:
        on_open = self.follower if self.queue.has_distances else None
        # What no table knows may be a further view of a storage that is kept already.
        is_first = is_counted and is_planned
        known = None if is_first else guard.view(tensor, self.queue, on_open)
        if known is None and is_counted:
            known = guard.keep(tensor, self.queue, on_open, is_planned=is_planned, origin=origin)
        return known or self._hold(tensor, is_counted=False, origin=origin)

    def _hold(self, tensor: torch.Tensor, *, is_counted: bool, origin: TensorOrigin | None = None) -> Any:
        if self.weights is not None and not is_counted and (weight := self.weights.hold(tensor)) is not None:
            return weight
        kept = Kept(tensor, self.follower if self.queue.has_distances else None, None, origin)
        if is_counted:
            nbytes = tensor.untyped_storage().nbytes()
            self.context.counters.kept_bytes += nbytes
            kept.bytes_of = self.context.scheduler.ledger.hold(kept, nbytes)
        return kept

    def _swap(self, saved: Saved, decision: Decision | SiteDecision) -> Any:
        if not saved.is_movable:
            return self._keep(saved, is_counted=False)
        tensor, storage = saved.tensor, saved.storage
        assert storage is not None
        sequence = next_sequence_number()
        version, part = version_of(tensor), part_of(tensor)
        site = self.context.scheduler.find(storage, version, part)
        if site is None:
            site = self.context.scheduler.enroll(self.queue, storage, version, decision.prefetch, part)
            self.departures.add(site, decision.tier, decision.leave, sequence)
        site.num_readers += 1
        site.last_use = sequence
        return Shared(site, tensor)

    def _rerun(self, saved: Saved) -> Any:
        rerun, tensor = self.regions.find(saved), saved.tensor
        if rerun is None or tensor.is_conj() or tensor.is_neg():
            self._miss()
            return self._keep(saved, is_counted=False)
        if rerun.num_readers == 0:
            self.context.counters.recomputed_bytes += rerun.nbytes
        rerun.add_reader()
        return Shared(rerun, tensor)

    # -- recipes ---------------------------------------------------------------------------------------------------

    def _attach(self, saved: Saved, entry: SavedTensorEntry, node: Node) -> Any:
        """The handle on a tensor whose node has a recipe, or from which recipes start."""
        recipe_graph, tensor = self.recipe_graph, saved.tensor
        assert recipe_graph is not None
        recipe_graph.is_observing = self.at.table is None
        if node.is_made or node.is_encoded:
            source = recipe_graph.find(node, tensor)
            if source is None and entry.is_counted and saved.is_movable:
                source = self._encode(saved, node) if node.is_encoded else recipe_graph.make(node, tensor)
            if source is None:
                self._miss()
                return self._keep(saved, is_counted=entry.is_counted, is_planned=False)
            source.note_saved(next_sequence_number())
            source.add_readers(1)
            return Shared(source, tensor, self.follower)
        if entry.decision.fate is Fate.SWAP:
            handle = self._swap(saved, entry.decision)
            if isinstance(handle, Shared):
                recipe_graph.add(node, HeldSource(handle, tensor))
            return handle
        if not entry.is_counted or not saved.is_plain:
            return self._keep(saved, is_counted=False)
        kept = self._keep(saved, is_counted=True)
        recipe_graph.add(node, HeldSource(kept, tensor))
        return kept

    def _encode(self, saved: Saved, node: Node) -> RecomputedSource | None:
        """The source of a tensor that is to be stored smaller: when the next operator saves something."""
        assert self.recipe_graph is not None
        source = self.recipe_graph.make(node, saved.tensor)
        if source is not None and not node.has_failed:
            self.departures.add_later(functools.partial(self._encode_now, node, source), next_sequence_number())
        return source

    def _encode_now(self, node: Node, source: RecomputedSource) -> None:
        assert self.recipe_graph is not None
        # Operators that encode are neither to be named nor to be logged as the model's.
        is_watched = self.first.is_on or self.log is not None
        with DisableTorchDispatch() if is_watched else contextlib.nullcontext():
            self.recipe_graph.encode_now(node, source, functools.partial(self._hold_form, node))

    def _hold_form(self, node: Node, form: torch.Tensor) -> HeldSource:
        """A source of the smaller form of a node, which stays or is swapped."""
        decision, storage = node.decision, form.untyped_storage()
        if self.context.scheduler.on_buffer is not None:
            self.context.scheduler.on_buffer(storage)
        if decision.fate is Fate.KEEP:
            return HeldSource(self._hold(form, is_counted=True), form)
        site = self.context.scheduler.enroll(self.queue, storage, version_of(form), decision.prefetch, part_of(form))
        self.departures.add(site, decision.tier, decision.leave, next_sequence_number())
        return HeldSource(Shared(site, form), form)

    def next_call(self, kind: str, name: str) -> int:
        """How often a layer, or a module with retained inputs, has been called before in this forward."""
        self._calls[kind, name] += 1
        return self._calls[kind, name] - 1

    def catch(self, nodes: Sequence[Node], tree: Any) -> None:
        """Hold retained inputs: tensors that autograd does not save, and that recipes will start from. `tree`: what
        their module was given, or gave."""
        leaves = tree_leaves(tree) if nodes else []
        for node in nodes:
            assert node.decision.retained_input is not None
            leaf = node.decision.retained_input.leaf
            found = leaves[leaf] if leaf < len(leaves) else None
            self._catch(node, found if isinstance(found, torch.Tensor) else None)

    def _catch(self, node: Node, tensor: torch.Tensor | None) -> None:
        with disable_current_modes() if self.first.is_on else contextlib.nullcontext():
            if tensor is None:
                self._miss()
                return
            saved = Saved(arrived(tensor), tensor.grad_fn, self.context.scheduler.engine.device)
            if not saved.is_movable:
                self._miss()
                return
            self._hold_retained_input(node, saved)

    def _hold_retained_input(self, node: Node, saved: Saved) -> None:
        recipe_graph, tensor = self.recipe_graph, saved.tensor
        assert recipe_graph is not None and saved.storage is not None
        recipe_graph.is_observing = self.first.is_on
        if self.departures.is_any:
            self.departures.keep_time()
        self.context.counters.retained_input_bytes += saved.storage.nbytes()
        decision = node.decision
        if node.is_made:
            if recipe_graph.make(node, tensor) is None:
                self._miss()
            return
        handle = self._swap(saved, decision) if decision.fate is Fate.SWAP else self._keep(saved, is_counted=True)
        source = HeldSource(handle, tensor)
        source.add_readers(-1)  # autograd does not read it; its readers are the recipes
        recipe_graph.add(node, source)

    # -- the end ---------------------------------------------------------------------------------------------------

    def close(self, *, is_complete: bool) -> None:
        """The forward is over, to its end if `is_complete`. Starts the copies that are left, and forgets dropped
        outputs that were not saved."""
        with disable_current_modes():
            self.departures.close()
        self.regions.close()
        if self.recipe_graph is not None:
            self.recipe_graph.close(is_complete=is_complete)
            self.queue.arrange()
            self.recipe_graph = None
            if self.context.guard is not None and is_complete:
                self.context.guard.end()
        self.context.scheduler.window.note_pass(self.queue.swapped_bytes)


@never_compiled
def _pack(forward_pass: weakref.ref[ForwardPass], tensor: torch.Tensor) -> Any:
    """The pack hook of a pass that is open."""
    return forward_pass().pack(tensor)  # type: ignore[union-attr]


@never_compiled
def _pack_unlogged(forward_pass: weakref.ref[ForwardPass], tensor: torch.Tensor) -> Any:
    """As `_pack`. Operators that make a handle are not the model's: they need no log, which takes 3 us for each."""
    if type(tensor) not in PLAIN_TYPES:
        return _pack(forward_pass, tensor)
    with DisableTorchDispatch():
        return _pack(forward_pass, tensor)
