"""A sparse linear program, gathered row by row and solved by HiGHS (scipy).

What: columns with a cost and limits, rows of a few terms; the least cost, as a number that is proven.

Cost: of gathering, about a microsecond a term; HiGHS takes the rest. scipy is imported when something is solved.

Not covered: warm starts, dual prices.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Terms = list[tuple[int, float]]
"""Columns, and what they are multiplied by."""

_MAX_NODES = 500
"""Of branch and bound. A count and not a clock, so that every rank stops at the same place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """The answer to a program."""

    bound: float
    """No values that keep to all rows cost less."""
    values: NDArray[np.float64] | None
    """Of the columns; None when no values keep to all rows."""


class Linear:
    """Columns and rows."""

    def __init__(self) -> None:
        self.cost: list[float] = []
        self._least: list[float] = []
        self._most: list[float] = []
        self._whole: list[int] = []
        self._rows: list[int] = []
        self._cols: list[int] = []
        self._values: list[float] = []
        self._lower: list[float] = []
        self._upper: list[float] = []

    def column(self, cost: float = 0.0, most: float = math.inf, *, least: float = 0.0, whole: bool = False) -> int:
        """A new column; its number. `whole`: it is an integer, where that is asked for."""
        self.cost.append(cost)
        self._most.append(most)
        self._least.append(least)
        self._whole.append(int(whole))
        return len(self.cost) - 1

    def row(self, terms: Iterable[tuple[int, float]], lower: float, upper: float) -> None:
        """lower <= sum of terms <= upper."""
        number = len(self._lower)
        for col, value in terms:
            self._rows.append(number)
            self._cols.append(col)
            self._values.append(value)
        self._lower.append(lower)
        self._upper.append(upper)

    def solve(self, *, whole: bool, gap: float, time_limit_seconds: float) -> Solved | None:
        """The least cost; with `whole` within `gap` of it. None when nothing was proven in time."""
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array

        shape = (len(self._lower), len(self.cost))
        matrix = csr_array((self._values, (self._rows, self._cols)), shape=shape)
        with _silent_stdout() if whole else contextlib.nullcontext():
            result = milp(
                np.array(self.cost),
                integrality=np.array(self._whole) if whole else None,
                bounds=Bounds(np.array(self._least), np.array(self._most)),
                constraints=LinearConstraint(matrix, np.array(self._lower), np.array(self._upper)),
                options={"time_limit": max(time_limit_seconds, 0.05), "mip_rel_gap": gap, "node_limit": _MAX_NODES},
            )
        if result.status == 2:
            return Solved(bound=math.inf, values=None)
        if result.x is None or (result.status != 0 and not whole):
            return None  # an unfinished simplex proves nothing
        is_searched = whole and result.mip_dual_bound is not None
        return Solved(bound=result.mip_dual_bound if is_searched else result.fun, values=result.x)


def merged(terms: Terms) -> Terms:
    """One term a column."""
    sums: dict[int, float] = {}
    for col, value in terms:
        sums[col] = sums.get(col, 0.0) + value
    return [(col, value) for col, value in sums.items() if value]


@contextlib.contextmanager
def _silent_stdout() -> Iterator[None]:
    """Branch and bound of HiGHS writes stray lines to the process's standard output, below Python."""
    sys.stdout.flush()
    try:
        kept = os.dup(1)
    except OSError:  # closed: nothing can be written there
        yield
        return
    with open(os.devnull, "wb") as nowhere:  # noqa: PTH123
        os.dup2(nowhere.fileno(), 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
