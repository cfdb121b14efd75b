"""Position tables: what the n-th saved tensor of a layer is, and its fate.

What: the first forward writes a `SavedTensorEntry` for each tensor that autograd saves, into a `LayerTable` (of a
layer, or of the model around its layers). Later forwards look entries up by position, and compare. `PlanContext` is
what all forwards of one tide share.

Cost: a look at a list for each saved tensor. Not covered: how a table is learned and followed
(runtime/hooks/forward_pass.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from lowtide.core.fate import Fate
from lowtide.core.rules import Decision
from lowtide.runtime.recompute.recipe_nodes import VIEW_NODES, Node
from lowtide.tensors.private import COMPILED_NODE


@dataclass(slots=True)
class SavedTensorEntry:
    """What the n-th saved tensor of a layer is, and its fate."""

    dtype: torch.dtype
    num_dims: int
    producer: type
    fate: Fate
    is_counted: bool
    """The first tensor of a storage that counts as an activation; parameters, inputs and further views do not."""
    tier: str | None = None
    distance: int | None = None
    leave: int | None = None
    is_planned: bool = True
    """A solved plan knows it, or rules decide."""
    node: Node | None = None
    """With a solved plan: its node, if a recipe recomputes it or recipes start from it."""


@dataclass(slots=True)
class LayerTable:
    """A layer of the model, or the model around its layers, and the tables of what it saves."""

    name: str
    module: nn.Module
    is_recomputed: bool
    fallback: Decision
    tables: dict[int, list[SavedTensorEntry]] = field(default_factory=dict)
    """By how often the layer has run before in this forward (a layer that is called three times has three)."""
    uses_transforms: bool = False
    """Whether its forward was seen to use `torch.func` (runtime/hooks/transforms.py)."""
    num_misses: int = 0
    """Forwards in which the table did not fit. After each of the first few it is learned again (the model may have run
    first in another mode); a layer that saves something else in each forward is not observed for ever."""


def is_same_producer(seen: type, now: type) -> bool:
    """Whether two autograd nodes stand for the same operator."""
    # Under a dispatch mode `reshape` makes other view nodes than without; each compiled graph has a node of its own.
    return seen is now or (seen.__name__ in _ALIKE and now.__name__ in _ALIKE and _is_alike(seen, now))


def _is_alike(seen: type, now: type) -> bool:
    return (seen.__name__ == COMPILED_NODE) == (now.__name__ == COMPILED_NODE)


_ALIKE = frozenset({*VIEW_NODES, COMPILED_NODE})
