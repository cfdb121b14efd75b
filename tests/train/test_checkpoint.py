"""Checkpoints: whole or not there, the same bits back, and a clear word when they do not fit."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from lowtide.errors import ConfigError
from lowtide.train import checkpoint
from lowtide.train.ranks import Ranks
from lowtide.train.stop import TrainingError

CPU = torch.device("cpu")
SETTINGS: dict[str, object] = {"train.learning_rate": 0.1, "model.fields": [1, 2]}


class Job:
    """A model with state in its optimizer."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2, bias=False))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)

    def step(self) -> None:
        self.model(torch.randn(3, 4)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, folder: Path, step: int, *, num_kept: int = 2) -> Path:
        return checkpoint.save(
            folder,
            step=step,
            model=self.model,
            optimizer=self.optimizer,
            data={"position": 7 * step},
            settings=SETTINGS,
            ranks=Ranks(),
            device=CPU,
            num_kept=num_kept,
        )

    def load(
        self, path: Path, *, settings: dict[str, object] = SETTINGS, ranks: Ranks | None = None
    ) -> checkpoint.Saved:
        return checkpoint.load(
            path, model=self.model, optimizer=self.optimizer, settings=settings, ranks=ranks or Ranks()
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        found = dict(self.model.state_dict())
        for index, state in self.optimizer.state_dict()["state"].items():
            found |= {f"{index}.{key}": torch.as_tensor(value) for key, value in state.items()}
        return found


@pytest.fixture
def job() -> Job:
    job = Job(seed=1)
    job.step()
    return job


def error_of_load(path: Path, **changes: object) -> str:
    with pytest.raises(ConfigError) as error:
        Job(seed=3).load(path, **changes)  # type: ignore[arg-type]
    return str(error.value)


def test_everything_comes_back_to_the_bit(job: Job, tmp_path: Path) -> None:
    path = job.save(tmp_path, 3)
    expected = [job.step() or random.random(), torch.rand(2).tolist(), np.random.rand(), job.tensors()]
    other = Job(seed=2)
    saved = other.load(path)
    checkpoint.set_random_state(saved.random, CPU)
    found = [other.step() or random.random(), torch.rand(2).tolist(), np.random.rand(), other.tensors()]
    assert (saved.step, saved.data) == (3, {"position": 21})
    assert found[:3] == expected[:3]
    assert found[3].keys() == expected[3].keys()
    assert all(torch.equal(found[3][key], expected[3][key]) for key in expected[3])


def test_newest_two_are_kept_and_nothing_else_is_left(job: Job, tmp_path: Path) -> None:
    for step in (1, 2, 10):
        job.save(tmp_path, step)
    assert [path.name for path in checkpoint.find(tmp_path)] == ["step-00000002", "step-00000010"]
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("moment", ["save", "_write_json", "_describe_files"])
def test_killed_while_writing_leaves_the_old_one(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """A kill is an exception that nobody catches: the folder is looked at as it was left."""
    old = job.save(tmp_path, 1)
    job.step()

    def die(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.dcp if moment == "save" else checkpoint, moment, die)
        with pytest.raises(KeyboardInterrupt):
            job.save(tmp_path, 2)
    assert checkpoint.find(tmp_path) == [old]
    assert Job(seed=2).load(old).step == 1
    job.save(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


def test_disk_full_is_said_and_harms_nothing(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = job.save(tmp_path, 1)

    def fill(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.dcp, "save", fill)
    with pytest.raises(TrainingError) as error:
        job.save(tmp_path, 2)
    assert str(error.value) == (
        f"checkpoint {tmp_path}/step-00000002 could not be written: [Errno 28] No space left on device; "
        "older ones are untouched"
    )
    assert checkpoint.find(tmp_path) == [old]


def test_truncated_file_is_named(job: Job, tmp_path: Path) -> None:
    path = job.save(tmp_path, 1)
    file = next(path.glob("*.distcp"))
    num_bytes = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-10])
    assert error_of_load(path) == (
        f"{path}: the checkpoint is damaged: {file.name} has {num_bytes - 10} of {num_bytes} bytes; "
        "delete this folder to resume from the one before it"
    )


def test_missing_file_is_named(job: Job, tmp_path: Path) -> None:
    path = job.save(tmp_path, 1)
    (path / ".metadata").unlink()
    assert "the checkpoint is damaged: .metadata is missing; delete" in error_of_load(path)
    (path / "run.json").unlink()
    assert "the checkpoint is damaged: run.json is missing; delete" in error_of_load(path)


def test_flipped_bits_do_not_pass(job: Job, tmp_path: Path) -> None:
    """Same size, other content: torch itself would read it as another number."""
    path = job.save(tmp_path, 1)
    weights = job.model[0].weight.detach().numpy().tobytes()
    file = next(path.glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[content.index(weights) + 5] ^= 0x10
    file.write_bytes(content)
    assert error_of_load(path) == (
        f"{path}: the checkpoint is damaged: the content of {file.name} is not what was written; "
        "delete this folder to resume from the one before it"
    )


def test_other_settings_are_refused(job: Job, tmp_path: Path) -> None:
    path = job.save(tmp_path, 1)
    assert error_of_load(path, settings=SETTINGS | {"train.learning_rate": 0.2}) == (
        f"{path}: made by a run with other settings: train.learning_rate was 0.1 and is now 0.2; "
        "put them back, or start a new run with another train.output_dir"
    )


def test_another_number_of_ranks_is_refused(job: Job, tmp_path: Path) -> None:
    path = job.save(tmp_path, 1)
    assert error_of_load(path, ranks=Ranks(num_ranks=2)) == (
        f"{path}: saved by 1 ranks, this run has 2; "
        "start it on as many with torchrun, or start a new run with another train.output_dir"
    )


def test_another_format_is_refused(job: Job, tmp_path: Path) -> None:
    path = job.save(tmp_path, 1)
    run = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps(run | {"format": 9}))
    assert "written in format 9, this version reads format 1" in error_of_load(path)
