"""Fetch buffers live exactly as long as their storages; freed memory leaves the process."""

from __future__ import annotations

import gc
import threading

import psutil
import pytest
import torch

from lowtide.engines.tiers import host_buffers as malloc
from lowtide.engines.tiers.host_buffers import BufferPool, HeapTrimmer, configure_malloc
from tests.support import processes

MIB = 1 << 20


def _tensor(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.float32).set_(storage)


def test_a_buffer_is_page_aligned_and_recycled():
    pool = BufferPool(8 * MIB)
    storage = pool.take(2 * MIB)
    address = storage.data_ptr()
    assert address % 4096 == 0
    assert (storage.nbytes(), pool.idle_bytes, pool.mapped_bytes) == (2 * MIB, 0, 2 * MIB)
    del storage
    assert pool.idle_bytes == 2 * MIB
    again = pool.take(2 * MIB - 100)  # as many pages
    assert (again.data_ptr(), again.nbytes(), pool.idle_bytes) == (address, 2 * MIB - 100, 0)


def test_idle_memory_is_bounded_and_the_longest_unused_goes_first():
    pool = BufferPool(4 * MIB)
    storages = [pool.take(size * MIB) for size in (1, 2, 3)]
    while storages:
        storages.pop(0)
    assert pool.idle_bytes == pool.mapped_bytes == 3 * MIB
    pool.trim()
    assert pool.idle_bytes == pool.mapped_bytes == 0


def test_nothing_is_kept_after_close():
    pool = BufferPool(8 * MIB)
    storage = pool.take(MIB)
    pool.close()
    tensor = _tensor(storage).fill_(3.0)
    assert tensor.sum().item() == 3.0 * tensor.numel()
    del storage, tensor
    assert pool.mapped_bytes == 0


def test_views_autograd_and_copies_keep_the_memory():
    pool = BufferPool(8 * MIB)
    x = _tensor(pool.take(MIB)).fill_(2.0).requires_grad_()
    y = (x * x).sum()
    view = x.detach()[100:200].view(10, 10).t()
    del x
    gc.collect()
    assert pool.idle_bytes == 0
    y.backward()
    del y
    gc.collect()
    assert pool.idle_bytes == 0
    assert bool((view == 2.0).all())
    del view
    gc.collect()
    assert pool.idle_bytes == MIB


def test_threads_take_and_drop_without_sharing_memory():
    pool = BufferPool(4 * MIB)
    wrong: list[int] = []

    def work(mark: int) -> None:
        for _ in range(300):
            tensor = _tensor(pool.take(256 * 1024)).fill_(mark)
            other = _tensor(pool.take(256 * 1024)).fill_(-mark)
            if not (bool((tensor == mark).all()) and bool((other == -mark).all())):
                wrong.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    pool.trim()
    assert pool.mapped_bytes == 0


def test_unmapped_buffers_leave_the_process():
    pool = BufferPool(0)
    process = psutil.Process()
    before = process.memory_info().rss
    storage = pool.take(256 * MIB)
    _tensor(storage).fill_(1.0)
    assert process.memory_info().rss - before > 200 * MIB
    del storage
    assert process.memory_info().rss - before < 32 * MIB


def test_empty_buffer():
    assert BufferPool(0).take(0).nbytes() == 0


def test_elsewhere_malloc_is_left_alone(monkeypatch):
    monkeypatch.setattr(malloc, "_glibc", lambda: None)
    assert not configure_malloc()
    HeapTrimmer().check(0)  # does nothing, and says nothing
    assert not HeapTrimmer().restart(0)


_BY_APPLY = """
import ctypes, os, torch
import lowtide
from lowtide.engines.tiers.host_buffers import HeapTrimmer, _glibc
before = dict(os.environ)
lowtide.apply(torch.nn.Linear(2, 2), {"swap": "all", "layers": [""]}, engine="host").remove()
assert dict(os.environ) == before
library = HeapTrimmer()._library
library.malloc.restype = ctypes.c_void_p
num_mapped = library.mallinfo2().hblks
library.malloc(30 << 20)
print(library.mallinfo2().hblks - num_mapped)
"""


@pytest.mark.parametrize(("said", "num_mapped"), [("1", 0), ("0", 1)])
def test_a_host_engine_sets_malloc_unless_the_environment_says_no(said, num_mapped, tmp_path):
    """Below the threshold a block of 30 MiB lies in the heap; malloc of itself maps it."""
    if malloc._glibc() is None:
        pytest.skip("not glibc")
    status, out, err = processes.program(_BY_APPLY, tmp_path, **{malloc.MALLOC_VARIABLE: said})
    assert status == 0, err
    assert int(out) == num_mapped


_FRAGMENTS = """
import sys, torch
from lowtide.engines.tiers.host_buffers import HeapTrimmer, configure_malloc
import psutil
process = psutil.Process()
torch.set_num_threads(1)
assert configure_malloc(int(sys.argv[1]))
trimmer = HeapTrimmer(16 << 20)
trimmer.check(0)
before = process.memory_info().rss
blocks = [torch.ones(512 * 1024) for _ in range(200)]  # 2 MiB each
pins = blocks[::20]  # keep one in twenty, so that the top of the heap stays in use
del blocks
for _ in range(3):
    trimmer.check(0)
    torch.ones(1 << 20)
trimmer.check(0)
print((process.memory_info().rss - before) >> 20, trimmer.num_trims)
"""


@pytest.mark.parametrize("threshold_bytes", [malloc.MMAP_THRESHOLD_BYTES, 256 << 10])
def test_freed_activations_leave_the_process(threshold_bytes, tmp_path):
    if malloc._glibc() is None:
        pytest.skip("not glibc")
    status, out, err = processes.program(_FRAGMENTS, tmp_path, str(threshold_bytes))
    assert status == 0, err
    resident_mib, _ = map(int, out.split())
    assert resident_mib < 20 + 16 + 16  # 10 blocks are still in use; slack; the rest of torch


_BEGINS_ANEW = """
import ctypes
from lowtide.engines.tiers.host_buffers import HeapTrimmer, _resident_bytes, configure_malloc
configure_malloc()
trimmer = HeapTrimmer(8 << 20)
library = trimmer._library
library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
trimmer.check(0)
blocks = [library.malloc(8 << 20) for _ in range(9)]
for block in blocks:
    ctypes.memset(block, 1, 8 << 20)
trimmer.check(0)
for block in blocks[:-1]:
    library.free(block)  # a hole below the last one
before, num_trims, peak = _resident_bytes(), trimmer.num_trims, trimmer._peak_bytes
trimmer.check(0)
assert trimmer.num_trims == num_trims  # the peak was higher: nothing is given back
assert trimmer.restart(0) and trimmer.num_trims == num_trims + 1
assert peak - trimmer._peak_bytes >= 60 << 20
print(before - _resident_bytes() >> 20)
"""


def test_it_forgets_a_peak_and_gives_back_what_was_kept_for_it(tmp_path):
    if malloc._glibc() is None:
        pytest.skip("not glibc")
    status, out, err = processes.program(_BEGINS_ANEW, tmp_path)
    assert status == 0, err
    assert int(out) >= 60
