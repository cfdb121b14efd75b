"""The accelerator engine under a swapped optimizer: streams that run late or early, an arena, a disk, no memory."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import lowtide
from lowtide.engines import accelerator
from lowtide.engines.accelerator import AcceleratorEngine
from lowtide.engines.tiers.disk import DiskTier
from tests.engines.sim_device import SimDevice
from tests.support.optimizer_zoo import Case, Result, assert_same, result_of, swapped, train

MIB = 2**20
CASES = (
    Case("AdamW", "foreach", torch.float32, has_missing=True),
    Case("Adafactor", "for-loop", torch.bfloat16, has_missing=False),
    Case("Counted", "for-loop", torch.float32, has_missing=True),
)


@functools.cache
def plain(case: Case) -> Result:
    return train(case, None)


@pytest.fixture
def _small_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "STAGE_BYTES", 4096)


@pytest.mark.usefixtures("_small_stages")
@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("policy", ["late", "early", 1, 2, 3])
def test_same_bits(policy: Any, tier: str, tmp_path: Path) -> None:
    for case in CASES:
        device = SimDevice(policy, computes_on_host=True)
        engine = AcceleratorEngine(device.device, 64 * MIB, DiskTier(tmp_path), ops=device)
        assert_same(train(case, lambda o: swapped(o, engine, tier=tier)), plain(case))  # noqa: B023
        assert engine.memory_in_use() == {"host": 0, "disk": 0}
        engine.close()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.kind)
def test_a_step_gets_by_with_the_memory_of_one_bucket(case: Case) -> None:
    """What cannot be fetched ahead is fetched when the bucket before it has left."""
    device = SimDevice(2, computes_on_host=True)
    device.room_bytes = 10_500  # the largest parameter's state
    engine = AcceleratorEngine(device.device, 64 * MIB, ops=device)
    assert_same(train(case, lambda o: swapped(o, engine)), plain(case))
    engine.close()


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.usefixtures("_small_stages")
def test_buckets_for_which_there_is_no_memory_are_cut_in_two(tier: str, tmp_path: Path) -> None:
    case = Case("AdamW", "foreach", torch.float32, has_missing=False)
    device = SimDevice(3, computes_on_host=True)
    engine = AcceleratorEngine(device.device, 64 * MIB, DiskTier(tmp_path), ops=device)
    parameters, optimizer = case.build()
    plain_parameters, plain_optimizer = case.build()
    handle = swapped(optimizer, engine, bucket_bytes=32768, tier=tier)
    counts = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(10):
            if step == 6:
                device.room_bytes = 12_000
            for p, o in ((parameters, optimizer), (plain_parameters, plain_optimizer)):
                case.set_gradients(p, step)
                o.step()
            counts.append(len(handle._store.buckets))
    assert counts[9] > counts[5]
    assert str(caught[0].message).startswith("lowtide: no memory on cpu for ")
    assert len(caught) < 10
    assert_same(result_of(parameters, optimizer), result_of(plain_parameters, plain_optimizer))
    handle.detach()
    assert engine.memory_in_use() == {"host": 0, "disk": 0}
    engine.close()


def test_without_memory_for_a_bucket_the_step_stops_and_can_go_on() -> None:
    case = Case("AdamW", "foreach", torch.float32, has_missing=False)
    device = SimDevice("late", computes_on_host=True)
    engine = AcceleratorEngine(device.device, 64 * MIB, ops=device)
    parameters, optimizer = case.build()
    plain_parameters, plain_optimizer = case.build()
    handle = swapped(optimizer, engine)
    for step in range(4):
        case.set_gradients(parameters, step)
        case.set_gradients(plain_parameters, step)
        plain_optimizer.step()
        if step != 2:
            optimizer.step()
            continue
        device.room_bytes = 5000
        with pytest.raises(lowtide.PartialStepError, match=r"of 5000 given, .*call handle.resume\(\)") as caught:
            optimizer.step()
        assert caught.value.can_resume
        device.room_bytes = None
        handle.resume()
    assert_same(result_of(parameters, optimizer), result_of(plain_parameters, plain_optimizer))
    handle.detach()
    engine.close()


def test_a_step_under_capture_is_refused() -> None:
    device = SimDevice("late", computes_on_host=True)
    engine = AcceleratorEngine(device.device, 64 * MIB, ops=device)
    parameters, optimizer = CASES[0].build()
    handle = swapped(optimizer, engine)
    CASES[0].set_gradients(parameters, 0)
    device.is_graph = True
    with pytest.raises(
        RuntimeError, match=r"^lowtide: a swapped optimizer cannot be captured in a graph of the device"
    ):
        optimizer.step()
    device.is_graph = False
    handle.detach()
    engine.close()
