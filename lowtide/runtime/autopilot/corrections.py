"""What a planned step says about the model that it was planned with: which number was wrong, and by how much.

What: `memory_excess` compares the device's own peak with the predicted one, `correct_times` measured stalls with
predicted ones. Each gives the one correction that it asks for, in words and in numbers, or nothing.

Which number is wrong when there are stalls? On the host, backward passes are timed. If compute took at least a tenth
less time than the profile says, there was less to hide copies behind, and the profile's times are scaled. Otherwise the
link is slower than it was measured. The 2 % are a share of the time that the step really took, because on a busy
machine stalls take longer too. Only one of the two is scaled after one measurement; the next step shows what is left.
Cost: some arithmetic, twice for each plan. Not covered: fewer stalls or bytes than predicted, unless the peak is off.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from lowtide.core.decisions import Prediction
from lowtide.core.profile import Profile
from lowtide.runtime.saved.stats import Stats
from lowtide.timeline.step import Link
from lowtide.units import format_bytes, format_seconds

_TOLERANCE = 0.02
_COMPUTE_TOLERANCE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """One number that was wrong. `why` begins with 'peak', 'loop', 'compute' or 'stalls'."""

    why: str
    unforeseen_bytes: int = 0
    """To be taken from the budget, beyond what was before."""
    profile: Profile | None = None
    """In place of the old one."""
    link: Link | None = None
    """The same."""


def correct_memory(
    predicted: Prediction, peak_bytes: int, budget_bytes: int, unforeseen_bytes: int = 0
) -> Correction | None:
    """Bytes that the profile did not foresee. For devices that keep count themselves; `peak_bytes` is their count.

    `unforeseen_bytes`: what is taken from the budget already; the plan in force was made for so much less.
    A step that took less than planned corrects nothing: what it did not need another one may (an optimizer's state
    comes with its first step), and no plan is made for more than the budget.
    """
    excess = peak_bytes - predicted.peak_bytes - unforeseen_bytes
    if excess <= 0 or (excess <= _TOLERANCE * predicted.peak_bytes and peak_bytes <= budget_bytes):
        return None
    why = f"peak: {format_bytes(peak_bytes)}, not {format_bytes(predicted.peak_bytes)}"
    return Correction(why=why, unforeseen_bytes=excess)


def correct_times(
    profile: Profile, predicted: Prediction, stats: Stats, backward_seconds: Sequence[float], link: Link
) -> Correction | None:
    """More stalls than predicted: compute was faster than the profile says, or the link slower than measured.

    `backward_seconds` are backward passes without their stalls; none where they were not timed.
    """
    stall = stats.stall_seconds / stats.num_forwards
    excess = stall - predicted.stall_seconds
    expected = sum(profile.op_seconds[profile.num_forward_ops :]) + predicted.recompute_seconds
    # Stalls of an engine with a clock of its own leave less than nothing: then nothing is known of compute.
    measured = min(backward_seconds, default=0.0)
    is_known = measured > 0.0 and expected > 0.0
    share = measured / expected if is_known else 1.0
    # Of the step as it was: on a machine that is busy with other work, everything takes longer, stalls too.
    if excess <= _TOLERANCE * predicted.step_seconds * max(1.0, share) or not stats.swapped_bytes:
        return None
    if share < 1.0 - _COMPUTE_TOLERANCE:
        why = f"compute: backward in {format_seconds(measured)}, not {format_seconds(expected)}"
        return Correction(why=why, profile=profile.with_times(share))
    return _correct_link(stats, stall, excess, link)


def _correct_link(stats: Stats, stall: float, excess: float, link: Link) -> Correction:
    out_seconds = stats.swapped_bytes / stats.num_forwards / link.out_bytes_per_second
    in_seconds = stats.copied_in_bytes / stats.num_forwards / link.in_bytes_per_second
    slower = (out_seconds + in_seconds) / (out_seconds + in_seconds + excess)
    slower_link = dataclasses.replace(
        link,
        out_bytes_per_second=link.out_bytes_per_second * slower,
        in_bytes_per_second=link.in_bytes_per_second * slower,
    )
    return Correction(
        why=f"stalls: {format_seconds(stall)} a step, not {format_seconds(stall - excess)}", link=slower_link
    )
