"""The pieces that a report is made of: large figures, tables, what was measured, and how a run stands; any of them as a
file.

`RunState` is what run.json says. The first rank writes it when training begins and ends, a rank that fails writes why.
What is killed writes nothing: then its process is looked for, which can be done on its own machine only. Not covered:
failures before training begins (a mistake in the file is one line on the terminal).
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypeVar

from lowtide.core.json_text import Mistake, build, parse_json
from lowtide.core.profile import MeasuredCurve
from lowtide.errors import ConfigError

_Element = TypeVar("_Element")


def to_json(element: Any) -> str:
    """As text; `from_json` gives back an equal one."""
    return json.dumps(dataclasses.asdict(element)) + "\n"


def from_json(kind: type[_Element], text: str) -> _Element:
    """What `to_json` wrote. Raises ConfigError for anything else."""
    try:
        return build(kind, parse_json(text, "file"))
    except (Mistake, ConfigError) as error:
        raise ConfigError(f"not as lowtide wrote it: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """One large figure."""

    what: str
    value: str
    beside: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of text; the first is the head."""

    title: str
    caption: str
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a run did, beside what its plan said."""

    peak_bytes: int | None = None
    is_without_temporaries: bool = False
    """Whether temporaries are missing from `peak_bytes`; such a peak cannot be compared with the predicted one."""
    step_seconds: float | None = None
    """Forward and backward of one micro-batch."""
    stall_seconds: float | None = None
    curve: MeasuredCurve | None = None
    """Bytes over time of an audited step."""


NOTHING = Measured()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One optimizer step of a run."""

    step: int
    loss: float
    seconds: float
    peak_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Of one run, as far as its files say."""

    state: Literal["running", "done", "stopped", "failed"]
    num_steps: int
    """That were asked for."""
    num_ranks: int
    host: str
    pid: int
    """Of the first rank."""
    process_start: str
    """When that process began, as the kernel counts; empty where it does not say. A later one has another."""
    began: str
    """UTC."""
    why: str = ""
    """It was stopped, or failed."""
    step: int = 0
    """In which it failed; 0: before the first."""
    rank: int = 0
    """That failed first."""
    device: str = ""
    """'cpu', 'cuda', ...; empty in files that say nothing of it."""

    @classmethod
    def now(cls, *, num_steps: int, num_ranks: int, device: str) -> RunState:
        """Of a run that begins in this process."""
        return cls(
            state="running",
            num_steps=num_steps,
            num_ranks=num_ranks,
            host=platform.node(),
            pid=os.getpid(),
            process_start=_start_of(os.getpid()) or "",
            began=datetime.now(UTC).isoformat(timespec="seconds"),
            device=device,
        )

    @property
    def is_alive(self) -> bool | None:
        """Whether its process is there; None where this machine cannot know."""
        if self.host != platform.node() or not self.process_start:
            return None
        return _start_of(self.pid) == self.process_start


def verdict(state: RunState, last_step: int) -> tuple[str, ...]:
    """What a reader must know before all else, the heading first; empty for a run that is done or goes on."""
    of_all = f"of {state.num_steps}"
    if state.state == "failed":
        where = f"in step {state.step} {of_all}" if state.step else "before its first step"
        who = f" on rank {state.rank}" if state.num_ranks > 1 else ""
        return (f"This run failed {where}{who}", state.why)
    if state.state == "stopped":
        return (
            f"This run was stopped after step {last_step} {of_all}",
            f"By {state.why}. The same command goes on from its last checkpoint.",
        )
    if state.state == "running" and state.is_alive is False:
        return (
            f"This run ended without a word after step {last_step} {of_all}",
            "It was killed, or the machine went down. A kill without a word is often the kernel's, for lack of main "
            "memory: look for 'Out of memory: Killed process' in dmesg, or at the memory limit of the container.",
        )
    if state.state == "running" and state.is_alive is None:
        return (
            f"Step {last_step} {of_all} is the last that is known",
            f"It goes on, or was killed: only {state.host}, where it ran, can tell.",
        )
    return ()


def _start_of(pid: int) -> str | None:
    """Field 22 of /proc/PID/stat; None without such a process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may have blanks
    return None if fields[0] == "Z" else fields[19]
