"""One rank of fully sharded data parallelism: its network lane and its bytes, by hand."""

from __future__ import annotations

import dataclasses

import pytest

from lowtide.cluster.sharded import Sharding, play_network, sharded_profile
from lowtide.core.profile import Profile, StateBytes
from lowtide.timeline.hardware import Cluster, load_hardware

HARDWARE = dataclasses.replace(load_hardware("h100"), memory_bytes_per_second=1e9)
CLUSTER = Cluster(
    name="test", node_devices=4, node_bytes_per_second=1e6, network_bytes_per_second=1e5, message_seconds=0.0,
    overlap_share=0.0, compute_share=1.0, reserved_share=0.0,
)  # fmt: skip
LAYERS = {"m.0": 4_000_000, "m.1": 4_000_000}
ALONE = Sharding(ranks=1, stored_width=2)
FOUR = Sharding(ranks=4, stored_width=4, reduced_width=2, has_copies=False)


def profile(forward: float = 10.0, backward: float = 20.0) -> Profile:
    """Embedding, two layers, head; 2 bytes a parameter: 4 M of each layer, 2 M outside."""
    names = ("embed", "m.0.mm", "m.1.mm", "head")
    return Profile(
        model="Test", device="h100", is_fake=True, batch="", layers=("m.0", "m.1"), signatures=("", ""),
        state=StateBytes(parameters=10_000_000, gradients=10_000_000, optimizer=20_000_000),
        num_forward_ops=4,
        op_names=(*names, *(f"{name}:backward" for name in reversed(names))),
        op_seconds=(1.0, forward, forward, 1.0, 2.0, backward, backward, 2.0),
        op_bytes=(100, 200, 300, 400, 500, 2_000_500, 6_000_500, 10_000_500),
        op_gradient_bytes=(0, 0, 0, 0, 0, 2_000_000, 6_000_000, 10_000_000), nodes=(),
    )  # fmt: skip


def test_alone_nothing_is_gathered() -> None:
    played = play_network(profile(), LAYERS, ALONE, CLUSTER, HARDWARE)
    assert played.step_seconds == sum(profile().op_seconds) == 66.0
    assert played.network_seconds == played.exposed_seconds == played.copy_seconds == 0.0


def test_what_fits_beside_compute_is_hidden() -> None:
    """A layer takes 3 s to gather and 3 s to reduce; the rest takes 1.5 s, and nothing hides it."""
    played = play_network(profile(), LAYERS, FOUR, CLUSTER, HARDWARE)
    root, layer = 2e6 * 0.75 / 1e6, 4e6 * 0.75 / 1e6
    assert played.network_seconds == pytest.approx(2 * root + 6 * layer)
    # In forward the first layer is gathered beside the embedding (1 s of 3), in backward beside the head (2 s of 3).
    # At the end the last layer's gradients are still under way when the embedding's backward is over.
    assert played.exposed_seconds == pytest.approx(root + 2.0 + 1.0 + (layer - 2.0) + root)
    assert played.step_seconds == pytest.approx(66.0 + played.exposed_seconds)


def test_a_slow_network_decides() -> None:
    slow = dataclasses.replace(CLUSTER, node_bytes_per_second=1e5)
    played = play_network(profile(), LAYERS, FOUR, slow, HARDWARE)
    root, layer = 15.0, 30.0
    # From the backward's first gather on, the lane is never idle.
    forward_end = root + max(layer, 1.0) + layer + 10.0 + 1.0
    assert played.step_seconds == pytest.approx(forward_end + 4 * layer + root)


def test_compute_is_slower_beside_the_network() -> None:
    busy = dataclasses.replace(CLUSTER, overlap_share=0.5)
    plain = play_network(profile(), LAYERS, FOUR, CLUSTER, HARDWARE)
    played = play_network(profile(), LAYERS, FOUR, busy, HARDWARE)
    # Beside: 1 of embed, 3 of the first layer; in backward 2 of head, 3 of the last layer, 3 of the other, 2 of embed.
    assert played.slowed_seconds == pytest.approx(0.5 * (1 + 3 + 2 + 3 + 3 + 2), rel=0.2)
    assert plain.step_seconds < played.step_seconds <= plain.step_seconds + played.slowed_seconds


def test_copies_into_and_out_of_buffers() -> None:
    copying = dataclasses.replace(FOUR, has_copies=True)
    played = play_network(profile(), LAYERS, copying, CLUSTER, HARDWARE)
    gathered = 2e6 + 2 * 8e6  # the layers twice
    assert played.copy_seconds == pytest.approx((2 * gathered + 2 * 10e6) / 1e9)


def test_gradients_are_reduced_in_their_own_width() -> None:
    wide = play_network(profile(), LAYERS, dataclasses.replace(FOUR, reduced_width=4), CLUSTER, HARDWARE)
    narrow = play_network(profile(), LAYERS, FOUR, CLUSTER, HARDWARE)
    assert wide.network_seconds - narrow.network_seconds == pytest.approx(10e6 * 0.75 / 1e6)


def test_replicas_sum_their_shards_over_the_network() -> None:
    """4 ranks of a node hold a replica, 2 nodes: each shard is summed between two devices, one of each node."""
    played = play_network(profile(), LAYERS, dataclasses.replace(FOUR, replicas=2), CLUSTER, HARDWARE)
    alone = play_network(profile(), LAYERS, FOUR, CLUSTER, HARDWARE)
    across = 2 * (10e6 / 4) * 0.5 / 1e5
    assert played.network_seconds - alone.network_seconds == pytest.approx(across)


def test_bytes_of_one_rank() -> None:
    found = sharded_profile(profile(), LAYERS, FOUR)
    # float32 shards of what is computed with in 16 bits.
    assert found.state == StateBytes(parameters=5_000_000, gradients=5_000_000, optimizer=10_000_000)
    root, layer = 2_000_000, 4_000_000
    assert found.op_bytes[0] == 100 + root
    assert found.op_bytes[1] == 200 + root + 2 * layer  # this layer and the next
    # In backward: the layer's gradients, those that are being reduced, and shards of what is done (2 of 10 M).
    assert found.op_bytes[5] == 500 + 1_000_000 + root + 2 * layer + layer + layer
    assert found.op_gradient_bytes == (0, 0, 0, 0, 0, 1_000_000, 3_000_000, 5_000_000)
    assert found.op_seconds == profile().op_seconds
