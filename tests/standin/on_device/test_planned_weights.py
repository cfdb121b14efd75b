"""`memory.weights` on the stand-in: one budget for weights, state and activations, held by the device's own count."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import lowtide
from lowtide.core.log import Listener
from tests.standin import budgets, device
from tests.standin.budgets import Prices, Training
from tests.support.grid import one_of

TRAINING = Training(width=128, tokens=32, num_layers=4, has_optimizer=True)


def _trained(memory: dict[str, Any] | None, budget: int = 0) -> tuple[list[torch.Tensor], list[int], Any]:
    """Losses and weights, the peak of each planned step, and the plan."""
    before = budgets._allocated_bytes()
    model = TRAINING.model()
    optimizer = TRAINING.optimizer(model)
    assert optimizer is not None
    found: list[torch.Tensor] = []
    peaks: list[int] = []
    plan = tide = None

    def hear(line: str) -> None:
        if line.startswith("lowtide: plan ") and "(first step)" in line:
            device.take_peak()  # the observed step is no planned one

    if memory is not None:
        tide = lowtide.optimize(model, budget=budget + before, optimizer=optimizer, memory=memory)
    with Listener(hear):
        for step in range(5):
            ids = TRAINING.batch(step, 0)
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach().cpu())
            del loss
            peaks.append(device.take_peak() - before)
    if tide is not None:
        plan = tide.plan
        tide.remove()
    return [*found, *(p.detach().cpu() for p in model.parameters())], peaks, plan


@functools.cache
def _plain() -> tuple[list[torch.Tensor], int]:
    device.play("early")
    found, peaks, _ = _trained(None)
    return found, max(peaks)


KEEPS = {"recompute": "none", "swap": "none"}


@pytest.mark.parametrize(
    ("policy", "number", "limits"), one_of(2, [("late", 0, KEEPS), (7, 1, {"recompute": "none"})], first=1)
)
def test_the_budget_is_held_with_plains_bits(policy: str | int, number: int, limits: dict[str, str]) -> None:
    plain, peak_bytes = _plain()
    budget = peak_bytes // 2
    device.play(policy)
    with budgets.at_given_prices(Prices.drawn(number, number)):
        found, peaks, plan = _trained({"weights": "swap", "min_bytes": 0, "strict": True, **limits}, budget)
    device.play("early")
    assert not device.violations()
    assert all(torch.equal(one, other) for one, other in zip(found, plain, strict=True))
    assert max(peaks) <= budget, [round(peak / budget, 4) for peak in peaks]
    assert plan.moves_weights


def test_before_the_first_step_the_weights_have_left() -> None:
    before = budgets._allocated_bytes()
    model = TRAINING.model()
    optimizer = torch.optim.AdamW(model.parameters())
    weights = sum(parameter.nbytes for parameter in model.parameters())
    with lowtide.optimize(model, "1GiB", memory={"weights": "swap", **KEEPS}, optimizer=optimizer) as tide:
        assert budgets._allocated_bytes() - before < weights // 4
        ids = TRAINING.batch(0, 0)
        model(input_ids=ids, labels=ids).loss.backward()
        assert tide.plan is not None and tide.plan.moves_weights
