"""Proof: whether a recipe repeats what this very forward pass did.

What: a recipe was written in an observed step. A later step may have computed the site from another frozen weight,
another row of a buffer, with another number or another operator; shapes and autograd's graph would look the same. So
the operators themselves are compared. `OperatorLog` is a dispatch mode around one forward pass. Of each operator that
recipes hold, it records the arguments and the results. A `Proof`, made once from each recipe, goes from the operator
that made the site back to the inputs of the recipe. On the way it compares each operator with the recipe's step: the
same operator, the same numbers, the same operands (by storage and version), viewed in the same way (size, stride,
offset, dtype). `Proof.mismatch` names the first difference: `aten.div.Tensor got 2.0 in place of 1.0`.

Why this proves it: an operator gives the same bytes for the same bytes (recipes hold no random operators), and all that
it reads is in its arguments. The exceptions are switches of the process, such as the precision of matmuls. They are
compared where recipes run (runtime/recompute/recipe_sources.py), and last of all the fingerprint of the result is
compared (runtime/recompute/fingerprint.py).

How storages are told apart: by address, and the log holds a weak reference to each storage that it names, so that no
other one can have that address while the log lives. The log holds no tensor.

Cost: 10 to 20 us in all for each operator of the forward pass; the dispatch mode alone is 4 us.
Not covered: tensors that are not plain (views with a conjugate or negative bit, subclasses): no recipe holds them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from lowtide.core.recipe import Recipe
from lowtide.recipes.execute import find_operator
from lowtide.recipes.graph import WAIT, has_statistics, pure_args
from lowtide.tensors.compiled import CompiledMode
from lowtide.tensors.kinds import is_plain
from lowtide.tensors.private import (
    base_of,
    is_view,
    schema_of,
    storage_key,
    tree_leaves,
    version_of,
)
from lowtide.tensors.view import Shape, may_overlap, part_of
from lowtide.tensors.wrappers import is_desugared

_AS_STRIDED = "aten.as_strided.default"


class Seen(tuple):
    """A tensor that an operator was given or gave out, without the tensor: key, version, and the parts of its `Shape`.

    A tuple, since some thousand are made in each forward pass, and Python makes nothing else as fast.
    """

    __slots__ = ()
    key = property(itemgetter(0))
    """Of its storage."""
    version = property(itemgetter(1))
    shape = property(itemgetter(2))
    """Equal to a `Shape` of the same parts."""


@dataclass(slots=True, eq=False)
class Ran:
    """One operator that ran. Tensors among `args`, `kwargs` and `outputs` are `Seen`; None where not plain."""

    func: Any
    args: list[Any]
    kwargs: dict[str, Any] = field(default_factory=dict)
    outputs: list[Seen | None] = field(default_factory=list)


class Start(NamedTuple):
    """What a recipe starts from, in this forward pass: `name` as users know it, and where it is."""

    name: str
    key: int
    version: int
    shape: Shape


class OperatorLog(CompiledMode):
    """Notes what operators of some kinds did, while it is active. One a forward pass.

    Operators of these kinds give out new storages or what they write into; views are not among them.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Else torch wraps each call, for 1 us. Nothing compiles here: compiled parts run without this mode.
        return False

    def __init__(self, kinds: frozenset) -> None:
        super().__init__()
        # By identity: torch's operators are asked for their hash in Python.
        self._written = {id(func): _written_positions(func) for func in kinds}
        """Of each operator to be noted, the positions of the arguments that it writes into."""
        self._makers: dict[int, dict[int, Ran]] = {}
        """By storage, then by the version that the operator left it at. The first one made the storage."""
        self._part_makers: dict[int, dict[Shape, dict[int, Ran]]] = {}
        """The same for parts of a storage that have a version counter each, as the gates of a GRU cell have."""
        self._pins: list[StorageWeakRef] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if types and is_desugared(types):
            return NotImplemented
        written = self._written.get(id(func))
        if written is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        # Before it runs: an operator that works in place changes what it was given.
        ran = Ran(func, [_frozen(arg) for arg in args])
        if kwargs:
            ran.kwargs = {key: _frozen(arg) for key, arg in kwargs.items()}
            out = func(*args, **kwargs)
        else:
            out = func(*args)
        self._note(ran, args, written, out)
        return out

    def _note(self, ran: Ran, args: tuple, written: tuple[int, ...], out: Any) -> None:
        given = []
        for position in written:
            seen = ran.args[position] if position < len(ran.args) else None
            if isinstance(seen, Seen):
                given.append(seen.key)
                makers = self._makers_of(seen.key, args[position])
                if part_of(args[position]) is not None:
                    owner = base_of(args[position]) if is_view(args[position]) else args[position]
                    assert owner is not None
                    makers = self._part_makers.setdefault(seen.key, {}).setdefault(Shape.of(owner), {})
                # Autograd counts the new version only after the operator has returned to it.
                makers[seen.version + 1] = ran
        for leaf in (out,) if isinstance(out, torch.Tensor) else tree_leaves(out):
            seen = _seen(leaf) if isinstance(leaf, torch.Tensor) else None
            ran.outputs.append(seen)
            if seen is not None and seen.key not in given:
                self._makers_of(seen.key, leaf).setdefault(seen.version, ran)

    def _makers_of(self, key: int, tensor: torch.Tensor) -> dict[int, Ran]:
        known = self._makers.get(key)
        if known is None:
            known = self._makers[key] = {}
            self._pins.append(StorageWeakRef(tensor.untyped_storage()))
        return known

    def creator(self, key: int) -> Ran | None:
        """The operator that made a storage; None where none of these kinds did."""
        return next(iter(self._makers.get(key, {}).values()), None)

    def is_in_parts(self, key: int) -> bool:
        """Whether parts of a storage with counters of their own were written to."""
        return key in self._part_makers

    def maker(self, key: int, version: int, shape: tuple | None) -> Ran | None:
        """The operator that left a storage at this version; of one in parts, where a tensor of this shape sees it. None
        where it was none of these kinds, and where that cannot be told."""
        makers, parts = self._makers.get(key, {}), self._part_makers.get(key)
        if parts is None:
            return makers.get(version)
        if version == 0 and len(makers) == 1:
            return makers.get(0)  # nobody wrote where the reader looks, nor to all of it before it was cut
        found = [] if shape is None else [of for part, of in parts.items() if may_overlap(part, Shape(*shape))]
        return found[0].get(version) if len(found) == 1 else None


def _seen(tensor: torch.Tensor) -> Seen | None:
    if not is_plain(tensor) or tensor.is_conj() or tensor.is_neg() or tensor.is_inference():
        return None  # of an inference tensor nothing is saved for backward, and it counts no versions
    shape = (tensor.size(), tensor.stride(), tensor.storage_offset(), tensor.dtype)
    return Seen((storage_key(tensor.untyped_storage()), version_of(tensor), shape))


def _frozen(arg: Any) -> Any:
    if isinstance(arg, torch.Tensor):
        return _seen(arg)
    return [_frozen(part) for part in arg] if isinstance(arg, (list, tuple)) else arg


@functools.cache
def _written_positions(func: Any) -> tuple[int, ...]:
    """Positions of the arguments that an operator writes into."""
    if not schema_of(func).is_mutable:
        return ()
    found = enumerate(schema_of(func).arguments)
    return tuple(position for position, arg in found if arg.alias_info is not None and arg.alias_info.is_write)


# -- a recipe, made ready to be compared ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FromInput:
    """A tensor among a step's arguments: the `index`-th that the recipe starts from."""

    index: int


@dataclass(frozen=True, slots=True)
class FromStep:
    """A tensor that an earlier step made."""

    step: int
    output: int
    maker: int
    """The last step that wrote to it before it is read here."""
    maker_here: int
    """The last one that wrote where it is read here."""
    views: tuple[int, ...] = ()
    """Steps that only look at it in another way, in their order."""


@dataclass(slots=True)
class _ProofStep:
    func: Any
    args: list[Any]
    kwargs: dict[str, Any]
    has_statistics: bool
    """Some of its arguments are no input of a recipe."""
    is_strided: bool
    """It looks at what an earlier step made, in another size, stride and offset."""


class Repeated(NamedTuple):
    """A step of a recipe, and the operator of a forward pass that did the same."""

    place: int
    """Of the step."""
    planned: tuple[list[Any], dict[str, Any]]
    """Its arguments; a tensor is a `FromInput` or a `FromStep`."""
    ran: tuple[Sequence[Any], dict[str, Any]]
    """What the operator got in their places; a tensor is a `Seen`."""
    outputs: list[Seen | None]


@dataclass(slots=True)
class Proof:
    """A recipe, made ready to be compared with what ran."""

    kinds: frozenset = frozenset()
    """Operators that the log must note for it."""
    _steps: list[_ProofStep] = field(default_factory=list)
    _views: dict[int, FromStep] = field(default_factory=dict)
    """The steps that only look in another way, and what they look at."""
    _writers: dict[tuple[int, int], list[tuple[int, Shape | None]]] = field(default_factory=dict)
    """By step and output: the steps that write to it in place, and where, if that is known."""
    _target: FromStep | None = None

    def mismatch(self, log: OperatorLog, site: Start, starts: Sequence[Start]) -> str:
        """Where this forward pass parts from the recipe, in words; empty where it does not.

        `site` is what the recipe is to make, `starts` what it would start from, in the order of its inputs.
        """
        assert self._target is not None
        return _Comparison(self, log, starts).run(self._target, site)

    def repeated(self, log: OperatorLog, site: Start, starts: Sequence[Start]) -> str | list[Repeated]:
        """As `mismatch`, but numbers and shapes may be others than in the recipe. Where nothing else differs: the steps
        with what this forward pass gave each of them, without those that only look in another way."""
        assert self._target is not None
        comparison = _Comparison(self, log, starts, follows_sizes=True)
        return comparison.run(self._target, site) or comparison.repeated()


def proof_of(recipe: Recipe) -> Proof:
    """The recipe, ready to be compared. Raises ConfigError if it names an operator that this torch does not have."""
    proof = Proof()
    for index, step in enumerate(recipe.steps):
        func = find_operator(step.op)
        args = [_template(proof, arg) for arg in step.args]
        kwargs = {key: _template(proof, arg) for key, arg in step.kwargs.items()}
        compiled = _ProofStep(func, args, kwargs, has_statistics(func), step.op == _AS_STRIDED)
        proof._steps.append(compiled)
        if step.op == WAIT or _is_view(func):
            base = args[0]
            assert isinstance(base, FromStep), "a recipe looks in another way only at what it made"
            proof._views[index] = base
        else:
            for position in _written_positions(func):
                base = args[position] if position < len(args) else None
                if isinstance(base, FromStep):
                    proof._writers.setdefault((base.step, base.output), []).append((index, _region(proof, base.views)))
    proof._target = _target_of(proof, recipe)
    proof.kinds = frozenset(step.func for i, step in enumerate(proof._steps) if i not in proof._views)
    return proof


def _target_of(proof: Proof, recipe: Recipe) -> FromStep:
    last = len(recipe.steps) - 1
    written = _written_positions(proof._steps[last].func) if last not in proof._views else ()
    if written:
        base = proof._steps[last].args[written[0]]
        assert isinstance(base, FromStep)
        return FromStep(base.step, base.output, last, last)
    return _made(proof, last, recipe.output)


def _template(proof: Proof, arg: Any) -> Any:
    if isinstance(arg, (list, tuple)):
        return [_template(proof, part) for part in arg]
    if isinstance(arg, dict) and "input" in arg:
        return FromInput(arg["input"])
    if isinstance(arg, dict) and "step" in arg:
        return _made(proof, arg["step"], arg["output"])
    return arg


def _made(proof: Proof, step: int, output: int) -> FromStep:
    views: tuple[int, ...] = ()
    if step in proof._views:
        base = proof._views[step]
        # What waits for a collective gives the same tensor, only its bytes are there.
        views = base.views if str(proof._steps[step].func) == WAIT else (*base.views, step)
        step, output = base.step, base.output
    look = _region(proof, views)
    maker = maker_here = step
    for index, where in proof._writers.get((step, output), ()):
        maker = index
        if look is None or where is None or may_overlap(where, look):
            maker_here = index
    return FromStep(step, output, maker, maker_here, views)


def _region(proof: Proof, views: Sequence[int]) -> Shape | None:
    """Where views look; None for all of a storage, and where a view of another dtype is among them. The dtype is any
    one: a storage of one recipe's step is seen in one."""
    if not views or not all(proof._steps[index].is_strided for index in views):
        return None
    size, stride, offset = proof._steps[views[-1]].args[1:]
    return Shape(tuple(size), tuple(stride), offset, torch.uint8)


def _is_view(func: Any) -> bool:
    returns = schema_of(func).returns
    return not schema_of(func).is_mutable and bool(returns) and returns[0].alias_info is not None


class _Comparison:
    """One recipe against one forward pass."""

    def __init__(self, proof: Proof, log: OperatorLog, starts: Sequence[Start], *, follows_sizes: bool = False) -> None:
        self._follows_sizes = follows_sizes
        self._proof = proof
        self._log = log
        self._starts = starts
        self._matched: dict[int, Ran] = {}
        self._waiting: list[int] = []

    def run(self, target: FromStep, site: Start) -> str:
        found = self._meet(target, site.key, site.version, None)
        while self._waiting and not found:
            index = self._waiting.pop()
            found = self._compare_step(self._proof._steps[index], self._matched[index])
        return found

    def repeated(self) -> str | list[Repeated]:
        """The steps beside what ran, after `run` found no difference."""
        found = []
        for index, step in enumerate(self._proof._steps):
            if index not in self._proof._views:
                ran = self._matched.get(index)
                if ran is None:
                    return f"{step.func} was not found again"
                found.append(Repeated(index, (step.args, step.kwargs), (_args(step, ran), ran.kwargs), ran.outputs))
        return found

    def _compare_step(self, step: _ProofStep, ran: Ran) -> str:
        if ran.func is not step.func:
            return f"{ran.func} ran in place of {step.func}"
        args = _args(step, ran)
        if len(args) != len(step.args) or ran.kwargs.keys() != step.kwargs.keys():
            return f"{step.func} got other arguments"
        for planned, actual in zip(step.args, args, strict=True):
            found = self._compare(planned, actual)
            if found:
                return f"{step.func} {found}"
        for key, planned in step.kwargs.items():
            found = self._compare(planned, ran.kwargs[key])
            if found:
                return f"{step.func} {found}"
        return ""

    def _compare(self, planned: Any, actual: Any) -> str:
        if self._follows_sizes and is_size(planned) and is_size(actual, planned):
            return ""
        if isinstance(planned, (FromInput, FromStep)):
            if not isinstance(actual, Seen):
                return "read something that is not a plain tensor"
            if isinstance(planned, FromInput):
                return self._given(planned, actual)
            return self._meet(planned, actual.key, actual.version, actual)
        if isinstance(planned, list):
            if not isinstance(actual, (list, tuple)) or len(actual) != len(planned):
                return f"got {_shown(actual)} in place of {_shown(planned)}"
            return next(filter(None, (self._compare(*pair) for pair in zip(planned, actual, strict=True))), "")
        return "" if is_same_constant(planned, actual) else f"got {_shown(actual)} in place of {_shown(planned)}"

    def _given(self, planned: FromInput, actual: Seen) -> str:
        start = self._starts[planned.index]
        if actual.key != start.key:
            return f"read another tensor than '{start.name}'"
        if actual.version != start.version:
            return f"read '{start.name}' before or after it was written to"
        is_same = self._follows_sizes or actual.shape == start.shape
        return "" if is_same else f"read '{start.name}' in another shape"

    def _meet(self, planned: FromStep, key: int, version: int, actual: Seen | None) -> str:
        first = self._log.creator(key)
        maker = self._log.maker(key, version, None if actual is None else actual.shape)
        # A part with a counter of its own knows nothing of what was written to the others.
        wanted_index = planned.maker_here if self._log.is_in_parts(key) else planned.maker
        wanted = self._proof._steps[wanted_index].func
        if first is None or maker is None:
            return f"started from what another operator than {wanted} made"
        output = first.outputs[planned.output] if planned.output < len(first.outputs) else None
        if output is None or output.key != key:
            return f"read another output of {self._proof._steps[planned.step].func}"
        if self._follows_sizes:
            if self._log.is_in_parts(key):
                return "wrote to parts of a storage, in other sizes"
        elif actual is not None and actual.shape != self._look(planned.views, output.shape):
            return f"read the result of {self._proof._steps[planned.step].func} in another shape"
        return self._pair(planned.step, first) or self._pair(wanted_index, maker)

    def _look(self, views: Sequence[int], shape: tuple) -> tuple:
        if not views:
            return shape
        look = Shape(*shape)
        for index in views:
            view = self._proof._steps[index]
            if view.is_strided:
                size, stride, offset = view.args[1:]
                look = Shape(tuple(size), tuple(stride), offset, look.dtype)
            else:
                look = _reinterpreted(view.func, view.args[1:], look)
        return look

    def _pair(self, index: int, ran: Ran) -> str:
        known = self._matched.get(index)
        if known is None:
            self._matched[index] = ran
            self._waiting.append(index)
            return ""
        return "" if known is ran else f"read the result of another {ran.func} than the recipe"


def _args(step: _ProofStep, ran: Ran) -> Sequence[Any]:
    return pure_args(ran) if step.has_statistics else ran.args  # type: ignore[arg-type]


def is_size(value: Any, like: Any = None) -> bool:
    """Whether an argument is a number, or a list of whole ones; of the type of `like`, if that is given."""
    if isinstance(value, (list, tuple)):
        return (like is None or isinstance(like, (list, tuple))) and all(type(part) is int for part in value)
    return type(value) in (int, float) and (like is None or type(like) is type(value))


def _reinterpreted(func: Any, args: Sequence[Any], look: Shape) -> Shape:
    """What a view of another dtype makes of a tensor."""
    given = torch.empty_strided(look.size, look.stride, dtype=look.dtype, device="meta")
    decoded = [getattr(torch, arg["dtype"]) if isinstance(arg, dict) else arg for arg in args]
    seen = func(given, *decoded)
    offset = look.offset * look.dtype.itemsize // seen.dtype.itemsize
    return Shape(tuple(seen.size()), seen.stride(), offset, seen.dtype)


def is_same_constant(planned: Any, actual: Any) -> bool:
    """Whether an argument that is no tensor is the one that a recipe has written down (core/profile.py says how)."""
    if isinstance(planned, dict):
        ((kind, value),) = planned.items()
        if kind == "device":
            return isinstance(actual, torch.device) and actual.type == value
        if kind == "float":
            return type(actual) is float and str(actual) == value
        return str(actual) == f"torch.{value}"
    # Zero and minus zero are equal, and make other bits.
    return type(planned) is type(actual) and planned == actual and (planned != 0 or repr(planned) == repr(actual))


def _shown(constant: Any) -> str:
    if isinstance(constant, dict):
        return str(next(iter(constant.values())))
    return "a tensor" if isinstance(constant, Seen) else str(constant)
