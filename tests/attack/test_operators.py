"""Every operator of torch's own database, under hooks that copy and overwrite what it saves, and by recipe."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tests.attack import operators
from tests.attack.left_out import LEFT_OUT, WITHOUT_RECIPE


def sweep(**how: Any) -> operators.Found:
    """`operators.sweep` in a thread of its own: torch's database reads the whole stack for each operator, and pytest's
    is so deep that this took nine tenths of the time."""
    given = {"dtypes": (torch.float32,), "num_samples": 6, "is_largest_only": True, **how}
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(operators.sweep, **given).result()


@pytest.mark.slow
@pytest.mark.extended  # an engine that moves shows it too, but for one that writes what it saved
def test_all_operators_are_the_same_to_the_bit_when_what_they_save_is_copied() -> None:
    found = sweep(ways=("copied",))
    assert found.unexpected == []
    assert {entry[:2] for entry in found.wrong} == {("nn.functional.rrelu", "copied")}
    assert found.counts["copied", "equal"] > 650


@pytest.mark.slow
def test_all_operators_are_the_same_to_the_bit_when_what_they_save_is_moved_or_made_again() -> None:
    found = sweep(ways=("virtual", "recipes"))
    assert found.unexpected == []
    assert found.wrong == []
    assert found.counts["virtual", "equal"] > 650
    assert found.counts["virtual", "refused"] == 0
    # What was sent away is gone, so its bytes could only come from the copy.
    assert found.counts["virtual", "(copied)"] > 1800
    assert found.counts["virtual", "(held)"] == 0
    assert found.counts["recipes", "(made)"] > 1800
    # An operator that is not tried any more must be named, with its reason; one that is tried again must not.
    assert found.left_out == LEFT_OUT
    assert found.without_recipe == WITHOUT_RECIPE


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.complex64, pytest.param(torch.bfloat16, marks=pytest.mark.extended)], ids=str)
def test_operators_of_other_types_are_the_same_to_the_bit(dtype: torch.dtype) -> None:
    found = sweep(ways=("virtual", "recipes"), dtypes=(dtype,), part=slice(None, None, 3))
    assert found.unexpected == []
    assert found.counts["virtual", "equal"] > 100
    assert found.counts["recipes", "(made)"] > 300


@pytest.mark.slow
@pytest.mark.extended  # engines know bytes, not operators; draws of the attack and models of the zoo use this one
def test_operators_on_the_host_engine_are_the_same_to_the_bit() -> None:
    # Every fourth. `make attack` tries all of them.
    found = sweep(ways=("host",), part=slice(1, None, 4))
    assert found.unexpected == []
    assert found.counts["host", "equal"] > 150
    assert found.counts["host", "refused"] == 0
    assert found.counts["host", "(copied)"] > 400
    assert found.counts["host", "(held)"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("way", ["recompute", "solved"])
def test_operators_under_a_plan_are_the_same_to_the_bit(way: str) -> None:
    # Every eighth; `make attack` tries all of them.
    found = sweep(ways=(way,), part=slice(None, None, 8))
    assert found.unexpected == []
    assert found.counts[way, "equal"] > 75
    assert found.counts[way, "(recomputed)"] > 12


def test_hooks_that_change_a_byte_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    fill = operators._Copy.open

    def wrong(self: operators._Copy) -> torch.Tensor:
        result = fill(self)
        result.untyped_storage()[0] ^= 1
        return result

    monkeypatch.setattr(operators._Copy, "open", wrong)
    found = sweep(ways=("copied",), part=slice(0, 40))
    assert found.unexpected != []


def test_bytes_that_an_operator_leaves_unset_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the builder of recipes took them for set, as it did for the losses that add up a block."""
    monkeypatch.setattr("lowtide.recipes.build.shows_all", lambda storage: True)
    from torch.testing._internal.common_methods_invocations import op_db

    place = [op.name for op in op_db].index("nn.functional.mse_loss")
    found = sweep(ways=("recipes",), part=slice(place, place + 1))
    assert [entry[:2] for entry in found.unexpected] == [("nn.functional.mse_loss", "recipes")]
