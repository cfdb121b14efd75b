"""What all forward passes of one tide share, and what one saved tensor is.

What: a `PlanContext` belongs to a tide. The first forward writes a `SavedTensorEntry` for each tensor that autograd
saves, into a `LayerTable` (of a layer, or of the model around its layers); later forwards look entries up by position,
and compare. `Saved` says what a tensor is, found out once: each fate has its own conditions (a storage, a plain type,
this device), and a condition that is tested in several places may be tested differently in each. `Parameters` says
which storages are the model's own; where there is a table, it is stored there.

Cost: a look at a list for each saved tensor, and 2 us a record; a tensor that is kept by the table, while no guard
watches live bytes, gets no record. Not covered: how a table is learned and followed (forward_pass.py); versions,
because they change: code that compares a version reads it at that moment.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lowtide.core.decisions import SiteDecision
from lowtide.core.rules import Decision, Rules
from lowtide.runtime.offload.scheduler import OffloadScheduler
from lowtide.runtime.offload.spill import Guard
from lowtide.runtime.recompute.fingerprint import Fingerprints
from lowtide.runtime.recompute.recipe_graph import Node
from lowtide.runtime.recompute.watch import Watch
from lowtide.runtime.saved.stats import Counters
from lowtide.tensors.kinds import is_movable, is_plain, leads_to_parameter, storage_keys, unregistered_in
from lowtide.tensors.private import COMPILED_NODE, base_of, is_view, storage_key
from lowtide.tensors.view import TensorOrigin
from lowtide.tensors.wrappers import inside


@dataclass
class PlanContext:
    """What all forward passes of one tide share."""

    model: nn.Module
    rules: Rules
    min_bytes: int
    scheduler: OffloadScheduler
    fingerprints: Fingerprints
    """Of what is recomputed."""
    sites: dict[str, SiteDecision] = field(default_factory=dict)
    """Decisions of the first forward, by site name."""
    seen_names: set[str] = field(default_factory=set)
    watches: dict[nn.Module, Watch] = field(default_factory=dict)
    """By module: what a recomputed module reads apart from its inputs."""
    has_drawn: threading.Event = field(default_factory=threading.Event)
    """Some forward pass has drawn from Python's or numpy's generator: then no second run may leave them moved, whether
    its module was seen to draw or not."""
    nodes: dict[str, Node] | None = None
    """What a solved plan says, by name; None where rules decide."""
    logged_kinds: frozenset = frozenset()
    """Operators that the plan's recipes contain; empty where it has no recipes."""
    guard: Guard | None = None
    """Watches live bytes; None without a limit."""
    keeps_collectives: bool = False
    """What collectives give in recomputed layers is kept, and they are not issued again."""
    slices: Callable[..., Any] | None = None
    """Gives a handle with a slice of an input of a recomputed layer, where that can be; None: inputs are kept whole."""
    unknown_site_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes of the sites that a solved plan does not know, by name."""

    @property
    def counters(self) -> Counters:
        return self.scheduler.counters

    @functools.cached_property
    def stay_rules(self) -> Rules:
        """The rules without recompute: the fate of what a recomputed region must hold on to."""
        return self.rules.without_recompute()

    def watch(self, module: nn.Module) -> Watch:
        """What a module reads apart from its inputs."""
        watch = self.watches.get(module)
        if watch is None:
            watch = self.watches[module] = Watch(module, self.model, self.has_drawn, is_planned=self.nodes is not None)
            watch.keeps_collectives = self.keeps_collectives
        return watch


# -- what the n-th saved tensor of a layer is --------------------------------------------------------------------------


@dataclass(slots=True)
class SavedTensorEntry:
    """What the n-th saved tensor of a layer is, and its fate."""

    dtype: torch.dtype
    num_dims: int
    producer: type
    decision: Decision | SiteDecision
    is_counted: bool
    """The first tensor of a storage that counts as an activation; parameters, inputs and further views do not."""
    is_activation: bool = False
    """It is counted, or a further view of what is."""
    origin: TensorOrigin | None = None
    is_planned: bool = True
    """A solved plan knows it, or rules decide."""
    node: Node | None = None
    """With a solved plan: its node, if a recipe recomputes it or recipes start from it."""
    is_simple: bool = False
    """Its handle is made without a closer look: the plan, or a rule, keeps it, and no recipe starts from it."""


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
    """Whether its forward was seen to use `torch.func` (runtime/session/wrap.py)."""
    num_misses: int = 0
    """Forwards in which the table did not fit. After each of the first few it is learned again (the model may have run
    first in another mode); a layer that saves something else in each forward is not observed for ever."""


def is_same_producer(seen: type, now: type) -> bool:
    """Whether two autograd nodes stand for the same operator."""
    # Under a dispatch mode `reshape` makes other view nodes than without; each compiled graph has a node of its own.
    return seen is now or (seen.__name__ in _ALIKE and now.__name__ in _ALIKE and _is_alike(seen, now))


def _is_alike(seen: type, now: type) -> bool:
    return (seen.__name__ == COMPILED_NODE) == (now.__name__ == COMPILED_NODE)


_VIEWS = ("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "AsStridedBackward0")
_ALIKE = frozenset({*_VIEWS, COMPILED_NODE})


# -- what a saved tensor is --------------------------------------------------------------------------------------------


class Saved:
    """One tensor that autograd saves, or that recipes start from: what the rest of a pass needs to know of it."""

    __slots__ = ("grad_fn", "is_movable", "is_plain", "storage", "tensor")

    def __init__(self, tensor: torch.Tensor, grad_fn: Any, device: torch.device) -> None:
        """`tensor`: the plain tensor; `grad_fn`: autograd's node that made it, or that made the wrapper around it."""
        self.tensor = tensor
        self.grad_fn = grad_fn
        self.is_plain = is_plain(tensor)
        """Dense, strided, with bytes, and of no subclass but Parameter."""
        self.storage: torch.UntypedStorage | None = None
        """The storage of a plain tensor; None for others, which may have none."""
        self.is_movable = False
        """It may leave `device` and come back as a view of the same bytes."""
        if self.is_plain:
            self.storage = tensor.untyped_storage()
            self.is_movable = is_movable(tensor, device)

    @property
    def key(self) -> int:
        """The storage's key in tables of live storages. Only for a plain tensor."""
        assert self.storage is not None
        return storage_key(self.storage)


class Parameters:
    """Which storages are the model's own, in one forward pass."""

    __slots__ = ("_keys_of_layer", "_keys_of_model", "_model")

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._keys_of_model: set[int] | None = None
        self._keys_of_layer: set[int] | None = None

    def forget_layer(self) -> None:
        """Another layer begins: look up its storages again, because sharded training gives a layer other, gathered
        parameters during its forward."""
        self._keys_of_layer = None

    def has(self, tensor: torch.Tensor, layer: nn.Module) -> bool:
        """A parameter or buffer, a view of one, or a cast of one that autograd can see. `layer`: the one that runs."""
        # Whether something is a Parameter is a question that torch answers in Python.
        if type(tensor) is not torch.Tensor and isinstance(tensor, nn.Parameter):
            return True
        if is_view(tensor) and isinstance(base_of(tensor), nn.Parameter):
            return True
        local = inside(tensor)
        if not is_plain(local):
            return False
        return self._has_key(storage_key(local.untyped_storage()), layer) or leads_to_parameter(tensor)

    def _has_key(self, key: int, layer: nn.Module) -> bool:
        if self._keys_of_model is None:
            self._keys_of_model = storage_keys(self._model).union(*map(storage_keys, unregistered_in(self._model)))
        if self._keys_of_layer is None:
            self._keys_of_layer = storage_keys(layer)
        return key in self._keys_of_model or key in self._keys_of_layer
