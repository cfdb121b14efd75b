"""The GPU benchmark's own code, dry-run on the host: every variant runs and is checked against plain."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TINY = ["--layers=2", "--hidden=128", "--vocab=256", "--sequence=64", "--batch=2", "--rounds=1"]


@pytest.mark.slow
def test_every_variant_runs_and_equals_plain(tmp_path: Path) -> None:
    out = tmp_path / "first_table.json"
    command = [sys.executable, "-m", "benchmarks.gpu", "--device=cpu", *TINY, f"--out={out}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert result["errors"] == {}
    assert set(result["rows"]) >= {"plain", "layer checkpointing", "save_on_cpu", "lowtide: keep", "lowtide: swap"}
    assert all(row["is_equal"] for row in result["rows"].values())
