"""Buckets that are fetched during the last backward pass: same bits, and never a bucket that is out of date."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowtide.engines.base import Lane
from tests.support.optimizer_zoo import Tower, assert_same, result_of, swapped
from tests.support.virtual_engine import VirtualEngine


class Counting(VirtualEngine):
    """A device with a counter of its memory, which the test sets."""

    in_use: int | None = None

    def device_bytes(self) -> int | None:
        return self.in_use


class Eager(VirtualEngine):
    """Copies to the device are done at once, so that what is written to a slot later comes too late."""

    def copy_in(self, slot, target):
        super().copy_in(slot, target)
        self.wait(Lane.COMPUTE, self.record(Lane.IN))


class Falling(VirtualEngine):
    """A device whose memory empties from one gradient to the next, but for the buckets that are fetched."""

    num_calls = 0
    most_bytes = 0
    handle: Any = None

    def device_bytes(self) -> int | None:
        held = self.handle._store.transfers.held_bytes if self.handle else 0
        in_use = 40_000 - 1_500 * (self.num_calls % 14) + held
        self.num_calls += 1
        self.most_bytes = max(self.most_bytes, in_use)
        return in_use


def _train(
    engine: Any, steps: int = 8, accumulate: int = 1, *, before: Any = None, each: Any = None, **options: Any
) -> tuple[Any, list[int]]:
    """What training leaves, and how many buckets had been fetched when each step began. `before`: that of a step."""
    torch.manual_seed(3)
    model = Tower(8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    handle = swapped(optimizer, engine, **options) if engine else None
    if isinstance(engine, Falling):
        engine.handle, engine.num_calls = handle, 0
    fetched = []
    for step in range(steps):
        if before:
            before(optimizer, step)
        for micro in range(accumulate):
            x = torch.full((3, 24), 0.1 * (step + micro))
            model(x, skip=step % 5 + 1).square().sum().backward()
        if each:
            each(optimizer, step)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if handle and handle._prefetch:
            fetched.append(len(handle._store.transfers.arrivals))
        optimizer.step()
        optimizer.zero_grad()
    result = result_of(list(model.parameters()), optimizer)
    if handle:
        handle.detach()
        assert engine.violations == []
        assert engine.num_slots == 0
        assert all(parameter._post_accumulate_grad_hooks in (None, {}) for parameter in model.parameters())
    return result, fetched


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_same_bits(seed: int, accumulate: int) -> None:
    truth, _ = _train(None, accumulate=accumulate)
    result, fetched = _train(VirtualEngine(seed), accumulate=accumulate, overlap="backward")
    assert_same(result, truth)
    assert fetched[0] == 0
    assert set(fetched[2:]) == {2}


@pytest.mark.extended
@pytest.mark.parametrize("seed", range(10, 60))
def test_same_bits_under_many_schedules(seed: int) -> None:
    for accumulate in (1, 2):
        truth, _ = _train(None, accumulate=accumulate)
        assert_same(_train(VirtualEngine(seed), accumulate=accumulate, overlap="backward")[0], truth)


def test_what_backward_has_freed_is_filled_and_no_more() -> None:
    truth, _ = _train(None)
    engine = Counting(0)
    engine.in_use = 10_000
    result, fetched = _train(engine, overlap="backward")
    assert_same(result, truth)
    assert fetched[2:] == [0] * 6, "the device never held less than at its worst moment"
    falling = Falling(0)
    result, fetched = _train(falling, overlap="backward")
    assert_same(result, truth)
    assert 2 < max(fetched) < 12
    assert falling.most_bytes == 40_000


def test_changes_between_fetch_and_step_count() -> None:
    def change(optimizer: Any, step: int) -> None:
        first = optimizer.param_groups[0]["params"][0]
        if step == 2:
            optimizer.state[first]["exp_avg"].data.mul_(2)  # which no version shows
        if step == 3:
            optimizer.state[first]["exp_avg"].mul_(2)
        if step == 4:
            optimizer.state[first]["exp_avg"] = torch.ones_like(first)
        if step == 5:
            optimizer.load_state_dict(optimizer.state_dict())
        if step == 6:
            optimizer.state.clear()
        if step == 7:
            optimizer.state[first]["exp_avg"].data = torch.ones_like(first)

    truth, _ = _train(None, each=change)
    for engine in (VirtualEngine(0), VirtualEngine(1), Eager(2)):
        assert_same(_train(engine, each=change, overlap="backward")[0], truth)


def test_a_write_to_a_tensor_that_was_kept_since_before_the_fetch_counts() -> None:
    """Nobody looks into `optimizer.state` after the fetch then."""
    kept: list[Tensor] = []

    def keep(optimizer: Any, step: int) -> None:
        if step == 4:
            kept.append(optimizer.state[optimizer.param_groups[0]["params"][0]]["exp_avg"])

    def write(optimizer: Any, step: int) -> None:
        if step == 4:
            kept.pop().mul_(2)

    truth, _ = _train(None, before=keep, each=write)
    result, fetched = _train(
        Eager(0), before=keep, each=write, overlap="backward"
    )  # its copies are older than the write
    assert_same(result, truth)
    assert fetched[4] == 2


def test_a_skipped_step_drops_what_was_fetched() -> None:
    torch.manual_seed(0)
    model = Tower(8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine = VirtualEngine(2)
    handle = swapped(optimizer, engine, overlap="backward")
    for step in range(6):
        model(torch.ones(3, 24)).sum().backward()
        if step != 4:
            optimizer.step()
        optimizer.zero_grad()
    assert handle._store.transfers.held_bytes == 0
    handle.detach()
    assert engine.violations == []


def test_auto_fetches_ahead_where_the_device_has_a_counter() -> None:
    engine = Counting(0)
    engine.in_use = 1
    for chosen, mode in ((engine, "backward"), (VirtualEngine(0), "step")):
        handle = swapped(torch.optim.AdamW(Tower(8).parameters()), chosen)
        assert handle.stats.overlap == mode
        handle.detach()
