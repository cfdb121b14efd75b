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
from torch.utils.checkpoint import checkpoint, get_device_states, set_device_states

from lowtide.catalog.trace import is_plain
from lowtide.runtime.handle import Kept, Swapped, View, modified_error, version_witness
from lowtide.runtime.stats import Counters, Ledger

_HELD_BUFFER_BYTES = 2**20


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
        for index, tensor in enumerate(tensors):
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
        if is_plain(tensor):
            dropped.count(tensor)
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
    """A module's forward with its arguments taken apart, so that it can be made again from other tensors."""

    __slots__ = ("_constants", "_places", "_spec", "forward", "module", "tensors")

    def __init__(self, module: nn.Module, forward: Callable, args: tuple, kwargs: dict) -> None:
        self.module = module
        self.forward = forward
        leaves, self._spec = tree_flatten((args, kwargs))
        self._places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self.tensors: list[torch.Tensor] = [leaves[i] for i in self._places]
        self._constants = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

    def make(self, tensors: list[torch.Tensor]) -> Any:
        """Run the forward on `tensors` in place of the original ones."""
        leaves = list(self._constants)
        for place, tensor in zip(self._places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = tree_unflatten(leaves, self._spec)
        return self.forward(*args, **kwargs)


class BufferState:
    """A module's buffers as they were before a run, for the second run; only those that the run changed are held.

    A change is seen by identity, version and value. On an accelerator comparing values would wait for the device, so
    small buffers are simply held, and large ones trusted to their version.
    """

    __slots__ = ("_before",)

    def __init__(self, module: nn.Module) -> None:
        with _disable_current_modes():
            self._before = [
                (owner, name, buffer, buffer._version, buffer.detach().clone())
                for owner in module.modules()
                for name, buffer in owner._buffers.items()
                if buffer is not None and buffer.numel()
            ]

    def settle(self) -> None:
        """The first run is over: let go of the copies that are not needed."""
        with _disable_current_modes():
            self._before = [entry for entry in self._before if _has_changed(*entry)]

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """Inside, the buffers are what the first run found; what is written to them is forgotten."""
        current = [(owner, name, owner._buffers[name]) for owner, name, *_ in self._before]
        for owner, name, _, _, before in self._before:
            owner._buffers[name] = before.clone()
        try:
            yield
        finally:
            for owner, name, buffer in current:
                owner._buffers[name] = buffer


def _has_changed(owner: nn.Module, name: str, buffer: torch.Tensor, version: int, before: torch.Tensor) -> bool:
    if owner._buffers.get(name) is not buffer or buffer._version != version:
        return True
    if buffer.device.type == "cpu":
        return not torch.equal(buffer, before)
    return buffer.untyped_storage().nbytes() <= _HELD_BUFFER_BYTES


class ParameterState:
    """The tensors that played a module's parameters in a run: `functional_call` lends others for one call only."""

    __slots__ = ("_then",)

    def __init__(self, module: nn.Module) -> None:
        self._then = [
            (owner, name, parameter)
            for owner in module.modules()
            for name, parameter in owner._parameters.items()
            if parameter is not None
        ]

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """Inside, the parameters are the tensors of the first run."""
        lent = [entry for entry in self._then if entry[0]._parameters.get(entry[1]) is not entry[2]]
        # A sharded parameter whose full storage was given back is gathered again by its owner, not by us.
        lent = [entry for entry in lent if not is_plain(entry[2]) or entry[2].untyped_storage().nbytes()]
        current = [(owner, name, owner._parameters[name]) for owner, name, _ in lent]
        for owner, name, parameter in lent:
            owner._parameters[name] = parameter
        try:
            yield
        finally:
            for owner, name, now in current:
                owner._parameters[name] = now


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
        self.input_keys = {t.untyped_storage()._cdata for t in call.tensors if is_plain(t)}
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
        output = checkpoint(self._body, *markers, use_reentrant=False)
        self.buffers.settle()
        for i, (tensor, version) in enumerate(zip(tensors, versions, strict=True)):
            if tensor._version != version:
                self._replace_input(i, copies)
        self.call.tensors = []
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
            return self.call.make(self.call.tensors)

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
        for handle in self.inputs:
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


class RandomState:
    """Random generator states of the host and of the devices of some tensors, as they are now."""

    __slots__ = ("cpu", "device_type", "devices", "states")

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.cpu = torch.get_rng_state()
        on_device = [t for t in tensors if t.device.type not in ("cpu", "meta")]
        self.device_type = on_device[0].device.type if on_device else None
        self.devices, self.states = get_device_states(*on_device) if on_device else ([], [])

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Draw from these states inside, and leave the generators outside untouched."""
        with torch.random.fork_rng(devices=self.devices, device_type=self.device_type or "cuda"):
            torch.set_rng_state(self.cpu)
            if self.device_type is not None:
                set_device_states(self.devices, self.states, device_type=self.device_type)
            yield


def autocast_state(device_type: str) -> Callable[[], contextlib.AbstractContextManager]:
    """A factory of contexts that re-enter autocast as it is now on `device_type`."""
    if not torch.amp.is_autocast_available(device_type):
        return contextlib.nullcontext
    is_enabled = torch.is_autocast_enabled(device_type)
    dtype = torch.get_autocast_dtype(device_type)
    is_caching = torch.is_autocast_cache_enabled()
    return lambda: torch.autocast(device_type, dtype=dtype, enabled=is_enabled, cache_enabled=is_caching)
