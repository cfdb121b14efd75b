"""The smallest cap on main memory, read from made-up trees."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowtide.engines.tiers.host_limit import HostLimit, host_limit

GIB = 1 << 30


def _tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": "MemTotal: 99999999 kB\nMemAvailable: 67108864 kB\n", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_the_machine_binds_without_other_caps(tmp_path):
    assert host_limit(root=_tree(tmp_path, {})) == HostLimit(limit_bytes=64 * GIB, source="machine")


def test_the_user_binds(tmp_path):
    assert host_limit(GIB, root=_tree(tmp_path, {})) == HostLimit(limit_bytes=GIB, source="user")


def test_the_user_cannot_raise_the_cap(tmp_path):
    assert host_limit(100 * GIB, root=_tree(tmp_path, {})).source == "machine"


def test_nothing_is_known(tmp_path):
    assert host_limit(root=tmp_path) == HostLimit(limit_bytes=None, source="unknown")


def test_version_2_takes_the_tightest_ancestor_less_what_is_in_use(tmp_path):
    group = "sys/fs/cgroup/jobs/one"
    files = {
        "proc/self/cgroup": "0::/jobs/one\n",
        f"{group}/memory.max": f"{16 * GIB}\n",
        f"{group}/memory.current": f"{2 * GIB}\n",
        "sys/fs/cgroup/jobs/memory.max": f"{12 * GIB}\n",
        "sys/fs/cgroup/jobs/memory.current": f"{5 * GIB}\n",
        "sys/fs/cgroup/jobs/memory.stat": f"anon 7\ninactive_file {GIB}\n",
    }
    assert host_limit(root=_tree(tmp_path, files)) == HostLimit(limit_bytes=8 * GIB, source="cgroup /jobs")


def test_version_2_high_binds_before_max(tmp_path):
    files = {
        "proc/self/cgroup": "0::/a\n",
        "sys/fs/cgroup/a/memory.max": "max\n",
        "sys/fs/cgroup/a/memory.high": f"{3 * GIB}\n",
        "sys/fs/cgroup/a/memory.current": f"{GIB}\n",
    }
    assert host_limit(root=_tree(tmp_path, files)) == HostLimit(limit_bytes=2 * GIB, source="cgroup /a")


def test_version_1_nested(tmp_path):
    base = "sys/fs/cgroup/memory"
    files = {
        "proc/self/cgroup": "4:memory:/docker/x\n1:cpu:/\n0::/\n",
        f"{base}/memory.limit_in_bytes": "9223372036854771712\n",
        f"{base}/docker/memory.limit_in_bytes": "9223372036854771712\n",
        f"{base}/docker/x/memory.limit_in_bytes": f"{6 * GIB}\n",
        f"{base}/docker/x/memory.usage_in_bytes": f"{2 * GIB}\n",
        f"{base}/docker/x/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB}\n",
    }
    assert host_limit(root=_tree(tmp_path, files)) == HostLimit(limit_bytes=5 * GIB, source="cgroup /docker/x")


@pytest.mark.parametrize("path", ["/docker/elsewhere", "/../.."])
def test_a_path_from_outside_the_container_means_the_mount(tmp_path, path):
    files = {
        "proc/self/cgroup": f"4:cpu,memory:{path}\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{4 * GIB}\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
    }
    assert host_limit(root=_tree(tmp_path, files)) == HostLimit(limit_bytes=3 * GIB, source="cgroup /")


def test_a_full_group_leaves_nothing(tmp_path):
    files = {
        "proc/self/cgroup": "0::/a\n",
        "sys/fs/cgroup/a/memory.max": f"{GIB}\n",
        "sys/fs/cgroup/a/memory.current": f"{2 * GIB}\n",
    }
    assert host_limit(root=_tree(tmp_path, files)).limit_bytes == 0


def test_this_machine_answers():
    limit = host_limit(1 << 20)
    assert limit.limit_bytes is not None
    assert limit.limit_bytes <= 1 << 20
