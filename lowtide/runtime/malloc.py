"""What the C library does with freed memory, and fetch buffers that it never sees.

What: `configure_malloc` makes large freed blocks return to the system at once; `BufferPool` hands out page-aligned
storages whose memory is recycled when torch lets go of them.
Why: on the host engine "device memory" is resident memory. glibc keeps freed heap (measured: 700-1500 MiB stayed
resident of 1000 MiB freed), so a swap would save nothing that the kernel can see. And fresh memory is dear: each page
is faulted in and zeroed (0.7-1.3 ms/MiB on virtual machines), as much as reading it from the disk.
Cost: with a fixed mmap threshold every large tensor of every step is fresh memory; see docs/LOG.md for what that costs
and what huge pages give back. The pool holds at most `idle_bytes` of unused memory.

Not covered: other allocators (jemalloc, mimalloc return memory by themselves), Windows, macOS.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import mmap
import threading
import weakref
from dataclasses import dataclass

import torch

MMAP_THRESHOLD_BYTES = 256 << 10
"""Blocks at least this large get a mapping of their own, which `free` gives back to the system."""
_M_MMAP_THRESHOLD = -3
_PAGE_BYTES = mmap.PAGESIZE
_HUGE_PAGE_BYTES = 2 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class MallocSetup:
    """What `configure_malloc` did."""

    changed: bool
    mmap_threshold_bytes: int | None
    """The threshold now in force, None where it was not touched."""
    note: str
    """One line for the report."""


def configure_malloc(mmap_threshold_bytes: int = MMAP_THRESHOLD_BYTES) -> MallocSetup:
    """Fix glibc's mmap threshold, for the whole process and for good (glibc cannot report the old value).

    Setting it also switches off glibc's own habit of raising it to 32 MiB after the first large `free`.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return MallocSetup(changed=False, mmap_threshold_bytes=None, note="not glibc: malloc left as it is")
    if not library.mallopt(_M_MMAP_THRESHOLD, mmap_threshold_bytes):
        return MallocSetup(changed=False, mmap_threshold_bytes=None, note="glibc refused the mmap threshold")
    note = f"glibc: blocks of {mmap_threshold_bytes >> 10} KiB and more return to the system when freed"
    return MallocSetup(changed=True, mmap_threshold_bytes=mmap_threshold_bytes, note=note)


class BufferPool:
    """Page-aligned storages over own mappings, recycled by size. Thread-safe, and safe to fall back on from finalizers.

    `idle_bytes`: most unused memory it keeps; past it the mapping unused for longest is unmapped.
    A storage keeps its mapping alive however it is shared (views, autograd, other threads): torch holds the exported
    memoryview until the last reference to the storage is gone, and only then does the mapping come back here.
    """

    def __init__(self, idle_bytes: int) -> None:
        self.limit_bytes = idle_bytes
        self._idle_bytes = 0
        self._idle: collections.OrderedDict[int, mmap.mmap] = collections.OrderedDict()
        """id -> mapping, longest unused first. Tens of entries at most, so a scan by size is cheap."""
        self._returned: collections.deque[mmap.mmap] = collections.deque()
        self._lock = threading.Lock()
        self._closed = False

    @property
    def idle_bytes(self) -> int:
        """Unused bytes held now."""
        return self._idle_bytes

    def take(self, nbytes: int) -> torch.UntypedStorage:
        """Uninitialised memory of `nbytes`: a recycled mapping of that size if there is one, else a new one."""
        if nbytes == 0:
            return torch.UntypedStorage(0)
        size = -(-nbytes // _PAGE_BYTES) * _PAGE_BYTES
        mapping = self._reuse(size) or _map(size)
        view = memoryview(mapping)[:nbytes]
        # torch keeps `view` (not a copy of its description) until the storage dies; then the mapping comes back.
        finalizer = weakref.finalize(view, self._give_back, mapping)
        finalizer.atexit = False
        return torch.frombuffer(view, dtype=torch.uint8).untyped_storage()

    def trim(self, keep_bytes: int = 0) -> None:
        """Unmap idle memory down to `keep_bytes`."""
        self._drain()
        with self._lock:
            self._evict(keep_bytes)

    def close(self) -> None:
        """Unmap everything idle, and from now on everything that comes back."""
        self._closed = True
        self.limit_bytes = 0
        self.trim()

    def _reuse(self, size: int) -> mmap.mmap | None:
        self._drain()
        with self._lock:
            for key in reversed(self._idle):
                if len(self._idle[key]) == size:
                    self._idle_bytes -= size
                    return self._idle.pop(key)
        return None

    def _give_back(self, mapping: mmap.mmap) -> None:
        """Runs in any thread at any time, even inside this pool's own locked sections: never blocks on the lock."""
        self._returned.append(mapping)
        self._drain()

    def _drain(self) -> None:
        while self._returned and self._lock.acquire(blocking=False):
            try:
                mapping = self._returned.popleft()
                self._idle[id(mapping)] = mapping
                self._idle_bytes += len(mapping)
                self._evict(self.limit_bytes)
            except IndexError:  # another thread took the last one
                return
            finally:
                self._lock.release()

    def _evict(self, keep_bytes: int) -> None:
        while self._idle_bytes > keep_bytes:
            _, mapping = self._idle.popitem(last=False)
            self._idle_bytes -= len(mapping)
            with contextlib.suppress(BufferError):
                mapping.close()  # at the latest when the last reference goes, which is here


def _map(size: int) -> mmap.mmap:
    mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= _HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping
