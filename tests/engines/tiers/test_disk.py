"""The disk tier: ranges never overlap and all come back, bytes survive, a full disk is an error and not a crash."""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
import random
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.core.ranges import RangeAllocator
from lowtide.engines.tiers import disk as disk_module
from lowtide.engines.tiers.disk import BLOCK_BYTES, CHUNK_BYTES, DiskTier, default_directory, padded
from lowtide.errors import ConfigError, TierFull
from tests.support import processes


def _memory(nbytes: int, shift: int = 0) -> tuple[mmap.mmap, int]:
    """A page-aligned mapping and an address `shift` bytes into it."""
    mapping = mmap.mmap(-1, nbytes + BLOCK_BYTES)
    return mapping, ctypes.addressof(ctypes.c_char.from_buffer(mapping)) + shift


def _num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@settings(max_examples=200)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40), st.integers(0, 1000)), max_size=120))
def test_ranges_never_overlap_and_all_come_back(script):
    ranges = RangeAllocator()
    held: list[tuple[int, int]] = []
    for is_allocation, size, pick in script:
        if is_allocation or not held:
            growth = ranges.growth_for(size)
            end_before = ranges.end_bytes
            start = ranges.allocate(size)
            assert ranges.end_bytes == end_before + growth
            assert all(start + size <= other or other + length <= start for other, length in held)
            held.append((start, size))
        else:
            ranges.free(*held.pop(pick % len(held)))
        assert sum(ranges._size_at.values()) == ranges.end_bytes - sum(length for _, length in held)
    for item in held:
        ranges.free(*item)
    assert ranges.growth_for(max(ranges.end_bytes, 1)) == (0 if ranges.end_bytes else 1)  # one range again


def test_a_step_that_repeats_does_not_grow_the_file():
    ranges = RangeAllocator()
    sizes = [random.Random(0).randrange(1, 100) for _ in range(200)]
    ends = []
    for _ in range(5):
        starts = [ranges.allocate(size) for size in sizes]
        for start, size in reversed(list(zip(starts, sizes, strict=True))):
            ranges.free(start, size)
        ends.append(ranges.end_bytes)
    assert len(set(ends)) == 1


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("shift", [0, 64])
@pytest.mark.parametrize("nbytes", [1, BLOCK_BYTES, 3 * BLOCK_BYTES + 17, CHUNK_BYTES + BLOCK_BYTES + 1])
def test_bytes_survive_whatever_their_alignment(tmp_path, direct, shift, nbytes):
    tier = DiskTier(tmp_path, direct=direct)
    data = random.Random(nbytes).randbytes(nbytes)
    _source_owner, source = _memory(nbytes, shift)
    _target_owner, target = _memory(nbytes + 8, shift)
    ctypes.memmove(source, data, nbytes)
    ctypes.memset(target, 0xAB, nbytes + 8)
    offsets = [tier.allocate(nbytes) for _ in range(3)]
    tier.write(offsets[1], source, nbytes)
    tier.read(offsets[1], target, nbytes)
    assert ctypes.string_at(target, nbytes) == data
    assert ctypes.string_at(target + nbytes, 8) == b"\xab" * 8  # not a byte beyond
    tier.close()


def test_neighbours_are_left_alone(tmp_path):
    tier = DiskTier(tmp_path)
    nbytes = BLOCK_BYTES + 5
    owners = [_memory(nbytes) for _ in range(4)]
    offsets = [tier.allocate(nbytes) for _ in owners]
    for index, (_, address) in enumerate(owners):
        ctypes.memset(address, index + 1, nbytes)
        tier.write(offsets[index], address, nbytes)
    _out_owner, out = _memory(nbytes)
    for index, offset in enumerate(offsets):
        tier.read(offset, out, nbytes)
        assert ctypes.string_at(out, nbytes) == bytes([index + 1]) * nbytes
    tier.close()


def test_the_budget_is_kept_by_sizes_that_are_no_multiple_of_a_block(tmp_path):
    """One byte less than three blocks holds one slot of a block, and then none of a block and a byte."""
    tier = DiskTier(tmp_path, budget_bytes=3 * BLOCK_BYTES - 1)
    tier.allocate(1)
    with pytest.raises(TierFull, match="disk budget: 4096 of 12287 bytes in use, 8192 more asked"):
        tier.allocate(BLOCK_BYTES + 1)
    assert tier.used_bytes == BLOCK_BYTES
    tier.allocate(BLOCK_BYTES)
    tier.close()


def test_the_budget_counts_padded_bytes(tmp_path):
    tier = DiskTier(tmp_path, budget_bytes=3 * BLOCK_BYTES)
    first = tier.allocate(1)
    tier.allocate(BLOCK_BYTES + 1)
    assert tier.used_bytes == 3 * BLOCK_BYTES
    with pytest.raises(TierFull, match="disk budget: 12288 of 12288 bytes in use, 4096 more asked"):
        tier.allocate(1)
    tier.free(first, 1)
    assert tier.used_bytes == 2 * BLOCK_BYTES
    assert tier.allocate(7) == first
    tier.close()


def test_the_file_has_no_name_and_its_descriptor_is_closed(tmp_path):
    before = _num_descriptors()
    tier = DiskTier(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert _num_descriptors() == before + 1
    tier.close()
    tier.close()
    assert _num_descriptors() == before
    forgotten = DiskTier(tmp_path)
    del forgotten
    gc.collect()
    assert _num_descriptors() == before


def test_a_directory_that_cannot_be_written_is_the_users_mistake(tmp_path):
    missing = tmp_path / "missing"
    with pytest.raises(ConfigError) as caught:
        DiskTier(missing)
    assert str(caught.value) == (
        f"swap directory '{missing}': cannot write there (No such file or directory); "
        "create it, or name another directory on a local disk"
    )


def test_memory_is_no_place_to_swap_to(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_module, "file_system_type", lambda _path: "tmpfs")
    with pytest.warns(RuntimeWarning, match="is main memory \\(tmpfs\\): swapping there frees none"):
        DiskTier(tmp_path).close()
    assert default_directory() == "/var/tmp"


def test_the_default_is_the_systems_temporary_directory(monkeypatch):
    monkeypatch.setattr(disk_module, "file_system_type", lambda _path: "ext4")
    assert default_directory() == tempfile.gettempdir()


def test_the_kernel_names_the_file_system():
    assert disk_module.file_system_type("/proc") == "proc"
    assert disk_module.file_system_type("/proc", mountinfo="/nowhere") is None


def test_a_full_disk_is_found_at_allocation(tmp_path, monkeypatch):
    def full(*_args):
        raise OSError(errno.ENOSPC, "No space left on device")

    tier = DiskTier(tmp_path)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(TierFull, match="disk: no room for 4096 more bytes in"):
        tier.allocate(100)
    assert tier.used_bytes == 0
    monkeypatch.undo()
    assert tier.allocate(100) == 0
    tier.close()


def test_more_than_the_disk_has_free(tmp_path):
    tier = DiskTier(tmp_path)
    with pytest.raises(TierFull):
        tier.allocate(1 << 60)
    tier.close()


_FILE_SIZE_LIMIT = """
import ctypes, errno, mmap, resource, sys
from lowtide.engines.tiers.disk import DiskTier
from lowtide.errors import TierFull
for direct in (True, False):
    tier = DiskTier(sys.argv[1], direct=direct)
    size = 4 << 20
    memory = mmap.mmap(-1, size)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    resource.setrlimit(resource.RLIMIT_FSIZE, (80 << 20, resource.RLIM_INFINITY))
    offsets = []
    try:
        while len(offsets) < 1000:
            offsets.append(tier.allocate(size))
    except TierFull:
        pass
    assert len(offsets) == 20, len(offsets)  # past a whole growth step, up to the last slot that fits
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, resource.RLIM_INFINITY))
    try:
        tier.write(offsets[0], address, size)
    except OSError as error:
        print(errno.errorcode[error.errno])
"""


def test_a_limit_of_the_system_fails_the_allocation_or_the_write(tmp_path):
    _, out, err = processes.program(_FILE_SIZE_LIMIT, tmp_path, str(tmp_path))
    assert out.strip() == "EFBIG\nEFBIG", err


def test_padding():
    assert [padded(n) for n in (1, 4096, 4097)] == [4096, 4096, 8192]


@pytest.mark.parametrize("direct", [True, False])
def test_a_view_and_the_file_show_the_same_bytes(tmp_path, direct):
    tier = DiskTier(tmp_path, direct=direct)
    tier.allocate(4096)
    offset = tier.allocate(10_000)
    view = tier.view(offset, 10_000)
    written = torch.arange(10_000).to(torch.uint8)
    tier.write(offset, written.data_ptr(), 10_000)
    assert bytes(view) == bytes(written.numpy())
    view[5000:5004] = b"abcd"
    read = torch.zeros(10_000, dtype=torch.uint8)
    tier.read(offset, read.data_ptr(), 10_000)
    assert bytes(read.numpy()) == bytes(view)
    tier.close()
    assert bytes(view[5000:5004]) == b"abcd"
