"""How layers are dealt to pipeline stages, and what a count per stage means.

Every (chunk, stage) cell of the grid holds `num_layers // (stages * chunks)` layers plus its `offset`. Layers are laid
out chunk by chunk, inside a chunk stage by stage. A table of counts has the shape of the grid; a cell's count selects
that many layers from the first layer of the cell.

The grid needs no devices, so a configuration written for 16 stages keeps its meaning on one.

`zero_bubble_v` is a pipeline whose second chunk comes back: the stage that has the first layers has the last ones,
too. A file writes both rows of a table by stage; here, as in upstream's newer code, the second row is in the order of
layers, which is the reverse.
Not covered: `start_stage`, which only shifts the numbers of stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lowtide.config.source import shown
from lowtide.mindformers.schema.issues import Issues

MOST_LAYERS = 4096
"""What no model has more of, nor of stages and chunks together. Each layer costs a millisecond or so."""
Table = list[list[int]]
"""`[chunk][stage]`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Sizes and first layers of all (chunk, stage) cells."""

    num_layers: int
    sizes: tuple[tuple[int, ...], ...]
    starts: tuple[tuple[int, ...], ...]
    comes_back: bool = False
    """The second chunk of a stage is that of the stage at the other end of the row."""

    @property
    def num_chunks(self) -> int:
        return len(self.sizes)

    @property
    def num_stages(self) -> int:
        return len(self.sizes[0])

    def table(self) -> Table:
        """All layers: the sizes themselves."""
        return [list(row) for row in self.sizes]

    def zeros(self) -> Table:
        return [[0] * self.num_stages for _ in self.sizes]

    def accumulated(self) -> Table:
        """The layer after the last one of each cell."""
        return [
            [start + size for start, size in zip(*rows, strict=True)]
            for rows in zip(self.starts, self.sizes, strict=True)
        ]

    def stage_total(self, stage: int) -> int:
        return sum(row[stage] for row in self.sizes)

    def locate(self, layer: int) -> tuple[int, int]:
        """(chunk, stage) of a layer."""
        chunk, column = self.cell(layer)
        return chunk, self.num_stages - 1 - column if self.comes_back and chunk == 1 else column

    def cell(self, layer: int) -> tuple[int, int]:
        """(row, column) of a layer in a table."""
        for chunk, row in enumerate(self.accumulated()):
            for column, end in enumerate(row):
                if layer < end:
                    return chunk, column
        raise AssertionError(f"layer {layer} is outside the grid {self.sizes}")

    def selects(self, table: Sequence[Sequence[int]], layer: int) -> bool:
        """Does a table of counts select this layer? A cell that the table does not have selects none."""
        chunk, stage = self.cell(layer)
        count = table[chunk][stage] if chunk < len(table) and stage < len(table[chunk]) else 0
        return layer - self.starts[chunk][stage] < count

    def deal(self, counts: Sequence[int]) -> Table:
        """One count per stage, dealt to the chunks of the stage in turn; a full chunk is passed over."""
        table = self.zeros()
        for stage, count in enumerate(counts):
            left = min(max(count, 0), self.stage_total(stage))
            while left:
                for chunk, row in enumerate(table):
                    if left and row[stage] < self.sizes[chunk][stage]:
                        row[stage] += 1
                        left -= 1
        return table


def make_grid(
    num_layers: int, num_stages: int, num_chunks: int, offset: object, issues: Issues, *, zero_bubble_v: bool = False
) -> Grid:
    """The grid, or a refusal that names what does not add up."""
    named = (("num_layers", num_layers), ("pipeline_stage", num_stages), ("pp_interleave_num", num_chunks))
    for name, value in named:
        if not _is_int(value) or value < 1:
            issues.refuse(name, f"must be an integer of at least 1, not {shown(value)}")
        if value > MOST_LAYERS:
            issues.refuse(name, f"must be at most {MOST_LAYERS}, not {shown(value)}")
    cells = num_stages * num_chunks
    if cells > MOST_LAYERS:
        issues.refuse("pp_interleave_num", f"makes {cells} chunks on {num_stages} stages; the most is {MOST_LAYERS}")
    once, depth, full = _offsets(offset, num_stages, num_chunks, issues)
    written = sum(map(sum, once))
    remainder = num_layers % cells
    if written != remainder:
        issues.refuse(
            "offset",
            f"adds up to {written}, but {num_layers} layers on {num_stages} {'stage' if num_stages == 1 else 'stages'} "
            f"of {num_chunks} {'chunk' if num_chunks == 1 else 'chunks'} leave {remainder} over; make it add up to "
            f"{remainder}",
        )
    average = num_layers // cells
    if zero_bubble_v and num_chunks != 2:
        issues.refuse(
            "pp_interleave_num", f"must be 2 with zero_bubble_v, which has 2 chunks a stage, not {num_chunks}"
        )
    rows = [list(row) for row in full]
    if zero_bubble_v:
        rows[1].reverse()
    sizes = tuple(tuple(average + extra for extra in row) for row in rows)
    _check_sizes(sizes, issues)
    total = sum(map(sum, sizes))
    if total != num_layers:
        each = "chunk" if depth else "stage"
        issues.tolerate("offset", "offset_repeated", each=each, total=total, num_layers=num_layers)
    starts, at = [], 0
    for row in sizes:
        starts.append(tuple(at + sum(row[:stage]) for stage in range(num_stages)))
        at += sum(row)
    return Grid(num_layers=num_layers, sizes=sizes, starts=tuple(starts), comes_back=zero_bubble_v)


def _offsets(offset: object, num_stages: int, num_chunks: int, issues: Issues) -> tuple[Table, int, Table]:
    """As written, each number once: this is what has to add up; how deep that is; and for each cell."""
    if isinstance(offset, int) and not isinstance(offset, bool):
        return [[offset]], 0, [[offset] * num_stages] * num_chunks
    if isinstance(offset, list | tuple) and offset and all(_is_int(item) for item in offset):
        if len(offset) != num_stages:
            issues.refuse("offset", f"has {len(offset)} numbers; write one for each of the {num_stages} stages")
        return [list(offset)], 1, [list(offset) for _ in range(num_chunks)]
    if isinstance(offset, list | tuple) and offset and all(isinstance(row, list | tuple) for row in offset):
        rows = [list(row) for row in offset]
        if len(rows) != num_chunks or any(len(row) != num_stages for row in rows):
            issues.refuse("offset", f"must have {num_chunks} rows (chunks) of {num_stages} numbers (stages)")
        if all(_is_int(item) for row in rows for item in row):
            return rows, 2, rows
    issues.refuse("offset", f"must be an integer, a list per stage, or lists [chunk][stage], not {offset!r}")


def _check_sizes(sizes: tuple[tuple[int, ...], ...], issues: Issues) -> None:
    last_chunk, last_stage = len(sizes) - 1, len(sizes[0]) - 1
    for chunk, row in enumerate(sizes):
        for stage, size in enumerate(row):
            if size < 0:
                issues.refuse("offset", f"gives stage {stage} of chunk {chunk} {size} layers; make it larger there")
            if size == 0 and (chunk, stage) not in ((0, 0), (last_chunk, last_stage)):
                issues.tolerate("offset", "stage_without_layers", stage=stage, chunk=chunk)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
