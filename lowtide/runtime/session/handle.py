"""What the user has of a model under plans, whether they are fixed or follow its steps; and the audit of its steps.

What: `Handle` is the face that `Tide` and `Tides` share: a context manager, the plan in force, `step`, `audit`.

Audit: the exact peak of what is on the device, around any number of steps of the user's.
`with tide.audit() as audit: step()`, then `audit.peak_bytes`; from then on `print(tide.plan)` has it beside the
predicted peak, as a report does. Every storage counts from the operator that made it until its memory is freed:
parameters, gradients, optimizer state, activations, temporaries, and the buffers that fetched activations arrive in,
which no operator makes. A batch counts from the first operator that reads it. Why: on the host and the virtual engine
no allocator counts (`stats.peak_device_bytes` has no temporaries there), and what a plan predicted is only worth
something beside a measurement of the same thing.

Around what: whole steps, as they were planned: all micro-batches of a step and the optimizer's, or one forward and
backward. What it leaves: the peak. Counters, gradients, random states and results are those of steps without it.

Cost: about 7 us an operator, so it is no part of a planned step, and its steps say nothing about time: an autopilot
does not compare them. Not covered: memory inside an operator that is freed before it returns; backward passes
in another thread than the one that entered; on an accelerator, `stats.peak_device_bytes` has the allocator's own peak.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from lowtide.core.plan import Plan, notebook_html
from lowtide.engines.base import Engine
from lowtide.errors import ConfigError
from lowtide.optimizer.swap import OptimizerSwap
from lowtide.runtime.offload.scheduler import OffloadScheduler
from lowtide.runtime.saved.stats import Counters
from lowtide.runtime.session.optimizer_state import PlacedState
from lowtide.runtime.session.retry import Rollback
from lowtide.tensors.live_bytes import LiveBytes
from lowtide.tensors.out_of_memory import is_out_of_memory
from lowtide.units import format_bytes

_CHANGES = {
    "weights": "share the parameters among ranks (FSDP2), or hold them in bf16",
    "gradients": "share the parameters among ranks (FSDP2), or hold them in bf16",
    "optimizer state": "write memory.optimizer: swap",
    "buffers and batch": "use a smaller micro-batch",
    "activations": "write a lower budget: the plan keeps all that fits this one",
    "head, loss, temporaries": "use a smaller micro-batch",
}
"""What helps most, by the line of the plan's account that is the largest."""


class Handle(abc.ABC):
    """What the user has of a model under plans: a context manager, and leaving it restores the model. All sizes in
    bytes, times in seconds."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, engine: Engine, placed: PlacedState | None
    ) -> None:
        self.model = model
        self.engine = engine
        self.placed = placed
        """The optimizer's state, wherever it is; None where another handle sees to that."""
        self._rollback = Rollback(self, optimizer)
        self._audit: Audit | None = None
        """The last one that was asked for."""

    @abc.abstractmethod
    def _in_force(self) -> Any:
        """The tide whose plan is in force, or was last; None before there is one."""

    @property
    @abc.abstractmethod
    def _is_over(self) -> bool:
        """Whether the model is as it was."""

    @abc.abstractmethod
    def _tighten(self, error: BaseException, num_tried: int) -> str | None:
        """Go over to a plan that needs less, after `num_tried` others; says how, or None when there is none. Called
        between two attempts."""

    @abc.abstractmethod
    def remove(self) -> None:
        """Restore the model exactly. Idempotent."""

    @property
    def plan(self) -> Plan | None:
        """The plan in force; None before the first step."""
        tide = self._in_force()
        plan: Plan | None = None if tide is None else tide.plan
        return plan

    @property
    def live_bytes(self) -> int:
        """Activations that are on the device now, as the ledger counts them. Unlike `stats`, cheap."""
        tide = self._in_force()
        return 0 if tide is None else tide._scheduler.ledger.now_bytes

    @property
    def optimizer_swap(self) -> OptimizerSwap | None:
        """The handle of the optimizer's state, if a plan has it elsewhere between steps."""
        return None if self.placed is None else self.placed.handle

    @property
    def is_audited(self) -> bool:
        """Whether an audit is open now."""
        return self._audit is not None and self._audit.is_open

    def audit(self) -> Audit:
        """A context manager around steps of your own: `audit.peak_bytes` is the exact peak on the device inside, in
        bytes. Afterwards `plan.audited_peak_bytes` has it, if a forward pass ran inside and no error came out. See
        the top of this file.

        Its steps take longer, by some 7 us an operator; it leaves nothing else. The plan in force stays inside: such
        steps say nothing about time, so they are not compared with a prediction. Where a batch of another shape brings
        another plan, its peak counts too. Raises ConfigError, when it is entered, where no plan is in force, and inside
        of another audit.
        """
        if not self.is_audited:
            self._audit = Audit(self)
        assert self._audit is not None
        return self._audit

    def _note_audit(self, peak_bytes: int | None) -> None:
        """An audit is over; None where it says nothing about the plan in force."""
        tide = self._in_force()
        if tide is not None and peak_bytes is not None:
            tide.audited_peak_bytes = peak_bytes

    def step(self, closure: Callable[[], Any], *, is_local: bool = False, is_joint: bool = False) -> Any:
        """Run `closure()`, forward and backward of one micro-batch, again if memory ran out; returns what it returns.

        After an out-of-memory error everything that the micro-batch changed is put back, the plan is tightened (where
        plans are made for a budget: for less; else all swapped, then all layers recomputed), and the closure runs
        again, at most twice; gradients are those of a step that never failed. The closure must do the same each time:
        draw the batch outside of it, and leave `zero_grad`, clipping and the optimizer's step outside too. In a process
        group nothing is run again, because the other ranks would wait for this one in their collectives, unless
        `is_local` says that the closure has none, or `is_joint` that all ranks take this step so, with the same
        collectives: then all run it again. See runtime/session/retry.py and together.py.
        """
        return closure() if self._is_over else self._rollback.run(closure, is_local=is_local, is_joint=is_joint)

    def settle(self) -> None:
        """Wait until no copy is under way, and give back what dead graphs owned. Not needed for correctness."""
        tide = self._in_force()
        if tide is not None:
            tide._scheduler.settle()

    def _counters(self) -> Counters | None:
        tide = self._in_force()
        return None if tide is None else tide._scheduler.counters

    def _describe_floor(self) -> str:
        """How much memory was needed at least, in words."""
        tide = self._in_force()
        if tide is None:
            return "It was the step that is observed."
        return (
            f"Parameters, gradients, buffers and optimizer state alone are "
            f"{format_bytes(tide._model_state_bytes())}, and activations took up to "
            f"{format_bytes(tide._scheduler.ledger.peak_bytes)} more.{plan_message(tide._plan)}"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """In a plain loop nothing else of lowtide's sees an error of backward: say what held the memory."""
        if error is not None and is_out_of_memory(error):
            notes = getattr(error, "__notes__", ())
            if not any(note.startswith("lowtide: ") for note in notes):  # a forward pass has said it of its own
                error.add_note(
                    "lowtide: out of memory outside of a forward pass (backward, or the optimizer's step). "
                    f"{self._describe_floor()}"
                )
        self.remove()

    def _repr_html_(self) -> str:
        return notebook_html(repr(self), self.plan)


class Audit:
    """A context in which every live byte is counted. Made by `Tide.audit` and `Tides.audit`."""

    def __init__(self, handle: Any) -> None:
        """`handle`: a `Handle` (tide.py)."""
        self._handle = handle
        self._num_before = 0
        """Forward passes under the plan in force before."""
        self._followed: list[OffloadScheduler] = []
        self._live: LiveBytes | None = None

    @property
    def peak_bytes(self) -> int:
        """Most bytes on the device at once, so far; 0 before the context is entered."""
        return 0 if self._live is None else self._live.peak_bytes

    @property
    def is_open(self) -> bool:
        """Whether it counts now."""
        return bool(self._followed)

    def follow(self) -> None:
        """Another plan may be in force now: count what it fetches."""
        assert self._live is not None
        scheduler = self._handle._in_force()._scheduler
        if scheduler not in self._followed:
            self._followed.append(scheduler)
        scheduler.on_buffer = self._live.add

    def __enter__(self) -> Audit:
        """Raises ConfigError where no plan is in force, inside of another audit of the same model, and for one that was
        over already."""
        tide = self._handle._in_force()
        if tide is None or self._handle._is_over:
            raise ConfigError("audit: no plan is in force; run a step first")
        if tide._scheduler.on_buffer is not None or self._live is not None:
            raise ConfigError("audit: one audit is open or was used already; leave it, and ask for a new one")
        self._num_before = tide._scheduler.counters.num_forwards
        self._live = LiveBytes(model=tide.model, optimizer=tide._optimizer, device_type=tide.engine.device_type)
        self.follow()
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._live is not None
        self._live.__exit__(kind, error, trace)
        for scheduler in self._followed:
            scheduler.on_buffer = None
        first, *others = self._followed
        says_it = error is None and not others and first.counters.num_forwards != self._num_before
        self._followed.clear()
        self._handle._note_audit(self._live.peak_bytes if says_it else None)


def plan_message(plan: Plan) -> str:
    """Two sentences, after a blank; nothing for a plan that predicts nothing."""
    lines = [line for line in plan.account if line.what in _CHANGES]
    if plan.predicted is None or not lines:
        return ""
    most = max(lines, key=lambda line: line.planned_bytes)
    budget = "" if plan.budget_bytes is None else f" of a budget of {format_bytes(plan.budget_bytes)}"
    return (
        f" The plan had said: peak {format_bytes(plan.predicted.peak_bytes)}{budget}, of which {most.what}: "
        f"{format_bytes(most.planned_bytes)}. What would help most: {_CHANGES[most.what]}."
    )
