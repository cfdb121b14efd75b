"""Swapping has a price of its own on some engines: a plan swaps only where that pays, and says so where it does not."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from typing import Any

import pytest

from lowtide.config.memory import load_memory
from lowtide.core.decisions import Prediction
from lowtide.core.fate import Fate
from lowtide.core.plan import Plan
from lowtide.errors import BudgetError
from lowtide.planner.plan_profile import plan_profile
from lowtide.planner.problem import state_bytes
from lowtide.report.report import Report
from lowtide.timeline.step import Link
from tests.support.grid import one_of
from tests.support.profiles import MIB, decoder_profile

LINK = Link(out_bytes_per_second=50e9, in_bytes_per_second=50e9)
DEAR, CHEAP = 1e-9, 1e-15
"""Seconds for each byte that is taken again: more than all recomputing, and next to nothing."""
_MADE = decoder_profile(2)
_STATE = dataclasses.replace(_MADE.state, optimizer_movable=_MADE.state.optimizer, optimizer_unit=8 * MIB)
PROFILE = dataclasses.replace(_MADE, state=_STATE)


LOW, HIGH = 583363662, 1058933208
BUDGET = LOW + int(0.7 * (HIGH - LOW))
"""Bytes: the floor, and everything kept."""


def planned(touch: float, *, share: float = 0.7, rules: dict[str, Any] | None = None) -> Plan:
    """A budget so much of the way from the floor to everything kept."""
    config = load_memory({"budget": LOW + int(share * (HIGH - LOW)), "min_bytes": 0, **(rules or {})})
    link = dataclasses.replace(LINK, page_fault_seconds_per_byte=touch)
    return plan_profile(PROFILE, config, link=link, with_suggestions=False)


def said(plan: Plan) -> Prediction:
    assert plan.predicted is not None
    return plan.predicted


def swaps(plan: Plan) -> bool:
    return any(site.fate is Fate.SWAP for site in plan.sites)


def price(plan: Plan, touch: float) -> float:
    """What this plan costs beside its seconds if it was chosen as if taking memory again were free, and is not."""
    return touch * (said(plan).plain_peak_bytes - state_bytes(PROFILE)) if swaps(plan) else 0.0


@pytest.mark.parametrize("rules", one_of(2, [{}, {"recompute": "none"}, {"optimizer": "auto"}, {"optimizer": "swap"}]))
def test_no_plan_is_slower_than_the_better_of_both(rules: dict[str, Any]) -> None:
    """The best that swaps, with what it costs to take memory again, and the best that swaps nothing."""
    draw = random.Random(7)
    kinds = set()
    for number in range(3 if "optimizer" in rules else 8):
        touch, share = 10 ** draw.uniform(-14, -11), (0.1, 0.5, 0.6, 0.7)[number % 4]
        plan = planned(touch, share=share, rules=rules)
        free = planned(0.0, share=share, rules=rules)
        best = said(free).step_seconds + price(free, touch)
        with contextlib.suppress(BudgetError):
            best = min(best, said(planned(touch, share=share, rules={**rules, "swap": "none"})).step_seconds)
        case = f"{touch} s a byte, {share} of the way"
        assert said(plan).step_seconds <= best * (1 + 1e-12), case
        assert said(plan).step_seconds * (1.0 - said(plan).gap) <= best * (1 + 1e-12), case
        assert said(plan).page_fault_seconds == pytest.approx(price(plan, touch)), case
        assert said(plan).peak_bytes <= LOW + int(share * (HIGH - LOW)), case
        assert said(plan).floor_bytes == said(free).floor_bytes, case
        assert swaps(free) or not swaps(plan), case
        kinds.add((swaps(free), swaps(plan)))
    if not rules:
        assert {(True, True), (True, False)} <= kinds


def test_where_the_price_is_high_nothing_is_swapped_and_the_plan_says_why() -> None:
    free, cheap, dear = planned(0.0), planned(CHEAP), planned(DEAR)
    assert swaps(free) and swaps(cheap) and not swaps(dear)
    # The same fates for all that follows from them: only the price is known.
    assert [site.fate for site in cheap.sites] == [site.fate for site in free.sites]
    more = said(free).pass_seconds + price(free, DEAR) - said(dear).pass_seconds
    assert said(dear).swap_excess_seconds == pytest.approx(more) and more > 0.5
    assert said(dear).page_fault_seconds == 0.0 and said(dear).recompute_seconds > 0.0
    line = "no activation is swapped: that would take 656.0 ms more, to take freed memory again"
    assert str(dear).splitlines()[3] == line
    assert "no activation is swapped" not in str(cheap) + str(free)
    remarks = {
        name: Report(title="", subtitle="", plan=plan).remarks for name, plan in (("dear", dear), ("cheap", cheap))
    }
    assert f"No{line[2:]}." in remarks["dear"] and len(remarks["dear"]) == len(remarks["cheap"]) + 1
    assert Plan.from_json(dear.to_json()) == dear
    # As with `swap: none`, but for the words.
    none = planned(DEAR, rules={"swap": "none"})
    assert [(site.name, site.fate) for site in dear.sites] == [(site.name, site.fate) for site in none.sites]
    assert dear.rules == none.rules == free.rules
    assert said(dear).gap == said(none).gap > 0.0
    reasons = {name: {site.reason for site in plan.sites} for name, plan in (("dear", dear), ("none", none))}
    assert "the rules leave no other fate" in reasons["none"] - reasons["dear"]
    assert "swapping would take longer" in reasons["dear"] - reasons["none"]


def test_who_must_swap_does() -> None:
    """Nothing else fits, or a rule asks for it."""
    for plan in (planned(DEAR, share=0.1), planned(DEAR, rules={"swap": ["layers.0"]})):
        assert swaps(plan) and said(plan).page_fault_seconds > 0.5 and said(plan).swap_excess_seconds == 0.0
        assert "freed memory taken again" in str(plan) and "no activation is swapped" not in str(plan)
