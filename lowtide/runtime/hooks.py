"""Saved-tensor hooks: what autograd hands over in a forward pass, and the fate each tensor gets.

What: a `Scope` is one forward pass of the model on one thread. While it is open, every tensor that autograd saves goes
through `Scope.pack`, which decides by position: the n-th tensor saved in this layer has the n-th entry of the layer's
table. The table was learned in the first forward, under a `Recorder` that knows who made what; later passes check each
tensor (dtype, number of dimensions, producing node) and go on hooks alone.

Divergence: a tensor that is not the one the table expects is counted, and gets the fate that its whole layer has (all
swapped, say) if there is one, else it is kept. It can never get a wrong value: every fate but `keep` identifies bytes
by a live storage and its version, not by position.

Cost: about 6 us a kept tensor in forward and backward together, of which 5 are what any saved-tensor hook costs; the
same under rules and under a solved plan. Not covered: sparse tensors and tensor subclasses (quantized, nested), but for
the two that catalog/wrappers.py takes apart; they stay as plain autograd has them.
"""

from __future__ import annotations

import contextlib
import heapq
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from lowtide.catalog.activations import leads_to_parameter
from lowtide.catalog.trace import PLAIN_TYPES, Recorder, is_plain, storage_keys
from lowtide.catalog.wrappers import arrived, inside, is_desugared
from lowtide.planner.fate import Fate
from lowtide.planner.plan import SiteDecision
from lowtide.planner.rules import Decision
from lowtide.runtime.cells import KeptInCell, Made
from lowtide.runtime.handle import Kept, KeptSite, Swapped
from lowtide.runtime.kept import KeptOnTape, KeptSiteOnTape
from lowtide.runtime.recompute import Call, Dropped, RegionRun, Rerun, RerunView, top_hooks, without_cache
from lowtide.runtime.slices import Parts
from lowtide.runtime.state import RandomState
from lowtide.runtime.tables import Entry, Region, Setting, is_same_producer
from lowtide.runtime.tape import Copy, Site, Tape
from lowtide.runtime.weaver import Node, Weaver
from lowtide.runtime.wrapped import Wrapped

_MAX_RELEARNED = 3


class Scope:
    """One forward pass on one thread."""

    def __init__(self, setting: Setting, entry: Region) -> None:
        self.setting = setting
        self.entry = entry
        self.mover = setting.mover
        self.counters = setting.counters
        self.tape = Tape()
        self.recorder: Recorder | None = None
        self.region: Region | None = None
        self.table: list[Entry] | None = None
        self.position = 0
        self.num_missed = 0
        self._calls: dict[str, int] = {}
        self._anchor_calls: dict[str, int] = {}
        self.recording: list[Entry] = []
        self.reruns: dict[int, tuple[StorageWeakRef, int, Rerun]] = {}
        # Sites saved by the operator that is being recorded now: its kernel has not been launched yet.
        self._pending: list[tuple[Site, str | None]] = []
        self._pending_sequence = -1
        # Copies that must be gone when the forward reaches a sequence number, next one first.
        self._deadlines: list[tuple[int, int, Copy]] = []
        self._parts: Parts = {}
        self._recorded_keys: dict[int, StorageWeakRef] = {}
        self._parameter_keys: set[int] | None = None
        self.weaver: Weaver | None = None
        if setting.nodes is not None:
            self.weaver = Weaver(setting.mover, setting.counters, self._miss)
        # One object, so that `is_innermost` can compare by identity.
        self.pack_hook = self.pack

    # -- where we are ----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def inside(self, region: Region) -> Iterator[None]:
        """Tensors saved inside belong to `region`; its table is learned if this is the first time."""
        outer = (self.region, self.table, self.position, self.recording, self.num_missed)
        call = self._calls[region.name] = self._calls.get(region.name, -1) + 1
        table = region.tables.get(call)
        self.region, self.table, self.position, self.recording, self.num_missed = region, table, 0, [], 0
        self._parameter_keys = None
        try:
            with self._observing(region) if table is None and self.recorder is None else contextlib.nullcontext():
                yield
            if table is not None:
                self._compare(region, table)
            else:
                # Also an empty one: a model around its layers often saves nothing, and need not be observed again.
                region.tables[call] = self.recording
        finally:
            self.region, self.table, self.position, self.recording, self.num_missed = outer

    def _compare(self, region: Region, table: list[Entry]) -> None:
        """A planned pass through the region is over: did its table fit?"""
        if 0 < self.position < len(table):
            self._miss()
        if not self.num_missed:
            return
        region.num_misses += 1
        if region.num_misses <= _MAX_RELEARNED:
            region.tables.clear()
            # Observe the whole forward again: names come from producers, which may lie outside this region.
            self.entry.tables.clear()

    def _miss(self) -> None:
        self.num_missed += 1
        self.counters.num_divergences += 1

    @contextlib.contextmanager
    def _observing(self, region: Region) -> Iterator[None]:
        self.recorder = recorder = Recorder(storage_keys(self.setting.model))
        try:
            with recorder.following(region.module, region.name), recorder:
                yield
        finally:
            self.recorder = None
            self.setting.seen_names |= recorder.seen_ops

    def is_innermost(self) -> bool:
        """Whether these hooks are the ones that autograd calls now (not inside someone's checkpoint region)."""
        hooks = top_hooks()
        return hooks is not None and hooks[0] is self.pack_hook

    # -- the pack hook ---------------------------------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor, wrapper: torch.Tensor | None = None) -> Any:
        """The handle that autograd keeps instead of `tensor`. `wrapper`: what autograd saves, around `tensor`."""
        if type(tensor) not in PLAIN_TYPES and wrapper is None and is_desugared((type(tensor),)):
            return self._pack_wrapped(tensor)
        grad_fn = tensor.grad_fn if wrapper is None else wrapper.grad_fn
        position = self.position
        self.position = position + 1
        if self._pending or self._deadlines:
            self._keep_time()
        table = self.table
        if table is None:
            with _disable_current_modes():
                return self._learn(tensor, grad_fn)
        if position < len(table):
            entry = table[position]
            if (
                entry.dtype is tensor.dtype
                and entry.num_dims == tensor.dim()
                and is_same_producer(entry.producer, type(grad_fn))
            ):
                return self._carry_out(tensor, entry, grad_fn)
        self._miss()
        return self._unplanned(tensor, grad_fn)

    def _pack_wrapped(self, tensor: torch.Tensor) -> Any:
        """A distributed tensor, or what a collective gives out: the plain tensor inside has a fate like any other."""
        if tensor._version or self.is_parameter(tensor):
            # Writes below a wrapper are not counted, so its bytes could not be told from those of another version.
            return self.pack(tensor, tensor)
        with _disable_current_modes():
            local = arrived(tensor)
            if not is_plain(local):
                return self.pack(tensor, tensor)
            return Wrapped(tensor, self.pack(local, tensor))

    def _carry_out(self, tensor: torch.Tensor, entry: Entry, grad_fn: Any) -> Any:
        if entry.node is not None:
            return self._weave(tensor, entry, entry.node, grad_fn)
        if entry.fate is Fate.SWAP:
            return self._swap(tensor, entry.tier, entry.distance, entry.leave)
        if entry.fate is Fate.RECOMPUTE:
            return self._rerun(tensor)
        return self._keep(tensor) if entry.is_counted else self._plain(tensor)

    def _plain(self, tensor: torch.Tensor) -> Kept:
        guard = self.setting.guard
        if guard is not None and is_plain(tensor) and self._is_movable(tensor, tensor.untyped_storage()):
            handle = guard.view(tensor, self.tape)
            if handle is not None:
                return handle
        return KeptOnTape(tensor, self.mover, self.tape) if self.tape.has_distances else Kept(tensor)

    def _keep(self, tensor: torch.Tensor) -> Kept:
        nbytes = tensor.untyped_storage().nbytes()
        self.counters.kept_bytes += nbytes
        if self.setting.guard is not None and self._is_movable(tensor, tensor.untyped_storage()):
            return self.setting.guard.keep(tensor, self.tape)
        if self.tape.has_distances:
            return KeptSiteOnTape(tensor, nbytes, self.setting.ledger, self.mover, self.tape)
        return KeptSite(tensor, nbytes, self.setting.ledger)

    def _swap(self, tensor: torch.Tensor, tier: str | None, distance: int | None, leave: int | None = None) -> Any:
        storage = tensor.untyped_storage()
        if not self._is_movable(tensor, storage):
            return self._plain(tensor)
        sequence = torch.autograd._get_sequence_nr()
        site = self.mover.find(storage, tensor._version)
        if site is None:
            site = self.mover.enroll(self.tape, storage, tensor._version, distance)
            if leave is not None:
                site.copy.has_deadline = True
                # It is sent with the next operator's save, so it cannot be gone before that.
                heapq.heappush(self._deadlines, (sequence + max(leave, 1), site.index, site.copy))
            self._pending.append((site, tier))
            self._pending_sequence = sequence
        site.num_readers += 1
        site.last_use = sequence
        return Swapped(site, tensor)

    def _keep_time(self) -> None:
        """Send what was saved before this operator, and see that what must be gone by now is."""
        sequence = torch.autograd._get_sequence_nr()
        if self._pending and sequence != self._pending_sequence:
            self._send_pending()
        while self._deadlines and self._deadlines[0][0] <= sequence:
            self.mover.land(heapq.heappop(self._deadlines)[2])

    def _send_pending(self) -> None:
        pending, self._pending = self._pending, []
        for site, tier in pending:
            self.mover.send(site, tier)

    def _is_movable(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
        # Conjugate and negative bits are not part of a storage view; such tensors are rare, small, and stay.
        if tensor.is_conj() or tensor.is_neg():
            return False
        return is_plain(tensor) and storage.nbytes() > 0 and tensor.device.type == self.setting.device_type

    def _rerun(self, tensor: torch.Tensor) -> Any:
        rerun = self._find_rerun(tensor)
        if rerun is None or tensor.is_conj() or tensor.is_neg():
            self._miss()
            return self._plain(tensor)
        if rerun.num_readers == 0:
            self.counters.recomputed_bytes += rerun.nbytes
        rerun.add_reader()
        return RerunView(rerun, tensor)

    def _find_rerun(self, tensor: torch.Tensor) -> Rerun | None:
        found = self.reruns.get(tensor.untyped_storage()._cdata)
        if found is None or found[0].expired() or found[1] != tensor._version:
            return None
        return found[2]

    # -- recipes ---------------------------------------------------------------------------------------------------

    def _weave(self, tensor: torch.Tensor, entry: Entry, node: Node, grad_fn: Any) -> Any:
        """A tensor of a node that has a recipe, or from which recipes start."""
        weaver = self.weaver
        assert weaver is not None
        weaver.is_observing = self.table is None
        if node.is_made:
            cell = weaver.find(node, tensor)
            if cell is None and entry.is_counted and self._is_movable(tensor, tensor.untyped_storage()):
                cell = weaver.make(node, tensor, grad_fn)
            if cell is None:
                self._miss()
                return self._keep(tensor) if entry.is_counted else self._plain(tensor)
            cell.last_use = torch.autograd._get_sequence_nr()
            return Made(cell, tensor, self.tape)
        if entry.fate is Fate.SWAP:
            handle = self._swap(tensor, entry.tier, entry.distance, entry.leave)
            if isinstance(handle, Swapped):
                weaver.swap(node, handle, grad_fn)
            return handle
        if not entry.is_counted or not is_plain(tensor):
            return self._plain(tensor)
        return KeptInCell(tensor, weaver.keep(node, tensor, grad_fn), self.mover, self.tape)

    def count_call(self, module: str) -> int:
        """How often a module with anchors has been called before in this forward."""
        count = self._anchor_calls.get(module, 0)
        self._anchor_calls[module] = count + 1
        return count

    def catch(self, node: Node, tensor: torch.Tensor | None) -> None:
        """An anchor: a tensor that autograd does not save, and that a recipe will start from."""
        with _disable_current_modes() if self.recorder is not None else contextlib.nullcontext():
            local = None if tensor is None else arrived(tensor)
            if local is None or not is_plain(local) or not self._is_movable(local, local.untyped_storage()):
                self._miss()
                return
            assert tensor is not None
            self._hold_anchor(node, local, tensor.grad_fn)

    def _hold_anchor(self, node: Node, tensor: torch.Tensor, grad_fn: Any) -> None:
        weaver = self.weaver
        assert weaver is not None
        weaver.is_observing = self.recorder is not None
        if self._pending or self._deadlines:
            self._keep_time()
        self.counters.anchor_bytes += tensor.untyped_storage().nbytes()
        decision = node.decision
        if node.is_made:
            if weaver.make(node, tensor, grad_fn) is None:
                self._miss()
        elif decision.fate is Fate.SWAP:
            tier = decision.tier.value if decision.tier else None
            handle = self._swap(tensor, tier, decision.prefetch, decision.leave)
            # Autograd does not read it; its readers are the recipes.
            handle.site.num_readers -= 1
            weaver.swap(node, handle, grad_fn)
        else:
            weaver.keep(node, tensor, grad_fn)

    # -- the first forward -----------------------------------------------------------------------------------------

    def _learn(self, tensor: torch.Tensor, grad_fn: Any) -> Any:
        """Name the tensor's storage by its producer, decide its fate by the rules, and remember both."""
        entry = Entry(tensor.dtype, tensor.dim(), type(grad_fn), Fate.KEEP, is_counted=False)
        self.recording.append(entry)
        if not self._is_activation(tensor, grad_fn):
            return self._plain(tensor)
        assert self.recorder is not None and self.region is not None
        storage = tensor.untyped_storage()
        is_first = not self._was_recorded(storage)
        name = self.recorder.names.get(storage._cdata) or f"{self.region.name}.input".lstrip(".")
        decision, reason = self._decide(name, tensor, storage.nbytes())
        entry.fate = decision.fate
        entry.is_counted = is_first
        entry.tier = decision.tier.value if decision.tier else None
        entry.distance = decision.prefetch
        if self.setting.nodes is not None:
            self._plan_entry(entry, name, storage.nbytes())
        if is_first:
            self._note_site(name, tensor, storage.nbytes(), decision, reason)
        return self._carry_out(tensor, entry, grad_fn)

    def _plan_entry(self, entry: Entry, name: str, nbytes: int) -> None:
        """What a solved plan says about a saved tensor beyond its fate."""
        assert self.setting.nodes is not None
        node = self.setting.nodes.get(name)
        if node is None:
            if entry.is_counted and nbytes and name not in self.setting.unplanned:
                self.setting.unplanned[name] = nbytes
            return
        node.was_seen = True
        entry.leave = node.decision.leave
        takes_part = node.is_made or (node.is_input and (entry.is_counted or entry.fate is Fate.SWAP))
        entry.node = node if takes_part and entry.fate is node.decision.fate else None

    def _decide(self, name: str, tensor: torch.Tensor, nbytes: int) -> tuple[Decision, str]:
        if self._find_rerun(tensor) is not None:
            decision = self.setting.rules.decide(name)
            return Decision(fate=Fate.RECOMPUTE, prefetch=None, tier=None, reason=decision.reason), decision.reason
        if self.setting.nodes is not None:
            return self._decide_as_planned(self.setting.nodes.get(name), tensor)
        decision = self.setting.stay_rules.decide(name)
        if decision.fate is Fate.SWAP and nbytes < self.setting.min_bytes:
            reason = f"smaller than min_bytes; {decision.reason}"
            return Decision(fate=Fate.KEEP, prefetch=None, tier=None, reason=reason), reason
        if decision.fate is Fate.SWAP and not self._is_movable(tensor, tensor.untyped_storage()):
            reason = f"not a plain tensor on {self.setting.device_type}; {decision.reason}"
            return Decision(fate=Fate.KEEP, prefetch=None, tier=None, reason=reason), reason
        return decision, decision.reason

    def _decide_as_planned(self, node: Node | None, tensor: torch.Tensor) -> tuple[Decision, str]:
        planned = node.decision if node is not None else None
        if planned is None:
            reason = "the plan does not know it"
        elif planned.anchor is not None:
            reason = "the plan took it for an anchor, but it is saved"
        elif planned.fate is Fate.RECOMPUTE and planned.recipe is None:
            reason = "to be recomputed with its layer, but saved outside of it"
        elif planned.fate is Fate.SWAP and not self._is_movable(tensor, tensor.untyped_storage()):
            reason = f"not a plain tensor on {self.setting.device_type}"
        else:
            fate, reason = planned.fate, planned.reason
            return Decision(fate=fate, prefetch=planned.prefetch, tier=planned.tier, reason=reason), reason
        return Decision(fate=Fate.KEEP, prefetch=None, tier=None, reason=reason), reason

    def _note_site(self, name: str, tensor: torch.Tensor, nbytes: int, decision: Decision, reason: str) -> None:
        assert self.region is not None
        self.setting.sites.setdefault(
            name,
            SiteDecision(
                name=name,
                layer=self.region.name or None,
                nbytes=nbytes,
                dtype=str(tensor.dtype).removeprefix("torch."),
                fate=decision.fate,
                tier=decision.tier,
                prefetch=decision.prefetch,
                reason=reason,
            ),
        )

    def _was_recorded(self, storage: torch.UntypedStorage) -> bool:
        seen = self._recorded_keys.get(storage._cdata)
        if seen is not None and not seen.expired():
            return True
        self._recorded_keys[storage._cdata] = StorageWeakRef(storage)
        return False

    # -- tensors that are no activations ---------------------------------------------------------------------------

    def _is_activation(self, tensor: torch.Tensor, grad_fn: Any) -> bool:
        """Not a parameter, buffer, view or cast of one, not the caller's own input, and an ordinary tensor."""
        if not is_plain(tensor) or self.is_parameter(tensor):
            return False
        assert self.recorder is not None
        key = tensor.untyped_storage()._cdata
        if key in self.recorder.parameter_keys:
            return False
        return key in self.recorder.names or grad_fn is not None

    def is_parameter(self, tensor: torch.Tensor) -> bool:
        """A parameter or buffer, a view of one, or a cast of one that autograd can see."""
        if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
            return True
        local = inside(tensor)
        if not is_plain(local):
            return False
        return local.untyped_storage()._cdata in self._keys_of_parameters() or leads_to_parameter(tensor)

    def _keys_of_parameters(self) -> set[int]:
        if self._parameter_keys is None:
            # The layer's own again: sharded training swaps whole parameters in for the time of its forward.
            module = self.region.module if self.region is not None else self.setting.model
            self._parameter_keys = storage_keys(self.setting.model) | storage_keys(module)
        return self._parameter_keys

    def _unplanned(self, tensor: torch.Tensor, grad_fn: Any) -> Any:
        """A tensor that no table foresaw: the fate of its whole layer if that is swap, else keep."""
        assert self.region is not None
        fallback = self.region.fallback
        # Without a gradient history a frozen weight's cast cannot be told from a mask: keep both.
        if grad_fn is None or not is_plain(tensor) or self.is_parameter(tensor):
            return self._plain(tensor)
        if fallback.fate is not Fate.SWAP or tensor.untyped_storage().nbytes() < self.setting.min_bytes:
            return self._keep(tensor)
        return self._swap(tensor, fallback.tier.value if fallback.tier else None, fallback.prefetch)

    # -- recompute -------------------------------------------------------------------------------------------------

    def checkpointed(self, module: nn.Module, forward: Callable, args: tuple, kwargs: dict) -> Any:
        """Run a recomputed region (see runtime/recompute.py)."""
        pack = self.pack if self.setting.slices is None else self._pack_input
        return self._run_region(self._new_region(module, forward, args, kwargs), pack)

    def _pack_input(self, tensor: torch.Tensor) -> Any:
        """The handle on an input of a recomputed layer, of which each tensor-parallel rank may keep a slice only."""
        handle, slices = self.pack(tensor), self.setting.slices
        assert slices is not None and self.region is not None
        where, is_first = self.region.name, self.recorder is not None
        with _disable_current_modes() if is_first else contextlib.nullcontext():
            return slices.instead_of(handle, tensor, self._parts, where, self.counters, compares=is_first)

    def _new_region(self, module: nn.Module, forward: Callable, args: tuple, kwargs: dict) -> RegionRun:
        call = Call(module, forward, *without_cache(module, args, kwargs))
        return RegionRun(call, Dropped(self.counters, self.setting.ledger, self._note_dropped))

    def _run_region(self, region: RegionRun, pack: Callable[[torch.Tensor], Any]) -> Any:
        changers = self.setting.input_changers
        module = region.call.module
        output = region.run(pack, may_change_inputs=self.recorder is not None or module in changers)
        if region.has_changed_inputs:
            changers.add(module)
        return output

    def _note_dropped(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor inside a recomputed region is an activation; in the first forward, also put it on record."""
        if self.recorder is None:
            return not self.is_parameter(tensor)
        with _disable_current_modes():
            if not self._is_activation(tensor, tensor.grad_fn):
                return False
            storage = tensor.untyped_storage()
            name = self.recorder.names.get(storage._cdata)
            # An input of the region is on record already, by the fate that it has outside.
            if name is not None and not self._was_recorded(storage):
                reason = self.setting.rules.decide(name).reason
                decision = Decision(fate=Fate.RECOMPUTE, prefetch=None, tier=None, reason=reason)
                self._note_site(name, tensor, storage.nbytes(), decision, reason)
            return True

    def discarded(self, module: nn.Module, forward: Callable, args: tuple, kwargs: dict) -> Any:
        """Run a module as a region and drop its output too, if it is one fresh tensor worth dropping."""
        region = self._new_region(module, forward, args, kwargs)
        random = RandomState(region.call.tensors)
        output = self._run_region(region, self.pack)
        if region.has_changed_inputs or not self._is_droppable(output, region.input_keys):
            return output
        storage = output.untyped_storage()
        rerun = Rerun(region, random, output)
        self.reruns[storage._cdata] = (StorageWeakRef(storage), output._version, rerun)
        return output

    def _is_droppable(self, output: Any, input_keys: set[int]) -> bool:
        if not isinstance(output, torch.Tensor) or not is_plain(output) or output.grad_fn is None:
            return False
        storage = output.untyped_storage()
        return storage.nbytes() >= self.setting.min_bytes and storage._cdata not in input_keys

    def close(self) -> None:
        """The forward is complete: send what is pending, forget outputs that nobody saved."""
        with _disable_current_modes():
            self._send_pending()
            for _, _, copy in self._deadlines:
                self.mover.land(copy)
        self._deadlines.clear()
        self.reruns.clear()
        self._parts.clear()
        if self.weaver is not None:
            self.weaver.close()
            self.tape.arrange()
            self.weaver = None
        del self.pack_hook  # a bound method of its own owner: a cycle
        self.mover.end_of_pass(self.tape)
