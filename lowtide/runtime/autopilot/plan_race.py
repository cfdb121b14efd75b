"""Races of plans on real steps: who takes part, whose turn it is, and which plan stays.

What: once the plan of a shape has settled, a few other plans that fit take turns with it, a step or two each, and the
fastest stays; then a plan that is made for the prices which this has shown may race the winner (planner/learned.py).
When the steps of the winner drift, they race again. `Race` (race.py) decides by numbers alone, `Contest` (contest.py)
says whose tide is whose, and `PlanRaces` is what an autopilot calls before each step.
Why it is safe: every plan gives the same bits, and none is tried whose predicted peak is above the budget. One that
needs more than the budget in its turn, or fails, is out, and the plan that was there before is in force again.
Cost: at most twelve steps at the pace of other plans, and eight more for the last one; a mark on the compute stream
each.
Not covered: several threads that train one model; then nothing races, since no plan may change in the middle of
another thread's forward pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from lowtide.core.decisions import Prediction
from lowtide.errors import ConfigError
from lowtide.planner.learned import learned_link, measured_prediction
from lowtide.runtime.autopilot.contest import LEARNED, Contest, Entrant, Standing
from lowtide.runtime.autopilot.events import RACE
from lowtide.runtime.autopilot.in_force import PlanInForce
from lowtide.runtime.autopilot.phases import Phase
from lowtide.runtime.autopilot.plan_cache import CachedPlan, ShapeBucket
from lowtide.runtime.autopilot.planning import Planning
from lowtide.runtime.autopilot.race import LATE_STEPS, Pace, Race, not_in_force, of_slowest_rank
from lowtide.runtime.autopilot.step_clock import StepClock
from lowtide.tensors.ranks import any_rank, gather
from lowtide.units import format_bytes


class PlanRaces:
    """The races of an autopilot, one for each shape."""

    def __init__(
        self, in_force: PlanInForce, planning: Planning, steps: StepClock, *, num_threads: Callable[[], int]
    ) -> None:
        """`num_threads`: how many train the model."""
        self._in_force = in_force
        self._planning = planning
        self._engine = in_force.engine
        self._steps = steps
        self._num_threads = num_threads
        self.results: list[tuple[Standing, ...]] = []
        """How the races went that are over, each with the winner first."""

    def before_step(self, key: ShapeBucket) -> None:
        """Between two forward passes, with the plan of `key` in force: begin a race, or see whose turn it is."""
        shape = self._in_force.shapes[key]
        self._steps.read()
        if self._in_force.state.phase is Phase.SETTLED and self._may_race(shape):
            self._begin(key, shape)
        if self._in_force.state.phase is Phase.RACING:
            assert shape.contest is not None
            self._take_turn(key, shape, shape.contest)

    def timed(self, key: ShapeBucket) -> Any:
        """Who wants to know how long the step takes that begins now."""
        shape = self._in_force.shapes[key]
        if shape.contest is not None:
            return shape.contest.race.lap()
        return shape.pace if self._in_force.state.phase is Phase.SETTLED else None

    @property
    def rival(self) -> Contest | None:
        """The race, if the plan in force is one that is only tried."""
        key = self._in_force.state.key
        contest = self._in_force.shapes[key].contest if key is not None else None
        return contest if contest is not None and contest.number else None

    def drop_rival(self, why: str) -> None:
        """The plan in force is out of the race, and the one that was there before is in force again."""
        contest, key = self.rival, self._in_force.state.key
        assert contest is not None and key is not None
        out = contest.in_force
        contest.race.drop(contest.number)
        self._in_force.say(f"lowtide: the race goes on without the plan '{out.name}': {why}")
        self._give_turn(key, self._in_force.shapes[key], contest, 0)
        if out.tide is not None:
            out.tide.remove()

    # -- the course of a race --------------------------------------------------------------------------------------

    def _may_race(self, shape: CachedPlan) -> bool:
        """The plan has run, there may be others, and no race has said which is the fastest, or steps have drifted."""
        tide = self._in_force.state.tide
        assert tide is not None
        if shape.plan.does_nothing or self._num_threads() > 1 or not tide.has_run:
            return False
        if shape.pace is not None and shape.pace.is_due():
            has_drifted = shape.pace.ask()
            shape.is_raced = not (self._in_force.decide("pace") and any_rank(has_drifted, self._planning.group))
        return not shape.is_raced

    def _begin(self, key: ShapeBucket, shape: CachedPlan) -> None:
        shape.is_raced = True
        shape.measured = None
        if self._engine.mark_time() is None or not self._in_force.decide("race"):
            return
        start = time.perf_counter()
        if shape.rivals is None:
            shape.rivals = self._planning.rivals(shape)
        source = self._planning.source
        plans = {name: source.localized(plan, shape.profile) for name, plan in shape.rivals.items()}
        names = not_in_force({name: plan.digest() for name, plan in plans.items()}, shape.plan.digest())
        if not names:
            return
        entrants = [Entrant(shape.name, shape.plan, shape.tide), *(Entrant(name, plans[name]) for name in names)]
        race = Race(
            len(entrants),
            is_fixed=self._planning.consensus.num_ranks > 1,
            num_late=0 if self._engine.device_type == "cpu" else LATE_STEPS,
            turn_steps=2 if any_rank(self._engine.forget_free_memory(), self._planning.group) else 1,
        )
        shape.contest = Contest(entrants, race, time.perf_counter() - start)
        self._in_force.say(f"lowtide: {len(entrants)} plans race: {', '.join(entrant.name for entrant in entrants)}")
        self._in_force.enter(Phase.RACING, key, shape.tide)

    def _take_turn(self, key: ShapeBucket, shape: CachedPlan, contest: Contest) -> None:
        if self._num_threads() > 1:
            self._end(key, shape, contest, contest.number)
            return
        # The first forward pass of a plan also tries its recipes out.
        if contest.number and not contest.race.is_learning(contest.number):
            peak_bytes = max(self._engine.device_peak_bytes() or 0, self._in_force.watch.peak.peak_bytes)
            if peak_bytes > self._planning.budget_bytes:
                self.drop_rival(f"it needed {format_bytes(peak_bytes)}")
        if contest.race.is_over(has_pending=self._steps.has_pending):
            self._finish(key, shape, contest)
        elif contest.race.turn != contest.number:
            self._give_turn(key, shape, contest, contest.race.turn)

    def _give_turn(self, key: ShapeBucket, shape: CachedPlan, contest: Contest, number: int) -> None:
        """Put the plan of this entrant in force."""
        self._engine.forget_free_memory()
        contest.in_force.tide = shape.tide
        contest.number = number
        shape.plan, shape.tide = contest.in_force.plan, contest.in_force.tide
        try:
            self._in_force.use(key)
        except ConfigError as error:
            if number == 0:
                raise
            self.drop_rival(str(error))  # somebody else's plan is on a part of the model by now

    def _finish(self, key: ShapeBucket, shape: CachedPlan, contest: Contest) -> None:
        medians = contest.race.medians
        if not self._in_force.decide("end of the race"):
            self._in_force.say("lowtide: the race is called off: the ranks have parted company")
            self._end(key, shape, contest, 0)
            return
        seconds = of_slowest_rank(gather(medians, self._planning.group))
        number, result = contest.result(seconds)
        if contest.link is None and self._begin_finals(shape, contest, number, seconds):
            self._give_turn(key, shape, contest, contest.race.turn)
            return
        if contest.link is not None and contest.entrants[number].name == LEARNED:
            self._planning.know(link=contest.link)  # for the plans of other shapes too
        own = medians[number]
        shape.measured = self._measured(contest, number)
        self.results.append(contest.standings(seconds))
        self._end(key, shape, contest, number)
        shape.rivals = contest.plans()
        shape.pace = Pace(own) if own else None
        shape.result = result
        self._in_force.tell(shape, RACE + result, contest.seconds)

    def _measured(self, contest: Contest, number: int) -> Prediction | None:
        """What the winner says by what its passes took on this rank."""
        link = self._planning.facts.link
        assert link is not None
        raced = zip((entrant.plan for entrant in contest.entrants), contest.race.pass_medians, strict=True)
        return measured_prediction(list(raced), link, number)

    def _begin_finals(self, shape: CachedPlan, contest: Contest, winner: int, seconds: list[float | None]) -> bool:
        """Whether one more plan races the winner: the one that is best by what the race says of prices."""
        start = time.perf_counter()
        assert self._planning.facts.link is not None
        plans = [entrant.plan for entrant in contest.entrants]
        link = learned_link(list(zip(plans, seconds, strict=True)), self._planning.facts.link)
        has_one = LEARNED in [entrant.name for entrant in contest.entrants]
        plan = self._planning.learned(shape, None if has_one else link)
        if plan is None or not contest.is_new(plan):
            return False
        contest.entrants.append(Entrant(LEARNED, plan))
        contest.race.begin_finals(winner)
        contest.link, contest.seconds = link, contest.seconds + time.perf_counter() - start
        self._in_force.say(f"lowtide: one more plan races '{contest.entrants[winner].name}': {LEARNED}")
        return True

    def _end(self, key: ShapeBucket, shape: CachedPlan, contest: Contest, number: int) -> None:
        """The plan of this entrant stays."""
        winner = contest.entrants[number]
        is_in_force = number == contest.number
        contest.in_force.tide = shape.tide
        shape.contest = None
        shape.name, shape.plan, shape.tide = winner.name, winner.plan, winner.tide
        if is_in_force:
            self._in_force.enter(Phase.SETTLED, key, shape.tide)
        else:
            self._engine.forget_free_memory()
            self._in_force.use(key)
        contest.retire(but=winner)
