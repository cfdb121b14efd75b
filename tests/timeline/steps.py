"""Random steps, fates and links for the tests of the timeline, and presence counted tick by tick."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

from hypothesis import strategies as st

from lowtide.core.fate import Fate
from lowtide.timeline.events import Timeline
from lowtide.timeline.memory import Lifetimes
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


def with_forms(step: Step, rng: random.Random) -> Step:
    """The step in which some items may be made from a smaller form, beside their recipe or in place of it."""
    items = list(step.items)
    seconds = max((tick.seconds for tick in step.ticks), default=0.0)
    for index, item in enumerate(step.items):
        if not item.reads or len(item.fates) == 1 or rng.random() < 0.5:
            continue
        has_recipe = Fate.RECOMPUTE in item.fates and rng.random() < 0.7
        if not has_recipe:
            fates = tuple(dict.fromkeys((*item.fates, Fate.RECOMPUTE)))
            items[index] = dataclasses.replace(item, fates=fates, inputs=(), recipe_seconds=0.0, recipe_bytes=0)
        items[index] = dataclasses.replace(items[index], form=len(items))
        items.append(
            Item(
                name=f"{item.name} smaller",
                nbytes=item.nbytes // rng.choice((2, 4, 8)),
                born=item.saved,
                saved=rng.randint(item.saved, step.num_forward_ticks - 1),
                dies=item.saved,
                fates=(Fate.KEEP, *[Fate.SWAP] * (rng.random() < 0.8), *[Fate.RECOMPUTE] * has_recipe),
                form_of=index,
                recipe_seconds=seconds * rng.randint(0, 8) / 16,
                recipe_bytes=rng.choice((0, rng.randint(0, 20))),
            )
        )
    return dataclasses.replace(step, items=tuple(items))


@st.composite
def steps(draw: st.DrawFn) -> Step:
    return random_step(random.Random(draw(st.integers(0, 2**32))), draw(st.integers(0, 9)))


@st.composite
def cases(draw: st.DrawFn, *, contention: bool = True) -> Case:
    """A step, a fate for each item, and a link. Without contention a faster link is never slower."""
    num_items, rng = draw(st.integers(0, 9)), random.Random(draw(st.integers(0, 2**32)))
    step = random_step(rng, num_items)
    if rng.random() < 0.5:
        step = with_forms(step, rng)
    weights = dict(zip(Fate, rng.choice(((1, 1, 1), (1, 4, 1), (1, 1, 4), (0.01, 1, 0.01)))))
    link = Link(
        out_bytes_per_second=rng.choice((0.5, 2.0, 8.0, 32.0, 1e6)),
        in_bytes_per_second=rng.choice((0.5, 2.0, 8.0, 32.0, 1e6)),
        latency_seconds=rng.choice((0.0, 0.25)),
        compute_share=rng.choice((0.0, 0.125)) if contention else 0.0,
    )
    fates = [rng.choices(item.fates, [weights[fate] for fate in item.fates])[0] for item in step.items]
    return step, fates, link


def sources_of(step: Step, fates: Sequence[Fate], index: int) -> tuple[int, ...]:
    """What a recomputed item is made from."""
    item = step.items[index]
    is_stored = item.form is not None and fates[item.form] is not Fate.RECOMPUTE
    return (item.form,) if is_stored and item.form is not None else item.inputs


def naive_needs(step: Step, fates: Sequence[Fate]) -> tuple[list[int | None], list[int]]:
    """First and last need of each item, by repetition until nothing changes."""
    needs = [item.reads[0] if item.reads else None for item in step.items]
    made = [index for index, fate in enumerate(fates) if fate is Fate.RECOMPUTE]
    for _ in step.items:
        for index in made:
            for source in sources_of(step, fates, index):
                needs[source] = min((tick for tick in (needs[source], needs[index]) if tick is not None), default=None)
    lasts = [max(item.release, *(tick + 1 for tick in item.reads), 0) for item in step.items]
    for index in made:
        need = needs[index]
        for source in sources_of(step, fates, index):
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
            form = step.items[item.form] if item.form is not None and fates[item.form] is not Fate.RECOMPUTE else None
            if need is None:
                total += item.nbytes * in_forward
                continue
            if fates[index] is Fate.KEEP:
                total += item.nbytes * (item.born <= tick < max(item.dies, last))
            elif fates[index] is Fate.RECOMPUTE:
                if form is not None:  # it stays until that is there
                    in_forward = item.born <= tick < max(item.dies, form.born + 1)
                    transient = max(transient, form.recipe_bytes * (tick in (form.born, need)))
                else:
                    transient = max(transient, item.recipe_bytes * (tick == need))
                total += item.nbytes * in_forward + item.nbytes * (need <= tick < last)
            else:
                leave, fetch = played.evict_by[index], played.prefetch_at[index]
                assert leave is not None and fetch is not None
                total += item.nbytes * ((item.born <= tick < max(item.dies, leave)) or (fetch <= tick < last))
        curve.append(total + transient)
    return curve


def needs_of(step: Step, fates: Sequence[Fate]) -> tuple[int | None, ...]:
    """Of each item the first tick in backward at which it must be there; None: never."""
    ticks = Lifetimes.of(step, fates).need.tolist()
    return tuple(None if tick == len(step.ticks) else tick for tick in ticks)
