"""What the runtime's own Python costs: in recipes, codecs, and layers that run again; none of it on an accelerator."""

from __future__ import annotations

import dataclasses

import pytest

from lowtide.config.memory import load_memory
from lowtide.core.fate import Fate
from lowtide.core.profile import Profile
from lowtide.core.recipe import Codec
from lowtide.planner.by_rules import HOST_COSTS, NO_COSTS, HostCosts, charged
from lowtide.planner.plan_profile import plan_profile
from lowtide.planner.rerun_layers import with_reruns
from lowtide.profiling.observe_step import observe
from lowtide.timeline.step import Link
from tests.support import zoo

LINK = Link(out_bytes_per_second=1e9, in_bytes_per_second=1e9)
COSTS = HostCosts(recipe_seconds=0.25, layer_seconds=2.0, codec_seconds=0.5)
CODEC = Codec(kind="bits", nbytes=1, work_bytes=0, seconds=1.0)


@pytest.fixture(scope="module")
def profile() -> Profile:
    case = zoo.CASES["llama"]
    model, batch = case.build(0), case.batch(0)
    return observe(model, lambda: case.loss(model, batch))


def test_each_recipe_and_codec_takes_as_much_longer_and_nothing_else_changes(profile: Profile) -> None:
    first, *rest = profile.nodes
    profile = dataclasses.replace(profile, nodes=(dataclasses.replace(first, codec=CODEC), *rest))
    dear = charged(profile, COSTS)
    assert dear.nodes[0].codec == dataclasses.replace(CODEC, seconds=1.5)
    pairs = [(old.recipe, new.recipe) for old, new in zip(profile.nodes, dear.nodes, strict=True)]
    assert any(old is not None for old, _ in pairs)
    for old, new in pairs:
        assert (old is None) == (new is None)
        if old is not None and new is not None:
            assert new == dataclasses.replace(old, seconds=old.seconds + 0.25)
    assert [dataclasses.replace(node, recipe=None, codec=None) for node in dear.nodes] == [
        dataclasses.replace(node, recipe=None, codec=None) for node in profile.nodes
    ]
    assert charged(profile, NO_COSTS) is profile


def test_a_layer_that_runs_again_takes_as_much_longer(profile: Profile) -> None:
    first = profile.layers[0]
    cheap, dear = (with_reruns(profile, [first], more_seconds=seconds) for seconds in (0.0, 2.0))
    assert sum(dear.op_seconds) - sum(cheap.op_seconds) == pytest.approx(2.0)
    assert dataclasses.replace(dear, op_seconds=cheap.op_seconds) == cheap


def test_an_accelerator_s_host_runs_ahead() -> None:
    assert HOST_COSTS.on("cpu") == HOST_COSTS
    assert HOST_COSTS.on("cuda") == HostCosts(op_seconds=HOST_COSTS.op_seconds)


@pytest.mark.parametrize("rule", ["layer", "recipes"])
def test_a_plan_says_so(profile: Profile, rule: str) -> None:
    name = profile.layers[0]
    again = [name] if rule == "layer" else [f"{name}.*"]
    memory = load_memory({"budget": "1GiB", "min_bytes": 0, "recompute": again, "swap": "none"})
    free, dear = (plan_profile(profile, memory, link=LINK, costs=costs) for costs in (NO_COSTS, COSTS))
    num = sum(site.fate is Fate.RECOMPUTE for site in dear.sites)
    assert [site.fate for site in dear.sites] == [site.fate for site in free.sites] and num
    assert free.predicted is not None and dear.predicted is not None
    more = 2.0 if rule == "layer" else 0.25 * num
    assert dear.predicted.recompute_seconds - free.predicted.recompute_seconds == pytest.approx(more)
    assert dear.predicted.step_seconds - free.predicted.step_seconds == pytest.approx(more)
