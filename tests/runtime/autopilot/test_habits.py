"""Habits that decide how much a step saves, and that shapes do not show: plans follow, bits stay, budgets hold.

Each habit is a training loop of a few phases. What every step holds at once is counted by an account of its own
(tests/independent_count.py); losses and weights are compared with those of the plain loop. The first step of a phase
may pass the budget, since nothing is known of it before it runs; no later one may, unless a warning says by how much.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import lowtide
from tests.independent_count import IndependentCount, state_tensors

WIDTH, ROWS = 32, 16
NUM_STEPS = 3
"""Of each phase."""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp()))


class Block(nn.Module):
    def __init__(self, p: float = 0.1) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down, self.drop = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:  # (N, T, WIDTH)
        parts = self.qkv(self.norm(x)).view(*x.shape[:2], 2, -1).transpose(1, 2).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(*parts).transpose(1, 2).reshape(x.shape))
        return x + self.drop(self.down(F.gelu(self.up(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 8)
        self.is_cut = False
        self.num_calls = 0

    def forward(self, x: Tensor, twice: bool = False, scale: float = 1.0) -> Tensor:  # (N, T, WIDTH) -> scalar
        self.num_calls += 1
        inner = x
        for layer in (*self.layers, *(self.layers if twice else ())):
            if self.is_cut:
                inner = x = x.detach().requires_grad_()
            x = layer(x)
        return (scale * self.head(x)).square().mean() + (inner.sum() * 0 if self.is_cut else 0)


Loop = Callable[[nn.Module, int], Tensor]


def batch(seed: int, length: int = 16, rows: int = ROWS) -> Tensor:
    return torch.randn(rows, length, WIDTH, generator=torch.Generator().manual_seed(seed))


def one(model: nn.Module, number: int) -> Tensor:
    loss = model(batch(number))
    loss.backward()
    return loss


def called(**how: Any) -> Loop:
    def loop(model: nn.Module, number: int) -> Tensor:
        loss = model(batch(number), **how)
        loss.backward()
        return loss

    return loop


def joint(*lengths: int) -> Loop:
    """So many forward passes, and one backward pass from the sum of their losses."""

    def loop(model: nn.Module, number: int) -> Tensor:
        loss = torch.stack([model(batch(10 * number + i, n)) for i, n in enumerate(lengths)]).sum()
        loss.backward()
        return loss

    return loop


def in_turn(num: int, *, is_reversed: bool) -> Loop:
    """So many forward passes, then their backward passes, as a pipeline written by hand has them."""

    def loop(model: nn.Module, number: int) -> Tensor:
        losses = [model(batch(10 * number + i)) for i in range(num)]
        for loss in reversed(losses) if is_reversed else losses:
            loss.backward()
        return torch.stack(losses).detach().sum()

    return loop


def accumulating(loop: Loop) -> Loop:
    def twice(model: nn.Module, number: int) -> Tensor:
        return loop(model, 100 * number) + loop(model, 100 * number + 1)

    return twice


def kernel(model: nn.Module, number: int) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return one(model, number)


def with_input_gradient(model: nn.Module, number: int) -> Tensor:
    loss = model(batch(number).requires_grad_())
    loss.backward()
    return loss


@dataclasses.dataclass(frozen=True)
class Phase:
    loop: Loop = one
    change: Callable[[nn.Module, torch.optim.Optimizer], None] = lambda model, optimizer: None


def freeze(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.layers[:3].requires_grad_(False)


def unfreeze(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.requires_grad_(True)


def evaluating(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.eval()


def training(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.train()


def grown(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    new = [Block(), Block()]
    model.layers.extend(new)
    optimizer.add_param_group({"params": [p for block in new for p in block.parameters()]})


def dropping(p: float) -> Callable[[nn.Module, torch.optim.Optimizer], None]:
    def change(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = p

    return change


def hooked(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    kept: list[Tensor] = []
    model.register_forward_pre_hook(lambda module, args: kept.clear())
    for layer in model.layers:
        layer.register_forward_hook(lambda module, args, output: kept.append(output.exp()))


def cut(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.is_cut = True


HABITS: dict[str, tuple[Phase, ...]] = {
    "unfrozen": (Phase(change=freeze), Phase(change=unfreeze), Phase(change=freeze)),
    "first in eval": (Phase(change=evaluating), Phase(change=training)),
    "dropout": (Phase(change=dropping(0.0)), Phase(change=dropping(0.2)), Phase(change=dropping(0.0))),
    "grown": (Phase(), Phase(change=grown)),
    "hooks": (Phase(), Phase(change=hooked)),
    "a flag": (Phase(), Phase(called(twice=True)), Phase()),
    "a kernel": (Phase(), Phase(kernel)),
    "input gradients": (Phase(), Phase(with_input_gradient)),
    "leaves inside": (Phase(change=cut),),
    "two passes": (Phase(joint(16, 16)),),
    "two passes of unlike lengths": (Phase(joint(16, 9)), Phase(joint(7, 16))),
    "two passes, later four": (Phase(), Phase(joint(16, 16)), Phase(joint(16, 16, 16, 16))),
    "two passes, accumulated": (Phase(accumulating(joint(16, 16))),),
    "a pipeline by hand": (Phase(in_turn(4, is_reversed=True)),),
    "first in, first out": (Phase(in_turn(3, is_reversed=False)),),
}


def trained(
    phases: tuple[Phase, ...], budget: int | None = None, **memory: Any
) -> tuple[list[Tensor], list[list[int]], Any]:
    """Losses and weights; the counted peaks of each phase; and the handle, which was removed."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tide = None
    results: list[Tensor] = []
    peaks: list[list[int]] = []
    try:
        for number, phase in enumerate(phases):
            phase.change(model, optimizer)
            if budget is not None and tide is None:
                how: Any = {"memory": {"min_bytes": 1, **memory}, "optimizer": optimizer, "engine": "host"}
                tide = lowtide.optimize(model, budget=budget, **how)
            peaks.append([])
            for step in range(NUM_STEPS):
                torch.manual_seed(100 * number + step)
                count = IndependentCount([state_tensors(model, optimizer)])
                with count:
                    loss = phase.loop(model, 100 * number + step)
                    optimizer.step()
                    optimizer.zero_grad()
                results.append(loss.detach().clone())
                peaks[-1].append(count.peak_bytes)
    finally:
        if tide is not None:
            tide.remove()
    return [*results, *(parameter.detach().clone() for parameter in model.parameters())], peaks, tide


@pytest.mark.parametrize("name", HABITS)
def test_plans_follow_what_the_loop_does(name: str) -> None:
    phases = HABITS[name]
    truth, plain, _ = trained(phases)
    most = max(max(peaks[1:]) for peaks in plain)
    share = Random(name).choice((0.6, 0.7, 0.85))
    budget = int(share * most)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        results, peaks, tide = trained(phases, budget)
    assert all(map(torch.equal, results, truth))
    said = [str(each.message) for each in told if "fits the budget of" in str(each.message)]
    assert len(said) <= len(phases)
    for own in peaks:
        assert said or max(own[1:]) <= budget, (share, [[round(p / budget, 3) for p in own] for own in peaks])
    # What was there before is taken up again, and nothing is planned twice for it.
    assert len(tide.events) <= 2 * len(phases) + 1, [event.why for event in tide.events]
