"""Text in columns, long lines broken between words, and the small words of tables.

What: `align` makes lines of a table from its cells; `wrapped` breaks lines of prose, so that what is printed fits the
terminal that it is printed to; `runs` and `layers_label` put equal layers into one row. Without a width every line is
as long as it is, so that a pipe or a file has one line for each row.
How: of a table that is wider than the width the last column, if that is text, goes under its row, indented, and other
columns of text are broken where that is needed, the widest first. Numbers are never broken. What does not fit even so
becomes one paragraph for each row.
Cost: linear in the cells, with a small factor. Not covered: words longer than the width, which stay whole; characters
that are two columns wide.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Hashable, Iterable, Sequence

Cells = Sequence[tuple[str, ...]]

_GAP = 2
"""Blanks between columns."""
_INDENT = "    "
_UNIT = re.compile(r"(?<=\d) (?=(?:[KMGT]?i?B|ms|µs|s|%)(?![^\s;:,.)]))")
"""The blank between a number and its unit: no line is broken there."""
_NO_BREAK = "\0"


def align(cells: Cells, *, numeric: tuple[int, ...], width: int | None = None) -> list[str]:
    """One line for each row, columns two blanks apart; the `numeric` ones are flush right. The first row is the head.

    `width`: the most characters of a line, as far as words allow it; None: as many as there are.
    """
    natural = [max(map(len, column)) for column in zip(*cells, strict=True)]
    if width is None or _total(natural) <= width:
        return _lines(cells, natural, numeric)
    has_notes = len(cells[0]) > 1 and len(cells[0]) - 1 not in numeric
    body = [row[:-1] for row in cells] if has_notes else cells
    widths = _fitted(body, numeric, width)
    if widths is None:
        return [line for row in cells[1:] for line in wrapped([_paragraph(cells[0], row)], width, indent=_INDENT)]
    lines = _lines(body[:1], widths, numeric)
    for row, whole in zip(body[1:], cells[1:], strict=True):
        lines += _lines([row], widths, numeric)
        if has_notes and whole[-1]:
            lines += wrapped([f"{_INDENT}{whole[-1]}"], width, indent=_INDENT)
    return lines


def wrapped(lines: Iterable[str], width: int | None, *, indent: str | None = None) -> list[str]:
    """The lines, those that are longer than `width` broken between words. What follows a break is indented by `indent`,
    or by four blanks more than its line."""
    found: list[str] = []
    for line in lines:
        if width is None or len(line) <= width:
            found.append(line)
            continue
        start = line[: len(line) - len(line.lstrip())]
        found += _wrap(line, width, first=start, later=f"{start}{_INDENT}" if indent is None else indent)
    return found


def _wrap(text: str, width: int, *, first: str = "", later: str = "") -> list[str]:
    lines = textwrap.wrap(
        _UNIT.sub(_NO_BREAK, text.strip()),
        max(width, 1),
        initial_indent=first,
        subsequent_indent=later,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(_NO_BREAK, " ") for line in lines] or [""]


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + _GAP * (len(widths) - 1)


def _fitted(cells: Cells, numeric: tuple[int, ...], width: int) -> list[int] | None:
    """Widths of columns whose sum is at most `width`; None where words and numbers are too long for it."""
    columns = list(zip(*cells, strict=True))
    widths = [max(map(len, column)) for column in columns]
    least = [_least(column, number in numeric) for number, column in enumerate(columns)]
    if _total(least) > width:
        return None
    for column in sorted(numeric, key=lambda column: least[column] - widths[column]):
        if _total(widths) > width:
            widths[column] = least[column]
    while _total(widths) > width:
        widths[max((c for c in range(len(widths)) if widths[c] > least[c]), key=lambda c: widths[c])] -= 1
    return widths


def _least(column: Sequence[str], is_numeric: bool) -> int:
    """Numbers stay whole, with their units; of a head and of text the longest word does."""
    texts = column[:1] if is_numeric else column
    words = [len(word) for text in texts for word in text.split()]
    return max([*words, *(len(text) for text in column[1:] if is_numeric)], default=0)


def _lines(cells: Cells, widths: Sequence[int], numeric: tuple[int, ...]) -> list[str]:
    lines: list[str] = []
    for row in cells:
        broken = [[text] if len(text) <= wide else _wrap(text, wide) for text, wide in zip(row, widths, strict=True)]
        for number in range(max(map(len, broken))):
            texts = (parts[number] if number < len(parts) else "" for parts in broken)
            padded = (
                text.rjust(wide) if column in numeric else text.ljust(wide)
                for column, (text, wide) in enumerate(zip(texts, widths, strict=True))
            )
            lines.append((" " * _GAP).join(padded).rstrip())
    return lines


def _paragraph(head: tuple[str, ...], row: tuple[str, ...]) -> str:
    """`layers 0-3: kept 1.0 GiB, swapped 2.0 GiB`."""
    told = [f"{name} {text}".strip() for name, text in zip(head[1:], row[1:], strict=True) if text]
    return f"{row[0]}: {', '.join(told)}" if row[0] else ", ".join(told)


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
