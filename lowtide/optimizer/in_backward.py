"""Updates within the backward pass: a bucket steps as soon as all of its gradients are there, and they are freed.

What: with `overlap="in_backward"` a hook on each parameter sees gradients come. A bucket that is complete is fetched,
stepped and sent back while backward goes on; parameters without a bucket, whose state is still to be made or stays on
the device, step as soon as about a bucket of them is there. `step()` does what is left. Why: copies hide behind the
backward pass, and a gradient lives only until its parameter steps. So the device never holds all gradients, in the
first step neither.

    gradients there at a time: those of one bucket, the next one, what belongs to incomplete buckets, and less than a
    bucket of small ones

The first step makes buckets in the order in which gradients come. Where later passes keep to that order, at most one
bucket is incomplete at a time.

What is complete steps when the next gradient comes: hooks of others on its last parameter have run by then, and each
pass leaves some gradients for `step()`. By those it is seen if gradients are changed between the two, as clipping does:
then the step is refused, and so it is where hyper-parameters were changed. Parameters that have stepped are not what
plain training would have; the message says to load a checkpoint.

Only for training in which each step has one backward pass, and nothing reads all gradients or changes hyper-parameters
between the two: no accumulation, no clipping by a norm over all, no `GradScaler`. A second backward pass before the
step raises RuntimeError. Several ranks are refused: gradients of others are not there yet when a parameter's own is.
Which gradients a bucket waits for is known from the step before, and a gradient that was kept (`set_to_none=False`)
does not count as one of this pass. State that somebody has replaced since the pass began waits for `step()`. Gradients
that were used are None afterwards.

Cost: a few microseconds a parameter. Not covered: see above; that is why this way must be asked for. Not seen: writes
that no version counts (`gradient.data`, and those of `GradScaler` where the optimizer is not fused).

When buckets are fetched: within the step, or ahead of it while the last backward pass before it still runs.

What: `BackwardPrefetch` counts gradients as they come. In the last backward pass before a step, and once the device
holds fewer bytes than it did at its worst moment, it fetches the first buckets, into memory that backward has freed.
Why: within a step the copies are all that happens; in backward they run beside computation and cost nothing.

The last backward pass is known from the step before: as many gradients came then. With another number of passes a
bucket is fetched too early or not at all, which costs memory or time and never a bit. The worst moment is looked at
where gradients come, so memory that is higher in between is not seen; where a device has no counter, no more than two
buckets are fetched ahead, in the second half of the pass.
What was fetched is used only if the bytes in its slot are still the same: not after `load_state_dict`, nor where a
tensor of the state was written to, nor where anybody looked into `optimizer.state` since, as a write through `.data`
leaves no trace. A step that is skipped (`GradScaler`) drops what was fetched.

Cost: some 10 us of Python at each of at most `NUM_MARKS` parameters a backward pass.
Not covered: the way back; buckets leave while the step computes with later ones. A tensor of the state that was kept in
a variable since before the backward pass, and is written to through `.data` after it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from lowtide.errors import ConfigError
from lowtide.optimizer.buckets import StateBucket, StateChunk
from lowtide.optimizer.groups import OwnedHook
from lowtide.optimizer.step import StepPart, Stepper, StepRun
from lowtide.optimizer.store import StateStore
from lowtide.optimizer.transfers import Arrival
from lowtide.tensors.private import current_graph_task_id, queue_callback, version_of
from lowtide.tensors.wrappers import inside

NUM_MARKS = 32
NUM_TRIED = 3


class BackwardPrefetch:
    """See the module's text. Attached to the parameters of one optimizer until `remove`."""

    def __init__(self, store: StateStore) -> None:
        self._store = store
        self._transfers = store.transfers
        self._arrivals: dict[int, tuple[Arrival, list[int]]] = {}
        self._count = 0
        """Gradients since the last step."""
        self._usual_count = 0
        self._marks_in_a_pass = 0
        self._most_bytes = 0
        """Of the device, at gradients since the last step; and the same for the step before."""
        self._usual_bytes = 0
        self._seen: set[int] = set()
        self._stream: torch.Stream | None = None
        """The stream of the last step."""
        parameters = [p for group in store.optimizer.param_groups for p in group["params"] if p.requires_grad]
        marks = parameters[:: -(-len(parameters) // NUM_MARKS)] if parameters else []
        hook = BackwardPrefetch._on_gradient
        self._hooks = [OwnedHook(self, hook).put_on(p.register_post_accumulate_grad_hook) for p in marks]

    def remove(self) -> None:
        self.give_up()
        for hook in self._hooks:
            hook.remove()

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        if self._count == 0:
            self.give_up()  # from before a step that was skipped
        if self._stream != self._current_stream():
            return  # of a wrapper that reduces gradients on a stream of its own; memory of that one is not ours to use
        self._count += 1
        self._seen.add(id(parameter))
        in_use = self._store.engine.device_bytes()
        self._most_bytes = max(self._most_bytes, in_use or 0)
        if self._usual_count and self._count > self._usual_count - self._marks_in_a_pass:
            self._fetch(in_use)

    def _fetch(self, in_use: int | None) -> None:
        """As many buckets as there is room for."""
        is_late = self._usual_count - self._count < self._marks_in_a_pass / 2
        for piece in (piece for home in self._store.homes for piece in home.pieces):
            home = piece.home
            if id(piece) in self._arrivals or home.resident is not None or home.was_idle:
                continue
            if in_use is None and (not is_late or len(self._arrivals) >= self._transfers.num_buffers - 1):
                return
            if in_use is not None:
                in_use += piece.nbytes
                if in_use > self._usual_bytes:
                    return
            self._start(piece)

    def _start(self, piece: StateChunk) -> None:
        with contextlib.suppress(torch.OutOfMemoryError):
            versions = _versions(piece.home)
            self._arrivals[id(piece)] = self._transfers.fetch(piece), versions

    def take(self) -> dict[int, Arrival]:
        """What was fetched and is still right, by the identity of its piece. A step begins."""
        self._stream = self._current_stream()
        pieces = {id(piece) for home in self._store.homes for piece in home.pieces}
        right: dict[int, Arrival] = {}
        for key, (arrival, versions) in self._arrivals.items():
            home = arrival.piece.home
            if key in pieces and home.is_bound(self._store.optimizer.state) and _versions(home) == versions:
                right[key] = arrival
            else:
                self._transfers.give_up(arrival)
        self._arrivals.clear()
        self._usual_count, self._count = self._count, 0
        self._usual_bytes, self._most_bytes = self._most_bytes, 0
        self._marks_in_a_pass = len(self._seen)
        self._seen.clear()
        return right

    def _current_stream(self) -> torch.Stream | None:
        device = self._store.device
        return None if device.type == "cpu" else torch.accelerator.current_stream(device)

    def give_up(self) -> None:
        """Drop what was fetched."""
        for arrival, _ in self._arrivals.values():
            self._transfers.give_up(arrival)
        self._arrivals.clear()


class StepOverlap:
    """Which way of fetching is in force. With 'auto' it is tried: `NUM_TRIED` steps of each, and the faster one stays.

    `stall_seconds` says how long steps have waited so far. Where the device has no counter of its memory 'auto' is
    'step': nobody could tell whether a bucket that is fetched early raises the peak.
    """

    def __init__(self, wanted: str, store: StateStore, stall_seconds: Callable[[], float]) -> None:
        self._store = store
        self._stall_seconds = stall_seconds
        self._prefetch = BackwardPrefetch(store) if wanted == "backward" else None
        self._is_trying = wanted == "auto" and store.engine.device_bytes() is not None
        self._stalls: list[float] = []
        self.tried: tuple[float, float] | None = None
        """With 'auto', after the trial: seconds that a step waits as 'step', and as 'backward'."""

    @property
    def is_trying(self) -> bool:
        """Whether the way may still change."""
        return self._is_trying

    @property
    def mode(self) -> str:
        return "step" if self._prefetch is None else "backward"

    def begin_step(self) -> dict[int, Arrival]:
        """Buckets that were fetched ahead, by the identity of their piece."""
        if self._is_trying:
            self._try()
        return {} if self._prefetch is None else self._prefetch.take()

    def _try(self) -> None:
        """The first step makes the state, and the first with a prefetch learns when gradients come."""
        self._stalls.append(self._stall_seconds())
        number = len(self._stalls)
        if number == 2 + NUM_TRIED:
            self._prefetch = BackwardPrefetch(self._store)
        elif number == 2 + 2 * NUM_TRIED + 1:
            self._is_trying = False
            without = self._stalls[1 + NUM_TRIED] - self._stalls[1]
            ahead = self._stalls[-1] - self._stalls[-1 - NUM_TRIED]
            self.tried = (without / NUM_TRIED, ahead / NUM_TRIED)
            if ahead >= without:
                self.close()

    def give_up(self) -> None:
        if self._prefetch is not None:
            self._prefetch.give_up()

    def close(self) -> None:
        if self._prefetch is not None:
            self._prefetch.remove()
            self._prefetch = None


def _versions(home: StateBucket) -> list[int]:
    return [version_of(inside(host)) for host in home.hosts]


@dataclass(frozen=True, slots=True)
class StepCalls:
    """What a step is made of, by the handle that owns it."""

    begin: Callable[[], StepRun]
    advance: Callable[[StepRun, list[int] | None], None]
    """Step these parts of a run."""
    refresh: Callable[[], None]
    """Take in state that was replaced."""
    stepping: Callable[[], AbstractContextManager[None]]
    """Within, nothing waits for copies."""


class InBackward:
    """See the module's text."""

    def __init__(self, stepper: Stepper, parameters: list[torch.Tensor], calls: StepCalls) -> None:
        self._stepper = stepper
        self._calls = calls
        self._run: StepRun | None = None
        self._stepped: set[torch.Tensor] = set()
        self._complete: StateBucket | None = None
        """It steps when the next gradient comes."""
        self._loose: list[torch.Tensor] = []
        """Parameters without a bucket whose gradient came, in that order, less than a bucket of them."""
        self._loose_bytes = 0
        """Of their state."""
        self._order: list[StateBucket] = []
        """Buckets in the order in which they stepped, in this step and in the one before."""
        self._last_order: list[StateBucket] = []
        self._had_gradient: set[torch.Tensor] = set()
        """Parameters, in the step before."""
        self._arrived: set[torch.Tensor] = set()
        """Parameters whose gradient came in this backward pass."""
        self._left: dict[torch.Tensor, tuple[torch.Tensor, int]] = {}
        """Gradients that were there when a backward pass ended, and their versions."""
        self._pass = -1
        """The backward pass whose end is waited for. One that fails has none."""
        self._there: dict[torch.Tensor, int] = {}
        """Bytes of the gradients that came in this step and are there."""
        self._there_bytes = 0
        self.gradient_peak_bytes = 0
        """The most of them at a time, in any step so far."""
        self._hooks = [
            OwnedHook(self, InBackward._on_gradient).put_on(p.register_post_accumulate_grad_hook)
            for p in parameters
            if p.requires_grad
        ]

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    @property
    def is_under_way(self) -> bool:
        """Whether backward has updated some parameters and `step()` not yet the others."""
        return self._run is not None

    def let_go(self) -> None:
        """Drop what was fetched ahead; the step that backward began can go on."""
        if self._run is not None:
            self._stepper.give_up(self._run)

    def end(self, parameters: list[torch.Tensor]) -> None:
        """The step that backward began is over; what it has not updated is somebody else's to update."""
        self.let_go()
        self.take(parameters)

    # -- while backward runs -------------------------------------------------------------------------------------------

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        if parameter in self._stepped:
            raise RuntimeError(
                "lowtide: a second backward pass before optimizer.step(): with overlap='in_backward' the first one has "
                "updated this parameter already; use 'backward' to accumulate gradients"
            )
        if parameter in self._arrived:
            self._forget_arrivals()  # another pass, before anything of this could step in the last one
        self._step_complete()
        self._note(parameter)
        home = self._stepper.store.home_of.get(parameter)
        if home is None:
            self._add_loose(parameter)
        elif home.resident is None and parameter in self._had_gradient and self._is_complete(home):
            self._complete = home

    def _note(self, parameter: torch.Tensor) -> None:
        self._arrived.add(parameter)
        if parameter not in self._there:
            self._there[parameter] = _bytes_of(parameter.grad)
            self._there_bytes += self._there[parameter]
            self.gradient_peak_bytes = max(self.gradient_peak_bytes, self._there_bytes)
        now = current_graph_task_id()
        if now != self._pass:
            self._pass = now
            queue_callback(self._at_the_end)

    def _at_the_end(self) -> None:
        """A backward pass is over, and so are the hooks of others on its gradients."""
        left = ((p, p.grad) for p in self._arrived - self._stepped)
        self._left |= {p: (gradient, version_of(gradient)) for p, gradient in left if gradient is not None}

    def _forget_arrivals(self) -> None:
        self._arrived.clear()
        self._complete = None
        self._loose, self._loose_bytes = [], 0

    def _is_complete(self, home: StateBucket) -> bool:
        """Whether all of its gradients are there."""
        expected = [p for p in home.parameters if p in self._had_gradient or p.grad is not None]
        return all(p in self._arrived and p.grad is not None for p in expected)

    def _step_complete(self) -> None:
        home, self._complete = self._complete, None
        if home is None:
            return
        self._see_replaced()
        if home not in self._stepper.store.homes:
            return  # its state was replaced since the step before
        with self._calls.stepping():
            is_bound = home.is_bound(self._stepper.optimizer.state)
            part = self._stepper.part_of(home, self._arrived) if is_bound else None
        self._step(part)

    def _add_loose(self, parameter: torch.Tensor) -> None:
        store = self._stepper.store
        with self._calls.stepping():
            nbytes = store.state_bytes_of(parameter)
        if self._loose and self._loose_bytes + nbytes > store.bucket_bytes:
            loose, self._loose, self._loose_bytes = self._loose, [], 0
            self._see_replaced()
            with self._calls.stepping():
                part = self._stepper.part_without_bucket(loose)
            self._step(part)
        self._loose.append(parameter)
        self._loose_bytes += nbytes

    def _see_replaced(self) -> None:
        if self._run is None:
            self._calls.refresh()

    def _step(self, part: StepPart | None) -> None:
        """None: it waits for `step()`, since its state was replaced, or one of its groups must step at once."""
        if part is None:
            return
        if self._run is None:
            self._run = self._calls.begin()
        run, parameters = self._run, part.parameters()
        run.parts.append(part)
        run.todo.append(len(run.parts) - 1)
        self._stepped.update(parameters)
        self._calls.advance(run, [len(run.parts) - 1])
        for parameter in parameters:
            parameter.grad = None
            self._there_bytes -= self._there.pop(parameter)
            self._left.pop(parameter, None)
        home_of = self._stepper.store.home_of
        homes = dict.fromkeys(home_of[p] for p in parameters if p in home_of)
        self._order += homes
        for home in homes:
            self._fetch_next(run, home)

    def _fetch_next(self, run: StepRun, home: StateBucket) -> None:
        following = self._last_order.index(home) + 1 if home in self._last_order else len(self._last_order)
        if following < len(self._last_order) and self._last_order[following] in self._stepper.store.homes:
            self._stepper.fetch_ahead(run, self._last_order[following].pieces[0])

    # -- when the optimizer steps --------------------------------------------------------------------------------------

    def why_not_done(self) -> str:
        """Why the step that backward began cannot be done to the bits of plain; empty where it can, or where backward
        has begun none."""
        if self._run is None:
            return ""
        if hasattr(self._stepper.optimizer, "found_inf"):
            return "GradScaler unscales gradients when the optimizer steps"
        if any(p.grad is not gradient or version_of(gradient) != then for p, (gradient, then) in self._left.items()):
            return "gradients were changed between the backward pass and the step (clipping)"
        changed = self._run.snapshot.changed()
        return f"{changed} was changed between the backward pass and the step" if changed else ""

    def take(self, parameters: list[torch.Tensor]) -> StepRun | None:
        """The step that backward began, or None. `parameters` are those of the optimizer."""
        run, self._run = self._run, None
        self._had_gradient = {p for p in parameters if p.grad is not None} | self._stepped
        self._last_order, self._order = self._order, []
        self._stepped = set()
        self._forget_arrivals()
        self._left.clear()
        self._there.clear()
        self._there_bytes = 0
        return run


def _bytes_of(gradient: torch.Tensor | None) -> int:
    local = None if gradient is None else inside(gradient)
    return local.nbytes if local is not None and local.layout == torch.strided else 0


def check_alone() -> None:
    """ConfigError where other ranks have a part in the gradients."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ConfigError(
            "lowtide.swap_optimizer: overlap 'in_backward' is for one rank: when a gradient is there, those of other "
            "ranks are not; use 'backward'"
        )
