"""Rows are in the file as soon as they are there, and a run that resumes does not lose or repeat them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.record import Record, read
from benchmarks.rows import Rows


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
