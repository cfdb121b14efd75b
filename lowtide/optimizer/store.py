"""All buckets of one optimizer: state comes into a bucket, is brought back, or stays where it is.

What: `StateStore.adopt` puts tensors of state into buckets, wherever they are now: made by the optimizer a moment ago,
loaded from a checkpoint, or put there by the user. `bring_back` is the way back.
Why one way in: state comes into being in many ways and at any time (in the first step, with a late first gradient, in
`load_state_dict`, by hand), and each of them must keep the device's share small and the bytes right.

What stays on the device: parameters of the resident share; small tensors and numbers (a `step` on the device would
cost a wait for the device to move); tensors that share memory with another tensor, since a copy would part them;
whatever the slower tiers have no room for, with a warning.
Cost: one copy on the device and one to the slower tier for each byte adopted.

Not covered: the order of copies (transfers.py).
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from lowtide.engines.base import Engine, Slot
from lowtide.errors import TierFull
from lowtide.optimizer.buckets import (
    ALIGN_BYTES,
    PART_ALIGN_BYTES,
    Buffer,
    StateBucket,
    StateChunk,
    StateTensor,
    bucket_bytes_for,
    bytes_of,
    describe,
    ends_of,
    in_order,
    lay_out,
    movable,
    runs,
    storages_of,
)
from lowtide.optimizer.transfers import Transfers
from lowtide.tensors.optimizers import parameters_of
from lowtide.tensors.private import storage_key
from lowtide.tensors.view import Shape, byte_view
from lowtide.tensors.wrappers import inside, shell_of

Value = tuple[torch.Tensor, Hashable, torch.Tensor]
"""A parameter, a key of its state, and the tensor there."""
Shown = tuple[dict, Hashable, torch.Tensor]
"""The state of a parameter, a key of it, and the tensor there."""
Holding = Callable[[Iterable[torch.Tensor]], AbstractContextManager[None]]
"""A context in which what these parameters and their gradients show is on the device, and may be written to."""


class StateStore:
    """See the module's text. `bucket_bytes`: None until the size of the state is known."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        engine: Engine,
        device: torch.device,
        *,
        tiers: tuple[str, ...],
        bucket_bytes: int | None,
        min_bytes: int,
        num_buffers: int,
        in_place: bool,
    ) -> None:
        self.optimizer = optimizer
        self.holding: Holding | None = None
        """None: weights and gradients are always on the device."""
        self.engine = engine
        self.device = device
        self.transfers = Transfers(engine, device, self._stay, num_buffers, in_place=in_place)
        self.buckets: list[StateBucket] = []
        self.bucket_of: dict[torch.Tensor, StateBucket] = {}
        self.residents: set[torch.Tensor] = set()
        """Parameters whose state stays on the device."""
        self.asked_to_stay: set[torch.Tensor] = set()
        """The part of `residents` that `keep` was given."""
        self.unfinished: list[StateBucket] = []
        """Buckets of large parameters whose first step is not over: `buckets` does not have them yet."""
        self.state_bytes_per_parameter_byte = 3.0
        """A guess on the safe side until state was seen."""
        self._tiers = tiers
        self._bucket_bytes = bucket_bytes
        self.min_bytes = min_bytes

    @property
    def bucket_bytes(self) -> int:
        if self._bucket_bytes is None:
            total = sum(inside(p.detach()).nbytes for p in parameters_of(self.optimizer))
            self._bucket_bytes = bucket_bytes_for(int(total * max(self.state_bytes_per_parameter_byte, 1.0)))
        return self._bucket_bytes

    def step_bytes_of(self, parameter: torch.Tensor) -> int:
        """Bytes of a parameter's state, or what they may come to where it has none yet; but no less than its own, which
        its gradient and the temporaries of its update have too."""
        found = sum(map(bytes_of, entries_of(self.optimizer.state, parameter).values()))
        own = inside(parameter.detach()).nbytes
        return max(found or int(own * self.state_bytes_per_parameter_byte), own)

    def keep(self, parameters: set[torch.Tensor]) -> None:
        """Have the state of these stay on the device, and of no others that were asked to; these are still there."""
        self.residents = (self.residents - self.asked_to_stay) | parameters
        self.asked_to_stay = parameters

    # -- in ------------------------------------------------------------------------------------------------------------

    def unplaced(self, parameters: Iterable[torch.Tensor], *, anywhere: bool = False) -> list[list[Value]]:
        """For each parameter its state on the device (or `anywhere`) that could be in a bucket and is not."""
        found = []
        for parameter in parameters:
            if parameter in self.residents:
                continue
            bucket = self.bucket_of.get(parameter)
            in_bucket = {id(host) for host in bucket.hosts} if bucket is not None else ()
            device = None if anywhere else self.device
            values = [
                (parameter, key, value)
                for key, value in entries_of(self.optimizer.state, parameter).items()
                if movable(value, device, self.min_bytes) and id(value) not in in_bucket
            ]
            if values:
                found.append(values)
        return found

    def adopt(
        self, parameters: Iterable[torch.Tensor], *, anywhere: bool = False, apart: Collection[torch.Tensor] = ()
    ) -> None:
        """Put all state of these parameters into buckets; what is in one already moves to a new one.

        `anywhere`: also what is in main memory, as after loading; no copy to or from it may be unfinished then.
        `apart`: parameters that share no bucket with the others.
        """
        parameters = list(dict.fromkeys(parameters))
        old = {id(bucket): bucket for p in parameters if (bucket := self.bucket_of.get(p)) is not None}
        everyone = dict.fromkeys([*parameters, *(p for bucket in old.values() for p in bucket.parameters)])
        for bucket in old.values():
            if bucket.resident is not None:
                self.part_from(bucket, bucket.resident)
        for parameter in everyone:
            self.bucket_of.pop(parameter, None)
        for bucket in old.values():
            self.buckets.remove(bucket)
        found = self._alone(self.unplaced(everyone, anywhere=anywhere))
        taken = {id(value) for values in found for _, _, value in values}
        shown = self._shown(everyone)
        for bucket in old.values():  # what stays on the device must not stay in memory that is freed
            self._take_out(
                {m for m in bucket.memories if any(id(v) not in taken for _, _, v in shown.get(m, ()))}, shown
            )
        for together in ([v for v in found if v[0][0] in apart], [v for v in found if v[0][0] not in apart]):
            sizes = [lay_out([inside(value).nbytes for _, _, value in values])[1] for values in together]
            least = [inside(values[0][0].detach()).nbytes for values in together]
            if sizes:
                self.state_bytes_per_parameter_byte = max(sum(sizes) / max(sum(least), 1), 0.01)
            for run in runs([*map(max, sizes, least)], self.bucket_bytes):
                self._make_bucket([value for values in together[run.start : run.stop] for value in values], anywhere)
        for bucket in old.values():
            self.transfers.free(bucket)

    def _alone(self, found: list[list[Value]]) -> list[list[Value]]:
        """Without tensors that share their memory with another tensor of state, a parameter or a gradient."""
        parameters = [values[0][0] for values in found]
        others = [tensor for p in parameters for tensor in (p.detach(), p.grad)]
        counts = Counter(storages_of([*others, *(v for p in parameters for v in self.optimizer.state[p].values())]))
        kept = [
            [value for value in values if all(counts[key] == 1 for key in storages_of(value[2:]))] for values in found
        ]
        return [values for values in kept if values]

    def _make_bucket(self, values: list[Value], anywhere: bool) -> None:
        parameter, is_alone = values[0][0], all(other is values[0][0] for other, _, _ in values)
        tensors = [inside(value) for _, _, value in values]
        width = sum(tensor.element_size() for tensor in tensors)
        ends = ends_of(self.optimizer, parameter, width, self.bucket_bytes, tensors) if is_alone else []
        entries, nbytes = describe(values, PART_ALIGN_BYTES if ends else ALIGN_BYTES)
        place = self._place(nbytes)
        if place is None:
            self.residents.update(parameter for parameter, _, _ in values)
            return
        bucket = StateBucket(*place, entries)
        if ends:
            bucket.cut(ends, self.engine)
        try:
            self._fill(bucket, values, directly=anywhere and bucket.slot.tier == "host")
        except torch.OutOfMemoryError:
            if not anywhere:
                self.transfers.free(bucket)
                return  # it stays on the device, and the next step tries again
            self._fill(bucket, values, directly=True)
        self.add_bucket(bucket)

    def add_bucket(self, bucket: StateBucket) -> None:
        """Let a filled bucket have the state of its parameters from now on."""
        self.buckets.append(bucket)
        self.bucket_of.update(dict.fromkeys(bucket.parameters, bucket))
        if bucket.resident is None:
            bucket.bind_host(self.optimizer.state)
        else:
            bucket.bind_device(self.optimizer.state, bucket.resident)

    def begin_bucket(
        self, parameter: torch.Tensor, dtypes: dict[Hashable, torch.dtype], ends: list[int]
    ) -> StateBucket | None:
        """A bucket for the state that a large parameter gets stretch by stretch; None where no tier has room.

        It is `unfinished` until the caller gives it to `add_bucket`."""
        local, shell = inside(parameter.detach()), shell_of(parameter.detach())
        sizes = [local.numel() * dtype.itemsize for dtype in dtypes.values()]
        starts, nbytes = lay_out(sizes, PART_ALIGN_BYTES)
        place = self._place(nbytes)
        if place is None:
            self.residents.add(parameter)
            return None
        entries = [
            StateTensor(parameter, key, Shape.of(local).at(0, dtype), start, size, shell)
            for (key, dtype), start, size in zip(dtypes.items(), starts, sizes, strict=True)
        ]
        bucket = StateBucket(*place, entries)
        bucket.cut(ends, self.engine)
        self.unfinished.append(bucket)
        return bucket

    def _fill(self, bucket: StateBucket, values: list[Value], *, directly: bool) -> None:
        """Write these values into a bucket. `directly`: by the host, from memory to memory; else through the device."""
        with torch.no_grad():
            if directly:
                for host, (_, _, value) in zip(bucket.hosts, values, strict=True):
                    inside(host).copy_(inside(value))
                return
            for chunk in bucket.chunks:
                sources = [inside(value) for _, _, value in values]
                if chunk.end is not None:
                    sources = [in_order(source, chunk.start, chunk.end) for source in sources]
                self.put(chunk, sources)

    def put(self, chunk: StateChunk, sources: Iterable[torch.Tensor]) -> None:
        """Write these bytes into a chunk, through a buffer on the device."""
        buffer = self.transfers.buffer_for(chunk)
        whole = [entry.over(buffer[0]) for entry in chunk.bucket.entries] if chunk.end is None else None
        for target, source in zip(whole or chunk.stretches(buffer), sources, strict=True):
            target.copy_(source)
        self.send(chunk, buffer)

    @torch.no_grad()
    def send(self, chunk: StateChunk, buffer: Buffer) -> None:
        """Send a chunk to its slots; where another one of its bucket could not be sent, it stays beside that."""
        if chunk.bucket.resident is None:
            self.transfers.send(chunk, buffer)
            return
        for there, own in zip(chunk.stretches(None), chunk.stretches(buffer), strict=True):
            there.copy_(own)
        self.transfers.drop(buffer)

    def _place(self, nbytes: int) -> tuple[Slot, torch.Tensor] | None:
        """A slot on the first tier with room."""
        reasons = []
        for tier in self._tiers:
            try:
                return self.engine.allocate_visible(nbytes, tier)
            except TierFull as full:
                reasons.append(str(full))
        warnings.warn(
            f"lowtide: {nbytes} bytes of optimizer state stay on {self.device}: {'; '.join(reasons)}",
            RuntimeWarning,
            stacklevel=2,
        )
        return None

    def _stay(self, chunk: StateChunk, buffer: Buffer, error: BaseException) -> None:
        """Keep the bytes of a chunk that could not be written on the device, until a step tries again."""
        bucket = chunk.bucket
        if chunk.end is None:
            bucket.resident = buffer[0]
        else:
            if bucket.resident is None:
                bucket.resident = self.transfers.gather(bucket)
            self.send(chunk, buffer)
        if bucket not in self.unfinished:
            bucket.bind_device(self.optimizer.state, bucket.resident)
        warnings.warn(
            f"lowtide: {bucket.nbytes} bytes of optimizer state could not be written to the tier '{bucket.slot.tier}' "
            f"({error}); they stay on {self.device} until a later step can",
            RuntimeWarning,
            stacklevel=2,
        )

    def refresh(self) -> None:
        """Take in what the user, or a checkpoint, has put in place of state that had a bucket."""
        state = self.optimizer.state
        lost = [bucket for bucket in self.buckets if bucket.resident is None and not bucket.is_bound(state)]
        if lost:
            self.transfers.settle()
            self.adopt((parameter for bucket in lost for parameter in bucket.parameters), anywhere=True)

    def start_anew(self) -> None:
        """Put what `optimizer.state` shows now into new buckets, and free the old ones."""
        self.transfers.settle()
        old, self.buckets = [*self.buckets, *self.unfinished], []
        self.unfinished.clear()
        self.bucket_of.clear()
        self.adopt(parameters_of(self.optimizer), anywhere=True)
        self.transfers.settle()
        for bucket in old:
            self.transfers.free(bucket)

    # -- back ----------------------------------------------------------------------------------------------------------

    def bring_back(self) -> None:
        """All state is on the device again, in plain tensors of its own; no bucket is left.

        Where memory runs out, the buckets that are left are whole: call it again, or step on.
        """
        self.transfers.give_up()
        self.transfers.settle()
        while self.unfinished:
            self.transfers.free(self.unfinished.pop())
        shown = self._shown(self.optimizer.state)
        while self.buckets:
            self._bring(self.buckets[0], shown)

    def _bring(self, bucket: StateBucket, shown: dict[int, list[Shown]]) -> None:
        """Bring a bucket's state to the device and free the bucket. Where memory runs out, it is as it was."""
        if bucket.resident is not None:
            self.part_from(bucket, bucket.resident)
        self._take_out(bucket.memories, shown)
        self.buckets.remove(bucket)
        for parameter in bucket.parameters:
            if self.bucket_of.get(parameter) is bucket:
                del self.bucket_of[parameter]
        self.transfers.free(bucket)

    def part_from(self, bucket: StateBucket, buffer: torch.UntypedStorage) -> None:
        """Give what `optimizer.state` shows of a bucket's buffer memory of its own, and drop the buffer."""
        self._take_out({storage_key(buffer)}, self._shown(bucket.parameters))
        bucket.resident = None
        self.transfers.drop((buffer,))

    def _shown(self, parameters: Iterable[torch.Tensor]) -> dict[int, list[Shown]]:
        """The tensors of the state of these parameters, by storage."""
        shown: dict[int, list[Shown]] = {}
        for parameter in list(parameters):
            entries = entries_of(self.optimizer.state, parameter)
            for name, value in entries.items():
                for key in storages_of([value]):
                    shown.setdefault(key, []).append((entries, name, value))
        return shown

    def _take_out(self, memories: Collection[int], shown: dict[int, list[Shown]]) -> None:
        """Copy what `optimizer.state` shows of these storages to other memory, on the device: all of it or nothing.
        Tensors that share memory still share it afterwards."""
        copies: list[Shown] = []
        for memory in memories:
            for together in _overlapping(shown.get(memory, [])):
                copies += self._copied(together)
        for entries, name, copied in copies:
            entries[name] = copied

    def _copied(self, together: list[Shown]) -> Iterator[Shown]:
        locals_ = [inside(value) for _, _, value in together]
        start = min(_start_bytes(local) for local in locals_) // ALIGN_BYTES * ALIGN_BYTES
        end = max(Shape.of(local).end_bytes() for local in locals_)
        memory = _copy(byte_view(locals_[0].untyped_storage())[start:end], self.device)
        for (entries, name, value), local in zip(together, locals_, strict=True):
            offset = (_start_bytes(local) - start) // local.element_size()
            copied = Shape.of(local).at(offset).over(memory.untyped_storage())
            shell = shell_of(value)
            yield entries, name, copied if shell is None else shell(copied)


def _copy(data: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`data`: bytes."""
    return torch.empty_like(data, device=device).copy_(data)


def _start_bytes(local: torch.Tensor) -> int:
    return int(local.storage_offset()) * local.element_size()


def _overlapping(values: list[Shown]) -> Iterator[list[Shown]]:
    """These tensors of one storage, in groups that share no byte."""
    group: list[Shown] = []
    group_end = 0
    for shown in sorted(values, key=lambda shown: _start_bytes(inside(shown[2]))):
        local = inside(shown[2])
        if group and _start_bytes(local) >= group_end:
            yield group
            group, group_end = [], 0
        group.append(shown)
        group_end = max(group_end, Shape.of(local).end_bytes())
    if group:
        yield group


def entries_of(state: Any, parameter: torch.Tensor) -> dict:
    """The state of one parameter, which is not made where there is none."""
    found = state.get(parameter)
    return found if isinstance(found, dict) else {}
