"""The guard: when live bytes come near a limit, kept activations are swapped after all ("spilled").

What: under `tide.set_limit(...)` a kept activation gets handles that can be turned into swapped ones later: `Group` is
one storage at one version, `Spillable` one saved tensor that views it. When a tensor is saved, and at layer boundaries,
the guard compares live bytes (model state plus the ledger of activations; on an accelerator, at layer boundaries, the
allocator's own number) with the limit less a headroom of 1/50. Above that mark groups are spilled, earliest saved
first, because backward needs those last: the group becomes a site of the scheduler, like any swapped one, and its
handles drop their tensors. A recomputed source whose recipe does not hold stays on the device; what the budget has no
room for is spilled at once. Autograd holds the same handles before and after, and versions are checked as ever. If
copies lag, compute waits: a stall, not an out-of-memory.
Why: a plan is as good as what it was made from. A longer sequence, an expert that gets all the tokens, another program
on the device: the guard turns these into a slower step.

A step that is longer than the one that was planned (a layer runs more often, operators save what the plan does not
know, or live bytes pass the mark) may have its worst moment where the plan's is not: gradients come while activations
of earlier calls are still there. From then on, until its backward pass is over, activations get what the budget leaves
beside state, all gradients, and what any operator of the step needs at once, whatever the plan keeps; what recipes
start from is spilled too, and nothing is fetched ahead of need beyond that.

Cost: a limit that is never reached costs 4 to 10 us a kept tensor, and 3 us a parameter and forward; one comparison
with the mark 0.05 us. Not covered: operators that need more at once than any of the step that was planned; storages
that something else holds too (they are copied and, as `stats.aliased_bytes` says, not freed).
"""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from lowtide.runtime.offload.scheduler import OffloadScheduler
from lowtide.runtime.offload.site import OffloadedStorage, PrefetchQueue
from lowtide.runtime.saved.handle import Kept
from lowtide.tensors.private import disable_current_modes, next_sequence_number, storage_key, version_of
from lowtide.tensors.view import View, part_of
from lowtide.units import format_bytes


class MaySpill(Protocol):
    """Something that the plan drops, and that has to stay since its recipe does not hold: it may be spilled."""

    spill_queue: PrefetchQueue | None
    site: OffloadedStorage | None

    @property
    def nbytes(self) -> int: ...
    @property
    def sequence(self) -> int: ...
    def spill(self) -> int: ...


_HEADROOM_SHARE = 50


class Group:
    """One kept storage at one version, for all handles that view it. They own it; its bytes are in the ledger."""

    __slots__ = (
        "__weakref__",
        "handles",
        "nbytes",
        "part",
        "queue",
        "scheduler",
        "sequence",
        "share",
        "site",
        "version",
        "weak",
    )

    def __init__(self, tensor: torch.Tensor, scheduler: OffloadScheduler, queue: PrefetchQueue, sequence: int) -> None:
        storage = tensor.untyped_storage()
        self.nbytes = storage.nbytes()
        self.site: OffloadedStorage | None = None
        self.share = scheduler.ledger.hold(self, self.nbytes)
        self.scheduler = scheduler
        self.queue = queue
        self.version = version_of(tensor)
        self.part = part_of(tensor)
        self.sequence = sequence
        """Autograd's number of the operator that saved it last. No copy may start before that operator was launched."""
        self.weak = StorageWeakRef(storage)
        self.handles: list[weakref.ref[Spillable]] = []

    def is_of(self, tensor: torch.Tensor) -> bool:
        return not self.weak.expired() and version_of(tensor) == self.version and part_of(tensor) == self.part

    def spill(self) -> int:
        """Start the storage's copy out. Returns the bytes that it will free. Call it under the scheduler's lock."""
        handles = [handle for handle in (reference() for reference in self.handles) if handle is not None]
        if not handles or any(version_of(handle.tensor) != handle.version for handle in handles):
            return 0  # modified since it was saved: plain autograd will raise, and so must the handle
        storage = handles[0].tensor.untyped_storage()
        site = self.scheduler.find(storage, self.version, self.part)
        if site is not None:
            return 0  # it is swapped already, as another site
        self.scheduler.ledger.change(self.share, 0)  # the site has them in the ledger from now on
        # Distance 0: it is fetched when it is read. There is no room for it before.
        self.site = site = self.scheduler.enroll(self.queue, storage, self.version, 0, self.part)
        site.num_readers = sum(handle.num_readers for handle in handles)
        site.last_use = self.sequence
        for handle in handles:
            handle.let_go()
        del storage
        self.scheduler.start_offload(site, None)
        return self.nbytes if site.copy.slot is not None else 0


class Spillable(Kept):
    """A saved tensor that stays on the device until the guard needs the room."""

    __slots__ = ("_num_readers", "group", "view")

    def __init__(self, tensor: torch.Tensor, group: Group, on_open: Callable[[], None]) -> None:
        super().__init__(tensor, on_open, group)
        self.group = group
        self.view: View | None = None
        self._num_readers = 1
        group.handles.append(weakref.ref(self))
        if group.site is not None:
            group.site.num_readers += 1
            self.let_go()

    @property
    def num_readers(self) -> int:
        """Who reads it in backward: autograd, and recipes."""
        return self._num_readers

    @num_readers.setter
    def num_readers(self, count: int) -> None:
        if self.group.site is not None:
            self.group.site.num_readers += count - self._num_readers
        self._num_readers = count

    def is_intact(self) -> bool:
        return version_of(self.tensor if self.view is None else self.view.alias) == self.version

    def read(self) -> torch.UntypedStorage:
        with self.group.scheduler.lock:
            if self.view is None:
                return self.tensor.untyped_storage()
            assert self.group.site is not None
            return self.group.site.read()

    def let_go(self) -> None:
        """Drop the tensor. From now on it is read from the group's site."""
        self.view = View(self.tensor, self.version, self.origin)
        del self.tensor

    def open(self) -> torch.Tensor:
        with self.group.scheduler.lock:
            if self.view is None:
                return super().open()
            assert self.on_open is not None
            self.on_open()
            self.view.check()
            return self.view.over(self.read())


class Guard:
    """Keeps live bytes of one tide below a limit. Calls `state_bytes()` once a forward pass."""

    def __init__(
        self,
        limit_bytes: int,
        *,
        scheduler: OffloadScheduler,
        min_bytes: int,
        state_bytes: Callable[[], int],
        slack_bytes: int | None = None,
        longer_bytes: int | None = None,
        num_calls: Mapping[str, int] | None = None,
    ) -> None:
        """`slack_bytes`: so much of what the plan drops may stay before its peak passes the budget. `longer_bytes`: so
        much may activations take in a step that is longer than the plan knows. `num_calls`: of layers, in the step that
        was planned. None: unknown."""
        self.beside_bytes: Callable[[], int] = int
        """What forward passes hold whose backward pass is still to come, and that ran under other plans."""
        self._slack_bytes = slack_bytes
        self._unplanned_bytes = 0
        self._owed: deque[tuple[weakref.ref[MaySpill], int]] = deque()
        """Recomputed sources that had to stay in this forward pass, and were not spilled yet."""
        self._high_bytes = limit_bytes - limit_bytes // _HEADROOM_SHARE
        self._longer_bytes = longer_bytes
        self._num_calls = num_calls
        self.num_extra_calls = 0
        """Calls of layers that no plan knew, so far."""
        self._scheduler = scheduler
        self._min_bytes = min_bytes
        self._state_bytes = state_bytes
        self._model_bytes = state_bytes()
        self._groups: dict[int, weakref.ref[Group]] = {}
        self._candidates: deque[weakref.ref[Group | MaySpill]] = deque()
        self._queues: tuple[PrefetchQueue, PrefetchQueue] | None = None

    def begin(self) -> None:
        """A forward pass begins: gradients or optimizer state may have come or gone."""
        self._model_bytes = self._state_bytes()
        self._candidates = deque(reference for reference in self._candidates if reference() is not None)
        self._groups = {key: reference for key, reference in self._groups.items() if reference() is not None}
        self._unplanned_bytes = 0
        self._owed.clear()
        if self._scheduler.ledger.now_bytes == 0:
            self._scheduler.most_ahead_bytes = None

    def keep(
        self, tensor: torch.Tensor, queue: PrefetchQueue, on_open: Callable[[], None], *, is_planned: bool = True
    ) -> Spillable:
        """The handle on a storage that is kept for the first time in this forward pass. May spill other groups.
        `is_planned`: the plan keeps it."""
        group = self._add_group(tensor, queue)
        handle = Spillable(tensor, group, on_open)
        if not is_planned and group.nbytes >= self._min_bytes:
            self._note_longer()
        self.check()
        return handle

    def _add_group(self, tensor: torch.Tensor, queue: PrefetchQueue) -> Group:
        self._scheduler.engine.compute_stream()  # a copy that begins on another stream must wait for this one too
        group = Group(tensor, self._scheduler, self._spill_queue(queue), next_sequence_number())
        self._groups[storage_key(tensor.untyped_storage())] = weakref.ref(group)
        if group.nbytes >= self._min_bytes:
            reference: weakref.ref[Group | MaySpill] = weakref.ref(group)
            self._candidates.append(reference)
        return group

    def enter(self, layer: str, call: int) -> None:
        """A layer begins, which has run `call` times before in this forward pass. May spill."""
        if self._num_calls is not None and call >= self._num_calls.get(layer, call + 1):
            self.num_extra_calls += 1
            self._note_longer()
            self.check()

    def _note_longer(self) -> None:
        """From now on this step is not the one that was planned: its worst moment may be where the plan's is not."""
        self._scheduler.most_ahead_bytes = self._longer_bytes

    def offer(self, source: MaySpill, queue: PrefetchQueue) -> None:
        """A recomputed source that has to stay because its recipe does not hold: it may be spilled.

        It is spilled where the plan's peak, plus all that has stayed so far, would pass the budget. Then it takes no
        more memory at the worst moment than in the plan, which drops it. Live bytes in forward do not show whether that
        is needed: the worst moment may be in backward.
        """
        self._pay()
        source.spill_queue = self._spill_queue(queue)
        self._candidates.append(weakref.ref(source))
        if self._slack_bytes is not None:
            self._unplanned_bytes += source.nbytes
            self._owed.append((weakref.ref(source), source.nbytes))

    def view(self, tensor: torch.Tensor, queue: PrefetchQueue, on_open: Callable[[], None]) -> Spillable | None:
        """A further handle on a storage that has a group already; None if it has none."""
        reference = self._groups.get(storage_key(tensor.untyped_storage()))
        group = reference() if reference is not None else None
        if group is None or group.weak.expired():
            return None
        if group.site is not None and not group.is_of(tensor):
            group = self._add_group(tensor, queue)  # written since the storage was sent away: it is here again
        group.sequence = next_sequence_number()
        return Spillable(tensor, group, on_open)

    def _spill_queue(self, queue: PrefetchQueue) -> PrefetchQueue:
        # Spilled sites have a queue of their own in each pass: they are in it in the order of saving, and backward
        # reads it from the end.
        if self._queues is None or self._queues[0] is not queue:
            self._queues = (queue, PrefetchQueue())
        return self._queues[1]

    def check(self, device: torch.device | None = None) -> None:
        """Spill until live bytes are below the mark. `device`: on an accelerator, its allocator's number counts."""
        self._pay()
        live_bytes = self._model_bytes + self.beside_bytes() + self._scheduler.ledger.now_bytes
        if device is not None and device.type != "cpu":
            live_bytes = self._scheduler.engine.device_bytes() or live_bytes
        excess_bytes = live_bytes - self._high_bytes
        if excess_bytes > 0:
            self._note_longer()
        if self._longer_bytes is not None and self._scheduler.most_ahead_bytes is not None:
            held_bytes = self.beside_bytes() + self._scheduler.ledger.now_bytes
            excess_bytes = max(excess_bytes, held_bytes - self._longer_bytes)
        if excess_bytes <= 0:
            return
        with self._scheduler.lock, disable_current_modes():
            if not self._spill(excess_bytes, next_sequence_number()):
                self._scheduler.counters.num_over_limit += 1

    def hold_at_most(self, nbytes: int) -> None:
        """Between two forward passes: spill until the activations of those that are over hold no more than this."""
        with self._scheduler.lock, disable_current_modes():
            self._scheduler.settle()
            self._spill(self._scheduler.ledger.now_bytes - nbytes, -1)

    def end(self) -> None:
        """The forward pass came to its end. Warns where more stayed that the plan drops than the budget has room for,
        and it could not be spilled."""
        self._pay(is_over=True)
        self.check()
        over_bytes = 0 if self._slack_bytes is None else self._unplanned_bytes - self._slack_bytes
        if over_bytes > 0:
            self._scheduler.counters.num_over_limit += 1
            warnings.warn(
                f"lowtide: {format_bytes(self._unplanned_bytes)} of what the plan makes again had to stay in this "
                "forward pass, because recipes did not hold, and there was no room to send them away: this step may "
                f"pass its budget by {format_bytes(over_bytes)}. The next one has a plan without these recipes.",
                stacklevel=2,
            )

    def _pay(self, *, is_over: bool = False) -> None:
        """Spill as much of what had to stay as the budget has no room for. `is_over`: no operator runs any more."""
        if not self._owed or self._slack_bytes is None or self._unplanned_bytes <= self._slack_bytes:
            return
        with self._scheduler.lock, disable_current_modes():
            sequence = -1 if is_over else next_sequence_number()
            paid_bytes = 0
            while self._owed and self._unplanned_bytes > self._slack_bytes:
                reference, nbytes = self._owed[0]
                source = reference()
                if source is not None and source.sequence == sequence:
                    break  # saved by the operator that is running now
                self._owed.popleft()
                if source is None or (source.site is not None and source.site.copy.slot is not None):
                    self._unplanned_bytes -= nbytes  # dead, or sent away below the mark
                    continue
                spilled_bytes = self._spill_one(source)
                self._unplanned_bytes -= spilled_bytes
                paid_bytes += spilled_bytes
            if paid_bytes:
                self._scheduler.retire(max(0, self._scheduler.leaving_bytes - paid_bytes))

    def _spill(self, excess_bytes: int, sequence: int) -> bool:
        """Whether so much could be spilled. `sequence`: of the operator that is running now."""
        # Copies that are running will free some bytes: spill only what is missing beyond those, then wait for them.
        missing_bytes = excess_bytes - self._scheduler.leaving_bytes
        while missing_bytes > 0 and self._candidates:
            group = self._candidates[0]()
            if group is not None and group.sequence == sequence:
                break  # saved by the operator that is running now
            self._candidates.popleft()
            missing_bytes -= self._spill_one(group)
        self._scheduler.retire(max(0, self._scheduler.leaving_bytes - excess_bytes))
        return missing_bytes <= 0

    def _spill_one(self, kept: Group | MaySpill | None) -> int:
        """The bytes that this will free: 0 where it is dead, or away already."""
        nbytes = kept.spill() if kept is not None and kept.site is None else 0
        if nbytes:
            counters = self._scheduler.counters
            counters.num_spills += 1
            counters.spilled_bytes += nbytes
            counters.kept_bytes -= nbytes
        return nbytes
