"""One floor for one step, time that never rises with the budget, a peak that is never above it."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from lowtide.config.memory import load_memory
from lowtide.core.plan import Plan
from lowtide.core.profile import Profile
from lowtide.errors import BudgetError
from lowtide.planner import min_peak
from lowtide.planner.by_rules import HOST_COSTS
from lowtide.planner.plan_profile import plan_profile, space_of
from lowtide.profiling.observe_step import observe
from lowtide.timeline.step import Link
from tests.support import zoo
from tests.support.profiles import MIB, decoder_profile

LINKS = (
    Link(out_bytes_per_second=6e9, in_bytes_per_second=6e9),
    Link(out_bytes_per_second=4e6, in_bytes_per_second=4e6, page_fault_seconds_per_byte=1e-9),
)
"""So slow that not every copy is hidden: for round numbers, and for small models that were observed."""
RULES: dict[str, Mapping[str, Any]] = {
    "free": {},
    "no swap": {"swap": "none"},
    "no recompute": {"recompute": "none"},
    "by hand": {"recompute": ["layers.0"], "swap": ["layers.1"]},
    "state": {"optimizer": "auto"},
}
NUM_BUDGETS, MOST_BUDGETS = 6, 50
FEW = ("decoder of 2", "llama")
"""Models of the suite; the others are `make test-extended`'s."""


def _with_state(profile: Profile) -> Profile:
    state = dataclasses.replace(profile.state, optimizer_movable=profile.state.optimizer, optimizer_unit=8 * MIB)
    return dataclasses.replace(profile, state=state)


def _observed(name: str) -> Profile:
    case = zoo.CASES[name]
    model = case.build(0)
    profile = observe(model, lambda: case.loss(model, case.batch(0)))
    # Times of an operator's launch say nothing of these sizes, and each machine has others.
    nodes = tuple(
        node
        if node.recipe is None
        else dataclasses.replace(node, recipe=dataclasses.replace(node.recipe, seconds=2e-3))
        for node in profile.nodes
    )
    return dataclasses.replace(profile, op_seconds=(1e-3,) * len(profile.op_seconds), nodes=nodes)


MODELS: dict[str, Callable[[], Profile]] = {
    **{f"decoder of {number}": functools.partial(decoder_profile, number) for number in (1, 2, 4, 16)},
    "decoder on a cpu": functools.partial(decoder_profile, 2, is_fake=False),
    **{
        name: functools.partial(_observed, name)
        for name in ("llama", "llama_bf16", "llama_eager", "llama_cache", "tied", "mlp", "transformer_encoder")
    },
}


class Planner:
    """Plans for any budget of one step under some rules."""

    def __init__(self, profile: Profile, rules: Mapping[str, Any]) -> None:
        self.profile = _with_state(profile) if "optimizer" in rules else profile
        is_small = profile.device == "cpu" and not profile.model.startswith("Decoder")
        self.link = LINKS[is_small]
        self.rules = {"min_bytes": 256 if is_small else MIB, **rules}

    def plan(self, budget_bytes: int) -> Plan:
        memory = load_memory({"budget": budget_bytes, **self.rules})
        how: Any = {"link": self.link, "costs": HOST_COSTS, "time_limit_seconds": 1e6, "with_suggestions": False}
        return plan_profile(self.profile, memory, **how)

    def fits(self, budget_bytes: int) -> bool:
        try:
            self.plan(budget_bytes)
        except BudgetError:
            return False
        return True


def check(name: str, rules: Mapping[str, Any], num_budgets: int) -> None:
    planner = Planner(MODELS[name](), rules)
    most = planner.plan(1 << 50).predicted
    assert most is not None
    with pytest.raises(BudgetError) as caught:
        planner.plan(1)
    floor_bytes = caught.value.floor_bytes
    draw = random.Random(name)
    smaller = (floor_bytes - 1, draw.randint(1, floor_bytes - 1))
    assert not any(planner.fits(budget_bytes) for budget_bytes in smaller), "the smallest budget that has a plan"
    top_bytes = max(most.peak_bytes, most.plain_peak_bytes)
    budgets = sorted({floor_bytes, top_bytes, *(draw.randint(floor_bytes, top_bytes) for _ in range(num_budgets - 2))})
    slowest = float("inf")
    for budget_bytes in budgets:
        predicted = planner.plan(budget_bytes).predicted
        assert predicted is not None
        assert predicted.floor_bytes == floor_bytes
        assert predicted.peak_bytes <= budget_bytes
        seconds = predicted.step_seconds + predicted.check_seconds
        assert seconds <= slowest * (1 + 1e-9), f"{budget_bytes} of {budgets}: a larger budget gives a slower plan"
        slowest = seconds


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.extended) for name in MODELS]
)
def test_a_larger_budget_is_never_slower_and_all_have_one_floor(name: str, rules: str) -> None:
    torch.manual_seed(0)
    check(name, RULES[rules], NUM_BUDGETS if name in FEW else MOST_BUDGETS)


def test_no_floor_is_looked_for_where_a_program_says_that_nothing_fits() -> None:
    """It takes seven programs and a search, and a pipeline's ranks ask for many budgets."""
    memory = load_memory({"budget": 1, "min_bytes": MIB, **RULES["no swap"]})
    space = space_of(decoder_profile(2), memory, LINKS[0], has_gradients=False, costs=HOST_COSTS)
    bounds = [min_peak.bound_bytes(way._arrays, None) for way in space.ways]
    assert not space.has_plan(min(bounds) - 1)
    assert not any("floor" in vars(way) for way in space.ways)
    assert min(bounds) <= space.floor_bytes <= 1.02 * min(bounds)


@pytest.mark.parametrize("name", ["llama", "gpt2_dropout"])
def test_where_swapping_is_dear_plans_are_as_fast_as_without_it(name: str) -> None:
    """Also where all recipes at once need more than everything kept, which is no floor to begin from."""
    torch.manual_seed(0)
    profile = _observed(name)
    planners = Planner(profile, {}), Planner(profile, RULES["no swap"])
    for planner in planners:
        planner.link = dataclasses.replace(LINKS[1], page_fault_seconds_per_byte=1e-6)
    most = planners[1].plan(1 << 50).predicted
    assert most is not None and most.floor_bytes is not None
    for percent in (25, 50):
        budget_bytes = most.floor_bytes + (most.plain_peak_bytes - most.floor_bytes) * percent // 100
        found, wanted = (planner.plan(budget_bytes).predicted for planner in planners)
        assert found is not None and wanted is not None
        assert found.step_seconds <= wanted.step_seconds * (1 + 1e-9), percent
        assert wanted.recompute_seconds > 0
