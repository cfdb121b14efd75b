"""Fingerprints: some bytes of what was dropped, compared with the same bytes of what was recomputed.

What: when a recomputed source drops its tensor, 64 words of 4 bytes spread over its storage are copied; when the recipe
has run, the same words of the result must be equal. A storage that is no larger is compared as a whole.
Why, although recipes/proof.py has compared every operator: some changes are in no argument of an operator. A weight
that is written through `.data` keeps its version; a setting of the process may choose another kernel; and a kernel of
another library may not give the same bytes twice. Fingerprints find what the proof cannot see.

When: on the host at once, before the operator that reads the tensor gets it. On an accelerator each comparison would
wait for the device, so all words of a backward pass are compared together at its end: `backward()` raises, and the
optimizer has not stepped.

Cost: 6 us when a tensor is dropped, and again when it is recomputed; on the host no byte that a budget counts. On an
accelerator 256 bytes for each (512 of the allocator's) until its graph is gone, a few hundred for all of them (both are
planned for: profiling/rounding.py), and the host waits once for the end of each backward pass with recipes. Not
covered: a difference in other words than these 64. Another number or weight changes almost every word, and
recipes/proof.py sees those anyway.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lowtide.tensors.private import AutoDispatchBelowAutograd, queue_callback

_NUM_WORDS = 64
_WORD = torch.int32
# Backward passes that may be open at once; more than anybody nests.
_MAX_OPEN = 64
_NUM_FLAGS = 512


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


class Fingerprints:
    """Takes and compares them for one plan. `on_mismatch` gets the site whose recipe must not be used again."""

    def __init__(self, on_mismatch: Callable[[str], None]) -> None:
        self._on_mismatch = on_mismatch
        self._picks: dict[int, tuple[Callable[[int], Any], itemgetter]] = {}
        """On the host, by number of words: how to read an array of them at an address, and which of them to take."""
        self._places: dict[tuple[int, torch.device], torch.Tensor] = {}
        """On an accelerator, by number of words: which of them. Not on the host: a budget would count the tensor."""
        self._waiting: dict[int, list[_Flags]] = {}
        """By backward pass: which of what it has recomputed differs."""

    def take(self, storage: torch.UntypedStorage) -> torch.Tensor | int:
        """At most 64 words of a storage. On an accelerator a tensor of them there, on the host their hash."""
        return self._hash(storage) if storage.device.type == "cpu" else self._words(storage)

    def _hash(self, storage: torch.UntypedStorage) -> int:
        """The hash of those words, read at their address: with torch it would be five operators of some microseconds
        each."""
        nbytes, address = storage.nbytes(), storage.data_ptr()
        num_words = nbytes // _WORD.itemsize
        if num_words <= _NUM_WORDS:
            return hash(ctypes.string_at(address, nbytes))
        pick = self._picks.get(num_words)
        if pick is None:
            words_at = (ctypes.c_int32 * num_words).from_address
            pick = self._picks[num_words] = words_at, itemgetter(*_places_of(num_words).tolist())
        words_at, chosen = pick
        return hash(chosen(words_at(address)))

    def _words(self, storage: torch.UntypedStorage) -> torch.Tensor:
        with AutoDispatchBelowAutograd():
            num_words = storage.nbytes() // _WORD.itemsize
            if num_words == 0:
                return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).to(_WORD)
            words = torch.empty(0, dtype=_WORD, device=storage.device).set_(storage, 0, (num_words,), (1,))
            if num_words <= _NUM_WORDS:
                return words.clone()
            key = num_words, storage.device
            if key not in self._places:
                self._places[key] = torch.from_numpy(_places_of(num_words)).to(storage.device)
            return words.index_select(0, self._places[key])

    def compare(self, name: str, then: torch.Tensor | int, storage: torch.UntypedStorage, task: int) -> None:
        """Compare `storage`, made in the backward pass `task` (-1: outside of any), with the fingerprint `then`.

        Raises RecipeMismatchError, at once or at the end of that backward pass.
        """
        now = self.take(storage)
        if isinstance(now, int) or isinstance(then, int):
            if now != then:
                self._fail(name)
        elif task != -1:
            if task not in self._waiting:
                while len(self._waiting) >= _MAX_OPEN:
                    # Backward passes that failed never settle.
                    del self._waiting[next(iter(self._waiting))]
                self._waiting[task] = []
                queue_callback(lambda: self.settle(task))
            blocks = self._waiting[task]
            if not blocks or not blocks[-1].takes(then):
                blocks.append(_Flags(then.device))
            blocks[-1].add(name, then, now)
        elif not torch.equal(then, now):
            self._fail(name)

    def settle(self, task: int) -> None:
        """The backward pass is over: raise RecipeMismatchError if anything that it made has other words."""
        names = [block.first() for block in self._waiting.pop(task, ())]
        name = next(filter(None, names), None)
        if name is not None:
            self._fail(name)

    def _fail(self, name: str) -> None:
        self._on_mismatch(name)
        raise RecipeMismatchError(name)


class _Flags:
    """On an accelerator: for each of some recomputed storages, whether its words differ. In one tensor, because each
    tensor takes a block of the allocator's, and because the host reads it once."""

    __slots__ = ("_differ", "_names")

    def __init__(self, device: torch.device) -> None:
        self._names: list[str] = []
        with AutoDispatchBelowAutograd():
            self._differ = torch.zeros(_NUM_FLAGS, dtype=torch.bool, device=device)

    def takes(self, words: torch.Tensor) -> bool:
        """Whether there is room for one more, on the device of `words`."""
        return len(self._names) < _NUM_FLAGS and self._differ.device == words.device

    def add(self, name: str, then: torch.Tensor, now: torch.Tensor) -> None:
        """Compare the words of the site `name`. Does not wait for the device."""
        place = len(self._names)
        self._names.append(name)
        with AutoDispatchBelowAutograd():
            torch.any(then != now, 0, keepdim=True, out=self._differ[place : place + 1])

    def first(self) -> str | None:
        """The first site whose words differ. Waits for the device."""
        differ = self._differ.cpu().tolist()
        return next((name for name, differs in zip(self._names, differ, strict=False) if differs), None)
