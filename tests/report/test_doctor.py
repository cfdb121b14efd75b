"""What the doctor finds on made-up machines, and on this one."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from lowtide.cli.main import main
from lowtide.report.doctor import Finding, _numa, examine


def _machine(root: Path, *, free_kib: int = 64 << 20, mappings: int = 262144, disk: str = "ext4") -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/sys/vm").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemAvailable:   {free_kib} kB\n")
    (root / "proc/sys/vm/max_map_count").write_text(f"{mappings}\n")
    number = root.stat().st_dev
    (root / "proc/self/mountinfo").write_text(f"1 0 {number >> 8}:{number & 255} / / rw - {disk} none rw\n")
    return root


def _found(root: Path, path: str | None = None, **environment: str) -> dict[str, Finding]:
    findings = examine(path or str(root), measures=False, environment=environment, root=root)
    return {finding.what: finding for finding in findings}


def test_a_machine_that_is_ready(tmp_path: Path) -> None:
    found = _found(_machine(tmp_path), THP_MEM_ALLOC_ENABLE="1")
    assert list(found) == ["versions", "device", "main memory", "vm.max_map_count", "malloc", "disk"]
    assert {what for what, finding in found.items() if finding.state != "ok"} <= {"versions", "device"}
    assert found["main memory"].found == "64.0 GiB can be taken (the machine allows no more)"


@pytest.mark.parametrize(
    ("machine", "what", "state", "advice"),
    [
        (
            {"free_kib": 1 << 20},
            "main memory",
            "note",
            "little is left for swapped activations; raise the limit, or swap to disk",
        ),
        (
            {"mappings": 1024},
            "vm.max_map_count",
            "bad",
            "as root: sysctl vm.max_map_count=65530; each swapped block may be a mapping",
        ),
        (
            {"disk": "tmpfs"},
            "disk",
            "bad",
            "that is main memory: swapping there frees nothing; set memory.disk_path to a directory on a disk",
        ),
        (
            {"disk": "nfs4"},
            "disk",
            "note",
            "a layered or remote file system: look at the measured link, and set memory.disk_path if it is slow",
        ),
    ],
)
def test_what_is_in_the_way(machine: dict, what: str, state: str, advice: str, tmp_path: Path) -> None:
    found = _found(_machine(tmp_path, **machine))[what]
    assert (found.state, found.advice) == (state, advice)


def test_allocators(tmp_path: Path) -> None:
    root = _machine(tmp_path)
    assert _found(root, LD_PRELOAD="/usr/lib/libjemalloc.so.2")["malloc"].state == "ok"
    assert _found(root, LOWTIDE_MALLOC="0")["malloc"].advice == (
        "what is swapped stays resident; unset LOWTIDE_MALLOC to have freed memory returned"
    )


def test_a_device_that_does_not_say_where_it_is() -> None:
    assert _numa(None, 1) == Finding("NUMA", "one node")
    unknown = _numa(None, 4)
    assert unknown.state == "note" and unknown.found.endswith("copy threads are not bound")
    assert unknown.found.startswith("4 nodes, and neither the device nor npu-smi says which is near")
    assert _numa(frozenset(os.sched_getaffinity(0)), 4).state == "ok"


def test_a_directory_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gone = str(tmp_path / "gone")
    assert _found(_machine(tmp_path / "root"), gone)["disk"].found == f"{gone}: no such directory"
    assert main(["doctor", "--no-measure", "--disk", gone]) == 1
    assert f"bad   disk              {gone}: no such directory" in capsys.readouterr().out.splitlines()


def test_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["doctor", "--json", "--disk", str(tmp_path)])
    findings = {finding["what"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert status == any(finding["state"] == "bad" for finding in findings.values())
    if findings["disk"]["state"] != "bad":
        assert findings["link"]["found"].startswith("to disk ") or findings["link"]["found"].startswith("to main")
