"""The table that shows a plan of `recompute_config` and `swap_config`.

What: one row for each part of a layer that a rule names, with its fate, its bytes, and the rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from lowtide.core.fate import Fate
from lowtide.core.plan import Plan
from lowtide.core.text_table import align
from lowtide.mindformers.schema import LayerPlan, Resolution
from lowtide.mindformers.schema.names import LAYER
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
        said = [(part, "recompute", layer.why[part]) for part in _recomputed(layer)]
        for part in layer.comm_recompute_ops:
            said.append((part, "recompute", f"{layer.comm_why[part]} (its collectives are recomputed)"))
        for part in layer.swap_ops:
            reader = layer.swap_stays.get(part)
            stays = "" if reader is None else f": '{reader}' reads it and is recomputed"
            said.append((part, "keep" if stays else "swap", f"{layer.why[part]}{stays}"))
        said += [(part, "keep", f"not swapped: {why}") for part, why in layer.swap_lost.items()]
        rows += [_row(resolution, layer, cells) for cells in said]
    return tuple(rows)


def rows_of_step(
    resolution: Resolution,
    sizes: Mapping[tuple[int, str, Fate], int],
    kept: Mapping[tuple[int, str], str],
    collectives: Mapping[tuple[int, str], tuple[int, str]],
) -> Iterator[Row]:
    """The rows with the bytes of an observed step, by layer and part: `sizes` of what has each fate, `kept` why some
    stay although a rule names them, `collectives` bytes and words of what is issued again."""
    for layer in resolution.layers:
        said: list[tuple[tuple[str, str, str], int]] = []
        named = [(part, Fate.RECOMPUTE) for part in _recomputed(layer)] + [(part, Fate.SWAP) for part in layer.swap_ops]
        for part, fate in named:
            nbytes, why = sizes.get((layer.index, part, fate), 0), kept.get((layer.index, part))
            if nbytes:
                text = layer.why[part] + (f"; a part stays: {why}" if why else "")
                said.append(((part, fate.value, text), nbytes))
            else:
                said.append(((part, "keep", f"{layer.why[part]}: {why or 'backward reads nothing of it'}"), 0))
        for part in layer.comm_recompute_ops:
            if (layer.index, part) in collectives:
                nbytes, words = collectives[layer.index, part]
                said.append(((part, "recompute", f"{layer.comm_why[part]} ({words})"), nbytes))
        said += [((part, "keep", f"not swapped: {why}"), 0) for part, why in layer.swap_lost.items()]
        yield from (_row(resolution, layer, cells, nbytes) for cells, nbytes in said)


def _recomputed(layer: LayerPlan) -> list[str]:
    return [LAYER] if layer.full_recompute else layer.recompute_ops


def _row(resolution: Resolution, layer: LayerPlan, said: tuple[str, str, str], nbytes: int | None = None) -> Row:
    part, fate, why = said
    prefetch = prefetch_of(layer.swap_ops[part]) if fate == "swap" else None
    unit = resolution.prefetch_unit
    return Row(layer=layer.index, part=part, fate=fate, why=why, nbytes=nbytes, prefetch=prefetch, prefetch_unit=unit)


def prefetch_of(written: int | str) -> int:
    """Operators ahead of the first reader; upstream's word `Auto` is 1."""
    return written if isinstance(written, int) else 1
