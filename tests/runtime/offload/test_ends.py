"""What copies and spills rely on: sources of a scheduler that died first, and parts of a storage with own counters."""

from __future__ import annotations

import gc

import torch

from lowtide.runtime.offload.scheduler import OffloadScheduler
from lowtide.runtime.offload.site import PrefetchQueue
from lowtide.runtime.offload.spill import Guard
from tests.support.virtual_engine import VirtualEngine


def test_what_a_dead_scheduler_was_copying_stays_with_the_engine() -> None:
    """Nobody else holds the sources any more, and the device may still read them."""
    total = 0
    for seed in range(12):
        engine, queue = VirtualEngine(seed), PrefetchQueue()
        scheduler = OffloadScheduler(engine)
        storages = [torch.ones(64 + number).untyped_storage() for number in range(5)]
        sites = [scheduler.enroll(queue, storage, 0, None, None) for storage in storages]
        for site in sites:
            scheduler.start_offload(site, None)
        leaving_bytes = scheduler.window.leaving_bytes
        del storages, sites, site, scheduler, queue
        gc.collect()
        assert sum(left.nbytes() for _, _, left in engine.leftovers if left is not None) == leaving_bytes, (
            f"seed {seed}"
        )
        total += leaving_bytes
    assert total > 0


def test_a_spilled_part_with_a_counter_of_its_own_is_not_another_part() -> None:
    """Both halves are of one storage and at version 0: what was spilled for the one may be older than the other."""
    whole = torch.ones(4, 8)
    one, other = whole.unsafe_chunk(2, 1)
    scheduler = OffloadScheduler(VirtualEngine(0))
    guard = Guard(2**20, scheduler=scheduler, min_bytes=0, state_bytes=int)
    handle = guard.keep(one, PrefetchQueue(), None)
    with scheduler.lock:
        assert handle.spill() == whole.untyped_storage().nbytes()
    assert handle.is_of(one) and handle.is_of(one[:1])  # a view of that half has its counter
    assert not handle.is_of(other) and not handle.is_of(whole)
    one.add_(1)
    assert not handle.is_of(one)
