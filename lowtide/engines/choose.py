"""Which engine a model gets: the accelerator it lives on, else the host; or the one that was asked for.

How much memory the device of a model has for one rank: what a budget of `90%` or `auto` is a share of.

What: `device_memory` asks an accelerator's driver. A model on the host has main memory for its device, since there the
next tier is the disk: of the machine or, where that is less, of its cgroup, and an equal share of it for each rank of
the machine. What the model itself holds already is its own: a budget counts it too.
Cost: a call of the driver, or a few small files. Not covered: several ranks on one accelerator; memory that others take
afterwards; systems without /proc, where a budget must be a size.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lowtide.core.budget import DeviceMemory
from lowtide.core.plan import Plan
from lowtide.engines.base import Engine, EngineChoice
from lowtide.engines.tiers.host_limit import host_limit, host_total
from lowtide.errors import ConfigError, did_you_mean
from lowtide.tensors.kinds import device_of
from lowtide.tensors.live_bytes import state_tensors, unique_bytes

_NAMES = ("accelerator", "host")


def choose_engine(wanted: EngineChoice, model: nn.Module, plan: Plan) -> Engine:
    """The engine to use: `wanted` itself, or a new one that the caller closes.

    Raises ConfigError for what is no engine, an unknown name, an accelerator engine for a model on the host, and a disk
    path that cannot be written.
    """
    if wanted is not None and not isinstance(wanted, str):
        found: Any = wanted(plan) if callable(wanted) and not isinstance(wanted, type) else wanted
        if not hasattr(found, "tiers"):
            raise ConfigError(
                f"engine: expected accelerator, host, an engine, or a function that makes one for a plan, not {found!r}"
            )
        engine: Engine = found
        return engine
    device = device_of(model)
    on_host = device.type in ("cpu", "meta")
    name = wanted or ("host" if on_host else "accelerator")
    if name not in _NAMES:
        raise ConfigError(f"engine: '{name}' is none of accelerator, host{did_you_mean(name, _NAMES)}")
    if name == "host":
        from lowtide.engines.host import HostEngine

        return HostEngine.for_plan(plan, {})
    if on_host:
        raise ConfigError("engine: 'accelerator' needs the model on an accelerator; move it there, or use 'host'")
    from lowtide.engines.accelerator import AcceleratorEngine

    warn_about_other_devices(device, model)
    return AcceleratorEngine.for_plan(device, plan, {})


def warn_about_other_devices(device: torch.device, model: nn.Module) -> None:
    """An engine has the lanes of one device; what other devices of this process save is kept."""
    others = sorted({str(p.device) for p in model.parameters() if p.device.type == device.type} - {str(device)})
    if others:
        warnings.warn(
            f"lowtide: {type(model).__name__} has parameters on {device} and on {', '.join(others)}; only what is "
            f"saved on {device} is swapped, the rest is kept. Apply a plan to the part on each device instead.",
            stacklevel=4,
        )


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
    return device_memory(device_of(model), own_bytes=unique_bytes(state_tensors(model, optimizer), "cpu"))
