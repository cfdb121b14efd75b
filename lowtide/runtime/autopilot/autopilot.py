"""The autopilot's state machine: which plan is in force under a budget, and what brings the next one.

Read from top to bottom, this is the life of a plan:

1. *A forward pass comes* (`prepare`). Its key is the shapes of the inputs, and the state of the model (model_state.py);
   where the pass before saved others than planned, that is another state.
   A plan that was made for that key, or for one that covers it (a plan serves smaller shapes too), is in the table
   (session/shapes.py); else the step is observed and planned for. An observed step runs the model's collectives once
   more; where only some ranks have the new shape, a model with collectives runs under the largest plan that exists, and
   the guard holds the limit.
2. *The plan is put on* (`_use`): a tide carries it out (session/tides.py).
3. *The step is over* (`compare`). The first two steps of each plan are compared with its prediction. What was wrong,
   and by how much, is the rule of measure.py; a new plan is made with the corrected figure.
4. *A step has shown something about all plans*, and they are made again: gradients stay from one pass to the next,
   several forward passes come before a backward pass, an optimizer was found, recipes or second runs did not hold, the
   device ran out of memory.

Why it is safe: a correction only ever plans for less than the budget, and is taken back where no plan fits with it.
Several ranks do the same, as long as they come here together (session/consensus.py): all use the smallest budget and
the first rank's plan; after that each rank plans for itself.

Cost: a comparison of flat lists for each forward pass; a walk over the modules for each plan that is put on; the solver
(a second) for each that is made. Not covered: graphs that are retained after their backward pass count as over; what
the caller does around the model's forward is not observed: on an accelerator it is measured and the plan corrected, on
the host it must fit beside the budget.
"""

from __future__ import annotations

import dataclasses
import gc
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lowtide.config.memory import plan_from_rules
from lowtide.core.log import LOG
from lowtide.core.plan import Plan
from lowtide.core.profile import Profile
from lowtide.engines.base import Engine, EngineChoice
from lowtide.engines.choose import choose_engine, memory_of_model
from lowtide.errors import BudgetError, NothingToTrainError, RecomputeRefusedError
from lowtide.profiling.layers import find_layers, named_layers
from lowtide.profiling.state_bytes import count_foreign_bytes
from lowtide.runtime.autopilot.facts import Facts, OpenPasses, SteppingOptimizers, what_failed
from lowtide.runtime.autopilot.measure import Correction, StepWatch
from lowtide.runtime.autopilot.model_state import ModelState
from lowtide.runtime.autopilot.plan_model import merged_config
from lowtide.runtime.autopilot.planner import Planner
from lowtide.runtime.recompute.fingerprint import RecipeMismatchError
from lowtide.runtime.saved.stats import Stats
from lowtide.runtime.session.apply import checked
from lowtide.runtime.session.optimizer_state import PlacedState
from lowtide.runtime.session.shapes import PlanTable, ShapeBucket, ShapePlan
from lowtide.runtime.session.tide import Tide
from lowtide.runtime.session.tides import FIRST_STEP, IN_FORCE, NEW_SHAPE, Phase, Tides
from lowtide.runtime.session.together import JointStepError
from lowtide.tensors.kinds import device_of, tensors_in
from lowtide.tensors.live_bytes import optimizer_tensors, unique_bytes
from lowtide.tensors.optimizers import bare
from lowtide.tensors.ranks import any_rank, check_group, has_company
from lowtide.tensors.snapshot import why_not_rerun
from lowtide.units import format_bytes

NUM_REVIEWS = 2
"""So many planned steps are compared with their prediction."""
_TIGHTER = 0.9
_MOST_UNSEEN = 4
"""So often a step is observed because other tensors were saved, for no known reason."""
CHANGED = "the model changed: "
"""How the event of a plan for another state of the model begins."""
ACCUMULATES = "gradients stay"
SEVERAL_PASSES = "several forward passes before a backward pass"
OPTIMIZER = "an optimizer was found"
UNSTEADY = "recipes do not hold"
REFUSED = "layers cannot run again"
OUT_OF_MEMORY = "out of memory"
_ANOTHERS = "another rank corrected its plan"


class Autopilot:
    """Keeps a model within a budget: the plan source of a `Tides`, which asks it before each forward pass."""

    def __init__(self, tides: Tides, planner: Planner) -> None:
        self._tides = tides
        self.planner = planner
        self.table = PlanTable()
        self.key: ShapeBucket | None = None
        """The shapes whose plan is in force, or is off for a moment; None where there is none."""
        self.model_state = ModelState(tides.model)
        self._num_structures = self.model_state.num_structures
        """Of the model that is planned for."""
        self.watch = StepWatch(tides.engine, tides.model)
        self._passes = OpenPasses()
        self._holds_more = False
        """Plans are made for a step whose first forward passes hold more than later ones will."""
        self._misfits_before = (False, 0)
        """Whether the forward pass that is under way is not the first under its plan, and what was there before it."""
        self._has_diverged = False
        """The last forward pass saved others than those before it."""
        self._foreign_bytes: int | None = None
        """On the device beside this training, when it was first observed. What comes later shows in measured peaks."""
        self._num_states = 0
        """Parameters of which the optimizer had state. By `dict`: a swapped state's own `len` waits for copies."""
        self._stepping = SteppingOptimizers(tides.model) if tides.placed.optimizer is None else None
        """Where no optimizer was given."""

    @property
    def budget_bytes(self) -> int | None:
        """Of this rank."""
        assert isinstance(self.planner.config.budget, int)
        return self.planner.config.budget

    @property
    def shape(self) -> ShapePlan | None:
        """The plan in force, with what is known about its shapes."""
        return None if self.key is None else self.table[self.key]

    @property
    def profile(self) -> Profile | None:
        return None if self.shape is None else self.planner.facts.known_to(self.shape.profile)

    @property
    def is_compared(self) -> bool:
        return self.shape is not None and self.shape.num_reviews < NUM_REVIEWS

    @property
    def has_gradients(self) -> bool:
        """Whether plans count gradients of earlier passes from the start of a pass."""
        return self.planner.facts.has_gradients or self.planner.facts.num_passes > 1

    # -- a forward pass comes --------------------------------------------------------------------------------------

    def prepare(self, args: tuple, kwargs: dict) -> None:
        self._note_divergence()
        model = self.model_state.look()
        if model in self.table.untrained and not any(t.requires_grad for t in tensors_in((args, kwargs))):
            self._run_without()
            self._begin_pass()
            return
        if self.shape is not None:
            self.watch.note_loop(self.shape)
        self._replan_for_all()
        facts = self.planner.facts
        if facts.num_passes > 1 and self._passes.num_open:
            self._passes.spill(facts.beside_bytes // (facts.num_passes - 1))
        bucket = self.table.bucket(args, kwargs, model=model)
        key = self._serving(bucket)
        if key is None and (
            not self.table or self.planner.consensus.may_observe(self._moment(f"shape {bucket.shapes}"))
        ):
            self._observe(bucket, args, kwargs)
            self._begin_pass()
            return
        if key is None:
            key = self.table.largest_for(bucket, ", and the guard keeps the limit")
        if not self._tides.is_audited:
            self.compare()  # also where shapes take turns, and none comes twice in a row
        more_state = self._with_state_of_now(key)
        if key != self.key or more_state:
            self._use(key, **more_state)
        self.watch.was_smaller |= key != bucket
        self._begin_pass()

    def _run_without(self) -> None:
        """No plan is in force from now on."""
        if self._tides.tide is not None:
            self._tides.take_off()
            self._tides.wrap()
        self.key = None

    def _begin_pass(self) -> None:
        self.watch.begin_pass()
        tide = self._tides.tide
        self._misfits_before = (False, 0) if tide is None else (tide.has_run, tide.num_misfits)

    def _note_divergence(self) -> None:
        """What was saved differs from what the same plan saw before, and nothing that is compared has changed: the
        model reads something else, which is a state of its own. A few times; then it is how the model is.

        Never where an observed step would move on what cannot be wound back: a plan that fits badly costs memory, and
        that would cost bits."""
        tide, has_diverged = self._tides.tide, self._has_diverged
        self._has_diverged = False
        if not has_diverged or tide is None or self.model_state.num_uncompared_changes >= _MOST_UNSEEN:
            return
        failed, refused, _ = what_failed(tide, self.planner.facts)
        is_known = failed or refused or has_company(self.planner.consensus.group)
        if not (is_known or why_not_rerun(self._tides.model, (), {})):
            self.model_state.num_uncompared_changes += 1

    def _replan_for_all(self) -> None:
        """What a step has shown about all plans."""
        num_open = self._passes.num_open
        self._passes.most = max(self._passes.most, num_open + 1)
        if num_open == 0:
            self._passes.forget()
        if num_open >= self.planner.facts.num_passes:
            # As many again may come. Where that does not fit, this one more.
            self.with_passes(1 << num_open.bit_length(), num_open + 1)
        elif num_open == 0 and (self._holds_more or self._passes.most != self.planner.facts.num_passes):
            self.with_passes(self._passes.most)
        # Between two forward passes of one step there may be gradients of the step, and they stay no longer than it.
        has_several = self.planner.facts.num_passes > 1
        is_new = not self.planner.facts.has_gradients and (not has_several or num_open == 0)
        if is_new and any(parameter.grad is not None for parameter in self.model_state.trained):
            self.with_gradients()
        if self._stepping is not None and self._stepping.optimizers:
            self.with_optimizers(self._stepping)
        self.without_unsteady()

    def _serving(self, bucket: ShapeBucket) -> ShapeBucket | None:
        """The known shape bucket whose plan is the one for these inputs; None if they need one of their own."""
        key = self.table.cover(bucket)
        if key is None or key == bucket:
            return key
        predicted = self.table[key].plan.predicted
        return key if predicted is None or predicted.peak_bytes <= self.planner.budget_bytes else None

    def _with_state_of_now(self, key: ShapeBucket) -> dict[str, Any]:
        """The optimizer may have got state that the plan of `key` does not know, and keeps it: of parameters that were
        not trained when it was made, or since no copy of it could step without values. A plan that counts that state
        too. Returns what to say of it, for `_use`. Raises BudgetError where no plan will do."""
        start, shape, optimizer = time.perf_counter(), self.table[key], self._tides.placed.optimizer
        if optimizer is None or self.key is None:
            return {}
        found = bare(optimizer).state
        num_before, self._num_states = self._num_states, dict.__len__(found) if isinstance(found, dict) else 0
        if key.model == self.key.model and num_before == self._num_states:
            return {}
        state = self.planner.facts.with_optimizer(shape.profile.state)
        here_bytes = unique_bytes(optimizer_tensors(optimizer), self._tides.engine.device_type)
        if here_bytes <= state.optimizer:
            return {}
        shape.profile = dataclasses.replace(shape.profile, state=dataclasses.replace(state, optimizer=here_bytes))
        is_joint = self._decide(f"state {here_bytes}")
        self._replace(shape, self.planner.replan(shape, is_joint=is_joint))
        return {"why": f"{CHANGED}its optimizer has more state", "start": start}

    def _observe(self, key: ShapeBucket, args: tuple, kwargs: dict) -> None:
        """Observe this shape for the first time, plan for it, and put the plan in force.

        Returns without a plan in force where this step is to run without one. Raises what the model raises, and
        BudgetError where no plan fits.
        """
        start = time.perf_counter()
        why = NEW_SHAPE if self.table else FIRST_STEP
        if self.table.is_of_new_model(key):
            why = f"{CHANGED}{self.model_state.why}"
        if self.model_state.num_structures != self._num_structures:
            self._num_structures = self.model_state.num_structures
            self._run_without()
            self.table.clear()
        self.key = None
        if self._foreign_bytes is None:
            of = (self._tides.model, self._tides.placed.optimizer, (args, kwargs), device_of(self._tides.model))
            self._foreign_bytes = count_foreign_bytes(*of, self._tides.engine.device_bytes)
            self._warn_of_other_models()
        buckets, foreign_bytes = [key], self._foreign_bytes

        def planned(profile: Profile) -> ShapePlan:
            profile = dataclasses.replace(profile, state=dataclasses.replace(profile.state, foreign=foreign_bytes))
            self.planner.measure_link()
            is_first = not self.table
            if is_first:
                self.planner.consensus.meet_first(key.shapes, profile)
            same = self.table.same_but_numbers(key, profile)
            if same is not None:
                self.model_state.ignore(same.model, key.model)
                buckets.append(self.table.bucket(args, kwargs, model=self.model_state.look()))
            is_joint = is_first or self.planner.consensus.is_together
            plan = self.planner.agreed(profile, self.planner.budget_bytes, is_joint=is_joint)
            return ShapePlan(profile=profile, plan=plan)

        try:
            shape = self._tides.observe(args, kwargs, planned, why=why)
        except NothingToTrainError:
            if not self.table and self._tides.placed.optimizer is None:
                raise
            self.table.untrained.add(key.model)
            LOG.info("lowtide: nothing is trained in this forward pass, which runs without a plan")
            return
        except BudgetError as refusal:
            # Where some plan is in the table, the run goes on under it with other batches.
            if not self.table and self._tides.phase is not Phase.REMOVED:
                self._stop_looking()
                self._tides.refuse(refusal)
            raise
        if shape is None:
            return
        self.table.add(buckets[-1], shape)
        self._use(buckets[-1], why=why, start=start)
        if self.planner.needs_more_room(shape):
            self.with_passes(self.planner.facts.num_passes)

    def follow(self, output: Any, tide: Tide) -> None:
        with self._tides.lock:
            self.model_state.leave_out_moved()
            self._passes.add(output, tide)
            if self.shape is not None:
                has_run, before = self._misfits_before
                num = tide.num_misfits - before
                usual = self.shape.misfits
                self._has_diverged |= num > usual.get(has_run, usual.get(False, num))
                usual[has_run] = num
        self.watch.follow(output, tide, is_compared=self.is_compared)

    def _decide(self, what: str) -> bool:
        """Whether all ranks are here, in the same forward pass, to decide the same; else each decides for itself."""
        return self.planner.consensus.all_here(self._moment(what))

    def _moment(self, what: str) -> str:
        return f"{self._tides.num_forwards} {what}"

    # -- from one plan to the next ---------------------------------------------------------------------------------

    def _use(self, key: ShapeBucket, *, why: str = "", start: float = 0.0, is_correction: bool = False) -> None:
        """Put the plan of a key in force; `why` it is a new one, and when making it began.

        What goes wrong on the way (a full disk) is the caller's to hear of; the next forward pass tries again.
        """
        seconds = time.perf_counter() - start
        self.key, shape = key, self.table.use(key)

        def equip(tide: Tide) -> None:
            self.planner.set_limit(tide, shape, beside_bytes=lambda: self._passes.bytes_beside(tide))

        try:
            shape.tide = self._tides.use(shape.plan, shape.tide, equip=equip)
        except BaseException:
            self.key = None
            shape.retire()
            raise
        finally:
            self.planner.know(resident_state_bytes=self._tides.placed.resident_bytes)
        shape.tide.keep_layers(self.planner.facts.refused)
        self.watch.begin(shape.tide)
        if why:
            budget_bytes = self.planner.budget_for(shape)
            self._tides.note(
                shape.plan, why=why, seconds=seconds, budget_bytes=budget_bytes, is_correction=is_correction
            )
        self.planner.warn_if_over(shape.plan, key.shapes)

    def _replace(self, shape: ShapePlan, plan: Plan) -> None:
        """Another plan for these shapes, from the next `_use` on."""
        if shape.tide is not None and shape.tide is self._tides.tide:
            self._tides.take_off()
        shape.replace(plan)

    # -- a step is over --------------------------------------------------------------------------------------------

    def compare(self) -> None:
        """Between two forward passes: compare what the step took with its prediction, and correct if need be.

        Raises BudgetError, and the model is as it was before `optimize`, where the budget is strict, the first planned
        step passed it, and no plan fits with what that step showed.
        """
        shape, tide = self.shape, self._tides.tide
        if shape is None or tide is None or not self.is_compared or self._passes.num_open:
            return
        stats = tide.stats  # not before: on the host it looks at every tensor there is
        if stats.num_forwards < 1:
            return
        pass_bytes = self.watch.highest_bytes
        self.watch.note_peak()  # the optimizer's step is over as well, and whatever else there was between two passes
        self._tell_first(shape, stats)
        assert self.planner.facts.link is not None
        correction = self.watch.correction(shape, stats, self.planner.facts.link, self.planner.budget_bytes)
        shape.num_reviews += 1
        self.watch.begin(tide)
        is_joint = self._decide("review")
        is_wrong = correction is not None
        if any_rank(is_wrong, self.planner.consensus.group) if is_joint else is_wrong:
            self._correct(shape, correction, pass_bytes, is_joint=is_joint)

    def _tell_first(self, shape: ShapePlan, stats: Stats) -> None:
        predicted = shape.plan.predicted
        if self.watch.is_first_told or predicted is None:
            return
        peak_bytes = None if self._tides.engine.device_peak_bytes() is None else self.watch.highest_bytes
        line = self.watch.first_line(predicted, peak_bytes=peak_bytes, counted_bytes=stats.peak_device_bytes)
        LOG.info(line)

    def _correct(self, shape: ShapePlan, correction: Correction | None, pass_bytes: int, *, is_joint: bool) -> None:
        """Plan again with what was measured on this rank, or on another one."""
        assert self.key is not None
        start = time.perf_counter()
        has_more_loop_bytes = shape.has_more_loop_bytes
        before = (shape.unforeseen_bytes, shape.profile, self.planner.facts)
        if correction is not None:
            shape.unforeseen_bytes += correction.unforeseen_bytes
            shape.profile = correction.profile or shape.profile
            self.planner.know(link=correction.link or self.planner.facts.link)
        try:
            plan = self.planner.replan(shape, is_joint=self.planner.consensus.is_together)
        except BudgetError as error:
            needed_bytes = error.floor_bytes + shape.unforeseen_bytes
            shape.unforeseen_bytes, shape.profile, self.planner.facts = before
            shape.num_reviews += NUM_REVIEWS
            shape.has_more_loop_bytes = False
            is_above = has_more_loop_bytes or pass_bytes > self.planner.budget_bytes
            if is_joint and any_rank(self._is_beginning and is_above, self.planner.consensus.group):
                refusal = self.planner.first_step_error(pass_bytes, needed_bytes)
                self._tides.remove()
                self._tides.refuse(refusal)
                raise refusal from None
            # Not the user's mistake in the middle of training: what is in force works, if it needs more than planned.
            self.planner.warn_of_correction(_why(correction), needed_bytes)
            return
        self._replace(shape, plan)
        self._use(self.key, why=_why(correction), start=start, is_correction=True)

    @property
    def _is_beginning(self) -> bool:
        """The first planned micro-batch is over, or the first one that found gradients: nothing is lost but that."""
        num = self._tides.num_forwards
        return num == 1 or (num == 2 and self.planner.facts.has_gradients)

    def restart(self, *, was_audited: bool) -> None:
        tide = self._tides.tide
        assert tide is not None
        if was_audited:
            self.watch.backward_seconds.clear()
        else:
            self.compare()
        self.watch.restart_totals(self._tides.tide or tide)

    # -- plans that are made again ---------------------------------------------------------------------------------

    def with_gradients(self) -> None:
        """Forward passes find gradients from now on (micro-batches accumulate)."""
        before = self.planner.facts
        self.planner.know(has_gradients=True)
        self._replan_all(ACCUMULATES, before)

    def with_passes(self, *numbers: int) -> None:
        """A step has so many forward passes before a backward pass: each leaves room for what the others hold.

        Of several `numbers` the first for which plans fit is taken, else the last. In the first such step this comes
        as soon as a forward pass begins while another one is open. The open ones were planned to be alone: they spill
        what is more than their share, and where that is not enough the rest of the step has so much less.
        """
        before = self.planner.facts
        for number in dict.fromkeys(numbers):
            self.planner.know(num_passes=number)
            if self.planner.make_room(self.table, self._passes.output_bytes):
                break
        self._replan_all(SEVERAL_PASSES, before)

    def _spill_open_passes(self, shapes: list[ShapePlan], plans: list[Plan]) -> int:
        """Bring them down to what they would hold under these plans. Returns how much more they hold all the same."""
        pairs = zip(shapes, plans, strict=True)
        return self._passes.spill(
            max((self.planner.own_bytes(plan, shape.profile) for shape, plan in pairs), default=0)
        )

    def with_optimizers(self, stepping: SteppingOptimizers) -> None:
        """They step the model's parameters, and none was given: their state is counted from now on."""
        before = self.planner.facts
        self._stop_looking()
        if len(stepping.optimizers) == 1:
            self._tides.placed.optimizer = stepping.optimizers[0]
        self.planner.know(optimizer=stepping.state(self._tides.engine.device_type))
        self._replan_all(OPTIMIZER, before)

    def _replan_all(self, why: str, before: Facts) -> None:
        """Make all plans again, since something is known that concerns all. `before`: what was known, which is known
        again where no plan will do, so that the next forward pass is refused as well."""
        start = time.perf_counter()
        shapes = list(self.table)
        is_open = self._passes.num_open > 0
        if self.shape is not None and not is_open:
            self.shape.num_reviews += 1  # its plan changes without a comparison
        try:
            is_joint = bool(shapes) and self._decide(why)
            if self.planner.facts.num_passes > 1 and why != SEVERAL_PASSES:
                self.planner.make_room(shapes, self._passes.output_bytes)
            plans = [self.planner.replan(shape, is_joint=is_joint) for shape in shapes]
            more_bytes = self._spill_open_passes(shapes, plans) if is_open else 0
            self._holds_more = more_bytes > 0
            if self._holds_more:
                self.planner.know(beside_bytes=self.planner.facts.beside_bytes + more_bytes)
                plans = [self.planner.replan(shape, is_joint=is_joint) for shape in shapes]
        except BudgetError:
            self.planner.facts = before
            raise
        for shape, plan in zip(shapes, plans, strict=True):
            self._replace(shape, plan)
        if self.key is not None:
            self._use(self.key, why=why, start=start)

    def without_unsteady(self) -> None:
        """Recipes that did not hold in the last step are no recipes, and layers that could not be run again will not
        be: plan again without them, so that memory fits."""
        tide, shape, before = self._tides.tide, self.shape, self.planner.facts
        if tide is None or shape is None:
            return
        failed, refused, unsteady = what_failed(tide, before)
        if not (failed or refused):
            return
        start = time.perf_counter()
        layers = before.refused | refused.keys()
        self.planner.know(unsteady=unsteady, refused=layers)
        if failed:
            name, why = next(iter(failed.items()))
            LOG.info("lowtide: %d recipes do not hold in every step: '%s' %s", len(failed), name, why)
        if refused:
            why = next(iter(refused.values()))
            LOG.info("lowtide: %d layers cannot be run again: %s", len(refused), why)
        is_joint = self._decide(f"{UNSTEADY} {len(unsteady)} {len(layers)}")
        try:
            plan = self.planner.replan(shape, is_joint=is_joint)
        except BudgetError:
            self.planner.facts = before  # so that the next forward is refused as well
            raise
        self._replace(shape, plan)
        shape.misfits.clear()  # what is kept now instead does not fit either, and that is no news
        assert self.key is not None
        self._use(self.key, why=UNSTEADY if failed else REFUSED, start=start)

    def for_less(self) -> None:
        """Out of memory, though the budget was kept on paper: plan for a tenth less. Nothing before the first plan.

        Raises BudgetError where no plan is that small; the budget and the plan then stay as they are.
        """
        shape = self.shape
        if shape is None or self.key is None or self._tides.phase not in IN_FORCE:
            return
        start = time.perf_counter()
        budget_bytes = self.planner.budget_for(shape)
        target = int(min(shape.plan.budget_bytes or budget_bytes, budget_bytes) * _TIGHTER)
        plan = self.planner.make(shape.profile, target)  # no other rank need be out of memory
        # Only now: where no plan is that small, the budget stays as it was.
        shape.unforeseen_bytes = self.planner.budget_bytes - target
        self._replace(shape, plan)
        self._use(self.key, why=OUT_OF_MEMORY, start=start, is_correction=True)

    def tighten(self, error: BaseException, num_tried: int) -> str | None:
        tide = self._tides.tide
        assert tide is not None
        if isinstance(error, RecipeMismatchError | RecomputeRefusedError | JointStepError):
            return tide._tighten(error, num_tried)
        try:
            with self._tides.lock:
                self.for_less()
        except BudgetError:
            return tide._tighten(error, num_tried)
        return f"the plan is made for {format_bytes(self._tides.events[-1].budget_bytes or 0)} now"

    def _other_models(self) -> list[str]:
        """Other models of this process that are under a budget now, in words."""
        others = [each for each in gc.get_objects() if type(each) is Tides and each is not self._tides]
        budgets = [
            (type(each.model).__name__, each.source.budget_bytes) for each in others if each.tide and not each._is_over
        ]
        return [f"{name} ({format_bytes(budget)})" for name, budget in budgets if budget]

    def _warn_of_other_models(self) -> None:
        """Where no allocator counts, what those hold between their steps is in no plan of this one."""
        if self._tides.engine.device_bytes() is not None or not self._other_models():
            return
        gc.collect()
        for other in self._other_models():
            warnings.warn(
                f"lowtide.optimize: {type(self._tides.model).__name__} ({format_bytes(self.budget_bytes or 0)}) and "
                f"{other} are under budgets in one process, and each is planned for alone: the weights, gradients and "
                "optimizer state of the other must fit beside its budget; give each its share, or call remove() on the "
                "one that is over",
                stacklevel=2,
            )

    def _stop_looking(self) -> None:
        """For optimizers. Idempotent."""
        if self._stepping is not None:
            self._stepping.remove()
            self._stepping = None

    def close(self) -> None:
        self._stop_looking()
        self._passes.forget()
        for shape in self.table:
            shape.retire()
        self.planner.close()


def _why(correction: Correction | None) -> str:
    return correction.why if correction is not None else _ANOTHERS


# -- the way in --------------------------------------------------------------------------------------------------------


def optimize(
    model: nn.Module,
    budget: int | str | None = None,
    *,
    memory: Any = None,
    optimizer: torch.optim.Optimizer | None = None,
    engine: EngineChoice = None,
    group: Any = None,
    strict: bool | None = None,
    place: Callable[[Any, Engine, str], PlacedState] = PlacedState,
) -> Tides:
    """See `lowtide.optimize`. `place`: makes what keeps the optimizer's state, and weights, where plans have them."""
    optimizer = checked(model, optimizer, "lowtide.optimize")
    check_group(group, "lowtide.optimize")
    config, _, line = merged_config(memory, budget).settled(lambda: memory_of_model(model, optimizer))
    if line:
        LOG.info("lowtide: %s", line)
    layers = named_layers(model, config.layers) if config.layers is not None else find_layers(model)
    bare = plan_from_rules(dataclasses.replace(config, recompute=None, swap=None), layers)
    chosen = choose_engine(engine, model, bare)
    placed = place(optimizer, chosen, "lowtide.optimize")
    placed.check(bare.optimizer)
    if config.optimizer == "auto" and (optimizer is None or (refusal := placed.why_not())):
        if optimizer is not None:
            LOG.info("lowtide: the optimizer's state stays on the device: %s", refusal)
        config = dataclasses.replace(config, optimizer="keep")
    is_strict = config.strict if strict is None else strict
    room = None if is_strict else lambda: memory_of_model(model, optimizer).free_bytes

    def autopilot(tides: Tides) -> Autopilot:
        return Autopilot(tides, Planner(model, config, chosen, group, room=room))

    how: Any = {"owns_engine": chosen is not engine, "placed": placed, "group": group}
    try:
        return Tides(model, optimizer, chosen, autopilot, call="lowtide.optimize", **how)
    except BaseException:
        placed.remove()
        raise
