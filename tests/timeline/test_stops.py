"""A runtime that can look at its plan only at some ticks: what the timeline chooses, it can carry out."""

from __future__ import annotations

import dataclasses
import random

import pytest

from lowtide.core.fate import Fate
from lowtide.timeline.events import run
from lowtide.timeline.memory import curve, plain_curve
from lowtide.timeline.step import Link, Step
from tests.timeline.steps import needs_of, random_step

LINK = Link(out_bytes_per_second=50.0, in_bytes_per_second=40.0, latency_seconds=0.1)


def with_stops(step: Step, draw: random.Random) -> Step:
    """The least stops that a step may have, and some more."""
    stops = {step.num_forward_ticks}
    for item in step.items:
        stops.add(item.saved + 1)
        stops.update(item.reads[:1])
    stops |= {tick for tick in range(len(step.ticks)) if draw.random() < 0.2}
    return dataclasses.replace(step, stops=tuple(sorted(stop for stop in stops if stop < len(step.ticks))))


def random_fates(step: Step, draw: random.Random) -> tuple[Fate, ...]:
    return tuple(draw.choice(item.fates) for item in step.items)


@pytest.mark.parametrize("seed", range(150))
def test_copies_are_waited_for_and_started_at_stops(seed: int) -> None:
    draw = random.Random(seed)
    step = with_stops(random_step(draw, 8), draw)
    fates = random_fates(step, draw)
    plain, least = int(plain_curve(step).max()), int(curve(step, fates).max())
    for budget in (None, plain, (plain + least) // 2, least):
        timeline = run(step, fates, LINK, budget_bytes=budget)
        allowed = {*step.stops, step.num_forward_ticks}
        assert {tick for tick in timeline.evict_by if tick is not None} <= allowed
        assert {tick for tick in timeline.prefetch_at if tick is not None} <= allowed | set(needs_of(step, fates))
        assert (
            list(timeline.curve)
            == curve(step, fates, evict_by=timeline.evict_by, prefetch_at=timeline.prefetch_at).tolist()
        )


@pytest.mark.parametrize("seed", range(60))
def test_stops_everywhere_are_no_restriction(seed: int) -> None:
    draw = random.Random(seed)
    step = random_step(draw, 8)
    everywhere = dataclasses.replace(step, stops=tuple(range(len(step.ticks))))
    fates = random_fates(step, draw)
    budget = int(curve(step, fates).max())
    for budget_bytes in (None, budget, 2 * budget):
        assert run(everywhere, fates, LINK, budget_bytes=budget_bytes) == run(
            step, fates, LINK, budget_bytes=budget_bytes
        )
