"""Rows are in the file as soon as they are there, a run that resumes does not lose or repeat them, errors are rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.record import Record, read
from benchmarks.rows import Rows, command_of, parser, run


def blank(notes: list[str] | None = None, **settings: Any) -> Record:
    return Record(
        question="some_question",
        title="?",
        kind="measured",
        command="python -m benchmarks.some_question",
        settings=settings,
        rows=[],
        notes=notes or [],
        hardware={"folder": "somewhere", "name": "some machine"},
        versions={},
    )


def test_every_row_is_written_at_once(tmp_path: Path) -> None:
    rows = Rows(blank(dtype="float32"), folder=tmp_path)
    for method in ("plain", "lowtide"):
        rows.add({"model": "llama", "method": method, "error": None})
        assert [row["method"] for row in read(rows.path).rows][-1] == method
    rows.add({"model": "llama", "method": "plain", "error": "later"})
    assert [row["error"] for row in read(rows.path).rows] == ["later", None]


def test_two_questions_of_one_model_have_rows_of_their_own(tmp_path: Path) -> None:
    """`benchmarks.largest` asks forward and backward alone, and then whole steps with another vocabulary."""
    rows = Rows(blank(), folder=tmp_path)
    for more in ({}, {"vocabulary": 16384, "optimizer": "adamw"}, {"vocabulary": 16384, "optimizer": "none"}):
        rows.add({"model": "llama", "method": "plain", "measure": "batch", **more})
    assert len(read(rows.path).rows) == 3


def test_a_run_that_resumes_keeps_what_is_there(tmp_path: Path) -> None:
    first = Rows(blank(["one"], dtype="float32"), folder=tmp_path)
    first.add({"model": "llama", "method": "plain", "setting": None})
    again = Rows(blank(["one", "two"], dtype="float32"), folder=tmp_path, resumes=True)
    assert again.has(model="llama", method="plain", setting=None)
    assert not again.has(model="llama", method="plain", setting=0.5)
    assert again.record.notes == ["one", "two"]
    again.add({"model": "gpt2", "method": "plain", "setting": None})
    assert [row["model"] for row in read(first.path).rows] == ["llama", "gpt2"]


def test_without_resume_a_run_begins_anew(tmp_path: Path) -> None:
    Rows(blank(), folder=tmp_path).add({"model": "llama", "method": "plain"})
    assert not Rows(blank(), folder=tmp_path).has(model="llama")


def test_rows_of_other_settings_are_not_mixed(tmp_path: Path, capsys: Any) -> None:
    first = Rows(blank(dtype="float32"), folder=tmp_path)
    first.add({"model": "llama"})
    again = Rows(blank(dtype="bfloat16"), folder=tmp_path, resumes=True)
    assert not again.rows
    assert capsys.readouterr().err.endswith(f"{first.path}: made with other settings; begun anew\n")


def test_one_model_alone_keeps_the_rows_of_the_others(tmp_path: Path) -> None:
    first = Rows(blank(), folder=tmp_path)
    for model in ("llama", "gpt2"):
        first.add({"model": model, "method": "plain"})
    again = Rows(blank(), folder=tmp_path, only=["gpt2"])
    assert [row["model"] for row in again.rows] == ["llama"]


def test_what_the_machine_may_be_to_blame_for_is_tried_again(tmp_path: Path) -> None:
    rows = Rows(blank(), folder=tmp_path)
    rows.add({"method": "a", "error": "TimeoutError: 'step' took more than 1 s"})
    rows.add({"method": "b", "error": "ImportError: not here"})
    again = Rows(blank(), folder=tmp_path, resumes=True)
    assert not again.has(method="a")
    assert again.has(method="b")


# ---------------------------------------------------------------------------------------------------------------------
# Pieces


PIECES = [{"model": "a"}, {"model": "b"}, {"model": "c"}]


def blank_order(**changes: Any) -> Record:
    given: dict[str, Any] = {
        "question": "order", "title": "Which order?", "kind": "measured", "command": "python -m benchmarks.order",
        "settings": {"rounds": 3, "sizes": (1, 2)}, "rows": [], "hardware": {"folder": "here", "name": "Here"},
        "versions": {"python": "3.11"},
    }  # fmt: skip
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
    return run(blank_order(**changes), PIECES, measure, args)


def written(folder: Path) -> list[dict]:
    return read(folder / "here" / "order.json").rows


def test_rows_are_in_order_and_start_with_the_piece(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert go(tmp_path, Recorder()) == 0
    assert written(tmp_path) == [{"model": "a", "number": 1}, {"model": "b", "number": 2}, {"model": "c", "number": 3}]
    printed = capsys.readouterr()
    assert printed.out.splitlines()[0].split() == ["model", "number"]
    assert "order 3/3 c: " in printed.err


def test_an_error_is_a_row_and_the_rest_goes_on(tmp_path: Path) -> None:
    measure = Recorder(failing="b")
    assert go(tmp_path, measure) == 1
    assert measure.asked == ["a", "b", "c"]
    assert written(tmp_path)[1] == {"model": "b", "error": "ValueError: no such\nmodel"}


def test_an_interruption_leaves_what_is_done_and_resume_does_the_rest(tmp_path: Path) -> None:
    assert go(tmp_path, Recorder(stop_at="b")) == 130
    assert [row["model"] for row in written(tmp_path)] == ["a"]
    measure = Recorder()
    assert go(tmp_path, measure, "--resume") == 0
    assert measure.asked == ["b", "c"]
    assert [row["model"] for row in written(tmp_path)] == ["a", "b", "c"]


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
    assert written(tmp_path)[0] == {"model": "a", "number": 1}


@pytest.mark.parametrize("changes", [{"settings": {"rounds": 4}}, {"versions": {"python": "3.12"}}])
def test_resume_starts_anew_with_other_settings(
    tmp_path: Path, changes: dict, capsys: pytest.CaptureFixture[str]
) -> None:
    go(tmp_path, Recorder())
    measure = Recorder()
    go(tmp_path, measure, "--resume", **changes)
    assert measure.asked == ["a", "b", "c"]
    assert f"order.json: made with other {next(iter(changes))}; begun anew" in capsys.readouterr().err


def test_without_resume_everything_is_measured_again(tmp_path: Path) -> None:
    go(tmp_path, Recorder())
    measure = Recorder(stop_at="b")
    go(tmp_path, measure)
    assert measure.asked == ["a", "b"]
    assert [row["model"] for row in written(tmp_path)] == ["a"]


def test_only_keeps_the_rows_of_the_others(tmp_path: Path) -> None:
    go(tmp_path, Recorder())
    measure = Recorder()
    assert go(tmp_path, measure, "--only", "c", "b") == 0
    assert measure.asked == ["b", "c"]
    assert [row["number"] for row in written(tmp_path)] == [1, 1, 2]


def test_only_of_an_unknown_piece_says_what_there_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert go(tmp_path, Recorder(), "--only", "d") == 2
    assert capsys.readouterr().err.endswith("] --only d: no such piece (known: a, b, c)\n")


def test_json_prints_the_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    go(tmp_path, Recorder(), "--json")
    assert json.loads(capsys.readouterr().out) == json.loads((tmp_path / "here" / "order.json").read_text())


def test_the_command_is_without_what_only_says_how() -> None:
    words = ["--rounds", "3", "--only", "a", "b", "--resume", "--sizes=1", "--json", "--out=x", "--out", "y", "--deep"]
    assert command_of("order", words) == ("python -m benchmarks.order --rounds 3 --sizes=1 --deep")
