"""Casts of weights that autocast remembers: they live until its outermost context is left.

Cost: a walk over the parameters. Not covered: which weights an operator casts; all that it may are counted.
"""

from __future__ import annotations

import torch
from torch import nn


def remembered_cast_bytes(module: nn.Module, device_type: str) -> int:
    """Bytes of the casts that autocast, as it is on this thread now, holds on to at most; 0 where it is off or has no
    cache. It remembers casts of float32 leaves that require a gradient."""
    if not torch.amp.is_autocast_available(device_type) or not torch.is_autocast_cache_enabled():
        return 0
    if not torch.is_autocast_enabled(device_type):
        return 0
    size = torch.get_autocast_dtype(device_type).itemsize
    return sum(p.numel() * size for p in module.parameters() if p.requires_grad and p.dtype is torch.float32)
