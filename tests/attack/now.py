"""What a model is told anew in every step: numbers, choices, and where to look.

Blocks read them from an argument, from a mapping, from their own attributes or from a global, whichever way a draw has
chosen: `numbers(self, now)` finds them. Positions (`few`) are few on purpose: what changes in one element of a thousand
is what a spot check misses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from torch import nn

WIDTH = 16
TOKENS = 6

WAYS = ("steady", "argument", "mapping", "attribute", "global")
"""How the numbers of a step reach the blocks; `steady`: as an argument, and the same in all steps."""


@dataclass(frozen=True)
class Now:
    """The numbers of one step."""

    step: int = 0
    choice: int = 0
    temperature: float = 1.25
    residual: float = 0.5
    slope: float = 0.1
    threshold: float = 0.05
    roll: int = 1
    offset: int = 1
    axis: int = 1
    eps: float = 1e-5
    bound: float = 1.0
    exponent: float = 1.5
    rate: float = 0.25
    is_odd: bool = False
    fails: bool = False
    few: tuple[int, ...] = (3,)


def drawn(seed: int, step: int, way: str) -> Now:
    """The numbers of step `step`."""
    if way == "steady":
        return Now()
    r = Random(seed * 7919 + step)
    return Now(
        step=step,
        choice=r.randrange(4),
        temperature=r.choice((0.5, 1.0, 1.25, 2.0)),
        residual=r.choice((0.0, 0.5, 0.75, 1.0)),
        slope=r.choice((0.01, 0.1, 0.3)),
        threshold=r.choice((0.04, 0.05, 0.06, 0.5)),
        roll=r.randrange(TOKENS),
        offset=r.randrange(TOKENS // 2),
        axis=r.choice((1, 2)),
        eps=r.choice((1e-5, 1e-3)),
        bound=r.choice((0.5, 1.0, 1.5)),
        exponent=r.choice((1.25, 1.5, 2.5)),
        rate=r.choice((0.1, 0.25, 0.5)),
        is_odd=r.random() < 0.5,
        few=tuple(sorted(r.sample(range(WIDTH * TOKENS), r.choice((1, 2, 3))))),
    )


class _Global:
    """The numbers of a program that keeps them in a module of its own."""

    now = Now()


def tell(model: nn.Module, now: Now, way: str) -> dict[str, Any]:
    """Say the numbers of a step to `model`; returns what is to be given to its forward."""
    if way in ("steady", "argument"):
        return {"now": now}
    if way == "mapping":
        return {"now": dataclasses.asdict(now)}
    if way == "attribute":
        for module in model.modules():
            if hasattr(type(module), "reads_numbers"):
                vars(module).update(dataclasses.asdict(now))
    _Global.now = now
    return {}


def numbers(module: nn.Module, now: Any) -> Any:
    """The numbers of this step, wherever they are."""
    if isinstance(now, Now):
        return now
    if isinstance(now, Mapping):
        return Now(**now)
    return module if "temperature" in vars(module) else _Global.now
