"""Everything a run needs to go on to the bit, in a folder that is either whole or not there.

What: `step-00000120/` has the tensors of the model and the optimizer as safetensors files, written by torch's
distributed checkpoint (each tensor, or each shard of one, by one rank that has it), and `run.json`: the step, the
settings that shape the loss curve, the SHA-256 of every file and of itself. All else follows from these. The folder is
written under another name and renamed at the end. No pickle is read: shapes stand in the safetensors files.
Cost: one pass over the bytes to write them and one to hash them; the step waits for both.
Not covered: another number of ranks than at saving, but for shards; an attacker, who can make hashes fit.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import get_state_dict

from examples.train.ranks import Ranks, TrainingError
from lowtide.config.run import RunConfig
from lowtide.config.source import read_text
from lowtide.core.json_text import parse_json
from lowtide.errors import ConfigError
from lowtide.tensors.fsdp import local_part

FORMAT = 5
NUM_KEPT = 2
_MOST_JSON_BYTES = 64 << 20
_NAME = re.compile(r"step-(\d{8,})")
_PARTIAL_SUFFIX = ".partial"
Tensors = dict[str, torch.Tensor]


def tensors_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rename: Callable[[str], str] = str) -> Tensors:
    """Those of the model and the optimizer themselves, by name, each once. `rename`: of a name, where ranks have other
    parts."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    states: Any = optimizer_state["state"]
    found: dict[str, Any] = {f"model.{name}": tensor for name, tensor in model_state.items()}
    found |= {f"optimizer.{key}.{name}": value for name, state in states.items() for key, value in state.items()}
    unique: dict[Any, str] = {}
    for name, tensor in found.items():
        unique.setdefault(local_part(tensor).data_ptr() or name, name)  # tied ones have one address
    # Numbers (`step`) as one element: a slice of a tensor without dimensions is not read back.
    return {rename(name): found[name] if found[name].dim() else found[name].view(1) for name in unique.values()}


def save(folder: Path, tensors: Tensors, *, step: int, settings: Mapping[str, object], ranks: Ranks) -> Path:
    """Writes `folder/step-...` on all ranks together and drops the oldest ones. Raises `TrainingError` if it cannot."""
    path = folder / f"step-{step:08d}"
    partial = folder / f".{path.name}{_PARTIAL_SUFFIX}"
    try:
        if ranks.is_first:
            folder.mkdir(parents=True, exist_ok=True)
            for leftover in folder.glob(f".step-*{_PARTIAL_SUFFIX}"):
                shutil.rmtree(leftover)
            partial.mkdir(mode=0o700)
        ranks.barrier()
        writer = HuggingFaceStorageWriter(str(partial), save_distributed=True)
        with warnings.catch_warnings(action="ignore"):  # of a process that is alone, that it is alone
            dcp.save(tensors, storage_writer=writer, no_dist=ranks.is_alone)
        if ranks.is_first:
            files = {file.name: _sha256_of_file(file) for file in partial.iterdir()}
            run = {"step": step, "settings": settings, "files": files}
            document = {"format": FORMAT, "sha256": _sha256_of(run), "run": run}
            (partial / "run.json").write_text(json.dumps(document), encoding="utf-8")
            _flush(partial / "run.json")
            _flush(partial)
            partial.rename(path)
            _flush(folder)
            for old in find(folder)[:-NUM_KEPT]:
                # Renamed first: a kill must not leave half a checkpoint under a whole one's name.
                shutil.rmtree(old.rename(folder / f".{old.name}{_PARTIAL_SUFFIX}"))
    except (OSError, CheckpointException) as error:
        what = f"checkpoint {path} could not be written: {_why(error)}; older ones are untouched"
        raise TrainingError(what) from error
    ranks.barrier()
    return path


def load(path: Path, tensors: Tensors, *, settings: Mapping[str, object], ranks: Ranks) -> int:
    """Fills the tensors from a whole checkpoint of the same run, and gives its step. Raises `ConfigError`: the folder
    is damaged, other settings."""
    run = _read_run(path)
    then, now = run["settings"], json.loads(json.dumps(settings))
    changed = [key for key in sorted(then.keys() | now.keys()) if then.get(key) != now.get(key)]
    if changed:
        listed = ", ".join(f"{key} was {then.get(key)!r} and is now {now.get(key)!r}" for key in changed[:3])
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        what = f"{path}: made by a run with other settings: {listed}{more}"
        raise ConfigError(f"{what}; put them back, or start a new run with another train.output_dir")
    for name, sha256 in run["files"].items() if ranks.is_first else ():
        try:
            if _sha256_of_file(path / name) != sha256:
                raise _damaged(path, f"the content of {name} is not what was written")
        except OSError as error:
            raise _damaged(path, f"{name} cannot be read: {error.strerror}") from None
    ranks.barrier()  # no rank reads a file before the first one has looked at all of them
    try:
        with warnings.catch_warnings(action="ignore"):  # of a process that is alone, that it is alone
            dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=ranks.is_alone)
    except CheckpointException as error:
        raise _damaged(path, f"its tensors are not those of this model ({_why(error)})") from None
    return int(run["step"])


# -- which checkpoint ----------------------------------------------------------------------------------------------


def find(folder: Path) -> list[Path]:
    """The whole checkpoints of a folder, oldest step first."""
    names = filter(_NAME.fullmatch, glob.glob("step-*", root_dir=folder))  # noqa: PTH207 -- does not raise
    return sorted((folder / name for name in names), key=step_of)


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def to_resume(run: RunConfig) -> Path | None:
    """What `train.resume` means, given what lies in the folder of checkpoints."""
    wanted, found = run.train.resume, find(run.checkpoint_dir)
    if wanted == "auto":
        return found[-1] if found else None
    chosen: Path | None = None
    if wanted != "never":
        path = Path(os.path.expanduser(wanted))  # noqa: PTH111 -- does not raise
        below = [path] if _NAME.fullmatch(path.name) and os.path.isdir(path) else find(path)  # noqa: PTH112
        if not below:
            ways = "write auto, never, or the path of a folder such as step-00000100"
            run.fail("train.resume", f"'train.resume': {path} is not a checkpoint; {ways}")
        chosen = below[-1]
    if found and step_of(found[-1]) > (step_of(chosen) if chosen else 0):
        what = f"'train.resume' is {wanted}, but {found[-1]} is already there and would be mixed with the new ones"
        run.fail("train.resume", f"{what}; choose another 'train.output_dir', delete the folder, or write auto")
    return chosen


# -- JSON ----------------------------------------------------------------------------------------------------------


def _read_run(path: Path) -> dict[str, Any]:
    """`run.json`, checked against its own hash."""
    try:
        document = parse_json(read_text(path / "run.json", most_bytes=_MOST_JSON_BYTES), "run.json")
    except ConfigError as error:
        raise _damaged(path, str(error).replace(str(path / "run.json"), "run.json")) from None
    if not isinstance(document, dict) or not isinstance(run := document.get("run"), dict):
        raise _damaged(path, "run.json is not the record of a run")
    if document.get("format") != FORMAT:
        raise ConfigError(
            f"{path}: written in another format than this version's, which is {FORMAT}; finish the run with the "
            "version that started it, or start a new one with another train.output_dir"
        )
    if document.get("sha256") != _sha256_of(run):
        raise _damaged(path, "the content of run.json is not what was written")
    return run


def _why(error: BaseException) -> BaseException:
    """What has failed on the first rank on which something has."""
    return next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error


def _damaged(path: Path, why: str) -> ConfigError:
    return ConfigError(f"{path}: the checkpoint is damaged: {why}; delete this folder to resume from the one before it")


def _sha256_of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sha256_of(run: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(run, sort_keys=True).encode()).hexdigest()


def _flush(path: Path) -> None:
    """Of a file what it holds, of a folder its names: a rename is only on disk when the folder is."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
