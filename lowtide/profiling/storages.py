"""The storages of the observed step: which are there, from when to when, how often they were written to.

What: `Storages` has one record (`graph.Storage`) for each block of bytes, from its first sight to its death, and finds
the record of a tensor. Parameters that FSDP2 gathers come and go in one storage; `Gathered` notes when they were there.

Cost: a look-up for each tensor that an operator takes or gives. Not covered: which operators ran (step_recorder.py),
what autograd saves (saved_tensors.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from lowtide.recipes.graph import Storage, Value
from lowtide.tensors.compiled import never_compiled
from lowtide.tensors.kinds import is_plain_or_fake
from lowtide.tensors.live_bytes import plain_parts
from lowtide.tensors.private import storage_key, version_of
from lowtide.tensors.wrappers import inside

NOWHERE = Storage(index=-1, nbytes=0, dtype=torch.uint8, name="", kind="unknown")
"""Of tensors without a storage of their own."""


class Storages:
    """What was seen so far, and what of it is alive. `now` says how many operators have run."""

    def __init__(self, device: torch.device, now: Callable[[], int]) -> None:
        self.records: list[Storage] = []
        self.off_device: set[int] = set()
        """Indices of what is not on the device of the step."""
        self.gathered: list[Gathered] = []
        self._device = device
        self._now = now
        self.weights: Any = None
        """The handle of weights that come and go, if there is one."""
        self._moved: dict[torch.Tensor, Storage] = {}
        """The records of these, wherever their bytes are."""
        self._live: dict[int, tuple[weakref.ref, Storage]] = {}

    def enroll(self, tensor: torch.Tensor, kind: str, name: str) -> Storage | None:
        """Put a storage that was there before the step on record; None if there is nothing to record."""
        tensor = inside(tensor)
        if not is_plain_or_fake(tensor):
            return None
        record = self.find(tensor) or self.register(tensor, kind, name, -1)
        if self.weights is not None and self.weights.moves(tensor):
            self._moved[tensor] = record
        return record

    def enroll_gathered(self, parameter: torch.Tensor, name: str) -> None:
        """Put a parameter on record that FSDP2 gathers in one storage from time to time."""
        record = self.enroll(parameter, "parameter", name)
        if record is not None and not record.is_gathered:
            record.is_gathered = True
            self.gathered.append(Gathered(record, parameter))

    def gathered_now(self) -> frozenset[int]:
        """Indices of the gathered parameters that are there."""
        return frozenset(entry.record.index for entry in self.gathered if entry.storage.nbytes())

    def look_at_gathered(self) -> None:
        """Before an operator runs: which gathered parameters are there?"""
        for entry in self.gathered:
            entry.look(self._now())

    def find(self, tensor: torch.Tensor) -> Storage | None:
        """The record of the tensor's storage."""
        entry = self._live.get(storage_key(tensor.untyped_storage()))
        if entry is None and self._moved:
            return self._moved.get(self.weights.weight_in(tensor.untyped_storage()))
        return None if entry is None else entry[1]

    def find_or_register(self, tensor: torch.Tensor, kind: str) -> Storage:
        """The record of the tensor's storage; a new one without a proper name if it has none yet."""
        return self.find(tensor) or self.register(tensor, kind, f"{kind}_{len(self.records)}", self._now())

    def register(self, tensor: torch.Tensor, kind: str, name: str, born: int) -> Storage:
        """A new record."""
        storage = tensor.untyped_storage()
        record = Storage(
            index=len(self.records), nbytes=storage.nbytes(), dtype=tensor.dtype, name=name, kind=kind, born=born
        )
        self.records.append(record)
        if tensor.device.type != self._device.type:
            self.off_device.add(record.index)
        self.watch(storage, record, lambda: setattr(record, "dies", self._now()))
        return record

    def register_parts(self, tensor: torch.Tensor, kind: str) -> None:
        """Sparse tensors and wrappers: their bytes count, and that is all."""
        for part in plain_parts(tensor):
            if self.find(part) is None:
                self.register(part, kind, f"part_{len(self.records)}", self._now())

    def storage_of(self, record: Storage) -> torch.UntypedStorage | None:
        """The living storage of a record."""
        return next((ref() for ref, known in self._live.values() if known is record), None)

    def watch(self, storage: torch.UntypedStorage, record: Storage, when_dead: Callable[[], None]) -> None:
        """Call `when_dead` once the bytes of `storage` are freed."""
        key = storage_key(storage)

        @never_compiled
        def gone(ref: weakref.ref) -> None:
            entry = self._live.get(key)
            if entry is not None and entry[0] is ref:
                del self._live[key]
            when_dead()

        self._live[key] = (weakref.ref(storage, gone), record)

    def alive(self, *, but: Iterable[torch.Tensor] = ()) -> list[Storage]:
        """Records of what is there, without the storages of some tensors."""
        held = {storage_key(tensor.untyped_storage()) for tensor in but if is_plain_or_fake(tensor)}
        return [record for key, (_, record) in self._live.items() if key not in held]

    def note_replaced(self, buffers: Iterable[torch.Tensor]) -> None:
        """The forward is over, and `buffers` are those of the model: what has lost its name can start no recipe."""
        now = {id(self.find(buffer)) for buffer in buffers if is_plain_or_fake(buffer)}
        for record in self.records:
            # A recipe would look a buffer up by its name, and find what has replaced it.
            if record.kind == "buffer" and id(record) not in now:
                record.kind = "replaced"
        for entry in self.gathered:
            # FSDP2 leaves the version as it is, so somebody else has written to the parameter.
            if version_of(entry.parameter) != entry.version:
                entry.record.kind = "replaced"

    def close(self) -> None:
        """The step is over: what goes from here on is no part of it."""
        for entry in self.gathered:
            entry.close(self._now())
        self._live.clear()
        for record in self.records:
            record.dies = None if record.dies == self._now() else record.dies


def value_of(tensor: torch.Tensor, record: Storage) -> Value:
    """How a tensor looks at the storage of `record` now."""
    strided = record is not NOWHERE
    return Value(
        storage=record,
        version=record.num_writes,
        size=tuple(tensor.size()),
        stride=tuple(tensor.stride()) if strided else (),
        offset=int(tensor.storage_offset()) if strided else 0,
        dtype=tensor.dtype,
        device=tensor.device,
        is_plain=strided and not tensor.is_conj() and not tensor.is_neg(),
    )


class Gathered:
    """A parameter that is there as a whole only now and then, and when that was."""

    __slots__ = ("_now", "_start", "parameter", "record", "spans", "storage", "version")

    def __init__(self, record: Storage, parameter: torch.Tensor) -> None:
        self.record = record
        self.parameter = parameter
        self.version = version_of(parameter)
        self.storage = inside(parameter).untyped_storage()
        self.spans: list[tuple[int, int, int]] = []
        """(start, end, bytes) of each time that it was there, in operators."""
        self._now = self._start = 0

    def look(self, index: int) -> None:
        """Before operator `index`: is it as large as it was?"""
        self._turn(index, self.storage.nbytes())

    def close(self, index: int) -> None:
        """Operator `index` is past the end of the step."""
        self.look(index)
        self._turn(index, 0)

    def _turn(self, index: int, nbytes: int) -> None:
        if nbytes == self._now:
            return
        if self._now:
            self.spans.append((self._start, index, self._now))
        self._now, self._start = nbytes, index
