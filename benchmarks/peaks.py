"""A run that is measured, and its peak of bytes: what methods and workers share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.subjects import Subject


@dataclass(slots=True)
class Running:
    """A method in force."""

    counters: Callable[[], dict[str, Any]] = dict
    """Since the last `reset`: `copied_bytes`, `stall_seconds`, ... Empty where the method does not say."""
    reset: Callable[[], None] = lambda: None
    audit: Callable[[], Any] | None = None
    """A context with `peak_bytes`, where the plain ledger would miss buffers of the method's own."""
    allocates_outside: bool = False
    """Its memory does not come from operators that a dispatch mode sees; the allocator's own events are counted."""
    facts: Callable[[], dict[str, Any]] = dict
    """What it decided: number of layers, predicted peak."""
    warm_up_steps: int = 1
    close: Callable[[], None] = lambda: None


def peak_bytes(subject: Subject, running: Running) -> int:
    """Of one step: everything on the device at its worst moment."""
    import torch

    if subject.device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(subject.device)
        subject.step()
        subject.synchronize()
        return int(torch.accelerator.max_memory_allocated(subject.device))
    from lowtide.tensors.live_bytes import LiveBytes

    if running.allocates_outside:
        held = LiveBytes(model=subject.model, optimizer=subject.optimizer)
        held.add_all(subject.batch.values())
        return held.now_bytes + allocated_peak_bytes(subject.step)
    counting = LiveBytes(model=subject.model, optimizer=subject.optimizer)
    with running.audit() if running.audit is not None else counting as live:
        subject.step()
    return int(live.peak_bytes)


def allocated_peak_bytes(step: Callable[[], Any]) -> int:
    """The most that torch's CPU allocator handed out at once during `step`, beyond what was out before."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        step()
    events = found.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    now_bytes = peak = 0
    for _, nbytes in changes:
        now_bytes += nbytes
        peak = max(peak, now_bytes)
    return peak
