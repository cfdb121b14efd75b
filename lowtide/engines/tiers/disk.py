"""The disk tier: one unlinked temporary file, cut into reusable ranges, read and written past the page cache.

What: `DiskTier` reserves ranges of a file (`allocate`, `free`), moves raw memory to and from them (`write`, `read`),
and shows them as memory (`view`).
Why: main memory that plays the device only gets emptier if the bytes leave the machine's memory altogether. A page
cache copy would still be resident (and counted by a cgroup), and measured about five times slower to write than
O_DIRECT on a virtual disk. The file has no name, so nothing stays behind however the process ends.
Cost: one system call per chunk (8 MiB). No copy in user space where memory is 4096-aligned; elsewhere one memcpy
through a reused bounce buffer per thread. Slots are padded to 4096 bytes instead of sending unaligned tails through a
second, buffered descriptor: mixing buffered and direct I/O on one file makes the kernel flush the cache on every
change-over, and the padding costs at most 4095 bytes per storage of 1 MiB or more.
The file grows in steps with `posix_fallocate`, so that a full disk is found in `allocate`, not in the middle of a
copy. It never shrinks before `close`: the next step needs the same ranges, and extents once written are the fastest.

Not covered: network file systems (they work, at their speed), disks whose sectors exceed 4096 bytes (falls back to
buffered I/O), keeping the page cache clean in that buffered fallback, encryption of what is written.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import errno
import mmap
import os
import tempfile
import threading
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path

from lowtide.core.ranges import RangeAllocator
from lowtide.engines.tiers.host_limit import Cap
from lowtide.errors import ConfigError, TierFull

BLOCK_BYTES = 4096
"""Alignment of memory, offsets and lengths that O_DIRECT accepts on every common disk."""
CHUNK_BYTES = 8 << 20
"""Largest single transfer. Above it the disk is no faster, below it system calls begin to show."""
GROW_BYTES = 64 << 20
"""Step by which the file grows: few allocations, and at most this much disk reserved beyond need."""
_DISK_DIRECTORY = "/var/tmp"  # noqa: S108 - the file is made with mkstemp
_MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs"})
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_CANNOT_PREALLOCATE = frozenset({errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS})


def padded(nbytes: int) -> int:
    """`nbytes` rounded up to whole blocks: what a slot really takes."""
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES


def file_system_type(path: str | os.PathLike[str], mountinfo: str = "/proc/self/mountinfo") -> str | None:
    """'ext4', 'tmpfs', ... of the mount that holds `path`, or None where the kernel does not say."""
    device = Path(path).stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path(mountinfo).read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        fields = line.split()
        if len(fields) > 4 and fields[2] == wanted and "-" in fields:
            return fields[fields.index("-") + 1]
    return None


def default_directory() -> str:
    """The system's temporary directory, or /var/tmp where that one is memory (swapping to memory frees none)."""
    directory = tempfile.gettempdir()
    if file_system_type(directory) in _MEMORY_FILE_SYSTEMS and Path(_DISK_DIRECTORY).is_dir():
        return _DISK_DIRECTORY
    return directory


class DiskTier:
    """Slots in one unlinked file. Thread-safe; `write` and `read` release the interpreter lock while they move bytes.

    `directory`: where the file lives; None = `default_directory()`. The choice is in `.directory`.
    `budget_bytes`: cap on slots in use; None = as much as the disk holds. `cap`: one that others share, instead of it.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        budget_bytes: int | None = None,
        direct: bool = True,
        *,
        cap: Cap | None = None,
    ) -> None:
        self.directory = os.fspath(directory) if directory is not None else default_directory()
        self.cap = cap if cap is not None else Cap(budget_bytes)
        self._descriptor, self.direct = _open_unlinked(self.directory, direct)
        self._finalizer = weakref.finalize(self, os.close, self._descriptor)
        self._lock = threading.Lock()
        self._ranges = RangeAllocator()
        self._reserved_bytes = 0
        self._used_bytes = 0
        self._returned: collections.deque[tuple[int, int]] = collections.deque()
        self._bounce = threading.local()
        if file_system_type(self.directory) in _MEMORY_FILE_SYSTEMS:
            warnings.warn(
                f"swap directory {self.directory!r} is main memory ({file_system_type(self.directory)}): swapping "
                "there frees none; name a directory on a disk",
                RuntimeWarning,
                stacklevel=2,
            )

    @property
    def used_bytes(self) -> int:
        """Bytes of slots in use, padding included."""
        self._drain()
        return self._used_bytes

    def allocate(self, nbytes: int) -> int:
        """File offset of a new slot. `TierFull` when the budget or the disk has no room for it."""
        size = padded(nbytes)
        self._drain()
        if not size:
            return 0  # takes no place in the file
        with self._lock:
            if not self.cap.take(size):
                raise TierFull(
                    f"disk budget: {self.cap.taken_bytes} of {self.cap.most_bytes} bytes in use, {size} more asked"
                )
            growth = self._ranges.growth_for(size)
            try:
                if growth:
                    self._reserve(self._ranges.end_bytes + growth)
            except BaseException:
                self.cap.give(size)
                raise
            self._used_bytes += size
            return self._ranges.allocate(size)

    def view(self, offset: int, nbytes: int, *, ahead: bool = False) -> memoryview:
        """A slot's bytes as writable memory, valid until the slot is freed, even after `close`.

        `ahead`: all of it will be needed soon, so that the kernel reads it meanwhile.

        It is the file mapped: a page takes memory once it is read, and the kernel may take that back. `write` and
        `read` see what was written to it and the other way round, once they are done."""
        assert nbytes > 0
        with self._lock:
            if os.fstat(self._descriptor).st_size < offset + nbytes:  # the file system cannot reserve
                os.ftruncate(self._descriptor, offset + padded(nbytes))
        start = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        mapping = mmap.mmap(self._descriptor, offset + nbytes - start, offset=start)
        if ahead and hasattr(mmap, "MADV_WILLNEED"):
            mapping.madvise(mmap.MADV_WILLNEED)
        return memoryview(mapping)[offset - start :]

    def free(self, offset: int, nbytes: int) -> None:
        """Give a slot back. Never blocks, so that a finalizer may call it (even one that interrupts `allocate`)."""
        if nbytes:
            self._returned.append((offset, padded(nbytes)))
        self._drain()

    def _drain(self) -> None:
        while self._returned and self._lock.acquire(blocking=False):
            try:
                offset, size = self._returned.popleft()
                self._used_bytes -= size
                self.cap.give(size)
                assert offset + size <= self._ranges.end_bytes
                self._ranges.free(offset, size)
            except IndexError:  # another thread took the last one
                return
            finally:
                self._lock.release()

    def write(self, offset: int, address: int, nbytes: int) -> None:
        """Memory at `address` -> the slot at `offset`. Raises OSError; the slot is then undefined."""
        for done, size, staged in self._transfers(address, nbytes):
            if staged is None:
                _write_all(self._descriptor, _view(address + done, size), offset + done)
                continue
            staged[:size] = _view(address + done, size)
            _write_all(self._descriptor, staged[: padded(size)] if self.direct else staged[:size], offset + done)

    def read(self, offset: int, address: int, nbytes: int) -> None:
        """The slot at `offset` -> memory at `address`. Raises OSError; the memory is then undefined."""
        for done, size, staged in self._transfers(address, nbytes):
            if staged is None:
                _read_all(self._descriptor, _view(address + done, size), offset + done, size)
                continue
            _read_all(self._descriptor, staged[: padded(size)] if self.direct else staged[:size], offset + done, size)
            _view(address + done, size)[:] = staged[:size]

    def close(self) -> None:
        """Close the file, which gives its disk space back. Idempotent. No copy may be running."""
        self._finalizer()

    def _transfers(self, address: int, nbytes: int) -> Iterator[tuple[int, int, memoryview | None]]:
        """(position, size, bounce view or None) for each chunk: whole blocks of aligned memory need no bounce."""
        aligned = not self.direct or address % BLOCK_BYTES == 0
        whole = nbytes if not self.direct else nbytes - nbytes % BLOCK_BYTES
        done = 0
        while aligned and done < whole:
            size = min(CHUNK_BYTES, whole - done)
            yield done, size, None
            done += size
        while done < nbytes:
            size = min(CHUNK_BYTES, nbytes - done)
            yield done, size, self._bounce_view()
            done += size

    def _bounce_view(self) -> memoryview:
        """This thread's bounce buffer: page-aligned, faulted in once, gone with its thread."""
        view: memoryview | None = getattr(self._bounce, "view", None)
        if view is None:
            view = memoryview(mmap.mmap(-1, CHUNK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
            self._bounce.view = view
        return view

    def _reserve(self, end_bytes: int) -> None:
        """Make the file at least `end_bytes` long on the disk, in steps while there is room for steps."""
        if end_bytes <= self._reserved_bytes:
            return
        stepped = -(-end_bytes // GROW_BYTES) * GROW_BYTES
        for target in (stepped, end_bytes):
            with contextlib.suppress(TierFull):
                self._extend(target)
                self._reserved_bytes = target
                return
        raise TierFull(f"disk: no room for {end_bytes - self._reserved_bytes} more bytes in {self.directory!r}")

    def _extend(self, end_bytes: int) -> None:
        more = end_bytes - self._reserved_bytes
        status = os.fstatvfs(self._descriptor)
        if more > status.f_bavail * status.f_frsize:
            raise TierFull
        try:
            os.posix_fallocate(self._descriptor, self._reserved_bytes, more)
        except OSError as error:
            if error.errno in _NO_SPACE:
                raise TierFull from error
            if error.errno not in _CANNOT_PREALLOCATE:
                raise


def _open_unlinked(directory: str, direct: bool) -> tuple[int, bool]:
    """(descriptor, whether it is O_DIRECT) of a new file without a name."""
    try:
        descriptor, path = tempfile.mkstemp(prefix="lowtide-", suffix=".swap", dir=directory)
    except OSError as error:
        raise ConfigError(
            f"swap directory {directory!r}: cannot write there ({error.strerror}); "
            "create it, or name another directory on a local disk"
        ) from error
    try:
        unbuffered = _open_direct(path) if direct else None
    finally:
        Path(path).unlink()
    if unbuffered is None:
        return descriptor, False
    os.close(descriptor)
    return unbuffered, True


def _open_direct(path: str) -> int | None:
    """An O_DIRECT descriptor that has proved itself with one block, or None where the file system refuses."""
    flag = getattr(os, "O_DIRECT", None)
    if flag is None:
        return None
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | flag)
    except OSError:
        return None
    block = mmap.mmap(-1, BLOCK_BYTES)
    try:
        os.pwrite(descriptor, block, 0)
        os.preadv(descriptor, [block], 0)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _view(address: int, nbytes: int) -> memoryview:
    """Raw memory as writable bytes. The caller keeps the owner of the memory alive."""
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")


def _write_all(descriptor: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        count = os.pwrite(descriptor, view[done:], offset + done)
        if count == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done += count


def _read_all(descriptor: int, view: memoryview, offset: int, needed_bytes: int) -> None:
    """Fill `view`; the end of the file may come after `needed_bytes` (padding that was never written)."""
    done = 0
    while done < needed_bytes:
        count = os.preadv(descriptor, [view[done:]], offset + done)
        if count == 0:
            raise OSError(errno.EIO, "the swap file ends before the slot does")
        done += count
