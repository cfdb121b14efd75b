"""Swap: every ordering decision between compute and copies, made once for all engines.

What: the `Mover` takes sites (runtime/tape.py) away from the device after the forward has saved them and brings them
back before the backward needs them: it sends, lands, fetches and frees, in terms of the engine's ordering calls alone.

The rules (each was once somebody's wrong gradient):
- a copy out waits for the compute lane that made the data, and is issued only after the operator that saved it has
  been launched: some operators save an input first and fill it after;
- the source is let go only when its copy is complete, or after the compute lane has been told to wait for it;
- a copy in waits for the compute lane that freed its buffer's memory, and for the site's own copy out;
- a reader waits for the copy in; every reader does, on its own lane;
- a slot, and a buffer in flight, belong to the mover until the engine says that their copies are complete, whoever
  else has let go of them.

Bounds: bytes leaving and bytes fetched ahead of need are each held below a window, which follows the bytes that a
pass really swaps (1/50 of them, and never less than two of the largest sites). When copies fall behind, compute
waits: a stall, not an out-of-memory. A solved plan says of each copy when it must be gone and when its fetch starts;
such copies are in no window.

Cost: about 15 us of Python a site. Not covered: what to swap (planner), where host bytes live (engines).
"""

from __future__ import annotations

import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch.autograd.variable import Variable

from lowtide.runtime.engines.base import Engine, Lane, Slot, TierFull
from lowtide.runtime.lock import Lock
from lowtide.runtime.stats import Counters, Ledger
from lowtide.runtime.tape import Copy, Site, Tape

if TYPE_CHECKING:
    from lowtide.runtime.cells import MadeCell

_MIN_WINDOW_BYTES = 16 * 2**20
_WINDOW_SHARE = 50
_POLL_SECONDS = 1e-4


def _windowed_bytes(copy: Copy) -> int:
    return 0 if copy.has_deadline else copy.nbytes


class Mover:
    """Sends sites away and brings them back. One per tide; safe to call from autograd's threads."""

    def __init__(self, engine: Engine, counters: Counters, ledger: Ledger) -> None:
        self.engine = engine
        self.counters = counters
        self.ledger = ledger
        self.lock = Lock()
        self._is_closed = False
        self.lease: object = None
        self.live: dict[int, weakref.ref[Site]] = {}
        self.orphans: deque[tuple] = deque()
        self._leaving: deque[Copy] = deque()
        self._leaving_bytes = 0
        self._ahead_bytes = 0
        # Buffers in flight, by the identity of their events; oldest first.
        self._arriving: dict[int, tuple] = {}
        self._unfreed: deque[tuple] = deque()
        self._open_sites: dict[int, weakref.WeakSet[Site | MadeCell]] = {}
        self._largest_bytes = 0
        self._pass_bytes = 0
        self._has_warned_full = False
        # Told of every buffer that the engine makes, while somebody counts live bytes.
        self.on_buffer: Callable[[torch.UntypedStorage], None] | None = None

    @property
    def leaving_bytes(self) -> int:
        """Bytes whose copies out are not complete yet."""
        return self._leaving_bytes

    # -- forward ---------------------------------------------------------------------------------------------------

    def find(self, storage: torch.UntypedStorage, version: int) -> Site | None:
        """The site of a live storage at this version, or None. An address alone proves nothing: it may be reused."""
        reference = self.live.get(storage._cdata)
        site = reference() if reference is not None else None
        if site is None or site.version != version or site.weak.expired():
            return None
        return site

    def forget(self, site: Site) -> None:
        """Drop the entry of a dying site unless another site has taken the address over."""
        reference = self.live.get(site.key)
        if reference is not None and reference() in (None, site):
            self.live.pop(site.key, None)

    def enroll(self, tape: Tape, storage: torch.UntypedStorage, version: int, distance: int | None) -> Site:
        """Make a site of a live storage. It stays on the device until `send`."""
        with self.lock:
            site = Site(self, tape, storage, version, distance)
            self.live[site.key] = weakref.ref(site)
            self.ledger.add(site.copy.nbytes)
            self._largest_bytes = max(self._largest_bytes, site.copy.nbytes)
            return site

    def send(self, site: Site, tier: str | None) -> None:
        """Start a site's way out. Where no tier has room it stays, counted as kept."""
        with self.lock:
            copy = site.copy
            slot = self._allocate(copy.nbytes, tier)
            if slot is None:
                self._stay(copy)
                return
            self.counters.swapped_bytes += copy.nbytes
            copy.slot = slot
            try:
                self._copy_out(copy)
            except BaseException:
                # Nothing is on its way: it must not count as away, or a later backward would read an empty slot.
                copy.slot = None
                self.counters.swapped_bytes -= copy.nbytes
                self.counters.kept_bytes += copy.nbytes
                self._unfreed.append((slot, ()))
                raise
            self.retire(self.window_bytes())

    def land(self, copy: Copy) -> None:
        """A copy whose deadline has come must be complete: compute waits for it if it is not."""
        with self.lock:
            while copy.is_leaving:
                self._retire_first()

    def _allocate(self, nbytes: int, tier: str | None) -> Slot | None:
        tiers = self.engine.tiers
        start = tiers.index(tier) if tier in tiers else 0
        self._free_orphans()
        for name in tiers[start:]:
            try:
                return self.engine.allocate(nbytes, name)
            except TierFull as full:
                reason = str(full)
        if not self._has_warned_full:
            self._has_warned_full = True
            warnings.warn(
                f"lowtide: no room left for swapped activations ({reason}); they stay on the device, and "
                "`stats.num_kept_for_lack_of_room` counts them. Raise host_budget or disk_budget, point disk_path at "
                "a larger disk, or swap less.",
                stacklevel=2,
            )
        return None

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
        self._leaving_bytes += _windowed_bytes(copy)

    def window_bytes(self) -> int:
        """How many bytes may be leaving, and how many may be fetched ahead of need. Follows the last full pass."""
        return max(self._pass_bytes // _WINDOW_SHARE, 2 * self._largest_bytes, _MIN_WINDOW_BYTES)

    def end_of_pass(self, tape: Tape) -> None:
        """A forward is complete: remember how much it swapped, for the next windows."""
        self._pass_bytes = max(tape.swapped_bytes, self._pass_bytes // 2)

    def retire(self, limit_bytes: int) -> None:
        """Let go of sources whose copies are complete; while more than `limit_bytes` are leaving, compute waits."""
        while self._leaving and (self._leaving_bytes > limit_bytes or self.engine.query(self._leaving[0].event)):
            self._retire_first()

    def _retire_first(self) -> None:
        engine, copy = self.engine, self._leaving[0]
        if not engine.query(copy.event):
            self.counters.stall_seconds += engine.wait(Lane.COMPUTE, copy.event)
        self._leaving.popleft()
        self._leaving_bytes -= _windowed_bytes(copy)
        copy.is_leaving = False
        self._land(copy)

    def _land(self, copy: Copy) -> None:
        failure = self.engine.failure(copy.event)
        if failure is not None:
            self._keep_after_failure(copy, failure)
            return
        self.counters.copied_out_bytes += copy.nbytes
        if not copy.is_needed_soon:
            self._drop_source(copy)

    def _drop_source(self, copy: Copy) -> None:
        if copy.source is not None:
            copy.source = None
            self.ledger.subtract(copy.nbytes)

    def _keep_after_failure(self, copy: Copy, failure: BaseException) -> None:
        self.counters.swapped_bytes -= copy.nbytes
        if copy.slot is None:
            self._drop_source(copy)
            return
        self._unfreed.append((copy.slot, (copy.event,)))
        self._stay(copy)
        if not self._has_warned_full:
            self._has_warned_full = True
            warnings.warn(
                f"lowtide: writing an activation to a slower tier failed ({failure}); it stays on the device, nothing "
                "is lost, and `stats.num_kept_for_lack_of_room` counts it. Free some space or point disk_path at "
                "another disk.",
                stacklevel=2,
            )

    # -- backward --------------------------------------------------------------------------------------------------

    def read(self, site: Site) -> torch.UntypedStorage:
        """Bytes of a site on the device, after the current compute lane has been made to wait for them."""
        with self.lock:
            self._free_orphans()
            self.retire(self.window_bytes())
            self._enter_task(site)
            self._bring(site)
            self._fetch_ahead(site)
            storage = self._storage(site)
            site.num_reads += 1
            if site.num_reads >= site.num_readers or site.task == -1:
                self.release(site)
            return storage

    def glance(self, site: Site) -> torch.UntypedStorage:
        """Bytes of a site, outside of any backward: nothing is counted, cancelled or fetched ahead."""
        with self.lock:
            storage = site.copy.source or site.elsewhere()
            if storage is None:
                self._fetch(site)
                storage = self._storage(site)
                self.release(site)
            return storage

    def _enter_task(self, site: Site) -> None:
        task = torch._C._current_graph_task_id()
        if site.task != task:
            site.task = task
            site.num_reads = 0
        if site.tape.task != task:
            site.tape.task = task
            site.tape.cursor = len(site.tape.sites)
        self._watch(task)

    def _watch(self, task: int) -> None:
        """Have the engine of autograd say when this backward is over."""
        if task != -1 and task not in self._open_sites:
            # A backward that failed never said that it was over.
            self._open_sites = {known: sites for known, sites in self._open_sites.items() if sites}
            self._open_sites[task] = weakref.WeakSet()
            Variable._execution_engine.queue_callback(lambda: self.end_of_backward(task))

    def note_made(self, cell: MadeCell, task: int) -> None:
        """A cell holds what it made for this backward: at its end the cell is told to let go."""
        with self.lock:
            self._watch(task)
            self._open_sites[task].add(cell)

    def _bring(self, site: Site) -> None:
        """See to it that the bytes are on the device, or on their way."""
        if site.copy.source is not None:
            self._forward(site)
            return
        if site.buffer is not None:
            return
        site.buffer = site.elsewhere()
        if site.buffer is None:
            self._fetch(site)
            return
        # Someone else kept the storage all along (a cache, an output): nothing was saved, and nothing need be fetched.
        self.counters.aliased_bytes += site.copy.nbytes
        self.ledger.add(site.copy.nbytes)
        self._note_open(site)

    def _storage(self, site: Site) -> torch.UntypedStorage:
        if site.copy.source is not None:
            return site.copy.source
        assert site.buffer is not None
        if site.arrival is None:
            return site.buffer
        self.counters.stall_seconds += self.engine.wait(Lane.COMPUTE, site.arrival)
        # Compute is ordered after the copy now: what reuses the buffer's memory comes after it.
        self._arriving.pop(id(site.arrival), None)
        failure = self.engine.failure(site.arrival)
        if failure is not None:
            assert site.copy.slot is not None
            raise RuntimeError(
                f"lowtide: a swapped activation of {site.copy.nbytes} bytes could not be read back from tier "
                f"'{site.copy.slot.tier}': {failure}"
            ) from failure
        return site.buffer

    def _forward(self, site: Site) -> None:
        """Backward needs bytes that have not left yet: keep the source, and spare the copy if it has not begun."""
        copy = site.copy
        if copy.is_needed_soon or copy.slot is None:
            return
        copy.is_needed_soon = True
        if copy.is_leaving and self.engine.cancel(copy.event):
            self._leaving.remove(copy)
            self._leaving_bytes -= _windowed_bytes(copy)
            copy.is_leaving = False
            self.engine.free(copy.slot)
            copy.slot = None

    def _fetch(self, site: Site) -> None:
        engine, copy = self.engine, site.copy
        assert copy.slot is not None
        buffer = engine.new_buffer(copy.nbytes, site.device)
        if self.on_buffer is not None:
            self.on_buffer(buffer)
        engine.wait(Lane.IN, engine.record(Lane.COMPUTE))
        engine.wait(Lane.IN, copy.event)
        engine.copy_in(copy.slot, buffer)
        # Only now: were one of these to fail, a later backward must not find a buffer that nothing fills.
        site.buffer = buffer
        site.arrival = copy.reading = engine.record(Lane.IN)
        self.ledger.add(copy.nbytes)
        self.counters.copied_in_bytes += copy.nbytes
        # The copy in flight owns the buffer too: were the graph dropped now, its memory must not be reused yet.
        self._arriving[id(site.arrival)] = (site.buffer, site.arrival)
        self._let_go_of_arrived()
        self._note_open(site)

    def _let_go_of_arrived(self) -> None:
        while self._arriving:
            oldest = next(iter(self._arriving))
            if not self.engine.query(self._arriving[oldest][1]):
                return
            del self._arriving[oldest]

    def _note_open(self, site: Site) -> None:
        if site.task in self._open_sites:
            self._open_sites[site.task].add(site)

    def _fetch_ahead(self, site: Site) -> None:
        """Start fetching what backward will read next: the sites saved before this one, latest first."""
        tape = site.tape
        if tape.is_timed:
            self.follow(tape)
            return
        tape.cursor = min(tape.cursor, site.index + 1)
        window = self.window_bytes()
        while tape.cursor > 0:
            following = tape.sites[tape.cursor - 1]()
            if following is not None and following is not site:
                if not self._may_fetch(following, site, window):
                    return
                self._start(following, tape)
            tape.cursor -= 1

    def _may_fetch(self, following: Site, site: Site, window: int) -> bool:
        if following.distance is not None:
            return following.last_use >= site.last_use - following.distance
        return self._ahead_bytes + following.copy.nbytes <= window

    def follow(self, tape: Tape) -> None:
        """A saved tensor is being opened: backward has come as far as the operator that asks for it."""
        node = torch._C._current_autograd_node() if tape.has_distances else None
        if node is None:
            return
        sequence = node._sequence_nr()
        is_due = tape.next_start is None or sequence <= tape.next_start
        # Another backward starts from the end again.
        if not is_due and tape.task == torch._C._current_graph_task_id():
            return
        self.advance(tape, sequence)

    def advance(self, tape: Tape, sequence: int) -> None:
        """Backward reached the op with this autograd sequence number: start fetches whose written distance says so."""
        with self.lock:
            task = torch._C._current_graph_task_id()
            if tape.task != task:
                tape.task = task
                tape.cursor = len(tape.sites)
            if tape.is_timed:
                self._advance_timed(tape, sequence)
                return
            while tape.cursor > 0:
                following = tape.sites[tape.cursor - 1]()
                if following is not None:
                    if following.distance is None or following.last_use < sequence - following.distance:
                        return
                    self._start(following, tape)
                tape.cursor -= 1

    def _advance_timed(self, tape: Tape, sequence: int) -> None:
        while tape.cursor > 0:
            following = tape.sites[tape.cursor - 1]()
            if following is not None:
                if following.start_at < sequence:
                    tape.next_start = following.start_at
                    return
                has_been_read = following.task == tape.task and following.num_reads > 0
                # Where its first reader is behind us, it has been read, or this backward goes around it.
                if not has_been_read and following.last_use <= sequence + 1:
                    self._start(following, tape)
            tape.cursor -= 1
        tape.next_start = -1

    def _start(self, site: Site, tape: Tape) -> None:
        if site.task != tape.task:
            site.task = tape.task
            site.num_reads = 0
        if not site.is_ahead:
            site.is_ahead = True
            self._ahead_bytes += site.copy.nbytes
        self._bring(site)

    def release(self, site: Site) -> None:
        """The last reader of this backward has its tensor: the site lets go, the slower copy stays for another one."""
        if site.is_ahead:
            site.is_ahead = False
            self._ahead_bytes -= site.copy.nbytes
        if site.buffer is not None:
            site.buffer = None
            site.arrival = None
            self.ledger.subtract(site.copy.nbytes)
        copy = site.copy
        if copy.source is not None and copy.is_needed_soon:
            copy.is_needed_soon = False
            if copy.slot is not None and not copy.is_leaving:
                self._drop_source(copy)

    def end_of_backward(self, task: int) -> None:
        """A backward is over: drop what it fetched and did not use."""
        with self.lock:
            for opened in list(self._open_sites.pop(task, ())):
                opened.let_go(task)
            self._free_orphans()

    # -- giving back -----------------------------------------------------------------------------------------------

    def _free_orphans(self) -> None:
        """Take over what dead sites owned, and free the slots whose copies are complete."""
        while self.orphans:
            copy, buffer, is_ahead = self.orphans.popleft()
            if is_ahead:
                self._ahead_bytes -= copy.nbytes
            if buffer is not None:
                self.ledger.subtract(copy.nbytes)
            if copy.slot is not None:
                self._unfreed.append((copy.slot, tuple(e for e in (copy.event, copy.reading) if e is not None)))
                copy.slot = None
            copy.is_needed_soon = False
            # While it is leaving, the source belongs to the copy in flight; landing drops it.
            if not copy.is_leaving:
                self._drop_source(copy)
        while self._unfreed and all(self.engine.query(event) for event in self._unfreed[0][1]):
            self.engine.free(self._unfreed.popleft()[0])

    def close(self) -> None:
        """No forward will follow. Sites of graphs that are still alive keep working, and free themselves."""
        self._is_closed = True
        self.settle()

    def after_close(self) -> None:
        """A site died after `close`: nothing else will come by to free what it owned."""
        if self._is_closed and self.lock.depth == 0:
            with self.lock:
                self._free_orphans()

    def settle(self) -> None:
        """Wait for every copy and free what nobody owns. Blocks the host; used at remove and in tests."""
        with self.lock:
            while self._leaving:
                self._retire_first()
            self._free_orphans()
            while self._arriving:
                # It stays in the queue until its copy is done: nobody else may own the buffer any more.
                oldest = next(iter(self._arriving))
                self._block_until(self._arriving[oldest][1])
                del self._arriving[oldest]
            for _, events in list(self._unfreed):
                for event in events:
                    self._block_until(event)
            self._free_orphans()

    def _block_until(self, event) -> None:
        # On an accelerator `wait` only tells the compute stream; the slot may be given back once the copy is done.
        self.engine.wait(Lane.COMPUTE, event)
        while not self.engine.query(event):
            time.sleep(_POLL_SECONDS)

    def num_open(self) -> int:
        """Things the mover still holds: zero when every graph is gone and `settle` ran."""
        return len(self._leaving) + len(self._arriving) + len(self._unfreed) + len(self.orphans)
