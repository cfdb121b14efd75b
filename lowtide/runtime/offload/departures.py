"""When the copies of one forward pass start, and by when they must be complete; and when sites are stored smaller.

Why: some operators save a tensor first and fill it afterwards (`rrelu` saves its noise, then draws it). So the copy of
a saved storage starts when the next operator saves something. And a solved plan uses the memory that its copies free:
where a copy must be complete by some operator, compute waits for it.

Cost: nothing where nothing was swapped; else one comparison of numbers for each saved tensor. Not covered: how a copy
is made (runtime/offload/scheduler.py).
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable

from lowtide.runtime.offload.scheduler import OffloadScheduler
from lowtide.runtime.offload.site import Copy, OffloadedStorage
from lowtide.tensors.private import next_sequence_number


class Departures:
    """The sites of one forward pass whose copies have not started, or have a deadline."""

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
