"""Commands, options, public names and keys are those that people have written down."""

from __future__ import annotations

import difflib

from tests.cli.surface import GOLDEN, surface


def test_what_people_use_is_frozen() -> None:
    before, now = GOLDEN.read_text(encoding="utf-8"), surface()
    changed = [
        line
        for line in difflib.unified_diff(before.splitlines(), now.splitlines(), lineterm="", n=0)
        if line.startswith(("+", "-")) and not line.startswith(("+++", "---"))
    ]
    assert not changed, "\n".join(
        [
            "what people have in their files and scripts has changed:",
            *changed,
            "A line with '-' breaks somebody's run: keep the old name beside the new one, and say so when it is used.",
            "If it must be: python -m tests.cli.surface, and a line in CHANGELOG.md that says what to write instead.",
        ]
    )
