"""The guard: when live bytes come near a limit, kept activations are swapped after all ("spilled").

What: under `tide.set_limit(...)` a kept activation gets a handle that can be turned into a swapped one later, a
`Spillable`; the first of a storage knows its further views. When a tensor is saved, and at layer boundaries,
the guard compares live bytes (model state plus the ledger of activations; on an accelerator, at layer boundaries, the
allocator's own number) with the limit less a headroom of 1/50. Above that mark storages are spilled, earliest saved
first, because backward needs those last: a storage becomes a site of the scheduler, like any swapped one, and its
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

Cost: a limit that is never reached costs 4 us a kept tensor beside what that costs without one (forward_pass.py), and a
look at each parameter in each forward. Not covered: operators that need more at once than any of the step that was
planned; storages that something else holds too (they are copied and, as `stats.aliased_bytes` says, not freed).
"""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from collections.abc import Callable, Mapping

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from lowtide.runtime.offload.scheduler import OffloadScheduler
from lowtide.runtime.offload.site import OffloadedStorage, PrefetchQueue
from lowtide.runtime.saved.handle import Kept
from lowtide.runtime.saved.stats import Share
from lowtide.tensors.kinds import is_movable
from lowtide.tensors.private import disable_current_modes, next_sequence_number, storage_key, version_of
from lowtide.tensors.view import Shape, TensorOrigin, View, modified_error, part_of
from lowtide.units import format_bytes

_HEADROOM_SHARE = 50


class Spillable(Kept):
    """A saved tensor that stays on the device until the guard needs the room.

    The first one of a storage has its bytes in the ledger. Further views of that storage hold the first one, so that
    the bytes are counted while any of them lives; when it is spilled, all let go.
    """

    first: Spillable | None = None
    """None: it is the first itself."""
    scheduler: OffloadScheduler
    queue: PrefetchQueue
    """Of spilled sites, in this forward pass."""
    sequence: int
    """Autograd's number of the operator that saved it last. No copy may start before that operator was launched."""
    site: OffloadedStorage | None = None
    """Where it was spilled to."""
    spilled: tuple[StorageWeakRef, int, Shape | None] | None = None
    """The storage that was spilled, at which version, and which part of it."""
    view: View | None = None
    """How it looks at the storage, once it has let go."""
    views: list[weakref.ref[Spillable]] | None = None
    """The further views, if it is the first."""
    _num_readers = 1

    @property
    def num_readers(self) -> int:
        """Who reads it in backward: autograd, and recipes."""
        return self._num_readers

    @num_readers.setter
    def num_readers(self, count: int) -> None:
        site = (self.first or self).site
        if site is not None:
            site.num_readers += count - self._num_readers
        self._num_readers = count

    def is_intact(self) -> bool:
        return version_of(self.tensor) == self.version if self.view is None else self.view.is_intact()

    def read(self) -> torch.UntypedStorage:
        with self.scheduler.lock:
            if self.view is None:
                return self.tensor.untyped_storage()
            site = (self.first or self).site
            assert site is not None
            return site.read()

    def open(self) -> torch.Tensor:
        # No lock: as long as nobody has let go, this tensor is right, and its storage stays while it is read.
        try:
            tensor = self.tensor
        except AttributeError:
            pass
        else:
            if self.on_open is not None:
                self.on_open()
            if version_of(tensor) != self.version:
                raise modified_error(tensor, tensor.size(), version_of(tensor), self.version, self.origin)
            return tensor
        with self.scheduler.lock:
            assert self.view is not None
            if self.on_open is not None:
                self.on_open()
            self.view.check()
            return self.view.over(self.read())

    # -- of the first one of a storage ---------------------------------------------------------------------------------

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` shows the bytes that were spilled."""
        assert self.spilled is not None
        return not self.spilled[0].expired() and self.spilled[1:] == (version_of(tensor), part_of(tensor))

    def add(self, further: Spillable) -> None:
        """A further view of the storage."""
        further.first = self
        self.views = self.views or []
        self.views.append(weakref.ref(further))
        if self.site is not None:
            self.site.num_readers += 1
            further.let_go()

    def let_go(self) -> None:
        """Drop the tensor. From now on it is read from the site."""
        self.view = View(self.tensor, self.version, self.origin)
        del self.tensor

    def spill(self) -> int:
        """Start the storage's copy out. Returns the bytes that it will free. Call it under the scheduler's lock."""
        scheduler, tensor = self.scheduler, self.tensor
        handles = [self, *(handle for weak in self.views or () if (handle := weak()) is not None)]
        if any(version_of(handle.tensor) != handle.version for handle in handles):
            return 0  # modified since it was saved: plain autograd will raise, and so must the handle
        if not all(is_movable(handle.tensor, scheduler.engine.device) for handle in handles):
            return 0
        storage, part = tensor.untyped_storage(), part_of(tensor)
        if len({storage_key(handle.tensor.untyped_storage()) for handle in handles}) > 1:
            return 0  # the data of one was exchanged since
        if scheduler.find(storage, self.version, part) is not None:
            return 0  # it is swapped already, as another site
        assert isinstance(self.bytes_of, Share)
        scheduler.ledger.change(self.bytes_of, 0)  # the site has them in the ledger from now on
        # Distance 0: it is fetched when it is read. There is no room for it before.
        self.site = site = scheduler.enroll(self.queue, storage, self.version, 0, part)
        self.spilled = StorageWeakRef(storage), self.version, part
        site.num_readers = sum(handle.num_readers for handle in handles)
        site.last_use = self.sequence
        for handle in handles:
            handle.let_go()
        del storage, tensor
        scheduler.start_offload(site, None)
        return site.copy.nbytes if site.copy.slot is not None else 0


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
        self._unknown_bytes = 0
        self._owed: deque[tuple[weakref.ref[Spillable], int]] = deque()
        """What the plan drops and had to stay in this forward pass, and was not spilled yet."""
        self._high_bytes = limit_bytes - limit_bytes // _HEADROOM_SHARE
        self._longer_bytes = longer_bytes
        self._num_calls = num_calls
        self.num_extra_calls = 0
        """Calls of layers that no plan knew, so far."""
        self._scheduler = scheduler
        self._min_bytes = min_bytes
        self._state_bytes = state_bytes
        self._model_bytes = state_bytes()
        self._room_bytes = 0
        """What activations may take before the mark is passed."""
        self._kept: dict[int, weakref.ref[Spillable]] = {}
        """The first handle of each storage that is kept, by the storage's key."""
        self._candidates: deque[weakref.ref[Spillable]] = deque()

    def begin(self) -> None:
        """A forward pass begins: gradients or optimizer state may have come or gone."""
        self._model_bytes = self._state_bytes()
        self._candidates = deque(reference for reference in self._candidates if reference() is not None)
        self._kept = {key: reference for key, reference in self._kept.items() if reference() is not None}
        self._look_around()
        self._unknown_bytes = 0
        self._owed.clear()
        if self._scheduler.ledger.now_bytes == 0:
            self._scheduler.window.most_ahead_bytes = None

    def _look_around(self) -> int:
        """What `beside_bytes` gives now."""
        beside_bytes = self.beside_bytes()
        self._room_bytes = self._high_bytes - self._model_bytes - beside_bytes
        return beside_bytes

    def keep(
        self,
        tensor: torch.Tensor,
        queue: PrefetchQueue,
        on_open: Callable[[], None] | None,
        *,
        is_planned: bool = True,
        origin: TensorOrigin | None = None,
    ) -> Spillable:
        """The handle on a storage that is kept for the first time in this forward pass. May spill others.
        `is_planned`: the plan keeps it. `origin`: as in `Kept`.

        This runs for each kept tensor of a step that goes as planned: what only spilling needs is found out then.
        """
        scheduler = self._scheduler
        if scheduler.engine.device_type != "cpu":
            scheduler.engine.compute_stream()  # a copy that begins on another stream must wait for this one too
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        handle = self._handle(tensor, queue, on_open, origin)
        share = handle.bytes_of = scheduler.ledger.hold(handle, nbytes)
        scheduler.counters.kept_bytes += nbytes
        self._kept[storage_key(storage)] = share
        if nbytes >= self._min_bytes:
            self._candidates.append(share)
            if not is_planned:
                self._note_longer()
        is_longer = scheduler.window.most_ahead_bytes is not None
        if self._owed or is_longer or scheduler.ledger.now_bytes > self._room_bytes:
            self.check()
        return handle

    def _handle(
        self,
        tensor: torch.Tensor,
        queue: PrefetchQueue,
        on_open: Callable[[], None] | None = None,
        origin: TensorOrigin | None = None,
    ) -> Spillable:
        handle = Spillable(tensor, on_open, None, origin)
        handle.scheduler = self._scheduler  # not the guard: a graph must not hold the model
        handle.queue = queue.spilled or _spill_queue(queue)
        handle.sequence = next_sequence_number()
        return handle

    def enter(self, layer: str, call: int) -> None:
        """A layer begins, which has run `call` times before in this forward pass. May spill."""
        if self._num_calls is not None and call >= self._num_calls.get(layer, call + 1):
            self.num_extra_calls += 1
            self._note_longer()
            self.check()

    def _note_longer(self) -> None:
        """From now on this step is not the one that was planned: its worst moment may be where the plan's is not."""
        self._scheduler.window.most_ahead_bytes = self._longer_bytes

    def offer(self, tensor: torch.Tensor, share: Share, queue: PrefetchQueue) -> Spillable:
        """The handle on what the plan drops, and what has to stay because its recipe does not hold: it may be spilled.
        `share`: its bytes in the ledger.

        It is spilled where the plan's peak, plus all that has stayed so far, would pass the budget. Then it takes no
        more memory at the worst moment than in the plan, which drops it. Live bytes in forward do not show whether that
        is needed: the worst moment may be in backward.
        """
        self._pay()
        handle, nbytes = self._handle(tensor, queue), tensor.untyped_storage().nbytes()
        handle.bytes_of = share
        self._candidates.append(weakref.ref(handle))
        if self._slack_bytes is not None:
            self._unknown_bytes += nbytes
            self._owed.append((weakref.ref(handle), nbytes))
        return handle

    def view(self, tensor: torch.Tensor, queue: PrefetchQueue, on_open: Callable[[], None] | None) -> Spillable | None:
        """A further handle on a storage that is kept already; None if it is not."""
        reference = self._kept.get(storage_key(tensor.untyped_storage()))
        first = reference() if reference is not None else None
        if first is None or (first.spilled is not None and first.spilled[0].expired()):
            return None
        if first.spilled is not None and not first.is_of(tensor):
            return self.keep(tensor, queue, on_open)  # written since the storage was sent away: it is here again
        first.sequence = next_sequence_number()
        further = self._handle(tensor, queue, on_open)
        first.add(further)
        return further

    def check(self, device: torch.device | None = None) -> None:
        """Spill until live bytes are below the mark. `device`: on an accelerator, its allocator's number counts."""
        self._pay()
        held_bytes = self._look_around() + self._scheduler.ledger.now_bytes
        live_bytes = self._model_bytes + held_bytes
        if device is not None and device.type != "cpu":
            live_bytes = self._scheduler.engine.device_bytes() or live_bytes
        excess_bytes = live_bytes - self._high_bytes
        if excess_bytes > 0:
            self._note_longer()
        if self._longer_bytes is not None and self._scheduler.window.most_ahead_bytes is not None:
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
        over_bytes = 0 if self._slack_bytes is None else self._unknown_bytes - self._slack_bytes
        if over_bytes > 0:
            self._scheduler.counters.num_over_limit += 1
            warnings.warn(
                f"lowtide: {format_bytes(self._unknown_bytes)} of what the plan makes again had to stay in this "
                "forward pass, because recipes did not hold, and there was no room to send them away: this step may "
                f"pass its budget by {format_bytes(over_bytes)}. The next one has a plan without these recipes.",
                stacklevel=2,
            )

    def _pay(self, *, is_over: bool = False) -> None:
        """Spill as much of what had to stay as the budget has no room for. `is_over`: no operator runs any more."""
        if not self._owed or self._slack_bytes is None or self._unknown_bytes <= self._slack_bytes:
            return
        with self._scheduler.lock, disable_current_modes():
            sequence = -1 if is_over else next_sequence_number()
            paid_bytes = 0
            while self._owed and self._unknown_bytes > self._slack_bytes:
                reference, nbytes = self._owed[0]
                handle = reference()
                if handle is not None and handle.sequence == sequence:
                    break  # saved by the operator that is running now
                self._owed.popleft()
                if handle is None or (handle.site is not None and handle.site.copy.slot is not None):
                    self._unknown_bytes -= nbytes  # dead, or sent away below the mark
                    continue
                spilled_bytes = self._spill_one(handle)
                self._unknown_bytes -= spilled_bytes
                paid_bytes += spilled_bytes
            if paid_bytes:
                self._scheduler.retire(max(0, self._scheduler.window.leaving_bytes - paid_bytes))

    def _spill(self, excess_bytes: int, sequence: int) -> bool:
        """Whether so much could be spilled. `sequence`: of the operator that is running now."""
        # Copies that are running will free some bytes: spill only what is missing beyond those, then wait for them.
        missing_bytes = excess_bytes - self._scheduler.window.leaving_bytes
        while missing_bytes > 0 and self._candidates:
            handle = self._candidates[0]()
            if handle is not None and handle.sequence == sequence:
                break  # saved by the operator that is running now
            self._candidates.popleft()
            missing_bytes -= self._spill_one(handle)
        self._scheduler.retire(max(0, self._scheduler.window.leaving_bytes - excess_bytes))
        return missing_bytes <= 0

    def _spill_one(self, kept: Spillable | None) -> int:
        """The bytes that this will free: 0 where it is dead, or away already."""
        nbytes = kept.spill() if kept is not None and kept.site is None else 0
        if nbytes:
            counters = self._scheduler.counters
            counters.num_spills += 1
            counters.spilled_bytes += nbytes
            counters.kept_bytes -= nbytes
        return nbytes


def _spill_queue(queue: PrefetchQueue) -> PrefetchQueue:
    """A new queue of what is spilled in the pass of `queue`: in it sites are in the order of saving, and backward reads
    it from the end."""
    queue.spilled = PrefetchQueue()
    return queue.spilled
