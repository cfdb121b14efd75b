"""`lowtide diff`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lowtide.cli.main import main

GOLDEN = Path(__file__).parents[1] / "core" / "golden"


def test_exit_status_and_text(capsys: pytest.CaptureFixture[str]) -> None:
    solved, observed = str(GOLDEN / "solved_plan.json"), str(GOLDEN / "observed_plan.json")
    assert main(["diff", solved, solved]) == 0
    assert "the same fates" in capsys.readouterr().out
    assert main(["diff", observed, solved]) == 1
    assert capsys.readouterr().out.splitlines()[0].split() == ["observed_plan.json", "solved_plan.json", "change"]
    assert main(["diff", observed, solved, "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["rules_new"] == ["keep 'layers.7.mlp'"]
    assert document["is_same"] is False


def test_a_file_that_is_no_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    solved = str(GOLDEN / "solved_plan.json")
    other = tmp_path / "other.json"
    other.write_text("{}", encoding="utf-8")
    assert main(["diff", solved, str(tmp_path / "gone.json")]) == 2
    assert capsys.readouterr().err == f"{tmp_path / 'gone.json'}: no such file; check the path\n"
    assert main(["diff", solved, str(other)]) == 2
    assert capsys.readouterr().err == (
        f"{other}: plan: this is no plan of lowtide; write one: lowtide plan RUN.yaml --out plan.json\n"
    )
