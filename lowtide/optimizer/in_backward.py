"""Copies and updates while backward runs: buckets that are fetched ahead, and buckets that step as gradients come.

`BackwardPrefetch` (overlap 'backward') fetches the first buckets in the last backward pass before a step, once the
device holds fewer bytes than it did at its worst moment: into memory that backward has freed. Why: within a step the
copies are all that happens; in backward they run beside computation and cost nothing.
The last backward pass is known from the step before: as many gradients came then. With another number of passes a
bucket is fetched too early or not at all, which costs memory or time and never a bit. The worst moment is looked at
where gradients come, so memory that is higher in between is not seen; where a device has no counter, no more than two
buckets are fetched ahead, in the second half of the pass.
What was fetched is used only if the bytes in its slot are still the same: not after `load_state_dict`, nor where a
tensor of the state was written to, nor where anybody looked into `optimizer.state` since, as a write through `.data`
leaves no trace. A step that is skipped (`GradScaler`) drops what was fetched.
Cost: some 10 us of Python at each of at most `NUM_MARKS` parameters a backward pass. Not covered: the way back; buckets
leave while the step computes with later ones. A tensor of the state that was kept in a variable since before the
backward pass, and is written to through `.data` after it.

`InBackward` (overlap 'in_backward') steps a bucket as soon as all of its gradients are there, and frees them. Why: a
gradient lives only until its parameter steps, so the device never holds all gradients, in the first step neither.

    gradients there at a time: those of one bucket, the next one, what belongs to incomplete buckets, and less than a
    bucket of small ones

Parameters without a bucket, whose state is still to be made or stays on the device, step as soon as about a bucket of
them is there. `step()` does what is left. The first step makes buckets in the order in which gradients come. Where
later passes keep to that order, at most one bucket is incomplete at a time.
What is complete steps when the next gradient comes: hooks of others on its last parameter have run by then, and each
pass leaves some gradients for `step()`. By those it is seen if gradients are changed between the two, as clipping does.
This way must be asked for; what it forbids is in docs/optimizer.md. Buckets are fetched ahead in the order of the step
before, as many as there are places for.
Which gradients a bucket waits for is known from the step before, and a gradient that was kept (`set_to_none=False`)
does not count as one of this pass; what a step does not use is stepped with zeros then, as in plain training. State
that somebody has replaced since the pass began waits for `step()`. Gradients that were used are None afterwards, so
others that are still there after a step must have been set to zero: else that is refused.
Cost: a few microseconds a parameter, two reads of the gradients that are left, and one wait for the device at `step()`,
which compares sums of their bytes. With `set_to_none=False` one more wait, when backward begins. Not seen: scaling that
no version counts, where all gradients that are left are zero.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from lowtide.optimizer.buckets import StateBucket, StateChunk, bytes_of
from lowtide.optimizer.groups import OwnedHook
from lowtide.optimizer.parts import StepPart, StepRun
from lowtide.optimizer.state import ShownState
from lowtide.optimizer.step import Stepper
from lowtide.optimizer.store import StateStore
from lowtide.tensors.optimizers import parameters_of
from lowtide.tensors.private import current_graph_task_id, queue_callback, version_of
from lowtide.tensors.view import sum_of_bytes, values_of
from lowtide.tensors.wrappers import inside

NUM_MARKS = 32
OTHER_WAYS = (
    "another way of updating (overlap='backward' of swap_optimizer, update='step' of swap_weights, or optimizer: auto "
    "without weights: auto in a plan)"
)
"""Advice in errors. Updates in backward can be asked for in three ways, and each has its own way out."""


class BackwardPrefetch:
    """See the module's text. Attached to the parameters of one optimizer until `remove`."""

    def __init__(self, store: StateStore) -> None:
        self._store = store
        self._transfers = store.transfers
        self._versions: dict[StateChunk, list[int]] = {}
        """Of the state in a chunk when its way to the device began."""
        self._count = 0
        """Gradients since the last step."""
        self._usual_count = 0
        self._marks_in_a_pass = 0
        self._most_bytes = 0
        """The most bytes on the device that were seen when gradients came, since the last step; and before it."""
        self._usual_bytes = 0
        self._seen: set[int] = set()
        self._stream: torch.Stream | None = None
        """The stream of the last step."""
        parameters = [p for p in parameters_of(store.optimizer) if p.requires_grad]
        marks = parameters[:: -(-len(parameters) // NUM_MARKS)] if parameters else []
        hook = BackwardPrefetch._on_gradient
        self._hooks = [OwnedHook(self, hook).put_on(p.register_post_accumulate_grad_hook) for p in marks]

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        if self._count == 0:
            self._transfers.give_up()  # from before a step that was skipped
        if self._stream != self._current_stream():
            return  # of a wrapper that reduces gradients on a stream of its own; memory of that one is not ours to use
        self._count += 1
        self._seen.add(id(parameter))
        in_use = self._store.engine.device_bytes()
        self._most_bytes = max(self._most_bytes, in_use or 0)
        if self._usual_count and self._count > self._usual_count - self._marks_in_a_pass:
            self._fetch(in_use)

    def _fetch(self, in_use: int | None) -> None:
        """Fetch as many chunks as there is room for."""
        is_late = self._usual_count - self._count < self._marks_in_a_pass / 2
        for chunk in (chunk for bucket in self._store.buckets for chunk in bucket.chunks):
            bucket, under_way = chunk.bucket, self._transfers.arrivals
            if chunk in under_way or bucket.resident is not None or bucket.was_idle:
                continue
            if in_use is None and (not is_late or len(under_way) >= self._transfers.num_buffers - 1):
                return
            if in_use is not None:
                in_use += chunk.nbytes
                if in_use > self._usual_bytes:
                    return
            self._versions[chunk] = _versions(bucket)
            self._transfers.fetch_ahead(chunk)

    def begin_step(self) -> None:
        """A step begins, and uses what was fetched and is still right."""
        self._stream = self._current_stream()
        chunks, state = {c for bucket in self._store.buckets for c in bucket.chunks}, self._store.optimizer.state

        def is_right(chunk: StateChunk) -> bool:
            then = self._versions.get(chunk)
            return chunk in chunks and chunk.bucket.is_bound(state) and _versions(chunk.bucket) == then

        self._transfers.give_up([chunk for chunk in self._transfers.arrivals if not is_right(chunk)])
        self._versions.clear()
        self._usual_count, self._count = self._count, 0
        self._usual_bytes, self._most_bytes = self._most_bytes, 0
        self._marks_in_a_pass = len(self._seen)
        self._seen.clear()

    def _current_stream(self) -> torch.Stream | None:
        device = self._store.device
        return None if device.type == "cpu" else torch.accelerator.current_stream(device)


def _versions(bucket: StateBucket) -> list[int]:
    return [version_of(inside(host)) for host in bucket.hosts]


@dataclass(slots=True)
class _StepSoFar:
    """What backward has done of the next step."""

    run: StepRun | None = None
    """None: nothing has stepped yet."""
    is_held: bool = False
    """More micro-batches will add to the gradients that come now."""
    stepped: set[torch.Tensor] = field(default_factory=set)
    order: list[StateBucket] = field(default_factory=list)
    """Buckets in the order in which they stepped."""
    following: int = 0
    """Places of the step before whose buckets have had their turn."""
    left: dict[torch.Tensor, _LeftGradient] = field(default_factory=dict)
    """Gradients that were there when a backward pass ended."""
    there: dict[torch.Tensor, int] = field(default_factory=dict)
    """Bytes of the gradients that came and are there."""


class InBackward:
    """See the module's text. `begin` makes a step without any part yet."""

    def __init__(self, stepper: Stepper, shown: ShownState, begin: Callable[[], StepRun]) -> None:
        self._stepper = stepper
        self._shown = shown
        self._begin = begin
        self._step = _StepSoFar()
        self._complete: StateBucket | None = None
        """The bucket that steps when the next gradient comes."""
        self._loose: dict[torch.Tensor, int] = {}
        """Parameters without a bucket whose gradient came, in that order, less than a bucket of them; and
        `step_bytes_of` each."""
        self._last_order: dict[StateBucket, int] = {}
        """Buckets in the order in which they stepped in the step before, and their places in it."""
        self._had_gradient: set[torch.Tensor] = set()
        """Parameters, in the step before."""
        self._arrived: set[torch.Tensor] = set()
        """Parameters whose gradient came in this backward pass."""
        self._freed: set[torch.Tensor] = set()
        """Parameters whose gradient was freed in some step, as long as gradients are set to zero between steps."""
        self._stayed: dict[torch.Tensor, weakref.ref[torch.Tensor]] = {}
        """Gradients that were there when the last step ended: what is done with those shows the habit."""
        self._pass = -1
        """The backward pass whose end is waited for. One that fails has none."""
        self.gradient_peak_bytes = 0
        """The most bytes of gradients that came in one step and were there at a time, in any step so far."""
        self._hooks: dict[torch.Tensor, Any] = {}
        self._put_on_hooks()

    def _put_on_hooks(self) -> None:
        """On the parameters that are trained by now."""
        for p in parameters_of(self._stepper.optimizer):
            if p.requires_grad and p not in self._hooks:
                self._hooks[p] = OwnedHook(self, InBackward._on_gradient).put_on(p.register_post_accumulate_grad_hook)

    def remove(self) -> None:
        for hook in self._hooks.values():
            hook.remove()

    @property
    def run(self) -> StepRun | None:
        """The step that backward has begun: it has updated some parameters, and `step()` not yet the others."""
        return self._step.run

    def hold(self, holds: bool) -> None:
        """While `holds`, gradients that come wait for those of more micro-batches, and update nothing."""
        self._step.is_held = holds

    def end(self) -> None:
        """Drop the step that backward began: what it has not updated, another one will."""
        self._stepper.transfers.give_up()
        self.take()

    # -- while backward runs -------------------------------------------------------------------------------------------

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        if self._step.is_held or parameter.grad is None:
            return  # frozen since the forward: torch calls the hook, and gives it no gradient
        if parameter in self._step.stepped:
            raise RuntimeError(
                "lowtide: a second backward pass before optimizer.step(): parameters are updated in backward, and the "
                f"first one has updated this parameter already; to accumulate gradients use {OTHER_WAYS}"
            )
        self._see_habit(parameter)
        if parameter in self._arrived:
            self._forget_arrivals()  # another pass, before anything of this could step in the last one
        self._step_complete()
        self._note(parameter)
        bucket = self._stepper.store.bucket_of.get(parameter)
        if bucket is None:
            self._add_loose(parameter)
        elif bucket.resident is None and parameter in self._had_gradient and self._is_complete(bucket):
            self._complete = bucket

    def _see_habit(self, parameter: torch.Tensor | None = None) -> None:
        """What was done with gradients after the last step, before another comes, or the next step: a gradient that was
        set to zero is the object that it was. RuntimeError where it was left alone. `parameter`: its gradient came."""
        stayed, self._stayed = self._stayed, {}
        kept = {p: p.grad for p, gradient in stayed.items() if p.grad is not None and p.grad is gradient()}
        if stayed and not kept:
            self._freed.clear()
        alone = next((g for p, g in kept.items() if p is not parameter), None)
        if alone is not None and self._freed and bool(values_of(alone).any()):
            raise RuntimeError(
                "lowtide: gradients of the last step are still there, to be added to or used again, but parameters are "
                "updated in backward, and most gradients were freed: call zero_grad() after each step, or use "
                f"{OTHER_WAYS}"
            )

    def _note(self, parameter: torch.Tensor) -> None:
        self._arrived.add(parameter)
        step = self._step
        if parameter not in step.there:
            step.there[parameter] = bytes_of(parameter.grad)
            self.gradient_peak_bytes = max(self.gradient_peak_bytes, sum(step.there.values()))
        now = current_graph_task_id()
        if now != self._pass:
            self._pass = now
            queue_callback(self._at_the_end)
            self._put_on_hooks()  # before the others of this pass come

    def _at_the_end(self) -> None:
        """A backward pass is over, and so are the hooks of others on its gradients."""
        left = ((p, p.grad) for p in self._arrived - self._step.stepped)
        self._step.left |= {p: _left(gradient) for p, gradient in left if gradient is not None}

    def _forget_arrivals(self) -> None:
        self._arrived.clear()
        self._complete = None
        self._loose = {}

    def _is_complete(self, bucket: StateBucket) -> bool:
        """Whether all of its gradients are there."""
        expected = [p for p in bucket.parameters if p in self._had_gradient or p.grad is not None]
        return all(p in self._arrived and p.grad is not None for p in expected)

    def _step_complete(self) -> None:
        bucket, self._complete = self._complete, None
        if bucket is None:
            return
        self._see_replaced()
        if bucket not in self._stepper.store.buckets:
            return  # its state was replaced since the step before
        with self._shown.stepping():
            is_bound = bucket.is_bound(self._stepper.optimizer.state)
            part = self._stepper.parts.of_bucket(bucket, self._arrived) if is_bound else None
        self._take_part(part)

    def _add_loose(self, parameter: torch.Tensor) -> None:
        store = self._stepper.store
        with self._shown.stepping():
            nbytes = store.step_bytes_of(parameter)
        if self._loose and sum(self._loose.values()) + nbytes > store.bucket_bytes:
            loose, self._loose = [*self._loose], {}
            self._see_replaced()
            with self._shown.stepping():
                part = self._stepper.parts.without_bucket(loose)
            self._take_part(part)
        self._loose[parameter] = nbytes

    def _see_replaced(self) -> None:
        if self._step.run is None:
            self._shown.refresh()

    def _take_part(self, part: StepPart | None) -> None:
        """None: it waits for `step()`, since its state was replaced, or one of its groups must step at once."""
        if part is None:
            return
        step = self._step
        if step.run is None:
            step.run = self._begin()
        run, parameters = step.run, part.parameters()
        run.parts.append(part)
        run.todo.append(len(run.parts) - 1)
        step.stepped.update(parameters)
        self._freed.update(parameters)
        transfers = self._stepper.transfers
        if any(chunk not in transfers.arrivals for chunk in part.chunks()) and not transfers.has_room():
            transfers.give_up()  # another order than in the step before
        self._stepper.advance(run, [len(run.parts) - 1])
        for parameter in parameters:
            parameter.grad = None
            del step.there[parameter]
            step.left.pop(parameter, None)
        bucket_of = self._stepper.store.bucket_of
        buckets = dict.fromkeys(bucket_of[p] for p in parameters if p in bucket_of)
        step.order += buckets
        step.following = max([step.following, *(self._last_order.get(bucket, -1) + 1 for bucket in buckets)])
        self._fetch_following(has_stepped=bool(buckets))

    def _fetch_following(self, *, has_stepped: bool) -> None:
        """Fetch what stepped next in the step before, as far as there are places; where a bucket has just left its
        place, one in any case."""
        stepper, step = self._stepper, self._step
        ahead = (chunk for bucket in tuple(self._last_order)[step.following :] for chunk in bucket.chunks)
        for number, chunk in enumerate(ahead):
            if chunk.bucket not in stepper.store.buckets or not (
                (number == 0 and has_stepped) or stepper.transfers.has_room()
            ):
                break
            stepper.transfers.fetch_ahead(chunk)

    # -- when the optimizer steps --------------------------------------------------------------------------------------

    def why_not_done(self) -> str:
        """Why the step that backward began cannot be done to the bits of plain; empty where it can, or where backward
        has begun none."""
        step = self._step
        if step.run is None:
            return ""
        if hasattr(self._stepper.optimizer, "found_inf"):
            return "GradScaler unscales gradients when the optimizer steps"
        if any(p.grad is not left[0] or _has_changed(left) for p, left in step.left.items()):
            return "gradients were changed between the backward pass and the step (clipping, GradScaler)"
        changed = step.run.snapshot.changed()
        return f"{changed} was changed between the backward pass and the step" if changed else ""

    def fill(self) -> None:
        """Where gradients are set to zero between steps, plain training has zeros for what this step did not use, and
        steps with them."""
        self._see_habit()
        for parameter in self._freed - self._step.stepped:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def take(self) -> StepRun | None:
        """The step that backward began, or None."""
        done, self._step = self._step, _StepSoFar()
        left = {p: p.grad for p in parameters_of(self._stepper.optimizer) if p.grad is not None}
        self._had_gradient = left.keys() | done.stepped
        self._stayed = {p: weakref.ref(gradient) for p, gradient in left.items()}
        self._last_order = {bucket: place for place, bucket in enumerate(done.order)}
        self._forget_arrivals()
        return done.run


_LeftGradient = tuple[torch.Tensor, int, torch.Tensor]
"""A gradient as backward has left it for `step()`, its version then, and the sum of its bytes."""


def _left(gradient: torch.Tensor) -> _LeftGradient:
    return gradient, version_of(gradient), sum_of_bytes(values_of(gradient))


def _has_changed(left: _LeftGradient) -> bool:
    """Whether somebody has written to it since."""
    gradient, version, total = left
    return version_of(gradient) != version or not torch.equal(total, sum_of_bytes(values_of(gradient)))
