"""`lowtide plan` of one rank of a fully sharded model: `parallel: {shard: fsdp2, data: 8}` in the run file.

What: the traced step of the whole model becomes that of one rank (cluster/sharded.py), is planned as a step of
one device is, and the plan's step is played with its gathers and reductions on a network lane.
Not covered: profiles of real steps (they have their collectives in them); recipes that would read a parameter while it
is in shards, which the runtime refuses; and the network while the plan is made. Layers that run again hide more of the
network than a plain step does; the printed step counts that, the choice of the plan does not.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lowtide.config.run import RunConfig
from lowtide.core.fate import Fate
from lowtide.errors import ConfigError
from lowtide.planner.optimizer_kinds import Weight, shard_of
from lowtide.units import format_seconds

if TYPE_CHECKING:
    from lowtide.cluster.sharded import NetworkStep, Sharding
    from lowtide.core.plan import Plan
    from lowtide.core.profile import Profile
    from lowtide.timeline.cluster import Cluster
    from lowtide.timeline.hardware import Hardware


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """What the network adds to the step of a plan. Seconds."""

    ranks: int
    replicas: int
    """How many groups of `ranks` there are."""
    cluster: str
    step: NetworkStep
    """That of the plan."""

    def lines(self) -> list[str]:
        replicas = f", {self.replicas} replicas" if self.replicas > 1 else ""
        return [
            f"fully sharded over {self.ranks} ranks{replicas} (cluster {self.cluster}): "
            f"step {format_seconds(self.step.step_seconds)} "
            f"with gathers and reductions of {format_seconds(self.step.network_seconds)}",
            f"  {format_seconds(self.step.exposed_seconds)} of them are waited for, slow compute by "
            f"{format_seconds(self.step.slowed_seconds)}, copies of buffers {format_seconds(self.step.copy_seconds)}",
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One rank."""

    profile: Profile
    """Its bytes are those of this rank."""
    whole: Profile
    layer_bytes: dict[str, int]
    sharding: Sharding
    cluster: Cluster
    hardware: Hardware

    def shards_of(self, weights: Sequence[Weight]) -> list[Weight]:
        """What is here of the parameters of the whole model."""
        return [shard_of(weight, self.sharding.ranks) for weight in weights]

    def network(self, plan: Plan) -> Network:
        """The network of the step that the plan makes."""
        from lowtide.cluster.sharded import play_network
        from lowtide.planner.rerun_layers import run_again

        assert plan.predicted is not None
        again = [
            rule.pattern.text
            for rule in plan.rules.rules
            if rule.fate is Fate.RECOMPUTE and rule.pattern.text in self.whole.layers
        ]
        step = run_again(self.whole, again)
        played = play_network(step, self.layer_bytes, self.sharding, self.cluster, self.hardware)
        return Network(
            ranks=self.sharding.ranks,
            replicas=self.sharding.replicas,
            cluster=self.cluster.name,
            step=dataclasses.replace(
                played, step_seconds=plan.predicted.step_seconds + played.step_seconds - sum(step.op_seconds)
            ),
        )


def rank_of(settings: RunConfig, args: argparse.Namespace, whole: Profile) -> Rank:
    """One of the ranks that share the model. Raises `ConfigError` for what cannot be planned so."""
    from lowtide.cli.run_step import layer_bytes
    from lowtide.cluster.sharded import Sharding, sharded_profile
    from lowtide.timeline.cluster import load_cluster
    from lowtide.timeline.hardware import load_hardware

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
        raise ConfigError("--hardware: say for which device: --hardware h100, ascend910b, ... or a TOML file")
    width = 2 if settings.model.dtype == "bfloat16" else 4
    replicas = config.replicas or 1
    sharding = Sharding(
        ranks=config.data // replicas,
        replicas=replicas,
        stored_width=width,
        gathered_width=width,
        reduced_width=width,
    )
    sizes = layer_bytes(settings, whole.layers)
    return Rank(
        profile=sharded_profile(whole, sizes, sharding),
        whole=whole,
        layer_bytes=sizes,
        sharding=sharding,
        cluster=load_cluster(args.cluster or config.cluster or args.hardware),
        hardware=load_hardware(args.hardware),
    )
