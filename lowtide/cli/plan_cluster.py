"""`lowtide plan RUN.yaml --devices 2048`: the fastest layout of a model over a cluster, without having one.

What: made instead of a plan for one device if the run file has a section `parallel`, or with `--devices`. Sizes that
the section has are kept, the others are searched. Of the model only its config is read. stdout has the plan, or with
`--json` one JSON document; `--export` writes it for another system as well.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lowtide.cli.waiting import Waiting
from lowtide.config.memory import MemoryConfig
from lowtide.config.run import ParallelConfig, RunConfig
from lowtide.core.budget import parse_budget, settle
from lowtide.core.fate import Fate
from lowtide.errors import ConfigError

if TYPE_CHECKING:
    from lowtide.cluster.search import ClusterPlan, Question
    from lowtide.timeline.cluster import Cluster
    from lowtide.timeline.hardware import Hardware

_ONE_DEVICE_ONLY = ("profile", "out", "host_budget")
_EXPORTS = ("mindformers", "megatron", "mindspeed")
NO_BYTES = "--budget: must be more than 0 bytes; write e.g. --budget 20GiB"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--devices", type=int, metavar="N", help="plan layouts of so many devices, see 'parallel'")
    parser.add_argument("--cluster", metavar="NAME", help="what connects them: h800, ideal, ... or a TOML file")
    parser.add_argument(
        "--export", nargs=2, metavar=("SYSTEM", "FILE"), help=f"write the layout for {', '.join(_EXPORTS)}"
    )


def is_cluster_requested(settings: RunConfig, args: argparse.Namespace) -> bool:
    is_sharded = settings.is_sharded
    if is_sharded and args.devices is not None:
        raise ConfigError("--devices: the ranks of a fully sharded model are 'parallel.data'; leave it out")
    if is_sharded or (settings.parallel is None and args.devices is None):
        for option in ("cluster", "export"):
            if getattr(args, option) is not None and not (is_sharded and option == "cluster"):
                raise ConfigError(f"--{option}: is for a plan for a cluster; write --devices, or a section 'parallel'")
        return False
    return True


def plan(settings: RunConfig, args: argparse.Namespace) -> ClusterPlan:
    """The plan, exported where that is asked for. Raises `ConfigError` for mistakes and where nothing fits."""
    for option in _ONE_DEVICE_ONLY:
        if getattr(args, option):
            raise ConfigError(f"--{option.replace('_', '-')}: is for a plan for one device; leave it out")
    if args.export is not None and args.export[0] not in _EXPORTS:
        raise ConfigError(f"--export: unknown system '{args.export[0]}'; known are {', '.join(_EXPORTS)}")
    with Waiting() as waiting:
        waiting.say("starting")
        question = make_question(settings, args)
        from lowtide.cluster.search import plan_cluster

        found = plan_cluster(question, progress=waiting.say)
        if args.export is not None:
            from lowtide.cluster.export import export

            export(found, args.export[0], Path(args.export[1]))
    return found


def make_question(settings: RunConfig, args: argparse.Namespace) -> Question:
    """What the run file and the command line ask for."""
    from lowtide.cluster.layout import Batch
    from lowtide.cluster.search import Question
    from lowtide.cluster.shape import shape_of
    from lowtide.timeline.cluster import load_cluster
    from lowtide.timeline.hardware import load_hardware

    config = settings.parallel or ParallelConfig()
    if args.hardware is None:
        raise ConfigError("--hardware: say for which device: --hardware h100, ascend910b, ... or a TOML file")
    hardware = load_hardware(args.hardware)
    cluster = load_cluster(args.cluster or config.cluster or args.hardware)
    if config.precision == "fp8" and "float8" not in hardware.flops_per_second:
        raise ConfigError(
            f"{config.place_of('precision')}: 'parallel.precision' is fp8, but {hardware.name} has no rate for it; "
            "write bf16, or give a file with flops_per_second.float8"
        )
    devices = _num_devices(config, args.devices)
    if config.global_batch is None and config.data is None:
        raise ConfigError(
            f"{config.place_of('global_batch')}: 'parallel.global_batch' is missing: without it, or 'parallel.data', "
            "nobody knows how many sequences a step has; write e.g. global_batch: 1024"
        )
    from lowtide.cli.run_model import model_config  # imports torch

    return Question(
        shape=shape_of(model_config(settings)),
        batch=Batch(
            sequences=config.global_batch,
            micro_batch=settings.train.batch_size,
            accumulation=settings.train.grad_accumulation,
            sequence_length=settings.data.sequence_length,
        ),
        config=config,
        devices=devices,
        hardware=hardware,
        cluster=cluster,
        budget_bytes=_budget(settings, args.budget, hardware, cluster),
        slices_loss=(settings.memory or MemoryConfig()).loss != "plain",
        fates=_fates(settings.memory or MemoryConfig()),
        optimizer=_optimizer(settings.memory or MemoryConfig(), args.optimizer),
    )


def _optimizer(memory: MemoryConfig, asked: str | None) -> Literal["keep", "swap", "auto"]:
    """Where its state is; which optimizer it is, is not asked."""
    if asked not in (None, "keep", "swap", "auto"):
        raise ConfigError(f"--optimizer: {asked} is for a plan for one device; write keep, swap or auto")
    if memory.optimizer == "in_backward":
        raise ConfigError(f"{memory.locations.of('optimizer')}: in_backward is for one rank; write keep, swap or auto")
    return asked or memory.optimizer or "keep"  # type: ignore[return-value]


def _num_devices(config: ParallelConfig, asked: int | None) -> int:
    if asked is not None:
        if asked < 1:
            raise ConfigError(f"--devices: must be at least 1, not {asked}")
        return asked
    if config.devices is not None:
        return config.devices
    sizes = (config.tensor, config.pipeline, config.context, config.data)
    if None in sizes:
        raise ConfigError(
            f"{config.place_of('devices')}: 'parallel.devices' is missing; write it, or --devices 2048, or all of "
            "tensor, pipeline, context and data"
        )
    tensor, pipeline, context, data = (size or 1 for size in sizes)
    return tensor * pipeline * context * data


def _budget(settings: RunConfig, text: str | None, hardware: Hardware, cluster: Cluster) -> int:
    """Left out or `auto`: what the device has, less what the cluster reserves."""
    from lowtide.timeline.hardware import memory_of_hardware

    written = settings.memory.budget if settings.memory is not None else None  # never 0: that is refused when read
    try:
        budget = (written or "auto") if text is None else parse_budget(text)
    except ValueError as error:
        raise ConfigError(f"--budget: {error}") from None
    if budget == 0:
        raise ConfigError(NO_BYTES)
    if budget == "auto":
        return int(hardware.memory_bytes * (1 - cluster.reserved_share))
    return settle(budget, memory_of_hardware(hardware))[0]


def _fates(memory: MemoryConfig) -> tuple[Fate, ...]:
    """That the section leaves. Rules that name layers are for a plan of one device."""
    for field in dataclasses.fields(memory):
        if (
            field.name not in ("budget", "recompute", "swap", "optimizer", "locations")
            and getattr(memory, field.name) != field.default
        ):
            raise ConfigError(
                f"{memory.locations.of(field.name)}: 'memory.{field.name}' is for a plan for one device; leave it out"
            )
    for key in ("recompute", "swap"):
        if getattr(memory, key) not in (None, "auto", "none", "all"):
            raise ConfigError(
                f"{memory.locations.of(key)}: 'memory.{key}' must be auto, none or all in a plan for a cluster"
            )
    if memory.recompute == "all":
        return (Fate.RECOMPUTE,)
    if memory.swap == "all":
        return (Fate.SWAP,)
    swap = () if memory.swap == "none" else (Fate.SWAP,)
    return (Fate.KEEP, *swap, *(() if memory.recompute == "none" else (Fate.RECOMPUTE,)))
