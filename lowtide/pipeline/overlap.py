"""The forward of one micro-batch and the backward of another, each hiding the other's all-to-all.

What: `Overlap.run_pair(forward, backward)` carries out two halves in turns. A half that has started an exchange
(exchange.py) and is about to wait for it lets the other half run up to that one's next wait. So rows travel while the
other micro-batch computes:

    backward   ... loss, head | combine' ->            | experts' | dispatch' ->         | attention' ...
    forward                   | attention, dispatch -> |          | experts, combine ->  | ...

Backward begins, because its first exchange is the one that follows least compute. `run` needs no pipeline: it pairs the
forward of each micro-batch with the backward of the one before (PP = 1). The executor of a pipeline takes `run_pair`.

How: the halves run on two threads, the forward on the caller's, and exactly one of them at a time. A `Baton` is with
one of them; the other waits. It changes hands only where its holder passes it on, so what both do happens in one order,
the same in every run and on every rank. A half that is over passes it on for good; one that raised makes the other
raise `Abandoned` where it waits, so nobody waits for ever. `as_this_thread` hands over what torch keeps for each thread
(gradients on or off, autocast, device and stream, saved-tensor hooks, modes), beside Python's context variables: a
backward on the second thread finds what it would find on the caller's.
Why threads: what torch keeps for a thread (gradients, autocast, saved-tensor hooks, streams) stays with its half. Why
in turns: ranks wait for each other's collectives, so all must start them in the same order; and two threads that race
for one compute stream would put one half's exchange behind the other's compute.
Why the graph is not cut: docs/decisions/0021. An exchange waits inside its autograd node, so a backward is one call of
autograd, hooks and accumulators see what they see without us, and swap and recompute find one backward pass.

A half without a partner (warm-up, cool-down: `run_pair(forward, None)`), or whose partner is over, waits; with
`weight_gradients` it runs some that were put off first (weight_gradients.py).

Exact: each half does what it does alone, in the same order, so losses and gradients are those of plain autograd to the
bit, whatever is kept, swapped or recomputed.
Cost: activations of two micro-batches at once, 33 us of the host for each exchange each way, and 0.1 ms a pair.
Not covered: `threading.local` of other libraries; modules of FSDP2, which would lose gradients (refused by name, but
for a model of which the root alone is sharded); a DDP that synchronises inside pairs (torch raises); a forward half
that calls autograd itself on an accelerator, whose thread is with the other half. A model that draws random numbers in
backward (not in a recomputed forward, which draws what the forward drew) draws them in another order.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch

from lowtide.errors import ConfigError
from lowtide.pipeline.exchange import Route, Wait, is_exchange, running_half, start_on_group
from lowtide.pipeline.weight_gradients import WeightGradients
from lowtide.tensors.private import (
    dispatch_modes,
    fsdp_module_of,
    function_modes,
    pop_dispatch_mode,
    pop_function_mode,
    pop_saved_tensors_hooks,
    push_dispatch_mode,
    push_function_mode,
    push_saved_tensors_hooks,
    top_saved_tensors_hooks,
)

_NUM_CHECKED = 8
"""In so many pairs it is looked whether a module cannot be in one: models do not change much."""
FORWARD, BACKWARD = "forward", "backward"
OTHER: Mapping[str, str] = {FORWARD: BACKWARD, BACKWARD: FORWARD}
Kind = Literal["issue", "wait", "segment", "counts", "fill"]
Batch = TypeVar("Batch")
Start = Callable[[torch.Tensor, torch.Tensor, Route], Any]
"""Starts the exchange of the second tensor, into the first one. Gives an object that has a `wait`."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened in a pair."""

    pair: int
    half: str
    """`forward` or `backward`."""
    kind: Kind
    """An exchange was started (`issue`); it was waited for and is there (`wait`); a half has computed and is about to
    start an exchange, to wait for one, or over (`segment`); integers were exchanged, which nobody tries to hide
    (`counts`); weight gradients that were put off have run while a half alone waits (`fill`)."""
    number: int
    """Of an exchange of this half, or of a segment, from 0."""


class Overlap:
    """Carries out pairs, one after the other. It owns a thread, which ends with it."""

    def __init__(
        self,
        *,
        start: Start = start_on_group,
        log: Callable[[Event], object] | None = None,
        weight_gradients: WeightGradients | None = None,
    ) -> None:
        """start: starts an exchange, for a link that is not a process group. log: is called with every event.
        weight_gradients: those of the pipeline, whose `most_kept` has waits run them."""
        self.start = start
        self.weight_gradients = weight_gradients
        self.log = log
        self.num_pairs = 0
        """How many were begun, those of one half among them."""
        self.backward_half: _Half | None = None
        """The one that is under way."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lowtide-overlap")
        self._is_running = False

    def run_pair(self, forward: Callable[[], object] | None, backward: Callable[[], object] | None) -> None:
        """Carry out both, each in turns with the other. `None` stands for no such half; the other one is alone then.

        An error of either ends both, and is raised as it was: the other half has then stopped at its next exchange.
        """
        if self._is_running:
            raise ConfigError(
                "lowtide: a half of a pair began another pair; give that one a lowtide.pipeline.Overlap of its own"
            )
        self._is_running = True
        try:
            if forward is not None and backward is not None:
                self._in_turns(forward, backward)
            else:
                for name, half in ((FORWARD, forward), (BACKWARD, backward)):
                    if half is not None:
                        with self.alone(name):
                            half()
        finally:
            self._is_running = False

    def run(self, forward: Callable[[Batch], torch.Tensor], micro_batches: Iterable[Batch]) -> list[torch.Tensor]:
        """One step without a pipeline: F0; F1 with B0; F2 with B1; ...; B. Gives the losses, detached.

        forward: the loss of one micro-batch, scaled as it is to be added up. Gradients are added in the order of the
        micro-batches, as in a loop of `forward(batch).backward()`.
        """
        losses: list[torch.Tensor] = []
        backward: Callable[[], object] | None = None
        made: list[torch.Tensor] = []

        def run_forward(batch: Batch) -> None:
            made.append(forward(batch))

        for batch in micro_batches:
            self.run_pair(functools.partial(run_forward, batch), backward)
            losses.append(made[0].detach())
            backward = functools.partial(torch.autograd.backward, made.pop())
        self.run_pair(None, backward)
        return losses

    @contextlib.contextmanager
    def alone(self, name: str) -> Iterator[None]:
        """Inside, what this thread computes is a half without a partner."""
        self.num_pairs += 1
        with self._carrying(_Half(self, name, self.num_pairs - 1, None)) as half:
            yield
            half.note("segment")

    def _in_turns(self, forward: Callable[[], object], backward: Callable[[], object]) -> None:
        baton = Baton(BACKWARD, FORWARD)
        ahead, behind = (_Half(self, name, self.num_pairs, baton) for name in (FORWARD, BACKWARD))
        self.num_pairs += 1
        context = contextvars.copy_context()
        there = self._thread.submit(context.run, self._on_thread, as_this_thread(), baton, behind, backward)
        try:
            self._carry_out(ahead, baton, forward)
            there.result()
        except BaseException as error:  # Ctrl-C outside of what a half does
            baton.end(FORWARD, error)
            there.result()
        baton.raise_error()

    def _on_thread(
        self,
        as_caller: contextlib.AbstractContextManager[None],
        baton: Baton,
        half: _Half,
        call: Callable[[], object],
    ) -> None:
        try:
            with as_caller:
                self._carry_out(half, baton, call)
        except BaseException as error:
            baton.end(BACKWARD, error)

    def _carry_out(self, half: _Half, baton: Baton, call: Callable[[], object]) -> None:
        """Run a half of a pair to its end. Its error is left in `baton`."""
        try:
            with self._carrying(half):
                baton.wait_for(half.name)
                call()
                half.note("segment")
        except BaseException as error:
            baton.end(half.name, error)
        else:
            baton.end(half.name, None)

    @contextlib.contextmanager
    def _carrying(self, half: _Half) -> Iterator[_Half]:
        """Inside, exchanges of this thread belong to `half`, and so do those of autograd's own threads."""
        token = running_half.set(half)
        outer = self.backward_half
        if half.name == BACKWARD:
            self.backward_half = half
        try:
            yield half
        finally:
            running_half.reset(token)
            if half.name == BACKWARD:
                self.backward_half = outer


class _Half:
    """One half of a pair: starts exchanges, and passes the baton on before it waits for one."""

    def __init__(self, overlap: Overlap, name: str, pair: int, baton: Baton | None) -> None:
        self.home = overlap
        self.name = name
        self._pair = pair
        self._baton = baton
        self._num: dict[Kind, int] = {}

    def check(self, x: torch.Tensor) -> None:
        """Raise ConfigError if `x`, which is about to leave, was made by what cannot be in a pair."""
        if self._pair < _NUM_CHECKED and (name := _sharded_module(x)) is not None:
            raise ConfigError(
                f"lowtide: '{name}' is a module of FSDP2, which takes one forward or backward at a time: in a pair it "
                "would lose gradients. Shard the optimizer's state instead, or step without lowtide.pipeline.Overlap"
            )

    def start(self, rows: torch.Tensor, sent: torch.Tensor, route: Route) -> Wait:
        """Start the exchange of `sent`, into `rows`. What waits for it may let the other half run first."""
        if not rows.is_floating_point() and not rows.is_complex():
            self.note("counts")
            wait: Wait = self.home.start(rows, sent, route).wait
            return wait
        self.note("segment")
        if self.home.weight_gradients is not None:
            self.home.weight_gradients.end_stretches()
        work = self.home.start(rows, sent, route)
        return functools.partial(self._wait, work, self.note("issue"))

    def _wait(self, work: Any, number: int) -> None:
        """Let the other half run, or where there is none what was put off; then wait for an exchange."""
        self.note("segment")
        is_alone = self._baton is None or not self._baton.pass_on(self.name)
        weights = self.home.weight_gradients
        if weights is not None and weights.at_wait(is_alone=is_alone):
            self.note("fill")
        work.wait()
        self.note("wait", number)

    def note(self, kind: Kind, number: int | None = None) -> int:
        """Log an event; without a number it is the next of its kind."""
        if number is None:
            number = self._num[kind] = self._num.get(kind, -1) + 1
        if self.home.log is not None:
            self.home.log(Event(self._pair, self.name, kind, number))
        return number


def _sharded_module(x: torch.Tensor) -> str | None:
    """The name of a module of FSDP2 that ran since the last exchange, as far as the graph of `x` shows it; or None."""
    waiting: list[Any] = [x.grad_fn]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        name = fsdp_module_of(node)
        if name is not None:
            return name
        if not is_exchange(node):
            waiting += [following for following, _ in node.next_functions]
    return None


# -- threads of which exactly one runs -------------------------------------------------------------------------------


class Abandoned(BaseException):
    """The other half raised, so this one need not go on. Not an `Exception`: models catch those."""


class Baton:
    """Who of several parties runs. The first one begins; the baton goes round in their order."""

    def __init__(self, *parties: Hashable) -> None:
        self._parties = parties
        self._holder: Hashable = parties[0]
        self._over: set[Hashable] = set()
        self._changed = threading.Condition()
        self.error: BaseException | None = None
        """What the first party that raised has raised."""

    def _following(self, party: Hashable) -> Hashable:
        """The next one that is not over: itself if all others are, None if it is, too."""
        after = self._parties.index(party) + 1
        return next((p for p in self._parties[after:] + self._parties[:after] if p not in self._over), None)

    def wait_for(self, party: Hashable) -> None:
        """Return when it is its turn. Raises Abandoned if another one has raised."""
        with self._changed:
            while self._holder != party and self.error is None:
                self._changed.wait()
            if self.error is not None:
                raise Abandoned

    def pass_on(self, party: Hashable) -> bool:
        """Let the others run, until the baton comes back. False if all are over: nothing has run."""
        with self._changed:
            if self.error is not None:
                raise Abandoned
            assert self._holder == party, f"{party} runs although it is not its turn"
            if self._following(party) == party:
                return False
            self._holder = self._following(party)
            self._changed.notify_all()
        self.wait_for(party)
        return True

    def end(self, party: Hashable, error: BaseException | None) -> None:
        """`party` is over, and raised `error` if that is not None."""
        with self._changed:
            self._over.add(party)
            if self.error is None and not isinstance(error, Abandoned):
                self.error = error
            if self._holder == party:
                self._holder = self._following(party)
            self._changed.notify_all()

    def raise_error(self) -> None:
        """Raise what the first party that raised has raised, if one has."""
        error, self.error = self.error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback leads to this frame


def as_this_thread(*, keeps_casts: bool = True) -> contextlib.AbstractContextManager[None]:
    """A context inside of which another thread is as the calling one is now. Afterwards hooks and modes of that thread
    are off; the rest stays as it is. `keeps_casts`: the cache of autocast survives until the calling thread leaves its
    autocast; else, where that is in none, until any thread leaves its own."""
    device = torch.accelerator.current_accelerator()
    kinds = ["cpu"] if device is None else ["cpu", device.type]
    # To ask for the stream of a device that nobody uses would set it up.
    is_used = device is not None and getattr(torch.get_device_module(device), "is_initialized", bool)()
    stream = torch.accelerator.current_stream() if is_used else None
    has_gradients, caches_casts = torch.is_grad_enabled(), torch.is_autocast_cache_enabled()
    autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
    is_nested = torch.autocast_increment_nesting() > 1
    torch.autocast_decrement_nesting()
    hooks, for_functions, for_dispatch = top_saved_tensors_hooks(), [*function_modes()], [*dispatch_modes()]

    @contextlib.contextmanager
    def taken_over() -> Iterator[None]:
        torch.set_grad_enabled(has_gradients)
        for kind, is_on, dtype in autocast:
            torch.set_autocast_enabled(kind, is_on)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(caches_casts)
        if stream is not None:
            torch.accelerator.set_stream(stream)  # and its device
        torch.get_num_threads()  # tells this thread how many torch was told to use
        with contextlib.ExitStack() as stack:
            # Whoever leaves the outermost autocast of a thread empties a cache that all threads share, and a weight
            # that the other half uses twice would be cast twice: other sums.
            if keeps_casts or is_nested:
                torch.autocast_increment_nesting()
                stack.callback(torch.autocast_decrement_nesting)
            if hooks is not None:
                push_saved_tensors_hooks(*hooks)
                stack.callback(pop_saved_tensors_hooks)
            for mode in for_functions:
                push_function_mode(mode)
                stack.callback(pop_function_mode)
            for mode in for_dispatch:
                push_dispatch_mode(mode)
                stack.callback(pop_dispatch_mode)
            yield

    return taken_over()
