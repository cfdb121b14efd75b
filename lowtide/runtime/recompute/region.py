"""Recompute: drop what a region saves, keep its inputs, and run it again when backward reads what it saved.

There are two kinds of regions, and one mechanism:

- a *layer*: everything it saves is dropped; its inputs stay, positional and keyword ones;
- a single *module* without children (an activation, a norm): what it saves is dropped, and so is its **output**, which
  the next operator would have saved. Reading that output in backward runs the module once more (hooks/regions.py).

The inputs of a region get handles like any other saved tensor, so they can be kept, swapped or recomputed.

A region runs again at most once in a backward pass, with gradients, in the random state and the autocast of its first
run, as one of `torch.utils.checkpoint` (non-reentrant) does. That itself is not in use: its hooks take several
microseconds for each tensor, a call of it 170 us beside 40 here, and it makes handles of positional inputs only
(docs/decisions/0106-regions-of-our-own.md).

What torch's does not do:
- an in-place write to a tensor saved inside a region raises, as in plain autograd (torch's recomputes silently);
- a region that writes into its own input runs again from a copy of the input as it was;
- what the second run gives is compared with what the first one gave, by fingerprints, before a gradient is used
  (fingerprint.py, saves.py); a difference is refused by name, and the module is not run again from the next step on;
- what common modules move is put back, so that they are not refused (watch.py): attributes, buffers, settings, random
  generators of all kinds;
- a second run stops after the last tensor that is needed, but not before that tensor has been filled (`nn.RReLU` saves
  its noise first and draws it afterwards);
- an error of a second run is raised in words of lowtide's, with the module's name;
- the bytes that a region drops are counted, and after they are recomputed they are in the ledger.

Cost: the region's forward time once more (a module whose output is dropped: up to twice, of something cheap), and, for
a decoder layer with 13 modules that saves 38 tensors, some 0.25 ms of Python beyond checkpoint (docs/history/LOG.md).
Not covered: differences that fingerprints miss (docs/limits.md); side effects that leave no trace in what the region
saves or gives (a forward that prints does so twice); a key-value cache: see `without_cache` (call.py).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointError

from lowtide.runtime.offload.site import OffloadedStorage
from lowtide.runtime.recompute.call import Call
from lowtide.runtime.recompute.collectives import KeptResults
from lowtide.runtime.recompute.fingerprint import Fingerprints, Print
from lowtide.runtime.recompute.functions import FunctionRow, TakenOff, functions_of, taken_from, tensors_on
from lowtide.runtime.recompute.saves import Dropped, DroppedTensor, FirstSaves, SecondSaves
from lowtide.runtime.recompute.watch import Before, Watch
from lowtide.runtime.saved.handle import Kept, Shared, Wrapped
from lowtide.tensors.compiled import graphs_between, never_compiled
from lowtide.tensors.kinds import tensors_in
from lowtide.tensors.modes import surroundings
from lowtide.tensors.out_of_memory import is_out_of_memory
from lowtide.tensors.private import (
    current_graph_group,
    current_graph_task_id,
    disable_current_modes,
    gradient_hooks,
    next_sequence_number,
    num_compiled_graphs,
    version_of,
)
from lowtide.tensors.wrappers import in_guise

_WAY_OUT = (
    "It depends on something that lowtide cannot put back: state outside of the model's objects, a nested function's "
    "variables, or work that is not the same twice. Give this module the fate keep or swap."
)


_CHANGED = (
    "It reads something that changed since its forward: keep or swap it. It is not run again from the next step on."
)


class _Made(NamedTuple):
    """What a second run has made for one backward pass."""

    saved: list[torch.Tensor | None]
    on_functions: list[dict[str, Any]]
    """Attributes, of each Function (functions.py)."""


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else version_of(tensor)


class RegionRun:
    """One run of a region: first from the real inputs, later, in backward, from handles on them."""

    def __init__(
        self, call: Call, dropped: Dropped, watch: Watch, fingerprints: Fingerprints, *, is_first: bool
    ) -> None:
        """`is_first`: each tensor that it saves is looked at, because this forward is observed."""
        self.call = call
        self.dropped = dropped
        self.watch = watch
        self.inputs: list[Any] = []
        self.has_changed_inputs = False
        self.fingerprints = fingerprints
        self.state = Before(watch, call, is_first=is_first)
        self.once = KeptResults(
            dropped.keep,
            lambda why: watch.refusal_of(f"lowtide: the recomputed {watch} cannot be run again: {why}. {_WAY_OUT}"),
            fingerprints,
        )
        if watch.keeps_collectives and not self.state.has_compiled:
            self.once.keep_collectives(self._check_collective, are_in_place=not watch.has_shards)
        self._output: list[Print] | None = None
        """Fingerprints of what the first run gave, where the second one goes to its end."""
        self._around: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
        """Gives a context with the random state and the autocast of the first run."""
        self._is_read_early = False
        """Its first run took gradients of what it had saved."""
        self._made: dict[Any, _Made] = {}
        """By backward pass: what its second run has saved and set on Functions, until it is read."""
        self._functions: list[FunctionRow] = []
        """What was taken off the `autograd.Function`s of the first run (functions.py)."""
        self._graphs: list[type] | None = None
        """The compiled graphs of the first run; None for a module without compiled parts."""

    def run(self, pack: Callable[[torch.Tensor], Any], *, may_change_inputs: bool) -> Any:
        """The forward's output. `pack` makes a handle of an input; `may_change_inputs`: the module may write to its
        inputs, so they are copied first.

        Raises RuntimeError if inputs were written to although `may_change_inputs` is false, and for a module that
        writes to its own parameters.
        """
        tensors = self.call.tensors
        copies: list[torch.Tensor] | None = None
        if may_change_inputs:
            with disable_current_modes():
                copies = [tensor.detach().clone() for tensor in tensors]
        versions = [_version(tensor) for tensor in tensors]
        # A tensor of inference mode can be neither saved nor written to: it stays as it is.
        self.inputs = [
            SimpleNamespace(open=lambda tensor=tensor: tensor) if tensor.is_inference() else pack(tensor)
            for tensor in tensors
        ]
        try:
            output = self._make_first()
            self.state.settle()
            for i, (tensor, version) in enumerate(zip(tensors, versions, strict=True)):
                if _version(tensor) != version:
                    self._replace_input(i, copies)
        finally:
            # Also after an error: the graph of an input that was written to leads back to this region, and no garbage
            # collector finds cycles through autograd.
            self.call.forget()
        return output

    def _replace_input(self, index: int, copies: list[torch.Tensor] | None) -> None:
        self.has_changed_inputs = True
        if copies is None:
            raise self.watch.refusal_of(
                f"lowtide: the recomputed {self.watch} wrote into its own input in this forward, "
                "but not in the first one; it cannot be run again. Give it the fate keep or swap."
            )
        self.inputs[index] = Kept(copies[index])

    @never_compiled
    def _make_first(self) -> Any:
        """The first run."""
        state, inputs = self.state, self.call.tensors
        stops = [tensor.grad_fn for tensor in inputs] if state.has_compiled else []
        self._around = surroundings(inputs)
        lets_go = self.watch.weights() is not None
        saves = FirstSaves(self.dropped, self.fingerprints, inputs, state.path, state.flow, lets_weights_go=lets_go)
        start = next_sequence_number()
        with saves.hooked(self._unpack), self.once.running(is_again=False), state.flow or contextlib.nullcontext():
            output = self.call.make_first()
        if state.keep_path(saves.learned()):
            self._output = self._prints_of(output)
        self.dropped.prints = self.fingerprints.together(self.dropped.prints)
        if state.looks_at_functions:
            with disable_current_modes():
                self._look_at_functions(tensors_in(output), start)
        self.dropped.forward_done()
        self.watch.frees |= self.dropped.nbytes > 0
        if state.has_compiled:
            self._graphs = [*map(type, graphs_between(tensors_in(output), stops))]
        return output

    def _look_at_functions(self, outputs: list[torch.Tensor], start: int) -> None:
        """Take off the Functions of the first run what they keep on `ctx`."""
        inputs = self.call.tensors
        off = TakenOff(outputs, inputs, self.fingerprints)

        def take(number: int) -> dict[str, Any]:
            made = self._made_now().on_functions
            values, made[number] = made[number], {}
            if not values:
                self._differs(CheckpointError("a Function runs twice in one backward pass"))
            return values

        for place, ctx in functions_of(outputs, start, [tensor.grad_fn for tensor in inputs]).items():
            off.take(place, ctx, take, self._refuse_function)
        self._functions = off.rows
        self.state.known.has_functions |= bool(off.rows)
        self.dropped.count_functions(off.gone, off.left)

    def _refuse_function(self, why: str) -> Exception:
        self.state.known.functions_stay = True
        return self.watch.refusal_of(
            f"lowtide: the recomputed {self.watch} cannot be run again: {why}. Gradients of this step are not right: "
            "set them to zero before you go on. From the next step on its Functions keep what they have on ctx."
        )

    @never_compiled
    def _unpack(self, saved: DroppedTensor) -> torch.Tensor:
        """The unpack hook: it checks the version, and gives what the second run has made for this backward pass."""
        if version_of(saved.alias) != saved.version:
            self.dropped.check(saved)
        made = self._made.get(current_graph_task_id()) or self._made_now()
        tensor = made.saved[saved.number]
        if tensor is None:
            self._differs(CheckpointError("a saved tensor is read twice in one backward pass"))
        made.saved[saved.number] = None
        return tensor

    def _made_now(self) -> _Made:
        """What the second run has saved for the backward pass that is running. Runs the region again, if need be."""
        backward = _current_backward()
        if backward not in self._made:
            try:
                with self._around():
                    self._make_again(backward)
            except CheckpointError as error:
                self._differs(error)
        # Outside of a backward pass nobody can say when its end is.
        return self._made.pop(backward) if isinstance(backward, str) else self._made[backward]

    def _make_again(self, backward: Any) -> None:
        """The second run, up to the last tensor that is needed. What it saves is compared with what the first run saved
        before anybody reads it."""
        tensors = self.open_inputs()
        dropped = self.dropped
        is_whole = self._graphs is not None or self._output is not None or dropped.path.is_filled_late
        to_the_end = is_whole or bool(self._functions)
        saves = SecondSaves(dropped, self.fingerprints, to_the_end=to_the_end)
        start = next_sequence_number()
        self._is_read_early |= dropped.note is not None
        gradients = self._gradients() if to_the_end or self._is_read_early else None
        with self.replayed():
            with saves.hooked():
                output = self._make_once(tensors)
            # Before buffers are as they were.
            on_functions = taken_from(tensors_in(output), start, self._functions) if self._functions else []
            prints = [self.fingerprints.of(tensor) for each in on_functions for tensor in tensors_on(each)]
        if gradients is not None and gradients != self._gradients():
            self.watch.differs = True
            raise self.watch.refusal_of(
                f"lowtide: the recomputed {self.watch} calls backward() in its own forward, and run again it added to "
                "gradients once more: set them to zero, and keep or swap it. It is not run again from the next step on."
            )
        saves.compare_kinds()
        self._compare(list(dropped.prints.values()), saves.prints, self._refuse_saved)
        if self._output is not None:
            self._compare(self._output, self._prints_of(output), self._refuse_output)
        self._compare([each for row in self._functions for each in row.prints], prints, self._refuse_on_function)
        if self._functions or self._output is not None:
            saves.refuse_emptied()
        self.state.known.is_compared |= self._output is not None
        # What nobody will read is not held.
        needed = [
            tensor if found() is not None else None for tensor, found in zip(saves.made, dropped.saved, strict=False)
        ]
        self._made[backward] = _Made(needed, on_functions)
        dropped.come_back()

    def _gradients(self) -> list[tuple[int, int]]:
        """What shows that gradients of the module's parameters were added to."""
        return [(id(p.grad), -1 if p.grad is None else _version(p.grad)) for p in self.call.module.parameters()]

    def _compare(self, then: list[Print], now: list[Print], refuse: Callable[[int], NoReturn]) -> None:
        task = current_graph_task_id()
        if any(isinstance(one, torch.Tensor) for one in then):
            # An optimizer that steps inside of backward must not get these gradients.
            is_urgent = any(gradient_hooks(parameter) for parameter in self.call.module.parameters())
            task = -1 if is_urgent else task
        self.fingerprints.check(then, now, task, refuse)

    def _check_collective(self, then: Print, now: Print) -> None:
        def refuse(_: int) -> NoReturn:
            self._refuse_values("what one of its collectives had given was written into")

        self._compare([then], [now], refuse)

    def _prints_of(self, output: Any) -> list[Print]:
        return [self.fingerprints.of(tensor) for tensor in tensors_in(output)]

    def _refuse_saved(self, index: int) -> NoReturn:
        """Of the fingerprints of what the region saves, that with this number differs first."""
        dropped = self.dropped
        number = list(dropped.prints)[index]
        _, producer, shape, _ = dropped.path.rows[number]
        made = "" if producer is type(None) else f", made by {producer.__name__}"
        self._refuse_values(
            f"the first tensor that differs is number {number + 1} of the {len(dropped.saved)} that it saves, of shape "
            f"{list(shape)}{made}"
        )

    def _refuse_on_function(self, index: int) -> NoReturn:
        kinds = [row.kind for row in self._functions for _ in row.prints]
        self._refuse_values(f"the first tensor that differs is one that a {kinds[index]} keeps on ctx")

    def _refuse_output(self, index: int) -> NoReturn:
        self._refuse_values(f"what it saves is the same, but of what it gives, tensor {index + 1} differs")

    def _refuse_values(self, which: str) -> NoReturn:
        self.watch.differs = True
        raise self.watch.refusal_of(
            f"lowtide: the recomputed {self.watch} gave other values when it was run again for its backward pass: "
            f"{which}. {_CHANGED}"
        )

    def _make_once(self, tensors: list[torch.Tensor]) -> Any:
        return self.call.make(tensors) if self._graphs is None else self._make_compiled(tensors, self._graphs)

    def _make_compiled(self, tensors: list[torch.Tensor], graphs: list[type]) -> Any:
        """The second run of a module with compiled parts: to its end, because a compiled graph saves at its end."""
        before = num_compiled_graphs()
        output = self.call.make(tensors)
        found = graphs_between(tensors_in(output), [tensor.grad_fn for tensor in tensors])
        if num_compiled_graphs() != before or [*map(type, found)] != graphs:
            raise self.watch.refusal_of(
                f"lowtide: the recomputed {self.watch} ran through other compiled code when it was run again for its "
                "backward pass: it was compiled anew since its forward, for other shapes, say, and other code may give "
                "other bits. Run backward before the next forward pass, mark the dimension as dynamic from the start "
                "(torch._dynamo.mark_dynamic), or give this module the fate keep or swap."
            )
        return output

    def make_whole(self, then: list[Print]) -> torch.Tensor:
        """The second run, to its end. Returns its output, whose fingerprint must be `then`."""
        with self._around():
            tensors = self.open_inputs()
            with self.replayed():
                output: torch.Tensor = self.call.make(tensors)
            self._compare(then, self._prints_of(output), self._refuse_output)
        return output

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """Inside, what the module reads is what it was before the first run (watch.py). An error is raised in words of
        ours."""
        with self.state.replayed(self.dropped.raise_plain), self.once.running(is_again=True):
            try:
                yield
            except CheckpointError:
                raise
            except Exception as error:
                if is_out_of_memory(error) or str(error).startswith("lowtide: "):
                    raise  # the former says nothing about the module, the latter is of a module inside
                raise self.watch.refusal_of(
                    f"lowtide: the recomputed {self.watch} failed when it was run again for its backward pass, with "
                    f"{type(error).__name__}: {error}. {_WAY_OUT}"
                ) from error

    def _differs(self, error: CheckpointError) -> NoReturn:
        self.watch.differs = True
        first = next((line for line in str(error).splitlines() if line), "").removeprefix("torch.utils.checkpoint: ")
        raise self.watch.refusal_of(
            f"lowtide: the recomputed {self.watch} did something else when it was run again for its backward pass. "
            f"{_WAY_OUT} (torch: {first})"
        ) from error

    def open_inputs(self) -> list[torch.Tensor]:
        """The inputs as they were, with the same need for gradients (else other tensors would be saved)."""
        tensors = [self._open_input(i).detach().requires_grad_(flag) for i, flag in enumerate(self.call.flags)]
        # A copy: the second run writes into them too, and there may be a third.
        tensors = [tensor.clone() for tensor in tensors] if self.has_changed_inputs else tensors
        return [*map(in_guise, tensors, self.call.guises)]

    def _open_input(self, index: int) -> torch.Tensor:
        try:
            return self.inputs[index].open()
        except RuntimeError as error:
            if index in self.dropped.path.saved_inputs or "modified by an inplace operation" not in str(error):
                raise
            raise self.watch.refusal_of(
                f"lowtide: an input of the recomputed {self.watch} was modified in place after it "
                "had run, so it cannot be run again. Plain autograd does not need this input; give the module the "
                f"fate keep or swap, or do not write into its input. ({error})"
            ) from error

    def note_end(self, sequence: int) -> None:
        """`sequence`: autograd's number at the end of the first run. When backward is there, it needs the inputs."""
        for site in self._swapped_inputs():
            site.last_use = max(site.last_use, sequence)

    def claim_inputs(self) -> None:
        """One more reader of the inputs: a swapped one must not be released after its first reader."""
        for site in self._swapped_inputs():
            site.num_readers += 1

    def _swapped_inputs(self) -> list[OffloadedStorage]:
        handles = [given.local if isinstance(given, Wrapped) else given for given in self.inputs]
        sources = [handle.source for handle in handles if isinstance(handle, Shared)]
        return [source for source in sources if isinstance(source, OffloadedStorage)]


def _current_backward() -> Any:
    """The backward pass that runs on this thread, or the group of such that torch takes for one; outside of any, the
    thread, as a text."""
    group = current_graph_group()
    if group is not None:
        return group
    task = current_graph_task_id()
    return task if task != -1 else f"outside, thread {threading.get_ident()}"


def own_hooks() -> saved_tensors_hooks:
    return saved_tensors_hooks(torch.Tensor.detach, lambda tensor: tensor)
