"""The commands of questions (a), (b) and (c), end to end at a tiny scale."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.record import Record, read_all
from tests.support import processes


@pytest.fixture(scope="module", autouse=True)
def server() -> None:
    """Children are forked from the process that all tests fork from."""
    processes.begin()


def run(question: str, folder: Path, *arguments: str) -> int:
    main = importlib.import_module(f"benchmarks.{question}").main
    return main(["--scale=tiny", "--threads=1", f"--out={folder}", *arguments])


def record_of(folder: Path) -> Record:
    (record,) = read_all(folder)
    return record


def by_title(record: Record) -> dict[str, dict[str, Any]]:
    return {row["title"]: row for row in record.rows}


@pytest.mark.slow
@pytest.mark.extended
def test_time_against_memory_writes_a_record_and_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    methods = ["--methods", "layer checkpointing", "trl offloading", "lowtide"]
    given = ["--only", "gpt2", *methods, "--shares", "0.6", "0.001", "--rounds", "2"]
    assert not run("time_against_memory", tmp_path, *given)
    record = record_of(tmp_path)
    rows = by_title(record)
    assert list(rows) == ["plain", "layer checkpointing", "trl offloading", "lowtide 60%", "lowtide 0%"]
    for title in ("plain", "layer checkpointing", "lowtide 60%"):
        row = rows[title]
        assert row["error"] is None
        assert row["is_equal"] is True
        assert row["ratio_min"] <= row["ratio_median"] <= row["ratio_max"]
        assert row["seconds_median"] > 0
        assert row["package"]
    assert rows["plain"]["ratio_median"] == 1
    assert rows["plain"]["saved_bytes"] == 0
    ours = rows["lowtide 60%"]
    assert ours["budget_bytes"] < rows["plain"]["peak_bytes"]
    assert ours["is_within_budget"] == (ours["peak_bytes"] <= ours["budget_bytes"])
    assert ours["peak_bytes"] < rows["plain"]["peak_bytes"]
    assert rows["trl offloading"]["error"]  # not installed, or it wants an accelerator
    assert rows["lowtide 0%"]["error"].startswith("BudgetError: budget ")
    assert record.settings == {"scale": "tiny", "dtype": "float32", "threads": 1, "num_rounds": 2}
    assert "-- gpt2, 4 x 64" in capsys.readouterr().out

    assert not run("time_against_memory", tmp_path, *given, "--resume", "--json")
    assert json.loads(capsys.readouterr().out)["rows"] == record.rows


@pytest.mark.extended
def test_idle_writes_a_record(tmp_path: Path) -> None:
    assert not run("idle", tmp_path, "--only", "gpt2", "--rounds", "2")
    rows = by_title(record_of(tmp_path))
    assert list(rows) == ["plain", "plain, a second process", "lowtide keep", "lowtide"]
    assert all(row["is_equal"] and row["error"] is None for row in rows.values())
    assert rows["lowtide"]["copied_bytes"] == 0
    assert rows["lowtide"]["saved_bytes"] == 0


@pytest.mark.extended
def test_largest_writes_a_record(tmp_path: Path) -> None:
    methods = ["--methods", "layer checkpointing", "trl offloading"]
    assert not run("largest", tmp_path, "--only", "gpt2", "--measures", "batch", *methods, "--most", "3")
    rows = by_title(record_of(tmp_path))
    assert list(rows) == ["plain", "layer checkpointing", "trl offloading"]
    plain, checkpointing = rows["plain"], rows["layer checkpointing"]
    assert plain["size"] == 4
    assert checkpointing["size"] > 4
    assert checkpointing["ratio_median"] == checkpointing["size"] / 4
    assert checkpointing["peak_bytes"] <= checkpointing["budget_bytes"] == plain["peak_bytes"]
    assert checkpointing["is_equal"] is True
    assert rows["trl offloading"]["error"]
    assert {(row["vocabulary"], row["optimizer"]) for row in rows.values()} == {(32, "none")}


@pytest.mark.parametrize("question", ["time_against_memory", "largest", "idle"])
def test_an_unknown_model_is_one_line(question: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        run(question, tmp_path, "--only", "lama")
    assert str(caught.value) == "unknown model 'lama'; known: llama, gpt2, qwen3_moe, vit, t5, bert, unet"
