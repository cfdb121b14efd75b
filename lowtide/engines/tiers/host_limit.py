"""How many bytes of main memory the runtime may take: the smallest of what the user, the cgroup and the machine allow.

What: `host_limit` reads /proc and /sys/fs/cgroup below a root path and names the cap that binds.
Why: the kernel kills a process that fills the container's memory, without a message. So the cap is known before the
first byte is copied. Memory in use is subtracted; page cache that the kernel can drop does not count as used.
Cost: a few small files, about 0.1 ms.

Not covered: memory that others take afterwards, `ulimit`, cgroup trees mounted elsewhere than /sys/fs/cgroup, swap
space (never counted as room), systems without /proc (the user's number alone, or None).

How many bytes of a tier may be reserved: by one engine, or by several that share what a user allows.

What: `Cap` counts what is taken. Why: one plan may have two engines, one for activations and one for the optimizer's
state, and a budget of the host is meant for both.
Cost: a lock for each slab or file range. Not covered: engines that know nothing of each other.

Which CPUs are near a device, and keeping a copy thread on them.

What: `cpus_near` follows a device's PCI address through /sys to its NUMA node and that node's CPUs. torch_npu tells no
address; `npu-smi` does, where it is installed. `stay_on` binds the calling thread. Only threads of lowtide's own
engines are bound (those that pin slabs and those that move bytes between pinned memory and disk), never the caller's.
Why: memory on the far node costs a hop for every byte copied, and first touch decides where memory lies.
Cost: three small files, once a device; a process for `npu-smi`. Not covered: systems without /sys (nothing happens);
devices whose address is unknown (`lowtide doctor` says so); several devices that share a node compete for its CPUs
as they would anyway.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import torch


def cpus_near(device: torch.device, root: Path = Path("/")) -> frozenset[int] | None:
    """The CPUs of the device's NUMA node that this process may use, or None where that cannot be told."""
    try:
        properties = torch.get_device_module(device).get_device_properties(device)
        return cpus_at(properties, root, npu=device.index or 0)
    except (AttributeError, RuntimeError):
        return None  # placement is a matter of speed only: no reason to stop


def cpus_at(properties: Any, root: Path = Path("/"), *, npu: int = 0) -> frozenset[int] | None:
    """As `cpus_near`, for an object with `pci_domain_id`, `pci_bus_id` and `pci_device_id`, or without them for the NPU
    of this number. `root` stands in for /."""
    try:
        if hasattr(properties, "pci_bus_id"):
            address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        else:
            address = address_by_npu_smi(npu) or "unknown"
        node = int((root / f"sys/bus/pci/devices/{address}/numa_node").read_text())
        if node < 0:  # one node, or firmware that does not say
            return None
        near = parse_cpu_list((root / f"sys/devices/system/node/node{node}/cpulist").read_text())
        return near & os.sched_getaffinity(0) or None
    except (AttributeError, OSError, ValueError, TypeError):
        return None


def address_by_npu_smi(npu: int) -> str | None:
    """The PCI address of one of the NPUs that this process sees; None where it is unknown."""
    command = shutil.which("npu-smi")
    visible = [number for number in os.environ.get("ASCEND_RT_VISIBLE_DEVICES", "").split(",") if number]
    if command is None or (visible and npu >= len(visible)):
        return None
    number = visible[npu] if visible else str(npu)
    try:
        told = subprocess.run(
            [command, "info", "-t", "board", "-i", number], capture_output=True, text=True, timeout=10, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"PCIe Bus Info\s*:\s*([0-9A-Fa-f]{4}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.\d)", told)
    return found[1].lower() if found else None


def num_nodes(root: Path = Path("/")) -> int:
    """NUMA nodes of the machine, as far as it says."""
    return len(list((root / "sys/devices/system/node").glob("node[0-9]*")))


def parse_cpu_list(text: str) -> frozenset[int]:
    """The kernel's list format: '0-3,8,10-11'."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def stay_on(cpus: frozenset[int] | None) -> None:
    """Bind the calling thread to these CPUs; nothing if they are unknown or no longer ours."""
    if cpus:
        with contextlib.suppress(OSError, AttributeError):
            os.sched_setaffinity(0, cpus)  # 0 is the calling thread


class Cap:
    """See the module's text. `most_bytes`: None = as many as there are. Thread-safe."""

    def __init__(self, most_bytes: int | None) -> None:
        assert most_bytes is None or most_bytes >= 0
        self.most_bytes = most_bytes
        self.taken_bytes = 0
        self._lock = threading.Lock()

    @property
    def room_bytes(self) -> int | None:
        """What may be taken beyond what is."""
        return None if self.most_bytes is None else max(0, self.most_bytes - self.taken_bytes)

    def take(self, nbytes: int) -> bool:
        """Whether there was room for `nbytes`, which are taken then."""
        with self._lock:
            if self.most_bytes is not None and self.taken_bytes + nbytes > self.most_bytes:
                return False
            self.taken_bytes += nbytes
            return True

    def give(self, nbytes: int) -> None:
        """Give back what was taken."""
        with self._lock:
            self.taken_bytes -= nbytes
            assert self.taken_bytes >= 0


_V1_UNLIMITED_BYTES = 1 << 60
"""cgroup v1 writes "no limit" as the largest page-aligned number, about 2**63."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLimit:
    """A cap on main memory, and who sets it."""

    limit_bytes: int | None
    """None: nothing is known, there is no cap."""
    source: str
    """'user', 'cgroup /path', 'machine' or 'unknown'."""
    total_bytes: int | None = field(default=None, compare=False)
    """What it is a cap on: taken bytes count too."""


def host_limit(user_bytes: int | None = None, root: Path = Path("/")) -> HostLimit:
    """The smallest cap. `root` stands in for / (tests give a made-up tree)."""
    caps = list(_caps(user_bytes, root))
    if not caps:
        return HostLimit(limit_bytes=None, source="unknown")
    return min(caps, key=lambda cap: cap.limit_bytes or 0)


def host_total(root: Path = Path("/")) -> HostLimit:
    """The smallest of what the cgroup allows and the machine has, whatever is taken of it; its `total_bytes` is None
    where nothing is known."""
    known = [cap for cap in _caps(None, root) if cap.total_bytes is not None]
    return min(known, key=lambda cap: cap.total_bytes or 0, default=HostLimit(limit_bytes=None, source="unknown"))


def _caps(user_bytes: int | None, root: Path) -> Iterator[HostLimit]:
    if user_bytes is not None:
        yield HostLimit(limit_bytes=user_bytes, source="user")
    machine = _fields(root / "proc/meminfo")
    available = machine.get("MemAvailable:")
    if available is not None:
        total = machine.get("MemTotal:")
        total_bytes = None if total is None else total * 1024
        yield HostLimit(limit_bytes=available * 1024, source="machine", total_bytes=total_bytes)
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            names = ("memory.max", "memory.high"), "memory.current", "inactive_file"
            yield from _headroom(root / "sys/fs/cgroup", path, *names)
            yield from _headroom(root / "sys/fs/cgroup/unified", path, *names)
        elif "memory" in controllers.split(","):
            older = ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"
            yield from _headroom(root / "sys/fs/cgroup/memory", path, *older)


def _headroom(mount: Path, path: str, limits: tuple[str, ...], used: str, reclaimable: str) -> Iterator[HostLimit]:
    """Of a group and all above it. The names of files, and of what the kernel can drop, are those of its version."""
    for group in _ancestors(mount, path):
        known = [number for limit in limits if (number := _number(group / limit)) is not None]
        lowest = min(known, default=_V1_UNLIMITED_BYTES)
        if lowest >= _V1_UNLIMITED_BYTES:
            continue
        dropped = _fields(group / "memory.stat").get(reclaimable, 0)
        in_use = max((_number(group / used) or 0) - dropped, 0)
        name = PurePosixPath("/") / group.relative_to(mount).as_posix()
        yield HostLimit(limit_bytes=max(lowest - in_use, 0), source=f"cgroup {name}", total_bytes=lowest)


def _ancestors(mount: Path, path: str) -> Iterator[Path]:
    """The group and all above it. A path that only exists outside the container means the mount itself."""
    group = mount / path.lstrip("/")
    if not group.is_dir() or ".." in group.parts:
        group = mount
    yield group
    while group != mount:
        group = group.parent
        yield group


def _number(file: Path) -> int | None:
    text = _text(file).strip()
    return int(text) if text.isdecimal() else None  # "max", or no such file


def _fields(file: Path) -> dict[str, int]:
    pairs = (line.split() for line in _text(file).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) > 1 and pair[1].isdecimal()}


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
