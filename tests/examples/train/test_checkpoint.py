"""Checkpoints: whole or not there, the same bits back, no program in them, and a clear word when they do not fit."""

from __future__ import annotations

import errno
import hashlib
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from examples.train import checkpoint
from examples.train.ranks import Ranks, TrainingError
from lowtide.errors import ConfigError

SETTINGS: dict[str, object] = {"train.learning_rate": 0.1, "model.fields": [1, 2]}
TENSORS = "shard-00001-model-00001-of-00001.safetensors"
READ = [TENSORS, "run.json"]
NEVER_READ = [".metadata", "__0_0.distcp", "rank-0.pt", "model.safetensors.index.json"]


class Job:
    """A model with a tied weight, and state in its optimizer."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4, bias=False))
        self.model[2].weight = self.model[0].weight
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)

    def step(self) -> None:
        self.model(torch.randn(3, 4)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, folder: Path, step: int) -> Path:
        tensors = checkpoint.tensors_of(self.model, self.optimizer)
        return checkpoint.save(folder, tensors, step=step, settings=SETTINGS, ranks=Ranks())

    def load(self, path: Path, *, settings: dict[str, object] = SETTINGS) -> int:
        tensors = checkpoint.tensors_of(self.model, self.optimizer)
        return checkpoint.load(path, tensors, settings=settings, ranks=Ranks())

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


def error_of_load(path: Path, **changes: Any) -> str:
    with pytest.raises(ConfigError) as error:
        Job(seed=3).load(path, **changes)
    return str(error.value)


def rewrite_hashes(path: Path) -> None:
    """As somebody would who may write to the folder."""
    document = json.loads((path / "run.json").read_text())
    for name in document["run"]["files"]:
        document["run"]["files"][name] = hashlib.sha256((path / name).read_bytes()).hexdigest()
    document["sha256"] = hashlib.sha256(json.dumps(document["run"], sort_keys=True).encode()).hexdigest()
    (path / "run.json").write_text(json.dumps(document))


def test_everything_comes_back_to_the_bit(job: Job, tmp_path: Path) -> None:
    path = job.save(tmp_path, 3)
    expected = job.tensors()
    other = Job(seed=2)
    assert other.load(path) == 3
    assert all(torch.equal(tensor, expected[name]) for name, tensor in other.tensors().items())
    torch.manual_seed(5)
    other.step()
    torch.manual_seed(5)
    job.step()
    assert all(torch.equal(tensor, job.tensors()[name]) for name, tensor in other.tensors().items())
    assert load_file(path / TENSORS)["model.0.weight"].shape == (4, 4)  # the package reads it


def test_the_newest_two_are_kept_and_nothing_else_is_left(job: Job, tmp_path: Path) -> None:
    (tmp_path / ".step-00000009.partial").mkdir()
    for step in (1, 2, 30):
        job.save(tmp_path, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000030"]


@pytest.mark.parametrize("moment", ["_sha256_of", "_sha256_of_file", "_flush"])
def test_what_stops_a_save_leaves_the_older_ones(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    job.save(tmp_path, 1)
    expected = job.tensors()["0.weight"].clone()

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    job.step()
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, moment, fail)
        with pytest.raises(TrainingError) as error:
            job.save(tmp_path, 2)
    assert str(error.value) == (
        f"checkpoint {tmp_path}/step-00000002 could not be written: [Errno 28] No space left on device; older ones are "
        "untouched"
    )
    (newest,) = checkpoint.find(tmp_path)
    other = Job(seed=2)
    other.load(newest)
    assert torch.equal(other.tensors()["0.weight"], expected)
    job.save(tmp_path, 2)
    assert len(list(tmp_path.iterdir())) == 2


class Program:
    """What a pickle can do: write a file when it is read."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("name", [*READ, *NEVER_READ])
@pytest.mark.parametrize("how", ["pickle", "torch.save"])
def test_a_planted_pickle_does_not_run(job: Job, tmp_path: Path, name: str, how: str) -> None:
    path, mark = job.save(tmp_path, 1), tmp_path / "mark"
    with (path / name).open("wb") as file:
        pickle.dump(Program(mark), file) if how == "pickle" else torch.save(Program(mark), file)
    if name != "run.json":
        rewrite_hashes(path)
    if name in READ:
        assert error_of_load(path).startswith(f"{path}: the checkpoint is damaged: ")
    else:
        assert Job(seed=2).load(path) == 1
    assert not mark.exists()
    with (path / name).open("rb") as file:  # the program does work
        pickle.load(file) if how == "pickle" else torch.load(file, weights_only=False)
    assert mark.exists()


def damages(content: bytes) -> Iterator[bytes]:
    """Cut short, longer, empty, and one bit flipped at many places."""
    yield from (b"", content[:7], content[: len(content) // 2], content[:-1], content + b"\0")
    for place in range(0, len(content), max(1, len(content) // 20)):
        yield content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


@pytest.mark.parametrize("name", READ)
def test_every_damage_is_one_line(job: Job, tmp_path: Path, name: str) -> None:
    path = job.save(tmp_path, 1)
    content = (path / name).read_bytes()
    for damaged in damages(content):
        (path / name).write_bytes(damaged)
        error = error_of_load(path)
        assert (error.startswith(f"{path}: ") and "\n" not in error and name in error) or "format" in error
    (path / name).unlink()
    assert f"{path}: the checkpoint is damaged: {name}" in error_of_load(path)


def test_what_does_not_fit_is_refused(job: Job, tmp_path: Path) -> None:
    path = job.save(tmp_path, 1)
    assert error_of_load(path, settings={"train.learning_rate": 0.2, "more": 1}) == (
        f"{path}: made by a run with other settings: model.fields was [1, 2] and is now None, more was None and is now "
        "1, train.learning_rate was 0.1 and is now 0.2; put them back, or start a new run with another train.output_dir"
    )
    other = Job(seed=2)
    other.model.append(torch.nn.Linear(4, 1))
    with pytest.raises(ConfigError) as error:
        other.load(path)
    assert str(error.value).startswith(
        f"{path}: the checkpoint is damaged: its tensors are not those of this model (Missing key in checkpoint"
    )
    document = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps(document | {"format": 2}))
    assert error_of_load(path) == (
        f"{path}: written in another format than this version's, which is 5; finish the run with the version that "
        "started it, or start a new one with another train.output_dir"
    )
