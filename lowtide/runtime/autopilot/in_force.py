"""The plan in force: what an autopilot has put on its model, and the way from one plan to the next.

What: `PlanInForce` has the plans by shape (plan_cache.py), the phase (phases.py), the wrapper around the model's
forward, and the tide under it. `use` takes one plan off and puts another on, `replace` gives some shapes another plan
first, and `tell` notes why (events.py). Whoever decides that (learn.py, review.py, again.py, plan_race.py) does it by
these calls.

Why it is safe: patches come off in the reverse order in which they went on. The phase changes in `enter` alone, which
asserts that the table has the way. What goes wrong while a plan is put on (a full disk) is raised, and nothing but the
wrapper is left on the model, so that the next forward pass tries again.
Cost: a walk over the model's modules for each plan that is put on. Not covered: which plan, and when.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from lowtide.core.plan import Plan
from lowtide.engines.base import Engine
from lowtide.runtime.autopilot.events import PlanEvent
from lowtide.runtime.autopilot.phases import Phase, State
from lowtide.runtime.autopilot.plan_cache import CachedPlan, PlanCache, ShapeBucket
from lowtide.runtime.autopilot.plan_watch import PlanWatch
from lowtide.runtime.autopilot.planning import Planning
from lowtide.runtime.session.apply import apply
from lowtide.runtime.session.audit import Audit
from lowtide.runtime.session.forward_patch import ForwardPatch
from lowtide.runtime.session.optimizer_state import PlacedState
from lowtide.runtime.session.tide import Tide
from lowtide.runtime.session.unseen import Unseen
from lowtide.tensors.fsdp import fsdp_modules
from lowtide.tensors.ranks import ALONE
from lowtide.units import format_bytes, format_seconds

NUM_REVIEWS = 2
"""So many planned steps are compared with their prediction."""


class PlanInForce:
    """Of one model on autopilot."""

    def __init__(
        self,
        model: nn.Module,
        engine: Engine,
        planning: Planning,
        placed: PlacedState,
        *,
        around: Callable[[Callable, tuple, dict], Any],
        before: Callable[[nn.Module, tuple, dict], None],
        handle: Any,
        owns_engine: bool,
        say: Callable[[str], None],
    ) -> None:
        """Puts the wrapper on `model`: its forward is called by `around` from now on, and `handle` is what the user
        has. `before` is called ahead of the hooks of a model that FSDP2 shards."""
        self.model = model
        self.engine = engine
        self.say = say
        self.state = State()
        self.shapes = PlanCache()
        self.events: list[PlanEvent] = []
        self.num_forwards = 0
        """How many planned forward passes have begun."""
        self.watch = PlanWatch(engine)
        self.audit: Audit | None = None
        """The last one that was asked for."""
        self._planning = planning
        self._placed = placed
        self._lease = _Lease(engine) if owns_engine else None
        self.patch = ForwardPatch(model, around, handle)
        self.unseen = Unseen(model, "lowtide.optimize")
        # Of a model that FSDP2 shards, plans are made before its own hooks begin the forward pass: the observed step
        # is then a whole step, forward and backward, between two others.
        self._entry: Any = None
        if fsdp_modules(model):
            self._entry = model.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        self.is_inside = self._entry is None
        """Plans are made inside of the model's forward pass, not before it."""

    # -- where it stands -------------------------------------------------------------------------------------------

    @property
    def is_audited(self) -> bool:
        return self.audit is not None and self.audit.is_open

    def enter(self, phase: Phase, key: ShapeBucket | None = None, tide: Tide | None = None) -> None:
        """Asserts that the table of phases has this way."""
        self.state = self.state.to(phase, key, tide)

    def decide(self, what: str) -> bool:
        """Whether all ranks are here, in the same forward pass, to decide the same; else each decides for itself."""
        return self._planning.consensus.all_here(f"{self.num_forwards} {what}")

    def count_review(self, shape: CachedPlan, num: int = 1) -> None:
        """So many comparisons fewer to come for the plan in force, which has settled when there are none."""
        shape.num_reviews += num
        if self.state.phase is Phase.COMPARED and shape.num_reviews >= NUM_REVIEWS:
            self.enter(Phase.SETTLED, self.state.key, self.state.tide)

    # -- from one plan to the next ---------------------------------------------------------------------------------

    def use(self, key: ShapeBucket, *, why: str = "", seconds: float = 0.0) -> None:
        """Put the plan of a shape bucket in force; `why` it is a new one, and how many `seconds` it took.

        What goes wrong on the way (a full disk) is the caller's to hear of; the next forward pass tries again.
        """
        self.take_off()
        shape = self.shapes.use(key)
        self.enter(Phase.CHANGING, key)
        try:
            self._put_on(key, shape)
        except BaseException:
            self.enter(Phase.WAITING)
            self.wrap()
            shape.retire()
            raise
        self.wrap()
        if why:
            self.tell(shape, why, seconds)

    def replace(self, shape: CachedPlan, plan: Plan) -> None:
        """Another plan for these shapes, from the next `use` on."""
        if shape.tide is self.state.tide:
            self.take_off()
        shape.replace(plan)

    def take_off(self) -> None:
        """Bring the model back to its own forward: patches come off in the reverse order."""
        self.patch.undo()
        if self.state.tide is not None:
            self.state.tide.suspend()
            self.enter(Phase.CHANGING, self.state.key)

    def wrap(self) -> None:
        """The wrapper goes on the model again, after it came off."""
        self.patch = self.patch.again()

    def tell(self, shape: CachedPlan, why: str, seconds: float) -> None:
        """Note that the plan of these shapes is a new one, why it is, and how many seconds it took."""
        event = PlanEvent(
            forward=self.num_forwards,
            why=why,
            budget_bytes=self._planning.budget_for(shape),
            digest=shape.plan.digest(),
            seconds=seconds,
        )
        self.events.append(event)
        predicted = shape.measured or shape.plan.predicted
        if predicted is not None:
            self.say(
                f"lowtide: plan {event.digest} ({why}): peak {format_bytes(predicted.peak_bytes)} of "
                f"{format_bytes(predicted.plain_peak_bytes)} plain, step {format_seconds(predicted.step_seconds)} for "
                f"{format_seconds(predicted.plain_seconds)}, made in {format_seconds(seconds)}"
            )

    def _put_on(self, key: ShapeBucket, shape: CachedPlan) -> None:
        if shape.tide is None:
            # Ranks have agreed already, or cannot.
            how: Any = {"optimizer": self._placed.optimizer, "engine": self.engine, "group": ALONE}
            self._placed.follow(shape.plan)
            self._planning.know(
                resident_state_bytes=self._placed.resident_bytes, defers_updates=self._placed.defers_updates
            )
            shape.tide = apply(self.model, shape.plan, **how, moves_state=False)
            shape.tide.outlive(self._lease)
            shape.tide.expect_no_forward()  # a graph of the plan before may be waiting for its backward pass
            self._planning.source.equip(shape.tide, shape, self._planning.consensus.budget_bytes)
        else:
            self._placed.expect_regions(shape.plan)
            shape.tide.resume()
        shape.tide.keep_layers(self._planning.facts.refused)
        self.watch.begin(shape.tide)
        is_compared = self._planning.has_budget and shape.num_reviews < NUM_REVIEWS
        phase = Phase.COMPARED if is_compared else Phase.SETTLED
        self.enter(phase if shape.contest is None else Phase.RACING, key, shape.tide)
        if self.is_audited:
            assert self.audit is not None
            self.audit.follow()

    # -- the end ---------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Take off what is on the model beside a tide. Idempotent."""
        self.unseen.close()
        self.patch.undo()
        if self._entry is not None:
            self._entry.remove()

    def remove(self) -> None:
        """Restore the model exactly, and bring the optimizer's state back. Idempotent.

        Where there is no memory for that state, the model is restored all the same; call it again.
        """
        if self.state.phase is Phase.REMOVED:
            self._placed.remove()
            return
        self.enter(Phase.REMOVED, self.state.key, self.state.tide)
        self.leave()
        for shape in self.shapes:
            shape.retire()
        self._lease = None
        try:
            self._placed.remove()
        finally:
            self._planning.source.close()


class _Lease:
    """Closes an engine when nobody holds it any more: the autopilot, and every graph made under one of its plans."""

    def __init__(self, engine: Engine) -> None:
        weakref.finalize(self, engine.close)
