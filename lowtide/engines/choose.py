"""Which engine a model gets: the accelerator it lives on, else the host; or the one that was asked for."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
from torch import nn

from lowtide.core.fate import Tier
from lowtide.core.plan import Plan
from lowtide.engines.base import Engine
from lowtide.engines.tiers.host_limit import Cap
from lowtide.errors import ConfigError, did_you_mean

_NAMES = ("accelerator", "host", "virtual")


def choose_engine(wanted: Engine | str | None, model: nn.Module, plan: Plan, *, beside: Engine | None = None) -> Engine:
    """The engine to use. `wanted` is an engine, None, or 'accelerator', 'host', 'virtual:SEED'. `beside`: an engine
    with which a new one shares what may be reserved on each tier.

    Raises ConfigError for an unknown name, a malformed seed, an accelerator engine for a model on the host, and a
    disk path that cannot be written.
    """
    if wanted is not None and not isinstance(wanted, str):
        if not hasattr(wanted, "tiers"):
            raise ConfigError(f"engine: expected accelerator, host, virtual:SEED or an engine, not {wanted!r}")
        return wanted
    device = next((parameter.device for parameter in model.parameters()), None)
    on_host = device is None or device.type in ("cpu", "meta")
    name, _, rest = (wanted or ("host" if on_host else "accelerator")).partition(":")
    if name not in _NAMES:
        raise ConfigError(f"engine: '{wanted}' is none of accelerator, host, virtual:SEED{did_you_mean(name, _NAMES)}")
    caps = {} if beside is None else beside.caps
    if name == "virtual":
        return _virtual(wanted or "", rest, plan, caps)
    if name == "host":
        return _host(plan, caps)
    if on_host:
        raise ConfigError("engine: 'accelerator' needs the model on an accelerator; move it there, or use 'host'")
    assert device is not None
    return _accelerator(device, model, plan, caps)


def _virtual(wanted: str, rest: str, plan: Plan, caps: Mapping[str, Cap]) -> Engine:
    from lowtide.engines.virtual import VirtualEngine

    if rest and not (rest.isdecimal() and len(rest) <= 18):
        raise ConfigError(f"engine: '{wanted[:80]}' needs a whole number as its seed, as in virtual:7")
    return VirtualEngine(
        int(rest or 0), host_bytes=plan.host_budget_bytes, disk_bytes=plan.disk_budget_bytes, caps=caps
    )


def _host(plan: Plan, caps: Mapping[str, Cap]) -> Engine:
    from lowtide.engines.host import HostEngine
    from lowtide.engines.tiers.host_buffers import configure_malloc

    # Without it freed activations stay resident, and a swap would save nothing that anyone can see.
    configure_malloc()
    return HostEngine(directory=plan.disk_path, disk_budget_bytes=plan.disk_budget_bytes, cap=caps.get("disk"))


def _accelerator(device: torch.device, model: nn.Module, plan: Plan, caps: Mapping[str, Cap]) -> Engine:
    from lowtide.engines.accelerator import AcceleratorEngine
    from lowtide.engines.tiers.disk import DiskTier

    warn_about_other_devices(device, model)
    disk = DiskTier(plan.disk_path, plan.disk_budget_bytes, cap=caps.get("disk")) if wants_disk(plan) else None
    return AcceleratorEngine(device, host_budget_bytes=plan.host_budget_bytes, disk=disk, cap=caps.get("host"))


def warn_about_other_devices(device: torch.device, model: nn.Module) -> None:
    """An engine has the lanes of one device; what other devices of this process save is kept."""
    others = sorted({str(p.device) for p in model.parameters() if p.device.type == device.type} - {str(device)})
    if others:
        warnings.warn(
            f"lowtide: {type(model).__name__} has parameters on {device} and on {', '.join(others)}; only what is "
            f"saved on {device} is swapped, the rest is kept. Apply a plan to the part on each device instead.",
            stacklevel=4,
        )


def wants_disk(plan: Plan) -> bool:
    """Whether an accelerator needs a disk tier: somebody named it. Staging for one takes pinned memory."""
    is_named = plan.disk_path is not None or plan.disk_budget_bytes is not None
    decisions = plan.sites if plan.is_solved else plan.rules.rules
    return is_named or any(decision.tier is Tier.DISK for decision in decisions)
