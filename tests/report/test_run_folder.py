"""Reports of runs of `lowtide train`: with a budget, by rules, of two stages, failed, and edited badly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lowtide.cli.main import main

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
    assert text.count("<figure>") == 4  # the run, memory, lanes, fates
    assert len(text.encode()) < 2_000_000
    assert main(["report", str(out), "--out", str(tmp_path / "run.json")]) == 0
    content = json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))
    assert [row["step"] for row in content["steps"]] == [1, 2, 3, 4]
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
    assert [row["step"] for row in content["steps"]] == [1, 2]
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
