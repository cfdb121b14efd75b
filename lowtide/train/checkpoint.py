"""Everything a run needs to go on to the bit, in a folder that is either whole or not there.

What: `step-00000120/` holds the model and the optimizer (written by `torch.distributed.checkpoint`), one
`rank-0.json` per rank (random states) and `run.json`: step, place in the data, the settings that shape the loss curve,
sizes and checksums of all files (torch reads a flipped bit as a number). The learning rate is a pure function of the
step, so the step is the scheduler's state.
Why a folder is whole: it is written under another name, flushed to disk, and renamed at the end. A kill at any moment
leaves the older checkpoints as they were. The newest `num_kept` are kept.
Cost: one copy of the weights and two of their size for AdamW per checkpoint, the time to flush them, and to read them
back for the checksum (rank 0, at saving and at loading); the step waits for it.
Not covered: another number of ranks than at saving (refused, because the random states and the order of the sums would
differ), saving in the background, folders that the ranks do not share, file systems without an atomic rename. As
everywhere in torch, a checkpoint contains pickles: load only your own.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import sys
import warnings
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from lowtide.config.run import RunConfig
from lowtide.errors import ConfigError
from lowtide.train.ranks import Ranks
from lowtide.train.stop import TrainingError

FORMAT = 1
_CHUNK_BYTES = 1 << 20
_NAME = re.compile(r"step-(\d{8,})")
_PARTIAL_SUFFIX = ".partial"


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What `load` gives back beside the model and the optimizer, which it fills in place."""

    step: int
    data: Mapping[str, object]
    """`Sampler.state()`."""
    random: Mapping[str, Any]
    """For `set_random_state`, when everything that draws has been built."""


def save(
    folder: Path,
    *,
    step: int,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Mapping[str, object],
    settings: Mapping[str, object],
    ranks: Ranks,
    device: torch.device,
    num_kept: int = 2,
) -> Path:
    """Writes `folder/step-...` on all ranks together and drops the oldest ones. Raises `TrainingError` if it cannot."""
    path = folder / f"step-{step:08d}"
    partial = folder / f".{path.name}{_PARTIAL_SUFFIX}"
    try:
        if ranks.is_first:
            folder.mkdir(parents=True, exist_ok=True)
            for leftover in folder.glob(f".step-*{_PARTIAL_SUFFIX}"):
                shutil.rmtree(leftover)
            partial.mkdir()
        ranks.barrier()
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        with _quiet():
            dcp.save(state, storage_writer=dcp.FileSystemWriter(partial), no_dist=ranks.is_alone)
        _write_json(partial / f"rank-{ranks.rank}.json", random_state(device))
        ranks.barrier()
        if ranks.is_first:
            run = {"format": FORMAT, "step": step, "num_ranks": ranks.num_ranks, "data": dict(data)}
            run |= {"settings": dict(settings), "files": _describe_files(partial)}
            _write_json(partial / "run.json", run)
            partial.rename(path)
            _flush_folder(folder)
            _drop_oldest(folder, num_kept=num_kept)
    except (OSError, CheckpointException) as error:
        raise TrainingError(f"checkpoint {path} could not be written: {error}; older ones are untouched") from error
    ranks.barrier()
    return path


def load(
    path: Path,
    *,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    settings: Mapping[str, object],
    ranks: Ranks,
) -> Saved:
    """Fills the model and the optimizer from a whole checkpoint of the same run.

    Raises `ConfigError`: the folder is damaged, other settings, another number of ranks.
    """
    run = _read_json(path / "run.json")
    _check(path, run, settings=settings, rank=ranks.rank, num_ranks=ranks.num_ranks)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state}
    try:
        with _quiet():
            dcp.load(state, storage_reader=dcp.FileSystemReader(path), no_dist=ranks.is_alone)
    except (Exception, CheckpointException) as error:  # a CheckpointException is not an Exception
        raise _damaged(path, _first_line(error)) from error
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    random = _read_json(path / f"rank-{ranks.rank}.json")
    return Saved(step=run["step"], data=run["data"], random=random)


def find(folder: Path) -> list[Path]:
    """The whole checkpoints of a folder, oldest step first."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if _NAME.fullmatch(path.name)), key=step_of)


def step_of(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def to_resume(run: RunConfig) -> Path | None:
    """What `train.resume` means, given what lies in the folder of checkpoints."""
    wanted = run.train.resume
    found = find(run.checkpoint_dir)
    if wanted == "auto":
        return found[-1] if found else None
    chosen = None if wanted == "never" else _named_checkpoint(run, Path(wanted).expanduser())
    first_step = step_of(chosen) if chosen else 0
    if found and step_of(found[-1]) > first_step:
        run.fail(
            "train.resume",
            f"'train.resume' is {wanted}, but {found[-1]} is already there and would be mixed with the new ones; "
            "choose another 'train.output_dir', delete the folder, or write auto",
        )
    return chosen


def _named_checkpoint(run: RunConfig, path: Path) -> Path:
    if path.resolve() in [found.resolve() for found in find(path.parent)]:
        return path
    if found := find(path):
        return found[-1]
    run.fail(
        "train.resume",
        f"'train.resume': {path} is not a checkpoint; write auto, never, or the path of a folder such as step-00000100",
    )


def random_state(device: torch.device) -> dict[str, Any]:
    """The generators a training step may draw from, as JSON."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "cpu": torch.get_rng_state().numpy().tobytes().hex(),
    }
    if device.type != "cpu":
        state["device"] = torch.get_device_module(device).get_rng_state(device).numpy().tobytes().hex()
    if numpy := sys.modules.get("numpy"):
        name, keys, *rest = numpy.random.get_state()
        state["numpy"] = [name, keys.tolist(), *rest]
    return state


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    torch.set_rng_state(_bytes_tensor(state["cpu"]))
    if device.type != "cpu" and "device" in state:
        torch.get_device_module(device).set_rng_state(_bytes_tensor(state["device"]), device)
    numpy = sys.modules.get("numpy")
    if numpy and "numpy" in state:
        numpy.random.set_state(tuple(state["numpy"]))


@contextmanager
def _quiet() -> Iterator[None]:
    """A run without a process group is a normal run, not one to be warned about."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


def _bytes_tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


def _check(path: Path, run: Mapping[str, Any], *, settings: Mapping[str, object], rank: int, num_ranks: int) -> None:
    if run.get("format") != FORMAT:
        raise ConfigError(
            f"{path}: written in format {run.get('format')}, this version reads format {FORMAT}; "
            "finish the run with the version that started it, or start a new one with another train.output_dir"
        )
    for name, (size_bytes, checksum) in run["files"].items():
        file = path / name
        found_bytes = file.stat().st_size if file.is_file() else None
        if found_bytes is None:
            raise _damaged(path, f"{name} is missing")
        if found_bytes != size_bytes:
            raise _damaged(path, f"{name} has {found_bytes} of {size_bytes} bytes")
        if rank == 0 and _checksum(file) != checksum:
            raise _damaged(path, f"the content of {name} is not what was written")
    if run["num_ranks"] != num_ranks:
        raise ConfigError(
            f"{path}: saved by {run['num_ranks']} ranks, this run has {num_ranks}; "
            f"start it on as many with torchrun, or start a new run with another train.output_dir"
        )
    then, now = run["settings"], json.loads(json.dumps(dict(settings)))
    changed = [key for key in sorted(then.keys() | now.keys()) if then.get(key) != now.get(key)]
    if changed:
        listed = ", ".join(f"{key} was {then.get(key)!r} and is now {now.get(key)!r}" for key in changed[:3])
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise ConfigError(
            f"{path}: made by a run with other settings: {listed}{more}; "
            "put them back, or start a new run with another train.output_dir"
        )


def _damaged(path: Path, why: str) -> ConfigError:
    return ConfigError(f"{path}: the checkpoint is damaged: {why}; delete this folder to resume from the one before it")


def _first_line(error: BaseException) -> str:
    """The cause, without the pages of traceback that torch.distributed.checkpoint puts around it."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise _damaged(path.parent, f"{path.name} is missing") from None
    except (OSError, ValueError) as error:
        raise _damaged(path.parent, f"{path.name}: {error}") from None
    if not isinstance(found, dict):
        raise _damaged(path.parent, f"{path.name} is not a mapping")
    return found


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())


def _describe_files(folder: Path) -> dict[str, tuple[int, int]]:
    return {path.name: (path.stat().st_size, _checksum(path)) for path in sorted(folder.iterdir())}


def _checksum(path: Path) -> int:
    """CRC-32: against damage, not against malice."""
    checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            checksum = zlib.crc32(chunk, checksum)
    return checksum


def _flush_folder(folder: Path) -> None:
    """A rename is only on disk when the folder that holds the name is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _drop_oldest(folder: Path, *, num_kept: int) -> None:
    for path in find(folder)[:-num_kept]:
        # renamed first: a kill in the middle of deleting must not leave a damaged folder under a whole one's name
        doomed = path.rename(folder / f".{path.name}{_PARTIAL_SUFFIX}")
        shutil.rmtree(doomed)
