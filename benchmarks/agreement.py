"""How well predictions and measurements agree: errors, and the order.

What: `summary` turns the rows of predicted.py into one row a model; `kendall_tau` is the agreement of two orders.
Cost: none. Not covered: confidence intervals; there are ten or so plans of a model.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.rows import Row

CLEAR = 0.05
"""Plans are clearly apart if their predicted times are, by this share of a plain step."""
LONG_SECONDS = 0.1
"""Shorter steps are those of toy models: what Python takes between operators is a large part of them."""


def kendall_tau(xs: Sequence[float], ys: Sequence[float], *, least: float = 0.0) -> float | None:
    """Pairs in the same order less those in the opposite one, over all pairs that differ in both (Kendall 1938).

    1 is the same order, -1 the opposite; None where no pair differs. Pairs whose `xs` are less than `least` apart do
    not count.
    """
    signs = [
        _sign(xs[i] - xs[j]) * _sign(ys[i] - ys[j])
        for i in range(len(xs))
        for j in range(i)
        if xs[i] != xs[j] and ys[i] != ys[j] and abs(xs[i] - xs[j]) >= least
    ]
    return sum(signs) / len(signs) if signs else None


def _sign(number: float) -> int:
    return (number > 0) - (number < 0)


def summary(rows: Sequence[Mapping[str, Any]]) -> list[Row]:
    """One row a model and size: errors of peaks and times, and how well the order is predicted; then the errors of
    times of all plans with steps above 100 ms, and of all with shorter ones."""
    good = [row for row in rows if not row.get("error")]
    groups = dict.fromkeys((row["model"], row.get("scale")) for row in good)
    by_group = {group: [row for row in good if (row["model"], row.get("scale")) == group] for group in groups}
    result = [_summary_of(*group, members) for group, members in by_group.items()]
    timed = [row for row in good if "seconds_median" in row]
    for name, is_long in (("steps above 100 ms", True), ("shorter steps", False)):
        some = [row for row in timed if (row["seconds_median"] > LONG_SECONDS) == is_long]
        if some:
            result.append({"model": name, "num_plans": len(some), **_time_errors(some)})
    return result


def _time_errors(rows: Sequence[Mapping[str, Any]]) -> Row:
    times = [100 * abs(row["predicted_ratio"] / row["ratio_median"] - 1) for row in rows]
    return {"time_error_median_percent": statistics.median(times), "time_error_worst_percent": max(times)}


def _summary_of(name: str, scale: int | None, rows: Sequence[Mapping[str, Any]]) -> Row:
    peaks = [100 * abs(row["predicted_peak_bytes"] / row["peak_bytes"] - 1) for row in rows]
    said, measured = ([row[key] for row in rows] for key in ("predicted_ratio", "ratio_median"))
    return {
        "model": name,
        **({} if scale is None else {"scale": scale}),
        "num_plans": len(rows),
        "peak_error_median_percent": statistics.median(peaks),
        "peak_error_worst_percent": max(peaks),
        "num_over_budget": sum(row["peak_bytes"] > row["budget_bytes"] for row in rows),
        **_time_errors(rows),
        "tau": kendall_tau(said, measured),
        "tau_of_clear_pairs": kendall_tau(said, measured, least=CLEAR),
        "tau_of_measured_with_itself": kendall_tau(
            [row["ratio_of_odd_rounds"] for row in rows], [row["ratio_of_even_rounds"] for row in rows]
        ),
        "is_equal": all(row["is_equal"] for row in rows),
    }
