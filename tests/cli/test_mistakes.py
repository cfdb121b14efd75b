"""What people mistype: one line with what to write instead, exit status 2, and nothing is written. No command is left out."""
# ruff: noqa: E501 -- messages are easier to compare in one piece

from __future__ import annotations

from pathlib import Path

import pytest

from lowtide.cli.main import COMMANDS, main

RUN = "model: {model_type: gpt2, n_embd: 16, n_layer: 1, n_head: 1}\ndata: {files: [text], sequence_length: 16}\n"
RUN += "train: {steps: 1, batch_size: 2, device: cpu}\n"
KNOWN = "'diff', 'doctor', 'explain', 'export', 'plan', 'profile', 'report', 'train'"
FORMS = "write to a file that ends in .html, .trace.json, .json or .pickle"
NO_RUN = "there is no metrics.jsonl in it; give its train.output_dir"
SIZE = "is not a size; write a number and a unit, such as 20GiB, 512MiB or 20GB"
CASES = {
    "plann run.yaml": f"lowtide: argument command: invalid choice: 'plann' (choose from {KNOWN}); did you mean 'plan'?; see lowtide --help",
    "diff plan.json": "lowtide diff: the following arguments are required: B.json; see lowtide diff --help",
    "diff gone.json plan.json": "gone.json: no such file; check the path",
    "diff plan.json plan.json": "plan.json: plan: this is no plan of lowtide; write one: lowtide plan RUN.yaml --out plan.json",
    "diff noise plan.json": "noise: this is not a text file; save it as UTF-8",
    "diff --jsn a b": "lowtide diff: unknown argument '--jsn'; did you mean '--json'?; see lowtide diff --help",
    "doctor --disks /tmp": "lowtide doctor: unknown argument '--disks'; did you mean '--disk'?; see lowtide doctor --help",
    "doctor --disk": "lowtide doctor: argument --disk: expected one argument; see lowtide doctor --help",
    "export gone.json": "lowtide export: the following arguments are required: --to, --profile; see lowtide export --help",
    "explain gone.yaml": "gone.yaml: no such file; check the path",
    "explain run.yaml --pp x": "lowtide explain: argument --pp: expected a whole number, such as 8192, not 'x'; see lowtide explain --help",
    "explain broken.yaml": "broken.yaml:2:1: not valid YAML: expected the node content, but found '<stream end>'; close the bracket or the quote that is open there",
    "plan run.yaml": "run.yaml: there is no budget to plan for; write --budget 20GiB, or 'budget: 20GiB' in the section 'memory'",
    "plan run.yaml --budgett 3GiB": "lowtide plan: unknown argument '--budgett'; did you mean '--budget'?; see lowtide plan --help",
    "plan run.yaml more.yaml": "lowtide plan: unknown argument 'more.yaml'; see lowtide plan --help",
    "plan run.yaml --budget banana": f"--budget: 'banana' {SIZE}",
    "plan run.yaml --budget -3GiB": f"--budget: '-3GiB' {SIZE}",
    "plan run.yaml --budget 1GiB --out folder": "--out: folder cannot be written: Is a directory; choose another file",
    "plan folder": "folder: this is a folder; give a file",
    "plan empty.yaml": "empty.yaml:1:1: the file is empty; write its sections, as in examples/",
    "plan run.yaml --devices -4 --hardware h100": "--devices: must be at least 1, not -4",
    "plan run.yaml --budget 1GiB --profile list.json": "--profile: list.json: profile: this is no profile of lowtide; write one: lowtide profile RUN.yaml --out profile.json",
    "plan run.yaml --budget 1GiB --profile folder": "--profile: folder: this is a folder; give a file",
    "plan run.yaml --budget 1GiB --report plan.pdf": f"report: plan.pdf: {FORMS}",
    "plan run.yaml --budget 1GiB --report no/where.html": "--report: no/where.html cannot be written: No such file or directory; choose another file",
    "plan run.yaml --budget 1GiB --profile plan.json": "--profile: plan.json: profile: this is no profile of lowtide; write one: lowtide profile RUN.yaml --out profile.json",
    "plan run.yaml --devices 0 --hardware h100": "--devices: must be at least 1, not 0",
    "plan run.yaml --budget 1GiB --cluster h800": "--cluster: is for a plan for a cluster; write --devices, or a section 'parallel'",
    "profile run.yaml --hardware h100": "--hardware: a real step runs on the device of the run; add --fake, or leave it out",
    "profile run.yaml --out no/where.json": "--out: no/where.json cannot be written: No such file or directory; choose another file",
    "report gone": "gone: no such folder; give the train.output_dir of a run of `lowtide train`",
    "report .": f".: no run of `lowtide train`: {NO_RUN}",
    "report . --out run.pdf": f"report: run.pdf: {FORMS}",
    "report run.yaml": "run.yaml: this is a file; give the train.output_dir of a run of `lowtide train`",
    "export list.json --to megatron --profile list.json": "list.json: plan: this is no plan of lowtide; write one: lowtide plan RUN.yaml --out plan.json",
    "train folder": "folder: this is a folder; give a file",
    "train run.yaml --steps 0": "--steps: must be at least 1, not 0",
    "train run.yaml --steps x": "lowtide train: argument --steps: expected a whole number, such as 8192, not 'x'; see lowtide train --help",
    "train broken.yaml": "broken.yaml:2:1: not valid YAML: expected the node content, but found '<stream end>'; close the bracket or the quote that is open there",
}  # fmt: skip


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(RUN)
    Path("broken.yaml").write_text("[[[\n")
    Path("plan.json").write_text('{"a": 1}')
    Path("list.json").write_text("[]")
    Path("empty.yaml").write_text("")
    Path("folder").mkdir()
    Path("noise").write_bytes(b"\x00\x01\xff")


@pytest.mark.parametrize("line", CASES)
def test_one_line_with_the_fix(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(Path().iterdir())
    try:
        status = main(line.split())
    except SystemExit as left:  # argparse
        status = left.code
    said = capsys.readouterr()
    told = [text for text in said.err.splitlines() if not text.startswith("lowtide: ") or text == CASES[line]]
    assert (status, said.out, told) == (2, "", [CASES[line]])
    assert sorted(Path().iterdir()) == before


def test_no_command_is_left_out() -> None:
    assert {line.split()[0] for line in CASES} >= set(COMMANDS)
