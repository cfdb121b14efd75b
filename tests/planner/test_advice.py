"""A refusal says what most of the memory is, and changes that were planned: what it says fits does fit."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from lowtide.config.memory import load_memory
from lowtide.core.profile import Profile, StateBytes
from lowtide.errors import BudgetError
from lowtide.planner.advice import WEIGHTS, Change
from lowtide.planner.plan_profile import plan_profile
from lowtide.timeline.step import Link
from tests.support.profiles import MIB, decoder_profile

LINK = Link(out_bytes_per_second=2e9, in_bytes_per_second=2e9, latency_seconds=1e-6)


def with_state(**changes: int) -> Profile:
    profile = decoder_profile(4)
    return dataclasses.replace(profile, state=dataclasses.replace(profile.state, **changes))


def refusal(profile: Profile, mib: int, changes: tuple[Change, ...] = (), **memory: Any) -> BudgetError:
    with pytest.raises(BudgetError) as caught:
        plan_profile(profile, load_memory({"budget": mib * MIB, **memory}), link=LINK, changes=changes)
    said = str(caught.value).splitlines()
    assert said[2:] == [f"  - {suggestion}" for suggestion in caught.value.suggestions]
    return caught.value


def most(error: BudgetError) -> str:
    return str(error).splitlines()[1]


def test_the_optimizers_state() -> None:
    moving = {"optimizer": 2048 * MIB, "optimizer_movable": 2048 * MIB, "optimizer_unit": 64 * MIB}
    error = refusal(with_state(**moving), 1200)
    assert most(error) == "  most of it is the optimizer's state: 2.0 GiB of 2.3 GiB"
    plan = plan_profile(
        with_state(**moving),
        load_memory({"budget": 1200 * MIB, "optimizer": "swap"}),
        link=LINK,
        time_limit_seconds=1.0,
        with_suggestions=False,
    )
    assert plan.predicted is not None and plan.predicted.peak_bytes <= 1200 * MIB
    assert error.suggestions[0].startswith("with 'optimizer: swap' it fits: peak 1.")
    assert error.suggestions[1].startswith("a budget of 2.4 GiB: ")


def test_the_optimizers_step() -> None:
    error = refusal(with_state(optimizer_temporaries=3000 * MIB), 1500)
    assert most(error) == "  most of it is the optimizer's step: 2.9 GiB of 3.4 GiB"
    assert error.suggestions[0].startswith("with 'an optimizer with fused=True' it fits: peak ")


def test_weights_and_changes_of_who_has_the_model() -> None:
    def change(text: str, profile: Profile | None) -> Change:
        return Change(text=text, helps=frozenset({WEIGHTS}), profile=lambda: profile)

    changes = (
        change("nowhere to be had", None),
        change("a little", with_state(parameters=1900 * MIB)),
        change("half of them", with_state(parameters=128 * MIB)),
        change("one too many", with_state(parameters=128 * MIB)),
    )
    error = refusal(with_state(parameters=2000 * MIB), 900, changes)
    assert most(error) == "  most of it is weights: 2.0 GiB of 2.4 GiB"
    fits, fails, larger, _ = error.suggestions
    assert fits.startswith("with 'half of them' it fits: peak 89")
    assert fails == "with 'a little' it needs 2.3 GiB still"
    assert larger.startswith("a budget of 2.4 GiB: ")


def test_activations_that_rules_hold() -> None:
    error = refusal(decoder_profile(4), 700, swap="none", recompute="none")
    assert most(error) == "  most of it is activations: 1.1 GiB of 1.5 GiB"
    assert error.suggestions[0].startswith("with 'recompute: auto, swap: auto' it fits: peak ")


def test_gradients() -> None:
    profile = dataclasses.replace(
        with_state(gradients=4096 * MIB),
        op_gradient_bytes=tuple(32 * count for count in decoder_profile(4).op_gradient_bytes),
        op_bytes=tuple(8 * MIB + 32 * count for count in decoder_profile(4).op_gradient_bytes),
    )
    assert most(refusal(profile, 1000)) == "  most of it is gradients: 4.0 GiB of 4.4 GiB"


def test_nothing_is_planned_again_for_who_wants_no_ways_out() -> None:
    def never() -> Profile:
        raise AssertionError("nobody asked")

    changes = (Change(text="x", helps=frozenset({WEIGHTS}), profile=never),)
    profile = dataclasses.replace(decoder_profile(4), state=StateBytes(parameters=1 << 30))
    with pytest.raises(BudgetError) as caught:
        plan_profile(profile, load_memory({"budget": MIB}), link=LINK, changes=changes, with_suggestions=False)
    assert "most of it" not in str(caught.value)
