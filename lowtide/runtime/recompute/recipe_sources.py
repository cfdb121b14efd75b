"""Sources of recipes: the storages that recipes start from or recompute, one for each node of one forward pass.

What: a solved plan gives single storages the fate `recompute`: their tensor is dropped when autograd saves it, and a
short recipe recomputes it in backward. Each node that takes part has a source:

- `HeldSource` refers to the handle on a tensor that stays on the device, under a limit until the guard needs the room
  (runtime/offload/spill.py), or to an `OffloadedStorage` of the scheduler, which counts each recipe as a reader;
- `RecomputedSource` holds a recipe, and links to the sources that the recipe starts from: a parameter or a buffer has a
  `StateSource`.

Not to be confused with `Copy.source` (runtime/offload/site.py): that is the original storage on the device, from which
a copy out reads.

Who owns what: the handles that autograd holds own their sources, and a recomputed source owns the sources it starts
from. Once the forward is over nothing else does, so a graph that dies takes its sources along, in any order.

A recomputed source runs at most once in a backward, however many handles and recipes read it. If backward frees the
graph as it goes (no `retain_graph`), the result replaces the links at once, because the inputs are no longer needed.
Otherwise the result is held until its last reader has it, and recomputed in the next backward.

Versions: a handle checks that its own tensor was not modified since it was saved, and raises plain autograd's error. A
recomputed source checks what its recipe starts from, and raises an error with words of its own. And its result must
have the fingerprint of what it dropped (fingerprint.py).

Cost: some 30 us a recomputed source in backward, with a recipe of one small operator. Not covered: when a source is
created, and whether its recipe fits this forward (runtime/recompute/recipe_graph.py).
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from lowtide.recipes.proof import Start
from lowtide.runtime.offload.scheduler import OffloadScheduler
from lowtide.runtime.offload.site import OffloadedStorage, PrefetchQueue
from lowtide.runtime.offload.spill import Guard, Spillable
from lowtide.runtime.recompute.fingerprint import Fingerprints
from lowtide.runtime.saved.handle import Kept, Shared
from lowtide.tensors.codecs import Decoder
from lowtide.tensors.modes import Modes
from lowtide.tensors.private import current_graph_task_id, keeps_graph, storage_key, version_of
from lowtide.tensors.view import Shape


class Source(Protocol):
    """A storage that a recipe may start from. Methods with a body are right for one that is always there."""

    def is_intact(self) -> bool:
        """Whether its bytes are still those of the forward pass."""

    def add_readers(self, count: int) -> None:
        """So many more read it in backward: saved tensors, and recipes."""
        return

    def needed_until(self, sequence: int) -> bool:
        """The save with this sequence number of autograd's needs it, directly or through recipes. Whether all that it
        is recomputed from is needed longer than was known."""
        return False

    def read(self) -> torch.UntypedStorage:
        """The storage with the bytes on the device, for one of its readers."""

    def start(self, name: str, shape: Shape) -> Start:
        """Its identity, for the proof that a recipe starts from it, seen as `shape`."""


class SourceLink(NamedTuple):
    """One input of a recipe: a source, and the shape in which the recipe reads it."""

    name: str
    source: Source
    shape: Shape

    def open(self) -> torch.Tensor:
        storage = self.source.read()
        if self.shape.end_bytes() > storage.nbytes():
            raise RuntimeError(
                f"lowtide: parameter '{self.name}' is sharded at this moment of the backward pass, but something that "
                "was dropped is to be made from it. The step is not the one that the plan was made for; plan again, or "
                "give it the fate keep or swap."
            )
        return self.shape.over(storage)

    def start(self) -> Start:
        return self.source.start(self.name, self.shape)


class StateSource(Source):
    """A parameter or a buffer, as it was in the forward.

    `counter` is the tensor that has the version: the tensor itself, or the distributed one around it. `weights`: the
    handle that has `tensor` come and go, which is a parameter then, and is where it was in the forward now.
    """

    def __init__(self, tensor: torch.Tensor, counter: torch.Tensor, weights: Any = None) -> None:
        self._tensor = tensor
        self._counter = counter
        self._version = version_of(counter)
        self._weights = weights
        self._key = storage_key(tensor.untyped_storage())

    def is_intact(self) -> bool:
        return version_of(self._counter) == self._version

    def read(self) -> torch.UntypedStorage:
        if self._weights is not None:
            self._weights.bring(self._tensor)
        return self._tensor.untyped_storage()

    def start(self, name: str, shape: Shape) -> Start:
        return Start(name, self._key, version_of(self._tensor), shape)


class HeldSource(Source):
    """The source of a node whose bytes come without a recipe: they stay on the device (under a limit until the guard
    needs the room), or are swapped."""

    def __init__(self, handle: Kept | Shared, tensor: torch.Tensor) -> None:
        """`handle`: what autograd has of `tensor`, or would have."""
        storage = tensor.untyped_storage()
        self._view = handle if isinstance(handle, Kept) else handle.view
        self._holder = handle if isinstance(handle, Kept) else handle.source
        if type(handle) is Kept:
            handle.bytes_of = None  # the ledger knows it all the same; recipes need all of it, not a rank's slice
        self._key = storage_key(storage)
        self.nbytes = storage.nbytes()
        self.shape = Shape.of(tensor)

    def add_readers(self, count: int) -> None:
        if isinstance(self._holder, Spillable | OffloadedStorage):
            self._holder.num_readers += count

    def needed_until(self, sequence: int) -> bool:
        if isinstance(self._holder, OffloadedStorage):
            self._holder.last_use = max(self._holder.last_use, sequence)
        return False

    def is_intact(self) -> bool:
        return self._view.is_intact()

    def read(self) -> torch.UntypedStorage:
        return self._holder.read()

    def start(self, name: str, shape: Shape) -> Start:
        return Start(name, self._key, self._view.version, shape)


class RecomputedSource(Source):
    """The source of a node that is dropped and recomputed. Until `drop` it holds its tensor's storage."""

    def __init__(
        self,
        name: str,
        program: Any,
        tensor: torch.Tensor,
        scheduler: OffloadScheduler,
        *,
        fingerprints: Fingerprints,
        modes: Modes,
    ) -> None:
        storage = tensor.untyped_storage()
        self.modes = modes
        self.fingerprints = fingerprints
        self.fingerprint: torch.Tensor | int | None = None
        self.name = name
        self.program = program
        self.scheduler = scheduler
        self.device = tensor.device
        self.nbytes = storage.nbytes()
        self.shape = Shape.of(tensor)
        self.version = version_of(tensor)
        self.weak = StorageWeakRef(storage)
        self.alias: torch.Tensor | None = tensor.detach()
        """An alias that shows the tensor's version, as long as the tensor stays."""
        self.links: tuple[SourceLink, ...] = ()
        self.last_use = 0
        """Autograd's sequence number of the last save that needs it, directly or through recipes."""
        self.num_readers = 0
        self.num_reads = 0
        self.kept: Spillable | None = None
        """What holds the storage, if it had to stay and the guard may spill it."""
        self.task: int | None = None
        self.held: torch.UntypedStorage | None = storage
        """What it holds until it dies: the tensor's own storage, or the result of the last backward of its graph."""
        self.result: torch.UntypedStorage | None = None
        """What was recomputed in the backward `task`, for the readers that are still to come."""
        self.share = scheduler.ledger.hold(self, self.nbytes)

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether it stands for this tensor's storage at this version."""
        # No other storage can have this address: the weak reference keeps the block at this address alive.
        return storage_key(tensor.untyped_storage()) == self.weak.cdata and version_of(tensor) == self.version

    def is_intact(self) -> bool:
        if self.kept is not None:
            return self.kept.is_intact()
        # Once dropped, it recomputes the value of the forward, whatever was written to the tensor since.
        return self.alias is None or version_of(self.alias) == self.version

    def add_readers(self, count: int) -> None:
        self.num_readers += count
        if self.kept is not None:
            self.kept.num_readers += count

    def needed_until(self, sequence: int) -> bool:
        is_longer = self.last_use < sequence
        self.last_use = max(self.last_use, sequence)
        return is_longer

    def note_saved(self, sequence: int) -> None:
        """The operator with this sequence number of autograd's has saved it."""
        self.last_use = sequence
        if self.kept is not None:
            self.kept.sequence = sequence

    def stay(self, guard: Guard, queue: PrefetchQueue) -> None:
        """It has to stay; from now on the guard may spill it."""
        assert self.alias is not None
        self.kept = kept = guard.offer(self.alias, self.share, queue)
        kept.version, kept.sequence, kept.num_readers = self.version, self.last_use, self.num_readers
        self.held = self.alias = None

    def drop(self, links: tuple[SourceLink, ...]) -> None:
        """Drop the storage. From now on it is recomputed when it is read."""
        assert self.held is not None
        self.fingerprint = self.fingerprints.take(self.held)
        self.links = links
        self.held = self.alias = None
        self.scheduler.ledger.change(self.share, 0)
        for link in links:
            link.source.add_readers(1)

    def read(self) -> torch.UntypedStorage:
        """The storage, bit for bit what the forward produced."""
        if self.held is not None:
            return self.held
        if self.kept is not None:
            return self.kept.read()
        task = current_graph_task_id()
        # A decoder gives the same bits under all modes. And a look at the number of threads would set it, in a thread
        # in which torch has not been asked for it yet: other kernels of this backward pass would get other sums.
        is_as_it_was = isinstance(self.program, Decoder) or self.modes.is_still(Modes())
        with contextlib.nullcontext() if is_as_it_was else self.modes.again():
            on_the_way = self._make_what_is_missing(task)
        storage = self._take(task)
        for source in on_the_way:
            # Outside of a backward there is no last reader to wait for.
            source.let_go(-1)
        return storage

    def _make_what_is_missing(self, task: int) -> list[RecomputedSource]:
        """Recompute this source and all that it needs. No recursion: a chain may be as long as the model is deep."""
        made: list[RecomputedSource] = []
        stack = [self]
        while stack:
            source = stack[-1]
            source._enter(task)
            if not source.is_missing(task):
                stack.pop()
                continue
            below = [link.source for link in source.links]
            missing = [other for other in below if isinstance(other, RecomputedSource) and other.is_missing(task)]
            if missing:
                stack.extend(missing)
                continue
            source._make(task)
            made.append(source)
            stack.pop()
        return made

    def is_missing(self, task: int) -> bool:
        """Whether this backward still has to recompute it."""
        is_held = self.held is not None or self.kept is not None
        return not is_held and (self.result is None or self.task != task)

    def _enter(self, task: int) -> None:
        if self.task != task:
            self._forget_result()
            self.task = task
            self.num_reads = 0

    def _make(self, task: int) -> None:
        storage = self.run()
        assert self.fingerprint is not None
        self.fingerprints.compare(self.name, self.fingerprint, storage, task)
        # Also true for a second backward of the same graph: only the last of them frees it.
        is_last = task != -1 and not keeps_graph()
        self.scheduler.ledger.change(self.share, self.nbytes)
        if is_last:
            self.held = storage
            self.links = ()
            return
        self.result = storage
        if task != -1:
            self.scheduler.note_made(self, task)

    def run(self) -> torch.UntypedStorage:
        """Run the recipe. Raises RuntimeError if anything that it starts from was modified."""
        for link in self.links:
            if not link.source.is_intact():
                raise self._modified_error(link)
        output = self.program.run([link.open() for link in self.links], self.device)
        storage = output.untyped_storage()
        if storage.nbytes() != self.nbytes:
            raise RuntimeError(
                f"lowtide: the recipe of '{self.name}' made {storage.nbytes()} bytes in place of {self.nbytes}; the "
                "model is not the one that the plan was made for. Plan again."
            )
        return storage

    def start(self, name: str = "", shape: Shape | None = None) -> Start:
        return Start(name or self.name, self.weak.cdata, self.version, shape or self.shape)

    def _take(self, task: int) -> torch.UntypedStorage:
        if self.held is not None:
            return self.held
        storage = self.result
        assert storage is not None
        self.num_reads += 1
        if task != -1 and self.num_reads >= self.num_readers:
            self._forget_result()
        return storage

    def let_go(self, task: int) -> None:
        """The backward `task` is over."""
        if self.task == task:
            self._forget_result()

    def _forget_result(self) -> None:
        if self.result is not None:
            self.result = None
            self.scheduler.ledger.change(self.share, 0)

    def _modified_error(self, link: SourceLink) -> RuntimeError:
        return RuntimeError(
            f"lowtide: '{link.name}' was modified in place after the forward had used it, so '{self.name}' cannot be "
            "recomputed from it. Plain autograd may not need it; give this site the fate keep or swap, or do not write "
            "into it before the backward pass."
        )
