"""All that may be done with a step, as one problem: candidates, the fastest within any budget, one floor, one bound.

What: a `Space` has *ways*. A way is a set of layers that run again as a whole, with or without recipes, with or without
swapping, with some fates for shares of the optimizer's state; each is a problem that a solver can work on (solve.py).
The ways of a step, whatever the budget is:
- the layers that rules name run again, and storages are kept, swapped or made again: the solver decides;
- the fewest layers that leave room for all else to be kept;
- all layers but the last, and half of them, with the solver deciding about the rest;
- each of these without recipes, where proving them has a price, and without swapping, where that has one of its own
  (`Link.page_fault_seconds_per_byte`: memory that went back to the system is taken again);
- with the optimizer's state on the device, and with shares of it moving as `memory.optimizer` allows.

Why budgets are rounded: search is not exact, so that one for a larger budget could find a slower plan. Each way has a
row of *limits*, from its floor to its peak with everything kept, that do not depend on the budget. The solver is asked
for these alone; between two of them stand three plans more, mixtures of theirs. The fastest plan of the limits within
the budget is taken: a larger budget chooses among more of them. From the budget downward limits are looked at as long
as the solver's bound leaves a chance for a faster plan, so mostly two. This is so for steps of any size.

The floor is the smallest floor of any way; a plan exists from there on. The bound is the least of the ways that could
be faster, by the linear program for the budget itself.

Cost: two solutions a way for one budget as a rule, seventeen at most, and the way's floor. Everything is remembered, so
that other budgets of the same step cost little. Not covered: sets of layers other than the first so many.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lowtide.config.memory import MemoryConfig
from lowtide.core.fate import Fate
from lowtide.core.profile import Profile
from lowtide.errors import BudgetError
from lowtide.planner.by_rules import NO_OTHER, layers_by_rule, problem_of
from lowtide.planner.local_search import Evaluator, Fates, Outcome, mixture, repair
from lowtide.planner.min_peak import bound_bytes, first_of, quick_floor
from lowtide.planner.problem import Problem, state_bytes, stored_form
from lowtide.planner.rerun_layers import call_seconds, can_rerun
from lowtide.planner.solve import bound_of, floor, refusal, solve
from lowtide.planner.state_items import StateShares, in_order, split
from lowtide.timeline.events import Event, Timeline, run
from lowtide.timeline.memory import StepArrays, plain_curve
from lowtide.timeline.step import Link

_NUM_SPANS = 16
"""Between limits for which the solver is asked."""
_CURVE = 2.0
"""Limits are closer where memory is short, and times change most: shares of the way up, to this power."""
_NUM_PARTS = 4
"""Of the span between two limits."""
_CHECK_SHARE = 0.005
"""A check that costs less than this share of the step is not worth another plan."""
_LAUNCH_SECONDS = 8e-6
"""What eager PyTorch's host takes to launch an operator on an accelerator. An estimate."""
_SWAP_IS_SLOWER = "swapping would take longer"


@dataclass(frozen=True, kw_only=True)
class Question:
    """A step, and what may be done with it, without a budget."""

    profile: Profile
    """With the prices of the runtime itself."""
    config: MemoryConfig
    link: Link
    has_gradients: bool
    time_limit_seconds: float
    layer_seconds: float = 0.0
    """Of lowtide's own, for each layer that runs again (by_rules.py)."""
    log_seconds: float = 0.0
    """For each operator of forward, where recipes are proved."""
    shares: tuple[StateShares | None, ...] = (None,)
    """What may become of the optimizer's state; None: it stays."""
    num_micro_batches: int = 1

    @property
    def seconds(self) -> float:
        """Of the plain step."""
        return sum(self.profile.op_seconds)

    @functools.cached_property
    def check_seconds(self) -> float:
        """What it costs to prove recipes in each forward pass, where a plan has any."""
        profile, num_ops = self.profile, self.profile.num_forward_ops
        host_seconds = num_ops * self.log_seconds
        if profile.device == "cpu":
            return host_seconds
        # The host runs ahead of an accelerator: only what makes it slower than the device shows.
        launches = num_ops * (_LAUNCH_SECONDS + self.log_seconds)
        return min(host_seconds, max(0.0, launches - sum(profile.op_seconds[:num_ops])))

    @functools.cached_property
    def page_fault_seconds(self) -> float:
        """What it costs to take memory again, where a plan swaps: as much as the plain step makes."""
        if not self.link.page_fault_seconds_per_byte:
            return 0.0
        plain = problem_of(self.profile, self.config, has_gradients=self.has_gradients, layers=())
        own_bytes = int(plain_curve(plain.step).max()) - state_bytes(self.profile, has_gradients=self.has_gradients)
        return self.link.page_fault_seconds_per_byte * max(0, own_bytes)

    @property
    def with_recipes(self) -> tuple[bool, ...]:
        """Whether to plan with them; both where proving them has a price."""
        has_price = self.check_seconds > _CHECK_SHARE * self.seconds
        return (True, False) if has_price and self.config.recomputes_freely else (True,)

    @property
    def with_swap(self) -> tuple[bool, ...]:
        """Whether to plan with swapping; both where it has a price of its own."""
        return (True, False) if self.page_fault_seconds > 0 and self.config.swaps_freely else (True,)


@dataclass(frozen=True, slots=True, kw_only=True)
class WayPlan:
    """A plan of one way. Seconds are of one step of one micro-batch."""

    way: Way
    fates: Fates
    timeline: Timeline
    limit_bytes: int
    """What it was played for."""
    check_seconds: float
    page_fault_seconds: float

    @property
    def problem(self) -> Problem:
        return self.way.problem

    @property
    def step_seconds(self) -> float:
        """Forward and backward, with memory that is taken again."""
        return self.timeline.step_seconds + self.page_fault_seconds

    @property
    def pass_seconds(self) -> float:
        """The same with what recipes cost to prove."""
        return self.step_seconds + self.check_seconds

    def events(self) -> tuple[Event, ...]:
        """Of compute and the lanes."""
        how: Any = {"budget_bytes": self.limit_bytes, "with_events": True}
        return run(self.problem.step, self.fates, self.way.question.link, **how).events

    @property
    def swaps(self) -> bool:
        """Whether any activation leaves the device."""
        return Fate.SWAP in split(self.problem, self.fates)[0]


class Way:
    """See the module's text. `layers` run again, and `shares` of the optimizer's state may move."""

    def __init__(
        self,
        question: Question,
        layers: tuple[str, ...],
        shares: StateShares | None = None,
        *,
        has_recipes: bool = True,
        swaps: bool = True,
    ) -> None:
        self.question = question
        self.layers = layers
        self.shares = shares
        self.has_recipes, self.may_swap = has_recipes, swaps
        self.is_main = has_recipes and swaps
        """Whether it leaves all that is allowed."""
        again = sum(call_seconds(question.profile, name, question.layer_seconds) for name in layers)
        self.least_seconds = question.seconds + again
        """No plan of it is faster."""
        self._outcomes: dict[int, Outcome | None] = {}
        self._bounds: dict[int, float] = {}
        self._parts: dict[tuple[int, int], Outcome | None] = {}

    @functools.cached_property
    def problem(self) -> Problem:
        question = self.question
        profile, config = question.profile, question.config
        if not self.has_recipes:
            profile = profile.without_recipes([node.name for node in profile.nodes])
        if not self.may_swap:
            config = dataclasses.replace(config, swap="none")
        how: Any = {"has_gradients": question.has_gradients, "layers": self.layers, "why_not_free": self.why_not_free}
        return problem_of(profile, config, **how, layer_seconds=question.layer_seconds, shares=self.shares)

    @property
    def why_not_free(self) -> str:
        """What is said of sites that may not have every fate."""
        return NO_OTHER if self.may_swap else _SWAP_IS_SLOWER

    @property
    def host_bytes(self) -> int | None:
        """What the host takes of activations: streamed shares of the state are there too, and all may be."""
        limit = self.question.config.host_budget
        return limit if limit is None or self.shares is None else limit - self.shares.host_bytes

    @functools.cached_property
    def _arrays(self) -> StepArrays:
        return StepArrays.of(self.problem.step)

    @functools.cached_property
    def floor(self) -> tuple[int, Fates]:
        """The smallest peak that was found, and fates that reach it."""
        return floor(self._arrays, self.host_bytes)

    def reaches(self, budget_bytes: int) -> bool:
        """Whether its floor is within the budget. A floor is looked for only where quick looks do not say."""
        peak_bytes, _, is_proven = quick_floor(self._arrays, self.host_bytes)
        if is_proven or peak_bytes <= budget_bytes:
            return peak_bytes <= budget_bytes
        return self._bound_bytes <= budget_bytes and self.floor[0] <= budget_bytes

    @functools.cached_property
    def _bound_bytes(self) -> int:
        return bound_bytes(self._arrays, self.host_bytes)

    @functools.cached_property
    def kept(self) -> tuple[int, Fates]:
        """The peak with everything kept that may be, and its fates."""
        fates = tuple(first_of(item, (Fate.KEEP, Fate.SWAP, Fate.RECOMPUTE)) for item in self.problem.step.items)
        return self._evaluator(0).floor(fates), fates

    @functools.cached_property
    def limits(self) -> tuple[int, ...]:
        """Bytes, from its floor upward. The last has room for everything."""
        low = self.floor[0]
        room = max(0, self.kept[0] - low)
        shares = ((number / _NUM_SPANS) ** _CURVE for number in range(_NUM_SPANS + 1))
        return tuple(dict.fromkeys(low + int(room * share) for share in shares))

    def _evaluator(self, limit_bytes: int) -> Evaluator:
        return Evaluator(self._arrays, self.question.link, limit_bytes, self.host_bytes)

    def _way_plan(self, outcome: Outcome, limit_bytes: int, *, pays: bool = True) -> WayPlan:
        """The same with what it costs beside its timeline. `pays`: also what its way has a price for and it may not
        have, for that is another way's: else a larger budget, for which this one was not tried, could be slower."""
        assert outcome.timeline is not None
        question, problem = self.question, self.problem
        has_recipes = _has_recipes(problem, outcome.fates) or (pays and self._pays_for_recipes)
        swaps = Fate.SWAP in split(problem, outcome.fates)[0] or (pays and self._pays_for_swaps)
        return WayPlan(
            way=self,
            fates=outcome.fates,
            timeline=outcome.timeline,
            limit_bytes=limit_bytes,
            check_seconds=question.check_seconds if has_recipes else 0.0,
            page_fault_seconds=question.page_fault_seconds if swaps else 0.0,
        )

    def all_kept(self) -> WayPlan | None:
        """With all kept that may be."""
        outcome = self._evaluator(self.kept[0]).play(self.kept[1])
        return self._way_plan(outcome, self.kept[0], pays=False) if outcome.fits else None

    def within(self, budget_bytes: int, is_bounded: bool, least: Callable[[], float]) -> Iterator[WayPlan]:
        """Plans within the budget, as long as there may be a faster one than `least()` seconds says.

        `is_bounded`: no plan is faster than its program says.
        """
        number, last = bisect.bisect_right(self.limits, budget_bytes) - 1, len(self.limits) - 1
        if number == last:
            yield from self._way_plans(self._outcome(last, least() if is_bounded else math.inf), last)
        for upper in range(min(number + 1, last), 0, -1):
            if is_bounded:
                self._outcome(upper, least())
                if least() <= max(self._bounds.get(upper, 0.0) + self._price_seconds, self.least_seconds):
                    return  # below this limit nothing is faster
            for part in range(_NUM_PARTS):
                if self._limit(upper - 1, part) <= budget_bytes:
                    yield from self._way_plans(self._part(upper - 1, part), upper - 1, part)

    def _limit(self, number: int, part: int = 0) -> int:
        """Bytes: a limit, and so many parts of what it is to the next one."""
        low, high = self.limits[number], self.limits[min(number + 1, len(self.limits) - 1)]
        return low + (high - low) * part // _NUM_PARTS

    def _way_plans(self, outcome: Outcome | None, number: int, part: int = 0) -> Iterator[WayPlan]:
        """What came of a limit, if anything."""
        if outcome is not None:
            yield self._way_plan(outcome, self._limit(number, part))

    def _part(self, number: int, part: int) -> Outcome | None:
        """The plan of a limit; between limits the best mixture of the plans of both, or that of the upper one with what
        is cheapest for its bytes taken off. The same whatever was asked before, or a larger budget could be slower."""
        below = self._outcome(number, math.inf)
        if not part:
            return below
        if (number, part) not in self._parts:
            above = self._outcome(number + 1, math.inf)
            evaluator = self._evaluator(self._limit(number, part))
            fates = [] if above is None else [repair(evaluator, above.fates)]
            if above is not None and below is not None:
                fates += [mixture(evaluator, above.fates, below.fates, from_end=from_end) for from_end in (False, True)]
            played = [evaluator.play(f if self.shares is None else in_order(self.problem, f)) for f in fates]
            self._parts[number, part] = min((o for o in played if o.fits), key=lambda o: o.seconds, default=None)
        return self._parts[number, part]

    def _outcome(self, number: int, beats: float) -> Outcome | None:
        """The plan for a limit; None where there is none, or none that is faster than `beats` seconds."""
        if number in self._outcomes or self._bounds.get(number, 0.0) + self._price_seconds >= beats:
            return self._outcomes.get(number)
        question, limit = self.question, self.limits[number]
        how: Any = {"host_bytes": self.host_bytes, "time_limit_seconds": question.time_limit_seconds}
        how |= {"low": self.floor, "beats": beats - self._price_seconds}
        try:
            solution = solve(self.problem.step, question.link, limit, **how)
        except BudgetError:
            self._outcomes[number] = None
            return None
        self._bounds[number] = solution.bound_seconds
        if solution.is_beaten:
            return None
        outcome = Outcome(
            fates=solution.fates, excess=(0, 0), seconds=solution.timeline.step_seconds, timeline=solution.timeline
        )
        if self.shares is not None:
            ordered = self._evaluator(limit).play(in_order(self.problem, solution.fates))
            outcome = ordered if ordered.fits and ordered.seconds <= outcome.seconds else outcome
        self._outcomes[number] = outcome
        return outcome

    @property
    def swap_price_seconds(self) -> float:
        """What each plan of it takes beside its program for memory that is taken again."""
        own = self.problem.step.items[: len(self.problem.nodes)]
        must_swap = any(item.fates == (Fate.SWAP,) for item in own)
        return self.question.page_fault_seconds if must_swap or self._pays_for_swaps else 0.0

    @functools.cached_property
    def _price_seconds(self) -> float:
        """The same with what recipes cost to prove."""
        return self.swap_price_seconds + (self.question.check_seconds if self._pays_for_recipes else 0.0)

    @property
    def _pays_for_recipes(self) -> bool:
        """What is planned without them is a way of its own."""
        return self.has_recipes and len(self.question.with_recipes) > 1

    @property
    def _pays_for_swaps(self) -> bool:
        return self.may_swap and len(self.question.with_swap) > 1

    def bound_seconds(self, budget_bytes: int) -> float:
        """No plan of this way within the budget is faster."""
        limit = min(budget_bytes, self.kept[0])
        seconds = bound_of(self._arrays, self.question.link, limit, self.host_bytes, self.question.time_limit_seconds)
        return max(seconds, self.least_seconds)


class Space:
    """See the module's text. `score` says how long a plan takes; it is never below what the plan's program says, but
    for several micro-batches that share what the optimizer's state costs."""

    def __init__(self, question: Question, score: Callable[[WayPlan], float]) -> None:
        self.question = question
        self._score = score
        forced = layers_by_rule(question.profile, question.config)  # they run again in any case
        rules = question.config.rules()
        able = can_rerun(question.profile)
        more = tuple(name for name in able if rules.decide(name, is_site=False).rule is None)  # nobody has decided
        if not question.config.recomputes_freely or question.profile.num_collectives:
            more = ()  # ranks that plan for themselves must issue the same collectives
        self._forced, self._more = forced, more
        self._known: dict[tuple[int, StateShares | None, bool, bool], Way] = {}
        numbers = (0,) if not more else tuple(dict.fromkeys((0, self._most, self._most // 2)))
        self.ways = [
            self._way_of(number, shares, has_recipes, swaps)
            for number in numbers
            for shares in question.shares
            for has_recipes in question.with_recipes
            for swaps in question.with_swap
        ]

    def _way_of(self, number: int, shares: StateShares | None, has_recipes: bool = True, swaps: bool = True) -> Way:
        """With the first so many layers running again."""
        key = (number, shares, has_recipes, swaps)
        if key not in self._known:
            layers = (*self._forced, *self._more[:number])
            self._known[key] = Way(self.question, layers, shares, has_recipes=has_recipes, swaps=swaps)
        return self._known[key]

    @functools.cached_property
    def _most(self) -> int:
        """The last layer's backward comes first: running it again may hold more than it frees."""
        number = len(self._more)
        return min((number, number - 1), key=lambda number: self._way_of(number, None).kept[0])

    def has_plan(self, budget_bytes: int, *, moves_state: bool | None = None) -> bool:
        """Whether any plan fits: the budget is not below the floor. `moves_state`: one in which the optimizer's state
        may move, or may not; None: either."""
        return any(
            way.reaches(budget_bytes)
            for way in self.ways
            if way.is_main and moves_state in (None, way.shares is not None)
        )

    @functools.cached_property
    def floor_bytes(self) -> int:
        """The smallest budget for which there is a plan."""
        return self._lowest.floor[0]

    @functools.cached_property
    def _lowest(self) -> Way:
        return min((way for way in self.ways if way.is_main), key=lambda way: way.floor[0])

    def refusal(self, budget_bytes: int, time_limit_seconds: float) -> BudgetError:
        """Of a budget below the floor, with ways out where there is time."""
        way = self._lowest
        evaluator = Evaluator(StepArrays.of(way.problem.step), self.question.link, budget_bytes, way.host_bytes)
        return refusal(evaluator, *way.floor, time_limit_seconds)

    def fastest(self, budget_bytes: int) -> tuple[WayPlan, float]:
        """The fastest plan within the budget, which is not below the floor; and, where it swaps nothing for the price
        of swapping, what the fastest that swaps takes beyond it."""
        best: WayPlan | None = None
        swapping: WayPlan | None = None

        def least() -> float:
            return math.inf if best is None else self._score(best)

        for candidate in self._candidates(budget_bytes, least):
            if candidate.swaps and (swapping is None or candidate.pass_seconds < swapping.pass_seconds):
                swapping = candidate
            if self._score(candidate) < least():
                best = candidate
        assert best is not None, "the floor's own fates fit"
        if swapping is None or best.swaps or swapping.pass_seconds - swapping.page_fault_seconds >= best.pass_seconds:
            return best, 0.0
        return best, max(0.0, swapping.pass_seconds - best.pass_seconds)

    def _candidates(self, budget_bytes: int, least: Callable[[], float]) -> Iterator[WayPlan]:
        yield from self._kept_within(budget_bytes, least)
        for way in sorted(self.ways, key=lambda way: way.least_seconds):
            if way.least_seconds < least():
                is_bounded = way.shares is None or self.question.num_micro_batches == 1
                yield from way.within(budget_bytes, is_bounded, least)

    def _kept_within(self, budget_bytes: int, least: Callable[[], float]) -> Iterator[WayPlan]:
        """The fewest layers that leave room for everything else, as anybody could have it."""
        for shares in self.question.shares:

            def fits(number: int, shares: StateShares | None = shares) -> bool:
                return self._way_of(number, shares).kept[0] <= budget_bytes

            most = self._most if self._more else 0
            low, high = -1, most
            if fits(0):
                high = 0
            elif not fits(most):
                continue
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (low, middle) if fits(middle) else (middle, high)
            way = self._way_of(high, shares)
            if way.least_seconds < least() and (found := way.all_kept()) is not None:
                yield found

    def bound_seconds(self, budget_bytes: int, best: WayPlan) -> float:
        """No plan within the budget is faster, by the same model, than this or `best`."""
        seconds = best.step_seconds
        if self.question.num_micro_batches > 1 and self.question.shares != (None,):
            return min(seconds, self.question.seconds)
        for way in self.ways:
            if not way.has_recipes or way.least_seconds >= seconds:
                continue
            if way.may_swap and not way.reaches(budget_bytes):
                continue
            seconds = min(seconds, way.bound_seconds(budget_bytes) + way.swap_price_seconds)
        return seconds


def _has_recipes(problem: Problem, fates: Sequence[Fate]) -> bool:
    nodes = problem.profile.nodes
    return any(
        fates[position] is Fate.RECOMPUTE
        and nodes[index].retained_input is None
        and stored_form(problem, fates, position) is None
        for position, index in enumerate(problem.nodes)
    )
