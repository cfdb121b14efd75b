"""How large tests and benchmarks on an accelerator are: from its memory and its speed.

What: `sizes_of(device)` times products of growing matrices until one takes a millisecond, and asks how much memory
there is. From that follow matrices that keep the device busy, copies that take a while, and a Llama whose step takes
some tenths of a second.
Why: a test made for one GPU takes minutes on a small one, and does not end on the stand-in device of the tests.
Cost: some milliseconds, and the largest matrix. Not covered: how fast copies are.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

_PRODUCT_SECONDS = 1e-3
_SIDES = (256, 512, 1024, 2048, 4096, 8192)
_MOST_COPY_BYTES = 256 * 2**20
_PASSES = 72
"""Floating point operations of a step of a Llama for each layer, token and square of its width: 12 squares of weights,
two operations each, three times."""
_STATE_AND_SAVED = 116
"""Bytes for each layer and square of the width over as many tokens, in 16 bits: 12 squares of weights and gradients,
and 34 squares of saved activations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What fits a device."""

    memory_bytes: int
    flops_per_second: float
    """Of products in bfloat16, as far as one of a millisecond reaches."""
    side: int
    """Of a square matrix whose product takes about a millisecond."""
    copy_bytes: int
    """Of a copy that takes a while: a small part of the memory."""

    def width(self, *, layers: int, seconds: float, most: int) -> int:
        """Of a Llama of so many layers over as many tokens as it is wide, a multiple of 128: its step takes about so
        many seconds, and everything that it saves fits twice."""
        by_speed = (seconds * self.flops_per_second / (_PASSES * layers)) ** (1 / 3)
        by_memory = (self.memory_bytes / (2 * _STATE_AND_SAVED * layers)) ** 0.5
        return max(128, int(min(by_speed, by_memory, most)) // 128 * 128)


def sizes_of(device: torch.device) -> Sizes:
    """Measures the device. Raises RuntimeError where it does not say how much memory it has."""
    memory_bytes = memory_info(device)[1]
    for side in _SIDES:
        seconds = _product_seconds(side, device)
        if seconds >= _PRODUCT_SECONDS or 8 * side * side * 8 > memory_bytes:
            break
    return Sizes(
        memory_bytes=memory_bytes,
        flops_per_second=2 * side**3 / seconds,
        side=side,
        copy_bytes=min(_MOST_COPY_BYTES, memory_bytes // 64),
    )


def memory_info(device: torch.device) -> tuple[int, int]:
    """Free bytes, and all bytes. Raises RuntimeError where the device does not say."""
    # torch_npu up to 2.12 has no `DeviceAllocator`; its own module has had this function all along.
    own = getattr(torch.get_device_module(device), "mem_get_info", None)
    return (own or torch.accelerator.get_memory_info)(device)


def _product_seconds(side: int, device: torch.device) -> float:
    """The least of some; the first one starts libraries."""
    factor = torch.ones(side, side, dtype=torch.bfloat16, device=device)
    found = []
    for _ in range(4):
        torch.accelerator.synchronize(device)
        started = time.perf_counter()
        factor @ factor
        torch.accelerator.synchronize(device)
        found.append(time.perf_counter() - started)
    return min(found)
