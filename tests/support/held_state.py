"""State in a module of its own, for models that keep it there (tests/profiling/test_leaves_nothing.py)."""

from __future__ import annotations

from typing import Any

COUNT = 0
ITEMS: list[int] = []
TABLE: dict[str, int] = {}


class Tally:
    total = 0

    def __init__(self) -> None:
        Tally.total += 1


def bump() -> int:
    """Count one more, where no caller names the variable."""
    global COUNT  # noqa: PLW0603
    COUNT += 1
    return COUNT


def reset(**names: Any) -> None:
    """All as if this had just been imported."""
    global COUNT
    COUNT, Tally.total = 0, 0
    ITEMS.clear()
    TABLE.clear()
    globals().pop("LATE", None)
