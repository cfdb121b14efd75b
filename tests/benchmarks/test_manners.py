"""What all benchmarks share: rows as they come, resuming, errors that are rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.manners import command_of, parser, run
from benchmarks.record import Record, read

PIECES = [{"model": "a"}, {"model": "b"}, {"model": "c"}]


def blank(**changes) -> Record:
    given = {"question": "order", "title": "Which order?", "kind": "measured", "command": "python -m benchmarks.order",
             "settings": {"rounds": 3, "sizes": (1, 2)}, "rows": [], "hardware": {"folder": "here", "name": "Here"},
             "versions": {"python": "3.11"}}  # fmt: skip
    return Record(**{**given, **changes})


class Recorder:
    """Measures nothing, and remembers what it was asked for."""

    def __init__(self, failing: str = "", stop_at: str = "") -> None:
        self.asked: list[str] = []
        self.failing = failing
        self.stop_at = stop_at

    def __call__(self, piece) -> dict:
        self.asked.append(piece["model"])
        if piece["model"] == self.stop_at:
            raise KeyboardInterrupt
        if piece["model"] == self.failing:
            raise ValueError("no such\nmodel")
        return {"number": len(self.asked)}


def go(folder: Path, measure: Recorder, *words: str, **changes) -> int:
    args = parser("order", "About order.").parse_args([*words, "--out", str(folder)])
    return run(blank(**changes), PIECES, measure, args)


def rows(folder: Path) -> list[dict]:
    return read(folder / "here" / "order.json").rows


def test_rows_are_in_order_and_start_with_the_piece(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert go(tmp_path, Recorder()) == 0
    assert rows(tmp_path) == [{"model": "a", "number": 1}, {"model": "b", "number": 2}, {"model": "c", "number": 3}]
    printed = capsys.readouterr()
    assert printed.out.splitlines()[0].split() == ["model", "number"]
    assert "order 3/3 c: " in printed.err


def test_an_error_is_a_row_and_the_rest_goes_on(tmp_path: Path) -> None:
    measure = Recorder(failing="b")
    assert go(tmp_path, measure) == 1
    assert measure.asked == ["a", "b", "c"]
    assert rows(tmp_path)[1] == {"model": "b", "error": "ValueError: no such\nmodel"}


def test_an_interruption_leaves_what_is_done_and_resume_does_the_rest(tmp_path: Path) -> None:
    assert go(tmp_path, Recorder(stop_at="b")) == 130
    assert [row["model"] for row in rows(tmp_path)] == ["a"]
    measure = Recorder()
    assert go(tmp_path, measure, "--resume") == 0
    assert measure.asked == ["b", "c"]
    assert [row["model"] for row in rows(tmp_path)] == ["a", "b", "c"]


def test_resume_of_a_whole_run_shows_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    go(tmp_path, Recorder())
    shown = capsys.readouterr().out
    measure = Recorder()
    assert go(tmp_path, measure, "--resume") == 0
    assert measure.asked == []
    assert capsys.readouterr().out == shown


def test_resume_tries_again_what_failed(tmp_path: Path) -> None:
    go(tmp_path, Recorder(failing="a"))
    measure = Recorder()
    assert go(tmp_path, measure, "--resume") == 0
    assert measure.asked == ["a"]
    assert rows(tmp_path)[0] == {"model": "a", "number": 1}


@pytest.mark.parametrize("changes", [{"settings": {"rounds": 4}}, {"versions": {"python": "3.12"}}])
def test_resume_starts_anew_with_other_settings(
    tmp_path: Path, changes: dict, capsys: pytest.CaptureFixture[str]
) -> None:
    go(tmp_path, Recorder())
    measure = Recorder()
    go(tmp_path, measure, "--resume", **changes)
    assert measure.asked == ["a", "b", "c"]
    assert f"order: other {next(iter(changes))} than in" in capsys.readouterr().err


def test_without_resume_everything_is_measured_again(tmp_path: Path) -> None:
    go(tmp_path, Recorder())
    measure = Recorder(stop_at="b")
    go(tmp_path, measure)
    assert measure.asked == ["a", "b"]
    assert [row["model"] for row in rows(tmp_path)] == ["a"]


def test_only_keeps_the_rows_of_the_others(tmp_path: Path) -> None:
    go(tmp_path, Recorder())
    measure = Recorder()
    assert go(tmp_path, measure, "--only", "c", "b") == 0
    assert measure.asked == ["b", "c"]
    assert [row["number"] for row in rows(tmp_path)] == [1, 1, 2]


def test_only_of_an_unknown_piece_says_what_there_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert go(tmp_path, Recorder(), "--only", "d") == 2
    assert capsys.readouterr().err == "--only d: no such piece (known: a, b, c)\n"


def test_json_prints_the_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    go(tmp_path, Recorder(), "--json")
    assert json.loads(capsys.readouterr().out) == json.loads((tmp_path / "here" / "order.json").read_text())


def test_the_command_is_without_what_only_says_how() -> None:
    words = ["--rounds", "3", "--only", "a", "b", "--resume", "--sizes=1", "--json", "--out=x", "--out", "y", "--deep"]
    assert command_of(parser("order", "").parse_args([]), "order", words) == (
        "python -m benchmarks.order --rounds 3 --sizes=1 --deep"
    )
