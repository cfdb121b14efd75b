"""What a race says about prices: plans that copy and plans that do not, each with the time of its steps.

What: `learned_link` compares predicted and measured steps. A plan without copies shows how long this machine takes for
what the profile says; what a plan with copies takes beyond that is the price of its copies. That has two parts. Memory
that went back to the system is taken again (a page fault for each 4 KiB), as much for few copies as for many: as far
as the excess goes, it is that (`Link.touch_seconds_per_byte`). What is left grows with the copies, whatever the reason
(cores that they share with compute, hooks), and goes where the timeline has it already, `Link.compute_share`: seconds
of compute lost for each second of copying. Where every plan copies, two that copy unlike amounts show the machine's
speed, too.

`measured_prediction` rewrites what the winner says by what its own passes took: what is printed is what happens.

Why a ratio: steps that are raced also have the optimizer's step and the program's own work in them, and machines differ
in speed from one hour to the next. Both lengthen all plans alike, as far as two numbers can tell.

Cost: some additions. Not covered: a race in which all plans copy alike, or none does (nothing can be told apart); a
price for each recipe or each tensor (for gpt2 on two cores, plans with and without recipes took the same); stalls,
which corrections.py answers for.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from lowtide.core.decisions import Prediction
from lowtide.core.fate import Fate
from lowtide.core.plan import Plan
from lowtide.timeline.step import Link

MOST_SHARE = 8.0
"""A second of copying costs no more compute than this; beyond it something else was slow."""
_NOTICED = 0.02
"""Of a step: a price that changes less is none."""
_ALIKE = 0.02
"""Squared sine of the angle between what two plans compute and what they copy: below it noise would be the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Raced:
    """A plan's step in parts, in seconds or in any other unit that all parts share."""

    rest: float
    """As predicted, without what copies cost."""
    touch: float
    """As predicted: memory that is taken again."""
    copies: float
    """How long its copies run."""
    measured: float

    @property
    def moves(self) -> bool:
        """Whether it has copies at all."""
        return self.copies > 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """`pace * (rest + touch_times * touch + share * copies)` is a step as measured."""

    pace: float
    touch_times: float
    """Between 0 and 1: more than all of it is not taken again."""
    share: float
    """See `Link.compute_share`."""

    def step(self, one: Raced) -> float:
        """How long this step should have taken."""
        return self.pace * (one.rest + self.touch_times * one.touch + self.share * one.copies)


def learned_prices(raced: Sequence[Raced]) -> Prices | None:
    """From steps of which some copy; None where they tell nothing about copies."""
    moving = [one for one in raced if one.moves]
    still = [one.measured / one.rest for one in raced if not one.moves]
    if not moving:
        return None
    if still:
        pace = statistics.median_low(still)
    else:
        found = _least_squares([(one.rest + one.touch, one.copies, one.measured) for one in moving])
        if found is None:
            return None
        pace = found
    excess = [one.measured / pace - one.rest for one in moving]
    times = [extra / one.touch for extra, one in zip(excess, moving, strict=True) if one.touch]
    touch_times = min(max(statistics.median_low(times), 0.0), 1.0) if times else 1.0
    shares = [(extra - touch_times * one.touch) / one.copies for extra, one in zip(excess, moving, strict=True)]
    return Prices(pace=pace, touch_times=touch_times, share=min(max(statistics.median_low(shares), 0.0), MOST_SHARE))


def _least_squares(moving: Sequence[tuple[float, float, float]]) -> float | None:
    """The pace with which `pace * (rest + share * copies)` is nearest to the seconds; None where plans are alike."""
    rest2, copies2, both = (sum(one[i] * one[j] for one in moving) for i, j in ((0, 0), (1, 1), (0, 1)))
    determinant = rest2 * copies2 - both * both
    if determinant <= _ALIKE * rest2 * copies2:
        return None
    by_rest, by_copies = (sum(one[i] * one[2] for one in moving) for i in (0, 1))
    pace = (copies2 * by_rest - both * by_copies) / determinant
    return pace if pace > 0.0 else None


def learned_link(raced: Sequence[tuple[Plan, float | None]], link: Link) -> Link | None:
    """`link` with the prices that the race has shown; None where that tells nothing new.

    `raced`: solved plans that were predicted with `link`, and the seconds of a step of each; None: not timed.
    """
    timed = [raced_parts(plan, link, seconds) for plan, seconds in raced if seconds is not None]
    found = learned_prices(timed)
    if found is None:
        return None
    is_new = any(
        abs((found.share - link.compute_share) * one.copies + (found.touch_times - 1.0) * one.touch)
        > _NOTICED * one.rest
        for one in timed
        if one.moves
    )
    if not is_new:
        return None
    touch = found.touch_times * link.touch_seconds_per_byte
    return dataclasses.replace(link, compute_share=found.share, touch_seconds_per_byte=touch)


def raced_parts(plan: Plan, link: Link, seconds: float) -> Raced:
    """The parts of a plan that was predicted with `link`, and the `seconds` that a step took."""
    found = plan.predicted
    assert found is not None
    compute = found.plain_seconds + found.recompute_seconds + found.codec_seconds + found.check_seconds
    return Raced(
        rest=compute + found.stall_seconds + found.optimizer_seconds,
        touch=found.touch_seconds,
        copies=copy_seconds(plan, link),
        measured=seconds,
    )


def copy_seconds(plan: Plan, link: Link) -> float:
    """How long the copies of activations run in a step under `plan`, both ways added up."""
    per_byte = 1.0 / link.out_bytes_per_second + 1.0 / link.in_bytes_per_second
    nbytes = [site.stored_bytes for site in plan.sites if site.fate is Fate.SWAP]
    return sum(nbytes) * per_byte + 2.0 * len(nbytes) * link.latency_seconds


def measured_prediction(raced: Sequence[tuple[Plan, float | None]], link: Link, winner: int) -> Prediction | None:
    """What the plan of number `winner` says, once it is known how long its passes took; None where they were not timed.

    `raced`: plans that were predicted with `link`, and the seconds of forward and backward of each.
    """
    plan, pass_seconds = raced[winner]
    predicted = plan.predicted
    if predicted is None or not pass_seconds:
        return None
    prices = learned_prices([_pass_parts(plan, link, seconds) for plan, seconds in raced if seconds is not None])
    own = _pass_parts(plan, link, pass_seconds)
    if prices is None:
        as_before = Prices(pace=1.0, touch_times=1.0, share=link.compute_share).step(own)
        prices = Prices(pace=pass_seconds / as_before if as_before else 1.0, touch_times=1.0, share=link.compute_share)
    return _as_measured(predicted, pass_seconds, prices)


def _pass_parts(plan: Plan, link: Link, seconds: float) -> Raced:
    parts = raced_parts(plan, link, seconds)
    assert plan.predicted is not None
    return dataclasses.replace(parts, rest=parts.rest - plan.predicted.optimizer_seconds)


def _as_measured(predicted: Prediction, pass_seconds: float, prices: Prices) -> Prediction:
    """The pass is the measured one, its parts are scaled, and what no part explains slows compute."""
    pace = prices.pace
    optimizer_seconds = pace * predicted.optimizer_seconds
    check_seconds = pace * predicted.check_seconds
    return dataclasses.replace(
        predicted,
        step_seconds=max(0.0, pass_seconds - check_seconds) + optimizer_seconds,
        stall_seconds=pace * predicted.stall_seconds,
        recompute_seconds=pace * predicted.recompute_seconds,
        plain_seconds=pace * predicted.plain_seconds,
        check_seconds=check_seconds,
        codec_seconds=pace * predicted.codec_seconds,
        optimizer_seconds=optimizer_seconds,
        touch_seconds=pace * prices.touch_times * predicted.touch_seconds,
        certainty=f"{predicted.certainty}; forward and backward as measured in the race",
    )
