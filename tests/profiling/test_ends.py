"""Inputs and states that hang on a graph of the user's: a step that lowtide looked at leaves that graph alone."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from tests.support.virtual_engine import virtual


class Net(nn.Module):
    """Takes a tensor, or something that has one; writes to it in place; keeps a hidden state with its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.hidden: Any = None

    def forward(self, x: Any, keeps: bool = False) -> Tensor:
        held = x.value if isinstance(x, types.SimpleNamespace) else x["value"][0] if isinstance(x, dict) else x
        y = self.body(held.mul_(2) if held.grad_fn is not None else held)
        if self.hidden is not None:
            y = y + self.hidden[0].sum()
        self.hidden = (y, y * 2) if keeps else None
        return y


def _embedded(m: Net, look: Callable) -> Tensor:
    x = m.embed(torch.arange(4))
    look((x,))
    return m(x)


def _in_an_object(m: Net, look: Callable) -> Tensor:
    x = types.SimpleNamespace(value=m.embed(torch.arange(4)))
    look((x,))
    return m(x)


def _in_containers(m: Net, look: Callable) -> Tensor:
    x = {"value": (torch.tanh(m.embed(torch.arange(4))) + 1,)}
    look((x,))
    return m(x)


def _hidden(m: Net, look: Callable) -> Tensor:
    first = m(torch.ones(4, 8), True)
    look((torch.ones(6, 8),))
    return m(torch.ones(6, 8)) + first.sum()


def _twice(m: Net, look: Callable) -> Tensor:
    first = m(torch.ones(4, 8))
    x = torch.cat([first, first])
    look((x,))
    return m(x) + first.sum()


def _frozen_prompt(m: Net, look: Callable) -> Tensor:
    m.requires_grad_(False)
    m.prompt = torch.ones(2, 8, requires_grad=True)  # type: ignore[assignment]
    x = torch.cat([m.prompt, torch.ones(4, 8)])  # type: ignore[list-item]
    look((x,))
    return m(x)


def _frozen_leaf(m: Net, look: Callable) -> Tensor:
    m.requires_grad_(False)
    m.prompt = torch.ones(4, 8, requires_grad=True)  # type: ignore[assignment]
    look((m.prompt,))
    return m(m.prompt)


HABITS = (_embedded, _in_an_object, _in_containers, _hidden, _twice, _frozen_prompt, _frozen_leaf)


def _train(habit: Callable[[Net, Callable], Tensor], way: str) -> list[Any]:
    torch.manual_seed(0)
    model = Net()
    tide = (
        lowtide.optimize(model, budget="1GiB", engine=virtual(1), memory={"min_bytes": 1})
        if way == "optimize"
        else None
    )

    def look(batch: tuple) -> None:
        loss = lambda y: y.square().mean()  # noqa: E731
        if way == "observe":
            lowtide.observe(model, batch, loss=loss)
        if way == "observe a function":
            lowtide.observe(model, lambda: loss(model(*batch)))
        if way == "plan":
            lowtide.plan(model, batch, loss=loss, budget="1GiB", hardware="cpu")

    found: list[Any] = []
    for _ in range(2):
        loss = habit(model, look).square().mean()
        loss.backward()
        prompt = getattr(model, "prompt", None)
        found += [loss.item(), *(p.grad.tolist() for p in model.parameters() if p.grad is not None)]
        found += [prompt.grad.tolist()] if prompt is not None else []
    if tide is not None:
        assert tide.plan is not None
        tide.remove()
    return found


@pytest.mark.parametrize("habit", HABITS, ids=lambda habit: habit.__name__[1:])
def test_graphs_that_were_there_are_left_to_their_backward(habit: Any) -> None:
    plain = _train(habit, "")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for way in ("optimize", "observe", "observe a function", "plan"):
            assert _train(habit, way) == plain, way
