"""Errors of predictions, and agreement of orders."""

from __future__ import annotations

import random

import pytest

from benchmarks.agreement import kendall_tau, learned_ratios, summary


def test_tau_is_that_of_scipy() -> None:
    from scipy.stats import kendalltau

    draw = random.Random(1)
    for _ in range(20):
        xs = [draw.random() for _ in range(9)]
        ys = [x + draw.random() for x in xs]
        assert kendall_tau(xs, ys) == pytest.approx(kendalltau(xs, ys).statistic)


def test_tau_of_the_same_the_opposite_and_nothing() -> None:
    assert kendall_tau([1, 2, 3], [10, 20, 30]) == 1
    assert kendall_tau([1, 2, 3], [3, 2, 1]) == -1
    assert kendall_tau([1, 1], [1, 2]) is None
    assert kendall_tau([1.0, 1.01, 1.2], [3, 2, 4]) == pytest.approx(1 / 3)
    assert kendall_tau([1.0, 1.01, 1.2], [3, 2, 4], least=0.05) == 1


def test_summary_of_a_model() -> None:
    row = {"model": "m", "predicted_peak_bytes": 110, "peak_bytes": 100, "budget_bytes": 105, "predicted_ratio": 1.1,
           "ratio_median": 1.0, "ratio_of_odd_rounds": 1.0, "ratio_of_even_rounds": 1.0, "is_equal": True}  # fmt: skip
    other = {**row, "predicted_peak_bytes": 100, "predicted_ratio": 1.5, "ratio_median": 1.5, "is_equal": False,
             "ratio_of_odd_rounds": 2.0, "ratio_of_even_rounds": 0.5, "budget_bytes": 100}  # fmt: skip
    (found,) = summary([row, {"model": "m", "error": "x"}, other])
    assert found["num_plans"] == 2
    assert found["peak_error_median_percent"] == pytest.approx(5)
    assert found["peak_error_worst_percent"] == pytest.approx(10)
    assert found["num_over_budget"] == 0
    assert found["time_error_worst_percent"] == pytest.approx(10)
    assert (found["tau"], found["tau_of_measured_with_itself"], found["is_equal"]) == (1, -1, False)


def _raced(measured: float, copies: float, touch: float, *, seconds: float, scale: int = 1) -> dict:
    """A plan whose step is predicted as a plain one, with its copies' parts."""
    return {"model": "m", "scale": scale, "predicted_peak_bytes": 100, "peak_bytes": 100, "budget_bytes": 100,
            "predicted_ratio": 1.0, "ratio_median": measured, "ratio_of_odd_rounds": measured, "is_equal": True,
            "ratio_of_even_rounds": measured, "rest_ratio": 1.0, "touch_ratio": touch, "copies_ratio": copies,
            "seconds_median": seconds}  # fmt: skip


def test_learned_errors_are_of_prices_that_other_plans_show_and_long_steps_stand_apart() -> None:
    long = [_raced(1.0 + 0.2 * bool(c) + c, c, 0.2 * bool(c), seconds=0.5, scale=2) for c in (0.0, 0.0, 0.1, 0.3)]
    short = [_raced(1.25, 0.1, 0.25, seconds=0.05), _raced(1.25, 0.2, 0.25, seconds=0.06), _raced(1.0, 0, 0, seconds=1)]
    small, large, above, below = summary([*short, *long])
    assert (small["scale"], large["scale"], above["model"]) == (1, 2, "steps above 100 ms")
    assert large["time_error_worst_percent"] == pytest.approx(100 * (1 - 1 / 1.5))
    assert large["learned_time_error_worst_percent"] == pytest.approx(0.0)
    assert (above["num_plans"], below["num_plans"]) == (5, 2)
    assert below["time_error_median_percent"] == pytest.approx(20.0)
    assert below["learned_time_error_worst_percent"] == pytest.approx(0.0)
    assert len(summary([{k: v for k, v in row.items() if k != "rest_ratio"} for row in long])) == 1


def test_a_plan_teaches_nothing_about_itself() -> None:
    """Nothing but the plain step shows what computing costs, and nothing but the plan itself what its copies do."""
    assert learned_ratios([_raced(1.2, 0.0, 0.0, seconds=1.0), _raced(1.5, 0.1, 0.2, seconds=1.0)]) == [1.0, None]
