"""The autopilot: observe, plan, apply, compare, correct.

What: `optimize` puts one wrapper on the model. The first forward pass with gradients is observed (one extra step whose
saved activations are parked outside the device, and which leaves no trace), planned for the budget, and then carried
out under the plan, as are all that follow. After each of the first two planned steps the measured stalls and, on an
accelerator, the measured peak are compared with the predicted ones; where they are off by more than 2 %, the model of
the memory, of compute or of the link is corrected by the difference and the plan is made again: from start to stable
in three planned steps.

Which model is wrong when stalls are seen? On the host backward passes are timed until then. If compute took less than
the profile says by more than a tenth, there was less to hide copies behind: the profile's times are scaled. Else the
link is slower than it was measured. And 2 % is of the time that the step really took: on a busy machine stalls take
longer, as everything does. Scaled one after the other, never both for one measurement: a stall has one cause
here, and the next step shows what is left.

The guard (guard.py) is set with each plan: to what the plan itself holds at most in forward, and what it leaves of the
budget. A step as planned never touches it; one that saves more than planned is spilled before the budget is passed.

Gradients: once a forward pass finds some (micro-batches accumulate), plans count them from the start of a pass on.
Shapes: a plan is made for each shape class of the inputs and kept; going back to a known one costs a recorded forward.
Ranks: all use the smallest budget; the first one's plan is the plan of all, and `apply` compares hashes.

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
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from lowtide.catalog.layers import find_layers, named_layers
from lowtide.catalog.links import cache_path, measure_link
from lowtide.catalog.observe import observe
from lowtide.catalog.sharded import fsdp_modules, refuse_other_shards
from lowtide.catalog.site import Profile
from lowtide.config.native import MemoryConfig
from lowtide.errors import BudgetError, ConfigError
from lowtide.planner.autoplan import plan_profile
from lowtide.planner.plan import Plan
from lowtide.runtime.agree import agreed, any_rank, smallest
from lowtide.runtime.engines.base import Engine
from lowtide.runtime.engines.choose import choose_engine
from lowtide.runtime.patch import ForwardPatch, patched_module
from lowtide.runtime.planning import merged_config
from lowtide.runtime.rollback import Rollback
from lowtide.runtime.stats import Stats
from lowtide.runtime.tide import Tide, apply
from lowtide.timeline.step import Link
from lowtide.units import format_bytes, format_seconds

_TOLERANCE = 0.02
_COMPUTE_TOLERANCE = 0.1
_NUM_REVIEWS = 2
# The guard begins to spill a fiftieth below its limit (guard.py).
_GUARD_HEADROOM = 49
_MAX_SHAPES = 16
_TIGHTER = 0.9
_ACCUMULATES = "gradients stay"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanEvent:
    """One time that the autopilot made, corrected or changed its plan."""

    forward: int
    """How many planned forward passes had run."""
    why: str
    """'first step', 'new shape', 'known shape', 'gradients stay', 'peak: ...', 'compute: ...', 'stalls: ...',
    'out of memory'."""
    budget_bytes: int
    """What the solver was given: the budget, less what measurements showed beyond its prediction."""
    digest: str
    seconds: float
    """Time that observing and planning took."""


@dataclass(slots=True)
class _Shape:
    """What is known about one shape class."""

    profile: Profile
    plan: Plan
    num_reviews: int = 0
    """How many planned steps were compared with their prediction."""
    unforeseen_bytes: int = 0


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
        self._budget_bytes = smallest(config.budget, group)
        self._optimizer = optimizer
        self._lease = _Lease(engine) if owns_engine else None
        self._group = group
        self._say = say or _say_nothing
        self._link: Link | None = None
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._expects_gradients = False
        self._shapes: OrderedDict[tuple, _Shape] = OrderedDict()
        self._current: tuple | None = None
        self._tide: Tide | None = None
        self._patch = ForwardPatch(model, self._around)
        self._is_learning = False
        # Of a model that FSDP2 shards, plans are made before its own hooks begin the forward pass: the observed step
        # is then a whole step, forward and backward, between two others.
        self._entry: Any = None
        if fsdp_modules(model):
            self._entry = model.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)
        self._is_removed = False
        self._num_forwards = 0
        self._backward_seconds: list[float] = []
        """Of the planned steps that are to be reviewed: backward passes, without stalls."""
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
        return sum(event.why not in ("first step", "new shape", "known shape", _ACCUMULATES) for event in self.events)

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
        if self._tide is not None:
            self._tide.remove()
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
        if not _is_training():
            return forward(*args, **kwargs)
        if self._entry is None:
            self._prepare(args, kwargs)
        self._num_forwards += 1
        output = self._patch.original(*args, **kwargs)
        is_reviewed = self._current is not None and self._shapes[self._current].num_reviews < _NUM_REVIEWS
        if self.engine.device_type == "cpu" and is_reviewed:
            self._time_backward(output)
        return output

    def _before(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """The hook of a sharded model."""
        if _is_training() and not self._is_learning:
            self._prepare(args, kwargs)

    def _prepare(self, args: tuple, kwargs: dict) -> None:
        """See that a plan for these inputs is in force."""
        key = _shape_key(args, kwargs)
        if not self._expects_gradients and any(parameter.grad is not None for parameter in self._trained):
            self._expect_gradients()
        if key not in self._shapes:
            self._learn(key, args, kwargs)
        elif key != self._current:
            self._use(key)
        else:
            self._review(key)

    def _time_backward(self, output: Any) -> None:
        """Put the seconds of the backward pass from `output` on record, without stalls."""
        tide = self._tide
        root = next((leaf.grad_fn for leaf in tree_leaves(_loss_or_all(output)) if _has_graph(leaf)), None)
        if root is None or tide is None:
            return
        seconds: list[float] = []

        def clock() -> float:
            return time.perf_counter() - tide.stats.stall_seconds

        def end() -> None:
            self._backward_seconds.append(clock() - seconds[-1])

        def begin(gradients: Any) -> None:
            if not seconds:  # a graph that is retained has other backward passes
                seconds.append(clock())
                torch.autograd.Variable._execution_engine.queue_callback(end)

        root.register_prehook(begin)

    def _learn(self, key: tuple, args: tuple, kwargs: dict) -> None:
        """Observe this shape for the first time, and plan for it."""
        start = time.perf_counter()
        why = "new shape" if self._shapes else "first step"
        self._say(f"lowtide: observing one step ({why})")
        self._take_off()
        self._current = None
        self._is_learning = True
        try:
            with _autocast_cache_left_alone():
                profile = observe(
                    self.model,
                    lambda: self.model(*args, **kwargs),
                    loss=_loss_or_all,
                    needs_scalar=False,
                    optimizer=self._optimizer,
                )
            if self._link is None:
                self._link = self._measure_link()
            plan = self._make_plan(profile, self._budget_bytes)
        except BaseException as error:
            # A bad batch is no reason to go on without a plan; that no plan fits the first one is.
            if self._shapes or not isinstance(error, BudgetError):
                self._patch = self._patch.again()
            else:
                self._leave()
            raise
        finally:
            self._is_learning = False
        self._shapes[key] = _Shape(profile=profile, plan=plan)
        if len(self._shapes) > _MAX_SHAPES:
            self._shapes.popitem(last=False)
        self._use(key, why=why, seconds=time.perf_counter() - start)

    def _expect_gradients(self) -> None:
        """Forward passes find gradients from now on (micro-batches accumulate): every plan is made again for that."""
        start = time.perf_counter()
        self._expects_gradients = True
        shapes = list(self._shapes.values())
        if self._current is not None:
            self._shapes[self._current].num_reviews += 1  # its plan changes without one
        try:
            plans = [self._make_plan(s.profile, self._budget_bytes - s.unforeseen_bytes) for s in shapes]
        except BudgetError:
            self._expects_gradients = False  # so that the next one is refused as well
            raise
        for shape, plan in zip(shapes, plans, strict=True):
            shape.plan = plan
        if self._current is not None:
            self._use(self._current, why=_ACCUMULATES, seconds=time.perf_counter() - start)

    def _measure_link(self) -> Link:
        device = next(parameter.device for parameter in self.model.parameters())
        place = str(self._config.disk_path or "")
        return measure_link(self.engine, device, place=place, cache=cache_path())

    def _make_plan(self, profile: Profile, budget_bytes: int) -> Plan:
        assert self._link is not None
        error: BudgetError | None = None
        plan: Plan | None = None
        try:
            plan = plan_profile(
                profile,
                self._config,
                link=self._link,
                budget_bytes=budget_bytes,
                has_gradients=self._expects_gradients,
            )
        except BudgetError as found:
            error = found
        return agreed(plan, error, self._group)

    def _use(self, key: tuple, *, why: str = "known shape", seconds: float = 0.0) -> None:
        """Put the plan of a shape class in force."""
        self._take_off()
        shape = self._shapes[key]
        self._shapes.move_to_end(key)
        self._current = key
        self._tide = apply(self.model, shape.plan, optimizer=self._optimizer, engine=self.engine)
        self._tide.outlive(self._lease)
        self._tide.set_limit(self._guard_limit(shape.plan))
        self._backward_seconds.clear()
        self._patch = self._patch.again()
        budget = self._budget_bytes - shape.unforeseen_bytes
        event = PlanEvent(
            forward=self._num_forwards,
            why=why,
            budget_bytes=budget,
            digest=shape.plan.digest(),
            seconds=seconds,
        )
        self.events.append(event)
        predicted = shape.plan.predicted
        if predicted is not None and why != "known shape":
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

    def _take_off(self) -> None:
        """Bring the model back to its own forward: patches come off in the reverse order."""
        self._patch.undo()
        if self._tide is not None:
            self._tide.remove()
            self._tide = None

    # -- compare and correct ---------------------------------------------------------------------------------------

    def _review(self, key: tuple) -> None:
        """A planned step is over: was it as predicted?"""
        shape, tide = self._shapes[key], self._tide
        assert tide is not None
        stats = tide.stats
        if shape.num_reviews >= _NUM_REVIEWS or stats.num_forwards < 1:
            return
        shape.num_reviews += 1
        why = self._correct_memory(shape, stats) or self._correct_times(shape, stats)
        tide.reset_stats()
        self._backward_seconds.clear()
        if not any_rank(bool(why), self._group):
            return
        start = time.perf_counter()
        shape.plan = self._make_plan(shape.profile, self._budget_bytes - shape.unforeseen_bytes)
        self._use(key, why=why or "another rank corrected its plan", seconds=time.perf_counter() - start)

    def _correct_memory(self, shape: _Shape, stats: Stats) -> str:
        """Bytes that the profile did not foresee. Only where the device itself keeps count."""
        predicted = shape.plan.predicted
        assert predicted is not None
        if self.engine.device_peak_bytes() is None:
            return ""
        excess = stats.peak_device_bytes - predicted.peak_bytes
        if abs(excess) <= _TOLERANCE * predicted.peak_bytes and stats.peak_device_bytes <= self._budget_bytes:
            return ""
        shape.unforeseen_bytes += excess
        return f"peak: {format_bytes(stats.peak_device_bytes)}, not {format_bytes(predicted.peak_bytes)}"

    def _correct_times(self, shape: _Shape, stats: Stats) -> str:
        """More stalls than predicted: compute was faster than the profile says, or the link slower than measured."""
        predicted, profile = shape.plan.predicted, shape.profile
        assert predicted is not None
        stall = stats.stall_seconds / stats.num_forwards
        excess = stall - predicted.stall_seconds
        expected = sum(profile.op_seconds[profile.num_forward_ops :]) + predicted.recompute_seconds
        # Stalls of an engine with a clock of its own leave less than nothing: then nothing is known of compute.
        measured = min(self._backward_seconds, default=0.0)
        is_known = measured > 0.0 and expected > 0.0
        share = measured / expected if is_known else 1.0
        # Of the step as it was: on a machine that is busy with other work, everything takes longer, stalls too.
        if excess <= _TOLERANCE * predicted.step_seconds * max(1.0, share) or not stats.swapped_bytes:
            return ""
        if share < 1.0 - _COMPUTE_TOLERANCE:
            shape.profile = profile.with_times(share)
            return f"compute: backward in {format_seconds(measured)}, not {format_seconds(expected)}"
        return self._correct_link(stats, stall, excess)

    def _correct_link(self, stats: Stats, stall: float, excess: float) -> str:
        assert self._link is not None
        out_seconds = stats.swapped_bytes / stats.num_forwards / self._link.out_bytes_per_second
        in_seconds = stats.copied_in_bytes / stats.num_forwards / self._link.in_bytes_per_second
        slower = (out_seconds + in_seconds) / (out_seconds + in_seconds + excess)
        self._link = dataclasses.replace(
            self._link,
            out_bytes_per_second=self._link.out_bytes_per_second * slower,
            in_bytes_per_second=self._link.in_bytes_per_second * slower,
        )
        return f"stalls: {format_seconds(stall)} a step, not {format_seconds(stall - excess)}"

    def tighten(self) -> None:
        """Plan for less: the budget was kept on paper, but the device ran out of memory."""
        if self._current is None:
            return
        shape = self._shapes[self._current]
        start = time.perf_counter()
        target = int((self._budget_bytes - shape.unforeseen_bytes) * _TIGHTER)
        shape.unforeseen_bytes = self._budget_bytes - target
        shape.plan = self._make_plan(shape.profile, target)
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


def _is_training() -> bool:
    """A forward pass with gradients, and not one that is run again in a backward pass."""
    return torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1


@contextlib.contextmanager
def _autocast_cache_left_alone() -> Iterator[None]:
    """Casts of weights that the observed step made would serve the real one, which then would not make its own."""
    is_enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(is_enabled)


def _loss_or_all(output: Any) -> Any:
    """Where the backward starts: the loss that the model gives, else everything it returns."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    is_loss = isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.requires_grad
    return loss if is_loss else output


def _has_graph(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None


class _Lease:
    """Closes an engine when nobody holds it any more: the autopilot, and every graph made under one of its plans."""

    def __init__(self, engine: Engine) -> None:
        weakref.finalize(self, engine.close)


def _say_nothing(line: str) -> None:
    pass


def say_to_stderr(line: str) -> None:
    """For programs that want to hear what the autopilot does."""
    print(line, file=sys.stderr, flush=True)  # noqa: T201


def _shape_key(args: tuple, kwargs: dict) -> tuple:
    leaves = tree_leaves((args, kwargs))
    shapes = tuple((tuple(leaf.shape), leaf.dtype) for leaf in leaves if isinstance(leaf, torch.Tensor))
    return (*shapes, torch.is_autocast_enabled("cuda"), torch.is_autocast_enabled("cpu"))
