"""What a report says, before it has a form: figures, remarks, tables, and the step on its clock.

What: `report_of_plan` gathers the report of a plan, whether it has run or not. `write.py` makes HTML of it, or a
trace, and `document` plain data for JSON. Predicted figures stand beside measured ones where a run has any.
Cost: one run of the timeline. Not covered: other steps than the one that was planned for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lowtide.config.memory import MemoryConfig
from lowtide.core.plan import Plan, why_unswapped
from lowtide.core.profile import Profile
from lowtide.planner.by_rules import NO_COSTS, HostCosts
from lowtide.report.budget_sweep import Sweep, checkpointed, document_of, sweep_document
from lowtide.report.export import Setting
from lowtide.report.played_step import OWNERS, Played, play
from lowtide.timeline.step import Link
from lowtide.units import format_bytes, format_seconds

Tile = tuple[str, str, str]
"""One large figure: what it is, its value, and what stands beside it."""


Table = tuple[str, str, Sequence[tuple[str, ...]]]
"""Title, caption, and rows of text, of which the first is the head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a run did, beside what its plan said."""

    peak_bytes: int | None = None
    is_without_temporaries: bool = False
    """Whether temporaries are missing from `peak_bytes`; such a peak cannot be compared with the predicted one."""
    step_seconds: float | None = None
    """Forward and backward of one micro-batch."""


NOTHING = Measured()


_MOST_POINTS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All that a page shows."""

    title: str
    subtitle: str
    tiles: tuple[Tile, ...] = ()
    plan: Plan | None = None
    played: Played | None = None
    sweep: Sweep = field(default_factory=dict)
    others: Mapping[str, Setting] = field(default_factory=dict)
    """The same step without a plan, with layers checkpointed by hand."""
    more_tables: tuple[Table, ...] = ()
    """Beside what the plan has."""
    measured: Measured = NOTHING

    @property
    def remarks(self) -> list[str]:
        """How sure the plan is, and what else a reader should know first."""
        if self.plan is None or self.plan.predicted is None:
            return []
        sure, gap = self.plan.predicted.certainty, 100 * self.plan.predicted.gap
        remarks = [f"How sure: {sure}; at most {gap:.1f} % from the fastest plan possible on this clock."]
        remarks += [f"{line[0].upper()}{line[1:]}." for line in why_unswapped(self.plan)]
        return remarks + ["This plan does nothing: everything fits."] * self.plan.does_nothing

    @property
    def tables(self) -> list[Table]:
        """All of them; where the bytes are at the worst moment comes first."""
        if self.plan is None or not self.plan.account:
            return [*self.more_tables]
        rows = [("", "everything kept", "planned")]
        rows += [(it.what, format_bytes(it.plain_bytes), format_bytes(it.planned_bytes)) for it in self.plan.account]
        caption = "Predicted. What is on the device when it holds the most, without the plan and with it."
        return [("At the worst moment", caption, rows), *self.more_tables]


def report_of_plan(
    plan: Plan,
    profile: Profile,
    config: MemoryConfig,
    *,
    link: Link,
    has_gradients: bool = False,
    sweep: Sweep | None = None,
    measured: Measured = NOTHING,
    title: str | None = None,
    tables: Sequence[Table] = (),
    costs: HostCosts = NO_COSTS,
) -> Report:
    """The report of a solved plan for `profile` under the rules of `config`.

    `tables`: further ones. `title`: absent, that of a plan that has not run. `costs`: with which the plan was made.
    """
    assert plan.predicted is not None, "only a solved plan predicts"
    how = "traced without a device, nothing has run" if profile.is_fake else f"observed on {profile.device}"
    return Report(
        title=title or f"{profile.model}: a plan within {format_bytes(plan.budget_bytes or 0)}",
        subtitle=f"One step of {profile.batch}; {how}.",
        tiles=tuple(tiles_of(plan, measured)),
        plan=plan,
        played=play(plan, profile, config, link=link, has_gradients=has_gradients, costs=costs),
        sweep=sweep or {},
        others=checkpointed(profile, link=link, has_gradients=has_gradients),
        more_tables=tuple(tables),
        measured=measured,
    )


def document(report: Report) -> dict[str, Any]:
    """The same as plain data, thinned to about a thousand points."""
    played = report.played
    return {
        "title": report.title,
        "subtitle": report.subtitle,
        "figures": [dict(zip(("what", "value", "beside"), tile, strict=True)) for tile in report.tiles],
        "remarks": report.remarks,
        "plan": None if report.plan is None else json.loads(report.plan.to_json()),
        "step": None if played is None else _step_document(played),
        "budgets": sweep_document(report.sweep, None if report.plan is None else report.plan.budget_bytes),
        "by_hand": document_of(report.others),
        "tables": [dict(zip(("title", "caption", "rows"), table, strict=True)) for table in report.tables],
    }


def _step_document(played: Played) -> dict[str, Any]:
    owners = {owner: max(part) for owner, part in zip(OWNERS, played.bytes_by_owner, strict=True) if part}
    stalls = [event for event in played.events if event.lane == "stall"]
    return {
        **played.thinned(_MOST_POINTS),
        "step_seconds": played.step_seconds,
        "num_ticks": len(played.starts),
        "peak_bytes_by_owner": owners,
        "stalls": [{"for": its.name, "start_seconds": its.start, "seconds": its.end - its.start} for its in stalls],
    }


def tiles_of(plan: Plan, measured: Measured) -> Iterator[Tile]:
    """Predicted figures, with measured ones beside them where there are any."""
    predicted = plan.predicted
    assert predicted is not None

    def off(value: float, of: float) -> str:
        return f"{100 * (value / of - 1 if of else 0.0):+.1f} %"

    budget = "no budget" if plan.budget_bytes is None else f"of {format_bytes(plan.budget_bytes)}"
    yield "peak, predicted", format_bytes(predicted.peak_bytes), budget
    if measured.peak_bytes is not None:
        beside = f"{off(measured.peak_bytes, predicted.peak_bytes)} off"
        yield measured_peak(measured, beside)
    floor = "" if predicted.floor_bytes is None else f"floor {format_bytes(predicted.floor_bytes)}"
    yield "everything kept", format_bytes(predicted.plain_peak_bytes), floor
    saved_bytes = predicted.plain_peak_bytes - predicted.peak_bytes
    yield _saved_tile("the plan", saved_bytes, predicted.plain_peak_bytes, "everything kept")
    seconds = predicted.step_seconds
    yield "step, predicted", format_seconds(seconds), f"{off(seconds, predicted.plain_seconds)} to everything kept"
    if measured.step_seconds is not None:
        yield "step, measured", format_seconds(measured.step_seconds), f"{off(measured.step_seconds, seconds)} off"
    waits = format_seconds(predicted.stall_seconds + predicted.recompute_seconds)
    yield "waits and recompute", waits, f"{format_seconds(predicted.stall_seconds)} waits"


def measured_peak(measured: Measured, beside: str = "") -> Tile:
    """A peak without temporaries is compared with nothing."""
    lacks = "temporaries not counted" if measured.is_without_temporaries else beside
    return "peak, measured", format_bytes(measured.peak_bytes or 0), lacks


def _saved_tile(who: str, saved_bytes: int, whole_bytes: int, of_what: str) -> Tile:
    """What was won, and which share of the whole that is."""
    saved_bytes = max(saved_bytes, 0)
    share = saved_bytes / whole_bytes if whole_bytes else 0.0
    return f"saved by {who}", format_bytes(saved_bytes), f"{100 * share:.0f} % of {of_what}"


def saved_tile_of_forwards(who: str, *, saved_bytes: int, held_bytes: int, num_forwards: int) -> Tile:
    """Where no peak was predicted: what autograd would have kept in a forward pass, and what of it did not stay.

    `saved_bytes` (what autograd saved) and `held_bytes` (what of it stayed) are totals of `num_forwards` passes.
    """
    passes = max(num_forwards, 1)
    whole = saved_bytes // passes
    of_what = f"the {format_bytes(whole)} that a forward pass saves"
    return _saved_tile(who, whole - held_bytes // passes, whole, of_what)
