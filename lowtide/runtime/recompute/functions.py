"""What the `autograd.Function`s of a recomputed module keep on `ctx`: dropped after its first run, and put back.

What a Function gives to `save_for_backward` goes through hooks. What it sets on `ctx` does not: a tensor (`ctx.x = x`),
a list of tensors, the result of a graph of its own (`with torch.enable_grad()`), with all that this graph saves. In
torch's reentrant checkpoint all of it goes, since the first run builds no graph; but then gradients have other sums
where a weight or an input has several readers, and hooks inside of the module never run. Here the graph stays, node by
node: only the attributes with tensors are taken off each `ctx`. Before its backward runs, those that the module's
second run has set on the same Function's `ctx` are put in their place. In all else backward is plain autograd's.

A tensor that the Function was given keeps its place in the graph of the first run, for `create_graph=True` and for what
backward computes from it with gradients. A graph of the Function's own is that of the second run.

What comes back is compared with what was taken off, by fingerprints. A tensor that was written to in place since the
module's first run is refused by name, once: plain autograd would read what was written. Then the module's Functions
keep what they have.

Left where it is, and counted (`stats.function_bytes`): what is held elsewhere too (a list that the module keeps), and a
graph that goes on into the graph around it. Not covered, nor counted: tensors in closures, Functions written in C++ or
compiled, and Functions whose outputs reach nothing that the module returns.

Cost: in a first run a walk over the module's graph, 1 us a node, where runs have shown such Functions; some 20 us for
each attribute. The module's second run goes to its end.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import CheckpointError

from lowtide.runtime.recompute.fingerprint import Fingerprints, Print
from lowtide.tensors.kinds import is_plain, nodes_between, plain_inside, storage_key_set
from lowtide.tensors.private import base_of, is_view, sequence_number, storage_key, version_of
from lowtide.tensors.view import version_alias
from lowtide.tensors.wrappers import inside

_MAX_DEPTH = 8
Take = Callable[[int], dict[str, Any]]
"""Gives what the second run of this backward pass has set on the Function with this number."""
Refuse = Callable[[str], Exception]
"""Makes the error that says why the module cannot be run again."""


@dataclass(frozen=True, slots=True)
class FunctionRow:
    """A Function whose attributes are taken off: where the module's run calls it, and what its tensors were."""

    place: int
    """How many autograd nodes the run had made before."""
    kind: str
    names: tuple[str, ...]
    """Of the attributes."""
    shapes: tuple[torch.Size, ...]
    prints: tuple[Print, ...]


def functions_of(outputs: Iterable[torch.Tensor], start: int, stops: Collection[Any]) -> dict[tuple[int, str], Any]:
    """The `ctx` of each Function that gave `outputs`, by its place in the run and its class; the run's first node had
    the number `start`, and no walk goes past the nodes `stops`."""
    nodes = nodes_between(outputs, stops, since=start)
    return {
        (sequence_number(node) - start, type(node).__name__): node
        for node in nodes
        if isinstance(node, BackwardCFunction)
    }


# -- tensors in attributes ---------------------------------------------------------------------------------------------


def _num_holders(values: Iterable[Any]) -> list[int]:
    return [sys.getrefcount(value) for value in values]


_ALONE = _num_holders([[]])[0]
"""What `_num_holders` gives for what nobody else holds."""


class _Contents:
    """The tensors in one attribute, and in the lists, dictionaries, tuples and simple objects there."""

    def __init__(self, value: Any, num_holders: int) -> None:
        self.value = value
        self.tensors: list[torch.Tensor] = []
        self.is_shared = False
        """Somebody else holds a list or dictionary with tensors, and may change it."""
        self._entered: set[int] = set()
        self._add(value, num_holders, 0)

    @classmethod
    def of(cls, attributes: dict[str, Any]) -> dict[str, _Contents]:
        """Of the attributes that have tensors, by name."""
        counts = _num_holders(attributes.values())
        found = {name: cls(value, count) for (name, value), count in zip(attributes.items(), counts, strict=True)}
        return {name: contents for name, contents in found.items() if contents.tensors}

    def _add(self, value: Any, num_holders: int, depth: int) -> None:
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
            return
        is_shared, num_before = num_holders > _ALONE and not isinstance(value, tuple), len(self.tensors)
        is_object = not isinstance(value, list | dict | tuple)
        is_simple = hasattr(value, "__dict__") and not isinstance(value, nn.Module | type) and not callable(value)
        if depth == _MAX_DEPTH or (is_object and (is_shared or not is_simple)):
            return
        self._entered.add(id(value))
        parts = _parts_of(value)
        for part, count in zip(parts, _num_holders(parts), strict=True):
            self._add(part, count, depth + 1)
        self.is_shared |= is_shared and len(self.tensors) > num_before

    def exchanged(self, tensors: dict[int, torch.Tensor]) -> Any:
        """The attribute with other tensors, by the identity of those that they replace. Lists, dictionaries and objects
        stay the same objects."""
        return self._exchanged(self.value, tensors)

    def _exchanged(self, value: Any, tensors: dict[int, torch.Tensor]) -> Any:
        if isinstance(value, torch.Tensor):
            return tensors[id(value)]
        if id(value) not in self._entered:
            return value
        if isinstance(value, tuple):
            parts = [self._exchanged(part, tensors) for part in value]
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        if isinstance(value, list):
            value[:] = [self._exchanged(part, tensors) for part in value]
            return value
        items = value if isinstance(value, dict) else vars(value)
        items.update({key: self._exchanged(part, tensors) for key, part in items.items()})
        return value


def _parts_of(value: Any) -> Collection[Any]:
    if isinstance(value, list | tuple):
        return value
    return (value if isinstance(value, dict) else vars(value)).values()


def _is_weight(tensor: torch.Tensor) -> bool:
    return isinstance(base_of(tensor) if is_view(tensor) else tensor, nn.Parameter)


# -- after the first run -----------------------------------------------------------------------------------------------


class TakenOff:
    """What is taken off the Functions of one run, and what stays on them."""

    def __init__(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], fingerprints: Fingerprints) -> None:
        """`outputs`, `inputs`: of the module."""
        self.rows: list[FunctionRow] = []
        self.gone: dict[int, torch.UntypedStorage] = {}
        """Storages that the Functions let go of, by key."""
        self.left: dict[int, torch.UntypedStorage] = {}
        """Those of attributes that cannot be taken off."""
        self._around = storage_key_set(plain_inside([*outputs, *inputs]))
        self._inputs = {id(tensor) for tensor in inputs if not isinstance(tensor, nn.Parameter)}
        self._fingerprints = fingerprints

    def take(self, place: tuple[int, str], ctx: Any, take: Take, refuse: Refuse) -> None:
        """Take off what one Function keeps, until its backward runs."""
        names = []
        tensors: list[torch.Tensor] = []
        for name, contents in _Contents.of(vars(ctx)).items():
            if all(map(_is_weight, contents.tensors)):
                continue
            if contents.is_shared or not all(self._can_go(tensor, ctx) for tensor in contents.tensors):
                self._note(self.left, contents.tensors)
                continue
            names.append(name)
            tensors += contents.tensors
        if not names:
            return
        self._note(self.gone, tensors)
        back = PutBack(ctx, names, tensors, functools.partial(take, len(self.rows)), refuse)
        prints = tuple(map(self._fingerprints.of, tensors))
        self.rows.append(FunctionRow(*place, tuple(names), tuple(tensor.shape for tensor in tensors), prints))
        for name in names:
            del vars(ctx)[name]
        ctx.register_prehook(back.put_on)
        ctx.register_hook(back.take_off)

    def _note(self, where: dict[int, torch.UntypedStorage], tensors: list[torch.Tensor]) -> None:
        for local in plain_inside(tensors):
            storage = local.untyped_storage()
            if storage_key(storage) not in self._around and not _is_weight(local):
                where[storage_key(storage)] = storage

    def _can_go(self, tensor: torch.Tensor, ctx: Any) -> bool:
        """Whether a tensor has no history, or is the Function's input or output, or the result of a graph that begins
        inside of the Function."""
        if tensor.grad_fn is None or tensor.grad_fn is ctx or _is_given(tensor, ctx):
            return True
        start = sequence_number(ctx)
        for node in nodes_between([tensor], ()):
            leaf = getattr(node, "variable", None)
            if (sequence_number(node) <= start) if leaf is None else (id(leaf) in self._inputs):
                return False
        return True


def _is_given(tensor: torch.Tensor, ctx: Any) -> bool:
    """Whether a tensor with a history is what the Function was called with."""
    return any(
        number == tensor.output_nr and (node is tensor.grad_fn or getattr(node, "variable", None) is tensor)
        for node, number in ctx.next_functions
        if node is not None
    )


# -- in backward -------------------------------------------------------------------------------------------------------


def taken_from(outputs: list[torch.Tensor], start: int, rows: list[FunctionRow]) -> list[dict[str, Any]]:
    """What a second run has set on the Functions of `rows`, taken off them. Raises CheckpointError if one is missing or
    has other attributes."""
    found = functions_of(outputs, start, ())
    values = []
    for row in rows:
        ctx = found.get((row.place, row.kind))
        attributes = {} if ctx is None else vars(ctx)
        missing = [name for name in row.names if name not in attributes]
        if missing:
            raise CheckpointError(f"a {row.kind} that kept '{missing[0]}' on ctx has not run, or does not keep it")
        values.append({name: attributes.pop(name) for name in row.names})
        shapes = tuple(tensor.shape for tensor in tensors_on(values[-1]))
        if shapes != row.shapes:
            raise CheckpointError(
                f"the tensors that a {row.kind} keeps on ctx had shapes {[*map(list, row.shapes)]}, and have "
                f"{[*map(list, shapes)]}"
            )
    return values


def tensors_on(attributes: dict[str, Any]) -> list[torch.Tensor]:
    """Those of all attributes, in order."""
    return [tensor for contents in _Contents.of(attributes).values() for tensor in contents.tensors]


class _Carrier(torch.autograd.Function):
    """Saves a tensor as any operator would: what its hook gives back is a tensor with the same history."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tensor)
        return tensor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> None:
        raise AssertionError("nobody has the output")


class _Slot:
    """One tensor that was taken off: its version, and its place in the graph."""

    def __init__(self, tensor: torch.Tensor, ctx: Any) -> None:
        self._alias = version_alias(tensor)
        self._version = version_of(self._alias)
        local = inside(tensor)
        self._storage = StorageWeakRef(local.untyped_storage()) if is_plain(local) else None
        self.is_output = tensor.grad_fn is not None and tensor.grad_fn is ctx
        self._box: list[torch.Tensor] = []
        self._place: torch.Tensor | None = None
        if tensor.requires_grad and _is_given(tensor, ctx):
            box = self._box
            with torch.enable_grad(), saved_tensors_hooks(lambda _: box, list.pop):
                self._place = _Carrier.apply(tensor)

    def filled(self, made: torch.Tensor) -> torch.Tensor | None:
        """The tensor, from the second run's; None if the first one was written to since, and is another one."""
        if version_of(self._alias) != self._version and not self._is_memory_of(inside(made)):
            return None
        if self._place is not None:
            self._box.append(made.detach())
            node: Any = self._place.grad_fn
            tensor: torch.Tensor = node.saved_tensors[0]
            return tensor
        return made.detach() if self.is_output else made

    def _is_memory_of(self, made: torch.Tensor) -> bool:
        """Whether the second run's lies where the first one's did: a buffer, which plain autograd has as it is now."""
        then = self._storage
        return then is not None and not then.expired() and storage_key(made.untyped_storage()) == then.cdata


class PutBack:
    """The hooks around the backward of one Function. They belong to its `ctx`, and so refer to it weakly."""

    def __init__(
        self,
        ctx: Any,
        names: list[str],
        tensors: list[torch.Tensor],
        take: Callable[[], dict[str, Any]],
        refuse: Refuse,
    ) -> None:
        """`names`: of the attributes with `tensors`."""
        self._ctx = ref(ctx)
        self._names = names
        self._slots = [_Slot(tensor, ctx) for tensor in tensors]
        self._take = take
        self._refuse = refuse
        self._values: dict[str, tuple[Any, list[int]]] = {}
        """What was put on for the backward pass that is running, and the versions of its tensors."""

    def put_on(self, _: Any) -> None:
        """Before the Function's backward."""
        ctx = self._ctx()
        missing = [name for name in self._names if name not in vars(ctx)]
        if not missing:
            return
        made = self._take()
        found = _Contents.of(made)
        tensors = [tensor for contents in found.values() for tensor in contents.tensors]
        exchanged = {}
        for slot, tensor in zip(self._slots, tensors, strict=True):
            filled = slot.filled(tensor)
            if filled is None:
                raise self._refuse(
                    f"a {type(ctx).__name__} keeps a tensor of shape {list(tensor.shape)} on ctx that was "
                    "written to in place after the module had run"
                )
            if slot.is_output and torch.is_grad_enabled():
                raise self._refuse(
                    f"a {type(ctx).__name__} keeps its output on ctx, and its backward runs with create_graph=True"
                )
            exchanged[id(tensor)] = filled
        values = {name: found[name].exchanged(exchanged) for name in missing}
        vars(ctx).update(values)
        self._values = {name: (value, _versions(value)) for name, value in values.items()}

    def take_off(self, *_: Any) -> None:
        """After it. What backward has changed stays as it is, for the next backward pass through this graph."""
        attributes = vars(self._ctx())
        for name, (value, versions) in self._values.items():
            if attributes.get(name) is value and _versions(value) == versions:
                del attributes[name]
        self._values = {}


def _versions(value: Any) -> list[int]:
    return [version_of(tensor) for tensor in tensors_on({"": value})]
