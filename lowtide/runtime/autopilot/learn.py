"""Which plan serves a batch; and one of a new shape is observed, and planned for.

What: `Learning` is asked before each forward pass. A plan is made for the shapes of a batch, and serves smaller ones
too (plan_cache.py): when the first smaller batch comes, the plan is made again without recipes that hold for one shape
only. Else the batch is observed (observe_call.py) and gets a plan of its own. An observed step runs the model's
collectives once more; where only some ranks have the new shape, a model with collectives runs under the largest plan
that exists, and the guard holds the limit.

Why it is safe: what goes wrong while a step is observed is raised, and the next forward pass tries again; only a first
step that no plan fits is the end. A batch that the model itself refuses leaves what it leaves without lowtide. If the
backward pass alone fails, it is to fail where the loop calls it, so this step runs without a plan
(unplanned_shapes.py).
Cost: the observed step (two to ten times a plain one) and the solver (a second) for each shape; else a look at the
shapes that are known.
Not covered: under several ranks, or where FSDP2 shards the model, a model that fails in the observed step: the error is
raised, and what that forward drew or wrote is restored.
"""

from __future__ import annotations

import dataclasses
import time
import warnings
from typing import Any

from lowtide.core.plan import Plan
from lowtide.core.profile import Profile
from lowtide.engines.bandwidth import cache_path
from lowtide.errors import BudgetError, ConfigError
from lowtide.profiling.observe_step import device_of
from lowtide.profiling.rounding import other_bytes
from lowtide.runtime.autopilot.observe_call import Witness, observe_call
from lowtide.runtime.autopilot.phases import CHANGED, FIRST_STEP, NEW_SHAPE, VARIES, Phase
from lowtide.runtime.autopilot.plan_cache import ShapeBucket, shape_bucket
from lowtide.runtime.autopilot.plan_source import Planning, is_within
from lowtide.runtime.autopilot.unplanned_shapes import UnplannedShapes
from lowtide.runtime.session.forward_patch import patched_part
from lowtide.runtime.session.optimizer_state import PlacedState
from lowtide.tensors.out_of_memory import is_out_of_memory
from lowtide.tensors.ranks import gather, has_company
from lowtide.timeline.step import Link
from lowtide.units import format_bytes


class Learning:
    """The shapes of one model on autopilot."""

    def __init__(self, machine: Any, planning: Planning, placed: PlacedState, unplanned: UnplannedShapes) -> None:
        """`machine` keeps the plan in force (machine.py). `unplanned` hears of steps that could not be observed, and
        says how the loop is to know."""
        self._in_force = machine
        self._model = machine.model
        self._planning = planning
        self._placed = placed
        self._unplanned = unplanned
        self.witness: Witness | None = None
        """Of the observed step: the first planned forward pass takes it, and shows it what comes out."""
        self._other_bytes: int | None = None
        """On the device beside this training, when it was first observed. What comes later shows in measured peaks."""
        self._has_collectives = False
        """In the model's own forward pass: then no rank may observe a step alone."""
        self._has_warned = False
        self._num_structures = machine.model_state.num_structures
        """Of the model that is planned for."""

    def serving(self, shape: ShapeBucket) -> ShapeBucket | None:
        """The known shape bucket whose plan is the one for these inputs; None if they need one of their own."""
        key = self._in_force.shapes.cover(shape)
        if key is None or key == shape:
            return key
        return key if self._keeps_budget(self._in_force.shapes[key].plan) and self._let_serve_smaller(key) else None

    def may_observe(self, shape: ShapeBucket) -> bool:
        """An observed step runs the model's collectives once more: then all ranks have to be there."""
        if not self._in_force.shapes:
            return True
        return self._in_force.decide(f"shape {shape.shapes}") or not self._has_collectives

    def largest_for(self, shape: ShapeBucket) -> ShapeBucket:
        """The plan for inputs that no plan was made for, and that cannot be observed."""
        key = self._in_force.shapes.largest_for(shape)
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"lowtide: inputs of {shape.shapes} on this rank alone, while the model exchanges data with other "
                "ranks in its forward pass, so no step can be observed for them; they run under the plan for "
                f"{key.shapes}, and the guard keeps the limit. Begin with the largest batch, or pad to common lengths.",
                stacklevel=2,
            )
        return key

    def observe(self, key: ShapeBucket, args: tuple, kwargs: dict) -> None:
        """Observe this shape for the first time, plan for it, and put the plan in force.

        Returns without a plan in force where this step is to run without one. Raises what the model raises, and
        BudgetError where no plan fits.
        """
        start = time.perf_counter()
        in_force, shapes = self._in_force, self._in_force.shapes
        self._placed.settle()  # what is written to parameters in an observed step is put back
        why = NEW_SHAPE if shapes else FIRST_STEP
        if shapes and all(known.model != key.model for known, _ in shapes.items()):
            why = f"{CHANGED}{in_force.model_state.why}"
        in_force.say(f"lowtide: observing one step ({why})")
        self._begin()
        profile = None
        try:
            profile = self._observed(args, kwargs)
            if self._planning.facts.link is None:
                self._planning.know(link=self._measured_link())
            if not shapes:
                self._meet_first(key, profile)
            key = self._without_idle_numbers(key, profile, args, kwargs)
            is_joint = not shapes or self._planning.consensus.is_together
            shape = self._planning.first(profile, shapes, is_joint=is_joint)
        except BaseException as error:
            if self._goes_on_without(error, args, kwargs, was_observed=profile is not None):
                return
            raise
        self._unplanned.note_success()
        if in_force.state.phase is Phase.REMOVED:  # by a hook of the user's, or in another thread: a plain forward
            self.witness = None
            return
        shapes.add(key, shape)
        in_force.use(key, why=why, seconds=time.perf_counter() - start)
        if self._planning.needs_more_room(shape):
            in_force.with_passes(self._planning.facts.num_passes)

    def _without_idle_numbers(self, key: ShapeBucket, profile: Profile, args: tuple, kwargs: dict) -> ShapeBucket:
        """The same key, unless a step that differs in numbers alone has done the same: they are left out then."""
        in_force = self._in_force
        for known, shape in in_force.shapes.items():
            if (known.shapes, known.kinds) != (key.shapes, key.kinds) or not _does_the_same(profile, shape.profile):
                continue
            in_force.ignored_numbers |= {place for place, _ in set(known.numbers) ^ set(key.numbers)}
            in_force.model_state.ignore(known.model, key.model)
            how: Any = {"model": in_force.model_state.look(), "ignored": in_force.ignored_numbers}
            return shape_bucket(args, kwargs, **how)
        return key

    def _keeps_budget(self, plan: Plan) -> bool:
        return not self._planning.has_budget or is_within(plan, self._planning.budget_bytes)

    # -- the observed step -----------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """No plan is in force, and other threads wait."""
        in_force = self._in_force
        if in_force.state.phase is Phase.WAITING and (under := patched_part(self._model)) is not None:
            raise ConfigError(
                f"lowtide.optimize: its module '{under}' came under another lowtide plan since; call remove() on that "
                "one first"
            )
        if in_force.state.phase is not Phase.WAITING:
            in_force.take_off()
            in_force.wrap()  # other threads wait in it until this is over
        in_force.enter(Phase.OBSERVING)
        if in_force.model_state.num_structures != self._num_structures:
            self._num_structures = in_force.model_state.num_structures
            in_force.shapes.clear()

    def _observed(self, args: tuple, kwargs: dict) -> Profile:
        self.witness = Witness(type(self._model).__name__)
        optimizer = self._placed.optimizer
        if self._other_bytes is None:
            read = self._in_force.engine.device_bytes
            self._other_bytes = other_bytes(self._model, optimizer, (args, kwargs), device_of(self._model), read)
        how: Any = {"is_inside": self._in_force.is_inside, "witness": self.witness}
        profile = observe_call(self._model, args, kwargs, optimizer, **how)
        return dataclasses.replace(profile, state=dataclasses.replace(profile.state, others=self._other_bytes))

    def _goes_on_without(self, error: BaseException, args: tuple, kwargs: dict, *, was_observed: bool) -> bool:
        """Observing or planning ended in `error`: whether the step is to run without a plan, or the error is raised."""
        witness, self.witness = self.witness, None
        in_force = self._in_force
        if in_force.state.phase is Phase.REMOVED:
            return False
        # A bad batch is no reason to go on without a plan; that no plan fits the first one is.
        if in_force.shapes or not isinstance(error, BudgetError):
            in_force.enter(Phase.WAITING)
        else:
            in_force.enter(Phase.REFUSED)
            in_force.leave()
            self._unplanned.note_refusal(error)
        if not isinstance(error, Exception):
            self._unplanned.note_interrupt(error)
        if was_observed or witness is None or not self._is_the_models(error):
            return False
        if witness.error is error:
            self._fail_for_real(args, kwargs)
        elif witness.is_over and self._unplanned.may_go_on():
            self._unplanned.go_on(error)
            return True
        return False

    def _is_the_models(self, error: BaseException) -> bool:
        """Whether the model raised it, for reasons of its own; and no other rank waits meanwhile."""
        is_ours = isinstance(error, ConfigError) or str(error).startswith("lowtide:")
        if is_ours or not isinstance(error, Exception) or is_out_of_memory(error):
            return False
        return self._in_force.is_inside and not has_company(self._planning.group)

    def _fail_for_real(self, args: tuple, kwargs: dict) -> None:
        """The model raised an error while it was observed, and nothing of that forward is left. A loop may leave such a
        batch out and go on: then random numbers were drawn and statistics moved until the error. So the forward runs
        once more, without a plan, and raises the error itself. Returns where it does not."""
        try:
            self._in_force.patch.original(*args, **kwargs)
        except Exception as again:
            if is_out_of_memory(again):
                return
            raise again from None

    def _measured_link(self) -> Link | None:
        link = self._planning.source.measure_link()
        if link is not None:
            out_rate, in_rate = (
                format_bytes(int(link.out_bytes_per_second)),
                format_bytes(int(link.in_bytes_per_second)),
            )
            self._in_force.say(
                f"lowtide: link: {out_rate}/s out, {in_rate}/s in; this machine's are kept in {cache_path()}"
            )
        return link

    def _meet_first(self, key: ShapeBucket, profile: Profile) -> None:
        """The first step is the one that all ranks take together, whatever they feed the model."""
        answers = gather((key.shapes, profile.num_collectives), self._planning.group)
        self._has_collectives = any(num for _, num in answers)
        if len({shapes for shapes, _ in answers}) > 1:
            self._planning.consensus.part()

    # -- smaller shapes --------------------------------------------------------------------------------------------

    def _let_serve_smaller(self, key: ShapeBucket) -> bool:
        """Plan anew without recipes that hold for one shape only; False where that does not fit."""
        shape = self._in_force.shapes[key]
        free = shape.profile.without_sizes(is_proven=shape.plan.check != "sampled")
        if not self._planning.has_budget:
            return not shape.has_sizes  # no plan is changed for the sake of other shapes
        if shape.serves_smaller:
            return True
        if shape.has_sizes:
            start = time.perf_counter()
            try:
                plan = self._planning.again(shape, is_joint=self._in_force.decide("vary"), profile=free)
            except BudgetError:
                return False
            if not self._keeps_budget(plan):
                return False
            self._in_force.replace(shape, plan)
            self._in_force.use(key, why=VARIES, seconds=time.perf_counter() - start)
        shape.profile = free
        shape.serves_smaller = True
        return True


def _does_the_same(one: Profile, other: Profile) -> bool:
    """Whether two observed steps ran the same operators, and saved the same."""
    sites = ([(site.name, site.nbytes) for site in profile.sites] for profile in (one, other))
    return one.op_names == other.op_names and next(sites) == next(sites)
