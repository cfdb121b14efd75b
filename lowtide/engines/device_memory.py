"""How much memory the device of a model has for one rank: what a budget of `90%` or `auto` is a share of.

What: `device_memory` asks an accelerator's driver. A model on the host has main memory for its device, since there the
next tier is the disk: of the machine or, where that is less, of its cgroup, and an equal share of it for each rank of
the machine. What the model itself holds already is its own: a budget counts it too.

Cost: a call of the driver, or a few small files. Not covered: several ranks on one accelerator; memory that others take
afterwards; systems without /proc, where a budget must be a size.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn

from lowtide.core.budget import DeviceMemory
from lowtide.engines.tiers.host_limit import host_limit, host_total
from lowtide.errors import ConfigError
from lowtide.tensors.live_bytes import optimizer_tensors, unique_bytes


def device_memory(device: torch.device, *, own_bytes: int, root: Path = Path("/")) -> DeviceMemory:
    """Of `device`, where this rank holds `own_bytes` on the host already. `root` stands in for / (tests give a tree).

    Raises `ConfigError` where nothing says how much there is.
    """
    if device.type in ("cpu", "meta"):
        return _main_memory(own_bytes, root)
    free_bytes, total_bytes = torch.accelerator.get_memory_info(device)
    # Blocks that torch's allocator keeps are taken for the driver, and this process's own.
    cached_bytes = torch.accelerator.memory_reserved(device)
    return DeviceMemory(total_bytes=total_bytes, free_bytes=free_bytes + cached_bytes, where=f"on {device}")


def _main_memory(own_bytes: int, root: Path) -> DeviceMemory:
    total, limit = host_total(root), host_limit(root=root)
    if total.total_bytes is None or limit.limit_bytes is None:
        raise ConfigError(
            "budget: nothing says how much main memory there is, so that a share of it and 'auto' mean nothing; write "
            "a size such as 20GiB"
        )
    num_ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    shared = f" for {num_ranks} ranks" if num_ranks > 1 else ""
    return DeviceMemory(
        total_bytes=total.total_bytes // num_ranks,
        free_bytes=limit.limit_bytes // num_ranks + own_bytes,
        where=f"of main memory ({total.source}{shared})",
    )


def memory_of_model(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> DeviceMemory:
    """Of the device that `model` is on. Raises as `device_memory` does."""
    parameters = list(model.parameters())
    device = next((parameter.device for parameter in parameters), torch.device("cpu"))
    held = [*parameters, *model.buffers(), *(p.grad for p in parameters if p.grad is not None)]
    held += optimizer_tensors(optimizer) if optimizer is not None else []
    return device_memory(device, own_bytes=unique_bytes(held, "cpu"))
