"""The weaver: which cells a forward pass has, and which of them may be dropped because a recipe makes them again.

What: `Node` is what a solved plan says about one name, ready to use; `Weaver` belongs to one forward pass, takes the
tensors that the pack hook and the anchors hand it, and links each made cell to those that its recipe starts from. As
soon as all of them are there, the made cell lets its tensor go.

When a recipe is trusted. Nodes are found by position, and a position can be another tensor than last time. So:
- in the first forward each recipe runs once, beside the tensor that it is to replace, and must give its very bytes;
- later, the shapes of the node and of what its recipe starts from must be the same again (or, for a recipe without
  sizes, may differ), and the autograd graph between them must be the same again: same operators, same parameters.
Where that fails, the tensor stays, counted as a divergence: it costs memory, never a value.

Collectives. A recipe may hold some (planner/sections.py), and then all ranks of the group must run it, as often and in
the same order. What decides whether it runs must therefore be the same on all of them:
- the model, the plan and the autograd graph are, since the forward's own collectives matched;
- bytes may differ, so the verdict of such a trial, and of every recipe further down, is that of all ranks together, and
  it is reached once: a rank that observes another forward by itself does not try again;
- nothing here looks at how much memory is free. No guard spills cells, and a micro-batch with collectives is never
  repeated by one rank (rollback.py).
A made cell runs once in a backward pass, before its first reader; backward reads in the order of the graph.

Cost: some 25 us a made cell and forward. Not covered: numbers that a model changes from step to step and bakes into an
operator (a scale that follows a schedule): neither shapes nor the graph show them.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lowtide.catalog.site import RecipeInput
from lowtide.catalog.trace import is_plain
from lowtide.catalog.wrappers import inside
from lowtide.errors import ConfigError
from lowtide.planner.fate import Fate
from lowtide.planner.plan import Plan, SiteDecision
from lowtide.runtime.agree import true_on_all
from lowtide.runtime.cells import Cell, KeptCell, Link, MadeCell, Shape, StateLink, SwappedCell, Trial, TrialError
from lowtide.runtime.handle import Swapped
from lowtide.runtime.stats import Counters
from lowtide.runtime.swap import Mover

# While recipes are tried out, so many dropped tensors stay a little longer: the next recipe often starts from them.
_NUM_RECENT = 4
# How far the graph behind a node is compared. Recipes are short.
_MAX_COMPARED = 24
VIEW_NODES = frozenset({"ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "AsStridedBackward0"})


@dataclass(slots=True, eq=False)
class Node:
    """What a solved plan says about one name, and what the first forward showed of it."""

    decision: SiteDecision
    inputs: tuple[Input, ...] = ()
    """Of its recipe."""
    is_input: bool = False
    """Some recipe starts from it."""
    program: Any = None
    shape: Shape | None = None
    """Of its first saved view, in the forward that was last observed."""
    trace: tuple | None = None
    """The autograd graph behind it then."""
    has_planned_shape: bool = False
    """It, and what its recipe starts from, then had the bytes that the plan was made for."""
    has_failed: bool = False
    """Its recipe did not give its bytes: it is kept from then on."""
    groups: tuple[str, ...] = ()
    """Process groups whose collectives making it takes, here or further up."""
    was_tried: bool = False
    """With all ranks of these groups, that is. Without groups each observed forward tries again."""
    was_seen: bool = False

    @property
    def name(self) -> str:
        return self.decision.name

    @property
    def is_made(self) -> bool:
        return self.program is not None


@dataclass(slots=True)
class Input:
    """One input of a recipe, looked up."""

    name: str
    shape: Shape
    node: Node | None = None
    find_state: Callable[[], torch.Tensor | None] | None = None
    """Parameters and buffers: as they are now."""
    follows: bool = False
    """It looks at its node as the node's first saved view does: what changes there may change here."""


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
        from lowtide.runtime.recipes import compile_recipe

        node.program = compile_recipe(recipe)
        node.inputs = tuple(_looked_up(entry, node, nodes, modules) for entry in recipe.inputs)
        # Plans list nodes in the order in which they are made, and recipes start from earlier ones.
        above = [name for entry in node.inputs if entry.node is not None for name in entry.node.groups]
        node.groups = tuple(dict.fromkeys([*above, *recipe.groups]))
    return nodes


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
    return (owner._parameters if kind == "parameter" else owner._buffers).get(attribute)


@dataclass(slots=True)
class Weaver:
    """The cells of one forward pass. `miss` counts a divergence."""

    mover: Mover
    counters: Counters
    miss: Callable[[], None]
    is_observing: bool = False
    """The pass is the observed one, or one of those that follow a model that has changed."""
    _cells: dict[str, Cell] = field(default_factory=dict)
    _waiting: dict[str, list[tuple[Node, MadeCell]]] = field(default_factory=dict)
    _recent: deque[Any] = field(default_factory=functools.partial(deque, maxlen=_NUM_RECENT))
    _marks: dict[Any, str] = field(default_factory=dict)
    """Autograd's nodes that made the cells' tensors. Holds them, so that they can be told apart by identity."""

    def keep(self, node: Node, tensor: torch.Tensor, grad_fn: Any) -> KeptCell:
        """A node that stays, and from which recipes may start. `grad_fn`: autograd's node that made it."""
        cell = KeptCell(tensor, self.mover.ledger)
        self.counters.kept_bytes += cell.nbytes
        self._add(node, cell, grad_fn)
        return cell

    def swap(self, node: Node, handle: Swapped, grad_fn: Any) -> None:
        """A node that was swapped, and from which recipes may start."""
        self._add(node, SwappedCell(handle.site, handle.view), grad_fn)

    def find(self, node: Node, tensor: torch.Tensor) -> MadeCell | None:
        """The made cell of this tensor's storage, if there is one."""
        cell = self._cells.get(node.name)
        return cell if isinstance(cell, MadeCell) and cell.is_of(tensor) else None

    def make(self, node: Node, tensor: torch.Tensor, grad_fn: Any) -> MadeCell | None:
        """A node that is to be dropped and made again; None where it cannot be, and has to stay."""
        if node.name in self._cells:
            return None
        cell = MadeCell(node.name, node.program, tensor, self.mover)
        is_new = self.is_observing
        if is_new and not node.has_failed:
            node.trace = self._trace(grad_fn)
        fits = not node.has_failed and (is_new or node.trace == self._trace(grad_fn))
        if not fits:
            self._stay(cell)
        self._add(node, cell, grad_fn)
        if fits:
            self._link(node, cell)
        return cell

    def _add(self, node: Node, cell: Cell, grad_fn: Any) -> None:
        if node.name in self._cells:
            return
        node.was_seen = True
        if self.is_observing:
            node.shape = cell.shape
        self._cells[node.name] = cell
        if grad_fn is not None:
            self._marks.setdefault(grad_fn, node.name)
        for waiting, dependent in self._waiting.pop(node.name, ()):
            self._link(waiting, dependent)

    # -- linking ---------------------------------------------------------------------------------------------------

    def _link(self, node: Node, cell: MadeCell) -> None:
        """Let the cell's tensor go if all that its recipe starts from is there; wait for what is not."""
        missing = next((entry for entry in node.inputs if entry.node and entry.name not in self._cells), None)
        if missing is not None:
            self._waiting.setdefault(missing.name, []).append((node, cell))
            return
        links = self._links(node, cell)
        if links is None:
            self._stay(cell)
            return
        if self.is_observing and not self._is_proven(node, cell, links):
            node.has_failed = True
            self._stay(cell)
            return
        if self.is_observing:
            self._recent.append(cell.source)
        cell.drop(links)
        self.counters.recomputed_bytes += cell.nbytes

    def _links(self, node: Node, cell: MadeCell) -> tuple[Link | StateLink, ...] | None:
        recipe = node.decision.recipe
        assert recipe is not None
        pairs = [(entry, entry.node, self._cells[entry.name]) for entry in node.inputs if entry.node]
        if self.is_observing:
            node.has_planned_shape = cell.nbytes == node.decision.nbytes and all(
                other.nbytes == above.decision.nbytes for _, above, other in pairs
            )
            for entry, _, other in pairs:
                entry.follows = entry.shape == other.shape or not node.has_planned_shape
        is_same = cell.shape == node.shape and all(other.shape == above.shape for _, above, other in pairs)
        is_literal = is_same and node.has_planned_shape
        if not is_literal and not (recipe.is_shape_free and all(entry.follows for entry, _, _ in pairs)):
            return None
        links = [self._link_to(entry, is_literal) for entry in node.inputs]
        return None if None in links else tuple(links)  # type: ignore[arg-type]

    def _link_to(self, entry: Input, is_literal: bool) -> Link | StateLink | None:
        if entry.node is None:
            assert entry.find_state is not None
            tensor = entry.find_state()
            if tensor is None or tensor.dtype != entry.shape.dtype:
                return None
            local = inside(tensor)
            fits = is_plain(local) and entry.shape.end_bytes() <= local.untyped_storage().nbytes()
            return StateLink(entry.name, local.detach(), entry.shape, tensor.detach()) if fits else None
        cell = self._cells[entry.name]
        shape = entry.shape if is_literal else cell.shape
        fits = cell.is_intact() and shape.end_bytes() <= cell.nbytes
        return Link(entry.name, cell, shape) if fits else None

    def _stay(self, cell: MadeCell) -> None:
        self.counters.kept_bytes += cell.nbytes
        self.miss()

    def _is_proven(self, node: Node, cell: MadeCell, links: tuple[Link | StateLink, ...]) -> bool:
        """Whether the recipe gives the bytes that it is to replace: on all ranks, if it takes them all."""
        if not node.groups:
            return self._gives_the_same(cell, links)
        if node.was_tried:
            return not node.has_failed
        node.was_tried = True
        trial: Trial = {}
        held = _at_hand(links, trial)
        # A collective may start only when all ranks have what it starts from.
        if not true_on_all(held is not None, node.groups, cell.device):
            return False
        return true_on_all(self._gives_the_same(cell, links, trial), node.groups, cell.device)

    def _gives_the_same(self, cell: MadeCell, links: tuple[Link | StateLink, ...], trial: Trial | None = None) -> bool:
        """Run the recipe beside the tensor that it is to replace."""
        assert cell.source is not None
        try:
            return _same_bytes(cell.try_out(links, {} if trial is None else trial), cell.source)
        except (TrialError, RuntimeError, TypeError, ValueError, IndexError):
            return False

    # -- the graph behind a node -----------------------------------------------------------------------------------

    def _trace(self, start: Any) -> tuple:
        """The autograd graph behind a tensor, as far as the next cells: types, parameters and names of cells."""
        trace: list[Any] = []
        queue = [start]
        for node in queue:
            if node is None:
                trace.append(None)
                continue
            name = self._marks.get(node)
            if name is not None and node is not start:
                trace.append(name)
                continue
            variable = getattr(node, "variable", None)
            if variable is not None:
                trace.append(id(variable) if isinstance(variable, nn.Parameter) else "leaf")
                continue
            kind = node.name()
            # Under a dispatch mode `reshape` makes other view nodes than without.
            if kind not in VIEW_NODES:
                trace.append(kind)
            if len(queue) < _MAX_COMPARED:
                queue.extend(following for following, _ in node.next_functions)
        return tuple(trace)

    # -- the end of the forward ------------------------------------------------------------------------------------

    def close(self) -> None:
        """The forward is over. What still waits stays; who reads what is settled; graphs own their cells alone."""
        for waiting in self._waiting.values():
            for _, cell in waiting:
                self._stay(cell)
        made = [cell for cell in self._cells.values() if isinstance(cell, MadeCell) and cell.links]
        has_changed = True
        while has_changed:
            has_changed = False
            for cell in reversed(made):
                for link in cell.links:
                    if isinstance(link, Link) and link.cell.last_use < cell.last_use:
                        link.cell.last_use = cell.last_use
                        has_changed = True
        self._cells.clear()
        self._waiting.clear()
        self._marks.clear()
        self._recent.clear()


def _at_hand(links: tuple[Link | StateLink, ...], trial: Trial) -> list[torch.Tensor] | None:
    """What a trial starts from; None where it cannot be had."""
    try:
        return [link.peek(trial) for link in links]
    except (TrialError, RuntimeError, TypeError, ValueError, IndexError):
        return None


def _same_bytes(one: torch.UntypedStorage, other: torch.UntypedStorage) -> bool:
    if one.nbytes() != other.nbytes():
        return False
    seen = [torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage) for storage in (one, other)]
    return torch.equal(*seen)
