"""What the C library does with freed memory, and fetch buffers that it never sees.

What: `configure_malloc` fixes how glibc treats large blocks; `HeapTrimmer` returns free heap to the system when, and
only when, resident memory would pass its peak need; `BufferPool` recycles fetch buffers.
Why: on the host engine "device memory" is resident memory. glibc keeps freed heap (measured: 400-1500 MiB stayed
resident of 1000 MiB freed), so a swap alone would save little that the kernel can see. Fresh memory, on the other
hand, is slow: giving every large block a mapping of its own (a threshold of 256 KiB) costs a page fault per 4 KiB, 30 %
of a step. So large blocks are recycled in the heap, on huge pages, and the heap is trimmed at a measured limit.
Cost: `check` ~5 us per copy, past the limit 35 ms where the heap has 150,000 holes; a trim likewise, and refaulting.

Not covered: other allocators (jemalloc, mimalloc return memory by themselves), musl, Windows, macOS; blocks above
32 MiB, which glibc maps one by one whatever it is told; memory that grows in the process for other reasons (it only
makes a trim come early, at most once per `slack_bytes` of growth).
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import mmap
import os
import threading
import time
import weakref
from pathlib import Path

import torch

from lowtide.tensors.compiled import never_compiled

MMAP_THRESHOLD_BYTES = 32 << 20
"""Blocks at least this large get a mapping of their own. The most that glibc accepts: recycle all that can be."""
TRIM_THRESHOLD_BYTES = 64 << 20
"""Free bytes at the end of the heap past which glibc itself shrinks it."""
HEAP_SLACK_BYTES = 24 << 20
"""Resident free heap tolerated beyond the peak of live memory."""
MALLOC_VARIABLE = "LOWTIDE_MALLOC"
"""`0` in the environment leaves malloc alone, and what is swapped stays resident; otherwise a host engine that lowtide
makes fixes malloc's thresholds."""
_STATM = Path("/proc/self/statm")
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_MADV_HUGEPAGE = 14
_PAGE_BYTES = mmap.PAGESIZE
_HUGE_PAGE_BYTES = 2 << 20


def configure_malloc(mmap_threshold_bytes: int = MMAP_THRESHOLD_BYTES) -> bool:
    """Fix glibc's thresholds, for the whole process and for good (glibc cannot report the old ones, and never adapts
    them again). Whether they are fixed: not where the environment says `LOWTIDE_MALLOC=0`, without glibc, or where it
    refuses.

    Huge pages are the user's to ask for, in the shell: torch reads `THP_MEM_ALLOC_ENABLE=1` once, at its first
    allocation of 2 MiB. It is worth it: measured, a swapped step's CPU time was 1.05 of the plain step's with it and
    1.19 without.
    The default recycles large blocks and needs a `HeapTrimmer` (the host engine has one). 256 KiB instead makes every
    freed tensor leave at once: the lowest resident memory without a trimmer, at the price of a page fault per page.
    """
    library = None if os.environ.get(MALLOC_VARIABLE) == "0" else _glibc()
    if library is None or not library.mallopt(_M_MMAP_THRESHOLD, mmap_threshold_bytes):
        return False
    library.mallopt(_M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES)  # a fixed mmap threshold would leave it at 128 KiB
    return True


_MALLINFO2_FIELDS = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)


class _Mallinfo2(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_size_t) for name in _MALLINFO2_FIELDS)


def _glibc() -> ctypes.CDLL | None:
    library = ctypes.CDLL(None)
    return library if hasattr(library, "gnu_get_libc_version") else None


class HeapTrimmer:
    """Keeps resident memory within `slack_bytes` of the peak of live memory. Not thread-safe; one caller at a time.

    Free heap below that peak is left alone: it was needed once, so it does not raise the peak, and reusing it costs no
    page fault. A trim recalibrates what is resident but not malloc's (code, stacks, file pages).
    Does nothing where there is no glibc >= 2.33 or no /proc.
    """

    def __init__(self, slack_bytes: int = HEAP_SLACK_BYTES) -> None:
        self.slack_bytes = slack_bytes
        self.num_trims = 0
        self._peak_bytes = 0
        self._limit_bytes = 0
        library = _glibc()
        self._library = library if library is not None and hasattr(library, "mallinfo2") else None
        if self._library is None or not _STATM.exists():
            self._library = None
            return
        self._library.mallinfo2.restype = _Mallinfo2
        self._library.malloc_trim.argtypes = [ctypes.c_size_t]
        self._library.sbrk.restype = ctypes.c_void_p
        self._library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self._heap_start = self._heap_end = _heap_start()

    @property
    def works(self) -> bool:
        """Whether this C library and this system let it trim."""
        return self._library is not None

    def check(self, other_live_bytes: int) -> None:
        """Trim if resident memory has passed the limit. `other_live_bytes`: resident memory that malloc cannot see."""
        if self._library is None or _resident_bytes() <= self._limit_bytes:
            return  # asking malloc takes milliseconds where the heap has many holes
        live_bytes = self._live_bytes() + other_live_bytes
        if live_bytes > self._peak_bytes:
            self._limit_bytes += live_bytes - self._peak_bytes
            self._peak_bytes = live_bytes
        if _resident_bytes() > self._limit_bytes:
            self._trim(live_bytes)

    def restart(self, other_live_bytes: int) -> bool:
        """Give all free heap back, and begin the measurement of the peak anew. False where it does nothing."""
        if self._library is None:
            return False
        self._peak_bytes = live_bytes = self._live_bytes() + other_live_bytes
        self._trim(live_bytes)
        return True

    def _trim(self, live_bytes: int) -> None:
        assert self._library is not None
        self._library.malloc_trim(0)
        self._use_huge_pages()
        after_bytes = _resident_bytes()
        self.num_trims += 1
        not_malloc_bytes = after_bytes - live_bytes
        self._limit_bytes = max(not_malloc_bytes + self._peak_bytes, after_bytes) + self.slack_bytes

    def _live_bytes(self) -> int:
        assert self._library is not None
        info = self._library.mallinfo2()
        return int(info.uordblks + info.hblkhd)

    def _use_huge_pages(self) -> None:
        """Ask for huge pages in the part of the heap that is new since the last time."""
        assert self._library is not None
        end = self._library.sbrk(0) // _PAGE_BYTES * _PAGE_BYTES
        if self._heap_start and end > self._heap_end:
            self._library.madvise(self._heap_start, end - self._heap_start, _MADV_HUGEPAGE)
        self._heap_end = end


def page_fault_seconds_per_byte(nbytes: int = HEAP_SLACK_BYTES) -> float:
    """What the first touch of a byte costs that the system has just given: a page fault for each page, measured.

    The memory is written twice; the difference is what the faults took, in processor time of this thread, since others
    may be busy. Never less than 0. Less memory than a trim gives back is no measure: of 1 MiB the system has the pages
    at hand (0.9 us each instead of 2.7, seen)."""
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    place = (ctypes.c_ubyte * nbytes).from_buffer(mapping)
    seconds = []
    for _ in range(2):
        start = time.thread_time()
        ctypes.memset(place, 1, nbytes)
        seconds.append(time.thread_time() - start)
    del place
    mapping.close()
    return max(0.0, seconds[0] - seconds[1]) / nbytes


def _heap_start() -> int:
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith("[heap]"):
            return int(line.split("-", 1)[0], 16)
    return 0


def _resident_bytes() -> int:
    with _STATM.open("rb", buffering=0) as file:
        return int(file.read().split()[1]) * _PAGE_BYTES


class BufferPool:
    """Page-aligned storages over own mappings, recycled by size. Thread-safe, and safe to fall back on from finalizers.

    `idle_bytes`: most unused memory it keeps; past it the mapping unused for longest is unmapped.
    A storage keeps its mapping alive however it is shared (views, autograd, other threads): torch holds the exported
    memoryview until the last reference to the storage is gone, and only then does the mapping come back here.
    """

    def __init__(self, idle_bytes: int) -> None:
        self.limit_bytes = idle_bytes
        self.idle_bytes = 0
        """Unused bytes held now."""
        self.mapped_bytes = 0
        """Bytes of all mappings, handed out and idle."""
        self._idle: collections.OrderedDict[int, mmap.mmap] = collections.OrderedDict()
        """id -> mapping, longest unused first. Tens of entries at most, so a scan by size is cheap."""
        self._returned: collections.deque[mmap.mmap] = collections.deque()
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> torch.UntypedStorage:
        """Uninitialised memory of `nbytes`: a recycled mapping of that size if there is one, else a new one."""
        if nbytes == 0:
            return torch.UntypedStorage(0)
        size = -(-nbytes // _PAGE_BYTES) * _PAGE_BYTES
        mapping = self._reuse(size) or self._map(size)
        view = memoryview(mapping)[:nbytes]
        # torch keeps `view` (not a copy of its description) until the storage dies; then the mapping comes back.
        finalizer = weakref.finalize(view, self._give_back, mapping)
        finalizer.atexit = False
        return torch.frombuffer(view, dtype=torch.uint8).untyped_storage()

    def trim(self) -> None:
        """Unmap all idle memory."""
        self._drain()
        with self._lock:
            self._evict(0)

    def close(self) -> None:
        """Unmap everything idle, and from now on everything that comes back."""
        self.limit_bytes = 0
        self.trim()

    def _map(self, size: int) -> mmap.mmap:
        mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if size >= _HUGE_PAGE_BYTES:
            with contextlib.suppress(OSError):  # a kernel without huge pages
                mapping.madvise(_MADV_HUGEPAGE)
        with self._lock:
            self.mapped_bytes += size
        return mapping

    def _reuse(self, size: int) -> mmap.mmap | None:
        self._drain()
        with self._lock:
            for key in reversed(self._idle):
                if len(self._idle[key]) == size:
                    self.idle_bytes -= size
                    return self._idle.pop(key)
        return None

    @never_compiled
    def _give_back(self, mapping: mmap.mmap) -> None:
        """Runs in any thread at any time, even inside this pool's own locked sections: never blocks on the lock."""
        self._returned.append(mapping)
        self._drain()

    def _drain(self) -> None:
        while self._returned and self._lock.acquire(blocking=False):
            try:
                mapping = self._returned.popleft()
                self._idle[id(mapping)] = mapping
                self.idle_bytes += len(mapping)
                self._evict(self.limit_bytes)
            except IndexError:  # another thread took the last one
                return
            finally:
                self._lock.release()

    def _evict(self, keep_bytes: int) -> None:
        while self.idle_bytes > keep_bytes:
            _, mapping = self._idle.popitem(last=False)
            self.idle_bytes -= len(mapping)
            self.mapped_bytes -= len(mapping)
            with contextlib.suppress(BufferError):
                mapping.close()  # at the latest when the last reference goes, which is here
