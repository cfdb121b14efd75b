"""Schedules as the CSV text of `torch.distributed.pipelining`: one line for each rank, one cell for each action.

What: `to_csv` writes what torch's loader reads (`compute_only` without transfers, `compute_comms` with them);
`from_csv` reads both. A cell is `[stage][kind][micro-batch]`, such as `3B0` or `1SEND_F4`; a pair is
`(0F7;7B3)OVERLAP_F_B`. Empty cells, by which torch aligns ranks in time, are left out.

Not covered: FSDP. Torch's lowered schedules say when parameters are gathered (UNSHARD, RESHARD) and gradients are
reduced (REDUCE_GRAD); those cells are left out, because here whoever runs the schedule decides that.
"""

from __future__ import annotations

import csv
import io
import re

from lowtide.errors import ConfigError
from lowtide.pipeline.schedule import PAIR, Action, AnyAction, Kind, Pair, Schedule

_KINDS = "|".join(sorted(Kind, key=len, reverse=True))
_ACTION = re.compile(rf"(\d+)({_KINDS})(\d+)")
_PAIR = re.compile(rf"\(([^;()]*);([^;()]*)\){PAIR}")
_OF_FSDP = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD)")


def to_csv(schedule: Schedule) -> str:
    """Lines end as in torch's files."""
    text = io.StringIO()
    csv.writer(text).writerows(schedule.actions)
    return text.getvalue()


def from_csv(text: str, *, source: str, name: str) -> Schedule:
    """The schedule in this text. `source` is for errors: the file that the text comes from.

    Which rank a stage lives on is read off its forwards. What the text leaves out (a stage without any forward, a
    transfer without its other end) is for `verify` to find.
    """
    rows = []
    for line, cells in enumerate(csv.reader(io.StringIO(text)), start=1):
        row = []
        for column, cell in enumerate(cells, start=1):
            word = cell.strip()
            if word and not _OF_FSDP.fullmatch(word):
                row.append(_parsed(word, f"{source}: line {line}, cell {column}"))
        rows.append(tuple(row))
    homes = {
        action.stage: rank
        for rank, row in enumerate(rows)
        for every in row
        for action in every.parts
        if action.kind is Kind.FORWARD
    }
    if sorted(homes) != list(range(len(homes))) or not homes:
        missing = next(stage for stage in range(len(homes) + 1) if stage not in homes)
        raise ConfigError(f"{source}: no rank has a forward of stage {missing}")
    most = max(action.micro_batch for row in rows for every in row for action in every.parts)
    return Schedule(name, most + 1, tuple(homes[stage] for stage in range(len(homes))), tuple(rows))


def _parsed(word: str, where: str) -> AnyAction:
    if found := _PAIR.fullmatch(word):
        forward, backward = (_single(part.strip(), where) for part in found.groups())
        return Pair(forward, backward)
    return _single(word, where)


def _single(word: str, where: str) -> Action:
    found = _ACTION.fullmatch(word)
    if not found:
        raise ConfigError(
            f"{where}: '{word}' is no action; one reads [stage][kind][micro-batch] with a kind of "
            f"{', '.join(Kind)}, or (0F7;7B3){PAIR}"
        )
    stage, kind, micro_batch = found.groups()
    return Action(Kind(kind), int(stage), int(micro_batch))
