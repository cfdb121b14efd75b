"""Gradients that are freed as they are used, in the account of a plan."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from lowtide.config.memory import load_memory
from lowtide.core.decisions import Prediction
from lowtide.core.plan import Plan
from lowtide.core.profile import Profile
from lowtide.errors import BudgetError, ConfigError
from lowtide.planner.by_rules import problem_of
from lowtide.planner.in_backward import (
    NUM_PLACES,
    UpdatesInBackward,
    _in_flight,
    closed_buckets,
    updates_allowed,
)
from lowtide.planner.place_state import bucket_size
from lowtide.planner.plan_profile import plan_profile
from lowtide.report.played_step import play
from lowtide.timeline.step import Link
from tests.planner.cases import assert_no_schedule_beats_the_bound
from tests.support.profiles import MIB, decoder_profile

LINK = Link(out_bytes_per_second=20e9, in_bytes_per_second=20e9)
MEMORY = load_memory({"budget": 4096 * MIB})


def profile_of(num_layers: int = 4, temporaries: int = 0):
    profile = decoder_profile(num_layers)
    state = dataclasses.replace(profile.state, optimizer_movable=256 * MIB, optimizer_temporaries=temporaries)
    return dataclasses.replace(profile, state=state)


def test_a_bucket_is_there_until_the_gradient_after_it_has_come() -> None:
    profile = profile_of(1)
    num_ops = len(profile.op_names)
    names = ("f",) * (num_ops - 6) + ("c.mm", "c.add", "b.mm", "a.mm", "a.add", "a.mul")
    made = (0,) * (num_ops - 6) + (10, 10, 14, 20, 21, 21)
    profile = dataclasses.replace(profile, op_names=names, op_gradient_bytes=made)

    def in_flight(bucket_bytes: int) -> list[int]:
        return _in_flight(np.asarray(made), closed_buckets(profile, bucket_bytes)).tolist()

    # c: 10, b: 4, a: 6 and 1. With room for 14 the gradients of c and b go once the first one of a has come.
    assert in_flight(14)[-6:] == [10, 10, 14, 20, 21, 21], "that of a is not added yet"
    assert in_flight(10)[-6:] == [10, 10, 14, 10, 11, 11], "c is gone when b's was added"
    assert in_flight(1)[-6:] == [10, 10, 14, 10, 11, 11]
    assert in_flight(100) == list(made)


def test_the_state_on_the_device_and_the_gradients_are_all_that_differs() -> None:
    profile = profile_of(temporaries=64 * MIB)
    own = UpdatesInBackward.of(profile, bucket_size(profile.state, LINK), 3).here(profile)
    beside = 64 * MIB // 8 + 3 * 32 * MIB
    assert own.state.optimizer == profile.state.optimizer - 256 * MIB
    assert (own.state.optimizer_movable, own.state.optimizer_temporaries) == (0, beside)
    for number, (one, other) in enumerate(zip(own.op_bytes, profile.op_bytes, strict=True)):
        made, in_flight = profile.op_gradient_bytes[number], own.op_gradient_bytes[number]
        assert one == other - made + in_flight + (beside if made else 0)
        assert 0 <= in_flight <= made
    assert own.state.gradients == own.op_gradient_bytes[-1] < profile.state.gradients
    # A bucket is an eighth of the state: an eighth of the gradients, and what has come since, are there.
    assert max(own.op_gradient_bytes) <= 16 * MIB + 128 * MIB // 25 + 1


def planned(profile: Profile, budget: int, optimizer: str = "in_backward") -> Plan:
    return plan_profile(profile, load_memory({"budget": budget, "optimizer": optimizer}), link=LINK)


def predicted(profile: Profile, budget: int, optimizer: str = "in_backward") -> Prediction:
    found = planned(profile, budget, optimizer).predicted
    assert found is not None
    return found


BUDGETS = [share * MIB for share in (352, 400, 500, 640, 800, 1100)]


def test_a_plan_keeps_its_budget_and_is_never_slower_with_more() -> None:
    profile = profile_of()
    plans = [planned(profile, budget) for budget in BUDGETS]
    found = [predicted(profile, budget) for budget in BUDGETS]
    assert all(one.peak_bytes <= budget for one, budget in zip(found, BUDGETS, strict=True))
    seconds = [one.step_seconds for one in found]
    assert seconds == sorted(seconds, reverse=True)
    assert len({one.floor_bytes for one in found}) == 1
    assert all(0.0 <= one.gap < 1.0 for one in found)
    for plan, one in zip(plans, found, strict=True):
        assert sum(line.planned_bytes for line in plan.account[:-1]) == plan.account[-1].planned_bytes
        assert plan.account[-1].planned_bytes == one.peak_bytes
        assert Plan.from_json(plan.to_json()) == plan


def test_it_needs_less_than_state_that_travels_beside_gradients_that_stay() -> None:
    profile = profile_of()
    assert predicted(profile, 2048 * MIB).floor_bytes < predicted(profile, 2048 * MIB, "swap").floor_bytes


def test_the_plan_says_how_the_state_travels() -> None:
    placement = planned(profile_of(), 640 * MIB).optimizer
    assert placement is not None and placement.overlap == "in_backward"
    assert placement.moved_bytes == 256 * MIB
    assert placement.bucket_bytes == 256 * MIB // 32 and placement.num_slots == NUM_PLACES
    assert placement.lines()[1] == (
        "  it comes and leaves while backward runs, where its parameters are updated, in buckets of 8.0 MiB"
    )


def test_visitors_carry_all_of_the_state_each_once_its_place_is_free() -> None:
    profile = profile_of()
    updates = updates_allowed(profile, MEMORY, LINK, 1)[0]
    visitors = [item for item in problem_of(profile, MEMORY, shares=updates).step.items if item.visit.nbytes]
    assert sum(item.visit.nbytes for item in visitors) == 256 * MIB
    assert all(item.visit.fetch_from <= item.reads[0] and not item.nbytes for item in visitors)
    for before, item in zip(visitors, visitors[NUM_PLACES:], strict=False):
        assert item.visit.fetch_from >= before.reads[0], "no more than there are places for"


@pytest.mark.parametrize(("layer_share", "num_places"), [(0.1, NUM_PLACES), (0.2, 13), (0.3, 16), (0.0, NUM_PLACES)])
def test_the_places_hold_the_state_of_a_layer_and_no_more_than_a_quarter(layer_share: float, num_places: int) -> None:
    profile = profile_of()
    state = dataclasses.replace(profile.state, optimizer_movable=4096 * MIB)  # 64 buckets
    weights = (int(state.parameters * layer_share),) * bool(layer_share)
    profile = dataclasses.replace(profile, state=state, layer_weights=weights)
    link = Link(out_bytes_per_second=1e9, in_bytes_per_second=1e9)
    updates = updates_allowed(profile, MEMORY, link, 1)[0]
    assert updates.bucket_bytes == 64 * MIB
    assert updates.num_places == num_places
    assert updates.slot_bytes == num_places * 64 * MIB


def test_no_schedule_beats_the_bound_of_a_step_with_visitors() -> None:
    profile = profile_of(2)
    updates = updates_allowed(profile, MEMORY, LINK, 1)[0]
    step = problem_of(profile, MEMORY, shares=updates).step
    assert_no_schedule_beats_the_bound(step, LINK)


def test_micro_batches_are_refused_by_name() -> None:
    memory = load_memory({"budget": 640 * MIB, "optimizer": "in_backward"})
    with pytest.raises(ConfigError) as caught:
        plan_profile(profile_of(), memory, link=LINK, num_micro_batches=4)
    assert str(caught.value) == (
        "memory.optimizer: in_backward is for one backward pass a step, and this step has 4 micro-batches; write "
        "optimizer: auto, which fetches state under the last one's backward"
    )


def test_a_refusal_names_it_with_its_figures() -> None:
    with pytest.raises(BudgetError) as caught:
        planned(profile_of(), 400 * MIB, "keep")
    said = [line for line in caught.value.suggestions if "in_backward" in line]
    assert said and said[0].startswith("with 'optimizer: in_backward' it fits: peak 384.0 MiB, ")


def test_the_planned_step_can_be_drawn() -> None:
    profile, memory = profile_of(), load_memory({"budget": 500 * MIB, "optimizer": "in_backward"})
    plan = plan_profile(profile, memory, link=LINK)
    played = play(plan, profile, memory, link=LINK)
    assert plan.predicted is not None
    assert played.step_seconds == pytest.approx(plan.predicted.step_seconds)
    assert {event.lane for event in played.events if event.name.startswith("optimizer state")} >= {"in", "out"}
