"""The fastest of all that may be done with a step: fates by the solver, whole layers that run again, with and without
recipes, with and without swapping.

What: `Asked.fastest` solves the step that rules leave (by_rules.py), and what else may be faster: the fewest layers
that run again as a whole; nothing made by recipes, where proving them costs more than they save; nothing swapped, where
swapping has a price of its own.

That price: a plan that swaps on the host engine has the heap returned to the system, and takes as much again in each
step as the plain step makes (`Link.touch_seconds_per_byte`): counted, 0.7 to 1.5 times that, whether it swaps much or
little. So it is a price of swapping at all, and the solver, which decides about single storages, does not see it. Here
the best plan that swaps, with its price, stands beside the best that swaps nothing, and the faster one is taken.

Cost: one solution, and one for each of the others that is tried; the last only where the price is above 0 and the first
swaps. Not covered: where the optimizer's state is (place_state.py), and writing the plan down (plan_profile.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lowtide.core.fate import Fate
from lowtide.core.profile import Profile
from lowtide.errors import BudgetError
from lowtide.planner.again import call_seconds, can_run_again
from lowtide.planner.by_rules import NO_OTHER, floor_of_kept, layers_by_rule, problem_of
from lowtide.planner.half_a_batch import with_half_a_batch
from lowtide.planner.problem import Problem, state_bytes, stored_form
from lowtide.planner.state_items import StateShares, in_order, split, with_state
from lowtide.timeline.events import run
from lowtide.timeline.memory import plain_curve
from lowtide.timeline.step import Link

if TYPE_CHECKING:
    from lowtide.config.memory import MemoryConfig
    from lowtide.planner.solve import Solution

# A check that costs less than this share of the step is not worth another plan.
_CHECK_SHARE = 0.005
# What eager PyTorch's host takes to launch an operator on an accelerator. An estimate.
_LAUNCH_SECONDS = 8e-6
_SWAP_IS_SLOWER = "swapping would take longer"


@dataclass(frozen=True, slots=True)
class Found:
    """A solution, and the layers that run again under it. Seconds are of one step of one micro-batch."""

    asked: Asked
    layers: tuple[str, ...]
    problem: Problem
    solution: Solution
    floor_bytes: int
    bound_seconds: float
    """No plan that was asked for is faster, by the same model."""
    check_seconds: float = 0.0
    touch_seconds: float = 0.0
    """What memory costs that went back to the system and is taken again."""
    swap_excess_seconds: float = 0.0
    """What the best plan that swaps takes beyond this one, which for that reason swaps nothing. 0: that is not why."""

    @property
    def step_seconds(self) -> float:
        """Forward and backward."""
        return self.solution.timeline.step_seconds + self.touch_seconds

    @property
    def pass_seconds(self) -> float:
        """The same with what recipes cost to prove."""
        return self.step_seconds + self.check_seconds

    @property
    def gap(self) -> float:
        """No plan that was asked for is faster by more than this share of the step."""
        seconds = self.step_seconds
        return max(0.0, (seconds - self.bound_seconds) / seconds) if seconds else 0.0

    @property
    def swaps(self) -> bool:
        """Whether any activation leaves the device."""
        own_fates, _ = split(self.problem, self.solution.fates)
        return Fate.SWAP in own_fates


@dataclass(frozen=True, slots=True)
class Asked:
    """What may be done, for which budget."""

    profile: Profile
    config: MemoryConfig
    link: Link
    budget_bytes: int
    has_gradients: bool
    time_limit_seconds: float
    progress: Callable[[str], None]
    layers: tuple[str, ...] | None = None
    """Those that run again, and no others; None: what rules and the planner say."""
    shares: StateShares | None = None
    """Of the optimizer's state, what the solver may move."""
    with_ways_out: bool = True
    weighs_touch: bool = True
    """False: who swaps pays for memory that is taken again, and is chosen as if nobody did."""
    layer_seconds: float = 0.0
    """Of lowtide's own, for each layer that runs again (host_costs.py)."""
    why_not_free: str = NO_OTHER
    """What is said of sites that may not have every fate."""

    def fastest(self, log_seconds: float) -> Found:
        """The best of all that may be done. Raises `BudgetError`."""
        found = self._with_touch(self._fastest_checked(log_seconds))
        if not found.touch_seconds or (self._may_keep_instead and not self.weighs_touch):
            return found
        # Who swaps pays the price in full, and who does not is no faster than the program says of that.
        found = dataclasses.replace(found, bound_seconds=found.bound_seconds + found.touch_seconds)
        if not self._may_keep_instead:
            return found
        config = dataclasses.replace(self.config, swap="none")
        still: Found | None = None
        with contextlib.suppress(BudgetError):
            other = dataclasses.replace(self, config=config, why_not_free=_SWAP_IS_SLOWER, with_ways_out=False)
            still = other._fastest_checked(log_seconds)
        if still is None:
            return found
        both: dict[str, Any] = {
            "bound_seconds": min(found.bound_seconds, still.bound_seconds),
            "floor_bytes": min(found.floor_bytes, still.floor_bytes),
        }
        excess_seconds = found.pass_seconds - still.pass_seconds
        if excess_seconds <= 0.0:
            return dataclasses.replace(found, **both)
        return dataclasses.replace(still, swap_excess_seconds=excess_seconds, **both)

    def _fastest_checked(self, log_seconds: float) -> Found:
        """With what recipes cost to prove, and without what memory costs that is taken again."""
        found = self._fastest_unchecked()
        check_seconds = _check_seconds(self, found, log_seconds)
        seconds = found.solution.timeline.step_seconds
        if check_seconds > _CHECK_SHARE * seconds and self.config.recomputes_freely:
            without = self.profile.without_recipes([node.name for node in self.profile.nodes])
            with contextlib.suppress(BudgetError):
                bare = dataclasses.replace(self, profile=without)._fastest_checked(log_seconds)
                if bare.solution.timeline.step_seconds < seconds + check_seconds:
                    # The floor is that of all that may be done.
                    return dataclasses.replace(bare, floor_bytes=found.floor_bytes)
        return dataclasses.replace(found, check_seconds=check_seconds)

    def _with_touch(self, found: Found) -> Found:
        """With what it costs to take memory again, if it swaps."""
        if not self.link.touch_seconds_per_byte or not found.swaps:
            return found
        plain = self.plain_problem() if found.layers or self.shares is not None else found.problem
        own_bytes = int(plain_curve(plain.step).max()) - state_bytes(self.profile, has_gradients=self.has_gradients)
        seconds = self.link.touch_seconds_per_byte * max(0, own_bytes)
        return dataclasses.replace(found, touch_seconds=seconds)

    @property
    def _may_keep_instead(self) -> bool:
        """Whether a plan that swaps nothing may be tried."""
        return self.config.swaps_freely

    def _fastest_unchecked(self) -> Found:
        forced = layers_by_rule(self.profile, self.config) if self.layers is None else self.layers
        found: Found | None = None
        refusal: BudgetError | None = None
        try:
            found = self._solved(forced)
        except BudgetError as error:
            refusal = error.with_traceback(None)  # its frames would be a cycle, and hold all that is above them
        # Whole layers run again, as anybody could have it: never slower than that, and never refused where that fits.
        for layers in self._ways(forced, found):
            try:
                other = self._solved(layers)
            except BudgetError as error:
                if refusal is None or error.floor_bytes < refusal.floor_bytes:
                    refusal = error.with_traceback(None)
                continue
            if found is None or other.solution.timeline.step_seconds < found.solution.timeline.step_seconds:
                found = other
        if found is not None:
            return found
        assert refusal is not None
        if not self.with_ways_out:
            raise refusal
        raise with_half_a_batch(refusal, self.problem(forced), self.config, self.has_gradients) from None

    def problem(self, layers: tuple[str, ...]) -> Problem:
        how: Any = {"has_gradients": self.has_gradients, "layers": layers, "why_not_free": self.why_not_free}
        how["layer_seconds"] = self.layer_seconds
        kept = problem_of(self.profile, self.config, **how)
        return kept if self.shares is None else with_state(kept, self.shares)

    def plain_problem(self) -> Problem:
        """Nothing runs again, and all of the optimizer's state stays."""
        return problem_of(self.profile, self.config, has_gradients=self.has_gradients, layers=())

    def _solved(self, layers: tuple[str, ...]) -> Found:
        from lowtide.planner.solve import solve

        problem = self.problem(layers)
        solution = solve(
            problem.step,
            self.link,
            self.budget_bytes,
            host_bytes=self.config.host_budget,
            time_limit_seconds=self.time_limit_seconds,
            progress=self.progress,
            with_ways_out=self.with_ways_out,
        )
        if self.shares is not None:
            fates = in_order(problem, solution.fates)
            timeline = run(problem.step, fates, self.link, budget_bytes=self.budget_bytes)
            if timeline.peak_bytes <= self.budget_bytes and timeline.step_seconds <= solution.timeline.step_seconds:
                solution = dataclasses.replace(solution, fates=fates, timeline=timeline)
        # The program bounds the step whose layers it was given; where the planner chose them, only the plain step does.
        is_by_rule = layers == layers_by_rule(self.profile, self.config)
        bound_seconds = solution.bound_seconds if is_by_rule else self.seconds
        return Found(self, layers, problem, solution, solution.floor_bytes, bound_seconds)

    def _ways(self, forced: tuple[str, ...], found: Found | None) -> Iterator[tuple[str, ...]]:
        """Sets of layers that are worth solving for: where nothing fits yet, all of them; and the fewest that fit with
        everything else kept, where that is faster than what was found."""
        if self.layers is not None or not self.config.recomputes_freely or self.profile.num_collectives:
            return  # ranks that plan for themselves must issue the same collectives
        more = tuple(name for name in can_run_again(self.profile) if name not in forced)
        if not more:
            return

        def first(number: int) -> tuple[str, ...]:
            return (*forced, *more[:number])

        def needed_bytes(number: int) -> int:
            return floor_of_kept(self.problem(first(number)))

        costs = [call_seconds(self.profile, name, self.layer_seconds) for name in more]
        # What a layer costs at least decides whether any of this can be faster: no problem is built in vain.
        if found is not None and found.solution.timeline.step_seconds <= self.seconds + min(costs):
            return
        # The last layer's backward comes first: running it again may hold more than it frees.
        most = min((len(more), len(more) - 1), key=needed_bytes)
        if needed_bytes(most) > self.budget_bytes:
            if found is None:
                yield first(most)
            return
        low, high = 0, most  # `low` are not enough, `high` are
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if needed_bytes(middle) <= self.budget_bytes else (middle, high)
        if found is None or found.solution.timeline.step_seconds > self.seconds + sum(costs[:high]):
            yield first(high)

    @property
    def host_budget_bytes(self) -> int | None:
        """The whole of it, as it was asked for."""
        limit = self.config.host_budget
        return limit if limit is None or self.shares is None else limit + self.shares.nbytes

    @property
    def seconds(self) -> float:
        """Of the plain step."""
        return sum(self.profile.op_seconds)


def _check_seconds(asked: Asked, found: Found, log_seconds: float) -> float:
    """What it costs to prove the plan's recipes in each forward pass. Nothing where it has none."""
    profile = asked.profile
    if asked.config.check == "sampled" or not _has_recipes(found):
        return 0.0
    host_seconds = profile.num_forward_ops * log_seconds
    if profile.device == "cpu":
        return host_seconds
    # The host runs ahead of an accelerator: only what makes it slower than the device shows.
    launches = profile.num_forward_ops * (_LAUNCH_SECONDS + log_seconds)
    return min(host_seconds, max(0.0, launches - sum(profile.op_seconds[: profile.num_forward_ops])))


def _has_recipes(found: Found) -> bool:
    nodes, fates = found.problem.profile.nodes, found.solution.fates
    return any(
        fates[position] is Fate.RECOMPUTE
        and nodes[index].anchor is None
        and stored_form(found.problem, fates, position) is None
        for position, index in enumerate(found.problem.nodes)
    )
