"""Faults that a reading of the engine once found, again, on a device. Those of budgets are in test_optimize.py, of a
prefetch without memory in test_memory_runs_out.py, of two devices in one process in test_apply.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.engines.accelerator import AcceleratorEngine
from lowtide.engines.base import Lane
from lowtide.engines.device_ops import TorchDevice
from lowtide.engines.tiers.disk import DiskTier
from lowtide.errors import ConfigError
from lowtide.profiling.op_timer import DeviceClock
from tests.standin import device, swaps
from tests.support import zoo

HERE, THERE = (torch.device(device.NAME, number) for number in range(2))
MIB = 2**20


class OnStreams(nn.Module):
    """Every other layer on a side stream, ordered as PyTorch asks for."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6))
        self.side = torch.Stream(HERE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        main = torch.accelerator.current_stream(HERE)
        for number, layer in enumerate(self.layers):
            stream = self.side if number % 2 else main
            stream.wait_stream(main if number % 2 else self.side)
            with stream:
                x.record_stream(stream)
                x = layer(x)
        main.wait_stream(self.side)
        x.record_stream(main)
        return x.square().mean()


@pytest.mark.parametrize("policy", ["late", "hidden", "early", 1, 2, 3])
def test_several_compute_streams(policy: str | int) -> None:
    device.play(policy, 0.3)
    results = []
    for is_swapped in (False, True):
        model = OnStreams().to(HERE)
        x = torch.linspace(-1, 1, 32 * 64, device=HERE).view(32, 64)
        tide = lowtide.apply(model, {"swap": "all", "min_bytes": 0}) if is_swapped else None
        if tide is not None:
            tide._scheduler.window.min_bytes = 0
        for _ in range(3):
            model(x).backward()
        torch.accelerator.synchronize(HERE)
        results.append([parameter.grad.cpu() for parameter in model.parameters()])
        if tide is not None:
            assert tide.stats.copied_in_bytes > 0
            tide.remove()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert device.violations() == []


@pytest.mark.parametrize("nbytes", [0, 1, 4097, 9 * MIB + 3])
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_bytes_come_back_to_the_second_device(tier: str, nbytes: int, tmp_path: Path) -> None:
    engine = AcceleratorEngine(THERE, 128 * MIB, DiskTier(tmp_path))
    data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=THERE)
    slot = engine.allocate(nbytes, tier)
    with torch.accelerator.device_index(1):
        engine.wait(Lane.OUT, engine.record(Lane.COMPUTE))
    engine.copy_out(data.untyped_storage(), slot)
    left = engine.record(Lane.OUT)
    buffer = engine.new_buffer(nbytes, THERE)
    engine.wait(Lane.IN, engine.record(Lane.COMPUTE))
    engine.wait(Lane.IN, left)
    engine.copy_in(slot, buffer)
    engine.wait(Lane.COMPUTE, engine.record(Lane.IN))
    again = torch.empty(0, dtype=torch.uint8, device=THERE).set_(buffer)
    assert torch.equal(again.cpu(), data.cpu())
    assert torch.accelerator.current_device_index() == 0
    engine.free(slot)
    assert engine.memory_in_use() == {"host": 0, "disk": 0}
    engine.close()


def test_operators_are_timed_on_the_device_that_runs_them() -> None:
    device.set_speeds(flops=1e9, memory=1e18, launch=0.0)
    square = torch.ones(100, 100, device=THERE)
    torch.accelerator.synchronize(THERE)
    clock = DeviceClock(TorchDevice(THERE))
    _, mark = clock.run(torch.mm, (square, square), {})
    assert clock.settle([(mark, "mm")]) == pytest.approx([2e-3])


def test_the_link_is_measured_on_the_device_s_clock() -> None:
    device.set_speeds(out=2e9, into=1e9, launch=0.0)
    engine = AcceleratorEngine(HERE, 64 * MIB)
    measured = engine.probe_bandwidth(8 * MIB)
    assert measured.out_bytes_per_second == pytest.approx(2e9)
    assert measured.in_bytes_per_second == pytest.approx(1e9)
    engine.close()


def test_a_lanes_thread_never_makes_another_device_the_current_one(tmp_path: Path) -> None:
    """A6. On CUDA that opens a context there, in every rank."""
    before = device.num_entered(0), device.num_entered(1)
    engine = AcceleratorEngine(THERE, 128 * MIB, DiskTier(tmp_path))
    data = torch.arange(5000, device=THERE)
    for _ in range(3):
        slot = engine.allocate(40_000, "disk")
        engine.wait(Lane.OUT, engine.record(Lane.COMPUTE))
        engine.copy_out(data.untyped_storage(), slot)
        buffer = engine.new_buffer(40_000, THERE)
        engine.wait(Lane.IN, engine.record(Lane.COMPUTE))
        engine.wait(Lane.IN, engine.record(Lane.OUT))
        engine.copy_in(slot, buffer)
        engine.wait(Lane.COMPUTE, engine.record(Lane.IN))
        engine.free(slot)
    torch.accelerator.synchronize(THERE)
    engine.close()
    assert device.num_entered(0) == before[0]
    assert device.num_entered(1) == before[1] + 2  # each lane's thread, once


@pytest.mark.parametrize("apply", [lowtide.apply, lowtide.optimize], ids=["apply", "optimize"])
def test_a_capture_is_refused(apply: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A8. The device captures nothing; it says that it does."""
    module = torch.get_device_module(device.NAME)
    case, model = zoo.CASES["mlp"], zoo.CASES["mlp"].build(0, HERE)
    with apply(model, memory={"swap": "all"} if apply is lowtide.apply else {"budget": 1 << 30}):
        monkeypatch.setattr(module, "is_current_stream_capturing", lambda: True, raising=False)
        with pytest.raises(ConfigError, match="a graph of the device is being captured around the forward of"):
            case.loss(model, case.batch(0, HERE))
        monkeypatch.undo()
        case.loss(model, case.batch(0, HERE)).backward()


def test_an_allocator_without_statistics_has_no_peak() -> None:
    """A9. `tide.stats` and budgets go by lowtide's own account then."""
    case, model = zoo.CASES["llama"], zoo.CASES["llama"].build(3, HERE)
    plan = {"swap": "all", "min_bytes": 0}
    with device.without_statistics():
        with lowtide.apply(model, plan) as tide:
            case.loss(model, case.batch(3, HERE)).backward()
            assert tide.stats.peak_device_bytes > sum(parameter.nbytes for parameter in model.parameters())
            tide.reset_stats()
        with lowtide.optimize(model, budget=1 << 30) as tide:
            for _ in range(3):
                case.loss(model, case.batch(3, HERE)).backward()
            assert tide.plan is not None and tide.engine.device_peak_bytes() is None


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_no_event_is_recorded_again_before_it_is_complete(tier: str, tmp_path: Path) -> None:
    """A11. Where an event has one state for all, whoever waits would wait for the wrong thing, or for ever."""
    plan = {"swap": [{"match": layer, "tier": tier} for layer in zoo.CASES["llama"].layers], "min_bytes": 0}
    run = swaps.Run(name="llama", plan={**plan, "disk_path": str(tmp_path)})
    swaps.plain(run)
    before = device.num_recorded_early()
    for policy in ("late", "hidden", 1):
        device.play(policy, 0.3)
        result, stats = swaps.swapped(run)
        assert stats.copied_in_bytes > 0
        swaps.assert_as_plain(result, run)
    assert device.num_recorded_early() == before
