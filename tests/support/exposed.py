"""Which exchanges of a pair nothing has hidden."""

from __future__ import annotations

from collections.abc import Iterable

from lowtide.pipeline.overlap import OTHER, Event


def exposed(log: Iterable[Event]) -> list[Event]:
    """The `issue` of each exchange for which no segment of the other half lies between issue and wait."""
    open_issues: dict[tuple[int, str, int], Event] = {}
    hidden: set[tuple[int, str, int]] = set()
    found = []
    for event in log:
        key = (event.pair, event.half, event.number)
        if event.kind == "issue":
            open_issues[key] = event
        elif event.kind == "segment":
            hidden.update(each for each in open_issues if each[:2] == (event.pair, OTHER[event.half]))
        elif event.kind == "wait":
            issue = open_issues.pop(key)
            if key not in hidden:
                found.append(issue)
    assert not open_issues, f"nobody waited for {sorted(open_issues)}"
    return found
