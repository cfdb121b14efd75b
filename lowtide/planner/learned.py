"""What a race says about the price of copies: plans that copy and plans that do not, each with the time of its steps.

What: `learned_link` compares predicted and measured steps. A plan without copies shows how long this machine takes for
what the profile says; what a plan with copies takes beyond that is the price of its copies, whatever the reason: cores
that they share with compute, memory that was given back and is touched again (a page fault for each 4 KiB), hooks. It
goes where the timeline has it already, `Link.compute_share`: seconds of compute lost for each second of copying. Where
every plan copies, two that copy unlike amounts show both numbers.

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

from lowtide.core.fate import Fate
from lowtide.core.plan import Plan
from lowtide.timeline.step import Link

MOST_SHARE = 8.0
"""A second of copying costs no more compute than this; beyond it something else was slow."""
_NOTICED = 0.02
"""Of a step: a price that changes less is none."""
_ALIKE = 0.02
"""Squared sine of the angle between what two plans compute and what they copy: below it noise would be the answer."""


def learned_link(raced: Sequence[tuple[Plan, float | None]], link: Link) -> Link | None:
    """`link` with the `compute_share` that the race has shown; None where that tells nothing new.

    `raced`: solved plans that were predicted with `link`, and the seconds of a step of each; None: not timed.
    """
    timed = [
        (_without_copies(plan), copy_seconds(plan, link), seconds) for plan, seconds in raced if seconds is not None
    ]
    moving = [(rest, copies, seconds) for rest, copies, seconds in timed if copies]
    still = [seconds / rest for rest, copies, seconds in timed if not copies]
    if not moving:
        return None
    if still:
        pace = statistics.median_low(still)
        share = statistics.median_low([(seconds / pace - rest) / copies for rest, copies, seconds in moving])
    else:
        found = _least_squares(moving)
        if found is None:
            return None
        share = found
    share = min(max(share, 0.0), MOST_SHARE)
    is_new = any(abs(share - link.compute_share) * copies > _NOTICED * rest for rest, copies, _ in moving)
    return dataclasses.replace(link, compute_share=share) if is_new else None


def _least_squares(moving: Sequence[tuple[float, float, float]]) -> float | None:
    """The share with which `pace * (rest + share * copies)` is nearest to the seconds; None where plans are alike."""
    rest2, copies2, both = (sum(one[i] * one[j] for one in moving) for i, j in ((0, 0), (1, 1), (0, 1)))
    determinant = rest2 * copies2 - both * both
    if determinant <= _ALIKE * rest2 * copies2:
        return None
    by_rest, by_copies = (sum(one[i] * one[2] for one in moving) for i in (0, 1))
    pace = (copies2 * by_rest - both * by_copies) / determinant
    price = (rest2 * by_copies - both * by_rest) / determinant
    return price / pace if pace > 0.0 else None


def copy_seconds(plan: Plan, link: Link) -> float:
    """How long the copies of activations run in a step under `plan`, both ways added up."""
    per_byte = 1.0 / link.out_bytes_per_second + 1.0 / link.in_bytes_per_second
    nbytes = [site.stored_bytes for site in plan.sites if site.fate is Fate.SWAP]
    return sum(nbytes) * per_byte + 2.0 * len(nbytes) * link.latency_seconds


def _without_copies(plan: Plan) -> float:
    """A step as predicted, had its copies slowed nothing."""
    found = plan.predicted
    assert found is not None
    compute = found.plain_seconds + found.recompute_seconds + found.codec_seconds + found.check_seconds
    return compute + found.stall_seconds + found.optimizer_seconds
