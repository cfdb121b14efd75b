"""One step of an optimizer, part by part: fetch a bucket, step its parameters, send it back.

What: `Stepper` steps the parts (parts.py) one after the other. While one computes, the next one's bucket arrives and
the last one's leaves.
Why it is exact: an optimizer of torch treats each parameter by itself (or, with foreach, in lists whose members do not
touch each other), so a step over some parameters, then over the others, is the step over all of them. The optimizer's
own `step` does the work, with `param_groups` that show it some of the parameters.

Where it stops: what failed before a part's own step leaves that part as it was (`PartialStepError`, can be resumed);
what failed inside may have updated half of its parameters, and nobody can tell which. The step is `torn` until it is
resumed or a checkpoint is loaded.
Cost: about 60 us of Python a part.

Not covered: optimizers that look at several parameters at once (requests.py refuses them).
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch

from lowtide.errors import PartialStepError
from lowtide.optimizer.buckets import Buffer, StateBucket
from lowtide.optimizer.groups import GroupSnapshot
from lowtide.optimizer.parts import Parts, StepPart, StepRun, Stretch, one_by_one
from lowtide.optimizer.requests import why_not_exact
from lowtide.optimizer.state import ShownState
from lowtide.optimizer.store import StateStore, entries_of
from lowtide.tensors.optimizers import parameters_of
from lowtide.tensors.wrappers import inside


class Stepper:
    """See the module's text."""

    def __init__(self, store: StateStore, shown: ShownState) -> None:
        self.optimizer = store.optimizer
        self.store = store
        self.transfers = store.transfers
        self.parts = Parts(store)
        self.torn: StepRun | None = None
        """The step that stopped half-way, or that cannot be done to the bits of plain any more."""
        self._shown = shown

    def check(self) -> None:
        """RuntimeError where a step cannot begin."""
        self.refuse_torn("step")
        odd = why_not_exact(self.optimizer)
        if odd:
            raise RuntimeError(f"lowtide: step: {odd}, or call handle.detach()")
        device = self.store.device
        for parameter in parameters_of(self.optimizer):
            if parameter.device != device:
                raise RuntimeError(
                    f"lowtide: a parameter is on {parameter.device}, and its optimizer was swapped for parameters on "
                    f"{device}; call handle.detach(), move the model, and swap the optimizer again (with Accelerate: "
                    "model.to(accelerator.device) first)"
                )

    def begin(self, call: Callable[[], Any]) -> StepRun:
        """A step without any part yet."""
        self.transfers.most_held = max(self.transfers.num_buffers, len(self.transfers.arrivals))
        return StepRun(self.optimizer.state, GroupSnapshot(self.optimizer.param_groups), call)

    def add_all(self, run: StepRun) -> None:
        """Parts for all parameters that have a gradient now."""
        run.gradients = {p: p.grad for p in parameters_of(self.optimizer) if p.grad is not None}
        parts = self.parts.all()
        run.todo += range(len(run.parts), len(run.parts) + len(parts))
        run.parts += parts

    def advance(self, run: StepRun, numbers: Iterable[int] | None = None) -> None:
        """Step some parts of a step; None: all that are left, and the step ends."""
        try:
            with self._shown.stepping():
                for number in tuple(run.todo if numbers is None else numbers):
                    self._step_part(run, number)
                if numbers is None:
                    self._end(run)
        except BaseException as error:
            self.torn, run.error = run, error
            raise

    def tear(self, run: StepRun, error: RuntimeError) -> None:
        """A step that cannot be done to the bits of plain any more: only a checkpoint mends it."""
        self.transfers.give_up()
        run.is_tainted = True
        self.torn, run.error = run, error

    def resume(self) -> StepRun:
        """Go on with the torn step from the part that failed. RuntimeError where that cannot give the same bits."""
        run = self.torn
        if run is None:
            raise RuntimeError("lowtide: no step of this optimizer stopped half-way; there is nothing to resume")
        if not run.can_resume:
            self.refuse_torn("resume")
        if any(run.gradients[p] is not p.grad for number in run.todo for p in run.parts[number].parameters()):
            raise RuntimeError(
                "lowtide: gradients were replaced since the step stopped, so it cannot go on to the same bits; load a "
                "checkpoint"
            )
        self.torn = None
        self.advance(run)
        return run

    def refuse_torn(self, call: str) -> None:
        """RuntimeError where a step has stopped half-way."""
        if self.torn is not None:
            way = "call handle.resume() first" if self.torn.can_resume else "load a checkpoint"
            raise RuntimeError(f"lowtide: {call}: the last step stopped half-way ({self.torn.error}); {way}")

    # -- one part after the other --------------------------------------------------------------------------------------

    def _end(self, run: StepRun) -> None:
        """All parts have stepped."""
        self.transfers.give_up()
        run.snapshot.commit()
        self.transfers.retire_all()

    def _step_part(self, run: StepRun, number: int) -> None:
        """Step one part; where it stops, say so and keep what can be kept."""
        holding = self.store.holding
        stepped = (p for p in run.parts[number].parameters() if p.grad is not None)  # the first part shows idle groups
        with contextlib.nullcontext() if holding is None else holding(stepped):
            while True:
                self._step_one(run, number)
                then = run.parts[number].then
                if then is None:
                    break
                run.parts[number] = then
        run.todo.remove(number)

    def _step_one(self, run: StepRun, number: int) -> None:
        buffers: list[Buffer | None] = []
        try:
            self._fetch(run, number, buffers)
            part = run.parts[number]
            stretch = part.stretch
            shown = stretch.show(buffers[0] if buffers else None) if stretch is not None else None
            whole = [] if stretch is not None else self._bind(part, buffers)
            run.is_tainted = True
            self._step(run, part, shown)
        except BaseException as error:
            self._stop(run, run.parts[number], buffers)
            if not isinstance(error, Exception):
                raise  # of the user's making: Ctrl-C
            raise self._said(run, number, error) from error
        if stretch is not None:
            stretch.put_away(buffers[0] if buffers else None)
        else:
            self._put_away(part, whole)
        run.is_tainted = False

    def _bind(
        self, part: StepPart, buffers: list[Buffer | None]
    ) -> list[tuple[torch.UntypedStorage, list[torch.Tensor]]]:
        """For each bucket of a part its bytes on the device, and what `optimizer.state` shows of them."""
        storages = [
            bucket.on_device() if buffer is None else buffer[0]
            for bucket, buffer in zip(part.buckets, buffers, strict=True)
        ]
        state = self.optimizer.state
        return [(s, bucket.bind_device(state, s)) for bucket, s in zip(part.buckets, storages, strict=True)]

    def _step(self, run: StepRun, part: StepPart, stretch: torch.Tensor | None) -> None:
        optimizer = self.optimizer
        own = optimizer.param_groups
        groups = run.snapshot.subset(part.chosen)
        if stretch is not None:
            groups[0]["params"] = [stretch]
        optimizer.param_groups = groups
        try:
            run.result = run.call()
        finally:
            optimizer.param_groups = own
        run.snapshot.collect(part.chosen, groups)

    def _fetch(self, run: StepRun, number: int, buffers: list[Buffer | None]) -> None:
        """Add the buckets of a part to `buffers`, on the device (None: they never left), and start the next part's."""
        while True:
            try:
                for chunk in run.parts[number].chunks():
                    self.transfers.fetch(chunk)
                break
            except torch.OutOfMemoryError:
                if not self._halve(run, number):
                    raise
        behind = run.parts[number].then
        if behind is None:
            following = run.todo.index(number) + 1
            behind = run.parts[run.todo[following]] if following < len(run.todo) else None
        for chunk in behind.chunks() if behind is not None else ():
            self.transfers.fetch_ahead(chunk)  # without memory now, it is fetched once this part's is free
        for chunk in run.parts[number].chunks():
            buffers.append(self.transfers.arrive(chunk))

    def _halve(self, run: StepRun, number: int) -> bool:
        """Cut the bucket of a part for which there is no memory in two, which step one after the other."""
        part = run.parts[number]
        if part.stretch is not None:
            return self._halve_stretches(run, number, part.stretch)
        if len(part.buckets) != 1 or len(part.buckets[0].parameters) < 2:
            return False
        bucket = part.buckets[0]
        self._warn_of_halving(bucket.nbytes)
        self.store.adopt(bucket.parameters, anywhere=True, apart=set(bucket.parameters[: len(bucket.parameters) // 2]))
        number_of = {p: group for group, parameters in part.chosen for p in parameters}
        halves = [
            self.parts.together(half.parameters, number_of, [half]) for half in self.parts.buckets_of(bucket.parameters)
        ]
        then = part.then
        for half in reversed([half for half in halves if half.chosen]):
            half.then, then = then, half
        assert then is not None
        run.parts[number] = then
        return True

    def _halve_stretches(self, run: StepRun, number: int, stretch: Stretch) -> bool:
        """Cut what is left of a large parameter into stretches of half the length."""
        part, nbytes = run.parts[number], sum(chunk.nbytes for chunk in run.parts[number].chunks())
        if not stretch.cut.halve():
            return False
        self._warn_of_halving(nbytes)
        run.parts[number] = one_by_one(part.chosen[0][0], stretch.cut.stretches(stretch.start))
        return True

    def _warn_of_halving(self, nbytes: int) -> None:
        """Say that a bucket is cut in two, and have nothing under way meanwhile."""
        warnings.warn(
            f"lowtide: no memory on {self.store.device} for {nbytes} bytes of optimizer state at a time; this "
            "bucket is cut in two",
            RuntimeWarning,
            stacklevel=2,
        )
        self.transfers.give_up()
        self.transfers.settle()

    def _stop(self, run: StepRun, part: StepPart, buffers: list[Buffer | None]) -> None:
        """Show the state again as it was before this part, and let go of what was fetched."""
        run.snapshot.take_back()
        if part.stretch is not None:
            part.stretch.hide()
        for chunk, buffer in zip(part.chunks(), buffers, strict=False):
            if buffer is not None:
                self.transfers.drop(buffer)
                if part.stretch is None:
                    chunk.bucket.bind_host(self.optimizer.state)
        self.transfers.give_up()

    def _put_away(self, part: StepPart, whole: list[tuple[torch.UntypedStorage, list[torch.Tensor]]]) -> None:
        """Send the buckets back, and give what the optimizer made anew a bucket."""
        state = self.optimizer.state
        outgrown: dict[torch.Tensor, None] = {}
        for bucket, (buffer, tensors) in zip(part.buckets, whole, strict=True):
            if self._holds_all(bucket, buffer, tensors):
                bucket.resident = None
                self.transfers.send(bucket.whole, (buffer,))
                bucket.bind_host(state)
            else:
                outgrown |= dict.fromkeys(bucket.parameters)
                self.store.part_from(bucket, buffer)
        new = self.store.unplaced(parameter for parameter in part.parameters() if parameter not in outgrown)
        if new or outgrown:
            self.store.adopt([*outgrown, *(values[0][0] for values in new)])

    def _holds_all(self, bucket: StateBucket, buffer: torch.UntypedStorage, shown: list[torch.Tensor]) -> bool:
        """Whether the bucket has all that the optimizer left; tensors that it made anew are copied to their places."""
        state = self.optimizer.state
        for entry, tensor in zip(bucket.entries, shown, strict=True):
            now = entries_of(state, entry.parameter).get(entry.key)
            if now is tensor:
                continue
            local = inside(now) if isinstance(now, torch.Tensor) else None
            if local is None or (local.size(), local.stride(), local.dtype) != entry.shape[:2] + entry.shape[3:]:
                return False
            with torch.no_grad():
                entry.over(buffer).copy_(local)
        known = {(entry.parameter, entry.key) for entry in bucket.entries}
        beside = (value for values in self.store.unplaced(bucket.parameters) for value in values)
        return not any((parameter, key) not in known for parameter, key, _ in beside)

    def _said(self, run: StepRun, number: int, error: Exception) -> PartialStepError:
        kind, count = type(self.optimizer).__name__, len(run.parts)
        if run.is_tainted:
            text = (
                f"{kind}.step failed inside part {number} of {count} ({type(error).__name__}: {error}); some of its "
                "parameters may be updated and others not, so it cannot be resumed: load a checkpoint"
            )
        elif not run.can_resume:
            text = (
                f"{kind}.step stopped before part {number} ({type(error).__name__}: {error}) within the backward pass, "
                "whose other gradients will not come: load a checkpoint"
            )
        else:
            text = (
                f"{kind}.step stopped before part {number} of {count} ({type(error).__name__}: {error}); the parts "
                "before it are updated and nothing is lost: call handle.resume() to go on with the same gradients"
            )
        return PartialStepError(text, bucket=number, can_resume=run.can_resume)
