"""Water-filling beside the linear program."""

from __future__ import annotations

import pytest

from lowtide.core.fate import Fate
from lowtide.planner.relaxation import Program
from lowtide.planner.solve import closed_form
from lowtide.timeline.events import run
from lowtide.timeline.memory import StepArrays
from tests.planner.cases import H200_LINK, MIB, llama, llama_budget, random_case


@pytest.mark.parametrize("share", [0.3, 0.4, 0.5, 0.6, 0.7])
def test_equal_layers_cost_what_the_program_says_within_half_a_point(share: float) -> None:
    """The smallest eviction whose fates fit. Below a third the inputs of recipes crowd out what this form counts."""
    step = llama()
    arrays = StepArrays.of(step)
    budget_bytes = llama_budget(step, share)
    bound = Program(step, H200_LINK, budget_bytes).solve(range(0, len(step.ticks), 3))
    assert bound is not None
    over = run(arrays, [Fate.KEEP] * len(step.items), H200_LINK).peak_bytes - budget_bytes
    for factor in range(100, 140, 2):
        fates = closed_form(arrays, H200_LINK, over * factor / 100)
        timeline = run(arrays, fates, H200_LINK, budget_bytes=budget_bytes)
        if timeline.peak_bytes <= budget_bytes:
            break
    assert timeline.peak_bytes <= budget_bytes
    assert timeline.step_seconds - bound.bound_seconds <= 0.006 * step.compute_seconds


def test_nothing_to_evict_keeps_everything() -> None:
    step = llama(2)
    assert set(closed_form(StepArrays.of(step), H200_LINK, 0)) == {Fate.KEEP}


def test_the_host_budget_is_kept() -> None:
    step = llama(4)
    arrays = StepArrays.of(step)
    fates = closed_form(arrays, H200_LINK, 10**12, host_bytes=100 * MIB)
    swapped = sum(
        item.nbytes for item, fate in zip(step.items, fates) if fate is Fate.SWAP and Fate.RECOMPUTE in item.fates
    )
    assert 0 < swapped <= 100 * MIB


def test_only_open_fates_are_used() -> None:
    for seed in range(20):
        case = random_case(seed, 8)
        for evict_bytes in (0, 20, 1000):
            fates = closed_form(StepArrays.of(case.step), case.link, evict_bytes)
            assert all(fate in item.fates for item, fate in zip(case.step.items, fates))
