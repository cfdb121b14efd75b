"""Swap: every ordering decision between compute and copies, made once for all engines.

What: the `OffloadScheduler` copies sites (runtime/offload/site.py) off the device after the forward has saved them, and
back before the backward needs them. It starts copies, waits for them and frees memory, and orders all that by the
engine's `record` and `wait` alone.

Here *source* is `Copy.source`: the original storage on the device, from which the copy out reads.

The rules (each of them broken has given a wrong gradient somewhere):
- a copy out waits for the compute lane that made the data, and is issued only after the operator that saved it has
  been launched: some operators save an input first and fill it after;
- the source is released only when its copy is complete, or after the compute lane has been told to wait for it;
- a copy in waits for the compute lane that freed its buffer's memory, and for the site's own copy out;
- every reader waits for the copy in, on its own compute lane;
- a slot, and a buffer that a copy is filling, belong to the scheduler until the engine says that the copy is complete,
  even if nothing else holds them any more; if the scheduler dies before that, they pass to the engine, and the engine's
  next scheduler frees them;
- with several compute streams a buffer is used only on the stream whose pool it came from: a fetch ahead of need runs
  on the stream that will read it, and a reader on another stream than the site's gets a buffer of its own. The engine
  takes care of the rest (engines/accelerator.py).

Out of memory: a fetch that a reader waits for frees what was fetched ahead of need, and tries once more.

Ahead of need: backward reads the sites of a queue from the end, and each saved tensor that it opens says how far it has
come. A fetch starts in one of three ways:
- The sites have no distance. Then each read starts the fetches of the sites saved before it, latest first, as far as
  the window has room.
- A site has a *distance* of N. Then its fetch starts when backward is within N operators of the site's first reader.
- All sites of a queue have a distance. Then the queue is *timed* (site.py): it is sorted by when the fetches start.
A fetch ahead of need that finds no memory is given up, and so are further ones in this backward pass.

Bounds: bytes in copies out, and bytes fetched ahead of need, are each held below a window, which follows the bytes that
a pass really swaps (1/50 of them, and never less than two of the largest sites). When copies fall behind, compute
waits: a stall, not an out-of-memory. A solved plan says of each copy when it must be complete and when its fetch
starts; such copies do not count in a window.

Cost: about 15 us of Python a site; 1 us a saved tensor that is opened, where any site has a distance. Not covered: what
to swap (planner), where host bytes live (engines). Operators that saved nothing are not seen: no fetch starts at them.
"""

from __future__ import annotations

import functools
import heapq
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from lowtide.engines.base import Engine, Event, Lane, Slot, block
from lowtide.errors import TierFull
from lowtide.runtime.offload.site import Copy, OffloadedStorage, PrefetchQueue
from lowtide.runtime.saved.stats import Counters, Ledger
from lowtide.tensors.private import (
    current_autograd_node,
    current_graph_task_id,
    next_sequence_number,
    queue_callback,
    sequence_number,
    storage_key,
)
from lowtide.tensors.view import Shape

_WINDOW_SHARE = 50


def _windowed_bytes(copy: Copy) -> int:
    return 0 if copy.has_deadline else copy.nbytes


class Window:
    """How many bytes may be in copies out, how many may be fetched ahead of need, and how many are. Units: bytes."""

    def __init__(self) -> None:
        # A smaller window causes waits and saves little: 16 MiB are a few thousandths of the smallest accelerator.
        self.min_bytes = 16 * 2**20
        self.largest_bytes = 0
        """The largest site that was ever to be moved."""
        self._pass_bytes = 0
        self.leaving_bytes = 0
        """In copies out that are not complete yet."""
        self.ahead_bytes = 0
        """Fetched ahead of need, and not read yet."""
        self.most_ahead_bytes: int | None = None
        """Nothing is fetched ahead of need beyond so many bytes of activations. None: as far as the plan says."""
        self.full_task: int | None = None
        """The backward in which a fetch ahead of need found no room."""

    def nbytes(self) -> int:
        """The size of the window now. It follows the last complete forward pass."""
        return max(self._pass_bytes // _WINDOW_SHARE, 2 * self.largest_bytes, self.min_bytes)

    def note_pass(self, swapped_bytes: int) -> None:
        """A forward pass is complete, and swapped `swapped_bytes`."""
        self._pass_bytes = max(swapped_bytes, self._pass_bytes // 2)


class OffloadScheduler:
    """Copies sites off the device and back. One per tide; safe to call from autograd's threads."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.counters = Counters()
        self.ledger = Ledger()
        """Of the bytes of activations on the device."""
        self.lock = threading.RLock()
        self._is_closed = False
        # Copies by the key of their source, and by their own identity. A copy is a weak reference to its site.
        self.live: dict[int, Copy] = {}
        self.copies: dict[int, Copy] = {}
        self.pending_free: deque[Copy] = deque()
        self._leaving: deque[Copy] = deque()
        # Storages that copies are filling (or reading, where nobody else holds them), with the events of these copies,
        # by the identity of the event; oldest first.
        self._arriving: dict[int, tuple] = {}
        self._unfreed: deque[tuple] = deque()
        self._open_sites: dict[int, weakref.WeakSet[Any]] = {}
        """What holds memory for a backward pass, and is told by `let_go` when that is over: sites, recipes' sources."""
        self.window = Window()
        self._has_warned_full = False
        rest = (self.copies, self._unfreed, self._arriving, self._leaving)
        weakref.finalize(self, _leave_the_rest, engine.leftovers, *rest).atexit = False
        # Called with every buffer that the engine makes, while something counts live bytes. None: nothing does.
        self.on_buffer: Callable[[torch.UntypedStorage], None] | None = None

    # -- forward ---------------------------------------------------------------------------------------------------

    def find(self, storage: torch.UntypedStorage, version: int, part: Shape | None) -> OffloadedStorage | None:
        """The site of a live storage at this version of this part, or None.

        An address alone is not enough: it may be reused. Nor is a version, since parts of a storage may have version
        counters of their own.
        """
        reference = self.live.get(storage_key(storage))
        site = reference() if reference is not None else None
        if site is None or site.version != version or site.part != part or site.weak.expired():
            return None
        return site

    def enroll(
        self,
        queue: PrefetchQueue,
        storage: torch.UntypedStorage,
        version: int,
        distance: int | None,
        part: Shape | None,
    ) -> OffloadedStorage:
        """Make a site of a live storage. It stays on the device until `start_offload`."""
        with self.lock:
            site = OffloadedStorage(self, queue, storage, version, distance, part=part)
            self.live[site.copy.key] = site.copy
            self.window.largest_bytes = max(self.window.largest_bytes, site.copy.nbytes)
            return site

    def start_offload(self, site: OffloadedStorage, tier: str | None) -> None:
        """Start a site's copy out. Where no tier has room, the site stays on the device, counted as kept."""
        with self.lock:
            copy = site.copy
            try:
                copy.slot = self._allocate(copy.nbytes, tier)
                if copy.slot is None:
                    self._stay(copy)
                    return
                self._copy_out(copy)
            except BaseException:
                # The copy failed: the site must not count as swapped, or backward would read an empty slot.
                slot, copy.slot = copy.slot, None
                self.counters.kept_bytes += copy.nbytes
                if slot is not None:
                    # A part of the copy may be running: it still reads the source and fills the slot.
                    begun = self.engine.record(Lane.OUT)
                    self._unfreed.append((slot, (begun,)))
                    self._arriving[id(begun)] = (copy.source, begun)
                raise
            self.counters.swapped_bytes += copy.nbytes
            self.retire(self.window.nbytes())

    def finish_due(self, copy: Copy) -> None:
        """The deadline of this copy has come: if it is not complete, compute waits for it."""
        with self.lock:
            while copy.is_leaving:
                self._retire_first()

    def _allocate(self, nbytes: int, tier: str | None) -> Slot | None:
        tiers = self.engine.tiers
        start = tiers.index(tier) if tier in tiers else 0
        self._free_pending()
        for name in tiers[start:]:
            try:
                return self.engine.allocate(nbytes, name)
            except TierFull as full:
                reason = str(full)
        self._warn_of_full(
            f"no room left for swapped activations ({reason}); they stay on the device, and "
            "`stats.num_kept_for_lack_of_room` counts them. Raise host_budget or disk_budget, point disk_path at a "
            "larger disk, or swap less."
        )
        return None

    def _warn_of_full(self, message: str) -> None:
        if not self._has_warned_full:
            self._has_warned_full = True
            warnings.warn(f"lowtide: {message}", stacklevel=3)

    def _stay(self, copy: Copy) -> None:
        copy.slot = None
        self.counters.num_kept_for_lack_of_room += 1
        self.counters.kept_bytes += copy.nbytes

    def _copy_out(self, copy: Copy) -> None:
        engine = self.engine
        assert copy.source is not None and copy.slot is not None
        engine.wait(Lane.OUT, engine.record(Lane.COMPUTE))
        engine.copy_out(copy.source, copy.slot)
        copy.event = engine.record(Lane.OUT)
        copy.is_leaving = True
        self._leaving.append(copy)
        self.window.leaving_bytes += _windowed_bytes(copy)

    def retire(self, limit_bytes: int) -> None:
        """Release sources whose copies are complete. While more than `limit_bytes` are in copies out, compute waits."""
        while self._leaving and (self.window.leaving_bytes > limit_bytes or self.engine.query(self._leaving[0].event)):
            self._retire_first()

    def _retire_first(self) -> None:
        engine, copy = self.engine, self._leaving[0]
        if not engine.query(copy.event):
            self.counters.stall_seconds += engine.wait(Lane.COMPUTE, copy.event)
        self._leaving.popleft()
        self.window.leaving_bytes -= _windowed_bytes(copy)
        copy.is_leaving = False
        self._finish(copy)

    def _finish(self, copy: Copy) -> None:
        failure = self.engine.failure(copy.event)
        if failure is not None:
            self._keep_after_failure(copy, failure)
            return
        self.counters.copied_out_bytes += copy.nbytes
        if not copy.is_needed_soon:
            self._drop_source(copy)

    def _drop_source(self, copy: Copy) -> None:
        copy.source = None
        self._account(copy)

    def _account(self, copy: Copy) -> None:
        self.ledger.change(copy.share, copy.nbytes * ((copy.source is not None) + (copy.buffer is not None)))

    def _keep_after_failure(self, copy: Copy, failure: BaseException) -> None:
        self.counters.swapped_bytes -= copy.nbytes
        if copy.slot is None:
            self._drop_source(copy)
            return
        self._unfreed.append((copy.slot, (copy.event,)))
        self._stay(copy)
        self._warn_of_full(
            f"writing an activation to a slower tier failed ({failure}); it stays on the device, nothing is lost, and "
            "`stats.num_kept_for_lack_of_room` counts it. Free some space or point disk_path at another disk."
        )

    # -- backward --------------------------------------------------------------------------------------------------

    def read(self, site: OffloadedStorage) -> torch.UntypedStorage:
        """The storage with a site's bytes on the device. The current compute lane waits until they are there."""
        with self.lock:
            self._free_pending()
            self.retire(self.window.nbytes())
            self._enter_task(site)
            if self.engine.compute_stream() == site.stream:
                self._ensure_resident_now(site)
                if site.queue.is_timed:
                    self.follow(site.queue)
                else:
                    self._fetch_near(site.queue, site.last_use, site)
                storage = self._storage(site)
            else:
                storage = self._read_apart(site)
            site.num_reads += 1
            if site.num_reads >= site.num_readers or site.task == -1:
                self.release(site)
            return storage

    def _read_apart(self, site: OffloadedStorage) -> torch.UntypedStorage:
        """The bytes for a reader on another stream than the site's. A buffer fetched for it is not in the ledger."""
        storage = site.copy.source or site.elsewhere()
        if storage is None:
            storage, arrival = self._copy_in(site)
            self._wait_for(arrival, site.copy)
        return storage

    def _enter_task(self, site: OffloadedStorage) -> None:
        task = current_graph_task_id()
        if site.task != task:
            site.task = task
            site.num_reads = 0
        if site.queue.task != task:
            site.queue.enter(task)
        self._watch(task)

    def _watch(self, task: int) -> None:
        """Have autograd's engine call `end_of_backward` when this backward is over."""
        if task != -1 and task not in self._open_sites:
            # A backward that failed never called `end_of_backward`.
            self._open_sites = {known: sites for known, sites in self._open_sites.items() if sites}
            self._open_sites[task] = weakref.WeakSet()
            queue_callback(lambda: self.end_of_backward(task))

    def note_made(self, source: Any, task: int) -> None:
        """A recipe's source holds what it made for this backward: at the end of that it is told to release it."""
        with self.lock:
            self._watch(task)
            self._open_sites[task].add(source)

    def ensure_resident(self, site: OffloadedStorage) -> None:
        """Unless the bytes are on the device or being fetched, start the fetch."""
        if site.copy.source is not None:
            self._forward(site)
            return
        copy = site.copy
        if copy.buffer is not None:
            return
        copy.buffer = site.elsewhere()
        if copy.buffer is not None:
            # Something else kept the storage alive (a cache, an output): swapping freed nothing, no fetch is needed.
            self.counters.aliased_bytes += copy.nbytes
        else:
            copy.buffer, copy.arrival = self._copy_in(site)
        self._account(copy)
        if site.task in self._open_sites:
            self._open_sites[site.task].add(site)

    def _ensure_resident_now(self, site: OffloadedStorage) -> None:
        """`ensure_resident` for a reader that waits: if memory has no room, what others hold is freed first."""
        try:
            self.ensure_resident(site)
        except (RuntimeError, MemoryError):
            if not self._make_room(site):
                raise
            self.ensure_resident(site)

    def _make_room(self, site: OffloadedStorage) -> bool:
        """Free what was fetched ahead of need, and the sources of copies out. False if there was nothing to free."""
        assert site.task is not None
        ahead = [
            other
            for other in self._open_sites.get(site.task, ())
            if isinstance(other, OffloadedStorage)
            and other is not site
            and other.copy.arrival is not None
            and not other.num_reads
        ]
        if not ahead and not self._leaving:
            return False
        self.window.full_task = site.task
        while self._leaving:
            self._retire_first()
        for other in ahead:
            # Until its copy is complete the buffer's memory cannot be reused.
            block(self.engine, other.copy.arrival)
            self.release(other)
        self._let_go_of_arrived()
        return True

    def _storage(self, site: OffloadedStorage) -> torch.UntypedStorage:
        if site.copy.source is not None:
            return site.copy.source
        assert site.copy.buffer is not None
        if site.copy.arrival is not None:
            self._wait_for(site.copy.arrival, site.copy)
        return site.copy.buffer

    def _wait_for(self, arrival: Event, copy: Copy) -> None:
        """The caller's compute lane waits for a fetched buffer. Raises RuntimeError if the bytes could not be read."""
        self.counters.stall_seconds += self.engine.wait(Lane.COMPUTE, arrival)
        # Compute is ordered after the copy now, and so is whatever reuses the buffer's memory.
        self._arriving.pop(id(arrival), None)
        failure = self.engine.failure(arrival)
        if failure is not None:
            assert copy.slot is not None
            raise RuntimeError(
                f"lowtide: a swapped activation of {copy.nbytes} bytes could not be read back from tier "
                f"'{copy.slot.tier}': {failure}"
            ) from failure

    def _forward(self, site: OffloadedStorage) -> None:
        """Backward needs bytes that are still on the device: keep the source; cancel the copy if it has not begun."""
        copy = site.copy
        if copy.is_needed_soon or copy.slot is None:
            return
        copy.is_needed_soon = True
        if copy.is_leaving and self.engine.cancel(copy.event):
            self._leaving.remove(copy)
            self.window.leaving_bytes -= _windowed_bytes(copy)
            copy.is_leaving = False
            self.engine.free(copy.slot)
            copy.slot = None

    def _copy_in(self, site: OffloadedStorage) -> tuple[torch.UntypedStorage, Event]:
        """A new buffer from the pool of the caller's compute lane, and the event of the copy that fills it."""
        engine, copy = self.engine, site.copy
        assert copy.slot is not None
        buffer = engine.new_buffer(copy.nbytes, site.device)
        if self.on_buffer is not None:
            self.on_buffer(buffer)
        engine.wait(Lane.IN, engine.record(Lane.COMPUTE))
        engine.wait(Lane.IN, copy.event)
        try:
            engine.copy_in(copy.slot, buffer)
        finally:
            # Also after an error: a part of the copy may be running, and fills the buffer.
            arrival = copy.reading = engine.record(Lane.IN)
            # The running copy holds the buffer too: if the graph is dropped now, its memory must not be reused yet.
            self._arriving[id(arrival)] = (buffer, arrival)
        self.counters.copied_in_bytes += copy.nbytes
        self._let_go_of_arrived()
        return buffer, arrival

    def _let_go_of_arrived(self) -> None:
        while self._arriving:
            oldest = next(iter(self._arriving))
            if not self.engine.query(self._arriving[oldest][1]):
                return
            del self._arriving[oldest]

    def release(self, site: OffloadedStorage) -> None:
        """The last reader of this backward has its tensor: free the buffer. The slot keeps the bytes for the next."""
        copy = site.copy
        self._note_read(copy)
        if copy.buffer is not None:
            copy.buffer = copy.arrival = None
            self._account(copy)
        if copy.source is not None and copy.is_needed_soon:
            copy.is_needed_soon = False
            if copy.slot is not None and not copy.is_leaving:
                self._drop_source(copy)

    def end_of_backward(self, task: int) -> None:
        """A backward is over: release what it fetched and did not use."""
        with self.lock:
            for opened in list(self._open_sites.pop(task, ())):
                opened.let_go(task)
            self._free_pending()

    # -- ahead of need ---------------------------------------------------------------------------------------------

    def follow(self, queue: PrefetchQueue) -> None:
        """A saved tensor is being opened: backward has reached the operator that reads it. Without the lock."""
        node = current_autograd_node() if queue.has_distances else None
        if node is None:
            return
        sequence = sequence_number(node)
        is_due = queue.next_start is None or sequence <= queue.next_start
        # Another backward starts from the end again.
        if not is_due and queue.task == current_graph_task_id():
            return
        with self.lock:
            queue.enter(current_graph_task_id())
            if queue.is_timed:
                self._fetch_timed(queue, sequence)
            else:
                self._fetch_near(queue, sequence)

    def _fetch_near(self, queue: PrefetchQueue, sequence: int, site: OffloadedStorage | None = None) -> None:
        """Backward reached the operator with this autograd sequence number, or reads `site`: start the fetches that are
        due of the sites saved before, latest first."""
        if site is not None:
            queue.cursor = min(queue.cursor, site.index + 1)
        while queue.cursor > 0:
            following = queue.sites[queue.cursor - 1]()
            if following is not None and following is not site:
                if following.distance is not None:
                    is_due = following.last_use >= sequence - following.distance
                else:
                    most_bytes = self.window.nbytes() if site is not None else 0
                    is_due = self.window.ahead_bytes + following.copy.nbytes <= most_bytes
                if not is_due or not self._fetch_ahead(following):
                    return
            queue.cursor -= 1

    def _fetch_timed(self, queue: PrefetchQueue, sequence: int) -> None:
        while queue.cursor > 0:
            following = queue.sites[queue.cursor - 1]()
            if following is not None:
                if following.start_at < sequence:
                    queue.next_start = following.start_at
                    return
                has_been_read = following.task == queue.task and following.num_reads > 0
                # Backward is past its first reader: either it has been read, or this backward does not need it.
                is_ahead = not has_been_read and following.last_use <= sequence + 1
                if is_ahead and not self._fetch_ahead(following):
                    return
            queue.cursor -= 1
        queue.next_start = -1

    def _fetch_ahead(self, site: OffloadedStorage) -> bool:
        """Start a fetch ahead of need; False where memory has no room for it."""
        task, most_bytes = site.queue.task, self.window.most_ahead_bytes
        if self.window.full_task == task:
            return False
        if most_bytes is not None and self.ledger.now_bytes + site.copy.nbytes > most_bytes:
            return False
        if self.engine.compute_stream() != site.stream:
            return True  # its buffer has to come from the pool of the reader's stream: its reader will fetch it
        if site.task != task:
            site.task = task
            site.num_reads = 0
        try:
            self.ensure_resident(site)
        except (RuntimeError, MemoryError):
            # Harmless: nobody waits for this fetch. If the cause was not a lack of memory, the reader gets the error.
            self.window.full_task = task
            return False
        if not site.copy.is_ahead:
            site.copy.is_ahead = True
            self.window.ahead_bytes += site.copy.nbytes
        return True

    def _note_read(self, copy: Copy) -> None:
        """If it was fetched ahead it has been read, or never will be: it no longer counts in the window."""
        if copy.is_ahead:
            copy.is_ahead = False
            self.window.ahead_bytes -= copy.nbytes

    # -- giving back -----------------------------------------------------------------------------------------------

    def _free_pending(self) -> None:
        """Take over what dead sites owned, and free the slots whose copies are complete."""
        while self.pending_free:
            self._take_over(self.pending_free[0])
            self.pending_free.popleft()
        while self._unfreed and all(self.engine.query(event) for event in self._unfreed[0][1]):
            self.engine.free(self._unfreed.popleft()[0])
        for _ in range(len(self.engine.leftovers)):
            slot, events, storage = self.engine.leftovers.popleft()
            if not all(self.engine.query(event) for event in events):
                self.engine.leftovers.append((slot, events, storage))
            elif slot is not None:
                self.engine.free(slot)

    def _take_over(self, copy: Copy) -> None:
        """Take over what the copy of a dead site owned. Safe to call again if a Ctrl-C interrupted it."""
        self._note_read(copy)
        copy.buffer = None
        entry = (copy.slot, _events_of(copy))
        if copy.slot is not None:
            copy.slot = None
            self._unfreed.append(entry)
        copy.is_needed_soon = False
        # While the copy out runs it reads the source; `_finish` drops it afterwards.
        if not copy.is_leaving:
            copy.source = None
        self._account(copy)
        if self.live.get(copy.key) is copy:
            del self.live[copy.key]
        self.copies.pop(id(copy), None)

    def close(self) -> None:
        """No forward will follow. Sites of graphs that are still alive keep working, and die with their graphs."""
        self._is_closed = True
        self.settle()

    def after_close(self) -> None:
        """A site died after `close`. May run at any point; does nothing while another call is at work here."""
        if self._is_closed and not self.lock._is_owned() and self.lock.acquire(blocking=False):  # type: ignore[attr-defined]
            try:
                self._free_pending()
            finally:
                self.lock.release()

    def settle(self) -> None:
        """Wait for every copy and free what has no owner. Blocks the host; used at remove and in tests."""
        with self.lock:
            while self._leaving:
                self._retire_first()
            self._free_pending()
            while self._arriving:
                # The buffer stays here until its copy is complete: nothing else may hold it any more.
                oldest = next(iter(self._arriving))
                block(self.engine, self._arriving[oldest][1])
                del self._arriving[oldest]
            for _, events in list(self._unfreed):
                for event in events:
                    block(self.engine, event)
            self._free_pending()

    def num_open(self) -> int:
        """How many copies, buffers and slots it still holds: zero when every graph is gone and `settle` ran."""
        return len(self._leaving) + len(self._arriving) + len(self._unfreed) + len(self.pending_free) + len(self.copies)


def _events_of(copy: Copy) -> tuple[Event, ...]:
    return tuple(event for event in (copy.event, copy.reading) if event is not None)


def _leave_the_rest(leftovers: deque, copies: dict, unfreed: deque, arriving: dict, leaving: deque) -> None:
    """A scheduler died, and with it all of its sites: copies that still run pass to the engine. Never blocks."""
    leftovers.extend((copy.slot, _events_of(copy), None) for copy in copies.values())
    leftovers.extend((slot, events, None) for slot, events in unfreed)
    leftovers.extend((None, (event,), buffer) for buffer, event in arriving.values())
    leftovers.extend((None, (copy.event,), copy.source) for copy in leaving)


class Departures:
    """The sites of one forward pass whose copies have not started, or have a deadline.

    Some operators save a tensor first and fill it afterwards (`rrelu` saves its noise, then draws it), so a copy starts
    when the next operator saves something. And a solved plan uses the memory that its copies free: where a copy must be
    complete by some operator, compute waits for it. Cost: nothing where nothing was swapped; else one comparison of
    numbers for each saved tensor.
    """

    __slots__ = ("_deadlines", "_pending", "_pending_sequence", "_scheduler", "is_any")

    def __init__(self, scheduler: OffloadScheduler) -> None:
        self._scheduler = scheduler
        self.is_any = False
        """There are such sites: `keep_time` has to be called for each tensor that is saved."""
        # What to do with what the operator saved that is being recorded now: its kernel has not been launched yet.
        self._pending: list[Callable[[], None]] = []
        self._pending_sequence = -1
        # Copies that must be complete when the forward reaches a sequence number; the next one first.
        self._deadlines: list[tuple[int, int, Copy]] = []

    def add(self, site: OffloadedStorage, tier: str | None, leave: int | None, sequence: int) -> None:
        """A new site, saved by operator number `sequence`. Its copy must be complete `leave` operators later."""
        if leave is not None:
            site.copy.has_deadline = True
            # Its copy starts with the next operator's save, so it cannot be complete before that.
            heapq.heappush(self._deadlines, (sequence + max(leave, 1), site.index, site.copy))
        self.add_later(functools.partial(self._scheduler.start_offload, site, tier), sequence)

    def add_later(self, start: Callable[[], None], sequence: int) -> None:
        """Call `start` once operator number `sequence` has been launched: when the next one saves something, or at the
        end of the forward. It may call `add`."""
        self._pending.append(start)
        self._pending_sequence = sequence
        self.is_any = True

    def keep_time(self, *, ahead: int = 0) -> None:
        """Start the copies of what was saved before this operator, and wait for those whose deadline has come.

        `ahead`: 1 where the operator has no number yet. A compiled part saves at its end, and by then it has computed.
        """
        sequence = next_sequence_number() + ahead
        if self._pending and sequence != self._pending_sequence:
            self._send_pending()
        while self._deadlines and self._deadlines[0][0] <= sequence:
            self._scheduler.finish_due(heapq.heappop(self._deadlines)[2])
        self.is_any = bool(self._pending or self._deadlines)

    def close(self) -> None:
        """The forward is over: start the copies that are left, and wait for all that have a deadline."""
        while self._pending:  # what is stored smaller may leave after that
            self._send_pending()
        for _, _, copy in self._deadlines:
            self._scheduler.finish_due(copy)
        self._deadlines.clear()

    def _send_pending(self) -> None:
        pending, self._pending = self._pending, []
        for start in pending:
            start()
