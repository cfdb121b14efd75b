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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lowtide.core.profile import Profile
from lowtide.timeline.cluster import Cluster, ring_seconds
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

    `layer_bytes`: bytes of each layer's parameters in the profile; `profile.state.parameters` are those of the whole
    model. Layers that run again (planner/rerun_layers.py) may already stand in the profile.
    """
    root_bytes = profile.state.parameters - sum(layer_bytes.values())
    play = _Play(layer_bytes, _Costs(sharding, cluster, hardware), cluster.overlap_share)
    play.gather_root(root_bytes)
    segments = _segments(profile, layer_bytes)
    for is_backward in (False, True):
        play.run([segment for segment in segments if segment.is_backward == is_backward], is_backward=is_backward)
    play.reduce_root(root_bytes)
    return NetworkStep(
        step_seconds=max(play.now, play.lane),
        network_seconds=play.busy,
        exposed_seconds=play.waited,
        slowed_seconds=play.slowed,
        copy_seconds=play.copied,
    )


@dataclass(frozen=True, slots=True)
class _Costs:
    """Seconds of what happens to `nbytes` of parameters as they are computed with."""

    sharding: Sharding
    cluster: Cluster
    hardware: Hardware

    def gather(self, nbytes: int) -> float:
        return ring_seconds(self.cluster, self.sharding.ranks, nbytes)

    def reduce(self, nbytes: int) -> float:
        ranks = self.sharding.ranks
        summed = self._summed(nbytes)
        # A sum over replicas is a scattered sum of each shard and a gather of it.
        across = ring_seconds(self.cluster, self.sharding.replicas, summed / ranks, stride=ranks)
        return ring_seconds(self.cluster, ranks, summed) + 2 * across

    def copy_out(self, nbytes: int) -> float:
        """What was gathered goes where the parameters are: read and written."""
        return self._copy(2 * nbytes)

    def copy_in(self, nbytes: int) -> float:
        """Gradients go where they are reduced, in the width in which they are."""
        return self._copy(nbytes + self._summed(nbytes))

    def _summed(self, nbytes: int) -> float:
        return nbytes / self.sharding.gathered_width * self.sharding.reduced_width

    def _copy(self, nbytes: float) -> float:
        has_copies = self.sharding.has_copies and self.sharding.ranks > 1
        return nbytes / self.hardware.memory_bytes_per_second if has_copies else 0.0


@dataclass(slots=True)
class _Play:
    """Two lanes. `now` is the end of compute, `lane` that of the network."""

    layer_bytes: Mapping[str, int]
    costs: _Costs
    overlap_share: float
    now: float = 0.0
    lane: float = 0.0
    busy: float = 0.0
    waited: float = 0.0
    slowed: float = 0.0
    copied: float = 0.0

    def gather_root(self, nbytes: int) -> None:
        self._wait(self._issue(self.costs.gather(nbytes)))
        self._copy(self.costs.copy_out(nbytes))

    def reduce_root(self, nbytes: int) -> None:
        self._copy(self.costs.copy_in(nbytes))
        self._wait(self._issue(self.costs.reduce(nbytes)))

    def run(self, segments: Sequence[_Segment], *, is_backward: bool) -> None:
        order = [segment.unit for segment in segments if segment.unit is not None]
        arrived = self._issue(self.costs.gather(self.layer_bytes[order[0]])) if order else 0.0
        place = 0
        for segment in segments:
            if segment.unit is None:
                self._compute(segment.seconds)
                continue
            nbytes = self.layer_bytes[segment.unit]
            self._wait(arrived)
            place += 1
            if place < len(order):  # the next one, while this one runs
                arrived = self._issue(self.costs.gather(self.layer_bytes[order[place]]))
            self._copy(self.costs.copy_out(nbytes))
            self._compute(segment.seconds)
            if is_backward:
                self._copy(self.costs.copy_in(nbytes))
                self._issue(self.costs.reduce(nbytes))

    def _issue(self, seconds: float) -> float:
        """A collective begins when compute has come to it and the lane is free. When it will be over."""
        self.lane = max(self.lane, self.now) + seconds
        self.busy += seconds
        return self.lane

    def _wait(self, until: float) -> None:
        self.waited += max(0.0, until - self.now)
        self.now = max(self.now, until)

    def _copy(self, seconds: float) -> None:
        self.copied += seconds
        self.now += seconds

    def _compute(self, seconds: float) -> None:
        lost = self.overlap_share * min(max(0.0, self.lane - self.now), seconds)
        self.slowed += lost
        self.now += seconds + lost


def sharded_profile(profile: Profile, layer_bytes: Mapping[str, int], sharding: Sharding) -> Profile:
    """The profile of one rank. Times stay; bytes are those of shards and of what is gathered."""
    state, ranks = profile.state, sharding.ranks
    scale = sharding.stored_width / sharding.gathered_width / ranks
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
            here += int(most / sharding.gathered_width * sharding.reduced_width)  # what is being reduced
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
