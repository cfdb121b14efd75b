"""The memory curve, against presence counted item by item and tick by tick."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from lowtide.core.fate import Fate
from lowtide.timeline.events import run
from lowtide.timeline.memory import Lifetimes, StepArrays, curve, peak, plain_curve
from lowtide.timeline.step import Item, Link, Step, Tick
from tests.timeline.steps import cases, naive_curve, naive_needs, needs_of, steps

LINK = Link(out_bytes_per_second=10.0, in_bytes_per_second=10.0)


def chain() -> Step:
    """Six ticks: a retained input (10 bytes) from which `b` (20) is made, from which `c` (40) is made."""
    fates = (Fate.KEEP, Fate.SWAP, Fate.RECOMPUTE)
    items = (
        Item(name="a", nbytes=10, born=0, saved=0, dies=1, fates=fates),
        Item(name="b", nbytes=20, born=0, saved=1, dies=2, reads=(5,), release=6, fates=fates, inputs=(0,)),
        Item(name="c", nbytes=40, born=1, saved=2, dies=2, reads=(3,), release=4, fates=fates, inputs=(1,),
             recipe_bytes=7),
    )  # fmt: skip
    return Step(ticks=tuple(Tick(seconds=1.0, base_bytes=100) for _ in range(6)), num_forward_ticks=3, items=items)


def test_all_kept_leaves_out_an_retained_input_that_nobody_needs() -> None:
    assert plain_curve(chain()).tolist() == [130, 160, 160, 160, 120, 120]


@pytest.mark.parametrize(
    ("fates", "needs", "expected"),
    [
        # c is made at tick 3 from b, which must be kept for it until then; its own release is later anyway.
        ("kkr", (None, 3, 3), [130, 160, 120, 167, 120, 120]),
        # The chain: b is made first, at tick 3, from a, which is kept until b is there, and b stays until tick 5.
        ("krr", (3, 3, 3), [130, 170, 110, 177, 120, 120]),
        # b alone: at its own read, and a until then.
        ("krk", (5, 5, 3), [130, 170, 150, 150, 110, 130]),
        # A swapped input of a recipe is back when the recipe runs. b must be saved before it can leave.
        ("ksr", (None, 3, 3), [130, 160, 100, 167, 120, 120]),
        ("srr", (3, 3, 3), [130, 160, 100, 177, 120, 120]),
        # A retained input that nobody needs is there while the forward has it, whatever its fate.
        ("skk", (None, 5, 3), [130, 160, 160, 160, 120, 120]),
        ("rkk", (None, 5, 3), [130, 160, 160, 160, 120, 120]),
    ],
)
def test_presence_by_hand(fates: str, needs: tuple[int | None, ...], expected: list[int]) -> None:
    step = chain()
    chosen = [{"k": Fate.KEEP, "s": Fate.SWAP, "r": Fate.RECOMPUTE}[letter] for letter in fates]
    assert needs_of(step, chosen) == needs
    assert curve(step, chosen).tolist() == expected


def test_leave_and_fetch_widen_presence() -> None:
    step = chain()
    fates = [Fate.KEEP, Fate.SWAP, Fate.KEEP]
    got = curve(step, fates, evict_by=(None, 3, None), prefetch_at=(None, 4, None))
    assert got.tolist() == [130, 160, 160, 140, 120, 120]


def test_peak_is_the_first_of_the_highest() -> None:
    assert peak(np.array([1, 5, 5, 2])) == (5, 1)


def test_a_fate_that_an_item_cannot_have() -> None:
    step = chain()
    item = Item(name="x", nbytes=1, born=0, saved=0, dies=1, reads=(3,), release=4)
    with pytest.raises(AssertionError, match=r"^x cannot be recompute"):
        curve(Step(ticks=step.ticks, num_forward_ticks=3, items=(item,)), [Fate.RECOMPUTE])


@given(cases())
@settings(max_examples=300)
def test_curve_is_presence_counted_one_by_one(case) -> None:
    step, fates, link = case
    played = run(step, fates, link)
    expected = naive_curve(step, fates, played)
    assert curve(step, fates, evict_by=played.evict_by, prefetch_at=played.prefetch_at).tolist() == expected
    assert list(played.curve) == expected


@given(cases())
@settings(max_examples=1000)
def test_needs_follow_recipes(case) -> None:
    step, fates, _ = case
    lifetimes = Lifetimes.of(StepArrays.of(step), fates)
    needs, lasts = naive_needs(step, fates)
    assert [None if tick == len(step.ticks) else tick for tick in lifetimes.need.tolist()] == needs
    assert lifetimes.release.tolist() == lasts


@given(steps())
@settings(max_examples=100)
def test_every_curve_is_above_the_one_without_timing(step: Step) -> None:
    fates = [Fate.SWAP] * len(step.items)
    played = run(step, fates, LINK)
    assert np.all(curve(step, fates) <= np.array(played.curve))
    assert np.all(np.array(played.curve) <= plain_curve(step))
