"""The watermark: before live bytes pass a limit, kept activations are sent away after all.

What: under `tide.set_limit(...)` every kept activation is held by handles that can change their mind: `Group` is one
storage at one version, `Spillable` one saved tensor that views it. At pack points and layer boundaries the guard
compares live bytes (model state plus the ledger of activations; on an accelerator, at layer boundaries, the allocator's
own number) with the limit less a headroom of 1/50. Above it, groups are spilled, earliest saved first, because backward
needs those last: the group becomes a site of the mover, like any swapped one, and its handles drop their tensors.
Autograd never notices, for the handles stay the same objects; versions are checked as ever. If copies lag, compute
waits: a stall, not an out-of-memory.
Why: a plan is as good as what it was made from. A longer sequence, an expert that gets all the tokens, a neighbour on
the device: the guard turns these into a slower step.

`cushion` is the last resort on CUDA: a pool that the allocator may take free blocks from when all else has failed.
Not yet measured on a GPU.

Cost: a limit that is never reached costs 4 to 10 us a kept tensor, and 3 us a parameter and forward; a look at the
mark itself 0.05 us. Not covered: cells of recipes, and inputs that
recomputed regions hold (they are few and planned for); gradients that grow during backward; storages that something
else holds too (they are copied and, as `stats.aliased_bytes` says, not freed).
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections import deque
from collections.abc import Callable, Iterator

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from lowtide.runtime.handle import Kept, View
from lowtide.runtime.stats import Counters, Ledger
from lowtide.runtime.swap import Mover
from lowtide.runtime.tape import Site, Tape

_HEADROOM_SHARE = 50


class Group:
    """One kept storage at one version, for all handles that view it. Owned by them; carries the bytes in the ledger."""

    __slots__ = ("__weakref__", "handles", "ledger", "mover", "nbytes", "sequence", "site", "tape", "version", "weak")

    def __init__(self, tensor: torch.Tensor, mover: Mover, ledger: Ledger, tape: Tape, sequence: int) -> None:
        storage = tensor.untyped_storage()
        self.nbytes = storage.nbytes()
        self.ledger = ledger
        self.site: Site | None = None
        ledger.add(self.nbytes)
        self.mover = mover
        self.tape = tape
        self.version = tensor._version
        self.sequence = sequence
        """Autograd's number of the operator that saved it last: until that was launched, nothing may be copied."""
        self.weak = StorageWeakRef(storage)
        self.handles: list[weakref.ref[Spillable]] = []

    def is_of(self, tensor: torch.Tensor) -> bool:
        return not self.weak.expired() and tensor._version == self.version

    def spill(self) -> int:
        """Send the storage away; the bytes that will leave the device. Under the mover's lock."""
        handles = [handle for handle in (reference() for reference in self.handles) if handle is not None]
        if not handles or any(handle.tensor._version != self.version for handle in handles):
            return 0  # modified since: plain autograd will raise, and so must the handle
        storage = handles[0].tensor.untyped_storage()
        site = self.mover.find(storage, self.version)
        if site is not None:
            return 0  # something else swaps it already
        self.ledger.subtract(self.nbytes)  # the site has them in the ledger from now on
        self.site = site = self.mover.enroll(self.tape, storage, self.version, None)
        site.num_readers = len(handles)
        site.last_use = self.sequence
        for handle in handles:
            handle.let_go()
        del storage
        self.mover.send(site, None)
        return self.nbytes if site.copy.slot is not None else 0

    def __del__(self) -> None:
        if self.site is None:
            self.ledger.subtract(self.nbytes)


class Spillable(Kept):
    """A saved tensor that stays on the device until the guard needs the room."""

    __slots__ = ("__weakref__", "forward_tape", "group", "view")

    def __init__(self, tensor: torch.Tensor, group: Group, forward_tape: Tape) -> None:
        super().__init__(tensor)
        self.group = group
        self.forward_tape = forward_tape
        self.view: View | None = None
        group.handles.append(weakref.ref(self))
        if group.site is not None:
            group.site.num_readers += 1
            self.let_go()

    def let_go(self) -> None:
        """From now on the tensor is made from the group's site."""
        view = View(self.tensor)
        # Of the saved tensor, not of the alias that was held in its place.
        view.version, view.producer, view.output_nr, view.is_view = (
            self.version,
            self.producer,
            self.output_nr,
            self.is_view,
        )
        self.view = view
        del self.tensor

    def open(self) -> torch.Tensor:
        with self.group.mover.lock:
            self.group.mover.follow(self.forward_tape)
            if self.view is None:
                return super().open()
            self.view.check()
            assert self.group.site is not None
            return self.view.over(self.group.site.read())


class Guard:
    """Keeps live bytes of one tide below a limit. `state_bytes()` is asked once a forward pass."""

    def __init__(
        self,
        limit_bytes: int,
        *,
        mover: Mover,
        counters: Counters,
        ledger: Ledger,
        min_bytes: int,
        state_bytes: Callable[[], int],
    ) -> None:
        self.limit_bytes = limit_bytes
        self._high_bytes = limit_bytes - limit_bytes // _HEADROOM_SHARE
        self._mover = mover
        self._counters = counters
        self._ledger = ledger
        self._min_bytes = min_bytes
        self._state_bytes = state_bytes
        self._model_bytes = state_bytes()
        self._groups: dict[int, weakref.ref[Group]] = {}
        self._candidates: deque[weakref.ref[Group]] = deque()
        self._tapes: tuple[Tape, Tape] | None = None

    def begin(self) -> None:
        """A forward pass begins: gradients or optimizer state may have come or gone."""
        self._model_bytes = self._state_bytes()
        self._candidates = deque(reference for reference in self._candidates if reference() is not None)
        self._groups = {key: reference for key, reference in self._groups.items() if reference() is not None}

    def keep(self, tensor: torch.Tensor, tape: Tape) -> Spillable:
        """The handle on a storage that is kept for the first time in this forward pass; may spill others."""
        sequence = torch.autograd._get_sequence_nr()
        group = Group(tensor, self._mover, self._ledger, self._spill_tape(tape), sequence)
        reference = weakref.ref(group)
        self._groups[tensor.untyped_storage()._cdata] = reference
        if group.nbytes >= self._min_bytes:
            self._candidates.append(reference)
        handle = Spillable(tensor, group, tape)
        self.check()
        return handle

    def view(self, tensor: torch.Tensor, tape: Tape) -> Spillable | None:
        """A further handle on a storage that the guard knows, else None."""
        reference = self._groups.get(tensor.untyped_storage()._cdata)
        group = reference() if reference is not None else None
        if group is None or not group.is_of(tensor):
            return None
        group.sequence = torch.autograd._get_sequence_nr()
        return Spillable(tensor, group, tape)

    def _spill_tape(self, tape: Tape) -> Tape:
        # A tape of its own for each pass: it is read from the end, and spilled sites come in the order of saving.
        if self._tapes is None or self._tapes[0] is not tape:
            self._tapes = (tape, Tape())
        return self._tapes[1]

    def check(self, device: torch.device | None = None) -> None:
        """Spill until live bytes are below the mark. `device`: an accelerator whose allocator may be asked."""
        live_bytes = self._model_bytes + self._ledger.now_bytes
        if device is not None and device.type != "cpu":
            live_bytes = torch.accelerator.memory_allocated(device)
        if live_bytes <= self._high_bytes:
            return
        with self._mover.lock, _disable_current_modes():
            self._spill(live_bytes - self._high_bytes)

    def _spill(self, excess_bytes: int) -> None:
        # What is leaving already will be gone: wait for it first, but spill at once what that will not cover.
        sequence = torch.autograd._get_sequence_nr()
        missing_bytes = excess_bytes - self._mover.leaving_bytes
        while missing_bytes > 0 and self._candidates:
            group = self._candidates[0]()
            if group is not None and group.sequence == sequence:
                break  # saved by the operator that is running now
            self._candidates.popleft()
            spilled_bytes = group.spill() if group is not None and group.site is None else 0
            if spilled_bytes:
                self._counters.num_spills += 1
                self._counters.spilled_bytes += spilled_bytes
                self._counters.kept_bytes -= spilled_bytes
                missing_bytes -= spilled_bytes
        if missing_bytes > 0:
            self._counters.num_over_limit += 1
        self._mover.retire(max(0, self._mover.leaving_bytes - excess_bytes))


@contextlib.contextmanager
def cushion(nbytes: int, device: torch.device) -> Iterator[bool]:
    """Inside, CUDA's allocator may fall back on a block of `nbytes` before it raises. Yields whether there is one.

    Not on other devices, and not with a torch whose pools cannot do this. Not yet measured on a GPU.
    """
    if device.type != "cuda" or "use_on_oom" not in inspect.signature(torch.cuda.MemPool.__init__).parameters:
        yield False
        return
    pool = torch.cuda.MemPool(use_on_oom=True)
    with torch.cuda.use_mem_pool(pool, device=device):
        block = torch.empty(nbytes, dtype=torch.uint8, device=device)
    del block  # the pool keeps it, free, on the stream that made it
    try:
        yield True
    finally:
        del pool
