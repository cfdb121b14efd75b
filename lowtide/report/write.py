"""A report into a file, in the form that the file's name asks for.

What: HTML, a memory snapshot, JSON, and the trace for Perfetto or chrome://tracing:
what compute and copies do when, and the memory. Its format is that of Chrome's trace events in JSON: complete events
`X`, counters `C`, names of threads `M`; times in microseconds. Cost: about 150 bytes an event.
Not covered: what really ran inside of a step; torch's profiler records that.

A report as one HTML file: it opens offline, needs no script, and follows the reader's light or dark theme.

What: `page` puts pictures and tables of a `Report` into one text. Pictures are images inside of the file, each in both
themes; the browser shows the one that fits. Every picture has a title with its subject, and a caption that says what is
predicted and what was measured.
Cost: milliseconds beyond the pictures. Not covered: reports of several runs at once; `lowtide diff` compares plans.

A step as a memory snapshot: the pickle that PyTorch's viewer (pytorch.org/memory_viz) opens, from a plan alone.

What: `snapshot` writes the predicted step of a plan, or of several, as `torch.cuda.memory._snapshot()` would have
recorded it: an `alloc` and a `free` for each activation when it comes and goes, with its name and fate in place of a
stack. Model state, gradients and temporaries, of which only sums are known, are blocks that are stacked: what comes
last goes first. No device and no run is needed. Format: `torch/cuda/memory.py` of torch 2.13.
Exact: after the events of each tick, the allocated bytes are those of the plan's curve; in between they are never more.
Addresses are made up (the smallest hole that fits), so what the viewer says of fragmentation means nothing.
Cost: some microseconds and 100 bytes an event. Not covered: what really ran; torch records that itself on CUDA.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
from collections import defaultdict
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from lowtide.core.plan import plan_table
from lowtide.core.ranges import RangeAllocator
from lowtide.core.text_table import percent
from lowtide.errors import ConfigError, wrong_argument
from lowtide.report.pictures import (
    history_picture,
    lane_picture,
    memory_picture,
    on_dark,
    sweep_picture,
)
from lowtide.report.played_step import OWNERS, Played
from lowtide.report.report import Report, document
from lowtide.timeline.events import Event
from lowtide.units import format_bytes
from lowtide.version import __version__

PROTOCOL = 4
"""The viewer reads 2 to 4."""
_BASE = 1 << 40
_UNNAMED = "state, gradients, temporaries: sum"
_WORDS = ("optimizer state, while here", "kept", "swapped, while here", "recomputed, while here")
Frames = list[dict[str, Any]]


def snapshot(steps: Sequence[Played]) -> dict[str, Any]:
    """The document. Each step is a device of its own: rank 0 is device 0."""
    devices = [_Device(number, played) for number, played in enumerate(steps)]
    return {"segments": [device.segment() for device in devices], "device_traces": [d.trace() for d in devices]}


def to_bytes(document: dict[str, Any]) -> bytes:
    """As the file that the viewer opens, and `pickle.load`."""
    return pickle.dumps(document, protocol=PROTOCOL)


class _Device:
    """One step, on addresses of its own."""

    def __init__(self, number: int, played: Played) -> None:
        self._number = number
        self._room = RangeAllocator()
        self._events: list[dict[str, Any]] = []
        self._live: dict[int, tuple[int, Frames]] = {}
        """Address -> bytes and their owner."""
        self._unnamed: list[tuple[int, int]] = []
        """Addresses and bytes of what has no name, the newest last."""
        self._play(played)

    def trace(self) -> list[dict[str, Any]]:
        first = {"action": "segment_alloc", "addr": _BASE, "size": self._room.end_bytes, "stream": 0, "frames": []}
        # The viewer adds this category by itself where it is missing, and some versions of it fail there.
        return [{**first, "time_us": 0, "category": "unknown"}, *self._events]

    def segment(self) -> dict[str, Any]:
        """What is on the device when the step is over."""
        blocks: list[dict[str, Any]] = []
        at = 0
        for address, (nbytes, frames) in sorted(self._live.items()):
            if address > at:
                blocks.append(_block(at, address - at, "inactive", []))
            blocks.append(_block(address, nbytes, "active_allocated", frames))
            at = address + nbytes
        if at < self._room.end_bytes:
            blocks.append(_block(at, self._room.end_bytes - at, "inactive", []))
        allocated = sum(nbytes for nbytes, _ in self._live.values())
        return {
            "device": self._number,
            "address": _BASE,
            "total_size": self._room.end_bytes,
            "allocated_size": allocated,
            "active_size": allocated,
            "requested_size": allocated,
            "stream": 0,
            "segment_type": "large",
            "segment_pool_id": (0, 0),
            "is_expandable": False,
            "frames": [],
            "blocks": blocks,
        }

    def _play(self, played: Played) -> None:
        coming, going = defaultdict(list), defaultdict(list)
        named = [0] * (len(played.starts) + 1)
        for number, block in enumerate(played.blocks):
            coming[block.start].append(number)
            going[block.end].append(number)
            for tick in range(block.start, block.end) if block.owner == 0 else ():
                named[tick] += block.nbytes
        others = _others(played, named)
        address_of: dict[int, int] = {}
        for tick, start in enumerate((*played.starts, played.step_seconds)):
            for number in going[tick]:
                self._free(address_of.pop(number), start)
            if tick == len(played.starts):
                break
            self._level(others[tick], start, _frames(_UNNAMED, tick, played.curve.num_forward_ticks))
            for number in coming[tick]:
                block = played.blocks[number]
                frames = _frames(block.name, tick, played.curve.num_forward_ticks, _WORDS[block.owner])
                address_of[number] = self._alloc(block.nbytes, start, frames, OWNERS[block.owner])

    def _level(self, wanted: int, start: float, frames: Frames) -> None:
        """Bring what has no name to so many bytes."""
        have = sum(nbytes for _, nbytes in self._unnamed)
        while have > wanted:
            address, nbytes = self._unnamed.pop()
            self._free(address, start)
            have -= nbytes
        if wanted > have:
            address = self._alloc(wanted - have, start, frames, OWNERS[0])
            self._unnamed.append((address, wanted - have))

    def _alloc(self, nbytes: int, start: float, frames: Frames, category: str) -> int:
        address = self._room.allocate(nbytes)
        self._live[address] = (nbytes, frames)
        self._note("alloc", address, start, category=category)
        return address

    def _free(self, address: int, start: float) -> None:
        for action in ("free_requested", "free_completed"):
            self._note(action, address, start)
        nbytes, _ = self._live.pop(address)
        self._room.free(address, nbytes)

    def _note(self, action: str, address: int, start: float, **more: str) -> None:
        nbytes, frames = self._live[address]
        self._events.append(
            {
                "action": action,
                "addr": _BASE + address,
                "size": nbytes,
                "stream": 0,
                "frames": frames,
                "time_us": round(start * 1e6),
                **more,
            }
        )


def _others(played: Played, named: Sequence[int]) -> list[int]:
    """In each tick, bytes that are in no block: state, gradients, temporaries, and what recipes need while they run."""
    recomputed = [0] * (len(played.starts) + 1)
    for block in played.blocks:
        if block.owner == len(OWNERS) - 1:
            recomputed[block.start] += block.nbytes
            recomputed[block.end] -= block.nbytes
    others, made = [], 0
    for tick, state in enumerate(played.bytes_by_owner[0]):
        made += recomputed[tick]
        others.append(state - named[tick] + played.bytes_by_owner[-1][tick] - made)
    assert min(others, default=0) >= 0
    return others


def _frames(name: str, tick: int, num_forward_ticks: int, what: str = "") -> Frames:
    """Lines in place of a stack: the operator that was running, the owner of the bytes, and what the plan does."""
    is_forward = tick < num_forward_ticks
    file = "forward" if is_forward else "backward"
    line = tick if is_forward else tick - num_forward_ticks
    return [{"filename": file, "line": line, "name": each} for each in (name, what) if each]


def _block(address: int, nbytes: int, state: str, frames: Frames) -> dict[str, Any]:
    return {
        "address": _BASE + address,
        "size": nbytes,
        "requested_size": nbytes,
        "state": state,
        "frames": frames,
    }


_FAR_GAP = 0.1
"""Share of the fastest step possible that a plan may be away from it before a caption says so."""


def page(report: Report) -> str:
    """The whole HTML text."""
    parts = [
        f"<h1>{escape(report.title)}</h1>",
        f'<p class="soft">{escape(report.subtitle)}</p>',
        _tiles(report),
        *(f"<p>{escape(line)}</p>" for line in report.remarks),
    ]
    picture = history_picture(report.history, report.plan)
    parts += _section("The run", "Measured, of the first rank: every step that was done.", picture)
    if report.played is not None:
        parts += _section(
            "Memory over one step",
            "Predicted, stacked by owner. The dotted line is the same step with everything kept, on its own clock."
            + _second_runs(report)
            + _measured_line(report),
            memory_picture(report.played, report.measured),
        )
        parts += _section(
            "What runs when",
            "Predicted. Copies out and in have a lane each; where compute has to wait for one, it says so.",
            lane_picture(report.played),
        )
    if report.sweep:
        picture = sweep_picture(report.sweep, report.measured)
        parts += _section("What other budgets would cost", _sweep_caption(report), picture)
    for table in report.tables:
        parts += [f"<h2>{escape(table.title)}</h2>", f'<p class="soft">{escape(table.caption)}</p>', _table(table.rows)]
    if report.plan is not None:
        parts += ["<h2>The plan</h2>", f"<pre>{escape(plan_table(report.plan))}</pre>"]
    body = "\n".join(part for part in parts if part)
    style = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(report.title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n{body}\n"
        f'<p class="soft">lowtide {__version__}</p>\n</body>\n</html>\n'
    )


def _sweep_caption(report: Report) -> str:
    """Says where a short search ended far from the bound: there the picture is worse than the truth may be."""
    far = [swept for swept in report.sweep if swept.predicted.gap > _FAR_GAP]
    caption = "Predicted: the best plan that a short search found for each budget."
    if not far:
        return caption
    where = ", ".join(f"{format_bytes(swept.budget_bytes)} ({percent(swept.predicted.gap)})" for swept in far)
    return f"{caption} A faster one may exist at {where}: plan for that budget itself, which searches longer."


def _second_runs(report: Report) -> str:
    assert report.played is not None and report.plan is not None
    layers = {f"recompute {layer}" for layer in report.plan.layers}
    if layers.isdisjoint(event.name for event in report.played.events):
        return ""
    return " What a layer makes while it runs again counts as temporaries."


def _measured_line(report: Report) -> str:
    """Which line of the memory picture is measured."""
    if report.measured.peak_bytes is None:
        return " Nothing here is measured: this plan has not run."
    return " The measured line is one figure, the highest peak of all steps."


def _tiles(report: Report) -> str:
    tiles = [
        f'<div class="tile"><span>{escape(tile.what)}</span><b>{escape(tile.value)}</b>'
        f"<span>{escape(tile.beside)}</span></div>"
        for tile in report.tiles
    ]
    return f'<div class="tiles">{"".join(tiles)}</div>' if tiles else ""


def _section(title: str, caption: str, picture: str | None) -> list[str]:
    """A part of the page; none without its picture."""
    if picture is None:
        return []
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


FORMS = (".html", ".trace.json", ".json", ".pickle")
_THREADS = {"compute": 1, "stall": 2, "out": 3, "in": 4}
_NAMES = {"compute": "compute", "stall": "compute waits for", "out": "copies out", "in": "copies in"}


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
        return page(report).encode()
    if name.endswith(".trace.json"):
        return json.dumps(trace(_step_of(report, name), report.title)).encode()
    if name.endswith(".pickle"):
        return to_bytes(snapshot([_step_of(report, name)]))
    return json.dumps(document(report), indent=1).encode()


def _step_of(report: Report, name: str) -> Played:
    if report.played is None:
        raise ConfigError(f"report: {name}: only a plan for a budget has a step on the clock; write .html or .json")
    return report.played


def _complete(event: Event) -> dict[str, Any]:
    begin, lasts = event.start * 1e6, (event.end - event.start) * 1e6
    return {"ph": "X", "pid": 1, "tid": _THREADS[event.lane], "name": event.name, "ts": begin, "dur": lasts}


def trace(played: Played, title: str) -> dict[str, Any]:
    """The document, ready for `json.dumps`."""
    events: list[dict[str, Any]] = [{"ph": "M", "pid": 1, "name": "process_name", "args": {"name": title}}]
    for lane, thread in _THREADS.items():
        events.append({"ph": "M", "pid": 1, "tid": thread, "name": "thread_name", "args": {"name": _NAMES[lane]}})
    events += [_complete(event) for event in played.events]
    for tick, start in enumerate(played.starts):
        values = {owner: part[tick] for owner, part in zip(OWNERS, played.bytes_by_owner, strict=True)}
        events.append({"ph": "C", "pid": 1, "name": "bytes on the device", "ts": start * 1e6, "args": values})
    return {"traceEvents": events, "displayTimeUnit": "ms"}
