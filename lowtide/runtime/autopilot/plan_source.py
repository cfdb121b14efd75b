"""Where an autopilot's plans come from: a budget, for which each is solved; or whatever else keeps the protocol.

What: `Planning` makes the plans of an autopilot from what is known by now (`Facts`), for the budget of all ranks,
agreed among them. Where no plan fits the budget, the one with the smallest peak is taken, unless the budget is strict
or the device has no room for that one. `PlanSource` is the protocol of whoever makes one rank's plans.
`BudgetSource` measures the link once, and gives profile, link and budget to the solver. With each plan it sets the
limit of the guard (runtime/offload/spill.py): the most that the plan holds in forward, and what it leaves of the
budget. A step as planned never reaches the limit; in a step that saves more, the guard swaps activations before the
budget is passed. Files of MindSpore Transformers are another source (mindformers/follow.py).

Several forward passes before one backward pass: at the worst moment all of them hold what they saved. A plan is made
for one of them, with room for what the others hold and for all gradients; how much that is is found by halving.
Cost: measuring the link takes a second, once for a machine; the solver takes another for each plan, and some eight
times that where a step has several forward passes; ranks that agree exchange the plan's text once.
Not covered: when a plan is made, and putting it on the model (machine.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from lowtide.config.memory import MemoryConfig
from lowtide.core.budget import Preset
from lowtide.core.plan import Plan
from lowtide.core.profile import Profile, StateBytes
from lowtide.engines.bandwidth import cache_path, measure_link
from lowtide.engines.base import Engine
from lowtide.errors import BudgetError
from lowtide.loss.attach import attach_where
from lowtide.planner.host_costs import HOST_COSTS
from lowtide.planner.plan_profile import plan_profile
from lowtide.planner.presets import plan_preset
from lowtide.planner.problem import state_bytes
from lowtide.planner.smaller import form_of
from lowtide.runtime.autopilot.consensus import PlanConsensus, agreed
from lowtide.runtime.autopilot.plan_cache import CachedPlan
from lowtide.runtime.session.tide import Tide
from lowtide.timeline.step import Link

# The guard begins to spill a fiftieth below its limit (spill.py).
_GUARD_HEADROOM = 49
_NUM_HALVINGS = 6
"""A sixty-fourth of what the other forward passes hold may be left free."""
_MOST_FLOORS = 4
"""A floor that has no plan after all is raised by a hundredth, so often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known beside the profiles, for all shapes."""

    link: Link | None = None
    """As it was measured, and corrected since; None where nobody needs it, and before the first step."""
    has_gradients: bool = False
    """Forward passes find gradients (micro-batches accumulate)."""
    unsteady: frozenset[str] = frozenset()
    """Sites whose recipe did not hold in some step, and smaller forms (planner/smaller.py) that a site did not fit: no
    plan has them again."""
    refused: frozenset[str] = frozenset()
    """Layers that could not be run again in some step: no plan does."""
    resident_state_bytes: int | None = None
    """What stays of the optimizer's state, of which some is elsewhere between steps by now, whatever the shape. None as
    long as all of it stays."""
    num_passes: int = 1
    """Forward passes before a backward pass."""
    beside_bytes: int = 0
    """What the other forward passes of a step hold while one of them is at its worst."""
    optimizer: StateBytes | None = None
    """The state of an optimizer that was found, of which profiles do not know; only its fields about that."""

    def known_to(self, profile: Profile) -> Profile:
        """The profile with the bytes that are known beside it."""
        state = profile.state
        if self.optimizer is not None:
            names = [field.name for field in dataclasses.fields(state) if field.name.startswith("optimizer")]
            state = dataclasses.replace(state, **{name: getattr(self.optimizer, name) for name in names})
        others = state.others + self.beside_bytes
        return dataclasses.replace(profile, state=dataclasses.replace(state, others=others))


class PlanSource(Protocol):
    """Where plans come from."""

    @property
    def budget_bytes(self) -> int | None:
        """What this rank may have on the device.

        None: there is no such number. Plans of such a source are carried out as they are, and predict nothing; so
        nothing is compared with them, and no plan is made a second time for what a step has shown.
        """

    def measure_link(self) -> Link | None:
        """How fast bytes leave the device and come back; None if no plan depends on it. Called in the first step."""

    def make_plan(self, profile: Profile, facts: Facts, budget_bytes: int | None) -> Plan:
        """This rank's own plan for what was observed, in `budget_bytes` if there is a budget.

        Raises BudgetError where none fits.
        """

    def localized(self, plan: Plan, profile: Profile) -> Plan:
        """A plan that may be another rank's, in the names of this one, which has observed `profile`."""

    def equip(self, tide: Tide, known: CachedPlan, budget_bytes: int | None) -> None:
        """Give a tide what it needs beside its plan. `budget_bytes` is that of all ranks. Before the first forward."""

    def close(self) -> None:
        """Undo what the source itself has changed about the model. Idempotent."""


class Planning:
    """Where the plans of an autopilot are made. Made on all ranks of `group` at once."""

    def __init__(self, source: PlanSource, group: Any, *, room: Callable[[], int] | None = None) -> None:
        """`room`: the bytes that the device has. Absent: a plan above the budget is a BudgetError."""
        self.source = source
        self.group = group
        self.consensus = PlanConsensus(group, source.budget_bytes)
        self.facts = Facts()
        """Replaced whenever a step shows something new; plans that are made from then on know it."""
        self._room = room

    def know(self, **facts: Any) -> None:
        """More is known, or other, of these fields of `Facts`."""
        self.facts = dataclasses.replace(self.facts, **facts)

    @property
    def has_budget(self) -> bool:
        """Whether some rank has one."""
        return self.consensus.budget_bytes is not None

    @property
    def budget_bytes(self) -> int:
        """That of all ranks. Only where there is one."""
        assert self.consensus.budget_bytes is not None
        return self.consensus.budget_bytes

    def budget_for(self, shape: CachedPlan) -> int | None:
        """The budget, less what measurements of these shapes showed beyond the prediction."""
        return self.budget_bytes - shape.unforeseen_bytes if self.has_budget else None

    def make(self, profile: Profile, budget_bytes: int | None) -> Plan:
        """This rank's own. Raises BudgetError where none fits."""
        return self.source.make_plan(profile, self.facts, budget_bytes)

    def nearest(self, profile: Profile, budget_bytes: int | None) -> Plan:
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

    def agreed(self, profile: Profile, budget_bytes: int | None, *, is_joint: bool) -> Plan:
        """The plan of all ranks if `is_joint`: all of them are making this call. BudgetErrors are shared as well."""
        if not is_joint:
            return self.source.localized(self.nearest(profile, budget_bytes), profile)
        error: BudgetError | None = None
        plan: Plan | None = None
        try:
            plan = self.nearest(profile, budget_bytes)
        except BudgetError as found:
            error = found.with_traceback(None)  # its frames would be a cycle, and hold this forward's output
        common = agreed(plan, error, self.group)
        # With other shapes the first rank's plan is not one for this rank.
        return self.source.localized(common if plan is None or self.consensus.is_together else plan, profile)

    def again(self, shape: CachedPlan, *, is_joint: bool, profile: Profile | None = None) -> Plan:
        """Another plan for the same shapes, with what is known by now. Raises BudgetError where none will do."""
        return self.agreed(profile or shape.profile, self.budget_for(shape), is_joint=is_joint)

    def first(self, profile: Profile, known: Iterable[CachedPlan], *, is_joint: bool) -> CachedPlan:
        """A plan for what was just observed; one that serves smaller shapes too, if some of the `known` do already.

        Raises BudgetError where none will do.
        """
        known = list(known)
        if any(shape.serves_smaller for shape in known):
            free = profile.without_sizes(is_proven=all(shape.plan.check != "sampled" for shape in known))
            with contextlib.suppress(BudgetError):
                plan = self.agreed(free, self.consensus.budget_bytes, is_joint=is_joint)
                if is_within(plan, self.budget_bytes):
                    return CachedPlan(profile=free, plan=plan, serves_smaller=True)
        return CachedPlan(profile=profile, plan=self.agreed(profile, self.consensus.budget_bytes, is_joint=is_joint))

    def make_room(self, shapes: Iterable[CachedPlan], output_bytes: int) -> bool:
        """Find out what the other forward passes of a step hold: the least for which that is true of the plans that
        are made with so much less. `output_bytes`: what a forward pass gives to the loop. Returns whether plans fit."""
        shapes = list(shapes)
        if not shapes:
            return True
        others = self.facts.num_passes - 1
        self.know(beside_bytes=0)

        def plans(beside_bytes: int) -> list[Plan]:
            """With so much room for the others; the smallest, where nothing fits. For a smaller budget of one step,
            of which the solver knows the floor then."""
            found = []
            for shape in shapes:
                try:
                    found.append(self.make(shape.profile, self.budget_bytes - shape.unforeseen_bytes - beside_bytes))
                except BudgetError as refusal:
                    found.append(self._smallest(shape.profile, refusal.with_traceback(None)))
            return found

        def held_bytes(beside_bytes: int) -> int:
            """By the others, under plans with so much room for them."""
            pairs = zip(plans(beside_bytes), shapes, strict=True)
            held = max(self.own_bytes(plan, shape.profile) for plan, shape in pairs)
            # Where one backward pass adds to older gradients, its own are apart until the last of them is known.
            gradients = max(shape.profile.state.gradients for shape in shapes) if self.facts.has_gradients else 0
            return others * (held + output_bytes) + gradients

        floors = [plan.predicted.floor_bytes for plan in plans(0) if plan.predicted is not None]
        most = max(0, self.budget_bytes - max(shape.unforeseen_bytes for shape in shapes) - max(floors))
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

    def needs_more_room(self, shape: CachedPlan) -> bool:
        """Whether plans leave less than a forward pass of these shapes holds, where a step has several."""
        others = self.facts.num_passes - 1
        return others > 0 and others * self.own_bytes(shape.plan, shape.profile) > self.facts.beside_bytes

    def own_bytes(self, plan: Plan, profile: Profile) -> int:
        """What a forward pass holds of its own when it is over."""
        assert plan.predicted is not None
        there = state_bytes(self.facts.known_to(profile), has_gradients=True)
        return max(0, plan.predicted.forward_held_bytes - there)


def is_within(plan: Plan, budget_bytes: int) -> bool:
    """Whether it keeps this budget by its own account."""
    return plan.predicted is None or plan.predicted.peak_bytes <= budget_bytes


class BudgetSource:
    """Plans that the solver makes for the budget of `config`."""

    def __init__(
        self,
        model: nn.Module,
        config: MemoryConfig,
        engine: Engine,
        *,
        preset: Preset | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """`config` has its budget in bytes. `preset`: what to plan for within it; `say` hears what that comes to."""
        assert isinstance(config.budget, int)
        self.budget_bytes: int | None = config.budget
        self._preset = preset
        self._say = say
        self._said = ""
        self._model = model
        self._config = config
        self._engine = engine
        self._loss = attach_where(model, **config.slices_loss)
        self._last: tuple[Profile, Facts, Profile] | None = None
        """What was planned for last, and what is known of it: the solver remembers a step by its profile."""

    def measure_link(self) -> Link:
        """Measured once for a machine; see engines/bandwidth.py."""
        device = next(parameter.device for parameter in self._model.parameters())
        place = str(self._config.disk_path or "")
        return measure_link(self._engine, device, place=place, cache=cache_path())

    def make_plan(self, profile: Profile, facts: Facts, budget_bytes: int | None) -> Plan:
        """Without the recipes and the second runs that did not hold. Raises BudgetError where none fits.

        Once some of the optimizer's state has moved, as much stays as stays now, or, where that does not fit, none.
        """
        assert facts.link is not None
        has_gradients = facts.has_gradients or facts.num_passes > 1
        how = {"link": facts.link, "budget_bytes": budget_bytes, "has_gradients": has_gradients}
        if self._last is None or self._last[0] is not profile or self._last[1] != facts:
            self._last = (profile, facts, _steady(facts.known_to(profile), facts))
        steady = self._last[2]

        def make(**limits: Any) -> Plan:
            return self._plan(steady, facts, self._config, costs=HOST_COSTS, **{**how, **limits})

        if self._preset is None:
            return make()
        assert budget_bytes is not None
        plan, line = plan_preset(self._preset, budget_bytes, make)
        if line != self._said and self._say is not None:
            self._say(f"lowtide: {line}")
        self._said = line
        return plan

    def _plan(self, profile: Profile, facts: Facts, config: MemoryConfig, **how: Any) -> Plan:
        if facts.resident_state_bytes is None:
            return plan_profile(profile, config, **how)
        if facts.resident_state_bytes:
            with contextlib.suppress(BudgetError):
                return _plan_around(profile, facts.resident_state_bytes, facts, config, how)
        return _plan_around(profile, 0, facts, config, how)

    @property
    def config(self) -> MemoryConfig:
        """The rules and the budget that plans are made under."""
        return self._config

    def localized(self, plan: Plan, profile: Profile) -> Plan:
        """As it is: a solved plan has no process group in it."""
        return plan

    def equip(self, tide: Tide, known: CachedPlan, budget_bytes: int | None) -> None:
        """The guard, and how much of what the plan makes again may stay where recipes do not hold."""
        predicted = known.plan.predicted
        assert predicted is not None and budget_bytes is not None
        # Where an allocator counts, all bytes count; else only state and activations do, so less is the limit.
        counts_all = self._engine.device_peak_bytes() is not None
        in_forward = predicted.forward_peak_bytes if counts_all else predicted.forward_held_bytes
        high = in_forward + max(0, budget_bytes - predicted.peak_bytes)
        # With what measurements showed beyond the peak.
        slack = max(0, budget_bytes - known.unforeseen_bytes - predicted.peak_bytes)
        tide.set_limit(high + high // _GUARD_HEADROOM + 1, slack_bytes=slack)

    def close(self) -> None:
        """The model's own loss again."""
        if self._loss is not None:
            self._loss.remove()


def _steady(profile: Profile, facts: Facts) -> Profile:
    """Without what did not hold in some step."""
    unsteady = set(facts.unsteady)
    misfits = {node.name for node in profile.sites if form_of(node.name) in unsteady}
    return profile.without_recipes(unsteady).without_codecs(misfits).without_second_runs(set(facts.refused))


def _plan_around(
    profile: Profile, resident_bytes: int, facts: Facts, config: MemoryConfig, how: dict[str, Any]
) -> Plan:
    """With so much of the optimizer's state on the device, and the rest elsewhere between steps."""
    state = profile.state
    moved = dataclasses.replace(state, optimizer_movable=state.optimizer_movable - resident_bytes)
    plan = plan_profile(dataclasses.replace(profile, state=moved), dataclasses.replace(config, optimizer="swap"), **how)
    assert plan.optimizer is not None
    stays = dataclasses.replace(plan.optimizer, resident_bytes=plan.optimizer.resident_bytes + resident_bytes)
    return dataclasses.replace(plan, optimizer=stays)
