"""What callers do around a forward: nested inputs, torch's switch of early stop, checkpoints of their own, a plan that
is corrected between forward and backward. Same bits as plain, and no false word."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import lowtide
from tests.support.virtual_engine import virtual


class Block(nn.Module):
    """As it is, or under torch's own checkpoint."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.linear, self.norm, self.reentrant = nn.Linear(8, 8), nn.LayerNorm(8), reentrant

    def _inner(self, x: Tensor) -> Tensor:
        return torch.dropout(torch.tanh(self.norm(self.linear(x))), 0.2, True)

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return self._inner(x)
        return checkpoint(self._inner, x, use_reentrant=self.reentrant) + x


def _steps(build: Callable[[], nn.Module], step: Callable[[nn.Module, int], Tensor], way: str) -> list[Any]:
    torch.manual_seed(0)
    model = build()
    found: list[Any] = []
    tide: Any = None
    if way == "optimize":
        tide = lowtide.optimize(model, budget="1GiB", engine=virtual(1), memory={"min_bytes": 1})
    elif way:
        rules = {"recompute": ["0", "1"], "layers": ["0", "1"]} if way == "recompute" else {"swap": "all"}
        tide = lowtide.apply(model, {**rules, "min_bytes": 1}, engine=virtual(1))
    for number in range(3):
        loss = step(model, number)
        loss.backward()
        found += [loss.item(), *(p.grad.tolist() for p in model.parameters()), torch.rand(1).item()]
    if tide is not None:
        tide.remove()
    return found


def _jagged(model: nn.Module, number: int) -> Tensor:
    parts = [torch.ones(2 + number, 8), torch.ones(3, 8) * number]
    return model(torch.nested.nested_tensor(parts, layout=torch.jagged)).values().square().mean()


def _early(setting: bool) -> Callable[[nn.Module, int], Tensor]:
    def step(model: nn.Module, number: int) -> Tensor:
        with set_checkpoint_early_stop(setting):
            return model(torch.ones(4, 8) + number).square().mean()

    return step


def _plain(model: nn.Module, number: int) -> Tensor:
    return model(torch.ones(4, 8) + number).square().mean()


HABITS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, int], Tensor], tuple[str, ...]]] = {
    "nested inputs": (
        lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), _jagged, ("optimize", "swap")
    ),
    "early stop": (lambda: nn.Sequential(Block(), Block()), _early(True), ("optimize", "recompute")),
    "no early stop": (lambda: nn.Sequential(Block(), Block()), _early(False), ("optimize", "recompute")),
    "early stop and a checkpoint inside": (
        lambda: nn.Sequential(Block(False), Block(False)), _early(True), ("optimize", "recompute")
    ),
    "checkpoints inside": (lambda: nn.Sequential(Block(False), Block()), _plain, ("optimize", "recompute")),
    "reentrant checkpoints inside": (lambda: nn.Sequential(Block(), Block(True)), _plain, ("optimize",)),
}  # fmt: skip


@pytest.mark.parametrize("habit", HABITS)
def test_the_bits_are_those_without_lowtide(habit: str) -> None:
    build, step, ways = HABITS[habit]
    plain = _steps(build, step, "")
    for way in ways:
        assert _steps(build, step, way) == plain, way


def test_a_plan_that_is_corrected_before_a_backward_says_nothing_of_a_forward() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    with lowtide.optimize(model, budget="1GiB", engine=virtual(1)) as tide, warnings.catch_warnings():
        warnings.simplefilter("error")
        loss = model(torch.ones(4, 8)).sum()
        autopilot = tide.source
        shape = autopilot.table[autopilot.key]
        autopilot._replace(shape, shape.plan)
        autopilot._use(autopilot.key, why="corrected")
        loss.backward()
        model(torch.ones(4, 8)).sum().backward()
