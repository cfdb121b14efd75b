"""What a person sees of a run, and what stays of it: lines on stderr, and metrics.jsonl.

What: `line_of` shows one step; `MetricsFile` keeps every step as one JSON line, `PlanFiles` the plan in force. They
belong to rank 0.
Not covered: experiment trackers; they can read metrics.jsonl.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lowtide.config.source import shown
from lowtide.errors import ConfigError
from lowtide.report.run_folder import PLAN, STEP, report_of_handle
from lowtide.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from lowtide.runtime.session.tide import Tide
    from lowtide.runtime.session.tides import Tides

_MOST_WRITES = 64
"""Batches that change their shape all the time change plans as often; those after that are not worth a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRecord:
    """The plan of a budget, and what it promised for one micro-batch."""

    digest: str
    predicted_peak_bytes: int
    predicted_seconds: float
    measured_seconds: float
    """Forward and backward, mean over the micro-batches of the step; the first step also observes and plans."""
    predicted_stall_seconds: float
    num_corrections: int
    """How often a new plan was made because a step was not as predicted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One line of metrics.jsonl. Numbers of bytes and seconds are rank 0's; tokens and loss are of all ranks."""

    step: int
    """Counted from 1: the number of optimizer steps done."""
    loss: float
    """Mean over all tokens of the step, on all ranks, before the optimizer moved."""
    grad_norm: float
    """Before clipping."""
    learning_rate: float
    step_seconds: float
    tokens_per_second: float
    peak_bytes: int | None
    """Peak on the device in this step: the allocator's on an accelerator, lowtide's account on the CPU, else null."""
    resident_bytes: int | None
    """Of the process, after the step."""
    peak_resident_bytes: int | None
    """Of the process, since it began."""
    tide: Mapping[str, float] | None
    """What lowtide did in this step: `tide.stats`. Null without a `memory` section."""
    plan: PlanRecord | None = None
    """Null without a budget."""
    device: str = ""
    """'cpu', 'cuda', ..."""

    @property
    def num_retries(self) -> int:
        return int(self.tide["num_retries"]) if self.tide else 0


def line_of(record: StepRecord, num_steps: int) -> str:
    """`step  3/60  loss 2.3456  1,234 tokens/s  peak 1.2 GiB  stall 3.0 ms`."""
    parts = [f"step {record.step:>{len(str(num_steps))}}/{num_steps}", f"loss {record.loss:.4f}"]
    parts.append(f"{record.tokens_per_second:,.0f} tokens/s")
    if record.peak_bytes is not None:
        parts.append(f"peak {format_bytes(record.peak_bytes)}")
    elif record.peak_resident_bytes is not None:
        parts.append(f"peak resident {format_bytes(record.peak_resident_bytes)}")
    if record.tide is not None:
        parts.append(f"stall {format_seconds(record.tide['stall_seconds'])}")
    if record.num_retries:
        parts.append(f"out of memory, run again: {record.num_retries}")
    return "  ".join(parts)


def say_on_stderr(text: str) -> None:
    """A line, at once."""
    print(text, file=sys.stderr, flush=True)


class MetricsFile:
    """metrics.jsonl: one line per step, also across interruptions."""

    def __init__(self, path: Path, *, first_step: int, warn: Callable[[str], None]) -> None:
        """Keeps the lines up to `first_step`: steps after the checkpoint will be done again. `warn` hears, once, that a
        line could not be written: a full disk ends no training.

        Raises `ConfigError` if the file cannot be written, or holds anything but lines of an earlier run.
        """
        self.last_loss: float | None = None
        self._digest = hashlib.sha256()
        self._path, self._warn, self._has_warned = path, warn, False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(f".{path.name}.partial")
            with partial.open("w", encoding="utf-8") as file:
                for step, loss, line in _done(path):
                    if step <= first_step:
                        file.write(line + "\n")
                        self._count(loss)
            partial.replace(path)
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written: {error.strerror}; choose another train.output_dir") from None

    def append(self, record: StepRecord) -> None:
        self._count(record.loss)
        line = memoryview(f"{json.dumps(dataclasses.asdict(record))}\n".encode())
        num_bytes = os.fstat(self._file.fileno()).st_size
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(num_bytes)  # of a line, all or nothing
            if not self._has_warned:
                self._has_warned = True
                self._warn(
                    f"lowtide: {self._path} cannot be written: {error.strerror}; training goes on without a record of "
                    "these steps"
                )

    def losses_sha256(self) -> str:
        """Over all steps of the run to the last bit: equal for a run that was interrupted and one that was not."""
        return self._digest.hexdigest()

    def close(self) -> None:
        self._file.close()

    def _count(self, loss: float) -> None:
        self.last_loss = loss
        self._digest.update(f"{loss.hex()}\n".encode())


class PlanFiles:
    """plan.json and step.json, for `lowtide report`: the plan in force, and its step on the clock."""

    def __init__(self, folder: Path, warn: Callable[[str], None]) -> None:
        """Files of an earlier run go. `warn` hears, once, that a file could not be written: a full disk ends no
        training."""
        self._folder, self._warn = folder, warn
        self._digest: str | None = None
        self._num_left = _MOST_WRITES
        for name in (PLAN, STEP):
            with contextlib.suppress(OSError):
                (folder / name).unlink(missing_ok=True)

    def follow(self, handle: Tide | Tides | None) -> None:
        """After each step: write the plan in force, if it is another one than before."""
        plan = None if handle is None else handle.plan
        if plan is None or plan.predicted is None or plan.digest() == self._digest or not self._num_left:
            return
        self._digest = plan.digest()
        self._num_left -= 1
        played = report_of_handle(handle).played
        assert played is not None
        try:
            for name, text in ((PLAN, plan.to_json()), (STEP, played.to_json())):
                partial = self._folder / f".{name}.partial"
                partial.write_text(text, encoding="utf-8")
                partial.replace(self._folder / name)
        except OSError as error:
            self._num_left = 0
            self._warn(
                f"lowtide: {self._folder / PLAN} cannot be written: {error.strerror}; training goes on, and its report "
                "will lack the plan"
            )


def _done(path: Path) -> Iterator[tuple[int, float, str]]:
    """Step, loss and text of the whole lines of an earlier run; a kill may have cut the last one."""
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else ():
        if not (line.startswith("{") and line.endswith("}")):
            continue
        try:
            record = json.loads(line)
            yield int(record["step"]), float(record["loss"]), line
        except (KeyError, TypeError, ValueError, RecursionError):
            raise ConfigError(
                f"{path}: this is not a line of lowtide's: {shown(line)}; move the file away, or choose another "
                "train.output_dir"
            ) from None


def resident_bytes() -> tuple[int | None, int | None]:
    """Resident memory of this process, now and at its highest; unknown where there is no /proc."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return None, None
    found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith(("VmRSS", "VmHWM"))}
    return found.get("VmRSS"), found.get("VmHWM")
