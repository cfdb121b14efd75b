"""A model whose forward is never called is told so, once, by the name of the module whose forward runs."""

from __future__ import annotations

import copy
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import lowtide
from tests.support.virtual_engine import virtual

X = torch.ones(4, 8)


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Lit(nn.Module):
    """As a Lightning module: the trainer calls `training_step`, and that the model inside."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Body()

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)

    def training_step(self, x: Tensor) -> Tensor:
        return self.model(x)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"encoder": nn.Linear(8, 8), "decoder": nn.Linear(8, 8)})
        self.frozen = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.training_step(x)

    def training_step(self, x: Tensor) -> Tensor:
        return self.parts["decoder"](self.parts["encoder"](self.frozen(x))).sum()


def _optimize(model: nn.Module) -> Any:
    return lowtide.optimize(model, budget="1GiB", engine=virtual(1))


def _apply(model: nn.Module) -> Any:
    return lowtide.apply(model, {"swap": "all", "min_bytes": 0}, engine=virtual(1))


CALLS: dict[str, Callable[[nn.Module], Any]] = {"lowtide.optimize": _optimize, "lowtide.apply": _apply}
END = ", so nothing is planned or moved."


def _warnings(call: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(warning.message) for warning in caught]


def _hooks(model: nn.Module) -> int:
    return sum(len(parameter._backward_hooks or ()) for parameter in model.parameters())


def _train(step: Callable[[Tensor], Tensor]) -> None:
    for _ in range(3):
        step(X).backward()


def test_a_part_of_the_module_runs() -> None:
    model = Lit()
    with _optimize(model) as tide:
        assert _warnings(lambda: _train(model.training_step)) == [
            "lowtide: gradients arrived at 'model' (Body), and the forward of Lit, which lowtide.optimize wrapped, was "
            "never called; give lowtide.optimize the module whose forward runs" + END
        ]
        assert tide.plan is None
        assert _hooks(model) == 0
    with _optimize(model.model) as tide:
        assert _warnings(lambda: _train(model.training_step)) == []
        assert tide.plan is not None


def test_under_rules_the_layers_of_a_part_are_enough() -> None:
    model = Lit()
    with _apply(model) as tide:
        assert _warnings(lambda: _train(model.training_step)) == []
        assert tide.stats.swapped_bytes


@pytest.mark.parametrize("call", CALLS)
def test_several_parts_run(call: str) -> None:
    model = Pair()
    with CALLS[call](model):
        assert _warnings(lambda: _train(model.training_step)) == [
            "lowtide: gradients arrived at 'parts.decoder' (Linear) and 'parts.encoder' (Linear), and the forward of "
            f"Pair, which {call} wrapped, was never called; give {call} the module whose forward runs" + END
        ]


@pytest.mark.parametrize("call", CALLS)
def test_the_forward_was_replaced_afterwards(call: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8))

    def forward(self: nn.Sequential, x: Tensor) -> Tensor:
        return self[0](x).sum()

    with CALLS[call](model):
        model.forward = types.MethodType(forward, model)  # type: ignore[method-assign]
        by = f"{__name__}.{forward.__qualname__}"
        assert _warnings(lambda: _train(model)) == [
            f"lowtide: gradients arrived at '0' (Linear), and the forward of Sequential that {call} wrapped was "
            f"replaced afterwards (by {by}) and not called; call {call} after that" + END
        ]
    with CALLS[call](model):
        assert _warnings(lambda: _train(model)) == []


def test_the_forward_runs_where_lowtide_steps_aside() -> None:
    aside = (
        "ran only where lowtide steps aside (without gradients, under forward-mode derivatives, where saved-tensor "
        "hooks are disabled, or inside a checkpoint region around it); checkpoint "
        "parts of the model instead, or leave that to lowtide" + END
    )
    x = X.clone().requires_grad_()
    for reentrant, call in ((True, "lowtide.optimize"), (True, "lowtide.apply"), (False, "lowtide.apply")):
        model = Body()
        with CALLS[call](model):
            [said] = _warnings(lambda: _train(lambda _: checkpoint(model, x, use_reentrant=reentrant)))  # noqa: B023
        assert said.startswith("lowtide: gradients arrived at 'layers.")
        assert said.endswith(aside)
    for put_on in CALLS.values():
        model = Body()
        with put_on(model), disable_saved_tensors_hooks("none here"):
            [said] = _warnings(lambda: _train(model))  # noqa: B023
        assert said.endswith(aside)


@pytest.mark.parametrize("call", CALLS)
def test_nothing_is_said_or_left_where_the_forward_runs(call: str) -> None:
    model = Body()
    tide = CALLS[call](model)
    assert _hooks(model) == 4
    twin = copy.deepcopy(model)
    assert _hooks(twin) == 0
    with torch.no_grad():
        model(X)  # an evaluation first
    assert _hooks(model) == 4
    assert _warnings(lambda: _train(model)) == []
    assert _hooks(model) == 0
    tide.remove()
    CALLS[call](model).remove()
    assert _hooks(model) == 0
    assert _warnings(lambda: _train(model)) == []


@pytest.mark.filterwarnings("ignore:lowtide. out of memory:UserWarning")
@pytest.mark.parametrize("call", CALLS)
def test_no_hook_comes_back_with_a_micro_batch_that_runs_again(call: str) -> None:
    model, failures = Body(), [True]

    def step() -> None:
        loss = model(X)
        if failures.pop() if failures else False:
            raise torch.OutOfMemoryError("made up")
        loss.backward()

    with CALLS[call](model) as tide:
        [said] = _warnings(lambda: tide.step(step))
        assert said.startswith("lowtide: out of memory (made up); ")
        assert tide.stats.num_retries == 1
        assert _hooks(model) == 0
    assert _hooks(model) == 0


def test_gradients_are_those_of_plain_training() -> None:
    model, plain = Lit(), Lit()
    plain.load_state_dict(model.state_dict())
    with _optimize(model), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _train(model.training_step)
    _train(plain.training_step)
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
