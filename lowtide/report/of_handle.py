"""The report of a model that trains: what its handle planned, beside what its counters say.

What: `report_of_handle` reads an `Autopilot` or a `Tide`; it changes neither. A handle with a budget has the whole step
on the clock. One that follows rules predicts nothing, and its report has the plan and the figures.
Cost: one run of the timeline. Not covered: other shapes than those in force.
"""

from __future__ import annotations

from lowtide.core.plan import Plan
from lowtide.errors import ConfigError
from lowtide.planner.host_costs import HOST_COSTS
from lowtide.report.parts import Measured, Table, Tile
from lowtide.report.report import Report, report_of_plan, saved_tile_of_forwards
from lowtide.report.story import story_of, tables_of
from lowtide.runtime.autopilot.autopilot import Autopilot
from lowtide.runtime.autopilot.plan_source import BudgetSource
from lowtide.runtime.saved.stats import Stats
from lowtide.runtime.session.tide import Tide
from lowtide.units import format_bytes, format_seconds


def report_of_handle(handle: Tide | Autopilot) -> Report:
    """Raises ConfigError before the first step, which shows what there is to report."""
    plan, stats = handle.plan, handle.stats
    tide = handle.tide if isinstance(handle, Autopilot) else handle
    audited_bytes = 0 if plan is None else plan.audited_peak_bytes or 0
    if plan is None or not (stats.num_forwards or audited_bytes):  # an audit starts the totals anew
        raise ConfigError("lowtide.write_report: no step has run under this handle yet; run one, then report")
    name = type(handle.model).__name__
    if isinstance(handle, Autopilot) and isinstance(handle.source, BudgetSource):
        assert handle.profile is not None
        assert handle.link is not None
        return report_of_plan(
            plan,
            handle.profile,
            handle.source.config,
            link=handle.link,
            has_gradients=handle.has_gradients,
            costs=HOST_COSTS,
            measured=Measured(
                peak_bytes=max(stats.peak_device_bytes, audited_bytes),
                is_without_temporaries=not audited_bytes and handle.engine.device_peak_bytes() is None,
                stall_seconds=stats.stall_seconds,
                curve=None if tide is None else tide.audited_curve,
            ),
            title=f"{name}: a run within {format_bytes(plan.budget_bytes or 0)}",
            tables=(_figures(stats), *tables_of(story_of(handle))),
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
