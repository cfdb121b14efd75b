"""What autograd saves in the observed step: handed out as tickets, so that it is seen to leave and to come back.

What: saved activations are parked: their bytes go elsewhere at once and autograd holds a handle. All readers of a
storage share the one copy that comes back, and it goes when the last handle does: exactly when plain autograd would
have released it. Parameters, casts of them, the batch and tensors that are not plain stay as they are; the questions
are the runtime's (runtime/hooks/forward_pass.py).
Where to: `file_stash` (no accelerator: resident memory really falls, so that the observed step itself is small),
`host_stash` (an accelerator: main memory), `fake_stash` (fake tensors have no bytes: a new empty storage will do).

Cost: one synchronous copy each way; an observed step is slower by that much. Not covered: in-place writes after saving
(the copy is that of the save); overlap, pinned memory, tiers (that is the runtime's business).
"""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from lowtide.core.recipe import Codec
from lowtide.profiling.step_record import NodeRecord, StepState
from lowtide.recipes.graph import Storage, index_limit
from lowtide.tensors.compiled import never_compiled, refuse_compiled_part
from lowtide.tensors.kinds import is_plain_or_fake, leads_to_parameter
from lowtide.tensors.private import base_of, next_sequence_number
from lowtide.tensors.view import Shape, byte_view, part_of
from lowtide.tensors.wrappers import Shell, arrived, inside, shell_of

CodecOf = Callable[[torch.UntypedStorage, torch.dtype, int | None], Codec | None]
"""The smallest form that holds a storage's bytes, as elements of a dtype; these may be known to be below a limit."""

WRITTEN_IN_PARTS = "written in parts that do not know of each other"
"""One copy, made when the first part was saved, would have old bytes of the others."""


class ByteStash(NamedTuple):
    """A place for bytes. The ticket is the place's own business."""

    put: Callable[[torch.UntypedStorage], Any]
    """Copy the bytes of a storage away; gives the ticket."""
    get: Callable[[Any], torch.UntypedStorage]
    """A new storage with those bytes."""
    close: Callable[[], None] = lambda: None
    """Give everything back."""


def file_stash() -> ByteStash:
    """An unlinked temporary file. The kernel may cache it, but that memory is not the process's."""
    file = tempfile.TemporaryFile(prefix="lowtide-observe-")  # noqa: SIM115

    def put(storage: torch.UntypedStorage) -> tuple[int, int]:
        offset = file.seek(0, os.SEEK_END)
        return offset, file.write(byte_view(storage).numpy().data)

    def get(ticket: tuple[int, int]) -> torch.UntypedStorage:
        offset, nbytes = ticket
        target = torch.empty(nbytes, dtype=torch.uint8)
        file.seek(offset)
        if file.readinto(target.numpy().data) != nbytes:
            raise OSError("observe: the temporary file ends before what was written to it")
        return target.untyped_storage()

    return ByteStash(put, get, file.close)


def host_stash() -> ByteStash:
    """Main memory, for tensors on an accelerator."""
    return ByteStash(
        lambda storage: (byte_view(storage).cpu(), storage.device),
        lambda ticket: ticket[0].to(ticket[1]).untyped_storage(),
    )


def fake_stash() -> ByteStash:
    """Fake tensors: only the size matters."""
    return ByteStash(
        torch.UntypedStorage.nbytes,
        lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, device="cpu").untyped_storage(),
    )


class _Parked:
    """The bytes of one node while autograd holds on to it."""

    __slots__ = ("__weakref__", "back", "node", "saves", "saving_sequence", "state", "ticket", "version")

    def __init__(
        self, state: StepState, saves: SavedTensorRecorder, node: NodeRecord, ticket: Any, sequence: int
    ) -> None:
        self.state = state
        self.saves = saves
        self.node = node
        self.ticket = ticket
        self.version = node.storage.num_writes
        self.saving_sequence = sequence
        self.back: torch.UntypedStorage | None = None

    def open(self) -> torch.UntypedStorage:
        self.node.reads.append(self.state.ops.count)
        if not self.state.ops.is_backward:
            self.saves.read_early = self.saves.read_early or self.node.name
        self.node.gathered &= self.state.storages.gathered_now()
        if self.back is None:
            self.back = self.saves.bring_back(self)
            if self.node.codec is None:
                limit = index_limit(self.node.storage)
                self.node.codec = self.saves.codec_of(self.back, self.node.shape.dtype, limit)
            if self.state.compiled is not None:
                self.state.compiled.made_bytes += self.back.nbytes()  # on record by itself
        return self.back

    @never_compiled
    def __del__(self) -> None:
        self.node.release = max(self.node.release, self.state.ops.count)


def _opened(parked: _Parked, shape: Shape, shell: Shell | None) -> torch.Tensor:
    """One saved tensor, as it looks at a parked storage."""
    empty = torch.empty(0, dtype=shape.dtype, device=parked.state.device)  # a fake storage says another device
    tensor = empty.set_(parked.open(), shape.offset, shape.size, shape.stride)
    return tensor if shell is None else shell(tensor)


class SavedTensorRecorder:
    """The saved-tensor hooks of one observed step."""

    def __init__(self, state: StepState, stash: ByteStash, codec_of: CodecOf) -> None:
        self.codec_of = codec_of
        self.nodes: dict[int, NodeRecord] = {}
        """By index of their storage."""
        self.kept: set[int] = set()
        """Indices of storages that were saved and stay."""
        self.staying: dict[int, str] = {}
        """Indices of activations that were saved and that no plan can move, and why."""
        self.ambiguous: set[str] = set()
        """Names that more than one storage has."""
        self.enough_op = 0
        """The first operator after all that have saved something so far."""
        self.read_early = ""
        """A node that was read before the forward was over."""
        self._state = state
        self._stash = stash
        self._index_of: dict[str, int] = {}
        self._parts: dict[int, Shape | None] = {}
        """Of the storages of nodes: what the first saved tensor's version counter speaks for."""
        self._parked: dict[int, weakref.ref[_Parked]] = {}

    def hooks(self) -> contextlib.AbstractContextManager:
        """Saved-tensor hooks for the forward of the step."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._open)

    @never_compiled
    def _pack(self, saved: torch.Tensor) -> Any:
        # An operator's inputs are saved before it runs, and what a compiled part saves before that part is an operator.
        self.enough_op = self._state.ops.count + (self._state.compiled is not None)
        with self._state.silently():
            tensor = arrived(saved)
            record = self._state.storages.find(tensor) if is_plain_or_fake(tensor) else None
            if self._state.compiled is None:
                refuse_compiled_part(self._state.path[-1])
            elif record is None and is_plain_or_fake(tensor) and not isinstance(base_of(tensor), nn.Parameter):
                record = self._state.compiled.made(tensor)
            if not self._state.is_inside or not self.is_activation(saved, record):
                return self._stay(saved, record)
            if record is None:
                record = self._state.storages.find_or_register(tensor, "unknown")
            why = self._why_it_stays(tensor, record)
            if why:
                if (record.index not in self.nodes or why == WRITTEN_IN_PARTS) and record.nbytes:
                    self.staying[record.index] = why
                return self._stay(saved, record)
            return functools.partial(_opened, self._parked_for(record, tensor), Shape.of(tensor), shell_of(saved))

    @never_compiled
    def _open(self, handle: Any) -> torch.Tensor:
        if isinstance(handle, torch.Tensor):
            return handle
        with self._state.silently():
            return handle()

    def _stay(self, tensor: torch.Tensor, record: Storage | None) -> Any:
        if record is not None:
            self.kept.add(record.index)
        weights = self._state.storages.weights
        if weights is not None and (held := weights.hold(tensor)) is not None:
            return held.open
        return tensor if tensor.grad_fn is None else tensor.detach()

    def _why_it_stays(self, tensor: torch.Tensor, record: Storage) -> str:
        """Why a plan cannot decide about an activation; empty if it can. The first save of a storage counts."""
        if record.index in self.staying:
            return self.staying[record.index]
        if not self.is_movable(tensor):
            return "not a plain tensor on the device"
        node = self.nodes.get(record.index)
        if node is not None:
            return "" if self._parts[record.index] == part_of(tensor) else WRITTEN_IN_PARTS
        # Storages are found again by name. What came into the model has no name but that of the layer that saves it.
        name = self._state.named.get(record.index) or f"{self._state.layer}.input".lstrip(".")
        record.name = name
        if self._index_of.setdefault(name, record.index) != record.index:
            self.ambiguous.add(name)
            return "another activation has the same name"
        return ""

    def is_activation(self, tensor: torch.Tensor, record: Storage | None) -> bool:
        """The runtime's question (runtime/hooks/forward_pass.py), of a record."""
        if not is_plain_or_fake(inside(tensor)):
            return False
        if isinstance(tensor, nn.Parameter) or isinstance(base_of(tensor), nn.Parameter):
            return False
        if (record is not None and is_parameter(record)) or leads_to_parameter(tensor):
            return False
        return (record is not None and record.index in self._state.named) or tensor.grad_fn is not None

    def is_movable(self, tensor: torch.Tensor) -> bool:
        if tensor.is_conj() or tensor.is_neg():
            return False
        return tensor.device.type == self._state.device.type and tensor.untyped_storage().nbytes() > 0

    def _parked_for(self, record: Storage, tensor: torch.Tensor) -> _Parked:
        sequence = next_sequence_number() - self._state.ops.start_sequence
        node = self.nodes.get(record.index)
        if node is None:
            node = self.nodes[record.index] = self.new_node(record, tensor, record.name)
            self._parts[record.index] = part_of(tensor)
        node.last_sequence = sequence
        ref = self._parked.get(record.index)
        parked = ref() if ref is not None else None
        if parked is None or parked.version != record.num_writes:
            parked = _Parked(self._state, self, node, self._stash.put(tensor.untyped_storage()), sequence)
            self._parked[record.index] = weakref.ref(parked)
        return parked

    def new_node(self, record: Storage, tensor: torch.Tensor, name: str) -> NodeRecord:
        return NodeRecord(
            storage=record,
            name=name,
            version=record.num_writes,
            saved=max(self._state.ops.count - 1, record.born),
            shape=Shape.of(tensor),
            # Also of a retained input: how long its copy may take is counted from here.
            first_sequence=next_sequence_number() - self._state.ops.start_sequence,
            gathered=self._state.storages.gathered_now(),
        )

    def repark(self, written: list[Storage]) -> None:
        """Some operators save an input before they fill it: park what they saved again, now that it is filled."""
        for record in written:
            ref = self._parked.get(record.index)
            parked = ref() if ref is not None else None
            sequence = next_sequence_number() - self._state.ops.start_sequence
            if parked is None or parked.saving_sequence != sequence:
                continue
            storage = self._state.storages.storage_of(record)
            assert storage is not None
            with self._state.silently():
                parked.ticket = self._stash.put(storage)
            parked.version = parked.node.version = record.num_writes

    def bring_back(self, parked: _Parked) -> torch.UntypedStorage:
        """The parked bytes, on the device again; from now on their death is the node's release."""
        storage = self._stash.get(parked.ticket)
        node = parked.node
        self._state.storages.watch(
            storage, node.storage, lambda: setattr(node, "release", max(node.release, self._state.ops.count))
        )
        return storage


def is_parameter(record: Storage) -> bool:
    """A parameter, a buffer, or a cast of one."""
    return record.kind in ("parameter", "buffer") or record.is_parameter_cast
