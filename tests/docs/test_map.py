"""The map in how-it-works.md is what the code draws today, and shows every room that stands."""

from __future__ import annotations

import importlib.util
import re
from html import unescape
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def make_map() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_map", ROOT / "docs" / "make_map.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_picture_and_table_are_what_the_code_draws(make_map: ModuleType) -> None:
    house = make_map.floors()
    assert make_map.PICTURE.read_text(encoding="utf-8") == make_map.picture(house), "run python docs/make_map.py"
    page = make_map.PAGE.read_text(encoding="utf-8")
    assert make_map.page(page, house) == page, "run python docs/make_map.py"


def test_every_room_that_stands_is_on_the_map_with_its_purpose(make_map: ModuleType) -> None:
    rooms = {room.name: room for floor in make_map.floors() for room in floor}
    package = ROOT / "lowtide"
    folders = {door.parent.relative_to(package).as_posix() for door in package.glob("*/__init__.py")} - {"runtime"}
    folders |= {door.parent.relative_to(package).as_posix() for door in package.glob("runtime/*/__init__.py")}
    assert folders <= set(rooms)
    for room in rooms.values():
        assert (package / room.path).exists()
        assert room.name == "version" or len(room.purpose) > 20, room.name
        assert room.name not in folders or (package / room.path / room.start).exists(), room.name


def test_no_line_of_the_picture_is_wider_than_its_box(make_map: ModuleType) -> None:
    """By the script's own guess of a character's width; and nothing is drawn outside the picture."""
    svg = make_map.picture(make_map.floors())
    width, height = map(int, re.search(r'viewBox="0 0 (\d+) (\d+)"', svg).groups())
    boxes = [
        tuple(map(float, box))
        for box in re.findall(r'x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="(\d+)" rx', svg)
    ]
    texts = re.findall(r'<text x="([\d.]+)" y="([\d.]+)" font-size="11"[^>]*>([^<]*)<', svg)
    assert len(boxes) >= 20 and len(texts) > len(boxes)
    for x, y, text in [(float(x), float(y), unescape(text)) for x, y, text in texts]:
        assert any(
            left <= x and x + len(text) * make_map.CHARACTER <= left + wide + 8 and top < y < top + high
            for left, top, wide, high in boxes
        ), text
    assert all(left + wide <= width and top + high <= height for left, top, wide, high in boxes)
