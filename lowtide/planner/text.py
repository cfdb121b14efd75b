"""Columns of plain text. Logs get pasted, so there are no lines, no colours and no characters that need a font."""

from __future__ import annotations

from collections.abc import Sequence


def align(cells: Sequence[tuple[str, ...]], *, numeric: tuple[int, ...]) -> list[str]:
    """One line for each row, columns two blanks apart; the `numeric` ones are flush right."""
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    lines = []
    for row in cells:
        texts = [
            text.rjust(width) if column in numeric else text.ljust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(texts).rstrip())
    return lines


def plural(word: str, count: int) -> str:
    """`sites`, unless there is one."""
    return word if count == 1 else f"{word}s"


def first_few(names: Sequence[str], count: int) -> str:
    """`a, b and 3 more`."""
    more = len(names) - count
    return ", ".join(names[:count]) + (f" and {more} more" if more > 0 else "")
