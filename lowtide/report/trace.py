"""The lanes of a step as a trace for Perfetto or chrome://tracing: what compute and copies do when, and the memory.

Format: Chrome's trace events in JSON: complete events `X`, counters `C`, names of threads `M`; times in microseconds.
Cost: about 150 bytes an event. Not covered: what really ran; torch's profiler records that.
"""

from __future__ import annotations

from typing import Any

from lowtide.report.played_step import OWNERS, Played

_THREADS = {"compute": 1, "stall": 2, "out": 3, "in": 4}
_NAMES = {"compute": "compute", "stall": "compute waits for", "out": "copies out", "in": "copies in"}


def trace(played: Played, title: str) -> dict[str, Any]:
    """The document, ready for `json.dumps`."""
    events: list[dict[str, Any]] = [{"ph": "M", "pid": 1, "name": "process_name", "args": {"name": title}}]
    for lane, thread in _THREADS.items():
        events.append({"ph": "M", "pid": 1, "tid": thread, "name": "thread_name", "args": {"name": _NAMES[lane]}})
    for event in played.events:
        events.append(
            {
                "ph": "X",
                "pid": 1,
                "tid": _THREADS[event.lane],
                "name": event.name,
                "ts": event.start * 1e6,
                "dur": (event.end - event.start) * 1e6,
            }
        )
    for tick, start in enumerate(played.starts):
        values = {owner: part[tick] for owner, part in zip(OWNERS, played.bytes_by_owner, strict=True)}
        events.append({"ph": "C", "pid": 1, "name": "bytes on the device", "ts": start * 1e6, "args": values})
    return {"traceEvents": events, "displayTimeUnit": "ms"}
