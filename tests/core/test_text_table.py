"""Tables have a line for each row; lines that are longer than a width are broken between words, and nothing is lost."""
# ruff: noqa: E501 -- lines of tables are compared in one piece

from __future__ import annotations

import random

from lowtide.core.text_table import align, wrapped

HEAD = ("", "sites each", "kept", "everything kept", "why")
ROWS = [
    ("layers 0-3", "12 keep + 2 recompute", "1.5 GiB", "12.5 GiB", "recomputed: mlp.act_fn.silu, mlp.mul and 3 more"),
    ("outside layers", "no sites", "-", "0 MiB", ""),
]


def test_each_row_is_a_line() -> None:
    assert align([HEAD, *ROWS], numeric=(2, 3)) == [
        "                sites each                kept  everything kept  why",
        "layers 0-3      12 keep + 2 recompute  1.5 GiB         12.5 GiB  recomputed: mlp.act_fn.silu, mlp.mul and 3 more",
        "outside layers  no sites                     -            0 MiB",
    ]  # fmt: skip


def test_what_follows_a_break_hangs_below_its_line() -> None:
    assert wrapped(["short", "  one two three four"], 14) == ["short", "  one two", "      three", "      four"]
    assert wrapped(["stalls 11.9 ms, gap 0.3 %; peak 120.0 GiB"], 20) == [
        "stalls 11.9 ms, gap",
        "    0.3 %; peak",
        "    120.0 GiB",
    ]
    assert wrapped(["a" * 20], 10) == ["a" * 20]
    assert wrapped(["  one two three four"], None) == ["  one two three four"]


def test_any_lines_in_any_width_have_every_word_and_none_is_too_long() -> None:
    draw = random.Random(0)
    for _ in range(300):
        lines = [
            " " * draw.randint(0, 6) + " ".join("x" * draw.randint(1, 9) for _ in range(draw.randint(1, 40)))
            for _ in range(draw.randint(1, 6))
        ]
        width = draw.randint(40, 160)
        shown = wrapped(lines, width)
        assert max(map(len, shown)) <= width
        assert " ".join(shown).split() == " ".join(lines).split()
