"""The report of a run from the files that it left: also of one that failed, was stopped, or is still going on.

What: `report_of_folder` reads what `lowtide train` wrote: metrics.jsonl, a line a step, and the files of run_files.py.
Whatever is missing is left out: a run without a budget has no plan, one without stages no rank files.
Cost: that of drawing. Not covered: runs of other trainers (`lowtide.write_report` has those); the other ranks of a run
without a pipeline; rank files that are on other machines.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from lowtide.config.source import read_text
from lowtide.core.plan import Plan
from lowtide.core.plan_table import plural
from lowtide.errors import ConfigError
from lowtide.report import rank_step, run_state
from lowtide.report.parts import Measured, StepRow, Table, Tile
from lowtide.report.played_step import Played, played_from_json
from lowtide.report.rank_step import RankStep, rank_table
from lowtide.report.report import Report, account_table, remarks_of, saved_tile_of_forwards, tiles_of
from lowtide.report.run_files import EVENTS, METRICS, PLAN, RUN, STEP, rank_name
from lowtide.report.story import story_from_json, tables_of
from lowtide.units import format_bytes, format_seconds

_MOST_BYTES = 1 << 28
_MOST_RANKS = 4096
_Read = TypeVar("_Read")


def report_of_folder(folder: Path) -> Report:
    """Raises ConfigError for a folder that is no run's, and for files that were edited badly."""
    metrics = folder / METRICS
    if folder.is_file():
        raise ConfigError(f"{folder}: this is a file; give the train.output_dir of a run of `lowtide train`")
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder; give the train.output_dir of a run of `lowtide train`")
    if not metrics.is_file() and not (folder / RUN).is_file():
        raise ConfigError(
            f"{folder}: no run of `lowtide train`: there is no {METRICS} in it; give its train.output_dir"
        )
    rows = tuple(_rows(metrics)) if metrics.is_file() else ()
    history = tuple(
        StepRow(step=row["step"], loss=row["loss"], seconds=row["step_seconds"], peak_bytes=row["peak_bytes"])
        for row in rows
    )
    plan, played = _plan_and_step(folder)
    ranks = tuple(_ranks(folder))
    peaks = [row.peak_bytes for row in history if row.peak_bytes is not None]
    recorded = (rows[-1] if rows else {}).get("plan") or {}
    state = _read(folder, RUN, run_state.from_json)
    measured = Measured(
        peak_bytes=max(peaks, default=None),
        is_without_temporaries=state is not None and state.device == "cpu",
        step_seconds=recorded.get("measured_seconds"),
    )
    story = _read(folder, EVENTS, story_from_json)
    return Report(
        title=f"{folder.name or folder.resolve().name}: {_what(plan, ranks)}",
        subtitle=f"{len(rows)} {plural('step', len(rows))} in {METRICS}." if rows else "No step was done.",
        tiles=tuple(_tiles(plan, history, measured, ranks, _moved(rows[-1] if rows else {}))),
        remarks=tuple(remarks_of(plan)) if plan is not None else (),
        plan=plan,
        played=played,
        tables=tuple(_tables(plan, ranks)) + (() if story is None else tuple(tables_of(story))),
        history=history,
        measured=measured,
        ranks=ranks,
        failure=_failure(state, history, plan, measured),
    )


def _what(plan: Plan | None, ranks: tuple[RankStep, ...]) -> str:
    if ranks:
        return f"a pipeline of {len(ranks)} ranks"
    if plan is not None and plan.budget_bytes:
        return f"a run within {format_bytes(plan.budget_bytes)}"
    return "a run"


def _tiles(
    plan: Plan | None,
    history: tuple[StepRow, ...],
    measured: Measured,
    ranks: tuple[RankStep, ...],
    moved: Tile | None,
) -> Iterator[Tile]:
    last = history[-1] if history else None
    yield Tile(
        what="steps done",
        value=str(last.step if last else 0),
        beside=f"loss {last.loss:.4f}" if last else "no loss yet",
    )
    if plan is not None:
        yield from tiles_of(plan, measured)
    elif last is not None:
        if measured.peak_bytes is not None:
            which = ("of the first rank",) if ranks else ()
            lacks = ("temporaries not counted",) if measured.is_without_temporaries else ()
            yield Tile(
                what="peak, measured", value=format_bytes(measured.peak_bytes), beside=", ".join((*which, *lacks))
            )
        if moved is not None:
            yield moved
        seconds = sorted(row.seconds for row in history)[len(history) // 2]
        yield Tile(what="step, median", value=format_seconds(seconds))


def _moved(row: dict[str, Any]) -> Tile | None:
    """What did not stay on the device in this step; None where lowtide did nothing."""
    counted = row.get("tide") or {}
    found = [counted.get(name) for name in ("saved_bytes", "kept_bytes", "aliased_bytes", "num_forwards")]
    numbers = [number for number in found if isinstance(number, int)]
    if len(numbers) < len(found):  # of another version
        return None
    saved, kept, aliased, num_forwards = numbers
    who = "the plans" if row.get("plan") else "the rules"
    return saved_tile_of_forwards(who, saved_bytes=saved, held_bytes=kept + aliased, num_forwards=num_forwards)


def _tables(plan: Plan | None, ranks: tuple[RankStep, ...]) -> Iterator[Table]:
    if ranks:
        yield rank_table(ranks)
    if plan is not None and plan.account:
        yield account_table(plan)


def _failure(
    state: run_state.RunState | None, history: tuple[StepRow, ...], plan: Plan | None, measured: Measured
) -> tuple[str, ...]:
    """What ended the run, and what was known of its memory until then."""
    said = () if state is None else run_state.verdict(state, history[-1].step if history else 0)
    if not said:
        return ()
    known = []
    if measured.peak_bytes is not None:
        known.append(f"the highest peak until then was {format_bytes(measured.peak_bytes)}")
    if plan is not None and plan.predicted is not None:
        budget = "" if plan.budget_bytes is None else f" of a budget of {format_bytes(plan.budget_bytes)}"
        known.append(f"the plan had said {format_bytes(plan.predicted.peak_bytes)}{budget}")
    text = "; ".join(known)
    return (*said, f"{text[0].upper()}{text[1:]}.") if text else said


def _plan_and_step(folder: Path) -> tuple[Plan | None, Played | None]:
    plan, played = _read(folder, PLAN, Plan.from_json), _read(folder, STEP, played_from_json)
    return (None, None) if plan is None or played is None else (plan, played)


def _ranks(folder: Path) -> Iterator[RankStep]:
    """By number; a rank that wrote nothing here is left out."""
    numbers = [path.name[len("rank-") : -len(".json")] for path in folder.glob("rank-*.json")]
    for number in sorted(int(each) for each in numbers if each.isdecimal())[:_MOST_RANKS]:
        found = _read(folder, rank_name(number), rank_step.from_json)
        if found is not None:
            yield found


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
