"""Buckets: where optimizer state is between steps, which bytes stand where in one, and what may be cut.

What: a `StateBucket` owns a slot of a slower tier, and for each tensor of state one over the slot's bytes, which stands
in `optimizer.state` between steps. `movable` says which tensors of state can live so. A `StateChunk` is what is copied
and stepped at once: all of a bucket, or a stretch of the elements of one large parameter, which has a bucket to itself.
Why: whoever looks into `optimizer.state` between steps (a checkpoint, a logger, a user) finds a valid tensor with the
right bytes and of the right shape; only its device is another. Each tensor has a storage of its own, a part of the
slot: `torch.save` writes whole storages, and would write the bucket for each of its tensors.
Why buckets: one copy moves a bucket. Per tensor, published systems pay 1.6 % of a step for the same bytes that cost
them 0.2 % packed. A bucket is also what a step needs on the device at a time, so it is no larger than it must be.

Why stretches: a step has three buckets on the device. Were a bucket never smaller than the state of the largest
parameter, the embedding of a large vocabulary alone would take gigabytes of each. Elements are taken in order of
memory, so rows and columns do not matter, and a stretch is a plain one-dimensional view. Stretches are multiples of
65,536 elements (`CUT_ELEMENTS`), so that torch's kernels find the vectors and chunks that the whole parameter has.
docs/optimizer.md has what is stepped whole all the same, in a bucket as large as it must be.

Cost: some microseconds a tensor when a bucket is made, and a large parameter and step.
Not covered: tensors in nested containers of a state; wrapped tensors other than `DTensor`: both stay on the device.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lowtide.engines.base import Engine, Slot
from lowtide.tensors.optimizers import CUT_ELEMENTS, is_alike_in_stretches
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


def bucket_bytes_for(state_bytes: int) -> int:
    """At least eight buckets, where they are not tiny then: fewer leave nothing to overlap."""
    return min(USUAL_BYTES, max(-(-state_bytes // 8), MIB))


Buffer = tuple[torch.UntypedStorage, ...]
"""The bytes of a chunk on the device: one storage for each of its slots."""


@dataclass(frozen=True, slots=True, eq=False)
class StateTensor:
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
        return local if self.shell is None else self.shell(local)


@dataclass(slots=True, eq=False)
class StateChunk:
    """What is copied and stepped at once. `slots`: the bucket's own; or of each entry the part with elements
    [start, end), in order of memory."""

    bucket: StateBucket
    slots: list[Slot]
    start: int = 0
    end: int | None = None
    """None: it is all of the bucket."""

    @property
    def nbytes(self) -> int:
        return sum(slot.nbytes for slot in self.slots)

    def overlaps(self, other: StateChunk) -> bool:
        return self is other or (self.bucket is other.bucket and None in (self.end, other.end))

    def stretches(self, buffer: Buffer | None) -> list[torch.Tensor]:
        """These elements of each entry, over `buffer`, or (None) over what of the bucket is on the device."""
        assert self.end is not None
        if buffer is None:
            storage = self.bucket.on_device()
            return [entry.stretch(storage, self.start, self.end, is_whole=True) for entry in self.bucket.entries]
        return [
            entry.stretch(storage, self.start, self.end, is_whole=False)
            for entry, storage in zip(self.bucket.entries, buffer, strict=True)
        ]


class StateBucket:
    """One bucket and where it lives. Plain data; the copies are made by transfers.py."""

    def __init__(self, slot: Slot, view: torch.Tensor, entries: list[StateTensor]) -> None:
        self.slot = slot
        self.nbytes = slot.nbytes
        self.entries = entries
        memory, begin = view.untyped_storage(), int(view.storage_offset())
        spans = (slice(start := begin + entry.start_bytes, start + entry.nbytes) for entry in entries)
        self.hosts = [entry.dressed(entry.shape.over(memory[own])) for entry, own in zip(entries, spans, strict=True)]
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
        self.chunks = [self.whole]

    @property
    def is_cut(self) -> bool:
        return self.chunks[0] is not self.whole

    def cut(self, ends: Iterable[int], engine: Engine) -> None:
        """Have it moved in stretches of the elements of its only parameter that end here."""
        assert len(self.parameters) == 1
        self.chunks, start = [], 0
        for end in ends:
            slots = [
                engine.part_of(self.slot, entry.start_bytes + start * size, (end - start) * size)
                for entry in self.entries
                for size in (entry.shape.dtype.itemsize,)
            ]
            self.chunks.append(StateChunk(self, slots, start, end))
            start = end

    def bind_host(self, state: Any) -> None:
        """Make `optimizer.state` show the bytes in the slot."""
        for entry, host in zip(self.entries, self.hosts, strict=True):
            state[entry.parameter][entry.key] = host

    def bind_device(self, state: Any, buffer: torch.UntypedStorage) -> list[torch.Tensor]:
        """Make `optimizer.state` show the bytes in `buffer`. Returns what it shows, in the order of `entries`."""
        shown = [entry.dressed(entry.over(buffer)) for entry in self.entries]
        for entry, tensor in zip(self.entries, shown, strict=True):
            state[entry.parameter][entry.key] = tensor
        return shown

    def on_device(self) -> torch.UntypedStorage:
        """The bytes of a bucket that could not be written to its slot."""
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
) -> tuple[list[StateTensor], int]:
    """The entries of a bucket with these tensors (parameter, key, value), and its bytes."""
    values = list(values)
    starts, nbytes = lay_out([inside(value).nbytes for _, _, value in values], align_bytes)
    entries = [
        StateTensor(parameter, key, Shape.of(inside(value)).at(0), start, inside(value).nbytes, shell_of(value))
        for (parameter, key, value), start in zip(values, starts, strict=True)
    ]
    return entries, nbytes


def bytes_of(value: Any) -> int:
    """What a tensor has on this rank; 0 for what has no bytes in one piece."""
    local = inside(value) if isinstance(value, torch.Tensor) else None
    return local.nbytes if local is not None and local.layout == torch.strided else 0


def storages_of(values: Iterable[Any]) -> list[int]:
    """What tells the storages of these tensors apart."""
    found = [inside(value) for value in values if isinstance(value, torch.Tensor)]
    kinds = (torch.Tensor, torch.nn.Parameter)
    return [storage_key(t.untyped_storage()) for t in found if type(t) in kinds and t.layout == torch.strided]


# -- stretches of a large parameter -----------------------------------------------------------------------------------


def in_order(tensor: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """Elements [start, end) of a dense tensor, in order of memory: a view."""
    return tensor.as_strided((end - start,), (1,), int(tensor.storage_offset()) + start)


def ends_of(
    optimizer: torch.optim.Optimizer,
    parameter: torch.Tensor,
    bytes_per_element: float,
    bucket_bytes: int,
    state: Sequence[torch.Tensor] = (),
) -> list[int]:
    """Where the stretches of a parameter with so much state end, all about equal and at most a bucket; none if it fits
    into one, or is stepped whole. `state`: as far as it is there."""
    local = inside(parameter.detach())
    unit_bytes = max(CUT_ELEMENTS * bytes_per_element, 1.0)
    most = max(int(bucket_bytes / unit_bytes), 1) * CUT_ELEMENTS
    if local.numel() <= most or not _lie_alike(local, *state) or not _may_be_cut(optimizer, parameter):
        return []
    count = -(-local.numel() // most)
    length = -(-local.numel() // (count * CUT_ELEMENTS)) * CUT_ELEMENTS
    return [*range(length, local.numel(), length), local.numel()]


def halves(ends: list[int]) -> list[int]:
    """Where stretches end that are half as long as those that end here, as far as they can be cut."""
    found = []
    for start, end in zip([0, *ends], ends, strict=False):
        middle = start + -(-(end - start) // (2 * CUT_ELEMENTS)) * CUT_ELEMENTS
        found += [middle, end] if middle < end else [end]
    return found


def is_cut_now(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> bool:
    """Whether this step may be taken in stretches: the gradient lies in memory as the parameter does."""
    gradient = parameter.grad
    if gradient is None or gradient.layout != torch.strided or is_distributed(gradient) != is_distributed(parameter):
        return False
    if is_distributed(parameter) and gradient.placements != parameter.placements:  # type: ignore[attr-defined]
        return False
    return _lie_alike(inside(parameter.detach()), inside(gradient.detach())) and _may_be_cut(optimizer, parameter)


def _lie_alike(parameter: torch.Tensor, *others: torch.Tensor) -> bool:
    """Whether they are plain, without gaps, and an element of each stands where it stands in the parameter."""
    return is_dense(parameter) and all(
        type(tensor) is torch.Tensor and (tensor.size(), tensor.stride()) == (parameter.size(), parameter.stride())
        for tensor in (parameter, *others)
    )


def _may_be_cut(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> bool:
    group = next(g for g in optimizer.param_groups if any(parameter is other for other in g["params"]))
    return is_alike_in_stretches(optimizer, group, parameter, is_accelerator=parameter.device.type != "cpu")
