"""The table that shows a plan of `recompute_config` and `swap_config`.

What: one row for each part of a layer that a rule names, with its fate, its bytes, and the rule.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from lowtide.core.fate import Fate
from lowtide.core.plan import Plan
from lowtide.core.text_table import align
from lowtide.mindformers.schema import LayerPlan, Resolution
from lowtide.mindformers.schema.flow import LAYER
from lowtide.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table: one part of one layer."""

    layer: int
    part: str
    """`mlp.mul`; `<layer>` for the layer as a whole."""
    fate: str
    """'recompute' or 'swap'; 'keep' where a rule has no effect."""
    why: str
    nbytes: int | None
    """Bytes that leave the device between forward and backward: freed or moved. None: no step was observed."""
    prefetch: int | None = None
    prefetch_unit: str = "operators"


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePlan:
    """A plan, with the table and the notes that explain it."""

    plan: Plan
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    """Rules that have less effect than one may expect from the file."""


def table(rows: Sequence[Row], width: int | None = None) -> list[str]:
    """Lines of text: a head, and a line for each row; more where a line has at most `width` characters."""
    has_bytes = any(row.nbytes is not None for row in rows)
    cells = [("layer", "op", "fate", *(["bytes"] if has_bytes else []), "why")]
    for row in rows:
        unit = "" if row.prefetch_unit == "operators" else " layer" if row.prefetch == 1 else " layers"
        fate = row.fate if row.prefetch is None else f"{row.fate}, prefetch {row.prefetch}{unit}"
        size = [format_bytes(row.nbytes or 0)] if has_bytes else []
        cells.append((str(row.layer), row.part, fate, *size, row.why))
    return align(cells, numeric=(), width=width)


def layer_sums(rows: Sequence[Row]) -> dict[int, tuple[int, int]]:
    """For each layer that has rows with bytes: (bytes moved, bytes freed). Empty if no step was observed."""
    sums: dict[int, tuple[int, int]] = {}
    for row in rows:
        if row.nbytes is None:
            continue
        moved, freed = sums.get(row.layer, (0, 0))
        is_moved = row.fate == Fate.SWAP.value
        sums[row.layer] = (moved + row.nbytes, freed) if is_moved else (moved, freed + row.nbytes)
    return sums


def rows_without_step(resolution: Resolution) -> tuple[Row, ...]:
    """The rows without bytes: what names and rules alone say."""
    rows = []
    for layer in resolution.layers:
        for part in [LAYER] if layer.full_recompute else layer.recompute_ops:
            rows.append(Row(layer=layer.index, part=part, fate="recompute", why=layer.why[part], nbytes=None))
        for part in layer.comm_recompute_ops:
            why = f"{layer.comm_why[part]} (its collectives are recomputed)"
            rows.append(Row(layer=layer.index, part=part, fate="recompute", why=why, nbytes=None))
        for part, written in layer.swap_ops.items():
            reader = layer.swap_stays.get(part)
            if reader is not None:
                why = f"{layer.why[part]}: '{reader}' reads it and is recomputed"
                rows.append(Row(layer=layer.index, part=part, fate="keep", why=why, nbytes=None))
                continue
            distance = prefetch_of(written)
            why = layer.why[part]
            unit = resolution.prefetch_unit
            row = Row(layer=layer.index, part=part, fate="swap", why=why, nbytes=None, prefetch=distance)
            rows.append(dataclasses.replace(row, prefetch_unit=unit))
        for part, why in layer.swap_lost.items():
            rows.append(Row(layer=layer.index, part=part, fate="keep", why=f"not swapped: {why}", nbytes=None))
    return tuple(rows)


def row_of(layer: LayerPlan, part: str, fate: Fate, nbytes: int, kept: str | None) -> Row:
    """The row of a part that a rule names. `kept`: why some of its bytes stay although the rule names them."""
    why = layer.why[part]
    if nbytes == 0:
        why = f"{why}: {kept or 'backward reads nothing of it'}"
        return Row(layer=layer.index, part=part, fate="keep", why=why, nbytes=0)
    if kept:
        why = f"{why}; a part stays: {kept}"
    prefetch = prefetch_of(layer.swap_ops[part]) if fate is Fate.SWAP else None
    return Row(layer=layer.index, part=part, fate=fate.value, why=why, nbytes=nbytes, prefetch=prefetch)


def prefetch_of(written: int | str) -> int:
    """Operators ahead of the first reader; upstream's word `Auto` is 1."""
    return written if isinstance(written, int) else 1
