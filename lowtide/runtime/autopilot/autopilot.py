"""The autopilot: observe, plan, apply, compare, correct, race.

What: `optimize` puts one wrapper on the model. The first forward pass with gradients is observed (one extra step whose
saved activations are parked outside the device, and which leaves no trace), planned for the budget, and then carried
out under the plan, as are all that follow. After each of the first two planned steps the measured stalls and, on an
accelerator, the measured peak are compared with the predicted ones; where they are off by more than 2 %, the model of
the memory, of compute or of the link is corrected by the difference (corrections.py) and the plan is made again: from
start to stable in three planned steps. Then a few plans take turns on at most twelve steps, and the fastest stays
(race.py, planner/rivals.py), unless a plan that is made for the prices which this has shown beats it in eight more
(planner/learned.py). When the time of a step drifts they race again.

Where it stands is a phase (phases.py); where plans come from is a `PlanSource` (plan_source.py), which need not have a
budget: then plans are carried out as they are, and of the above only observe, plan, apply is left.

Gradients: once a forward pass finds some (micro-batches accumulate), plans count them from the start of a pass on.
Shapes: a plan is made for the shapes of a batch, and serves smaller ones too (shapes.py). As soon as it does, it is
made again without recipes that hold for one shape only. Plans of other shapes are put aside and taken up as they were.
Ranks: all use the smallest budget, and the first one's plan as long as all have the same shapes and come to each
decision together; after that each rank plans for itself (consensus.py). A new shape is observed by all ranks or, where
the model itself has collectives, not at all: it runs under the largest plan there is, and the guard keeps the limit.

Threads: those that train one model at once come to a plan one after another; one that arrives while another thread
observes or plans waits until a plan is in force. Plans do not race when several threads train: none may change while
another thread is in the middle of a forward pass.

Cost: the observed step (two to ten times a plain one), the solver (a second), then nothing per operator.
Not covered: what the caller does around the model's forward (a loss of one's own) is not observed: on an accelerator it
is measured and the plan corrected, on the host it must fit beside the budget. A backward pass of another thread that is
under way while a new shape is observed: its gradients may be lost.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import nn

from lowtide.core.plan import Plan
from lowtide.core.profile import Profile
from lowtide.engines.bandwidth import cache_path
from lowtide.engines.base import Engine
from lowtide.errors import BudgetError, ConfigError, RecomputeRefusedError
from lowtide.optimizer.swap import OptimizerSwap
from lowtide.planner.learned import learned_link
from lowtide.runtime.autopilot.consensus import PlanConsensus, agreed, agreed_rivals
from lowtide.runtime.autopilot.contest import BEFORE, LEARNED, SOLVERS, Contest, Entrant
from lowtide.runtime.autopilot.corrections import Correction, correct_memory, correct_times
from lowtide.runtime.autopilot.observe_call import BackwardClock, Witness, is_training, observe_call
from lowtide.runtime.autopilot.peaks import PeakWatch
from lowtide.runtime.autopilot.phases import Phase, State
from lowtide.runtime.autopilot.plan_cache import CachedPlan, PlanCache, ShapeBucket, shape_bucket
from lowtide.runtime.autopilot.plan_source import Facts, PlanSource
from lowtide.runtime.autopilot.race import LATE_STEPS, Pace, Race, not_in_force, of_slowest_rank
from lowtide.runtime.autopilot.step_clock import StepClock
from lowtide.runtime.offload.scheduler import OffloadScheduler
from lowtide.runtime.recompute.fingerprint import RecipeMismatchError
from lowtide.runtime.saved.stats import Stats
from lowtide.runtime.session.apply import apply
from lowtide.runtime.session.audit import Audit
from lowtide.runtime.session.checks import refuse_capture
from lowtide.runtime.session.forward_patch import ForwardPatch
from lowtide.runtime.session.optimizer_state import PlacedState
from lowtide.runtime.session.retry import Rollback
from lowtide.runtime.session.tide import Tide
from lowtide.runtime.session.unseen import Unseen
from lowtide.tensors.fsdp import fsdp_modules
from lowtide.tensors.ranks import ALONE, any_rank, gather
from lowtide.timeline.step import Link
from lowtide.units import format_bytes, format_seconds

_NUM_REVIEWS = 2
_TIGHTER = 0.9
_ACCUMULATES = "gradients stay"
_VARIES = "shapes vary"
_UNSTEADY = "recipes do not hold"
_REFUSED = "layers cannot run again"
_RACE = "race: "
_PLAIN = (Phase.OBSERVING, Phase.REFUSED, Phase.REMOVED)
"""Whoever holds the lock in one of these observes at this moment, or came when all was over."""
_NOT_CORRECTIONS = ("first step", "new shape", _ACCUMULATES, _VARIES, _UNSTEADY, _REFUSED)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanEvent:
    """One time that the autopilot made, corrected or changed its plan."""

    forward: int
    """How many planned forward passes had run."""
    why: str
    """'first step', 'new shape', 'shapes vary', 'gradients stay', 'recipes do not hold', 'layers cannot run again',
    'peak: ...', 'compute: ...', 'stalls: ...', 'out of memory', 'race: no swap 102 ms, solver's 118 ms'."""
    budget_bytes: int | None
    """What the solver was given: the budget, less what measurements showed beyond its prediction; None without one."""
    digest: str
    seconds: float
    """Time that observing and planning took; of a race, that of making the other plans."""


class Autopilot:
    """A model on autopilot. Shows the face of a `Tide`; leaving it as a context manager removes it."""

    def __init__(
        self,
        model: nn.Module,
        source: PlanSource,
        optimizer: torch.optim.Optimizer | None,
        engine: Engine,
        *,
        owns_engine: bool,
        placed: PlacedState,
        group: Any = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.model = model
        self.engine = engine
        self.events: list[PlanEvent] = []
        """What the autopilot decided, and when."""
        self.source = source
        """Where its plans come from."""
        self._consensus = PlanConsensus(group, source.budget_bytes)
        self._optimizer = optimizer
        self._placed = placed
        self._lease = _Lease(engine) if owns_engine else None
        self._group = group
        self._say = say or _say_nothing
        self._facts = Facts()
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._shapes = PlanCache()
        self._state = State()
        self._lock = threading.RLock()
        """Of whoever observes, plans or changes the plan."""
        self._was_smaller = False
        """A step since the last review was smaller than the one that was planned."""
        self._has_collectives = False
        """In the model's own forward pass: then no rank may observe a step alone."""
        self._has_warned = False
        self._patch = ForwardPatch(model, self._around, self)
        self._witness: Witness | None = None
        self._unseen = Unseen(model, "lowtide.optimize")
        # Of a model that FSDP2 shards, plans are made before its own hooks begin the forward pass: the observed step
        # is then a whole step, forward and backward, between two others.
        self._entry: Any = None
        if fsdp_modules(model):
            self._entry = model.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)
        self._num_forwards = 0
        self._peak = PeakWatch(engine.device_peak_bytes)
        """Of the same steps, on a device whose allocator counts."""
        self._clock = BackwardClock()
        """Of the planned steps that are to be reviewed."""
        self._steps = StepClock(engine, self._trained)
        """Of the steps of plans that race, or have won."""
        self._audit: Audit | None = None
        """The last one that was asked for."""
        self._threads: set[int] = set()
        """Those that have come with a forward pass."""
        self._rollback = Rollback(
            model,
            optimizer,
            counters=lambda: self.tide._counters if self.tide is not None else None,
            settle=self._settle,
            tighten=self._tighten,
            describe_floor=self._describe_floor,
        )

    # -- what the user sees ----------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan | None:
        """The plan in force; None before the first step."""
        if self.tide is None or self._state.key is None:
            return None
        result = self._shapes[self._state.key].result
        return dataclasses.replace(self.tide.plan, raced=result) if result else self.tide.plan

    @property
    def profile(self) -> Profile | None:
        """What was observed for the shapes in force; None before the first step."""
        return self._shapes[self._state.key].profile if self._state.key is not None else None

    @property
    def link(self) -> Link | None:
        """The link as measured, and corrected since; None before the first step, and without a budget."""
        return self._facts.link

    @property
    def has_gradients(self) -> bool:
        """Whether plans count gradients of earlier micro-batches from the start of a pass."""
        return self._facts.has_gradients

    @property
    def tide(self) -> Tide | None:
        """The tide in force; None before the first step."""
        return self._state.tide

    @property
    def phase(self) -> Phase:
        """Where it stands: waiting, observing, a plan in force, refused, removed."""
        return self._state.phase

    @property
    def optimizer_swap(self) -> OptimizerSwap | None:
        """The handle of the optimizer's state, once a plan has it elsewhere between steps."""
        return self._placed.handle

    @property
    def stats(self) -> Stats:
        """What happened under the plan in force; zeros before the first step."""
        return self.tide.stats if self.tide is not None else Stats.nothing()

    @property
    def num_corrections(self) -> int:
        """How often a plan was made again because a step was not as predicted."""
        whys = [event.why for event in self.events if not event.why.startswith(_RACE)]
        return sum(why not in _NOT_CORRECTIONS for why in whys)

    @property
    def _is_audited(self) -> bool:
        return self._audit is not None and self._audit.is_open

    def reset_stats(self) -> None:
        """Start all totals, and the peak, anew; what they were is compared with the prediction first."""
        with self._lock:
            if self._state.key is not None and self.tide is not None:
                self._review(self._state.key)
                self._restart_stats(self.tide)

    def audit(self) -> Audit:
        """A context manager around steps of your own: `audit.peak_bytes` is the exact peak on the device inside, in
        bytes, and `plan.audited_peak_bytes` has it afterwards. See `Tide.audit`.

        The plan in force stays inside: steps that are counted operator by operator say nothing about time, so they are
        neither compared nor raced. Where a batch of another shape brings another plan, its peak counts too.

        Raises ConfigError, when it is entered, where no plan is in force (before the first step, after `remove`).
        """

        def scheduler() -> OffloadScheduler:
            if self.tide is None or self.phase is Phase.REMOVED:
                raise ConfigError("audit: no plan is in force; run a step first")
            return self.tide._scheduler

        def done(peak_bytes: int | None) -> None:
            with self._lock:
                if self.tide is not None and peak_bytes is not None and self._num_forwards != before:
                    self.tide.audited_peak_bytes = peak_bytes
                if self.tide is not None and self.phase is Phase.COMPARED:
                    # The next comparison is of steps that nobody watched.
                    self._restart_stats(self.tide)
                    self._clock.seconds.clear()

        if self._is_audited:
            raise ConfigError("audit: one audit is open or was used already; leave it, and ask for a new one")
        before = self._num_forwards
        self._audit = Audit(self.model, self._optimizer, self.engine.device_type, scheduler=scheduler, done=done)
        return self._audit

    def step(self, closure: Callable[[], Any], *, is_local: bool = False) -> Any:
        """What `closure()` returns: one micro-batch, which runs again if memory ran out. See `Tide.step`.

        Here the plan is first made again for less; where the solver finds none, the rules of `Tide.step` follow.
        """
        if self.phase in (Phase.REFUSED, Phase.REMOVED):
            return closure()
        return self._rollback.run(closure, is_local=is_local)

    def remove(self) -> None:
        """Restore the model exactly. Idempotent.

        Where there is no memory for the optimizer's state, the model is restored all the same; call it again.
        """
        if self.phase is Phase.REMOVED:
            self._placed.remove()
            return
        self._enter(Phase.REMOVED, self._state.key, self.tide)
        self._leave()
        for shape in self._shapes:
            shape.retire()
        self._lease = None
        try:
            self._placed.remove()
        finally:
            self.source.close()

    def _leave(self) -> None:
        self._unseen.close()
        self._patch.undo()
        if self._entry is not None:
            self._entry.remove()

    def _enter(self, phase: Phase, key: ShapeBucket | None = None, tide: Tide | None = None) -> None:
        """Asserts that the table of phases has this way."""
        self._state = self._state.to(phase, key, tide)

    def __enter__(self) -> Autopilot:
        return self

    def __repr__(self) -> str:
        budget = "" if self.source.budget_bytes is None else f", budget {format_bytes(self.source.budget_bytes)}"
        plan = "" if self.tide is None else f", plan {self.tide.plan.digest()}"
        return f"<lowtide.Autopilot {self.phase.value}: engine '{self.engine.name}'{budget}{plan}>"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    # -- each forward ----------------------------------------------------------------------------------------------

    def _around(self, forward: Callable, args: tuple, kwargs: dict) -> Any:
        if not is_training():
            self._unseen.was_aside = True
            return forward(*args, **kwargs)
        refuse_capture(self.model, self.engine)
        with self._lock:
            if self.phase in _PLAIN:
                return forward(*args, **kwargs)
            self._unseen.end()
            if self._entry is None:
                self._prepare(args, kwargs)
            self._num_forwards += 1
            # Taken first: where this forward fails, the next one may have other inputs.
            witness, self._witness = self._witness, None
            planned, tide = self._patch.original, self.tide
        output = planned(*args, **kwargs)
        if witness is not None:
            witness.compare(output)
        if self.source.races:
            self._steps.follow(output)
        if self.phase is Phase.COMPARED and tide is not None:
            self._peak.follow(output)
            if self.engine.device_type == "cpu":
                self._clock.follow(output, lambda: tide.stats.stall_seconds)
        return output

    def _before(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """The hook of a sharded model."""
        if not is_training():
            return
        with self._lock:
            if self.phase not in _PLAIN:
                self._prepare(args, kwargs)

    def _prepare(self, args: tuple, kwargs: dict) -> None:
        """See that a plan for these inputs is in force."""
        self._steps.stop()
        self._threads.add(threading.get_ident())
        if self._has_budget:
            if not self._facts.has_gradients and any(parameter.grad is not None for parameter in self._trained):
                self._expect_gradients()
            self._drop_unsteady()
        shape = shape_bucket(args, kwargs)
        key = self._serving(shape)
        if key is None and self._may_observe(shape):
            self._learn(shape, args, kwargs)
            return
        if key is None:
            key = self._largest_for(shape)
        if self._state.key is not None and not self._is_audited:
            self._review(self._state.key)  # also where shapes take turns, and none comes twice in a row
        if key != self._state.key:
            self._use(key)
        self._was_smaller |= key != shape
        if self.source.races and not self._is_audited:
            self._race(key)
            self._steps.start(self._timed(key) if key == shape else None)

    # -- shapes ----------------------------------------------------------------------------------------------------

    def _serving(self, shape: ShapeBucket) -> ShapeBucket | None:
        """The known shape bucket whose plan is the one for these inputs; None if they need one of their own."""
        key = self._shapes.cover(shape)
        return key if key is None or key == shape or self._let_serve_smaller(key) else None

    def _let_serve_smaller(self, key: ShapeBucket) -> bool:
        """Plan anew without recipes that hold for one shape only; False where that does not fit."""
        shape = self._shapes[key]
        free = shape.profile.without_sizes(is_proven=shape.plan.check == "full")
        if not self._has_budget:
            return not shape.has_sizes  # no plan is changed for the sake of other shapes
        if shape.serves_smaller:
            return True
        if shape.has_sizes:
            start = time.perf_counter()
            try:
                plan = self._plan_again(shape, is_joint=self._decide("vary"), profile=free)
            except BudgetError:
                return False
            self._replace(shape, plan)
            self._use(key, why=_VARIES, seconds=time.perf_counter() - start)
        shape.profile = free
        shape.rivals = shape.before = None  # they may have recipes with sizes
        shape.serves_smaller = True
        return True

    def _may_observe(self, shape: ShapeBucket) -> bool:
        """An observed step runs the model's collectives once more: then all ranks have to be there."""
        if not self._shapes:
            return True
        return self._decide(f"shape {shape.shapes}") or not self._has_collectives

    def _decide(self, what: str) -> bool:
        """Whether all ranks are here, in the same forward pass, to decide the same; else each decides for itself."""
        return self._consensus.all_here(f"{self._num_forwards} {what}")

    def _largest_for(self, shape: ShapeBucket) -> ShapeBucket:
        """The plan for inputs that no plan was made for, and that cannot be observed."""
        key = self._shapes.largest_for(shape)
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"lowtide: inputs of {shape.shapes} on this rank alone, while the model exchanges data with other "
                "ranks in its forward pass, so no step can be observed for them; they run under the plan for "
                f"{key.shapes}, and the guard keeps the limit. Begin with the largest batch, or pad to common lengths.",
                stacklevel=2,
            )
        return key

    def _learn(self, key: ShapeBucket, args: tuple, kwargs: dict) -> None:
        """Observe this shape for the first time, and plan for it."""
        start = time.perf_counter()
        why = "new shape" if self._shapes else "first step"
        self._say(f"lowtide: observing one step ({why})")
        if self.phase is not Phase.WAITING:
            self._take_off()
            self._patch = self._patch.again()  # other threads wait in it until this is over
        self._enter(Phase.OBSERVING)
        try:
            self._witness = Witness(type(self.model).__name__)
            how: Any = {"is_inside": self._entry is None, "witness": self._witness}
            profile = observe_call(self.model, args, kwargs, self._optimizer, **how)
            if self._facts.link is None:
                self._facts = dataclasses.replace(self._facts, link=self._measured_link())
            if not self._shapes:
                self._meet_first(key, profile)
            shape = self._learned(profile, is_joint=not self._shapes or self._consensus.is_together)
        except BaseException as error:
            self._witness = None
            if self.phase is Phase.REMOVED:
                raise
            # A bad batch is no reason to go on without a plan; that no plan fits the first one is.
            if self._shapes or not isinstance(error, BudgetError):
                self._enter(Phase.WAITING)
            else:
                self._enter(Phase.REFUSED)
                self._leave()
            raise
        if self.phase is Phase.REMOVED:  # by a hook of the user's, or in another thread: this forward is a plain one
            self._witness = None
            return
        self._shapes.add(key, shape)
        self._use(key, why=why, seconds=time.perf_counter() - start)

    def _measured_link(self) -> Link | None:
        link = self.source.measure_link()
        if link is not None:
            out_rate, in_rate = (
                format_bytes(int(link.out_bytes_per_second)),
                format_bytes(int(link.in_bytes_per_second)),
            )
            self._say(f"lowtide: link: {out_rate}/s out, {in_rate}/s in; this machine's are kept in {cache_path()}")
        return link

    def _meet_first(self, key: ShapeBucket, profile: Profile) -> None:
        """The first step is the one that all ranks take together, whatever they feed the model."""
        answers = gather((key.shapes, profile.num_collectives), self._group)
        self._has_collectives = any(num for _, num in answers)
        if len({shapes for shapes, _ in answers}) > 1:
            self._consensus.part()

    def _learned(self, profile: Profile, *, is_joint: bool) -> CachedPlan:
        """A plan for what was just observed; one that serves smaller shapes too, if others do already."""
        if any(known.serves_smaller for known in self._shapes):
            free = profile.without_sizes(is_proven=all(known.plan.check == "full" for known in self._shapes))
            with contextlib.suppress(BudgetError):
                plan = self._agreed_plan(free, self._consensus.budget_bytes, is_joint=is_joint)
                return CachedPlan(profile=free, plan=plan, serves_smaller=True)
        return CachedPlan(
            profile=profile, plan=self._agreed_plan(profile, self._consensus.budget_bytes, is_joint=is_joint)
        )

    def _expect_gradients(self) -> None:
        """Forward passes find gradients from now on (micro-batches accumulate): every plan is made again for that."""
        start = time.perf_counter()
        before = self._facts
        self._facts = dataclasses.replace(before, has_gradients=True)
        shapes = list(self._shapes)
        if self._state.key is not None:
            self._count_review(self._shapes[self._state.key])  # its plan changes without one
        try:
            is_joint = bool(shapes) and self._decide(_ACCUMULATES)
            plans = [self._plan_again(shape, is_joint=is_joint) for shape in shapes]
        except BudgetError:
            self._facts = before  # so that the next one is refused as well
            raise
        for shape, plan in zip(shapes, plans, strict=True):
            self._replace(shape, plan)
        if self._state.key is not None:
            self._use(self._state.key, why=_ACCUMULATES, seconds=time.perf_counter() - start)

    def _drop_unsteady(self) -> None:
        """Recipes that did not hold in the last step are no recipes, and layers that could not be run again will not
        be: plan again without them, so that memory fits. A plan that is only tried is out, and nothing else changes."""
        failed = self.tide.failed_recipes if self.tide is not None else {}
        refused = self.tide.refused_layers if self.tide is not None else {}
        if self._rival is not None:
            if failed or refused:
                self._drop_rival(next(iter(refused.values()), "a recipe did not hold"))
            return
        before = self._facts
        failed = {name: why for name, why in failed.items() if name not in before.unsteady}
        refused = {name: why for name, why in refused.items() if name not in before.refused}
        key = self._state.key
        if key is None or not (failed or refused):
            return
        start = time.perf_counter()
        unsteady, layers = before.unsteady | failed.keys(), before.refused | refused.keys()
        self._facts = dataclasses.replace(before, unsteady=unsteady, refused=layers)
        if failed:
            name, why = next(iter(failed.items()))
            self._say(f"lowtide: {len(failed)} recipes do not hold in every step: '{name}' {why}")
        if refused:
            self._say(f"lowtide: {len(refused)} layers cannot be run again: {next(iter(refused.values()))}")
        shape = self._shapes[key]
        is_joint = self._decide(f"{_UNSTEADY} {len(unsteady)} {len(layers)}")
        try:
            plan = self._plan_again(shape, is_joint=is_joint)
        except BudgetError:
            self._facts = before  # so that the next forward is refused as well
            raise
        self._replace(shape, plan)
        why = _UNSTEADY if failed else _REFUSED
        self._use(key, why=why, seconds=time.perf_counter() - start)

    @property
    def _has_budget(self) -> bool:
        return self._consensus.budget_bytes is not None

    @property
    def _budget_bytes(self) -> int:
        """That of all ranks. Only where there is one."""
        assert self._consensus.budget_bytes is not None
        return self._consensus.budget_bytes

    def _budget_for(self, shape: CachedPlan) -> int | None:
        """The budget, less what measurements of these shapes showed beyond the prediction."""
        return self._budget_bytes - shape.unforeseen_bytes if self._has_budget else None

    def _make_plan(self, profile: Profile, budget_bytes: int | None) -> Plan:
        """This rank's own. Raises BudgetError where none fits."""
        return self.source.make_plan(profile, self._facts, budget_bytes)

    def _agreed_plan(self, profile: Profile, budget_bytes: int | None, *, is_joint: bool) -> Plan:
        """The plan of all ranks if `is_joint`: all of them are making this call. BudgetErrors are shared as well."""
        if not is_joint:
            return self.source.localized(self._make_plan(profile, budget_bytes), profile)
        error: BudgetError | None = None
        plan: Plan | None = None
        try:
            plan = self._make_plan(profile, budget_bytes)
        except BudgetError as found:
            error = found.with_traceback(None)  # its frames would be a cycle, and hold this forward's output
        common = agreed(plan, error, self._group)
        # With other shapes the first rank's plan is not one for this rank.
        return self.source.localized(common if plan is None or self._consensus.is_together else plan, profile)

    def _plan_again(self, shape: CachedPlan, *, is_joint: bool, profile: Profile | None = None) -> Plan:
        return self._agreed_plan(profile or shape.profile, self._budget_for(shape), is_joint=is_joint)

    def _use(self, key: ShapeBucket, *, why: str = "", seconds: float = 0.0) -> None:
        """Put the plan of a shape bucket in force; `why` it is a new one.

        What goes wrong on the way (a full disk) is the caller's to hear of; the next forward pass tries again.
        """
        self._take_off()
        shape = self._shapes.use(key)
        self._enter(Phase.CHANGING, key)
        try:
            self._put_on(key, shape)
        except BaseException:
            self._enter(Phase.WAITING)
            self._patch = self._patch.again()
            shape.retire()
            raise
        self._patch = self._patch.again()
        if why:
            self._tell(shape, why, seconds)

    def _put_on(self, key: ShapeBucket, shape: CachedPlan) -> None:
        if shape.tide is None:
            # Ranks have agreed already, or cannot.
            how: Any = {"optimizer": self._optimizer, "engine": self.engine, "group": ALONE}
            self._placed.follow(shape.plan)
            self._facts = dataclasses.replace(self._facts, resident_state_bytes=self._placed.resident_bytes)
            shape.tide = apply(self.model, shape.plan, **how, moves_state=False)
            shape.tide.outlive(self._lease)
            self.source.equip(shape.tide, shape, self._consensus.budget_bytes)
        else:
            shape.tide.resume()
        shape.tide.keep_layers(self._facts.refused)
        # Also of a plan that is new: the device's counter remembers what came before it, the observed step too.
        self._restart_stats(shape.tide)
        is_compared = self._has_budget and shape.num_reviews < _NUM_REVIEWS
        phase = Phase.COMPARED if is_compared else Phase.SETTLED
        self._enter(phase if shape.contest is None else Phase.RACING, key, shape.tide)
        self._was_smaller = False
        self._clock.seconds.clear()
        if self._is_audited:
            assert self._audit is not None
            self._audit.follow()

    def _tell(self, shape: CachedPlan, why: str, seconds: float) -> None:
        event = PlanEvent(
            forward=self._num_forwards,
            why=why,
            budget_bytes=self._budget_for(shape),
            digest=shape.plan.digest(),
            seconds=seconds,
        )
        self.events.append(event)
        predicted = shape.plan.predicted
        if predicted is not None:
            self._say(
                f"lowtide: plan {event.digest} ({why}): peak {format_bytes(predicted.peak_bytes)} of "
                f"{format_bytes(predicted.plain_peak_bytes)} plain, step {format_seconds(predicted.step_seconds)} for "
                f"{format_seconds(predicted.plain_seconds)}, made in {format_seconds(seconds)}"
            )

    def _replace(self, shape: CachedPlan, plan: Plan) -> None:
        """Another plan for these shapes, from the next `_use` on."""
        if shape.tide is self.tide:
            self._take_off()
        shape.replace(plan)

    def _take_off(self) -> None:
        """Bring the model back to its own forward: patches come off in the reverse order."""
        self._patch.undo()
        if self.tide is not None:
            self.tide.suspend()
            self._enter(Phase.CHANGING, self._state.key)

    # -- compare and correct ---------------------------------------------------------------------------------------

    def _review(self, key: ShapeBucket) -> None:
        """A planned step is over: was it as predicted?"""
        shape, tide = self._shapes[key], self.tide
        assert tide is not None
        stats = tide.stats
        if self.phase is not Phase.COMPARED or stats.num_forwards < 1:
            return
        self._peak.note()  # the optimizer's step is over as well
        found = self._correction(shape, stats)
        self._count_review(shape)
        self._was_smaller = False
        self._restart_stats(tide)
        self._clock.seconds.clear()
        if self._decide("review"):
            if not any_rank(found is not None, self._group):
                return
        elif found is None:
            return
        start = time.perf_counter()
        before = (shape.unforeseen_bytes, shape.profile, self._facts)
        if found is not None:
            shape.unforeseen_bytes += found.unforeseen_bytes
            shape.profile = found.profile or shape.profile
            self._facts = dataclasses.replace(self._facts, link=found.link or self._facts.link)
        try:
            plan = self._plan_again(shape, is_joint=self._consensus.is_together)
        except BudgetError as error:
            # Not the user's mistake in the middle of training: what is in force works, if it needs more than planned.
            shape.unforeseen_bytes, shape.profile, self._facts = before
            self._count_review(shape, _NUM_REVIEWS)
            self._warn_that_nothing_fits(found, error)
            return
        corrected = shape.plan
        self._replace(shape, plan)
        shape.before = corrected
        why = found.why if found is not None else "another rank corrected its plan"
        self._use(key, why=why, seconds=time.perf_counter() - start)

    def _count_review(self, shape: CachedPlan, num: int = 1) -> None:
        """So many comparisons fewer to come for the plan in force, which has settled when there are none."""
        shape.num_reviews += num
        if self.phase is Phase.COMPARED and shape.num_reviews >= _NUM_REVIEWS:
            self._enter(Phase.SETTLED, self._state.key, self.tide)

    def _restart_stats(self, tide: Tide) -> None:
        tide.reset_stats()
        self._peak.restart()

    def _warn_that_nothing_fits(self, found: Correction | None, error: BudgetError) -> None:
        why = found.why if found is not None else "another rank corrected its plan"
        needed = error.floor_bytes + self._budget_bytes - self._planned_budget_bytes(found)
        warnings.warn(
            f"lowtide: a planned step was not as predicted ({why}), and no plan fits the budget of "
            f"{format_bytes(self._budget_bytes)} with that; the plan in force stays, and steps may need more than the "
            f"budget. Raise it to {format_bytes(needed)}, or make the micro-batch smaller.",
            stacklevel=2,
        )

    def _planned_budget_bytes(self, found: Correction | None) -> int:
        """What was left of the budget when no plan was found for it."""
        assert self._state.key is not None
        unforeseen_bytes = self._shapes[self._state.key].unforeseen_bytes
        return self._budget_bytes - unforeseen_bytes - (found.unforeseen_bytes if found is not None else 0)

    def _correction(self, shape: CachedPlan, stats: Stats) -> Correction | None:
        predicted, link = shape.plan.predicted, self._facts.link
        assert predicted is not None
        assert link is not None
        found = None
        if self.engine.device_peak_bytes() is not None:
            found = correct_memory(predicted, self._peak.peak_bytes, self._budget_bytes, shape.unforeseen_bytes)
        if found is not None or self._was_smaller:
            return found
        return correct_times(shape.profile, predicted, stats, self._clock.seconds, link)

    def tighten(self) -> None:
        """Plan for less: the budget was kept on paper, but the device ran out of memory. Nothing without a budget."""
        with self._lock:
            key = self._state.key
            if key is None or self.phase is Phase.REMOVED or not self._has_budget:
                return
            shape = self._shapes[key]
            start = time.perf_counter()
            target = int((self._budget_bytes - shape.unforeseen_bytes) * _TIGHTER)
            plan = self._make_plan(shape.profile, target)  # no other rank need be out of memory
            # Only now: where no plan is that small, the budget stays as it was.
            shape.unforeseen_bytes = self._budget_bytes - target
            self._replace(shape, plan)
            self._use(key, why="out of memory", seconds=time.perf_counter() - start)

    def _tighten(self, error: BaseException, num_tried: int) -> str | None:
        """After an out-of-memory error, between two attempts: what was done about it, or None."""
        if self.phase in (Phase.REFUSED, Phase.REMOVED):
            return None  # since this micro-batch began
        if self.tide is None:
            # Observing failed, where nothing is kept on the device: no plan would help.
            self._patch.undo()
            self._patch = self._patch.again()
            return None
        self._steps.forget()
        if self._rival is not None:
            with self._lock:
                self._drop_rival(str(error).partition("\n")[0] or type(error).__name__)
            return "the plan that was tried is out of the race"
        if not self._has_budget or isinstance(error, RecipeMismatchError | RecomputeRefusedError):
            return self.tide._tighten(error, num_tried)
        try:
            self.tighten()
        except BudgetError:
            return self.tide._tighten(error, num_tried)
        return f"the plan is made for {format_bytes(self.events[-1].budget_bytes or 0)} now"

    # -- the race --------------------------------------------------------------------------------------------------

    def _race(self, key: ShapeBucket) -> None:
        """Between two forward passes, with the plan of `key` in force: begin a race, or see whose turn it is."""
        shape = self._shapes[key]
        self._steps.read()
        if self.phase is Phase.SETTLED and self._may_race(shape):
            self._begin_race(key, shape)
        if self.phase is Phase.RACING:
            assert shape.contest is not None
            self._take_turn(key, shape, shape.contest)

    def _timed(self, key: ShapeBucket) -> Any:
        """Who wants to know how long the step takes that begins now."""
        shape = self._shapes[key]
        if shape.contest is not None:
            return shape.contest.race.lap()
        return shape.pace if self.phase is Phase.SETTLED else None

    def _may_race(self, shape: CachedPlan) -> bool:
        """The plan has run, there may be others, and no race has said which is the fastest, or steps have drifted."""
        assert self.tide is not None
        if shape.plan.does_nothing or len(self._threads) > 1 or not self.tide.has_run:
            return False
        if shape.pace is not None and shape.pace.is_due():
            has_drifted = shape.pace.ask()
            shape.is_raced = not (self._decide("pace") and any_rank(has_drifted, self._group))
        return not shape.is_raced

    def _begin_race(self, key: ShapeBucket, shape: CachedPlan) -> None:
        shape.is_raced = True
        if self.engine.mark_time() is None or not self._decide("race"):
            return
        start = time.perf_counter()
        if shape.rivals is None:
            shape.rivals = agreed_rivals(self._rivals_of(shape), self._group)
        plans = {name: self.source.localized(plan, shape.profile) for name, plan in shape.rivals.items()}
        names = not_in_force({name: plan.digest() for name, plan in plans.items()}, shape.plan.digest())
        if not names:
            return
        entrants = [Entrant(shape.name, shape.plan, shape.tide), *(Entrant(name, plans[name]) for name in names)]
        race = Race(
            len(entrants),
            is_fixed=self._consensus.num_ranks > 1,
            num_late=0 if self.engine.device_type == "cpu" else LATE_STEPS,
            turn_steps=2 if any_rank(self.engine.forget_free_memory(), self._group) else 1,
        )
        shape.contest = Contest(entrants, race, time.perf_counter() - start)
        self._say(f"lowtide: {len(entrants)} plans race: {', '.join(entrant.name for entrant in entrants)}")
        self._enter(Phase.RACING, key, self.tide)

    def _rivals_of(self, shape: CachedPlan) -> dict[str, Plan]:
        """Other plans that fit, by name. None of them moves the optimizer's state, or brings it back."""
        budget_bytes = self._budget_bytes - shape.unforeseen_bytes
        found: dict[str, Plan] = {}
        if shape.name != SOLVERS:
            with contextlib.suppress(BudgetError):
                found[SOLVERS] = self._make_plan(shape.profile, budget_bytes)
        solvers = found.get(SOLVERS, shape.plan)
        found |= self.source.rivals(solvers, shape.profile, self._facts, budget_bytes)
        if shape.before is not None and _peak_bytes(shape.before) <= budget_bytes:
            found[BEFORE] = shape.before
        has_moved = self._facts.resident_state_bytes is not None
        return {name: plan for name, plan in found.items() if _moves_state(plan) == has_moved}

    def _take_turn(self, key: ShapeBucket, shape: CachedPlan, contest: Contest) -> None:
        if len(self._threads) > 1:
            self._end_race(key, shape, contest, contest.number)
            return
        # The first forward pass of a plan also tries its recipes out.
        if contest.number and not contest.race.is_learning(contest.number):
            peak_bytes = self.engine.device_peak_bytes() or 0
            if peak_bytes > self._budget_bytes:
                self._drop_rival(f"it needed {format_bytes(peak_bytes)}")
        if contest.race.is_over(has_pending=self._steps.has_pending):
            self._finish_race(key, shape, contest)
        elif contest.race.turn != contest.number:
            self._give_turn(key, shape, contest, contest.race.turn)

    def _give_turn(self, key: ShapeBucket, shape: CachedPlan, contest: Contest, number: int) -> None:
        """Put the plan of this entrant in force."""
        self.engine.forget_free_memory()
        contest.in_force.tide = shape.tide
        contest.number = number
        shape.plan, shape.tide = contest.in_force.plan, contest.in_force.tide
        try:
            self._use(key)
        except ConfigError as error:
            if number == 0:
                raise
            self._drop_rival(str(error))  # somebody else's plan is on a part of the model by now

    @property
    def _rival(self) -> Contest | None:
        """The race, if the plan in force is one that is only tried."""
        contest = self._shapes[self._state.key].contest if self._state.key is not None else None
        return contest if contest is not None and contest.number else None

    def _drop_rival(self, why: str) -> None:
        """The plan in force is out of the race, and the one that was there before is in force again."""
        contest, key = self._rival, self._state.key
        assert contest is not None and key is not None
        out = contest.in_force
        contest.race.drop(contest.number)
        self._say(f"lowtide: the race goes on without the plan '{out.name}': {why}")
        self._give_turn(key, self._shapes[key], contest, 0)
        if out.tide is not None:
            out.tide.remove()

    def _finish_race(self, key: ShapeBucket, shape: CachedPlan, contest: Contest) -> None:
        medians = contest.race.medians
        if not self._decide("end of the race"):
            self._say("lowtide: the race is called off: the ranks have parted company")
            self._end_race(key, shape, contest, 0)
            return
        seconds = of_slowest_rank(gather(medians, self._group))
        number, result = contest.result(seconds)
        if contest.link is None and self._begin_finals(shape, contest, number, seconds):
            self._give_turn(key, shape, contest, contest.race.turn)
            return
        if contest.link is not None and contest.entrants[number].name == LEARNED:
            self._facts = dataclasses.replace(self._facts, link=contest.link)  # for the plans of other shapes too
        own = medians[number]
        self._end_race(key, shape, contest, number)
        shape.rivals = contest.plans()
        shape.pace = Pace(own) if own else None
        shape.result = result
        self._tell(shape, _RACE + result, contest.seconds)

    def _begin_finals(self, shape: CachedPlan, contest: Contest, winner: int, seconds: list[float | None]) -> bool:
        """Whether one more plan races the winner: the one that is best by what the race says of prices."""
        start = time.perf_counter()
        assert self._facts.link is not None
        plans = [entrant.plan for entrant in contest.entrants]
        link = learned_link(list(zip(plans, seconds, strict=True)), self._facts.link)
        found: dict[str, Plan] = {}
        if link is not None and LEARNED not in [entrant.name for entrant in contest.entrants]:
            facts = dataclasses.replace(self._facts, link=link)
            with contextlib.suppress(BudgetError):
                budget_bytes = self._budget_bytes - shape.unforeseen_bytes
                plan = self.source.make_plan(shape.profile, facts, budget_bytes)
                if _moves_state(plan) == _moves_state(shape.plan):
                    found[LEARNED] = plan
        # Ranks may have measured other links: all have a plan, or none has.
        for name, plan in agreed_rivals(found, self._group).items():
            if contest.is_new(plan):
                contest.entrants.append(Entrant(name, self.source.localized(plan, shape.profile)))
                contest.race.begin_finals(winner)
                contest.link, contest.seconds = link, contest.seconds + time.perf_counter() - start
                self._say(f"lowtide: one more plan races '{contest.entrants[winner].name}': {name}")
                return True
        return False

    def _end_race(self, key: ShapeBucket, shape: CachedPlan, contest: Contest, number: int) -> None:
        """The plan of this entrant stays."""
        winner = contest.entrants[number]
        is_in_force = number == contest.number
        contest.in_force.tide = shape.tide
        shape.contest = None
        shape.name, shape.plan, shape.tide = winner.name, winner.plan, winner.tide
        if is_in_force:
            self._enter(Phase.SETTLED, key, self.tide)
        else:
            self.engine.forget_free_memory()
            self._use(key)
        contest.retire(but=winner)

    def _settle(self) -> None:
        if self.tide is not None:
            self.tide.settle()

    def _describe_floor(self) -> str:
        return self.tide._describe_floor() if self.tide is not None else "It was the step that is observed."


class _Lease:
    """Closes an engine when nobody holds it any more: the autopilot, and every graph made under one of its plans."""

    def __init__(self, engine: Engine) -> None:
        weakref.finalize(self, engine.close)


def _peak_bytes(plan: Plan) -> int:
    assert plan.predicted is not None
    return plan.predicted.peak_bytes


def _moves_state(plan: Plan) -> bool:
    return plan.optimizer is not None and plan.optimizer.moves


def _say_nothing(line: str) -> None:
    pass
