"""Running out of memory in the middle of a micro-batch: take it back, need less, run it again.

What: `Rollback.run(closure)` runs forward and backward of one micro-batch. On an out-of-memory error anywhere in it,
where a recipe made other bytes than it should (runtime/recompute/fingerprint.py), and where a layer that a plan runs
again turns out to be one that cannot (refused.py; both are kept the next time), the graph is let go, everything that
the micro-batch changed is put back to the bit (what modules hold, random states: tensors/snapshot.py; lowtide's
totals), the plan is tightened, and the closure runs again.
Why at this level: inside an allocator there is no safe place to think, and an operator cannot be repeated from outside.
A micro-batch can, because autograd owns everything that lowtide holds for it.

Gradients are not copied, and not moved aside while all goes well: with gradient accumulation that would double them. A
gradient that has received its share of this micro-batch before the error keeps it (it is complete, and the second run
would compute the same bits); in the second run that parameter lends autograd an empty gradient, which is thrown away.
So every `.grad` is what plain accumulation gives, because autograd's own accumulation made it. A gradient that did not
exist before the micro-batch is simply dropped.

Refused, with a note on the error that says why: several ranks, unless all take each step so (together.py),
parameters with post-accumulate-grad hooks (they have acted on a gradient already), a closure that wrote to parameters
(through `.data` too, as samples of them show: a second run would write once more) or into gradients by itself.

Cost while nothing fails: one walk over what the modules hold (tensors/snapshot.py: about 20 us a module), 7 us a
parameter and 12 us more where it has a gradient, a copy of each buffer up to 1 MiB, a host copy of larger ones until
they were seen not to change.
Not covered: what the closure itself advances (a data iterator: draw the batch outside), gradients of tensors that are
neither the model's nor the optimizer's, and what a snapshot does not reach.
"""

from __future__ import annotations

import contextlib
import gc
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from lowtide.errors import RecomputeRefusedError
from lowtide.runtime.recompute.fingerprint import RecipeMismatchError
from lowtide.runtime.saved.stats import Counters
from lowtide.runtime.session.together import Attempt, JointStepError, places
from lowtide.tensors.kinds import is_plain, swapped_weights_of
from lowtide.tensors.out_of_memory import is_out_of_memory
from lowtide.tensors.private import disable_current_modes, gradient_hooks, version_of
from lowtide.tensors.snapshot import take
from lowtide.tensors.view import sample_of
from lowtide.tensors.wrappers import inside

MAX_ATTEMPTS = 3
"""Beside those that keep one more layer, of which there are at most as many as layers."""
# Facts, not work: what was really copied, waited for or refused stays counted when a micro-batch is taken back.
_KEPT_COUNTERS = frozenset(
    {"copied_in_bytes", "copied_out_bytes", "stall_seconds", "num_kept_for_lack_of_room", "num_retries"}
)


_WROTE = "the closure wrote to parameters (an optimizer step belongs outside of it)."


class Rollback:
    """Runs micro-batches of one model, and runs them again after an out-of-memory error. See the module."""

    def __init__(self, handle: Any, optimizer: torch.optim.Optimizer | None) -> None:
        """`handle`: a `Handle` (handle.py), which makes the plan smaller."""
        self._handle = handle
        self._optimizer = optimizer
        self._steady = WeakTensorKeyDictionary()
        self._places = places()
        """Of joint attempts."""
        self.is_running = False
        """Inside `run`, which has the last word on an error."""

    def run(self, closure: Callable[[], Any], *, is_local: bool, is_joint: bool = False) -> Any:
        """What `closure()` returns. Raises what it raises; an out-of-memory error only when nothing helped. `is_joint`:
        all ranks call this, and take the micro-batch back together (together.py)."""
        self.is_running = True
        is_joint = is_joint and _num_ranks() > 1
        try:
            start = _Start(self._handle.model, self._optimizer, self._handle._counters(), self._steady)
            try:
                result = self._repeated(closure, start, is_local=is_local, is_joint=is_joint)
                start.check_repeated()
            finally:
                start.close()
            start.state.note_steady()
            return result
        finally:
            self.is_running = False

    def _repeated(self, closure: Callable[[], Any], start: _Start, *, is_local: bool, is_joint: bool) -> Any:
        """What `closure()` returns, once it comes to its end."""
        tried: list[str] = []
        kept: set[str] = set()
        while True:
            attempt = Attempt(self._handle.model, next(self._places)) if is_joint else None
            try:
                with attempt or contextlib.nullcontext():
                    return closure()
            except Exception as error:
                if not _may_be_repeated(error, attempt):
                    raise
                failure = error
            # Out of the except block: nothing refers to the failed graph any more but the frames of the error.
            not_again = "lowtide: this micro-batch was not run again: "
            obstacle = _obstacle(start, attempt, is_local=is_local)
            if obstacle is not None:
                failure.add_note(f"{not_again}{obstacle}")
                raise failure
            place = self._let_go(failure)
            start.go_back()
            if (obstacle := start.late_obstacle()) is not None:
                failure.add_note(f"{not_again}{obstacle}")
            refused = {failure.path} - kept if isinstance(failure, RecomputeRefusedError) else set()
            can_try = obstacle is None and (refused or len(tried) < MAX_ATTEMPTS - 1)
            # On several ranks by rules that depend on nothing but the plan, so that all do the same.
            why = failure if attempt is None else JointStepError(_first_line(failure), is_memory=True)
            how = self._handle._tighten(why, len(tried)) if can_try else None
            if attempt is not None and len(answers := {*attempt.exchange(how or "")}) > 1:
                failure.add_note(f"lowtide: the ranks would go on with different plans ({'; '.join(answers)}).")
                raise failure
            if how is None:
                if obstacle is None and not _can_be_given_up(failure):
                    failure.add_note(place)
                    failure.add_note(self._failure_message(tried, start.num_unfinished()))
                raise failure
            kept |= refused
            if not refused:
                tried.append(how)
            counters = self._handle._counters()
            if counters is not None:
                counters.num_retries += 1
            what = "out of memory"
            if _can_be_given_up(failure):
                is_recipe = isinstance(failure, RecipeMismatchError)
                what = "a recipe made other bytes" if is_recipe else "a layer cannot be run again"
            where = "" if attempt is None else " on all ranks"
            warnings.warn(
                f"lowtide: {what} ({_first_line(failure)}); {how}, and the micro-batch is run again{where}.",
                stacklevel=4,
            )
            del failure

    def _let_go(self, failure: BaseException) -> str:
        """End the failed graph, and give its memory back. Returns where memory ran out."""
        place = "".join(["Memory ran out here:\n", *traceback.format_tb(failure.__traceback__)]).rstrip()
        for error in _chain(failure):
            # The frames hold the graph. Clearing them is not enough: sources of nested functions would survive.
            error.__traceback__ = None
        with disable_current_modes(), torch.enable_grad():
            # What a failed backward had ready waits in a queue of torch's, with its graph, until another one begins.
            torch.zeros((), requires_grad=True).backward()
        gc.collect()  # graphs in reference cycles
        self._handle.settle()
        for device_type in {parameter.device.type for parameter in self._handle.model.parameters()} - {"cpu", "meta"}:
            empty_cache = getattr(torch.get_device_module(device_type), "empty_cache", None)
            if empty_cache is not None:
                empty_cache()
        return place

    def _failure_message(self, tried: list[str], num_unfinished: int) -> str:
        what = "; then ".join(tried) if tried else "the plan has nothing left to give"
        partial = (
            f" {num_unfinished} gradients hold a part of this micro-batch: set them to zero before you go on."
            if num_unfinished
            else ""
        )
        return (
            f"lowtide: memory ran out {len(tried) + 1} times in this micro-batch ({what}). "
            f"{self._handle._describe_floor()}{partial} Use smaller micro-batches or a larger device."
        )


def _may_be_repeated(error: BaseException, attempt: Attempt | None) -> bool:
    """Whether another attempt may end well; of a step on all ranks, only where memory ran out on one of them."""
    if attempt is None:
        return is_out_of_memory(error) or _can_be_given_up(error)
    return is_out_of_memory(error) or (isinstance(error, JointStepError) and error.is_memory)


def _obstacle(start: _Start, attempt: Attempt | None, *, is_local: bool) -> str | None:
    """Why the micro-batch cannot be taken back, on this rank or, of a step on all, on any; or None."""
    if attempt is None:
        return _no_second_run(is_local) or start.obstacle()
    found = attempt.exchange(attempt.obstacle() or start.obstacle() or "")
    return next((f"rank {rank}: {why}" for rank, why in enumerate(found) if why), None)


def _can_be_given_up(error: BaseException) -> bool:
    """Whether it is about something that a plan recomputes, and that may as well be kept."""
    return isinstance(error, RecipeMismatchError) or (isinstance(error, RecomputeRefusedError) and error.can_stay)


def _no_second_run(is_local: bool) -> str | None:
    num_ranks = _num_ranks()
    if is_local or not num_ranks:
        return None
    return (
        f"this process is one of {num_ranks} ranks, and a rank cannot repeat its collectives alone. End all ranks and "
        "lower the budget; a closure without collectives may say so: tide.step(closure, is_local=True), and ranks that "
        "all take each step so repeat it together: tide.step(closure, is_joint=True)."
    )


def _num_ranks() -> int:
    """Of the job; 0 where it is none of several processes."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 0


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and everything that it was raised from or during."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        waiting += [one.__cause__, one.__context__]
        yield one


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


class _Gradient:
    """A parameter and the gradient that it had before the micro-batch."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self.parameter = parameter
        self.parameter_version = version_of(parameter)
        self.num_held = 0
        """How many accumulations of this micro-batch the old gradient holds."""
        self.num_seen = 0
        """How many there were in this attempt."""
        self._is_kept_graph = False
        grad = parameter.grad
        # Weakly: a closure that begins with zero_grad() must really free what it drops. Sparse gradients may be
        # replaced instead of written to, and then the old one is what must come back.
        self._old = None if grad is None else TensorWeakRef(grad)
        self._strong = grad if grad is not None and grad.layout is not torch.strided else None
        self._version = 0 if grad is None else version_of(grad)
        self._hook = None if grad is None else parameter.register_post_accumulate_grad_hook(self._after)

    def _after(self, parameter: torch.Tensor) -> None:
        assert self._old is not None
        self.num_seen += 1
        self._is_kept_graph |= torch.is_grad_enabled()
        if self.num_seen < self.num_held:
            parameter.grad = None
        elif self.num_seen == self.num_held:
            parameter.grad = self._strong
        elif parameter.grad is self._old():
            self.num_held += 1

    def obstacle(self) -> str | None:
        """Why the gradient cannot be taken back, or None."""
        if version_of(self.parameter) != self.parameter_version:
            return _WROTE
        if self._old is None:
            return None
        if self._is_kept_graph:
            return "gradients were accumulated with create_graph=True, which replaces them."
        old = self._old()
        num_written = self.num_held if old is None else version_of(old) - self._version
        is_aside = self.num_seen < self.num_held
        if num_written != self.num_held or (self.num_held and not is_aside and self.parameter.grad is not old):
            return "the closure changed gradients by itself (do so outside of it)."
        return None

    def go_back(self) -> None:
        """Ready for another attempt. Where the closure itself let go of the old gradient, there is none."""
        assert self._old is not None or not self.num_held
        old = None if self._old is None else self._old()
        self.num_seen = 0
        if self.num_held:
            self._strong, old = old, None
        self.parameter.grad = old

    def close(self) -> None:
        """The micro-batch is over, well or badly: no gradient stays aside."""
        if self._hook is not None:
            self._hook.remove()
        if self.num_seen < self.num_held and self._strong is not None:
            self.parameter.grad = self._strong


class _Start:
    """What a micro-batch finds: gradients, buffers, attributes, random states, totals. To be closed."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        counters: Counters | None,
        steady: WeakTensorKeyDictionary,
    ) -> None:
        parameters = {id(parameter): parameter for parameter in model.parameters()}
        for group in optimizer.param_groups if optimizer is not None else ():
            parameters.update({id(parameter): parameter for parameter in group["params"]})
        self._counters = counters
        self._counted = {} if counters is None else dict(vars(counters))
        self._has_hooks = any(gradient_hooks(p) for p in parameters.values())
        weights = swapped_weights_of(model)  # those that come and go are compared when they come
        stay = [p for p in parameters.values() if weights is None or not weights.moves(p)]
        self._parameters = [p for p in stay if is_plain(inside(p)) and not p.is_meta]
        with disable_current_modes():
            self._samples = [*map(sample_of, self._parameters)]
        self._gradients = [_Gradient(p) for p in parameters.values() if p.requires_grad]
        try:
            # After them: what comes back includes the hooks of these gradients.
            self.state = take(model, steady=steady, devices={tensor.device for tensor in parameters.values()})
        except BaseException:
            self.close()  # there may be no memory for the copies
            raise

    def close(self) -> None:
        """The micro-batch is over, well or badly."""
        for gradient in self._gradients:
            gradient.close()

    def obstacle(self) -> str | None:
        """Why the micro-batch cannot be taken back, or None."""
        if self._has_hooks:
            return "parameters have post-accumulate-grad hooks, which have acted on gradients of the failed run."
        for gradient in self._gradients:
            if found := gradient.obstacle():
                return found
        lost = self.state.lost(but={id(gradient.parameter) for gradient in self._gradients})
        if not lost:
            return None
        return f"it wrote to '{lost[0]}', which it had not written to before, and there is no copy of it."

    def late_obstacle(self) -> str | None:
        """Why the micro-batch cannot run again, as samples of parameters show: they see what no version counts. They
        take memory, so ask when the failed graph is gone. None: it can."""
        try:
            with disable_current_modes():
                are_same = all(map(torch.equal, self._samples, map(sample_of, self._parameters)))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return "there is no memory to see whether the closure wrote to parameters."
        return None if are_same else _WROTE

    def go_back(self) -> None:
        """Put everything back."""
        for gradient in self._gradients:
            gradient.go_back()
        self.state.restore()
        for name, value in self._counted.items():
            if name not in _KEPT_COUNTERS:
                setattr(self._counters, name, value)

    def num_unfinished(self) -> int:
        """How many old gradients hold a part of the micro-batch."""
        return sum(gradient.num_held > 0 for gradient in self._gradients)

    def check_repeated(self) -> None:
        """After success: the last attempt must have done at least what the failed ones did."""
        if any(gradient.num_held > gradient.num_seen for gradient in self._gradients):
            raise RuntimeError(
                "lowtide: the closure given to tide.step ran out of memory, was run again, and then computed fewer "
                "gradients than before. Gradients are not right now: give tide.step a closure that does the same each "
                "time."
            )
