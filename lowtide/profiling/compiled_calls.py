"""Compiled parts in the observed step: one operator forward and one for each graph backward.

What: a compiled part shows nobody its operators, so its call is put on record as one: what it was given, what it saved
and gave out, its time, and how many bytes it held at its worst moment beyond these (from the allocations that torch
notes for its profilers). Its backward passes are recorded by hooks on autograd's nodes. No recipe goes through a
compiled part; what it gave out may start one. While it runs, the recorder is no dispatch mode: under one the compiler
would leave the part as it is, and another step would be observed.

Cost: 0.2 ms a call, and a copy of the part's large buffers, which it may write to. Not covered: how many bytes it holds
inside, while a profiler of the user's is on; what other threads allocate meanwhile counts too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import nn

from lowtide.profiling.producer_names import COMPILED
from lowtide.profiling.storages import Storages
from lowtide.recipes.graph import Call, Storage, Value
from lowtide.tensors.compiled import nodes_between, without
from lowtide.tensors.kinds import is_plain_or_fake
from lowtide.tensors.private import (
    begin_counting_allocations,
    end_counting_allocations,
    next_sequence_number,
    sequence_number,
    tree_leaves,
    version_of,
)
from lowtide.tensors.ranks import has_company
from lowtide.tensors.wrappers import inside


class _CompiledPart:
    """In the place of an operator."""

    namespace = "lowtide"

    def __str__(self) -> str:
        return "a compiled part"


_PART = _CompiledPart()


class StepRecord(Protocol):
    """What this file and saved_tensors.py ask of the recorder of the step. A `StepRecorder` has all of it."""

    device: torch.device
    storages: Storages
    clock: Any
    """A `HostClock` or `DeviceClock`; on a fake step, which has another one, nothing is compiled."""
    named: dict[int, str]
    compiled: CompiledCall | None
    temporary: list[tuple[int, int]]
    about_to_write: Callable[[torch.UntypedStorage], None] | None
    is_inside: bool
    start_sequence: int

    @property
    def num_ops(self) -> int: ...
    @property
    def path(self) -> str: ...
    @property
    def is_backward(self) -> bool: ...
    def silently(self) -> contextlib.AbstractContextManager[None]: ...
    def region(self) -> str: ...
    def entry(self, name: str) -> Callable: ...
    def begin(self, name: str) -> Callable: ...
    def end(self, name: str) -> Callable: ...
    def exit(self, name: str) -> Callable: ...
    def frozen(self, arg: Any) -> Any: ...
    def output(self, leaf: Any, call: Call) -> Value | None: ...
    def next_name(self, op: str) -> str: ...
    def note_compiled(self, call: Call, mark: Any, sequence: int) -> None: ...


class CompiledCall:
    """One call of a compiled part, or of one of its graphs in backward, while it is under way."""

    def __init__(self, recorder: StepRecord, call: Call) -> None:
        self._recorder = recorder
        self.call = call
        self.made_bytes = 0
        """Of storages that it made and that are on record by themselves."""
        self._aside = contextlib.ExitStack()
        self._is_counting = False
        self._outer: CompiledCall | None = None

    def begin(self) -> None:
        """From here on nothing is recorded but what it saves."""
        self._outer, self._recorder.compiled = self._recorder.compiled, self
        self._aside.enter_context(without([self._recorder]))
        self._is_counting = begin_counting_allocations()

    def end(self) -> int:
        """The most bytes that it held at once, more than when it began; 0 where nobody could count them."""
        threads = end_counting_allocations(self._recorder.device.type) if self._is_counting else []
        self._aside.close()
        self._recorder.compiled = self._outer
        return sum(max(0, *accumulate(sizes, initial=0)) for sizes in threads)

    def made(self, tensor: torch.Tensor) -> Storage:
        """It saves a tensor that nobody has seen: its own."""
        name = self._recorder.next_name(COMPILED)
        record = self._recorder.storages.register(tensor, "made", name, self.call.index)
        record.producer = self.call
        self._recorder.named[record.index] = name
        self.made_bytes += record.nbytes
        return record

    def brought(self, nbytes: int) -> None:
        """A parked storage came back for it; it is on record by itself."""
        self.made_bytes += nbytes

    def output(self, leaf: Any) -> Value | None:
        """It has given this out."""
        known = len(self._recorder.storages.records)
        value = self._recorder.output(leaf, self.call)
        for record in self._recorder.storages.records[known:]:
            self.made_bytes += record.nbytes
        return value


def run_compiled(recorder: StepRecord, part: tuple[str, nn.Module], call: Callable, args: tuple, kwargs: dict) -> Any:
    """What `call` gives; the call of the compiled `part` (name, module) is on record afterwards."""
    name, module = part
    recorder.entry(name)(module, args, kwargs)
    recorder.begin(name)(module, args, kwargs)
    output = None
    try:
        output = _run(recorder, module, call, args, kwargs)
        recorder.end(name)(module, args, output)
        return output
    finally:
        recorder.exit(name)(module, args, output)


def _run(recorder: StepRecord, module: nn.Module, call: Callable, args: tuple, kwargs: dict) -> Any:
    recorder.storages.look_at_gathered()
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    written = _Written(recorder, [*given, *module.buffers()])
    record = Call(
        index=recorder.num_ops,
        func=_PART,
        args=(recorder.frozen(given),),
        kwargs={},
        outputs=(),
        name="",
        seconds=0.0,
        is_random=False,
        is_collective=has_company(),  # nobody sees whether it has any; then ranks must do the same
    )
    under_way, sequence, stops = CompiledCall(recorder, record), next_sequence_number(), [t.grad_fn for t in given]
    under_way.begin()
    try:
        output, mark = recorder.clock.run(call, args, kwargs)
    except BaseException:
        under_way.end()
        raise
    peak_bytes = under_way.end()
    leaves = tree_leaves(output)
    record.outputs = tuple(under_way.output(leaf) for leaf in leaves)
    for value in record.outputs:
        if value is not None and value.storage.producer is record and not value.storage.name:
            value.storage.name = recorder.named[value.storage.index] = recorder.next_name(COMPILED)
    made = [value.storage.name for value in record.outputs if value is not None and value.storage.producer is record]
    record.name = made[0] if made else f"{recorder.next_name(COMPILED)}"
    written.note()
    nodes = nodes_between([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)], stops)
    # With several graphs, what the first ones saved is parked already when the last one runs.
    beyond = peak_bytes - under_way.made_bytes if len(nodes) == 1 else peak_bytes
    recorder.temporary.append((record.index, max(0, beyond)))
    recorder.note_compiled(record, recorder.clock.seconds(mark, record), sequence)
    for node in nodes:
        _record_backward(recorder, record.name, node)
    return output


class _Written:
    """Which tensors a compiled part writes into: their versions tell."""

    def __init__(self, recorder: StepRecord, tensors: list[torch.Tensor]) -> None:
        local = [inside(tensor) for tensor in tensors if not tensor.is_inference()]
        self._tensors = [(tensor, version_of(tensor)) for tensor in local if is_plain_or_fake(tensor)]
        self._storages = recorder.storages
        if recorder.about_to_write is not None:
            for tensor, _ in self._tensors:
                found = self._storages.find(tensor)
                if found is not None and found.kind == "buffer":
                    recorder.about_to_write(tensor.untyped_storage())

    def note(self) -> None:
        """The part has run."""
        changed = {
            id(found): found
            for tensor, version in self._tensors
            if version_of(tensor) != version and (found := self._storages.find(tensor)) is not None
        }
        for record in changed.values():
            record.num_writes += 1


def _record_backward(recorder: StepRecord, name: str, node: Any) -> None:
    """See that the backward pass of one compiled graph is on record as one operator."""
    sequence = sequence_number(node)
    steps: list[Iterator[None]] = []

    def begin(gradients: Any) -> None:
        steps.append(_backward(recorder, f"{name}:backward", sequence))
        next(steps[-1])

    def end(given: Any, gradients: Any) -> None:
        with contextlib.suppress(StopIteration):
            steps.pop().send(given)  # type: ignore[attr-defined]

    node.register_prehook(begin)
    node.register_hook(end)


def _backward(recorder: StepRecord, name: str, sequence: int) -> Iterator[Any]:
    call = Call(
        index=recorder.num_ops,
        func=_PART,
        args=(),
        kwargs={},
        outputs=(),
        name=name,
        seconds=0.0,
        is_random=False,
        is_collective=False,
    )
    recorder.storages.look_at_gathered()
    under_way = CompiledCall(recorder, call)
    under_way.begin()
    mark = recorder.clock.begin()
    peak_bytes, given = 0, None
    try:
        given = yield
    finally:
        taken = recorder.clock.end(mark)
        peak_bytes = under_way.end()
    for leaf in tree_leaves(given):
        value = under_way.output(leaf)
        if value is not None and not value.storage.name:
            value.storage.name = f"{name}#{value.storage.index}"
    recorder.temporary.append((call.index, max(0, peak_bytes - under_way.made_bytes)))
    recorder.note_compiled(call, recorder.clock.seconds(taken, call), sequence)
