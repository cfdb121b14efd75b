"""The cluster files: all load, every number has a source, and mistakes are told in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowtide.errors import ConfigError
from lowtide.timeline.cluster import load_cluster
from lowtide.timeline.hardware import known_names

GOOD = """\
node_devices = { value = 4, source = "vendor: sheet" }
node_bytes_per_second = { value = 1e11, source = "measured: a gather" }
network_bytes_per_second = { value = 1e10, source = "measured: a gather" }
message_seconds = { value = 0, source = "assumed: none" }
overlap_share = { value = 0.1, source = "published: somewhere" }
compute_share = { value = 0.5, source = "assumed: half" }
reserved_share = { value = 0.1, source = "assumed: a tenth" }
"""


def test_all_load_and_are_of_the_right_size() -> None:
    assert known_names("clusters") == ("a100", "ascend910b", "h100", "h200", "h800", "ideal")
    for name in known_names("clusters"):
        cluster = load_cluster(name)
        assert cluster.name == name
        assert set(cluster.sources) == {key.partition(" ")[0] for key in GOOD.splitlines()}
        assert cluster.node_devices == 8
        assert 0.5 <= cluster.compute_share <= 1
        if name != "ideal":
            assert 1e10 <= cluster.network_bytes_per_second < cluster.node_bytes_per_second <= 1e12


def test_groups_within_a_node_are_faster(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(GOOD)
    cluster = load_cluster(path)
    assert (cluster.name, cluster.node_devices) == ("mine", 4)
    assert [cluster.bytes_per_second(count) for count in (2, 4, 5)] == [1e11, 1e11, 1e10]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ('node_devices = { value = 4.5, source = "vendor: sheet" }', "node_devices: expected a whole number, not 4.5"),
        ('compute_share = { value = 2, source = "assumed: x" }', "compute_share: a share is at most 1, not 2"),
        ('overlap_share = { value = 0.1, source = "somewhere" }',
         "overlap_share: a source starts with 'measured: ', 'vendor: ', 'published: ' or 'assumed: ', unlike "
         "'somewhere'"),
        ('node_byte_per_second = { value = 1, source = "vendor: x" }',
         "unknown key 'node_byte_per_second'; did you mean 'node_bytes_per_second'?"),
    ],
)  # fmt: skip
def test_mistakes(line: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    key = line.partition(" ")[0]
    kept = [entry for entry in GOOD.splitlines() if entry.partition(" ")[0] != key]
    path.write_text("\n".join([*kept, line]))
    with pytest.raises(ConfigError) as error:
        load_cluster(path)
    assert str(error.value) == f"{path}: {text}"


def test_an_unknown_name() -> None:
    with pytest.raises(ConfigError) as error:
        load_cluster("h80")
    assert str(error.value) == (
        "cluster: unknown cluster 'h80'; did you mean 'h800'? (known: a100, ascend910b, h100, h200, h800, ideal; a "
        "file of "
        "your "
        "own is given by its path, which ends in .toml)"
    )
