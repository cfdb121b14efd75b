"""Which CPUs are near a device, and keeping a copy thread on them.

What: `cpus_near` follows a device's PCI address through /sys to its NUMA node and that node's CPUs; `stay_on` binds the
calling thread. Only threads of lowtide's own engines are bound (those that pin slabs and those that move bytes between
pinned memory and disk), never the caller's.
Why: memory on the far node costs a hop for every byte copied, and first touch decides where memory lies.
Cost: three small files, once a device. Not covered: systems without /sys (nothing happens); devices that tell no PCI
address; several devices that share a node compete for its CPUs as they would anyway.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import torch


def cpus_near(device: torch.device, root: Path = Path("/")) -> frozenset[int] | None:
    """The CPUs of the device's NUMA node that this process may use, or None where that cannot be told."""
    try:
        properties = torch.get_device_module(device).get_device_properties(device)
        return cpus_at(properties, root)
    except (AttributeError, RuntimeError):
        return None  # placement is a matter of speed only: no reason to stop


def cpus_at(properties: Any, root: Path = Path("/")) -> frozenset[int] | None:
    """As `cpus_near`, for an object with `pci_domain_id`, `pci_bus_id` and `pci_device_id`. `root` stands in for /."""
    try:
        address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        node = int((root / f"sys/bus/pci/devices/{address}/numa_node").read_text())
        if node < 0:  # one node, or firmware that does not say
            return None
        near = parse_cpu_list((root / f"sys/devices/system/node/node{node}/cpulist").read_text())
        return near & os.sched_getaffinity(0) or None
    except (AttributeError, OSError, ValueError, TypeError):
        return None


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
