"""Absurd flags and files on the command line: one line, exit status 2, before torch is imported."""
# ruff: noqa: E501 -- messages are easier to compare in one piece

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lowtide.cli.main import main

GOOD = "model: {model_type: gpt2, n_embd: 16, n_layer: 1, n_head: 1}\ndata: {files: [text], sequence_length: 16}\n"
GOOD += "train: {steps: 1, batch_size: 2, device: cpu}\n"


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(GOOD)
    Path("text").write_text("a tale of two cities\n" * 20)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err.rstrip("\n")


NO_FOLDER = "cannot be made or written to: No such file or directory; choose another folder"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train", "run.yaml", "--output-dir", "/proc/x"), f"--output-dir: /proc/x {NO_FOLDER}"),
        (
            ("train", "run.yaml", "--output-dir", "text"),
            "--output-dir: text cannot be made or written to: File exists; choose another folder",
        ),
        (
            ("train", "run.yaml", "--output-dir", "text/x/y"),
            "--output-dir: text/x/y cannot be made or written to: Not a directory; choose another folder",
        ),
        (("train", "run.yaml", "--steps", "9" * 30), f"--steps: must be at most 1000000000000000, not {'9' * 30}"),
        (("train", "run.yaml", "--steps", "-1"), "--steps: must be at least 1, not -1"),
        (
            ("plan", "run.yaml", "--budget", "9" * 26),
            f"--budget: {'9' * 26} is too large; the largest size is 1048576TiB",
        ),
        (
            ("plan", "run.yaml", "--budget", "9" * 5000),
            f"--budget: '{'9' * 40}...' is not a size; write a number and a unit, such as 20GiB, 512MiB or 20GB",
        ),
        (
            ("plan", "run.yaml", "--budget", "1GiB", "--host-budget", "2000000TiB"),
            "--host-budget: 2000000TiB is too large; the largest size is 1048576TiB",
        ),
        (
            ("plan", "run.yaml", "--budget", "1GiB", "--out", "/proc/x"),
            "--out: /proc/x cannot be written: No such file or directory; choose another file",
        ),
        (("profile", "run.yaml", "--out", "."), "--out: . cannot be written: Is a directory; choose another file"),
        (
            ("plan", "run.yaml", "--budget", "1GiB", "--profile", "/dev/zero"),
            "--profile: /dev/zero: this is a pipe or a device; write its content to a file first",
        ),
        (
            ("explain", "run.yaml", "--num-layers", "100000000"),
            "run.yaml:1:1: missing section 'recompute_config' or 'swap_config'; write one of them, or use lowtide plan for "
            "a section 'memory'",
        ),
        (("train", "/dev/zero"), "/dev/zero: this is a pipe or a device; write its content to a file first"),
        (("train", "a\nb\x1b[2J"), r"a\nb\x1b[2J: no such file; check the path"),
    ],
)
def test_one_line(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str) -> None:
    before = sorted(Path().iterdir())
    assert refused(capsys, *arguments) == message
    assert sorted(Path().iterdir()) == before


def test_layers_of_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.yaml").write_text("model: {model_config: {num_layers: 4}}\nrecompute_config: {recompute: true}\n")
    expected = "--num-layers: 'num_layers' must be at most 4096, not 100000000"
    assert refused(capsys, "explain", "run.yaml", "--num-layers", "100000000") == expected


@pytest.mark.parametrize(("key", "folder"), [("output_dir", "text/x"), ("checkpoint_dir", "/proc/x")])
def test_folders_of_the_file(capsys: pytest.CaptureFixture[str], key: str, folder: str) -> None:
    Path("run.yaml").write_text(GOOD.replace("steps: 1", f"steps: 1, {key}: {folder}"))
    why = "Not a directory" if key == "output_dir" else "No such file or directory"
    expected = f"run.yaml:3:{29 + len(key) - 8}: 'train.{key}': {folder} cannot be made or written to: {why}; "
    assert refused(capsys, "train", "run.yaml") == f"{expected}choose another folder"


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_without_permission(capsys: pytest.CaptureFixture[str]) -> None:
    Path("locked").mkdir(mode=0o500)
    expected = "--output-dir: locked/x cannot be made or written to: Permission denied; choose another folder"
    assert refused(capsys, "train", "run.yaml", "--output-dir", "locked/x") == expected


def test_a_file_is_refused_before_torch_comes() -> None:
    """What makes it quick: a mistake that needs no torch does not wait for it."""
    code = (
        "import sys\nfrom lowtide.cli.main import main\n"
        "assert main(['train', 'run.yaml', '--output-dir', '/proc/x']) == 2\n"
        "assert main(['plan', 'run.yaml', '--budget', '9' * 26]) == 2\n"
        "assert 'torch' not in sys.modules\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, env=environment)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "[text]",
            "['**x']",
            "run.yaml:2:16: 'data.files[0]': no file matches '**x'; check the path",
        ),
        (
            "[text]",
            f"[{'x' * 300}]",
            f"run.yaml:2:16: 'data.files[0]': no file matches '{'x' * 59}...{'x' * 16}'; check the path",
        ),
        ("[text]", "[/dev/zero]", "run.yaml:2:16: 'data.files[0]': no file matches '/dev/zero'; check the path"),
        (
            "steps: 1",
            f"steps: 1, resume: {'x' * 300}",
            f"run.yaml:3:27: 'train.resume': {'x' * 300} is not a checkpoint; write auto, never, or the path of a folder "
            "such as step-00000100",
        ),
        (
            "device: cpu",
            "device: 'cuda:99999999999999999999'",
            "run.yaml:3:42: 'train.device': 'cuda:99999999999999999999' is not a device; write auto, cpu or the "
            "accelerator's name, such as cuda",
        ),
    ],
)
def test_what_only_training_sees(capsys: pytest.CaptureFixture[str], old: str, new: str, message: str) -> None:
    Path("run.yaml").write_text(GOOD.replace(old, new))
    assert refused(capsys, "train", "run.yaml", "--output-dir", "out") == message


def test_weights_that_no_memory_holds(capsys: pytest.CaptureFixture[str]) -> None:
    """Without the check the kernel would end the process, without a word."""
    Path("run.yaml").write_text(GOOD.replace("n_embd: 16", "n_embd: 16, vocab_size: 99999999999"))
    text = refused(capsys, "train", "run.yaml", "--output-dir", "out")
    assert text.startswith("run.yaml:1:8: 'model': its weights are 5960.5 GiB, and ")
    assert text.endswith("; make the model smaller, or plan it without weights: lowtide plan")


@pytest.mark.parametrize("line", ['{"step": 1}', '{"a": ' * 20_000 + "}", "{}", '{"step": "x", "loss": 1}'])
def test_a_foreign_metrics_file(capsys: pytest.CaptureFixture[str], line: str) -> None:
    Path("out").mkdir()
    Path("out/metrics.jsonl").write_text(line + "\n")
    text = refused(capsys, "train", "run.yaml", "--output-dir", "out")
    assert text.startswith("out/metrics.jsonl: this is not a line of lowtide's: '{")
    assert text.endswith("'; move the file away, or choose another train.output_dir")
    assert Path("out/metrics.jsonl").read_text() == line + "\n"


def test_a_plan_is_still_written() -> None:
    """The file is looked at before the work is done, and an older one stays until then."""
    Path("plan.json").write_text("old")
    assert main(["plan", "run.yaml", "--budget", "1", "--out", "plan.json"]) == 2
    assert Path("plan.json").read_text() == "old"
    assert main(["plan", "run.yaml", "--budget", "1GiB", "--out", "plan.json"]) == 0
    assert json.loads(Path("plan.json").read_text())["budget_bytes"] == 1 << 30
