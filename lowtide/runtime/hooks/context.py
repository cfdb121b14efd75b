"""What all forward passes of one tide share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import nn

from lowtide.core.decisions import SiteDecision
from lowtide.core.rules import Rules
from lowtide.runtime.offload.scheduler import OffloadScheduler
from lowtide.runtime.offload.spill import Guard
from lowtide.runtime.recompute.fingerprint import Fingerprints
from lowtide.runtime.recompute.recipe_nodes import Node
from lowtide.runtime.recompute.watch import Watch
from lowtide.runtime.saved.stats import Counters, Ledger
from lowtide.tensors.random_state import Draws


class InputKeeper(Protocol):
    """Holds inputs of recomputed layers in another form, such as this rank's slice of them."""

    def instead_of(
        self,
        handle: Any,
        tensor: torch.Tensor,
        parts: dict[int, Any],
        where: str,
        *,
        counters: Counters,
        ledger: Ledger,
        compares: bool,
    ) -> Any:
        """The handle on an input of layer `where`: `handle`, or another. `parts`: what this forward holds so."""


@dataclass(slots=True)
class PlanContext:
    """What all forward passes of one tide share."""

    model: nn.Module
    rules: Rules
    stay_rules: Rules
    """The rules without recompute: the fate of what a recomputed region must hold on to."""
    min_bytes: int
    device_type: str
    scheduler: OffloadScheduler
    counters: Counters
    ledger: Ledger
    fingerprints: Fingerprints
    """Of what is recomputed."""
    sites: dict[str, SiteDecision] = field(default_factory=dict)
    """Decisions of the first forward, by site name."""
    seen_names: set[str] = field(default_factory=set)
    input_changers: WeakSet[nn.Module] = field(default_factory=WeakSet)
    """Recomputed modules that were seen to write into their inputs."""
    watches: dict[nn.Module, Watch] = field(default_factory=dict)
    """By module: what a recomputed module reads apart from its inputs."""
    draws: Draws = field(default_factory=Draws)
    nodes: dict[str, Node] | None = None
    """What a solved plan says, by name; None where rules decide."""
    logged_kinds: frozenset = frozenset()
    """Operators that the plan's recipes contain; empty where it has no recipes."""
    logs_always: bool = True
    """Operators are compared in every forward pass; else in the first one, and in every 64th."""
    guard: Guard | None = None
    """Watches live bytes; None without a limit."""
    slices: InputKeeper | None = None
    """Cuts the inputs of recomputed layers into slices; None: they are kept whole."""
    has_warned_of_tangents: bool = False
    """The warning about a forward pass with tangents before any without them was given."""
    unplanned: dict[str, int] = field(default_factory=dict)
    """Bytes of the sites that a solved plan does not know, by name."""

    def watch(self, module: nn.Module) -> Watch:
        """What a module reads apart from its inputs."""
        watch = self.watches.get(module)
        if watch is None:
            watch = self.watches[module] = Watch(module, self.model, self.draws, is_planned=self.nodes is not None)
        return watch
