"""Audit: the exact peak of what is on the device, around any number of steps of the user's.

What: `with tide.audit() as audit: step()`, then `audit.peak_bytes`; from then on `print(tide.plan)` has it beside the
predicted peak, as a report does. Every storage counts from the operator that made it until its memory is freed:
parameters, gradients, optimizer state, activations, temporaries, and the buffers that fetched activations arrive in,
which no operator makes. A batch counts from the first operator that reads it. Why: on the host and the virtual engine
no allocator counts (`stats.peak_device_bytes` has no temporaries there), and what a plan predicted is only worth
something beside a measurement of the same thing.

Around what: whole steps, as they were planned: all micro-batches of a step and the optimizer's, or one forward and
backward. What it leaves: the peak. Counters, gradients, random states and results are those of steps without it.

Cost: about 7 us an operator, so it is no part of a planned step, and its steps say nothing about time: an autopilot
does not compare them. Not covered: memory inside an operator that is freed before it returns; backward passes
in another thread than the one that entered; on an accelerator, `stats.peak_device_bytes` has the allocator's own peak.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

import torch
from torch import nn

from lowtide.errors import ConfigError
from lowtide.runtime.offload.scheduler import OffloadScheduler
from lowtide.tensors.live_bytes import LiveBytes


class Audit:
    """A context in which every live byte is counted. Made by `Tide.audit` and `Autopilot.audit`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        device_type: str,
        *,
        scheduler: Callable[[], OffloadScheduler],
        done: Callable[[int | None], None],
    ) -> None:
        """`scheduler` is that of the plan in force. `done` gets the peak in bytes when the context is left; None where
        it was left by an error, or where one plan followed another inside."""
        self._of = (model, optimizer, device_type)
        self._scheduler = scheduler
        self._followed: list[OffloadScheduler] = []
        self._done = done
        self._live: LiveBytes | None = None

    @property
    def peak_bytes(self) -> int:
        """Most bytes on the device at once, so far; 0 before the context is entered."""
        return 0 if self._live is None else self._live.peak_bytes

    @property
    def is_open(self) -> bool:
        """Whether it counts now."""
        return bool(self._followed)

    def follow(self) -> None:
        """Another plan may be in force now: count what it fetches."""
        assert self._live is not None
        scheduler = self._scheduler()
        if scheduler not in self._followed:
            self._followed.append(scheduler)
        scheduler.on_buffer = self._live.add

    def __enter__(self) -> Audit:
        """Raises ConfigError inside of another audit of the same model, and for one that was over already."""
        if self._scheduler().on_buffer is not None or self._live is not None:
            raise ConfigError("audit: one audit is open or was used already; leave it, and ask for a new one")
        model, optimizer, device_type = self._of
        self._live = LiveBytes(model=model, optimizer=optimizer, device_type=device_type)
        self.follow()
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._live is not None
        self._live.__exit__(kind, error, trace)
        for scheduler in self._followed:
            scheduler.on_buffer = None
        self._done(self._live.peak_bytes if error is None and len(self._followed) == 1 else None)
        self._followed.clear()
