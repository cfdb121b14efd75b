"""Ranges of addresses: of a file of swapped tensors, of a slab of host memory, of a memory snapshot."""

from __future__ import annotations

import bisect


class RangeAllocator:
    """Best-fit ranges: freed neighbours join. `take` has what was given to `free`; `allocate` moves the end of [0, end)
    up where that does not fit.

    Cost: O(log n) search plus O(n) list shifts, n = free ranges (tens in a training step, whose order is a stack's).
    """

    def __init__(self) -> None:
        self.end_bytes = 0
        self._by_size: list[tuple[int, int]] = []
        """(size, start) of each free range, sorted."""
        self._size_at: dict[int, int] = {}
        """start -> size of each free range."""
        self._start_at: dict[int, int] = {}
        """end -> start of each free range."""

    def growth_for(self, nbytes: int) -> int:
        """Bytes by which the end would move if `allocate(nbytes)` were called now."""
        return 0 if self.largest_bytes >= nbytes else nbytes - self._tail_bytes()

    @property
    def largest_bytes(self) -> int:
        """Of the free ranges; 0 where there is none."""
        return self._by_size[-1][0] if self._by_size else 0

    def take(self, nbytes: int) -> int | None:
        """Start of a range of exactly `nbytes` that was free, or None where no free one is as large."""
        assert nbytes > 0
        index = bisect.bisect_left(self._by_size, (nbytes, 0))
        if index == len(self._by_size):
            return None
        size, start = self._by_size[index]
        self._remove(start, size)
        if size > nbytes:
            self._insert(start + nbytes, size - nbytes)
        return start

    def allocate(self, nbytes: int) -> int:
        """Start of a range of exactly `nbytes` that overlaps no other range in use."""
        found = self.take(nbytes)
        if found is not None:
            return found
        tail = self._tail_bytes()
        start = self.end_bytes - tail
        if tail:
            self._remove(start, tail)
        self.end_bytes = start + nbytes
        return start

    def free(self, start: int, nbytes: int) -> None:
        """Give back a range, or give one that is new."""
        assert start >= 0
        assert start not in self._size_at
        before = self._start_at.get(start)
        if before is not None:
            self._remove(before, start - before)
            start, nbytes = before, nbytes + start - before
        after_bytes = self._size_at.get(start + nbytes)
        if after_bytes is not None:
            self._remove(start + nbytes, after_bytes)
            nbytes += after_bytes
        self._insert(start, nbytes)

    def drop(self, start: int, nbytes: int) -> bool:
        """Take back exactly this range, where all of it is free and nothing around it is."""
        if self._size_at.get(start) != nbytes:
            return False
        self._remove(start, nbytes)
        return True

    def _tail_bytes(self) -> int:
        start = self._start_at.get(self.end_bytes)
        return 0 if start is None else self.end_bytes - start

    def _insert(self, start: int, size: int) -> None:
        bisect.insort(self._by_size, (size, start))
        self._size_at[start] = size
        self._start_at[start + size] = start

    def _remove(self, start: int, size: int) -> None:
        del self._by_size[bisect.bisect_left(self._by_size, (size, start))]
        del self._size_at[start]
        del self._start_at[start + size]
