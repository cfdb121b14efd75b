"""Cells: what recipes start from and what they make, one for each node of one forward pass.

What: a solved plan gives single storages the fate `recompute`: their tensor is dropped when autograd saves it, and made
again in backward by a short recipe. For each node that takes part there is a cell:

- `KeptCell` holds a detached alias;
- `SwappedCell` refers to a `Site` of the mover, of which the recipes that start from it are further readers;
- `MadeCell` holds a recipe and links to the cells, parameters and buffers that it starts from.

Who owns what: the handles that autograd holds own their cells, and a made cell owns the cells it starts from. Nothing
else does once the forward is over, so a graph that dies takes its cells along, in any order.

A made cell runs at most once in a backward, however many handles and recipes read it. If backward frees the graph as
it goes (no `retain_graph`), what was made replaces the links at once: the inputs are needed no longer. Otherwise the
result is held until its last reader has it, and made again in the next backward.

Versions: a handle checks that its own tensor was not modified since it was saved, with the words of plain autograd; a
made cell checks what its recipe starts from, and says so in words of its own.

Cost: some 30 us a made cell in backward, with a recipe of one small operator. Not covered: when a cell is made, and
whether its recipe still fits this forward (runtime/weaver.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from lowtide.catalog.site import Geometry
from lowtide.runtime.handle import Kept, View
from lowtide.runtime.stats import Ledger
from lowtide.runtime.swap import Mover
from lowtide.runtime.tape import Site, Tape

# How many dropped cells may be made to try a recipe out.
_MAX_TRIED = 64

Trial: TypeAlias = dict[int, torch.UntypedStorage]
"""What was made to try a recipe out, by `id` of the cell."""


class TrialError(Exception):
    """A recipe could not be tried out."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How a tensor looks at a storage."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Shape:
        return cls(tuple(tensor.size()), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)

    @classmethod
    def from_geometry(cls, geometry: Geometry) -> Shape:
        return cls(geometry.size, geometry.stride, geometry.offset, getattr(torch, geometry.dtype))

    def end_bytes(self) -> int:
        """Bytes from the start of the storage to the end of the last element."""
        if 0 in self.size:
            return 0
        last = sum((count - 1) * step for count, step in zip(self.size, self.stride, strict=True))
        return (self.offset + last + 1) * self.dtype.itemsize

    def over(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """A tensor of this shape over `storage`."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)


class Cell(Protocol):
    """What a recipe may start from."""

    shape: Shape
    last_use: int
    """Autograd's sequence number of the last save that needs it, directly or through recipes."""
    num_readers: int

    @property
    def nbytes(self) -> int:
        """Of the storage."""

    def is_intact(self) -> bool:
        """Whether its bytes are still those that it was made for."""

    def read(self) -> torch.UntypedStorage:
        """The bytes on the device, for one of `num_readers`."""

    def peek(self, trial: Trial) -> torch.UntypedStorage:
        """The bytes, beside the course of things: nothing is counted, and nothing is held that was not."""


class KeptCell:
    """A node that stays on the device. Carries its bytes in the ledger."""

    __slots__ = ("alias", "last_use", "ledger", "nbytes", "num_readers", "shape", "version")

    def __init__(self, tensor: torch.Tensor, ledger: Ledger) -> None:
        # Before anything can fail: the finalizer runs in any case.
        self.nbytes = tensor.untyped_storage().nbytes()
        self.ledger = ledger
        ledger.add(self.nbytes)
        self.alias = tensor.detach()
        self.version = tensor._version
        self.shape = Shape.of(tensor)
        self.last_use = 0
        self.num_readers = 0

    def is_intact(self) -> bool:
        return self.alias._version == self.version

    def read(self) -> torch.UntypedStorage:
        return self.alias.untyped_storage()

    def peek(self, trial: Trial) -> torch.UntypedStorage:
        return self.alias.untyped_storage()

    def __del__(self) -> None:
        self.ledger.subtract(self.nbytes)


class SwappedCell:
    """A node on a slower tier. The mover counts those who read it."""

    __slots__ = ("shape", "site", "view")

    def __init__(self, site: Site, view: View) -> None:
        self.site = site
        self.view = view
        self.shape = Shape(tuple(view.size), view.stride, int(view.offset), view.witness.dtype)

    @property
    def nbytes(self) -> int:
        return self.site.copy.nbytes

    @property
    def last_use(self) -> int:
        return self.site.last_use

    @last_use.setter
    def last_use(self, sequence: int) -> None:
        self.site.last_use = sequence

    @property
    def num_readers(self) -> int:
        return self.site.num_readers

    @num_readers.setter
    def num_readers(self, count: int) -> None:
        self.site.num_readers = count

    def is_intact(self) -> bool:
        return self.view.witness._version == self.view.version

    def read(self) -> torch.UntypedStorage:
        return self.site.read()

    def peek(self, trial: Trial) -> torch.UntypedStorage:
        return self.site.mover.glance(self.site)


class Link:
    """One input of a recipe: a cell, and how to look at it."""

    __slots__ = ("cell", "name", "shape")

    def __init__(self, name: str, cell: Cell, shape: Shape) -> None:
        self.name = name
        self.cell = cell
        self.shape = shape

    def open(self) -> torch.Tensor:
        return self.shape.over(self.cell.read())

    def peek(self, trial: Trial) -> torch.Tensor:
        return self.shape.over(self.cell.peek(trial))

    def is_intact(self) -> bool:
        return self.cell.is_intact()


class StateLink:
    """One input of a recipe: a parameter or a buffer, as it was in the forward.

    `counter` has the version: the tensor itself, or the distributed one around it.
    """

    __slots__ = ("counter", "name", "shape", "tensor", "version")

    def __init__(self, name: str, tensor: torch.Tensor, shape: Shape, counter: torch.Tensor) -> None:
        self.name = name
        self.tensor = tensor
        self.counter = counter
        self.version = counter._version
        self.shape = shape

    def open(self) -> torch.Tensor:
        storage = self.tensor.untyped_storage()
        if self.shape.end_bytes() > storage.nbytes():
            raise RuntimeError(
                f"lowtide: parameter '{self.name}' is sharded at this moment of the backward pass, but something that "
                "was dropped is to be made from it. The step is not the one that the plan was made for; plan again, or "
                "give it the fate keep or swap."
            )
        return self.shape.over(storage)

    def peek(self, trial: Trial) -> torch.Tensor:
        return self.open()

    def is_intact(self) -> bool:
        return self.counter._version == self.version


class MadeCell:
    """A node that is dropped and made again. Until it is linked it holds its tensor's storage."""

    __slots__ = (
        "__weakref__",
        "device",
        "last_use",
        "links",
        "mover",
        "name",
        "nbytes",
        "num_readers",
        "num_reads",
        "program",
        "result",
        "shape",
        "source",
        "task",
        "version",
        "weak",
    )

    def __init__(self, name: str, program: Any, tensor: torch.Tensor, mover: Mover) -> None:
        storage = tensor.untyped_storage()
        self.name = name
        self.program = program
        self.mover = mover
        self.device = tensor.device
        self.nbytes = storage.nbytes()
        self.shape = Shape.of(tensor)
        self.version = tensor._version
        self.weak = StorageWeakRef(storage)
        self.links: tuple[Link | StateLink, ...] = ()
        self.last_use = 0
        self.num_readers = 0
        self.num_reads = 0
        self.task: int | None = None
        self.source: torch.UntypedStorage | None = storage
        """What it holds for good: the tensor's own storage, or what was made once nobody can ask for it again."""
        self.result: torch.UntypedStorage | None = None
        """What was made in the backward `task`, for those who have yet to read it."""
        mover.ledger.add(self.nbytes)

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether it stands for this tensor's storage at this version."""
        # No other storage can have this address: the weak reference holds the block that it is the address of.
        return tensor.untyped_storage()._cdata == self.weak.cdata and tensor._version == self.version

    def is_intact(self) -> bool:
        # What it makes is the value that the forward made, whatever was written to the tensor since.
        return True

    def drop(self, links: tuple[Link | StateLink, ...]) -> None:
        """From now on it is made when it is read."""
        self.links = links
        self.source = None
        self.mover.ledger.subtract(self.nbytes)
        for link in links:
            if isinstance(link, Link):
                link.cell.num_readers += 1

    def read(self) -> torch.UntypedStorage:
        """The storage, bit for bit what the forward produced."""
        if self.source is not None:
            return self.source
        task = torch._C._current_graph_task_id()
        on_the_way = self._make_what_is_missing(task)
        storage = self._take(task)
        for cell in on_the_way:
            # Outside of a backward there is no last reader to wait for.
            cell.let_go(-1)
        return storage

    def _make_what_is_missing(self, task: int) -> list[MadeCell]:
        """Make this cell and all that it needs. A chain may be as long as the model is deep: no recursion."""
        made: list[MadeCell] = []
        stack = [self]
        while stack:
            cell = stack[-1]
            cell._enter(task)
            if cell.source is not None or cell.result is not None:
                stack.pop()
                continue
            below = [link.cell for link in cell.links if isinstance(link, Link)]
            missing = [other for other in below if isinstance(other, MadeCell) and other.is_missing(task)]
            if missing:
                stack.extend(missing)
                continue
            cell._make(task)
            made.append(cell)
            stack.pop()
        return made

    def is_missing(self, task: int) -> bool:
        """Whether this backward has to make it (again)."""
        return self.source is None and (self.result is None or self.task != task)

    def _enter(self, task: int) -> None:
        if self.task != task:
            self._forget_result()
            self.task = task
            self.num_reads = 0

    def _make(self, task: int) -> None:
        storage = self.run()
        # Also true for a second backward of the same graph: only the last of them frees it.
        is_last = task != -1 and not torch._C._autograd._get_current_graph_task_keep_graph()
        self.mover.ledger.add(self.nbytes)
        if is_last:
            self.source = storage
            self.links = ()
            return
        self.result = storage
        if task != -1:
            self.mover.note_made(self, task)

    def run(self) -> torch.UntypedStorage:
        """Run the recipe. Raises RuntimeError if anything that it starts from was modified."""
        for link in self.links:
            if not link.is_intact():
                raise self._modified_error(link)
        output = self.program.run([link.open() for link in self.links], self.device)
        storage = output.untyped_storage()
        if storage.nbytes() != self.nbytes:
            raise RuntimeError(
                f"lowtide: the recipe of '{self.name}' made {storage.nbytes()} bytes in place of {self.nbytes}; the "
                "model is not the one that the plan was made for. Plan again."
            )
        return storage

    def peek(self, trial: Trial) -> torch.UntypedStorage:
        if self.source is not None:
            return self.source
        alive = torch.UntypedStorage._new_with_weak_ptr(self.weak.cdata) or trial.get(id(self))
        if alive is None:
            if len(trial) >= _MAX_TRIED or self.program.has_collectives:
                raise TrialError
            alive = trial[id(self)] = self.try_out(self.links, trial)
        return alive

    def try_out(self, links: tuple[Link | StateLink, ...], trial: Trial) -> torch.UntypedStorage:
        """What the recipe makes from `links`. Raises TrialError where too much would have to be made for it."""
        return self.program.run([link.peek(trial) for link in links], self.device).untyped_storage()

    def _take(self, task: int) -> torch.UntypedStorage:
        if self.source is not None:
            return self.source
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
            self.mover.ledger.subtract(self.nbytes)

    def _modified_error(self, link: Link | StateLink) -> RuntimeError:
        return RuntimeError(
            f"lowtide: '{link.name}' was modified in place after the forward had used it, so '{self.name}' cannot be "
            "made again from it. Plain autograd may not need it; give this site the fate keep or swap, or do not write "
            "into it before the backward pass."
        )

    def __del__(self) -> None:
        if self.source is not None or self.result is not None:
            self.mover.ledger.subtract(self.nbytes)


class KeptInCell(Kept):
    """A saved tensor that views a kept node. The cell has the bytes in the ledger."""

    __slots__ = ("cell", "mover", "tape")

    def __init__(self, tensor: torch.Tensor, cell: KeptCell, mover: Mover, tape: Tape) -> None:
        super().__init__(tensor)
        self.cell = cell
        self.mover = mover
        self.tape = tape

    def open(self) -> torch.Tensor:
        self.mover.follow(self.tape)
        return super().open()


class Made:
    """A saved tensor whose storage is a `MadeCell`."""

    __slots__ = ("cell", "tape", "view")

    def __init__(self, cell: MadeCell, tensor: torch.Tensor, tape: Tape) -> None:
        self.cell = cell
        self.tape = tape
        self.view = View(tensor)
        cell.num_readers += 1

    def open(self) -> torch.Tensor:
        """The tensor, made again if need be. Raises RuntimeError if it was modified in place since it was saved."""
        self.view.check()
        self.cell.mover.follow(self.tape)
        return self.view.over(self.cell.read())
