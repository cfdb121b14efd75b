"""The graph of recipes: which sources a forward pass has, and which of them may be dropped because a recipe recomputes
them.

What: a `Node` is what a solved plan says about one name, prepared for this model. A `RecipeGraph` belongs to one
forward pass. It gets tensors from the pack hook and from the retained inputs, and links each recomputed source to the
sources that its recipe starts from. As soon as all of them are there, the recomputed source drops its tensor.

When a recipe is trusted: never because it was right once. Nodes are found by position, and at a position there can be
another tensor than last time, or one computed from another weight or with another number. So a recomputed source drops
its tensor only if, in this very forward pass,
- the node, and what its recipe starts from, have the shapes that the recipe is for (or `recipes/build.py` takes the
  shapes from the operators of this very pass), and
- `recipes/proof.py` finds that the operators that made it are the recipe's, with the same numbers and operands.
Where that fails, the tensor stays, counted as a divergence, and the recipe is not used again: that costs memory, never
a wrong value. What is recomputed later must have the fingerprint of what was dropped (fingerprint.py).

Collectives. A recipe may contain some (mindformers/plan.py). Then all ranks of the group must run it, as often and in
the same order. So whatever decides whether it runs must be the same on all of them:
- The model, the plan and the autograd graph are the same, since the forward's own collectives matched.
- The proof of a rank's own operators may fail on one rank only. So in the first forward all ranks decide together,
  once, about such a recipe and about each recipe that starts from its result. A rank on which the proof fails in a
  later forward raises an error.
- Free memory decides nothing here: what the guard spills comes back when it is read, and one rank alone never repeats
  a micro-batch with collectives (session/retry.py).
A recomputed source runs once in a backward pass, before its first reader; backward reads in the order of the graph.

Stored smaller. A site with a codec gets a `RecomputedSource` whose program is a decoder and whose one link leads to the
smaller form, a `HeldSource`. So all that holds for recomputed
sources holds here. It is encoded as the next operator saves something, because some operators save what they have not
filled yet. Where the bytes do not fit the codec any more, or were written to since they were saved, the source keeps
its storage: a divergence, and the codec is not used again. On an accelerator integers are narrowed without a look;
where some do not fit, the fingerprint is made to differ, so `backward()` raises at its end.

Cost: some 25 us a recomputed source and forward, what recipes/proof.py says, and the codec's own (tensors/codecs.py).
Not covered: tensors that something else holds: their bytes stay on the device beside the smaller form.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lowtide.core.decisions import SiteDecision
from lowtide.core.fate import Fate
from lowtide.core.plan import Plan
from lowtide.core.recipe import Codec, Recipe, RecipeInput
from lowtide.errors import ConfigError
from lowtide.recipes.build import bound
from lowtide.recipes.execute import CompiledRecipe
from lowtide.recipes.proof import OperatorLog, Proof, proof_of
from lowtide.runtime.offload.scheduler import OffloadScheduler
from lowtide.runtime.recompute.fingerprint import Fingerprints
from lowtide.runtime.recompute.recipe_sources import HeldSource, RecomputedSource, SourceLink, StateSource
from lowtide.tensors.codecs import always_fits, encode
from lowtide.tensors.kinds import is_plain
from lowtide.tensors.modes import Modes
from lowtide.tensors.private import next_sequence_number, own_buffers, own_parameters
from lowtide.tensors.ranks import true_on_all
from lowtide.tensors.view import Shape
from lowtide.tensors.wrappers import inside


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
        node.program, node.proof = CompiledRecipe(recipe), proof_of(recipe)
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


def give_up_recipe(nodes: Mapping[str, Node], name: str) -> None:
    """The recipe of `name` made other bytes than the forward pass: its site is kept from now on."""
    nodes[name].has_failed, nodes[name].why_failed = True, "it made other bytes"


@dataclass(slots=True)
class RecipeGraph:
    """The sources of one forward pass."""

    scheduler: OffloadScheduler
    stays: Callable[[RecomputedSource], None]
    """Called with each source that should be dropped and cannot be: a divergence."""
    fingerprints: Fingerprints
    log: OperatorLog | None
    """What the operators of this pass did; None where the plan has no recipe."""
    is_observing: bool = False
    """The pass learns position tables: it is the first one, or the model has changed."""
    modes: Modes = field(default_factory=Modes)
    """The modes at the beginning of the pass."""
    weights: Any = None
    """The handle of weights that come and go; None where all stay."""
    _sources: dict[str, HeldSource | RecomputedSource] = field(default_factory=dict)
    _waiting: dict[str, list[tuple[Node, RecomputedSource]]] = field(default_factory=dict)

    def find(self, node: Node, tensor: torch.Tensor) -> RecomputedSource | None:
        """The recomputed source of this tensor's storage, if there is one."""
        source = self._sources.get(node.name)
        return source if isinstance(source, RecomputedSource) and source.is_of(tensor) else None

    def make(self, node: Node, tensor: torch.Tensor) -> RecomputedSource | None:
        """The source of a node that is to be dropped and recomputed, or to be stored smaller: then it holds its tensor
        until `encode_now`. None where the node has a source already."""
        if node.name in self._sources:
            return None
        how: Any = {"fingerprints": self.fingerprints, "modes": self.modes}
        program = None if node.is_encoded else node.program
        source = RecomputedSource(node.name, program, tensor, self.scheduler, **how)
        # It must not leave the device before the operator that saves it has been launched.
        source.last_use = next_sequence_number()
        if node.has_failed:
            self._stay(source)
        self.add(node, source)
        if not (node.has_failed or node.is_encoded):
            self._link(node, source)
        return source

    def encode_now(self, node: Node, source: RecomputedSource, hold: Callable[[torch.Tensor], HeldSource]) -> None:
        """Store it smaller, now that the operator that saved it has been launched. `hold`: a source of its form."""
        codec = node.decision.codec
        assert codec is not None
        form = store_smaller(source, codec, node.decision.nbytes, hold)
        if isinstance(form, str):
            node.has_failed, node.why_failed = True, form
            self._stay(source)
        else:
            self.scheduler.counters.narrowed_bytes += source.nbytes - form.nbytes

    def add(self, node: Node, source: HeldSource | RecomputedSource) -> None:
        """Recipes may start from this source of a node."""
        if node.name in self._sources:
            return
        node.was_seen = True
        if self.is_observing:
            node.shape = source.shape
        self._sources[node.name] = source
        for waiting, dependent in self._waiting.pop(node.name, ()):
            self._link(waiting, dependent)

    # -- linking ---------------------------------------------------------------------------------------------------

    def _link(self, node: Node, source: RecomputedSource) -> None:
        """Drop the source's tensor if all that its recipe starts from is there; else wait for what is missing."""
        missing = next((entry for entry in node.inputs if entry.node and entry.name not in self._sources), None)
        if missing is not None:
            self._waiting.setdefault(missing.name, []).append((node, source))
            return
        links = self._links(node, source)
        if links is None:
            self._stay(source)
            return
        source.drop(links)
        self.scheduler.counters.recomputed_bytes += source.nbytes

    def _links(self, node: Node, source: RecomputedSource) -> tuple[SourceLink, ...] | None:
        """What the source is recomputed from, as this forward pass has shown it; None where it must stay."""
        recipe = node.decision.recipe
        assert recipe is not None
        pairs = [(entry, entry.node, self._sources[entry.name]) for entry in node.inputs if entry.node]
        if self.is_observing:
            node.has_planned_shape = source.nbytes == node.decision.nbytes and all(
                other.nbytes == above.decision.nbytes for _, above, other in pairs
            )
        is_same = source.shape == node.shape and all(other.shape == above.shape for _, above, other in pairs)
        is_literal = is_same and node.has_planned_shape
        if not (is_literal or recipe.can_follow_sizes):
            if not node.groups:
                node.has_failed, node.why_failed = True, "it holds for one shape only"
            return None
        links = [link for entry in node.inputs if (link := self._link_to(entry, is_literal)) is not None]
        if len(links) < len(node.inputs):
            return None
        if not is_literal:
            return self._links_in_these_sizes(node, source, recipe, links)
        return tuple(links) if self._holds(node, source, tuple(links)) else None

    def _links_in_these_sizes(
        self, node: Node, source: RecomputedSource, recipe: Recipe, given: list[SourceLink]
    ) -> tuple[SourceLink, ...] | None:
        """For other shapes than the recipe's: the links of the recipe as this very forward pass did it, which the
        source then runs. None where the pass did something else."""
        assert self.log is not None and node.proof is not None
        found = bound(recipe, node.proof, self.log, source.start(), [link.start() for link in given])
        if isinstance(found, str):
            node.has_failed, node.why_failed = True, found
            return None
        known = node.bound
        if known is None or known[0] != found:
            known = node.bound = (found, CompiledRecipe(found))
        source.program = known[1]
        by_name = {(entry.kind, entry.name): link for entry, link in zip(recipe.inputs, given, strict=True)}
        shapes = [(by_name[entry.kind, entry.name], Shape.from_geometry(entry.geometry)) for entry in found.inputs]
        return tuple(link._replace(shape=shape) for link, shape in shapes)

    def _link_to(self, entry: Input, is_literal: bool) -> SourceLink | None:
        if entry.node is None:
            assert entry.find_state is not None
            tensor = entry.find_state()
            if tensor is None or tensor.dtype != entry.shape.dtype:
                return None
            local = inside(tensor)
            if self.weights is not None and self.weights.moves(tensor):
                return SourceLink(entry.name, StateSource(tensor, tensor, self.weights), entry.shape)
            fits = is_plain(local) and entry.shape.end_bytes() <= local.untyped_storage().nbytes()
            own = StateSource(local.detach(), tensor.detach()) if fits else None
            return None if own is None else SourceLink(entry.name, own, entry.shape)
        source = self._sources[entry.name]
        shape = entry.shape if is_literal else source.shape
        fits = source.is_intact() and shape.end_bytes() <= source.nbytes
        return SourceLink(entry.name, source, shape) if fits else None

    def _stay(self, source: RecomputedSource) -> None:
        self.scheduler.counters.kept_bytes += source.nbytes
        self.stays(source)

    def _holds(self, node: Node, source: RecomputedSource, links: tuple[SourceLink, ...]) -> bool:
        """Whether the recipe repeats what this forward pass did; on all ranks, if it has collectives."""
        assert self.log is not None and node.proof is not None
        why = node.proof.mismatch(self.log, source.start(), [link.start() for link in links])
        if node.groups:
            return self._holds_for_all(node, why, source)
        if why:
            node.has_failed, node.why_failed = True, why
        return not why

    def _holds_for_all(self, node: Node, why: str, source: RecomputedSource) -> bool:
        if not node.was_agreed:
            node.was_agreed = True
            node.has_failed = not true_on_all(not why, node.groups, source.device)
            node.why_failed = why or "it does not hold on another rank"
        elif why and not node.has_failed:
            raise RuntimeError(
                f"lowtide: '{node.name}' was to be recomputed by all ranks together, but in this forward pass {why}. "
                "The other ranks cannot be told in time; give this site the fate keep or swap."
            )
        return not node.has_failed

    # -- the end of the forward ------------------------------------------------------------------------------------

    def close(self, *, is_complete: bool) -> None:
        """The forward is over, to its end if `is_complete`.

        A source that still waits for an input stays. Each input gets the `last_use` of what is recomputed from it.
        From now on only autograd's graph holds the sources.
        """
        for name, waiting in self._waiting.items():
            for node, source in waiting:
                if is_complete and not node.groups:
                    node.has_failed, node.why_failed = True, f"what it starts from, '{name}', was not there"
                self._stay(source)
        made = [source for source in self._sources.values() if isinstance(source, RecomputedSource) and source.links]
        has_changed = True
        while has_changed:
            has_changed = False
            for source in reversed(made):
                for link in source.links:
                    has_changed |= link.source.needed_until(source.last_use)
        self._sources.clear()
        self._waiting.clear()


# -- stored smaller ----------------------------------------------------------------------------------------------------


def store_smaller(
    source: RecomputedSource, codec: Codec, planned_bytes: int, hold: Callable[[torch.Tensor], HeldSource]
) -> HeldSource | str:
    """Let `source` drop its storage for the smaller form, which `hold` makes a source of: that one, or why not.

    `planned_bytes`: of the storage, when `codec` was chosen.
    """
    assert source.held is not None
    if not source.is_intact():
        return "it was written to after it had been saved"
    is_looked_at = source.device.type == "cpu" or always_fits(source.shape.dtype) == codec.kind
    if not is_looked_at and source.nbytes > planned_bytes:
        return f"it is larger than planned, and nobody looks whether it fits its codec ({codec.kind})"
    encoded = encode(codec.kind, source.held, source.shape.dtype)
    if encoded is None:
        return f"it does not fit its codec any more ({codec.kind})"
    source.program = encoded.decoder
    form = hold(encoded.data)
    source.drop((SourceLink(source.name, form, Shape.of(encoded.data)),))
    if encoded.misfit is not None:
        # Narrowing keeps the lowest bits of each word: with one more, none is what is decoded.
        assert isinstance(source.fingerprint, torch.Tensor)
        source.fingerprint = source.fingerprint + encoded.misfit
    return form
