"""The plans of a run and why they were made, as plain rows.

What: `history_of` reads a handle; `tables_of` makes a table of it. events.json has it as data.
Cost: nothing. Not covered: Python's view of it, `tide.events`.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.report.elements import Table
from lowtide.runtime.session.tides import Tides
from lowtide.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Rows of text."""

    events: tuple[tuple[str, str, str, str, str], ...]


def history_of(handle: Tides) -> History:
    events = [
        (
            str(event.forward),
            event.why,
            "-" if event.budget_bytes is None else format_bytes(event.budget_bytes),
            event.digest,
            format_seconds(event.seconds),
        )
        for event in handle.events
    ]
    return History(events=tuple(events))


def tables_of(story: History) -> list[Table]:
    """One of all decisions. None where nothing happened."""
    if not story.events:
        return []
    head = ("after forward pass", "why", "budget for the solver", "plan", "took")
    caption = "Each time that the plan was made or corrected."
    return [Table(title="What happened", caption=caption, rows=(head, *story.events))]
