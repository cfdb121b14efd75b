"""What a run leaves for its report when it fails, is killed, or finds a full disk; and files that were edited badly."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.train.progress import MetricsFile, StepRecord
from lowtide.cli.main import main
from lowtide.errors import ConfigError
from lowtide.report.elements import RunState, Table, from_json, to_json, verdict
from lowtide.report.rank_step import RankStep, rank_table
from lowtide.report.run_folder import RunFiles, report_of_folder
from lowtide.report.write import page
from lowtide.timeline.events import Event

STATE = RunState(
    state="running", num_steps=9, num_ranks=1, host="elsewhere", pid=1, process_start="5", began="2026-01-01T00:00:00"
)
HERE = RunState.now(num_steps=9, num_ranks=2, device="cpu")
STEP = RankStep(
    rank=1,
    step=7,
    schedule="1f1b",
    holds="stage 1: layers 2-3",
    spans=(
        Event(lane="wait", name="1RECV_F0", start=-3.0, end=-2.0),
        Event(lane="forward", name="1F0", start=-2.0, end=-1.5),
        Event(lane="backward", name="1B0", start=-1.5, end=-0.5),
        Event(lane="send", name="1SEND_B0", start=-0.5, end=0.5),
    ),
    memory=((-1.5, 300), (-0.5, 100)),
    memory_is="activations, as lowtide counts them",
    peaks=((1, 300), (7, 400)),
    predicted_bytes=None,
    budget_bytes=1 << 20,
)


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (dataclasses.replace(STATE, state="done"), ()),
        (HERE, ()),
        (
            dataclasses.replace(STATE, state="failed", why="RuntimeError: bad", step=4),
            ("This run failed in step 4 of 9", "RuntimeError: bad"),
        ),
        (
            dataclasses.replace(HERE, state="failed", why="RuntimeError: bad", rank=1),
            ("This run failed before its first step on rank 1", "RuntimeError: bad"),
        ),
        (
            dataclasses.replace(STATE, state="stopped", why="SIGTERM"),
            (
                "This run was stopped after step 3 of 9",
                "By SIGTERM. The same command goes on from its last checkpoint.",
            ),
        ),
        (
            STATE,
            (
                "Step 3 of 9 is the last that is known",
                "It goes on, or was killed: only elsewhere, where it ran, can tell.",
            ),
        ),
    ],
)
def test_what_is_said_first(state: RunState, said: tuple[str, ...]) -> None:
    assert verdict(state, 3) == said
    assert from_json(RunState, to_json(state)) == state


def test_a_process_that_is_gone_was_killed() -> None:
    """One with its number that began at another time is another one."""
    assert HERE.is_alive is True
    assert STATE.is_alive is None
    for gone in (dataclasses.replace(HERE, process_start="1"), dataclasses.replace(HERE, pid=2**22 + 1)):
        assert gone.is_alive is False
        assert verdict(gone, 3)[0] == "This run ended without a word after step 3 of 9"


def test_ranks_in_a_file_and_a_table() -> None:
    assert from_json(RankStep, to_json(STEP)) == STEP
    table = rank_table((STEP,))
    assert table.rows[1] == (
        "1", "stage 1: layers 2-3", "1.50 s (60 %)", "1.00 s (40 %)", "<0.001 MiB", "-", "1.0 MiB",
    )  # fmt: skip
    with pytest.raises(ConfigError):
        from_json(RankStep, to_json(STEP).replace('"wait"', '"weight"'))


@pytest.mark.parametrize("kind", [RunState, RankStep, Table])
@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"events": [[]]}', '{"a": ' * 9000])
def test_files_that_were_edited_badly(kind: Any, text: str) -> None:
    with pytest.raises(ConfigError):
        from_json(kind, text)


class FullDisk:
    """Every write of this file finds the disk full, after some bytes."""

    def __init__(self, file: Any, num_bytes: int) -> None:
        self._file, self._left = file, num_bytes

    def write(self, data: memoryview) -> int:
        taken = min(len(data), self._left)
        if not taken:
            raise OSError(28, "No space left on device")
        self._left -= taken
        return self._file.write(data[:taken])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _record(step: int) -> StepRecord:
    return StepRecord(
        step=step, loss=0.5, grad_norm=1.0, learning_rate=0.1, step_seconds=1.0, tokens_per_second=1.0, peak_bytes=None,
        resident_bytes=None, peak_resident_bytes=None, tide=None,
    )  # fmt: skip


def test_lines_on_a_full_disk_are_whole_or_not_there(tmp_path: Path) -> None:
    said: list[str] = []
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path, first_step=0, warn=said.append)
    metrics.append(_record(1))
    metrics._file = FullDisk(metrics._file, 20)
    metrics.append(_record(2))
    metrics.append(_record(3))
    metrics._file = metrics._file._file  # there is room again
    metrics.append(_record(4))
    metrics.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 4]
    assert said == [
        f"lowtide: {path} cannot be written: No space left on device; training goes on without a record of these steps"
    ]
    assert metrics.losses_sha256() is not None


def test_other_files_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    files = RunFiles(tmp_path, said.append)
    files.begin(num_steps=9, num_ranks=1, is_first=True, device="cpu")

    def full(self: Path, text: str, encoding: str) -> int:
        with self.open("w") as file:
            file.write(text[:5])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        files.note_rank(lambda: STEP, step=1, is_last=False)
        files.failed("RuntimeError: bad", step=2, rank=0)
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
    assert said == [
        f"lowtide: {tmp_path / 'rank-1.json'} cannot be written: No space left on device; training goes on, and its "
        "report will lack what happens from now on"
    ]
    files.note_peak(2, 5)
    files.note_rank(lambda: STEP, step=2, is_last=False)
    assert from_json(RankStep, (tmp_path / "rank-1.json").read_text()).peaks == ((2, 5),)


def test_ranks_write_the_same_steps(tmp_path: Path) -> None:
    files, written = RunFiles(tmp_path, print), []

    def make(step: int) -> RankStep:
        written.append(step)
        return STEP

    for step in range(5, 60):
        files.note_rank(lambda step=step: make(step), step=step, is_last=step == 59)
    assert written == [*range(5, 21), 32, 48, 59]


def _fails_at(step: int, folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> Path:
    """A run whose forward pass raises in a step."""
    from examples.train import trainer

    text, run = folder / "text.txt", folder / "run.yaml"
    text.write_text("the tide goes out and comes back. " * 200, encoding="utf-8")
    run.write_text(
        "model: {model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, "
        f"num_attention_heads: 2}}\ndata: {{files: [{text}], sequence_length: 32}}\n"
        f"train: {{steps: 5, batch_size: 4, output_dir: {folder / 'out'}, engine: host}}\n"
        "memory: {budget: 2MiB, min_bytes: 0}\n",
        encoding="utf-8",
    )
    take = trainer.Trainer._run_micro_batch

    def failing(self: Any, tokens: torch.Tensor, *, is_last: bool) -> torch.Tensor:
        if self.step == step - 1:
            raise error
        return take(self, tokens, is_last=is_last)

    monkeypatch.setattr(trainer.Trainer, "_run_micro_batch", failing)
    if isinstance(error, ValueError):
        with pytest.raises(ValueError, match="a <bad> batch"):
            main(["train", str(run)])
    else:
        assert main(["train", str(run)]) == 1
    return folder / "out"


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (ValueError("a <bad> batch"), "ValueError: a <bad> batch"),
        (
            MemoryError("no room"),
            "step 4: out of memory: no room; lower train.batch_size or memory.budget",
        ),
    ],
)
def test_a_run_that_failed(error: Exception, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = report_of_folder(_fails_at(4, tmp_path, monkeypatch, error))
    heading, text, known = report.failure
    assert (heading, text) == ("This run failed in step 4 of 5", why)
    assert known.startswith("The highest peak until then was ")
    assert "; the plan had said " in known and known.endswith(" of a budget of 2.0 MiB.")
    assert [row.step for row in report.history] == [1, 2, 3]
    html = page(report)
    assert html.index("This run failed") < html.index('<div class="tiles">')
    assert "a &lt;bad&gt; batch" in html or isinstance(error, MemoryError)
    assert "What happened" in html


def test_a_run_that_was_killed_and_one_that_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, pid, said in (
        ("killed", 2**22 + 1, "This run ended without a word after step 0"),
        ("on", os.getpid(), ""),
    ):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "run.json").write_text(to_json(dataclasses.replace(HERE, pid=pid)), encoding="utf-8")
        failure = report_of_folder(folder).failure
        assert (failure[0] if failure else "").startswith(said) and bool(failure) == bool(said)
    (folder / "rank-0.json").write_text("{}", encoding="utf-8")
    assert main(["report", str(folder), "--out", str(folder / "run.json")]) == 2
    assert capsys.readouterr().err == (
        f"{folder / 'rank-0.json'}: not as lowtide wrote it: missing key 'rank'; delete it for a report without it\n"
    )


def test_losses_that_are_no_numbers(tmp_path: Path) -> None:
    line = {"step": 1, "loss": float("nan"), "step_seconds": 0.5, "peak_bytes": None}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8")
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "out.json")]) == 0
    assert json.loads((tmp_path / "out.json").read_text(), parse_constant=pytest.fail)["steps"][0]["loss"] is None


def test_the_measured_peak_is_that_of_the_plan_in_force(tmp_path: Path) -> None:
    """Plans that were corrected may have needed more. What failed is told the highest of all."""
    tide = {"saved_bytes": 800, "kept_bytes": 200, "aliased_bytes": 40, "num_forwards": 2}
    lines = [
        {"step": step, "loss": 1.0, "step_seconds": 0.5, "peak_bytes": peak, "plan": {"digest": digest}, "tide": tide}
        for step, peak, digest in ((1, 900 << 20, "a"), (2, 500 << 20, "b"), (3, 400 << 20, "b"))
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    state = dataclasses.replace(HERE, state="failed", why="one\n  - two", step=4)
    (tmp_path / "run.json").write_text(to_json(state), encoding="utf-8")
    report = report_of_folder(tmp_path)
    assert report.measured.peak_bytes == 500 << 20
    assert report.failure[1:] == ("one\n  - two", "The highest peak until then was 900.0 MiB.")
    assert "white-space: pre-line" in page(report)
    peak, saved = (tile for tile in report.tiles if tile.what in ("peak, measured", "saved by the plans"))
    assert (peak.value, peak.beside) == ("500.0 MiB", "temporaries not counted")
    assert saved.beside == "70 % of the <0.001 MiB that a forward pass saves"
    old = json.loads(to_json(state))
    del old["device"]  # as 0.1.0 wrote it
    assert from_json(RunState, json.dumps(old)).device == ""
