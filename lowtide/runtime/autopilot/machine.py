"""The state machine of an autopilot: which plan is in force, and what brings the next one.

Read from top to bottom, this is the life of a plan:

1. *A forward pass comes* (`prepare`). Its key is the shapes of the inputs, and the state of the model. A plan that was
   made for that key, or for one that covers it, is in the table (plan_cache.py); else the step is observed and planned
   for (learn.py).
2. *The plan is put on* (`use`): a tide carries it out. Patches come off in the reverse order in which they went on.
3. *The step is over* (`compare`). The first two steps of each plan are compared with its prediction, by what was
   measured of them (peaks.py). What was wrong, and by how much, is the rule of corrections.py; a new plan is made with
   the corrected figure.
4. *A step has shown something about all plans*, and they are made again: gradients stay from one pass to the next,
   several forward passes come before a backward pass, an optimizer was found, recipes or second runs did not hold, the
   device ran out of memory.
5. *It is over* (`leave`, `remove`): the model is as it was.

Why it is safe: the phase changes in `enter` alone, which asserts that the table of phases.py has the way. A correction
only ever plans for less than the budget, and is taken back where no plan fits with it. What goes wrong while a plan is
put on (a full disk) is raised, and nothing but the wrapper is left on the model, so that the next forward pass tries
again. Several ranks do the same, as long as they come here together (consensus.py).

Cost: a comparison of flat lists for each forward pass (model_state.py); a walk over the modules for each plan that is
put on; the solver for each that is made. Not covered: graphs that are retained after their backward pass count as over.
"""

from __future__ import annotations

import dataclasses
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lowtide.core.plan import Plan
from lowtide.engines.base import Engine
from lowtide.errors import BudgetError
from lowtide.planner.smaller import form_of
from lowtide.profiling.state_bytes import state_bytes
from lowtide.runtime.autopilot.corrections import Correction, correct_memory, correct_times
from lowtide.runtime.autopilot.first_step import FirstStep
from lowtide.runtime.autopilot.learn import Learning
from lowtide.runtime.autopilot.model_state import ModelState
from lowtide.runtime.autopilot.peaks import PlanWatch
from lowtide.runtime.autopilot.phases import (
    ACCUMULATES,
    OPTIMIZER,
    OUT_OF_MEMORY,
    REFUSED,
    SEVERAL_PASSES,
    UNSTEADY,
    Phase,
    PlanEvent,
    State,
)
from lowtide.runtime.autopilot.plan_cache import CachedPlan, PlanCache, ShapeBucket, shape_bucket
from lowtide.runtime.autopilot.plan_source import Facts, Planning
from lowtide.runtime.autopilot.unplanned_shapes import UnplannedShapes
from lowtide.runtime.saved.stats import Stats
from lowtide.runtime.session.apply import apply
from lowtide.runtime.session.audit import Audit
from lowtide.runtime.session.forward_patch import ForwardPatch
from lowtide.runtime.session.optimizer_state import PlacedState
from lowtide.runtime.session.tide import Tide
from lowtide.runtime.session.unobserved_forwards import UnobservedForwards
from lowtide.tensors.fsdp import fsdp_modules
from lowtide.tensors.private import tree_leaves
from lowtide.tensors.ranks import ALONE, any_rank
from lowtide.units import format_bytes, format_seconds

NUM_REVIEWS = 2
"""So many planned steps are compared with their prediction."""
_TIGHTER = 0.9
_ANOTHERS = "another rank corrected its plan"


class Machine:
    """Keeps the plan in force that is the right one for a model. See the module."""

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
        self.planning = planning
        self.say = say
        self.state = State()
        self.shapes = PlanCache()
        self.model_state = ModelState(model)
        self.ignored_numbers: set[int] = set()
        """Places of numbers among the inputs that change nothing."""
        self.events: list[PlanEvent] = []
        self.num_forwards = 0
        """How many planned forward passes have begun."""
        self.watch = PlanWatch(engine)
        self.audit: Audit | None = None
        """The last one that was asked for."""
        self._placed = placed
        self._lease = _Lease(engine) if owns_engine else None
        self.patch = ForwardPatch(model, around, handle)
        self.unseen = UnobservedForwards(model, "lowtide.optimize")
        # Of a model that FSDP2 shards, plans are made before its own hooks begin the forward pass: the observed step
        # is then a whole step, forward and backward, between two others.
        self._entry: Any = None
        if fsdp_modules(model):
            self._entry = model.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        self.is_inside = self._entry is None
        """Plans are made inside of the model's forward pass, not before it."""
        self.unplanned = UnplannedShapes(model)
        self.learning = Learning(self, planning, placed, self.unplanned)
        self.first = FirstStep(engine, model if planning.has_budget else None)
        self._passes: weakref.WeakSet[_Pass] = weakref.WeakSet()
        """Of planned forward passes whose graph is alive."""
        self._most_passes = 1
        """That were open at the same time."""
        self._has_guessed_passes = False
        """Plans are made for a step of which not all is known yet."""
        self._beside: set[Tide] = set()
        """Whose plans are not in force any more, while forward passes under them are open."""
        self._output_bytes = 0
        """The most that a forward pass has given to the loop."""
        self._most_over_bytes = 0
        """By which a warning has said that a plan is above the budget."""
        self._found: list[torch.optim.Optimizer] = []
        """Optimizers that have stepped the model's parameters, where none was given."""
        self._finder: Any = None
        if placed.optimizer is None and planning.has_budget:
            self._finder = register_optimizer_step_pre_hook(_finder(weakref.ref(self)))

    # -- a forward pass --------------------------------------------------------------------------------------------

    def prepare(self, args: tuple, kwargs: dict) -> None:
        """A forward pass with these inputs comes: see that a plan for it is in force."""
        self.unplanned.tell_interrupt()
        model = self.model_state.look() if self.planning.has_budget else 0
        if self.planning.has_budget:
            self._note_loop()
            self._made_again_for_all()
        shape = shape_bucket(args, kwargs, model=model, ignored=self.ignored_numbers)
        key = self.learning.serving(shape)
        if key is None and self.learning.may_observe(shape):
            self.learning.observe(shape, args, kwargs)
            return
        if key is None:
            key = self.learning.largest_for(shape)
        if self.state.key is not None and not self.is_audited:
            self.compare(self.state.key)  # also where shapes take turns, and none comes twice in a row
        if key != self.state.key:
            self.use(key)
        self.watch.was_smaller |= key != shape

    def _made_again_for_all(self) -> None:
        """What a step has shown about all plans."""
        num_open = self.num_open_passes
        self._most_passes = max(self._most_passes, num_open + 1)
        if num_open == 0:
            self._beside.clear()
        if num_open >= self.planning.facts.num_passes:
            # As many again may come. Where that does not fit, this one more.
            self.with_passes(1 << num_open.bit_length(), num_open + 1)
        elif num_open == 0 and (self._has_guessed_passes or self._most_passes > self.planning.facts.num_passes):
            self.with_passes(self._most_passes)
        # Between two forward passes of one step there may be gradients of the step, and they stay no longer than it.
        has_several = self.planning.facts.num_passes > 1
        is_new = not self.planning.facts.has_gradients and (not has_several or num_open == 0)
        if is_new and any(parameter.grad is not None for parameter in self.model_state.trained):
            self.with_gradients()
        if self._finder is not None and self._found:
            self.with_optimizer()
        self.without_unsteady()

    def follow(self, output: Any) -> None:
        """A planned forward pass gave `output`: it is open until its backward pass begins."""
        self.model_state.leave_out_moved()
        leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        own = _Pass(self.state.tide)
        for leaf in leaves:
            if leaf.grad_fn is not None:
                leaf.grad_fn.register_prehook(own.begin_backward)
                self._passes.add(own)
        nbytes = sum(leaf.numel() * leaf.element_size() for leaf in leaves if leaf.layout is torch.strided)
        self._output_bytes = max(self._output_bytes, nbytes)

    @property
    def num_open_passes(self) -> int:
        """Forward passes whose backward pass is still to come."""
        return sum(each.is_open for each in self._passes)

    # -- where it stands -------------------------------------------------------------------------------------------

    @property
    def is_audited(self) -> bool:
        return self.audit is not None and self.audit.is_open

    def enter(self, phase: Phase, key: ShapeBucket | None = None, tide: Tide | None = None) -> None:
        """Asserts that the table of phases has this way."""
        self.state = self.state.to(phase, key, tide)

    def decide(self, what: str) -> bool:
        """Whether all ranks are here, in the same forward pass, to decide the same; else each decides for itself."""
        return self.planning.consensus.all_here(f"{self.num_forwards} {what}")

    def count_review(self, shape: CachedPlan, num: int = 1) -> None:
        """So many comparisons fewer to come for the plan in force, which has settled when there are none."""
        shape.num_reviews += num
        if self.state.phase is Phase.COMPARED and shape.num_reviews >= NUM_REVIEWS:
            self.enter(Phase.SETTLED, self.state.key, self.state.tide)

    # -- from one plan to the next ---------------------------------------------------------------------------------

    def use(self, key: ShapeBucket, *, why: str = "", seconds: float = 0.0) -> None:
        """Put the plan of a key in force; `why` it is a new one, and how many `seconds` it took.

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
            self._tell(shape, why, seconds)
        self._say_what_is_over(key, shape.plan)

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

    def _put_on(self, key: ShapeBucket, shape: CachedPlan) -> None:
        if shape.tide is None:
            # Ranks have agreed already, or cannot.
            how: Any = {"optimizer": self._placed.optimizer, "engine": self.engine, "group": ALONE}
            self._placed.follow(shape.plan)
            self.planning.know(resident_state_bytes=self._placed.resident_bytes)
            shape.tide = apply(self.model, shape.plan, **how, moves_state=False)
            shape.tide.outlive(self._lease)
            shape.tide.expect_no_forward()  # a graph of the plan before may be waiting for its backward pass
            self.planning.source.equip(shape.tide, shape, self.planning.consensus.budget_bytes)
            shape.tide.stand_beside(self._beside_bytes)
        else:
            shape.tide.resume()
        shape.tide.keep_layers(self.planning.facts.refused)
        self.watch.begin(shape.tide)
        is_compared = self.planning.has_budget and shape.num_reviews < NUM_REVIEWS
        self.enter(Phase.COMPARED if is_compared else Phase.SETTLED, key, shape.tide)
        if self.is_audited:
            assert self.audit is not None
            self.audit.follow()

    def _tell(self, shape: CachedPlan, why: str, seconds: float) -> None:
        """Note that the plan of these shapes is a new one, why it is, and how many seconds it took."""
        event = PlanEvent(
            forward=self.num_forwards,
            why=why,
            budget_bytes=self.planning.budget_for(shape),
            digest=shape.plan.digest(),
            seconds=seconds,
        )
        self.events.append(event)
        predicted = shape.plan.predicted
        if predicted is not None:
            self.say(
                f"lowtide: plan {event.digest} ({why}): peak {format_bytes(predicted.peak_bytes)} of "
                f"{format_bytes(predicted.plain_peak_bytes)} plain, step {format_seconds(predicted.step_seconds)} for "
                f"{format_seconds(predicted.plain_seconds)}, made in {format_seconds(seconds)}"
            )

    def _say_what_is_over(self, key: ShapeBucket, plan: Plan) -> None:
        """Warn where the plan needs more than the budget, once for each that needs more than those before."""
        if plan.predicted is None or not self.planning.has_budget:
            return
        budget_bytes, peak_bytes = self.planning.budget_bytes, plan.predicted.peak_bytes
        over_bytes = peak_bytes - budget_bytes
        if over_bytes <= self._most_over_bytes:
            return
        self._most_over_bytes = over_bytes
        warnings.warn(
            f"lowtide: no plan of {type(self.model).__name__} for inputs of {_listed(key.shapes)} fits the budget of "
            f"{format_bytes(budget_bytes)}: the least that one needs is {format_bytes(peak_bytes)}, "
            f"{format_bytes(over_bytes)} more. Such steps run under that one. Raise the budget to it, make the "
            "micro-batch smaller, or write strict: true to have a BudgetError instead.",
            stacklevel=2,
        )

    # -- a step is over --------------------------------------------------------------------------------------------

    def compare(self, key: ShapeBucket) -> None:
        """Between two forward passes, with the plan of `key` in force: compare, and correct if need be.

        Raises BudgetError, and the model is as it was before `optimize`, where the budget is strict, the first planned
        step passed it, and no plan fits with what that step showed.
        """
        if self.state.phase is not Phase.COMPARED or self.num_open_passes:
            return
        shape, tide = self.shapes[key], self.state.tide
        assert tide is not None
        stats = tide.stats  # not before: on the host it looks at every tensor there is
        if stats.num_forwards < 1:
            return
        pass_bytes = self.watch.highest_bytes
        self.watch.peak.note()  # the optimizer's step is over as well, and whatever else there was between two passes
        self._tell_first(shape, stats)
        found = self._correction(shape, stats)
        self.count_review(shape)
        self.watch.begin(tide)
        is_joint = self.decide("review")
        if any_rank(found is not None, self.planning.group) if is_joint else found is not None:
            self._correct(key, found, pass_bytes, is_joint=is_joint)

    def _note_loop(self) -> None:
        """What the loop does between forward and backward was measured: plans have room for it from now on."""
        key = self.state.key
        if key is None or self.watch.was_smaller:
            return
        shape = self.shapes[key]
        more_bytes = self.watch.loop.extra_bytes - shape.loop_bytes
        if more_bytes > 0:
            shape.profile = shape.profile.with_loop_bytes(more_bytes)
            shape.loop_bytes += more_bytes
            shape.has_more_loop_bytes = True

    def _tell_first(self, shape: CachedPlan, stats: Stats) -> None:
        predicted = shape.plan.predicted
        if self.first.is_told or predicted is None:
            return
        peak_bytes = None if self.engine.device_peak_bytes() is None else self.watch.highest_bytes
        self.say(self.first.line(predicted, peak_bytes=peak_bytes, counted_bytes=stats.peak_device_bytes))

    def _correction(self, shape: CachedPlan, stats: Stats) -> Correction | None:
        """What this step says was wrong; None where it was as predicted."""
        predicted, link = shape.plan.predicted, self.planning.facts.link
        assert predicted is not None
        assert link is not None
        found = None
        if self.engine.device_peak_bytes() is not None:
            # Where the loop took more, the profile has what is above the prediction there.
            peak_bytes = self.watch.peak.peak_bytes if shape.has_more_loop_bytes else self.watch.highest_bytes
            found = correct_memory(predicted, peak_bytes, self.planning.budget_bytes, shape.unforeseen_bytes)
        if found is None and not self.watch.was_smaller:
            found = correct_times(shape.profile, predicted, stats, self.watch.clock.seconds, link)
        if found is None and shape.has_more_loop_bytes:
            found = Correction(why=f"loop: {format_bytes(shape.loop_bytes)} between forward and backward")
        return found

    def _correct(self, key: ShapeBucket, found: Correction | None, pass_bytes: int, *, is_joint: bool) -> None:
        """Plan again with what was found on this rank, or on another one."""
        start = time.perf_counter()
        shape = self.shapes[key]
        has_more_loop_bytes = shape.has_more_loop_bytes
        before = (shape.unforeseen_bytes, shape.profile, self.planning.facts)
        if found is not None:
            shape.unforeseen_bytes += found.unforeseen_bytes
            shape.profile = found.profile or shape.profile
            self.planning.know(link=found.link or self.planning.facts.link)
        try:
            plan = self.planning.again(shape, is_joint=self.planning.consensus.is_together)
        except BudgetError as error:
            needed_bytes = error.floor_bytes + shape.unforeseen_bytes
            shape.unforeseen_bytes, shape.profile, self.planning.facts = before
            self.count_review(shape, NUM_REVIEWS)
            shape.has_more_loop_bytes = False
            is_above = has_more_loop_bytes or pass_bytes > self.planning.budget_bytes
            if is_joint and any_rank(self._is_beginning and is_above, self.planning.group):
                refusal = self._first_step_error(pass_bytes, needed_bytes)
                self.remove()
                self.unplanned.note_refusal(refusal)
                raise refusal from None
            # Not the user's mistake in the middle of training: what is in force works, if it needs more than planned.
            self._warn_that_nothing_fits(found, needed_bytes)
            return
        self.replace(shape, plan)
        self.use(key, why=_why(found), seconds=time.perf_counter() - start)

    @property
    def _is_beginning(self) -> bool:
        """The first planned micro-batch is over, or the first one that found gradients: nothing is lost but that."""
        return self.num_forwards == 1 or (self.num_forwards == 2 and self.planning.facts.has_gradients)

    def _first_step_error(self, pass_bytes: int, needed_bytes: int) -> BudgetError:
        return BudgetError(
            f"budget {format_bytes(self.planning.budget_bytes)}: the first planned step took "
            f"{format_bytes(pass_bytes)}, which no observation of the model shows (a loss of the loop's own, or what "
            "else is on the device), and no plan fits with that; the least that can be reached is "
            f"{format_bytes(needed_bytes)}; raise the budget to that, or make the micro-batch smaller",
            floor_bytes=needed_bytes,
        )

    def _warn_that_nothing_fits(self, found: Correction | None, needed_bytes: int) -> None:
        warnings.warn(
            f"lowtide: a planned step was not as predicted ({_why(found)}), and no plan fits the budget of "
            f"{format_bytes(self.planning.budget_bytes)} with that; the plan in force stays, and steps may need more "
            f"than the budget. Raise it to {format_bytes(needed_bytes)}, or make the micro-batch smaller.",
            stacklevel=2,
        )

    # -- plans that are made again ---------------------------------------------------------------------------------

    def with_gradients(self) -> None:
        """Forward passes find gradients from now on (micro-batches accumulate)."""
        before = self.planning.facts
        self.planning.know(has_gradients=True)
        self._all_again(ACCUMULATES, before)

    def with_passes(self, *numbers: int) -> None:
        """A step has so many forward passes before a backward pass: each leaves room for what the others hold.

        Of several `numbers` the first for which plans fit is taken, else the last. In the first such step this comes
        as soon as a forward pass begins while another one is open. The open ones were planned to be alone: they spill
        what is more than their share, and where that is not enough the rest of the step has so much less.
        """
        before = self.planning.facts
        for number in dict.fromkeys(numbers):
            self.planning.know(num_passes=number)
            if self.planning.make_room(self.shapes, self._output_bytes):
                break
        self._has_guessed_passes = self.num_open_passes > 0
        self._all_again(SEVERAL_PASSES, before)

    def _spill_open_passes(self, plans: list[Plan]) -> int:
        """Bring the open forward passes down to what they would hold under these plans. Returns how many bytes more
        they hold all the same."""
        pairs = zip(self.shapes, plans, strict=True)
        share_bytes = max(self.planning.own_bytes(plan, shape.profile) for shape, plan in pairs)
        own = Counter(tide for each in self._passes if each.is_open and (tide := each.tide) is not None)
        for tide, num_passes in own.items():
            tide.hold_at_most(share_bytes * num_passes)
        self._beside |= own.keys()
        return sum(tide.live_bytes for tide in own) - share_bytes * own.total()

    def _beside_bytes(self) -> int:
        """What open forward passes hold under plans that are not in force."""
        return sum(tide.live_bytes for tide in self._beside if tide is not self.state.tide)

    def with_optimizer(self) -> None:
        """An optimizer steps the model's parameters that nobody had told of: its state is counted from now on."""
        before = self.planning.facts
        self._finder.remove()
        self._finder = None
        if len(self._found) == 1:
            self._placed.optimizer = self._found[0]
        is_accelerator = self.engine.device_type != "cpu"
        how: Any = {"inputs": 0, "device_type": self.engine.device_type, "is_accelerator": is_accelerator}
        states = [state_bytes(self.model, optimizer=optimizer, **how) for optimizer in self._found]
        most = max(states, key=lambda state: state.optimizer_temporaries)
        self.planning.know(optimizer=dataclasses.replace(most, optimizer=sum(state.optimizer for state in states)))
        self._all_again(OPTIMIZER, before)

    def _all_again(self, why: str, before: Facts) -> None:
        """All plans, since something is known that concerns all. `before`: what was known, which is known again where
        no plan will do, so that the next forward pass is refused as well."""
        start = time.perf_counter()
        shapes = list(self.shapes)
        if self.state.key is not None and not self._has_guessed_passes:
            self.count_review(self.shapes[self.state.key])  # its plan changes without one
        try:
            is_joint = bool(shapes) and self.decide(why)
            if shapes and self.planning.facts.num_passes > 1 and why != SEVERAL_PASSES:
                self.planning.make_room(shapes, self._output_bytes)
            plans = [self.planning.again(shape, is_joint=is_joint) for shape in shapes]
            more_bytes = self._spill_open_passes(plans) if self._has_guessed_passes else 0
            if more_bytes > 0:
                self.planning.know(beside_bytes=self.planning.facts.beside_bytes + more_bytes)
                plans = [self.planning.again(shape, is_joint=is_joint) for shape in shapes]
        except BudgetError:
            self.planning.facts = before
            raise
        for shape, plan in zip(shapes, plans, strict=True):
            self.replace(shape, plan)
        if self.state.key is not None:
            self.use(self.state.key, why=why, seconds=time.perf_counter() - start)

    def without_unsteady(self) -> None:
        """Recipes that did not hold in the last step are no recipes, and layers that could not be run again will not
        be: plan again without them, so that memory fits."""
        tide, key, before = self.state.tide, self.state.key, self.planning.facts
        if tide is None or key is None:
            return
        failed, refused = tide.failed_recipes, tide.refused_layers
        # A site may still be stored smaller where its recipe failed, and be made by its recipe where its codec did.
        smaller = {site.name for site in tide.plan.sites if site.codec is not None} if failed else ()
        lost = {name: form_of(name) if name in smaller else name for name in failed}
        failed = {name: why for name, why in failed.items() if lost[name] not in before.unsteady}
        refused = {name: why for name, why in refused.items() if name not in before.refused}
        if not (failed or refused):
            return
        start = time.perf_counter()
        unsteady, layers = before.unsteady | {lost[name] for name in failed}, before.refused | refused.keys()
        self.planning.know(unsteady=unsteady, refused=layers)
        if failed:
            name, why = next(iter(failed.items()))
            self.say(f"lowtide: {len(failed)} recipes do not hold in every step: '{name}' {why}")
        if refused:
            why = next(iter(refused.values()))
            self.say(f"lowtide: {len(refused)} layers cannot be run again: {why}")
        shape = self.shapes[key]
        is_joint = self.decide(f"{UNSTEADY} {len(unsteady)} {len(layers)}")
        try:
            plan = self.planning.again(shape, is_joint=is_joint)
        except BudgetError:
            self.planning.facts = before  # so that the next forward is refused as well
            raise
        self.replace(shape, plan)
        self.use(key, why=UNSTEADY if failed else REFUSED, seconds=time.perf_counter() - start)

    def for_less(self) -> None:
        """Out of memory, though the budget was kept on paper: a tenth less. Nothing without a budget, or a plan.

        Raises BudgetError where no plan is that small; the budget and the plan then stay as they are.
        """
        key = self.state.key
        if key is None or self.state.phase is Phase.REMOVED or not self.planning.has_budget:
            return
        shape = self.shapes[key]
        start = time.perf_counter()
        budget_bytes = self.planning.budget_bytes - shape.unforeseen_bytes
        # A preset plans for less than the budget.
        target = int(min(shape.plan.budget_bytes or budget_bytes, budget_bytes) * _TIGHTER)
        plan = self.planning.make(shape.profile, target)  # no other rank need be out of memory
        # Only now: where no plan is that small, the budget stays as it was.
        shape.unforeseen_bytes = self.planning.budget_bytes - target
        self.replace(shape, plan)
        self.use(key, why=OUT_OF_MEMORY, seconds=time.perf_counter() - start)

    def found_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step."""
        own = {id(parameter) for parameter in self.model.parameters()}
        stepped = (parameter for group in optimizer.param_groups for parameter in group["params"])
        if all(optimizer is not each for each in self._found) and any(id(p) in own for p in stepped):
            self._found.append(optimizer)

    # -- the end ---------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Take off what is on the model beside a tide. Idempotent."""
        self.unseen.close()
        self.patch.undo()
        for hook in (self._entry, self._finder):
            if hook is not None:
                hook.remove()
        self._finder = None

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
        self._beside.clear()
        try:
            self._placed.remove()
        finally:
            self.planning.source.close()


class _Pass:
    """A forward pass. Alive as long as its graph is, which has hooks that belong to it."""

    __slots__ = ("__weakref__", "_tide", "is_open")

    def __init__(self, tide: Tide | None) -> None:
        self._tide = None if tide is None else weakref.ref(tide)
        self.is_open = True

    @property
    def tide(self) -> Tide | None:
        """Under whose plan it ran, while that is remembered."""
        return None if self._tide is None else self._tide()

    def begin_backward(self, gradients: Any) -> None:
        self.is_open = False


class _Lease:
    """Closes an engine when nobody holds it any more: the autopilot, and every graph made under one of its plans."""

    def __init__(self, engine: Engine) -> None:
        weakref.finalize(self, engine.close)


def _finder(machine: weakref.ref[Machine]) -> Callable[..., None]:
    def about_to_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        found = machine()
        if found is not None:
            found.found_optimizer(optimizer)

    return about_to_step


def _why(found: Correction | None) -> str:
    return found.why if found is not None else _ANOTHERS


def _listed(shapes: tuple[tuple[int, ...], ...]) -> str:
    return ", ".join("x".join(map(str, shape)) or "()" for shape in shapes) or "no tensors"
