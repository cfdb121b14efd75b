"""Which errors say that memory ran out, of any allocator.

Why by their text too: torch's allocator on the host raises a plain RuntimeError, and so do older accelerator plug-ins.
"""

from __future__ import annotations

import errno

import torch

_OUT_OF_MEMORY_TEXTS = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    # Older accelerator plug-ins raise a plain RuntimeError.
    "out of memory. Tried to allocate",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: a device's allocator, torch's allocator on the host, or Python's own."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    if isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY_TEXTS):
        return True
    return error.__cause__ is not None and is_out_of_memory(error.__cause__)
