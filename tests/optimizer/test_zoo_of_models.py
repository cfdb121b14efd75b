"""Every model of the zoo trains to the same bits with its optimizer swapped, in each way of overlapping."""

from __future__ import annotations

import dataclasses

import pytest

from tests.support import zoo
from tests.support.optimizer_zoo import swapped
from tests.support.virtual_engine import VirtualEngine

OVERLAPS = ("step", "backward", "in_backward")
TURNS = (OVERLAPS[::2], OVERLAPS[1::2])
"""Two of them for every second model, in turn; the others are `make test-extended`'s."""


@pytest.mark.parametrize(
    ("name", "overlaps"),
    [
        pytest.param(name, TURNS[turn], marks=[pytest.mark.extended] if (number + 2 * turn) % 4 else [])
        for number, name in enumerate(zoo.CASES)
        for turn in (0, 1)
    ],
)
def test_same_bits(name: str, overlaps: tuple[str, ...]) -> None:
    case = zoo.CASES[name]
    for seed, overlap in enumerate(overlaps):
        accumulate = 1 if overlap == "in_backward" else 2
        truth = zoo.plain_result(name, 3, 3, accumulate)
        model = case.build(3)
        optimizer = zoo.make_optimizer(model)
        engine = VirtualEngine(seed)
        handle = swapped(optimizer, engine, overlap=overlap)
        result = zoo.train(case, model, optimizer, 3, num_steps=3, accumulate=accumulate)
        handle.detach()
        if overlap == "in_backward":  # gradients are gone when `train` looks at them
            result, truth = (dataclasses.replace(each, grads={}) for each in (result, truth))
        zoo.assert_same(result, truth)
        assert engine.violations == []
        assert engine.num_slots == 0
