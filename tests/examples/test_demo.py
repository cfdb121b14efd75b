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
    return {"runs": {"plain": run_of(), "plain, malloc": run_of(), **runs}}


ALL_RUNS = ("plain", "plain, malloc", "recompute", "mixed", "swap", "swap, state", "all elsewhere")


@pytest.mark.slow
@pytest.mark.parametrize(
    "names", [("plain", "mixed"), pytest.param(ALL_RUNS, marks=pytest.mark.extended)], ids=["", "all"]
)
def test_the_demo_prints_its_table_and_json_and_leaves_with_zero(
    demo: ModuleType, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each run is a process; one of the plans has every fate. They take their steps in turn."""
    assert tuple(demo.RUNS) == ALL_RUNS
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(demo, "RUNS", {name: demo.RUNS[name] for name in names})
    status = demo.main(["--tiny", "--steps", "2", "--json"])
    out, err = capsys.readouterr()
    assert status == 0, err
    report = json.loads(out)
    assert list(report["runs"]) == list(names)
    plain = report["runs"]["plain"]
    for name, run in report["runs"].items():
        assert run["losses"] == plain["losses"], name
        assert run["weights_sha256"] == plain["weights_sha256"], name
        assert run["peak_resident_bytes"] >= run["rest_resident_bytes"] > run["state_bytes"] > 0
        assert run["kept_bytes"] + run["swapped_bytes"] + run["recomputed_bytes"] == run["saved_bytes"] > 0
        assert len(run["step_seconds"]) == report["num_steps"] - 1
    assert report["runs"]["mixed"]["recomputed_bytes"] > 0
    assert report["runs"]["mixed"]["swapped_bytes"] > 0
    if "swap" in names:
        assert report["runs"]["recompute"]["recomputed_bytes"] > 0
        assert report["runs"]["swap"]["swapped_bytes"] > 0
    table = err.split("\n\n")[1].splitlines()
    assert re.split(r"\s{2,}", table[0]) == [
        *(
            "run",
            "peak MiB",
            "above rest",
            "kept",
            "swapped",
            "recomputed",
            "s/step",
            "range",
            "x fastest plain",
            "losses, weights",
        ),
    ]
    assert [re.split(r"\s{2,}", line)[0] for line in table[1:]] == list(report["runs"])
    assert [line.split()[-1] for line in table[1:]] == ["-"] + ["identical"] * (len(names) - 1)
    steps = [line.split(" step ") for line in err.splitlines() if " step " in line]
    turns = [name.strip() for name, _ in steps]
    assert turns == [*names, *names[1:], names[0]] and [step[0] for _, step in steps] == ["1"] * len(names) + [
        "2"
    ] * len(names)


FEW = ("plain", "mixed")
TWO_RUNS = f"""
import runpy, sys
demo = runpy.run_path({str(DEMO)!r})
for name in set(demo["RUNS"]) - set({FEW!r}):
    del demo["RUNS"][name]
sys.exit(demo["main"](["--tiny", "--steps", "5000"]))
"""


@pytest.mark.slow
@pytest.mark.extended
def test_ctrl_c_ends_the_demo_and_its_children() -> None:
    """Of two runs: each is a process that loads torch."""
    with subprocess.Popen(
        [sys.executable, "-c", TWO_RUNS],
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    ) as process:
        assert process.stderr is not None
        for name in FEW:
            assert process.stderr.readline() == f"{name:<13} starting\n"
        assert "step 1/5000" in process.stderr.readline()
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        pids = [int(pid) for pid in children.read_text().split()] if children.exists() else []
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        assert process.wait(timeout=120) == 130
    assert rest.splitlines()[-1] == "demo: interrupted"
    assert "Traceback" not in rest
    deadline = time.monotonic() + 120
    while (left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left


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
    assert captured.out.strip().splitlines()[3].split() == [
        *("swap", "3", "2", "1", "1", "1", "2.00", "1.00", "-", "4.00", "1.00", "DIFFERENT")
    ]


# -- words and table ---------------------------------------------------------------------------------------------------


def cells_of(demo: ModuleType, report: dict[str, Any]) -> dict[str, dict[str, str]]:
    header, *rows = demo.rows(report)
    return {row[0]: dict(zip(header, row, strict=True)) for row in rows}


def measured(*, mib: int, seconds: float, **changes: Any) -> dict[str, Any]:
    return run_of(peak_resident_bytes=mib << 20, step_seconds=[seconds], **changes)


COMMITTED = DEMO.parents[1] / "benchmarks" / "results" / "cpu-2-core" / "demo.json"


def made_up(**runs: dict[str, Any]) -> dict[str, Any]:
    return {"runs": {"plain": measured(mib=150, seconds=3.0), "plain, malloc": measured(mib=160, seconds=2.0), **runs}}


def reports() -> list[dict[str, Any]]:
    """What was measured, and runs in which the plans win, lose, tie and differ."""
    return [
        json.loads(COMMITTED.read_text()),
        made_up(recompute=measured(mib=80, seconds=2.5), mixed=measured(mib=90, seconds=1.5), swap=run_of()),
        made_up(recompute=measured(mib=200, seconds=9.0), mixed=measured(mib=160, seconds=2.0)),
        made_up(mixed=measured(mib=70, seconds=2.2), swap=measured(mib=70, seconds=2.2, loss=1.25)),
        report_of(recompute=run_of(), mixed=run_of(), swap=run_of()),
    ]


@pytest.mark.parametrize("number", range(5))
def test_words_and_table_say_the_same(demo: ModuleType, number: int) -> None:
    """Every number and every comparison of the sentences is found again in the cells of the table."""
    report = reports()[number]
    cells = cells_of(demo, report)
    sentences = demo.words(report)
    name, peak = re.fullmatch(
        r"The fastest plain run is '(.*)', with a peak of (\d+) MiB\. Compared with it:", sentences[0]
    ).groups()  # type: ignore[union-attr]
    base = cells[name]
    assert (base[demo.RATIO], base["peak MiB"]) == ("1.00", peak)
    assert all(float(cells[plain][demo.RATIO]) >= 1 for plain in ("plain", "plain, malloc"))
    plans = [name for name in cells if name not in ("plain", "plain, malloc")]
    assert len(sentences) == len(plans) + 3
    for name, sentence in zip(plans, sentences[1:], strict=False):
        found = re.fullmatch(r"(.*) takes (.*) of its time, with a peak (?:as high|(\d+) % (lower|higher))\.", sentence)
        assert found is not None, sentence
        assert (found[1], found[2]) == (name, cells[name][demo.RATIO])
        difference = int(cells[name]["peak MiB"]) / int(base["peak MiB"]) - 1
        said = int(found[3] or 0) / 100 * (-1 if found[4] == "lower" else 1)
        assert abs(said - difference) <= 0.005
    lowest, fastest = re.fullmatch(
        r"Of the plans (.*) ha(?:s|ve) the lowest peak, and (.*) ha(?:s|ve) the shortest step\.", sentences[-2]
    ).groups()  # type: ignore[union-attr]
    for names, column in ((lowest, "peak MiB"), (fastest, demo.RATIO)):
        best = min(float(cells[name][column]) for name in plans)
        assert names.split(" and ") == [name for name in plans if float(cells[name][column]) == best]
    differing = [name for name in cells if cells[name]["losses, weights"] == "DIFFERENT"]
    if differing:
        assert sentences[-1] == f"NOT the same to the bit as plain: {', '.join(differing)}."
    else:
        assert sentences[-1] == "Every loss, and every weight at the end, is plain's to the bit."


def test_a_run_that_fails_ends_the_demo(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo.sys, "executable", "/bin/false")
    assert demo.main(["--tiny"]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == (
        "demo: run 'plain' failed with status 1; its own message is above"
    )
