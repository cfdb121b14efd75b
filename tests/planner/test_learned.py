"""What a race says of prices: from plans with known fates and times, the share of compute that copies cost."""

from __future__ import annotations

import dataclasses

import pytest

from lowtide.core.codec import Codec
from lowtide.core.decisions import Prediction, SiteDecision
from lowtide.core.fate import Fate
from lowtide.core.plan import Plan
from lowtide.core.rules import Rules
from lowtide.planner.learned import (
    MOST_SHARE,
    Raced,
    copy_seconds,
    learned_link,
    learned_prices,
    measured_prediction,
)
from lowtide.timeline.step import Link

LINK = Link(out_bytes_per_second=1e9, in_bytes_per_second=5e8, latency_seconds=1e-3, compute_share=0.25)
PLAIN, RECOMPUTE = 1.0, 0.3


def plan_of(*nbytes: int, recompute_seconds: float = 0.0) -> Plan:
    """Swaps sites of so many bytes, and keeps one."""
    fates = [(Fate.SWAP, size) for size in nbytes] + [(Fate.KEEP, 10**9)]
    sites = tuple(
        SiteDecision(name=f"{number}", layer=None, nbytes=size, dtype="float32", fate=fate, reason="")
        for number, (fate, size) in enumerate(fates)
    )
    slowed = LINK.compute_share * (sum(nbytes) * 3e-9 + 2e-3 * len(nbytes))
    predicted = Prediction(
        peak_bytes=1,
        step_seconds=PLAIN + recompute_seconds + slowed,
        stall_seconds=0.0,
        recompute_seconds=recompute_seconds,
        gap=0.0,
        plain_peak_bytes=2,
        plain_seconds=PLAIN,
        floor_bytes=1,
        certainty="",
    )
    return Plan(layers=(), rules=Rules(()), min_bytes=0, sites=sites, predicted=predicted)


STILL, MOVING = plan_of(recompute_seconds=RECOMPUTE), plan_of(10**8, 10**8)


def test_copies_run_both_ways_and_each_has_a_latency() -> None:
    assert copy_seconds(MOVING, LINK) == pytest.approx(0.6 + 4e-3)
    assert copy_seconds(STILL, LINK) == 0.0


@pytest.mark.parametrize("pace", [0.5, 1.0, 3.0])
def test_what_copies_cost_is_found_whatever_the_machines_speed(pace: float) -> None:
    for share in (0.0, 0.7, 2.0):
        moving = pace * (PLAIN + share * copy_seconds(MOVING, LINK))
        found = learned_link([(MOVING, moving), (STILL, pace * (PLAIN + RECOMPUTE))], LINK)
        assert found is not None
        assert found.compute_share == pytest.approx(share)
        assert dataclasses.replace(found, compute_share=LINK.compute_share) == LINK


def test_what_was_believed_is_no_news() -> None:
    as_believed = PLAIN + 0.25 * copy_seconds(MOVING, LINK)
    for noise in (0.99, 1.0, 1.01):
        assert learned_link([(MOVING, noise * as_believed), (STILL, PLAIN + RECOMPUTE)], LINK) is None


def test_a_price_is_never_negative_and_has_a_limit() -> None:
    fast, slow = (learned_link([(MOVING, seconds), (STILL, 1.3)], LINK) for seconds in (0.1, 100.0))
    assert fast is not None and fast.compute_share == 0.0
    assert slow is not None and slow.compute_share == MOST_SHARE


@pytest.mark.parametrize("pace", [0.5, 2.0])
def test_two_plans_that_copy_unlike_amounts_show_speed_and_price(pace: float) -> None:
    few = plan_of(2 * 10**7, recompute_seconds=RECOMPUTE)
    seconds = pace * (PLAIN + 1.5 * copy_seconds(MOVING, LINK)), pace * (1.3 + 1.5 * copy_seconds(few, LINK))
    found = learned_link([(MOVING, seconds[0]), (few, seconds[1])], LINK)
    assert found is not None and found.compute_share == pytest.approx(1.5)


def test_where_nothing_can_be_told_apart_nothing_is_learned() -> None:
    assert learned_link([(MOVING, 9.0)], LINK) is None
    alike = plan_of(10**8, 99 * 10**6)
    assert learned_link([(MOVING, 2.0), (alike, 2.05)], LINK) is None
    assert learned_link([(MOVING, 900.0), (plan_of(10**7, recompute_seconds=5.0), 0.1)], LINK) is None  # pace below 0
    assert learned_link([(STILL, 9.0), (plan_of(), 2.0)], LINK) is None
    assert learned_link([(MOVING, 9.0), (STILL, None)], LINK) is None
    assert learned_link([(MOVING, None), (STILL, 1.3)], LINK) is None
    assert learned_link([], LINK) is None


def test_one_plan_that_was_disturbed_does_not_decide() -> None:
    share, extra = 0.7, plan_of(2 * 10**8)
    times = [(plan, PLAIN + share * copy_seconds(plan, LINK)) for plan in (MOVING, extra)]
    found = learned_link([*times, (plan_of(3 * 10**8), 50.0), (STILL, PLAIN + RECOMPUTE), (plan_of(), 40.0)], LINK)
    assert found is not None and found.compute_share == pytest.approx(share)


def test_a_smaller_form_is_copied_in_fewer_bytes_and_takes_time_of_its_own() -> None:
    codec = Codec(kind="bits", nbytes=10**7, work_bytes=0, seconds=0.1)
    sites = [dataclasses.replace(site, codec=codec if site.fate is Fate.SWAP else None) for site in MOVING.sites]
    assert MOVING.predicted is not None
    coded = dataclasses.replace(
        MOVING.with_sites(sites), predicted=dataclasses.replace(MOVING.predicted, codec_seconds=0.2)
    )
    assert copy_seconds(coded, LINK) == pytest.approx(0.06 + 4e-3)
    moving = PLAIN + 0.2 + 2.0 * copy_seconds(coded, LINK)
    found = learned_link([(coded, moving), (STILL, PLAIN + RECOMPUTE)], LINK)
    assert found is not None
    assert found.compute_share == pytest.approx(2.0)


# -- memory that is taken again ----------------------------------------------------------------------------------------

TOUCH = dataclasses.replace(LINK, touch_seconds_per_byte=1e-9)


def touching(plan: Plan, seconds: float) -> Plan:
    """The same plan, whose step has so many seconds of memory that is taken again."""
    assert plan.predicted is not None
    more = plan.predicted.step_seconds + seconds
    return dataclasses.replace(
        plan, predicted=dataclasses.replace(plan.predicted, step_seconds=more, touch_seconds=seconds)
    )


@pytest.mark.parametrize("pace", [0.5, 2.0])
@pytest.mark.parametrize(("times", "share"), [(0.0, 0.0), (0.4, 0.0), (1.0, 0.0), (1.0, 0.6)])
def test_an_excess_is_memory_that_is_taken_again_and_what_is_left_is_copies(
    pace: float, times: float, share: float
) -> None:
    moving = touching(MOVING, 0.5)
    seconds = pace * (PLAIN + times * 0.5 + share * copy_seconds(MOVING, LINK))
    found = learned_link([(moving, seconds), (STILL, pace * (PLAIN + RECOMPUTE))], TOUCH)
    assert found is not None
    assert found.touch_seconds_per_byte == pytest.approx(times * 1e-9)
    assert found.compute_share == pytest.approx(share)


def test_a_plan_without_copies_takes_nothing_again() -> None:
    few, many = (Raced(rest=1.0, touch=0.4, copies=copies, measured=1.4) for copies in (0.1, 0.5))
    still = Raced(rest=1.1, touch=0.0, copies=0.0, measured=1.1)
    found = learned_prices([few, many, still])
    assert found is not None
    assert (found.pace, found.touch_times, found.share) == pytest.approx((1.0, 1.0, 0.0))
    assert [found.step(one) for one in (few, many, still)] == pytest.approx([1.4, 1.4, 1.1])


def test_the_winner_says_what_its_passes_took() -> None:
    raced = [(touching(MOVING, 0.5), 3.1), (STILL, 2.6), (plan_of(10), None)]
    for number, (plan, seconds) in enumerate(raced[:2]):
        found = measured_prediction(raced, TOUCH, number)
        assert found is not None and plan.predicted is not None and seconds is not None
        assert found.pass_seconds == pytest.approx(seconds)
        assert found.plain_seconds == pytest.approx(2.0 * PLAIN)
        assert found.recompute_seconds == pytest.approx(2.0 * plan.predicted.recompute_seconds)
        assert found.peak_bytes == plan.predicted.peak_bytes
        assert "measured in the race" in found.certainty
    assert measured_prediction(raced, TOUCH, 2) is None


def test_one_plan_alone_shows_how_fast_the_machine_is() -> None:
    found = measured_prediction([(MOVING, 2.0 * (PLAIN + 0.25 * copy_seconds(MOVING, LINK)))], LINK, 0)
    assert found is not None and found.plain_seconds == pytest.approx(2.0 * PLAIN)


def test_what_the_optimizer_and_proofs_cost_is_told_from_the_passes() -> None:
    assert STILL.predicted is not None
    parts = {"optimizer_seconds": 0.4, "check_seconds": 0.1, "step_seconds": PLAIN + RECOMPUTE + 0.4}
    plan = dataclasses.replace(STILL, predicted=dataclasses.replace(STILL.predicted, **parts))
    found = measured_prediction([(plan, 2.8)], LINK, 0)
    assert found is not None
    assert found.pass_seconds == pytest.approx(2.8)
    assert (found.step_seconds, found.check_seconds, found.optimizer_seconds) == pytest.approx((3.4, 0.2, 0.8))
