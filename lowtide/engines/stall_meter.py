"""How long the compute stream waited for copies, as the device saw it.

What: a pair of timing events around each wait of the compute stream, read later from a ring.
Why: the host cannot see these waits (it has long gone on), and they are what a plan has to answer for.
Cost: per timed wait two event records, some microseconds on the device as well, which are counted as stall. Nothing
ever synchronises: pairs are read once the device has passed them, a few with each new wait.

Not covered: waits that found their event complete (the engine skips them, they cost nothing), and time for which the
host was blocked (the engine's `wait` returns that).
"""

from __future__ import annotations

from collections import deque

from lowtide.engines.device_ops import DeviceOps, RawEvent, Stream

STALL_RING = 1024
"""Timed waits that the device has not passed yet. Beyond it waits go untimed: stalls are then under-reported."""


class StallMeter:
    """Sums the device time that the compute stream spent in waits."""

    def __init__(self, ops: DeviceOps) -> None:
        self._ops = ops
        self._pairs: deque[tuple[RawEvent, RawEvent]] = deque()
        self._pool: deque[tuple[RawEvent, RawEvent]] = deque()
        self._seconds = 0.0

    def wait(self, stream: Stream, event: RawEvent) -> None:
        """Make `stream` wait for `event`, and time it."""
        self._read(2)  # more than comes in, so that the ring empties as the device catches up
        if len(self._pairs) >= STALL_RING:
            stream.wait_event(event)
            return
        before, after = self._pool.pop() if self._pool else (self._new(), self._new())
        before.record(stream)
        stream.wait_event(event)
        after.record(stream)
        self._pairs.append((before, after))

    def seconds(self) -> float:
        """Stalls known so far; waits still in the device's future are not in it."""
        self._read(len(self._pairs))
        return self._seconds

    def _new(self) -> RawEvent:
        return self._ops.new_event(timing=True)

    def _read(self, at_most: int) -> None:
        while at_most > 0 and self._pairs and self._pairs[0][1].query():
            before, after = self._pairs.popleft()
            self._seconds += before.elapsed_time(after) / 1e3
            self._pool.append((before, after))
            at_most -= 1
