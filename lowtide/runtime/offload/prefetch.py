"""Fetches ahead of need: which site is fetched next, and when, before backward reads it.

What: backward reads the sites of a queue from the end, and calls this code with every saved tensor that it opens. A
fetch starts in one of three ways:
- The sites have no distance. Then each read starts the fetches of the sites saved before it, latest first, as far as
  the window has room.
- A site has a *distance* of N. Then its fetch starts when backward is within N operators of the site's first reader.
- All sites of a queue have a distance. Then the queue is *timed* (site.py): it is sorted by when the fetches start.
A fetch ahead of need that finds no memory is given up, and so are further ones in this backward pass.

The `Window` bounds the bytes that are being copied: it follows the bytes that a pass really swaps (1/50 of them, and
never less than two of the largest sites).

`Prefetch` gets its scheduler with each call and stores no reference to it: a scheduler must die at once with the last
of its graphs.

Cost: 1 us a saved tensor that is opened, where any site has a distance. Not covered: how a site is fetched
(runtime/offload/scheduler.py). Operators that saved nothing are not seen, so no fetch can start at them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from lowtide.engines.base import Engine
from lowtide.runtime.offload.site import Copy, OffloadedStorage, PrefetchQueue
from lowtide.tensors.private import current_autograd_node, current_graph_task_id, sequence_number

_WINDOW_SHARE = 50


class Bringer(Protocol):
    """What `Prefetch` calls to start a fetch. An `OffloadScheduler` has it."""

    def has_room(self, site: OffloadedStorage) -> bool:
        """Whether a site may be fetched ahead of need."""

    def ensure_resident(self, site: OffloadedStorage) -> None:
        """Unless the bytes are on the device or being fetched, start the fetch."""


class Window:
    """How many bytes may be in copies out, and how many may be fetched ahead of need. Units: bytes."""

    __slots__ = ("_pass_bytes", "largest_bytes", "min_bytes")

    def __init__(self) -> None:
        # A smaller window causes waits and saves little: 16 MiB are a few thousandths of the smallest accelerator.
        self.min_bytes = 16 * 2**20
        self.largest_bytes = 0
        """The largest site that was ever to be moved."""
        self._pass_bytes = 0

    def nbytes(self) -> int:
        """The size of the window now. It follows the last complete forward pass."""
        return max(self._pass_bytes // _WINDOW_SHARE, 2 * self.largest_bytes, self.min_bytes)

    def note_pass(self, swapped_bytes: int) -> None:
        """A forward pass is complete, and swapped `swapped_bytes`."""
        self._pass_bytes = max(swapped_bytes, self._pass_bytes // 2)


class Prefetch:
    """Fetches ahead of need of one scheduler. Call everything but `follow` under the scheduler's lock."""

    __slots__ = ("_ahead_bytes", "_engine", "_full_task", "_lock", "_window")

    def __init__(self, engine: Engine, lock: AbstractContextManager, window: Window) -> None:
        self._engine = engine
        self._lock = lock
        self._window = window
        self._ahead_bytes = 0
        # The backward in which a fetch ahead of need found no room.
        self._full_task: int | None = None

    def follow(self, queue: PrefetchQueue, scheduler: Bringer) -> None:
        """A saved tensor is being opened: backward has reached the operator that reads it."""
        node = current_autograd_node() if queue.has_distances else None
        if node is None:
            return
        sequence = sequence_number(node)
        is_due = queue.next_start is None or sequence <= queue.next_start
        # Another backward starts from the end again.
        if not is_due and queue.task == current_graph_task_id():
            return
        self._advance(queue, sequence, scheduler)

    def after_read(self, site: OffloadedStorage, scheduler: Bringer) -> None:
        """Start fetching what backward will read next: the sites saved before this one, latest first."""
        queue = site.queue
        if queue.is_timed:
            self.follow(queue, scheduler)
            return
        queue.cursor = min(queue.cursor, site.index + 1)
        while queue.cursor > 0:
            following = queue.sites[queue.cursor - 1]()
            if following is not None and following is not site:
                is_started = self._may_fetch(following, site) and self._start(following, queue, scheduler)
                if not is_started:
                    return
            queue.cursor -= 1

    def _may_fetch(self, following: OffloadedStorage, site: OffloadedStorage) -> bool:
        if following.distance is not None:
            return following.last_use >= site.last_use - following.distance
        return self._ahead_bytes + following.copy.nbytes <= self._window.nbytes()

    def _advance(self, queue: PrefetchQueue, sequence: int, scheduler: Bringer) -> None:
        """Backward reached the operator with this autograd sequence number: start the fetches that are due."""
        with self._lock:
            queue.enter(current_graph_task_id())
            if queue.is_timed:
                self._advance_timed(queue, sequence, scheduler)
                return
            while queue.cursor > 0:
                following = queue.sites[queue.cursor - 1]()
                if following is not None:
                    if following.distance is None or following.last_use < sequence - following.distance:
                        return
                    if not self._start(following, queue, scheduler):
                        return
                queue.cursor -= 1

    def _advance_timed(self, queue: PrefetchQueue, sequence: int, scheduler: Bringer) -> None:
        while queue.cursor > 0:
            following = queue.sites[queue.cursor - 1]()
            if following is not None:
                if following.start_at < sequence:
                    queue.next_start = following.start_at
                    return
                has_been_read = following.task == queue.task and following.num_reads > 0
                # Backward is past its first reader: either it has been read, or this backward does not need it.
                is_ahead = not has_been_read and following.last_use <= sequence + 1
                if is_ahead and not self._start(following, queue, scheduler):
                    return
            queue.cursor -= 1
        queue.next_start = -1

    def _start(self, site: OffloadedStorage, queue: PrefetchQueue, scheduler: Bringer) -> bool:
        """Start a fetch ahead of need; False where memory has no room for it."""
        if self._full_task == queue.task or not scheduler.has_room(site):
            return False
        if self._engine.compute_stream() != site.stream:
            return True  # its buffer has to come from the pool of the reader's stream: its reader will fetch it
        if site.task != queue.task:
            site.task = queue.task
            site.num_reads = 0
        try:
            scheduler.ensure_resident(site)
        except (RuntimeError, MemoryError):
            # Harmless: nobody waits for this fetch. If the cause was not a lack of memory, the reader gets the error.
            self.give_up(queue.task)
            return False
        if not site.copy.is_ahead:
            site.copy.is_ahead = True
            self._ahead_bytes += site.copy.nbytes
        return True

    def give_up(self, task: int | None) -> None:
        """Memory has no room: start no more fetches ahead of need in the backward pass `task`."""
        self._full_task = task

    def forget(self, copy: Copy) -> None:
        """What was fetched ahead has been read, or nobody will read it: it no longer counts in the window."""
        copy.is_ahead = False
        self._ahead_bytes -= copy.nbytes
