"""The lanes of a step as a trace for Perfetto or chrome://tracing: what compute and copies do when, and the memory.

Format: Chrome's trace events in JSON: complete events `X`, counters `C`, names of threads `M`; times in microseconds.
Cost: about 150 bytes an event. Not covered: what really ran inside of a step; torch's profiler records that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lowtide.report.played_step import OWNERS, Played
from lowtide.report.rank_step import COMPUTE, RankStep

_THREADS = {"compute": 1, "stall": 2, "out": 3, "in": 4}
_NAMES = {"compute": "compute", "stall": "compute waits for", "out": "copies out", "in": "copies in"}
_RANK_THREADS = (COMPUTE, ("wait",), ("send",), ("receive",))


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


def trace_of_ranks(ranks: Sequence[RankStep], title: str) -> dict[str, Any]:
    """The last step of each rank of a pipeline, as measured: a process for each rank, with its lanes."""
    events: list[dict[str, Any]] = []
    origin = min(each.start for each in ranks)
    for each in ranks:
        name = f"{title}: rank {each.rank} ({each.holds})"
        events.append({"ph": "M", "pid": each.rank, "name": "process_name", "args": {"name": name}})
        for number, lanes in enumerate(_RANK_THREADS):
            words = "compute" if lanes is COMPUTE else lanes[0]
            events.append({"ph": "M", "pid": each.rank, "tid": number, "name": "thread_name", "args": {"name": words}})
            events += [
                {
                    "ph": "X",
                    "pid": each.rank,
                    "tid": number,
                    "name": span.name,
                    "ts": (span.start - origin) * 1e6,
                    "dur": (span.end - span.start) * 1e6,
                }
                for span in each.spans
                if span.lane in lanes
            ]
        for seconds, found in each.memory:
            args = {each.memory_is: found}
            at = (seconds - origin) * 1e6
            events.append({"ph": "C", "pid": each.rank, "name": "bytes on the device", "ts": at, "args": args})
    return {"traceEvents": events, "displayTimeUnit": "ms"}
