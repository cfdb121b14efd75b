"""How long a step takes, from the start of one forward pass to the start of the next.

What: `StepClock` puts a mark on the compute stream at the start of a forward pass, and one at the start of the first
forward pass after a backward pass has run. What lies between is a step: forward, backward, and what the caller does
until the next one, the optimizer's step and the next batch included. A third mark, at the end of the backward pass,
tells the two passes from the rest. Where gradients accumulate, it is a micro-batch; the ones with the optimizer's step
in them are then left out, since which plan gets those is chance.

Nothing is waited for: on an accelerator marks are read when the device has passed them.

Cost: a mark and a hook on the outputs for each forward pass. Not covered: what else runs between two steps
(evaluation, a checkpoint); that is an outlier, for whoever takes the median. Optimizers that give parameters other
storages instead of writing to them: their steps are not told from micro-batches.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from lowtide.engines.base import Engine, Event
from lowtide.tensors.fsdp import local_part
from lowtide.tensors.private import queue_callback, tree_leaves, version_of

_NUM_WATCHED = 8
_NUM_RECENT = 8


class Timed(Protocol):
    """Who wants to know about a step."""

    def over(self) -> None:
        """It has run."""

    def note(self, seconds: float, pass_seconds: float) -> None:
        """So long it took, and so long its forward and its backward pass alone. Called later than `over`, or never."""


class StepClock:
    """Times steps for whoever asks, one after the other."""

    def __init__(self, engine: Engine, parameters: Sequence[torch.Tensor]) -> None:
        self._engine = engine
        self._watched = parameters[:: 1 + len(parameters) // _NUM_WATCHED]
        """Some of those that an optimizer writes to."""
        self._open: _Step | None = None
        self._pending: deque[tuple[Timed, Event, Event, Event]] = deque()
        """Who asks; the step's start, the end of its backward pass, and its end."""
        self._have_optimizer: deque[bool] = deque(maxlen=_NUM_RECENT)
        """Of the last steps: whether the optimizer's was in it."""

    @property
    def has_pending(self) -> bool:
        """Whether some times are not known yet."""
        return bool(self._pending)

    def start(self, timed: Timed | None) -> None:
        """A forward pass begins. `timed` is told about the step; None: nobody asks. Nothing if a step is under way."""
        if self._open is None:
            mark = self._engine.mark_time() if timed is not None else None
            self._open = _Step(timed, mark, self._versions())

    def follow(self, output: Any) -> None:
        """A forward pass gave `output`: see its backward pass begin."""
        if self._open is None or self._open.has_backward:
            return
        step = weakref.ref(self._open)
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                leaf.grad_fn.register_prehook(lambda gradients: _seen(step, self._engine))

    def stop(self) -> None:
        """Another forward pass begins: the step is over if a backward pass has run."""
        step = self._open
        if step is None or not step.has_backward:
            return
        self._open = None
        has_optimizer = step.versions != self._versions()
        self._have_optimizer.append(has_optimizer)
        if step.timed is None or has_optimizer != self._wants_optimizer():
            return
        step.timed.over()
        if step.mark is not None:
            end = self._engine.mark_time()
            self._pending.append((step.timed, step.mark, end if step.pass_end is None else step.pass_end, end))

    def forget(self) -> None:
        """The step under way is none that anybody wants to hear of: it failed, or its plan was changed."""
        self._open = None

    def read(self) -> None:
        """Tell of all times that are known by now."""
        while self._pending:
            timed, start, pass_end, end = self._pending[0]
            seconds, pass_seconds = (self._engine.seconds_between(start, mark) for mark in (end, pass_end))
            if seconds is None or pass_seconds is None:
                return
            self._pending.popleft()
            timed.note(seconds, pass_seconds)

    def _wants_optimizer(self) -> bool:
        """Steps without the optimizer's are what counts, if a third of them is like that."""
        return 3 * self._have_optimizer.count(False) < len(self._have_optimizer)

    def _versions(self) -> tuple[int, ...]:
        return tuple(version_of(local_part(parameter)) for parameter in self._watched)


class _Step:
    __slots__ = ("__weakref__", "has_backward", "mark", "pass_end", "timed", "versions")

    def __init__(self, timed: Timed | None, mark: Event | None, versions: tuple[int, ...]) -> None:
        self.timed = timed
        self.mark = mark
        self.versions = versions
        self.has_backward = False
        self.pass_end: Event | None = None
        """When its last backward pass ended; None: that was not seen."""


def _seen(step: weakref.ref[_Step], engine: Engine) -> None:
    """A backward pass of this step begins."""
    found = step()
    if found is None:
        return
    found.has_backward = True

    def end() -> None:
        found = step()
        if found is not None:
            found.pass_end = engine.mark_time()

    if found.mark is not None:
        queue_callback(end)
