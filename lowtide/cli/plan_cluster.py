"""`lowtide plan RUN.yaml --devices 2048`: the fastest layout of a model over a cluster, without having one.

What: made instead of a plan for one device if the run file has a section `parallel`, or with `--devices`. Sizes that
the section has are kept, the others are searched. Of the model only its config is read. stdout has the plan, or with
`--json` one JSON document; `--export` writes it for another system as well.

With `parallel: {shard: fsdp2, data: 8}` it is one rank of a fully sharded model (`sharded_rank`): the traced step of
the whole model becomes that of one rank (cluster/sharded.py), is planned as a step of one device is, and the plan's
step is played with its gathers and reductions on a network lane.
Not covered there: profiles of real steps (they have their collectives in them); recipes that would read a parameter
while it is in shards, which the runtime refuses; and the network while the plan is made. Layers that run again hide
more of the network than a plain step does; the printed step counts that, the choice of the plan does not.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from lowtide.cli.waiting import Waiting
from lowtide.cluster.export import export
from lowtide.cluster.layout import Question
from lowtide.cluster.search import ClusterPlan, plan_cluster
from lowtide.cluster.shape import shape_of
from lowtide.cluster.sharded import NetworkStep, play_network, sharded_profile
from lowtide.config.memory import MemoryConfig
from lowtide.config.run import ParallelConfig, RunConfig
from lowtide.core.budget import parse_budget, settle
from lowtide.core.fate import Fate
from lowtide.core.plan import Plan
from lowtide.core.profile import Profile
from lowtide.errors import ConfigError
from lowtide.planner.rerun_layers import with_reruns
from lowtide.timeline.hardware import Cluster, Hardware, load_cluster, load_hardware, memory_of_hardware
from lowtide.units import format_seconds

_ONE_DEVICE_ONLY = ("profile", "out", "host_budget")
_EXPORTS = ("mindformers", "megatron", "mindspeed")
_NO_HARDWARE = "--hardware: say for which device: --hardware h100, ascend910b, ... or a TOML file"
NO_BYTES = "--budget: must be more than 0 bytes; write e.g. --budget 20GiB"


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

        found = plan_cluster(question, progress=waiting.say)
        if args.export is not None:
            export(found, args.export[0], Path(args.export[1]))
    return found


def make_question(settings: RunConfig, args: argparse.Namespace) -> Question:
    """What the run file and the command line ask for."""
    config = settings.parallel or ParallelConfig()
    if args.hardware is None:
        raise ConfigError(_NO_HARDWARE)
    hardware = load_hardware(args.hardware)
    cluster = _cluster_of(config, args)
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
        sequences=config.global_batch,
        micro_batch=settings.train.batch_size,
        accumulation=settings.train.grad_accumulation,
        sequence_length=settings.data.sequence_length,
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


# -- one rank of a fully sharded model ---------------------------------------------------------------------------------


def check_sharded(settings: RunConfig, args: argparse.Namespace) -> None:
    """Raises `ConfigError` for what cannot be planned of one rank, before a step is traced."""
    config = settings.parallel
    assert config is not None
    if settings.memory is not None and settings.memory.optimizer == "in_backward":
        raise ConfigError(
            "memory.optimizer: in_backward is for one rank; beside 'parallel.shard' write optimizer: auto"
        )
    if config.data is None:
        raise ConfigError(
            f"{config.place_of('shard')}: 'parallel.shard' is planned for a number of ranks; write e.g. data: 8"
        )
    if config.tensor not in (None, 1):
        settings.fail(
            "parallel.tensor",
            f"'parallel.tensor' is {config.tensor}, and a plan beside 'shard' is of whole products in this version; "
            "leave it out to plan, or let lowtide train observe a step of such a rank",
        )
    if args.profile is not None:
        raise ConfigError(
            "--profile: it is of one device, and ranks that share the parameters are planned; leave it out"
        )
    if args.hardware is None:
        raise ConfigError(_NO_HARDWARE)
    _cluster_of(config, args)


def _cluster_of(config: ParallelConfig, args: argparse.Namespace) -> Cluster:
    return load_cluster(args.cluster or config.cluster or args.hardware)


def sharded_rank(
    settings: RunConfig, args: argparse.Namespace, whole: Profile
) -> tuple[Profile, Callable[[Plan], NetworkStep]]:
    """The step of one of the ranks that share the model, `whole` of which was traced; and the step that a plan of it
    makes, with the network."""
    from lowtide.cli.run_step import layer_bytes, sharding_of

    config = settings.parallel
    assert config is not None and config.data is not None
    sharding = sharding_of(settings, config.data, config.replicas or 1)
    sizes = layer_bytes(settings, whole.layers)
    cluster, hardware = _cluster_of(config, args), load_hardware(args.hardware)

    def network_of(plan: Plan) -> NetworkStep:
        assert plan.predicted is not None
        rules = (rule for rule in plan.rules.rules if rule.fate is Fate.RECOMPUTE)
        step = with_reruns(whole, [rule.pattern.text for rule in rules if rule.pattern.text in whole.layers])
        played = play_network(step, sizes, sharding, cluster, hardware)
        seconds = plan.predicted.step_seconds + played.step_seconds - sum(step.op_seconds)
        return dataclasses.replace(played, step_seconds=seconds)

    return sharded_profile(whole, sizes, sharding), network_of


def network_document(step: NetworkStep) -> dict[str, Any]:
    """As plain data."""
    sharding = step.sharding
    whose = {"ranks": sharding.ranks, "replicas": sharding.replicas, "cluster": step.cluster.name}
    seconds = ("step_seconds", "network_seconds", "exposed_seconds", "slowed_seconds", "copy_seconds")
    return whose | {name: getattr(step, name) for name in seconds}


def network_lines(step: NetworkStep) -> list[str]:
    """For people."""
    replicas = f", {step.sharding.replicas} replicas" if step.sharding.replicas > 1 else ""
    return [
        f"fully sharded over {step.sharding.ranks} ranks{replicas} (cluster {step.cluster.name}): "
        f"step {format_seconds(step.step_seconds)} "
        f"with gathers and reductions of {format_seconds(step.network_seconds)}",
        f"  {format_seconds(step.exposed_seconds)} of them are waited for, slow compute by "
        f"{format_seconds(step.slowed_seconds)}, copies of buffers {format_seconds(step.copy_seconds)}",
    ]
