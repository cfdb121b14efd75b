"""Optimizers that lowtide does not know: stepped in parts only where a trial gives the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lowtide.optimizer.requests import why_not_in_parts
from tests.support.optimizer_zoo import Counted

PREFIX = "{} cannot be stepped in parts: {} came out different in a trial on small parameters"


class _Custom(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.calls = 0

    def parameters(self) -> list[Any]:
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.parameters():
            parameter.sub_(parameter.grad * self.param_groups[0]["lr"])


class Counting(_Custom):
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.calls += 1


class GlobalNorm(_Custom):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        norm = sum(p.grad.square().sum() for p in self.parameters())
        for parameter in self.parameters():
            parameter.sub_(parameter.grad / norm)


class Noisy(_Custom):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.parameters():
            self.state[parameter]["noise"] = torch.randn(parameter.shape)


class SharedState(_Custom):
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.state["all"]["calls"] = self.state["all"].get("calls", 0) + 1


class WantsClosure(_Custom):
    def step(self, closure: Any) -> None:  # type: ignore[override]
        closure()


class EvaluatesFirst(_Custom):
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        super().step()
        return loss


class EvaluatesLate(_Custom):
    """Looks ahead, as sharpness-aware optimizers do."""

    def step(self, closure: Any = None) -> None:
        super().step()
        if closure is not None:
            closure()
            super().step()


class Broken(_Custom):
    def step(self, closure: Any = None) -> None:
        raise KeyError("model")


class KeepsParameters(_Custom):
    """Looks at a list of its own instead of `param_groups`."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.own = [p for group in self.param_groups for p in group["params"]]

    def parameters(self) -> list[Any]:
        return [p for p in self.own if p.grad is not None]


class Inner(torch.optim.AdamW):
    """Derived from torch's, without a change."""


@pytest.mark.parametrize(
    ("kind", "refusal"),
    [
        (_Custom, ""),
        (Inner, ""),
        (Counted, ""),
        (Counting, PREFIX.format("Counting", "its attribute 'calls'")),
        (GlobalNorm, PREFIX.format("GlobalNorm", "a parameter of param_groups[0]")),
        (Noisy, PREFIX.format("Noisy", "state['noise']")),
        (SharedState, PREFIX.format("SharedState", "state['all']")),
        (KeepsParameters, PREFIX.format("KeepsParameters", "a parameter of param_groups[0]")),
        (WantsClosure, "WantsClosure.step cannot do without a closure, so it may evaluate it more than once"),
        (EvaluatesFirst, ""),
        (
            EvaluatesLate,
            "EvaluatesLate cannot be stepped in parts: it does not evaluate its closure once, before it steps "
            "(3 times in 3 steps of a trial)",
        ),
        (Broken, "Broken is not of torch, and could not be tried on small parameters (KeyError: 'model')"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_unknown_optimizers_are_tried(kind: Any, refusal: str) -> None:
    parameters = [nn.Parameter(torch.ones(30, 20)), nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2))]
    optimizer = kind(parameters)
    before, keys = torch.get_rng_state(), set(vars(optimizer))
    assert why_not_in_parts(optimizer) == refusal
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.grad is None and bool((p == 1).all()) for p in parameters)
    assert len(optimizer.state) == 0
    assert set(vars(optimizer)) == keys


def test_the_rate_of_the_first_group_for_all_is_refused_though_rates_are_equal_now() -> None:
    groups = [{"params": [nn.Parameter(torch.ones(8, 8))]} for _ in range(2)]
    assert why_not_in_parts(_Custom(groups)) == PREFIX.format("_Custom", "a parameter of param_groups[1]")
    assert why_not_in_parts(_Custom(groups[0]["params"])) == ""
    groups = [{"params": [nn.Parameter(torch.ones(8, 8))], "lr": lr} for lr in (0.0, 0.0)]
    assert why_not_in_parts(_Custom(groups)) == PREFIX.format("_Custom", "a parameter of param_groups[1]")
    assert why_not_in_parts(Counted(groups)) == ""
