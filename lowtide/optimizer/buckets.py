"""Where the state of a bucket is between steps: a slot of a slower tier, and ordinary tensors over its bytes.

What: `StateBucket` is one bucket. It owns a slot, and for each tensor of state one over the slot's bytes, which stands
in `optimizer.state` between steps. `StateChunk` is what is copied and stepped at once: all of a bucket, or a stretch of
the elements of one large parameter, which has a bucket to itself. `movable` says which tensors of state can live so.
Why: whoever looks into `optimizer.state` between steps (a checkpoint, a logger, a user) finds a valid tensor with the
right bytes and of the right shape, only its device is another. Nothing is ever empty or out of date.
Each tensor has a storage of its own, which is a part of the slot: `torch.save` writes whole storages, and would write
the bucket for each of its tensors.
Cost: some microseconds a tensor when a home is made.

Not covered: tensors in nested containers of a state; wrapped tensors other than `DTensor`: both stay on the device.

Which bytes of the state stand where in a bucket: plain arithmetic over sizes.

What: `lay_out` puts tensors one behind the other, `runs` cuts a list of parameters into buckets, `stretch_for` cuts one
large parameter, `bucket_bytes_for` chooses how large buckets are.
Why: one copy moves a bucket. Per tensor, published systems pay 1.6 % of a step for the same bytes that cost them 0.2 %
packed. A bucket is also what a step needs on the device at a time, so it should not be larger than it must.
Cost: nothing. Not covered: large parameters that must be stepped whole; each is a bucket of its own.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lowtide.engines.base import Engine, Slot
from lowtide.tensors.optimizers import CUT_ELEMENTS
from lowtide.tensors.private import storage_key
from lowtide.tensors.view import Shape
from lowtide.tensors.wrappers import Shell, inside, is_distributed, shell_of
from lowtide.units import GIB, MIB

ALIGN_BYTES = 256
"""Where each tensor of a bucket begins: what kernels with wide loads ask for."""
PART_ALIGN_BYTES = 4096
"""Where each tensor of a bucket begins that is copied in parts: what engines ask for."""
MOST_BYTES = GIB
"""Largest bucket that can be asked for. A larger one moves no faster, and three of them are on the device at a time."""
USUAL_BYTES = 128 * MIB
"""Some 2.5 ms of a link of 55 GB/s, more than ten times what a bucket costs the host."""
LEAST_BYTES = 4096


def lay_out(sizes: Sequence[int], align_bytes: int = ALIGN_BYTES) -> tuple[tuple[int, ...], int]:
    """Where each of these tensors begins in a bucket, and how long the bucket is."""
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += -(-size // align_bytes) * align_bytes
    return tuple(starts), end


def runs(sizes: Sequence[int], most_bytes: float) -> list[range]:
    """Consecutive ones of `sizes` that stay within `most_bytes` together; one that does not by itself is alone."""
    found: list[range] = []
    start, total = 0, 0
    for index, size in enumerate(sizes):
        if index > start and total + size > most_bytes:
            found.append(range(start, index))
            start, total = index, 0
        total += size
    return [*found, range(start, len(sizes))] if sizes else []


def stretch_for(num_elements: int, bytes_per_element: float, bucket_bytes: int) -> int | None:
    """Elements of each stretch of a parameter, all about equal and at most a bucket; None where it fits into one."""
    unit_bytes = max(CUT_ELEMENTS * bytes_per_element, 1.0)
    most = max(int(bucket_bytes / unit_bytes), 1) * CUT_ELEMENTS
    if num_elements <= most:
        return None
    count = -(-num_elements // most)
    return -(-num_elements // (count * CUT_ELEMENTS)) * CUT_ELEMENTS


def bucket_bytes_for(state_bytes: int) -> int:
    """At least eight buckets, where they are not tiny then: fewer leave nothing to overlap."""
    return min(USUAL_BYTES, max(-(-state_bytes // 8), MIB))


Bucket = tuple[torch.UntypedStorage, ...]
"""The bytes of a piece on the device: one storage for each of its slots."""


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """One tensor of state: `optimizer.state[parameter][key]`."""

    parameter: torch.Tensor
    key: Hashable
    shape: Shape
    start_bytes: int
    nbytes: int
    shell: Shell | None
    """What goes around the plain tensor; None for a plain one."""

    def over(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The plain tensor, over the bytes of a bucket."""
        return self.shape.at(self.start_bytes // self.shape.dtype.itemsize).over(storage)

    def stretch(self, storage: torch.UntypedStorage, start: int, end: int, *, is_whole: bool) -> torch.Tensor:
        """Elements [start, end) in order of memory, over a storage of these only, or of the whole bucket."""
        offset = self.start_bytes // self.shape.dtype.itemsize + start if is_whole else 0
        return Shape((end - start,), (1,), offset, self.shape.dtype).over(storage)

    def dressed(self, local: torch.Tensor) -> torch.Tensor:
        return local if self.shell is None else self.shell.around(local)


class StateChunk:
    """What is copied and stepped at once. `slots`: the bucket's own; or of each entry the part with elements
    [start, end), in order of memory."""

    __slots__ = ("end", "home", "slots", "start")

    def __init__(self, home: StateBucket, slots: list[Slot], start: int = 0, end: int | None = None) -> None:
        self.home = home
        self.slots = slots
        self.start = start
        self.end = end
        """None: it is all of the bucket."""

    @property
    def nbytes(self) -> int:
        return sum(slot.nbytes for slot in self.slots)

    def overlaps(self, other: StateChunk) -> bool:
        return self is other or (self.home is other.home and None in (self.end, other.end))

    def stretches(self, bucket: Bucket | None) -> list[torch.Tensor]:
        """These elements of each entry, over `bucket`, or (None) over what of the home is on the device."""
        assert self.end is not None
        if bucket is None:
            storage = self.home.on_device()
            return [entry.stretch(storage, self.start, self.end, is_whole=True) for entry in self.home.entries]
        return [
            entry.stretch(storage, self.start, self.end, is_whole=False)
            for entry, storage in zip(self.home.entries, bucket, strict=True)
        ]


class StateBucket:
    """One bucket and where it lives. Plain data; the copies are made by transfers.py."""

    __slots__ = (
        "addresses",
        "entries",
        "hosts",
        "memories",
        "nbytes",
        "parameters",
        "pieces",
        "resident",
        "slot",
        "was_idle",
        "whole",
    )

    def __init__(self, slot: Slot, view: torch.Tensor, entries: list[Entry]) -> None:
        self.slot = slot
        self.nbytes = slot.nbytes
        self.entries = entries
        self.hosts = [entry.dressed(_own_part(view, entry)) for entry in entries]
        """What `optimizer.state` holds between steps, in the order of `entries`."""
        self.addresses = [_address_of(host) for host in self.hosts]
        self.memories = frozenset(storages_of(self.hosts))
        """What tells the storages of `hosts` apart from others."""
        self.parameters = list(dict.fromkeys(entry.parameter for entry in entries))
        self.resident: torch.UntypedStorage | None = None
        """The bytes on the device, where they could not be written to the slot."""
        self.was_idle = False
        """Whether no parameter of it had a gradient in the last step."""
        self.whole = StateChunk(self, [slot])
        self.pieces = [self.whole]

    @property
    def is_cut(self) -> bool:
        return self.pieces[0] is not self.whole

    def cut(self, ends: Iterable[int], engine: Engine) -> None:
        """Have it moved in stretches of the elements of its only parameter that end here."""
        assert len(self.parameters) == 1
        self.pieces, start = [], 0
        for end in ends:
            slots = [
                engine.part_of(self.slot, entry.start_bytes + start * size, (end - start) * size)
                for entry in self.entries
                for size in (entry.shape.dtype.itemsize,)
            ]
            self.pieces.append(StateChunk(self, slots, start, end))
            start = end

    def bind_host(self, state: Any) -> None:
        """Make `optimizer.state` show the bytes in the slot."""
        for entry, host in zip(self.entries, self.hosts, strict=True):
            state[entry.parameter][entry.key] = host

    def bind_device(self, state: Any, bucket: torch.UntypedStorage) -> list[torch.Tensor]:
        """Make `optimizer.state` show the bytes in `bucket`. Returns what it shows, in the order of `entries`."""
        shown = [entry.dressed(entry.over(bucket)) for entry in self.entries]
        for entry, tensor in zip(self.entries, shown, strict=True):
            state[entry.parameter][entry.key] = tensor
        return shown

    def on_device(self) -> torch.UntypedStorage:
        """The bytes of a home that could not be written to its slot."""
        assert self.resident is not None
        return self.resident

    def is_bound(self, state: Any) -> bool:
        """Whether `optimizer.state` still shows all of it and each tensor once, or somebody has put something else
        there (or, with `tensor.data = other`, into a tensor that is there), or a view of it in another place."""
        is_shown = all(
            state.get(entry.parameter, {}).get(entry.key) is host and _address_of(host) == address
            for entry, host, address in zip(self.entries, self.hosts, self.addresses, strict=True)
        )
        values = [value for parameter in self.parameters for value in state.get(parameter, {}).values()]
        return is_shown and sum(key in self.memories for key in storages_of(values)) == len(self.entries)


def _address_of(host: torch.Tensor) -> int:
    return inside(host).data_ptr()


def _own_part(view: torch.Tensor, entry: Entry) -> torch.Tensor:
    start = int(view.storage_offset()) + entry.start_bytes
    return entry.shape.over(view.untyped_storage()[start : start + entry.nbytes])


def movable(value: Any, device: torch.device | None, min_bytes: int) -> bool:
    """Whether this is a tensor of state that can live elsewhere: on `device` (None: anywhere), dense, not small."""
    if not isinstance(value, torch.Tensor) or not (type(value) is torch.Tensor or is_distributed(value)):
        return False
    local = inside(value)
    return (
        type(local) is torch.Tensor
        and local.layout == torch.strided
        and device in (None, local.device)
        and local.dim() > 0
        and local.nbytes >= max(min_bytes, 1)
        and not local.requires_grad
        and not local.is_conj()
        and not local.is_neg()
        and is_dense(local)
    )


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill a stretch of memory, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def describe(
    values: Iterable[tuple[torch.Tensor, Hashable, torch.Tensor]], align_bytes: int = ALIGN_BYTES
) -> tuple[list[Entry], int]:
    """The entries of a bucket with these tensors (parameter, key, value), and its bytes."""
    values = list(values)
    starts, nbytes = lay_out([inside(value).nbytes for _, _, value in values], align_bytes)
    entries = [
        Entry(parameter, key, Shape.of(inside(value)).at(0), start, inside(value).nbytes, shell_of(value))
        for (parameter, key, value), start in zip(values, starts, strict=True)
    ]
    return entries, nbytes


def storages_of(values: Iterable[Any]) -> list[int]:
    """What tells the storages of these tensors apart."""
    return [storage_key(inside(v).untyped_storage()) for v in values if isinstance(v, torch.Tensor) and _has_storage(v)]


def _has_storage(value: torch.Tensor) -> bool:
    local = inside(value)
    return type(local) in (torch.Tensor, torch.nn.Parameter) and local.layout == torch.strided
