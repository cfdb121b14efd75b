"""The demo: what it prints, what it returns, and that it notices a difference."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

DEMO = Path(__file__).parents[2] / "examples" / "demo.py"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", DEMO)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_of(loss: float = 1.5, weights: str = "aa", **changes: Any) -> dict[str, Any]:
    run = {f"{name}_bytes": 2**20 for name in ("state", "kept", "swapped", "recomputed", "rest_resident")}
    run |= {"peak_resident_bytes": 3 * 2**20, "step_seconds": [1.0, 2.0, 4.0]}
    return run | {"losses": [(2.5).hex(), loss.hex()], "weights_sha256": weights} | changes


def report_of(**runs: dict[str, Any]) -> dict[str, Any]:
    return {"runs": {"plain": run_of(), **runs}}


@pytest.mark.slow
def test_the_demo_prints_its_table_and_json_and_leaves_with_zero() -> None:
    command = [sys.executable, str(DEMO), "--tiny", "--steps", "2", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert list(report["runs"]) == ["plain", "plain, malloc", "recompute", "mixed", "swap"]
    plain = report["runs"]["plain"]
    for name, run in report["runs"].items():
        assert run["losses"] == plain["losses"], name
        assert run["weights_sha256"] == plain["weights_sha256"], name
        assert run["peak_resident_bytes"] >= run["rest_resident_bytes"] > run["state_bytes"] > 0
        assert run["kept_bytes"] + run["swapped_bytes"] + run["recomputed_bytes"] == run["saved_bytes"] > 0
        assert len(run["step_seconds"]) == report["num_steps"] - 1
    assert report["runs"]["recompute"]["recomputed_bytes"] > 0
    assert report["runs"]["swap"]["swapped_bytes"] > 0
    table = done.stderr.split("\n\n")[1].splitlines()
    assert re.split(r"\s{2,}", table[0]) == [
        *("run", "peak MiB", "above rest", "kept", "swapped", "recomputed", "s/step", "x plain", "losses, weights"),
    ]
    assert [re.split(r"\s{2,}", line)[0] for line in table[1:]] == list(report["runs"])
    assert [line.split()[-1] for line in table[1:]] == ["-"] + ["identical"] * 4
    assert "plain         step 2/2" in done.stderr


@pytest.mark.slow
def test_ctrl_c_ends_the_demo_and_its_children() -> None:
    command = [sys.executable, str(DEMO), "--tiny", "--steps", "5000"]
    with subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        # A suite that a shell started in the background ignores Ctrl-C, and its children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "plain         starting\n"
        assert "step 1/5000" in process.stderr.readline()
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        pids = [int(pid) for pid in children.read_text().split()] if children.exists() else []
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        assert process.wait(timeout=30) == 130
    assert rest.splitlines()[-1] == "demo: interrupted"
    assert "Traceback" not in rest
    time.sleep(0.1)
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_one_step_is_refused(demo: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        demo.main(["--steps", "1"])
    assert ended.value.code == 2
    assert "--steps must be at least 2: the first step warms up" in capsys.readouterr().err


def test_a_difference_is_found_and_said(demo: ModuleType) -> None:
    assert demo.differences(report_of(swap=run_of())["runs"]) == []
    assert demo.differences(report_of(swap=run_of(loss=1.25))["runs"]) == [
        "demo: run 'swap': the loss of step 2 is 1.25, in the plain run 1.5"
    ]
    assert demo.differences(report_of(swap=run_of(weights="bb"))["runs"]) == [
        "demo: run 'swap': the losses are the same, the weights at the end are not"
    ]
    nan = run_of(loss=float("nan"))
    assert demo.differences({"plain": nan, "swap": copy.deepcopy(nan)}) == []


def test_the_status_says_so_too(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = report_of(swap=run_of(loss=1.25))
    report |= {"size": demo.SIZES["tiny"], "num_parameters": 10**6, "num_steps": 3, "machine": {"threads": 1}}
    report["peak_method"] = "kernel"
    monkeypatch.setattr(demo, "run_all", lambda size_name, num_steps: report)
    assert demo.main([]) == 1
    captured = capsys.readouterr()
    assert captured.err == "demo: run 'swap': the loss of step 2 is 1.25, in the plain run 1.5\n"
    assert captured.out.strip().splitlines()[2].split() == [
        *("swap", "3", "2", "1", "1", "1", "2.00", "1.00", "DIFFERENT")
    ]


def test_a_run_that_fails_ends_the_demo(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo.sys, "executable", "/bin/false")
    assert demo.main(["--tiny"]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == (
        "demo: run 'plain' failed with status 1; its own message is above"
    )
