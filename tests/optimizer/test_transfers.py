"""Each wait between copies and compute matters: without any one of them the adversarial engine gives wrong numbers."""

from __future__ import annotations

import pytest
import torch

from lowtide.engines.base import Lane
from lowtide.optimizer.transfers import NUM_BUFFERS
from tests.support.optimizer_zoo import BUCKET_BYTES, Case, assert_same, result_of, swapped, train
from tests.support.virtual_engine import VirtualEngine

CASE = Case("AdamW", "foreach", torch.float32, has_missing=False)


class Forgetful(VirtualEngine):
    """Waits of one lane for another never happen."""

    forgotten: tuple[Lane, Lane]

    def wait(self, lane, event):
        return 0.0 if (lane, event.lane) == self.forgotten else super().wait(lane, event)


@pytest.mark.parametrize(
    "forgotten",
    [(Lane.IN, Lane.COMPUTE), (Lane.COMPUTE, Lane.IN), (Lane.OUT, Lane.COMPUTE), (Lane.COMPUTE, Lane.OUT)],
    ids=lambda pair: f"{pair[0].value} for {pair[1].value}",
)
def test_a_forgotten_wait_is_seen(forgotten: tuple[Lane, Lane]) -> None:
    truth = train(CASE, None, steps=4)
    engine = Forgetful(5)
    engine.forgotten = forgotten
    try:
        assert_same(train(CASE, lambda optimizer: swapped(optimizer, engine), steps=4), truth)
    except AssertionError:
        return
    assert engine.violations


def test_no_more_than_a_few_buckets_are_on_the_device() -> None:
    """In the first step too, in which the optimizer makes its state."""
    engine = VirtualEngine(3)
    parameters, optimizer = CASE.build()
    handle = swapped(optimizer, engine)
    for step in range(3):
        CASE.set_gradients(parameters, step)
        optimizer.step()
        largest = max(bucket.nbytes for bucket in handle._store.buckets)
        assert handle.stats.num_buckets >= 5
        assert largest <= max(BUCKET_BYTES, 2 * 4 * 40 * 30 + 512)
        assert handle.stats.bucket_peak_bytes <= NUM_BUFFERS * largest
        assert handle._store.transfers.held_bytes == 0
    handle.detach()


def test_what_is_not_stepped_is_not_moved() -> None:
    """Experts in turn: of 12 parameters in three buckets, each step has gradients for those of another one."""
    engine = VirtualEngine(1)
    results = []
    for is_swapped in (False, True):
        parameters = [torch.nn.Parameter(torch.full((8, 16), 0.1 * number)) for number in range(12)]
        optimizer = torch.optim.AdamW(parameters, foreach=True)
        handle = swapped(optimizer, engine, bucket_bytes=4096) if is_swapped else None
        moved = before = 0
        for step in range(16):
            active = [number for number in range(12) if step == 0 or number // 4 == step % 3]
            for number, parameter in enumerate(parameters):
                parameter.grad = torch.full_like(parameter, 0.1) if number in active else None
            optimizer.step()
            if handle:
                moved, before = handle.stats.fetched_bytes - before, handle.stats.fetched_bytes
        results.append(result_of(parameters, optimizer))
        if handle:
            assert moved == 4 * 2 * 4 * 8 * 16
            handle.detach()
    assert_same(results[1], results[0])
    assert engine.violations == []
    assert engine.num_slots == 0
