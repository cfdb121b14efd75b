"""What a person sees of a run, and what stays of it: lines on stderr, and files of its folder, both of rank 0.

`RunFiles` keeps every step as a line of metrics.jsonl, and of the plan in force plan.json and step.json, for `lowtide
report`. A full disk ends no training.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lowtide.config.source import shown
from lowtide.errors import ConfigError
from lowtide.report.run_folder import METRICS, PLAN, STEP, report_of_handle
from lowtide.units import format_bytes, format_seconds


def line_of(record: Mapping[str, Any], num_steps: int) -> str:
    """`step  3/60  loss 2.3456  1,234 tokens/s  peak 1.2 GiB  stall 3.0 ms`."""
    parts = [f"step {record['step']:>{len(str(num_steps))}}/{num_steps}", f"loss {record['loss']:.4f}"]
    parts.append(f"{record['tokens_per_second']:,.0f} tokens/s")
    if record["peak_bytes"] is not None:
        parts.append(f"peak {format_bytes(record['peak_bytes'])}")
    elif record["peak_resident_bytes"] is not None:
        parts.append(f"peak resident {format_bytes(record['peak_resident_bytes'])}")
    if record["tide"] is not None:
        parts.append(f"stall {format_seconds(record['tide']['stall_seconds'])}")
        if record["tide"]["num_retries"]:
            parts.append(f"out of memory, run again: {record['tide']['num_retries']}")
    return "  ".join(parts)


class RunFiles:
    """The files of one run, also across interruptions."""

    def __init__(self, folder: Path, *, first_step: int, warn: Callable[[str], None]) -> None:
        """Keeps the lines up to `first_step`: later steps will be done again. `warn` hears, once for each file, that it
        could not be written. Raises `ConfigError` if metrics.jsonl cannot be, or holds anything but such lines."""
        self._folder, self._warn = folder, warn
        self._digest: str | None = None
        """Of the plan that is written."""
        self._lost: set[str] = set()
        path = folder / METRICS
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _replace(path, "".join(f"{line}\n" for step, line in _done(path) if step <= first_step))
            for name in (PLAN, STEP):
                (folder / name).unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written: {error.strerror}; choose another train.output_dir") from None

    def append(self, record: Mapping[str, Any]) -> None:
        """One step."""
        line = memoryview(f"{json.dumps(record)}\n".encode())
        with (
            self._or_warn(METRICS, "training goes on without a record of these steps"),
            (self._folder / METRICS).open("ab", buffering=0) as file,
        ):
            num_bytes = file.tell()
            try:
                while line:
                    line = line[file.write(line) :]
            except OSError:
                file.truncate(num_bytes)  # of a line, all or nothing
                raise

    def follow(self, handle: Any) -> None:
        """After each step: write the plan in force on the model, if it is another one than before. None: no model."""
        plan = None if handle is None else handle.plan
        if plan is None or plan.predicted is None or plan.digest() == self._digest:
            return
        self._digest = plan.digest()
        played = report_of_handle(handle).played
        assert played is not None
        with self._or_warn(PLAN, "training goes on, and its report will lack the plan"):
            _replace(self._folder / PLAN, plan.to_json())
            _replace(self._folder / STEP, played.to_json())

    @contextlib.contextmanager
    def _or_warn(self, name: str, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if name not in self._lost:
                self._lost.add(name)
                self._warn(f"lowtide: {self._folder / name} cannot be written: {error.strerror}; {what}")


def _replace(path: Path, text: str) -> None:
    """Write a file that is whole or as it was."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def _done(path: Path) -> Iterator[tuple[int, str]]:
    """Step and text of the whole lines of an earlier run; a kill may have cut the last one."""
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else ():
        if not (line.startswith("{") and line.endswith("}")):
            continue
        try:
            record = json.loads(line)
            step, _ = int(record["step"]), float(record["loss"])
        except (KeyError, TypeError, ValueError, RecursionError):
            message = f"{path}: this is not a line of lowtide's: {shown(line)}"
            raise ConfigError(f"{message}; move the file away, or choose another train.output_dir") from None
        yield step, line


def resident_bytes() -> tuple[int | None, int | None]:
    """Resident memory of this process, now and at its highest; unknown where there is no /proc."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return None, None
    found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith(("VmRSS", "VmHWM"))}
    return found.get("VmRSS"), found.get("VmHWM")
