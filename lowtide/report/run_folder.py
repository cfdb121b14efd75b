"""The report of a run: of one that trains, by its handle, and of one whose folder is left, also while it goes on.

What: `report_of_handle` reads a `Tides` or a `Tide` that trains, and changes neither; rules predict nothing, so their
report has no clock. `report_of_folder` reads what the trainer (examples/train) leaves of the first rank:
metrics.jsonl, a line a step, plan.json, and step.json, the plan on the clock. Whatever is missing is left out.
Cost: a run of the timeline; drawing. Not covered: runs of other trainers without their handle; other ranks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from lowtide.config.source import read_text
from lowtide.core.plan import Plan
from lowtide.core.text_table import plural
from lowtide.errors import ConfigError
from lowtide.planner.by_rules import HOST_COSTS
from lowtide.report.played_step import Played
from lowtide.report.report import (
    Measured,
    Report,
    Table,
    Tile,
    measured_peak,
    report_of_plan,
    saved_tile_of_forwards,
    tiles_of,
)
from lowtide.runtime.autopilot.autopilot import Autopilot
from lowtide.runtime.saved.stats import Stats
from lowtide.runtime.session.tide import Tide
from lowtide.runtime.session.tides import Tides
from lowtide.units import format_bytes, format_seconds


def report_of_handle(handle: Tide | Tides) -> Report:
    """Raises ConfigError before the first step, which shows what there is to report."""
    plan, stats = handle.plan, handle.stats
    audited_bytes = 0 if plan is None else plan.audited_peak_bytes or 0
    if plan is None or not (stats.num_forwards or audited_bytes):  # an audit starts the totals anew
        raise ConfigError("lowtide.write_report: no step has run under this handle yet; run one, then report")
    name = type(handle.model).__name__
    if isinstance(handle, Tides) and isinstance(handle.source, Autopilot):
        planner = handle.source.planner
        assert handle.profile is not None
        assert planner.facts.link is not None
        return report_of_plan(
            plan,
            handle.profile,
            planner.config,
            link=planner.facts.link,
            has_gradients=handle.source.has_gradients,
            costs=HOST_COSTS,
            measured=Measured(
                peak_bytes=max(stats.peak_device_bytes, audited_bytes),
                is_without_temporaries=not audited_bytes and handle.engine.device_peak_bytes() is None,
            ),
            title=f"{name}: a run within {format_bytes(plan.budget_bytes or 0)}",
            tables=(_measured_table(stats), *history_of(handle)),
        )
    return _of_rules(name, plan, stats, max(stats.peak_device_bytes, audited_bytes))


def _of_rules(name: str, plan: Plan, stats: Stats, peak_bytes: int) -> Report:
    held_bytes = stats.kept_bytes + stats.aliased_bytes
    how: Any = {"saved_bytes": stats.saved_bytes, "held_bytes": held_bytes, "num_forwards": stats.num_forwards}
    tiles = (
        ("peak, measured", format_bytes(peak_bytes), ""),
        saved_tile_of_forwards("the rules", **how),
        ("swapped", format_bytes(stats.swapped_bytes), "in all forward passes"),
        ("recomputed", format_bytes(stats.recomputed_bytes), "in all forward passes"),
        ("waits for copies", format_seconds(stats.stall_seconds), ""),
    )
    return Report(
        title=f"{name}: a run by rules",
        subtitle=f"{stats.num_forwards} forward passes. Rules predict nothing, so there is no clock to compare with.",
        tiles=tiles,
        plan=plan,
        more_tables=(_measured_table(stats),),
    )


def _measured_table(stats: Stats) -> Table:
    rows = (
        ("", "since the plan came into force"),
        ("forward passes", str(stats.num_forwards)),
        ("kept", format_bytes(stats.kept_bytes)),
        ("swapped", format_bytes(stats.swapped_bytes)),
        ("recomputed", format_bytes(stats.recomputed_bytes)),
        ("copied out, and back", f"{format_bytes(stats.copied_out_bytes)}, {format_bytes(stats.copied_in_bytes)}"),
        ("compute waited for copies", format_seconds(stats.stall_seconds)),
        ("saved tensors that the plan did not expect", str(stats.num_divergences)),
        ("sent away near the limit", format_bytes(stats.spilled_bytes)),
        ("host and disk bytes reserved now", f"{format_bytes(stats.host_bytes)}, {format_bytes(stats.disk_bytes)}"),
    )
    return "What was measured", "Totals of this rank.", rows


def history_of(handle: Tides) -> tuple[Table, ...]:
    """A table of each decision; none where nothing happened."""
    rows = [("after forward pass", "why", "budget for the solver", "plan", "took")]
    for event in handle.events:
        budget = "-" if event.budget_bytes is None else format_bytes(event.budget_bytes)
        rows.append((str(event.forward), event.why, budget, event.digest, format_seconds(event.seconds)))
    caption = "Each time that the plan was made or corrected."
    return (("What happened", caption, rows),) if len(rows) > 1 else ()


METRICS, PLAN, STEP = "metrics.jsonl", "plan.json", "step.json"
_MOST_BYTES = 1 << 28
_Read = TypeVar("_Read")


def report_of_folder(folder: Path) -> Report:
    """Raises ConfigError for a folder that is no run's, and for files that were edited badly."""
    metrics = folder / METRICS
    if not folder.is_dir():
        wrong = "this is a file" if folder.is_file() else "no such folder"
        raise ConfigError(f"{folder}: {wrong}; give the train.output_dir of a run of `lowtide train`")
    if not metrics.is_file():
        raise ConfigError(
            f"{folder}: no run of `lowtide train`: there is no {METRICS} in it; give its train.output_dir"
        )
    rows = tuple(_rows(metrics))
    plan, played = _read(folder, PLAN, Plan.from_json), _read(folder, STEP, Played.from_json)
    if plan is None or played is None:
        plan = played = None
    last = rows[-1] if rows else {}
    recorded = last.get("plan") or {}
    same = [row for row in rows if (row.get("plan") or {}).get("digest") == recorded.get("digest")]
    peaks = [row["peak_bytes"] for row in same if row["peak_bytes"] is not None]  # not those of plans that are gone
    measured = Measured(
        peak_bytes=max(peaks, default=None),
        is_without_temporaries=last.get("device") == "cpu",
        step_seconds=recorded.get("measured_seconds"),
    )
    within = f" within {format_bytes(plan.budget_bytes)}" if plan is not None and plan.budget_bytes else ""
    return Report(
        title=f"{folder.name or folder.resolve().name}: a run{within}",
        subtitle=f"{len(rows)} {plural('step', len(rows))} in {METRICS}." if rows else "No step was done.",
        tiles=tuple(_tiles(plan, rows, measured)),
        plan=plan,
        played=played,
        measured=measured,
    )


def _tiles(plan: Plan | None, rows: tuple[dict[str, Any], ...], measured: Measured) -> Iterator[Tile]:
    if not rows:
        yield "steps done", "0", "no loss yet"
    else:
        yield "steps done", str(rows[-1]["step"]), f"loss {rows[-1]['loss']:.4f}"
    if plan is not None:
        yield from tiles_of(plan, measured)
    elif rows:
        if measured.peak_bytes is not None:
            yield measured_peak(measured)
        yield from _moved(rows[-1])
        yield "step, median", format_seconds(sorted(row["step_seconds"] for row in rows)[len(rows) // 2]), ""


def _moved(row: dict[str, Any]) -> Iterator[Tile]:
    """What did not stay on the device in this step; nothing where lowtide did nothing."""
    counted = row.get("tide") or {}
    found: list[Any] = [counted.get(name) for name in ("saved_bytes", "kept_bytes", "aliased_bytes", "num_forwards")]
    if all(isinstance(number, int) for number in found):  # else of another version
        saved, kept, aliased, num_forwards = found
        who = "the plans" if row.get("plan") else "the rules"
        yield saved_tile_of_forwards(who, saved_bytes=saved, held_bytes=kept + aliased, num_forwards=num_forwards)


def _read(folder: Path, name: str, parse: Callable[[str], _Read]) -> _Read | None:
    """None where the file is not there."""
    if not (folder / name).is_file():
        return None
    try:
        return parse(read_text(folder / name, most_bytes=_MOST_BYTES))
    except ConfigError as error:
        raise ConfigError(f"{folder / name}: {error}; delete it for a report without it") from None


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines; a kill may have cut the last one."""
    for number, line in enumerate(read_text(path, most_bytes=_MOST_BYTES).splitlines(keepends=True), start=1):
        if not line.endswith("}\n"):
            continue
        try:
            row = json.loads(line)
            if not row["step_seconds"] >= 0:
                raise ValueError
            yield {"peak_bytes": None, **row, "step": int(row["step"]), "loss": float(row["loss"])}
        except (KeyError, TypeError, ValueError, RecursionError):
            raise ConfigError(
                f"{path}:{number}: this is not a step that `lowtide train` wrote; delete the line for a report "
                "without it"
            ) from None
