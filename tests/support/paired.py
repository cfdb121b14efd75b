"""A schedule in which forwards and backwards that meet are pairs, for tests of what a pair does."""

from __future__ import annotations

from dataclasses import replace

from lowtide.pipeline.schedule import Action, AnyAction, Kind, Pair, Schedule


def paired(schedule: Schedule) -> Schedule:
    """The same schedule, in which a forward and the full backward right after it are a pair where they can be one.

    `dualpipev` has such two on the last rank, where its main part begins; apart they are earlier by what their weight
    gradients take, so that a pair pays where these are put off (`WeightGradients(most_kept=...)`). Other schedules may
    stand still then (`gpipe` does), which `verify` says.
    """
    rows = []
    for row in schedule.actions:
        made: list[AnyAction] = []
        for each in row:
            before = made[-1] if made else None
            if (
                isinstance(each, Action)
                and each.kind is Kind.BACKWARD
                and isinstance(before, Action)
                and before.kind is Kind.FORWARD
                and before.makes not in schedule.needs(each)
            ):
                made[-1] = Pair(before, each)
            else:
                made.append(each)
        rows.append(tuple(made))
    return replace(schedule, actions=tuple(rows))
