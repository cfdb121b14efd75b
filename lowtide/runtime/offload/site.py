"""What the scheduler moves: sites, their copies, and the order in which a forward pass saved them.

An `OffloadedStorage` is one activation storage at one version; a `Copy` is its bytes on a slower tier; a
`PrefetchQueue` lists the sites of one forward pass in the order of saving, which backward reads from the end. Autograd
owns sites (through the handles in runtime/saved/handle.py), sites own copies, and queues hold sites weakly: a graph
that is dropped gives everything back.

How bytes are freed: a `Copy` is a weak reference to its site, and the reference's callback is `deque.append`. So when a
site dies, its copy is appended to the scheduler's queue, and only C code runs. Why: in a finalizer written in Python,
Python swallows a Ctrl-C, and the rest of the finalizer never runs.

`Copy.source` is the original storage on the device, from which the copy out reads. It has nothing to do with the
sources of recipes (`HeldSource` and others, runtime/recompute/recipe_sources.py).

Cost: some 3 us a site. Not covered: when anything is moved (runtime/offload/scheduler.py).
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from lowtide.engines.base import Event, Slot
from lowtide.tensors.compiled import never_compiled
from lowtide.tensors.private import storage_at, storage_key
from lowtide.tensors.view import Shape


class Copy(weakref.ref):
    """One site's bytes on a slower tier, and its storages on the device. The scheduler and the site hold it."""

    def __init__(self, site: OffloadedStorage, scheduler: Any, storage: torch.UntypedStorage) -> None:
        super().__init__(site, scheduler.pending_free.append)  # type: ignore[call-arg]
        self.source: torch.UntypedStorage | None = storage
        self.key = storage_key(storage)
        # The storage on the device that the bytes were fetched into; backward reads it.
        self.buffer: torch.UntypedStorage | None = None
        self.nbytes = storage.nbytes()
        # It was fetched ahead of need, and counts in the window of such bytes.
        self.is_ahead = False
        self.slot: Slot | None = None
        self.event: Event = None
        # Of the copy that fills the buffer.
        self.arrival: Event = None
        # The last copy in. Until it is complete the slot must not be freed, even if nobody waits for it any more.
        self.reading: Event = None
        self.is_leaving = False
        # A plan says when it must be complete: then it does not count in the window.
        self.has_deadline = False
        # Backward is about to read it: the source must stay when the copy out is complete.
        self.is_needed_soon = False
        # The bytes of source and buffer in the ledger.
        self.share = scheduler.ledger.hold(self, self.nbytes)
        scheduler.copies[id(self)] = self

    def __new__(cls, site: OffloadedStorage, scheduler: Any, storage: torch.UntypedStorage) -> Copy:
        return super().__new__(cls, site, scheduler.pending_free.append)


class _Farewell:
    """Dies with a site, just after the site's copy was appended to the scheduler's queue, and lets the scheduler free
    that copy. Needed after `close`: then no forward follows that would do so. A Ctrl-C here loses nothing: the copy is
    freed when the next site dies, or with the scheduler."""

    __slots__ = ("scheduler",)

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    @never_compiled
    def __del__(self) -> None:
        self.scheduler.after_close()


class OffloadedStorage:
    """One activation storage, at one version, shared by all saved tensors that view it. Owned by autograd's handles.
    `scheduler`: the `OffloadScheduler` that moves it."""

    def __init__(
        self,
        scheduler: Any,
        queue: PrefetchQueue,
        storage: torch.UntypedStorage,
        version: int,
        distance: int | None,
        *,
        part: Shape | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.queue = queue
        self.weak = StorageWeakRef(storage)
        self.version = version
        # The part of the storage that this version counts for.
        self.part = part
        self.device = storage.device
        # The compute stream that saved it: its memory may come from that stream's pool.
        self.stream = scheduler.engine.compute_stream()
        self.copy = Copy(self, scheduler, storage)
        self.farewell = _Farewell(scheduler)
        self.distance = distance
        # Autograd's sequence number when it was last saved. The operator that reads it first has the number before.
        self.last_use = 0
        self.task: int | None = None
        self.num_readers = 0
        self.num_reads = 0
        self.index = queue.append(self)

    @property
    def start_at(self) -> int:
        """In a timed queue: where backward starts its fetch."""
        assert self.distance is not None
        return self.last_use - 1 + self.distance

    def elsewhere(self) -> torch.UntypedStorage | None:
        """The original storage, if something other than this site keeps it alive."""
        pointer = storage_at(self.weak.cdata)
        return pointer if pointer is not None and pointer.nbytes() == self.copy.nbytes else None

    def read(self) -> torch.UntypedStorage:
        """The storage with the bytes on the device, safe to use on the current compute lane."""
        return self.scheduler.read(self)

    def let_go(self, task: int) -> None:
        """The backward `task` is over."""
        if self.task == task:
            self.scheduler.release(self)


class PrefetchQueue:
    """The sites of one forward pass in the order of saving. Holds them weakly: a dropped graph frees itself.

    A queue is *timed* once `arrange` found a distance on every site: then it is sorted by when the fetches start.
    """

    def __init__(self) -> None:
        self.sites: list[weakref.ref[OffloadedStorage]] = []
        self.cursor = 0
        self.task: int | None = None
        self.swapped_bytes = 0
        self.has_distances = False
        self.is_timed = False
        self.spilled: PrefetchQueue | None = None
        """Of what was spilled in the same pass."""
        # No fetch starts before backward reaches this sequence number. None: not known.
        self.next_start: int | None = None

    def append(self, site: OffloadedStorage) -> int:
        self.sites.append(weakref.ref(site))
        self.cursor = len(self.sites)
        self.swapped_bytes += site.copy.nbytes
        self.has_distances |= site.distance is not None
        return len(self.sites) - 1

    def enter(self, task: int) -> None:
        """The backward `task` reads. If another one read last, this one starts from the end again."""
        if self.task != task:
            self.task = task
            self.cursor = len(self.sites)

    def turn(self, start: int) -> None:
        """What was saved from number `start` on will be read in the order of saving: by a region that runs again."""
        self.sites[start:] = reversed(self.sites[start:])
        for index in range(start, len(self.sites)):
            site = self.sites[index]()
            if site is not None:
                site.index = index

    def arrange(self) -> None:
        """The forward is over: sort the sites by when backward starts their fetches; the first to start is last."""
        alive = [site for site in (reference() for reference in self.sites) if site is not None]
        if not alive or any(site.distance is None for site in alive):
            return
        # Of those that start together, the one that is needed first is last: a lane is in order.
        alive.sort(key=lambda site: (site.start_at, site.last_use))
        for index, site in enumerate(alive):
            site.index = index
        self.sites = [weakref.ref(site) for site in alive]
        self.cursor = len(alive)
        self.is_timed = True
