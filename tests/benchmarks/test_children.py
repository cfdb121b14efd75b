"""Children that fail, hang or die are an error of their own, and the others go on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from benchmarks.children import CannotRunError, Child, median_of, one_line, ratios, run_rounds
from tests.support import processes


@contextmanager
def started(**arguments: Any) -> Iterator[Child]:
    processes.begin()
    child = Child("child", "tests.support.misbehaving:start", arguments)
    try:
        child.start(30)
        yield child
    finally:
        child.stop()


def test_a_child_is_a_process_of_its_own_that_answers() -> None:
    with started() as child:
        assert child.error is None
        assert child.ready["process"] != os.getpid()
        assert child.ask("step", 10) == {"seconds": 0.5}


def test_an_error_while_preparing_is_one_line() -> None:
    with started(fails_at_once=True) as child:
        assert child.error == "ValueError: first line"
        assert child.ask("step", 10) is None


@pytest.mark.parametrize(
    ("order", "error"),
    [
        ("raise", "RuntimeError: it broke"),
        ("hang", "TimeoutError: 'hang' took more than 1 s"),
        ("die", "the process ended with status -9"),
        ("no such order", "KeyError: 'no such order'"),
    ],
)
def test_a_child_that_fails_says_so_and_the_others_go_on(order: str, error: str) -> None:
    with started() as child, started() as other:
        child.ask(order, 1)
        assert child.error == error
        run_rounds([child, other], 2, 10)
        assert (len(child.steps), len(other.steps)) == (0, 2)


def test_ratios_are_taken_round_by_round_without_the_first() -> None:
    base, child = Child("base", "", {}), Child("child", "", {})
    base.steps = [{"seconds": s} for s in (100.0, 9.0, 1.0, 2.0, 4.0)]
    child.steps = [{"seconds": s} for s in (9.0, 3.0, 4.0, 10.0)]
    found = ratios(child, base, offset=1)
    assert found == {"ratio_median": 2.5, "ratio_min": 2.0, "ratio_max": 3.0}
    assert median_of(child, "seconds") == 4.0
    assert median_of(child, "stall_seconds") is None


def test_a_long_error_is_cut() -> None:
    assert len(one_line(ValueError("x" * 1000))) == 240
    assert one_line(KeyboardInterrupt()) == "KeyboardInterrupt"
    assert one_line(CannotRunError("not installed: pip install trl")) == "not installed: pip install trl"
