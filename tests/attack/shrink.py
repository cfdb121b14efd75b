"""The smallest draw that still goes wrong in the same way: parts are taken away one by one, as long as it does.

Cost: some fifty draws. Not covered: two parts that go wrong only together with a third that could be any other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from tests.attack.apart import judge_apart
from tests.attack.draw import Draw, Verdict
from tests.attack.words import WordLoss


def shrunk(draw: Draw, verdict: Verdict, judge: Callable[[Draw], Verdict] = judge_apart) -> tuple[Draw, Verdict]:
    """The draw made smaller, and the verdict on it."""
    found = True
    while found:
        found = False
        for smaller in _smaller(draw):
            other = judge(smaller)
            if other.kind == verdict.kind and (verdict.kind != "crash" or _kind(other) == _kind(verdict)):
                draw, verdict, found = smaller, other, True
                break
    return draw, verdict


def _kind(verdict: Verdict) -> str:
    return verdict.detail.partition(":")[0]


def _smaller(draw: Draw) -> Iterator[Draw]:
    def change(**changes: object) -> Draw:
        return dataclasses.replace(draw, **changes)  # type: ignore[arg-type]

    if draw.state != "stays":
        yield change(state="stays")
        if draw.state != "step":
            yield change(state="step")
    if draw.rows:
        yield change(rows=0, row_wise=())
    if draw.optimizer not in ("sgd", "lbfgs"):
        yield change(optimizer="sgd")
    for side in draw.sides:
        yield change(sides=tuple(other for other in draw.sides if other != side))
    for trait in sorted(draw.model.traits):
        yield change(model=dataclasses.replace(draw.model, traits=draw.model.traits - {trait}))
    words = draw.model.words
    if words is not None:
        simple = dataclasses.asdict(WordLoss(words.place))
        for name, value in simple.items():
            if getattr(words, name) != value:
                less = dataclasses.replace(words, **{name: value})
                yield change(model=dataclasses.replace(draw.model, words=less))
    layers = draw.model.layers
    if len(layers) > 1:
        for index in range(len(layers)):
            yield change(model=dataclasses.replace(draw.model, layers=layers[:index] + layers[index + 1 :]))
    for index, layer in enumerate(layers):
        for place in range(len(layer)):
            less = layer[:place] + layer[place + 1 :]
            if less:
                now = (*layers[:index], less, *layers[index + 1 :])
                yield change(model=dataclasses.replace(draw.model, layers=now))
        if layer != (("pointwise", 0),):
            now = (*layers[:index], (("pointwise", 0),), *layers[index + 1 :])
            yield change(model=dataclasses.replace(draw.model, layers=now))
    if draw.way != "steady":
        yield change(way="steady")
        if draw.way != "argument":
            yield change(way="argument")
    if draw.core not in ("plain", "searching"):
        yield change(core="plain")
    if draw.engine != "virtual:0":
        yield change(engine="virtual:0")
    if draw.plan not in ("recompute", "keep", "swap"):
        yield change(plan="recompute")
    if draw.plan != "keep":
        yield change(plan="keep")
    if draw.num_samples > 4 and words is None:
        yield change(num_samples=4)
    if draw.num_steps > 1:
        yield change(num_steps=draw.num_steps - 1)
