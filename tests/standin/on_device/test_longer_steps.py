"""Steps that are longer than planned, on the stand-in: its own count of bytes is below the budget in each of them."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import pytest
import torch

import lowtide
from lowtide.core.log import Listener
from tests.standin import budgets, device
from tests.standin.budgets import HERE, Prices
from tests.test_longer_steps import LOOPS, Loop, assert_plain_bits, budget_of

POLICIES = ("late", 1)
OFTEN = ("attention_low", 1)
"""Others are on the virtual engine: tests/test_longer_steps.py, and here in `make test-extended`."""
SLACK = 1 << 20
"""The allocator's grain, and what it keeps beside tensors."""


class OnDevice:
    """A loop on the stand-in, planned steps only."""

    def __init__(self, loop: Loop, budget_bytes: int) -> None:
        self.loop = loop
        self.before_bytes = budgets._allocated_bytes()
        self.model, self.optimizer = loop.build(HERE)
        memory = {"min_bytes": 4096, **dict(loop.memory)}
        budget = budget_bytes + self.before_bytes
        self.tide: Any = lowtide.optimize(self.model, budget=budget, memory=memory, optimizer=self.optimizer)
        self.peaks: list[int] = []
        self.results: list[torch.Tensor] = []

    def _planned(self, line: str) -> None:
        if line.startswith("lowtide: plan "):
            device.take_peak()  # what it took to make the plan

    def run(self) -> list[int]:
        torch.manual_seed(1)
        device.take_peak()
        for step in range(len(self.loop.steps)):
            self.optimizer.zero_grad()
            with Listener(self._planned):
                self.results += self.loop.losses(self.model, step)
            self.optimizer.step()
            self.peaks.append(device.take_peak() - self.before_bytes)
        return self.peaks


@pytest.mark.filterwarnings("error:lowtide. no plan:UserWarning")
@pytest.mark.parametrize(
    ("name", "policy"),
    [
        pytest.param(name, policy, marks=[] if (name, policy) == OFTEN else [pytest.mark.extended])
        for name in LOOPS
        for policy in POLICIES
    ],
)
def test_the_budget_holds_in_every_step(name: str, policy: str | int) -> None:
    loop, budget_bytes = LOOPS[name], budget_of(name) + SLACK
    device.play(policy, 0.5)
    with contextlib.ExitStack() as stack:
        stack.enter_context(budgets.at_given_prices(Prices.drawn(3, 1)))
        found = OnDevice(loop, budget_bytes)
        tide = stack.enter_context(found.tide)
        peaks = found.run()
        what = [round(peak / budget_bytes, 3) for peak in peaks], [event.why for event in tide.events]
    device.play("late")
    assert max(peaks) <= budget_bytes, what
    assert_plain_bits(loop, found, HERE)
    assert device.violations() == []
    del found, tide
    gc.collect()
