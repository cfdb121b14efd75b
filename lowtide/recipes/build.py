"""Recipes: how to compute a node of an observed step again from its nearest nodes, parameters and constants.

What: for each node (a storage that autograd saves, or a retained input) walk back from the operator that made it,
through recorded operators, until every leaf is a node that exists before this one is saved, a parameter, a buffer, or
nothing at all (`arange`, `full`). Those operators, in the order in which they ran, are the recipe. Run again on the
same bytes they give the same bytes.

Why from the nearest nodes: each node is a decision of the solver, with a cost of its own. A recipe that went past one
would hide that decision, and the graph of nodes would not be sparse. Between two nodes there is one path only, since a
storage has one producer, so a recipe leaves nothing to choose.

In-place writes: versions tell what was read. A storage that an operator of the recipe makes may be written in place by
later ones, in the order in which that happened. No recipe starts from a node, parameter or buffer that the step writes
into after it was saved or read: later it holds other bytes than those that were read.

Shapes: views are not run again; a tensor is described by its size, stride and offset at a storage (one `as_strided`
where an operator of the recipe made it). So recipes hold for the shapes that were observed, and `bound` gives them
others.

Collectives: a recipe holds none, for all ranks of the group would have to run it, as often and in the same order.
`build_collective_recipes` makes those that do hold one, for rules that name them (mindformers/plan.py). Only functional
collectives are repeated: they name their group by a string, and return memory of their own.

Not covered: numbers that Python computes anew in each step and passes to an operator (a schedule); those that come out
of a tensor (`.item()`) are noticed, except through `tolist()` on the host.

`bound` gives a recipe in the sizes of this forward pass. It was written down in an observed step, with the sizes of
that step in it: in the arguments of operators (`arange(128)`), in how they look at storages (size, stride, offset). A
batch of another length runs the same operators with other sizes. `bound` takes those from the operators that ran in
this very forward pass, as the log of the proof (proof.py) has them, and gives a recipe that holds for it.

Why it is exact: nothing is derived. The proof has found, operator by operator, that this pass did what the recipe does:
the same operators, on the results of each other, from the same tensors at the same versions, with the same arguments
but for numbers and shapes. The bound recipe repeats them with those that they were given. So no expression in the
batch's sizes is needed, nor two shapes that agree on one: 8 may be a length, a number of heads, or both.

Cost: building is linear in the steps written; no recipe is longer than `MAX_STEPS`. `bound` takes some 10 us a step,
once for each set of sizes (runtime/recompute/recipe_graph.py keeps the last). Not covered by it: collectives, tensors
that are seen in another dtype, storages that are written in parts: what has those holds for one shape, or stays
(`Recipe.can_follow_sizes`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lowtide.core.recipe import Geometry, Recipe, RecipeInput, RecipeStep
from lowtide.recipes.graph import (
    WAIT,
    OpCall,
    Storage,
    Value,
    has_numbers,
    is_empty,
    is_random,
    is_repeatable,
    is_wait,
    leaves_bytes_unset,
    packet_name,
    pure_args,
    read_values,
    shows_all,
    written_values,
)
from lowtide.recipes.proof import FromInput, FromStep, OperatorLog, Proof, Repeated, Seen, Start
from lowtide.tensors.private import OpOverload
from lowtide.tensors.view import Shape

MAX_STEPS = 256
COLLECTIVE = "collective"
"""Why a node has no recipe that one rank could run alone."""

# Writers that change more than bytes.
_RESHAPERS = frozenset({"set_", "resize_", "resize_as_", "as_strided_"})
# Views that another dtype looks through: `as_strided` cannot write those.
_REINTERPRETS = frozenset({"view_as_real", "view_as_complex", "view"})


Target = tuple[Storage, int]
"""A node that may get a recipe, and that recipes of later nodes may start from: its storage, at this version."""


class _NoRecipeError(Exception):
    """Why there is none, in a short phrase."""


def build_recipes(calls: Sequence[OpCall], targets: Sequence[Target]) -> Mapping[int, Recipe | str]:
    """The recipe of each target, by `storage.index`; a short phrase where there is none.

    `calls` are the forward's operators; `targets` are in order of saving: a recipe starts from earlier targets only.
    """
    return _built(_Graph(calls, targets), list(enumerate(targets)))


def build_collective_recipes(
    calls: Sequence[OpCall], targets: Sequence[Target], recipes: Mapping[int, Recipe | str]
) -> Mapping[int, Recipe | str]:
    """The recipes with collectives of those targets that have none in `recipes` (from `build_recipes`) for that reason.

    By `storage.index`, as `build_recipes`. The name of a group is that of the rank that observed.
    """
    asked = [(rank, target) for rank, target in enumerate(targets) if recipes[target[0].index] == COLLECTIVE]
    return _built(_Graph(calls, targets), asked, with_collectives=True) if asked else {}


def _built(
    graph: _Graph, targets: Sequence[tuple[int, Target]], *, with_collectives: bool = False
) -> dict[int, Recipe | str]:
    """The recipe, or why there is none, of each target with its rank."""
    found: dict[int, Recipe | str] = {}
    for rank, (storage, version) in targets:
        try:
            found[storage.index] = _RecipeBuilder(graph, storage, version, rank, with_collectives).build()
        except _NoRecipeError as reason:
            found[storage.index] = str(reason)
    return found


class _Graph:
    """What all recipes of a step share: who wrote what, and where a walk stops."""

    def __init__(self, calls: Sequence[OpCall], targets: Sequence[Target]) -> None:
        self.targets: dict[int, tuple[int, int]] = {}
        """By index of their storage: rank, and version."""
        for rank, (storage, version) in enumerate(targets):
            self.targets.setdefault(storage.index, (rank, version))
        self.writers: dict[int, list[tuple[OpCall, Value]]] = {}
        self.reinterpretations: dict[tuple, OpCall] = {}
        self.item_reads: dict[str, int] = {}
        self.wait_seconds: dict[int, float] = {}
        for call in calls:
            self._note(call)

    def _note(self, call: OpCall) -> None:
        name = packet_name(call)
        if name == "_local_scalar_dense" and call.args[0].dtype is not torch.bool:
            # A bool can only choose a branch, which shows in the order of what is saved.
            # The module that read the number may have returned it: suspect is also what its parent does next.
            self.item_reads.setdefault(".".join(call.name.split(".")[:-2]), call.index)
        if is_wait(call) and isinstance(call.args[0], Value):
            self.wait_seconds.setdefault(call.args[0].storage.index, call.seconds)
        if name in _REINTERPRETS:
            output, source = call.outputs[0], call.args[0]
            if output is not None and isinstance(source, Value) and output.dtype != source.dtype:
                self.reinterpretations.setdefault((output.storage.index, _looks(output)), call)
        for value in written_values(call):
            self.writers.setdefault(value.storage.index, []).append((call, value))

    def maker(self, storage: Storage, version: int) -> OpCall:
        """The operator after which the storage had this version."""
        if storage.kind == "input":
            raise _NoRecipeError("input")
        if storage.kind != "made" or storage.producer is None:
            raise _NoRecipeError("unknown producer")
        if version == 0:
            if any(value.storage is storage for value in read_values(storage.producer)):
                raise _NoRecipeError("mutated")
            return storage.producer
        writers = self.writers.get(storage.index, [])
        if version > len(writers):
            raise _NoRecipeError("mutated")
        call, written = writers[version - 1]
        # One write through one argument that also comes out: nothing else can be said about in a straight line.
        if written.version != version - 1 or len(written_values(call)) != 1 or packet_name(call) in _RESHAPERS:
            raise _NoRecipeError("mutated")
        if not any(output is not None and output.storage is storage for output in call.outputs):
            raise _NoRecipeError("mutated")
        return call

    def why_empty(self, storage: Storage) -> str:
        """Why nothing is made from memory that was allocated without values."""
        is_drawn = any(is_random(call) for call, _ in self.writers.get(storage.index, ()))
        return "random" if is_drawn else "uninitialised"

    def reads_data(self, call: OpCall) -> bool:
        """Whether Python may have computed a number in this call's arguments from a tensor, in a module close by."""
        if not self.item_reads:
            return False
        path = call.name.split(".")[:-1]
        paths = (".".join(path[:length]) for length in range(len(path) + 1))
        return any(self.item_reads.get(above, call.index) < call.index for above in paths)


@dataclass(slots=True)
class _RecipeBuilder:
    """The recipe of one target."""

    graph: _Graph
    storage: Storage
    version: int
    rank: int
    with_collectives: bool = False
    calls: dict[int, OpCall] = field(default_factory=dict)
    inputs: dict[RecipeInput, int] = field(default_factory=dict)
    steps: list[RecipeStep] = field(default_factory=list)
    made: dict[int, tuple[int, int, Value]] = field(default_factory=dict)
    views: dict[tuple, int] = field(default_factory=dict)
    device: torch.device | None = None

    def build(self) -> Recipe:
        last, output = self._result()
        self._walk()
        if is_empty(self.storage):
            raise _NoRecipeError(self.graph.why_empty(self.storage))
        order = [self.calls[index] for index in sorted(self.calls)]
        assert order[-1] is last, "an operator that a recipe needs ran after the last of it"
        for call in order:
            self._write(call)
        return Recipe(
            inputs=tuple(self.inputs),
            steps=tuple(self.steps),
            output=output,
            seconds=sum(self._seconds(call) for call in order),
            transient_bytes=self._transient_bytes(order),
        )

    def _seconds(self, call: OpCall) -> float:
        made = call.outputs[0] if call.is_collective else None
        return call.seconds + (0.0 if made is None else self.graph.wait_seconds.get(made.storage.index, 0.0))

    def _result(self) -> tuple[OpCall, int]:
        """The operator that completed the node, and which of its outputs that is."""
        storage = self.storage
        call = self.graph.maker(storage, self.version)
        if not shows_all(storage):
            raise _NoRecipeError("uninitialised")
        for output, value in enumerate(call.outputs):
            if value is not None and value.storage is storage:
                # Only what is used must be plain and on one device: attention kernels put seeds elsewhere.
                self._check_plain(value)
                return call, output
        raise _NoRecipeError("unknown producer")

    def _walk(self) -> None:
        """Collect the operators that must run again."""
        storage, version = self.storage, self.version
        if storage.num_writes > version:
            raise _NoRecipeError("mutated")
        needed, seen = [(storage, version)], {(storage.index, version)}
        while needed:
            call = self.graph.maker(*needed.pop())
            if call.index in self.calls:
                continue
            self._check(call)
            self.calls[call.index] = call
            if len(self.calls) > MAX_STEPS:
                raise _NoRecipeError("too long")
            for value in read_values(call):
                if self._start(value) is not None:
                    continue
                if is_empty(value.storage):
                    raise _NoRecipeError(self.graph.why_empty(value.storage))
                key = (value.storage.index, value.version)
                if key not in seen:
                    seen.add(key)
                    needed.append((value.storage, value.version))

    def _check(self, call: OpCall) -> None:
        if is_random(call):
            raise _NoRecipeError("random")
        if leaves_bytes_unset(call):
            raise _NoRecipeError("uninitialised")
        if call.is_collective and not self.with_collectives:
            raise _NoRecipeError(COLLECTIVE)
        if not isinstance(call.func, OpOverload):
            raise _NoRecipeError("unknown producer")
        if call.is_collective and not is_repeatable(call):
            name = f"{call.func.namespace}.{packet_name(call)}"
            raise _NoRecipeError(f"{COLLECTIVE} {name}, which is not a functional one")
        for value in read_values(call):
            self._check_plain(value)

    def _check_plain(self, value: Value) -> None:
        if not value.is_plain:
            raise _NoRecipeError("not a plain tensor")
        if self.device not in (None, value.device):
            raise _NoRecipeError("two devices")
        self.device = value.device

    def _start(self, value: Value) -> RecipeInput | None:
        """The input of the recipe that this value is, or None if it must be made."""
        storage = value.storage
        if storage.kind in ("parameter", "buffer"):
            if storage.num_writes or storage.index in self.graph.writers:
                raise _NoRecipeError("mutated")
            return RecipeInput(kind=storage.kind, name=storage.name, geometry=_geometry(value))
        rank, version = self.graph.targets.get(storage.index, (self.rank, self.version))
        if rank >= self.rank or value.version != version or storage.num_writes != version:
            return None
        return RecipeInput(kind="node", name=storage.name, geometry=_geometry(value))

    def _write(self, call: OpCall) -> None:
        """One operator as a step, after the views that it needs of what earlier steps made."""
        step = RecipeStep(
            op=str(call.func),
            args=tuple(self._encode(arg) for arg in pure_args(call)),
            kwargs={key: self._encode(arg) for key, arg in call.kwargs.items()},
        )
        if self.graph.reads_data(call) and has_numbers(call):
            raise _NoRecipeError("number read from data")
        self.steps.append(step)
        if call.is_collective:
            self.steps.append(RecipeStep(op=WAIT, args=({"step": len(self.steps) - 1, "output": 0},)))
        for output, value in enumerate(call.outputs):
            if value is not None and value.storage.producer is call:
                self.made.setdefault(value.storage.index, (len(self.steps) - 1, output, value))

    def _encode(self, arg: Any) -> Any:
        if isinstance(arg, Value):
            return self._reference(arg)
        if isinstance(arg, (list, tuple)):
            return [self._encode(item) for item in arg]
        return encode_constant(arg)

    def _reference(self, value: Value) -> dict[str, int]:
        start = self._start(value)
        if start is None:
            return self._view(value)
        return {"input": self.inputs.setdefault(start, len(self.inputs))}

    def _view(self, value: Value) -> dict[str, int]:
        """What a step made, as the operator saw it."""
        key = (value.storage.index, _looks(value))
        if key in self.views:
            return {"step": self.views[key], "output": 0}
        step, output, base = self.made[value.storage.index]
        if _looks(value) == _looks(base):
            return {"step": step, "output": output}
        if value.dtype == base.dtype:
            args = ({"step": step, "output": output}, [*value.size], [*value.stride], value.offset)
            self.steps.append(RecipeStep(op="aten.as_strided.default", args=args))
        else:
            self._reinterpret(key)
        self.views[key] = len(self.steps) - 1
        return {"step": self.views[key], "output": 0}

    def _reinterpret(self, key: tuple) -> None:
        call = self.graph.reinterpretations.get(key)
        if call is None:
            raise _NoRecipeError("reinterpreted bytes")
        source = self._view(call.args[0])
        self.steps.append(RecipeStep(op=str(call.func), args=(source, *map(encode_constant, call.args[1:]))))

    def _transient_bytes(self, order: Sequence[OpCall]) -> int:
        """Most bytes at once: each storage from the operator that makes it to the last that reads it."""
        last = {value.storage.index: call.index for call in order for value in read_values(call)}
        last[self.storage.index] = order[-1].index + 1
        peak, alive = 0, dict[int, int]()
        for call in order:
            made = {o.storage.index: o.storage for o in call.outputs if o is not None and o.storage.producer is call}
            alive.update({index: storage.nbytes for index, storage in made.items()})
            peak = max(peak, sum(alive.values()) + call.temporary_bytes)
            alive = {index: nbytes for index, nbytes in alive.items() if last.get(index, -1) > call.index}
        return peak


def _looks(value: Value) -> Shape:
    return Shape(value.size, value.stride, value.offset, value.dtype)


def _name(thing: torch.dtype | torch.layout | torch.memory_format) -> str:
    return str(thing).removeprefix("torch.")


def _geometry(value: Value) -> Geometry:
    return Geometry(size=value.size, stride=value.stride, offset=value.offset, dtype=_name(value.dtype))


def encode_constant(arg: Any) -> Any:
    """An argument that is no tensor, as a recipe writes it (core/recipe.py)."""
    if isinstance(arg, float) and not math.isfinite(arg):
        return {"float": str(arg)}
    if arg is None or type(arg) in (bool, int, float, str):
        return arg
    if isinstance(arg, (list, tuple)):
        return [encode_constant(item) for item in arg]
    if isinstance(arg, torch.device):
        return {"device": arg.type}
    for kind, key in ((torch.dtype, "dtype"), (torch.layout, "layout"), (torch.memory_format, "memory_format")):
        if isinstance(arg, kind):
            return {key: _name(arg)}
    raise _NoRecipeError("argument that cannot be written")


def bound(recipe: Recipe, proof: Proof, log: OperatorLog, site: Start, starts: Sequence[Start]) -> Recipe | str:
    """The recipe as this forward pass did it, or where it parts from it, in words.

    `proof` is that of `recipe`; `site` is what it is to make, `starts` what it would start from, in the order of its
    inputs (their shapes do not matter). Inputs of the result may name one start several times, in several shapes.
    """
    assert recipe.can_follow_sizes
    repeated = proof.repeated(log, site, starts)
    return repeated if isinstance(repeated, str) else _Binder(recipe).bind(repeated)


class _Binder:
    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._inputs: dict[RecipeInput, int] = {}
        self._steps: list[RecipeStep] = []
        self._placed: dict[int, tuple[int, list[Seen | None]]] = {}
        """By step of the recipe: which step it is here, and what it gave out."""
        self._views: dict[tuple[int, int, tuple], int] = {}

    def bind(self, repeated: Sequence[Repeated]) -> Recipe | str:
        try:
            for step in repeated:
                self._add(step)
        except _NoRecipeError as reason:
            return str(reason)
        return dataclasses.replace(self._recipe, inputs=tuple(self._inputs), steps=tuple(self._steps))

    def _add(self, step: Repeated) -> None:
        (args, kwargs), (ran_args, ran_kwargs) = step.planned, step.ran
        written = RecipeStep(
            op=self._recipe.steps[step.place].op,
            args=tuple(self._argument(*pair) for pair in zip(args, ran_args, strict=True)),
            kwargs={key: self._argument(planned, ran_kwargs[key]) for key, planned in kwargs.items()},
        )
        self._steps.append(written)
        self._placed[step.place] = (len(self._steps) - 1, step.outputs)

    def _argument(self, planned: Any, actual: Any) -> Any:
        if isinstance(planned, FromInput):
            start = self._recipe.inputs[planned.index]
            geometry = _seen_geometry(actual)
            if geometry.dtype != start.geometry.dtype:
                raise _NoRecipeError("read a tensor of another dtype")
            entry = dataclasses.replace(start, geometry=geometry)
            return {"input": self._inputs.setdefault(entry, len(self._inputs))}
        if isinstance(planned, FromStep):
            return self._made(planned, actual)
        if isinstance(planned, list):
            if any(isinstance(part, (FromInput, FromStep, list)) for part in planned):
                return [self._argument(*pair) for pair in zip(planned, actual, strict=True)]
            return encode_constant(actual)
        return planned if isinstance(planned, dict) else encode_constant(actual)

    def _made(self, planned: FromStep, actual: Seen) -> dict[str, int]:
        step, outputs = self._placed[planned.step]
        given_out = outputs[planned.output]
        assert given_out is not None, "the proof has compared it"
        if actual.shape == given_out.shape:
            return {"step": step, "output": planned.output}
        look = Shape(*actual.shape)
        if look.dtype != given_out.shape[3]:
            raise _NoRecipeError("read a tensor of another dtype")
        key = (step, planned.output, tuple(look))
        if key not in self._views:
            args = ({"step": step, "output": planned.output}, [*look.size], [*look.stride], look.offset)
            self._steps.append(RecipeStep(op="aten.as_strided.default", args=args))
            self._views[key] = len(self._steps) - 1
        return {"step": self._views[key], "output": 0}


def _seen_geometry(seen: Seen) -> Geometry:
    size, stride, offset, dtype = seen.shape
    return Geometry(size=tuple(size), stride=tuple(stride), offset=int(offset), dtype=str(dtype).removeprefix("torch."))
