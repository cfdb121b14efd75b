"""The report of a run from the files that it left: also of one that failed, was stopped, or is still going on.

What: `lowtide train` writes a line a step into metrics.jsonl and, when its plan changes, plan.json and step.json (the
plan on the clock). `RunFiles` writes the two, `report_of_folder` reads all three. Without a budget there is only the
first, and the report has the run's own figures.
Cost: a run of the timeline each time that a plan is made. Not covered: other ranks than the first; runs of other
trainers (`lowtide.write_report` has those).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lowtide.config.source import read_text
from lowtide.core.plan import Plan
from lowtide.errors import ConfigError
from lowtide.report.played_step import Played, play, played_from_json, played_to_json
from lowtide.report.report import Measured, Report, StepRow, Tile, account_table, remarks_of, tiles_of
from lowtide.runtime.autopilot.autopilot import Autopilot
from lowtide.runtime.autopilot.phases import Phase
from lowtide.runtime.autopilot.plan_source import BudgetSource
from lowtide.units import format_bytes, format_seconds

METRICS, PLAN, STEP = "metrics.jsonl", "plan.json", "step.json"
_MOST_BYTES = 1 << 28


_MOST_WRITES = 64
"""Batches that change their shape all the time change plans as often; those after that are not worth a file."""


class RunFiles:
    """plan.json and step.json of a run, kept up to date."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._digest: str | None = None
        self._num_writes = 0

    def follow(self, handle: Any) -> None:
        """Write the plan in force, if it is another one than before. A handle without a solved plan writes nothing, and
        neither does a race: its plans take turns, and one of them stays."""
        if not isinstance(handle, Autopilot) or handle.phase is Phase.RACING or self._num_writes == _MOST_WRITES:
            return
        plan = handle.plan
        if plan is None or plan.predicted is None or plan.digest() == self._digest:
            return
        assert isinstance(handle.source, BudgetSource)
        assert handle.profile is not None and handle.link is not None
        played = play(plan, handle.profile, handle.source.config, link=handle.link, has_gradients=handle.has_gradients)
        self._digest = plan.digest()
        self._num_writes += 1
        for name, text in ((PLAN, plan.to_json()), (STEP, played_to_json(played))):
            partial = self._folder / f".{name}.partial"
            partial.write_text(text, encoding="utf-8")
            partial.replace(self._folder / name)


def report_of_folder(folder: Path) -> Report:
    """Raises ConfigError for a folder that is no run's, and for files that were edited badly."""
    metrics = folder / METRICS
    if not metrics.is_file():
        raise ConfigError(
            f"{folder}: no run of `lowtide train`: there is no {METRICS} in it; give its train.output_dir"
        )
    rows = tuple(_rows(metrics))
    plan, played = _plan_and_step(folder)
    last = rows[-1] if rows else {}
    history = tuple(
        StepRow(step=row["step"], loss=row["loss"], seconds=row["step_seconds"], peak_bytes=row["peak_bytes"])
        for row in rows
    )
    loss = f"{last['loss']:.4f}" if rows else "-"
    peaks = [row.peak_bytes for row in history if row.peak_bytes is not None]
    recorded = last.get("plan") or {}
    measured = Measured(peak_bytes=max(peaks, default=None), step_seconds=recorded.get("measured_seconds"))
    tiles = [Tile(what="steps done", value=str(last.get("step", 0)), beside=f"loss {loss}")]
    if plan is not None:
        tiles += tiles_of(plan, measured)
    elif rows:
        if measured.peak_bytes is not None:
            tiles.append(Tile(what="peak, measured", value=format_bytes(measured.peak_bytes)))
        seconds = sorted(row.seconds for row in history)[len(history) // 2]
        tiles.append(Tile(what="step, median", value=format_seconds(seconds)))
    return Report(
        title=f"{folder.name or folder.resolve().name}: a run"
        + (f" within {format_bytes(plan.budget_bytes)}" if plan is not None and plan.budget_bytes else ""),
        subtitle=f"{len(rows)} steps in {metrics.name}." if rows else "No step was done.",
        tiles=tuple(tiles),
        remarks=tuple(remarks_of(plan)) if plan is not None else (),
        plan=plan,
        played=played,
        tables=(account_table(plan),) if plan is not None and plan.account else (),
        history=history,
    )


def _plan_and_step(folder: Path) -> tuple[Plan | None, Played | None]:
    if not (folder / PLAN).is_file() or not (folder / STEP).is_file():
        return None, None
    try:
        plan = Plan.from_json(read_text(folder / PLAN, most_bytes=_MOST_BYTES))
        return plan, played_from_json(read_text(folder / STEP, most_bytes=_MOST_BYTES))
    except ConfigError as error:
        raise ConfigError(f"{folder}: {error}; delete {PLAN} and {STEP} for a report without them") from None


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines; a kill may have cut the last one."""
    for number, line in enumerate(read_text(path, most_bytes=_MOST_BYTES).splitlines(keepends=True), start=1):
        if not line.endswith("}\n"):
            continue
        try:
            row = json.loads(line)
            if not math.isfinite(row["loss"]) or row["step_seconds"] < 0:
                raise ValueError
            yield {"peak_bytes": None, **row, "step": int(row["step"])}
        except (KeyError, TypeError, ValueError, RecursionError):
            raise ConfigError(f"{path}:{number}: this is not a step that `lowtide train` wrote") from None
