"""The forward of one micro-batch and the backward of another, each hiding the other's all-to-all.

What: `Overlap.run_pair(forward, backward)` carries out two halves in turns. A half that has started an exchange
(exchange.py) and is about to wait for it lets the other half run up to that one's next wait. So rows travel while the
other micro-batch computes:

    backward   ... loss, head | combine' ->            | experts' | dispatch' ->         | attention' ...
    forward                   | attention, dispatch -> |          | experts, combine ->  | ...

Backward begins, because its first exchange is the one that follows least compute. `run` needs no pipeline: it pairs the
forward of each micro-batch with the backward of the one before (PP = 1). The executor of a pipeline takes `run_pair`.

How: the halves run on two threads, the forward on the caller's, and exactly one of them at a time (two_threads.py).
Why threads: what torch keeps for a thread (gradients, autocast, saved-tensor hooks, streams) stays with its half. Why
in turns: ranks wait for each other's collectives, so all must start them in the same order; and two threads that race
for one compute stream would put one half's exchange behind the other's compute.
Why the graph is not cut: docs/decisions/0021. An exchange waits inside its autograd node, so a backward is one call of
autograd, hooks and accumulators see what they see without us, and swap and recompute find one backward pass.

A half without a partner (warm-up, cool-down), or whose partner is over, calls `fill` between the start of an exchange
and its wait: weight gradients that were put off, for one.

Exact: each half does what it does alone, in the same order, so losses and gradients are those of plain autograd to the
bit, whatever is kept, swapped or recomputed.
Cost: activations of two micro-batches at once, and 40 to 120 us of the host for each exchange.
Not covered: modules of FSDP2 in both halves (one half would reshard what the other reads); a forward half that calls
autograd itself on an accelerator, whose thread is with the other half. A model that draws random numbers in backward
(not in a recomputed forward, which draws what the forward drew) draws them in another order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

import torch

from lowtide.errors import ConfigError
from lowtide.pipeline.exchange import Half, Route, Work, running_half, start_on_group
from lowtide.pipeline.overlap_figures import BACKWARD, FORWARD, OTHER, Event, Kind
from lowtide.pipeline.two_threads import Baton, ThreadState

Batch = TypeVar("Batch")
Start = Callable[[torch.Tensor, torch.Tensor, Route], Work]


class Log(Protocol):
    """A list, or what stamps events with a clock."""

    def append(self, event: Event, /) -> None: ...


class Overlap:
    """Carries out pairs, one after the other. It owns a thread, which ends with it."""

    def __init__(
        self, *, start: Start = start_on_group, fill: Callable[[], object] | None = None, log: Log | None = None
    ) -> None:
        """start: starts an exchange, for a link that is not a process group. fill: called while an exchange is under
        way and no other half can run. log: every event is appended to it."""
        self.start = start
        self.fill = fill
        self.log = log
        self.num_pairs = 0
        """How many were carried out."""
        self.backward_half: Half | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lowtide-overlap")
        self._is_running = False

    def run_pair(self, forward: Callable[[], object] | None, backward: Callable[[], object] | None) -> None:
        """Carry out both, each in turns with the other; `None` stands for no such half.

        An error of either ends both, and is raised as it was: the other half has then stopped at its next exchange.
        """
        if self._is_running:
            raise ConfigError(
                "lowtide: a half of a pair began another pair; give that one a lowtide.pipeline.Overlap of its own"
            )
        self._is_running = True
        baton = Baton(FORWARD if backward is None else BACKWARD)
        try:
            if forward is None or backward is None:
                self._alone(baton, forward, backward)
            else:
                self._in_turns(baton, forward, backward)
        finally:
            self.num_pairs += 1
            self._is_running = False
        error, baton.error = baton.error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback leads to this frame

    def run(self, forward: Callable[[Batch], torch.Tensor], micro_batches: Iterable[Batch]) -> list[torch.Tensor]:
        """One step without a pipeline: F0; F1 with B0; F2 with B1; ...; B. Gives the losses, detached.

        forward: the loss of one micro-batch, scaled as it is to be added up. Gradients are added in the order of the
        micro-batches, as in a loop of `forward(batch).backward()`.
        """
        losses: list[torch.Tensor] = []
        backward: Callable[[], object] | None = None
        made: list[torch.Tensor] = []
        for batch in micro_batches:
            self.run_pair(functools.partial(_append, made, forward, batch), backward)
            losses.append(made[0].detach())
            backward = functools.partial(torch.autograd.backward, made.pop())
        self.run_pair(None, backward)
        return losses

    def _alone(self, baton: Baton, forward: Callable[[], object] | None, backward: Callable[[], object] | None) -> None:
        for name, call in ((FORWARD, forward), (BACKWARD, backward)):
            if call is None:
                baton.end(name, OTHER[name], None)
        for name, call in ((FORWARD, forward), (BACKWARD, backward)):
            if call is not None:
                self._carry_out(name, baton, call)

    def _in_turns(self, baton: Baton, forward: Callable[[], object], backward: Callable[[], object]) -> None:
        there = self._thread.submit(self._on_thread, ThreadState.now(), baton, backward)
        try:
            self._carry_out(FORWARD, baton, forward)
            there.result()
        except BaseException as error:  # Ctrl-C outside of what a half does
            baton.end(FORWARD, BACKWARD, error)
            there.result()

    def _on_thread(self, state: ThreadState, baton: Baton, call: Callable[[], object]) -> None:
        try:
            with state.taken_over():
                state.context.run(self._carry_out, BACKWARD, baton, call)
        except BaseException as error:
            baton.end(BACKWARD, FORWARD, error)

    def _carry_out(self, name: str, baton: Baton, call: Callable[[], object]) -> None:
        """Run a half to its end. Its error is left in `baton`."""
        half = _Half(self, name, baton)
        if name == BACKWARD:
            self.backward_half = half
        token = running_half.set(half)
        try:
            baton.wait_for(name)
            call()
            half.note("segment")
        except BaseException as error:
            half.end(error)
        else:
            half.end(None)
        finally:
            running_half.reset(token)
            if name == BACKWARD:
                self.backward_half = None


def _append(made: list[torch.Tensor], forward: Callable[[Batch], torch.Tensor], batch: Batch) -> None:
    made.append(forward(batch))


class _Half:
    """One half of a pair: starts exchanges, and passes the baton on before it waits for one."""

    def __init__(self, overlap: Overlap, name: str, baton: Baton) -> None:
        self.home = overlap
        self._name = name
        self._baton = baton
        self._num: dict[Kind, int] = {}

    def start(self, rows: torch.Tensor, sent: torch.Tensor, route: Route) -> Work:
        if not rows.is_floating_point() and not rows.is_complex():
            self.note("counts")
            return self.home.start(rows, sent, route)
        self.note("segment")
        work = self.home.start(rows, sent, route)
        return _Turn(self, work, self.note("issue"))

    def let_other_run(self) -> None:
        self.note("segment")
        if not self._baton.pass_on(self._name, OTHER[self._name]) and self.home.fill is not None:
            self.home.fill()

    def note(self, kind: Kind, number: int | None = None) -> int:
        """Log an event; without a number it is the next of its kind."""
        if number is None:
            number = self._num[kind] = self._num.get(kind, -1) + 1
        if self.home.log is not None:
            self.home.log.append(Event(self.home.num_pairs, self._name, kind, number))
        return number

    def end(self, error: BaseException | None) -> None:
        self._baton.end(self._name, OTHER[self._name], error)


class _Turn:
    """An exchange of a half: its wait comes after the other half's turn."""

    __slots__ = ("_half", "_number", "_work")

    def __init__(self, half: _Half, work: Work, number: int) -> None:
        self._half = half
        self._work = work
        self._number = number

    def wait(self) -> None:
        self._half.let_other_run()
        self._work.wait()
        self._half.note("wait", self._number)
