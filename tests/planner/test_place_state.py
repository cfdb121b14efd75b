"""An optimizer's state beside activations: one budget, one link.

Every plan is for a small decoder of round numbers, whose state is as large as its weights and gradients together.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import pytest

from lowtide.config.memory import load_memory
from lowtide.core.decisions import OptimizerPlacement
from lowtide.core.fate import Fate
from lowtide.core.plan import Plan
from lowtide.core.profile import Profile, StateBytes
from lowtide.errors import BudgetError, ConfigError
from lowtide.planner.by_rules import problem_of
from lowtide.planner.place_state import batch_tokens, bucket_size, bucket_temporaries, placed_fates, shares_of
from lowtide.planner.plan_profile import plan_profile
from lowtide.planner.state_items import StateShares, in_order, with_state
from lowtide.report.budget_sweep import budget_sweep, sweep_lines
from lowtide.report.played_step import play
from lowtide.timeline.events import run
from lowtide.timeline.memory import plain_curve
from lowtide.timeline.step import Link
from tests.support.profiles import MIB, decoder_profile

LINK = Link(out_bytes_per_second=20e9, in_bytes_per_second=20e9, compute_share=0.02)
STATE = 256 * MIB


def profile_of(num_layers: int = 4, *, temporaries: int = 64 * MIB, **more: int) -> Profile:
    profile = decoder_profile(num_layers)
    state = {"optimizer_movable": STATE - 64, "optimizer_temporaries": temporaries, **more}
    return dataclasses.replace(profile, state=dataclasses.replace(profile.state, **state))


PROFILE = profile_of()
KEEP_FLOOR, FLOOR = 576, 360  # MiB: with the state on the device, and without


def planned(optimizer: str, budget: int, profile: Profile = PROFILE, **more: Any) -> Plan:
    memory = load_memory({"budget": budget, "optimizer": optimizer, **more})
    return plan_profile(profile, memory, link=LINK)


def seconds_of(plan: Plan) -> float:
    assert plan.predicted is not None
    return plan.predicted.step_seconds


# -- what must hold for every budget ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plans() -> dict[int, dict[str, Plan | None]]:
    """For a row of budgets in MiB the plan of each kind, None where none fits."""
    found: dict[int, dict[str, Plan | None]] = {}
    for mib in (380, 500, 650, 1000, 1600):
        found[mib] = {}
        for optimizer in ("keep", "swap", "auto"):
            try:
                found[mib][optimizer] = planned(optimizer, mib * MIB)
            except BudgetError:
                found[mib][optimizer] = None
    return found


def test_the_peak_is_within_the_budget(plans: dict[int, dict[str, Plan | None]]) -> None:
    for mib, by_kind in plans.items():
        for plan in by_kind.values():
            if plan is not None:
                assert plan.predicted is not None and plan.predicted.peak_bytes <= mib * MIB
                assert plan.account[-1].planned_bytes == plan.predicted.peak_bytes
                assert sum(line.planned_bytes for line in plan.account[:-1]) == plan.predicted.peak_bytes
                assert sum(line.plain_bytes for line in plan.account[:-1]) == plan.predicted.plain_peak_bytes


def test_auto_is_never_slower_than_keep_and_never_needs_more(plans: dict[int, dict[str, Plan | None]]) -> None:
    num_compared = 0
    for by_kind in plans.values():
        keep, auto = by_kind["keep"], by_kind["auto"]
        assert auto is not None
        if keep is not None:
            num_compared += 1
            assert seconds_of(auto) <= seconds_of(keep)
            assert keep.predicted is not None and auto.predicted is not None
            assert auto.predicted.floor_bytes <= keep.predicted.floor_bytes
    assert 2 <= num_compared < len(plans), "budgets on both sides of the floor with the state on the device"


@pytest.mark.parametrize("optimizer", ["auto", "swap"])
def test_a_larger_budget_is_never_slower(plans: dict[int, dict[str, Plan | None]], optimizer: str) -> None:
    row = [by_kind[optimizer] for _, by_kind in sorted(plans.items())]
    for tight, loose in itertools.pairwise(row):
        assert tight is not None and loose is not None
        assert seconds_of(loose) <= seconds_of(tight) * (1 + 1e-3)


def test_the_gap_is_one(plans: dict[int, dict[str, Plan | None]]) -> None:
    """No plan of any kind for the same budget is faster than the bound of `auto`, which may do all that others do."""
    for by_kind in plans.values():
        auto = by_kind["auto"]
        assert auto is not None and auto.predicted is not None
        bound = auto.predicted.step_seconds * (1 - auto.predicted.gap)
        assert all(seconds_of(plan) >= bound * (1 - 1e-9) for plan in by_kind.values() if plan is not None)


def test_the_floor_falls_by_the_state(plans: dict[int, dict[str, Plan | None]]) -> None:
    keep, auto = (plans[1600][kind] for kind in ("keep", "auto"))
    assert keep is not None and auto is not None and keep.predicted is not None and auto.predicted is not None
    assert keep.predicted.floor_bytes // MIB == KEEP_FLOOR
    assert auto.predicted.floor_bytes // MIB == FLOOR


def test_the_memory_of_the_step_is_drawn_as_predicted(plans: dict[int, dict[str, Plan | None]]) -> None:
    for mib, by_kind in plans.items():
        for optimizer, plan in by_kind.items():
            if plan is None or plan.predicted is None:
                continue
            memory = load_memory({"budget": mib * MIB, "optimizer": optimizer})
            curve = play(plan, PROFILE, memory, link=LINK)
            assert max(curve.planned_bytes) == plan.predicted.peak_bytes
            assert max(curve.plain_bytes) == plan.predicted.plain_peak_bytes
            assert len(curve.planned_bytes) == len(curve.plain_bytes) == len(curve.seconds)


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=pytest.mark.extended) for seed in (0, 3)])
def test_the_same_holds_for_random_states_links_and_micro_batches(seed: int) -> None:
    draw = random.Random(seed)
    nbytes = draw.choice((96, 256, 700)) * MIB
    unit = draw.choice((0, 90 * MIB))
    profile = profile_of(
        draw.randint(1, 3), optimizer=nbytes, optimizer_movable=nbytes - 512, optimizer_unit=unit,
        temporaries=draw.choice((0, 200 * MIB)),
    )  # fmt: skip
    rate = draw.choice((4e9, 20e9, 100e9))
    link = Link(out_bytes_per_second=rate, in_bytes_per_second=rate, compute_share=draw.choice((0.0, 0.05)))
    many = draw.choice((1, 4))

    def found(optimizer: str, budget: int) -> Plan | None:
        memory = load_memory({"budget": budget, "optimizer": optimizer})
        try:
            return plan_profile(profile, memory, link=link, has_gradients=many > 1, num_micro_batches=many)
        except BudgetError:
            return None

    widest = found("auto", 1 << 40)
    assert widest is not None and widest.predicted is not None and widest.does_nothing
    low, high = widest.predicted.floor_bytes, widest.predicted.plain_peak_bytes
    before: float | None = None
    for share in (0.0, 0.4, 0.8):
        budget = low + int((high - low) * share)
        auto, keep = found("auto", budget), found("keep", budget)
        assert auto is not None and auto.predicted is not None, "a floor can be reached"
        assert auto.predicted.peak_bytes <= budget
        assert keep is None or seconds_of(auto) <= seconds_of(keep)
        assert before is None or seconds_of(auto) <= before * (1 + 1e-3)
        before = seconds_of(auto)


# -- what is decided -------------------------------------------------------------------------------------------------


def test_where_everything_fits_the_state_stays(plans: dict[int, dict[str, Plan | None]]) -> None:
    plan = plans[1600]["auto"]
    assert plan is not None and plan.does_nothing
    assert plan.optimizer == OptimizerPlacement(moved_bytes=0, resident_bytes=STATE - 64, reason="everything fits")
    assert seconds_of(plan) == pytest.approx(sum(PROFILE.op_seconds))


def test_swap_moves_all_of_it_whatever_the_budget(plans: dict[int, dict[str, Plan | None]]) -> None:
    for by_kind in plans.values():
        plan = by_kind["swap"]
        assert plan is not None and plan.optimizer is not None and not plan.does_nothing
        assert (plan.optimizer.moved_bytes, plan.optimizer.resident_bytes) == (STATE - 64, 0)
        assert plan.optimizer.reason == "memory.optimizer asks for it"


def test_where_the_state_does_not_fit_it_moves(plans: dict[int, dict[str, Plan | None]]) -> None:
    plan = plans[500]["auto"]
    assert plans[500]["keep"] is None
    assert plan is not None and plan.optimizer is not None and plan.optimizer.moves
    assert plan.optimizer.reason == "the budget asks for it"
    assert Plan.from_json(plan.to_json()) == plan


def test_keep_says_nothing_of_it(plans: dict[int, dict[str, Plan | None]]) -> None:
    plan = plans[1600]["keep"]
    assert plan is not None and plan.optimizer is None


def test_state_without_memory_to_hide_in_is_streamed_and_paid_for() -> None:
    """A step whose floor is the optimizer's own: nothing has room beside the slots."""
    plan = planned("swap", (FLOOR + 4) * MIB, profile_of(temporaries=0))
    assert plan.optimizer is not None and plan.optimizer.beside_bytes < STATE / 2
    assert plan.optimizer.exposed_seconds > 0.25 * STATE / LINK.in_bytes_per_second
    assert plan.optimizer.free_from_tokens is None


@pytest.mark.parametrize(("budget", "is_beside"), [(1600, True), (372, False)])
def test_micro_batches_share_what_the_state_costs(budget: int, is_beside: bool) -> None:
    """All of it beside compute, and hardly any."""
    memory = load_memory({"budget": budget * MIB, "optimizer": "swap", "recompute": "none"})
    one, eight = (plan_profile(PROFILE, memory, link=LINK, num_micro_batches=number) for number in (1, 8))
    assert one.predicted is not None and eight.predicted is not None and one.optimizer is not None
    assert (one.optimizer.beside_bytes == one.optimizer.moved_bytes) == is_beside
    share = eight.predicted.optimizer_seconds / one.predicted.optimizer_seconds
    assert share == pytest.approx(1 / 8) if is_beside else 0 < share < 1
    assert eight.predicted.step_seconds < one.predicted.step_seconds


def test_temporaries_are_those_of_one_bucket() -> None:
    """The optimizer's step needs all of them at once when the state stays."""
    large = profile_of(temporaries=4096 * MIB)
    keep, swap = (planned(kind, 8192 * MIB, large).predicted for kind in ("keep", "swap"))
    assert keep is not None and swap is not None
    assert keep.floor_bytes == (128 + 128 + 256 + 4096) * MIB + large.state.inputs
    bucket = bucket_size(large.state, LINK)
    assert swap.floor_bytes == pytest.approx((128 + 128 + 512) * MIB + 3 * bucket + large.state.inputs, abs=1024)


def test_or_those_of_what_is_stepped_at_once() -> None:
    """Where parameters step one after the other, the largest one has them all, and a bucket may be of it alone."""
    at_once = StateBytes(optimizer_movable=800, optimizer_temporaries=400)
    assert [bucket_temporaries(at_once, nbytes) for nbytes in (100, 800, 900)] == [50, 400, 400]
    one_by_one = dataclasses.replace(at_once, optimizer_share_at_once=0.25)
    assert [bucket_temporaries(one_by_one, nbytes) for nbytes in (100, 200, 800)] == [200, 400, 400]


def test_the_ladder_has_a_column_for_it() -> None:
    memory = load_memory({"budget": 420 * MIB, "optimizer": "auto"})
    plan = plan_profile(PROFILE, memory, link=LINK)
    lines = sweep_lines(budget_sweep(plan, PROFILE, memory, link=LINK), plan.budget_bytes)
    assert lines[0].split() == [
        "budget",
        "of",
        "plain",
        "peak",
        "step",
        "over",
        "plain",
        "stalls",
        "recompute",
        "optimizer",
        "gap",
    ]
    assert lines[-1].split()[:2] == [f"{FLOOR}.0", "MiB"]


# -- shares and buckets ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("movable", "unit", "rate", "expected"),
    [
        (100 << 30, 0, 55e9, 165_000_192),  # 3 ms of the link, up to a multiple of 256
        (100 << 30, 0, 2e9, 64 * MIB),
        (100 << 30, 0, 900e9, 256 * MIB),
        (64 * MIB, 0, 55e9, 8 * MIB),  # an eighth of little
        (100 << 30, 1 << 30, 55e9, 1 << 30),  # what cannot be cut
    ],
)
def test_bucket_size(movable: int, unit: int, rate: float, expected: int) -> None:
    state = StateBytes(optimizer=movable, optimizer_movable=movable, optimizer_unit=unit)
    assert bucket_size(state, Link(out_bytes_per_second=rate, in_bytes_per_second=rate)) == expected


def test_shares_are_whole_buckets_and_few() -> None:
    state = StateBytes(optimizer=10 << 40, optimizer_movable=10 << 40)
    shares = shares_of(state, LINK, None, may_stay=True)
    assert shares is not None and len(shares.sizes) <= 64 and shares.nbytes == 10 << 40
    bucket = bucket_size(state, LINK)
    assert all(size % bucket == 0 for size in shares.sizes[:-1])
    limited = shares_of(state, LINK, 1 << 40, may_stay=True)
    assert limited is not None and (1 << 40) - bucket < limited.nbytes <= 1 << 40
    assert shares_of(state, LINK, bucket - 1, may_stay=True) is None
    assert shares_of(StateBytes(), LINK, None, may_stay=True) is None


def test_streaming_takes_as_long_as_the_slower_direction() -> None:
    state = StateBytes(optimizer=1024 * MIB, optimizer_movable=1024 * MIB)
    link = Link(out_bytes_per_second=10e9, in_bytes_per_second=40e9, latency_seconds=1e-3)
    shares = shares_of(state, link, None, num_micro_batches=4, may_stay=False)
    assert shares is not None and shares.fates == (Fate.SWAP, Fate.RECOMPUTE)
    num_buckets = -(-1024 * MIB // bucket_size(state, link))
    expected = (1024 * MIB / 10e9 + 1e-3 * num_buckets) / 4
    assert sum(shares.streamed_seconds) == pytest.approx(expected)


def test_shares_that_stay_change_nothing_but_the_optimizers_tick() -> None:
    problem = problem_of(PROFILE, load_memory({"budget": 1}))
    shares = shares_of(PROFILE.state, LINK, None, may_stay=True)
    assert shares is not None
    mixed = with_state(problem, shares)
    before, after = plain_curve(problem.step), plain_curve(mixed.step)
    assert after[1:-2].tolist() == before[1:-1].tolist()
    assert after[-2] - before[-1] == shares.slot_bytes + shares.temporaries - 64 * MIB
    assert after[-1] == 0
    assert mixed.step.compute_seconds == problem.step.compute_seconds


def test_a_share_is_in_order_of_what_stays_comes_early_and_is_streamed() -> None:
    problem = problem_of(PROFILE, load_memory({"budget": 1}))
    shares = StateShares(
        sizes=(8, 8, 8, 8), fates=tuple(Fate), streamed_seconds=(1.0,) * 4, slot_bytes=0, temporaries=0
    )
    mixed = with_state(problem, shares)
    own = (Fate.KEEP,) * len(problem.step.items)
    fates = in_order(mixed, (*own, Fate.RECOMPUTE, Fate.SWAP, Fate.KEEP, Fate.SWAP))
    assert fates == (*own, Fate.KEEP, Fate.SWAP, Fate.SWAP, Fate.RECOMPUTE)
    state = StateBytes(optimizer=40, optimizer_movable=32)
    placement = OptimizerPlacement(moved_bytes=24, resident_bytes=8, beside_bytes=16, reason="")
    assert placed_fates(placement, state, shares) == fates[len(own) :]
    played = run(mixed.step, fates, LINK)
    assert played.recompute_seconds == 1.0


def test_tokens_of_a_batch() -> None:
    assert batch_tokens(dataclasses.replace(PROFILE, batch="input_ids=int64[4, 4096], labels=int64[4, 4096]")) == 16384
    assert batch_tokens(dataclasses.replace(PROFILE, batch="x=float32[4, 4096]")) is None


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "memory", "message"),
    [
        (StateBytes(parameters=1), {},
         "memory.optimizer: swap has nothing to move: there is no optimizer, or it has no state; pass optimizer=, "
         "take its first step before this if it has none yet, or write optimizer: keep"),
        (StateBytes(optimizer=64), {},
         "memory.optimizer: swap has nothing to move: no tensor of the optimizer's state has 16,384 elements; write "
         "optimizer: keep"),
        (StateBytes(optimizer=STATE, optimizer_movable=STATE), {"host_budget": "200MiB"},
         "memory.optimizer: swap moves 256.0 MiB, more than the host budget of 200.0 MiB; raise host_budget, or write "
         "optimizer: auto"),
    ],
)  # fmt: skip
def test_swap_without_effect_is_refused(state: StateBytes, memory: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        planned("swap", 1 << 40, dataclasses.replace(PROFILE, state=state), **memory)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("state", "reason"), [(StateBytes(), "there is none"), (StateBytes(optimizer=64), "none of it can move")]
)
def test_auto_says_why_nothing_moves(state: StateBytes, reason: str) -> None:
    plan = planned("auto", 1 << 40, dataclasses.replace(PROFILE, state=state))
    assert plan.optimizer == OptimizerPlacement(moved_bytes=0, reason=reason)


def test_a_host_budget_is_for_state_and_activations_together() -> None:
    plan = planned("auto", 800 * MIB, host_budget="400MiB")
    assert plan.optimizer is not None and plan.optimizer.moved_bytes is not None
    swapped = sum(site.nbytes for site in plan.sites if site.fate is Fate.SWAP)
    assert plan.optimizer.moved_bytes + swapped <= 400 * MIB
    assert plan.host_budget_bytes == 400 * MIB


def test_a_budget_below_the_floor_says_the_floor_without_the_state() -> None:
    with pytest.raises(BudgetError) as caught:
        planned("auto", 100 * MIB)
    assert caught.value.floor_bytes // MIB == FLOOR
