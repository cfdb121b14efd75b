"""Exact live bytes: what every tensor of a step holds, operator by operator.

What: `LiveBytes` is a dispatch mode around a whole user step. It counts each storage once, from the operator that made
it (or from `add`, for what no operator made) until its memory is freed, and takes a sample after each operator, while
the operator's inputs and outputs are both alive. Why: predicted and measured peaks must mean the same thing; this is
the measurement. On a Llama of 91 M parameters it equals a counting C++ allocator to the byte.

How a death is seen: a weak reference to the Python storage object. Torch keeps that object alive for as long as the
bytes are, by any holder, and clears weak references only when they are freed: at once, and never too early.
Addresses are reused by the next storage, so a death is settled before an address is looked up again.

Cost: about 6 us an operator. Not covered: memory inside an operator that is freed before it returns, and what an
allocator keeps beyond live tensors; parameters that FSDP2 gathers for the first time inside (they count from then on).
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from lowtide.tensors.compiled import CompiledMode
from lowtide.tensors.fsdp import gathered_storages
from lowtide.tensors.kinds import PLAIN_TYPES, tensors_of
from lowtide.tensors.optimizers import SWAP_ATTRIBUTE, bare
from lowtide.tensors.private import (
    is_traceable_wrapper_subclass,
    sparse_indices,
    sparse_values,
    storage_key,
    tree_leaves,
)


class LiveBytes(CompiledMode):
    """`with LiveBytes(model=model, optimizer=optimizer) as live: step()`, then `live.peak_bytes`.

    Only storages on `device_type` count; without it, the type of the model's first parameter ('cpu' without a model).
    """

    def __init__(
        self,
        *,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        device_type: str | None = None,
    ) -> None:
        super().__init__()
        first = next(model.parameters(), None) if model is not None else None
        self.device_type = device_type or ("cpu" if first is None else first.device.type)
        self.peak_bytes = 0
        self._now_bytes = 0
        self._live: dict[int, tuple[weakref.ref, int]] = {}
        # Filled by finalizers, which may run in any thread and at any point: they only append.
        self._dead: deque[weakref.KeyedRef] = deque()
        # Emptied and filled without an operator, so they are looked at with each one.
        self._resized = [] if model is None else gathered_storages(model)
        self.add_all(state_tensors(model, optimizer))

    @property
    def now_bytes(self) -> int:
        """Bytes alive now."""
        self._settle()
        return self._now_bytes

    def add(self, storage: torch.UntypedStorage) -> None:
        """Count a storage that no operator made (a parameter, the batch, a buffer that was fetched)."""
        self._settle()
        key, nbytes = storage_key(storage), storage.nbytes()
        known = self._live.get(key)
        if known is not None:
            if known[1] != nbytes:  # resized in place
                self._live[key] = (known[0], nbytes)
                self._now_bytes += nbytes - known[1]
        else:
            # Called by C code alone: a function of ours might be called where a compiler looks at functions.
            self._live[key] = (weakref.KeyedRef(storage, self._dead.append, key), nbytes)
            self._now_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self._now_bytes)

    def add_all(self, tensors: Iterable[torch.Tensor]) -> None:
        """`add` the storages of tensors on the device that counts."""
        for tensor in tensors:
            for part in plain_parts(tensor):
                if part.device.type == self.device_type:
                    self.add(part.untyped_storage())

    def _settle(self) -> None:
        while self._dead:
            ref = self._dead.popleft()
            if ref.key in self._live and self._live[ref.key][0] is ref:
                self._now_bytes -= self._live.pop(ref.key)[1]

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        for storage in self._resized:
            self.add(storage)
        out = func(*args, **(kwargs or {}))
        # Inputs too: what something else made is counted from the first time that it is seen.
        self.add_all(_tensors_in((args, kwargs, out)))
        return out


def _tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """Of what an operator takes or gives: tensors, and lists of them. Five times as fast as `tree_leaves`."""
    for leaf in tree.values() if isinstance(tree, dict) else tree:
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif isinstance(leaf, (tuple, list, dict)):
            yield from _tensors_in(leaf)


def plain_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors with a storage of their own that `tensor` is made of."""
    if tensor.layout in (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
        yield from _sparse_parts(tensor)
    elif is_traceable_wrapper_subclass(tensor):
        for part in (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]):
            if isinstance(part, torch.Tensor):  # a DTensor's mesh is an attribute of its own
                yield from plain_parts(part)
    elif tensor.layout is torch.strided:
        yield tensor


def _sparse_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    if tensor.layout is torch.sparse_coo:
        yield from (sparse_indices(tensor), sparse_values(tensor))
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    else:
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The tensors in an optimizer's state, without those that are elsewhere between steps (optimizer/swap.py)."""
    found = bare(optimizer)
    swap = getattr(found, SWAP_ATTRIBUTE, None)
    states = list(found.state.values()) if swap is None else swap().state_here()
    return [leaf for leaf in tree_leaves(states) if isinstance(leaf, torch.Tensor)]


def state_tensors(model: nn.Module | None, optimizer: torch.optim.Optimizer | None) -> list[torch.Tensor]:
    """Parameters, buffers, gradients, and what there is of an optimizer's state; some may stand there several times."""
    tensors = [] if model is None else tensors_of(model)
    tensors += [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
    return tensors if optimizer is None else [*tensors, *optimizer_tensors(optimizer)]


def unique_bytes(tensors: Iterable[torch.Tensor], device_type: str | None = None) -> int:
    """Bytes of the storages of `tensors`, each counted once; of one device type only if given."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        is_plain = type(tensor) in PLAIN_TYPES and tensor.layout is torch.strided  # runs in each forward, under a limit
        for part in (tensor,) if is_plain else plain_parts(tensor):
            if device_type is None or part.device.type == device_type:
                storage = part.untyped_storage()
                sizes[storage_key(storage)] = storage.nbytes()
    return sum(sizes.values())
