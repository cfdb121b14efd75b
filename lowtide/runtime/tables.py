"""Position tables: what the n-th saved tensor of a layer is, and what becomes of it.

What: the first forward writes an `Entry` for each tensor that autograd saves in a `Region` (a layer, or the model
around its layers); later forwards go by position and compare. `Setting` is what all forwards of one tide share.

Cost: a look at a list for each saved tensor. Not covered: how a table is learned and followed (runtime/hooks.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from weakref import WeakSet

import torch
from torch import nn

from lowtide.planner.fate import Fate
from lowtide.planner.plan import SiteDecision
from lowtide.planner.rules import Decision, Rules
from lowtide.runtime.guard import Guard
from lowtide.runtime.slices import Slices
from lowtide.runtime.stats import Counters, Ledger
from lowtide.runtime.swap import Mover
from lowtide.runtime.weaver import VIEW_NODES, Node


@dataclass(slots=True)
class Entry:
    """What the n-th saved tensor of a layer is, and what becomes of it."""

    dtype: torch.dtype
    num_dims: int
    producer: type
    fate: Fate
    is_counted: bool
    """The first tensor of a storage that counts as an activation; parameters, inputs and further views do not."""
    tier: str | None = None
    distance: int | None = None
    leave: int | None = None
    node: Node | None = None
    """Of a solved plan: it is made by a recipe, or recipes start from it."""


@dataclass(slots=True)
class Region:
    """A layer of the model, or the model around its layers, and the tables of what it saves."""

    name: str
    module: nn.Module
    is_recomputed: bool
    fallback: Decision
    tables: dict[int, list[Entry]] = field(default_factory=dict)
    """By how often the region has run before in this forward (a layer that is called three times has three)."""
    num_misses: int = 0
    """Forwards in which the table did not fit. After the first few the table is learned anew (a model first run in
    another mode, say); a layer that is never twice the same is not worth observing forever."""


@dataclass(slots=True)
class Setting:
    """What all scopes of one tide share."""

    model: nn.Module
    rules: Rules
    stay_rules: Rules
    """The rules without recompute: the fate of what a recomputed region must hold on to."""
    min_bytes: int
    device_type: str
    mover: Mover
    counters: Counters
    ledger: Ledger
    sites: dict[str, SiteDecision] = field(default_factory=dict)
    """Decisions of the first forward, by site name."""
    seen_names: set[str] = field(default_factory=set)
    input_changers: WeakSet[nn.Module] = field(default_factory=WeakSet)
    """Recomputed modules that were seen to write into their inputs."""
    nodes: dict[str, Node] | None = None
    """What a solved plan says, by name; None where rules decide."""
    guard: Guard | None = None
    """Watches live bytes; None without a limit."""
    slices: Slices | None = None
    """Cuts the inputs of recomputed layers; None: they are kept whole."""
    unplanned: dict[str, int] = field(default_factory=dict)
    """Bytes of the sites that a solved plan does not know, by name."""


def is_same_producer(seen: type, now: type) -> bool:
    """Whether two autograd nodes stand for the same operator."""
    # Under a dispatch mode `reshape` makes other view nodes than without.
    return seen is now or (seen.__name__ in VIEW_NODES and now.__name__ in VIEW_NODES)
