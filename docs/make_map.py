"""Writes docs/map.svg and the table of rooms in docs/how-it-works.md. No line of either is written by hand.

    python docs/make_map.py

What: the floors are `FLOORS` of tests/test_house.py, which also proves that imports go down only. What a room is for,
and which file to read first, is what the docstring of its `__init__` says. A room without code is left out.

Cost: milliseconds. Not covered: single files, and which room imports which; the test shows that when it fails.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import textwrap
from collections.abc import Sequence
from html import escape
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "lowtide"
PICTURE = ROOT / "docs" / "map.svg"
PAGE = ROOT / "docs" / "how-it-works.md"

WIDTH, MARGIN, LEFT, TOP, GAP = 980, 14, 46, 44, 8
LINE, HEAD, CHARACTER = 14, 22, 5.6
"""Heights of a line of text and of a name, and the mean width of a character of 11 points; all in pixels."""
ROOM, EDGE, INK, PAPER, FAINT = "#e3eef5", "#1f6f9f", "#22303a", "#ffffff", "#6b7a85"


class Room(NamedTuple):
    """One box of the map: a folder of the package, or a file that stands by itself."""

    name: str
    path: str
    """Below `lowtide/`."""
    purpose: str
    """The first sentence of its docstring."""
    start: str
    """The file to read first."""


def floors() -> list[list[Room]]:
    """The rooms of each floor, from the ground up."""
    found = [[room for name in names if (room := _room(name)) is not None] for names in _house().FLOORS]
    return [rooms for rooms in found if rooms]


def _room(name: str) -> Room | None:
    path = "__init__.py" if name == "the public surface" else name
    door = PACKAGE / path / "__init__.py"
    if door.exists():
        text = _docstring(door)
        start = re.search(r"^Start at `([^`]+)`", text, re.MULTILINE)
        return Room(name, f"{path}/", _purpose(text), start.group(1) if start else "")
    file = PACKAGE / path if path.endswith(".py") else PACKAGE / f"{path}.py"
    return Room(name, file.name, _purpose(_docstring(file)), "") if file.exists() else None


def _docstring(file: Path) -> str:
    return ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""


def _purpose(text: str) -> str:
    """The first sentence of a docstring, on one line."""
    paragraph = " ".join(text.partition("\n\n")[0].split())
    return re.split(r"(?<=[a-z`)])\. ", paragraph)[0].rstrip(".")


def picture(house: Sequence[Sequence[Room]]) -> str:
    """The SVG: a row of boxes for each floor, the ground at the bottom."""
    parts, y = [], float(TOP)
    for rooms in reversed(house):
        width = (WIDTH - LEFT - MARGIN - GAP * (len(rooms) - 1)) / len(rooms)
        texts = [textwrap.wrap(room.purpose, int((width - 16) / CHARACTER)) for room in rooms]
        height = HEAD + LINE * max(map(len, texts)) + 10
        for index, (room, lines) in enumerate(zip(rooms, texts, strict=True)):
            x = LEFT + index * (width + GAP)
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}" rx="3" fill="{ROOM}" '
                f'stroke="{EDGE}"/>'
            )
            parts.append(_text(x + 8, y + 17, room.name, size=13, weight="bold"))
            parts += [_text(x + 8, y + HEAD + 11 + LINE * number, line) for number, line in enumerate(lines)]
        y += height + GAP
    bottom = y - GAP
    parts += [
        _text(LEFT, 26, "The rooms of lowtide. A file imports from its own room and from floors below.", size=13),
        f'<line x1="24" y1="{TOP}" x2="24" y2="{bottom - 8:.1f}" stroke="{FAINT}" stroke-width="2"/>',
        f'<path d="M 18 {bottom - 10:.1f} L 30 {bottom - 10:.1f} L 24 {bottom:.1f} Z" fill="{FAINT}"/>',
    ]
    height = int(bottom) + MARGIN
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" font-family="sans-serif">\n<title>The rooms of lowtide, floor by floor</title>\n'
        f'<rect width="{WIDTH}" height="{height}" fill="{PAPER}"/>\n'
    )
    return head + "\n".join(parts) + "\n</svg>\n"


def table(house: Sequence[Sequence[Room]]) -> str:
    """The rooms as Markdown, from the top floor down."""
    lines = ["| room | what it is for | start at |", "|---|---|---|"]
    for rooms in reversed(house):
        for room in rooms:
            start = f"`{room.start}`" if room.start else ""
            lines.append(f"| [`{room.path}`](../lowtide/{room.path}) | {room.purpose} | {start} |")
    return "\n".join(lines)


def page(text: str, house: Sequence[Sequence[Room]]) -> str:
    """how-it-works.md with the table of rooms replaced."""
    begin, end = "<!-- rooms: begin -->", "<!-- rooms: end -->"
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    assert rest and after, "how-it-works.md has lost its marks 'rooms'"
    return f"{before}{begin}\n{table(house)}\n{end}{after}"


def _house() -> ModuleType:
    spec = importlib.util.spec_from_file_location("test_house", ROOT / "tests" / "test_house.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _text(x: float, y: float, text: str, *, size: int = 11, weight: str = "normal") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" fill="{INK}">{escape(text)}</text>'


def main() -> None:
    house = floors()
    PICTURE.write_text(picture(house), encoding="utf-8")
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), house), encoding="utf-8")


if __name__ == "__main__":
    main()
