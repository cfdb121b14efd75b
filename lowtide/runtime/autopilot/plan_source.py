"""Where an autopilot's plans come from: a budget, for which each is solved; or whatever else keeps the protocol.

What: `PlanSource` is the protocol. `BudgetSource` measures the link once, and gives profile, link and budget to the
solver. With each plan it sets the limit of the guard (runtime/offload/spill.py): the most that the plan holds in
forward, and what it leaves of the budget. A step as planned never reaches the limit; in a step that saves more, the
guard swaps activations before the budget is passed. Files of MindSpore Transformers are another source
(mindformers/follow.py).
Cost: measuring the link takes a second, once for a machine; the solver takes another for each plan.
Not covered: when a plan is made, and that ranks agree on it; that is the autopilot's own.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from lowtide.config.memory import MemoryConfig
from lowtide.core.budget import Preset
from lowtide.core.plan import Plan
from lowtide.core.profile import Profile
from lowtide.engines.bandwidth import cache_path, measure_link
from lowtide.engines.base import Engine
from lowtide.errors import BudgetError
from lowtide.loss.attach import attach_where
from lowtide.planner.host_costs import HOST_COSTS
from lowtide.planner.plan_profile import plan_profile
from lowtide.planner.presets import plan_preset
from lowtide.planner.smaller import form_of
from lowtide.runtime.autopilot.plan_cache import CachedPlan
from lowtide.runtime.session.tide import Tide
from lowtide.timeline.step import Link

# The guard begins to spill a fiftieth below its limit (spill.py).
_GUARD_HEADROOM = 49


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
        how = {"link": facts.link, "budget_bytes": budget_bytes, "has_gradients": facts.has_gradients}
        steady = _steady(profile, facts)

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
