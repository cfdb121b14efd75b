"""One rank of fully sharded data parallelism (FSDP2's `fully_shard` of every layer, and of the model around them).

What: `sharded_profile` turns the profile of a whole model on one device into that of one rank: parameters, gradients
and optimizer state in shards, and beside them what is gathered while a layer runs. `play_network` plays the same step
with its all-gathers and reduce-scatters on a network lane, and says how long it takes.

The order is that of FSDP2: in forward the next layer is gathered while this one runs; in
backward too, and gradients of a layer are reduced while the layer before it runs. What is not in a layer (embedding,
head) is gathered first, stays, and is reduced last; nothing hides these two.
A collective beside compute slows compute by the cluster's `overlap_share` of its time. Copies into and out of the
buffers of collectives run on the compute lane, at the rate of a copy.

Cost: linear in operators. Not covered: a layer that is called twice, several micro-batches without reduction, and
collectives that wait for a slower rank.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lowtide.core.profile import Profile, layer_of
from lowtide.timeline.hardware import Cluster, Hardware, ring_seconds

_TWO = 2
"""Layers that are gathered at once: the one that runs, and the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """How parameters are spread."""

    ranks: int
    replicas: int = 1
    """Groups of `ranks` that each have all parameters (hybrid sharding); their gradients are summed between groups."""
    stored_width: int = 4
    """Bytes of an element of a shard, of its gradient and of each moment."""
    gathered_width: int = 2
    """Bytes of an element while it is computed with."""
    reduced_width: int = 4
    """Bytes of an element of a gradient while it is summed."""
    has_copies: bool = True
    """Whether collectives have buffers of their own, as FSDP2's have; FSDP1 gathers into the parameters' own memory."""


def play_network(
    profile: Profile, layer_bytes: Mapping[str, int], sharding: Sharding, cluster: Cluster, hardware: Hardware
) -> NetworkStep:
    """The step of `profile`, its layers gathered before they run and their gradients reduced after.

    `layer_bytes`: bytes of each layer's parameters in the profile; `profile.state.parameters` are those of the whole
    model. Layers that run again (planner/rerun_layers.py) may already stand in the profile.
    """
    root_bytes = profile.state.parameters - sum(layer_bytes.values())
    step = NetworkStep(sharding, cluster, hardware)
    step.wait(step.gather(root_bytes))
    step.copy_out(root_bytes)
    for is_backward, operators in itertools.groupby(
        enumerate(zip(profile.op_names, profile.op_seconds, strict=True)), lambda op: op[0] >= profile.num_forward_ops
    ):
        units = itertools.groupby((op for _, op in operators), lambda op: layer_of(op[0], layer_bytes))
        segments = [(unit, sum(seconds for _, seconds in of_unit)) for unit, of_unit in units]
        _run(step, segments, layer_bytes, is_backward=is_backward)
    step.copy_in(root_bytes)
    step.wait(step.reduce(root_bytes))
    step.step_seconds = max(step.step_seconds, step.lane_seconds)
    return step


def _run(
    step: NetworkStep,
    segments: Sequence[tuple[str | None, float]],
    layer_bytes: Mapping[str, int],
    *,
    is_backward: bool,
) -> None:
    """`segments`: what runs one after the other, and its seconds; None: outside of the layers."""
    following = iter([unit for unit, _ in segments if unit is not None])

    def gather_next() -> float:
        unit = next(following, None)
        return 0.0 if unit is None else step.gather(layer_bytes[unit])

    arrived = gather_next()
    for unit, seconds in segments:
        if unit is None:
            step.compute(seconds)
            continue
        step.wait(arrived)
        arrived = gather_next()  # the next one, while this one runs
        step.copy_out(layer_bytes[unit])
        step.compute(seconds)
        if is_backward:
            step.copy_in(layer_bytes[unit])
            step.reduce(layer_bytes[unit])


@dataclass(slots=True)
class NetworkStep:
    """A step on two lanes while it is played, and what it took. Seconds; `nbytes` are of parameters in the width in
    which they are computed with."""

    sharding: Sharding
    cluster: Cluster
    hardware: Hardware
    step_seconds: float = 0.0
    """When compute ends; the step, once it is over."""
    lane_seconds: float = 0.0
    """When the network lane is free."""
    network_seconds: float = 0.0
    """That the lane is busy."""
    exposed_seconds: float = 0.0
    """That compute waits for it."""
    slowed_seconds: float = 0.0
    """By which compute is slower beside it."""
    copy_seconds: float = 0.0
    """Of copies between parameters and the buffers of collectives."""

    def gather(self, nbytes: int) -> float:
        """When it will be over."""
        return self._issue(ring_seconds(self.cluster, self.sharding.ranks, nbytes))

    def reduce(self, nbytes: int) -> float:
        """The same of gradients."""
        ranks, summed = self.sharding.ranks, self._summed(nbytes)
        # A sum over replicas is a scattered sum of each shard and a gather of it.
        across = ring_seconds(self.cluster, self.sharding.replicas, summed / ranks, stride=ranks)
        return self._issue(ring_seconds(self.cluster, ranks, summed) + 2 * across)

    def copy_out(self, nbytes: int) -> None:
        """What was gathered goes where the parameters are: read and written."""
        self._copy(2 * nbytes)

    def copy_in(self, nbytes: int) -> None:
        """Gradients go where they are reduced, in the width in which they are."""
        self._copy(nbytes + self._summed(nbytes))

    def wait(self, until: float) -> None:
        """Compute goes on then at the earliest."""
        self.exposed_seconds += max(0.0, until - self.step_seconds)
        self.step_seconds = max(self.step_seconds, until)

    def compute(self, seconds: float) -> None:
        """Slower while the lane is busy."""
        lost = self.cluster.overlap_share * min(max(0.0, self.lane_seconds - self.step_seconds), seconds)
        self.slowed_seconds += lost
        self.step_seconds += seconds + lost

    def _issue(self, seconds: float) -> float:
        """A collective begins when compute has come to it and the lane is free."""
        self.lane_seconds = max(self.lane_seconds, self.step_seconds) + seconds
        self.network_seconds += seconds
        return self.lane_seconds

    def _summed(self, nbytes: int) -> float:
        return nbytes / self.sharding.gathered_width * self.sharding.reduced_width

    def _copy(self, nbytes: float) -> None:
        if self.sharding.has_copies and self.sharding.ranks > 1:
            self.copy_seconds += nbytes / self.hardware.memory_bytes_per_second
            self.step_seconds += nbytes / self.hardware.memory_bytes_per_second


def sharded_profile(profile: Profile, layer_bytes: Mapping[str, int], sharding: Sharding) -> Profile:
    """The profile of one rank. Times stay; bytes are those of shards and of what is gathered."""
    state, ranks = profile.state, sharding.ranks
    scale = sharding.stored_width / sharding.gathered_width / ranks
    root_bytes = state.parameters - sum(layer_bytes.values())
    most = max(layer_bytes.values(), default=0)
    gathered: list[int] = []
    for number, name in enumerate(profile.op_names):
        unit = layer_of(name, layer_bytes)
        is_backward = number >= profile.num_forward_ops
        here = root_bytes
        if unit is not None:
            here += _TWO * most
            here += layer_bytes[unit] if is_backward else 0  # its gradients before they are reduced
        if is_backward:
            here += int(most / sharding.gathered_width * sharding.reduced_width)  # what is being reduced
        gathered.append(here)
    op_gradients = tuple(int(nbytes * scale) for nbytes in profile.op_gradient_bytes)
    op_bytes = tuple(
        nbytes - whole + shard + extra
        for nbytes, whole, shard, extra in zip(
            profile.op_bytes, profile.op_gradient_bytes, op_gradients, gathered, strict=True
        )
    )
    scaled = ("parameters", "gradients", "optimizer", "optimizer_movable", "optimizer_unit", "optimizer_temporaries")
    return dataclasses.replace(
        profile,
        state=dataclasses.replace(state, **{name: int(getattr(state, name) * scale) for name in scaled}),
        op_bytes=op_bytes,
        op_gradient_bytes=op_gradients,
    )
