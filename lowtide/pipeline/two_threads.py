"""Two threads of which exactly one runs: whose turn it is, and what the second thread takes over from the first.

What: a `Baton` is with one of two halves; the other waits. It changes hands only where its holder passes it on, so what
both do happens in one order, the same in every run and on every rank. A half that is over passes it on for good; one
that raised makes the other raise `Abandoned` where it waits, so nobody waits for ever.
`ThreadState` is what torch keeps for each thread (gradients on or off, autocast, device and stream, saved-tensor hooks,
modes) and Python's context variables: a backward on the second thread finds what it would find on the caller's.

Cost: 16 us each time that the baton changes hands, and 0.1 ms a pair.
Not covered: `threading.local` of other libraries.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from lowtide.tensors.private import (
    Hooks,
    dispatch_modes,
    function_modes,
    pop_dispatch_mode,
    pop_function_mode,
    pop_saved_tensors_hooks,
    push_dispatch_mode,
    push_function_mode,
    push_saved_tensors_hooks,
    top_saved_tensors_hooks,
)


class Abandoned(BaseException):
    """The other half raised, so this one need not go on. Not an `Exception`: models catch those."""


class Baton:
    """Who of two halves, named by words, runs."""

    def __init__(self, first: str) -> None:
        self._holder: str | None = first
        self._over: set[str] = set()
        self._changed = threading.Condition()
        self.error: BaseException | None = None
        """What the first half that raised has raised."""

    def wait_for(self, half: str) -> None:
        """Return when it is the turn of `half`. Raises Abandoned if the other one has raised."""
        with self._changed:
            while self._holder != half and self.error is None:
                self._changed.wait()
            if self.error is not None:
                raise Abandoned

    def pass_on(self, half: str, other: str) -> bool:
        """Let the other half run, until the baton comes back. False if the other half is over: nothing has run."""
        with self._changed:
            if self.error is not None:
                raise Abandoned
            assert self._holder == half, f"{half} runs although it is not its turn"
            if other in self._over:
                return False
            self._holder = other
            self._changed.notify_all()
        self.wait_for(half)
        return True

    def end(self, half: str, other: str, error: BaseException | None) -> None:
        """`half` is over, and raised `error` if that is not None."""
        with self._changed:
            self._over.add(half)
            if self.error is None and not isinstance(error, Abandoned):
                self.error = error
            if self._holder == half:
                self._holder = other
            self._changed.notify_all()


@dataclass(frozen=True, slots=True)
class ThreadState:
    """What torch keeps for the thread that called `now`."""

    context: contextvars.Context
    has_gradients: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    """For each kind of device: whether it is on, and the dtype."""
    caches_casts: bool
    stream: torch.Stream | None
    """Of the accelerator, if the process uses one."""
    hooks: Hooks | None
    function_modes: tuple[Any, ...]
    dispatch_modes: tuple[Any, ...]

    @staticmethod
    def now() -> ThreadState:
        device = torch.accelerator.current_accelerator()
        kinds = ["cpu"] if device is None else ["cpu", device.type]
        # To ask for the stream of a device that nobody uses would set it up.
        is_used = device is not None and getattr(torch.get_device_module(device), "is_initialized", bool)()
        return ThreadState(
            context=contextvars.copy_context(),
            has_gradients=torch.is_grad_enabled(),
            autocast=tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds),
            caches_casts=torch.is_autocast_cache_enabled(),
            stream=torch.accelerator.current_stream() if is_used else None,
            hooks=top_saved_tensors_hooks(),
            function_modes=tuple(function_modes()),
            dispatch_modes=tuple(dispatch_modes()),
        )

    @contextlib.contextmanager
    def taken_over(self) -> Iterator[None]:
        """Inside, this thread is as the other one was. Afterwards hooks and modes are off; the rest stays as it is."""
        torch.set_grad_enabled(self.has_gradients)
        for kind, is_on, dtype in self.autocast:
            torch.set_autocast_enabled(kind, is_on)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self.caches_casts)
        if self.stream is not None:
            torch.accelerator.set_stream(self.stream)  # and its device
        torch.get_num_threads()  # tells this thread how many torch was told to use
        with contextlib.ExitStack() as stack:
            # Whoever leaves the outermost autocast of a thread empties a cache that all threads share, and a weight
            # that the other half uses twice would be cast twice: other sums.
            torch.autocast_increment_nesting()
            stack.callback(torch.autocast_decrement_nesting)
            if self.hooks is not None:
                push_saved_tensors_hooks(*self.hooks)
                stack.callback(pop_saved_tensors_hooks)
            for mode in self.function_modes:
                push_function_mode(mode)
                stack.callback(pop_function_mode)
            for mode in self.dispatch_modes:
                push_dispatch_mode(mode)
                stack.callback(pop_dispatch_mode)
            yield
