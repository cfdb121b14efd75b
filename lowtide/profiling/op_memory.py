"""What an operator of the observed step holds while it runs, beside what it is given and gives out.

Why: many operators are made of others (`_safe_softmax` makes a mask of its whole input), and kernels have workspace. A
dispatch mode sees none of that, and a budget is held against the allocator's count, which has it.
How: the allocator's peak is reset before each operator and read after it; what is beyond the bytes that are left is the
operator's own. Allocators count when they are asked, not when the device gets there, so nothing has to be waited for.
Cost: three calls of the allocator's statistics for each operator of the observed step, which so resets the process's
peak counter, as every new plan does. Not covered: devices whose allocator does not count (then it is nothing), and what
other threads allocate meanwhile.
"""

from __future__ import annotations

import torch

from lowtide.engines.device_ops import allocated_bytes, reset_peak


class OpMemory:
    """Of one device. Use: `begin()`, run one operator, `end()`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._modules = (torch.get_device_module(device), torch.accelerator)

    def begin(self) -> None:
        """An operator is about to run."""
        reset_peak(self._modules, self._device)

    def end(self) -> int:
        """It has run: the most bytes that it held beyond those that it has left."""
        peak_bytes = allocated_bytes(self._modules, self._device, "peak")
        left_bytes = allocated_bytes(self._modules, self._device, "current")
        return 0 if peak_bytes is None or left_bytes is None else max(0, peak_bytes - left_bytes)
