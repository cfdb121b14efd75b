"""Counts of layers: `true`, a number for each stage, or a table `[chunk][stage]`, as one table.

Where a form is refused or read otherwise than it looks, the message says so (issues.py).
Not covered: layer indices, which numbers are while swap is on (recompute.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

from lowtide.config.source import join_path
from lowtide.mindformers.schema.grid import Grid, Table
from lowtide.mindformers.schema.issues import Issues


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Reads counts for one grid."""

    grid: Grid
    issues: Issues

    def table(self, value: Any, path: str) -> Table:
        """The table of a value in any form."""
        if isinstance(value, bool):
            return self.grid.table() if value else self.grid.zeros()
        if not isinstance(value, list | tuple):
            self._illegal(path, value)
        if self.grid.comes_back:
            value = self._turned(value, path)
        if all(isinstance(item, int) for item in value):
            return self._per_stage(value, path)
        if all(isinstance(item, str) for item in value):
            self.issues.tolerate(
                path,
                "is a list of names where layers are counted",
                meaning="every layer, as upstream reads it",
                fix="write true, a count per stage, or lists [chunk][stage]",
            )
            return self.grid.table()
        if all(isinstance(row, bool | list | tuple) for row in value):
            return self._per_cell(value, path)
        self._illegal(path, value)

    def _turned(self, value: Any, path: str) -> Any:
        """With zero_bubble_v, the table with its second row in the order of layers. Upstream turns it round before it
        looks at it, and crashes on whatever has no second row."""
        if all(isinstance(item, str) for item in value):
            return value
        if len(value) < 2 or not isinstance(value[1], list | tuple):
            self.issues.refuse(
                path,
                f"must be true, false or 2 rows [chunk][stage] with zero_bubble_v, whose second row comes back, not "
                f"{value!r}",
            )
        return [value[0], value[1][::-1], *value[2:]]

    def _per_stage(self, value: Any, path: str) -> Table:
        num_stages = self.grid.num_stages
        if len(value) > num_stages:
            self.issues.refuse(path, f"has {len(value)} counts for {_of(num_stages, 'stage')}; write one per stage")
        if isinstance(value, tuple) and any(isinstance(item, bool) for item in value):
            self._tuple(path, value)
        if value and self.grid.num_chunks > 1 and all(isinstance(item, bool) for item in value):
            self.issues.tolerate(
                path,
                f"is a list of {_of(len(value), 'boolean')}, which may mean stages or chunks",
                meaning="read as stages, as upstream does",
                fix="write lists [chunk][stage]",
            )
        counts = []
        for stage, item in enumerate(value):
            total = self.grid.stage_total(stage)
            where = join_path(path, stage)
            if isinstance(item, bool):
                counts.append(total if item else 0)
                continue
            if item < 0:
                self.issues.tolerate(where, f"asks for {item} layers", meaning="read as 0", fix="write 0 or more")
            elif item > total:
                self._clipped(where, item, total)
            counts.append(item)
        return self.grid.deal(counts)

    def _per_cell(self, value: Any, path: str) -> Table:
        num_chunks, num_stages = self.grid.num_chunks, self.grid.num_stages
        is_short = len(value) < num_chunks
        table: Table = []
        if len(value) > num_chunks:
            self.issues.refuse(path, f"has {len(value)} rows for {_of(num_chunks, 'chunk')}; write one per chunk")
        if any(isinstance(row, tuple) and row for row in value) or (
            isinstance(value, tuple) and any(isinstance(row, bool) for row in value)
        ):
            self._tuple(path, value)
        for chunk, row in enumerate(value):
            where = join_path(path, chunk)
            sizes = self.grid.sizes[chunk]
            if isinstance(row, bool):
                table.append(list(sizes) if row else [0] * num_stages)
                continue
            if len(row) > num_stages:
                self.issues.refuse(where, f"has {len(row)} counts for {_of(num_stages, 'stage')}; write one per stage")
            is_short = is_short or len(row) < num_stages
            cells = enumerate(zip(row, sizes, strict=False))
            table.append([self._cell(item, size, join_path(where, stage)) for stage, (item, size) in cells])
        if is_short:
            self.issues.tolerate(
                path,
                f"is smaller than {_of(num_chunks, 'chunk')} of {_of(num_stages, 'stage')}",
                meaning="what is missing counts as 0",
                fix=f"write {num_chunks} rows of {num_stages} counts",
            )
        return table

    def _cell(self, item: Any, size: int, path: str) -> int:
        if isinstance(item, bool):
            return size if item else 0
        if not isinstance(item, int):
            self._illegal(path, item)
        if item < 0:
            self.issues.tolerate(path, f"asks for {item} layers", meaning="selects none", fix="write 0 or more")
        elif item > size:
            self._clipped(path, item, size)
        return min(item, size)

    def check_shared(self, value: Any, path: str) -> None:
        """Upstream rewrites one table in place for each default op, and refuses its own result for the second one."""
        if not isinstance(value, list | tuple) or not any(isinstance(row, list | tuple) for row in value):
            return
        rows = [(row, sizes) for row, sizes in zip(value, self.grid.sizes, strict=False)]
        if any(
            isinstance(row, bool)
            or any(isinstance(item, bool) or (isinstance(item, int) and item > size) for item, size in zip(row, sizes))
            for row, sizes in rows
            if isinstance(row, bool | list | tuple)
        ):
            self.issues.tolerate(
                path,
                "has true, false or too large a count in a table, which upstream refuses where it names no ops",
                meaning="read as for named ops",
                fix="write counts that fit, or name the ops",
            )

    def _clipped(self, path: str, count: int, size: int) -> None:
        self.issues.warn(path, f"asks for {_of(count, 'layer')} of {size}; read as {size}")

    def _tuple(self, path: str, value: Any) -> None:
        self.issues.tolerate(
            path,
            f"is written with tuples, {value!r}, which upstream stumbles over",
            meaning="read as lists",
            fix="write lists",
        )

    def _illegal(self, path: str, value: Any) -> NoReturn:
        hint = ""
        if isinstance(value, str) and value.startswith("("):
            hint = "; a tuple cannot be written in YAML, use [ ]"
        elif value is None:
            hint = "; write false to switch it off"
        elif isinstance(value, int):
            hint = f"; write [{value}] for a count per stage"
        forms = "true, false, a count per stage such as [2, 1], or counts [chunk][stage] such as [[2, 1], [1, 0]]"
        self.issues.refuse(path, f"must be {forms}, not {value!r}{hint}")


def as_logged_by_upstream(value: Any, table: Table) -> str:
    """Upstream works on the table as it was written: a tuple stays one, and `true` becomes a row of numpy's."""
    is_rows = isinstance(value, list | tuple) and any(isinstance(row, list | tuple) for row in value)
    if not is_rows or not (isinstance(value, tuple) or any(row is True for row in value)):
        return ""
    rows = [
        f"array({counts}, dtype=int32)" if row is True else str(counts)
        for row, counts in zip(value, table, strict=False)
    ]
    text = ", ".join(rows)
    return f"({text})" if isinstance(value, tuple) else f"[{text}]"


def _of(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
