"""Everything a run needs to go on to the bit, in a folder that is either whole or not there, and in which nothing runs.

What: `step-00000120/` holds for each rank a share of the tensors of the model and the optimizer (`rank-0.safetensors`)
and its random states (`rank-0.json`), and for all of them `run.json`: step, place in the data, the settings that shape
the loss curve, the optimizer's groups, size and SHA-256 of every file, and of itself. The learning rate is a pure
function of the step, so the step is the scheduler's state. Experts that are split over ranks are written by those,
each part under a name of its own (experts.py). Where ranks have different layers (`is_split`), each writes and reads
all that it has, and its optimizer's groups.
Why a folder is whole: it is written under another name, each file and the folder flushed to disk, and renamed at the
end. A kill or a power cut at any moment leaves the older checkpoints as they were. The newest `num_kept` are kept.
What it protects from: damage. A flipped bit, a file cut short or taken from another checkpoint is named. It does not
protect from somebody who may write to the folder and makes the hashes fit: such a person decides with which numbers
training goes on, but runs no code by it, for there are no pickles, only JSON and bytes. Files are 0600, folders 0700.
Cost: one pass over the weights and two of their size for AdamW per checkpoint, hashed on the way, and the time to flush
them; one more read at loading (rank 0). The step waits for it.
Shards (`layout`) are written as whole tensors, each gathered by all ranks and kept by the one that writes it; any
number of ranks may read them, each its own part. Random states are only taken up by the same ranks.
Not covered: of a run without shards another number of ranks than at saving (refused, because the random states and the
order of the sums would differ), saving in the background, folders that the ranks do not share, file systems without an
atomic rename, and checkpoints of version 0.1, which are pickles (refused by name).
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from lowtide.config.source import read_text, shown
from lowtide.core.json_text import parse_json
from lowtide.errors import ConfigError
from lowtide.train.experts import RankExperts
from lowtide.train.ranks import Ranks
from lowtide.train.run_file import RunConfig
from lowtide.train.shards import whole_of
from lowtide.train.stop import TrainingError
from lowtide.train.tensors import TensorFile, open_new, write_tensors

FORMAT = 2
_MOST_JSON_BYTES = 64 << 20
_NAME = re.compile(r"step-(\d{8,})")
_PARTIAL_SUFFIX = ".partial"


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What `load` gives back beside the model and the optimizer, which it fills in place."""

    step: int
    data: Mapping[str, object]
    """`Sampler.state()`."""
    random: Mapping[str, Any] | None
    """For `set_random_state`, when everything that draws has been built; None where other ranks saved than load."""


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
    experts: RankExperts | None = None,
    layout: str | None = None,
    is_split: bool = False,
    num_kept: int = 2,
) -> Path:
    """Writes `folder/step-...` on all ranks together and drops the oldest ones. Raises `TrainingError` if it cannot."""
    path = folder / f"step-{step:08d}"
    partial = folder / f".{path.name}{_PARTIAL_SUFFIX}"
    try:
        if ranks.is_first:
            _make_folder(folder)
            for leftover in folder.glob(f".step-*{_PARTIAL_SUFFIX}"):
                shutil.rmtree(leftover)
            partial.mkdir(mode=0o700)
        ranks.barrier()
        tensors, groups = _state(model, optimizer)
        of_ranks = _own_share(tensors, experts, ranks, is_split=is_split)
        if layout is not None:
            of_ranks = _gathered(tensors, of_ranks)
        written = write_tensors(partial / _tensors_name(ranks.rank), of_ranks)
        own: dict[str, Any] = {"random": random_state(device), "tensors": [written.num_bytes, written.sha256]}
        if is_split:
            own["groups"] = groups
        _write_json(partial / _rank_name(ranks.rank), own)
        ranks.barrier()
        if ranks.is_first:
            run = {"step": step, "num_ranks": ranks.num_ranks, "data": dict(data), "settings": dict(settings)}
            run |= {"groups": groups, "files": _files_of(partial, ranks.num_ranks)}
            if layout is not None:
                run["layout"] = layout
            _write_json(partial / "run.json", {"format": FORMAT, "sha256": _sha256_of(run), "run": run})
            _flush_folder(partial)
            partial.rename(path)
            _flush_folder(folder)
            _drop_oldest(folder, num_kept=num_kept)
    except OSError as error:
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
    experts: RankExperts | None = None,
    layout: str | None = None,
    is_split: bool = False,
) -> Saved:
    """Fills the model and the optimizer from a whole checkpoint of the same run.

    Raises `ConfigError`: the folder is damaged, other settings, another number of ranks, version 0.1.
    """
    run = _read_run(path)
    try:
        is_same = layout is None or (run.get("layout"), run["num_ranks"]) == (layout, ranks.num_ranks)
        _check(path, run, settings=settings, rank=ranks.rank, num_ranks=ranks.num_ranks if is_same else None)
        own: dict[str, Any] = _read_json(path / _rank_name(ranks.rank)) if is_same else {}
        tensors, groups = _state(model, optimizer)
        _read_tensors(path, tensors, of_ranks=[ranks.rank] if is_split else range(run["num_ranks"]), experts=experts)
        saved_groups = (own if is_split else run)["groups"]
        _put_back(model, optimizer, tensors, saved_groups, like=groups, may_be_recut=layout is not None)
        random_states = dict(own["random"]) if is_same else None
        saved = Saved(step=int(run["step"]), data=dict(run["data"]), random=random_states)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise _damaged(path, f"it does not say what it must ({type(error).__name__}: {error})") from None
    return saved


# -- the state as tensors and JSON ---------------------------------------------------------------------------------


def _state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """All tensors by name, and the optimizer's groups as JSON takes them."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    tensors: dict[str, Any] = {f"model.{name}": tensor for name, tensor in model_state.items()}
    state: Any = optimizer_state["state"]
    tensors |= {f"optimizer.{key}.{name}": value for name, values in state.items() for key, value in values.items()}
    assert all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()), "AdamW's state is tensors"
    groups: Any = optimizer_state["param_groups"]
    return tensors, [dict(group) for group in groups]


def _put_back(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    tensors: Mapping[str, torch.Tensor],
    groups: list[Any],
    *,
    like: list[Any],
    may_be_recut: bool,
) -> None:
    """Into the model and the optimizer. `like`: the groups as they are here, which decide what a saved one may be."""
    named = [[(sorted(group), group["params"]) for group in each] for each in (groups, like)]
    if named[0] != named[1] and not may_be_recut:
        raise TypeError("the optimizer has other groups")
    saved = {name: group for group in groups for name in group["params"]}
    if saved.keys() != {name for group in like for name in group["params"]}:
        raise TypeError("the optimizer has other groups")
    typed = []
    for here in like:
        then = [saved[name] for name in here["params"]]
        # Groups may be cut in another way, where other ranks have the shards, but not joined from different ones.
        if any({**group, "params": 0} != {**then[0], "params": 0} or group.keys() != here.keys() for group in then):
            raise TypeError("the optimizer has other groups")
        typed.append({key: _like({**then[0], "params": here["params"]}[key], value) for key, value in here.items()})
    state: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith("optimizer."):
            _, key, parameter = name.split(".", 2)
            state.setdefault(parameter, {})[key] = tensor
    model_state: Any = {
        name.removeprefix("model."): tensor for name, tensor in tensors.items() if name.startswith("model.")
    }
    optimizer_state: Any = {"state": state, "param_groups": typed}
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)


def _like(value: Any, here: Any) -> Any:
    """A setting of the optimizer out of JSON, of the type that it has here."""
    if isinstance(here, tuple):
        return tuple(_like(one, other) for one, other in zip(value, here, strict=True))
    is_number = isinstance(value, int | float)
    if isinstance(here, int | float) and not is_number:
        raise TypeError(f"{shown(value)} stands where a number belongs")
    return value


def shares(tensors: Mapping[str, torch.Tensor], *, num_ranks: int) -> list[dict[str, torch.Tensor]]:
    """What each rank writes: the largest tensor to the rank that has the fewest bytes; on all ranks the same."""
    found: list[dict[str, torch.Tensor]] = [{} for _ in range(num_ranks)]
    num_bytes = [0] * num_ranks
    for name in sorted(tensors, key=lambda name: (-tensors[name].nbytes, name)):
        rank = num_bytes.index(min(num_bytes))
        found[rank][name] = tensors[name]
        num_bytes[rank] += tensors[name].nbytes
    return found


def _own_share(
    tensors: Mapping[str, torch.Tensor], experts: RankExperts | None, ranks: Ranks, *, is_split: bool
) -> Mapping[str, torch.Tensor]:
    """What this rank writes."""
    if is_split:
        return tensors
    own = {} if experts is None else experts.own_of(tensors)
    common = {name: tensor for name, tensor in tensors.items() if name not in own}
    share = shares(common, num_ranks=ranks.num_ranks)[ranks.rank]
    if experts is not None and experts.is_writer:
        share |= {experts.name_of(name, experts.split.rank): tensor for name, tensor in own.items()}
    return share


def _gathered(tensors: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`own` as whole tensors, in main memory. All ranks gather all of them, in the same order."""
    found: dict[str, torch.Tensor] = {}
    for name in sorted(tensors):
        whole = whole_of(tensors[name])
        if name in own:
            found[name] = whole.cpu()
    return found


def _read_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], *, of_ranks: Sequence[int], experts: RankExperts | None
) -> None:
    """Fills all tensors from the files of these ranks, once it is sure that none is missing."""
    others: dict[str, torch.Tensor] = {}
    if experts is not None:
        own = experts.own_of(tensors)
        parts = [{experts.name_of(name, i): t for name, t in own.items()} for i in range(experts.split.num_ranks)]
        tensors = {name: tensor for name, tensor in tensors.items() if name not in own} | parts[experts.split.rank]
        others = {name: tensor for part in parts for name, tensor in part.items() if name not in tensors}
    try:
        files = [TensorFile(path / _tensors_name(rank)) for rank in of_ranks]
        names = [name for file in files for name in file.entries]
        if sorted(names) != sorted((*tensors, *others)):
            other = next(iter(set(names) ^ {*tensors, *others}), "a name that is there twice")
            raise ConfigError(f"the tensors are not those of this model: {shown(other)}")
        for file in files:
            file.read_into(tensors, others)
    except ConfigError as error:
        raise _damaged(path, str(error)) from None


# -- which checkpoint ----------------------------------------------------------------------------------------------


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
    chosen = None if wanted == "never" else _named_checkpoint(run, Path(os.path.expanduser(wanted)))  # noqa: PTH111 -- does not raise
    first_step = step_of(chosen) if chosen else 0
    if found and step_of(found[-1]) > first_step:
        run.fail(
            "train.resume",
            f"'train.resume' is {wanted}, but {found[-1]} is already there and would be mixed with the new ones; "
            "choose another 'train.output_dir', delete the folder, or write auto",
        )
    return chosen


def _named_checkpoint(run: RunConfig, path: Path) -> Path:
    with suppress(OSError):  # a name that no file system takes
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
    """Raises `ConfigError` if it is not the state of such generators."""
    try:
        _set_random_state(state, device)
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        text = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"checkpoint: its random state cannot be taken up ({text}); resume from another one"
        ) from None


def _set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    torch.set_rng_state(_bytes_tensor(state["cpu"]))
    if device.type != "cpu" and "device" in state:
        torch.get_device_module(device).set_rng_state(_bytes_tensor(state["device"]), device)
    numpy = sys.modules.get("numpy")
    if numpy and "numpy" in state:
        numpy.random.set_state(tuple(state["numpy"]))


def _bytes_tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


def _check(
    path: Path, run: Mapping[str, Any], *, settings: Mapping[str, object], rank: int, num_ranks: int | None
) -> None:
    """`num_ranks`: that must have saved it; None for any number."""
    if num_ranks not in (None, run["num_ranks"]):
        raise ConfigError(
            f"{path}: saved by {run['num_ranks']} ranks, this run has {num_ranks}; "
            f"start it on as many with torchrun, or start a new run with another train.output_dir"
        )
    saved_by = int(run["num_ranks"])
    # Two for each rank. Counted first: the names of a number gone wrong would fill the memory.
    is_whole = len(run["files"]) == 2 * saved_by and set(run["files"]) == {
        name for each in range(saved_by) for name in (_rank_name(each), _tensors_name(each))
    }
    if not is_whole:
        raise _damaged(path, "run.json lists other files than those of its ranks")
    for name, (size_bytes, sha256) in run["files"].items():
        file = path / name
        found_bytes = file.stat().st_size if file.is_file() else None
        if found_bytes is None:
            raise _damaged(path, f"{name} is missing")
        if found_bytes != size_bytes:
            raise _damaged(path, f"{name} has {found_bytes} of {size_bytes} bytes")
        if rank == 0 and _sha256_of_file(path, name) != sha256:
            raise _damaged(path, f"the content of {name} is not what was written")
    then, now = run["settings"], json.loads(json.dumps(dict(settings)))
    changed = [key for key in sorted(then.keys() | now.keys()) if then.get(key) != now.get(key)]
    split = "train.expert_parallel"
    if split in changed:
        raise ConfigError(
            f"{path}: saved with {split} {then.get(split, 1)}, this run has {now.get(split, 1)}; put it back, or "
            "start a new run with another train.output_dir"
        )
    if changed:
        listed = ", ".join(f"{key} was {then.get(key)!r} and is now {now.get(key)!r}" for key in changed[:3])
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise ConfigError(
            f"{path}: made by a run with other settings: {listed}{more}; "
            "put them back, or start a new run with another train.output_dir"
        )


def _damaged(path: Path, why: str) -> ConfigError:
    return ConfigError(f"{path}: the checkpoint is damaged: {why}; delete this folder to resume from the one before it")


def _read_run(path: Path) -> dict[str, Any]:
    """`run.json`, checked against its own hash."""
    document = _read_json(path / "run.json")
    if document.get("format") == 1:
        raise ConfigError(
            f"{path}: written by lowtide 0.1, whose checkpoints are pickles, which this version does not read; finish "
            "the run with lowtide 0.1, or start a new one with another train.output_dir"
        )
    if document.get("format") != FORMAT:
        raise ConfigError(
            f"{path}: written in format {shown(document.get('format'))}, this version reads format {FORMAT}; "
            "finish the run with the version that started it, or start a new one with another train.output_dir"
        )
    run = document.get("run")
    if not isinstance(run, dict) or document.get("sha256") != _sha256_of(run):
        raise _damaged(path, "the content of run.json is not what was written")
    return run


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise _damaged(path.parent, f"{path.name} is missing")
    try:
        found = parse_json(read_text(path, most_bytes=_MOST_JSON_BYTES), path.name)
    except ConfigError as error:
        raise _damaged(path.parent, str(error).replace(str(path), path.name)) from None
    if not isinstance(found, dict):
        raise _damaged(path.parent, f"{path.name} is not a mapping")
    return found


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    with open_new(path) as file:
        file.write(json.dumps(value).encode())
        file.flush()
        os.fsync(file.fileno())


def _rank_name(rank: int) -> str:
    return f"rank-{rank}.json"


def _tensors_name(rank: int) -> str:
    return f"rank-{rank}.safetensors"


def _files_of(folder: Path, num_ranks: int) -> dict[str, tuple[int, str]]:
    """Size and hash of every rank's files. Those of the tensors are taken from the rank that wrote them: read back they
    would only say what the page cache holds."""
    found: dict[str, tuple[int, str]] = {}
    for rank in range(num_ranks):
        name = _rank_name(rank)
        found[name] = ((folder / name).stat().st_size, _sha256_of_file(folder, name))
        num_bytes, sha256 = _read_json(folder / name)["tensors"]
        found[_tensors_name(rank)] = (num_bytes, sha256)
    return found


def _sha256_of(run: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(run, sort_keys=True).encode()).hexdigest()


def _sha256_of_file(folder: Path, name: str) -> str:
    try:
        with (folder / name).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise _damaged(folder, f"{name} cannot be read: {error.strerror}") from None


def _make_folder(folder: Path) -> None:
    """The folder of checkpoints, for its owner only, with its name on disk; one that is there stays as it is."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(mode=0o700 if path == folder else 0o777, exist_ok=True)
        _flush_folder(path.parent)


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
