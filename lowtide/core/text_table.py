"""Text in columns, long lines broken between words, and the small words of tables.

What: `align` makes lines of a table from its cells; `wrapped` breaks lines that are longer than the terminal that they
are printed to; `runs` and `layers_label` put equal layers into one row.
Cost: linear in the cells. Not covered: words longer than the width, which stay whole; characters that are two columns
wide.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Hashable, Iterable, Sequence

Cells = Sequence[tuple[str, ...]]

_UNIT = re.compile(r"(?<=\d) (?=(?:[KMGT]?i?B|ms|µs|s|%)(?![^\s;:,.)]))")
"""The blank between a number and its unit: no line is broken there."""
_NO_BREAK = "\0"


def align(cells: Cells, *, numeric: tuple[int, ...]) -> list[str]:
    """One line for each row, the head first. Columns are two blanks apart; the `numeric` ones are flush right."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        padded = (
            text.rjust(wide) if column in numeric else text.ljust(wide)
            for column, (text, wide) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join(padded).rstrip())
    return lines


def wrapped(lines: Iterable[str], width: int | None) -> list[str]:
    """The lines, those that are longer than `width` broken between words, but not between a number and its unit. What
    follows a break is indented by four blanks more than its line. None: no line is broken."""
    found: list[str] = []
    for line in lines:
        if width is None or len(line) <= width:
            found.append(line)
            continue
        start = line[: len(line) - len(line.lstrip())]
        parts = textwrap.wrap(
            _UNIT.sub(_NO_BREAK, line.strip()),
            width,
            initial_indent=start,
            subsequent_indent=f"{start}    ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        found += [part.replace(_NO_BREAK, " ") for part in parts]
    return found


def runs(layers: Sequence[str], keys: Sequence[Hashable]) -> list[tuple[int, int]]:
    """Inclusive index ranges of neighbours with equal keys and names that count up: `h.3`, `h.4`."""
    runs: list[tuple[int, int]] = []
    for index, key in enumerate(keys):
        if runs and keys[runs[-1][0]] == key and _follows(layers[index - 1], layers[index]):
            runs[-1] = (runs[-1][0], index)
        else:
            runs.append((index, index))
    return runs


def _follows(before: str, after: str) -> bool:
    stem, _, number = after.rpartition(".")
    return number.isdecimal() and before == f"{stem}.{int(number) - 1}"


def layers_label(layers: Sequence[str], first: int, last: int) -> str:
    """`layers 2-5`, or with its stem where there are several kinds."""
    stem, _, number = layers[first].rpartition(".")
    if not number.isdecimal():
        return layers[first]
    is_only_stem = all(layer.rpartition(".")[0] == stem for layer in layers)
    numbers = number if first == last else f"{number}-{layers[last].rpartition('.')[2]}"
    if not is_only_stem:
        return f"{stem}.{numbers}"
    return f"layer {numbers}" if first == last else f"layers {numbers}"


def plural(word: str, count: int) -> str:
    """`sites`, unless there is one."""
    return word if count == 1 else f"{word}s"


def first_few(names: Sequence[str], count: int) -> str:
    """`a, b and 3 more`."""
    more = len(names) - count
    return ", ".join(names[:count]) + (f" and {more} more" if more > 0 else "")


def some_quoted(names: Iterable[str]) -> str:
    """`'a', 'b', 'c' and 3 more`."""
    return first_few([f"'{name}'" for name in names], 3)


def percent(share: float) -> str:
    """`4.2 %`."""
    return f"{round(100 * share, 1) + 0.0:.1f} %"  # + 0.0: no `-0.0 %`
