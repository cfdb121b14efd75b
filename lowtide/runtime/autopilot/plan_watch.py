"""What is measured of the steps of the plan in force, as long as it is compared with its prediction.

What: `PlanWatch` joins the device's peak and what the loop takes between two passes (peaks.py), the seconds of backward
passes (observe_call.py), and whether a step was smaller than the one that was planned. A measurement ends, and the next
one begins, with each comparison and with each plan that is put on.
Cost: what the parts say, in the steps of plans that are compared; nothing once a plan has settled.
Not covered: what follows from the figures (review.py).
"""

from __future__ import annotations

from typing import Any

from lowtide.engines.base import Engine
from lowtide.runtime.autopilot.observe_call import BackwardClock
from lowtide.runtime.autopilot.peaks import LoopWatch, PeakWatch
from lowtide.runtime.session.tide import Tide


class PlanWatch:
    """Of one model on autopilot."""

    def __init__(self, engine: Engine) -> None:
        self.peak = PeakWatch(engine.device_peak_bytes)
        """On a device whose allocator counts."""
        self.loop = LoopWatch(engine)
        """The same, of what is between forward and backward."""
        self.clock = BackwardClock()
        """Used on the host alone."""
        self._is_host = engine.device_type == "cpu"
        self.was_smaller = False
        """A step since the measurement began was smaller than the one that was planned."""

    @property
    def highest_bytes(self) -> int:
        """The device's peak, whatever was at work."""
        return max(self.peak.peak_bytes, self.loop.peak_bytes)

    def follow(self, output: Any, tide: Tide) -> None:
        """A planned forward pass under `tide`, which is compared, gave `output`."""
        self.peak.follow(output)
        self.loop.follow(output)
        if self._is_host:
            self.clock.follow(output, lambda: tide.stats.stall_seconds)

    def begin(self, tide: Tide) -> None:
        """A new measurement, of `tide`: also of a plan that is new, since the device's counter remembers what came
        before it, the observed step too."""
        self.restart_totals(tide)
        self.was_smaller = False
        self.clock.seconds.clear()

    def restart_totals(self, tide: Tide) -> None:
        """Only the totals of `tide` and the peaks; times of steps that have run still count."""
        tide.reset_stats()
        self.peak.restart()
        self.loop.restart()
