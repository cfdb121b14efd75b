"""The plans that race with the solver's: each fits, and is what its name says."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest

from lowtide.config.memory import MemoryConfig, load_memory
from lowtide.core.fate import Fate
from lowtide.core.plan import Plan
from lowtide.core.profile import Profile
from lowtide.errors import BudgetError
from lowtide.planner.plan_profile import plan_profile
from lowtide.planner.problem import state_bytes
from lowtide.planner.rivals import FEWEST, LESS_SWAP, NO_SWAP, rivals_of
from lowtide.timeline.step import Link
from tests.runtime.autopilot.test_race_of_plans import priced

LINK = Link(out_bytes_per_second=2e9, in_bytes_per_second=2e9, latency_seconds=1e-6)


@pytest.fixture
def profile() -> Profile:
    return priced(0.7)[0]


def config_for(profile: Profile, share: float, **more: Any) -> MemoryConfig:
    """A budget so much of the way from the floor to everything kept."""
    config = load_memory({"budget": 1 << 40, "min_bytes": 256, **more})
    found = plan_profile(profile, load_memory({"budget": 1 << 40, "min_bytes": 256}), link=LINK).predicted
    assert found is not None
    budget = found.floor_bytes + int(share * (found.plain_peak_bytes - found.floor_bytes))
    return dataclasses.replace(config, budget=budget)


def planned(profile: Profile, config: MemoryConfig) -> tuple[Plan, dict[str, Plan]]:
    make = functools.partial(plan_profile, profile, link=LINK)
    plan = make(config)
    return plan, dict(rivals_of(plan, config, profile, make, LINK))


def fates(plan: Plan) -> set[Fate]:
    return {site.fate for site in plan.sites}


def test_each_rival_fits_and_is_what_its_name_says(profile: Profile) -> None:
    config = config_for(profile, 0.7)
    plan, rivals = planned(profile, config)
    assert Fate.SWAP in fates(plan) and list(rivals) == [NO_SWAP, FEWEST]
    for rival in rivals.values():
        assert rival.predicted is not None and config.budget is not None
        assert rival.predicted.peak_bytes <= config.budget == rival.budget_bytes
        assert Fate.SWAP not in fates(rival) and rival.is_solved
    again = [rule.pattern.text for rule in rivals[FEWEST].rules.rules]
    assert again == list(plan.layers[: len(again)]) and 0 < len(again) < len(plan.layers)
    gone = {site.layer for site in rivals[FEWEST].sites if site.fate is Fate.RECOMPUTE}
    assert gone == set(again)
    with pytest.raises(BudgetError):  # one less does not fit
        plan_profile(
            profile,
            dataclasses.replace(config, swap="none", recompute="none"),
            link=LINK,
            layers=tuple(again[:-1]),
            with_ways_out=False,
        )


def test_where_no_number_of_layers_fits_there_is_no_such_plan(profile: Profile) -> None:
    plan, rivals = planned(profile, config_for(profile, 0.1))
    assert FEWEST not in rivals and not plan.does_nothing


def test_where_some_swapping_is_needed_a_plan_with_less_of_it_races(profile: Profile) -> None:
    config = config_for(profile, 0.35)
    plan, rivals = planned(profile, config)
    assert list(rivals) == [LESS_SWAP]
    less, solvers = ([site.nbytes for site in one.sites if site.fate is Fate.SWAP] for one in (rivals[LESS_SWAP], plan))
    assert 0 < sum(less) < 0.7 * sum(solvers)
    assert rivals[LESS_SWAP].predicted is not None and config.budget is not None
    assert rivals[LESS_SWAP].predicted.peak_bytes <= config.budget
    # A plan that is made for dear copies has no such rival, nor has one that swaps no more than that.
    slow = dataclasses.replace(LINK, out_bytes_per_second=5e8, in_bytes_per_second=5e8, compute_share=0.5)
    for link in (dataclasses.replace(LINK, compute_share=2.0), slow):
        make = functools.partial(plan_profile, profile, link=link)
        assert not dict(rivals_of(make(config), config, profile, make, link))


@pytest.mark.parametrize(
    ("rules", "names"),
    [
        ({"swap": "none"}, [FEWEST]), ({"recompute": "none"}, []), ({"recompute": ["layers.0"]}, []),
        ({"swap": [{"match": "layers.0"}]}, []),
    ],
)  # fmt: skip
def test_rules_of_the_user_stay_rules(profile: Profile, rules: dict, names: list[str]) -> None:
    assert list(planned(profile, config_for(profile, 0.7, **rules))[1]) == names


def test_a_plan_that_keeps_everything_has_no_rival(profile: Profile) -> None:
    plan, rivals = planned(profile, config_for(profile, 1.5))
    assert plan.does_nothing and not rivals


def test_memory_is_taken_again_as_the_plain_step_makes_it(profile: Profile) -> None:
    """Also where a layer runs again, and less is made at once."""
    link = dataclasses.replace(LINK, touch_seconds_per_byte=1e-9)
    config = config_for(profile, 1.5, swap=["layers.1"])
    for layers in ((), ("layers.0", "layers.2")):
        plan = plan_profile(profile, config, link=link, layers=layers)
        assert (
            plan.predicted is not None and Fate.SWAP in fates(plan) and (Fate.RECOMPUTE in fates(plan)) == bool(layers)
        )
        own_bytes = plan.predicted.plain_peak_bytes - state_bytes(profile)
        assert plan.predicted.touch_seconds == pytest.approx(1e-9 * own_bytes)


def test_layers_with_collectives_do_not_run_again(profile: Profile) -> None:
    exchanging = dataclasses.replace(profile, num_collectives=1)
    assert FEWEST not in planned(exchanging, config_for(profile, 0.7))[1]
