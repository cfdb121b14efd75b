"""Is this machine ready: what a run will find here, what is in its way, and how to mend it.

What: `examine` looks at torch, devices, main memory, disk, kernel limits and allocators, and measures the link to the
next tier, alone and beside compute. Each `Finding` says what was found and, where it could be better, what to do.
Why: most of what makes a swap slow or kills a run is known before its first step: a container's memory limit, a /tmp
that is memory itself, a disk far away, an allocator that keeps freed memory.
Cost: about two seconds with the measurement, which is not written to the cache. Not covered: the model and its run file
(`lowtide plan` and `lowtide explain` have those); other processes that come later.
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from lowtide.core.plan import Plan
from lowtide.engines.bandwidth import measure_link
from lowtide.engines.choose import choose_engine
from lowtide.engines.tiers.disk import default_directory, file_system_type
from lowtide.engines.tiers.host_buffers import MALLOC_VARIABLE
from lowtide.engines.tiers.host_limit import cpus_near, host_limit, num_nodes
from lowtide.errors import ConfigError
from lowtide.tensors.private import TESTED
from lowtide.units import GIB, format_bytes

State = Literal["ok", "note", "bad"]
"""note: it works, and something else would be better. bad: a run that needs it fails or is slow."""

_PROBE_BYTES = 64 << 20
_FEW_MAPPINGS = 65530
"""The kernel's default of `vm.max_map_count`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at."""

    what: str
    state: State
    found: str
    advice: str = ""
    """What to do; empty where there is nothing to do."""


def examine(
    disk_path: str | None = None,
    *,
    measures: bool = True,
    say: Callable[[str], None] = lambda line: None,
    environment: Mapping[str, str] = os.environ,
    root: Path = Path("/"),
) -> Iterator[Finding]:
    """Findings in the order of a report. `disk_path`: the directory to swap to, as in `memory.disk_path`. `root` stands
    in for / (tests give a made-up tree)."""
    yield _torch_version()
    device = _device()
    yield _device_memory(device)
    yield _main_memory(root)
    yield from _kernel(device, root)
    yield from _allocators(device, environment)
    if device.type != "cpu":
        yield _numa(cpus_near(device, root), num_nodes(root))
    directory = disk_path or default_directory()
    disk = _disk(directory, root)
    yield disk
    if measures and (device.type != "cpu" or disk.state != "bad"):
        say("measuring the link")
        yield _link(device, directory)


def _torch_version() -> Finding:
    found = f"torch {torch.__version__}, Python {platform.python_version()}"
    if any(torch.__version__.startswith(f"{version}.") for version in TESTED):
        return Finding(what="versions", state="ok", found=found)
    advice = f"lowtide was tested with torch {TESTED[0]} to {TESTED[-1]}; if something is odd, try one of these"
    return Finding(what="versions", state="note", found=found, advice=advice)


def _device() -> torch.device:
    device = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if device is None else device


def _device_memory(device: torch.device) -> Finding:
    if device.type == "cpu":
        found = f"no accelerator; {torch.get_num_threads()} threads of {os.cpu_count()} CPUs"
        return Finding(what="device", state="note", found=found, advice="models train on the CPU, and swap to disk")
    free_bytes, total_bytes = torch.accelerator.get_memory_info(device)
    name = getattr(torch.get_device_module(device), "get_device_name", lambda _: device.type)(device)
    found = f"{name}: {format_bytes(free_bytes)} free of {format_bytes(total_bytes)}"
    taken = f"other processes have {format_bytes(total_bytes - free_bytes)}: leave that out of the budget"
    is_free = free_bytes > 0.95 * total_bytes
    return Finding(what="device", state="ok" if is_free else "note", found=found, advice="" if is_free else taken)


def _main_memory(root: Path) -> Finding:
    limit = host_limit(root=root)
    if limit.limit_bytes is None:
        return Finding(
            what="main memory",
            state="note",
            found="nothing says how much there is",
            advice="write memory.host_budget, or a swap may fill it and the kernel kill the process",
        )
    found = f"{format_bytes(limit.limit_bytes)} can be taken (the {limit.source} allows no more)"
    if limit.limit_bytes < 2 * GIB:
        advice = "little is left for swapped activations; raise the limit, or swap to disk"
        return Finding(what="main memory", state="note", found=found, advice=advice)
    return Finding(what="main memory", state="ok", found=found)


def _kernel(device: torch.device, root: Path) -> Iterator[Finding]:
    try:
        mappings = int((root / "proc/sys/vm/max_map_count").read_text())
    except (OSError, ValueError):
        mappings = None
    if mappings is not None:
        few = mappings < _FEW_MAPPINGS
        yield Finding(
            what="vm.max_map_count",
            state="bad" if few else "ok",
            found=f"{mappings:,}",
            advice=f"as root: sysctl vm.max_map_count={_FEW_MAPPINGS}; each swapped block may be a mapping"
            if few
            else "",
        )
    if device.type == "cpu":
        return
    try:
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        unlimited = soft == resource.RLIM_INFINITY
    except (ImportError, OSError):
        return
    yield Finding(
        what="locked memory",
        state="ok" if unlimited else "note",
        found="no limit" if unlimited else f"{format_bytes(soft)} (ulimit -l)",
        advice="" if unlimited else "pinned host memory may count against it: ulimit -l unlimited",
    )


def _allocators(device: torch.device, environment: Mapping[str, str]) -> Iterator[Finding]:
    if device.type != "cpu":
        setting = environment.get("PYTORCH_ALLOC_CONF", environment.get("PYTORCH_CUDA_ALLOC_CONF", ""))
        expands = "expandable_segments:True" in setting
        yield Finding(
            what="device allocator",
            state="ok" if expands else "note",
            found=setting or "torch's defaults",
            advice=""
            if expands
            else "near the budget blocks of odd sizes may not fit: PYTORCH_ALLOC_CONF=expandable_segments:True",
        )
        return
    preloaded = environment.get("LD_PRELOAD", "")
    if any(name in preloaded for name in ("jemalloc", "tcmalloc", "mimalloc")):
        yield Finding(what="malloc", state="ok", found=preloaded)
    elif environment.get(MALLOC_VARIABLE) == "0":
        advice = f"what is swapped stays resident; unset {MALLOC_VARIABLE} to have freed memory returned"
        yield Finding(what="malloc", state="note", found=f"{MALLOC_VARIABLE}=0", advice=advice)
    else:
        huge = environment.get("THP_MEM_ALLOC_ENABLE") == "1"
        advice = "" if huge else "swapped steps are faster on huge pages: THP_MEM_ALLOC_ENABLE=1 in the shell"
        found = "the C library's, on huge pages" if huge else "the C library's"
        yield Finding(what="malloc", state="ok" if huge else "note", found=found, advice=advice)


def _numa(near: frozenset[int] | None, nodes: int) -> Finding:
    """`near`: the CPUs near the device, where it is known where it is."""
    if near is None and nodes <= 1:
        return Finding(what="NUMA", state="ok", found="one node")
    if near is None:
        return Finding(
            what="NUMA",
            state="note",
            found=f"{nodes} nodes, and neither the device nor npu-smi says which is near: copy threads are not bound",
            advice="bind each rank to the CPUs near its device (numactl; npu-smi info -t topo lists them)",
        )
    mine = os.sched_getaffinity(0)
    if mine <= near:
        return Finding(what="NUMA", state="ok", found=f"this process stays on the {len(near)} CPUs near the device")
    return Finding(
        what="NUMA",
        state="note",
        found=f"{len(near)} of this process's {len(mine)} CPUs are near the device",
        advice="pinned memory is put on their node; bind each rank there (numactl, or torchrun --numa-binding)",
    )


def _disk(directory: str, root: Path) -> Finding:
    path = Path(directory)
    if not path.is_dir() or not os.access(path, os.W_OK):
        why = "no such directory" if not path.is_dir() else "it cannot be written"
        return Finding(what="disk", state="bad", found=f"{directory}: {why}", advice="name another one: --disk PATH")
    kind = file_system_type(path, str(root / "proc/self/mountinfo"))
    free_bytes = shutil.disk_usage(path).free
    found = f"{directory}: {format_bytes(free_bytes)} free" + (f", {kind}" if kind else "")
    if kind in ("tmpfs", "ramfs"):
        advice = "that is main memory: swapping there frees nothing; set memory.disk_path to a directory on a disk"
        return Finding(what="disk", state="bad", found=found, advice=advice)
    if kind in ("nfs", "nfs4", "cifs", "fuse", "overlay"):
        advice = "a layered or remote file system: look at the measured link, and set memory.disk_path if it is slow"
        return Finding(what="disk", state="note", found=found, advice=advice)
    return Finding(what="disk", state="ok", found=found)


def _link(device: torch.device, directory: str) -> Finding:
    """Between the device and the tier below it: main memory for an accelerator, the disk for a CPU."""
    model = torch.nn.Linear(1, 1, device=device)
    plan = Plan(layers=(), min_bytes=0, disk_path=directory if device.type == "cpu" else None)
    try:
        engine = choose_engine(None, model, plan)
    except ConfigError as error:
        return Finding(what="link", state="bad", found="cannot be measured", advice=str(error))
    try:
        both = measure_link(engine, device)
        idle = engine.probe_bandwidth(_PROBE_BYTES)
    finally:
        engine.close()
    where = "disk" if device.type == "cpu" else "main memory"
    rates = [f"{format_bytes(round(rate))}/s" for rate in (idle.out_bytes_per_second, idle.in_bytes_per_second)]
    loaded = [f"{format_bytes(round(rate))}/s" for rate in (both.out_bytes_per_second, both.in_bytes_per_second)]
    return Finding(
        what="link",
        state="ok",
        found=f"to {where} {rates[0]}, back {rates[1]}; beside compute {loaded[0]} and {loaded[1]}, "
        f"which slows compute by {100 * both.compute_share:.0f} %",
    )
