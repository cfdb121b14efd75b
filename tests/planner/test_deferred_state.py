"""State whose updates wait for the next forward pass: bytes in every tick, and what compute waits for."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from profiles import MIB, decoder_profile

from lowtide.config.memory import load_memory
from lowtide.core.decisions import OptimizerPlacement
from lowtide.core.plan import Plan
from lowtide.core.plan_table import placement_lines
from lowtide.core.profile import Profile
from lowtide.errors import BudgetError, ConfigError
from lowtide.planner.by_rules import problem_of
from lowtide.planner.deferred_state import play_deferred, with_deferred
from lowtide.planner.place_state import bucket_size, deferred_of, deferred_state
from lowtide.planner.plan_profile import plan_profile
from lowtide.report.memory_curve import memory_curve
from lowtide.timeline.events import run
from lowtide.timeline.memory import plain_curve
from lowtide.timeline.step import Link

LINK = Link(out_bytes_per_second=20e9, in_bytes_per_second=20e9, compute_share=0.02)
STATE = 256 * MIB
WEIGHTS = 128 * MIB


def profile_of(num_layers: int = 4, **more: int) -> Profile:
    profile = decoder_profile(num_layers)
    state = {"optimizer_movable": STATE, "optimizer_temporaries": 64 * MIB, **more}
    return dataclasses.replace(profile, state=dataclasses.replace(profile.state, **state))


PROFILE = profile_of()


def planned(state: str, budget: int, *, profile: Profile = PROFILE, overlap: str = "deferred", **how: Any) -> Plan:
    memory = load_memory({"budget": budget, "optimizer": {"state": state, "overlap": overlap}})
    return plan_profile(profile, memory, link=LINK, **how)


def test_gradients_are_held_until_their_layer_begins_and_count() -> None:
    problem = problem_of(PROFILE, load_memory({"budget": 1}))
    state = deferred_state(PROFILE.state, LINK, STATE)
    mixed = with_deferred(problem, state, has_gradients=False, layers=PROFILE.layers)
    before, after = plain_curve(problem.step), plain_curve(mixed.step)
    num_forward = problem.step.num_forward_ticks
    held = (after - before + STATE - state.slot_bytes - state.temporaries)[:num_forward]
    assert tuple(held) == mixed.held_gradients[:num_forward]
    assert held[0] == WEIGHTS
    assert all(held[:-1] >= held[1:]) and 0 < held[-1] < WEIGHTS / 20, "what is left is the head's"
    # Four layers of six operators; all of a layer's are done when it begins.
    by_op = [held[max(t for t in range(num_forward) if problem.starts[t] <= op)] for op in range(25)]
    assert by_op[:2] == [WEIGHTS, by_op[1]] and by_op[1] == by_op[6] > by_op[7]
    alone = with_deferred(problem, state, has_gradients=False)
    assert alone.held_gradients[:num_forward] > tuple(held), "modules of a layer that does not run again begin later"
    assert (after - before)[num_forward:-1].tolist() == [-STATE] * (len(before) - num_forward - 1)
    assert (after - before)[-1] == state.slot_bytes + state.temporaries - 64 * MIB - STATE
    # Gradients that stay are counted already.
    stay = problem_of(PROFILE, load_memory({"budget": 1}), has_gradients=True)
    more = plain_curve(with_deferred(stay, state, has_gradients=True).step) - plain_curve(stay.step)
    assert set(more[:num_forward]) == {state.slot_bytes + state.temporaries - STATE}


def test_a_gradient_whose_module_is_nowhere_in_forward_is_held_to_its_end() -> None:
    names = tuple(name.replace("lm_head", "elsewhere") if ":" in name else name for name in PROFILE.op_names)
    profile = dataclasses.replace(PROFILE, op_names=names)
    problem = problem_of(profile, load_memory({"budget": 1}))
    mixed = with_deferred(problem, deferred_state(profile.state, LINK, STATE), has_gradients=False)
    least = WEIGHTS // len(PROFILE.op_names[: PROFILE.num_forward_ops])
    assert least <= mixed.held_gradients[problem.step.num_forward_ticks - 1] <= least + 1


@pytest.mark.parametrize("has_gradients", [False, True])
def test_the_account_and_the_curve_are_those_of_the_plan(has_gradients: bool) -> None:
    for mib in (500, 800, 1600):
        plan = planned("swap", mib * MIB, has_gradients=has_gradients)
        assert plan.predicted is not None and plan.predicted.peak_bytes <= mib * MIB
        assert plan.account[-1].planned_bytes == plan.predicted.peak_bytes
        assert sum(line.planned_bytes for line in plan.account[:-1]) == plan.predicted.peak_bytes
        assert sum(line.plain_bytes for line in plan.account[:-1]) == plan.predicted.plain_peak_bytes
        memory = load_memory({"budget": mib * MIB, "optimizer": {"state": "swap", "overlap": "deferred"}})
        curve = memory_curve(plan, PROFILE, memory, link=LINK, has_gradients=has_gradients)
        assert max(curve.planned_bytes) == plan.predicted.peak_bytes
        assert Plan.from_json(plan.to_json()) == plan


def test_all_of_it_waits_where_that_is_written() -> None:
    plan = planned("swap", 1600 * MIB)
    placed = plan.optimizer
    assert placed is not None and (placed.overlap, placed.moved_bytes, placed.resident_bytes) == ("deferred", STATE, 0)
    assert placed.reason == "memory.optimizer asks for it"
    assert plan.predicted is not None
    assert plan.predicted.optimizer_seconds == pytest.approx(placed.exposed_seconds + placed.slowed_seconds)
    assert placement_lines(placed)[1] == (
        "  each bucket comes in the next forward pass, steps before the first module that needs it, and leaves, in "
        "buckets of 32.0 MiB"
    )


def test_auto_never_defers_unasked_and_is_never_slower_where_it_may() -> None:
    for mib in (400, 500, 650, 1600):
        without, with_it = (planned("auto", mib * MIB, overlap=overlap) for overlap in ("auto", "deferred"))
        assert without.optimizer is not None and without.optimizer.overlap != "deferred"
        assert with_it.optimizer is not None and with_it.predicted is not None and without.predicted is not None
        assert with_it.predicted.step_seconds <= without.predicted.step_seconds
        assert with_it.predicted.peak_bytes <= mib * MIB
        assert with_it.predicted.floor_bytes <= without.predicted.floor_bytes
    assert with_it.optimizer == OptimizerPlacement(moved_bytes=0, resident_bytes=STATE, reason="everything fits")
    # A long forward pass, and no memory beside backward.
    num_forward = PROFILE.num_forward_ops
    large = profile_of(optimizer=1024 * MIB, optimizer_movable=1024 * MIB)
    seconds = (4e-3,) * num_forward + large.op_seconds[num_forward:]
    long = dataclasses.replace(large, op_seconds=seconds)
    pays = planned("auto", 650 * MIB, profile=long, has_gradients=True)
    assert pays.optimizer is not None and pays.optimizer.overlap == "deferred"
    assert pays.optimizer.reason == "updates in the next forward pass gain more than others"


def test_what_is_exposed_is_what_forward_does_not_hide() -> None:
    """25 ms of forward. Nothing else on the lanes."""
    problem = problem_of(PROFILE, load_memory({"budget": 1 << 40}))
    for rate in (1e9, 5e9, 50e9):
        link = Link(out_bytes_per_second=rate, in_bytes_per_second=rate)
        state = deferred_state(PROFILE.state, link, STATE)
        mixed = with_deferred(problem, state, has_gradients=False)
        fates = [item.fates[0] for item in mixed.step.items]
        timeline = run(mixed.step, fates, link)
        cost = play_deferred(mixed, timeline, fates, link, state)
        one = bucket_size(PROFILE.state, link) / rate
        forward = 25e-3
        assert STATE / rate + one - forward <= cost.exposed_seconds + 1e-9
        assert cost.exposed_seconds >= one, "the first one has nothing to hide behind"
        if rate == 1e9:  # the lanes are never idle
            assert cost.exposed_seconds <= STATE / rate + 2 * one
        if rate == 50e9:
            assert cost.exposed_seconds <= 2 * one
        assert cost.slowed_seconds == 0.0


def test_micro_batches_share_it() -> None:
    one, four = (planned("swap", 1600 * MIB, num_micro_batches=number).predicted for number in (1, 4))
    assert one is not None and four is not None
    assert four.optimizer_seconds == pytest.approx(one.optimizer_seconds / 4)


def test_the_host_takes_what_it_takes() -> None:
    state = deferred_of(PROFILE.state, LINK, 100 * MIB, 0.0)
    assert state is not None and (state.nbytes, state.resident_bytes) == (96 * MIB, 160 * MIB)
    assert deferred_of(PROFILE.state, LINK, MIB, 0.0) is None
    memory = {"budget": 1 << 40, "optimizer": {"state": "swap", "overlap": "deferred"}, "host_budget": "100MiB"}
    with pytest.raises(ConfigError, match=r"^memory\.optimizer: swap moves 256\.0 MiB, more than the host budget of"):
        plan_profile(PROFILE, load_memory(memory), link=LINK)


def test_a_budget_below_the_floor_says_the_floor() -> None:
    with pytest.raises(BudgetError) as caught:
        planned("swap", 100 * MIB)
    # The first layer's forward: weights, gradients, three slots, a bucket's temporaries, and what it makes.
    assert 128 + 128 + 3 * 32 + 8 < caught.value.floor_bytes // MIB < 128 + 128 + 3 * 32 + 8 + 120
