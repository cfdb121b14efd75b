"""Shape classes of inputs: which of the plans that are there serves which batch.

What: a plan is made for the shapes of one batch. Batches of text seldom have the same length twice, and observing each
length would cost more than the plan saves; so a plan also serves every batch that is smaller in each dimension: under
the same fates it needs less. Such a plan may hold no recipe in which a size is written (catalog/recipes.py marks them).
Why not only one plan, for the largest: a batch of a sixteenth of its size would be swapped and recomputed for nothing.
A plan serves batches down to half its size; smaller ones are observed and get their own.
Cost: a comparison of a few integers a step. Of n lengths in random order, some log n are longer than all before.
Not covered: sizes that are Python numbers in the inputs; a list with another number of tensors is another class.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

MOST_TIMES_LARGER = 2.0
"""A plan serves no batch of which some tensor is smaller than this part of what it was made for."""


@dataclass(frozen=True, slots=True)
class ShapeClass:
    """The shapes of a batch, and what else decides which operators run."""

    shapes: tuple[tuple[int, ...], ...]
    """Sizes of every tensor in the inputs, in the order of `torch.utils._pytree`."""
    kinds: tuple[Any, ...]
    """Their dtypes, and which autocasts are on."""

    def covers(self, other: ShapeClass) -> bool:
        """Whether a batch of `other` is like one of this, and nowhere larger."""
        if self.kinds != other.kinds:
            return False
        pairs = zip(self.shapes, other.shapes, strict=True)
        return all(len(own) == len(their) and all(map(int.__ge__, own, their)) for own, their in pairs)

    def times_larger(self, other: ShapeClass) -> float:
        """The largest ratio of two tensors' numbers of elements; `other` must be covered."""
        pairs = zip(self.shapes, other.shapes, strict=True)
        return max((math.prod(own) / max(1, math.prod(their)) for own, their in pairs), default=1.0)

    @property
    def num_elements(self) -> int:
        """Of all tensors together."""
        return sum(map(math.prod, self.shapes))


def shape_class(args: tuple, kwargs: dict) -> ShapeClass:
    """The class of a model's inputs."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    autocast = (torch.is_autocast_enabled("cuda"), torch.is_autocast_enabled("cpu"))
    return ShapeClass(tuple(tuple(t.shape) for t in tensors), (*(t.dtype for t in tensors), *autocast))


def smallest_cover(shape: ShapeClass, known: Iterable[ShapeClass]) -> ShapeClass | None:
    """Of the known classes that cover `shape`, the one with the fewest elements; itself if it is known."""
    return min((other for other in known if other.covers(shape)), key=lambda other: other.num_elements, default=None)
