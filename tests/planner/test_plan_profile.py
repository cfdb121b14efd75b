"""What a solved plan says of its time, beside what the timeline plays."""

from __future__ import annotations

import dataclasses

import pytest

from lowtide.config.memory import load_memory
from lowtide.core.decisions import Prediction
from lowtide.core.plan import Plan
from lowtide.planner import space
from lowtide.planner.plan_profile import plan_profile, plan_within, space_of
from lowtide.planner.problem import state_bytes
from lowtide.timeline.step import Link
from tests.support.profiles import decoder_profile

LINK = Link(out_bytes_per_second=50e9, in_bytes_per_second=50e9)
PROFILE = decoder_profile()


def said(link: Link, **rules: object) -> Prediction:
    plan = plan_profile(PROFILE, load_memory({"budget": "100GiB", **rules}), link=link)
    assert plan.predicted is not None
    return plan.predicted


@pytest.mark.parametrize("layers", [["layers.0"], ["layers.*"]])
def test_who_swaps_pays_once_for_all_memory_that_is_taken_again(layers: list[str]) -> None:
    free = said(LINK, swap=layers)
    priced = said(dataclasses.replace(LINK, page_fault_seconds_per_byte=1e-12), swap=layers)
    expected = 1e-12 * (free.plain_peak_bytes - state_bytes(PROFILE))
    assert free.page_fault_seconds == 0.0 and priced.page_fault_seconds == pytest.approx(expected) and expected > 0.0
    assert priced.step_seconds == pytest.approx(free.step_seconds + expected)
    assert dataclasses.replace(priced, step_seconds=free.step_seconds, page_fault_seconds=0.0, gap=free.gap) == free
    # All plans that the rule leaves pay it: they can be faster by as many seconds as without it.
    assert priced.gap * priced.step_seconds == pytest.approx(free.gap * free.step_seconds)


def test_who_swaps_nothing_pays_nothing() -> None:
    priced = said(dataclasses.replace(LINK, page_fault_seconds_per_byte=1e-12), swap="none")
    assert priced.page_fault_seconds == 0.0 and priced == said(LINK, swap="none")


def test_a_plan_without_its_floor_is_the_same_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks for one where a quick look says that a budget is enough."""
    config = load_memory({"budget": "100GiB"})
    plan = plan_profile(PROFILE, config, link=LINK)
    assert plan.predicted is not None and plan.predicted.floor_bytes is not None
    monkeypatch.setattr(space, "floor", lambda *step: pytest.fail("a floor was looked for"))
    plans = space_of(dataclasses.replace(PROFILE), config, LINK)
    budget = 100 * 2**30
    assert plans.has_plan(budget) and not plans.has_plan(0)
    bare = plan_within(plans, budget, with_floor=False)
    assert bare == dataclasses.replace(plan, predicted=dataclasses.replace(plan.predicted, floor_bytes=None))
    assert Plan.from_json(bare.to_json()) == bare
    assert "floor" in str(plan) and "floor" not in str(bare)
