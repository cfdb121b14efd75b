"""Bytes that move in pieces: through a ring of pinned chunks to the disk and back, and blocks in several ranges.

Properties over sizes that are no multiples of anything, under a device that does everything as late as it may.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch

from lowtide.engines.accelerator import _pair_up
from lowtide.engines.staging import Staging
from lowtide.engines.tiers import arena
from lowtide.engines.tiers.disk import DiskTier
from tests.engines.sim_device import SimDevice


@pytest.mark.parametrize("policy", ["late", 0, 1])
def test_whatever_its_size_a_tensor_goes_through_the_ring_and_comes_back(policy: str | int, tmp_path: Path) -> None:
    disk, r = DiskTier(tmp_path), Random(str(policy))
    for _ in range(12):
        device = SimDevice(policy)
        chunk_bytes, num_chunks = 4096 * r.choice((1, 2)), r.choice((1, 2, 4))
        slab = torch.zeros(4096 + chunk_bytes * num_chunks, dtype=torch.uint8)
        start = -slab.data_ptr() % 4096  # the disk is written past the page cache
        chunks = list(slab[start : start + chunk_bytes * num_chunks].split(chunk_bytes))
        ring = Staging(device, device.new_stream(), disk, chunks)
        source = torch.randint(0, 255, (r.randrange(1, 9 * chunk_bytes),), dtype=torch.uint8)
        offset, target = disk.allocate(source.numel()), torch.zeros_like(source)
        ring.write_out(source, offset)
        ring.read_in(offset, target)
        device.drain()
        assert torch.equal(source, target), (chunk_bytes, num_chunks, source.numel())
        disk.free(offset, source.numel())
    disk.close()


def test_a_block_in_several_ranges_is_paired_byte_by_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowtide.engines.accelerator.COPY_BYTES", 700)
    for seed in range(20):
        r = Random(seed)
        slabs = [torch.zeros(r.randrange(200, 4000), dtype=torch.uint8) for _ in range(r.randrange(1, 5))]
        ranges = [(slab, 0) for slab in slabs]
        nbytes = sum(map(len, slabs)) - r.randrange(0, 150)
        block, data = arena.Block(nbytes, ranges), torch.randint(1, 255, (nbytes,), dtype=torch.uint8)
        for host, part in _pair_up(block, data):
            assert 0 < host.numel() == part.numel() <= 700
            host.copy_(part)
        assert torch.equal(torch.cat(block.ranges()), data), f"seed {seed}"
