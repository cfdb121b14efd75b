"""Checkpoints: whole or not there, the same bits back, and a clear word when they do not fit."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lowtide.errors import ConfigError
from lowtide.train import checkpoint
from lowtide.train.ranks import Ranks
from lowtide.train.stop import TrainingError
from lowtide.train.tensors import TensorFile, write_tensors

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


@pytest.mark.parametrize("moment", ["write_tensors", "_write_json", "_files_of", "_flush_folder"])
def test_killed_while_writing_leaves_the_old_one(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """A kill is an exception that nobody catches: the folder is looked at as it was left."""
    old = job.save(tmp_path, 1)
    job.step()

    def die(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, moment, die)
        with pytest.raises(KeyboardInterrupt):
            job.save(tmp_path, 2)
    assert checkpoint.find(tmp_path) == [old]
    assert Job(seed=2).load(old).step == 1
    job.save(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


def test_killed_while_deleting_leaves_no_half_checkpoint(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.save(tmp_path, 1)

    def die(path: Path) -> None:
        (path / "run.json").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", die)
        with pytest.raises(KeyboardInterrupt):
            job.save(tmp_path, 2, num_kept=1)
    assert [path.name for path in checkpoint.find(tmp_path)] == ["step-00000002"]
    assert Job(seed=2).load(tmp_path / "step-00000002").step == 2


def test_disk_full_is_said_and_harms_nothing(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = job.save(tmp_path, 1)

    def fill(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fill)
    with pytest.raises(TrainingError) as error:
        job.save(tmp_path, 2)
    assert str(error.value) == (
        f"checkpoint {tmp_path}/step-00000002 could not be written: [Errno 28] No space left on device; "
        "older ones are untouched"
    )
    assert checkpoint.find(tmp_path) == [old]


def test_truncated_file_is_named(job: Job, tmp_path: Path) -> None:
    path = job.save(tmp_path, 1)
    file = path / "rank-0.safetensors"
    num_bytes = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-10])
    assert error_of_load(path) == (
        f"{path}: the checkpoint is damaged: {file.name} has {num_bytes - 10} of {num_bytes} bytes; "
        "delete this folder to resume from the one before it"
    )


def test_missing_file_is_named(job: Job, tmp_path: Path) -> None:
    path = job.save(tmp_path, 1)
    (path / "rank-0.safetensors").unlink()
    assert "the checkpoint is damaged: rank-0.safetensors is missing; delete" in error_of_load(path)
    (path / "run.json").unlink()
    assert "the checkpoint is damaged: run.json is missing; delete" in error_of_load(path)


def test_flipped_bits_do_not_pass(job: Job, tmp_path: Path) -> None:
    """Same size, other content: it would be read as another number."""
    path = job.save(tmp_path, 1)
    weights = job.model[0].weight.detach().numpy().tobytes()
    file = path / "rank-0.safetensors"
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
    assert "written in format 9, this version reads format 2" in error_of_load(path)


# ---- to the bit, also where tensors are odd


def test_tensors_of_every_kind_come_back_and_others_can_read_them(tmp_path: Path) -> None:
    load_file = pytest.importorskip("safetensors.torch").load_file
    torch.manual_seed(1)
    dtypes = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16]
    dtypes += [torch.int8, torch.uint8, torch.bool]
    tensors = {str(dtype): (torch.randn(3, 5) * 9).to(dtype) for dtype in dtypes}
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 3), "across": torch.randn(4, 3).t()}
    tensors["odd"] = torch.tensor([float("nan"), -0.0, float("inf")])
    written = write_tensors(tmp_path / "x", tensors)
    content = (tmp_path / "x").read_bytes()
    assert (written.num_bytes, written.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    found = {name: torch.empty_like(tensor).fill_(1) for name, tensor in tensors.items()}
    TensorFile(tmp_path / "x").read_into(found)
    for other in (found, load_file(tmp_path / "x")):
        assert other.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert (other[name].dtype, other[name].shape) == (tensor.dtype, tensor.shape)
            ours, theirs = (each.contiguous().reshape(-1).view(torch.uint8) for each in (tensor, other[name]))
            assert torch.equal(ours, theirs), name


def test_ranks_share_the_work() -> None:
    tensors = {f"t{index}": torch.empty(1 + 7 * index % 50) for index in range(60)}
    parts = checkpoint.shares(tensors, num_ranks=4)
    assert sorted(name for part in parts for name in part) == sorted(tensors)
    sizes = [sum(tensor.nbytes for tensor in part.values()) for part in parts]
    assert max(sizes) - min(sizes) <= max(tensor.nbytes for tensor in tensors.values())
    assert checkpoint.shares(dict(reversed(tensors.items())), num_ranks=4) == parts


def test_settings_of_the_optimizer_come_back(job: Job, tmp_path: Path) -> None:
    group: dict[str, Any] = job.optimizer.param_groups[0]
    group["lr"], group["betas"] = 0.125, (0.5, 0.75)
    path = job.save(tmp_path, 1)
    other = Job(seed=2)
    other.load(path)
    assert (other.optimizer.param_groups[0]["lr"], other.optimizer.param_groups[0]["betas"]) == (0.125, (0.5, 0.75))
    assert isinstance(other.optimizer.param_groups[0]["betas"], tuple)


# ---- on disk, and for nobody else


def test_only_the_owner_may_read(job: Job, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        path = job.save(tmp_path / "runs" / "checkpoints", 1)
    finally:
        os.umask(before)
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in (path.parent, path, *path.iterdir())}
    assert modes == {
        "checkpoints": 0o700,
        "step-00000001": 0o700,
        "rank-0.json": 0o600,
        "rank-0.safetensors": 0o600,
        "run.json": 0o600,
    }


def test_everything_is_flushed_in_the_order_that_survives_a_power_cut(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The content before the name of it, the names of files before that of their folder, the rename last."""
    flushed: list[str] = []
    ordinary = os.fsync

    def record(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        flushed.append(f"{path.relative_to(tmp_path)}")
        if path.is_dir():
            flushed[-1] += f" with {', '.join(sorted(inner.name for inner in path.iterdir()))}"
        else:
            flushed[-1] += f" of {path.stat().st_size} bytes"
        ordinary(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    path = job.save(tmp_path / "checkpoints", 1)
    sizes = {file.name: file.stat().st_size for file in path.iterdir()}
    partial = "checkpoints/.step-00000001.partial"
    assert flushed == [
        ". with checkpoints",
        *(f"{partial}/{name} of {sizes[name]} bytes" for name in ("rank-0.safetensors", "rank-0.json", "run.json")),
        f"{partial} with rank-0.json, rank-0.safetensors, run.json",
        "checkpoints with step-00000001",
    ]


# ---- what damage and malice can do


class Program:
    """A pickle that leaves a mark when it is read back."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._mark),)


def rewrite_hashes(path: Path, **changes: object) -> None:
    """What somebody with a text editor and some patience can do."""
    document = json.loads((path / "run.json").read_text())
    run = document["run"]
    for name in run["files"]:
        content = (path / name).read_bytes()
        run["files"][name] = [len(content), hashlib.sha256(content).hexdigest()]
    run |= changes
    document["sha256"] = hashlib.sha256(json.dumps(run, sort_keys=True).encode()).hexdigest()
    (path / "run.json").write_text(json.dumps(document))


NAMES = ["rank-0.safetensors", "rank-0.json", "run.json", ".metadata", "__0_0.distcp", "rank-0.pt"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("how", ["pickle", "torch.save"])
def test_a_planted_pickle_does_not_run(job: Job, tmp_path: Path, name: str, how: str) -> None:
    path, mark = job.save(tmp_path, 1), tmp_path / "mark"
    with (path / name).open("wb") as file:
        pickle.dump(Program(mark), file) if how == "pickle" else torch.save(Program(mark), file)
    if name != "run.json":
        rewrite_hashes(path)
    if name in NAMES[:3]:
        assert error_of_load(path).startswith(f"{path}: the checkpoint is damaged: {name}")
    else:
        assert Job(seed=2).load(path).step == 1  # a file that nobody asked for
    assert not mark.exists()
    with (path / name).open("rb") as file:  # the program does work
        pickle.load(file) if how == "pickle" else torch.load(file, weights_only=False)
    assert mark.exists()


def test_a_checkpoint_of_version_0_1_is_refused_by_name_and_not_read(tmp_path: Path) -> None:
    path, mark = tmp_path / "step-00000001", tmp_path / "mark"
    path.mkdir()
    (path / ".metadata").write_bytes(pickle.dumps(Program(mark)))
    (path / "run.json").write_text(json.dumps({"format": 1, "step": 1, "num_ranks": 1, "files": {}}))
    assert error_of_load(path) == (
        f"{path}: written by lowtide 0.1, whose checkpoints are pickles, which this version does not read; finish the "
        "run with lowtide 0.1, or start a new one with another train.output_dir"
    )
    assert not mark.exists()


def damages(content: bytes) -> Iterator[bytes]:
    """Cut short, longer, empty, and one bit flipped at many places."""
    yield from (b"", content[:7], content[: len(content) // 2], content[:-1], content + b"\0")
    for place in range(0, len(content), max(1, len(content) // 60)):
        yield content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


@pytest.mark.parametrize("name", NAMES[:3])
def test_every_damage_is_one_clear_line(job: Job, tmp_path: Path, name: str) -> None:
    path = job.save(tmp_path, 1)
    content = (path / name).read_bytes()
    for damaged in damages(content):
        if name == "run.json" and damaged == content + b"\0":
            continue
        (path / name).write_bytes(damaged)
        text = error_of_load(path)
        assert text.startswith((f"{path}: the checkpoint is damaged: ", f"{path}: written in format "))
        assert text.isprintable()
    (path / name).write_bytes(content)
    assert Job(seed=2).load(path).step == 1


@pytest.mark.parametrize("name", NAMES[:2])
def test_damage_with_hashes_that_fit_is_still_one_line_or_other_numbers(job: Job, tmp_path: Path, name: str) -> None:
    """Hashes are no seal. Whoever makes them fit chooses the numbers, and nothing more."""
    path = job.save(tmp_path, 1)
    content = (path / name).read_bytes()
    num_refused = 0
    for damaged in damages(content):
        (path / name).write_bytes(damaged)
        rewrite_hashes(path)
        try:
            saved = Job(seed=2).load(path)
            checkpoint.set_random_state(saved.random, CPU)
        except ConfigError as error:
            num_refused += 1
            assert str(error).isprintable()  # noqa: PT017 -- both ends are fine
    assert num_refused >= 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"files": {"../../x": [1, "0"]}}, "run.json lists other files than those of its ranks"),
        ({"files": []}, "run.json lists other files than those of its ranks"),
        (
            {"files": {"rank-0.json": 1, "rank-0.safetensors": 2}},
            "it does not say what it must (TypeError: cannot unpack non-iterable int object)",
        ),
        ({"groups": []}, "it does not say what it must (TypeError: the optimizer has other groups)"),
        ({"step": "x"}, "it does not say what it must (ValueError: invalid literal for int() with base 10: 'x')"),
        ({"settings": 3}, "it does not say what it must (AttributeError: 'int' object has no attribute 'keys')"),
    ],
)
def test_a_run_file_that_somebody_wrote(job: Job, tmp_path: Path, changes: dict[str, object], message: str) -> None:
    path = job.save(tmp_path, 1)
    rewrite_hashes(path)
    document = json.loads((path / "run.json").read_text())
    run = document["run"] | changes
    document |= {"run": run, "sha256": hashlib.sha256(json.dumps(run, sort_keys=True).encode()).hexdigest()}
    (path / "run.json").write_text(json.dumps(document))
    expected = f"{path}: the checkpoint is damaged: {message}; delete this folder to resume from the one before it"
    assert error_of_load(path) == expected


def test_a_number_of_ranks_gone_wrong_fills_no_memory(job: Job, tmp_path: Path) -> None:
    """A run that is dealt out may be read by any number of ranks, so nothing else says that it is too many."""
    path = job.save(tmp_path, 1)
    document = json.loads((path / "run.json").read_text())
    document["run"]["num_ranks"] = 10**15
    document["sha256"] = hashlib.sha256(json.dumps(document["run"], sort_keys=True).encode()).hexdigest()
    (path / "run.json").write_text(json.dumps(document))
    other = Job(seed=3)
    with pytest.raises(ConfigError, match=r"run\.json lists other files than those of its ranks"):
        checkpoint.load(
            path, model=other.model, optimizer=other.optimizer, settings=SETTINGS, ranks=Ranks(), layout="shards"
        )


def test_tensors_of_another_model_are_refused(job: Job, tmp_path: Path) -> None:
    path = job.save(tmp_path, 1)
    tensors = {"model.0.weight": torch.zeros(4, 8)}
    (path / "rank-0.safetensors").unlink()
    write_tensors(path / "rank-0.safetensors", tensors)
    rewrite_hashes(path)
    assert "the checkpoint is damaged: the tensors are not those of this model: '" in error_of_load(path)
    shutil.rmtree(path)
    path = job.save(tmp_path, 1)
    content = (path / "rank-0.safetensors").read_bytes()
    (path / "rank-0.safetensors").write_bytes(content.replace(b'"shape": [8, 4]', b'"shape": [4, 8]', 1))
    rewrite_hashes(path)
    text = error_of_load(path)
    assert text.startswith(f"{path}: the checkpoint is damaged: rank-0.safetensors has another '")
    assert "{'dtype': 'F32', 'shape': [4, 8], 'data_offsets': [" in text


def test_a_random_state_that_is_none() -> None:
    state = checkpoint.random_state(CPU)
    for key, value in {"cpu": "00ff", "python": [3, [1, 2], None], "numpy": ["x"]}.items():
        with pytest.raises(ConfigError, match=r"^checkpoint: its random state cannot be taken up \("):
            checkpoint.set_random_state(state | {key: value}, CPU)
    checkpoint.set_random_state(state, CPU)


def test_a_file_of_tensors_that_is_cut_short_is_refused(job: Job, tmp_path: Path) -> None:
    path = job.save(tmp_path, 1)
    file = path / "rank-0.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    rewrite_hashes(path)
    assert "the checkpoint is damaged: rank-0.safetensors ends in the middle of '" in error_of_load(path)


def test_groups_of_another_optimizer_are_refused(job: Job, tmp_path: Path) -> None:
    """As many groups, but not of the same parameters: decay would go to others."""
    path = job.save(tmp_path, 1)
    document = json.loads((path / "run.json").read_text())
    run = document["run"]
    run["groups"][0]["params"].reverse()
    document["sha256"] = hashlib.sha256(json.dumps(run, sort_keys=True).encode()).hexdigest()
    (path / "run.json").write_text(json.dumps(document))
    assert "it does not say what it must (TypeError: the optimizer has other groups)" in error_of_load(path)
