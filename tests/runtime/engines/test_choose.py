"""Which engine a plan gets, where that does not take a device."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from lowtide.config.native import load_memory
from lowtide.planner.fate import Fate, Tier
from lowtide.planner.plan import Plan, SiteDecision
from lowtide.runtime.engines.choose import wants_disk


def rules(**memory: object) -> Plan:
    return Plan.from_rules(load_memory(memory), ("layers.0",))


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
