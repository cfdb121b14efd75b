"""When a measurement of planned steps ends, and which figures the next one begins with."""

from __future__ import annotations

from typing import Any

from lowtide.runtime.autopilot.peaks import PlanWatch
from tests.support.virtual_engine import VirtualEngine


class Totals:
    """As much of a tide as is measured anew."""

    def __init__(self) -> None:
        self.num_resets = 0

    def reset_stats(self) -> None:
        self.num_resets += 1


def watched() -> tuple[PlanWatch, Any]:
    watch = PlanWatch(VirtualEngine(seed=1))
    watch.peak.peak_bytes, watch.loop.peak_bytes, watch.loop.extra_bytes = 3, 5, 1
    watch.was_smaller = True
    watch.clock.seconds.append(1.0)
    return watch, Totals()


def test_a_new_measurement_knows_nothing_of_the_one_before() -> None:
    watch, tide = watched()
    assert watch.highest_bytes == 5
    watch.begin(tide)
    assert (watch.highest_bytes, watch.loop.extra_bytes, tide.num_resets) == (0, 0, 1)
    assert not watch.was_smaller and watch.clock.seconds == []


def test_totals_that_start_anew_leave_the_steps_that_have_run() -> None:
    watch, tide = watched()
    watch.restart_totals(tide)
    assert (watch.highest_bytes, watch.loop.extra_bytes, tide.num_resets) == (0, 0, 1)
    assert watch.was_smaller and watch.clock.seconds == [1.0]
