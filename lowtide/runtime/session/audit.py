"""Audit: the exact peak of what is on the device, around any number of steps of the user's.

What: `with tide.audit() as audit: step()`, then `audit.peak_bytes`. Every storage counts from the operator that made
it until its memory is freed: parameters, gradients, optimizer state, activations, temporaries, and the buffers that
fetched activations arrive in, which no operator makes. Why: on the host and the virtual engine no allocator counts, and
what a plan predicted is only worth something beside a measurement of the same thing.

Cost: about 6 us an operator, so it is no part of a planned step. Not covered: memory inside an operator that is freed
before it returns; the trial runs of recipes in the first forward; on an accelerator, `stats.peak_device_bytes` has the
allocator's own peak.
"""

from __future__ import annotations

from types import TracebackType

import torch
from torch import nn

from lowtide.runtime.offload.scheduler import OffloadScheduler
from lowtide.tensors.live_bytes import LiveBytes


class Audit:
    """A context in which every live byte is counted. Made by `Tide.audit`."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, scheduler: OffloadScheduler, device_type: str
    ) -> None:
        self._scheduler = scheduler
        self._live = LiveBytes(model=model, optimizer=optimizer, device_type=device_type)

    @property
    def peak_bytes(self) -> int:
        """Most bytes on the device at once, so far."""
        return self._live.peak_bytes

    def __enter__(self) -> Audit:
        self._scheduler.on_buffer = self._live.add
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._scheduler.on_buffer = None
        self._live.__exit__(kind, error, trace)
