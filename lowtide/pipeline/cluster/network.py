"""How long collectives take: latency and bytes over bandwidth, of groups within a node or across nodes.

What: seconds of one all-to-all of tokens, of one gather or scatter around a ring, of one hand-over to the next stage.
All are what they take with the network to themselves; what of it is hidden, step.py says.
Not covered: congestion, uneven routing.
"""

from __future__ import annotations

from lowtide.timeline.cluster import Cluster


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
