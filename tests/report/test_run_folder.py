"""Reports of runs of `lowtide train`: with a budget, by rules, on a full disk, and edited badly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from examples.train.progress import RunFiles
from examples.train.ranks import Ranks
from lowtide.cli.main import main
from lowtide.report.run_folder import report_of_folder

RUN = """
model: {{model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 2}}
data: {{files: [{text}], sequence_length: 32}}
train: {{steps: {steps}, batch_size: 4, output_dir: {out}, engine: host}}
memory: {memory}
"""


def _trained(folder: Path, memory: str, steps: int = 4) -> Path:
    text, run = folder / "text.txt", folder / "run.yaml"
    text.write_text("the tide goes out and comes back. " * 200, encoding="utf-8")
    run.write_text(RUN.format(text=text, out=folder / "out", memory=memory, steps=steps), encoding="utf-8")
    assert main(["train", str(run)]) == 0
    return folder / "out"


def test_a_run_within_a_budget(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = _trained(tmp_path, "{budget: 2MiB, min_bytes: 0}")
    capsys.readouterr()
    assert main(["report", str(out)]) == 0
    assert capsys.readouterr().out == f"{out / 'report.html'}\n"
    text = (out / "report.html").read_text(encoding="utf-8")
    assert text.count("<figure>") == 2  # memory, lanes
    assert len(text.encode()) < 2_000_000
    assert main(["report", str(out), "--out", str(tmp_path / "run.json")]) == 0
    content = json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))
    tiles = {tile["what"]: tile["value"] for tile in content["figures"]}
    assert tiles["steps done"] == "4"
    assert {"peak, predicted", "peak, measured", "step, measured"} <= tiles.keys()
    assert main(["report", str(out), "--out", str(tmp_path / "run.trace.json")]) == 0
    assert main(["diff", str(out / "plan.json"), str(out / "plan.json")]) == 0


def test_a_run_by_rules_that_was_cut_short(tmp_path: Path) -> None:
    out = _trained(tmp_path, "{swap: all, min_bytes: 0}", steps=2)
    metrics = out / "metrics.jsonl"
    metrics.write_text(metrics.read_text(encoding="utf-8") + '{"step": 3, "lo', encoding="utf-8")  # killed in a write
    assert main(["report", str(out), "--out", str(tmp_path / "run.json")]) == 0
    content = json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))
    assert {"what": "steps done", "value": "2"}.items() <= content["figures"][0].items()
    assert content["plan"] is None


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"{tmp_path}: no run of `lowtide train`: there is no metrics.jsonl in it; give its train.output_dir\n"
    )
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n', encoding="utf-8")
    assert main(["report", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"{tmp_path / 'metrics.jsonl'}:1: this is not a step that `lowtide train` wrote; delete the line "
        "for a report without it\n"
    )
    (tmp_path / "metrics.jsonl").write_text("", encoding="utf-8")
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "run.pdf")]) == 2
    assert capsys.readouterr().err.endswith("write to a file that ends in .html, .trace.json, .json or .pickle\n")
    assert main(["report", str(tmp_path)]) == 0  # a run that failed before its first step
    for name in ("plan.json", "step.json"):
        (tmp_path / name).write_text("{}", encoding="utf-8")
    assert main(["report", str(tmp_path)]) == 2
    assert capsys.readouterr().err.endswith("; delete it for a report without it\n")


class FullDisk:
    """Every write of this file finds the disk full, after some bytes."""

    def __init__(self, file: Any, num_bytes: int) -> None:
        self._file, self._left = file, num_bytes

    def __enter__(self) -> FullDisk:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, data: memoryview) -> int:
        taken = min(len(data), self._left)
        if not taken:
            raise OSError(28, "No space left on device")
        self._left -= taken
        return self._file.write(data[:taken])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def test_lines_on_a_full_disk_are_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    path = tmp_path / "metrics.jsonl"
    files = RunFiles(tmp_path, first_step=0, warn=said.append)
    record = {"loss": 0.5, "step_seconds": 1.0}
    files.append({"step": 1, **record})
    opened = Path.open
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda *args, **how: FullDisk(opened(*args, **how), 20))
        files.append({"step": 2, **record})
        files.append({"step": 3, **record})
    files.append({"step": 4, **record})  # there is room again
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 4]
    assert said == [
        f"lowtide: {path} cannot be written: No space left on device; training goes on without a record of these steps"
    ]


def test_a_plan_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(Ranks, "say", lambda self, text: said.append(text))
    write = Path.write_text

    def full(self: Path, text: str, encoding: str) -> int:
        if self.name == ".plan.json.partial":
            raise OSError(28, "No space left on device")
        return write(self, text, encoding=encoding)

    monkeypatch.setattr(Path, "write_text", full)
    out = _trained(tmp_path, "{budget: 2MiB, min_bytes: 0}", steps=3)
    assert not (out / "plan.json").exists()
    assert [line for line in said if line.startswith("lowtide: ") and "plan.json" in line] == [
        f"lowtide: {out / 'plan.json'} cannot be written: No space left on device; training goes on, and its report "
        "will lack the plan"
    ]
    assert main(["report", str(out), "--out", str(tmp_path / "out.json")]) == 0


def test_losses_that_are_no_numbers(tmp_path: Path) -> None:
    line = {"step": 1, "loss": float("nan"), "step_seconds": 0.5, "peak_bytes": None}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8")
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "out.json")]) == 0
    content = json.loads((tmp_path / "out.json").read_text(), parse_constant=pytest.fail)
    assert content["figures"][0] == {"what": "steps done", "value": "1", "beside": "loss nan"}


def test_the_measured_peak_is_that_of_the_plan_in_force(tmp_path: Path) -> None:
    """Plans that were corrected may have needed more."""
    tide = {"saved_bytes": 800, "kept_bytes": 200, "aliased_bytes": 40, "num_forwards": 2}
    common = {"loss": 1.0, "step_seconds": 0.5, "tide": tide, "device": "cpu"}
    lines = [
        {"step": step, "peak_bytes": peak, "plan": {"digest": digest}, **common}
        for step, peak, digest in ((1, 900 << 20, "a"), (2, 500 << 20, "b"), (3, 400 << 20, "b"))
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    report = report_of_folder(tmp_path)
    assert report.measured.peak_bytes == 500 << 20
    peak, saved = (tile for tile in report.tiles if tile[0] in ("peak, measured", "saved by the plans"))
    assert peak[1:] == ("500.0 MiB", "temporaries not counted")
    assert saved[2] == "70 % of the <0.001 MiB that a forward pass saves"
