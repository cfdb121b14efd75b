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

import functools
import inspect
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lowtide.engines.base import EngineChoice
from lowtide.errors import ConfigError
from lowtide.optimizer.buckets import bytes_of
from lowtide.optimizer.in_backward import OTHER_WAYS, BackwardPrefetch, InBackward
from lowtide.optimizer.parts import StepRun
from lowtide.optimizer.requests import check_optimizer, checked, engine_for, first_ones, tiers_from
from lowtide.optimizer.state import ShownState
from lowtide.optimizer.step import Stepper
from lowtide.optimizer.store import Holding, StateStore
from lowtide.optimizer.transfers import NUM_BUFFERS
from lowtide.tensors.optimizers import SWAP_ATTRIBUTE, bare, bare_step, parameters_of
from lowtide.tensors.private import is_wrapped_by_scheduler, step_post_hooks, tell_scheduler
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
    optimizer: torch.optim.Optimizer,
    *,
    tier: str = "host",
    overlap: str = "auto",
    resident: float = 0.0,
    bucket_bytes: int | str = "auto",
    engine: EngineChoice = None,
    min_bytes: int | str = MIN_BYTES,
    num_buffers: int = NUM_BUFFERS,
    weights: Holding | None = None,
) -> OptimizerSwap:
    """Keep the state of `optimizer` in main memory or a file between steps, until `detach()` of the handle or the end
    of its `with` block. Parameters, state and `param_groups` are the same to the bit; the optimizer stays the object
    that it is.

    `tier`: "host", the first tier below the device (main memory; for a model on the CPU a file); "disk"; or "mapped",
    the first tier again, but read and written in place by the optimizer's kernels (CPU and CUDA).
    `overlap`: when copies run; "auto" chooses. `resident`: the share of parameters whose state stays on the device.
    `bucket_bytes`: how much is copied at once. `num_buffers`: the most buckets on the device at once, 2 or more.
    State smaller than `min_bytes` stays where it is. `engine`: as in `apply`. `weights`: for `swap_weights`, which
    gives it.
    Raises `ConfigError` for optimizers that cannot be stepped in parts, and for every other mistake.
    """
    found = bare(optimizer)
    if not isinstance(found, torch.optim.Optimizer):
        raise ConfigError(
            f"lowtide.swap_optimizer: takes a torch.optim.Optimizer, or a wrapper around one, not "
            f"{type(optimizer).__name__}"
        )
    device, share, size, least = checked(
        found, tier=tier, overlap=overlap, resident=resident, bucket_bytes=bucket_bytes, min_bytes=min_bytes
    )
    chosen = engine_for(engine, found, tier)
    tiers = tiers_from(chosen, tier)
    store = StateStore(
        found,
        chosen,
        device,
        tiers=tiers,
        bucket_bytes=size,
        min_bytes=least,
        num_buffers=num_buffers,
        in_place=tier == "mapped",
    )
    store.holding = weights
    store.keep(first_ones(found, share, least, largest_first=overlap == "in_backward"))
    if store.transfers.in_place and overlap == "auto":
        overlap = "step"
    return OptimizerSwap(store, overlap=overlap, closes_engine=chosen is not engine)


def why_not(optimizer: Any) -> str:
    """Why the state of an optimizer cannot be swapped, in words for a user; empty where it can."""
    try:
        check_optimizer(bare(optimizer))
    except ConfigError as error:
        return str(error)
    return ""


class OptimizerSwap:
    """The handle of one optimizer. Made by `swap_optimizer`."""

    def __init__(self, store: StateStore, *, overlap: str, closes_engine: bool) -> None:
        self._store = store
        self._closes_engine = closes_engine
        self._is_ours = False
        """Whether the step that runs is the one of this handle."""
        self._has_warned = False
        self._num_steps = 0
        self._engine_stall_seconds = store.engine.stall_seconds()
        # Without a counter of its memory nobody could tell whether a bucket that is fetched early raises the peak.
        is_ahead = overlap == "backward" or (overlap == "auto" and store.engine.device_bytes() is not None)
        self._prefetch = BackwardPrefetch(store) if is_ahead else None
        self._attach()
        self._adopt_all()
        is_in_backward = overlap == "in_backward"
        self._in_backward = InBackward(self._stepper, self._shown, self._begin) if is_in_backward else None

    # -- attach and detach ---------------------------------------------------------------------------------------------

    def _attach(self) -> None:
        optimizer = self.optimizer
        kind = type(optimizer)
        self._bare_step = bare_step(kind)
        self._previous = vars(optimizer).get("step")
        self._shown = ShownState(
            optimizer,
            self._store,
            refuse=self._refuse,
            after_load=self._after_load,
        )
        self._stepper = Stepper(self._store, self._shown)
        # A function: who looks for optimizers in attributes passes it by.
        setattr(optimizer, SWAP_ATTRIBUTE, lambda: self)
        self._step = types.MethodType(_step_of(self, self._previous or kind.step), optimizer)
        optimizer.step = self._step  # type: ignore[method-assign]
        self._hooks: tuple[Any, ...] = (
            optimizer.register_step_pre_hook(lambda *_: self._before_step()),
            optimizer.register_step_post_hook(lambda *_: None if self._is_ours else self._adopt_all()),
        )

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._store.optimizer

    @property
    def is_attached(self) -> bool:
        """Whether the swap is in force."""
        return bool(self._hooks)

    def _adopt_all(self) -> None:
        new = [values[0][0] for values in self._store.unplaced(parameters_of(self.optimizer))]
        if new:
            self._store.adopt(new)
        self._store.transfers.settle()

    def _before_step(self) -> None:
        """Somebody who kept the class's own `step` calls it: all of the state comes to the device for it."""
        if self._is_ours:
            return
        self.flush()
        if self._in_backward is not None:
            self._in_backward.end()
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"lowtide: {type(self.optimizer).__name__}.step was called past the swap (by who kept it from before), "
                "so all of its state is on the device in each step; attach before accelerator.prepare and other "
                "wrappers",
                RuntimeWarning,
                stacklevel=2,
            )
        self._store.bring_back()

    @property
    def has_begun(self) -> bool:
        """Whether backward has updated some parameters of a step whose `step()` is to come."""
        return self._in_backward is not None and self._in_backward.run is not None

    def hold_updates(self, holds: bool) -> None:
        """While `holds`, gradients that come wait for those of more micro-batches, and update nothing."""
        if self._in_backward is not None:
            self._in_backward.hold(holds)

    def detach(self) -> None:
        """Bring the state back to the device, in plain tensors, and leave the optimizer as it was. Idempotent.

        Where memory runs out the swap stays in force, and a later call goes on from there.
        """
        if not self.is_attached:
            return
        self.flush()
        optimizer = self.optimizer
        self._store.bring_back()
        # From here on nothing runs out of memory; before, all is in force and can be called again.
        if self._in_backward is not None:
            self._in_backward.remove()
        if self._prefetch is not None:
            self._prefetch.remove()
            self._prefetch = None
        self._stepper.torn = None
        for hook in self._hooks:
            hook.remove()
        self._hooks = ()
        self._shown.take_off()
        delattr(optimizer, SWAP_ATTRIBUTE)
        if vars(optimizer).get("step") is self._step:
            del optimizer.step
            if self._previous is not None:
                optimizer.step = self._previous  # type: ignore[method-assign]
        if self._closes_engine:
            self._store.engine.close()

    def keep_no_more_than(self, share: float) -> None:
        """Send away the state of parameters beyond this share of all, as far as it stayed. Nothing comes back. Call it
        between steps. Raises RuntimeError where a step has stopped half-way."""
        self._stepper.refuse_torn("keep_no_more_than")
        store = self._store
        self.flush()
        chosen = first_ones(self.optimizer, share, store.min_bytes, largest_first=self._in_backward is not None)
        store.keep(chosen & store.asked_to_stay)
        self._adopt_all()

    def __enter__(self) -> OptimizerSwap:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    # -- a step --------------------------------------------------------------------------------------------------------

    def _run(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """One step, without its hooks."""
        self._stepper.refuse_torn("step")
        begun = None if self._in_backward is None else self._in_backward.run
        if begun is not None and self.optimizer.state is not begun.state:
            raise RuntimeError(
                "lowtide: step: optimizer.state was replaced after backward had begun this step; put the old one back, "
                "and replace it after optimizer.step()"
            )
        self._shown.take_over()
        given = inspect.signature(self._bare_step).bind(self.optimizer, *args, **kwargs)
        closure, loss = given.arguments.pop("closure", None), None
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
        run.call = functools.partial(self._bare_step, *given.args, **given.kwargs)
        with self._shown.stepping():
            self._stepper.add_all(run)
        self._stepper.advance(run)
        self._num_steps += 1
        if is_wrapped_by_scheduler(self._previous):
            tell_scheduler(self.optimizer)
        return run.result if closure is None else loss

    def _taken_from_backward(self) -> StepRun | None:
        """The step that backward began, if it did. RuntimeError where it cannot be done to the bits of plain."""
        if self._in_backward is None:
            return None
        reason = self._in_backward.why_not_done()
        self._in_backward.fill()
        run = self._in_backward.take()
        if run is None or not reason:
            return run
        self._stepper.tear(run, RuntimeError(reason))
        raise RuntimeError(
            f"lowtide: step: {reason}, and parameters were updated in backward, before that: load a checkpoint, and "
            f"use {OTHER_WAYS}"
        )

    def _begin(self) -> StepRun:
        """A step without any part yet."""
        with self._shown.stepping():
            self._stepper.check()
            call = functools.partial(self._bare_step, self.optimizer)
            if self._prefetch is not None:
                self._prefetch.begin_step()
            return self._stepper.begin(call)

    def resume(self) -> Any:
        """Go on with a step that stopped with `PartialStepError`, from the part that failed, with the same gradients.

        Raises RuntimeError where no step stopped, where it stopped inside a part, or where gradients are others now.
        """
        run = self._stepper.resume()
        self._num_steps += 1
        for hook in step_post_hooks(self.optimizer):
            hook(self.optimizer, (self.optimizer,), {})
        return run.result

    # -- what others see -----------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Block until main memory and files have all of the state."""
        self._shown.take_over()
        self._store.transfers.settle()

    def _refuse(self, call: str) -> None:
        """RuntimeError where a checkpoint cannot be made or loaded now. To load one is the way out of a torn step."""
        is_way_out = call == "load_state_dict" and self._stepper.torn is not None
        if self._in_backward is not None and self._in_backward.run is not None and not is_way_out:
            raise RuntimeError(
                f"lowtide: {call}: the step that backward began is not done; call optimizer.step() first"
            )
        if not is_way_out:
            self._stepper.refuse_torn(call)

    def _after_load(self) -> None:
        self._stepper.torn = None
        if self._in_backward is not None:
            self._in_backward.end()

    def state_here(self) -> list[Any]:
        """What is in `optimizer.state`, without the tensors that take no memory of the device. Sizes only: nothing is
        waited for."""
        elsewhere = self.ids_elsewhere()
        with self._shown.stepping():
            entries = [one.values() if isinstance(one, dict) else (one,) for one in self.optimizer.state.values()]
        return [value for values in entries for value in values if id(value) not in elsewhere]

    def ids_elsewhere(self) -> set[int]:
        """Identities of the tensors in `optimizer.state` that take no memory of the device."""
        return {id(host) for bucket in self._store.buckets if bucket.resident is None for host in bucket.hosts}

    @property
    def stats(self) -> OptimizerStats:
        """What was moved so far, and what lives where now."""
        store, transfers, way = self._store, self._store.transfers, "step" if self._prefetch is None else "backward"
        with self._shown.stepping():  # sizes only
            found = [entries for entries in self.optimizer.state.values() if isinstance(entries, dict)]
        total = sum(bytes_of(value) for entries in found for value in entries.values())
        swapped = sum(entry.nbytes for bucket in store.buckets if bucket.resident is None for entry in bucket.entries)
        return OptimizerStats(
            num_steps=self._num_steps,
            num_buckets=sum(len(bucket.chunks) for bucket in store.buckets),
            swapped_bytes=swapped,
            resident_bytes=total - swapped,
            bucket_peak_bytes=transfers.peak_bytes,
            gradient_peak_bytes=None if self._in_backward is None else self._in_backward.gradient_peak_bytes,
            sent_bytes=transfers.sent_bytes,
            fetched_bytes=transfers.fetched_bytes,
            stall_seconds=self._stall_seconds(),
            overlap="in_backward" if self._in_backward is not None else way,
        )

    def _stall_seconds(self) -> float:
        # An engine that others use too has stalls that are not ours.
        engine_stalls = self._store.engine.stall_seconds() - self._engine_stall_seconds if self._closes_engine else 0.0
        return self._store.transfers.stall_seconds + engine_stalls

    def __str__(self) -> str:
        stats = self.stats
        total = stats.swapped_bytes + stats.resident_bytes
        share = stats.resident_bytes / total if total else 1.0
        gradients = stats.gradient_peak_bytes
        most = "" if gradients is None else f", with {format_bytes(gradients)} of gradients at most at a time"
        tiers = ", ".join(sorted({bucket.slot.tier for bucket in self._store.buckets})) or "no tier yet"
        return (
            f"{type(self.optimizer).__name__}: {format_bytes(stats.swapped_bytes)} of state on {tiers} between steps, "
            f"{share:.0%} resident; {stats.num_buckets} buckets, {format_bytes(stats.bucket_peak_bytes)} at most on "
            f"{self._store.device} in a step; {stats.num_steps} steps waited {stats.stall_seconds:.3f} s for copies "
            f"(overlap '{stats.overlap}'{most})"
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
        if not holder.is_attached:  # a scheduler has kept this function
            return type(optimizer).step(optimizer, *args, **kwargs)
        holder._is_ours = True
        try:
            return hooked(optimizer, *args, **kwargs)
        finally:
            holder._is_ours = False

    return step
