"""One rank of fully sharded data parallelism (FSDP2's `fully_shard` of every layer, and of the model around them).

What: `sharded_profile` turns the profile of a whole model on one device into that of one rank: parameters, gradients and
optimizer state in shards, and beside them what is gathered while a layer runs. `play_network` plays the same step with
its all-gathers and reduce-scatters on a network lane, and says how long it takes.

The order is that of FSDP2, looked up in torch 2.13: in forward the next layer is gathered while this one runs; in
backward too, and gradients of a layer are reduced while the layer before it runs. What is not in a layer (embedding,
head) is gathered first, stays, and is reduced last; nothing hides these two.
A collective beside compute slows compute by the cluster's `overlap_share` of its time. Copies into and out of the
buffers of collectives run on the compute lane, at the rate of a copy.

Cost: linear in operators. Not covered: a layer that is called twice, several micro-batches without reduction, and
collectives that wait for a slower rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lowtide.core.profile import Profile
from lowtide.pipeline.cluster.network import ring_seconds
from lowtide.timeline.cluster import Cluster
from lowtide.timeline.hardware import Hardware

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


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkStep:
    """A step with its network lane. Seconds."""

    step_seconds: float
    network_seconds: float
    """That the lane is busy."""
    exposed_seconds: float
    """That compute waits for it."""
    slowed_seconds: float
    """By which compute is slower beside it."""
    copy_seconds: float
    """Of copies between parameters and the buffers of collectives."""


@dataclass(slots=True)
class _Segment:
    """Consecutive operators of one unit. `unit` None: outside of the layers."""

    unit: str | None
    seconds: float
    is_backward: bool


def play_network(
    profile: Profile, layer_bytes: Mapping[str, int], sharding: Sharding, cluster: Cluster, hardware: Hardware
) -> NetworkStep:
    """The step of `profile`, its layers gathered before they run and their gradients reduced after.

    `layer_bytes`: bytes of each layer's parameters as they are computed with (gathered); `profile.state.parameters` are
    those of the whole model. Layers that run again (planner/again.py) may already stand in the profile.
    """
    width = _width(profile, sharding)
    root_bytes = profile.state.parameters - sum(layer_bytes.values())

    def gather(nbytes: int) -> float:
        return ring_seconds(cluster, sharding.ranks, nbytes)

    def reduce(nbytes: int) -> float:
        summed = nbytes / width * sharding.reduced_width
        seconds = ring_seconds(cluster, sharding.ranks, summed)
        # A sum over replicas is a scattered sum and a gather of each shard.
        across = ring_seconds(cluster, sharding.replicas, summed / sharding.ranks, stride=sharding.ranks)
        return seconds + 2 * across

    def copied(nbytes: float) -> float:
        return nbytes / hardware.memory_bytes_per_second if sharding.has_copies and sharding.ranks > 1 else 0.0

    def copied_out(nbytes: int) -> float:
        return copied(2 * nbytes)

    def copied_in(nbytes: int) -> float:
        return copied(nbytes + nbytes / width * sharding.reduced_width)

    share = cluster.overlap_share
    segments = _segments(profile, layer_bytes)
    forward = [segment for segment in segments if not segment.is_backward]
    backward = [segment for segment in segments if segment.is_backward]
    now = lane = busy = waited = slowed = copies = 0.0

    def issue(seconds: float, at: float) -> float:
        nonlocal lane, busy
        lane = max(lane, at) + seconds
        busy += seconds
        return lane

    for part in (forward, backward):
        order = [segment.unit for segment in part if segment.unit is not None]
        arrived: dict[str, float] = {}
        if part is forward:
            now = issue(gather(root_bytes), now) + copied_out(root_bytes)
            waited += now - copied_out(root_bytes)
            copies += copied_out(root_bytes)
        if order:
            arrived[order[0]] = issue(gather(layer_bytes[order[0]]), now)
        place = 0
        for segment in part:
            seconds, beside = segment.seconds, 0.0
            if segment.unit is not None:
                nbytes = layer_bytes[segment.unit]
                ready = arrived.get(segment.unit, now)
                waited += max(0.0, ready - now)
                now = max(now, ready)
                place += 1
                copies += copied_out(nbytes)
                seconds += copied_out(nbytes)
                beside = max(0.0, lane - now)  # reductions that are under way
                if place < len(order):
                    following = gather(layer_bytes[order[place]])
                    arrived[order[place]] = issue(following, now)
                    beside = max(0.0, lane - now)
                if part is backward:
                    copies += copied_in(nbytes)
                    seconds += copied_in(nbytes)
            else:
                beside = max(0.0, lane - now)
            lost = share * min(beside, seconds)
            slowed += lost
            now += seconds + lost
            if part is backward and segment.unit is not None:
                issue(reduce(layer_bytes[segment.unit]), now)
    copies += copied_in(root_bytes)
    now += copied_in(root_bytes)
    end = issue(reduce(root_bytes), now)
    waited += max(0.0, end - now)
    return NetworkStep(
        step_seconds=max(now, end),
        network_seconds=busy,
        exposed_seconds=waited,
        slowed_seconds=slowed,
        copy_seconds=copies,
    )


def sharded_profile(profile: Profile, layer_bytes: Mapping[str, int], sharding: Sharding) -> Profile:
    """The profile of one rank. Times stay; bytes are those of shards and of what is gathered."""
    state, ranks = profile.state, sharding.ranks
    scale = sharding.stored_width / _width(profile, sharding) / ranks
    root_bytes = state.parameters - sum(layer_bytes.values())
    most = max(layer_bytes.values(), default=0)
    gathered: list[int] = []
    for number, name in enumerate(profile.op_names):
        unit = _unit_of(name, layer_bytes)
        is_backward = number >= profile.num_forward_ops
        here = root_bytes
        if unit is not None:
            here += _TWO * most
            here += layer_bytes[unit] if is_backward else 0  # its gradients before they are reduced
        if is_backward:
            here += int(most / _width(profile, sharding) * sharding.reduced_width)  # what is being reduced
        gathered.append(here)
    op_gradients = tuple(int(nbytes * scale) for nbytes in profile.op_gradient_bytes)
    op_bytes = tuple(
        nbytes - whole + shard + extra
        for nbytes, whole, shard, extra in zip(
            profile.op_bytes, profile.op_gradient_bytes, op_gradients, gathered, strict=True
        )
    )
    return dataclasses.replace(
        profile,
        state=dataclasses.replace(
            state,
            parameters=int(state.parameters * scale),
            gradients=int(state.gradients * scale),
            optimizer=int(state.optimizer * scale),
            optimizer_movable=int(state.optimizer_movable * scale),
            optimizer_unit=int(state.optimizer_unit * scale),
            optimizer_temporaries=int(state.optimizer_temporaries * scale),
        ),
        op_bytes=op_bytes,
        op_gradient_bytes=op_gradients,
    )


def _width(profile: Profile, sharding: Sharding) -> int:
    """Bytes of an element while it is computed with."""
    return sharding.gathered_width


def _segments(profile: Profile, layer_bytes: Mapping[str, int]) -> Sequence[_Segment]:
    segments: list[_Segment] = []
    for number, (name, seconds) in enumerate(zip(profile.op_names, profile.op_seconds, strict=True)):
        unit, is_backward = _unit_of(name, layer_bytes), number >= profile.num_forward_ops
        last = segments[-1] if segments else None
        if last is not None and last.unit == unit and last.is_backward == is_backward:
            last.seconds += seconds
        else:
            segments.append(_Segment(unit, seconds, is_backward))
    return segments


def _unit_of(name: str, layer_bytes: Mapping[str, int]) -> str | None:
    # The layer's own path is as long as the keys' is: `model.layers.12.mlp.mul`.
    for length in sorted({key.count(".") + 1 for key in layer_bytes}):
        head = ".".join(name.split(".")[:length])
        if head in layer_bytes:
            return head
    return None
