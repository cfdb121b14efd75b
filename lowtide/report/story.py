"""What an autopilot decided in a run, and how its races went, as plain rows.

What: `story_of` reads a handle; `tables_of` makes tables of it. events.json has it as data.
Cost: nothing. Not covered: Python's view of it, `tide.events`.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from lowtide.errors import ConfigError
from lowtide.report.parts import Table
from lowtide.runtime.autopilot.autopilot import Autopilot
from lowtide.runtime.autopilot.contest import Standing
from lowtide.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """Rows of text, and races as data."""

    events: tuple[tuple[str, ...], ...] = ()
    races: tuple[tuple[Standing, ...], ...] = ()
    """Each with its winner first."""


def story_of(handle: Autopilot) -> Story:
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
    return Story(events=tuple(events), races=tuple(handle.races))


def tables_of(story: Story) -> list[Table]:
    """One of all decisions, and one for each race. None where nothing happened."""
    tables = []
    if story.events:
        head = ("after forward pass", "why", "budget for the solver", "plan", "took")
        caption = "Each time that the plan was made, corrected, or raced against others on real steps."
        tables.append(Table(title="What happened", caption=caption, rows=(head, *story.events)))
    for number, race in enumerate(story.races, start=1):
        which = f", number {number}" if len(story.races) > 1 else ""
        tables.append(
            Table(
                title=f"The race{which}",
                caption="Plans that fit took turns on real steps, all with the same bits; the fastest stays. Times are "
                "lower medians of the steps that count: a plan's first ones do not.",
                rows=(
                    ("plan", "predicted", "measured", "to the winner", "steps that count", ""),
                    *(_row(each, race[0]) for each in race),
                ),
            )
        )
    return tables


def _row(each: Standing, winner: Standing) -> tuple[str, ...]:
    measured, to_winner = "-", "-"
    if each.seconds is not None:
        measured = format_seconds(each.seconds)
        to_winner = f"{each.seconds / winner.seconds:.2f}" if winner.seconds else "-"
    result = "stays" if each is winner else "out: it did not fit, or failed" if each.is_out else ""
    return (each.name, format_seconds(each.predicted_seconds), measured, to_winner, str(each.num_counted), result)


def story_to_json(story: Story) -> str:
    """As text; `story_from_json` gives back an equal one."""
    return json.dumps(dataclasses.asdict(story)) + "\n"


def story_from_json(text: str) -> Story:
    """What `story_to_json` wrote. Raises ConfigError for anything else."""
    try:
        content = json.loads(text)
        events = tuple(tuple(str(cell) for cell in row) for row in content["events"])
        races = tuple(tuple(Standing(**each) for each in race) for race in content["races"])
        if any(len(row) != 5 for row in events) or not all(races):
            raise ValueError
        return Story(events=events, races=races)
    except (KeyError, TypeError, ValueError, RecursionError):
        raise ConfigError("not a list of events that lowtide wrote") from None
