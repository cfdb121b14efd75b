"""Bytes on a device that no observed step shows: what its allocator rounds up, and what others hold there.

Rounding: allocators hand out blocks in multiples of a grain (512 bytes on CUDA) and count them so. A plan is made for
bytes of storages, and its budget is held against the allocator's count. `grain_of` finds the grain by asking for one
byte; `rounding_bytes` bounds what all of it comes to at any moment of a step: each storage of the observed step takes
up to one grain more than its bytes. That step keeps everything that any plan keeps, so the most of it at any operator
is a bound for every plan. Gradients and the optimizer's state are beside it: each parameter has one gradient, and up to
four tensors of state or of the optimizer's temporaries. `fingerprint_bytes` is lowtide's own part: what a recipe makes
is compared with a fingerprint of what was dropped, which is on the device.

Others: `other_bytes` is what the allocator has given out when a model is first observed, less the blocks of its
parameters, buffers, gradients, optimizer state and batch: batches that were put there before, a second model, results
that the loop holds.

Cost: one allocation, a pass over the storages and tensors, and one collection of garbage where something is left. Not
covered: what an allocator gives out beyond its grain (CUDA leaves up to 1 MiB of a large block unsplit); that is
measured and corrected (runtime/autopilot/measure.py). What comes to the device later (the first planned steps are
compared with their prediction), and devices whose allocator does not count.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn

from lowtide.recipes.graph import Storage
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


_MOST_GRAIN = 4096
_NUM_PROBES = 8
_OPTIMIZER_TENSORS = 4
# Of a fingerprint, and of flags for many of them.
_WORDS_BYTES = 256
_FLAGS_BYTES = 512
_WEIGHTS_BYTES = 4096


def grain_of(device: torch.device) -> int:
    """Bytes of which every block is a multiple; 1 where the device does not count its bytes.

    The allocator is asked several times: between two readings a collection of garbage may free blocks, and another
    thread may do anything. What they change is a multiple of the grain as well, so the least growth is the grain.
    """
    if device.type == "cpu":
        return 1
    try:
        grown = [_growth(device) for _ in range(_NUM_PROBES)]
    except (AttributeError, RuntimeError):
        return 1
    grain = min((nbytes for nbytes in grown if nbytes > 0), default=1)
    return grain if grain <= _MOST_GRAIN and grain.bit_count() == 1 else 1


def _growth(device: torch.device) -> int:
    """By how much the allocator's count grows with one byte."""
    before = torch.accelerator.memory_allocated(device)
    probe = torch.empty(1, dtype=torch.uint8, device=device)
    grown = torch.accelerator.memory_allocated(device) - before
    del probe
    return grown


def rounding_bytes(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    storages: Sequence[Storage],
    off_device: Collection[int],
    grain: int,
) -> int:
    """A bound of what the allocator gives out beyond the bytes of storages, in any step. `storages`: those of the
    observed step; those in `off_device` do not count."""
    if grain == 1:
        return 0
    changes: dict[int, int] = {}
    for storage in storages:
        if storage.index not in off_device:
            changes[storage.born] = changes.get(storage.born, 0) + -storage.nbytes % grain
            if storage.dies is not None:
                # Beside what the operator makes that runs when it dies.
                changes[storage.dies + 1] = changes.get(storage.dies + 1, 0) - (-storage.nbytes % grain)
    now = most = 0
    for index in sorted(changes):
        now += changes[index]
        most = max(most, now)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    per_parameter = 1 if optimizer is None else 1 + _OPTIMIZER_TENSORS
    beside = sum(-(parameter.numel() * parameter.itemsize) % grain for parameter in trained)
    steps = 0 if optimizer is None else grain * len(trained)  # a number each, which some optimizers have on the device
    return most + per_parameter * beside + steps


def fingerprint_bytes(sizes: Collection[int], grain: int, *, num_regions: int = 0) -> tuple[int, int]:
    """What fingerprints (runtime/recompute/fingerprint.py) take of an allocator with this grain: for each storage that
    is made again, and for all of them together. `sizes`: bytes of the storages that may be made again;
    `num_regions`: layers that may run again."""
    if grain == 1:
        return 0, 0
    # Together: which words are read, by size; the words of a storage that was just made, how they compare, the flags of
    # all, and the weights of the places, with what is made of them while one fingerprint is taken.
    together = len({*sizes}) * _up(2 * _WORDS_BYTES, grain) + 3 * _up(_FLAGS_BYTES, grain)
    return _up(_WORDS_BYTES, grain), together + 2 * _up(_WEIGHTS_BYTES, grain) + num_regions * grain


def _up(nbytes: int, grain: int) -> int:
    return -(-nbytes // grain) * grain
