"""Every operator of torch's own database, its first float32 sample, under hooks that copy and poison what it saves."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tests.attack import operators


def sweep(**how: Any) -> operators.Found:
    """`operators.sweep` in a thread of its own: torch's database reads the whole stack for each operator, and pytest's
    is so deep that this took nine tenths of the time."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(operators.sweep, dtypes=(torch.float32,), num_samples=1, **how).result()


@pytest.mark.slow
def test_only_rrelu_saves_what_it_fills_afterwards() -> None:
    found = sweep(ways=("copied",))
    assert found.unexpected == []
    assert {name for name, _, _ in found.wrong} == {"nn.functional.rrelu"}
    assert found.counts["copied", "equal"] > 600


@pytest.mark.slow
@pytest.mark.parametrize("way", ["swap", "recompute", "solved"])
def test_operators_under_a_plan_are_the_same_to_the_bit(way: str) -> None:
    # Every eighth; `make attack` tries all of them.
    found = sweep(ways=(way,), part=slice(None, None, 8))
    assert found.unexpected == []
    assert found.counts[way, "equal"] > 75


def test_hooks_that_change_a_byte_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    fill = operators._Copy.open

    def wrong(self: operators._Copy) -> torch.Tensor:
        result = fill(self)
        result.untyped_storage()[0] ^= 1
        return result

    monkeypatch.setattr(operators._Copy, "open", wrong)
    found = sweep(ways=("copied",), part=slice(0, 40))
    assert found.unexpected != []
