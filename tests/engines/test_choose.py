"""Which engine a plan gets, where that does not take a device."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from lowtide.config.memory import load_memory, plan_from_rules
from lowtide.core.decisions import SiteDecision
from lowtide.core.fate import Fate, Tier
from lowtide.core.plan import Plan
from lowtide.engines.accelerator import wants_disk
from lowtide.engines.choose import choose_engine, warn_about_other_devices
from lowtide.errors import ConfigError


def rules(**memory: object) -> Plan:
    return plan_from_rules(load_memory(memory), ("layers.0",))


def solved(tier: Tier | None) -> Plan:
    site = SiteDecision(
        name="layers.0.mul", layer="layers.0", nbytes=8, dtype="float32", fate=Fate.SWAP, tier=tier, reason="drawn"
    )
    return Plan(layers=("layers.0",), min_bytes=0, sites=(site,), is_solved=True)


@pytest.mark.parametrize(
    ("plan", "wants"),
    [
        (rules(swap="all"), False),
        (rules(swap=[{"match": "layers.*", "tier": "host"}]), False),
        (rules(swap=[{"match": "layers.*", "tier": "disk"}]), True),
        (rules(swap="all", disk_budget="1MiB"), True),
        (rules(swap="all", disk_path=str(Path("/tmp"))), True),
        (solved(None), False),
        (solved(Tier.HOST), False),
        (solved(Tier.DISK), True),
        (Plan.from_json(solved(Tier.DISK).to_json()), True),
        # Here the sites only show what the rules did.
        (dataclasses.replace(solved(Tier.DISK), is_solved=False), False),
    ],
)
def test_an_accelerator_gets_a_disk_tier_only_where_somebody_names_it(plan: Plan, wants: bool) -> None:
    assert wants_disk(plan) is wants


class Placed:
    """A parameter on a device that need not be there."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)


class Net(nn.Module):
    def __init__(self, *devices: str) -> None:
        super().__init__()
        self.placed = [Placed(device) for device in devices]

    def parameters(self, recurse: bool = True) -> list:
        return self.placed


def test_parameters_on_other_devices_are_named() -> None:
    with pytest.warns(UserWarning, match="has parameters on") as said:
        warn_about_other_devices(torch.device("cuda", 0), Net("cuda:0", "cuda:2", "cpu", "cuda:1", "cuda:2"))
    assert str(said[0].message) == (
        "lowtide: Net has parameters on cuda:0 and on cuda:1, cuda:2; only what is saved on cuda:0 is swapped, the "
        "rest is kept. Apply a plan to the part on each device instead."
    )


def test_one_device_is_nothing_to_speak_of() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_about_other_devices(torch.device("cuda", 0), Net("cuda:0", "cuda:0", "cpu"))


def test_what_is_no_engine_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        choose_engine(3, nn.Linear(2, 2), rules(swap="all"))  # type: ignore[arg-type]
    assert str(caught.value) == (
        "engine: expected accelerator, host, an engine, or a function that makes one for a plan, not 3"
    )
