"""Plans for a budget: each is solved for a profile, and for what else is known by now.

What: `Planner` makes the plans of an autopilot from a profile and `Facts` (facts.py), for the budget of all ranks,
agreed among them. Where no plan fits the budget, the one with the smallest peak is taken, unless the budget is strict
or the device has no room for that one. The link is measured once. With each plan comes the limit of the guard
(runtime/offload/spill.py): the most that the plan holds in forward, and what it leaves of the budget. A step as planned
never reaches the limit; in a step that saves more, the guard swaps activations before the budget is passed.

Several forward passes before one backward pass: at the worst moment all of them hold what they saved. A plan is made
for one of them, with room for what the others hold and for all gradients; how much that is is found by halving.
Cost: measuring the link takes a second, once for a machine; the solver takes another for each plan, and some eight
times that where a step has several forward passes; ranks that agree exchange the plan's text once.
Not covered: when a plan is made, and putting it on the model (autopilot.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from torch import nn

from lowtide.config.memory import MemoryConfig
from lowtide.core.fate import Fate
from lowtide.core.log import LOG
from lowtide.core.plan import Plan
from lowtide.core.profile import Profile
from lowtide.engines.bandwidth import cache_path, measure_link
from lowtide.engines.base import Engine
from lowtide.errors import BudgetError
from lowtide.loss.attach import attach_where
from lowtide.planner.by_rules import HOST_COSTS
from lowtide.planner.plan_profile import plan_profile
from lowtide.planner.problem import op_base_bytes, state_bytes
from lowtide.planner.rerun_layers import with_reruns
from lowtide.planner.smaller import form_of
from lowtide.runtime.autopilot.facts import Facts
from lowtide.runtime.session.consensus import PlanConsensus, agreed
from lowtide.runtime.session.shapes import ShapePlan
from lowtide.runtime.session.tide import Tide
from lowtide.tensors.kinds import device_of
from lowtide.units import format_bytes

# The guard begins to spill a fiftieth below its limit (spill.py).
_GUARD_HEADROOM = 49
_NUM_HALVINGS = 6
"""A sixty-fourth of what the other forward passes hold may be left free."""
_MOST_FLOORS = 4
"""A floor that has no plan after all is raised by a hundredth, so often."""


class Planner:
    """Makes plans for the budget of `config`. Made on all ranks of `group` at once."""

    def __init__(
        self,
        model: nn.Module,
        config: MemoryConfig,
        engine: Engine,
        group: Any,
        *,
        room: Callable[[], int] | None = None,
    ) -> None:
        """`config` has its budget in bytes.
        `room`: the bytes that the device has, for plans above the budget. Absent: the budget is strict."""
        assert isinstance(config.budget, int)
        self.config = config
        """The rules and the budget that plans are made under."""
        self.consensus = PlanConsensus(group, config.budget)
        self.facts = Facts()
        """Replaced whenever a step shows something new; plans that are made from then on know it."""
        self._model = model
        self._engine = engine
        self._room = room
        self._most_over_bytes = 0
        """By which a warning has said that a plan is above the budget."""
        self._loss = attach_where(model, **config.slices_loss)
        self._last: tuple[Profile, Facts, Profile] | None = None
        """What was planned for last, and what is known of it: the solver remembers a step by its profile."""

    def know(self, **facts: Any) -> None:
        """More is known, or other, of these fields of `Facts`."""
        self.facts = dataclasses.replace(self.facts, **facts)

    @property
    def budget_bytes(self) -> int:
        """That of all ranks, the smallest."""
        assert self.consensus.budget_bytes is not None
        return self.consensus.budget_bytes

    def budget_for(self, shape: ShapePlan) -> int:
        """The budget, less what measurements of these shapes showed beyond the prediction."""
        return self.budget_bytes - shape.unforeseen_bytes

    def measure_link(self) -> None:
        """How fast bytes leave the device and come back: measured once for a machine (engines/bandwidth.py)."""
        if self.facts.link is not None:
            return
        place = str(self.config.disk_path or "")
        link = measure_link(self._engine, device_of(self._model), place=place, cache=cache_path())
        rates = [format_bytes(int(rate)) for rate in (link.out_bytes_per_second, link.in_bytes_per_second)]
        LOG.info("lowtide: link: %s/s out, %s/s in; this machine's are kept in %s", *rates, cache_path())
        self.know(link=link)

    # -- one plan --------------------------------------------------------------------------------------------------

    def make(self, profile: Profile, budget_bytes: int, *, with_floor: bool = True) -> Plan:
        """This rank's own plan, without the recipes and the second runs that did not hold. Raises BudgetError where
        none fits.

        Once some of the optimizer's state has moved, as much stays as stays now, or, where that does not fit, none.
        `with_floor`: as of `plan_within`.
        """
        facts = self.facts
        assert facts.link is not None
        has_gradients = facts.has_gradients or facts.num_passes > 1
        how = {"link": facts.link, "budget_bytes": budget_bytes, "has_gradients": has_gradients}
        if self._last is None or self._last[0] is not profile or self._last[1] != facts:
            self._last = (profile, facts, _steady(facts.known_to(profile), facts))
        steady = self._last[2]
        return self._plan(steady, costs=HOST_COSTS, with_floor=with_floor, **how)

    def _plan(self, profile: Profile, **how: Any) -> Plan:
        resident_bytes = self.facts.resident_state_bytes
        if resident_bytes is None or self.config.optimizer == "in_backward":
            return plan_profile(profile, self.config, **how)
        if resident_bytes:
            with contextlib.suppress(BudgetError):
                return _plan_around(profile, resident_bytes, self.config, how)
        return _plan_around(profile, 0, self.config, how)

    def nearest(self, profile: Profile, budget_bytes: int) -> Plan:
        """This rank's own; where none fits, the one with the smallest peak. Raises BudgetError where that is too much
        for the device, or not asked for."""
        try:
            return self.make(profile, budget_bytes)
        except BudgetError as refusal:
            if self._room is None or refusal.floor_bytes > self._room():
                raise
            error = refusal.with_traceback(None)  # its frames would be a cycle, and hold this forward's output
        return self._smallest(profile, error)

    def _smallest(self, profile: Profile, error: BudgetError) -> Plan:
        """The plan with the smallest peak, of which `error` says how much that is."""
        floor_bytes = error.floor_bytes
        for _ in range(_MOST_FLOORS):
            with contextlib.suppress(BudgetError):
                return self.make(profile, floor_bytes)
            floor_bytes += max(1, floor_bytes // 100)
        raise error

    def agreed(self, profile: Profile, budget_bytes: int, *, is_joint: bool) -> Plan:
        """The plan of all ranks if `is_joint`: all of them are making this call. BudgetErrors are shared as well."""
        if not is_joint:
            return self.nearest(profile, budget_bytes)
        error: BudgetError | None = None
        plan: Plan | None = None
        try:
            plan = self.nearest(profile, budget_bytes)
        except BudgetError as refusal:
            error = refusal.with_traceback(None)  # its frames would be a cycle, and hold this forward's output
        common = agreed(plan, error, self.consensus.group)
        # With other shapes the first rank's plan is not one for this rank.
        return common if plan is None or self.consensus.is_together else plan

    def replan(self, shape: ShapePlan, *, is_joint: bool) -> Plan:
        """Another plan for the same shapes, with what is known by now. Raises BudgetError where none will do."""
        return self.agreed(shape.profile, self.budget_for(shape), is_joint=is_joint)

    # -- several forward passes before a backward pass ---------------------------------------------------------------

    def make_room(self, shapes: Iterable[ShapePlan], output_bytes: int) -> bool:
        """Find out what the other forward passes of a step hold: the least for which that is true of the plans that
        are made with so much less. `output_bytes`: what a forward pass gives to the loop. Returns whether plans fit."""
        shapes = list(shapes)
        if not shapes:
            return True
        num_others = self.facts.num_passes - 1
        self.know(beside_bytes=0)

        def plans(beside_bytes: int, *, with_floor: bool = False) -> list[Plan]:
            """With so much room for the others; the smallest, where nothing fits. For a smaller budget of one step,
            of which the solver knows the floor then."""
            made = []
            for shape in shapes:
                try:
                    made.append(self.make(shape.profile, self.budget_for(shape) - beside_bytes, with_floor=with_floor))
                except BudgetError as refusal:
                    made.append(self._smallest(shape.profile, refusal.with_traceback(None)))
            return made

        def held_bytes(beside_bytes: int) -> int:
            """By the others, under plans with so much room for them."""
            pairs = zip(plans(beside_bytes), shapes, strict=True)
            held = max(self.own_bytes(plan, shape.profile) for plan, shape in pairs)
            # Where one backward pass adds to older gradients, its own are apart until the last of them is known.
            gradients = max(shape.profile.state.gradients for shape in shapes) if self.facts.has_gradients else 0
            return num_others * (held + output_bytes) + gradients

        predictions = [plan.predicted for plan in plans(0, with_floor=True)]
        floor_bytes = max(found.floor_bytes or 0 for found in predictions if found is not None)
        most = max(0, self.budget_bytes - max(shape.unforeseen_bytes for shape in shapes) - floor_bytes)
        least = held_bytes(most)
        if least > most:  # nothing fits; so much is held under the smallest plans
            self.know(beside_bytes=least)
            return False
        low, high = 0, min(most, max(least, held_bytes(0)))
        for _ in range(_NUM_HALVINGS):
            middle = (low + high) // 2
            low, high = (low, middle) if held_bytes(middle) <= middle else (middle, high)
        self.know(beside_bytes=high)
        return True

    def needs_more_room(self, shape: ShapePlan) -> bool:
        """Whether plans leave less than a forward pass of these shapes holds, where a step has several."""
        num_others = self.facts.num_passes - 1
        return num_others > 0 and num_others * self.own_bytes(shape.plan, shape.profile) > self.facts.beside_bytes

    def own_bytes(self, plan: Plan, profile: Profile) -> int:
        """What a forward pass holds of its own when it is over."""
        assert plan.predicted is not None
        there = state_bytes(self.facts.known_to(profile), has_gradients=True)
        return max(0, plan.predicted.forward_held_bytes - there)

    # -- beside a plan ----------------------------------------------------------------------------------------------

    def warn_if_over(self, plan: Plan, shapes: Iterable[tuple[int, ...]]) -> None:
        """Warn where the plan for inputs of these shapes needs more than the budget, once for each that needs more than
        those before."""
        if plan.predicted is None:
            return
        budget_bytes, peak_bytes = self.budget_bytes, plan.predicted.peak_bytes
        over_bytes = peak_bytes - budget_bytes
        if over_bytes <= self._most_over_bytes:
            return
        self._most_over_bytes = over_bytes
        inputs = ", ".join("x".join(map(str, shape)) or "()" for shape in shapes) or "no tensors"
        warnings.warn(
            f"lowtide: no plan of {type(self._model).__name__} for inputs of {inputs} fits the "
            f"budget of {format_bytes(budget_bytes)}: the least that one needs is {format_bytes(peak_bytes)}, "
            f"{format_bytes(over_bytes)} more. Such steps run under that one. Raise the budget to it, make the "
            "micro-batch smaller, or write strict: true to have a BudgetError instead.",
            stacklevel=2,
        )

    def warn_of_correction(self, why: str, needed_bytes: int) -> None:
        """Warn that no plan fits with what a step has shown."""
        warnings.warn(
            f"lowtide: a planned step was not as predicted ({why}), and no plan fits the budget of "
            f"{format_bytes(self.budget_bytes)} with that; the plan in force stays, and steps may need more than the "
            f"budget. Raise it to {format_bytes(needed_bytes)}, or make the micro-batch smaller.",
            stacklevel=2,
        )

    def first_step_error(self, pass_bytes: int, needed_bytes: int) -> BudgetError:
        """For a first planned step that took `pass_bytes`, where no plan fits with that."""
        return BudgetError(
            f"budget {format_bytes(self.budget_bytes)}: the first planned step took {format_bytes(pass_bytes)}, which "
            "no observation of the model shows (a loss of the loop's own, or what else is on the device), and no plan "
            f"fits with that; the least that can be reached is {format_bytes(needed_bytes)}; raise the budget to that, "
            "or make the micro-batch smaller",
            floor_bytes=needed_bytes,
        )

    def set_limit(self, tide: Tide, shape: ShapePlan, beside_bytes: Callable[[], int]) -> None:
        """Give `tide` its guard, and how much of what the plan recomputes may stay where recipes do not hold.
        `beside_bytes`: what forward passes under other plans hold."""
        predicted, budget_bytes = shape.plan.predicted, self.budget_bytes
        assert predicted is not None
        # Where an allocator counts, all bytes count; else only state and activations do, so less is the limit.
        counts_all = self._engine.device_peak_bytes() is not None
        in_forward = predicted.forward_peak_bytes if counts_all else predicted.forward_held_bytes
        high = in_forward + max(0, budget_bytes - predicted.peak_bytes)
        # With what measurements showed beyond the peak.
        slack = max(0, budget_bytes - shape.unforeseen_bytes - predicted.peak_bytes)
        least = _least_bytes(dataclasses.replace(self.facts, beside_bytes=0).known_to(shape.profile), shape.plan)
        longer = max(0, budget_bytes - shape.unforeseen_bytes - least)
        limit = high + high // _GUARD_HEADROOM + 1
        num_calls = Counter(call.name for call in shape.profile.calls)
        longer -= longer // _GUARD_HEADROOM
        tide.set_limit(limit, slack_bytes=slack, longer_bytes=longer, num_calls=num_calls)
        assert tide._context.guard is not None
        tide._context.guard.beside_bytes = beside_bytes

    def close(self) -> None:
        """The model's own loss again."""
        self._loss.close()


def _least_bytes(profile: Profile, plan: Plan) -> int:
    """The most that is on the device beside what is held for backward: state, all gradients, temporaries, what an
    operator of forward has just made, and what one of backward needs at once. So much is taken in a step of any length
    that consists of the same operators, in whatever order."""
    profile = with_reruns(profile, plan.rules.rerun(plan.layers))
    recipes = {site.name: site.recipe for site in plan.sites if site.fate is Fate.RECOMPUTE and site.recipe is not None}
    num_ops = len(profile.op_seconds)
    need = {node.name: node.reads[0] if node.reads else num_ops for node in profile.nodes}
    release = {node.name: node.release for node in profile.nodes}
    for node in reversed(profile.nodes):
        for name in recipes[node.name].nodes if node.name in recipes else ():
            need[name] = min(need[name], need[node.name])
            release[name] = max(release[name], need[node.name] + 1)
    change = np.zeros(num_ops + 1, dtype=np.int64)
    for node in profile.nodes:
        for start, end in ((max(node.born, 0), node.dies), (need[node.name], release[node.name])):
            if start < end:
                change[start] += node.nbytes
                change[min(end, num_ops)] -= node.nbytes
    beside = [recipe.transient_bytes for recipe in recipes.values()]
    beside += [site.codec.work_bytes for site in plan.sites if site.codec is not None]
    placement = plan.optimizer
    away = (placement.moved_bytes or 0) - placement.beside_bytes if placement is not None else 0
    held = np.cumsum(change)[:num_ops] + op_base_bytes(profile, {}, has_gradients=True)
    return int(held.max()) + max(beside, default=0) - away


def _steady(profile: Profile, facts: Facts) -> Profile:
    """Without what did not hold in some step."""
    unsteady = set(facts.unsteady)
    misfits = {node.name for node in profile.sites if form_of(node.name) in unsteady}
    return profile.without_recipes(unsteady).without_codecs(misfits).without_second_runs(set(facts.refused))


def _plan_around(profile: Profile, resident_bytes: int, config: MemoryConfig, how: dict[str, Any]) -> Plan:
    """With so much of the optimizer's state on the device, and the rest elsewhere between steps."""
    state = profile.state
    moved = dataclasses.replace(state, optimizer_movable=state.optimizer_movable - resident_bytes)
    plan = plan_profile(dataclasses.replace(profile, state=moved), dataclasses.replace(config, optimizer="swap"), **how)
    assert plan.optimizer is not None
    stays = dataclasses.replace(plan.optimizer, resident_bytes=plan.optimizer.resident_bytes + resident_bytes)
    return dataclasses.replace(plan, optimizer=stays)
