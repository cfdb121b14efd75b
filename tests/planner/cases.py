"""Steps to solve: small random ones with every feature of an item, a stack of equal layers; an exhaustive answer."""

from __future__ import annotations

import dataclasses
import itertools
import random

from lowtide.core.fate import Fate
from lowtide.planner.local_search import Evaluator
from lowtide.planner.min_peak import UNREACHABLE, floor
from lowtide.planner.solve import bound_of
from lowtide.timeline.events import Timeline, run
from lowtide.timeline.memory import StepArrays
from lowtide.timeline.step import Item, Link, Step, Tick
from tests.timeline.steps import with_forms

MIB = 1 << 20
GIB = 1 << 30
ALL = (Fate.KEEP, Fate.SWAP, Fate.RECOMPUTE)
H200_LINK = Link(out_bytes_per_second=52e9, in_bytes_per_second=52e9)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    step: Step
    link: Link
    budget_bytes: int
    host_bytes: int | None


def random_step(rng: random.Random, max_items: int) -> Step:
    """Chains of recipes, retained inputs, restricted fates; lifetimes that nest roughly as those of a network do."""
    num_forward, num_backward = rng.randint(3, 10), rng.randint(3, 14)
    num_ticks = num_forward + num_backward
    ticks = tuple(
        Tick(seconds=rng.choice([0.5, 1, 2]) * rng.random(), base_bytes=rng.randint(0, 30)) for _ in range(num_ticks)
    )
    spans = []
    for _ in range(rng.randint(2, max_items)):
        born = rng.randrange(num_forward)
        saved = min(num_forward - 1, born + rng.randint(0, 1))
        dies = max(min(num_ticks, saved + rng.choice([1, 1, 1, 1, 1, 2, 3, 0])), born)
        spans.append((saved, born, dies))
    items: list[Item] = []
    chained = rng.random()
    for number, (saved, born, dies) in enumerate(sorted(spans)):
        is_retained_input = rng.random() < 0.2
        depth = int((num_forward - born) / num_forward * num_backward * rng.uniform(0.7, 1.2)) - 1
        first = num_forward + min(num_backward - 1, max(0, depth))
        reads = () if is_retained_input else tuple(sorted({first, min(num_ticks - 1, first + rng.randint(0, 2))}))
        release = 0 if is_retained_input else min(num_ticks, reads[-1] + 1 + rng.choice([0, 0, 0, 1]))
        older = [index for index in range(number) if items[index].born <= born]
        num_inputs = min(len(older), rng.choice([0, 1, 1, 2])) if rng.random() < chained else 0
        fates = ALL if rng.random() < 0.75 else ALL[:2]
        if rng.random() < 0.15:
            fates = rng.choice([ALL[:1], ALL[1:2], (Fate.KEEP, Fate.RECOMPUTE), ALL[:2]])
        items.append(
            Item(
                name=f"i{number}",
                nbytes=rng.choice([10, 20, 40, rng.randint(1, 60)]),
                born=born,
                saved=saved,
                dies=dies,
                reads=reads,
                release=release,
                fates=fates,
                recipe_seconds=rng.random() * rng.choice([0.1, 0.5, 1]),
                recipe_bytes=rng.choice([0, 0, rng.randint(0, 20)]),
                inputs=tuple(sorted(rng.sample(older, num_inputs))) if Fate.RECOMPUTE in fates else (),
            )
        )
    return Step(ticks=ticks, num_forward_ticks=num_forward, items=tuple(items))


def random_case(seed: int, max_items: int, *, has_forms: bool = False) -> Case:
    """Links from far too slow to instant, with and without latency and contention; budgets from below the floor up.
    `has_forms`: some items may be made from a smaller form."""
    rng = random.Random(seed)
    step = random_step(rng, max_items)
    if has_forms:
        step = with_forms(step, random.Random(seed))
    total, seconds = sum(item.nbytes for item in step.items), step.compute_seconds
    link = Link(
        out_bytes_per_second=total / seconds * rng.choice([0.3, 1, 3, 30]),
        in_bytes_per_second=total / seconds * rng.choice([0.3, 1, 3, 30]),
        latency_seconds=rng.choice([0, 0, 0.02 * seconds / len(step.ticks)]),
        compute_share=rng.choice([0, 0, 0.03, 0.1]),
    )
    host_bytes = rng.choice([None, None, None, int(total * rng.random())])
    plain_bytes = run(step, [item.fates[0] for item in step.items], link).peak_bytes
    floor_bytes, _ = floor(step, host_bytes)
    if floor_bytes == UNREACHABLE:
        return Case(step=step, link=link, budget_bytes=plain_bytes, host_bytes=host_bytes)
    room = max(plain_bytes - floor_bytes, 5)
    share = rng.choice([-0.05, 0, *(rng.random() * scale for scale in (0.3, 0.3, 0.6, 0.6, 0.9, 0.9, 1, 1)), 1.02])
    return Case(step=step, link=link, budget_bytes=int(floor_bytes + room * share), host_bytes=host_bytes)


def exhaustive(case: Case) -> Timeline | None:
    """The fastest of all fates that fit, judged by the timeline. Cost: the product of the numbers of fates."""
    arrays = StepArrays.of(case.step)
    best: Timeline | None = None
    for fates in itertools.product(*(item.fates for item in case.step.items)):
        timeline = run(arrays, fates, case.link, budget_bytes=case.budget_bytes)
        fits_host = case.host_bytes is None or timeline.slower_bytes <= case.host_bytes
        if timeline.peak_bytes > case.budget_bytes or not fits_host:
            continue
        if best is None or timeline.step_seconds < best.step_seconds:
            best = timeline
    return best


FORWARD_TICKS, BACKWARD_TICKS = 12, 24


def llama(num_layers: int = 32, num_parts: int = 1) -> Step:
    """A stack of Llama-7B layers with fused kernels, 4,096 tokens, on an H200: 2.83 and 5.79 ms a layer.

    Eleven items a layer, or that many times `num_parts`. Rates: 700 TFLOP/s for products, three quarters of it for
    attention, 4 TB/s.
    """
    hidden, inner, tokens = 4096, 11008, 4096
    small, large = tokens * hidden * 2, tokens * inner * 2
    square, wide = 2 * tokens * hidden * hidden / 700e12, 2 * tokens * hidden * inner / 700e12
    attention = 2 * tokens * tokens * hidden / (0.75 * 700e12)
    add, norm, mul = 3 * small / 4e12, 2 * small / 4e12, 3 * large / 4e12
    # name, bytes, recipe seconds, made from, born in tick, last used in tick
    rows = [
        ("x", small, wide + add, ("a_above", "x2_above"), 0, 6),
        ("n1", small, norm, ("x",), 1, 4),
        ("q", small, square + norm, ("n1",), 2, 5),
        ("k", small, square + norm, ("n1",), 3, 5),
        ("v", small, square, ("n1",), 4, 5),
        ("o", small, attention, ("q", "k", "v"), 5, 6),
        ("x2", small, square + add, ("o", "x"), 6, 11),
        ("n2", small, norm, ("x2",), 7, 9),
        ("g", large, wide, ("n2",), 8, 10),
        ("u", large, wide, ("n2",), 9, 10),
        ("a", large, mul, ("g", "u"), 10, 11),
    ]
    forward = [add, norm, square, square, square, attention, square + add, norm, wide, wide, mul, wide]
    backward: list[tuple[float, str]] = [
        *((wide, ""), (wide, "a"), (mul, "g u"), (mul, "g"), (wide, ""), (wide, "n2"), (wide, ""), (wide, "n2")),
        *((norm * 2, "x2"), (norm, "x2"), (square, ""), (square, "o"), (attention, "q k v o"), (attention, "q k v")),
        *((square, ""), (square, "n1"), (square, ""), (square, "n1"), (square, ""), (square, "n1")),
        *((norm * 2, "x"), (norm, "x"), (add, ""), (add, "")),
    ]
    forward_scale = 2.83e-3 / sum(forward)
    backward_scale = 5.79e-3 / sum(seconds for seconds, _ in backward)
    ticks = [Tick(seconds=seconds * forward_scale, base_bytes=64 * MIB) for seconds in forward] * num_layers
    ticks += [Tick(seconds=seconds * backward_scale, base_bytes=128 * MIB) for seconds, _ in backward] * num_layers
    num_forward = FORWARD_TICKS * num_layers
    reads = {name: [at for at, (_, names) in enumerate(backward) if name in names.split()] for name, *_ in rows}
    items: list[Item] = []
    places: dict[tuple[int, str, int], int] = {}
    for layer in range(num_layers):
        for name, nbytes, seconds, made_from, born, used in rows:
            for part in range(num_parts):
                first = num_forward + BACKWARD_TICKS * (num_layers - 1 - layer)
                sources = [
                    (layer - 1, source.removesuffix("_above"), part)
                    if source.endswith("_above")
                    else (layer, source, part)
                    for source in made_from
                ]
                places[layer, name, part] = len(items)
                items.append(
                    Item(
                        name=f"layers.{layer}.{name}{part or ''}",
                        nbytes=nbytes // num_parts,
                        born=FORWARD_TICKS * layer + born,
                        saved=FORWARD_TICKS * layer + born + 1,
                        dies=FORWARD_TICKS * layer + used + 1,
                        reads=tuple(first + at for at in reads[name]),
                        release=first + reads[name][-1] + 1,
                        fates=ALL if name != "x" or layer else ALL[:2],
                        recipe_seconds=seconds / num_parts,
                        recipe_bytes=nbytes // num_parts,
                        inputs=tuple(places[source] for source in sources if source in places),
                    )
                )
    return Step(ticks=tuple(ticks), num_forward_ticks=num_forward, items=tuple(items))


def llama_budget(step: Step, share: float) -> int:
    """What the stack needs beside activations, and this share of them."""
    return 128 * MIB + int(share * sum(item.nbytes for item in step.items))


def assert_no_schedule_beats_the_bound(step: Step, link: Link) -> None:
    """For three budgets, of 400 random schedules each."""
    arrays, generator, num_played = StepArrays.of(step), random.Random(0), 0
    for budget in (280 * MIB, 330 * MIB, 500 * MIB):
        bound = bound_of(arrays, link, budget, None, 60.0)
        for _ in range(400):
            played = Evaluator(arrays, link, budget).play([generator.choice(item.fates) for item in step.items])
            num_played += played.fits
            assert not played.fits or played.seconds >= bound * (1 - 1e-9)
    assert num_played > 100
