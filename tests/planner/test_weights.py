"""Weights that come for their layer's turn, in the one problem: `memory.weights`."""

from __future__ import annotations

import dataclasses

import pytest

from lowtide.config.memory import load_memory
from lowtide.core.plan import Plan
from lowtide.core.profile import Profile
from lowtide.errors import ConfigError
from lowtide.planner.by_rules import problem_of
from lowtide.planner.in_backward import NUM_LAYERS_HERE, WEIGHTS, WeightsInTurn, weights_allowed
from lowtide.planner.plan_profile import plan_profile
from lowtide.report.played_step import play
from lowtide.timeline.step import Item, Link
from tests.planner.cases import assert_no_schedule_beats_the_bound
from tests.support.profiles import MIB, decoder_profile

LINK = Link(out_bytes_per_second=20e9, in_bytes_per_second=20e9)
FAST = Link(out_bytes_per_second=1e15, in_bytes_per_second=1e15)
LAYER = 24 * MIB


def profile_of(num_layers: int = 8, *, optimizer: bool = True) -> Profile:
    """128 MiB of weights and of gradients, 256 MiB of state; layers have 24 MiB, or 12 of 8."""
    profile = decoder_profile(num_layers)
    state = dataclasses.replace(profile.state, optimizer_movable=256 * MIB) if optimizer else profile.state
    layer = LAYER if num_layers <= 4 else LAYER // 2
    return dataclasses.replace(profile, state=state, layer_weights=(layer,) * num_layers)


def memory(budget: int, weights: str = "swap", **more: object):
    return load_memory({"budget": budget, "weights": weights, **more})


def in_turn(profile: Profile, **more: object) -> WeightsInTurn:
    found = weights_allowed(profile, memory(4096 * MIB, **more), LINK, 1)[0]
    assert isinstance(found, WeightsInTurn)
    return found


def visitors(profile: Profile) -> list[Item]:
    config = memory(4096 * MIB)
    items = problem_of(profile, config, shares=in_turn(profile)).step.items
    return [item for item in items if item.name.startswith(WEIGHTS)]


def test_each_layer_visits_in_forward_and_in_backward() -> None:
    profile = profile_of()
    step = problem_of(profile, memory(4096 * MIB), shares=in_turn(profile)).step
    found = visitors(profile)
    forward = [item for item in found if item.reads[0] < step.num_forward_ticks]
    backward = [item for item in found if item.reads[0] >= step.num_forward_ticks]
    names = [f"{WEIGHTS} {layer}" for layer in profile.layers]
    assert [item.name for item in forward] == names
    assert [item.name for item in backward] == names[::-1]
    assert {item.visit.nbytes for item in forward} == {12 * MIB} and not any(item.visit.leave_bytes for item in forward)
    assert {item.visit.leave_bytes for item in backward} == {12 * MIB}, "what is trained leaves"
    here = [item.visit.nbytes for item in backward[: NUM_LAYERS_HERE - 2]]
    assert here == [1] * len(here), "they are there since their forward"
    for before, item in zip(forward, forward[NUM_LAYERS_HERE - 1 :], strict=False):
        assert item.visit.fetch_from >= before.reads[0], "no more than there are places for"


def test_the_ticks_have_a_window_of_weights() -> None:
    profile = profile_of()
    own = in_turn(profile)
    here = own.here(profile)
    assert here.state.parameters == 128 * MIB - 8 * 12 * MIB + NUM_LAYERS_HERE * 12 * MIB
    assert own.host_bytes == 256 * MIB + 8 * 12 * MIB


BUDGETS = [share * MIB for share in (330, 500, 1100)]


@pytest.mark.parametrize("weights", [pytest.param("swap", marks=pytest.mark.extended), "auto"])
def test_a_plan_keeps_its_budget_and_is_never_slower_with_more(weights: str) -> None:
    profile = profile_of()
    plans = [plan_profile(profile, memory(budget, weights), link=LINK) for budget in BUDGETS]
    seconds = []
    for plan, budget in zip(plans, BUDGETS, strict=True):
        found = plan.predicted
        assert found is not None and plan.weights is not None
        assert found.peak_bytes <= budget
        assert plan.account[-1].planned_bytes == found.peak_bytes
        assert sum(line.planned_bytes for line in plan.account[:-1]) == found.peak_bytes
        assert Plan.from_json(plan.to_json()) == plan
        seconds.append(found.step_seconds)
    assert seconds == sorted(seconds, reverse=True)


def test_the_floor_is_lower_than_with_weights_that_stay() -> None:
    profile = profile_of()
    floors = []
    for config in (memory(2048 * MIB), load_memory({"budget": 2048 * MIB, "optimizer": "in_backward"})):
        found = plan_profile(profile, config, link=LINK).predicted
        assert found is not None
        floors.append(found.floor_bytes)
    assert floors[0] == floors[1] - (8 - NUM_LAYERS_HERE) * 12 * MIB


def test_auto_leaves_weights_where_they_fit() -> None:
    plan = plan_profile(profile_of(), memory(4096 * MIB, "auto"), link=LINK)
    assert plan.weights is not None and not plan.moves_weights
    assert plan.weights.lines() == ["weights: stay on the device, the step is faster so"]


def test_a_fast_link_hides_all_and_a_slow_one_is_waited_for() -> None:
    profile, config = profile_of(), memory(1100 * MIB)
    fast = plan_profile(profile, config, link=FAST).predicted
    slow = plan_profile(profile, config, link=Link(out_bytes_per_second=2e9, in_bytes_per_second=2e9))
    assert fast is not None and slow.predicted is not None and slow.weights is not None
    assert fast.stall_seconds < 1e-6
    come = 2 * 96 * MIB - (NUM_LAYERS_HERE - 2) * 12 * MIB + 256 * MIB
    assert slow.weights.in_bytes == pytest.approx(come, abs=8)
    assert slow.predicted.step_seconds >= come / 2e9
    assert slow.weights.exposed_seconds > 0
    assert slow.weights.hidden_from_tokens is not None and slow.weights.hidden_from_tokens > 4096


def test_no_schedule_beats_the_bound() -> None:
    profile = profile_of(2)
    step = problem_of(profile, memory(4096 * MIB), shares=in_turn(profile)).step
    assert_no_schedule_beats_the_bound(step, LINK)


def test_an_optimizer_without_state_leaves_only_weights_to_move() -> None:
    plan = plan_profile(profile_of(optimizer=False), memory(900 * MIB), link=LINK)
    assert plan.weights is not None and plan.optimizer is not None
    assert plan.weights.moved_bytes == 96 * MIB and not plan.optimizer.moved_bytes


def test_the_host_is_counted_and_capped() -> None:
    profile = profile_of()
    plan = plan_profile(profile, memory(500 * MIB, host_budget=1500 * MIB), link=LINK)
    assert plan.weights is not None
    assert 352 * MIB <= plan.weights.host_bytes <= 1500 * MIB
    with pytest.raises(ConfigError) as caught:
        plan_profile(profile, memory(500 * MIB, host_budget=300 * MIB), link=LINK)
    assert str(caught.value) == (
        "memory.weights: swap moves 352.0 MiB of weights and optimizer state, more than the host budget of 300.0 MiB; "
        "raise host_budget"
    )


def test_what_cannot_be_combined_is_refused_by_name() -> None:
    profile = profile_of()
    with pytest.raises(ConfigError) as caught:
        plan_profile(profile, memory(500 * MIB), link=LINK, num_micro_batches=4)
    assert str(caught.value) == (
        "memory.weights: swap is for one backward pass a step, and this step has 4 micro-batches; make the micro-batch "
        "as large as the step: activations make room"
    )
    without = dataclasses.replace(profile, layer_weights=())
    with pytest.raises(ConfigError, match=r"memory\.weights: swap has nothing to move: no layer has"):
        plan_profile(without, memory(500 * MIB), link=LINK)


@pytest.mark.parametrize("budget", [400 * MIB, 1100 * MIB])
def test_the_planned_step_can_be_drawn(budget: int) -> None:
    profile, config = profile_of(), memory(budget)
    plan = plan_profile(profile, config, link=LINK)
    played = play(plan, profile, config, link=LINK)
    assert plan.predicted is not None
    assert played.step_seconds == pytest.approx(plan.predicted.step_seconds)
    lanes = {event.lane for event in played.events if event.name.startswith(WEIGHTS)}
    assert lanes >= {"in", "out"}
