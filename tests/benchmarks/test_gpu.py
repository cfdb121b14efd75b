"""The GPU benchmark's own code, dry-run on the host: every variant runs and is checked against plain."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import processes

TINY = ["--layers=2", "--hidden=128", "--vocab=256", "--sequence=64", "--batch=2", "--rounds=1"]


@pytest.mark.extended
def test_every_variant_runs_and_equals_plain(tmp_path: Path) -> None:
    path = tmp_path / "first_table.json"
    run = "import runpy; runpy.run_module('benchmarks.gpu', run_name='__main__')"
    status, _, err = processes.program(run, tmp_path, "--device=cpu", *TINY, f"--out={path}", seconds=200)
    assert status == 0, err
    result = json.loads(path.read_text())
    assert result["errors"] == {}
    assert set(result["rows"]) >= {"plain", "layer checkpointing", "save_on_cpu", "lowtide: keep", "lowtide: swap"}
    assert all(row["is_equal"] for row in result["rows"].values())
