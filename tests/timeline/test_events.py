"""The clock of a step: by hand, by its rules read back from the events, and by what must hold for every case."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.core.fate import Fate
from lowtide.timeline.events import Event, Timeline, run
from lowtide.timeline.memory import StepArrays, curve, peak, plain_curve
from lowtide.timeline.step import Item, Link, Step, Tick
from tests.timeline.steps import Case, cases, needs_of, sources_of, steps

ALL = tuple(Fate)
KEEP, SWAP, RECOMPUTE = Fate.KEEP, Fate.SWAP, Fate.RECOMPUTE


def three_layers(nbytes: int = 10) -> Step:
    """Three forward ticks and three backward ticks of one second; tick i saves an item that tick 5 - i reads."""
    items = tuple(
        Item(name="abc"[i], nbytes=nbytes, born=i, saved=i, dies=i + 1, reads=(5 - i,), release=6 - i, fates=ALL,
             recipe_seconds=0.25)
        for i in range(3)
    )  # fmt: skip
    return Step(ticks=tuple(Tick(seconds=1.0, base_bytes=100) for _ in range(6)), num_forward_ticks=3, items=items)


def link(out: float, back: float | None = None, **more: float) -> Link:
    return Link(out_bytes_per_second=out, in_bytes_per_second=out if back is None else back, **more)


def on_lane(played: Timeline, lane: str) -> dict[str, tuple[float, float]]:
    return {event.name: (event.start, event.end) for event in played.events if event.lane == lane}


# -- by hand -----------------------------------------------------------------------------------------------------------


def test_copies_that_hide_behind_compute() -> None:
    played = run(three_layers(), [SWAP, KEEP, KEEP], link(20.0), with_events=True)
    # Saved at 1.0, landed at 1.5; tick 2 starts at 2.0, a whole copy time later: gone from there on.
    assert on_lane(played, "out") == {"a": (1.0, 1.5)}
    assert played.evict_by == (2, None, None)
    # Needed at 5.0: half a second for the copy and half of that as slack ask for a start at 4.25 or before.
    assert on_lane(played, "in") == {"a": (4.0, 4.5)}
    assert played.prefetch_at == (4, None, None)
    assert (played.step_seconds, played.stall_seconds, played.slower_bytes) == (6.0, 0.0, 10)
    assert played.curve == (110, 120, 120, 120, 120, 110)
    assert (played.peak_bytes, played.peak_tick) == (120, 1)


def test_a_copy_gets_twice_its_time_before_compute_would_wait_for_it() -> None:
    # Landed at 1.8; tick 2 starts at 2.0, too early for a link that is half as fast.
    step, fates = three_layers(), [SWAP, KEEP, KEEP]
    played = run(step, fates, link(12.5))
    assert played.evict_by == (3, None, None)


def test_of_two_that_are_needed_at_once_the_last_produced_comes_first() -> None:
    items = tuple(
        Item(name="abc"[i], nbytes=10, born=born, saved=1, dies=2, reads=(4,), release=5, fates=ALL)
        for i, born in enumerate((0, 1, 0))
    )
    step = Step(ticks=tuple(Tick(seconds=1.0, base_bytes=0) for _ in range(5)), num_forward_ticks=2, items=items)
    played = run(step, [SWAP] * 3, link(20.0), with_events=True)
    # Out as they were saved, all at once; in: `b`, then of the two that are equal the one that was saved last.
    assert list(on_lane(played, "out")) == ["a", "b", "c"]
    assert list(on_lane(played, "in")) == ["b", "c", "a"]


def test_slow_copies_make_compute_wait() -> None:
    played = run(three_layers(), [SWAP, SWAP, KEEP], link(5.0), with_events=True)
    # a: 1.0 to 3.0, b: 3.0 to 5.0; backward starts at 5.0. Both are asked for at once: b until 7.0, a until 9.0.
    assert on_lane(played, "out") == {"a": (1.0, 3.0), "b": (3.0, 5.0)}
    assert on_lane(played, "in") == {"b": (5.0, 7.0), "a": (7.0, 9.0)}
    assert played.evict_by == (3, 3, None)
    assert played.prefetch_at == (3, 3, None)
    assert [(e.start, e.end) for e in played.events if e.lane == "stall"] == [(3.0, 5.0), (6.0, 7.0), (8.0, 9.0)]
    assert played.stall_seconds == 2.0 + 1.0 + 1.0
    assert played.step_seconds == 10.0


def test_a_budget_forces_a_landing() -> None:
    played = run(three_layers(), [SWAP, SWAP, KEEP], link(5.0), budget_bytes=120, with_events=True)
    # At tick 2 `c` takes the place of `a`, which lands at 3.0 only.
    assert played.evict_by == (2, 3, None)
    assert on_lane(played, "compute")["forward 2"] == (3.0, 4.0)
    # `a` may come back only once `c` is gone: at tick 4, when `b` is needed, with which it then shares the lane.
    assert played.prefetch_at == (4, 3, None)
    assert played.curve == (110, 120, 120, 120, 120, 110)


def test_a_landing_that_memory_cannot_wait_for_does_not_use_its_slack() -> None:
    # Landed at 1.5, but with slack it would leave at tick 2; without room at tick 1 it has to go there.
    played = run(three_layers(), [SWAP, KEEP, KEEP], link(20.0), budget_bytes=110)
    assert played.evict_by == (1, None, None)
    # On its way back it has no room before tick 5.
    assert played.prefetch_at == (5, None, None)
    assert played.stall_seconds == 0.5 + 0.5
    assert played.peak_bytes == 120  # `b` and `c` are kept: that budget cannot be met


def test_recompute_and_contention_take_time() -> None:
    played = run(three_layers(), [SWAP, RECOMPUTE, KEEP], link(20.0, compute_share=0.25), with_events=True)
    assert played.recompute_seconds == 0.25
    assert played.contention_seconds == 0.25
    assert played.step_seconds == 6.5
    lane = on_lane(played, "compute")
    assert lane["forward 1"] == (1.0, 2.125)  # the copy out was issued when tick 0 had run
    assert lane["recompute b"] == (4.125, 4.375)
    assert lane["backward 1"] == (4.375, 5.5)


def test_latency_is_paid_for_each_copy() -> None:
    played = run(three_layers(), [SWAP, SWAP, KEEP], link(20.0, latency_seconds=0.25), with_events=True)
    assert on_lane(played, "out") == {"a": (1.0, 1.75), "b": (2.0, 2.75)}


def test_an_retained_input_that_nobody_needs_is_not_copied() -> None:
    step = three_layers()
    retained_input = Item(name="x", nbytes=50, born=0, saved=0, dies=1, fates=ALL, recipe_seconds=9.0)
    step = Step(ticks=step.ticks, num_forward_ticks=3, items=(retained_input, *step.items))
    for fate in ALL:
        played = run(step, [fate, KEEP, KEEP, KEEP], link(0.001), with_events=True)
        assert played.step_seconds == step.compute_seconds
        assert played.curve == (160, 120, 130, 130, 120, 110)
        assert (played.evict_by[0], played.prefetch_at[0], played.slower_bytes) == (None, None, 0)
        assert needs_of(step, [fate, KEEP, KEEP, KEEP])[0] is None


def test_a_step_without_items_or_backward() -> None:
    step = Step(ticks=(Tick(seconds=2.0, base_bytes=3),), num_forward_ticks=1, items=())
    played = run(step, [], link(1.0), budget_bytes=1, with_events=True)
    assert (played.step_seconds, played.peak_bytes, played.curve) == (2.0, 3, (3,))
    assert played.events == (Event(lane="compute", name="forward 0", start=0.0, end=2.0),)


# -- the rules, read back from the events ------------------------------------------------------------------------------


def check_rules(step: Step, fates: Sequence[Fate], played: Timeline) -> None:
    """Every wait that the rules ask for has happened, lanes do one thing at a time, and no time is lost."""
    num_forward = step.num_forward_ticks
    lanes = {lane: sorted((e for e in played.events if e.lane == lane), key=lambda e: (e.start, e.end))
             for lane in ("compute", "out", "in", "stall")}  # fmt: skip
    for lane in ("out", "in"):
        assert all(first.end <= second.start + 1e-9 for first, second in pairwise(lanes[lane]))
    # Rounded, since a tick that takes no time may seem to start a hair after the wait that follows it.
    busy = sorted(lanes["compute"] + lanes["stall"], key=lambda event: (round(event.start, 9), round(event.end, 9)))
    now = 0.0
    for event in busy:
        assert event.start == pytest.approx(now, abs=1e-9)
        now = event.end
    assert now == pytest.approx(played.step_seconds, abs=1e-9)

    compute = on_lane(played, "compute")
    starts = [compute[f"forward {tick}"][0] for tick in range(num_forward)]
    starts += [compute[f"backward {tick}"][0] for tick in range(len(step.ticks) - num_forward)]
    ends = [compute[f"forward {tick}"][1] for tick in range(num_forward)]
    ends += [compute[f"backward {tick}"][1] for tick in range(len(step.ticks) - num_forward)]
    out, back = on_lane(played, "out"), on_lane(played, "in")
    needs = needs_of(step, fates)
    for item, fate, leave, fetch, need in zip(step.items, fates, played.evict_by, played.prefetch_at, needs):
        if fate is RECOMPUTE and need is not None:
            assert compute[f"recompute {item.name}"][1] <= starts[need] + 1e-9
        if fate is not SWAP or need is None:
            assert item.name not in out and item.name not in back
            assert leave is None and fetch is None
            continue
        assert leave is not None and fetch is not None
        assert item.saved < leave <= num_forward <= fetch <= need
        assert ends[item.saved] <= out[item.name][0] + 1e-9
        assert out[item.name][1] <= starts[leave] + 1e-9
        assert ends[fetch - 1] <= back[item.name][0] + 1e-9
        assert back[item.name][1] <= starts[need] + 1e-9
        for place, (made, chosen, made_need) in enumerate(zip(step.items, fates, needs)):
            sources = sources_of(step, fates, place)
            is_reader = chosen is RECOMPUTE and made_need is not None and step.items.index(item) in sources
            assert not is_reader or back[item.name][1] <= compute[f"recompute {made.name}"][0] + 1e-9


@given(cases(), st.sampled_from([None, 40, 80, 120]))
@settings(max_examples=200)
def test_the_rules(case: Case, budget: int | None) -> None:
    step, fates, link = case
    check_rules(step, fates, run(step, fates, link, budget_bytes=budget, with_events=True))


def scaled(link: Link, factor: float) -> Link:
    return Link(
        out_bytes_per_second=link.out_bytes_per_second * factor,
        in_bytes_per_second=link.in_bytes_per_second * factor,
        latency_seconds=link.latency_seconds,
        compute_share=link.compute_share,
    )


# -- what must hold for every case -------------------------------------------------------------------------------------


@given(steps())
def test_all_kept_is_the_plain_step(step: Step) -> None:
    played = run(step, [KEEP] * len(step.items), link(1.0, compute_share=0.5), budget_bytes=1)
    assert played.step_seconds == pytest.approx(step.compute_seconds)
    assert list(played.curve) == plain_curve(step).tolist()
    assert (played.stall_seconds, played.contention_seconds, played.recompute_seconds) == (0.0, 0.0, 0.0)


@given(cases(), st.sampled_from([None, 60, 100]))
@settings(max_examples=150)
def test_time_is_conserved(case: Case, budget: int | None) -> None:
    step, fates, link = case
    played = run(step, fates, link, budget_bytes=budget)
    extra = played.stall_seconds + played.recompute_seconds + played.contention_seconds
    assert played.step_seconds == pytest.approx(step.compute_seconds + extra)


@given(cases(), st.sampled_from([None, 60, 100]))
@settings(max_examples=150)
def test_swapping_never_takes_more_memory_than_keeping(case: Case, budget: int | None) -> None:
    step, fates, link = case
    kept = [KEEP if fate is SWAP else fate for fate in fates]
    swapped, plain = run(step, fates, link, budget_bytes=budget), run(step, kept, link, budget_bytes=budget)
    assert all(here <= there for here, there in zip(swapped.curve, plain.curve))


@given(cases(), st.integers(0, 40))
@settings(max_examples=200)
def test_what_waiting_can_fit_fits(case: Case, room: int) -> None:
    step, fates, link = case
    budget = peak(curve(step, fates))[0] + room
    assert run(step, fates, link, budget_bytes=budget).peak_bytes <= budget


@given(cases(contention=False), st.sampled_from([None, 0, 20]), st.sampled_from([1.1, 2.0, 50.0]))
@settings(max_examples=300)
def test_a_faster_link_is_never_slower(case: Case, room: int | None, factor: float) -> None:
    step, fates, link = case
    budget = None if room is None else peak(curve(step, fates))[0] + room
    slow = run(step, fates, link, budget_bytes=budget)
    fast = run(step, fates, scaled(link, factor), budget_bytes=budget)
    assert fast.step_seconds <= slow.step_seconds + 1e-9


@given(cases(contention=False))
def test_copies_that_take_no_time_cost_none(case: Case) -> None:
    step, fates, _ = case
    played = run(step, fates, link(1e15), budget_bytes=peak(curve(step, fates))[0])
    assert played.stall_seconds == pytest.approx(0.0, abs=1e-9)


def run_with_slack(slack: float, case: Case) -> Timeline:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lowtide.timeline.events.SLACK", slack)
        return run(*case)


@given(cases(contention=False))
@settings(max_examples=150)
def test_fetching_late_costs_nothing(case: Case) -> None:
    """Memory aside, the chosen ticks are as good as fetching everything when backward starts."""
    played, early = run(*case), run_with_slack(1e9, case)
    assert {tick for tick in early.prefetch_at if tick is not None} <= {case[0].num_forward_ticks}
    assert played.step_seconds <= early.step_seconds + 1e-9


@given(cases())
def test_slack_makes_room_for_a_slower_link(case: Case) -> None:
    """Without a budget, more slack never issues a fetch later."""
    early, late = run_with_slack(2.0, case), run_with_slack(0.0, case)
    assert all(a <= b for a, b in zip(early.prefetch_at, late.prefetch_at) if a is not None and b is not None)


def test_a_fetch_is_delayed_until_it_fits() -> None:
    """One tick in the middle of backward is full: what is needed after it is fetched after it."""
    bases = [0, 0, 0, 0, 90, 0, 0, 0]
    items = (Item(name="a", nbytes=20, born=0, saved=0, dies=1, reads=(7,), release=8, fates=ALL),)
    step = Step(ticks=tuple(Tick(seconds=1.0, base_bytes=base) for base in bases), num_forward_ticks=3, items=items)
    # Copies take 4 s: out from 1.0 to 5.0, and in from 5.0 on when backward starts, in time for the need at 9.0.
    played = run(step, [SWAP], link(5.0))
    assert (played.prefetch_at, played.stall_seconds) == ((3,), 2.0)
    # Issued at tick 5, at 7.0, it arrives at 11.0.
    played = run(step, [SWAP], link(5.0), budget_bytes=100)
    assert (played.prefetch_at, played.stall_seconds) == ((5,), 4.0)


# -- speed -------------------------------------------------------------------------------------------------------------


def stack(num_layers: int, num_items: int, ticks_per_layer: int) -> Step:
    rng = random.Random(0)
    num_forward = num_layers * ticks_per_layer
    num_ticks = 3 * num_forward
    ticks = tuple(Tick(seconds=rng.random() * 2e-4, base_bytes=1000) for _ in range(num_ticks))
    items: list[Item] = []
    for index in range(num_layers * num_items):
        born = index * ticks_per_layer // num_items
        read = num_ticks - 1 - 2 * born
        items.append(
            Item(name=f"{index}", nbytes=rng.randint(1, 64) << 20, born=born, saved=born, dies=born + 1, reads=(read,),
                 release=read + 1, fates=ALL, recipe_seconds=1e-5, inputs=(index - 1,) if index % 3 else ())
        )  # fmt: skip
    return Step(ticks=ticks, num_forward_ticks=num_forward, items=tuple(items))


@pytest.mark.parametrize(("shape", "limit_seconds"), [((32, 11, 25), 0.03), ((128, 40, 52), 0.45)])
def test_speed(shape: tuple[int, int, int], limit_seconds: float) -> None:
    step = stack(*shape)
    arrays = StepArrays.of(step)
    fates = random.Random(1).choices(ALL, k=len(step.items))
    budget = peak(curve(arrays, fates))[0]
    seconds = []  # a third of the limit on a quiet machine
    for _ in range(5):
        start = time.process_time()
        run(arrays, fates, link(52e9), budget_bytes=budget)
        seconds.append(time.process_time() - start)
    assert min(seconds) < limit_seconds
