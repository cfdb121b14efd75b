"""The handle of a model whose plans come from observed steps: a tide for each shape of its inputs, one in force.

What: `Tides` puts one wrapper on a model, and asks its `PlanSource` before each forward pass that trains. The source
sees to it that the right tide is in force: one that it has (`use`), or one for a step that is observed first
(`observe`). There are two sources: a budget (runtime/autopilot) and a file of MindSpore Transformers
(mindformers/follow.py). A plan by rules needs none of this (apply.py).

Where it stands is a `Phase`, which follows from four facts: whether it is over, whether a step is being observed,
whether a tide is in force, and whether its source compares that with its prediction.

    WAITING ---> OBSERVING ---> COMPARED ---> SETTLED ---> REMOVED  (REMOVED comes after any other phase)
       ^             |     <------- a shape without a plan ---+
       +-------------+---> REFUSED                 (COMPARED and SETTLED follow each other where plans are made again)

What goes wrong in an observed step is raised, and the next forward pass tries again. A batch that the model itself
refuses leaves what it leaves without lowtide.

- The backward pass of the observed step failed (a hook of the user's, a number that is none): the loop is to hear of it
  from its own backward pass, so this step runs without a plan. If its backward pass goes well, the fault is in being
  observed, and the next observed step that fails is an error.
- Ctrl-C ended the observed step: what it had drawn and written was put back. The next forward pass says so.
- No plan fits: a `BudgetError` leaves the model as it was, so that its caller can take another budget, or none. But it
  is a `ValueError`, and a loop that leaves bad batches out (`except ValueError`) would go on without a plan, and not
  know. So the next forward pass that trains without a plan warns once (`Reminder`).

Why it is safe: patches come off in the reverse order in which they went on. What goes wrong while a plan is put on (a
full disk) is raised, and nothing but the wrapper is left on the model, so that the next forward pass tries again.
Threads: if several threads train one model, they get a plan one after another; a thread that arrives while another one
observes or plans waits until there is a plan.

Cost: the observed step (two to ten times a plain one) for each shape, then nothing per operator.
Not covered: what the caller does around the model's forward (a loss of one's own) is not observed. If a backward pass
of another thread runs while a new shape is observed, its gradients may be lost. Under several ranks, or where FSDP2
shards the model, a model that fails in the observed step: the error is raised, and what that forward drew or wrote is
restored; a loop that calls `model.forward` itself after a `BudgetError`, where no hook runs.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from lowtide.core.log import LOG
from lowtide.core.plan import Plan
from lowtide.core.profile import Profile
from lowtide.engines.base import Engine
from lowtide.errors import BudgetError, ConfigError
from lowtide.profiling.observe_call import ObservedOutput, is_training, loss_or_all, observe_call
from lowtide.runtime.saved.stats import Stats
from lowtide.runtime.session.apply import apply
from lowtide.runtime.session.forward_patch import UnobservedForwards, handle_of, patched_part
from lowtide.runtime.session.handle import Handle
from lowtide.runtime.session.optimizer_state import PlacedState
from lowtide.runtime.session.tide import Tide
from lowtide.runtime.session.wrap import refuse_capture
from lowtide.tensors.compiled import ForwardPatch
from lowtide.tensors.fsdp import fsdp_modules
from lowtide.tensors.kinds import tensors_in
from lowtide.tensors.out_of_memory import is_out_of_memory
from lowtide.tensors.private import num_dispatch_modes, queue_callback
from lowtide.tensors.ranks import ALONE, has_company
from lowtide.units import format_bytes, format_seconds

_Made = TypeVar("_Made")

FIRST_STEP = "first step"
NEW_SHAPE = "new shape"


class Phase(Enum):
    """Where a handle stands."""

    WAITING = "waiting"
    """No plan is in force; the next forward pass sees to one. Before the first step, and after one that failed."""
    OBSERVING = "observing"
    """A step is being observed and planned for, inside of a forward pass."""
    COMPARED = "compared"
    """A plan is in force, and what its steps take is compared with what was predicted."""
    SETTLED = "settled"
    """A plan is in force, and its steps are not compared, or not any more."""
    REFUSED = "refused"
    """No plan fits the first step: the model is as it was."""
    REMOVED = "removed"
    """The user is done: the model is as it was, for good."""


IN_FORCE = frozenset({Phase.COMPARED, Phase.SETTLED})


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanEvent:
    """One time that a plan was made, corrected or changed."""

    forward: int
    """How many planned forward passes had run."""
    why: str
    """'first step', 'new shape', 'the model changed: ...', 'several forward passes before a backward pass', 'an
    optimizer was found', 'gradients stay', 'recipes do not hold', 'layers cannot run again',
    'peak: ...', 'loop: ...', 'compute: ...', 'stalls: ...', 'out of memory'."""
    budget_bytes: int | None
    """What the solver was given: the budget, less what measurements showed beyond its prediction; None without one."""
    digest: str
    seconds: float
    """Time that observing and planning took."""
    is_correction: bool = False
    """Whether the plan was made again because a step was not as predicted."""


class PlanSource(Protocol):
    """Where the plans of a `Tides` come from. Called under the lock of the handle, where no line says otherwise."""

    @property
    def budget_bytes(self) -> int | None:
        """What this rank may have on the device; None where that is no matter."""

    @property
    def is_compared(self) -> bool:
        """Whether the steps of the tide in force are compared with its plan's prediction."""

    @property
    def profile(self) -> Profile | None:
        """What was observed for the shapes in force."""

    def prepare(self, args: tuple, kwargs: dict) -> None:
        """A forward pass with these inputs comes: see that the tide for it is in force."""

    def follow(self, output: Any, tide: Tide) -> None:
        """A forward pass under `tide` gave `output`. Without the lock."""

    def restart(self, *, was_audited: bool) -> None:
        """All totals begin anew; `was_audited`: because an audit is over, whose steps say nothing about time."""

    def tighten(self, error: BaseException, num_tried: int) -> str | None:
        """A micro-batch under the tide in force ran out of memory, and will run again: take a plan that needs less.
        Returns how, or None where there is none. Without the lock."""

    def close(self) -> None:
        """Remove all tides, and undo what the source itself has changed about the model. Once."""


# -- the observed step -------------------------------------------------------------------------------------------------


class StepObserver:
    """Observes steps of one model."""

    def __init__(self, model: nn.Module, placed: PlacedState, group: Any, *, is_inside: bool) -> None:
        """`is_inside`: steps are observed when the model's forward is called, after its own hooks have run."""
        self._model = model
        self._placed = placed
        self._group = group
        self.is_inside = is_inside
        self.is_under_way = False
        """A step is being observed and planned for at this moment."""
        self.observed: ObservedOutput | None = None
        """Of the observed step: the first planned forward pass takes it, and shows it what comes out."""
        self._interrupted = ""
        """By what the last observed step was ended, if that was no `Exception` and the loop was not told yet."""
        self._has_ended: bool | None = None
        """Whether the backward pass of a step without a plan has ended, whose observed one failed. None: no such step.
        """

    def observe(
        self,
        args: tuple,
        kwargs: dict,
        forward: Callable[..., Any],
        make: Callable[[Profile], _Made],
        *,
        is_over: Callable[[], bool],
    ) -> _Made | None:
        """What `make` gives for the profile of the step that `forward(*args, **kwargs)` begins, which is the model's
        own. None where this step is to run without a plan; and where `is_over`: the user removed the plan meanwhile.

        Raises what the model raises, and what `make` does.
        """
        self._placed.settle()  # what is written to parameters in an observed step is put back
        observed = self.observed = ObservedOutput(type(self._model).__name__)
        profile = None
        self.is_under_way = True
        try:
            how: Any = {"is_inside": self.is_inside, "observed": observed}
            profile = observe_call(self._model, args, kwargs, self._placed.optimizer, **how)
            made = make(profile)
        except BaseException as error:
            self.is_under_way, self.observed = False, None
            came_from_forward, observed.error = observed.error is error, None  # else they would hold each other
            if is_over():
                raise
            if not isinstance(error, Exception):
                self._interrupted = type(error).__name__
            if profile is None and self._is_the_models(error):
                if came_from_forward:
                    _fail_for_real(forward, args, kwargs)
                elif observed.is_over and not self._has_ended:
                    self._go_on_without(error)
                    return None
            raise
        self.is_under_way = False
        self._has_ended = None
        if is_over():
            self.observed = None
            return None
        return made

    def _is_the_models(self, error: BaseException) -> bool:
        """Whether the model raised it, for reasons of its own; and no other rank waits meanwhile."""
        is_ours = isinstance(error, ConfigError) or str(error).startswith("lowtide:")
        if is_ours or not isinstance(error, Exception) or is_out_of_memory(error):
            return False
        return self.is_inside and not has_company(self._group)

    def _go_on_without(self, error: BaseException) -> None:
        self._has_ended = False
        first = str(error).partition("\n")[0]
        warnings.warn(
            f"lowtide: the backward pass of {type(self._model).__name__} failed while it was observed, with "
            f"{type(error).__name__}: {first}; so this step runs without a plan, and the next one is observed again.",
            stacklevel=2,
        )

    def follow_without_plan(self, output: Any) -> None:
        """The forward pass of a step without a plan gave `output`."""
        if self._has_ended is None:
            return
        leaves = tensors_in(loss_or_all(output))
        root = next((leaf.grad_fn for leaf in leaves if leaf.grad_fn is not None), None)
        if root is not None:
            root.register_prehook(lambda gradients: queue_callback(self._note_end))

    def _note_end(self) -> None:
        self._has_ended = True

    def tell_interrupt(self) -> None:
        """If Ctrl-C ended the last observed step, the loop has caught that and trains on: warn once."""
        what, self._interrupted = self._interrupted, ""
        if what:
            warnings.warn(
                f"lowtide: {what} ended a forward pass of {type(self._model).__name__} while it was observed. What it "
                "had drawn and written by then was put back: training goes on as if it had not begun, where without "
                "lowtide a part of it would have stayed.",
                stacklevel=2,
            )


def _fail_for_real(forward: Callable[..., Any], args: tuple, kwargs: dict) -> None:
    """The model raised an error while it was observed, and nothing of that forward is left. A loop may leave such a
    batch out and go on: then random numbers were drawn and statistics moved until the error. So the forward runs once
    more, without a plan, and raises the error itself. Returns where it does not."""
    try:
        forward(*args, **kwargs)
    except Exception as error:
        if is_out_of_memory(error):
            return
        raise error from None


class Reminder:
    """A hook on the model that warns in its next forward pass that trains without a plan, and goes."""

    def __init__(self, model: nn.Module, refusal: BudgetError) -> None:
        # Not the error: it refers to its frames, and those to all that is above them.
        self._why = str(refusal).partition("\n")[0]
        self._hook = model.register_forward_pre_hook(self._before)

    def remove(self) -> None:
        self._hook.remove()

    def _before(self, model: nn.Module, args: Any) -> None:
        if not is_training() or num_dispatch_modes():  # or the step is one that `observe` or `plan` looks at
            return
        self.remove()
        if handle_of(model) is None:
            warnings.warn(
                f"lowtide: {type(model).__name__} trains without a plan from here on, since the BudgetError of a "
                f"forward pass before was caught ({self._why}). Call remove() on the handle if that is what you want.",
                stacklevel=2,
            )


# -- the handle --------------------------------------------------------------------------------------------------------


class Tides(Handle):
    """A model under plans that come from a source."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        engine: Engine,
        source: Callable[[Tides], Any],
        *,
        call: str,
        owns_engine: bool,
        placed: PlacedState,
        group: Any = None,
    ) -> None:
        """`source` makes the plan source for this handle, and may be collective in `group`. `call`: the function that
        the user called, for messages."""
        super().__init__(model, optimizer, engine, placed)
        self.placed: PlacedState = placed
        self.tide: Tide | None = None
        """The tide in force; None before the first step. After `remove` the last one: its totals can still be read."""
        self.events: list[PlanEvent] = []
        """What was decided, and when."""
        self.num_forwards = 0
        """How many planned forward passes have begun."""
        self.lock = threading.RLock()
        """Of the thread that observes, plans or changes the plan."""
        self.source = source(self)
        self._call = call
        self._end: Phase | None = None
        """REFUSED or REMOVED, once it is over."""
        # Of a model that FSDP2 shards, plans are made before its own hooks begin the forward pass: the observed step
        # is then a whole step, forward and backward, between two others.
        is_sharded = bool(fsdp_modules(model))
        self._hooks: list[Any] = (
            [model.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)] if is_sharded else []
        )
        self._observer = StepObserver(model, placed, group, is_inside=not is_sharded)
        self._lease = {engine}
        """Held by this handle, and by every graph made under one of its plans."""
        if owns_engine:
            weakref.finalize(self._lease, engine.close)
        self._patch = ForwardPatch(model, self._around, self)
        self._unobserved = UnobservedForwards(model, call)
        self._inside = threading.local()
        """Of each thread: whether it is in a forward pass of the model, which may call itself."""

    # -- what the user sees ----------------------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        """Where it stands: waiting, observing, a plan in force, refused, removed."""
        if self._end is not None:
            return self._end
        if self._observer.is_under_way:
            return Phase.OBSERVING
        if self.tide is None:
            return Phase.WAITING
        return Phase.COMPARED if self.source.is_compared else Phase.SETTLED

    @property
    def profile(self) -> Profile | None:
        """What was observed for the shapes in force; None before the first step."""
        return self.source.profile

    def _in_force(self) -> Tide | None:
        return self.tide

    @property
    def _is_over(self) -> bool:
        return self._end is not None

    @property
    def stats(self) -> Stats:
        """What happened under the plan in force; zeros before the first step."""
        return self.tide.stats if self.tide is not None else Stats.nothing()

    @property
    def num_corrections(self) -> int:
        """How often a plan was made again because a step was not as predicted."""
        return sum(event.is_correction for event in self.events)

    def reset_stats(self) -> None:
        """Start all totals, and the peak, anew; what they were is compared with the prediction first."""
        with self.lock:
            if self._end is None and self.tide is not None:
                self.source.restart(was_audited=False)
            elif self.tide is not None:
                self.tide.reset_stats()

    def _note_audit(self, peak_bytes: int | None) -> None:
        with self.lock:
            super()._note_audit(peak_bytes)
            if self.phase is Phase.COMPARED:
                self.source.restart(was_audited=True)  # the next comparison is of steps without an audit

    def remove(self) -> None:
        """Restore the model exactly, and bring the optimizer's state back. Idempotent.

        Where there is no memory for that state, the model is restored all the same; call it again.
        """
        is_first = self._end is not Phase.REMOVED
        self._end = Phase.REMOVED
        self._leave()
        try:
            if is_first:
                self.source.close()
                self._lease = set()
        finally:
            self.placed.remove()

    def __repr__(self) -> str:
        budget = "" if self.source.budget_bytes is None else f", budget {format_bytes(self.source.budget_bytes)}"
        plan = "" if self.tide is None else f", plan {self.tide.plan.digest()}"
        return f"<lowtide.Tides {self.phase.value}: engine '{self.engine.name}'{budget}{plan}>"

    # -- each forward pass -----------------------------------------------------------------------------------------

    def _around(self, forward: Callable, args: tuple, kwargs: dict) -> Any:
        if not is_training():
            self._unobserved.step_aside()
            return forward(*args, **kwargs)
        if getattr(self._inside, "is_on", False):  # a model that calls itself: a part of the pass that is under way
            return self._patch.original(*args, **kwargs)
        refuse_capture(self.model, self.engine)
        with self.lock:
            if self._is_plain:
                return forward(*args, **kwargs)
            self._unobserved.end()
            if self._observer.is_inside:
                self._prepare(args, kwargs)
            self.num_forwards += 1
            # Taken first: where this forward fails, the next one may have other inputs.
            observed, self._observer.observed = self._observer.observed, None
            planned, tide = self._patch.original, None if self._is_plain else self.tide
        self._inside.is_on = True
        try:
            with contextlib.nullcontext() if observed is None else observed.watching(self.model):
                output = planned(*args, **kwargs)
        except Exception as error:
            if is_out_of_memory(error) and not self._rollback.is_running:
                error.add_note(f"lowtide: out of memory in a forward pass. {self._describe_floor()}")
            raise
        finally:
            self._inside.is_on = False
        if tide is None:  # the step could not be observed, or the user was done meanwhile
            self._observer.follow_without_plan(output)
            return output
        if observed is not None:
            observed.compare(output)
        self.source.follow(output, tide)
        return output

    def _before(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """The hook of a sharded model."""
        if not is_training():
            return
        with self.lock:
            if not self._is_plain:
                self._prepare(args, kwargs)

    def _prepare(self, args: tuple, kwargs: dict) -> None:
        self._observer.tell_interrupt()
        self.source.prepare(args, kwargs)

    @property
    def _is_plain(self) -> bool:
        """Whether forward passes are plain ones now: it is over, or the thread with the lock is observing this one."""
        return self._end is not None or self._observer.is_under_way

    # -- what a source does ----------------------------------------------------------------------------------------

    def observe(self, args: tuple, kwargs: dict, make: Callable[[Profile], _Made], *, why: str) -> _Made | None:
        """What `make` gives for the profile of the step that a forward pass with these inputs begins. No plan is in
        force from now on.

        None where this step is to run without a plan. Raises what the model raises, and what `make` does.
        """
        if self.tide is None and (under := patched_part(self.model)) is not None:
            raise ConfigError(
                f"{self._call}: its module '{under}' came under another lowtide plan since; call remove() on that one "
                "first"
            )
        LOG.info("lowtide: observing one step (%s)", why)
        if self.tide is not None:
            self.take_off()
            self.wrap()  # other threads wait in it until this is over
        return self._observer.observe(args, kwargs, self._patch.original, make, is_over=lambda: self._end is not None)

    def use(self, plan: Plan, tide: Tide | None, *, equip: Callable[[Tide], None]) -> Tide:
        """Put `tide` in force, or a new one that carries out `plan`, which `equip` completes. Returns it.

        What goes wrong on the way (a full disk) is raised; then no plan is in force, and the next forward pass tries
        again.
        """
        self.take_off()
        try:
            if tide is None:
                self.placed.follow(plan)
                # Ranks have agreed already, or cannot.
                how: Any = {"optimizer": self.placed.optimizer, "engine": self.engine, "group": ALONE}
                tide = apply(self.model, plan, **how, moves_state=False)
                # It lives as long as any graph of this tide.
                weakref.finalize(tide._scheduler, lambda lease: None, self._lease).atexit = False
                tide._unobserved.end()  # a graph of the plan before may be waiting for its backward pass
                equip(tide)
            else:
                tide.resume()
        except BaseException:
            if tide is not None:
                tide.remove()
            self.wrap()
            raise
        self.tide = tide
        self.wrap()
        if self.is_audited:
            assert self._audit is not None
            self._audit.follow()
        return tide

    def take_off(self) -> None:
        """Bring the model back to its own forward: patches come off in the reverse order. `use` goes on."""
        self._patch.undo()
        if self.tide is not None and self._end is None:
            self.tide.suspend()
            self.tide = None

    def wrap(self) -> None:
        """The wrapper goes on the model again, after it came off."""
        self._patch = self._patch.reapply()

    def refuse(self, refusal: BudgetError) -> None:
        """No plan fits: the model is as it was, and the next forward pass that trains says so."""
        self._end = self._end or Phase.REFUSED
        self._leave()
        self._hooks = [Reminder(self.model, refusal)]

    def note(self, plan: Plan, *, why: str, seconds: float, budget_bytes: int | None, is_correction: bool) -> None:
        """Remember, and say, that a new plan is in force, why, and how many seconds it took."""
        how: Any = {"budget_bytes": budget_bytes, "seconds": seconds, "is_correction": is_correction}
        event = PlanEvent(forward=self.num_forwards, why=why, digest=plan.digest(), **how)
        self.events.append(event)
        predicted = plan.predicted
        if predicted is not None:
            LOG.info(
                f"lowtide: plan {event.digest} ({why}): peak {format_bytes(predicted.peak_bytes)} of "
                f"{format_bytes(predicted.plain_peak_bytes)} plain, step {format_seconds(predicted.step_seconds)} for "
                f"{format_seconds(predicted.plain_seconds)}, made in {format_seconds(seconds)}"
            )

    def _leave(self) -> None:
        """Take off what is on the model beside a tide. Idempotent."""
        self._unobserved.close()
        self._patch.undo()
        for hook in self._hooks:
            hook.remove()

    # -- out of memory ---------------------------------------------------------------------------------------------

    def _tighten(self, error: BaseException, num_tried: int) -> str | None:
        if self._end is not None:
            return None  # since this micro-batch began
        if self.tide is None:
            # Observing failed, where nothing is kept on the device: no plan would help.
            self._patch.undo()
            self.wrap()
            return None
        return self.source.tighten(error, num_tried)
