"""Recipes of a plan, prepared for one model: their operators are looked up, and their inputs are found.

A `Node` is what a plan says of one name. What its recipe starts from in one forward pass are links: to sources
(recipe_sources.py), and to parameters and buffers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from lowtide.core.decisions import SiteDecision
from lowtide.core.fate import Fate
from lowtide.core.plan import Plan
from lowtide.core.recipe import Recipe, RecipeInput
from lowtide.errors import ConfigError
from lowtide.recipes.execute import CompiledRecipe, compile_recipe
from lowtide.recipes.proof import Proof, Start, proof_of
from lowtide.tensors.private import own_buffers, own_parameters, storage_key, version_of
from lowtide.tensors.view import Shape

VIEW_NODES = frozenset({"ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "AsStridedBackward0"})


@dataclass(slots=True, eq=False)
class Node:
    """What a solved plan says about one name, and what the first forward showed of it."""

    decision: SiteDecision
    inputs: tuple[Input, ...] = ()
    """The inputs of its recipe."""
    is_input: bool = False
    """Some recipe starts from it."""
    program: Any = None
    proof: Proof | None = None
    shape: Shape | None = None
    """The shape of its first saved view in the forward that was last observed."""
    has_planned_shape: bool = False
    """In that forward it, and what its recipe starts from, had as many bytes as in the plan."""
    has_failed: bool = False
    """Its recipe did not hold in some forward pass, or gave other bytes: it is kept from then on."""
    why_failed: str = ""
    groups: tuple[str, ...] = ()
    """Process groups of the collectives in its recipe, and in the recipes that it starts from."""
    was_agreed: bool = False
    """All ranks of these groups have exchanged whether its recipe holds on them."""
    was_seen: bool = False
    bound: tuple[Recipe, CompiledRecipe] | None = None
    """Its recipe in the last sizes that were not the plan's, and ready to run."""

    @property
    def name(self) -> str:
        return self.decision.name

    @property
    def is_made(self) -> bool:
        return self.program is not None

    @property
    def is_encoded(self) -> bool:
        """It is stored smaller."""
        return self.decision.codec is not None


@dataclass(slots=True)
class Input:
    """One input of a recipe, looked up."""

    name: str
    shape: Shape
    node: Node | None = None
    find_state: Callable[[], torch.Tensor | None] | None = None
    """For a parameter or a buffer: gives the tensor that the module has now. None for a node."""


def nodes_of(plan: Plan, model: nn.Module) -> dict[str, Node]:
    """The nodes of a solved plan by name, recipes compiled.

    Raises ConfigError where a recipe starts from something that this model or this plan does not have.
    """
    nodes = {decision.name: Node(decision) for decision in plan.sites}
    modules = dict(model.named_modules(remove_duplicate=False))
    for node in nodes.values():
        recipe = node.decision.recipe
        if node.decision.fate is not Fate.RECOMPUTE or recipe is None:
            continue
        node.program, node.proof = compile_recipe(recipe), proof_of(recipe)
        node.inputs = tuple(_looked_up(entry, node, nodes, modules) for entry in recipe.inputs)
        # Plans list nodes in the order in which they are made, and recipes start from earlier ones.
        above = [name for entry in node.inputs if entry.node is not None for name in entry.node.groups]
        node.groups = tuple(dict.fromkeys([*above, *recipe.groups]))
    return nodes


def logged_kinds(nodes: Mapping[str, Node] | None) -> frozenset:
    """The operators that some recipe of a plan holds."""
    return frozenset().union(*(node.proof.kinds for node in (nodes or {}).values() if node.proof is not None))


def _looked_up(entry: RecipeInput, node: Node, nodes: Mapping[str, Node], modules: Mapping[str, nn.Module]) -> Input:
    shape = Shape.from_geometry(entry.geometry)
    if entry.kind == "node":
        if entry.name not in nodes:
            raise _unfit(node, f"node '{entry.name}', which the plan does not list")
        nodes[entry.name].is_input = True
        return Input(entry.name, shape, node=nodes[entry.name])
    path, _, attribute = entry.name.rpartition(".")
    owner = modules.get(path)
    find = None if owner is None else functools.partial(_find_state, owner, entry.kind, attribute)
    if find is None or find() is None:
        raise _unfit(node, f"{entry.kind} '{entry.name}', which this model does not have")
    return Input(entry.name, shape, find_state=find)


def _unfit(node: Node, what: str) -> ConfigError:
    return ConfigError(
        f"lowtide.apply: the recipe of '{node.name}' starts from {what}; the plan was made for another model, plan "
        "again"
    )


def _find_state(owner: nn.Module, kind: str, attribute: str) -> torch.Tensor | None:
    return (own_parameters(owner) if kind == "parameter" else own_buffers(owner)).get(attribute)


# -- what a recipe starts from -----------------------------------------------------------------------------------------


class Source(Protocol):
    """A storage that a recipe may start from. Methods with a body are right for one that is always there."""

    def is_intact(self) -> bool:
        """Whether its bytes are still those of the forward pass."""

    def add_readers(self, count: int) -> None:
        """So many more read it in backward: saved tensors, and recipes."""

    def needed_until(self, sequence: int) -> bool:
        """The save with this sequence number of autograd's needs it, directly or through recipes. Whether all that it
        is recomputed from is needed longer than was known."""
        return False

    def read(self) -> torch.UntypedStorage:
        """The storage with the bytes on the device, for one of its readers."""

    def start(self, name: str, shape: Shape) -> Start:
        """Its identity, for the proof that a recipe starts from it, seen as `shape`."""


class SourceLink(NamedTuple):
    """One input of a recipe: a source, and the shape in which the recipe reads it."""

    name: str
    source: Source
    shape: Shape

    def open(self) -> torch.Tensor:
        storage = self.source.read()
        if self.shape.end_bytes() > storage.nbytes():
            raise RuntimeError(
                f"lowtide: parameter '{self.name}' is sharded at this moment of the backward pass, but something that "
                "was dropped is to be made from it. The step is not the one that the plan was made for; plan again, or "
                "give it the fate keep or swap."
            )
        return self.shape.over(storage)

    def start(self) -> Start:
        return self.source.start(self.name, self.shape)


class StateSource(Source):
    """A parameter or a buffer, as it was in the forward.

    `counter` is the tensor that has the version: the tensor itself, or the distributed one around it. `weights`: the
    handle that has `tensor` come and go, which is a parameter then, and is where it was in the forward now.
    """

    def __init__(self, tensor: torch.Tensor, counter: torch.Tensor, weights: Any = None) -> None:
        self._tensor = tensor
        self._counter = counter
        self._version = version_of(counter)
        self._weights = weights
        self._key = storage_key(tensor.untyped_storage())

    def is_intact(self) -> bool:
        return version_of(self._counter) == self._version

    def read(self) -> torch.UntypedStorage:
        if self._weights is not None:
            self._weights.bring(self._tensor)
        return self._tensor.untyped_storage()

    def start(self, name: str, shape: Shape) -> Start:
        return Start(name, self._key, version_of(self._tensor), shape)
