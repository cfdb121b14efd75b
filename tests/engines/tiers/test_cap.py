"""What several engines may reserve together."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from lowtide.core.plan import Plan
from lowtide.engines.accelerator import AcceleratorEngine
from lowtide.engines.choose import choose_engine
from lowtide.engines.tiers.arena import Arena
from lowtide.engines.tiers.disk import BLOCK_BYTES, DiskTier
from lowtide.engines.tiers.host_limit import Cap
from lowtide.errors import TierFull
from tests.engines.sim_device import SimDevice
from tests.support.virtual_engine import virtual

MIB = 2**20
PLAN = Plan(layers=(), min_bytes=0)


def _slab(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


def test_a_cap_is_never_passed_and_gives_back() -> None:
    cap = Cap(10)
    assert cap.take(6) and not cap.take(5) and cap.take(4)
    assert (cap.room_bytes, cap.taken_bytes) == (0, 10)
    cap.give(4)
    assert cap.room_bytes == 4
    endless = Cap(None)
    assert endless.take(1 << 60) and endless.room_bytes is None


def test_two_arenas_reserve_together_what_one_may() -> None:
    cap = Cap(16 * MIB)
    one, other = Arena(cap, _slab), Arena(cap, _slab)
    first, second = one.allocate(8 * MIB), other.allocate(7 * MIB)
    with pytest.raises(TierFull, match="of at most 16777216 in use"):
        other.allocate(2 * MIB)
    assert one.bytes_reserved + other.bytes_reserved == cap.taken_bytes <= 16 * MIB
    one.free(first)
    one.trim()
    other.free(other.allocate(7 * MIB))
    other.free(second)
    other.trim()
    assert cap.taken_bytes == 0


def test_a_machine_that_refuses_lowers_the_cap_of_all() -> None:
    def refuses(nbytes: int) -> torch.Tensor:
        raise RuntimeError("no more")

    cap = Cap(16 * MIB)
    one, other = Arena(cap, _slab), Arena(cap, refuses)
    one.allocate(2 * MIB)
    with pytest.warns(RuntimeWarning, match="the machine refused"), pytest.raises(TierFull):
        other.allocate(MIB)
    assert cap.most_bytes == cap.taken_bytes == one.bytes_reserved


def test_two_files_take_together_what_one_may(tmp_path) -> None:
    cap = Cap(3 * BLOCK_BYTES)
    one, other = DiskTier(tmp_path, cap=cap), DiskTier(tmp_path, cap=cap)
    first = one.allocate(2 * BLOCK_BYTES)
    with pytest.raises(TierFull, match="disk budget: 8192 of 12288 bytes in use, 8192 more asked"):
        other.allocate(2 * BLOCK_BYTES)
    one.free(first, 2 * BLOCK_BYTES)
    cap.most_bytes = None
    with pytest.raises(TierFull, match="no room for"):
        one.allocate(1 << 60)
    other.free(other.allocate(2 * BLOCK_BYTES), 2 * BLOCK_BYTES)
    assert (one.used_bytes, other.used_bytes, cap.taken_bytes) == (0, 0, 0)
    one.close()
    other.close()


@pytest.mark.parametrize("name", [virtual(3), "host"])
def test_an_engine_beside_another_shares_its_caps(name: str, tmp_path) -> None:
    plan = dataclasses.replace(PLAN, host_budget_bytes=8 * MIB, disk_budget_bytes=8 * MIB, disk_path=str(tmp_path))
    model = nn.Linear(2, 2)
    one = choose_engine(name, model, plan)
    other, apart = one.another(plan), choose_engine(name, model, plan)
    tier = one.tiers[0]
    slot = one.allocate(6 * MIB, tier)
    with pytest.raises(TierFull):
        other.allocate(3 * MIB, tier)
    apart.free(apart.allocate(3 * MIB, tier))
    one.free(slot)
    other.free(other.allocate(3 * MIB, tier))
    for engine in (one, other, apart):
        engine.close()


def test_pinned_memory_is_shared_and_comes_back_when_an_engine_is_closed() -> None:
    device = SimDevice("late")
    one = AcceleratorEngine(device.device, 16 * MIB, ops=device)
    other = AcceleratorEngine(device.device, ops=device, cap=one.caps["host"])
    other.free(other.allocate(12 * MIB, "host"))
    with pytest.raises(TierFull):
        one.allocate(12 * MIB, "host")
    other.close()
    one.free(one.allocate(12 * MIB, "host"))
    one.close()
    assert one.caps["host"].taken_bytes == 0
