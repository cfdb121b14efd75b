"""Plans may come from anywhere that keeps the protocol: with no budget they are carried out as they are."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowtide.config.memory import load_memory
from lowtide.core.codec import Codec
from lowtide.core.decisions import SiteDecision
from lowtide.core.fate import Fate
from lowtide.core.pattern import Pattern
from lowtide.core.plan import Plan
from lowtide.core.profile import Profile
from lowtide.core.rules import Rule, Rules
from lowtide.errors import BudgetError
from lowtide.runtime.autopilot.autopilot import Autopilot
from lowtide.runtime.autopilot.phases import Phase
from lowtide.runtime.autopilot.plan_cache import CachedPlan
from lowtide.runtime.autopilot.plan_source import BudgetSource, Facts, PlanSource
from lowtide.runtime.session.optimizer_state import PlacedState
from lowtide.runtime.session.tide import Tide
from lowtide.tensors.ranks import ALONE
from lowtide.timeline.step import Link
from tests.support.profiles import MIB, decoder_profile
from tests.support.virtual_engine import VirtualEngine


class SwapAll:
    """Everything goes away, for no reason but that we say so."""

    def __init__(self) -> None:
        self.budget_bytes: int | None = None
        self.asked: list[tuple[Facts, int | None]] = []
        self.equipped: list[tuple[Tide, int | None]] = []
        self.num_closed = 0

    def measure_link(self) -> None:
        pass

    def make_plan(self, profile: Profile, facts: Facts, budget_bytes: int | None) -> Plan:
        self.asked.append((facts, budget_bytes))
        rule = Rule(pattern=Pattern.parse("layers.*"), fate=Fate.SWAP, where="test")
        return Plan(layers=profile.layers, rules=Rules((rule,)), min_bytes=0)

    def localized(self, plan: Plan, profile: Profile) -> Plan:
        return plan

    def equip(self, tide: Tide, known: CachedPlan, budget_bytes: int | None) -> None:
        assert known.tide is tide
        self.equipped.append((tide, budget_bytes))

    def close(self) -> None:
        self.num_closed += 1


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:  # (N, 16) -> scalar
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x.square().mean()


def gradients(model: nn.Module) -> list[Any]:
    return [parameter.grad for parameter in model.parameters()]


def test_a_source_of_ones_own_without_a_budget() -> None:
    torch.manual_seed(0)
    model, plain = Net(), Net()
    plain.load_state_dict(model.state_dict())
    source = SwapAll()
    checked: PlanSource = source
    x = torch.randn(8, 16)
    engine = VirtualEngine(seed=1)
    placed = PlacedState(None, engine, "lowtide.optimize")
    tide = Autopilot(model, checked, None, engine, owns_engine=False, placed=placed, group=ALONE)
    for _ in range(4):  # gradients accumulate, and nothing is planned anew for that
        model(x).backward()
        plain(x).backward()
        assert tide.phase is Phase.SETTLED
        tide.tighten()
    assert all(torch.equal(a, b) for a, b in zip(gradients(model), gradients(plain), strict=True))
    assert tide.stats is not None and tide.stats.swapped_bytes > 0 and tide.stats.num_forwards == 4
    assert tide.link is None and tide.num_corrections == 0
    assert [(event.why, event.budget_bytes) for event in tide.events] == [("first step", None)]
    assert source.asked == [(Facts(), None)]
    assert source.equipped == [(tide.tide, None)]
    assert source.num_closed == 0
    tide.remove()
    tide.remove()
    assert source.num_closed == 1
    engine.close()


def test_a_recipe_that_did_not_hold_leaves_the_codec_and_a_codec_that_did_not_fit_the_recipe() -> None:
    """A site may have both; each is given up alone (planner/smaller.py has the name of a smaller form)."""
    name = "model.layers.0.mlp.mul"
    codec = Codec(kind="bits", nbytes=2 * MIB, work_bytes=MIB, seconds=1e-5)
    profile = decoder_profile(2)
    nodes = (dataclasses.replace(node, codec=codec if node.name == name else None) for node in profile.nodes)
    profile = dataclasses.replace(profile, nodes=tuple(nodes))
    config = load_memory({"budget": "4GiB", "swap": "none", "keep": ["layers.*.norm.mul", "layers.*.mlp.silu"]})
    source = BudgetSource(nn.Linear(1, 1), config, VirtualEngine(0))
    link = Link(out_bytes_per_second=1e9, in_bytes_per_second=1e9)
    plain = source.make_plan(profile, Facts(link=link), 4 << 30)
    assert plain.predicted is not None

    def made(*unsteady: str) -> SiteDecision:
        facts = Facts(link=link, unsteady=frozenset(unsteady))
        plan = source.make_plan(profile, facts, plain.predicted.plain_peak_bytes - 20 * MIB)
        return next(site for site in plan.sites if site.name == name)

    assert (made().codec, made().fate) == (codec, Fate.KEEP)  # the cheaper of the two
    assert (made(name).codec, made(name).fate) == (codec, Fate.KEEP)
    other = made(f"{name} smaller")
    assert (other.codec, other.fate) == (None, Fate.RECOMPUTE)
    assert other.recipe is not None
    with pytest.raises(BudgetError):
        made(name, f"{name} smaller")
