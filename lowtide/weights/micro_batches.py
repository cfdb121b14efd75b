"""Backward of several micro-batches layer by layer, so that one stay of a layer's weights serves all of them.

What: micro-batches one after the other fetch each layer twice a micro-batch, for its forward and for its backward. Here
all forwards run first, in order. At the entry and the exit of each layer the graph is *cut*: what goes on is the same
bytes, with a node of its own that holds on to the gradient instead of passing it on. Then each layer's backward runs
for one micro-batch after the other before the layer below begins (the order that GreedySnake takes). So a
step of M micro-batches fetches a layer M + 1 times.

Why the bits are plain's: a graph that is cut falls into pieces (the backward of a layer, and what stands between), and
a piece is run once, with all that arrives for it, in autograd's own order. A sum is formed inside of one piece, or over
micro-batches, which come in order. `_check` refuses graphs in which that is not so: where a tensor or a weight is used
by two pieces, the sum would have another order.

Cost: what the layers of all micro-batches saved is there at a time; with layers under torch's checkpoint these are the
inputs of the layers. Python: about 1 us a node of the graph, for the check. Refused by name: micro-batches that run
different layers, plans, weights that two layers share. Not covered: a forward that calls `torch.autograd.grad` with
`allow_unused=True`: to torch, what is behind a cut is unused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lowtide.errors import ConfigError
from lowtide.tensors.private import tree_map_only

_CALL = "lowtide: step"
_ONE_BY_ONE = "call backward() of one micro-batch after the other instead"


@dataclass(eq=False, slots=True)
class _Joint:
    """Where the graph was cut: the tensor before the cut, its node then, and the gradient that has arrived at it."""

    batch: MicroBatch
    tensor: torch.Tensor
    node: Any
    gradient: torch.Tensor | None = None


class _CutGraph(torch.autograd.Function):
    """The same bytes, in a graph that begins here. Writes in place count for the tensor before the cut, too."""

    @staticmethod
    def forward(ctx: Any, root: torch.Tensor, tensor: torch.Tensor, joint: _Joint) -> torch.Tensor:
        ctx.joint = joint
        ctx.set_materialize_grads(False)
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[None, None, None]:
        if not ctx.joint.batch.is_complete:
            raise ConfigError(f"{_CALL}: a micro-batch has a backward pass inside of its forward; {_ONE_BY_ONE}")
        ctx.joint.gradient = gradient
        return None, None, None


@dataclass(eq=False, slots=True)
class _LayerRun:
    """A layer's forward in one micro-batch, between its cuts."""

    name: str
    given: list[_Joint] = field(default_factory=list)
    made: list[_Joint] = field(default_factory=list)


class MicroBatch:
    """One micro-batch, from its forward to the end of its backward."""

    def __init__(self) -> None:
        self.runs: list[_LayerRun] = []
        self.loss: torch.Tensor | None = None
        self.is_complete = False
        """Its forward is over."""
        self._root = torch.zeros((), requires_grad=True)

    def enter(self, name: str, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """A layer begins: what it is given instead."""
        run = _LayerRun(name)
        self.runs.append(run)
        return self._cut((args, kwargs), run.given)

    def leave(self, output: Any) -> Any:
        """That layer is over: what it gives instead."""
        return self._cut(output, self.runs[-1].made)

    def _cut(self, tree: Any, joints: list[_Joint]) -> Any:
        known: dict[int, torch.Tensor] = {}

        def cut(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.requires_grad:
                return tensor
            if id(tensor) not in known:
                joints.append(_Joint(self, tensor, tensor.grad_fn))
                cut_off = _CutGraph.apply(self._root, tensor.detach(), joints[-1])
                assert isinstance(cut_off, torch.Tensor)
                known[id(tensor)] = cut_off
            return known[id(tensor)]

        return tree_map_only(torch.Tensor, cut, tree)

    def pieces(self) -> list[tuple[str, list[torch.Tensor]]]:
        """What each part of the graph between cuts begins at in backward, with a name for people."""
        assert self.loss is not None
        found = [("what follows the layers", [self.loss])]
        for run in self.runs:
            found.append((f"'{run.name}'", [joint.tensor for joint in run.made]))
            found.append((f"what goes into '{run.name}'", [joint.tensor for joint in run.given]))
        return found


def run_backward(
    batches: Sequence[MicroBatch], *, before: Callable[[MicroBatch], None], after: Callable[[str], None]
) -> None:
    """Backward of all micro-batches, from the last layer to the first. `before` is called ahead of each piece with its
    micro-batch, `after` with a layer's name when its backward is over for all."""
    for batch in batches:
        before(batch)
        assert batch.loss is not None
        batch.loss.backward()
        batch.loss = None
    while batches[0].runs:
        name = batches[0].runs[-1].name
        for batch in batches:
            before(batch)
            run = batch.runs.pop()
            _send(run.made)
            _send(run.given)
        after(name)


def _send(joints: list[_Joint]) -> None:
    """Backward from these cuts, with what has arrived at them."""
    arrived = [joint for joint in joints if joint.gradient is not None]
    if arrived:
        torch.autograd.backward([j.tensor for j in arrived], [j.gradient for j in arrived])


def check(batches: Sequence[MicroBatch], names: dict[torch.Tensor, str]) -> None:
    """Raise `ConfigError` for graphs whose pieces would form other sums than plain's. `names`: of parameters."""
    first = [run.name for run in batches[0].runs]
    repeated = next((name for name in first if first.count(name) > 1), None)
    if repeated is not None:
        raise ConfigError(f"{_CALL}: '{repeated}' runs more than once in a forward; {_ONE_BY_ONE}")
    owners: dict[Any, str] = {}
    for number, batch in enumerate(batches, 1):
        if [run.name for run in batch.runs] != first:
            raise ConfigError(f"{_CALL}: micro-batch {number} runs other layers than the first one; {_ONE_BY_ONE}")
        for run in batch.runs:
            if any(joint.tensor.grad_fn is not joint.node for joint in (*run.given, *run.made)):
                raise ConfigError(
                    f"{_CALL}: what '{run.name}' was given or gave was written into through another tensor; "
                    f"{_ONE_BY_ONE}"
                )
        # All use the same leaves; anything else is of one micro-batch.
        leaves: dict[Any, str] = {}
        for piece, roots in batch.pieces():
            _own(roots, f"{piece} of micro-batch {number}", owners, leaves, names)


def _own(
    roots: list[torch.Tensor],
    piece: str,
    owners: dict[Any, str],
    leaves: dict[Any, str],
    names: dict[torch.Tensor, str],
) -> None:
    """Note for each node of the graph from these roots on, up to a cut, and for each weight, that it is of `piece`.
    Raises `ConfigError` for what is of another one already."""
    pending: list[Any] = [root if root.grad_fn is None else root.grad_fn for root in roots]
    while pending:
        node = pending.pop()
        if type(node).__name__ == "AccumulateGrad":
            node = node.variable
        if node is None:
            continue
        is_leaf = isinstance(node, torch.Tensor)
        known = leaves if is_leaf else owners
        if known.get(node) is piece:
            continue
        if node in known:
            raise ConfigError(
                f"{_CALL}: {_named(node, names)} is used by {known[node]} and by {piece}, so gradients would not be "
                f"added up as in plain training; {_ONE_BY_ONE}"
            )
        known[node] = piece
        if not is_leaf and not isinstance(getattr(node, "joint", None), _Joint):
            pending += [following for following, _ in node.next_functions]


def _named(node: Any, names: dict[torch.Tensor, str]) -> str:
    if isinstance(node, torch.Tensor):
        return f"'{names[node]}'" if node in names else f"an input of shape {list(node.shape)}"
    joint = getattr(node, "joint", None)
    if isinstance(joint, _Joint):
        return f"what a layer gives, of shape {list(joint.tensor.shape)},"
    return f"the result of {type(node).__name__.removesuffix('Backward0')}"
