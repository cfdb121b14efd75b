"""Budgets that the device sets, on a model in training: the same bits, and nobody is refused later."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.core.budget import DeviceMemory
from lowtide.core.log import Listener
from lowtide.runtime.autopilot import autopilot as door
from lowtide.timeline.step import Link
from tests.support.virtual_engine import VirtualEngine

LINK = Link(out_bytes_per_second=2e9, in_bytes_per_second=2e9, latency_seconds=1e-6)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Every model is on a device of so many bytes; 64 MiB unless a test says otherwise."""

    def has(nbytes: int) -> None:
        memory = DeviceMemory(total_bytes=nbytes, free_bytes=nbytes, where="on a made-up device")
        monkeypatch.setattr(door, "memory_of_model", lambda model, optimizer=None: memory)

    has(64 << 20)
    return has


def batch(rows: int) -> torch.Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows))


def gradients(model: nn.Module, rows: tuple[int, ...]) -> list[torch.Tensor]:
    """Of steps with two micro-batches each, the second with gradients of the first."""
    found = []
    for number in rows:
        model.zero_grad(set_to_none=True)
        for _ in range(2):
            model(batch(number)).backward()
        found += [parameter.grad.clone() for parameter in model.parameters()]
    return found


@pytest.mark.parametrize("memory", [{"budget": "auto"}, {"budget": "50%"}])
def test_bits_and_later_batches(memory: dict[str, Any]) -> None:
    """Gradients that stay and a larger batch need more than the first step did."""
    model, said = Net(), []
    truth = gradients(copy.deepcopy(model), (64, 64, 256))
    with Listener(said.append), lowtide.apply(model, {**memory, "min_bytes": 1}, engine=VirtualEngine(0)) as tide:
        mine = gradients(model, (64, 64, 256))
        assert all(torch.equal(a, b) for a, b in zip(mine, truth, strict=True))
        plan = tide.plan
        assert plan is not None and plan.predicted is not None
    budget = "60.8 MiB: 64.0 MiB on a made-up device less 3.2 MiB (5 %) for what no plan counts"
    assert (
        said[0]
        == {
            "auto": f"lowtide: budget auto = {budget}",
            "50%": "lowtide: budget 50% = 32.0 MiB: of 64.0 MiB on a made-up device",
        }[memory["budget"]]
    )


def test_a_device_that_is_too_small_is_refused_as_a_budget_is(device: Callable[[int], None]) -> None:
    device(1 << 10)
    tide = lowtide.optimize(Net(), memory={"budget": "auto", "strict": True}, engine=VirtualEngine(0))
    with pytest.raises(lowtide.BudgetError, match="no plan fits"):
        tide.model(batch(8))
    tide.remove()


def test_min_bytes_fits_a_small_model() -> None:
    """A model whose activations are all below 1 MiB is not left alone for that."""
    model = Net()
    with lowtide.optimize(model, 300_000, engine=VirtualEngine(0)) as tide:
        model(batch(64)).backward()
        assert tide.plan is not None and not tide.plan.does_nothing and tide.plan.min_bytes <= 64 * 64 * 4


class Linears(nn.Module):
    """Layers that save nothing but their input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.act = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), nn.Tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.act(layer(x))
        return x.sum()


def test_a_recompute_rule_that_frees_nothing_is_named(recwarn: pytest.WarningsRecorder) -> None:
    model = Linears()
    with lowtide.apply(model, {"recompute": ["layers.0-1", "act"], "min_bytes": 0}, engine=VirtualEngine(0)):
        model(torch.randn(4, 8)).backward()
        model(torch.randn(4, 8)).backward()
    assert [str(each.message) for each in recwarn if "lowtide" in str(each.message)] == [
        "lowtide: recompute 'layers.0-1' (memory.recompute[0]) frees nothing: what it names saves no more than its "
        "inputs, which stay, and runs again all the same; take it out of the rule"
    ]


def test_a_rule_that_moves_nothing_is_named() -> None:
    model = Net()
    with lowtide.apply(model, {"swap": ["layers.0-1"]}, engine=VirtualEngine(0)):
        with pytest.warns(UserWarning, match="moves nothing") as caught:
            model(batch(64)).backward()
        model(batch(64)).backward()
    (warning,) = [entry for entry in caught if "moves nothing" in str(entry.message)]
    assert str(warning.message) == (
        "lowtide: swap 'layers.0-1' (memory.swap[0]) moves nothing: what it names is smaller than min_bytes, 1.0 MiB "
        "(the largest of 4 activations has 0.016 MiB); write min_bytes: 16384, or less"
    )
