"""Does the attack notice when a check of lowtide is missing? Each of `CHECKS` is switched off in this process, one at a
time, and some draw must then go wrong that is right with the check.

A check is named by where it is (`module:name`) and by what does nothing in its place. Where a name has moved, `is_off`
says so. Draws are those that can need the check at all: others would only cost time. Where another check stands behind
one (a fingerprint behind a comparison of numbers), the draws are those that get past that one too: differences in few
elements.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import reduce
from random import Random
from typing import Any
from unittest import mock

from tests.attack.draw import Draw, judge
from tests.attack.models import BLOCKS, ModelDraw
from tests.attack.words import WordLoss


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check, and the draws that need it."""

    where: str
    nothing: Callable[..., Any]
    """What to put in its place."""
    plans: tuple[str, ...]
    blocks: tuple[str, ...] = ("pointwise", "gated", "normed", "attention")
    suits: Callable[[Any], bool] = lambda block: True
    """Whether a block, as it was drawn, can need the check."""
    core: str = "plain"
    words: WordLoss | None = None
    ways: tuple[str, ...] = ("argument", "attribute")
    sides: tuple[tuple[str, ...], ...] = ((),)

    @contextlib.contextmanager
    def is_off(self) -> Iterator[None]:
        """Inside, the check finds nothing wrong."""
        module, _, path = self.where.partition(":")
        *owners, name = path.split(".")
        owner = reduce(getattr, owners, importlib.import_module(module))
        assert callable(getattr(owner, name)), f"{self.where} is no check any more"
        with mock.patch.object(owner, name, self.nothing):
            yield

    def draw(self, seed: int) -> Draw:
        """A draw that can need the check."""
        r = Random(f"{seed} broken")
        names = [(r.choice(self.blocks), r.randrange(1000)) for _ in range(50)]
        layer = (next(pair for pair in names if self.suits(BLOCKS[pair[0]](Random(pair[1])))),)
        return Draw(
            seed,
            ModelDraw((layer,), frozenset(), own_loss=self.words is not None, words=self.words),
            way=r.choice(self.ways),
            core=self.core,
            sides=r.choice(self.sides),
            optimizer="sgd",
            plan=r.choice(self.plans),
            engine=f"virtual:{seed}",
            # Many elements and few chances to look at them: a fingerprint must not be what saves the draw.
            num_samples=64,
            num_steps=3,
        )


def _has_state_rows(block: Any) -> bool:
    """Rows that a recipe may start from, and that do not decide about all of a mask."""
    return block.kind in ("buffer", "frozen") and block.is_used != "mask"


CHECKS: dict[str, Check] = {
    "version of a kept tensor": Check(
        where="lowtide.runtime.saved.handle:Kept.open",
        nothing=lambda kept: kept.tensor,
        plans=("keep", "swap"),
        sides=(("writes_parameter",),),
    ),
    "version of a moved tensor": Check(
        where="lowtide.runtime.saved.handle:View.check",
        nothing=lambda view: None,
        plans=("swap",),
        sides=(("writes_activation",),),
    ),
    "version of a recipe's parameter": Check(
        where="lowtide.runtime.recompute.recipe_sources:StateSource.is_intact",
        nothing=lambda link: True,
        plans=("solved",),
        blocks=("rows",),
        suits=_has_state_rows,
        sides=(("writes_table",),),
    ),
    "numbers of a recipe": Check(
        where="lowtide.recipes.proof:is_same_constant",
        nothing=lambda planned, actual: True,
        plans=("solved",),
        blocks=("few_numbered",),
    ),
    "operands of a recipe": Check(
        where="lowtide.recipes.proof:_Comparison._given",
        nothing=lambda self, planned, actual: "",
        plans=("solved",),
        blocks=("rows",),
        suits=lambda block: _has_state_rows(block) and block.is_sparse,
    ),
    "fingerprint of what was made": Check(
        where="lowtide.runtime.recompute.fingerprint:Fingerprints.compare",
        nothing=lambda self, *args: None,
        plans=("solved",),
        sides=(("writes_data",),),
    ),
    "second derivative of a sliced loss": Check(
        where="lowtide.loss.cross_entropy:_OnlyOnce.apply",
        nothing=lambda gradient, *made_from: gradient,
        plans=("keep",),
        blocks=("pointwise",),
        core="twice_differentiated",
        words=WordLoss("function"),
    ),
}


def prove(name: str, seeds: Iterable[int]) -> Draw | None:
    """The first of these draws that goes wrong without the check, and only without it; None if there is none."""
    check = CHECKS[name]
    for seed in seeds:
        draw = check.draw(seed)
        with check.is_off():
            verdict = judge(draw)
        if verdict.is_wrong and not judge(draw).is_wrong:
            return draw
    return None
