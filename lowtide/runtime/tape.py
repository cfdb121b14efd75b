"""What the mover moves: sites, their copies, and the order in which a forward pass saved them.

A `Site` is one activation storage at one version; a `Copy` is its bytes on a slower tier; a `Tape` lists the sites of
one forward pass in the order of saving, which backward reads from the end. Autograd owns sites (through the handles in
runtime/handle.py), sites own copies, and tapes hold sites weakly: a graph that is dropped gives everything back.

Cost: some 3 us a site. Not covered: when anything is moved (runtime/swap.py).
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from lowtide.runtime.engines.base import Event, Slot

if TYPE_CHECKING:
    from lowtide.runtime.swap import Mover


class Copy:
    """One site's bytes on a slower tier, and the source on the device while it is still there."""

    __slots__ = ("event", "has_deadline", "is_leaving", "is_needed_soon", "nbytes", "reading", "slot", "source")

    def __init__(self, source: torch.UntypedStorage, nbytes: int) -> None:
        self.source: torch.UntypedStorage | None = source
        self.nbytes = nbytes
        self.slot: Slot | None = None
        self.event: Event = None
        # The last copy in: until it is complete the slot must stay, also if nobody waits for its bytes any more.
        self.reading: Event = None
        self.is_leaving = False
        # A plan says when it must be gone: then no window of bytes has to.
        self.has_deadline = False
        # Backward is about to read it: landing must not drop the source any more.
        self.is_needed_soon = False


class Site:
    """One activation storage, at one version, shared by all saved tensors that view it. Owned by autograd's handles."""

    __slots__ = (
        "__weakref__",
        "arrival",
        "buffer",
        "copy",
        "device",
        "distance",
        "index",
        "is_ahead",
        "key",
        "last_use",
        "mover",
        "num_readers",
        "num_reads",
        "start_at",
        "tape",
        "task",
        "version",
        "weak",
    )

    def __init__(self, mover: Mover, tape: Tape, storage: torch.UntypedStorage, version: int, distance: int | None):
        self.mover = mover
        self.tape = tape
        self.key = storage._cdata
        self.weak = StorageWeakRef(storage)
        self.version = version
        self.device = storage.device
        self.copy = Copy(storage, storage.nbytes())
        self.distance = distance
        # Autograd's sequence number when it was last saved: one more than that of the operator that reads it first.
        self.last_use = 0
        self.start_at = 0
        self.buffer: torch.UntypedStorage | None = None
        self.arrival: Event = None
        self.task: int | None = None
        self.num_readers = 0
        self.num_reads = 0
        self.is_ahead = False
        self.index = tape.append(self)

    def elsewhere(self) -> torch.UntypedStorage | None:
        """The original storage, if something other than this site keeps it alive."""
        pointer = torch.UntypedStorage._new_with_weak_ptr(self.weak.cdata)
        return pointer if pointer is not None and pointer.nbytes() == self.copy.nbytes else None

    def read(self) -> torch.UntypedStorage:
        """The bytes on the device, safe to use on the current compute lane."""
        return self.mover.read(self)

    def let_go(self, task: int) -> None:
        """The backward `task` is over."""
        if self.task == task:
            self.mover.release(self)

    def __del__(self) -> None:
        # May run at any point, also while this thread holds the mover's lock: only leave a note.
        self.mover.orphans.append((self.copy, self.buffer, self.is_ahead))
        self.mover.forget(self)
        self.mover.after_close()


class Tape:
    """The sites of one forward pass in the order of saving. Holds them weakly: a dropped graph frees itself.

    A tape is *timed* once `arrange` found a distance on every site: then it is in the order in which fetches start.
    """

    __slots__ = ("cursor", "has_distances", "is_timed", "next_start", "sites", "swapped_bytes", "task")

    def __init__(self) -> None:
        self.sites: list[weakref.ref[Site]] = []
        self.cursor = 0
        self.task: int | None = None
        self.swapped_bytes = 0
        self.has_distances = False
        self.is_timed = False
        # Nothing is to be started before backward reaches this sequence number. None: not known.
        self.next_start: int | None = None

    def append(self, site: Site) -> int:
        self.sites.append(weakref.ref(site))
        self.cursor = len(self.sites)
        self.swapped_bytes += site.copy.nbytes
        self.has_distances |= site.distance is not None
        return len(self.sites) - 1

    def arrange(self) -> None:
        """The forward is over: bring the sites into the order in which backward starts their fetches, latest first."""
        alive = [site for site in (reference() for reference in self.sites) if site is not None]
        if not alive or any(site.distance is None for site in alive):
            return
        for site in alive:
            assert site.distance is not None
            site.start_at = site.last_use - 1 + site.distance
        alive.sort(key=lambda site: site.start_at)
        for index, site in enumerate(alive):
            site.index = index
        self.sites = [weakref.ref(site) for site in alive]
        self.cursor = len(alive)
        self.is_timed = True
