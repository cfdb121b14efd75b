"""Faults that a reading of the engine once found, again, on a device. Those of budgets are in test_optimize.py, of a
prefetch without memory in test_memory_runs_out.py, of two devices in one process in test_apply.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import lowtide
from lowtide.engines.accelerator import AcceleratorEngine
from lowtide.engines.base import Lane
from lowtide.engines.tiers.disk import DiskTier
from lowtide.profiling.op_timer import DeviceClock, DeviceTimer
from tests.standin import device

HERE, THERE = (torch.device("standin", number) for number in range(2))
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
# The stand-in may come to a standstill with the disk's threads: an event is asked with the lock of the interpreter held
# while another thread, which has the device's lock, lets go of pinned memory. Not mended yet.
@pytest.mark.parametrize("tier", ["host", pytest.param("disk", marks=pytest.mark.extended)])
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
    clock = DeviceClock(DeviceTimer(THERE))
    _, mark = clock.run(torch.mm, (square, square), {})
    assert clock.settle([mark]) == pytest.approx([2e-3])


def test_the_link_is_measured_on_the_device_s_clock() -> None:
    device.set_speeds(out=2e9, into=1e9, launch=0.0)
    engine = AcceleratorEngine(HERE, 64 * MIB)
    measured = engine.probe_bandwidth(8 * MIB)
    assert measured.out_bytes_per_second == pytest.approx(2e9)
    assert measured.in_bytes_per_second == pytest.approx(1e9)
    engine.close()
