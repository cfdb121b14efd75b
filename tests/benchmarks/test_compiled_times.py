"""Times of compiled code, against bytes counted by hand."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from benchmarks.compiled_times import of_all, of_layers
from lowtide.core.profile import Profile
from lowtide.profiling.fake.trace import trace
from tests.support.profiles import ROUND_HARDWARE as HARDWARE


class Gated(torch.nn.Module):
    """Three element-wise operators between two products."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([GatedLayer(), GatedLayer()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class GatedLayer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(256, 256, bias=False)
        self.down = torch.nn.Linear(256, 256, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        return self.down(torch.sin(h).exp().neg()) + x


def test_compiled_rows_read_what_comes_and_write_what_is_needed() -> None:
    hardware = dataclasses.replace(HARDWARE, launch_seconds=0.0, flops_per_second={"float32": 1e15})
    batch = (torch.empty(1024, 256),)
    prices = (None, of_layers, of_all)
    eager, layers, every = (
        trace(Gated(), batch, hardware=hardware, loss=lambda y: (y * y).sum(), price=price) for price in prices
    )
    size = 4 * 1024 * 256 / 1e9

    def forward(profile: Profile, what: str) -> float:
        return sum(
            seconds
            for name, seconds in zip(profile.op_names[: profile.num_forward_ops], profile.op_seconds)
            if name.startswith("layers.0.") and what in name
        )

    def elementwise(profile: Profile) -> float:
        return sum(forward(profile, what) for what in ("sin", "exp", "neg"))

    assert elementwise(eager) == pytest.approx(6 * size)
    # One kernel: reads h; backward needs h, which is there, exp's result, and down's input: two are written.
    assert elementwise(layers) == elementwise(every) == pytest.approx(3 * size)
    assert forward(eager, "mm") == forward(every, "mm")
    # The loss is in no layer.
    outside = [
        sum(s for n, s in zip(p.op_names, p.op_seconds) if not n.startswith("layers.")) for p in (eager, layers, every)
    ]
    assert outside[0] == outside[1] > outside[2]
    assert dataclasses.replace(eager, op_seconds=(), nodes=()) == dataclasses.replace(every, op_seconds=(), nodes=())
