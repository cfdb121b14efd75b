"""A report into a file, in the form that the file's name asks for: HTML, a trace, a memory snapshot, or JSON.

HTML: one file that opens offline, needs no script, and follows the reader's light or dark theme. Pictures are images
inside of the file, each in both themes. Every picture has a title with its subject, and a caption that says what is
predicted and what was measured. Not covered: several runs at once; `lowtide diff` compares plans.

Trace, for Perfetto or chrome://tracing: what compute and copies do when, and the memory. Its format is that of Chrome's
trace events in JSON: complete events `X`, counters `C`, names of threads `M`; times in microseconds. About 150 bytes an
event. Not covered: what really ran inside of a step; torch's profiler records that.

Memory snapshot: the pickle that PyTorch's viewer (pytorch.org/memory_viz) opens, from a plan alone, as
`torch.cuda.memory._snapshot()` would have recorded the predicted step (torch 2.13): an `alloc` and a `free` for each
activation when it comes and goes, with its name and fate in place of a stack. Model state, gradients and temporaries,
of which only sums are known, are blocks that are stacked: what comes last goes first.
Exact: after the events of each tick, the allocated bytes are those of the plan; in between they are never more.
Addresses are made up (the smallest hole that fits), so what the viewer says of fragmentation means nothing.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
from collections import defaultdict
from collections.abc import Iterator, Sequence
from html import escape
from itertools import accumulate
from operator import itemgetter
from pathlib import Path
from string import Template
from typing import Any

from lowtide.config.source import write_file
from lowtide.core.plan import plan_table
from lowtide.core.ranges import RangeAllocator
from lowtide.core.text_table import percent
from lowtide.errors import ConfigError, wrong_argument
from lowtide.report.pictures import draw_lanes, draw_memory, draw_sweep, on_dark, svg
from lowtide.report.played_step import OWNERS, Block, Played
from lowtide.report.report import Report, document
from lowtide.units import format_bytes
from lowtide.version import __version__

PROTOCOL = 4
"""The viewer reads 2 to 4."""
_BASE = 1 << 40
_UNNAMED = "state, gradients, temporaries: sum"
_WORDS = ("optimizer state, while here", "kept", "swapped, while here", "recomputed, while here")


def snapshot(played: Played) -> dict[str, Any]:
    """The document."""
    coming: dict[int, list[Block]] = defaultdict(list)
    for block in (*_unnamed(played), *played.blocks):
        coming[block.start].append(block)
    there: dict[int, list[dict[str, Any]]] = defaultdict(list)
    trace: list[dict[str, Any]] = []
    room = RangeAllocator()
    for tick, start in enumerate((*played.starts, played.step_seconds)):
        when = {"stream": 0, "time_us": round(start * 1e6)}
        for taken in there.pop(tick, ()):
            room.free(taken["addr"] - _BASE, taken["size"])
            trace += [{"action": action, **taken, **when} for action in ("free_requested", "free_completed")]
        for block in coming[tick]:
            frames = _frames(block, tick, played.num_forward_ticks)
            taken = {"addr": _BASE + room.allocate(block.nbytes), "size": block.nbytes, "frames": frames}
            there[block.end].append(taken)
            trace.append({"action": "alloc", **taken, **when, "category": OWNERS[block.owner]})
    first = {"action": "segment_alloc", "addr": _BASE, "size": room.end_bytes, "stream": 0, "frames": [], "time_us": 0}
    # The viewer adds this category by itself where it is missing, and some versions of it fail there.
    trace.insert(0, {**first, "category": "unknown"})
    left = sorted((taken for those in there.values() for taken in those), key=itemgetter("addr"))
    return {"segments": [_segment(left, room.end_bytes)], "device_traces": [trace]}


def to_bytes(document: dict[str, Any]) -> bytes:
    """As the file that the viewer opens, and `pickle.load`."""
    return pickle.dumps(document, protocol=PROTOCOL)


def _unnamed(played: Played) -> Iterator[Block]:
    """What is in no block (state, gradients, temporaries, what recipes need while they run), stacked."""
    num_ticks = len(played.starts)
    named = [0] * (num_ticks + 1)
    for block in played.blocks:
        named[block.start] += block.nbytes
        named[block.end] -= block.nbytes
    stack: list[tuple[int, int]] = []
    have = 0
    for tick, (total, known) in enumerate(zip(played.planned_bytes, accumulate(named))):
        assert total >= known
        while have > total - known:
            start, nbytes = stack.pop()
            have -= nbytes
            yield Block(name=_UNNAMED, owner=0, nbytes=nbytes, start=start, end=tick)
        if total - known > have:
            stack.append((tick, total - known - have))
            have = total - known
    for start, nbytes in stack:  # it is there when the step is over
        yield Block(name=_UNNAMED, owner=0, nbytes=nbytes, start=start, end=num_ticks + 1)


def _segment(left: Sequence[dict[str, Any]], total_bytes: int) -> dict[str, Any]:
    """What is on the device when the step is over, in the order of addresses, and the holes between."""
    blocks: list[dict[str, Any]] = []
    at = _BASE
    for taken in (*left, {"addr": _BASE + total_bytes, "size": 0, "frames": []}):
        if taken["addr"] > at:
            blocks.append(_block(at, taken["addr"] - at, "inactive", []))
        if taken["size"]:
            blocks.append(_block(taken["addr"], taken["size"], "active_allocated", taken["frames"]))
        at = taken["addr"] + taken["size"]
    sizes = ("allocated_size", "active_size", "requested_size")
    own = {"device": 0, "address": _BASE, "total_size": total_bytes, "stream": 0, "segment_type": "large"}
    own |= dict.fromkeys(sizes, sum(taken["size"] for taken in left))
    return own | {"segment_pool_id": (0, 0), "is_expandable": False, "frames": [], "blocks": blocks}


def _block(address: int, nbytes: int, state: str, frames: list[dict[str, Any]]) -> dict[str, Any]:
    return {"address": address, "size": nbytes, "requested_size": nbytes, "state": state, "frames": frames}


def _frames(block: Block, tick: int, num_forward_ticks: int) -> list[dict[str, Any]]:
    """Lines in place of a stack: the operator that was running, the owner of the bytes, and what the plan does."""
    is_forward = tick < num_forward_ticks
    place = {"filename": "forward", "line": tick} if is_forward else {"filename": "backward"}
    names = [block.name] if block.name == _UNNAMED else [block.name, _WORDS[block.owner]]
    return [{"line": tick - num_forward_ticks, **place, "name": name} for name in names]


_FAR_GAP = 0.1
"""Share of the fastest step possible that a plan may be away from it before a caption says so."""


def page(report: Report) -> str:
    """The whole HTML text."""
    parts = [f"<h1>{escape(report.title)}</h1>", f'<p class="soft">{escape(report.subtitle)}</p>', _tiles(report)]
    parts += [f"<p>{escape(line)}</p>" for line in report.remarks]
    if report.played is not None:
        caption = (
            "Predicted, stacked by owner. The dotted line is the same step with everything kept, on its own clock."
        )
        caption += _second_runs(report)
        if report.measured.peak_bytes is None:
            caption += " Nothing here is measured: this plan has not run."
        else:
            caption += " The measured line is one figure, the highest peak of all steps."
        parts += _section("Memory over one step", caption, svg(draw_memory, report.played, report.measured))
        caption = "Predicted. Copies out and in have a lane each; where compute has to wait for one, it says so."
        parts += _section("What runs when", caption, svg(draw_lanes, report.played))
    if len(report.sweep) > 1 and report.plan is not None:
        picture = svg(draw_sweep, report.sweep, report.plan.budget_bytes, report.others)
        parts += _section("What other budgets would cost", _sweep_caption(report), picture)
    for title, caption, rows in report.tables:
        parts += [f"<h2>{escape(title)}</h2>", f'<p class="soft">{escape(caption)}</p>', _table(rows)]
    if report.plan is not None:
        parts += ["<h2>The plan</h2>", f"<pre>{escape(plan_table(report.plan, _PLAN_CHARACTERS))}</pre>"]
    body = "\n".join(part for part in parts if part)
    style, frame = (Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("page.css", "page.html"))
    return Template(frame).substitute(title=escape(report.title), style=style, body=body, version=__version__)


def _sweep_caption(report: Report) -> str:
    """Says where a short search ended far from the bound: there the picture is worse than the truth may be."""
    far = {budget: predicted.gap for budget, predicted in report.sweep.items() if predicted.gap > _FAR_GAP}
    caption = "Predicted: the best plan that a short search found for each budget."
    if report.others:
        caption += " Crosses: no plan, layers checkpointed by hand; their peaks in place of a budget."
    if not far:
        return caption
    where = ", ".join(f"{format_bytes(budget)} ({percent(gap)})" for budget, gap in far.items())
    return f"{caption} A faster one may exist at {where}: plan for that budget itself, which searches longer."


def _second_runs(report: Report) -> str:
    assert report.played is not None and report.plan is not None
    layers = {f"recompute {layer}" for layer in report.plan.layers}
    if layers.isdisjoint(event.name for event in report.played.events):
        return ""
    return " What a layer makes while it runs again counts as temporaries."


def _tiles(report: Report) -> str:
    tiles = [[escape(text) for text in tile] for tile in report.tiles]
    cells = [f'<div class="tile"><span>{a}</span><b>{b}</b><span>{c}</span></div>' for a, b, c in tiles]
    return f'<div class="tiles">{"".join(cells)}</div>' if cells else ""


def _section(title: str, caption: str, picture: str) -> list[str]:
    """A part of the page; the browser shows the picture that fits its theme."""
    light, dark = _data(picture), _data(on_dark(picture))
    return [
        f"<h2>{escape(title)}</h2>",
        f'<figure><div class="wide"><picture><source media="(prefers-color-scheme: dark)" srcset="{dark}">'
        f'<img alt="{escape(title)}" src="{light}"></picture></div>'
        f"<figcaption>{escape(caption)}</figcaption></figure>",
    ]


def _data(svg: str) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    cells = ["".join(f"<th>{escape(cell)}</th>" for cell in head)]
    cells += ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in body]
    return f'<div class="wide"><table>{"".join(f"<tr>{row}</tr>" for row in cells)}</table></div>'


_PLAN_CHARACTERS = 116  # of a line of the plan: the page is so wide
FORMS = (".html", ".trace.json", ".json", ".pickle")
_THREADS = {"compute": 1, "stall": 2, "out": 3, "in": 4}
_NAMES = {"compute": "compute", "stall": "compute waits for", "out": "copies out", "in": "copies in"}


def check_form(path: str | os.PathLike[str]) -> None:
    """Raise ConfigError for a name that asks for no form, and for HTML where nothing can draw its pictures."""
    if not isinstance(path, str | os.PathLike):
        raise wrong_argument("lowtide.write_report", "path", "the path of a file", path)
    if not os.fspath(path).endswith(FORMS):
        raise ConfigError(
            f"report: {os.fspath(path)}: write to a file that ends in {', '.join(FORMS[:-1])} or {FORMS[-1]}"
        )
    try:
        if os.fspath(path).endswith(".html"):
            import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError("report: pictures need matplotlib; pip install 'lowtide[report]'") from None


def write_report(report: Report, path: str | os.PathLike[str]) -> Path:
    """Write `report` as HTML, as a trace for Perfetto, as a memory snapshot for PyTorch's viewer, or as JSON. Raises
    ConfigError where that cannot be."""
    check_form(path)
    write_file(path, _content(report, os.fspath(path)), where="report")
    return Path(path)


def _content(report: Report, name: str) -> bytes:
    if name.endswith(".html"):
        return page(report).encode()
    if name.endswith(".trace.json"):
        return json.dumps(trace(_step_of(report, name), report.title)).encode()
    if name.endswith(".pickle"):
        return to_bytes(snapshot(_step_of(report, name)))
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
        begin, lasts = event.start * 1e6, (event.end - event.start) * 1e6
        told = {"ph": "X", "pid": 1, "tid": _THREADS[event.lane], "name": event.name, "ts": begin, "dur": lasts}
        events.append(told)
    for tick, start in enumerate(played.starts):
        values = {owner: part[tick] for owner, part in zip(OWNERS, played.bytes_by_owner, strict=True)}
        events.append({"ph": "C", "pid": 1, "name": "bytes on the device", "ts": start * 1e6, "args": values})
    return {"traceEvents": events, "displayTimeUnit": "ms"}
