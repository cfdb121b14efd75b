"""A sparse linear program, solved by HiGHS (scipy), and what its rows about memory and the link are made of.

What: `Linear` has columns with a cost and limits, and rows of a few terms; its answer is the least cost, as a number
that is proven. `Moves` has what every share of the relaxation changes at which point.

Why it stays small: whatever is cumulative is a variable of its own, which adds its changes to its predecessor.
Everything is in the program's units, so that numbers are near one. Cost: some seven columns and nine rows a point,
about a microsecond a term; HiGHS takes the rest. scipy is imported when something is solved.

Not covered: warm starts, dual prices; which shares there are, and what ties those of one item together (relaxation.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Terms = list[tuple[int, float]]
"""Columns, and what they are multiplied by."""


Solved = tuple[float, Floats | None]
"""The answer to a program: no values that keep to all rows cost less; and the values of its columns, None when no
values keep to all rows."""


class Linear:
    """Columns and rows."""

    def __init__(self) -> None:
        self.cost: list[float] = []
        self._least: list[float] = []
        self._most: list[float] = []
        self._rows: list[int] = []
        self._cols: list[int] = []
        self._values: list[float] = []
        self._lower: list[float] = []
        self._upper: list[float] = []

    def column(self, cost: float = 0.0, most: float = math.inf, *, least: float = 0.0) -> int:
        """A new column; its number."""
        self.cost.append(cost)
        self._most.append(most)
        self._least.append(least)
        return len(self.cost) - 1

    def row(self, terms: Terms, lower: float, upper: float) -> None:
        """lower <= sum of terms <= upper."""
        self._rows.extend([len(self._lower)] * len(terms))
        self._cols.extend([col for col, _ in terms])
        self._values.extend([value for _, value in terms])
        self._lower.append(lower)
        self._upper.append(upper)

    def solve(self, time_limit_seconds: float) -> Solved | None:
        """The least cost. None when nothing was proven in time."""
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array

        shape = (len(self._lower), len(self.cost))
        matrix = csr_array((self._values, (self._rows, self._cols)), shape=shape)
        result = milp(
            np.array(self.cost),
            bounds=Bounds(np.array(self._least), np.array(self._most)),
            constraints=LinearConstraint(matrix, np.array(self._lower), np.array(self._upper)),
            options={"time_limit": max(time_limit_seconds, 0.05)},
        )
        if result.status == 2:
            return math.inf, None
        if result.x is None or result.status != 0:
            return None  # an unfinished simplex proves nothing
        return result.fun, result.x


def merged(terms: Terms) -> Terms:
    """One term a column."""
    sums: dict[int, float] = {}
    for col, value in terms:
        sums[col] = sums.get(col, 0.0) + value
    return [(col, value) for col, value in sums.items() if value]


# -- what is there at each point, and what was copied by then ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Moves:
    """What changes at each point, as terms over columns; the last entry is for what happens after all points."""

    away: list[Terms]
    """Bytes that the plain curve has and the device has not."""
    dead: list[Terms]
    """Copying out that would free memory from here on."""
    ready: list[Terms]
    """Copying out that can have been done."""
    needed: list[Terms]
    """Copying in that must have been done."""
    extra: list[Terms]
    """Seconds by which compute takes longer between the point before and this one."""
    transient: list[Terms]
    swapped: Terms
    """Bytes on the next tier."""
    back: Terms
    """All copying in."""

    @classmethod
    def of(cls, num_points: int) -> Moves:
        rows: Iterator[list[Terms]] = ([[] for _ in range(num_points + 1)] for _ in range(6))
        return cls(next(rows), next(rows), next(rows), next(rows), next(rows), next(rows), [], [])


def transient(build: Linear, terms: Terms) -> Terms:
    """The largest of what the recipes of one tick need beside their results."""
    if not terms:
        return []
    most = build.column()
    for col, size in terms:
        build.row([(most, 1.0), (col, -size)], 0.0, math.inf)
    return [(most, 1.0)]


def prefix(build: Linear, before: int, changes: Terms) -> int:
    """A column that is the one before plus the changes."""
    now = build.column(least=-math.inf)
    add_up(build, now, before, changes)
    return now


def add_up(build: Linear, now: int, before: int, changes: Terms) -> None:
    """The column `now` is the one before plus the changes."""
    terms = [(now, -1.0), *changes]
    if before >= 0:
        terms.append((before, 1.0))
    build.row(merged(terms), 0.0, 0.0)


def minus(col: int) -> Terms:
    """Less a column, if there is one."""
    return [(col, -1.0)] if col >= 0 else []
