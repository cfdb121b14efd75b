"""Plans from a source of one's own: a `Tides` carries them out; and plans for a budget, from what steps have shown."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from lowtide.config.memory import load_memory
from lowtide.core.decisions import SiteDecision
from lowtide.core.fate import Fate
from lowtide.core.plan import Plan
from lowtide.core.profile import Profile
from lowtide.core.recipe import Codec
from lowtide.core.rules import Pattern, Rule, Rules
from lowtide.errors import BudgetError
from lowtide.runtime.autopilot.facts import Facts
from lowtide.runtime.autopilot.planner import Planner
from lowtide.runtime.session.optimizer_state import PlacedState
from lowtide.runtime.session.shapes import ShapePlan
from lowtide.runtime.session.tide import Tide
from lowtide.runtime.session.tides import Phase, PlanSource, Tides
from lowtide.tensors.ranks import ALONE
from lowtide.timeline.step import Link
from tests.support.profiles import MIB, decoder_profile
from tests.support.small_models import Residual as Net
from tests.support.virtual_engine import VirtualEngine


class SwapAll:
    """Everything goes away, for no reason but that we say so."""

    budget_bytes = None
    is_compared = False

    def __init__(self, tides: Tides) -> None:
        self.tides = tides
        self.shape: ShapePlan | None = None
        self.num_equipped = self.num_followed = self.num_closed = 0

    @property
    def profile(self) -> Profile | None:
        return None if self.shape is None else self.shape.profile

    def prepare(self, args: tuple, kwargs: dict) -> None:
        if self.shape is None:
            self.shape = self.tides.observe(args, kwargs, self._planned, why="first step")
            assert self.shape is not None
            self.shape.tide = self.tides.use(self.shape.plan, None, equip=self._equip)

    def _planned(self, profile: Profile) -> ShapePlan:
        rule = Rule(pattern=Pattern.parse("layers.*"), fate=Fate.SWAP, where="test")
        return ShapePlan(profile=profile, plan=Plan(layers=profile.layers, rules=Rules((rule,)), min_bytes=0))

    def _equip(self, tide: Tide) -> None:
        self.num_equipped += 1

    def follow(self, output: Any, tide: Tide) -> None:
        self.num_followed += 1

    def restart(self, *, was_audited: bool) -> None:
        pass

    def tighten(self, error: BaseException, num_tried: int) -> str | None:
        return None

    def close(self) -> None:
        self.num_closed += 1
        if self.shape is not None:
            self.shape.retire()


def gradients(model: nn.Module) -> list[Any]:
    return [parameter.grad for parameter in model.parameters()]


def test_a_source_of_ones_own_without_a_budget() -> None:
    torch.manual_seed(0)
    model, plain = Net(), Net()
    plain.load_state_dict(model.state_dict())
    x = torch.randn(8, 16)
    engine = VirtualEngine(seed=1)
    placed = PlacedState(None, engine, "lowtide.apply")
    tides = Tides(model, None, engine, SwapAll, call="lowtide.apply", owns_engine=False, placed=placed, group=ALONE)
    source: PlanSource = tides.source
    assert isinstance(source, SwapAll)
    for _ in range(4):  # gradients accumulate, and nothing is planned anew for that
        model(x).backward()
        plain(x).backward()
        assert tides.phase is Phase.SETTLED
    assert all(torch.equal(a, b) for a, b in zip(gradients(model), gradients(plain), strict=True))
    assert tides.stats.swapped_bytes > 0 and tides.stats.num_forwards == 4
    assert tides.num_corrections == 0 and tides.events == []
    assert (source.num_equipped, source.num_followed, source.num_closed) == (1, 4, 0)
    tides.remove()
    tides.remove()
    assert source.num_closed == 1 and "forward" not in vars(model)
    engine.close()


def test_a_recipe_that_did_not_hold_leaves_the_codec_and_a_codec_that_did_not_fit_the_recipe() -> None:
    """A site may have both; each is given up alone (planner/smaller.py has the name of a smaller form)."""
    name = "model.layers.0.mlp.mul"
    codec = Codec(kind="bits", nbytes=2 * MIB, work_bytes=MIB, seconds=1e-5)
    profile = decoder_profile(2)
    nodes = (dataclasses.replace(node, codec=codec if node.name == name else None) for node in profile.nodes)
    profile = dataclasses.replace(profile, nodes=tuple(nodes))
    config = load_memory({"budget": "4GiB", "swap": "none", "keep": ["layers.*.norm.mul", "layers.*.mlp.silu"]})
    planner = Planner(nn.Linear(1, 1), config, VirtualEngine(0), ALONE)
    link = Link(out_bytes_per_second=1e9, in_bytes_per_second=1e9)
    planner.facts = Facts(link=link)
    plain = planner.make(profile, 4 << 30)
    assert plain.predicted is not None

    def made(*unsteady: str) -> SiteDecision:
        planner.know(unsteady=frozenset(unsteady))
        plan = planner.make(profile, plain.predicted.plain_peak_bytes - 20 * MIB)
        return next(site for site in plan.sites if site.name == name)

    assert (made().codec, made().fate) == (codec, Fate.KEEP)  # the cheaper of the two
    assert (made(name).codec, made(name).fate) == (codec, Fate.KEEP)
    other = made(f"{name} smaller")
    assert (other.codec, other.fate) == (None, Fate.RECOMPUTE)
    assert other.recipe is not None
    with pytest.raises(BudgetError):
        made(name, f"{name} smaller")
