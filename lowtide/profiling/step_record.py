"""One step on record: what it told, before anything is made of it, and what all that watch it share meanwhile.

Told: a `Trace` has operators, storages, nodes and layers, as plain records that hold no tensor; build_profile.py reads
it.
Meanwhile: `Operators` are the columns of the trace, which grow, and autograd's number of each operator. `StepState` has
the storages, the module that is running, and what an operator was given and gave out, in records. `StepRecorder` sees
operators and compiled parts (step_recorder.py), `ModuleWatch` modules (module_watch.py), `SavedTensorRecorder` what
autograd saves (saved_tensors.py); each writes here.

Cost: a few appends an operator. Not covered: what is made of it (build_profile.py).
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from operator import itemgetter
from typing import Any

import torch

from lowtide.core.recipe import Codec, Recipe, RetainedInput
from lowtide.profiling.op_timer import Clock
from lowtide.profiling.producer_names import COMPILED
from lowtide.profiling.storages import NOWHERE, Storages, value_of
from lowtide.recipes.graph import OpCall, Storage, Value
from lowtide.tensors.compiled import without
from lowtide.tensors.kinds import is_plain_or_fake
from lowtide.tensors.private import (
    begin_counting_allocations,
    current_autograd_node,
    end_counting_allocations,
    next_sequence_number,
    sequence_number,
)
from lowtide.tensors.view import Shape

OUTSIDE = "outside"
"""Path of what runs outside of the model's forward."""


# -- what a step told -------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class NodeRecord:
    """A storage that a plan may decide about, as it was first saved or caught."""

    storage: Storage
    name: str
    version: int
    saved: int
    shape: Shape
    first_sequence: int = 0
    last_sequence: int = 0
    reads: list[int] = field(default_factory=list)
    release: int = 0
    retained_input: RetainedInput | None = None
    is_given: bool = False
    """On record only because a layer was given it: no recipe starts from it, and none makes it."""
    codec: Codec | None = None
    """The smallest form that holds its bytes."""
    gathered: frozenset[int] = frozenset()
    """Indices of the gathered parameters that were there whenever it was saved or read."""
    recipes: tuple[Recipe | str, Recipe | str | None] = ("unknown producer", None)
    """How one rank alone makes it again, or why not; and how all ranks together do, where one alone cannot because of a
    collective."""


@dataclass(slots=True, kw_only=True)
class Span:
    """One call of a layer: a half-open range of forward operators, and autograd's number when it was over."""

    name: str
    first_op: int
    end_op: int = 0
    enough_op: int = 0
    """The first operator from which on nothing is saved."""
    end_sequence: int = 0
    inputs: tuple[str, ...] = ()
    """Names of the nodes that the call was given: what a second run of the layer starts from."""
    why_not: str = ""
    """Why the call cannot be run again; empty if it can."""
    given: dict[int, int] = field(default_factory=dict)
    """While it is watched: the records of what it was given, by index, and how often each had been written."""
    versions: list[int] = field(default_factory=list)
    """The same: how often its parameters had been written to before."""
    objects: list[Any] = field(default_factory=list)
    """The same: what it was given beside tensors."""


@dataclass(slots=True, kw_only=True)
class Operators:
    """The operators of a step in the order in which they ran: one entry for each in every column. `clock` says how long
    each took, once the step is over."""

    clock: Clock
    calls: list[OpCall] = field(default_factory=list)
    """The forward's alone."""
    names: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    """Once the step is over."""
    num_forward: int = -1
    """-1: the forward is not over."""
    start_sequence: int = 0
    """Autograd's sequence number at the start of the model's forward."""
    temporary: list[tuple[int, int]] = field(default_factory=list)
    """(operator, bytes): what an operator, or a compiled part, holds inside of it at its worst moment beyond what it
    gives out."""
    _marks: list[Any] = field(default_factory=list)
    _end_sequence: int = 0
    _sequence: int = -1
    """Number of the autograd node that the last backward operator ran for; -1 in forward."""
    _nodes: list[tuple[int, str]] = field(default_factory=list)
    """Autograd's number of the last node that an operator of the forward made, and the operator's name."""

    @property
    def count(self) -> int:
        """Operators that have run; also the index of the next."""
        return len(self.names)

    @property
    def is_backward(self) -> bool:
        """The forward is over."""
        return self.num_forward >= 0

    def begin_forward(self) -> None:
        self.start_sequence = next_sequence_number()

    def begin_backward(self) -> None:
        self.num_forward = self.count
        self._end_sequence = next_sequence_number()

    def add(self, call: OpCall, mark: Any, sequence: int) -> None:
        """An operator has run. `sequence`: number of the autograd node that was running; -1 in forward."""
        self._sequence = sequence
        if not self.is_backward:
            self.calls.append(call)
        self._marks.append(self.clock.seconds(mark, call))
        self.names.append(call.name)

    def add_compiled(self, call: OpCall, mark: Any, sequence: int) -> None:
        """A compiled part has run, forward or backward, as one operator. `sequence`: autograd's number of it."""
        if self.is_backward:
            self.add(call, mark, self._known(sequence))
        else:
            self._note_node(sequence, call.name)
            self.add(call, mark, -1)

    def note_node(self, name: str) -> None:
        """The node of the operator that is running has been made: it has the number before the next one."""
        number = next_sequence_number() - 1
        if number >= self.start_sequence:
            self._note_node(number, name)

    def _note_node(self, number: int, name: str) -> None:
        if not self._nodes or number > self._nodes[-1][0]:
            self._nodes.append((number, name))

    def backward_now(self) -> tuple[int, str]:
        """The number and the name of the backward operator that is running."""
        node = current_autograd_node()
        number = self._sequence if node is None else self._known(sequence_number(node))
        position = bisect.bisect_right(self._nodes, number, key=itemgetter(0)) - 1
        return number, f"{self._nodes[position][1] if position >= 0 else OUTSIDE}:backward"

    def _known(self, number: int) -> int:
        """Gradient accumulators, and what a recomputation made in backward, have numbers beyond the forward's: they
        count to what ran before them."""
        return number if self.start_sequence <= number < self._end_sequence else self._sequence

    def finish(self) -> None:
        """The step is over: the clock says how long each operator took."""
        self.seconds = self.clock.settle(self._marks)
        self._marks.clear()


@dataclass(slots=True, kw_only=True)
class Trace:
    """Everything that one step told."""

    ops: Operators
    storages: list[Storage]
    off_device: set[int]
    """Indices of storages that are not on the device that counts."""
    nodes: list[NodeRecord]
    """Nodes in the order in which they were saved."""
    never_read: list[tuple[int, int]]
    """Storages that no plan can move although they were observed as nodes (backward never opened them, or they are
    written in parts), and the operator before which autograd let go of each."""
    staying: dict[int, str]
    """Indices of storages that autograd saved and no plan can move, and why."""
    ambiguous: set[str]
    """Names of nodes that another storage has too: recipes may not start from them."""
    gradients: set[int]
    """Indices of the storages of the parameters' gradients."""
    hidden: list[Storage]
    spans: list[Span]
    gathered: list[tuple[int, int, int]] = field(default_factory=list)
    """(start, end, bytes): half-open ranges of operators in which a sharded parameter was there as a whole."""


# -- while it is watched ----------------------------------------------------------------------------------------------


class StepState:
    """See the module's text. `mode` is the dispatch mode that sees the operators; `next_name(op)` gives the name of
    what the next `op` of the module that is running makes."""

    def __init__(self, device: torch.device, clock: Clock, mode: Any, next_name: Callable[[str], str]) -> None:
        self.device = device
        self.ops = Operators(clock=clock)
        self.storages = Storages(device, lambda: self.ops.count)
        self.mode = mode
        self.next_name = next_name
        self.named: dict[int, str] = {}
        """Names of what operators have made, by index of the storage."""
        self.path = [OUTSIDE]
        """Paths of the modules that are running, from the outside in."""
        self.layer = ""
        """The layer that is running."""
        self.is_inside = False
        """Whether the model's forward is running."""
        self.is_silent = False
        """Whether what runs is ours, not the step's."""
        self.compiled: CompiledCall | None = None
        """The call of a compiled part that is under way."""
        self.about_to_write: Callable[[torch.UntypedStorage], None] | None = None
        """Called before an operator writes to bytes that were there before the step."""

    @contextlib.contextmanager
    def silently(self) -> Iterator[None]:
        """What runs inside is ours, not the step's."""
        before, self.is_silent = self.is_silent, True
        try:
            yield
        finally:
            self.is_silent = before

    def frozen(self, arg: Any) -> Any:
        """An argument, in which a `Value` stands for each tensor."""
        if isinstance(arg, torch.Tensor):
            if not is_plain_or_fake(arg):
                return value_of(arg, self._parts(arg, "unknown"))
            return value_of(arg, self.storages.find_or_register(arg, "unknown"))
        if isinstance(arg, list | tuple):
            return type(arg)(self.frozen(part) for part in arg)
        if isinstance(arg, dict):
            return {key: self.frozen(part) for key, part in arg.items()}
        return arg

    def _parts(self, tensor: torch.Tensor, kind: str) -> Storage:
        with self.silently():
            self.storages.register_parts(tensor, kind)
        return NOWHERE

    def output(self, leaf: Any, call: OpCall) -> Value | None:
        """What a call has given out; None for what is no tensor."""
        if not isinstance(leaf, torch.Tensor):
            return None
        if not is_plain_or_fake(leaf):
            return value_of(leaf, self._parts(leaf, "made"))
        record = self.storages.find(leaf)
        if record is None:
            record = self.storages.register(leaf, "made", "", call.index)
            record.producer = None if self.ops.is_backward else call
        else:
            record.nbytes = max(record.nbytes, leaf.untyped_storage().nbytes())
        return value_of(leaf, record)


class CompiledCall:
    """One call of a compiled part, or of one of its graphs in backward, while it is under way."""

    def __init__(self, state: StepState, call: OpCall) -> None:
        self._state = state
        self.call = call
        self.made_bytes = 0
        """Bytes of the storages that it made and that are on record by themselves."""
        self._aside = contextlib.ExitStack()
        self._is_counting = False
        self._outer: CompiledCall | None = None

    def begin(self) -> None:
        """From here on nothing is recorded but what it saves."""
        self._outer, self._state.compiled = self._state.compiled, self
        self._aside.enter_context(without([self._state.mode]))
        self._is_counting = begin_counting_allocations()

    def end(self) -> int:
        """The most bytes that it held at once, more than when it began; 0 where they could not be counted."""
        threads = end_counting_allocations(self._state.device.type) if self._is_counting else []
        self._aside.close()
        self._state.compiled = self._outer
        return sum(max(0, *accumulate(sizes, initial=0)) for sizes in threads)

    def made(self, tensor: torch.Tensor) -> Storage:
        """Put a tensor on record that it has made inside and saves."""
        name = self._state.next_name(COMPILED)
        record = self._state.storages.register(tensor, "made", name, self.call.index)
        record.producer = self.call
        self._state.named[record.index] = name
        self.made_bytes += record.nbytes
        return record

    def output(self, leaf: Any) -> Value | None:
        """Put on record what it has given out."""
        known = len(self._state.storages.records)
        value = self._state.output(leaf, self.call)
        for record in self._state.storages.records[known:]:
            self.made_bytes += record.nbytes
        return value
