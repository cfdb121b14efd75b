"""Which of the tensors that a region saves must be fingerprinted, and what it reads and writes outside of itself.

What: a `Flow` is a dispatch mode around one run of a region. It follows which storages were computed from which saved
tensors. A saved tensor from which no later one was computed is at the *frontier*: whatever the region read, if any
saved tensor differs, some tensor of the frontier does (up to what rounding absorbs). In a Llama layer: 2 of 38.
Beside that it sees each tensor from outside of the region that an operator reads, wherever Python keeps it, and copies
the bytes of those that one writes to, before they are written.

Not taken for a dependency, because a difference would be lost: operators that take shape and type only (`empty_like`),
integers and booleans made of floating-point numbers (`x > 0`, the places of a `topk`), other parts of the same storage.

Cost: some 20 us an operator, in a module's first run only. Not covered: parts of one storage that are written one by
one and saved one by one are taken for one another from the second write on.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from lowtide.tensors.compiled import CompiledMode
from lowtide.tensors.kinds import is_plain, plain_inside, storage_key_set, written_arguments
from lowtide.tensors.private import (
    OpOverload,
    base_of,
    disable_current_modes,
    schema_of,
    storage_key,
)
from lowtide.tensors.view import Shape, byte_view, may_overlap
from lowtide.tensors.wrappers import inside

_BLIND = frozenset({"zero_", "fill_", "uniform_", "normal_", "random_", "exponential_", "bernoulli_", "set_"})
"""Operators that read no value of what they write to; beside those named `..._like` and `new_...`."""


class Written(NamedTuple):
    """A storage from outside of the region that its run wrote to, and what was in it before."""

    tensor: ref[torch.Tensor]
    weak: StorageWeakRef
    before: torch.Tensor


class Flow(CompiledMode):
    """Sees the operators of one run of a region."""

    supports_higher_order_operators = True

    def __init__(self, inputs: Iterable[torch.Tensor], *, is_sharded: bool) -> None:
        """`inputs`: of the region. `is_sharded`: sharding exchanges what is outside, so that nothing of it is noted."""
        super().__init__()
        self._inputs = storage_key_set(plain_inside([*inputs]))
        self._is_sharded = is_sharded
        self._sources: dict[int, tuple[StorageWeakRef, int]] = {}
        """By storage made in the region: a bit for each saved tensor from which it was computed."""
        self._saved: dict[int, list[tuple[int, Shape]]] = {}
        """By storage: numbers of saved tensors, and which part of it each is."""
        self._opaque: set[int] = set()
        """Workspaces of recurrent kernels, which are partly unwritten memory."""
        self._reached = 0
        self._num_saved = 0
        self.own: list[int] = []
        """Numbers of the saved tensors that are no parameters and no inputs of the region."""
        self.read: dict[int, ref[torch.Tensor]] = {}
        """Tensors from outside that operators read, by storage."""
        self.written: dict[int, Written] = {}

    def save(self, tensor: torch.Tensor) -> None:
        """The region saves its next tensor."""
        number, local = self._num_saved, inside(tensor)
        self._num_saved += 1
        if not is_plain(local):
            self.own.append(number)
            return
        key = storage_key(local.untyped_storage())
        if key in self._inputs:
            return
        if not self._knows(key):
            self._note_outside(local, key, is_written=False)
        if key not in self._sources or key in self._opaque:
            return  # of a parameter the version is compared
        self._reached |= self._sources[key][1]
        shape, known = Shape.of(local), self._saved.setdefault(key, [])
        if all(shape != other for _, other in known):
            self.own.append(number)
        known.append((number, shape))

    @property
    def frontier(self) -> list[int]:
        """Numbers of the saved tensors from which no later one was computed."""
        return [number for number in self.own if not self._reached >> number & 1]

    def _knows(self, key: int) -> bool:
        found = self._sources.get(key)
        if found is None:
            return False
        if found[0].expired():
            del self._sources[key]
            self._saved.pop(key, None)
            self.read.pop(key, None)
            return False
        return True

    def _bits(self, tensor: torch.Tensor, key: int) -> int:
        """Of the saved tensors from which `tensor` was computed, or which it is itself."""
        bits = self._sources[key][1]
        if key in self._saved:
            shape = Shape.of(tensor)
            for number, other in self._saved[key]:
                if may_overlap(shape, other):
                    bits |= 1 << number
        return bits

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        given = kwargs or {}
        tensors = plain_inside((args, given))
        written = storage_key_set(plain_inside(written_arguments(func, args, given)))
        name = _name(func)
        is_blind = name in _BLIND or name.endswith("_like") or name.startswith("new_")
        bits, is_floating, keys = 0, False, set()
        for tensor in tensors:
            key = storage_key(tensor.untyped_storage())
            keys.add(key)
            if key not in self._inputs:
                is_new = not self._knows(key)
                if is_new or key in self.read:
                    self._note_outside(tensor, key, is_written=key in written or "batch_norm" in name)
                if self._knows(key) and not is_blind:
                    bits |= self._bits(tensor, key)
            is_floating = is_floating or tensor.is_floating_point() or tensor.is_complex()
        output = func(*args, **given)
        for tensor in (*plain_inside(output), *(tensor for tensor in tensors if written)):
            storage = tensor.untyped_storage()
            key = storage_key(storage)
            is_lossy = is_floating and not (tensor.is_floating_point() or tensor.is_complex())
            if key not in keys:
                self._sources[key] = (StorageWeakRef(storage), 0 if is_lossy else bits)
                self._saved.pop(key, None)
                self._opaque.discard(key)
                if "rnn" in name and tensor.dtype is torch.uint8:
                    self._opaque.add(key)
            elif key in written and self._knows(key):
                before = 0 if is_blind else self._sources[key][1]
                self._sources[key] = (self._sources[key][0], before | bits)
        return output

    def _note_outside(self, tensor: torch.Tensor, key: int, *, is_written: bool) -> None:
        is_parameter = isinstance(tensor, nn.Parameter) or isinstance(base_of(tensor), nn.Parameter)
        if key not in self.read:
            if not self._is_sharded:
                self.read[key] = ref(tensor)  # not its base, which Python may know only while somebody asks
            if not is_parameter:
                self._sources[key] = (StorageWeakRef(tensor.untyped_storage()), 0)
        if is_written and key not in self.written and not (is_parameter or self._is_sharded):
            storage = tensor.untyped_storage()
            with disable_current_modes():
                self.written[key] = Written(ref(tensor), StorageWeakRef(storage), byte_view(storage).clone())


def _name(func: Any) -> str:
    return schema_of(func).name.rpartition("::")[2] if isinstance(func, OpOverload) else ""
