"""What a planned step says about memory, compute and the link: too little and too much are both learned from."""

from __future__ import annotations

import dataclasses

import pytest

from lowtide.core.decisions import Prediction
from lowtide.runtime.autopilot.measure import Correction, correct_memory, correct_times
from lowtide.runtime.saved.stats import Stats
from lowtide.timeline.step import Link
from tests.support.profiles import decoder_profile

PLANNED, BUDGET = 1000, 1100


def corrected(peak_bytes: int, unforeseen_bytes: int = 0) -> Correction | None:
    predicted = Prediction(**{**_zeros(Prediction), "peak_bytes": PLANNED})
    return correct_memory(predicted, peak_bytes, BUDGET, unforeseen_bytes)


def _zeros(kind: type) -> dict[str, int]:
    return {field.name: 0 for field in dataclasses.fields(kind)}


@pytest.mark.parametrize("peak_bytes", [980, 1000, 1020])
def test_two_per_cent_are_no_mistake(peak_bytes: int) -> None:
    assert corrected(peak_bytes) is None


@pytest.mark.parametrize(("peak_bytes", "excess"), [(1021, 21), (1200, 200)])
def test_more_than_planned_is_corrected(peak_bytes: int, excess: int) -> None:
    found = corrected(peak_bytes)
    assert found is not None
    assert found.unforeseen_bytes == excess
    assert found.why.startswith("peak: ")
    assert (found.profile, found.link) == (None, None)


@pytest.mark.parametrize("unforeseen_bytes", [0, 90])
def test_less_than_planned_is_no_reason_to_use_more(unforeseen_bytes: int) -> None:
    """An optimizer's state comes with its first step; a batch may be short, a counter reset."""
    assert corrected(979, unforeseen_bytes) is None
    assert corrected(400, unforeseen_bytes) is None


def test_what_was_taken_from_the_budget_is_taken_once() -> None:
    """The plan in force is made for so much less, and the step needs so much more than it says."""
    assert corrected(1090, 90) is None
    more = corrected(1190, 90)
    assert more is not None and more.unforeseen_bytes == 100


def test_the_budget_is_kept_to_the_byte() -> None:
    predicted = Prediction(**{**_zeros(Prediction), "peak_bytes": PLANNED})
    found = correct_memory(predicted, PLANNED + 1, PLANNED)
    assert found is not None and found.unforeseen_bytes == 1


def _times(stall_seconds: float, num_forwards: int, backward_seconds: tuple[float, ...]) -> Correction | None:
    """A profile of ten seconds forward and twenty backward, planned without stalls, over a link of 100 bytes/s."""
    profile = dataclasses.replace(
        decoder_profile(1), op_names=("a", "b"), op_seconds=(10.0, 20.0), op_bytes=(0, 0), op_gradient_bytes=(0, 0),
        num_forward_ops=1, nodes=(),
    )  # fmt: skip
    predicted = Prediction(**{**_zeros(Prediction), "step_seconds": 30.0})
    moved = {"swapped_bytes": 1000 * num_forwards, "copied_in_bytes": 1000 * num_forwards}
    stats = Stats(**{**_zeros(Stats), **moved, "stall_seconds": stall_seconds, "num_forwards": num_forwards})
    return correct_times(profile, predicted, stats, backward_seconds, LINK)


LINK = Link(out_bytes_per_second=100.0, in_bytes_per_second=100.0)


def test_stalls_are_those_of_one_step() -> None:
    assert _times(0.6 * 4, 4, ()) is None
    found = _times(5.0 * 4, 4, ())
    assert found is not None and found.link is not None
    # Twenty seconds of copying took twenty-five.
    assert found.link.out_bytes_per_second == pytest.approx(80.0)
    assert found.why == "stalls: 5.00 s a step, not 0 s"


def test_compute_that_was_faster_is_told_from_a_slower_link() -> None:
    found = _times(5.0, 1, (10.0, 12.0))
    assert found is not None and found.profile is not None and found.link is None
    assert found.profile.op_seconds == pytest.approx((5.0, 10.0))
    slower = _times(5.0, 1, (19.0,))
    assert slower is not None and slower.profile is None and slower.link is not None
