"""Rows of a record as a table: which columns, in which order, and how a number reads.

What: units are read off the keys (`_bytes`, `_seconds`, `_percent`, `_share`, `_per_second`), and `X_median` with its
`X_min` and `X_max` is one column with its spread. Known columns come in a fixed order, the ratio to plain first; others
follow as they are. `markdown_table` is what RESULTS.md has, `text_table` what a benchmark prints.
Cost: none. Not covered: choosing rows (report.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lowtide.core.text_table import align
from lowtide.units import format_bytes, format_seconds

Row = Mapping[str, Any]
_NAMES = ("model", "num_devices", "title", "method", "piece", "draw", "plan", "setting")
_NUMBERS = ("ratio_median", "peak_bytes", "peak_resident_bytes", "seconds_median", "copied_bytes", "stall_seconds",
            "pinned_bytes")  # fmt: skip
_LAST = ("is_equal", "package", "outcome", "error")
_SAID_BY_TITLE = ("method", "setting")
_LABELS = {
    "title": "method",
    "ratio_median": "x plain",
    "seconds_median": "seconds a step",
    "peak_bytes": "peak",
    "peak_resident_bytes": "peak resident",
    "is_equal": "equal",
    "flops_per_second": "products",
    "bytes_per_second": "copies",
}
_UNITS = ("_bytes_per_second", "_per_second", "_bytes", "_seconds", "_percent", "_share")
_NOTHING = "-"


@dataclass(frozen=True, slots=True)
class Column:
    """One column: where its numbers are and how they read."""

    key: str
    label: str
    is_text: bool
    read: Callable[[Row], str]


def columns(rows: Sequence[Row]) -> list[Column]:
    """The columns that these rows need: a key that no row has a value for is left out."""
    keys = [key for key in dict.fromkeys(key for row in rows for key in row) if _has_value(rows, key)]
    stems = [key.removesuffix("_median") for key in keys if key.endswith("_median")]
    folded = {f"{stem}_{end}" for stem in stems for end in ("min", "max")}
    keys = [key for key in keys if key not in folded]
    if "title" in keys:  # the two in words
        keys = [key for key in keys if key not in _SAID_BY_TITLE]
    names, numbers, last = ([key for key in known if key in keys] for known in (_NAMES, _NUMBERS, _LAST))
    rest = [key for key in keys if key not in (*names, *numbers, *last)]
    # Words say what a row is, also those that nobody knows here: they stand before its numbers.
    words = [key for key in rest if _is_words(rows, key)]
    rest = [key for key in rest if key not in words]
    return [_column(rows, key) for key in (*names, *words, *numbers, *rest, *last)]


def markdown_table(rows: Sequence[Row], chosen: Sequence[Column] | None = None) -> str:
    """The rows as a Markdown table; numbers flush right."""
    chosen = columns(rows) if chosen is None else chosen
    lines = [
        [column.label for column in chosen],
        ["---" if column.is_text else "---:" for column in chosen],
        *([column.read(row).replace("|", "\\|") for column in chosen] for row in rows),
    ]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def text_table(rows: Sequence[Row]) -> str:
    """The rows as columns of plain text."""
    if not rows:
        return "no rows"
    chosen = columns(rows)
    numeric = tuple(place for place, column in enumerate(chosen) if not column.is_text)
    cells = [tuple(column.label for column in chosen)]
    cells += [tuple(column.read(row) for column in chosen) for row in rows]
    return "\n".join(align(cells, numeric=numeric))


def label_of(key: str) -> str:
    """`predicted_peak_bytes` -> `predicted peak`."""
    if key in _LABELS:
        return _LABELS[key]
    key = key.removesuffix("_median").removeprefix("is_")
    for unit in _UNITS:
        if key.endswith(unit) and key != unit:
            return key.removesuffix(unit).replace("_", " ")
    return key.removeprefix("num_").replace("_", " ")


def value_text(key: str, value: Any) -> str:
    """One value, with the unit that its key names."""
    if value is None or value == "":
        return _NOTHING
    if isinstance(value, bool):
        return "yes" if value else "NO" if key == "is_equal" else "no"
    if isinstance(value, str):
        return " ".join(value.split())
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {value_text(name, inner)}" for name, inner in value.items())
    if isinstance(value, Sequence):
        return ", ".join(value_text(key, inner) for inner in value)
    return _number_text(key, value)


def _number_text(key: str, value: float) -> str:
    if "bytes_per_second" in key:
        return f"{value / 1e9:.1f} GB/s"
    if "flops" in key:
        return f"{value / 1e9:,.0f} GFLOP/s"
    if "bytes" in key and not key.endswith("per_parameter"):
        return format_bytes(int(value))
    if "seconds" in key:
        return f"{value * 1e6:.3g} µs" if 0 < value < 1e-4 else format_seconds(value)
    if "percent" in key:
        return f"{value:.2f} %"
    if "share" in key:
        return f"{value:.1%}".replace("%", " %")
    if key.startswith("tau"):
        return f"{value:.2f}"
    if isinstance(value, int):
        return f"{value:,}"
    if "ratio" in key:
        return f"{value:.3f}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _column(rows: Sequence[Row], key: str) -> Column:
    return Column(key, label_of(key), _is_words(rows, key), lambda row: _cell(row, key))


def _cell(row: Row, key: str) -> str:
    text = value_text(key, row.get(key))
    stem = key.removesuffix("_median")
    least, most = row.get(f"{stem}_min"), row.get(f"{stem}_max")
    if stem == key or least is None or most is None:
        return text
    return f"{text} ({value_text(key, least)} - {value_text(key, most)})"


def _has_value(rows: Sequence[Row], key: str) -> bool:
    return any(row.get(key) is not None for row in rows)


def _is_words(rows: Sequence[Row], key: str) -> bool:
    values = [row[key] for row in rows if row.get(key) is not None]
    return key == "is_equal" or any(isinstance(value, str) for value in values)
