"""Random steps, fates and links for the tests of the timeline, and presence counted tick by tick."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import strategies as st

from lowtide.core.fate import Fate
from lowtide.timeline.events import Timeline
from lowtide.timeline.step import Item, Link, Step, Tick

Case = tuple[Step, list[Fate], Link]


def random_step(rng: random.Random, num_items: int) -> Step:
    """Drawn by `random`: thousands of numbers, of which hypothesis need only know the seed."""
    num_forward = rng.randint(1, 12)
    num_ticks = num_forward + rng.randint(1, 16)
    ticks = tuple(Tick(seconds=rng.randint(0, 20) / 8, base_bytes=rng.randint(0, 30)) for _ in range(num_ticks))
    shapes = []
    for place, born in enumerate(sorted(rng.randrange(num_forward) for _ in range(num_items))):
        saved = rng.choice((born, rng.randint(born, num_forward - 1)))
        reads = sorted({rng.randrange(num_forward, num_ticks) for _ in range(rng.randint(0, 3))})
        inputs = {rng.randrange(place) for _ in range(rng.randint(0, 2))} if place else set()
        shapes.append((saved, place, born, reads, inputs))
    # Items are in order of `saved`, which is not always the order in which they were made.
    by_saved = sorted(shapes)
    index_of = {place: index for index, (_, place, *_) in enumerate(by_saved)}
    items = tuple(
        Item(
            name=f"item{index}",
            nbytes=rng.randint(0, 40),
            born=born,
            saved=saved,
            dies=num_ticks if rng.random() < 0.1 else rng.randint(born, num_forward),
            reads=tuple(reads),
            release=rng.choice((reads[-1] + 1, rng.randint(reads[-1] + 1, num_ticks))) if reads else 0,
            fates=tuple(Fate),
            recipe_seconds=rng.randint(0, 8) / 8,
            recipe_bytes=rng.randint(0, 20),
            inputs=tuple(sorted(index_of[place] for place in inputs)),
        )
        for index, (saved, _, born, reads, inputs) in enumerate(by_saved)
    )
    return Step(ticks=ticks, num_forward_ticks=num_forward, items=items)


@st.composite
def steps(draw: st.DrawFn) -> Step:
    return random_step(random.Random(draw(st.integers(0, 2**32))), draw(st.integers(0, 9)))


@st.composite
def cases(draw: st.DrawFn, *, contention: bool = True) -> Case:
    """A step, a fate for each item, and a link. Without contention a faster link is never slower."""
    num_items, rng = draw(st.integers(0, 9)), random.Random(draw(st.integers(0, 2**32)))
    step = random_step(rng, num_items)
    weights = rng.choice(((1, 1, 1), (1, 4, 1), (1, 1, 4), (0, 1, 0)))
    link = Link(
        out_bytes_per_second=rng.choice((0.5, 2.0, 8.0, 32.0, 1e6)),
        in_bytes_per_second=rng.choice((0.5, 2.0, 8.0, 32.0, 1e6)),
        latency_seconds=rng.choice((0.0, 0.25)),
        compute_share=rng.choice((0.0, 0.125)) if contention else 0.0,
    )
    return step, rng.choices(tuple(Fate), weights, k=num_items), link


def naive_needs(step: Step, fates: Sequence[Fate]) -> tuple[list[int | None], list[int]]:
    """First and last need of each item, by repetition until nothing changes."""
    needs = [item.reads[0] if item.reads else None for item in step.items]
    made = [index for index, fate in enumerate(fates) if fate is Fate.RECOMPUTE]
    for _ in step.items:
        for index in made:
            for source in step.items[index].inputs:
                needs[source] = min((tick for tick in (needs[source], needs[index]) if tick is not None), default=None)
    lasts = [max(item.release, *(tick + 1 for tick in item.reads), 0) for item in step.items]
    for index in made:
        need = needs[index]
        for source in step.items[index].inputs:
            lasts[source] = max(lasts[source], 0 if need is None else need + 1)
    return needs, lasts


def naive_curve(step: Step, fates: Sequence[Fate], played: Timeline) -> list[int]:
    """The curve by its definition: each item asked in each tick."""
    needs, lasts = naive_needs(step, fates)
    curve = []
    for tick, entry in enumerate(step.ticks):
        total = entry.base_bytes
        transient = 0
        for index, item in enumerate(step.items):
            need, last = needs[index], lasts[index]
            in_forward = item.born <= tick < item.dies
            if need is None:
                total += item.nbytes * in_forward
                continue
            if fates[index] is Fate.KEEP:
                total += item.nbytes * (item.born <= tick < max(item.dies, last))
            elif fates[index] is Fate.RECOMPUTE:
                total += item.nbytes * in_forward + item.nbytes * (need <= tick < last)
                transient = max(transient, item.recipe_bytes * (tick == need))
            else:
                leave, fetch = played.evict_by[index], played.prefetch_at[index]
                assert leave is not None and fetch is not None
                total += item.nbytes * ((item.born <= tick < max(item.dies, leave)) or (fetch <= tick < last))
        curve.append(total + transient)
    return curve
