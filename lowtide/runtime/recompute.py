"""Recompute: drop what a region saves, keep its inputs, and run it again when backward asks.

Two regions, one mechanism (`torch.utils.checkpoint`, non-reentrant, never a copy of it):

- a *layer*: everything it saves is dropped; its inputs remain, positional and keyword alike;
- a single *module* without children (an activation, a norm): what it saves is dropped, and so is its **output**, which
  is what the next operator would have saved. Reading that output in backward runs the module once more.

The inputs of a region are handles like any other saved tensor, keyword inputs included, so they can be kept, swapped or
themselves be rerun; checkpoint would hold positional ones only, and keep keyword inputs in a closure out of reach.

Around checkpoint this file adds what checkpoint leaves to chance:
- in-place writes to a tensor saved inside a region raise, as in plain autograd (checkpoint would recompute silently);
- a region that writes into its own input is run again from a copy of the input as it was;
- module buffers (batch-norm statistics, counters) are, in the second run, what they were in the first, and what they
  had become after it;
- the bytes that a region drops are counted, and while they exist again they are in the ledger.

Random state and autocast are restored by checkpoint for regions, and by `Rerun` for outputs.

Cost: the region's forward time once more (a module whose output is dropped: up to twice, of something cheap).
Not covered: regions with side effects other than buffers and random state (a key-value cache: see `without_cache`).
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from lowtide.catalog.trace import is_plain
from lowtide.catalog.wrappers import inside
from lowtide.runtime.handle import Kept, Swapped, View, modified_error, version_witness
from lowtide.runtime.state import BufferState, ParameterState, RandomState, autocast_state
from lowtide.runtime.stats import Counters, Ledger
from lowtide.runtime.wrapped import Wrapped


def is_checkpoint_hook(hooks: tuple[Callable, Callable] | None) -> bool:
    """Whether these saved-tensor hooks are those of a `torch.utils.checkpoint` region (forward or recompute)."""
    if hooks is None:
        return False
    return getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint" or (
        "checkpoint" in getattr(hooks[0], "__qualname__", "") and "_hook" in getattr(hooks[0], "__qualname__", "")
    )


def top_hooks() -> tuple[Callable, Callable] | None:
    """The innermost saved-tensor hooks of this thread, or None. Only the innermost pair is ever called."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


class Dropped:
    """What one run of a region dropped, in bytes, and whether it exists again."""

    __slots__ = ("_inputs", "_seen", "counters", "is_back", "ledger", "nbytes", "note", "saved_inputs")

    def __init__(self, counters: Counters, ledger: Ledger, note: Callable[[torch.Tensor], bool]) -> None:
        self.counters = counters
        self.ledger = ledger
        # Called once for each storage that the region would have saved; says whether it is an activation.
        self.note: Callable[[torch.Tensor], bool] | None = note
        self.nbytes = 0
        self.is_back = False
        self._seen: dict[int, StorageWeakRef] = {}
        self._inputs: dict[int, int] = {}
        # Which inputs the region saves, as plain autograd would; the others it needs only to run again.
        self.saved_inputs: set[int] = set()

    def count(self, tensor: torch.Tensor) -> None:
        """Add a storage that the region would have saved. Units: bytes."""
        storage = tensor.untyped_storage()
        seen = self._seen.get(storage._cdata)
        if seen is not None and not seen.expired():
            if storage._cdata in self._inputs:
                self.saved_inputs.add(self._inputs[storage._cdata])
            return
        self._seen[storage._cdata] = StorageWeakRef(storage)
        if self.note is not None and self.note(tensor):
            self.nbytes += storage.nbytes()

    def leave_out(self, tensors: list[torch.Tensor]) -> None:
        """The region's own inputs: they remain, and are counted where they are kept or swapped."""
        for index, tensor in enumerate(map(inside, tensors)):
            if is_plain(tensor):
                storage = tensor.untyped_storage()
                self._seen[storage._cdata] = StorageWeakRef(storage)
                self._inputs[storage._cdata] = index

    def forward_done(self) -> None:
        self._seen = {}
        self._inputs = {}
        self.note = None
        self.counters.recomputed_bytes += self.nbytes

    def come_back(self) -> None:
        if not self.is_back:
            self.is_back = True
            self.ledger.add(self.nbytes)

    def __del__(self) -> None:
        if self.is_back:
            self.ledger.subtract(self.nbytes)


class _Saved:
    """A tensor that a region saved and checkpoint dropped: its holder, and the witness of its version."""

    __slots__ = ("dropped", "holder", "is_view", "output_nr", "producer", "size", "version", "witness")

    def __init__(self, holder: Any, tensor: torch.Tensor, dropped: Dropped) -> None:
        self.holder = holder
        self.dropped = dropped
        self.producer, self.output_nr, self.is_view = type(tensor.grad_fn), tensor.output_nr, tensor._is_view()
        self.size = tensor.size()
        self.version = tensor._version
        self.witness = version_witness(tensor) if tensor.layout is torch.strided else tensor.detach()

    def check(self) -> None:
        if self.witness._version != self.version:
            raise modified_error(self.witness, self.size, self.witness._version, self.version, self)


@contextlib.contextmanager
def _counting(dropped: Dropped) -> Iterator[None]:
    """Chain to checkpoint's own hooks: it still sees every tensor, in order; we count bytes and watch versions."""
    hooks = top_hooks()
    assert is_checkpoint_hook(hooks) and hooks is not None
    outer_pack, outer_unpack = hooks

    def pack(tensor: torch.Tensor) -> Any:
        local = inside(tensor)
        if is_plain(local):
            dropped.count(local)
        return _Saved(outer_pack(tensor), tensor, dropped)

    def unpack(saved: _Saved) -> torch.Tensor:
        saved.check()
        tensor = outer_unpack(saved.holder)
        saved.dropped.come_back()
        return tensor

    with saved_tensors_hooks(pack, unpack):
        yield
    dropped.forward_done()


class Call:
    """A module's forward with its arguments taken apart, so that it can be made again from other tensors.

    The first run gets the caller's own containers, so that what a module writes into them arrives; later runs get new
    ones, filled as the caller's were before the first. A tensor that was given twice is one tensor in every run.
    """

    __slots__ = ("_constants", "_places", "_spec", "_written", "forward", "module", "tensors")

    def __init__(self, module: nn.Module, forward: Callable, args: tuple, kwargs: dict) -> None:
        self.module = module
        self.forward = forward
        self._written: tuple[tuple, dict] | None = (args, kwargs)
        leaves, self._spec = tree_flatten((args, kwargs))
        unique = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}
        order = {key: index for index, key in enumerate(unique)}
        self.tensors: list[torch.Tensor] = list(unique.values())
        self._places = [(i, order[id(leaf)]) for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self._constants = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

    def make_first(self) -> Any:
        """Run the forward on the caller's own arguments."""
        assert self._written is not None
        args, kwargs = self._written
        return self.forward(*args, **kwargs)

    def forget(self) -> None:
        """The first run is over: do not hold its tensors any longer."""
        self._written = None
        self.tensors = []

    def make(self, tensors: list[torch.Tensor]) -> Any:
        """Run the forward on `tensors` in place of the original ones."""
        leaves = list(self._constants)
        for place, index in self._places:
            leaves[place] = tensors[index]
        args, kwargs = tree_unflatten(leaves, self._spec)
        return self.forward(*args, **kwargs)


class RegionRun:
    """One run of a region: first from the real inputs, later, in backward, from handles on them."""

    __slots__ = (
        "_flags",
        "_has_run",
        "buffers",
        "call",
        "dropped",
        "has_changed_inputs",
        "input_keys",
        "inputs",
        "parameters",
    )

    def __init__(self, call: Call, dropped: Dropped) -> None:
        self.call = call
        self.dropped = dropped
        self.inputs: list[Any] = []
        self.input_keys = {t.untyped_storage()._cdata for t in map(inside, call.tensors) if is_plain(t)}
        self.has_changed_inputs = False
        self.buffers = BufferState(call.module)
        self.parameters = ParameterState(call.module)
        self._flags = [tensor.requires_grad for tensor in call.tensors]
        self._has_run = False

    def run(self, pack: Callable[[torch.Tensor], Any], *, may_change_inputs: bool) -> Any:
        """The forward's output. `pack` makes handles; `may_change_inputs`: copy them first, as they may be written to.

        Raises RuntimeError if inputs were written to although `may_change_inputs` is false.
        """
        tensors = self.call.tensors
        with _disable_current_modes():
            copies = [tensor.detach().clone() for tensor in tensors] if may_change_inputs else None
            # Checkpoint learns from these which devices' random states to save.
            markers = [torch.empty(0, device=device) for device in {tensor.device: None for tensor in tensors}]
        versions = [tensor._version for tensor in tensors]
        self.inputs = [pack(tensor) for tensor in tensors]
        try:
            output = checkpoint(self._body, *markers, use_reentrant=False)
            self.buffers.settle()
            for i, (tensor, version) in enumerate(zip(tensors, versions, strict=True)):
                if tensor._version != version:
                    self._replace_input(i, copies)
        finally:
            # Also after an error: an input that was written to has a graph, which leads back to this region, and no
            # collector sees cycles through autograd.
            self.call.forget()
        return output

    def _replace_input(self, index: int, copies: list[torch.Tensor] | None) -> None:
        self.has_changed_inputs = True
        if copies is None:
            raise RuntimeError(
                f"lowtide: a recomputed {type(self.call.module).__name__} wrote into its own input in this forward, "
                "but not in the first one; it cannot be run again. Give it the fate keep or swap."
            )
        self.inputs[index] = Kept(copies[index])

    def _body(self, *markers: torch.Tensor) -> Any:
        if self._has_run:
            with self.replayed():
                return self.call.make(self.open_inputs())
        self._has_run = True
        self.dropped.leave_out(self.call.tensors)
        with _counting(self.dropped):
            return self.call.make_first()

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """Inside, the module's buffers and parameters are those of the first run."""
        with self.buffers.replayed(), self.parameters.replayed():
            yield

    def open_inputs(self) -> list[torch.Tensor]:
        """The inputs as they were, with the same need for gradients (else other tensors would be saved)."""
        tensors = [self._open_input(i).detach().requires_grad_(flag) for i, flag in enumerate(self._flags)]
        # A copy: the second run writes into them too, and there may be a third.
        return [tensor.clone() for tensor in tensors] if self.has_changed_inputs else tensors

    def _open_input(self, index: int) -> torch.Tensor:
        try:
            return self.inputs[index].open()
        except RuntimeError as error:
            if index in self.dropped.saved_inputs or "modified by an inplace operation" not in str(error):
                raise
            raise RuntimeError(
                f"lowtide: an input of a recomputed {type(self.call.module).__name__} was modified in place after it "
                "had run, so it cannot be run again. Plain autograd does not need this input; give the module the "
                f"fate keep or swap, or do not write into its input. ({error})"
            ) from error

    def claim_inputs(self) -> None:
        """One more reader of the inputs: a swapped one must not be let go after the first."""
        for given in self.inputs:
            handle = given.local if isinstance(given, Wrapped) else given
            if isinstance(handle, Swapped):
                handle.site.num_readers += 1


_CACHE_NAMES = ("past_key_values", "past_key_value", "layer_past")


def without_cache(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Take an empty key-value cache out of a layer's inputs: its second run would append to it again.

    Raises RuntimeError for a cache that already holds tokens, since then dropping it would change the result.
    """
    named = {name: kwargs[name] for name in _CACHE_NAMES if kwargs.get(name) is not None}
    if not named:
        return args, kwargs
    for name, cache in named.items():
        if _num_cached(module, cache):
            raise RuntimeError(
                f"lowtide: a layer under recompute was called with {name} that already holds tokens; running it again "
                "would change them. Train with use_cache=False, or give this layer another fate."
            )
    warnings.warn(
        f"lowtide: recomputed layers do not fill {', '.join(named)}; set use_cache=False to say so yourself.",
        stacklevel=2,
    )
    kwargs = {**kwargs, **dict.fromkeys(named)}
    if "use_cache" in kwargs:
        kwargs["use_cache"] = False
    return args, kwargs


def _num_cached(module: nn.Module, cache: Any) -> int:
    index = getattr(module, "layer_idx", getattr(getattr(module, "self_attn", None), "layer_idx", 0))
    length = getattr(cache, "get_seq_length", None)
    return int(length(index or 0)) if callable(length) else len(cache)


class Rerun:
    """A module's dropped output, made again from the module's inputs when backward reads it.

    Owns handles on the inputs (which may themselves be kept, swapped or rerun), and the random and autocast state in
    which the module ran. The result is held from its first reader of a backward to its last.
    """

    __slots__ = ("autocast", "nbytes", "num_readers", "num_reads", "random", "region", "result", "task")

    def __init__(self, region: RegionRun, random: RandomState, output: torch.Tensor) -> None:
        self.region = region
        self.random = random
        self.autocast = autocast_state(output.device.type)
        self.nbytes = output.untyped_storage().nbytes()
        self.num_readers = 0
        self.num_reads = 0
        self.task: int | None = None
        self.result: torch.UntypedStorage | None = None

    def add_reader(self) -> None:
        """One more saved tensor views this output."""
        if self.num_readers == 0:
            self.region.claim_inputs()
        self.num_readers += 1

    def read(self) -> torch.UntypedStorage:
        """The output's storage, bit for bit what the forward produced."""
        task = torch._C._current_graph_task_id()
        if task != self.task:
            self.task, self.num_reads, self.result = task, 0, None
        storage = self.result if self.result is not None else self._run()
        self.num_reads += 1
        self.result = storage if self.num_reads < self.num_readers and task != -1 else None
        return storage

    def _run(self) -> torch.UntypedStorage:
        region = self.region
        with torch.no_grad(), self.random.restored(), self.autocast(), region.replayed():
            output = region.call.make(region.open_inputs())
        assert output.untyped_storage().nbytes() == self.nbytes, "a module's second run made an output of another size"
        return output.untyped_storage()


class RerunView:
    """A saved tensor that views a dropped module output."""

    __slots__ = ("rerun", "view")

    def __init__(self, rerun: Rerun, tensor: torch.Tensor) -> None:
        self.rerun = rerun
        self.view = View(tensor)

    def open(self) -> torch.Tensor:
        """The tensor, made again. Raises RuntimeError if it was modified in place since it was saved."""
        self.view.check()
        return self.view.over(self.rerun.read())
