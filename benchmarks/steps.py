"""What benchmarks of real steps have in common: waiting for the device, the peak of a step, a checksum of its results.

Cost: an audit of every live byte on a CPU takes about 6 µs an operator, in a step of its own; a checksum copies all
gradients to the host. Not covered: several devices.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def synchronize(device: torch.device) -> None:
    """Return when the device has done all its work; on the host it has."""
    if device.type != "cpu":
        torch.get_device_module(device.type).synchronize(device)


def timed(step: Callable[[], Any], device: torch.device) -> float:
    """Seconds of `step`, from an idle device to an idle device."""
    synchronize(device)
    started = time.perf_counter()
    step()
    synchronize(device)
    return time.perf_counter() - started


def allocated_bytes(device: torch.device) -> int:
    """What the device's allocator has given out; 0 on the host, which has no such counter."""
    return 0 if device.type == "cpu" else int(torch.accelerator.memory_allocated(device))


def peak_bytes_of(step: Callable[[], Any], model: nn.Module, tide: Any = None) -> int:
    """Most bytes on the device during `step`, everything counted: on an accelerator the allocator's own peak, on the
    host an audit of every live byte. `tide` is the `Tide` under which the model is, if any."""
    device = next(model.parameters()).device
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)
        step()
        return int(torch.accelerator.max_memory_allocated(device))
    from lowtide.tensors.live_bytes import LiveBytes

    with tide.audit() if tide is not None else LiveBytes(model=model) as live:
        step()
    return int(live.peak_bytes)


def checksum(loss: torch.Tensor, model: nn.Module) -> str:
    """16 hexadecimal digits that differ if the loss or any gradient differs in a bit."""
    digest = hashlib.sha256(_bytes_of(loss))
    for parameter in model.parameters():
        if parameter.grad is not None:
            digest.update(_bytes_of(parameter.grad))
    return digest.hexdigest()[:16]


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
