"""Which engine a model gets: the accelerator it lives on, else the host; or the one that was asked for."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from lowtide.core.plan import Plan
from lowtide.engines.base import Engine, EngineChoice
from lowtide.errors import ConfigError, did_you_mean

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
    device = next((parameter.device for parameter in model.parameters()), None)
    on_host = device is None or device.type in ("cpu", "meta")
    name = wanted or ("host" if on_host else "accelerator")
    if name not in _NAMES:
        raise ConfigError(f"engine: '{name}' is none of accelerator, host{did_you_mean(name, _NAMES)}")
    if name == "host":
        from lowtide.engines.host import HostEngine

        return HostEngine.for_plan(plan, {})
    if on_host:
        raise ConfigError("engine: 'accelerator' needs the model on an accelerator; move it there, or use 'host'")
    assert device is not None
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
