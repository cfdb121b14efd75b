"""Several micro-batches layer by layer, so that one stay of a layer's weights serves all of them.

What: micro-batches one after the other fetch each layer twice a micro-batch, for its forward and for its backward. Here
a layer runs forward for one micro-batch after the other before the layer above begins, and so it is, downwards, in
backward (the order that GreedySnake takes). So a step fetches a layer twice, however many micro-batches it has.

Backward: at the exit of each layer the graph is *cut*: what goes on is the same bytes, with a node of its own that
holds on to the gradient instead of passing it on. Why the bits are plain's: a graph that is cut falls into pieces (what
follows the layers; each layer, with what goes into it), and a piece is run once, with all that arrives for it, in
autograd's own order. A sum is formed inside of one piece, or over micro-batches, which come in order. `check` refuses
graphs in which that is not so: where a tensor or a weight is used by two pieces, the sum would have another order.
`run_backward` refuses one that draws random numbers or writes into buffers: plain's has done so before the next
forward.

Forward (`Forwards`): each micro-batch's runs on a thread of its own that is as the caller's, and exactly one runs at a
time (pipeline/overlap.py has the baton). It changes hands at the entry of each layer, so that every run has one order.
Why the bits are plain's: a forward that leaves nothing for another one gives the same whenever it runs. That is looked
at, not believed: the last micro-batch of the first step runs under a look at all that its code reaches
(tensors/snapshot.py), at each entry of a layer. If something has moved, forwards stay in order, each layer is fetched
for each of them, and a line says why. From then on modules, random generators and settings are looked at, at each
entry; what moves then is refused by name before any gradient is there.

Cost: what the layers of all micro-batches saved is there at a time, whichever way the forwards go; with layers under
torch's checkpoint these are the inputs of the layers. Python: about 1 us a node of the graph, for the check; 0.1 ms a
layer and micro-batch for the turns; the first look about a second for 300 modules. Refused by name: micro-batches that
run different layers, plans, weights that two layers share, reentrant checkpoints around layers.

Not covered, and not seen:
- a forward that calls `torch.autograd.grad` with `allow_unused=True`: to torch, what is behind a cut is unused;
- what a forward writes through `.data` into a buffer above 1 MiB, or into a weight that stays on the device;
- what a hook of backward leaves for the next forward, other than in buffers and random generators (a number that
  scales the loss, say): here all forwards have run before it;
- a forward that begins to write to globals or objects outside of its modules after the first look; a lock that a
  forward holds while its layers run (the next one waits for it for ever).
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lowtide.core.log import LOG
from lowtide.errors import ConfigError
from lowtide.pipeline.overlap import Baton, as_this_thread
from lowtide.profiling.untouched import to_the_end
from lowtide.tensors.modes import Modes
from lowtide.tensors.private import (
    next_sequence_number,
    sequence_number,
    top_saved_tensors_hooks,
    tree_leaves,
    tree_map_only,
    version_of,
)
from lowtide.tensors.remembered import Record
from lowtide.tensors.snapshot import process_states, take

_MOST_LOOKS = 2
"""Steps that are looked at: what a first forward sets up once is there in the second one."""
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
class _Piece:
    """A part of the graph of a micro-batch between cuts: a layer and what goes into it, or what follows the layers."""

    layer: str | None
    begins_at: float
    """Nodes with this sequence number or a later one are the layer's own."""
    made: list[_Joint] = field(default_factory=list)
    """Where what the layer gives was cut."""

    def __str__(self) -> str:
        return "what follows the layers" if self.layer is None else f"'{self.layer}'"


@dataclass(eq=False, slots=True)
class MicroBatch:
    """One micro-batch, from its forward to the end of its backward."""

    is_last: bool
    """No more micro-batch of the step comes after it."""
    is_watched: bool = False
    """More come after it, and its weights are to be the same for their forwards."""
    at_layer: Callable[[Collection[str]], None] = lambda parts: None
    """Called before a layer begins, with names of parts of the model: around the layers, the last one, and this."""
    runs: list[_Piece] = field(default_factory=list)
    loss: torch.Tensor | None = None
    is_complete: bool = False
    """Its forward is over."""
    _root: torch.Tensor = field(default_factory=lambda: torch.zeros((), requires_grad=True))

    def enter(self, name: str) -> None:
        """A layer begins."""
        self.runs.append(_Piece(name, next_sequence_number()))

    def leave(self, output: Any) -> Any:
        """That layer is over: what it gives instead, with its tensors cut. What has none of a graph is the same object,
        which may be written into."""
        made, known = self.runs[-1].made, dict[int, torch.Tensor]()

        def cut(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.requires_grad and id(tensor) not in known:
                made.append(_Joint(self, tensor, tensor.grad_fn))
                cut_off = _CutGraph.apply(self._root, tensor.detach(), made[-1])
                assert isinstance(cut_off, torch.Tensor)
                known[id(tensor)] = cut_off
            return known.get(id(tensor), tensor)

        has_graph = any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in tree_leaves(output))
        return tree_map_only(torch.Tensor, cut, output) if has_graph else output

    def let_go(self) -> None:
        """Forget the graph. The node of a cut leads here, and no collector of garbage sees a cycle through a node."""
        self.loss = None
        self.runs.clear()

    def pieces(self) -> list[tuple[_Piece, list[torch.Tensor]]]:
        """The parts of the graph between cuts, and what each begins at in backward."""
        assert self.loss is not None
        runs = [(run, [joint.tensor for joint in run.made]) for run in self.runs]
        return [(_Piece(None, math.inf), [self.loss]), *runs]


class Forwards:
    """How the forwards of micro-batches that are handed over together run. `parts`: names of what comes and goes."""

    def __init__(self, model: nn.Module, parts: Collection[str]) -> None:
        self.is_by_layer = False
        """Whether they take turns at each layer from now on."""
        self.sums: dict[Any, torch.Tensor | None] = {}
        """Of the bytes of weights, as the first of several micro-batches has used them."""
        self._model = model
        self._parts = parts
        self._looks_left = _MOST_LOOKS
        self._took_turns = False
        self._said: set[str] = set()
        self._current: MicroBatch | None = None
        """The one whose forward runs now."""

    def at(self, name: str) -> MicroBatch | None:
        """The micro-batch whose forward has come to a part of the model, once it is its turn there; None where none was
        handed over."""
        batch = self._current
        if batch is not None:
            batch.at_layer({"", name, *(run.layer or "" for run in batch.runs[-1:])})
            self._current = batch
        return batch

    def run(self, calls: Sequence[Callable[[], Any]], batches: list[MicroBatch]) -> None:
        """Run the forward of each micro-batch, and add to `batches` what it leaves."""
        modes, num = Modes(), len(calls)
        is_bare = modes.is_still(modes) and top_saved_tensors_hooks() is None
        try:
            self._took_turns = self.is_by_layer and is_bare and num > 1
            if self._took_turns:
                self._run_by_layer(calls, batches)
                return
            for number, call in enumerate(calls, 1):
                batches.append(MicroBatch(number == num, is_watched=number == 1 < num))
                if 1 < number == num and is_bare and self._looks_left and not self.is_by_layer:
                    self._look_at(calls, batches[-1])
                else:
                    self._run(call, batches[-1], number)
        finally:
            self._current = None
        if not is_bare:
            self._say("its caller has modes or hooks on")

    def _run(self, call: Callable[[], Any], batch: MicroBatch, number: int) -> None:
        self._current = batch
        batch.loss = call()
        if not isinstance(batch.loss, torch.Tensor) or batch.loss.numel() != 1 or not batch.loss.requires_grad:
            raise ConfigError(f"{_CALL}: what loss {number} returns is no scalar tensor with a graph")
        batch.is_complete = True

    def _say(self, why: str) -> None:
        if why not in self._said:
            self._said.add(why)
            LOG.info("%s: forwards run one after the other, each with all layers fetched for it: %s", _CALL, why)

    def _look_at(self, calls: Sequence[Callable[[], Any]], batch: MicroBatch) -> None:
        """Run the forward of the last micro-batch, and see whether the next step's may take turns."""
        self._looks_left -= 1
        before = _Surroundings(self._model, (), calls)
        found: list[str] = []
        batch.at_layer = lambda parts: found.append("" if any(found) else before.changed(parts))
        self._run(calls[-1], batch, len(calls))
        batch.at_layer = lambda _: None
        found.append(before.changed())
        with ThreadPoolExecutor(1) as pool:
            found.append(pool.submit(contextvars.copy_context().run, before.changed).result())
        why = next(filter(None, found), "")
        self.is_by_layer = not why
        if why and not self._looks_left:
            self._say(f"one changes {why}")

    def keep_order_for(self, weight: str) -> None:
        """A forward casts this weight twice around layers, so forwards run one after the other from now on. Raises
        `ConfigError` if these took turns already: a cast does not outlive a turn."""
        if self._took_turns:
            self._refuse(f"the cast of {weight} (used twice around layers)")
        self.is_by_layer = False
        self._say(f"one uses the cast of {weight} twice around layers")

    def _run_by_layer(self, calls: Sequence[Callable[[], Any]], batches: list[MicroBatch]) -> None:
        """Each on a thread, which hands over where a layer begins. An error of one ends all, and is raised."""
        baton, before = Baton(*range(len(calls))), _Surroundings(self._model, self._parts)
        for number in range(len(calls)):
            turn = functools.partial(self._take_turns, baton, before, number)
            batches.append(MicroBatch(number == len(calls) - 1, is_watched=number == 0, at_layer=turn))
        with ThreadPoolExecutor(len(calls), thread_name_prefix="lowtide-forward") as pool:
            try:
                futures = []
                for number, call in enumerate(calls):
                    alone = functools.partial(self._run_and_look, before, call, batches[number], number + 1)
                    turn = functools.partial(_on_thread, as_this_thread(keeps_casts=False), baton, number, alone)
                    futures.append(pool.submit(contextvars.copy_context().run, turn))
                for future in futures:
                    future.result()
            except BaseException as error:  # Ctrl-C, which comes to this thread
                baton.end(0, error)
            to_the_end(pool.shutdown)
        baton.raise_error()

    def _take_turns(self, baton: Baton, before: _Surroundings, number: int, parts: Collection[str]) -> None:
        self._refuse(before.changed(parts))
        torch.clear_autocast_cache()  # all threads share it, and each may cast to a dtype of its own
        baton.pass_on(number)

    def _run_and_look(self, before: _Surroundings, call: Callable[[], Any], batch: MicroBatch, number: int) -> None:
        self._run(call, batch, number)
        self._refuse(before.changed())

    def _refuse(self, changed: str) -> None:
        if changed:
            self.is_by_layer, self._looks_left = False, 0
            raise ConfigError(
                f"{_CALL}: the forward of a micro-batch changes {changed}, and forwards of others run in between, so "
                "this step is not right: no gradient was touched; call step again, and forwards will run one after the "
                "other"
            )


def _on_thread(
    as_caller: contextlib.AbstractContextManager[None], baton: Baton, number: int, alone: Callable[[], None]
) -> None:
    """Run a forward when it is its turn, to its end. Its error is left in `baton`."""
    try:
        with as_caller:
            baton.wait_for(number)
            alone()
    except BaseException as error:
        baton.end(number, error)
    else:
        baton.end(number, None)


class _Surroundings:
    """What a forward could leave for another one, as it is now: what its modules hold, random generators, settings of
    torch; with `calls`, the functions of micro-batches, all that their code reaches. `parts`: of the model."""

    def __init__(self, model: nn.Module, parts: Collection[str], calls: Sequence[Callable] = ()) -> None:
        devices = {parameter.device for parameter in model.parameters()}
        self._found = take(model, beside=calls or None, called=bool(calls), devices=devices)
        self._modes = Modes()
        self._context = [*contextvars.copy_context().items()]
        graphs = (f"'{name}' (a graph of before)" for tensor, name in self._found.tensors if tensor.grad_fn is not None)
        self._graph = next(graphs, "") if calls else ""
        self._is_begun = False
        self._records: dict[str, list[Record]] = {}
        for record in self._found.records():
            name = f"{record.name}."
            part = next((part for part in parts if name.startswith(f"{part}.")), "")
            self._records.setdefault(part, []).append(record)

    def changed(self, parts: Collection[str] = ()) -> str:
        """The name of the first thing that is not as it was; empty if all is. `parts`: where a layer begins, what is
        theirs is looked at; none: a forward is over, and all is."""
        if not self._is_begun:  # batches may be drawn from an iterator ahead of the layers
            self._is_begun = True
            self._found.note_positions()
        if not self._modes.is_still(Modes()):
            return "a setting of torch"
        if not parts and [*contextvars.copy_context().items()] != self._context:
            return "a context variable"
        records = (record for part in parts or self._records for record in self._records.get(part, ()))
        record = next((record for record in records if not record.is_same()), None)
        if record is not None:
            return f"'{record.changed_name()}'"
        written = (f"'{name}'" for name in self._found.written(by_value=not parts))
        return next(written, "") or self._graph or next(iter(self._found.moved()), "")


def _surroundings(model: nn.Module) -> Callable[[str], None]:
    """What backward has to leave as it is where more forwards have run already: buffers, and the random generators of
    torch, Python and numpy. The function raises `ConfigError` where the backward of a piece has changed something of
    it."""
    buffers = [(name, buffer, version_of(buffer)) for name, buffer in model.named_buffers()]
    generators = [*process_states({parameter.device for parameter in model.parameters()})]

    def check_after(piece: str) -> None:
        written = next((name for name, buffer, version in buffers if version_of(buffer) != version), None)
        if written is None and all(generator.is_same() for generator in generators):
            return
        does = "draws random numbers" if written is None else f"writes into '{written}'"
        raise ConfigError(
            f"{_CALL}: backward of {piece} {does}, which plain training does before the next micro-batch's forward; "
            "this step is not right: call zero_grad() (with update='in_backward' load a checkpoint, weights were "
            "updated), and backward() of one micro-batch after the other"
        )

    return check_after


def run_backward(
    batches: Sequence[MicroBatch],
    model: nn.Module,
    *,
    before: Callable[[MicroBatch], None],
    after: Callable[[str], None],
) -> None:
    """Backward of all micro-batches, from the last layer to the first. `before` is called ahead of each piece with its
    micro-batch, `after` with a layer's name when its backward is over for all."""
    check_after = _surroundings(model) if len(batches) > 1 else lambda piece: None
    for batch in batches:
        before(batch)
        assert batch.loss is not None
        batch.loss.backward()
        batch.loss = None
        check_after("what follows the layers")
    while batches[0].runs:
        name = batches[0].runs[-1].layer
        assert name is not None
        for batch in batches:
            before(batch)
            _send(batch.runs.pop().made)
            check_after(f"'{name}'")
        after(name)


def _send(joints: list[_Joint]) -> None:
    """Backward from these cuts, with what has arrived at them."""
    arrived = [joint for joint in joints if joint.gradient is not None]
    if arrived:
        torch.autograd.backward([j.tensor for j in arrived], [j.gradient for j in arrived])


def check(
    batches: Sequence[MicroBatch], names: dict[torch.Tensor, str], parts: Mapping[str, Collection[torch.Tensor]]
) -> str:
    """Raise `ConfigError` for graphs whose pieces would form other sums than plain's, or keep gradients of all layers.
    `names`: of parameters. `parts`: the weights of each part of the model that comes and goes.

    Returns the name of a weight whose cast a forward uses twice, at least once around layers, or an empty string.
    Autocast makes one cast of both, and adds their gradients in its dtype; forwards that take turns make two."""
    first = [run.layer for run in batches[0].runs]
    repeated = next((name for name in first if first.count(name) > 1), None)
    if repeated is not None:
        raise ConfigError(f"{_CALL}: '{repeated}' runs more than once in a forward; {_ONE_BY_ONE}")
    owners: dict[Any, tuple[_Piece, int]] = {}
    casts: dict[tuple[torch.Tensor, int], list[bool]] = {}
    for number, batch in enumerate(batches, 1):
        if [run.layer for run in batch.runs] != first:
            raise ConfigError(f"{_CALL}: micro-batch {number} runs other layers than the first one; {_ONE_BY_ONE}")
        for run in batch.runs:
            if any(joint.tensor.grad_fn is not joint.node for joint in run.made):
                raise ConfigError(
                    f"{_CALL}: what '{run.layer}' gave was written into through another tensor; {_ONE_BY_ONE}"
                )
        for piece, roots in batch.pieces():
            _own(roots, (piece, number), owners, casts, names)
    for part, weights in parts.items():
        for weight in weights:
            user, _ = owners.get(weight, (None, 0))
            if user is not None and weight not in parts.get(user.layer or "", ()):
                raise ConfigError(
                    f"{_CALL}: '{names[weight]}' is used by {user}, and it is there for '{part}', all of whose "
                    f"results must be tensors, or tuples, lists or dicts of them; {_ONE_BY_ONE}"
                )
    return next((_named(weight, names) for (weight, _), around in casts.items() if len(around) > 1 and any(around)), "")


def check_unwritten(before: Mapping[Any, torch.Tensor | None], after: Mapping[Any, torch.Tensor | None]) -> None:
    """Raise `ConfigError` where a later forward has written into a weight, past its version too: the backward of an
    earlier micro-batch would take the new bytes. `before`, `after`: sums of bytes by item."""
    for item, one in before.items():
        other = after[item]
        if one is not None and other is not None and one is not other and not torch.equal(one, other):
            raise ConfigError(
                f"{_CALL}: '{item.name}' is written into by the forward of a micro-batch, and those before it had "
                f"other bytes; {_ONE_BY_ONE}"
            )


def _own(
    roots: list[torch.Tensor],
    piece_of: tuple[_Piece, int],
    owners: dict[Any, tuple[_Piece, int]],
    casts: dict[tuple[torch.Tensor, int], list[bool]],
    names: dict[torch.Tensor, str],
) -> None:
    """Note for each node of the graph from these roots on, up to a cut, and for each weight, that it is of a piece of
    the micro-batch with this number. Raises `ConfigError` for what is of another piece already. The same piece of
    several micro-batches may share weights, and casts of them, which each goes through by itself; but no cut. `casts`:
    for each use of a weight's cast by a micro-batch, whether the cast was made around layers."""
    piece, number = piece_of
    pending: list[Any] = [root if root.grad_fn is None else root.grad_fn for root in roots]
    seen: set[Any] = set()
    while pending:
        node = pending.pop()
        if type(node).__name__ == "AccumulateGrad":
            node = node.variable
        if node is None:
            continue
        owner, first = owners.setdefault(node, piece_of)
        is_joint = isinstance(getattr(node, "joint", None), _Joint)
        if owner.layer != piece.layer or (is_joint and owner is not piece):
            raise ConfigError(
                f"{_CALL}: {_named(node, names)} is used by {owner} of micro-batch {first} and by {piece} of "
                f"micro-batch {number}, so gradients would not be added up as in plain training; {_ONE_BY_ONE}"
            )
        _look_around(node, owner, number, casts)
        if node not in seen and not is_joint and not isinstance(node, torch.Tensor):
            pending += [following for following, _ in node.next_functions]
        seen.add(node)


def _look_around(node: Any, piece: _Piece, number: int, casts: dict[tuple[torch.Tensor, int], list[bool]]) -> None:
    """Note a use of a weight's cast; raise `ConfigError` for a reentrant checkpoint around layers."""
    kind = type(node).__name__
    if kind not in ("ToCopyBackward0", "CheckpointFunctionBackward"):
        return
    is_around = sequence_number(node) < piece.begins_at
    if kind == "ToCopyBackward0":
        weight = getattr(node.next_functions[0][0], "variable", None)
        if weight is not None:
            casts.setdefault((weight, number), []).append(is_around)
    elif is_around:
        raise ConfigError(
            f"{_CALL}: a reentrant checkpoint is around layers, whose graphs are made in backward only; give it "
            f"use_reentrant=False, or {_ONE_BY_ONE}"
        )


def _named(node: Any, names: dict[torch.Tensor, str]) -> str:
    if isinstance(node, torch.Tensor):
        return f"'{names[node]}'" if node in names else f"an input of shape {list(node.shape)}"
    joint = getattr(node, "joint", None)
    if isinstance(joint, _Joint):
        return f"what a layer gives, of shape {list(joint.tensor.shape)},"
    return f"the result of {type(node).__name__.removesuffix('Backward0')}"
