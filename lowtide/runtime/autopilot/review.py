"""A planned step is over: was it as predicted? If not, the plan is corrected.

What: `Review` compares the first two steps of each plan with its prediction, by what was measured of them
(plan_watch.py). corrections.py says which number was wrong; a new plan is made with the corrected one and put in force.
Before that, what the loop takes between forward and backward goes into the profile, where plans have room for it.

Why it is safe: a correction only ever plans for less than the budget, and is taken back where no plan fits with it: the
plan that is in force then stays, with a warning. Only where the first planned step already passed the budget, so that
nothing is lost but that step, it is a `BudgetError`. Several ranks do the same, as long as they come here together.
Cost: some arithmetic twice for each plan, and the solver where something is corrected.
Not covered: plans that are made again for other reasons (again.py).
"""

from __future__ import annotations

import time
import warnings

from lowtide.errors import BudgetError
from lowtide.runtime.autopilot.corrections import Correction, correct_memory, correct_times
from lowtide.runtime.autopilot.first_step import FirstStep
from lowtide.runtime.autopilot.in_force import NUM_REVIEWS, PlanInForce
from lowtide.runtime.autopilot.phases import Phase
from lowtide.runtime.autopilot.plan_cache import CachedPlan, ShapeBucket
from lowtide.runtime.autopilot.planning import Planning
from lowtide.runtime.autopilot.unplanned import Unplanned
from lowtide.runtime.saved.stats import Stats
from lowtide.tensors.ranks import any_rank
from lowtide.units import format_bytes

_ANOTHERS = "another rank corrected its plan"


class Review:
    """Of the steps of one model on autopilot."""

    def __init__(self, in_force: PlanInForce, planning: Planning, first: FirstStep, unplanned: Unplanned) -> None:
        """`first` says how the first planned step went; `unplanned` hears of a first step that no plan fits."""
        self._in_force = in_force
        self._watch = in_force.watch
        self._engine = in_force.engine
        self._planning = planning
        self._first = first
        self._unplanned = unplanned

    def compare(self, key: ShapeBucket) -> None:
        """Between two forward passes, with the plan of `key` in force: compare, and correct if need be.

        Raises BudgetError, and the model is as it was before `optimize`, where the first planned step passed the budget
        and no plan fits with what it showed.
        """
        if self._in_force.state.phase is not Phase.COMPARED:
            return
        shape, tide = self._in_force.shapes[key], self._in_force.state.tide
        assert tide is not None
        stats = tide.stats  # not before: on the host it looks at every tensor there is
        if stats.num_forwards < 1:
            return
        pass_bytes = self._watch.highest_bytes
        self._watch.peak.note()  # the optimizer's step is over as well, and whatever else there was between two passes
        self._tell_first(shape, stats)
        found = self._correction(shape, stats)
        self._in_force.count_review(shape)
        self._watch.begin(tide)
        is_joint = self._in_force.decide("review")
        if any_rank(found is not None, self._planning.group) if is_joint else found is not None:
            self._correct(key, found, pass_bytes, is_joint=is_joint)

    def note_loop(self) -> None:
        """What the loop does between forward and backward was measured: plans have room for it from now on."""
        key = self._in_force.state.key
        if key is None or self._watch.was_smaller:
            return
        shape = self._in_force.shapes[key]
        more_bytes = self._watch.loop.extra_bytes - shape.loop_bytes
        if more_bytes > 0:
            shape.profile = shape.profile.with_loop_bytes(more_bytes)
            shape.loop_bytes += more_bytes
            shape.has_more_loop_bytes = True

    def _tell_first(self, shape: CachedPlan, stats: Stats) -> None:
        predicted = shape.plan.predicted
        if self._first.is_told or predicted is None:
            return
        peak_bytes = None if self._engine.device_peak_bytes() is None else self._watch.highest_bytes
        line = self._first.line(predicted, peak_bytes=peak_bytes, counted_bytes=stats.peak_device_bytes)
        self._in_force.say(line)

    def _correction(self, shape: CachedPlan, stats: Stats) -> Correction | None:
        """What this step says was wrong; None where it was as predicted."""
        predicted, link = shape.plan.predicted, self._planning.facts.link
        assert predicted is not None
        assert link is not None
        found = None
        if self._engine.device_peak_bytes() is not None:
            # Where the loop took more, the profile has what is above the prediction there.
            peak_bytes = self._watch.peak.peak_bytes if shape.has_more_loop_bytes else self._watch.highest_bytes
            found = correct_memory(predicted, peak_bytes, self._planning.budget_bytes, shape.unforeseen_bytes)
        if found is None and not self._watch.was_smaller:
            found = correct_times(shape.profile, predicted, stats, self._watch.clock.seconds, link)
        if found is None and shape.has_more_loop_bytes:
            found = Correction(why=f"loop: {format_bytes(shape.loop_bytes)} between forward and backward")
        return found

    def _correct(self, key: ShapeBucket, found: Correction | None, pass_bytes: int, *, is_joint: bool) -> None:
        """Plan again with what was found on this rank, or on another one."""
        start = time.perf_counter()
        shape = self._in_force.shapes[key]
        has_more_loop_bytes = shape.has_more_loop_bytes
        before = (shape.unforeseen_bytes, shape.profile, self._planning.facts)
        if found is not None:
            shape.unforeseen_bytes += found.unforeseen_bytes
            shape.profile = found.profile or shape.profile
            self._planning.know(link=found.link or self._planning.facts.link)
        try:
            plan = self._planning.again(shape, is_joint=self._planning.consensus.is_together)
        except BudgetError as error:
            needed_bytes = error.floor_bytes + shape.unforeseen_bytes
            shape.unforeseen_bytes, shape.profile, self._planning.facts = before
            self._in_force.count_review(shape, NUM_REVIEWS)
            shape.has_more_loop_bytes = False
            is_above = has_more_loop_bytes or pass_bytes > self._planning.budget_bytes
            if is_joint and any_rank(self._is_beginning and is_above, self._planning.group):
                refusal = self._first_step_error(pass_bytes, needed_bytes)
                self._in_force.remove()
                self._unplanned.note_refusal(refusal)
                raise refusal from None
            # Not the user's mistake in the middle of training: what is in force works, if it needs more than planned.
            self._warn_that_nothing_fits(found, needed_bytes)
            return
        self._in_force.replace(shape, plan)
        self._in_force.use(key, why=_why(found), seconds=time.perf_counter() - start)

    @property
    def _is_beginning(self) -> bool:
        """The first planned micro-batch is over, or the first one that found gradients: nothing is lost but that."""
        num_forwards = self._in_force.num_forwards
        return num_forwards == 1 or (num_forwards == 2 and self._planning.facts.has_gradients)

    def _first_step_error(self, pass_bytes: int, needed_bytes: int) -> BudgetError:
        return BudgetError(
            f"budget {format_bytes(self._planning.budget_bytes)}: the first planned step took "
            f"{format_bytes(pass_bytes)}, which no observation of the model shows (a loss of the loop's own, or what "
            "else is on the device), and no plan fits with that; the least that can be reached is "
            f"{format_bytes(needed_bytes)}; raise the budget to that, or make the micro-batch smaller",
            floor_bytes=needed_bytes,
        )

    def _warn_that_nothing_fits(self, found: Correction | None, needed_bytes: int) -> None:
        warnings.warn(
            f"lowtide: a planned step was not as predicted ({_why(found)}), and no plan fits the budget of "
            f"{format_bytes(self._planning.budget_bytes)} with that; the plan in force stays, and steps may need more "
            f"than the budget. Raise it to {format_bytes(needed_bytes)}, or make the micro-batch smaller.",
            stacklevel=2,
        )


def _why(found: Correction | None) -> str:
    return found.why if found is not None else _ANOTHERS
