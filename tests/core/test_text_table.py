"""Tables and prose in a width: nothing is cut, nothing is lost, and without a width nothing changes."""
# ruff: noqa: E501 -- lines of tables are compared in one piece

from __future__ import annotations

import random

import pytest

from lowtide.core.text_table import align, wrapped

HEAD = ("", "sites each", "kept", "everything kept", "why")
ROWS = [
    ("layers 0-3", "12 keep + 2 recompute", "1.5 GiB", "12.5 GiB", "recomputed: mlp.act_fn.silu, mlp.mul and 3 more"),
    ("outside layers", "no sites", "-", "0 MiB", ""),
]
CELLS = [HEAD, *ROWS]
NUMERIC = (2, 3)


def test_without_a_width_each_row_is_a_line() -> None:
    assert align(CELLS, numeric=NUMERIC) == align(CELLS, numeric=NUMERIC, width=200) == [
        "                sites each                kept  everything kept  why",
        "layers 0-3      12 keep + 2 recompute  1.5 GiB         12.5 GiB  recomputed: mlp.act_fn.silu, mlp.mul and 3 more",
        "outside layers  no sites                     -            0 MiB",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("width", "lines"),
    [
        (100, ["                sites each                kept  everything kept",
               "layers 0-3      12 keep + 2 recompute  1.5 GiB         12.5 GiB",
               "    recomputed: mlp.act_fn.silu, mlp.mul and 3 more",
               "outside layers  no sites                     -            0 MiB"]),
        (60, ["                sites each                kept  everything",
              "                                                      kept",
              "layers 0-3      12 keep + 2 recompute  1.5 GiB    12.5 GiB",
              "    recomputed: mlp.act_fn.silu, mlp.mul and 3 more",
              "outside layers  no sites                     -       0 MiB"]),
        (35, ["layers 0-3: sites each 12 keep + 2",
              "    recompute, kept 1.5 GiB,",
              "    everything kept 12.5 GiB, why",
              "    recomputed: mlp.act_fn.silu,",
              "    mlp.mul and 3 more",
              "outside layers: sites each no",
              "    sites, kept -, everything kept",
              "    0 MiB"]),
    ],
)  # fmt: skip
def test_a_narrow_table(width: int, lines: list[str]) -> None:
    assert align(CELLS, numeric=NUMERIC, width=width) == lines


def test_numbers_stay_whole_before_a_row_is_broken() -> None:
    cells = [("", "the budget", "the peak"), ("aa bb cc", "12345.6 GiB", "100.0 %")]
    assert align(cells, numeric=(1, 2), width=24) == [
        "     the budget      the",
        "                    peak",
        "aa  12345.6 GiB  100.0 %",
        "bb",
        "cc",
    ]
    assert align(cells, numeric=(1, 2), width=23)[0] == "aa bb cc: the budget"


def test_prose_hangs_below_its_line() -> None:
    assert wrapped(["short", "  one two three four"], 14) == ["short", "  one two", "      three", "      four"]
    assert wrapped(["stalls 11.9 ms, gap 0.3 %; peak 120.0 GiB"], 20) == [
        "stalls 11.9 ms, gap",
        "    0.3 %; peak",
        "    120.0 GiB",
    ]
    assert wrapped(["a" * 20], 10) == ["a" * 20]
    assert wrapped(["  one two three four"], None) == ["  one two three four"]


def test_any_table_in_any_width_has_every_word_and_no_line_too_long() -> None:
    draw = random.Random(0)
    for _ in range(300):
        num_columns, num_rows = draw.randint(1, 7), draw.randint(1, 5)
        cells = [
            tuple(" ".join("x" * draw.randint(1, 9) for _ in range(draw.randint(0, 6))) for _ in range(num_columns))
            for _ in range(num_rows + 1)
        ]
        numeric = tuple(column for column in range(num_columns) if draw.random() < 0.4)
        width = draw.randint(40, 160)
        lines = align(cells, numeric=numeric, width=width)
        assert max(map(len, lines), default=0) <= width
        words = sorted(word for row in cells[1:] for text in row for word in text.split())
        found = sorted(word.rstrip(",:") for line in lines for word in line.split())
        for word in words:
            found.remove(word)  # all of them, as often as they stand there
