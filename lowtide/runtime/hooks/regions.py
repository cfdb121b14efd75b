"""Recomputed layers and modules of one forward pass: how each is started, and what it drops.

An output of a module that is dropped has a `Rerun`, which recomputes it by running the module again.

Why not in the pack hook: inside a recomputed region autograd does not call our pack hook, so a pass works before and
after the region. How a region runs, and runs again, is in runtime/recompute/region.py.

Cost: see runtime/recompute/region.py. Not covered: which modules these are (runtime/session).
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from lowtide.errors import RecomputeRefusedError
from lowtide.runtime.hooks.context import LayerTable, Parameters, PlanContext, Saved
from lowtide.runtime.hooks.first_forward import FirstForward
from lowtide.runtime.recompute.call import Call, without_cache
from lowtide.runtime.recompute.region import RegionRun, own_hooks
from lowtide.runtime.recompute.saves import Dropped
from lowtide.tensors.kinds import is_plain, storage_key_set
from lowtide.tensors.private import (
    current_graph_task_id,
    disable_current_modes,
    next_sequence_number,
    storage_key,
    version_of,
)
from lowtide.tensors.wrappers import inside


class Rerun:
    """A module's dropped output, recomputed from the module's inputs when backward reads it.

    Owns handles on the inputs, which may themselves be kept, swapped or recomputed. The result is held from the first
    reader of a backward pass to the last.
    """

    __slots__ = ("nbytes", "num_readers", "num_reads", "prints", "region", "result", "task")

    def __init__(self, region: RegionRun, output: torch.Tensor) -> None:
        self.region = region
        self.nbytes = output.untyped_storage().nbytes()
        self.prints = [region.fingerprints.of(output)]
        self.num_readers = 0
        self.num_reads = 0
        self.task: int | None = None
        self.result: torch.UntypedStorage | None = None

    def add_reader(self) -> None:
        """One more saved tensor views this output."""
        if self.num_readers == 0:
            self.region.watch.frees = True
            self.region.claim_inputs()
        self.num_readers += 1

    def read(self) -> torch.UntypedStorage:
        """The output's storage, bit for bit what the forward produced."""
        task = current_graph_task_id()
        if task != self.task:
            self.task, self.num_reads, self.result = task, 0, None
        storage = self.result if self.result is not None else self._run()
        self.num_reads += 1
        self.result = storage if self.num_reads < self.num_readers and task != -1 else None
        return storage

    def _run(self) -> torch.UntypedStorage:
        region = self.region
        # With gradients, as in the first run: without them other kernels may run. The graph is released at once. What
        # it saves must not reach the hooks of an outer region that is running again.
        with own_hooks():
            output = region.make_whole(self.prints)
        assert output.untyped_storage().nbytes() == self.nbytes, "a module's second run made an output of another size"
        return output.untyped_storage()


class Regions:
    """The regions of one forward pass. Each call gives it the `ForwardPass`: a reference to that would be a cycle."""

    def __init__(self, context: PlanContext, first: FirstForward, parameters: Parameters) -> None:
        self._context = context
        self._first = first
        self._parameters = parameters
        self._outputs: dict[int, tuple[StorageWeakRef, int, Rerun]] = {}
        """Dropped outputs, by the key of their storage: the storage, its version, and what recomputes it."""
        self._parts: dict[int, Any] = {}

    def checkpointed(self, now: Any, module: nn.Module, forward: Callable, args: tuple, kwargs: dict) -> Any:
        """Run a module as a region: what it saves is dropped. Returns its output."""
        pack = now.pack if self._context.slices is None else functools.partial(self._pack_input, now)
        region = self._begun(now, module, forward, args, kwargs)
        if region is None:
            return forward(*args, **kwargs)
        output = self._run(now, region, pack)
        if self._context.nodes is not None:
            # Backward needs the inputs when it reaches the end of the region: a plan counts distances from there.
            region.note_end(next_sequence_number())
        return output

    def discarded(self, now: Any, module: nn.Module, forward: Callable, args: tuple, kwargs: dict) -> Any:
        """Run a module as a region and drop its output too, if it is one fresh tensor worth dropping."""
        region = self._begun(now, module, forward, args, kwargs)
        if region is None:
            return forward(*args, **kwargs)
        inputs = storage_key_set([*map(inside, region.call.tensors)])
        output = self._run(now, region, now.pack)
        if region.has_changed_inputs or not self._is_droppable(output, inputs):
            return output
        storage = output.untyped_storage()
        rerun = Rerun(region, output)
        self._outputs[storage_key(storage)] = (StorageWeakRef(storage), version_of(output), rerun)
        return output

    def find(self, saved: Saved) -> Rerun | None:
        """What recomputes a saved tensor, if it is a dropped output; else None."""
        found = self._outputs.get(saved.key) if self._outputs and saved.is_plain else None
        if found is None or found[0].expired() or found[1] != version_of(saved.tensor):
            return None
        return found[2]

    def close(self) -> None:
        """The forward is over: forget outputs that were not saved."""
        self._outputs.clear()
        self._parts.clear()

    def _begun(self, now: Any, module: nn.Module, forward: Callable, args: tuple, kwargs: dict) -> RegionRun | None:
        """The region, before its first run. None if a solved plan chose it and it cannot run again: then what it saves
        is kept, which costs memory and no value."""
        watch = self._context.watch(module)
        if watch.differs or (watch.is_planned and watch.refusal):
            return None
        try:
            call = Call(module, forward, *without_cache(module, args, kwargs, watch.refusal_of))
            note = functools.partial(self._note_dropped, now.layer)
            dropped = Dropped(self._context.counters, self._context.scheduler.ledger, note)
            return RegionRun(call, dropped, watch, self._context.fingerprints, is_first=self._first.is_on)
        except RecomputeRefusedError as error:
            if not error.can_stay:
                raise
            warnings.warn(f"{error} It is kept.", stacklevel=2)
            return None

    def _run(self, now: Any, region: RegionRun, pack: Callable[[torch.Tensor], Any]) -> Any:
        # A solved plan has no room for copies, and chooses no layer that was observed to write to its inputs.
        is_new = self._first.is_on and self._context.nodes is None
        output = region.run(pack, may_change_inputs=is_new or region.watch.writes_inputs)
        region.watch.writes_inputs |= region.has_changed_inputs
        return output

    def _pack_input(self, now: Any, tensor: torch.Tensor) -> Any:
        """The handle on an input of a recomputed layer, of which each tensor-parallel rank may keep a slice only."""
        handle, slices = now.pack(tensor), self._context.slices
        assert slices is not None
        is_first = self._first.is_on
        with disable_current_modes() if is_first else contextlib.nullcontext():
            return slices(
                handle,
                tensor,
                self._parts,
                now.layer.name,
                counters=self._context.counters,
                ledger=self._context.scheduler.ledger,
                compares=is_first,
            )

    def _note_dropped(self, where: LayerTable, tensor: torch.Tensor) -> bool:
        """Whether a tensor inside a recomputed region is an activation. In the first forward, also record it."""
        if not self._first.is_on:
            return not self._parameters.has(tensor, where.module)
        with disable_current_modes():
            saved = Saved(tensor, tensor.grad_fn, self._context.scheduler.engine.device)
            return self._first.note_dropped(saved, where)

    def _is_droppable(self, output: Any, input_keys: set[int]) -> bool:
        if not isinstance(output, torch.Tensor) or not is_plain(output) or output.grad_fn is None:
            return False
        storage = output.untyped_storage()
        return storage.nbytes() >= self._context.min_bytes and storage_key(storage) not in input_keys
