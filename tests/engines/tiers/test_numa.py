"""The CPUs near a device, from a made-up /sys, and threads that stay on them."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lowtide.engines.tiers.host_limit import cpus_at, cpus_near, num_nodes, parse_cpu_list, stay_on

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="CPUs are chosen on Linux only")
DEVICE = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xDC, pci_device_id=1)


def _system(root: Path, *, node: str, cpus: str | None) -> Path:
    place = root / "sys/bus/pci/devices/0000:dc:01.0"
    place.mkdir(parents=True)
    (place / "numa_node").write_text(node)
    if cpus is not None:
        nodes = root / f"sys/devices/system/node/node{int(node)}"
        nodes.mkdir(parents=True)
        (nodes / "cpulist").write_text(cpus)
    return root


def test_the_cpus_of_the_node_that_are_ours(tmp_path: Path) -> None:
    mine = sorted(os.sched_getaffinity(0))
    root = _system(tmp_path, node="1\n", cpus=f"{mine[0]},4000-4003\n")
    assert cpus_at(DEVICE, root) == {mine[0]}


@pytest.mark.parametrize(("node", "cpus"), [("-1\n", None), ("1\n", None), ("1\n", "4000-4003\n"), ("1\n", "x\n")])
def test_where_the_system_does_not_tell_nothing_is_chosen(node: str, cpus: str | None, tmp_path: Path) -> None:
    assert cpus_at(DEVICE, _system(tmp_path, node=node, cpus=cpus)) is None


def test_devices_without_an_address_are_left_alone(tmp_path: Path) -> None:
    assert cpus_at(SimpleNamespace(), tmp_path) is None
    assert cpus_at(DEVICE, tmp_path) is None
    assert cpus_near(torch.device("cpu"), tmp_path) is None


ASCEND = SimpleNamespace(name="Ascend910B3", total_memory=64 << 30, cube_core_num=20, vector_core_num=40)
"""What torch_npu tells of a device: no address."""
SMI = """\
#!/bin/sh
[ "$*" = "info -t board -i 5" ] || exit 1
echo "        NPU ID                         : 5"
echo "        PCIe Bus Info                  : 0000:DC:01.0"
"""


def test_an_npu_is_found_by_what_npu_smi_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = sorted(os.sched_getaffinity(0))
    root = _system(tmp_path / "root", node="1\n", cpus=f"{mine[0]}\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cpus_at(ASCEND, root) is None  # nobody to ask
    command = tmp_path / "npu-smi"
    command.write_text(SMI)
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "3,5")
    assert cpus_at(ASCEND, root, npu=1) == {mine[0]}
    assert cpus_at(ASCEND, root, npu=0) is None  # it fails
    assert cpus_at(ASCEND, root, npu=2) is None  # this process does not see so many
    assert num_nodes(root) == 1 and num_nodes(tmp_path) == 0


def test_lists_as_the_kernel_writes_them() -> None:
    assert parse_cpu_list("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert parse_cpu_list("\n") == frozenset()


def test_only_the_thread_that_asks_is_bound() -> None:
    before = os.sched_getaffinity(0)
    seen: list[set[int]] = []

    def work() -> None:
        stay_on(frozenset({min(before)}))
        seen.append(os.sched_getaffinity(0))
        stay_on(None)
        stay_on(frozenset({4000}))  # taken from us: only speed is lost
        seen.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [{min(before)}] * 2
    assert os.sched_getaffinity(0) == before
