"""The autopilot: observe, plan, apply, compare, correct.

What: `optimize` puts one wrapper on the model. The first forward pass with gradients is observed (one extra step whose
saved activations are parked outside the device, and which leaves no trace), planned for the budget, and then carried
out under the plan, as are all that follow. After each of the first two planned steps the measured stalls and, on an
accelerator, the measured peak are compared with the predicted ones; where they are off by more than 2 %, the model of
the memory, of compute or of the link is corrected by the difference (corrections.py) and the plan is made again: from
start to stable in three planned steps.

The guard (guard.py) is set with each plan: to what the plan itself holds at most in forward, and what it leaves of the
budget. A step as planned never touches it; one that saves more than planned is spilled before the budget is passed.

Gradients: once a forward pass finds some (micro-batches accumulate), plans count them from the start of a pass on.
Shapes: a plan is made for the shapes of a batch, and serves smaller ones too (shapes.py). As soon as it does, it is
made again without recipes in which sizes are written. Plans of other shapes are put aside and taken up as they were.
Ranks: all use the smallest budget, and the first one's plan as long as all have the same shapes and come to each
decision together; after that each rank plans for itself (agree.py). A new shape is observed by all ranks or, where the
model itself has collectives, not at all: it runs under the largest plan there is, and the guard keeps the limit.

Cost: the observed step (two to ten times a plain one), the solver (a second), then nothing per operator.
Not covered: DTensor parameters that FSDP2 did not make (catalog/sharded.py has those that it did); what the caller does
around the model's forward (a loss of one's own) is not observed: on an accelerator it is measured and the plan
corrected, on the host it must fit beside the budget.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import nn

from lowtide.catalog.layers import find_layers, named_layers
from lowtide.catalog.links import cache_path, measure_link
from lowtide.catalog.sharded import fsdp_modules, refuse_other_shards
from lowtide.catalog.site import Profile
from lowtide.config.native import MemoryConfig
from lowtide.errors import BudgetError, ConfigError
from lowtide.planner.autoplan import plan_profile
from lowtide.planner.plan import Plan
from lowtide.runtime.agree import ALONE, Council, agreed, any_rank, gather
from lowtide.runtime.corrections import Correction, correct_memory, correct_times
from lowtide.runtime.engines.base import Engine
from lowtide.runtime.engines.choose import choose_engine
from lowtide.runtime.known import Known, KnownPlans
from lowtide.runtime.one_step import BackwardClock, is_training, observe_call
from lowtide.runtime.patch import ForwardPatch, patched_module
from lowtide.runtime.planning import merged_config
from lowtide.runtime.rollback import Rollback
from lowtide.runtime.shapes import ShapeClass, shape_class
from lowtide.runtime.stats import Stats
from lowtide.runtime.tide import Tide, apply
from lowtide.timeline.step import Link
from lowtide.units import format_bytes, format_seconds

_NUM_REVIEWS = 2
# The guard begins to spill a fiftieth below its limit (guard.py).
_GUARD_HEADROOM = 49
_TIGHTER = 0.9
_ACCUMULATES = "gradients stay"
_VARIES = "shapes vary"
_NOT_CORRECTIONS = ("first step", "new shape", _ACCUMULATES, _VARIES)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanEvent:
    """One time that the autopilot made, corrected or changed its plan."""

    forward: int
    """How many planned forward passes had run."""
    why: str
    """'first step', 'new shape', 'shapes vary', 'gradients stay', 'peak: ...', 'compute: ...', 'stalls: ...',
    'out of memory'."""
    budget_bytes: int
    """What the solver was given: the budget, less what measurements showed beyond its prediction."""
    digest: str
    seconds: float
    """Time that observing and planning took."""


def optimize(
    model: nn.Module,
    *,
    budget: int | str | None = None,
    memory: Any = None,
    optimizer: torch.optim.Optimizer | None = None,
    engine: Engine | str | None = None,
    group: Any = None,
    say: Callable[[str], None] | None = None,
) -> AutoTide:
    """Train `model` within a budget. See `lowtide.optimize`."""
    config = merged_config(memory, budget)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"lowtide.optimize: expected a torch.nn.Module, not {type(model).__name__}")
    if patched_module(model) is not None:
        raise ConfigError("lowtide.optimize: this model is already under a lowtide plan; call remove() on it first")
    refuse_other_shards(model, "lowtide.optimize")
    layers = named_layers(model, config.layers) if config.layers is not None else find_layers(model)
    bare = Plan.from_rules(dataclasses.replace(config, recompute=None, swap=None), layers)
    chosen = choose_engine(engine, model, bare)
    return AutoTide(model, config, optimizer, chosen, owns_engine=chosen is not engine, group=group, say=say)


class AutoTide:
    """A model on autopilot. Shows the face of a `Tide`; leaving it as a context manager removes it."""

    def __init__(
        self,
        model: nn.Module,
        config: MemoryConfig,
        optimizer: torch.optim.Optimizer | None,
        engine: Engine,
        *,
        owns_engine: bool,
        group: Any = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        assert config.budget is not None
        self.model = model
        self.engine = engine
        self.events: list[PlanEvent] = []
        """What the autopilot decided, and when."""
        self._config = config
        self._council = Council(group, config.budget)
        self._budget_bytes = self._council.budget_bytes
        self._optimizer = optimizer
        self._lease = _Lease(engine) if owns_engine else None
        self._group = group
        self._say = say or _say_nothing
        self._link: Link | None = None
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._expects_gradients = False
        self._shapes = KnownPlans()
        self._current: ShapeClass | None = None
        self._was_smaller = False
        """A step since the last review was smaller than the one that was planned."""
        self._has_collectives = False
        """In the model's own forward pass: then no rank may observe a step alone."""
        self._has_warned = False
        self._tide: Tide | None = None
        self._patch = ForwardPatch(model, self._around)
        self._is_learning = False
        self._times_backward = engine.device_type == "cpu"
        # Of a model that FSDP2 shards, plans are made before its own hooks begin the forward pass: the observed step
        # is then a whole step, forward and backward, between two others.
        self._entry: Any = None
        if fsdp_modules(model):
            self._entry = model.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)
        self._is_removed = False
        self._num_forwards = 0
        self._clock = BackwardClock()
        """Of the planned steps that are to be reviewed."""
        self._rollback = Rollback(
            model,
            optimizer,
            counters=lambda: self._tide._counters if self._tide is not None else None,
            settle=self._settle,
            tighten=self._tighten,
            describe_floor=self._describe_floor,
        )

    # -- what the user sees ----------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan | None:
        """The plan in force; None before the first step."""
        return self._tide.plan if self._tide is not None else None

    @property
    def profile(self) -> Profile | None:
        """What was observed for the shapes in force; None before the first step."""
        return self._shapes[self._current].profile if self._current is not None else None

    @property
    def link(self) -> Link | None:
        """The link as measured, and corrected since; None before the first step."""
        return self._link

    @property
    def tide(self) -> Tide | None:
        """The tide in force; None before the first step."""
        return self._tide

    @property
    def stats(self) -> Stats | None:
        """What happened under the plan in force; None before the first step."""
        return self._tide.stats if self._tide is not None else None

    @property
    def num_corrections(self) -> int:
        """How often a plan was made again because a step was not as predicted."""
        return sum(event.why not in _NOT_CORRECTIONS for event in self.events)

    def reset_stats(self) -> None:
        """Start all totals, and the peak, anew; what they were is compared with the prediction first."""
        if self._tide is not None and self._current is not None:
            self._review(self._current)
            self._tide.reset_stats()

    def step(self, closure: Callable[[], Any], *, is_local: bool = False) -> Any:
        """What `closure()` returns: one micro-batch, which runs again if memory ran out. See `Tide.step`.

        Here the plan is first made again for less; where the solver finds none, the rules of `Tide.step` follow.
        """
        return closure() if self._is_removed else self._rollback.run(closure, is_local=is_local)

    def remove(self) -> None:
        """Restore the model exactly. Idempotent."""
        if self._is_removed:
            return
        self._is_removed = True
        self._leave()
        for shape in self._shapes:
            shape.retire()
        self._lease = None

    def _leave(self) -> None:
        self._patch.undo()
        if self._entry is not None:
            self._entry.remove()

    def __enter__(self) -> AutoTide:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    # -- each forward ----------------------------------------------------------------------------------------------

    def _around(self, forward: Callable, args: tuple, kwargs: dict) -> Any:
        if not is_training():
            return forward(*args, **kwargs)
        if self._entry is None:
            self._prepare(args, kwargs)
        self._num_forwards += 1
        output = self._patch.original(*args, **kwargs)
        is_reviewed = self._current is not None and self._shapes[self._current].num_reviews < _NUM_REVIEWS
        tide = self._tide
        if self._times_backward and is_reviewed and tide is not None:
            self._clock.follow(output, lambda: tide.stats.stall_seconds)
        return output

    def _before(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """The hook of a sharded model."""
        if is_training() and not self._is_learning:
            self._prepare(args, kwargs)

    def _prepare(self, args: tuple, kwargs: dict) -> None:
        """See that a plan for these inputs is in force."""
        if not self._expects_gradients and any(parameter.grad is not None for parameter in self._trained):
            self._expect_gradients()
        shape = shape_class(args, kwargs)
        key = self._serving(shape)
        if key is None and self._may_observe(shape):
            self._learn(shape, args, kwargs)
            return
        if key is None:
            key = self._largest_for(shape)
        if key != self._current:
            self._use(key)
        else:
            self._review(key)
        self._was_smaller |= key != shape

    # -- shapes ----------------------------------------------------------------------------------------------------

    def _serving(self, shape: ShapeClass) -> ShapeClass | None:
        """The known shape class whose plan is the one for these inputs; None if they need one of their own."""
        key = self._shapes.cover(shape)
        return key if key is None or key == shape or self._let_serve_smaller(key) else None

    def _let_serve_smaller(self, key: ShapeClass) -> bool:
        """Plan anew without recipes that hold for one shape only; False where that does not fit."""
        shape = self._shapes[key]
        if shape.serves_smaller:
            return True
        if shape.has_sizes:
            start = time.perf_counter()
            try:
                plan = self._plan_again(shape, is_joint=self._decide("vary"), profile=shape.profile.without_sizes())
            except BudgetError:
                return False
            self._replace(shape, plan)
            self._use(key, why=_VARIES, seconds=time.perf_counter() - start)
        shape.profile = shape.profile.without_sizes()
        shape.serves_smaller = True
        return True

    def _may_observe(self, shape: ShapeClass) -> bool:
        """An observed step runs the model's collectives once more: then all ranks have to be there."""
        if not self._shapes:
            return True
        return self._decide(f"shape {shape.shapes}") or not self._has_collectives

    def _decide(self, what: str) -> bool:
        """Whether all ranks are here, in the same forward pass, to decide the same; else each decides for itself."""
        return self._council.all_here(f"{self._num_forwards} {what}")

    def _largest_for(self, shape: ShapeClass) -> ShapeClass:
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

    def _learn(self, key: ShapeClass, args: tuple, kwargs: dict) -> None:
        """Observe this shape for the first time, and plan for it."""
        start = time.perf_counter()
        why = "new shape" if self._shapes else "first step"
        self._say(f"lowtide: observing one step ({why})")
        self._take_off()
        self._current = None
        self._is_learning = True
        try:
            profile = observe_call(self.model, args, kwargs, self._optimizer)
            if self._link is None:
                self._link = self._measure_link()
            if not self._shapes:
                self._meet_first(key, profile)
            shape = self._learned(profile, is_joint=not self._shapes or self._council.is_together)
        except BaseException as error:
            # A bad batch is no reason to go on without a plan; that no plan fits the first one is.
            if self._shapes or not isinstance(error, BudgetError):
                self._patch = self._patch.again()
            else:
                self._leave()
            raise
        finally:
            self._is_learning = False
        self._shapes.add(key, shape)
        self._use(key, why=why, seconds=time.perf_counter() - start)

    def _meet_first(self, key: ShapeClass, profile: Profile) -> None:
        """The first step is the one that all ranks take together, whatever they feed the model."""
        answers = gather((key.shapes, profile.num_collectives), self._group)
        self._has_collectives = any(num for _, num in answers)
        if len({shapes for shapes, _ in answers}) > 1:
            self._council.part()

    def _learned(self, profile: Profile, *, is_joint: bool) -> Known:
        """A plan for what was just observed; one that serves smaller shapes too, if others do already."""
        if any(known.serves_smaller for known in self._shapes):
            free = profile.without_sizes()
            with contextlib.suppress(BudgetError):
                plan = self._agreed_plan(free, self._budget_bytes, is_joint=is_joint)
                return Known(profile=free, plan=plan, serves_smaller=True)
        return Known(profile=profile, plan=self._agreed_plan(profile, self._budget_bytes, is_joint=is_joint))

    def _expect_gradients(self) -> None:
        """Forward passes find gradients from now on (micro-batches accumulate): every plan is made again for that."""
        start = time.perf_counter()
        self._expects_gradients = True
        shapes = list(self._shapes)
        if self._current is not None:
            self._shapes[self._current].num_reviews += 1  # its plan changes without one
        try:
            is_joint = bool(shapes) and self._decide(_ACCUMULATES)
            plans = [self._plan_again(shape, is_joint=is_joint) for shape in shapes]
        except BudgetError:
            self._expects_gradients = False  # so that the next one is refused as well
            raise
        for shape, plan in zip(shapes, plans, strict=True):
            self._replace(shape, plan)
        if self._current is not None:
            self._use(self._current, why=_ACCUMULATES, seconds=time.perf_counter() - start)

    def _measure_link(self) -> Link:
        device = next(parameter.device for parameter in self.model.parameters())
        place = str(self._config.disk_path or "")
        return measure_link(self.engine, device, place=place, cache=cache_path())

    def _make_plan(self, profile: Profile, budget_bytes: int) -> Plan:
        """This rank's own. Raises BudgetError where none fits."""
        assert self._link is not None
        return plan_profile(
            profile, self._config, link=self._link, budget_bytes=budget_bytes, has_gradients=self._expects_gradients
        )

    def _agreed_plan(self, profile: Profile, budget_bytes: int, *, is_joint: bool) -> Plan:
        """The plan of all ranks if `is_joint`: all of them are making this call. BudgetErrors are shared as well."""
        if not is_joint:
            return self._make_plan(profile, budget_bytes)
        error: BudgetError | None = None
        plan: Plan | None = None
        try:
            plan = self._make_plan(profile, budget_bytes)
        except BudgetError as found:
            error = found
        common = agreed(plan, error, self._group)
        # With other shapes the first rank's plan is not one for this rank.
        return common if plan is None or self._council.is_together else plan

    def _plan_again(self, shape: Known, *, is_joint: bool, profile: Profile | None = None) -> Plan:
        budget_bytes = self._budget_bytes - shape.unforeseen_bytes
        return self._agreed_plan(profile or shape.profile, budget_bytes, is_joint=is_joint)

    def _use(self, key: ShapeClass, *, why: str = "", seconds: float = 0.0) -> None:
        """Put the plan of a shape class in force; `why` it is a new one."""
        self._take_off()
        shape = self._shapes.use(key)
        self._current = key
        if shape.tide is None:
            # Ranks have agreed already, or cannot.
            shape.tide = apply(self.model, shape.plan, optimizer=self._optimizer, engine=self.engine, group=ALONE)
            shape.tide.outlive(self._lease)
            shape.tide.set_limit(self._guard_limit(shape.plan))
        else:
            shape.tide.resume()
            shape.tide.reset_stats()
        self._tide = shape.tide
        self._was_smaller = False
        self._clock.seconds.clear()
        self._patch = self._patch.again()
        if why:
            self._tell(shape, why, seconds)

    def _tell(self, shape: Known, why: str, seconds: float) -> None:
        event = PlanEvent(
            forward=self._num_forwards,
            why=why,
            budget_bytes=self._budget_bytes - shape.unforeseen_bytes,
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

    def _guard_limit(self, plan: Plan) -> int | None:
        """What live bytes may reach in forward before the guard spills: the plan's own, and what it leaves free.

        Where an allocator counts, all bytes count; else only state and activations do, so less is the limit.
        """
        predicted = plan.predicted
        assert predicted is not None
        counts_all = self.engine.device_peak_bytes() is not None
        in_forward = predicted.forward_peak_bytes if counts_all else predicted.forward_held_bytes
        high = in_forward + max(0, self._budget_bytes - predicted.peak_bytes)
        return high + high // _GUARD_HEADROOM + 1

    def _replace(self, shape: Known, plan: Plan) -> None:
        """Another plan for these shapes, from the next `_use` on."""
        if shape.tide is self._tide:
            self._take_off()
        shape.retire()
        shape.plan = plan

    def _take_off(self) -> None:
        """Bring the model back to its own forward: patches come off in the reverse order."""
        self._patch.undo()
        if self._tide is not None:
            self._tide.suspend()
            self._tide = None

    # -- compare and correct ---------------------------------------------------------------------------------------

    def _review(self, key: ShapeClass) -> None:
        """A planned step is over: was it as predicted?"""
        shape, tide = self._shapes[key], self._tide
        assert tide is not None
        stats = tide.stats
        if shape.num_reviews >= _NUM_REVIEWS or stats.num_forwards < 1:
            return
        found = self._correction(shape, stats)
        shape.num_reviews += 1
        self._was_smaller = False
        tide.reset_stats()
        self._clock.seconds.clear()
        if self._decide("review"):
            if not any_rank(found is not None, self._group):
                return
        elif found is None:
            return
        start = time.perf_counter()
        if found is not None:
            shape.unforeseen_bytes += found.unforeseen_bytes
            shape.profile = found.profile or shape.profile
            self._link = found.link or self._link
        self._replace(shape, self._plan_again(shape, is_joint=self._council.is_together))
        why = found.why if found is not None else "another rank corrected its plan"
        self._use(key, why=why, seconds=time.perf_counter() - start)

    def _correction(self, shape: Known, stats: Stats) -> Correction | None:
        predicted, link = shape.plan.predicted, self._link
        assert predicted is not None
        assert link is not None
        found = None
        if self.engine.device_peak_bytes() is not None:
            found = correct_memory(predicted, stats, self._budget_bytes, only_more=self._was_smaller)
        if found is not None or self._was_smaller:
            return found
        return correct_times(shape.profile, predicted, stats, self._clock.seconds, link)

    def tighten(self) -> None:
        """Plan for less: the budget was kept on paper, but the device ran out of memory."""
        if self._current is None:
            return
        shape = self._shapes[self._current]
        start = time.perf_counter()
        target = int((self._budget_bytes - shape.unforeseen_bytes) * _TIGHTER)
        shape.unforeseen_bytes = self._budget_bytes - target
        self._replace(shape, self._make_plan(shape.profile, target))  # no other rank need be out of memory
        self._use(self._current, why="out of memory", seconds=time.perf_counter() - start)

    def _tighten(self, error: BaseException) -> str | None:
        """After an out-of-memory error, between two attempts: what was done about it, or None."""
        if self._tide is None or self._current is None:
            # Observing failed, where nothing is kept on the device: no plan would help.
            self._patch.undo()
            self._patch = self._patch.again()
            return None
        try:
            self.tighten()
        except BudgetError:
            return self._tide._tighten(error)
        return f"the plan is made for {format_bytes(self.events[-1].budget_bytes)} now"

    def _settle(self) -> None:
        if self._tide is not None:
            self._tide.settle()

    def _describe_floor(self) -> str:
        return self._tide._describe_floor() if self._tide is not None else "It was the step that is observed."


class _Lease:
    """Closes an engine when nobody holds it any more: the autopilot, and every graph made under one of its plans."""

    def __init__(self, engine: Engine) -> None:
        weakref.finalize(self, engine.close)


def _say_nothing(line: str) -> None:
    pass


def say_to_stderr(line: str) -> None:
    """For programs that want to hear what the autopilot does."""
    print(line, file=sys.stderr, flush=True)  # noqa: T201
