"""A report into a file, in the form that the file's name asks for.

What: HTML (page.py), a memory snapshot (memory_snapshot.py), JSON, and here the trace for Perfetto or chrome://tracing:
what compute and copies do when, and the memory. Its format is that of Chrome's trace events in JSON: complete events
`X`, counters `C`, names of threads `M`; times in microseconds. Cost: about 150 bytes an event.
Not covered: what really ran inside of a step; torch's profiler records that.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lowtide.errors import ConfigError, wrong_argument
from lowtide.report.played_step import OWNERS, Played
from lowtide.report.rank_step import COMPUTE, RankStep
from lowtide.report.report import Report, document

FORMS = (".html", ".trace.json", ".json", ".pickle")
_THREADS = {"compute": 1, "stall": 2, "out": 3, "in": 4}
_NAMES = {"compute": "compute", "stall": "compute waits for", "out": "copies out", "in": "copies in"}
_RANK_THREADS = (COMPUTE, ("wait",), ("send",), ("receive",))


def check_form(path: str | os.PathLike[str]) -> None:
    """Raise ConfigError for a name that asks for no form."""
    if not isinstance(path, str | os.PathLike):
        raise wrong_argument("lowtide.write_report", "path", "the path of a file", path)
    if not os.fspath(path).endswith(FORMS):
        raise ConfigError(
            f"report: {os.fspath(path)}: write to a file that ends in {', '.join(FORMS[:-1])} or {FORMS[-1]}"
        )


def write_report(report: Report, path: str | os.PathLike[str]) -> Path:
    """Write `report` as HTML, as a trace for Perfetto, as a memory snapshot for PyTorch's viewer, or as JSON. Raises
    ConfigError where that cannot be."""
    check_form(path)
    try:
        Path(path).write_bytes(_content(report, os.fspath(path)))
    except OSError as error:
        raise ConfigError(
            f"report: {os.fspath(path)} cannot be written: {error.strerror}; choose another file"
        ) from None
    return Path(path)


def _content(report: Report, name: str) -> bytes:
    if name.endswith(".html"):
        from lowtide.report.page import page

        return page(report).encode()
    if name.endswith(".trace.json"):
        if report.ranks:
            return json.dumps(trace_of_ranks(report.ranks, report.title)).encode()
        return json.dumps(trace(_step_of(report, name), report.title)).encode()
    if name.endswith(".pickle"):
        from lowtide.report.memory_snapshot import snapshot, to_bytes

        return to_bytes(snapshot([_step_of(report, name)]))
    return json.dumps(document(report), indent=1).encode()


def _step_of(report: Report, name: str) -> Played:
    if report.played is None:
        raise ConfigError(f"report: {name}: only a plan for a budget has a step on the clock; write .html or .json")
    return report.played


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
