"""Bind: a recipe in the sizes of this forward pass.

What: a recipe was written down in an observed step, with the sizes of that step in it: in the arguments of operators
(`arange(128)`), in how they look at storages (size, stride, offset). A batch of another length runs the same operators
with other sizes. `bound` takes those from the operators that ran in this very forward pass, as the log of the proof
(proof.py) has them, and gives a recipe that holds for it.

Why it is exact: nothing is derived. The proof has found, operator by operator, that this pass did what the recipe does:
the same operators, on the results of each other, from the same tensors at the same versions, with the same arguments
but for numbers and shapes. The bound recipe repeats them with those that they were given. So no expression in the
batch's sizes is needed, nor two shapes that agree on one: 8 may be a length, a number of heads, or both.

Cost: some 10 us a step, once for each set of sizes (runtime/recompute/recipe_graph.py keeps the last). Not covered:
forward passes without a log (`check: sampled`), collectives, tensors that are seen in another dtype, storages that are
written in parts: what has those holds for one shape, or stays (`Recipe.can_follow_sizes`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from lowtide.core.recipe import Geometry, Recipe, RecipeInput, RecipeStep
from lowtide.recipes.build import encode_constant
from lowtide.recipes.proof import Given, Made, OperatorLog, Proof, Repeated, Seen, Start
from lowtide.tensors.view import Shape


def bound(recipe: Recipe, proof: Proof, log: OperatorLog, site: Start, starts: Sequence[Start]) -> Recipe | str:
    """The recipe as this forward pass did it, or where it parts from it, in words.

    `proof` is that of `recipe`; `site` is what it is to make, `starts` what it would start from, in the order of its
    inputs (their shapes do not matter). Inputs of the result may name one start several times, in several shapes.
    """
    assert recipe.can_follow_sizes
    repeated = proof.repeated(log, site, starts)
    return repeated if isinstance(repeated, str) else _Binder(recipe).bind(repeated)


class _OtherDtypeError(Exception):
    """A tensor is seen in another dtype than in the observed step."""


class _Binder:
    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._inputs: dict[RecipeInput, int] = {}
        self._steps: list[RecipeStep] = []
        self._placed: dict[int, tuple[int, list[Seen | None]]] = {}
        """By step of the recipe: which step it is here, and what it gave out."""
        self._views: dict[tuple[int, int, tuple], int] = {}

    def bind(self, repeated: Sequence[Repeated]) -> Recipe | str:
        try:
            for step in repeated:
                self._add(step)
        except _OtherDtypeError:
            return "read a tensor of another dtype"
        return dataclasses.replace(self._recipe, inputs=tuple(self._inputs), steps=tuple(self._steps))

    def _add(self, step: Repeated) -> None:
        (args, kwargs), (ran_args, ran_kwargs) = step.planned, step.ran
        written = RecipeStep(
            op=self._recipe.steps[step.place].op,
            args=tuple(self._argument(*pair) for pair in zip(args, ran_args, strict=True)),
            kwargs={key: self._argument(planned, ran_kwargs[key]) for key, planned in kwargs.items()},
        )
        self._steps.append(written)
        self._placed[step.place] = (len(self._steps) - 1, step.outputs)

    def _argument(self, planned: Any, actual: Any) -> Any:
        if isinstance(planned, Given):
            start = self._recipe.inputs[planned.index]
            geometry = _geometry(actual)
            if geometry.dtype != start.geometry.dtype:
                raise _OtherDtypeError
            entry = dataclasses.replace(start, geometry=geometry)
            return {"input": self._inputs.setdefault(entry, len(self._inputs))}
        if isinstance(planned, Made):
            return self._made(planned, actual)
        if isinstance(planned, list):
            if any(isinstance(part, (Given, Made, list)) for part in planned):
                return [self._argument(*pair) for pair in zip(planned, actual, strict=True)]
            return encode_constant(actual)
        return planned if isinstance(planned, dict) else encode_constant(actual)

    def _made(self, planned: Made, actual: Seen) -> dict[str, int]:
        step, outputs = self._placed[planned.step]
        given_out = outputs[planned.output]
        assert given_out is not None, "the proof has compared it"
        if actual.shape == given_out.shape:
            return {"step": step, "output": planned.output}
        look = Shape(*actual.shape)
        if look.dtype != given_out.shape[3]:
            raise _OtherDtypeError
        key = (step, planned.output, tuple(look))
        if key not in self._views:
            args = ({"step": step, "output": planned.output}, [*look.size], [*look.stride], look.offset)
            self._steps.append(RecipeStep(op="aten.as_strided.default", args=args))
            self._views[key] = len(self._steps) - 1
        return {"step": self._views[key], "output": 0}


def _geometry(seen: Seen) -> Geometry:
    size, stride, offset, dtype = seen.shape
    return Geometry(size=tuple(size), stride=tuple(stride), offset=int(offset), dtype=str(dtype).removeprefix("torch."))
