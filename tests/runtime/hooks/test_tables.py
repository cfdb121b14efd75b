"""Tables of what layers save, under models whose layers save other things from step to step."""

from __future__ import annotations

from random import Random
from typing import Any

import torch
from torch import Tensor, nn

import lowtide
from tests.support.virtual_engine import VirtualEngine

SWAP = {"swap": "all", "min_bytes": 0, "layers": ["0", "1", "2"]}


class _Moody(nn.Module):
    """Saves more or fewer tensors, and of another operator, by its mode."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.mode = nn.Linear(8, 8), 0

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        if self.mode == 0:
            return h.tanh().sin()
        if self.mode == 1:
            return h.sigmoid()
        if self.mode == 3:
            return h.tanh()  # as much of the first mode as is saved first
        return h.exp().cos().tanh() * h


def _gradients(model: nn.Module, modes: list[int], x: Tensor) -> list[Tensor]:
    for layer, mode in zip(model, modes, strict=True):
        layer.mode = mode  # type: ignore[assignment]
    return list(torch.autograd.grad(model(x).square().mean(), list(model.parameters())))


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(_Moody() for _ in range(3)))


def _names(tide: lowtide.Tide) -> set[str]:
    return {site.name for site in tide.plan.sites}


def test_a_layer_that_saves_something_else_is_counted_and_learned_again() -> None:
    for seed in range(12):
        r, model, x = Random(seed), _model(), torch.randn(4, 8)
        first, second = ([r.randrange(4) for _ in range(3)] for _ in range(2))
        if seed == 0:
            first, second = [0, 0, 0], [0, 3, 0]
        with lowtide.apply(model, SWAP, engine=VirtualEngine(seed)) as tide:
            for modes in (first, first, second, second, second):
                wanted = _gradients(twin := _model(), modes, x)
                del twin
                got = _gradients(model, modes, x)
                assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True)), f"seed {seed}"
                if modes is first:
                    assert tide.stats.num_divergences == 0
            num_divergences = tide.stats.num_divergences
            assert (num_divergences > 0) == (first != second), f"seed {seed}: {first} -> {second}"
            _gradients(model, second, x)
            assert tide.stats.num_divergences == num_divergences, "learned, and counted no more"
            names = _names(tide)
        fresh = _model()
        with lowtide.apply(fresh, SWAP, engine=VirtualEngine(seed)) as other:
            _gradients(fresh, second, x)
            assert _names(other) <= names, f"seed {seed}: {_names(other) - names}"


def _fetched(model: nn.Module, memory: dict[str, Any], seed: int) -> list[int]:
    with lowtide.apply(model, memory, engine=VirtualEngine(seed)) as tide:
        loss = model(torch.randn(4, 8)).square().mean()
        tide.settle()
        found = []
        for _ in range(3):
            before = tide.stats.copied_in_bytes
            loss.backward(retain_graph=True)
            found.append(tide.stats.copied_in_bytes - before)
    return found


class _ReadOften(nn.Module):
    """One storage with four readers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        return h.sin() * h.cos() + h.exp() * h


def test_every_backward_of_one_graph_fetches_as_much_as_the_first() -> None:
    for seed in range(6):
        for distance in (0, 3, None):
            rule = {"match": "*"} | ({} if distance is None else {"prefetch": distance})
            torch.manual_seed(seed)
            model = nn.Sequential(*(_ReadOften() for _ in range(3)))
            first, *others = _fetched(model, {"swap": [rule], "min_bytes": 0}, seed)
            assert first > 0 and others == [first, first], f"seed {seed}, distance {distance}: {first}, {others}"
