"""What connects the devices of a cluster, in a handful of numbers, and how much of a device a whole step reaches.

What: `load_cluster("h800")`, or the path of a file of one's own. The files, clusters/*.toml, have the form of those of
devices: one number a line, each with its source. `ideal` leaves communication out.
Why beside the device: the same H100 stands in nodes of other widths, and what a training step reaches of a roofline is
a matter of the software around it.

Not covered: the shape of the network beyond "within a node" and "between nodes", and traffic of others on it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from lowtide.errors import ConfigError
from lowtide.timeline.hardware import Form, read_numbers, read_sourced

_KEYS = (
    "node_devices",
    "node_bytes_per_second",
    "network_bytes_per_second",
    "message_seconds",
    "overlap_share",
    "compute_share",
    "reserved_share",
)
_CLUSTER = Form(
    keys=_KEYS,
    may_be_zero=("message_seconds", "overlap_share", "reserved_share"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Devices in nodes. Rates are those of one device, each way."""

    name: str
    node_devices: int
    node_bytes_per_second: float
    """Between two devices of a node."""
    network_bytes_per_second: float
    """Between two devices of different nodes."""
    message_seconds: float
    """Added to each collective and to each hand-over."""
    overlap_share: float
    """Seconds that compute loses for each second that a collective runs beside it."""
    compute_share: float
    """Of the device's rates, what whole training steps reach."""
    reserved_share: float
    """Of the device's memory, what is left to libraries, communication buffers and fragmentation."""
    sources: Mapping[str, str] = field(default_factory=dict)

    def bytes_per_second(self, num_devices: int) -> float:
        """Of a group of so many devices that lie side by side: within a node if they fit into one."""
        is_within = num_devices <= self.node_devices
        return self.node_bytes_per_second if is_within else self.network_bytes_per_second


def load_cluster(name_or_path: str | os.PathLike[str]) -> Cluster:
    """The cluster of that name, or of a TOML file. Raises `ConfigError` as `load_hardware` does."""
    return _parse(*read_sourced(name_or_path, "clusters", "cluster: unknown cluster"))


def _parse(text: str, where: str, name: str) -> Cluster:
    numbers, sources = read_numbers(text, where, _CLUSTER)
    for key in ("overlap_share", "compute_share", "reserved_share"):
        if numbers[key] > 1:
            raise ConfigError(f"{where}: {key}: a share is at most 1, not {numbers[key]:g}")
    devices = numbers.pop("node_devices")
    if devices != int(devices):
        raise ConfigError(f"{where}: node_devices: expected a whole number, not {devices:g}")
    return Cluster(name=name, node_devices=int(devices), sources=sources, **numbers)


def all_to_all_seconds(
    cluster: Cluster, ranks: int, *, tokens: int, vector_bytes: int, top_k: int, most_nodes: int | None
) -> float:
    """One dispatch (or combine) of a vector for each token, to `top_k` experts spread over `ranks` that lie side by
    side. Each node that a token goes to gets it once over the network; within the node it is passed on to each expert.
    The two are at work at the same time, and the slower one counts."""
    if ranks == 1:
        return 0.0
    nodes = max(1, -(-ranks // cluster.node_devices))
    reached = nodes * (1 - (1 - 1 / nodes) ** top_k)
    if most_nodes is not None:
        reached = min(reached, most_nodes)
    across = tokens * vector_bytes * reached * (1 - 1 / nodes)
    within = tokens * vector_bytes * top_k * (1 - 1 / min(ranks, cluster.node_devices))
    slower = max(across / cluster.network_bytes_per_second, within / cluster.node_bytes_per_second)
    return cluster.message_seconds + slower


def ring_seconds(cluster: Cluster, ranks: int, nbytes: float, *, stride: int = 1) -> float:
    """A gather to, or a scattered sum over, `ranks` that are `stride` devices apart; `nbytes` is the whole of it."""
    if ranks == 1:
        return 0.0
    rate = cluster.bytes_per_second(ranks * stride)
    if ranks * stride > cluster.node_devices:
        # A ring enters and leaves each node once, and each device of the node that is in the group can be the place:
        # so many rings run side by side, each with a share of the bytes, over an adapter of its own.
        rate = min(cluster.node_bytes_per_second, rate * max(1, cluster.node_devices // stride))
    return cluster.message_seconds + nbytes * (ranks - 1) / ranks / rate


def hand_over_seconds(cluster: Cluster, nbytes: float, *, stride: int, ranks: int) -> float:
    """Activations, or their gradient, to the next of `ranks` stages that are `stride` devices apart."""
    if ranks == 1:
        return 0.0
    return cluster.message_seconds + nbytes / cluster.bytes_per_second(ranks * stride)
