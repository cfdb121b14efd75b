"""A host memory arena of exact size with a hard cap.

What: slabs of host memory, obtained from a `make_slab` callable as they are needed, and blocks cut out of them. A
block is one contiguous piece where one can be had, and several pieces where the cap leaves no other way; callers copy
in pieces anyway.
Why: pinning memory costs milliseconds per call, and torch's pinned allocator rounds every request up to a power of
two (a tensor of 1.1 GiB pins 2 GiB). Slabs *are* powers of two, so nothing is lost to that rounding, and they are
pinned once and reused for the whole run. Blocks are rounded to `BLOCK_BYTES` only: every piece starts and
ends on this boundary of its slab (pinned slabs start on a page), which is what direct file access asks for.
Cost: a search in a sorted list for each piece (`RangeAllocator` of core/ranges.py). Slabs start small and double up to
`slab_bytes`, so `bytes_reserved` is at most about twice the highest `bytes_in_use`, and never above the cap.

What is promised: `bytes_reserved <= cap_bytes` always; `allocate` refuses (`TierFull`) only when the free bytes and
the bytes that may still be reserved cannot hold the request together, or when the machine refuses a slab; a refused
request changes nothing but the slabs held in reserve; a free slab is whole again (one range).

When the machine refuses a slab (`RuntimeError` or `MemoryError` from `make_slab`), the cap is lowered to what is held,
with one warning, and the request ends in `TierFull`. There is deliberately no fall-back to pageable memory: a copy to
or from pageable memory blocks the calling thread, so every time in the plan would silently be wrong, and a machine
that cannot pin is nearly out of memory. The caller goes on to the next tier, which is slower but asynchronous.

Not covered: threads (the runtime's lock guards all calls); moving blocks (a block stays where it is until freed); the
cap of the *process* (two arenas know nothing of each other, unless they were given one cap).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import accumulate

import torch

from lowtide.core.ranges import RangeAllocator
from lowtide.engines.tiers.disk import BLOCK_BYTES, padded
from lowtide.engines.tiers.host_limit import Cap
from lowtide.errors import TierFull

SLAB_BYTES = 256 * 2**20
"""Largest slab. Pinning runs at some GB/s, so that one slab costs well under a second, once."""
FIRST_SLAB_BYTES = 2 * 2**20
"""Smallest slab to start with; later ones double. Only the last slabs before the cap may be smaller."""

_APART_BYTES = 2**48
"""Between the places of two slabs in the range allocator: no slab is as long, so that none is another's neighbour."""


Range = tuple[torch.Tensor, int]
"""A stretch of a slab, and its place in the range allocator, which has all slabs."""


class Block:
    """Bytes handed out by an arena. `ranges()` gives them as uint8 tensors in order, `nbytes` long together."""

    __slots__ = ("_taken", "nbytes")

    def __init__(self, nbytes: int, pieces: list[Range]) -> None:
        self.nbytes = nbytes
        self._taken: list[Range] | None = pieces

    def ranges(self) -> list[torch.Tensor]:
        """The block's memory. Valid until the block is freed; the caller keeps no slice beyond that."""
        assert self._taken is not None, "the block was freed"
        ends = accumulate(memory.numel() for memory, _ in self._taken)
        # The last one may be longer, up to the alignment.
        return [memory[: memory.numel() - max(0, end - self.nbytes)] for (memory, _), end in zip(self._taken, ends)]

    def part(self, start: int, nbytes: int) -> Block:
        """Some bytes of a block in one piece. Valid until the block is freed; it is not freed itself."""
        assert self._taken is not None, "the block was freed"
        assert len(self._taken) == 1
        assert start + nbytes <= self.nbytes
        return Block(nbytes, [(self._taken[0][0][start : start + nbytes], 0)])


class Arena:
    """See the module's text. `cap`: bytes, or what several arenas share. `make_slab(nbytes)` returns a one-dimensional
    uint8 tensor of `nbytes`."""

    def __init__(
        self,
        cap: int | Cap,
        make_slab: Callable[[int], torch.Tensor],
        *,
        slab_bytes: int = SLAB_BYTES,
    ) -> None:
        assert slab_bytes.bit_count() == 1 and slab_bytes >= BLOCK_BYTES, "slabs are powers of two"
        self._cap = Cap(cap) if isinstance(cap, int) else cap
        self.bytes_reserved = 0
        """Bytes of all slabs: what the process really holds."""
        self.bytes_in_use = 0
        """Bytes of all blocks, rounded to the alignment."""
        self._make_slab = make_slab
        self._slab_bytes = slab_bytes
        self._ranges = RangeAllocator()
        self._slabs: dict[int, torch.Tensor] = {}
        """By their place in the range allocator, a multiple of `_APART_BYTES`."""
        self._next_place = 0

    @property
    def cap_bytes(self) -> int:
        """Of all arenas that share the cap."""
        assert self._cap.most_bytes is not None
        return self._cap.most_bytes

    def _room_bytes(self) -> int:
        room_bytes = self._cap.room_bytes
        assert room_bytes is not None
        return room_bytes

    def allocate(self, nbytes: int, *, whole: bool = False) -> Block:
        """A block of `nbytes`, in one piece if possible. Raises `TierFull`; then no block has changed.

        `whole`: in one piece or not at all; for one that is larger than a slab, a slab of its own is made."""
        assert nbytes >= 0
        size = padded(nbytes)
        if size == 0:
            return Block(0, [])
        if self._ranges.largest_bytes < size:
            self._grow(size, whole)
        if self._ranges.largest_bytes >= size:
            return Block(nbytes, [self._take(size)])
        if whole or self._free_bytes() < size:
            in_one_piece = " in one piece" if whole else ""
            raise TierFull(
                f"host arena: {nbytes} bytes{in_one_piece} asked for, {self.bytes_in_use} of at most {self.cap_bytes} "
                "in use"
            )
        return Block(nbytes, self._gather(size))

    def free(self, block: Block) -> None:
        """Give a block back and merge its ranges with free neighbours. The slabs are kept for reuse; see `trim`."""
        pieces = block._taken
        assert pieces is not None, "the block was freed before"
        block._taken = None
        for memory, place in pieces:
            self.bytes_in_use -= memory.numel()
            self._ranges.free(place, memory.numel())

    def trim(self) -> int:
        """Let go of every slab that is entirely free. Returns how many bytes that were."""
        before_bytes = self.bytes_reserved
        for place, slab in list(self._slabs.items()):
            if self._ranges.drop(place, slab.nbytes):
                del self._slabs[place]
                self.bytes_reserved -= slab.nbytes
                self._cap.give(slab.nbytes)
        return before_bytes - self.bytes_reserved

    # -- slabs ---------------------------------------------------------------------------------------------------------

    def _grow(self, size: int, whole: bool) -> None:
        """Add one slab that holds `size`, or slabs until `size` bytes are free in pieces; never above the cap."""
        # Nothing is pinned for a request that cannot be met: reserving the rest of the cap would be of no use to it.
        if self._reachable_bytes() < size:
            return
        own_bytes = _power_of_two_above(size)
        if whole and own_bytes > self._slab_bytes and own_bytes <= self._room_bytes():
            self._add_slab(own_bytes)
            return
        slab_bytes = self._next_slab_bytes(size)
        if slab_bytes >= size:
            self._add_slab(slab_bytes)
            return
        if whole:
            return
        while self._free_bytes() < size:
            slab_bytes = self._next_slab_bytes(size - self._free_bytes())
            if slab_bytes == 0 or not self._add_slab(slab_bytes):
                return

    def _free_bytes(self) -> int:
        return self.bytes_reserved - self.bytes_in_use

    def _reachable_bytes(self) -> int:
        """Bytes that could be in use more than are now: free ones, and slabs that still fit under the cap."""
        room = self._room_bytes() // BLOCK_BYTES * BLOCK_BYTES
        return self._free_bytes() + room

    def _next_slab_bytes(self, missing: int) -> int:
        wanted = _power_of_two_above(max(missing, self.bytes_reserved, FIRST_SLAB_BYTES))
        room = self._room_bytes()
        fitting = 1 << (room.bit_length() - 1) if room > 0 else 0
        slab_bytes = min(wanted, fitting, self._slab_bytes)
        return slab_bytes if slab_bytes >= BLOCK_BYTES else 0

    def _add_slab(self, slab_bytes: int) -> bool:
        if not self._cap.take(slab_bytes):
            return False  # another arena was faster
        try:
            slab = self._make_slab(slab_bytes)
        except (RuntimeError, MemoryError) as error:
            self._cap.give(slab_bytes)
            warnings.warn(
                f"the machine refused {slab_bytes} bytes of host memory for swapping ({error}); "
                f"the host tier stays at {self.bytes_reserved} bytes instead of {self.cap_bytes}",
                RuntimeWarning,
                stacklevel=4,
            )
            self._cap.most_bytes = self._cap.taken_bytes
            return False
        assert slab.nbytes == slab_bytes
        self._slabs[self._next_place] = slab
        self._ranges.free(self._next_place, slab_bytes)
        self._next_place += _APART_BYTES
        self.bytes_reserved += slab_bytes
        return True

    # -- pieces --------------------------------------------------------------------------------------------------------

    def _take(self, size: int) -> Range:
        """A piece of `size`. The caller has checked that a free range holds it."""
        place = self._ranges.take(size)
        assert place is not None
        self.bytes_in_use += size
        start = place % _APART_BYTES
        return self._slabs[place - start][start : start + size], place

    def _gather(self, size: int) -> list[Range]:
        """Pieces that are `size` long together, largest first. The caller has checked that they exist."""
        pieces = []
        while size > 0:
            pieces.append(self._take(min(self._ranges.largest_bytes, size)))
            size -= pieces[-1][0].numel()
        return pieces


def _power_of_two_above(nbytes: int) -> int:
    """The smallest power of two that is at least `nbytes`."""
    return 1 << (nbytes - 1).bit_length()
