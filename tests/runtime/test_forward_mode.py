"""Forward-mode derivatives and `torch.func`, around the model and inside it: tensors that have a size and no memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import lowtide
from lowtide.tensors.kinds import is_plain
from tests.support.virtual_engine import virtual


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(torch.sigmoid(self.first(x)) * x))


def _dual(model: nn.Module, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        primal, tangent = forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x))))
        return primal.sum() + tangent.sum()


def _jvp(model: nn.Module, x: Tensor) -> Tensor:
    primal, tangent = torch.func.jvp(model, (x,), (torch.ones_like(x),))
    return primal.sum() + tangent.sum()


def _vmap(model: nn.Module, x: Tensor) -> Tensor:
    return torch.vmap(model)(x).square().sum()


class Around(nn.Module):
    """The same, inside of a model."""

    def __init__(self, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.net = Net()
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.net, x)


CALLS = {"dual": _dual, "jvp": _jvp, "vmap": _vmap}


def _train(name: str, is_inside: bool, engine: str, memory: dict[str, Any] | None, budget: str | None) -> list[Tensor]:
    torch.manual_seed(0)
    model = Around(CALLS[name]) if is_inside else Net()
    tide: Any = None
    if budget is not None:
        tide = lowtide.optimize(model, budget=budget, engine=engine)
    elif memory is not None:
        tide = lowtide.apply(model, {"min_bytes": 0, **memory}, engine=engine)
    found = []
    for step in range(2):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        loss = model(x) if is_inside else CALLS[name](model, x)
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters())]  # type: ignore[union-attr]
        model.zero_grad()
    if tide is not None:
        tide.remove()
    return found


@pytest.mark.parametrize("engine", [virtual(1), "host"])
@pytest.mark.parametrize("is_inside", [False, True], ids=["around", "inside"])
@pytest.mark.parametrize("name", CALLS)
def test_forward_mode_is_the_same_to_the_bit(name: str, is_inside: bool, engine: str) -> None:
    plain = _train(name, is_inside, engine, None, None)
    for memory, budget in (({"swap": "all"}, None), ({"swap": "none"}, None), (None, "1GiB")):
        found = _train(name, is_inside, engine, memory, budget)
        assert all(torch.equal(one, other) for one, other in zip(found, plain, strict=True))


def test_what_has_a_size_and_no_memory_is_not_plain() -> None:
    seen = []
    zeros = torch._efficientzerotensor((4, 8))  # type: ignore[attr-defined]
    torch.func.vmap(lambda x: seen.append(is_plain(x)) or x)(torch.ones(2, 2))
    assert seen == [False]
    assert not is_plain(zeros)
    assert is_plain(torch.ones(2))


@pytest.mark.parametrize("memory", [{"keep": ["*"]}, {"swap": "all"}, {"recompute": ["1", "3"]}, "solved", "optimize"])
def test_tangents_of_a_first_forward_are_those_without_a_plan(memory: Any) -> None:
    """torch has another formula for the tangent of a norm under any dispatch mode, one that learns a table too."""

    def tangents(memory: Any) -> list[Tensor]:
        torch.manual_seed(0)
        parts = [nn.Linear(16, 16), nn.LayerNorm(16), nn.SiLU(), nn.LayerNorm(16), nn.Linear(16, 16)]
        model, x = nn.Sequential(*parts), torch.randn(64, 16)
        tide: Any = None
        if memory == "optimize":
            tide = lowtide.optimize(model, budget="1GiB", engine=virtual(1))
        elif memory is not None:
            plan = lowtide.plan(model, (x,), loss=Tensor.sum, budget="1GiB") if memory == "solved" else memory
            tide = lowtide.apply(model, plan, engine=virtual(1))
        found = []
        for _ in range(2):
            with forward_ad.dual_level():
                out = forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x))))
                found.append(out.tangent.clone())
        primal = model(x)
        primal.sum().backward()
        found += [primal.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
        if tide is not None:
            tide.remove()
        return found

    plain = tangents(None)
    with pytest.warns(UserWarning, match="so nothing of this pass is planned or moved"):
        found = tangents(memory)
    assert all(torch.equal(one, other) for one, other in zip(found, plain, strict=True))
