"""Presets turn into plans that can be told apart: the fastest, the smallest, and the knee between them."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from lowtide.config.memory import load_memory
from lowtide.core.budget import Preset
from lowtide.core.plan import Plan
from lowtide.errors import BudgetError
from lowtide.planner.plan_profile import plan_profile
from lowtide.planner.presets import knee, plan_preset
from lowtide.timeline.step import Link
from lowtide.units import format_bytes
from tests.support.profiles import MIB, decoder_profile

LINK = Link(out_bytes_per_second=2e9, in_bytes_per_second=2e9, latency_seconds=1e-6)
MOST = 1 << 40


@functools.cache
def planned(preset: Preset, most_bytes: int = MOST, **memory: Any) -> tuple[Plan, str]:
    config = load_memory({"budget": most_bytes, **memory})
    return plan_preset(preset, most_bytes, functools.partial(plan_profile, decoder_profile(8), config, link=LINK))


def peak(plan: Plan) -> int:
    assert plan.predicted is not None
    return plan.predicted.peak_bytes


def seconds(plan: Plan) -> float:
    assert plan.predicted is not None
    return plan.predicted.step_seconds


def test_fastest_keeps_all_that_fits() -> None:
    plan, line = planned("fastest")
    assert plan.does_nothing and plan.budget_bytes == MOST
    assert line == "preset fastest: the fastest plan within 1024.0 GiB"
    less, _ = planned("fastest", 900 * MIB)
    assert not less.does_nothing and peak(less) <= 900 * MIB


def test_smallest_is_the_least_that_can_be_planned() -> None:
    plan, line = planned("smallest")
    assert plan.predicted is not None and peak(plan) == plan.predicted.floor_bytes
    assert line == f"preset smallest: peak {format_bytes(peak(plan))}, the least that can be planned"
    config = load_memory({"budget": peak(plan) - 1})
    with pytest.raises(BudgetError):
        plan_profile(decoder_profile(8), config, link=LINK, with_suggestions=False)


def test_balanced_is_between_them_and_says_between_what() -> None:
    smallest, fastest = planned("smallest")[0], planned("fastest")[0]
    plan, line = planned("balanced")
    assert peak(smallest) <= peak(plan) < peak(fastest)
    assert seconds(fastest) <= seconds(plan) < seconds(smallest)
    assert line.startswith(f"preset balanced: peak {format_bytes(peak(plan))}, ")
    assert f"from {format_bytes(peak(smallest))} (" in line and f"to {format_bytes(peak(fastest))} (" in line


def test_presets_stay_within_what_there_is_and_within_rules() -> None:
    for preset in ("fastest", "balanced", "smallest"):
        plan, _ = planned(preset, 900 * MIB, recompute="none")
        assert peak(plan) <= 900 * MIB
        assert all(site.recipe is None for site in plan.sites)


@pytest.mark.parametrize("preset", ["fastest", "balanced", "smallest"])
def test_where_nothing_fits_the_refusal_is_the_usual_one(preset: Preset) -> None:
    with pytest.raises(BudgetError, match="no plan fits") as caught:
        planned(preset, 100 * MIB)
    assert caught.value.suggestions


def test_the_knee() -> None:
    curve = [(10, 9.0), (20, 5.0), (30, 3.0), (60, 2.0), (110, 1.0)]
    assert knee(curve) == 2  # 0.2 + 0.25; its neighbours have 0.1 + 0.5 and 0.5 + 0.125
    assert knee(curve[::-1]) == 2
    assert knee([(10, 2.0), (20, 1.0)]) == 0  # of equals the least bytes
    assert knee([(30, 1.0), (10, 1.001), (20, 1.0)]) == 1  # no time is to be won
    assert knee([(10, 1.0)]) == 0
    line = [(10 * n, 10.0 - n) for n in range(6)]
    assert knee(line) == 0
