"""Errors of predictions, and agreement of orders."""

from __future__ import annotations

import random

import pytest

from benchmarks.agreement import kendall_tau, summary


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


def test_long_steps_stand_apart() -> None:
    row = {"model": "m", "predicted_peak_bytes": 100, "peak_bytes": 100, "budget_bytes": 100, "is_equal": True,
           "ratio_of_odd_rounds": 1.0, "ratio_of_even_rounds": 1.0, "predicted_ratio": 1.0}  # fmt: skip
    long = [{**row, "scale": 2, "ratio_median": ratio, "seconds_median": 0.5} for ratio in (1.0, 1.5)]
    short = [{**row, "scale": 1, "ratio_median": 1.25, "seconds_median": seconds} for seconds in (0.05, 0.06, 1.0)]
    small, large, above, below = summary([*short, *long])
    assert (small["scale"], large["scale"], above["model"]) == (1, 2, "steps above 100 ms")
    assert large["time_error_worst_percent"] == pytest.approx(100 * (1 - 1 / 1.5))
    assert (above["num_plans"], below["num_plans"]) == (3, 2)
    assert below["time_error_median_percent"] == pytest.approx(20.0)
