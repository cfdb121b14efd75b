"""The door of this room: optimizer state in main memory or a file, fetched for the moment of a step.

What: `swap_optimizer` attaches to an optimizer and gives a handle. The optimizer stays the object that it is, of its
own class; schedulers, `GradScaler`, clipping, Accelerate and checkpoints go on working with it.
How: an instance attribute `step` (as torch's schedulers set one), hooks for `state_dict` and `load_state_dict`, and a
mapping in place of `optimizer.state` that waits for copies. All of it is taken back by `detach()`.
Why: master weights and moments are 8 to 12 bytes a parameter, and are used for a moment of each step. With the state
elsewhere the device has room for that many bytes of activations, or of a larger model.

Cost: the bytes cross the link twice a step; `overlap` says where that hides. Between steps the device holds none of
the state, in a step at most three buckets.
Not covered: LBFGS, optimizers captured in graphs of the device, parameters on several devices (all refused).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from lowtide.core.budget import DeviceMemory
from lowtide.engines.base import EngineChoice
from lowtide.engines.device_memory import device_memory
from lowtide.errors import ConfigError
from lowtide.optimizer.in_backward import InBackward, StepCalls, StepOverlap, check_alone
from lowtide.optimizer.requests import (
    bucket_bytes_of,
    check_names,
    check_optimizer,
    engine_for,
    first_ones,
    share_of,
    size_of,
    tiers_from,
    why_none_stays,
    why_not_exact,
)
from lowtide.optimizer.residency import Residency, StateChoice
from lowtide.optimizer.state import Checkpoints, SettledState
from lowtide.optimizer.step import Stepper, StepRun
from lowtide.optimizer.store import StateStore
from lowtide.optimizer.transfers import NUM_BUFFERS
from lowtide.optimizer.trial import bare_step, why_not_in_parts
from lowtide.tensors.optimizers import SWAP_ATTRIBUTE, bare
from lowtide.tensors.private import is_wrapped_by_scheduler, step_post_hooks, tell_scheduler
from lowtide.tensors.wrappers import inside
from lowtide.units import format_bytes

MIN_BYTES = 16 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStats:
    """What a handle has done so far. Bytes are of this rank."""

    num_steps: int
    num_buckets: int
    swapped_bytes: int
    """State that lives elsewhere between steps."""
    resident_bytes: int
    """State that stays on the device."""
    bucket_peak_bytes: int
    """Most bytes of buckets that were on the device at a time."""
    gradient_peak_bytes: int | None
    """Most bytes of gradients that were there at a time, of those that came in one step; None: all that came, since
    nothing is freed before the step ends (overlap 'in_backward' alone does)."""
    sent_bytes: int
    fetched_bytes: int
    stall_seconds: float
    """Time that steps waited for copies, as far as the engine can tell."""
    overlap: str
    """'step', 'backward' or 'in_backward': the way that is in force now."""


def swap_optimizer(
    optimizer: Any,
    *,
    tier: str = "host",
    overlap: str = "auto",
    resident: float | str = "auto",
    bucket_bytes: int | str = "auto",
    engine: EngineChoice = None,
    min_bytes: int | str = MIN_BYTES,
    num_buffers: int = NUM_BUFFERS,
    memory: Callable[[], DeviceMemory] | None = None,
) -> OptimizerSwap:
    """See `lowtide.swap_optimizer`. `num_buffers`: buckets that a step has on the device at a time, 2 at least.
    `memory`: what the device has for this process (None: ask its driver)."""
    found = bare(optimizer)
    if not isinstance(found, torch.optim.Optimizer):
        raise ConfigError(
            f"lowtide.swap_optimizer: takes a torch.optim.Optimizer, or a wrapper around one, not "
            f"{type(optimizer).__name__}"
        )
    check_names(tier, overlap)
    share = share_of(resident)
    size = None if bucket_bytes == "auto" else bucket_bytes_of(bucket_bytes)
    least = size_of("min_bytes", min_bytes)
    device = check_optimizer(found)
    refusal = why_not_in_parts(found)
    if refusal:
        raise ConfigError(f"lowtide.swap_optimizer: {refusal}")
    if overlap == "in_backward":
        check_alone()
    chosen = engine_for(engine, found, tier)
    tiers = tiers_from(chosen, tier)
    store = StateStore(found, chosen, device, tiers=tiers, bucket_bytes=size, min_bytes=least, num_buffers=num_buffers)
    store.keep(first_ones(found, share or 0.0, least))
    handle = OptimizerSwap(found, store, overlap=overlap, closes_engine=chosen is not engine)
    if share is None:
        handle.choose_residency(memory or functools.partial(device_memory, device, own_bytes=0))
    return handle


def why_not(optimizer: Any) -> str:
    """Why the state of an optimizer cannot be swapped, in words for a user; empty where it can."""
    found = bare(optimizer)
    try:
        check_optimizer(found)
    except ConfigError as error:
        return str(error)
    refusal = why_not_in_parts(found)
    return f"lowtide.swap_optimizer: {refusal}" if refusal else ""


class OptimizerSwap:
    """The handle of one optimizer. Made by `swap_optimizer`."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        store: StateStore,
        *,
        overlap: str,
        closes_engine: bool,
    ) -> None:
        self.optimizer = optimizer
        self._store = store
        self._transfers = store.transfers
        self._stepper = Stepper(optimizer, store)
        self._closes_engine = closes_engine
        self._is_stepping = False
        self._is_attached = False
        self._is_ours = False
        """Whether the step that runs is the one of this handle."""
        self._has_warned = False
        self._torn: StepRun | None = None
        self._torn_error: BaseException | None = None
        self._num_steps = 0
        self._in_backward: InBackward | None = None
        self._residency: Residency | None = None
        self._engine_stall_seconds = store.engine.stall_seconds()
        self._attach()
        self._overlap = StepOverlap(overlap, store, self._stall_seconds)
        self._adopt_all()
        if overlap == "in_backward":
            calls = StepCalls(self._begin, self._advance, self._refresh, self._stepping)
            self._in_backward = InBackward(self._stepper, self._parameters(), calls)

    # -- attach and detach ---------------------------------------------------------------------------------------------

    def _attach(self) -> None:
        optimizer = self.optimizer
        kind = type(optimizer)
        self._bare_step = bare_step(kind)
        self._takes_closure = "closure" in inspect.signature(self._bare_step).parameters
        self._previous = vars(optimizer).get("step")
        self._original_state = optimizer.state
        self._state = SettledState(self._settle, getattr(optimizer.state, "default_factory", dict), optimizer.state)
        optimizer.state = self._state
        self._begun_with: Any = None
        """What was `optimizer.state` when the last step began."""
        # A function: who looks for optimizers in attributes passes it by.
        setattr(optimizer, SWAP_ATTRIBUTE, lambda: self)
        self._step = types.MethodType(_step_of(self, self._previous or kind.step), optimizer)
        optimizer.step = self._step  # type: ignore[method-assign]
        self._checkpoints = Checkpoints(
            optimizer,
            self._store,
            before_save=self._before_state_dict,
            before_load=self._before_load,
            after_load=self._after_load,
            settle=self._settle,
        )
        self._hooks = (
            optimizer.register_step_pre_hook(lambda *_: self._before_step()),
            optimizer.register_step_post_hook(lambda *_: self._after_step()),
        )
        self._is_attached = True

    def _parameters(self) -> list[torch.Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _adopt_all(self) -> None:
        new = [values[0][0] for values in self._store.homeless(self._parameters())]
        if new:
            self._store.adopt(new)
        self._transfers.settle()

    def _before_step(self) -> None:
        """Somebody who kept the class's own `step` calls it: all of the state comes to the device for it."""
        if self._is_ours:
            return
        self.flush()
        if self._in_backward is not None:
            self._in_backward.end(self._parameters())
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"lowtide: {type(self.optimizer).__name__}.step was called past the swap (by who kept it from before), "
                "so all of its state is on the device in each step; attach before accelerator.prepare and other "
                "wrappers",
                RuntimeWarning,
                stacklevel=2,
            )
        self._overlap.give_up()
        self._store.bring_back()

    def _after_step(self) -> None:
        if not self._is_ours:
            self._adopt_all()

    def detach(self) -> None:
        """Bring the state back to the device, in plain tensors, and leave the optimizer as it was. Idempotent.

        Where memory runs out the swap stays in force, and a later call goes on from there.
        """
        if not self._is_attached:
            return
        self.flush()
        optimizer, state = self.optimizer, self.optimizer.state
        if self._in_backward is not None:
            self._in_backward.let_go()
        self._overlap.give_up()
        self._store.bring_back()
        # From here on nothing runs out of memory; before, all is in force and can be called again.
        if self._in_backward is not None:
            self._in_backward.remove()
        self._overlap.close()
        self._transfers.close()
        self._is_attached = False
        self._torn = None
        self._checkpoints.remove()
        for hook in self._hooks:
            hook.remove()
        if isinstance(state, SettledState):
            content = dict(state.items())
            self._original_state.clear()
            self._original_state.update(content)
            optimizer.state = self._original_state
        delattr(optimizer, SWAP_ATTRIBUTE)
        if vars(optimizer).get("step") is self._step:
            del optimizer.step
            if self._previous is not None:
                optimizer.step = self._previous  # type: ignore[method-assign]
        if self._closes_engine:
            self._store.engine.close()

    def choose_residency(self, memory: Callable[[], DeviceMemory]) -> None:
        """From now on what stays on the device is chosen by what `memory()` says that there is."""
        self._residency = Residency(
            self._store, memory, settle=self.flush, is_alone=self._closes_engine, why_none=why_none_stays()
        )

    def keep_no_more_than(self, share: float) -> None:
        """From now on no more than this share of the parameters has its state on the device: what stayed beyond leaves.
        Between steps. Nothing comes back. Raises RuntimeError where a step has stopped half-way."""
        if self._torn is not None:
            raise RuntimeError(self._words_of_torn("keep_no_more_than"))
        store = self._store
        self.flush()
        store.keep(first_ones(self.optimizer, share, store.min_bytes) & store.asked_to_stay)
        self._adopt_all()

    def __enter__(self) -> OptimizerSwap:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    # -- a step --------------------------------------------------------------------------------------------------------

    def _run(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """One step, without its hooks."""
        if self._torn is not None:
            raise RuntimeError(self._words_of_torn("step"))
        if self._is_under_way and self.optimizer.state is not self._begun_with:
            raise RuntimeError(
                "lowtide: step: optimizer.state was replaced after backward had begun this step; put the old one back, "
                "and replace it after optimizer.step()"
            )
        self._take_over()
        closure, args, kwargs = self._closure_in(args, kwargs)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._store.engine.is_capturing():
            raise RuntimeError(
                "lowtide: a swapped optimizer cannot be captured in a graph of the device; detach() first"
            )
        run = self._taken_from_backward()
        if run is None:
            run = self._begin()
        run.call = functools.partial(self._bare_step, self.optimizer, *args, **kwargs)
        with self._stepping():
            self._stepper.add_all(run)
        self._advance(run, None)
        self._num_steps += 1
        if self._residency is not None:
            is_settled = self._num_steps > 1 and not self._overlap.is_trying
            self._residency.after_step(self._stall_seconds, self._overlap.tried, is_settled=is_settled)
        if is_wrapped_by_scheduler(self._previous):
            tell_scheduler(self.optimizer)
        return run.result if closure is None else loss

    def _taken_from_backward(self) -> StepRun | None:
        """The step that backward began, if it did. RuntimeError where it cannot be done to the bits of plain."""
        if self._in_backward is None:
            return None
        reason = self._in_backward.why_not_done()
        run = self._in_backward.take(self._parameters())
        if run is None or not reason:
            return run
        self._tear(run, RuntimeError(reason))
        raise RuntimeError(
            f"lowtide: step: {reason}, and overlap='in_backward' has updated parameters before that: load a "
            "checkpoint, and use overlap='backward'"
        )

    def _tear(self, run: StepRun, error: RuntimeError) -> None:
        """A step that cannot be done to the bits of plain any more: only a checkpoint mends it."""
        self._stepper.give_up(run)
        run.is_tainted = True
        self._torn, self._torn_error = run, error

    def _begin(self) -> StepRun:
        """A step without any part yet."""
        if self._torn is not None:
            raise RuntimeError(self._words_of_torn("step"))
        self._begun_with = self.optimizer.state
        with self._stepping():
            odd = why_not_exact(self.optimizer)
            if odd:
                raise RuntimeError(f"lowtide: step: {odd}, or call handle.detach()")
            call = functools.partial(self._bare_step, self.optimizer)
            return self._stepper.begin(call, self._overlap.begin_step())

    def _advance(self, run: StepRun, numbers: list[int] | None) -> None:
        """Step some parts of a step; None: all that are left, and the step ends."""
        try:
            with self._stepping():
                for number in numbers or ():
                    self._stepper.step_part(run, number)
                if numbers is None:
                    self._stepper.run(run)
        except BaseException as error:
            self._torn, self._torn_error = run, error
            raise

    @contextlib.contextmanager
    def _stepping(self) -> Iterator[None]:
        """Within, `optimizer.state` is the optimizer's own to read, and nothing waits for copies."""
        before, self._is_stepping = self._is_stepping, True
        try:
            yield
        finally:
            self._is_stepping = before

    def _closure_in(
        self, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[Callable[[], Any] | None, tuple, dict[str, Any]]:
        if not self._takes_closure:
            return None, args, kwargs
        if args:
            return args[0], args[1:], kwargs
        return kwargs.get("closure"), args, {key: value for key, value in kwargs.items() if key != "closure"}

    def resume(self) -> Any:
        """Go on with a step that stopped with `PartialStepError`, from the part that failed, with the same gradients.

        Raises RuntimeError where no step stopped, where it stopped inside a part, or where gradients are others now.
        """
        run = self._torn
        if run is None:
            raise RuntimeError("lowtide: no step of this optimizer stopped half-way; there is nothing to resume")
        if not run.can_resume:
            raise RuntimeError(self._words_of_torn("resume"))
        if any(run.gradients[p] is not p.grad for number in run.todo for p in run.parts[number].parameters()):
            raise RuntimeError(
                "lowtide: gradients were replaced since the step stopped, so it cannot go on to the same bits; load a "
                "checkpoint"
            )
        self._torn = self._torn_error = None
        self._advance(run, None)
        self._num_steps += 1
        for hook in step_post_hooks(self.optimizer):
            hook(self.optimizer, (self.optimizer,), {})
        return run.result

    # -- what others see -----------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Block until main memory and files have all of the state."""
        self._take_over()
        self._transfers.settle()

    def _settle(self) -> None:
        if self._is_stepping:
            return
        self._overlap.give_up()  # who looks may write, also through `.data`, which nothing shows
        if not self._transfers.is_settled:
            self._transfers.settle()

    def _take_over(self) -> None:
        """Where somebody has put another mapping in place of `optimizer.state`: what is on its way belongs to the old
        one; from then on the new one counts."""
        optimizer, put = self.optimizer, self.optimizer.state
        if put is self._state or self._is_stepping:
            return
        optimizer.state = self._state
        try:
            self._settle()
        finally:
            if not isinstance(put, SettledState):
                self._original_state = put
            self._state = SettledState(self._settle, getattr(put, "default_factory", None), put)
            optimizer.state = self._state

    def _refresh(self) -> None:
        self._take_over()
        with self._stepping():
            self._store.refresh()

    @property
    def _is_under_way(self) -> bool:
        return self._in_backward is not None and self._in_backward.is_under_way

    def _before_state_dict(self) -> None:
        self._take_over()
        self._settle()
        self._refuse_under_way("state_dict")
        if self._torn is not None:
            raise RuntimeError(self._words_of_torn("state_dict"))

    def _before_load(self) -> None:
        if self._torn is None:  # else to load is the way out
            self._refuse_under_way("load_state_dict")
        self._take_over()
        self._settle()

    def _refuse_under_way(self, call: str) -> None:
        if self._is_under_way:
            raise RuntimeError(
                f"lowtide: {call}: the step that backward began is not done; call optimizer.step() first"
            )

    def _after_load(self, made: Any) -> None:
        """`made`: the mapping that torch has put in place of the one before."""
        self._original_state = made
        self._torn = self._torn_error = None
        if self._in_backward is not None:
            self._in_backward.end(self._parameters())

    def _words_of_torn(self, call: str) -> str:
        assert self._torn is not None
        way = "call handle.resume() first" if self._torn.can_resume else "load a checkpoint"
        return f"lowtide: {call}: the last step stopped half-way ({self._torn_error}); {way}"

    def state_here(self) -> list[Any]:
        """What is in `optimizer.state`, without the tensors that take no memory of the device. Sizes only: nothing is
        waited for."""
        elsewhere = self.ids_elsewhere()
        with self._stepping():
            entries = [one.values() if isinstance(one, dict) else (one,) for one in self.optimizer.state.values()]
        return [value for values in entries for value in values if id(value) not in elsewhere]

    def ids_elsewhere(self) -> set[int]:
        """Identities of the tensors in `optimizer.state` that take no memory of the device."""
        return {id(host) for home in self._store.homes if home.resident is None for host in home.hosts}

    @property
    def residency(self) -> StateChoice | None:
        """What `resident="auto"` chose, and why; None until it has, and where a share was given."""
        return None if self._residency is None else self._residency.choice

    @property
    def stats(self) -> OptimizerStats:
        """What was moved so far, and what lives where now."""
        store, transfers = self._store, self._transfers
        with self._stepping():  # sizes only
            total = sum(
                inside(value).nbytes
                for entries in self.optimizer.state.values()
                if isinstance(entries, dict)
                for value in entries.values()
                if isinstance(value, torch.Tensor) and value.layout == torch.strided
            )
        swapped = sum(entry.nbytes for home in store.homes if home.resident is None for entry in home.entries)
        return OptimizerStats(
            num_steps=self._num_steps,
            num_buckets=sum(len(home.pieces) for home in store.homes),
            swapped_bytes=swapped,
            resident_bytes=total - swapped,
            bucket_peak_bytes=transfers.peak_bytes,
            gradient_peak_bytes=None if self._in_backward is None else self._in_backward.gradient_peak_bytes,
            sent_bytes=transfers.sent_bytes,
            fetched_bytes=transfers.fetched_bytes,
            stall_seconds=self._stall_seconds(),
            overlap=self._overlap_now(),
        )

    def _stall_seconds(self) -> float:
        # An engine that others use too has stalls that are not ours.
        engine_stalls = self._store.engine.stall_seconds() - self._engine_stall_seconds if self._closes_engine else 0.0
        return self._transfers.stall_seconds + engine_stalls

    def _overlap_now(self) -> str:
        return "in_backward" if self._in_backward is not None else self._overlap.mode

    def __str__(self) -> str:
        stats = self.stats
        total = stats.swapped_bytes + stats.resident_bytes
        share = stats.resident_bytes / total if total else 1.0
        gradients = stats.gradient_peak_bytes
        most = "" if gradients is None else f", with {format_bytes(gradients)} of gradients at most at a time"
        tiers = ", ".join(sorted({home.slot.tier for home in self._store.homes})) or "no tier yet"
        return (
            f"{type(self.optimizer).__name__}: {format_bytes(stats.swapped_bytes)} of state on {tiers} between steps, "
            f"{share:.0%} resident; {stats.num_buckets} buckets, {format_bytes(stats.bucket_peak_bytes)} at most on "
            f"{self._store.device} in a step; {stats.num_steps} steps waited {stats.stall_seconds:.3f} s for copies "
            f"(overlap '{stats.overlap}'{most}){'' if self.residency is None else f'; {self.residency}'}"
        )


def _step_of(handle: OptimizerSwap, previous: Any) -> Callable[..., Any]:
    """The function that stands as `optimizer.step`. Its hooks fire once around the whole step, as torch fires them."""
    holder = handle

    @functools.wraps(previous)
    def whole(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        return holder._run(args, kwargs)

    hooked = torch.optim.Optimizer.profile_hook_step(whole)

    @functools.wraps(previous)
    def step(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if not holder._is_attached:  # a scheduler has kept this function
            return type(optimizer).step(optimizer, *args, **kwargs)
        holder._is_ours = True
        try:
            return hooked(optimizer, *args, **kwargs)
        finally:
            holder._is_ours = False

    return step
