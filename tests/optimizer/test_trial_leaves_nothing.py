"""The trial of an optimizer leaves nothing: what it shares with its twins is as it was, also where it is refused."""

import itertools
import random
import threading
import types
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lowtide
from lowtide.optimizer.requests import why_not_in_parts
from lowtide.tensors.snapshot import take
from tests.support.what_moved import changed

STEPS: list[int] = []
TALLY = types.SimpleNamespace(n=0)


class Keeps(torch.optim.Optimizer):
    """Scales its steps by a number from a place that they move on."""

    total = 0

    def __init__(self, params: Any, move: Callable[[Any], float], held: Any = None, *, refused: bool = False) -> None:
        super().__init__(params, {"lr": 0.1, "tally": types.SimpleNamespace(n=0)})
        self.move, self.held, self.refused = move, held, refused

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad * group["lr"] * (1 + 0.01 * self.move(self)))
        if self.refused:
            raise KeyError("model")


def _added(holder: Any, name: str = "n") -> int:
    setattr(holder, name, getattr(holder, name, 0) + 1)
    return int(getattr(holder, name))


def _writes_to_the_real_one(o: Keeps) -> float:
    o.held.weight.data.mul_(0.5)
    return float(o.held.weight.sum())


def _counted(o: Keeps) -> int:
    STEPS.append(1)
    return len(STEPS)


def _locked() -> Any:
    return types.SimpleNamespace(lock=threading.Lock(), n=0)


PLACES: dict[str, tuple[Callable[[Any], float], Callable[[], Any]]] = {
    "nothing": (lambda o: 0.0, lambda: None),
    "torch's random state": (lambda o: float(torch.rand(1)), lambda: None),
    "Python's random state": (lambda o: random.random(), lambda: None),
    "numpy's random state": (lambda o: np.random.rand(), lambda: None),
    "generator": (lambda o: float(torch.rand(1, generator=o.held)), torch.Generator),
    "numpy's generator": (lambda o: o.held.random(), lambda: np.random.default_rng(1)),
    "Python's generator": (lambda o: o.held.random(), lambda: random.Random(1)),
    "object": (lambda o: _added(o.held), types.SimpleNamespace),
    "object with a lock": (lambda o: _added(o.held), _locked),
    "object in a group": (lambda o: _added(o.param_groups[0]["tally"]), lambda: None),
    "module": (lambda o: float(o.held(torch.ones(2, 2)).sum() + o.held.num_batches_tracked), lambda: nn.BatchNorm1d(2)),
    "parameter of another": (_writes_to_the_real_one, lambda: nn.Linear(2, 2)),
    "global": (_counted, lambda: None),
    "global object": (lambda o: _added(TALLY), lambda: None),
    "class": (lambda o: _added(Keeps, "total"), lambda: None),
    "another optimizer": (
        lambda o: o.held.step() or 0.0, lambda: torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0)
    ),
}  # fmt: skip


@pytest.mark.parametrize("refused", [False, True], ids=["tried", "refused"])
@pytest.mark.parametrize("place", PLACES)
def test_a_trial_leaves_nothing(place: str, refused: bool) -> None:
    move, make = PLACES[place]
    weights = [nn.Parameter(torch.ones(30, 20)), nn.Parameter(torch.ones(3))]
    held = make()
    if isinstance(held, torch.optim.Optimizer):
        held.param_groups[0]["params"][0].grad = torch.ones(2)
    optimizer = Keeps(weights, move, held, refused=refused)
    before = take(beside=optimizer, called=True)
    weight = held.weight.tolist() if isinstance(held, nn.Linear) else None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            lowtide.swap_optimizer(optimizer, tier="disk").detach()
        except lowtide.ConfigError:
            assert refused or place != "nothing"
    assert changed(before) == []
    assert not optimizer.state
    assert weight is None or held.weight.tolist() == weight


class ByShape(torch.optim.Optimizer):
    """Counts the steps of each parameter in a table that its copies share."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.tally = types.SimpleNamespace(steps={})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            count = self.tally.steps[parameter.shape] = self.tally.steps.get(parameter.shape, 0) + 1
            parameter.sub_(parameter.grad / count)


def test_both_twins_begin_with_the_same_state() -> None:
    optimizer = ByShape([nn.Parameter(torch.ones(30, 20)), nn.Parameter(torch.ones(3))])
    assert why_not_in_parts(optimizer) == ""
    assert optimizer.tally.steps == {}


def test_what_a_trial_cannot_wind_back_is_named() -> None:
    optimizer = Keeps([nn.Parameter(torch.ones(30, 20))], lambda o: next(o.held), itertools.count())
    with pytest.warns(UserWarning, match="Keeps") as caught, pytest.raises(lowtide.ConfigError):
        lowtide.swap_optimizer(optimizer, tier="disk")
    assert [str(each.message) for each in caught] == [
        "lowtide: the trial of Keeps moved 'batch.held' (itertools.count) on, which cannot be wound back, so training "
        "goes on from there; keep the position as a number if that matters."
    ]
