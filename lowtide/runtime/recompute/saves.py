"""What a region saves: counted and fingerprinted in its first run, made and fingerprinted again in its second.

What: `FirstSaves` and `SecondSaves` are saved-tensor hooks. `Dropped` is what the first run dropped, and a `Path` what
it saved in one run, in order. As long as the next runs save the same, each only counts and fingerprints what that one
has shown to need it. A run that leaves the path looks at everything.

Cost: some 2 us a saved tensor in the first run, 0.7 us in the second, 0.5 us when backward reads it, which is less than
checkpoint's own hooks take; the fingerprints of the frontier (flow.py). Not covered: how they are compared
(fingerprint.py, region.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple
from weakref import ref

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import CheckpointError

from lowtide.runtime.recompute.fingerprint import Fingerprints, Print
from lowtide.runtime.recompute.flow import Flow
from lowtide.runtime.saved.stats import Counters, Ledger, Share
from lowtide.tensors.compiled import never_compiled
from lowtide.tensors.kinds import is_plain
from lowtide.tensors.private import base_of, is_view, next_sequence_number, storage_key, version_of
from lowtide.tensors.view import TensorOrigin, modified_error, version_alias
from lowtide.tensors.wrappers import inside

Row = tuple[int, type, torch.Size, torch.dtype]
"""Of a saved tensor: how many autograd nodes the run had made before it, the class of its own node, shape and type."""


class SavedRole(NamedTuple):
    """What is to be done with a saved tensor."""

    nbytes: int
    """To count: 0 if it is not the first of an activation's storage; -1 if that is larger than the tensor."""
    is_fingerprinted: bool
    is_lasting: bool
    """It is a parameter, or a view of one, and stays anyway."""


@dataclass(slots=True, kw_only=True)
class Path:
    """What a module saved in one run, in order. Once learned it is shared by all runs that follow it."""

    rows: list[Row] = field(default_factory=list)
    roles: list[SavedRole] = field(default_factory=list)
    origins: list[TensorOrigin] = field(default_factory=list)
    saved_inputs: set[int] = field(default_factory=set)
    """The inputs that plain autograd would save in the region. The others are needed only to run it again."""
    function_roles: list[bool] = field(default_factory=list)
    """Of the storages that `autograd.Function`s of the run keep on `ctx`: whether it does not save them, too."""
    is_filled_late: bool = False
    """Whether the last operator that saves something may fill it after saving it, as `rrelu` does."""


class Dropped:
    """What one run of a region dropped: how many bytes, their fingerprints, and whether they have been recomputed."""

    def __init__(self, counters: Counters, ledger: Ledger, note: Callable[[torch.Tensor], bool]) -> None:
        self.counters = counters
        self.ledger = ledger
        # Called once for each storage that the region would have saved. Returns whether it is an activation.
        self.note: Callable[[torch.Tensor], bool] | None = note
        """None once the first run is over."""
        self.nbytes = 0
        self.is_back = False
        self._kept_bytes = 0
        self.has_results = False
        """Something stays for the second run."""
        self._results: set[int] = set()
        """Kept, and not saved so far, by the key of the storage."""
        self._share: Share | None = None
        self._seen: dict[int, tuple[StorageWeakRef, bool]] = {}
        self._inputs: dict[int, int] = {}
        self.path = Path()
        """Its own, or the one that it follows."""
        self.prints: dict[int, Print] = {}
        """Fingerprints, by number of the saved tensor."""
        self.saved: list[ref[DroppedTensor]] = []

    def raise_plain(self) -> None:
        """Raise plain autograd's error if something that the region saved was modified since."""
        for found in self.saved:
            saved = found()
            if saved is not None:
                self.check(saved)

    def check(self, saved: DroppedTensor) -> None:
        """Raise plain autograd's error if a saved tensor was modified since."""
        now = version_of(saved.alias)
        if now != saved.version:
            origin = self.path.origins[saved.number]
            raise modified_error(saved.alias, self.path.rows[saved.number][2], now, saved.version, origin)

    def count(self, tensor: torch.Tensor) -> tuple[bool, bool]:
        """Add a storage that the region would have saved. Returns whether it was added, and whether the run has made
        it. Units: bytes."""
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        seen = self._seen.get(key)
        if seen is not None and not seen[0].expired():
            if key in self._inputs:
                self.path.saved_inputs.add(self._inputs[key])
            elif key in self._results:
                self._results.remove(key)
                self.counters.retained_input_bytes -= storage.nbytes()
            return False, seen[1]
        is_own = self.note is not None and self.note(tensor)
        self._seen[key] = StorageWeakRef(storage), is_own
        if is_own:
            self.nbytes += storage.nbytes()
        return is_own, is_own

    def leave_out(self, tensors: list[torch.Tensor]) -> None:
        """Do not count the region's own inputs: they are counted where they are kept or swapped."""
        for index, tensor in enumerate(map(inside, tensors)):
            if is_plain(tensor):
                storage = tensor.untyped_storage()
                self._seen[storage_key(storage)] = StorageWeakRef(storage), False
                self._inputs[storage_key(storage)] = index

    def keep(self, result: torch.Tensor) -> None:
        """A fresh tensor that the first run got stays for the second one: it is kept, not dropped."""
        storage = result.untyped_storage()
        self._seen[storage_key(storage)] = StorageWeakRef(storage), False
        self._results.add(storage_key(storage))
        self.has_results = True
        self._kept_bytes += storage.nbytes()
        self.counters.kept_bytes += storage.nbytes()
        self.counters.retained_input_bytes += storage.nbytes()  # until the region saves it
        self._hold()

    def count_functions(self, gone: dict[int, torch.UntypedStorage], left: dict[int, torch.UntypedStorage]) -> None:
        """Storages that `autograd.Function`s of the run let go, and those that they keep, by key. What the run saves
        itself is counted already."""
        role = self.path.function_roles
        if len(role) != len(gone):
            role = self.path.function_roles = [key not in self._seen for key in gone]
        self.nbytes += sum(storage.nbytes() for storage, counts in zip(gone.values(), role, strict=True) if counts)
        self.counters.function_bytes += sum(storage.nbytes() for storage in left.values())

    def _hold(self) -> None:
        nbytes = self._kept_bytes + (self.nbytes if self.is_back else 0)
        if self._share is None:
            self._share = self.ledger.hold(self, nbytes)
        else:
            self.ledger.change(self._share, nbytes)

    def forward_done(self) -> None:
        """The first run is over."""
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


@dataclass(slots=True, weakref_slot=True, eq=False)
class DroppedTensor:
    """What autograd holds of a tensor that a region saved: its number, and an alias that tells its version."""

    number: int
    version: int
    alias: torch.Tensor


class _Prints:
    """Fingerprints of what a run saves. What its operator may yet fill is looked at when that one is over."""

    def __init__(self, fingerprints: Fingerprints) -> None:
        self._fingerprints = fingerprints
        self._late: list[tuple[int, torch.Tensor]] = []
        self._place = -1
        self.found: dict[int, Print] = {}

    def add(self, number: int, tensor: torch.Tensor, place: int) -> None:
        """`place`: how many nodes the run has made before."""
        if self._late and place != self._place:
            self.finish()
        if not tensor.requires_grad and _may_be_filled_late(tensor):
            self._late.append((number, tensor))
            self._place = place
        else:
            self.found[number] = self._fingerprints.of(tensor)

    def finish(self) -> None:
        for number, tensor in self._late:
            self.found[number] = self._fingerprints.of(tensor)
        self._late.clear()


class FirstSaves:
    """The saved-tensor hooks of a first run."""

    def __init__(
        self,
        dropped: Dropped,
        fingerprints: Fingerprints,
        inputs: list[torch.Tensor],
        path: Path | None,
        flow: Flow | None,
        *,
        lets_weights_go: bool = False,
    ) -> None:
        """`inputs`: of the region. `path`: that it is expected to follow. `lets_weights_go`: weights come and go too,
        so that none of their bytes is held."""
        self._lets_weights_go = lets_weights_go
        self._dropped = dropped
        self._inputs = inputs
        self._path = self._follows = path
        self._flow = flow
        self._prints = _Prints(fingerprints)
        self._is_deep = fingerprints.is_deep
        self._start = next_sequence_number()
        self._rows: list[Row] = []
        """Of the path, as long as each tensor is as it was."""
        self._roles: list[SavedRole] = []
        if path is not None:
            self._rows, self._roles = path.rows, path.roles
            dropped.path = path
        else:
            dropped.leave_out(inputs)

    @never_compiled
    def _pack(self, tensor: torch.Tensor) -> DroppedTensor:
        dropped, rows = self._dropped, self._rows
        number = len(dropped.saved)
        row = next_sequence_number() - self._start, type(tensor.grad_fn), tensor.shape, tensor.dtype
        if number < len(rows) and rows[number] == row and not dropped.has_results:
            role = self._roles[number]
            if role.nbytes:
                dropped.nbytes += role.nbytes if role.nbytes > 0 else inside(tensor).untyped_storage().nbytes()
        else:
            role = self._role(tensor, number, row)
        if role.is_fingerprinted:
            self._prints.add(number, tensor, row[0])
        is_held = role.is_lasting and not self._lets_weights_go
        saved = DroppedTensor(number, version_of(tensor), tensor if is_held else version_alias(tensor))
        dropped.saved.append(ref(saved))
        return saved

    def _role(self, tensor: torch.Tensor, number: int, row: Row) -> SavedRole:
        """What to do with a tensor that is not as it was in the run before."""
        dropped, path = self._dropped, self._follows
        if path is None or number >= len(path.rows) or path.rows[number][:2] != row[:2] or dropped.has_results:
            return self._look(tensor, number, row)
        # Another shape: still on the path. From here on rows are this run's own.
        if dropped.path is path:
            self._rows, dropped.path = [], replace(path, rows=path.rows[:number])
        dropped.path.rows.append(row)
        role = path.roles[number]
        if role.nbytes:
            dropped.nbytes += inside(tensor).untyped_storage().nbytes()
        return role

    def _look(self, tensor: torch.Tensor, number: int, row: Row) -> SavedRole:
        """Off the path: what to do with a tensor. It is counted already."""
        dropped, local, place = self._dropped, inside(tensor), row[0]
        if self._follows is not None:
            self._follows, self._rows = None, []
            dropped.path = Path(rows=dropped.path.rows[:number], origins=dropped.path.origins[:number])
            dropped.leave_out(self._inputs)
        path = dropped.path
        path.rows.append(row)
        is_part = is_view(tensor)
        path.origins.append(TensorOrigin.of(tensor))
        is_first, is_own = dropped.count(local) if is_plain(local) else (False, True)
        if number == 0 or path.rows[number - 1][0] != place:
            path.is_filled_late = False
        if not tensor.requires_grad and _may_be_filled_late(tensor):
            path.is_filled_late = True
        if self._flow is None:
            # Bytes in a row may be the workspace of a recurrent kernel, which is partly unwritten memory.
            is_fingerprinted = is_own and not (local.dtype is torch.uint8 and local.dim() == 1)
        else:
            self._flow.save(tensor)
            is_fingerprinted = True
        nbytes = local.numel() * local.itemsize if is_first else 0
        if is_first and nbytes != local.untyped_storage().nbytes():
            nbytes = -1
        role = SavedRole(nbytes, is_fingerprinted, isinstance(base_of(tensor) if is_part else tensor, nn.Parameter))
        path.roles.append(role)
        return role

    @contextlib.contextmanager
    def hooked(self, unpack: Callable[[DroppedTensor], torch.Tensor]) -> Iterator[None]:
        """Inside, what is saved is dropped. Autograd holds this object and `unpack` as long as the graph lives: there
        must be no way from them to the graph."""
        try:
            with saved_tensors_hooks(self._pack, unpack):
                yield
            self._prints.finish()
        finally:
            self._inputs = []
            self._dropped.prints = self._prints.found

    def learned(self) -> Path | None:
        """The path of a run that was watched; None for one that followed a path, or left it."""
        dropped, path = self._dropped, self._follows
        if path is not None and len(dropped.saved) == len(path.rows):
            return path
        if self._flow is None or self._path is not None or dropped.has_results:
            return None
        frontier = self._flow.own if self._is_deep else self._flow.frontier
        dropped.prints = {number: dropped.prints[number] for number in frontier}
        roles = enumerate(dropped.path.roles)
        dropped.path.roles = [one._replace(is_fingerprinted=number in frontier) for number, one in roles]
        return dropped.path


class EnoughError(BaseException):
    """A second run has saved all that is needed. Not an `Exception`, because a forward may catch those."""


class SecondSaves:
    """The saved-tensor hooks of a second run."""

    def __init__(self, dropped: Dropped, fingerprints: Fingerprints, *, to_the_end: bool) -> None:
        self._dropped = dropped
        self._prints = _Prints(fingerprints)
        self._left = -1 if to_the_end else len(dropped.saved)
        self.made: list[torch.Tensor] = []
        """What it has saved, without its graph."""

    @never_compiled
    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        made = self.made
        number = len(made)
        alone = tensor.detach() if tensor.requires_grad else tensor
        made.append(alone)
        if number in self._dropped.prints:
            self._prints.add(number, tensor, next_sequence_number())
        if number + 1 == self._left:
            raise EnoughError
        return alone

    @contextlib.contextmanager
    def hooked(self) -> Iterator[None]:
        """Inside, what is saved is held here. It is left after the last tensor that is needed."""
        try:
            with saved_tensors_hooks(self._pack, lambda tensor: tensor):
                yield
        except EnoughError:
            pass
        self._prints.finish()

    def compare_kinds(self) -> None:
        """Raise CheckpointError unless it has saved as many tensors as the first run, of the same shapes and types."""
        rows, made = self._dropped.path.rows, self.made
        num_saved = len(self._dropped.saved)
        for row, tensor in zip(rows, made, strict=False):
            if tensor.shape != row[2] or tensor.dtype is not row[3]:
                raise CheckpointError(
                    f"a tensor that it saved had shape {list(row[2])} and {row[3]}, and has shape {list(tensor.shape)} "
                    f"and {tensor.dtype}"
                )
        # A backward pass that begins inside of the first run needs only what that one has saved so far.
        if len(made) < num_saved or (len(made) > num_saved and self._dropped.note is None):
            raise CheckpointError(f"it saved {len(made)} tensors, and had saved {num_saved}")

    def refuse_emptied(self) -> None:
        """Raise CheckpointError for a tensor that backward will read, and whose memory was given back since."""
        for found, tensor in zip(self._dropped.saved, self.made, strict=False):
            if found() is not None and is_plain(tensor) and tensor.numel() and not tensor.untyped_storage().nbytes():
                raise CheckpointError(f"it saved a tensor of shape {list(tensor.shape)}, and then emptied its storage")

    @property
    def prints(self) -> list[Print]:
        """Of those of which the first run has some, in its order."""
        return [self._prints.found[number] for number in self._dropped.prints]
