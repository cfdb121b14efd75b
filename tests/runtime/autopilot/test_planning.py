"""Which plans may race with the one in force."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from lowtide.core.decisions import OptimizerPlacement
from lowtide.core.plan import Plan
from lowtide.runtime.autopilot.plan_cache import CachedPlan
from lowtide.runtime.autopilot.planning import Planning
from lowtide.tensors.ranks import ALONE
from tests.runtime.autopilot.test_first_step import PREDICTED

STAYS = Plan(layers=(), min_bytes=0, is_solved=True, predicted=PREDICTED)
MOVES = dataclasses.replace(STAYS, optimizer=OptimizerPlacement(moved_bytes=8, reason="it does not fit"))


class Source:
    """Has two rivals for whatever plan: one leaves the optimizer's state on the device, one does not."""

    budget_bytes = PREDICTED.peak_bytes
    races = True

    def rivals(self, *_: Any) -> dict[str, Plan]:
        return {"stays": STAYS, "moves": MOVES}


@pytest.mark.parametrize(("resident_bytes", "name"), [(None, "stays"), (0, "moves")])
def test_no_rival_moves_the_optimizers_state_or_brings_it_back(resident_bytes: int | None, name: str) -> None:
    planning = Planning(Source(), ALONE)  # type: ignore[arg-type]
    planning.know(resident_state_bytes=resident_bytes)
    shape = CachedPlan(profile=None, plan=STAYS)  # type: ignore[arg-type]
    assert set(planning.rivals(shape)) == {name}


@pytest.mark.parametrize(("unforeseen_bytes", "names"), [(0, {"stays", "before the correction"}), (1, {"stays"})])
def test_what_was_before_a_correction_races_only_where_it_fits(unforeseen_bytes: int, names: set[str]) -> None:
    shape = CachedPlan(profile=None, plan=STAYS, before=STAYS, unforeseen_bytes=unforeseen_bytes)  # type: ignore[arg-type]
    assert set(Planning(Source(), ALONE).rivals(shape)) == names  # type: ignore[arg-type]
