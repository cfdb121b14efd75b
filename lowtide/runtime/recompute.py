"""Recompute: drop what a region saves, keep its inputs, and run it again when backward asks.

Two regions, one mechanism (`torch.utils.checkpoint`, non-reentrant, never a copy of it):

- a *layer*: everything it saves is dropped; its inputs remain, positional and keyword alike;
- a single *module* without children (an activation, a norm): what it saves is dropped, and so is its **output**, which
  is what the next operator would have saved. Reading that output in backward runs the module once more.

Inputs are flattened and handed to checkpoint as positional tensors, because it saves only those through the
surrounding hooks: a keyword input would sit in a closure, out of reach of swap.

Around checkpoint this file adds what checkpoint leaves to chance:
- in-place writes to a tensor saved inside a region raise, as in plain autograd (checkpoint would recompute silently);
- module buffers (batch-norm statistics, counters) are put back after the second run, so that they move once a step;
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
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint, get_device_states, set_device_states

from lowtide.catalog.trace import is_plain
from lowtide.runtime.handle import View, modified_error, version_witness
from lowtide.runtime.stats import Counters, Ledger


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


class Region:
    """One run of a recomputed region: how many bytes it dropped, and whether they exist again."""

    __slots__ = ("_seen", "counters", "is_back", "ledger", "nbytes", "note")

    def __init__(self, counters: Counters, ledger: Ledger, note: Callable[[torch.Tensor], bool]) -> None:
        self.counters = counters
        self.ledger = ledger
        self.note: Callable[[torch.Tensor], bool] | None = note
        self.nbytes = 0
        self.is_back = False
        self._seen: dict[int, StorageWeakRef] = {}

    def count(self, tensor: torch.Tensor) -> None:
        """Add a storage that the region would have saved. Units: bytes."""
        storage = tensor.untyped_storage()
        seen = self._seen.get(storage._cdata)
        if seen is not None and not seen.expired():
            return
        self._seen[storage._cdata] = StorageWeakRef(storage)
        if self.note is not None and self.note(tensor):
            self.nbytes += storage.nbytes()

    def leave_out(self, tensors: tuple[torch.Tensor, ...]) -> None:
        """The region's own inputs: they remain, and are counted where they are kept or swapped."""
        for tensor in tensors:
            if is_plain(tensor):
                storage = tensor.untyped_storage()
                self._seen[storage._cdata] = StorageWeakRef(storage)

    def forward_done(self) -> None:
        self._seen = {}
        self.note = None
        self.counters.recomputed_bytes += self.nbytes

    def come_back(self) -> None:
        if not self.is_back:
            self.is_back = True
            self.ledger.add(self.nbytes)

    def __del__(self) -> None:
        if self.is_back:
            self.ledger.subtract(self.nbytes)


class _Dropped:
    """A tensor that a region saved and checkpoint dropped: its holder, and the witness of its version."""

    __slots__ = ("device", "dtype", "holder", "region", "size", "version", "witness")

    def __init__(self, holder: Any, tensor: torch.Tensor, region: Region) -> None:
        self.holder = holder
        self.region = region
        self.dtype, self.device, self.size = tensor.dtype, tensor.device, tensor.size()
        self.version = tensor._version
        self.witness = version_witness(tensor) if tensor.layout is torch.strided else tensor

    def check(self) -> None:
        if self.witness._version != self.version:
            raise modified_error(self.dtype, self.size, self.device, self.witness._version, self.version)


@contextlib.contextmanager
def _counting(region: Region) -> Iterator[None]:
    """Chain to checkpoint's own hooks: it still sees every tensor, in order; we count bytes and watch versions."""
    hooks = top_hooks()
    assert is_checkpoint_hook(hooks) and hooks is not None
    outer_pack, outer_unpack = hooks

    def pack(tensor: torch.Tensor) -> Any:
        if is_plain(tensor):
            region.count(tensor)
        return _Dropped(outer_pack(tensor), tensor, region)

    def unpack(dropped: _Dropped) -> torch.Tensor:
        dropped.check()
        tensor = outer_unpack(dropped.holder)
        dropped.region.come_back()
        return tensor

    with saved_tensors_hooks(pack, unpack):
        yield
    region.forward_done()


@contextlib.contextmanager
def _unchanged_buffers(module: torch.nn.Module) -> Iterator[None]:
    """Put a module's buffers back as they were: the second run of a region must leave no trace in them."""
    before = [(buffer, buffer.detach().clone()) for buffer in module.buffers() if buffer.numel()]
    try:
        yield
    finally:
        for buffer, value in before:
            # `.data`: the version counter must not move either, another graph may have saved this buffer.
            buffer.data.copy_(value)


def checkpointed(
    module: torch.nn.Module,
    forward: Callable,
    args: tuple,
    kwargs: dict,
    counters: Counters,
    ledger: Ledger,
    note: Callable[[torch.Tensor], bool],
) -> Any:
    """`forward(*args, **kwargs)` as a recomputed region.

    `note` is called once for each storage that the region would have saved, and says whether it is an activation.
    """
    args, kwargs = without_cache(module, args, kwargs)
    leaves, spec = tree_flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    constants = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    region = Region(counters, ledger, note)
    has_run = False

    def run(*tensors: torch.Tensor) -> Any:
        nonlocal has_run
        filled = list(constants)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        run_args, run_kwargs = tree_unflatten(filled, spec)
        if has_run:
            with _unchanged_buffers(module):
                return forward(*run_args, **run_kwargs)
        has_run = True
        region.leave_out(tensors)
        with _counting(region):
            return forward(*run_args, **run_kwargs)

    # Only `run` may hold the region's tokens: checkpoint keeps it for as long as the graph lives.
    return checkpoint(run, *(leaves[i] for i in places), use_reentrant=False)


_CACHE_NAMES = ("past_key_values", "past_key_value", "layer_past")


def without_cache(module: torch.nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
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


def _num_cached(module: torch.nn.Module, cache: Any) -> int:
    index = getattr(module, "layer_idx", getattr(getattr(module, "self_attn", None), "layer_idx", 0))
    length = getattr(cache, "get_seq_length", None)
    return int(length(index or 0)) if callable(length) else len(cache)


class Rerun:
    """A module's dropped output, made again from the module's inputs when backward reads it.

    Owns handles on the inputs (which may themselves be kept, swapped or rerun), and the random and autocast state in
    which the module ran. The result is held from its first reader of a backward to its last.
    """

    __slots__ = (
        "__weakref__",
        "autocast",
        "forward",
        "inputs",
        "ledger",
        "make",
        "module",
        "nbytes",
        "num_readers",
        "num_reads",
        "random",
        "result",
        "task",
        "version",
    )

    def __init__(
        self,
        module: torch.nn.Module,
        forward: Callable,
        inputs: list,
        make: Callable[[list[torch.Tensor]], tuple[tuple, dict]],
        state: RandomState,
        output: torch.Tensor,
        ledger: Ledger,
    ) -> None:
        self.module, self.forward, self.inputs, self.make = module, forward, inputs, make
        self.random = state
        self.autocast = autocast_state(output.device.type)
        self.nbytes = output.untyped_storage().nbytes()
        self.version = output._version
        self.ledger = ledger
        self.num_readers = 0
        self.num_reads = 0
        self.task: int | None = None
        self.result: torch.UntypedStorage | None = None

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
        tensors = [handle.open() for handle in self.inputs]
        args, kwargs = self.make(tensors)
        with torch.no_grad(), self.random.restored(), self.autocast(), _unchanged_buffers(self.module):
            output = self.forward(*args, **kwargs)
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
