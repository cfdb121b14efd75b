"""Recompute: drop what a region saves, keep its inputs, and run it again when backward reads what it saved.

There are two kinds of regions, and one mechanism (`torch.utils.checkpoint`, non-reentrant, never a copy of it):

- a *layer*: everything it saves is dropped; its inputs stay, positional and keyword ones;
- a single *module* without children (an activation, a norm): what it saves is dropped, and so is its **output**, which
  the next operator would have saved. Reading that output in backward runs the module once more (module_output.py).

The inputs of a region get handles like any other saved tensor, so they can be kept, swapped or recomputed.
(`checkpoint` would make handles only of positional inputs, and hold keyword inputs in a closure.)

What this file adds to `checkpoint`:
- an in-place write to a tensor saved inside a region raises, as in plain autograd (`checkpoint` would recompute
  silently);
- a region that writes into its own input runs again from a copy of the input as it was;
- everything else that a region reads is the same in the second run as in the first, or the second run is refused
  (tensors/run_state.py, tensors/modes.py): parameters, buffers, attributes, modes, random generators of all kinds;
- a second run stops after the last tensor that is needed, but not before that tensor has been filled (`nn.RReLU` saves
  its noise first and draws it afterwards);
- an error of a second run is raised in words of lowtide's, with the module's name;
- the bytes that a region drops are counted, and after they are recomputed they are in the ledger.

Torch's random state and autocast are restored by checkpoint for regions, and by `Rerun` for outputs.

Cost: the region's forward time once more (a module whose output is dropped: up to twice, of something cheap), and, for
a decoder layer with 13 modules that saves 38 tensors, 1.4 ms of Python beyond checkpoint's own 0.8: 0.6 for what it
reads (tensors/run_state.py), 0.6 for what it drops. Not covered: side effects that leave no trace in Python's objects
or torch's settings (a forward that prints does so twice); a key-value cache: see `without_cache` (call.py).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NoReturn
from weakref import ref

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import CheckpointError, checkpoint, set_checkpoint_early_stop

from lowtide.runtime.recompute.call import Call
from lowtide.runtime.recompute.once import KeptResults
from lowtide.runtime.saved.handle import Kept, Swapped
from lowtide.runtime.saved.hook_stack import is_checkpoint_hook
from lowtide.runtime.saved.stats import Counters, Ledger, Share
from lowtide.runtime.saved.wrapped import Wrapped
from lowtide.tensors.compiled import graphs_between, has_compiled, never_compiled
from lowtide.tensors.kinds import is_plain
from lowtide.tensors.out_of_memory import is_out_of_memory
from lowtide.tensors.private import (
    disable_current_modes,
    is_view,
    next_sequence_number,
    num_compiled_graphs,
    storage_key,
    top_saved_tensors_hooks,
    tree_leaves,
    version_of,
)
from lowtide.tensors.run_state import RunState, Watch
from lowtide.tensors.view import modified_error, version_witness
from lowtide.tensors.wrappers import inside


class Dropped:
    """What one run of a region dropped: how many bytes, and whether they have been recomputed."""

    __slots__ = (
        "__weakref__",
        "_inputs",
        "_kept_bytes",
        "_last_sequence",
        "_results",
        "_saved",
        "_seen",
        "_share",
        "counters",
        "is_back",
        "is_filled_late",
        "ledger",
        "nbytes",
        "note",
        "num_saved",
        "saved_inputs",
    )

    def __init__(self, counters: Counters, ledger: Ledger, note: Callable[[torch.Tensor], bool]) -> None:
        self.counters = counters
        self.ledger = ledger
        # Called once for each storage that the region would have saved. Returns whether it is an activation.
        self.note: Callable[[torch.Tensor], bool] | None = note
        self.nbytes = 0
        self.is_back = False
        self._kept_bytes = 0
        self._results: set[int] = set()
        """Kept, and not saved so far, by the key of the storage."""
        self._share: Share | None = None
        self._seen: dict[int, StorageWeakRef] = {}
        self._inputs: dict[int, int] = {}
        # The inputs that plain autograd would save in the region. The others are needed only to run it again.
        self.saved_inputs: set[int] = set()
        self.num_saved = 0
        self.is_filled_late = False
        """Whether the last operator that saves something may fill it after saving it, as `rrelu` does."""
        self._last_sequence = -1
        self._saved: list[ref[_Saved]] = []

    def enter(self, saved: _Saved, tensor: torch.Tensor) -> None:
        """One more tensor that the region saves."""
        self.num_saved += 1
        self._saved.append(ref(saved))
        sequence = next_sequence_number()
        if sequence != self._last_sequence:
            self._last_sequence, self.is_filled_late = sequence, False
        if not tensor.requires_grad and _may_be_filled_late(tensor):
            self.is_filled_late = True

    def raise_plain(self) -> None:
        """Raise plain autograd's error if something that the region saved was modified since."""
        for found in self._saved:
            saved = found()
            if saved is not None:
                saved.check()

    def count(self, tensor: torch.Tensor) -> None:
        """Add a storage that the region would have saved. Units: bytes."""
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        seen = self._seen.get(key)
        if seen is not None and not seen.expired():
            if key in self._inputs:
                self.saved_inputs.add(self._inputs[key])
            elif key in self._results:
                self._results.remove(key)
                self.counters.anchor_bytes -= storage.nbytes()
            return
        self._seen[key] = StorageWeakRef(storage)
        if self.note is not None and self.note(tensor):
            self.nbytes += storage.nbytes()

    def leave_out(self, tensors: list[torch.Tensor]) -> None:
        """Do not count the region's own inputs: they are counted where they are kept or swapped."""
        for index, tensor in enumerate(map(inside, tensors)):
            if is_plain(tensor):
                storage = tensor.untyped_storage()
                self._seen[storage_key(storage)] = StorageWeakRef(storage)
                self._inputs[storage_key(storage)] = index

    def keep(self, result: torch.Tensor) -> None:
        """A fresh tensor that the first run got stays for the second one: it is kept, not dropped."""
        storage = result.untyped_storage()
        self._seen[storage_key(storage)] = StorageWeakRef(storage)
        self._results.add(storage_key(storage))
        self._kept_bytes += storage.nbytes()
        self.counters.kept_bytes += storage.nbytes()
        self.counters.anchor_bytes += storage.nbytes()  # until the region saves it
        self._hold()

    def _hold(self) -> None:
        nbytes = self._kept_bytes + (self.nbytes if self.is_back else 0)
        if self._share is None:
            self._share = self.ledger.hold(self, nbytes)
        else:
            self.ledger.change(self._share, nbytes)

    def forward_done(self) -> None:
        self._seen = {}
        self._inputs = {}
        self._results = set()
        self.note = None
        self.counters.recomputed_bytes += self.nbytes

    def come_back(self) -> None:
        if not self.is_back:
            self.is_back = True
            self._hold()


def _may_be_filled_late(tensor: torch.Tensor) -> bool:
    """Whether it is fresh memory that nobody wrote to, as far as its version shows: no parameter, index or view."""
    return (
        tensor.is_floating_point()
        and version_of(tensor) == 0
        and not isinstance(tensor, nn.Parameter)
        and not is_view(tensor)
    )


class _Saved:
    """A tensor that a region saved and `checkpoint` dropped: checkpoint's handle, and the witness of its version."""

    __slots__ = ("__weakref__", "dropped", "holder", "is_view", "output_nr", "producer", "size", "version", "witness")

    def __init__(self, holder: Any, tensor: torch.Tensor, dropped: Dropped) -> None:
        self.holder = holder
        self.dropped = dropped
        self.producer, self.output_nr, self.is_view = type(tensor.grad_fn), tensor.output_nr, is_view(tensor)
        self.size = tensor.size()
        self.version = version_of(tensor)
        self.witness = version_witness(tensor) if tensor.layout is torch.strided else tensor.detach()

    def check(self) -> None:
        if version_of(self.witness) != self.version:
            raise modified_error(self.witness, self.size, version_of(self.witness), self.version, self)


def _checkpoint_hooks() -> tuple[Callable, Callable]:
    hooks = top_saved_tensors_hooks()
    assert is_checkpoint_hook(hooks) and hooks is not None
    return hooks


@contextlib.contextmanager
def _counting(dropped: Dropped, differs: Callable[[CheckpointError], NoReturn]) -> Iterator[None]:
    """Hooks around checkpoint's own: these still get every tensor, in order; ours count bytes and check versions.
    `differs` raises an error of ours for checkpoint's error about a second run that saved other tensors."""
    outer_pack, outer_unpack = _checkpoint_hooks()

    @never_compiled
    def pack(tensor: torch.Tensor) -> Any:
        local = inside(tensor)
        if is_plain(local):
            dropped.count(local)
        saved = _Saved(outer_pack(tensor), tensor, dropped)
        dropped.enter(saved, tensor)
        return saved

    def unpack(saved: _Saved) -> torch.Tensor:
        saved.check()
        try:
            tensor = outer_unpack(saved.holder)
        except CheckpointError as error:
            differs(error)
        saved.dropped.come_back()
        return tensor

    with saved_tensors_hooks(pack, unpack):
        yield
    dropped.forward_done()


class _EnoughError(BaseException):
    """A second run has saved all that is needed. Not an `Exception`, because a forward may catch those."""


@contextlib.contextmanager
def _stopping_after(num_saved: int) -> Iterator[None]:
    """Leave the block once it has saved `num_saved` tensors. Checkpoint's hooks get each of them."""
    outer_pack, outer_unpack = _checkpoint_hooks()
    left = num_saved

    @never_compiled
    def pack(tensor: torch.Tensor) -> Any:
        nonlocal left
        packed = outer_pack(tensor)
        left -= 1
        if not left:
            raise _EnoughError
        return packed

    with contextlib.suppress(_EnoughError), saved_tensors_hooks(pack, outer_unpack):
        yield


_WAY_OUT = (
    "It depends on something that lowtide cannot put back: state outside of the model's objects, a nested function's "
    "variables, or work that is not the same twice. Give this module the fate keep or swap."
)


def _other_exchange(watch: Watch, why: str) -> RuntimeError:
    return watch.refusal_of(f"lowtide: the recomputed {watch} cannot be run again: {why}. {_WAY_OUT}")


class _Constant:
    """A handle on a tensor that cannot be modified."""

    __slots__ = ("_tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def open(self) -> torch.Tensor:
        return self._tensor


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else version_of(tensor)


class RegionRun:
    """One run of a region: first from the real inputs, later, in backward, from handles on them."""

    __slots__ = (
        "_flags",
        "_graphs",
        "_has_run",
        "call",
        "dropped",
        "has_changed_inputs",
        "input_keys",
        "inputs",
        "once",
        "state",
        "watch",
    )

    def __init__(self, call: Call, dropped: Dropped, watch: Watch, *, is_first: bool) -> None:
        """`is_first`: it is not known yet what the module writes to."""
        self.call = call
        self.dropped = dropped
        self.watch = watch
        self.once = KeptResults(dropped.keep, functools.partial(_other_exchange, watch))
        self.inputs: list[Any] = []
        self.input_keys = {storage_key(t.untyped_storage()) for t in map(inside, call.tensors) if is_plain(t)}
        self.has_changed_inputs = False
        self.state = RunState(watch, call.objects(), is_first=is_first)
        self.state.refuse_iterators()
        self._flags = [tensor.requires_grad for tensor in call.tensors]
        self._has_run = False
        self._graphs: list[type] | None = None
        """The compiled graphs of the first run; None for a module without compiled parts."""

    def run(self, pack: Callable[[torch.Tensor], Any], *, may_change_inputs: bool) -> Any:
        """The forward's output. `pack` makes a handle of an input; `may_change_inputs`: the module may write to its
        inputs, so they are copied first.

        Raises RuntimeError if inputs were written to although `may_change_inputs` is false, and for a module that
        writes to its own parameters.
        """
        tensors = self.call.tensors
        with disable_current_modes():
            copies = [tensor.detach().clone() for tensor in tensors] if may_change_inputs else None
            # From these `checkpoint` learns of which devices to save the random state.
            markers = [torch.empty(0, device=device) for device in {tensor.device: None for tensor in tensors}]
        versions = [_version(tensor) for tensor in tensors]
        # A tensor of inference mode can be neither saved nor written to: it stays as it is.
        self.inputs = [_Constant(tensor) if tensor.is_inference() else pack(tensor) for tensor in tensors]
        try:
            # No early stop of checkpoint's, whatever the caller has set: `_stopping_after` does that.
            with set_checkpoint_early_stop(False):
                output = checkpoint(self._body, *markers, use_reentrant=False)
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

    def _body(self, *markers: torch.Tensor) -> Any:
        if self._has_run:
            self.make_again()
            return None
        self._has_run = True
        self.dropped.leave_out(self.call.tensors)
        stops = [tensor.grad_fn for tensor in self.call.tensors]
        with _counting(self.dropped, self._differs), self.once.running(is_again=False):
            output = self.call.make_first()
        if has_compiled(self.call.module):
            self._graphs = graphs_between(_tensors_of(output), stops)
        return output

    def make_again(self) -> Any:
        """The second run, up to the last tensor that is needed. Called by `checkpoint` in backward."""
        tensors = self.open_inputs()
        dropped = self.dropped
        with self.replayed():
            if self._graphs is not None:
                self._make_compiled(tensors, self._graphs)
            elif dropped.is_filled_late:
                self.call.make(tensors)
            else:
                with _stopping_after(dropped.num_saved):
                    self.call.make(tensors)

    def _make_compiled(self, tensors: list[torch.Tensor], graphs: list[type]) -> None:
        """The second run of a module with compiled parts: to its end, because a compiled graph saves at its end."""
        before = num_compiled_graphs()
        output = self.call.make(tensors)
        found = graphs_between(_tensors_of(output), [tensor.grad_fn for tensor in tensors])
        if num_compiled_graphs() != before or found != graphs:
            raise self.watch.refusal_of(
                f"lowtide: the recomputed {self.watch} ran through other compiled code when it was run again for its "
                "backward pass: it was compiled anew since its forward, for other shapes, say, and other code may give "
                "other bits. Run backward before the next forward pass, mark the dimension as dynamic from the start "
                "(torch._dynamo.mark_dynamic), or give this module the fate keep or swap."
            )

    def make_whole(self) -> Any:
        """The second run, to its end. Returns its output."""
        tensors = self.open_inputs()
        with self.replayed():
            return self.call.make(tensors)

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """Inside, everything that the module reads is what it was before the first run (tensors/run_state.py). An error
        is raised in words of ours."""
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
        first = next((line for line in str(error).splitlines() if line), "").removeprefix("torch.utils.checkpoint: ")
        raise self.watch.refusal_of(
            f"lowtide: the recomputed {self.watch} did something else when it was run again for its backward pass. "
            f"{_WAY_OUT} (torch: {first})"
        ) from error

    def open_inputs(self) -> list[torch.Tensor]:
        """The inputs as they were, with the same need for gradients (else other tensors would be saved)."""
        tensors = [self._open_input(i).detach().requires_grad_(flag) for i, flag in enumerate(self._flags)]
        # A copy: the second run writes into them too, and there may be a third.
        return [tensor.clone() for tensor in tensors] if self.has_changed_inputs else tensors

    def _open_input(self, index: int) -> torch.Tensor:
        try:
            return self.inputs[index].open()
        except RuntimeError as error:
            if index in self.dropped.saved_inputs or "modified by an inplace operation" not in str(error):
                raise
            raise self.watch.refusal_of(
                f"lowtide: an input of the recomputed {self.watch} was modified in place after it "
                "had run, so it cannot be run again. Plain autograd does not need this input; give the module the "
                f"fate keep or swap, or do not write into its input. ({error})"
            ) from error

    def note_end(self, sequence: int) -> None:
        """`sequence`: autograd's number at the end of the first run. When backward is there, it needs the inputs."""
        for given in self.inputs:
            handle = given.local if isinstance(given, Wrapped) else given
            if isinstance(handle, Swapped):
                handle.site.last_use = max(handle.site.last_use, sequence)

    def claim_inputs(self) -> None:
        """One more reader of the inputs: a swapped one must not be released after its first reader."""
        for given in self.inputs:
            handle = given.local if isinstance(given, Wrapped) else given
            if isinstance(handle, Swapped):
                handle.site.num_readers += 1


def _tensors_of(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def own_hooks() -> saved_tensors_hooks:
    return saved_tensors_hooks(torch.Tensor.detach, lambda tensor: tensor)
