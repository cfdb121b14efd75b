"""What is on the device beside a model's training, when it is first observed.

What: bytes that the allocator has given out and that are of no parameter, buffer, gradient, state of the optimizer, or
tensor of the batch: batches that were put there before, a second model, results that the loop holds.
Why: a budget is held against the allocator's count, which has them; no observed step shows them.
How: the allocator's count less the blocks of what is known, each rounded up to the allocator's grain.
Cost: one pass over the tensors, and one collection of garbage where something is left. Not covered: what comes to the
device later (the first planned steps are compared with their prediction), blocks that the allocator leaves unsplit
(they count as others), and devices whose allocator does not count.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lowtide.profiling.rounding import grain_of
from lowtide.tensors.live_bytes import optimizer_tensors, plain_parts
from lowtide.tensors.private import storage_key, tree_leaves


def other_bytes(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, batch: Any, device: torch.device, read: Callable[[], Any]
) -> int:
    """Bytes on `device` that are none of these. `read` gives the allocator's count, or None where there is none."""
    if read() is None:
        return 0
    parameters = list(model.parameters())
    known = [*parameters, *model.buffers(), *(p.grad for p in parameters if p.grad is not None)]
    known += [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    if optimizer is not None:
        known += optimizer_tensors(optimizer)
    grain = grain_of(device)
    sizes: dict[Any, int] = {}
    for tensor in known:
        for part in plain_parts(tensor):
            if part.device == device:
                storage = part.untyped_storage()
                sizes[storage_key(storage)] = -(-storage.nbytes() // grain) * grain
    known_bytes = sum(sizes.values())
    if read() > known_bytes:
        gc.collect()  # what nobody can reach is not there for long
    return max(0, int(read()) - known_bytes)
