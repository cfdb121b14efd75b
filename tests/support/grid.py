"""Grids of cases of which `make test` has a part, and `make test-extended` the rest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def one_of(step: int, cases: Iterable[Any], first: int = 0) -> list[Any]:
    """Of each `step` cases in a row one, from the `first` on; the others are marked `extended`. A case is a value, or a
    tuple where several names are parametrized at once."""
    return [
        pytest.param(*case, marks=[] if at % step == first else [pytest.mark.extended])
        for at, case in enumerate(case if isinstance(case, tuple) else (case,) for case in cases)
    ]


def in_turn(ways: int, rows: Iterable[Any], columns: Iterable[Any]) -> list[Any]:
    """Pairs of a row and a column: each row with every `ways`-th column, begun one further in each row, so that rows
    share the columns among them. The other pairs are marked `extended`."""
    columns = list(columns)
    return [
        pytest.param(
            row,
            column,
            id=f"{getattr(row, 'name', row)}-{column}",
            marks=[] if at % ways == number % ways else [pytest.mark.extended],
        )
        for number, row in enumerate(rows)
        for at, column in enumerate(columns)
    ]
