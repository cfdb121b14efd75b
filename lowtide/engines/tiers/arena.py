"""A host memory arena of exact size with a hard cap.

What: slabs of host memory, obtained from a `make_slab` callable as they are needed, and blocks cut out of them. A
block is one contiguous piece where one can be had, and several pieces where the cap leaves no other way; callers copy
in pieces anyway.
Why: pinning memory costs milliseconds per call, and torch's pinned allocator rounds every request up to a power of
two (a tensor of 1.1 GiB pins 2 GiB). Slabs *are* powers of two, so nothing is lost to that rounding, and they are
pinned once and reused for the whole run. Blocks are rounded to `ALIGN_BYTES` only.
Cost: allocate and free are O(1) per piece: free ranges hang in segregated lists by size (a bit mask finds the first
list that is certain to fit), neighbours are linked, so that coalescing needs no search. Slabs start small and double
up to `slab_bytes`, so `bytes_reserved` is at most about twice the highest `bytes_in_use`, and never above the cap.

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

import torch

from lowtide.engines.tiers.host_limit import Cap
from lowtide.errors import TierFull

ALIGN_BYTES = 4096
"""Every piece starts and ends on this boundary of its slab (pinned slabs start on a page): what direct file access asks
for."""
SLAB_BYTES = 256 * 2**20
"""Largest slab. Pinning runs at some GB/s, so that one slab costs well under a second, once."""
FIRST_SLAB_BYTES = 2 * 2**20
"""Smallest slab to start with; later ones double. Only the last slabs before the cap may be smaller."""

_SUBCLASS_BITS = 3  # eight size classes per power of two: a chosen range is at most 1/8 larger than it need be
_CLASS_SCAN = 8  # ranges looked at in the class that may or may not fit


class _Range:
    """A stretch of a slab, free or in use, linked to its neighbours in address order."""

    __slots__ = ("after", "before", "free", "index", "size", "slab", "start")

    def __init__(self, slab: torch.Tensor, start: int, size: int) -> None:
        self.slab = slab
        self.start = start
        self.size = size
        self.free = False
        self.index = -1  # where it hangs in the list of its size class
        self.before: _Range | None = None
        self.after: _Range | None = None


class Block:
    """Bytes handed out by an arena. `pieces()` gives them as uint8 tensors in order, `nbytes` long together."""

    __slots__ = ("_ranges", "nbytes")

    def __init__(self, nbytes: int, ranges: list[_Range]) -> None:
        self.nbytes = nbytes
        self._ranges: list[_Range] | None = ranges

    def pieces(self) -> list[torch.Tensor]:
        """The block's memory. Valid until the block is freed; the caller keeps no slice beyond that."""
        assert self._ranges is not None, "the block was freed"
        left = self.nbytes
        tensors = []
        for part in self._ranges:
            length = min(part.size, left)
            tensors.append(part.slab[part.start : part.start + length])
            left -= length
        return tensors

    def part(self, start: int, nbytes: int) -> Block:
        """Some bytes of a block in one piece. Valid until the block is freed; it is not freed itself."""
        assert self._ranges is not None, "the block was freed"
        assert len(self._ranges) == 1
        assert start + nbytes <= self.nbytes
        return Block(nbytes, [_Range(self._ranges[0].slab, self._ranges[0].start + start, nbytes)])


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
        assert slab_bytes.bit_count() == 1 and slab_bytes >= ALIGN_BYTES, "slabs are powers of two"
        self._cap = Cap(cap) if isinstance(cap, int) else cap
        self.bytes_reserved = 0
        """Bytes of all slabs: what the process really holds."""
        self.bytes_in_use = 0
        """Bytes of all blocks, rounded to the alignment."""
        self._make_slab = make_slab
        self._slab_bytes = slab_bytes
        self._heads: dict[int, _Range] = {}  # first range of each slab, by the slab's address
        self._classes: dict[int, list[_Range]] = {}  # free ranges by size class, latest freed last
        self._mask = 0  # bit c is set while class c has a free range

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
        size = -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES
        if size == 0:
            return Block(0, [])
        found = self._find(size)
        if found is None:
            self._grow(size, whole)
            found = self._find(size)
        if found is not None:
            return Block(nbytes, [self._take(found, size)])
        if whole or self._free_bytes() < size:
            in_one_piece = " in one piece" if whole else ""
            raise TierFull(
                f"host arena: {nbytes} bytes{in_one_piece} asked for, {self.bytes_in_use} of at most {self.cap_bytes} "
                "in use"
            )
        return Block(nbytes, self._gather(size))

    def free(self, block: Block) -> None:
        """Give a block back and merge its ranges with free neighbours. The slabs are kept for reuse; see `trim`."""
        ranges = block._ranges
        assert ranges is not None, "the block was freed before"
        block._ranges = None
        for part in ranges:
            self.bytes_in_use -= part.size
            self._release(part)

    def trim(self) -> int:
        """Let go of every slab that is entirely free. Returns how many bytes that were."""
        before_bytes = self.bytes_reserved
        for address, head in list(self._heads.items()):
            if head.free and head.after is None:
                self._unlist(head)
                del self._heads[address]
                self.bytes_reserved -= head.size
                self._cap.give(head.size)
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
        room = self._room_bytes() // ALIGN_BYTES * ALIGN_BYTES
        return self._free_bytes() + room

    def _next_slab_bytes(self, missing: int) -> int:
        wanted = _power_of_two_above(max(missing, self.bytes_reserved, FIRST_SLAB_BYTES))
        room = self._room_bytes()
        fitting = 1 << (room.bit_length() - 1) if room > 0 else 0
        slab_bytes = min(wanted, fitting, self._slab_bytes)
        return slab_bytes if slab_bytes >= ALIGN_BYTES else 0

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
        whole = _Range(slab, 0, slab_bytes)
        self._heads[slab.data_ptr()] = whole
        self.bytes_reserved += slab_bytes
        self._list(whole)
        return True

    # -- free ranges ---------------------------------------------------------------------------------------------------

    def _find(self, size: int) -> _Range | None:
        """A free range of at least `size`: the best of a few in its own class, else any of the next larger class."""
        own = _size_class(size)
        if self._mask >> own & 1:
            best: _Range | None = None
            for candidate in self._classes[own][-_CLASS_SCAN:]:
                if candidate.size >= size and (best is None or candidate.size < best.size):
                    best = candidate
            if best is not None:
                return best
        larger = self._mask >> (own + 1)
        if larger == 0:
            return None
        lowest = own + (larger & -larger).bit_length()
        return self._classes[lowest][-1]

    def _gather(self, size: int) -> list[_Range]:
        """Several free ranges that hold `size` together, largest first. The caller has checked that they exist."""
        ranges = []
        while size > 0:
            largest = self._classes[self._mask.bit_length() - 1][-1]
            piece = min(largest.size, size)
            ranges.append(self._take(largest, piece))
            size -= piece
        return ranges

    def _take(self, part: _Range, size: int) -> _Range:
        """Turn the first `size` bytes of a free range into one in use; the rest stays free."""
        self._unlist(part)
        if part.size > size:
            rest = _Range(part.slab, part.start + size, part.size - size)
            rest.before, rest.after = part, part.after
            if part.after is not None:
                part.after.before = rest
            part.after, part.size = rest, size
            self._list(rest)
        self.bytes_in_use += size
        return part

    def _release(self, part: _Range) -> None:
        """Free a range and swallow its free neighbours."""
        following = part.after
        if following is not None and following.free:
            self._unlist(following)
            self._join(part, following)
        preceding = part.before
        if preceding is not None and preceding.free:
            self._unlist(preceding)
            self._join(preceding, part)
            part = preceding
        self._list(part)

    @staticmethod
    def _join(left: _Range, right: _Range) -> None:
        left.size += right.size
        left.after = right.after
        if right.after is not None:
            right.after.before = left

    def _list(self, part: _Range) -> None:
        part.free = True
        size_class = _size_class(part.size)
        members = self._classes.setdefault(size_class, [])
        part.index = len(members)
        members.append(part)
        self._mask |= 1 << size_class

    def _unlist(self, part: _Range) -> None:
        """Take a range out of its list in constant time: the last member moves into its place."""
        part.free = False
        size_class = _size_class(part.size)
        members = self._classes[size_class]
        last = members.pop()
        if last is not part:
            members[part.index] = last
            last.index = part.index
        if not members:
            self._mask &= ~(1 << size_class)


def _size_class(size: int) -> int:
    """Classes grow with the size, eight per power of two: every range in a higher class is larger than `size`."""
    exponent = size.bit_length() - 1
    shift = exponent - _SUBCLASS_BITS
    step = (size >> shift if shift >= 0 else size << -shift) & ((1 << _SUBCLASS_BITS) - 1)
    return exponent << _SUBCLASS_BITS | step


def _power_of_two_above(nbytes: int) -> int:
    """The smallest power of two that is at least `nbytes`."""
    return 1 << (nbytes - 1).bit_length()
