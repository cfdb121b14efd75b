"""Fingerprints: some bytes of what was dropped, compared with the same bytes of what was recomputed.

What: of a tensor that a region saves, at least one element of every row is taken, each time of another column, as raw
bytes in their order; of a storage that a recipe drops, 64 words of 4 bytes spread over it. What comes back must have
the same. With `check: deep` every byte is taken of both.
Why, although versions and operators are compared too: some changes show nowhere else. A module reads state that nobody
looks at, a weight is written through `.data`, a setting chooses another kernel, a kernel does not repeat itself.

When: on the host at once, before any operator of backward gets what was made. On an accelerator each comparison would
wait for the device, so all fingerprints of a backward pass are compared together at its end: `backward()` raises, and
the optimizer has not stepped. Where an optimizer steps inside of backward, they are compared at once there too.

Cost: on the host 2 to 6 us a tensor, and no byte that a budget counts. On an accelerator some operators for each, 512
bytes of the allocator's for each recipe and for each region until its graph is gone, a few thousand for all of them,
and the host waits once for the end of each backward pass. Not covered: a difference in other bytes than those that are
taken; its share stands in docs/limits.md.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from lowtide.tensors.kinds import is_plain
from lowtide.tensors.private import (
    AutoDispatchBelowAutograd,
    DisableTorchDispatch,
    queue_callback,
    sparse_indices,
    sparse_values,
)
from lowtide.tensors.wrappers import arrived

_NUM_WORDS = 64
_WORD = torch.int32
# Backward passes that may be open at once; more than anybody nests.
_MAX_OPEN = 64
_NUM_FLAGS = 512
_NUM_WEIGHTS = 2**9
_MAX_LAYOUTS = 1024
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Print = torch.Tensor | int
"""On the host a hash, on an accelerator a tensor of one int64 there."""


class RecipeMismatchError(RuntimeError):
    """The recipe of `site` made other bytes than the forward pass did."""

    def __init__(self, site: str) -> None:
        self.site = site
        super().__init__(
            f"lowtide: '{site}' was dropped, and what its recipe made in its place has other bytes: something that no "
            "operator was given has changed since the forward pass (a weight written through .data, a switch of the "
            "process, a kernel that does not repeat itself). Gradients of this step are not right: set them to zero "
            "before you go on. The site is kept from now on; a micro-batch inside tide.step(...) is run again by "
            "itself."
        )


def _places_of(num_words: int) -> NDArray[np.int64]:
    """The places of the 64 words among `num_words`. At random: even distances would hit few columns of a matrix."""
    places = np.random.default_rng(num_words).integers(num_words, size=_NUM_WORDS)
    places[:2] = 0, num_words - 1
    return places


def sampled(
    shape: Sequence[int], stride: Sequence[int], *, all_of_it: bool = False
) -> tuple[int, int] | NDArray[np.int64]:
    """The elements of a tensor to take: how many, and their distance in memory; where it has gaps, each one's offset.

    The distance is the golden part of a row (the dimension with the smallest stride), so that every row is met, and the
    columns are spread evenly.
    """
    dims = sorted((step, size) for step, size in zip(stride, shape, strict=True) if size > 1 and step > 0)
    num = 1
    for _, size in dims:
        num *= size
    distance = 1 if all_of_it or not dims else max(1, int(dims[0][1] * 0.6180339887))
    count = -(-num // distance)
    expected = 1
    for step, size in dims:
        if step != expected:
            break
        expected *= size
    else:
        return count, distance
    places = np.arange(0, num, distance)
    offsets = np.zeros(count, np.int64)
    for step, size in dims:
        offsets += places % size * step
        places //= size
    return offsets


class Fingerprints:
    """Takes and compares them for one plan. `on_mismatch` gets the site whose recipe must not be used again."""

    def __init__(self, on_mismatch: Callable[[str], None], *, is_deep: bool = False) -> None:
        self._on_mismatch = on_mismatch
        self.is_deep = is_deep
        """Every byte of everything is taken."""
        self._picks: dict[int, tuple[Callable[[int], Any], itemgetter]] = {}
        """On the host, by number of words: how to read an array of them at an address, and which of them to take."""
        self._readers: dict[Any, Callable[[int], int]] = {}
        """On the host, by layout of a tensor: what gives the hash of those of its bytes that are taken."""
        self._places: dict[Any, torch.Tensor] = {}
        """On an accelerator, by number of words or layout: which of them. Not on the host: a budget would count it."""
        self._weights: dict[torch.device, torch.Tensor] = {}
        self._waiting: dict[int, list[_Flags]] = {}
        """By backward pass: which of what it has recomputed differs."""

    # -- of a storage, for recipes ---------------------------------------------------------------------------------

    def take(self, storage: torch.UntypedStorage) -> Print:
        """Of at most 64 words of a storage."""
        return self._hash(storage) if storage.device.type == "cpu" else self._words(storage)

    def _hash(self, storage: torch.UntypedStorage) -> int:
        """The hash of those words, read at their address: with torch it would be five operators of some microseconds
        each."""
        nbytes, address = storage.nbytes(), storage.data_ptr()
        num_words = nbytes // _WORD.itemsize
        if num_words <= _NUM_WORDS or self.is_deep:
            return hash(ctypes.string_at(address, nbytes))
        pick = self._picks.get(num_words)
        if pick is None:
            words_at = (ctypes.c_int32 * num_words).from_address
            pick = self._picks[num_words] = words_at, itemgetter(*_places_of(num_words).tolist())
        words_at, chosen = pick
        return hash(chosen(words_at(address)))

    def _words(self, storage: torch.UntypedStorage) -> torch.Tensor:
        with AutoDispatchBelowAutograd(), DisableTorchDispatch():
            num_words = storage.nbytes() // _WORD.itemsize
            if num_words == 0:
                return self._digest(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))
            words = torch.empty(0, dtype=_WORD, device=storage.device).set_(storage, 0, (num_words,), (1,))
            if num_words > _NUM_WORDS and not self.is_deep:
                key = num_words, storage.device
                if key not in self._places:
                    self._places[key] = torch.from_numpy(_places_of(num_words)).to(storage.device)
                words = words.index_select(0, self._places[key])
            return self._digest(words)

    def compare(self, name: str, then: Print, storage: torch.UntypedStorage, task: int) -> None:
        """Compare `storage`, made in the backward pass `task` (-1: outside of any), with the fingerprint `then`.

        Raises RecipeMismatchError, at once or at the end of that backward pass.
        """

        def refuse(_: int) -> NoReturn:
            self._on_mismatch(name)
            raise RecipeMismatchError(name)

        self.check([then], [self.take(storage)], task, refuse)

    # -- of a tensor, for regions ----------------------------------------------------------------------------------

    def of(self, tensor: torch.Tensor) -> Print:
        """Of at least one element of each row of a tensor, in their order."""
        local = arrived(tensor)
        if not is_plain(local):
            if local.layout is torch.sparse_coo:
                return hash((self.of(sparse_indices(local)), self.of(sparse_values(local))))
            return 0
        if not local.untyped_storage().nbytes():
            return 0  # of a Function that gives memory back by `resize_`, too
        if local.device.type == "cpu":
            layout = local.shape, local.stride(), local.dtype
            read = self._readers.get(layout)
            if read is None:
                if len(self._readers) >= _MAX_LAYOUTS:
                    self._readers.clear()
                read = self._readers[layout] = _reader_of(*layout, all_of_it=self.is_deep)
            return read(local.data_ptr())
        with AutoDispatchBelowAutograd(), DisableTorchDispatch():
            return self._digest(self._elements(local))

    def _elements(self, tensor: torch.Tensor) -> torch.Tensor:
        """The elements of a tensor on an accelerator that are taken, as integers."""
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor.resolve_conj())
        if not tensor.numel():
            return tensor.new_zeros(0, dtype=torch.int64)
        shape, stride = tensor.shape, tensor.stride()
        integers = torch.empty(0, dtype=_INTEGERS[tensor.element_size()], device=tensor.device)
        found = sampled(shape, stride, all_of_it=self.is_deep)
        if isinstance(found, tuple):
            num, step = found
            return integers.set_(tensor.untyped_storage(), tensor.storage_offset(), (num,), (step,))
        key = shape, stride, tensor.device
        if key not in self._places:
            self._places[key] = torch.from_numpy(found).to(tensor.device)
        span = int(found[-1]) + 1
        flat = integers.set_(tensor.untyped_storage(), tensor.storage_offset(), (span,), (1,))
        return flat.index_select(0, self._places[key])

    def _digest(self, words: torch.Tensor) -> torch.Tensor:
        """A sum of words, each by a weight of its place. Does not wait for the device."""
        words = words.to(torch.int64)
        weights = self._weights.get(words.device)
        if weights is None:
            numbers = np.random.default_rng(0).integers(-(2**62), 2**62, size=_NUM_WEIGHTS) | 1
            weights = self._weights[words.device] = torch.from_numpy(numbers).to(words.device)
        while (num := words.numel()) > _NUM_WEIGHTS:
            rows = num // _NUM_WEIGHTS
            head = words[: rows * _NUM_WEIGHTS].reshape(rows, _NUM_WEIGHTS) * weights
            words = torch.cat([head.sum(1), words[rows * _NUM_WEIGHTS :]])
        return (words * weights[:num]).sum(0, keepdim=True)

    @staticmethod
    def together(prints: dict[int, Print]) -> dict[int, Print]:
        """The same in one block of the accelerator's allocator."""
        tensors = [one for one in prints.values() if isinstance(one, torch.Tensor)]
        if not tensors or len({one.device for one in tensors}) != 1:
            return prints
        with AutoDispatchBelowAutograd(), DisableTorchDispatch():
            parts = iter(torch.cat(tensors).split(1))
        return {key: next(parts) if isinstance(one, torch.Tensor) else one for key, one in prints.items()}

    # -- comparing -------------------------------------------------------------------------------------------------

    def check(self, then: Sequence[Print], now: Sequence[Print], task: int, refuse: Callable[[int], NoReturn]) -> None:
        """Compare fingerprints of the same things; `refuse` raises an error about the first that differs, by number.

        On the host at once, on an accelerator at the end of the backward pass `task`; at once too if that is -1.
        """
        for index, (first, second) in enumerate(zip(then, now, strict=True)):
            if isinstance(first, int) or isinstance(second, int):
                if isinstance(first, torch.Tensor) or isinstance(second, torch.Tensor) or first != second:
                    refuse(index)
            elif task == -1:
                if not torch.equal(first, second):
                    refuse(index)
            else:
                self._wait(task, first, second, index, refuse)

    def _wait(
        self, task: int, then: torch.Tensor, now: torch.Tensor, index: int, refuse: Callable[[int], NoReturn]
    ) -> None:
        if task not in self._waiting:
            while len(self._waiting) >= _MAX_OPEN:
                # Backward passes that failed never settle.
                del self._waiting[next(iter(self._waiting))]
            self._waiting[task] = []
            queue_callback(lambda: self.settle(task))
        blocks = self._waiting[task]
        if not blocks or not blocks[-1].takes(then):
            blocks.append(_Flags(then.device))
        blocks[-1].add(then, now, index, refuse)

    def settle(self, task: int) -> None:
        """The backward pass is over: raise the error about the first of what it made that differs, if one does."""
        found = [block.first() for block in self._waiting.pop(task, ())]
        first = next(filter(None, found), None)
        if first is not None:
            index, refuse = first
            refuse(index)


def _reader_of(
    shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype, *, all_of_it: bool
) -> Callable[[int], int]:
    """What gives the hash of the elements that are taken of a tensor on the host, from its address. Reads memory as it
    lies: with torch it would be five operators."""
    if not shape.numel():
        return lambda address: 0
    word: Any = np.dtype(f"V{dtype.itemsize}")
    found = sampled(shape, stride, all_of_it=all_of_it)
    if isinstance(found, tuple):
        num, step = found
        steps = (step * dtype.itemsize,)
        memory: Any = ctypes.c_char * (((num - 1) * step + 1) * dtype.itemsize)
        return lambda address: hash(np.ndarray(num, word, memory.from_address(address), 0, steps).tobytes())
    span = int(found.max()) + 1
    memory = ctypes.c_char * (span * dtype.itemsize)
    return lambda address: hash(np.ndarray(span, word, memory.from_address(address))[found].tobytes())


class _Flags:
    """On an accelerator: for each of some fingerprints, whether it differs. In one tensor, because each tensor takes a
    block of the allocator's, and because the host reads it once."""

    def __init__(self, device: torch.device) -> None:
        self._refusals: list[tuple[int, Callable[[int], NoReturn]]] = []
        with AutoDispatchBelowAutograd(), DisableTorchDispatch():
            self._differ = torch.zeros(_NUM_FLAGS, dtype=torch.bool, device=device)

    def takes(self, then: torch.Tensor) -> bool:
        """Whether there is room for one more, on the device of `then`."""
        return len(self._refusals) < _NUM_FLAGS and self._differ.device == then.device

    def add(self, then: torch.Tensor, now: torch.Tensor, index: int, refuse: Callable[[int], NoReturn]) -> None:
        """Compare two fingerprints. Does not wait for the device."""
        place = len(self._refusals)
        self._refusals.append((index, refuse))
        with AutoDispatchBelowAutograd(), DisableTorchDispatch():
            torch.ne(then, now, out=self._differ[place : place + 1])

    def first(self) -> tuple[int, Callable[[int], NoReturn]] | None:
        """The first that differs. Waits for the device."""
        differ = self._differ.cpu().tolist()
        return next((refusal for refusal, differs in zip(self._refusals, differ, strict=False) if differs), None)
