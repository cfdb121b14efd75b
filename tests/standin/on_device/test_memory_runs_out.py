"""An allocation that finds no memory, whichever one it is: the step is right all the same, or ends in the error that
says what was tried; and the next step is right."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import torch

import lowtide
from lowtide.tensors.private import gradient_hooks
from tests.standin import device
from tests.standin.swaps import HERE
from tests.support import zoo

CASE = zoo.CASES["llama"]
PLANS = {
    "swap": {"swap": "all", "min_bytes": 0},
    "recompute": {"recompute": "all"},
    "part": {"swap": ["model.layers.0"], "min_bytes": 0},
}


class Rig:
    """A model under a plan, and what its gradients should be."""

    def __init__(self, plan: Any) -> None:
        self.num_calls = 0
        self.model = CASE.build(3, HERE)
        self.batch = CASE.batch(3, HERE)
        self.closure()
        self.truth = self.gradients()
        self.tide = lowtide.apply(self.model, plan)
        self.tide._scheduler.window.min_bytes = 0
        self.step()  # its tables are learned
        before = device.num_allocations()
        self.step()
        self.num_allocations = device.num_allocations() - before
        assert self.is_right()

    def closure(self) -> None:
        self.num_calls += 1
        self.model.zero_grad()
        CASE.loss(self.model, self.batch).backward()

    def step(self) -> None:
        self.tide.step(self.closure)

    def gradients(self) -> list[torch.Tensor]:
        return [parameter.grad.cpu() for parameter in self.model.parameters() if parameter.grad is not None]

    def is_right(self) -> bool:
        return all(torch.equal(a, b) for a, b in zip(self.gradients(), self.truth, strict=True))


def lives_through(rig: Rig, first: int, num: int) -> bool:
    """Whether the step came to its end, or had not begun; False where it ended in the stated error."""
    is_complete, num_calls = True, rig.num_calls
    with warnings.catch_warnings(), device.refusing(first, num):
        warnings.simplefilter("ignore")
        try:
            rig.step()
        except torch.OutOfMemoryError as error:
            is_complete = False
            notes = getattr(error, "__notes__", [])
            # Where not even the copies for going back could be made, nothing has begun.
            assert rig.num_calls == num_calls or any(note.startswith("lowtide: ") for note in notes), notes
    if is_complete:
        assert rig.is_right(), f"allocation {first}"
    rig.step()
    assert rig.is_right(), f"the step after allocation {first} was refused"
    assert device.violations() == []
    return is_complete or rig.num_calls == num_calls + 1  # the step after it


def check(plan: str, every: int, policy: str | int) -> None:
    device.play(policy)
    rig = Rig(PLANS[plan])
    gc.collect()
    are_complete = [lives_through(rig, number, 1) for number in range(0, rig.num_allocations, every)]
    assert plan != "part" or sum(are_complete) >= 2, "it may swap more, and then recompute; the others have done that"
    lives_through(rig, 0, 10_000)
    lives_through(rig, rig.num_allocations // 2, 10_000)
    rig.tide.settle()
    gc.collect()
    assert rig.tide._scheduler.num_open() == 0
    rig.tide.remove()


@pytest.mark.parametrize("plan", PLANS)
def test_some_allocation_is_refused(plan: str) -> None:
    check(plan, 60, "late")


def test_a_step_that_could_not_even_begin_leaves_gradients_and_hooks_as_they_were() -> None:
    rig = Rig(PLANS["part"])
    parameters = list(rig.model.parameters())
    before = [parameter.grad for parameter in parameters]
    with device.refusing(0, 1), pytest.raises(torch.OutOfMemoryError):
        rig.step()
    assert all(parameter.grad is grad for parameter, grad in zip(parameters, before, strict=True))
    assert not any(gradient_hooks(parameter) for parameter in parameters)
    rig.tide.remove()


@pytest.mark.extended
@pytest.mark.parametrize("policy", ["late", "hidden", 1, 2])
@pytest.mark.parametrize("plan", PLANS)
def test_any_allocation_is_refused(plan: str, policy: str | int) -> None:
    check(plan, 1, policy)
