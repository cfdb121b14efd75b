"""The solver beside exhaustive search on small steps, and beside its own bound on large ones."""

from __future__ import annotations

import dataclasses
import itertools
import random
import time

import pytest

from lowtide.core.fate import Fate
from lowtide.errors import BudgetError
from lowtide.planner.local_search import Evaluator
from lowtide.planner.solve import Solution, floor, refusal, solve
from lowtide.timeline.events import run
from lowtide.timeline.memory import Lifetimes, StepArrays, floor_curve
from lowtide.timeline.step import Item, Link, Step, Tick
from tests.planner.cases import ALL, GIB, H200_LINK, MIB, Case, exhaustive, llama, llama_budget, random_case

FAST = Link(out_bytes_per_second=1e15, in_bytes_per_second=1e15)


def _solve(case: Case) -> Solution:
    return solve(case.step, case.link, case.budget_bytes, host_bytes=case.host_bytes, time_limit_seconds=60.0)


def _compare(seed: int, max_items: int, *, has_forms: bool = False) -> float | None:
    """Checks one case; the share by which the step is slower than the fastest, or None where nothing fits."""
    case = random_case(seed, max_items, has_forms=has_forms)
    fastest = exhaustive(case)
    if fastest is None:
        with pytest.raises(BudgetError) as caught:
            _solve(case)
        assert caught.value.floor_bytes > case.budget_bytes
        return None
    solution = _solve(case)
    timeline = solution.timeline
    assert timeline.peak_bytes <= case.budget_bytes
    assert case.host_bytes is None or timeline.slower_bytes <= case.host_bytes
    assert timeline == run(case.step, solution.fates, case.link, budget_bytes=case.budget_bytes)
    assert solution.bound_seconds <= fastest.step_seconds * (1 + 1e-9), "not a bound"
    assert 0 <= solution.gap < 1
    assert solution.gap == pytest.approx(1 - solution.bound_seconds / timeline.step_seconds, abs=1e-12)
    return timeline.step_seconds / fastest.step_seconds - 1


def test_small_random_steps_are_as_fast_as_exhaustive_search() -> None:
    slower = [_compare(seed, max_items=4) for seed in range(30)]
    found = [share for share in slower if share is not None]
    assert len(found) > 20
    assert max(found) <= 0.01
    assert len(slower) - len(found) > 2, "some cases must have no solution"


def test_smaller_forms_are_weighed_as_exhaustive_search_does() -> None:
    """Kept, swapped, by a recipe, its smaller form kept or swapped: up to five ways for an item."""
    slower = [_compare(seed, max_items=3, has_forms=True) for seed in range(30)]
    found = [share for share in slower if share is not None]
    assert len(found) > 20
    assert max(found) <= 0.01


@pytest.mark.slow
@pytest.mark.parametrize("block", range(3))
def test_random_steps_are_as_fast_as_exhaustive_search(block: int) -> None:
    slower = [_compare(10_000 + 12 * block + number, max_items=7) for number in range(8)]
    found = [share for share in slower if share is not None]
    assert max(found) <= 0.01


@pytest.mark.slow
def test_ten_items_are_as_fast_as_exhaustive_search() -> None:
    seeds = (seed for seed in range(20_000, 20_400) if len(random_case(seed, 10).step.items) == 10)
    for seed in itertools.islice(seeds, 1):
        slower = _compare(seed, max_items=10)
        assert slower is None or slower <= 0.01


@pytest.mark.parametrize(("share", "at_most"), [(0.1, 0.144), (0.2, 0.107), (0.3, 0.071), (0.5, 0.0096), (0.7, 0.0014)])
def test_a_stack_of_layers_is_solved_to_within_a_printed_gap(share: float, at_most: float) -> None:
    """At most what a program with whole layers as slots promises; more slots can only do better."""
    step = llama()
    started = time.process_time()  # other work aside
    solution = solve(step, H200_LINK, llama_budget(step, share), time_limit_seconds=60.0)
    assert time.process_time() - started < 3.0  # half a second; the first also imports scipy
    assert solution.timeline.peak_bytes <= llama_budget(step, share)
    assert solution.gap <= 0.005
    assert solution.timeline.step_seconds / step.compute_seconds - 1 <= at_most


@pytest.mark.slow
def test_a_very_large_stack() -> None:
    step = llama(128, num_parts=4)
    started = time.process_time()
    solution = solve(step, H200_LINK, llama_budget(step, 0.2), time_limit_seconds=120.0)
    assert time.process_time() - started < 10.0  # two seconds; the first also imports scipy
    assert len(step.items) == 5632
    assert solution.gap <= 0.005


def test_a_larger_budget_is_never_slower() -> None:
    step = llama(8)
    shares = [0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0]
    solutions = [solve(step, H200_LINK, llama_budget(step, share)) for share in shares]
    for tight, loose in itertools.pairwise(solutions):
        assert loose.timeline.step_seconds <= tight.timeline.step_seconds * (1 + 1e-3)
        assert loose.bound_seconds <= tight.bound_seconds * (1 + 1e-6)
    assert set(solutions[-1].fates) == {Fate.KEEP}


@pytest.mark.slow
def test_a_larger_budget_is_never_slower_in_random_steps() -> None:
    for seed in range(300, 304):
        case = random_case(seed, max_items=7)
        floor_bytes, _ = floor(case.step, case.host_bytes)
        if floor_bytes > 1 << 40:
            continue
        seconds = [
            _solve(dataclasses.replace(case, budget_bytes=budget_bytes)).timeline.step_seconds
            for budget_bytes in range(floor_bytes, floor_bytes + 150, 10)
        ]
        assert all(loose <= tight * (1 + 1e-9) for tight, loose in itertools.pairwise(seconds)), seed


def test_where_everything_fits_everything_is_kept() -> None:
    step = llama(4)
    solution = solve(step, H200_LINK, 100 * GIB)
    assert set(solution.fates) == {Fate.KEEP}
    assert solution.gap == 0.0
    assert solution.bound_seconds == solution.timeline.step_seconds == pytest.approx(step.compute_seconds)


def test_the_same_step_has_the_same_plan() -> None:
    step = llama(8)
    first, second = (solve(step, H200_LINK, llama_budget(step, 0.3)) for _ in range(2))
    assert first.fates == second.fates


# -- nothing fits ----------------------------------------------------------------------------------------------------


def _two_item_step(**changes: object) -> Step:
    item = Item(name="mlp.mul", nbytes=2 * GIB, born=0, saved=0, dies=1, reads=(3,), release=4, fates=ALL[:2])
    other = dataclasses.replace(item, name="mlp.up", born=1, saved=1, dies=2, reads=(2,), release=3)
    ticks = tuple(Tick(seconds=0.1, base_bytes=GIB) for _ in range(4))
    return Step(ticks=ticks, num_forward_ticks=2, items=(dataclasses.replace(item, **changes), other))


def test_the_floor_is_reached_by_its_fates() -> None:
    for seed in range(12):
        case = random_case(seed, max_items=6)
        floor_bytes, fates = floor(case.step, case.host_bytes)
        arrays = StepArrays.of(case.step)
        if floor_bytes <= 1 << 40:
            assert int(floor_curve(arrays, Lifetimes.of(arrays, fates)).max()) == floor_bytes


def test_the_floor_is_no_higher_than_a_plan_that_exists() -> None:
    """Where nothing may be swapped, too: what recomputing reaches is found."""
    for seed in range(20):
        step = random_case(seed, max_items=5).step
        items = tuple(
            dataclasses.replace(item, fates=tuple(fate for fate in item.fates if fate is not Fate.SWAP) or ALL[:1])
            for item in step.items
        )
        arrays = StepArrays.of(dataclasses.replace(step, items=items))
        floor_bytes, _ = floor(arrays)
        every = itertools.product(*(item.fates for item in items))
        assert floor_bytes == min(int(floor_curve(arrays, Lifetimes.of(arrays, fates)).max()) for fates in every)


def test_a_budget_below_the_floor_says_where_what_and_how() -> None:
    with pytest.raises(BudgetError) as caught:
        solve(_two_item_step(), FAST, 2 * GIB)
    error = caught.value
    assert error.floor_bytes == 3 * GIB
    assert str(error) == (
        "budget 2.0 GiB: no plan fits; the least that can be reached is 3.0 GiB, set by forward tick 0: 1.0 GiB there "
        "is not activations, the largest activation there is 'mlp.mul' with 2.0 GiB; raise the budget to 3.0 GiB or "
        "make the micro-batch smaller"
    )
    assert _ways_out(_two_item_step(), 2 * GIB) == (
        "a budget of 3.0 GiB: 400.0 ms a step, 0.0 % over keeping everything",
        "a budget of 4.0 GiB: 400.0 ms a step, 0.0 % over keeping everything",
    )


def _ways_out(step: Step, budget_bytes: int, host_bytes: int | None = None) -> tuple[str, ...]:
    arrays = StepArrays.of(step)
    return refusal(Evaluator(arrays, FAST, budget_bytes, host_bytes), *floor(arrays, host_bytes), 5.0).suggestions


def test_ways_out_name_the_host() -> None:
    step = _two_item_step()
    with pytest.raises(BudgetError) as caught:
        solve(step, FAST, 4 * GIB, host_bytes=GIB)
    assert caught.value.floor_bytes == 5 * GIB
    assert _ways_out(step, 4 * GIB, GIB) == (
        "a host budget of 2.0 GiB: 400.0 ms a step, 0.0 % over keeping everything",
        "a budget of 5.0 GiB: 400.0 ms a step, 0.0 % over keeping everything",
    )


def test_forced_swaps_that_the_host_cannot_take() -> None:
    step = _two_item_step(fates=(Fate.SWAP,))
    with pytest.raises(BudgetError) as caught:
        solve(step, FAST, 100 * GIB, host_bytes=512 * MIB)
    assert str(caught.value) == (
        "budget 100.0 GiB: rules swap more than the host budget of 512.0 MiB takes; raise it or swap less"
    )


def test_the_floor_does_not_depend_on_times() -> None:
    """Two observations of one step have other times; what one was told must be enough for the other."""
    for seed in range(6):
        step, host_bytes = random_case(seed, 9).step, random_case(seed, 9).host_bytes
        draw = random.Random(seed)
        ticks = tuple(dataclasses.replace(tick, seconds=tick.seconds * draw.uniform(0.2, 5)) for tick in step.ticks)
        items = tuple(
            dataclasses.replace(item, recipe_seconds=item.recipe_seconds * draw.uniform(0.2, 5)) for item in step.items
        )
        other = dataclasses.replace(step, ticks=ticks, items=items)
        assert floor(step, host_bytes) == floor(other, host_bytes)
