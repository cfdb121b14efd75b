"""Saved-tensor hooks: what autograd hands over in a forward pass, and the fate each tensor gets.

What: a `ForwardPass` is one forward pass of the model on one thread. While it is open, every tensor that autograd saves
goes through `ForwardPass.pack`, in three steps:
1. Find the entry: the n-th tensor saved in this layer has the n-th entry of the layer's table. In a first forward,
   which is observed, the entry is decided by name (first_forward.py). Later passes use no dispatch mode for it; they
   compare the tensor with the entry (dtype, number of dimensions, producing node).
2. Find out what the tensor is: one record, `Saved` (classify.py), where the entry's fate needs it.
3. Carry out the entry: `_carry_out` has one line for each fate. It returns the handle; backward runs nothing but the
   handle's `open`.

Divergence: a tensor that is not the one in the table is counted. It is swapped if its whole layer is, else kept. It can
never get a wrong value: every fate but `keep` identifies bytes by a live storage and its version, not by position.

Cost: about 6 us a kept tensor in forward and backward together, of which 5 are what any saved-tensor hook costs; the
same under rules and under a solved plan. Not covered: sparse tensors and tensor subclasses (quantized, nested), but for
the two that tensors/wrappers.py takes apart; they stay as plain autograd has them.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from lowtide.core.fate import Fate
from lowtide.recipes.proof import OperatorLog
from lowtide.runtime.hooks.classify import Parameters, Saved
from lowtide.runtime.hooks.context import PlanContext
from lowtide.runtime.hooks.first_forward import FirstForward
from lowtide.runtime.hooks.regions import Regions
from lowtide.runtime.hooks.table import LayerTable, SavedTensorEntry, is_same_producer
from lowtide.runtime.offload.departures import Departures
from lowtide.runtime.offload.site import PrefetchQueue
from lowtide.runtime.recompute.module_output import RerunView
from lowtide.runtime.recompute.recipe_graph import RecipeGraph
from lowtide.runtime.recompute.recipe_nodes import Node
from lowtide.runtime.recompute.recipe_sources import Made, OffloadedSource, RecomputedSource, ResidentSource
from lowtide.runtime.saved.handle import Kept, Swapped
from lowtide.runtime.saved.wrapped import Wrapped
from lowtide.tensors.compiled import never_compiled, without
from lowtide.tensors.kinds import PLAIN_TYPES, is_plain, ordered_storage_keys, storage_key_set, swapped_weights_of
from lowtide.tensors.private import (
    DisableTorchDispatch,
    disable_current_modes,
    is_forward_mode,
    next_sequence_number,
    top_saved_tensors_hooks,
    version_of,
)
from lowtide.tensors.view import View, part_of
from lowtide.tensors.wrappers import arrived, is_desugared

_MAX_RELEARNED = 3
# Where a plan says `check: sampled`, so many forward passes lie between two proofs.
_SAMPLED = 64


class ForwardPass:
    """One forward pass on one thread."""

    def __init__(self, context: PlanContext, entry: LayerTable) -> None:
        self.context = context
        self.entry = entry
        self.scheduler = context.scheduler
        self.device = context.scheduler.engine.device
        self.counters = context.counters
        self.queue = PrefetchQueue()
        self.follower = self.scheduler.follower(self.queue)
        self.layer: LayerTable | None = None
        self.table: list[SavedTensorEntry] | None = None
        self.position = 0
        self.num_missed = 0
        self.is_complete = False
        """The forward pass came to its end."""
        self._calls: dict[str, int] = {}
        self._retained_input_calls: dict[str, int] = {}
        self.recording: list[SavedTensorEntry] = []
        self.departures = Departures(context.scheduler)
        self.parameters = Parameters(context.model)
        self.weights = swapped_weights_of(context.model)
        """Knows the weights that come and go; None where all stay."""
        self.first = FirstForward(context, self.parameters)
        self.regions = Regions(context, self.first, self.parameters)
        self.log: OperatorLog | None = None
        is_sample = context.counters.num_forwards % _SAMPLED == 0
        # Under any dispatch mode torch computes tangents by other formulas. So with tangents no table is learned, and
        # what recipes would recompute stays.
        self.has_tangents = is_forward_mode()
        if context.logged_kinds and not self.has_tangents and (context.logs_always or is_sample or not entry.tables):
            self.log = OperatorLog(context.logged_kinds)
        self.recipe_graph: RecipeGraph | None = None
        if context.nodes is not None:
            self.recipe_graph = RecipeGraph(
                context.scheduler,
                context.counters,
                self._stay,
                context.fingerprints,
                self.log,
                learns_graphs=not context.logs_always,
            )
        context.draws.begin()
        self._is_compiled = False
        """A compiled part is running."""
        # One object, so that `is_innermost` can compare by identity.
        self.pack_hook = self.pack

    # -- where we are ----------------------------------------------------------------------------------------------

    def logging(self) -> contextlib.AbstractContextManager:
        """A context that logs what operators do, where recipes are to be proven; else one that does nothing."""
        return contextlib.nullcontext() if self.log is None else self.log

    @contextlib.contextmanager
    def inside(self, layer: LayerTable) -> Iterator[None]:
        """Tensors saved inside belong to `layer`. Its table is learned if it has none for this call."""
        outer = (self.layer, self.table, self.position, self.recording, self.num_missed)
        call = self._calls[layer.name] = self._calls.get(layer.name, -1) + 1
        table = layer.tables.get(call)
        is_blind = table is None and self.has_tangents
        if is_blind:
            table = self._nothing_known()
        self.layer, self.table, self.position, self.recording, self.num_missed = layer, table, 0, [], 0
        self.parameters.forget_layer()
        try:
            with self.first.observing(layer) if table is None and not self.first.is_on else contextlib.nullcontext():
                yield
            if is_blind:
                pass  # a table is learned in a pass without tangents
            elif table is not None:
                self._compare(layer, table)
            else:
                # Also an empty table: a model often saves nothing around its layers, and need not be observed again.
                layer.tables[call] = self.recording
        finally:
            self.layer, self.table, self.position, self.recording, self.num_missed = outer

    def run_compiled(self, name: str, call: Callable, args: tuple, kwargs: dict) -> Any:
        """A compiled part of the model: nobody watches its operators, only what it saves passes by here."""
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

    def _nothing_known(self) -> list[SavedTensorEntry]:
        """The table of a layer in a forward pass that cannot learn one: empty. So all that is saved is swapped if its
        whole layer is, else kept, and the guard may spill it."""
        if not self.context.has_warned_of_tangents:
            self.context.has_warned_of_tangents = True
            warnings.warn(
                f"lowtide: {type(self.context.model).__name__} runs under forward-mode derivatives (a dual level is "
                "open) before lowtide has seen a forward pass without them, and torch gives other tangents while "
                "anybody watches its operators; so what this pass saves has no plan yet, and is kept or swapped as it "
                "comes. Run the model once without a dual level first.",
                stacklevel=2,
            )
        return []

    def _compare(self, layer: LayerTable, table: list[SavedTensorEntry]) -> None:
        """A pass through a layer that has a table is over. If the table did not fit, it is learned again."""
        if 0 < self.position < len(table):
            self._miss()
        if not self.num_missed:
            return
        layer.num_misses += 1
        if layer.num_misses <= _MAX_RELEARNED:
            layer.tables.clear()
            # Observe the whole forward again: names come from producers, which may be outside this layer.
            self.entry.tables.clear()

    def _miss(self) -> None:
        self.num_missed += 1
        self.counters.num_divergences += 1

    def _stay(self, source: RecomputedSource) -> None:
        self._miss()
        if self.context.guard is not None:
            self.context.guard.offer(source, self.queue)

    @property
    def knows_nothing(self) -> bool:
        """Whether it is not known yet what the region that runs now writes to."""
        return self.first.is_on or (self.has_tangents and not self.table)

    def is_innermost(self) -> bool:
        """Whether these hooks are the ones that autograd calls now (not inside someone's checkpoint region)."""
        hooks = top_saved_tensors_hooks()
        return hooks is not None and hooks[0] is self.pack_hook

    # -- the pack hook ---------------------------------------------------------------------------------------------

    @never_compiled
    def pack(self, tensor: torch.Tensor, wrapper: torch.Tensor | None = None) -> Any:
        """The handle that autograd holds instead of `tensor`. `wrapper`: what autograd saves, with `tensor` inside."""
        if self.log is not None and type(tensor) in PLAIN_TYPES:
            # Operators that make a handle are not the model's: they need no log, which would take 3 us for each.
            with DisableTorchDispatch():
                return self._pack(tensor, wrapper)
        return self._pack(tensor, wrapper)

    def _pack(self, tensor: torch.Tensor, wrapper: torch.Tensor | None) -> Any:
        if type(tensor) not in PLAIN_TYPES and wrapper is None and is_desugared((type(tensor),)):
            return self._pack_wrapped(tensor)
        grad_fn = tensor.grad_fn if wrapper is None else wrapper.grad_fn
        position = self.position
        self.position = position + 1
        if self.departures.is_any:
            self.departures.keep_time()
        table = self.table
        if table is None:
            with disable_current_modes():
                return self._learn(Saved(tensor, grad_fn, self.device))
        if position < len(table):
            entry = table[position]
            if (
                entry.dtype is tensor.dtype
                and entry.num_dims == tensor.dim()
                and is_same_producer(entry.producer, type(grad_fn))
            ):
                if entry.fate is Fate.KEEP and entry.node is None and self.context.guard is None:
                    return self._hold(tensor, is_counted=entry.is_counted)
                return self._carry_out(Saved(tensor, grad_fn, self.device), entry)
        self._miss()
        return self._unplanned(Saved(tensor, grad_fn, self.device))

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
        assert self.layer is not None
        return self.parameters.has(tensor, self.layer.module)

    def _learn(self, saved: Saved) -> Any:
        """Decide by name, remember the decision for this position, and carry it out."""
        assert self.layer is not None
        entry = self.first.entry_of(saved, self.layer, is_output=self.regions.find(saved) is not None)
        self.recording.append(entry)
        return self._carry_out(saved, entry)

    def _unplanned(self, saved: Saved) -> Any:
        """A tensor that is not in the table: swapped if its whole layer is, else kept."""
        assert self.layer is not None
        fallback = self.layer.fallback
        # Without a gradient history the cast of a frozen weight looks like a mask: keep both.
        is_unknown = saved.grad_fn is None and not self._is_compiled  # what a compiled part saves has none
        if is_unknown or saved.storage is None or self._is_parameter(saved.tensor):
            return self._keep(saved, is_counted=False)
        if fallback.fate is not Fate.SWAP or saved.storage.nbytes() < self.context.min_bytes:
            return self._keep(saved, is_counted=True)
        return self._swap(saved, fallback.tier.value if fallback.tier else None, fallback.prefetch)

    def _carry_out(self, saved: Saved, entry: SavedTensorEntry) -> Any:
        if entry.node is not None:
            return self._attach(saved, entry, entry.node)
        if entry.fate is Fate.SWAP:
            return self._swap(saved, entry.tier, entry.distance, entry.leave)
        if entry.fate is Fate.RECOMPUTE:
            return self._rerun(saved)
        return self._keep(saved, is_counted=entry.is_counted)

    def _keep(self, saved: Saved, *, is_counted: bool) -> Any:
        """`is_counted`: the first tensor of a storage that is an activation."""
        guard = self.context.guard
        if guard is None or not saved.is_movable:
            return self._hold(saved.tensor, is_counted=is_counted)
        if is_counted:
            assert saved.storage is not None
            self.counters.kept_bytes += saved.storage.nbytes()
            return guard.keep(saved.tensor, self.queue, self.follower)
        return guard.view(saved.tensor, self.follower) or self._hold(saved.tensor, is_counted=False)

    def _hold(self, tensor: torch.Tensor, *, is_counted: bool) -> Any:
        if self.weights is not None and not is_counted and (weight := self.weights.hold(tensor)) is not None:
            return weight
        kept = Kept(tensor, self.follower if self.queue.has_distances else None)
        if is_counted:
            nbytes = tensor.untyped_storage().nbytes()
            self.counters.kept_bytes += nbytes
            kept.bytes_of = self.context.ledger.hold(kept, nbytes)
        return kept

    def _swap(self, saved: Saved, tier: str | None, distance: int | None, leave: int | None = None) -> Any:
        if not saved.is_movable:
            return self._keep(saved, is_counted=False)
        tensor, storage = saved.tensor, saved.storage
        assert storage is not None
        sequence = next_sequence_number()
        version, part = version_of(tensor), part_of(tensor)
        site = self.scheduler.find(storage, version, part)
        if site is None:
            site = self.scheduler.enroll(self.queue, storage, version, distance, part)
            self.departures.add(site, tier, leave, sequence)
        site.num_readers += 1
        site.last_use = sequence
        return Swapped(site, tensor)

    def _rerun(self, saved: Saved) -> Any:
        rerun, tensor = self.regions.find(saved), saved.tensor
        if rerun is None or tensor.is_conj() or tensor.is_neg():
            self._miss()
            return self._keep(saved, is_counted=False)
        if rerun.num_readers == 0:
            self.counters.recomputed_bytes += rerun.nbytes
        rerun.add_reader()
        return RerunView(rerun, tensor)

    # -- recipes ---------------------------------------------------------------------------------------------------

    def _attach(self, saved: Saved, entry: SavedTensorEntry, node: Node) -> Any:
        """The handle on a tensor whose node has a recipe, or from which recipes start."""
        recipe_graph, tensor = self.recipe_graph, saved.tensor
        assert recipe_graph is not None
        recipe_graph.is_observing = self.table is None
        if node.is_made or node.is_encoded:
            source = recipe_graph.find(node, tensor)
            if source is None and entry.is_counted and saved.is_movable:
                start = self._encode if node.is_encoded else self._make
                source = start(saved, node)
            if source is None:
                self._miss()
                return self._keep(saved, is_counted=entry.is_counted)
            source.last_use = next_sequence_number()
            return Made(source, tensor, self.follower)
        if entry.fate is Fate.SWAP:
            handle = self._swap(saved, entry.tier, entry.distance, entry.leave)
            if isinstance(handle, Swapped):
                recipe_graph.swap(node, handle, saved.grad_fn)
            return handle
        if not entry.is_counted or not saved.is_plain:
            return self._keep(saved, is_counted=False)
        return Kept(tensor, self.follower, recipe_graph.keep(node, tensor, saved.grad_fn))

    def _make(self, saved: Saved, node: Node) -> RecomputedSource | None:
        assert self.recipe_graph is not None
        return self.recipe_graph.make(node, saved.tensor, saved.grad_fn)

    def _encode(self, saved: Saved, node: Node) -> RecomputedSource | None:
        """The source of a tensor that is to be stored smaller: when the next operator saves something."""
        assert self.recipe_graph is not None
        source = self.recipe_graph.encode(node, saved.tensor, saved.grad_fn)
        if source is not None and not node.has_failed:
            self.departures.add_later(functools.partial(self._encode_now, node, source), next_sequence_number())
        return source

    def _encode_now(self, node: Node, source: RecomputedSource) -> None:
        assert self.recipe_graph is not None
        # Operators that encode are neither to be named nor to be logged as the model's.
        is_watched = self.first.is_on or self.log is not None
        with disable_current_modes() if is_watched else contextlib.nullcontext():
            self.recipe_graph.encode_now(node, source, functools.partial(self._hold_form, node))

    def _hold_form(self, node: Node, form: torch.Tensor) -> ResidentSource | OffloadedSource:
        """A source of the smaller form of a node, which stays or is swapped."""
        decision, storage = node.decision, form.untyped_storage()
        if self.scheduler.on_buffer is not None:
            self.scheduler.on_buffer(storage)
        if decision.fate is Fate.KEEP:
            self.counters.kept_bytes += storage.nbytes()
            return ResidentSource(form, self.context.ledger)
        tier = decision.tier.value if decision.tier else None
        site = self.scheduler.enroll(self.queue, storage, version_of(form), decision.prefetch, part_of(form))
        self.departures.add(site, tier, decision.leave, next_sequence_number())
        return OffloadedSource(site, View(form))

    def count_call(self, module: str) -> int:
        """How often a module with retained inputs has been called before in this forward."""
        count = self._retained_input_calls.get(module, 0)
        self._retained_input_calls[module] = count + 1
        return count

    def catch(self, node: Node, tensor: torch.Tensor | None) -> None:
        """Hold a retained input: a tensor that autograd does not save, and that a recipe will start from."""
        with disable_current_modes() if self.first.is_on else contextlib.nullcontext():
            if tensor is None:
                self._miss()
                return
            saved = Saved(arrived(tensor), tensor.grad_fn, self.device)
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
        self.counters.retained_input_bytes += saved.storage.nbytes()
        decision = node.decision
        if node.is_made:
            if recipe_graph.make(node, tensor, saved.grad_fn) is None:
                self._miss()
        elif decision.fate is Fate.SWAP:
            tier = decision.tier.value if decision.tier else None
            handle = self._swap(saved, tier, decision.prefetch, decision.leave)
            # Autograd does not read it; its readers are the recipes.
            handle.site.num_readers -= 1
            recipe_graph.swap(node, handle, saved.grad_fn)
        else:
            recipe_graph.keep(node, tensor, saved.grad_fn)

    # -- the end ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """The forward is over: start the copies that are left, and forget dropped outputs that nobody saved."""
        with disable_current_modes():
            self.departures.close()
        self.regions.close()
        if self.recipe_graph is not None:
            self.recipe_graph.close(is_complete=self.is_complete)
            self.queue.arrange()
            self.recipe_graph = None
            if self.context.guard is not None and self.is_complete:
                self.context.guard.end()
        del self.pack_hook  # a bound method of its own owner: a cycle
        self.scheduler.window.note_pass(self.queue.swapped_bytes)
