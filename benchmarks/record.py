"""The form of a result: one JSON file for one question on one hardware.

What: `Record` is what a benchmark leaves behind, `write` puts it at `results/<hardware>/<question>.json`, `read_all`
gives back what is there. report.py makes RESULTS.md, the plots and the table of docs/benchmarks.md from them alone, so
nothing stands in a table that was not written down by a run.
Why one form: methods, models and machines are compared across files; a figure without its versions, its command and the
hardware's name cannot be.
Cost: none. Not covered: merging two machines' results into one row; every row belongs to one file.

`kind` says where the numbers come from: 'measured' (a clock and counters), 'emulated' (measured, but something was
slowed down or stood in for), 'computed' (the timeline or the solver; nothing ran).
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
KINDS = ("measured", "emulated", "computed")
_PACKAGES = ("torch", "transformers", "lowtide", "torchtune", "trl", "torchao", "bitsandbytes", "scipy", "numpy")


def hardware(device: str = "cpu") -> dict[str, Any]:
    """Name and size of what the numbers belong to. `folder` is the name of its folder under results/."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    host = {"processor": _processor(), "num_cores": cores, "host_memory_bytes": _host_memory_bytes()}
    if device == "cpu":
        return {"folder": f"cpu-{cores}-core", "name": f"CPU, {cores} cores", **host}
    import torch

    found = torch.get_device_module(device).get_device_properties(0)
    folder = re.sub(r"[^a-z0-9]+", "-", found.name.lower()).strip("-")
    return {"folder": folder, "name": found.name, "device_memory_bytes": found.total_memory, **host}


def versions() -> dict[str, str]:
    """Python's, and those of the packages that are compared, where installed."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    match = re.search(r"model name\s*:\s*(.+)", text)
    return match.group(1).strip() if match else platform.machine()


def _host_memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One question, answered on one machine."""

    question: str
    """A short name, also the file's: `time_against_memory`."""
    title: str
    """The question as a sentence."""
    kind: str
    command: str
    """What makes this file again."""
    settings: dict[str, Any]
    """Shapes, dtypes, rounds, seeds: what a reader needs to judge the rows."""
    rows: list[dict[str, Any]]
    """Plain numbers and words; units in the keys (`_seconds`, `_bytes`); `error` where a method could not run."""
    notes: list[str] = field(default_factory=list)
    """Whole sentences for the report: assumptions, what was left out and why."""
    hardware: dict[str, Any] = field(default_factory=hardware)
    versions: dict[str, str] = field(default_factory=versions)

    def __post_init__(self) -> None:
        assert self.kind in KINDS, self.kind
        assert re.fullmatch(r"[a-z0-9_]+", self.question), self.question


def write(record: Record, folder: Path | None = None) -> Path:
    """Write `record` to its place under `folder` (default: `benchmarks/results`) at once or not at all."""
    place = (folder or RESULTS) / record.hardware["folder"] / f"{record.question}.json"
    place.parent.mkdir(parents=True, exist_ok=True)
    partial = place.with_suffix(".partial")
    partial.write_text(json.dumps(dataclasses.asdict(record), indent=1) + "\n")
    partial.replace(place)
    return place


def read(path: Path) -> Record:
    """The record in a file."""
    return Record(**json.loads(path.read_text()))


def read_all(folder: Path | None = None) -> list[Record]:
    """Every record under `folder`, in the order of hardware and question."""
    return [read(path) for path in sorted((folder or RESULTS).glob("*/*.json")) if _is_record(path)]


def _is_record(path: Path) -> bool:
    return "kind" in json.loads(path.read_text())
