"""Reads a run file: sections `model`, `data`, `train`, `memory`, `pipeline`, `parallel` (config/run.py).

What: `load_run("run.yaml")` reads the whole file; every mistake is one line with its place. Paths in it are relative to
the current directory, as on every command line.
Why here and without torch: a file with a mistake must be refused at once, before anything heavy is imported. Only what
needs the model library (fields of the model's config class) or the disk (the text) is checked later; `places` keeps
where these were written, so that the late errors name the line too.
MindSpore Transformers' `recompute_config` and `swap_config` may stand beside them (config/mindformers); the file may
then also have keys that mean nothing here, such as `context`, and `model.model_config`.
`pipeline` says that the layers are split over ranks, `parallel.shard` that each of them is; what cannot stand beside
them yet is refused by name.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from lowtide.config.loader import load_tree
from lowtide.config.memory import MemoryConfig
from lowtide.config.run import SCHEDULES, DType, PipelineConfig, Precision, RunConfig
from lowtide.config.source import RawValue, read_yaml
from lowtide.errors import ConfigError, did_you_mean
from lowtide.mindformers.schema import has_sections, read_sections
from lowtide.mindformers.schema.file import SECTIONS
from lowtide.pipeline.generators import GENERATORS, make_schedule

_OURS = ("model", "data", "train", "memory", "pipeline", "parallel")
_UPSTREAMS = ("trainer", "run_mode", "modelarts")
"""Keys of MindSpore Transformers that look like a misspelt one of ours."""
_MOST_TOKENS = 2**27
"""Of a micro-batch of one rank: 1 GiB of token numbers."""
_MOST_REPEATS = 4096
"""Of a block of the model: layers, experts. Each takes a millisecond or so to build."""
_REPEATS = re.compile(r"(num_|n_)?(\w+_)?(layers?|experts)|num_(mem_)?blocks|num_hidden_groups|inner_group_num")
_WEIGHTS: dict[Precision, DType] = {"float32": "float32", "bf16_autocast": "float32", "bf16": "bfloat16"}


def load_run(path: str | os.PathLike[str]) -> RunConfig:
    """Reads and checks a run file. Raises `ConfigError` for any mistake in it."""
    root = read_yaml(path)
    sections = read_sections(path, root) if has_sections(root) else None
    root = root if sections is None else _without_sections(root)
    for entry in root.entries:  # a section that is not read is a mistake, most often in its name
        if entry.key not in _OURS:
            hint = did_you_mean(entry.key, (*_OURS, *SECTIONS)) or f"; known sections: {', '.join(_OURS)}"
            raise ConfigError(f"{entry.place}: unknown section '{entry.key}'{hint}")
    file = load_tree(root, RunConfig)
    _check_model(file)
    _check_size(file)
    if sections is not None:
        _check_beside_sections(file)
    if file.pipeline is not None:
        _check_pipeline(file, file.pipeline)
    elif file.train.tensor_parallel > 1:
        file.fail(
            "train.tensor_parallel",
            "'train.tensor_parallel' is for the stages of a section 'pipeline'; without one write parallel: {shard: "
            "fsdp2, tensor: ...}",
        )
    beside = {"pipeline": file.pipeline is not None, "train.expert_parallel": file.train.expert_parallel > 1}
    for key in (key for key, is_there in beside.items() if is_there and file.is_sharded):
        file.fail("parallel.shard", f"'parallel.shard' cannot stand beside '{key}' yet; take one of them out")
    if file.memory is not None:
        file.memory.rules()  # a malformed pattern is found when it is read, not when the model is there
    train = file.train
    if train.engine is not None and file.memory is None and sections is None:
        file.fail("train.engine", "'train.engine' needs a 'memory' section; add one or remove the key")
    output_dir = train.output_dir or Path("runs") / Path(path).stem
    model = dataclasses.replace(file.model, dtype=_WEIGHTS[train.precision])
    return dataclasses.replace(file, model=model, sections=sections, output_dir=output_dir)


def _without_sections(root: RawValue) -> RawValue:
    """The file without the two sections and without what only upstream reads; a misspelt key of ours stays in.
    `parallel` is upstream's beside them."""
    parallel = [entry.node for entry in root.entries if entry.key == "parallel"]
    for inner in (inner for node in parallel for inner in node.entries):
        if inner.key == "shard":
            raise ConfigError(
                f"{inner.place}: 'parallel.shard' cannot stand beside recompute_config and swap_config yet; use the "
                "section 'memory'"
            )
    ours = tuple(key for key in _OURS if key != "parallel")
    foreign = [entry.key for entry in root.entries if entry.key in _UPSTREAMS or not did_you_mean(entry.key, ours)]
    kept = [entry for entry in root.entries if entry.key in ours or entry.key not in foreign]
    entries = []
    for entry in kept:
        node = entry.node
        if entry.key == "model":
            below = tuple(inner for inner in node.entries if inner.key != "model_config")
            node = dataclasses.replace(node, entries=below)
        entries.append(dataclasses.replace(entry, node=node))
    return dataclasses.replace(root, entries=tuple(entries))


def _check_beside_sections(file: RunConfig) -> None:
    """Beside the two sections, `memory` says where bytes may go, not what happens to them."""
    memory = file.memory
    for key in ("budget", "recompute", "swap", "keep") if memory is not None else ():
        if getattr(memory, key) not in (None, ()):
            file.fail(
                f"memory.{key}",
                f"'memory.{key}' cannot stand beside recompute_config and swap_config; write all of it here, or all of "
                "it there",
            )


def _check_pipeline(file: RunConfig, pipeline: PipelineConfig) -> None:
    """The schedule exists for these numbers, and nothing stands beside it that only whole models have."""
    try:
        make_schedule(pipeline.schedule, num_ranks=pipeline.stages, num_micro_batches=pipeline.micro_batches)
    except ConfigError as error:
        file.fail("pipeline", str(error))
    if pipeline.overlap and not SCHEDULES[pipeline.schedule].has_pairs:
        have = sorted(name for name in GENERATORS if SCHEDULES[name].has_pairs)
        file.fail(
            "pipeline.overlap",
            f"'pipeline.overlap' is about pairs of a forward and a backward, which '{pipeline.schedule}' does not "
            f"have; choose {', '.join(have[:-1])} or {have[-1]}",
        )
    if file.train.grad_accumulation != 1:
        file.fail(
            "train.grad_accumulation",
            f"'train.grad_accumulation' is {file.train.grad_accumulation}, and a step of a pipeline has "
            f"{pipeline.micro_batches} micro-batches already; write their number into 'pipeline.micro_batches' only",
        )
    memory = file.memory
    if memory is not None and memory.has_budget:
        _check_budget_of_stages(memory, file.fail)


def _check_budget_of_stages(memory: MemoryConfig, fail: Callable[[str, str], NoReturn]) -> None:
    """What the plans for the stages of a pipeline do not know of."""
    if memory.slices_loss["must"]:
        fail("memory.loss", "'memory.loss' cannot be sliced beside 'pipeline', where the loss is no part of a model")
    for key, is_asked in (("rows", memory.rows is not None), ("weights", memory.weights != "keep")):
        if is_asked:
            fail(f"memory.{key}", f"'memory.{key}' cannot stand beside a budget and 'pipeline' yet; leave it out")


def _check_model(file: RunConfig) -> None:
    """The section says which model, and beside a folder nothing that stands in the folder."""
    model, key_places = file.model, file.model.locations.keys
    if model.path is not None and model.model_type is not None:
        file.fail("model", "'model' needs either 'path' or 'model_type', not both; remove one of them")
    if model.path is None and model.model_type is None:
        for key in model.fields:
            if hint := did_you_mean(key, ("path", "model_type")):
                raise ConfigError(f"{key_places[key]}: unknown key 'model.{key}'{hint}")
        file.fail("model", "'model' needs either 'path' or 'model_type'; write e.g. model_type: llama")
    for key in model.fields if model.path is not None else ():
        ours = ("path", "dtype", "seed", "lora")
        hint = did_you_mean(key, ours) or "; a model from a folder takes only path, dtype, seed and lora"
        raise ConfigError(f"{key_places[key]}: unknown key 'model.{key}'{hint}")
    for key, value in model.fields.items():
        if _REPEATS.fullmatch(key) and isinstance(value, int) and not 0 <= value <= _MOST_REPEATS:
            bound = "at least 0" if value < 0 else f"at most {_MOST_REPEATS}"
            file.fail(f"model.{key}", f"'model.{key}' must be {bound}, not {value}")
    if model.path is not None and not os.path.isdir(model.path):  # noqa: PTH112 -- does not raise
        what = f"{model.path} is not a folder on this machine; check the path (nothing is downloaded)"
        file.fail("model.path", f"'model.path': {what}")
    needed = _WEIGHTS[file.train.precision]
    if "model.dtype" in file.places.places and model.dtype != needed:
        file.fail(
            "model.dtype",
            f"'model.dtype' is {model.dtype}, but 'train.precision' {file.train.precision} has {needed} weights; "
            "leave one of them out",
        )


def _check_size(file: RunConfig) -> None:
    """A micro-batch that no memory holds is refused before anything heavy is imported."""
    num_tokens = file.train.batch_size * file.data.sequence_length
    if num_tokens > _MOST_TOKENS:
        file.fail(
            "train.batch_size",
            f"'train.batch_size' of {file.train.batch_size} sequences of {file.data.sequence_length} makes "
            f"{num_tokens} tokens per micro-batch, of at most {_MOST_TOKENS}; lower one of them",
        )
