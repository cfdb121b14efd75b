"""The autopilot: a model that stays within a budget. Here is the handle that the user has.

What: `optimize` puts one wrapper on the model. The first forward pass with gradients is observed: one extra step whose
saved activations are stored off the device, and after which everything is as before (learn.py). A plan is made for the
budget (plan_source.py), and this pass and all later ones run under a plan. Which one, and when another is made, is the
state machine's (machine.py): for other shapes, for a model that has changed, where a step was not as predicted, where
gradients stay, where several forward passes come before a backward pass, where recipes do not hold, and where the
device runs out of memory all the same.

Plans come from a `PlanSource` (plan_source.py). A source may have no budget: then plans are carried out as they are,
and nothing is compared or corrected.

Ranks: all use the smallest budget. As long as all have the same shapes and come to each decision together, they use the
first rank's plan; after that each rank plans for itself (consensus.py). A new shape is observed by all ranks.

Threads: if several threads train one model, they get a plan one after another; a thread that arrives while another one
observes or plans waits until there is a plan.

Cost: the observed step (two to ten times a plain one), the solver (a second), then nothing per operator.
Not covered: what the caller does around the model's forward (a loss of one's own) is not observed; on an accelerator it
is measured and the plan corrected, on the host it must fit beside the budget. If a backward pass of another thread runs
while a new shape is observed, its gradients may be lost.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import nn

from lowtide.core.measured_curve import MeasuredCurve
from lowtide.core.plan import Plan
from lowtide.core.plan_table import notebook_html
from lowtide.core.profile import Profile
from lowtide.engines.base import Engine
from lowtide.errors import BudgetError, ConfigError, RecomputeRefusedError
from lowtide.optimizer.swap import OptimizerSwap
from lowtide.runtime.autopilot.machine import Machine
from lowtide.runtime.autopilot.observe_call import is_training
from lowtide.runtime.autopilot.phases import Phase
from lowtide.runtime.autopilot.plan_source import Planning, PlanSource
from lowtide.runtime.offload.scheduler import OffloadScheduler
from lowtide.runtime.recompute.fingerprint import RecipeMismatchError
from lowtide.runtime.saved.stats import Stats
from lowtide.runtime.session.audit import Audit
from lowtide.runtime.session.checks import refuse_capture
from lowtide.runtime.session.memory_message import add_message
from lowtide.runtime.session.optimizer_state import PlacedState
from lowtide.runtime.session.retry import Rollback
from lowtide.runtime.session.tide import Tide
from lowtide.tensors.out_of_memory import is_out_of_memory
from lowtide.timeline.step import Link
from lowtide.units import format_bytes

_PLAIN = (Phase.OBSERVING, Phase.REFUSED, Phase.REMOVED)
"""Whoever holds the lock in one of these observes at this moment, or came when all was over."""


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
        room: Callable[[], int] | None = None,
    ) -> None:
        """`room`: the bytes that the device has, for plans above the budget. Absent: the budget is strict."""
        self.model = model
        self.engine = engine
        self.source = source
        """Where its plans come from."""
        self._planning = Planning(source, group, room=room)
        self._optimizer = optimizer
        self._placed = placed
        self._lock = threading.RLock()
        """Of whoever observes, plans or changes the plan."""
        how: Any = {"around": self._around, "before": self._before, "handle": self, "owns_engine": owns_engine}
        self._machine = Machine(model, engine, self._planning, placed, **how, say=say or _say_nothing)
        self.events = self._machine.events
        """What the autopilot decided, and when."""
        self._inside = threading.local()
        """Of each thread: whether it is in a forward pass of the model, which may call itself."""
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
        return None if self.tide is None or self._machine.state.key is None else self.tide.plan

    @property
    def profile(self) -> Profile | None:
        """What was observed for the shapes in force; None before the first step."""
        key = self._machine.state.key
        return None if key is None else self._planning.facts.known_to(self._machine.shapes[key].profile)

    @property
    def link(self) -> Link | None:
        """The link as measured, and corrected since; None before the first step, and without a budget."""
        return self._planning.facts.link

    @property
    def has_gradients(self) -> bool:
        """Whether plans count gradients of earlier passes from the start of a pass."""
        return self._planning.facts.has_gradients or self._planning.facts.num_passes > 1

    @property
    def tide(self) -> Tide | None:
        """The tide in force; None before the first step."""
        return self._machine.state.tide

    @property
    def phase(self) -> Phase:
        """Where it stands: waiting, observing, a plan in force, refused, removed."""
        return self._machine.state.phase

    @property
    def optimizer_swap(self) -> OptimizerSwap | None:
        """The handle of the optimizer's state, once a plan has it elsewhere between steps."""
        return self._placed.handle

    @property
    def stats(self) -> Stats:
        """What happened under the plan in force; zeros before the first step."""
        return self.tide.stats if self.tide is not None else Stats.nothing()

    @property
    def live_bytes(self) -> int:
        """Activations that are on the device now, as lowtide counts them. Unlike `stats`, cheap."""
        return self.tide.live_bytes if self.tide is not None else 0

    @property
    def num_corrections(self) -> int:
        """How often a plan was made again because a step was not as predicted."""
        return sum(event.is_correction for event in self.events)

    def reset_stats(self) -> None:
        """Start all totals, and the peak, anew; what they were is compared with the prediction first."""
        with self._lock:
            if self._machine.state.key is not None and self.tide is not None:
                self._machine.compare(self._machine.state.key)
                self._machine.watch.restart_totals(self.tide)

    def audit(self) -> Audit:
        """A context manager around steps of your own: `audit.peak_bytes` is the exact peak on the device inside, in
        bytes, and `plan.audited_peak_bytes` has it afterwards. See `Tide.audit`.

        The plan in force stays inside: steps that are counted operator by operator say nothing about time, so they are
        not compared. Where a batch of another shape brings another plan, its peak counts too.

        Raises ConfigError, when it is entered, where no plan is in force (before the first step, after `remove`).
        """

        def scheduler() -> OffloadScheduler:
            if self.tide is None or self.phase is Phase.REMOVED:
                raise ConfigError("audit: no plan is in force; run a step first")
            return self.tide._scheduler

        def done(peak_bytes: int | None, curve: MeasuredCurve | None) -> None:
            with self._lock:
                if self.tide is not None and peak_bytes is not None and self._machine.num_forwards != before:
                    self.tide.audited_peak_bytes, self.tide.audited_curve = peak_bytes, curve
                if self.tide is not None and self.phase is Phase.COMPARED:
                    # The next comparison is of steps that nobody watched.
                    self._machine.watch.restart_totals(self.tide)
                    self._machine.watch.clock.seconds.clear()

        if self._machine.is_audited:
            raise ConfigError("audit: one audit is open or was used already; leave it, and ask for a new one")
        before = self._machine.num_forwards
        of = (self.model, self._optimizer, self.engine.device_type)
        audit = Audit(*of, scheduler=scheduler, layers=lambda: self.plan.layers if self.plan else (), done=done)
        self._machine.audit = audit
        return audit

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
        self._machine.unplanned.close()
        self._machine.remove()

    def __enter__(self) -> Autopilot:
        return self

    def __repr__(self) -> str:
        budget = "" if self.source.budget_bytes is None else f", budget {format_bytes(self.source.budget_bytes)}"
        plan = "" if self.tide is None else f", plan {self.tide.plan.digest()}"
        return f"<lowtide.Autopilot {self.phase.value}: engine '{self.engine.name}'{budget}{plan}>"

    def _repr_html_(self) -> str:
        return notebook_html(repr(self), self.plan)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        add_message(error, self._describe_floor)
        self.remove()

    # -- each forward ----------------------------------------------------------------------------------------------

    def _around(self, forward: Callable, args: tuple, kwargs: dict) -> Any:
        machine = self._machine
        if not is_training():
            machine.unseen.was_aside = True
            return forward(*args, **kwargs)
        if getattr(self._inside, "is_on", False):  # a model that calls itself: a part of the pass that is under way
            return machine.patch.original(*args, **kwargs)
        refuse_capture(self.model, self.engine)
        with self._lock:
            if machine.state.phase in _PLAIN:
                return forward(*args, **kwargs)
            machine.unseen.end()
            if machine.is_inside:
                machine.prepare(args, kwargs)
            machine.num_forwards += 1
            # Taken first: where this forward fails, the next one may have other inputs.
            witness, machine.learning.witness = machine.learning.witness, None
            planned, tide = machine.patch.original, machine.state.tide
        machine.first.begin()
        self._inside.is_on = True
        try:
            with contextlib.nullcontext() if witness is None else witness.watching(self.model):
                output = planned(*args, **kwargs)
        except Exception as error:
            if is_out_of_memory(error) and not self._rollback.is_running:
                error.add_note(f"lowtide: out of memory in a forward pass. {self._describe_floor()}")
            raise
        finally:
            self._inside.is_on = False
        if tide is None:  # the step could not be observed, or the user was done meanwhile
            machine.unplanned.follow(output)
            return output
        machine.first.follow(output)
        if witness is not None:
            witness.compare(output)
        if self._planning.has_budget:
            with self._lock:
                machine.follow(output)
        if machine.state.phase is Phase.COMPARED:
            machine.watch.follow(output, tide)
        return output

    def _before(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """The hook of a sharded model."""
        if not is_training():
            return
        with self._lock:
            if self.phase not in _PLAIN:
                self._machine.prepare(args, kwargs)

    # -- out of memory ---------------------------------------------------------------------------------------------

    def tighten(self) -> None:
        """Plan for less: the budget was kept on paper, but the device ran out of memory. Nothing without a budget."""
        with self._lock:
            self._machine.for_less()

    def _tighten(self, error: BaseException, num_tried: int) -> str | None:
        """After an out-of-memory error, between two attempts: what was done about it, or None."""
        if self.phase in (Phase.REFUSED, Phase.REMOVED):
            return None  # since this micro-batch began
        tide = self.tide
        if tide is None:
            # Observing failed, where nothing is kept on the device: no plan would help.
            self._machine.patch.undo()
            self._machine.wrap()
            return None
        if not self._planning.has_budget or isinstance(error, RecipeMismatchError | RecomputeRefusedError):
            return tide._tighten(error, num_tried)
        try:
            self.tighten()
        except BudgetError:
            return tide._tighten(error, num_tried)
        return f"the plan is made for {format_bytes(self.events[-1].budget_bytes or 0)} now"

    def _settle(self) -> None:
        if self.tide is not None:
            self.tide.settle()

    def _describe_floor(self) -> str:
        return self.tide._describe_floor() if self.tide is not None else "It was the step that is observed."


def _say_nothing(line: str) -> None:
    pass
