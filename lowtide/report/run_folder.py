"""What a run leaves for its report, and the report of it: also of one that failed, was stopped, or is still going on.

What: `RunFiles` keeps the files of a run of the trainer (examples/train) up to date: run.json (how the run stands),
plan.json, step.json (the plan on the clock) and events.json (what the autopilot decided) of the first rank; rank-R.json
(its last step) of each rank of a pipeline. Each file is replaced as a whole, so a reader never sees half of one. A full
disk ends no training: what cannot be written is left out, which is said once.
`report_of_folder` reads them, and metrics.jsonl, a line a step; whatever is missing is left out. `report_of_handle`
reads a `Tides` or a `Tide` that trains, and changes neither; rules predict nothing, so their report has no clock.
Cost: a run of the timeline for each plan that is made; a file of a rank each 16 steps; drawing. Not covered: runs of
other trainers without their handle; the other ranks of a run without a pipeline; rank files on other machines.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from lowtide.config.source import read_text
from lowtide.core.plan import Plan
from lowtide.core.text_table import plural
from lowtide.errors import ConfigError
from lowtide.planner.host_costs import HOST_COSTS
from lowtide.report.elements import Measured, RunState, StepRow, Table, Tile, from_json, to_json, verdict
from lowtide.report.played_step import Played, play
from lowtide.report.rank_step import RankStep, rank_table
from lowtide.report.report import Report, account_table, remarks_of, report_of_plan, saved_tile_of_forwards, tiles_of
from lowtide.runtime.autopilot.autopilot import Autopilot
from lowtide.runtime.saved.stats import Stats
from lowtide.runtime.session.tide import Tide
from lowtide.runtime.session.tides import Tides
from lowtide.units import format_bytes, format_seconds


def report_of_handle(handle: Tide | Tides) -> Report:
    """Raises ConfigError before the first step, which shows what there is to report."""
    plan, stats = handle.plan, handle.stats
    tide = handle.tide if isinstance(handle, Tides) else handle
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
                stall_seconds=stats.stall_seconds,
                curve=None if tide is None else tide.audited_curve,
            ),
            title=f"{name}: a run within {format_bytes(plan.budget_bytes or 0)}",
            tables=(_figures(stats), *_some(history_of(handle))),
        )
    return _of_rules(name, plan, stats, max(stats.peak_device_bytes, audited_bytes))


def _of_rules(name: str, plan: Plan, stats: Stats, peak_bytes: int) -> Report:
    tiles = (
        Tile(what="peak, measured", value=format_bytes(peak_bytes)),
        saved_tile_of_forwards(
            "the rules",
            saved_bytes=stats.saved_bytes,
            held_bytes=stats.kept_bytes + stats.aliased_bytes,
            num_forwards=stats.num_forwards,
        ),
        Tile(what="swapped", value=format_bytes(stats.swapped_bytes), beside="in all forward passes"),
        Tile(what="recomputed", value=format_bytes(stats.recomputed_bytes), beside="in all forward passes"),
        Tile(what="waits for copies", value=format_seconds(stats.stall_seconds)),
    )
    return Report(
        title=f"{name}: a run by rules",
        subtitle=f"{stats.num_forwards} forward passes. Rules predict nothing, so there is no clock to compare with.",
        tiles=tiles,
        plan=plan,
        tables=(_figures(stats),),
    )


def _figures(stats: Stats) -> Table:
    rows = [("", "since the plan came into force")]
    for what, value in (
        ("forward passes", str(stats.num_forwards)),
        ("kept", format_bytes(stats.kept_bytes)),
        ("swapped", format_bytes(stats.swapped_bytes)),
        ("recomputed", format_bytes(stats.recomputed_bytes)),
        ("copied out, and back", f"{format_bytes(stats.copied_out_bytes)}, {format_bytes(stats.copied_in_bytes)}"),
        ("compute waited for copies", format_seconds(stats.stall_seconds)),
        ("saved tensors that the plan did not expect", str(stats.num_divergences)),
        ("sent away near the limit", format_bytes(stats.spilled_bytes)),
        ("host and disk bytes reserved now", f"{format_bytes(stats.host_bytes)}, {format_bytes(stats.disk_bytes)}"),
    ):
        rows.append((what, value))
    return Table(title="What was measured", caption="Totals of this rank.", rows=tuple(rows))


def history_of(handle: Tides) -> Table:
    """Each decision; the head alone where nothing happened."""
    rows = [("after forward pass", "why", "budget for the solver", "plan", "took")]
    rows += [
        (
            str(event.forward),
            event.why,
            "-" if event.budget_bytes is None else format_bytes(event.budget_bytes),
            event.digest,
            format_seconds(event.seconds),
        )
        for event in handle.events
    ]
    caption = "Each time that the plan was made or corrected."
    return Table(title="What happened", caption=caption, rows=tuple(rows))


def _some(table: Table | None) -> tuple[Table, ...]:
    return () if table is None or len(table.rows) < 2 else (table,)


METRICS, RUN, PLAN, STEP, EVENTS = "metrics.jsonl", "run.json", "plan.json", "step.json", "events.json"
_EVERY_STEPS = 16
"""Of the files of ranks, once so many steps have had one each: counted, so that all ranks write the same steps."""
_MOST_WRITES = 64
"""Batches that change their shape all the time change plans as often; those after that are not worth a file."""
_MOST_PEAKS = 4096


def rank_name(rank: int) -> str:
    return f"rank-{rank}.json"


class RunFiles:
    """Of one rank. `warn` hears, once, that a file could not be written."""

    def __init__(self, folder: Path, warn: Callable[[str], None]) -> None:
        self._folder = folder
        self._warn = warn
        self._has_warned = False
        self._state: RunState | None = None
        self._digest: str | None = None
        self._story: Table | None = None
        self._num_writes = 0
        self._peaks: list[tuple[int, int]] = []
        self._num_rank_steps = 0

    def begin(self, *, num_steps: int, num_ranks: int, is_first: bool, device: str) -> None:
        """Training begins. The first rank says so, and clears what an earlier run has left."""
        self._state = RunState.now(num_steps=num_steps, num_ranks=num_ranks, device=device)
        if is_first:
            for name in (PLAN, STEP, EVENTS, *(path.name for path in self._folder.glob("rank-*.json"))):
                with contextlib.suppress(OSError):
                    (self._folder / name).unlink(missing_ok=True)
            self._write(RUN, to_json(self._state))

    def end(self, *, stopped_by: str | None) -> None:
        """Of the first rank: all steps are done, or a signal came. Nothing where there was none to do."""
        if self._state is None:
            return
        state = dataclasses.replace(self._state, state="stopped" if stopped_by else "done", why=stopped_by or "")
        self._write(RUN, to_json(state))

    def failed(self, why: str, *, step: int, rank: int) -> None:
        """Of the rank that failed first. Nothing before training has begun."""
        if self._state is not None:
            state = dataclasses.replace(self._state, state="failed", why=why, step=step, rank=rank)
            self._write(RUN, to_json(state))

    def follow(self, handle: Any) -> None:
        """Write the plan in force, if it is another one than before. A handle without a solved plan writes nothing."""
        if not (isinstance(handle, Tides) and isinstance(handle.source, Autopilot)) or self._num_writes == _MOST_WRITES:
            return
        plan = handle.plan
        if plan is None or plan.predicted is None:
            return
        story = history_of(handle)
        if story != self._story:
            self._story = story
            self._write(EVENTS, to_json(story))
        if plan.digest() == self._digest:
            return
        planner = handle.source.planner
        assert handle.profile is not None and planner.facts.link is not None
        known: Any = {"link": planner.facts.link, "has_gradients": handle.source.has_gradients, "costs": HOST_COSTS}
        played = play(plan, handle.profile, planner.config, **known)
        self._digest = plan.digest()
        self._num_writes += 1
        self._write(PLAN, plan.to_json())
        self._write(STEP, to_json(played))

    def note_peak(self, step: int, peak_bytes: int | None) -> None:
        """Of this rank, after each step."""
        if peak_bytes is not None:
            self._peaks.append((step, peak_bytes))
        if len(self._peaks) > _MOST_PEAKS:
            self._peaks = self._peaks[::2]

    def note_rank(self, make: Callable[[], RankStep], *, step: int, is_last: bool) -> None:
        """Write what this rank did in a step: of the first steps, of some later ones, and of the last."""
        self._num_rank_steps += 1
        if is_last or self._num_rank_steps <= _EVERY_STEPS or step % _EVERY_STEPS == 0:
            made = dataclasses.replace(make(), peaks=tuple(self._peaks))
            self._write(rank_name(made.rank), to_json(made))

    def _write(self, name: str, text: str) -> None:
        partial = self._folder / f".{name}.partial"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            partial.write_text(text, encoding="utf-8")
            partial.replace(self._folder / name)
        except OSError as error:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            if not self._has_warned:
                self._has_warned = True
                self._warn(
                    f"lowtide: {self._folder / name} cannot be written: {error.strerror}; training goes on, and its "
                    "report will lack what happens from now on"
                )


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
    recorded = (rows[-1] if rows else {}).get("plan") or {}
    same = [row for row in rows if (row.get("plan") or {}).get("digest") == recorded.get("digest")]
    peaks = [row["peak_bytes"] for row in same if row["peak_bytes"] is not None]  # not those of plans that are gone
    state = _read(folder, RUN, functools.partial(from_json, RunState))
    measured = Measured(
        peak_bytes=max(peaks, default=None),
        is_without_temporaries=state is not None and state.device == "cpu",
        step_seconds=recorded.get("measured_seconds"),
    )
    story = _read(folder, EVENTS, functools.partial(from_json, Table))
    return Report(
        title=f"{folder.name or folder.resolve().name}: {_what(plan, ranks)}",
        subtitle=f"{len(rows)} {plural('step', len(rows))} in {METRICS}." if rows else "No step was done.",
        tiles=tuple(_tiles(plan, history, measured, ranks, _moved(rows[-1] if rows else {}))),
        remarks=tuple(remarks_of(plan)) if plan is not None else (),
        plan=plan,
        played=played,
        tables=tuple(_tables(plan, ranks, measured)) + _some(story),
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


def _tables(plan: Plan | None, ranks: tuple[RankStep, ...], measured: Measured) -> Iterator[Table]:
    if ranks:
        yield rank_table(ranks, is_without_temporaries=measured.is_without_temporaries)
    if plan is not None and plan.account:
        yield account_table(plan)


def _failure(
    state: RunState | None, history: tuple[StepRow, ...], plan: Plan | None, measured: Measured
) -> tuple[str, ...]:
    """What ended the run, and what was known of its memory until then."""
    said = () if state is None else verdict(state, history[-1].step if history else 0)
    if not said:
        return ()
    known = []
    peaks = [row.peak_bytes for row in history if row.peak_bytes is not None]
    if peaks:
        known.append(f"the highest peak until then was {format_bytes(max(peaks))}")
    if plan is not None and plan.predicted is not None:
        budget = "" if plan.budget_bytes is None else f" of a budget of {format_bytes(plan.budget_bytes)}"
        known.append(f"the plan had said {format_bytes(plan.predicted.peak_bytes)}{budget}")
    text = "; ".join(known)
    return (*said, f"{text[0].upper()}{text[1:]}.") if text else said


def _plan_and_step(folder: Path) -> tuple[Plan | None, Played | None]:
    plan, played = _read(folder, PLAN, Plan.from_json), _read(folder, STEP, functools.partial(from_json, Played))
    return (None, None) if plan is None or played is None else (plan, played)


def _ranks(folder: Path) -> Iterator[RankStep]:
    """By number; a rank that wrote nothing here is left out."""
    numbers = [path.name[len("rank-") : -len(".json")] for path in folder.glob("rank-*.json")]
    for number in sorted(int(each) for each in numbers if each.isdecimal())[:_MOST_RANKS]:
        found = _read(folder, rank_name(number), functools.partial(from_json, RankStep))
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
