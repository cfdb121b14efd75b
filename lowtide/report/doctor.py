"""Is this machine ready: what a run will find here, what is in its way, and how to mend it.

What: `examine` looks at torch, devices, main memory, disk, kernel limits and allocators, and measures the link to the
next tier, alone and beside compute. Each `Finding` says what was found and, where it could be better, what to do.
Why: most of what makes a swap slow or kills a run is known before its first step: a container's memory limit, a /tmp
that is memory itself, a disk far away, an allocator that keeps freed memory.
Cost: about two seconds with the measurement, which is not written to the cache. Not covered: the model and its run file
(`lowtide plan` and `lowtide explain` have those); other processes that come later.
"""

from __future__ import annotations

import contextlib
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


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    what: str
    found: str
    advice: str = ""
    """What to do; empty where there is nothing to do."""
    is_bad: bool = False

    @property
    def state(self) -> State:
        return "bad" if self.is_bad else "note" if self.advice else "ok"


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
    yield _allocator(device, environment)
    if device.type != "cpu":
        yield _numa(cpus_near(device, root), num_nodes(root))
    directory = disk_path or default_directory()
    disk = _disk(directory, root)
    yield disk
    if measures and (device.type != "cpu" or disk.state != "bad"):
        say("measuring the link")
        yield _link(device, directory)


def _torch_version() -> Finding:
    is_tested = any(torch.__version__.startswith(f"{version}.") for version in TESTED)
    advice = f"lowtide was tested with torch {TESTED[0]} to {TESTED[-1]}; if something is odd, try one of these"
    found = f"torch {torch.__version__}, Python {platform.python_version()}"
    return Finding("versions", found, "" if is_tested else advice)


def _device() -> torch.device:
    device = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if device is None else device


def _device_memory(device: torch.device) -> Finding:
    if device.type == "cpu":
        found = f"no accelerator; {torch.get_num_threads()} threads of {os.cpu_count()} CPUs"
        return Finding("device", found, "models train on the CPU, and swap to disk")
    free_bytes, total_bytes = torch.accelerator.get_memory_info(device)
    name = getattr(torch.get_device_module(device), "get_device_name", lambda _: device.type)(device)
    found = f"{name}: {format_bytes(free_bytes)} free of {format_bytes(total_bytes)}"
    taken = f"other processes have {format_bytes(total_bytes - free_bytes)}: leave that out of the budget"
    return Finding("device", found, "" if free_bytes > 0.95 * total_bytes else taken)


def _main_memory(root: Path) -> Finding:
    limit = host_limit(root=root)
    if limit.limit_bytes is None:
        advice = "write memory.host_budget, or a swap may fill it and the kernel kill the process"
        return Finding("main memory", "nothing says how much there is", advice)
    found = f"{format_bytes(limit.limit_bytes)} can be taken (the {limit.source} allows no more)"
    advice = "little is left for swapped activations; raise the limit, or swap to disk"
    return Finding("main memory", found, advice if limit.limit_bytes < 2 * GIB else "")


def _kernel(device: torch.device, root: Path) -> Iterator[Finding]:
    with contextlib.suppress(OSError, ValueError):  # a kernel without this limit
        mappings = int((root / "proc/sys/vm/max_map_count").read_text())
        few = mappings < _FEW_MAPPINGS
        advice = f"as root: sysctl vm.max_map_count={_FEW_MAPPINGS}; each swapped block may be a mapping"
        yield Finding("vm.max_map_count", f"{mappings:,}", advice if few else "", is_bad=few)
    if device.type == "cpu":
        return
    with contextlib.suppress(ImportError, OSError):
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        if soft == resource.RLIM_INFINITY:
            yield Finding("locked memory", "no limit")
        else:
            advice = "pinned host memory may count against it: ulimit -l unlimited"
            yield Finding("locked memory", f"{format_bytes(soft)} (ulimit -l)", advice)


def _allocator(device: torch.device, environment: Mapping[str, str]) -> Finding:
    if device.type != "cpu":
        setting = environment.get("PYTORCH_ALLOC_CONF", environment.get("PYTORCH_CUDA_ALLOC_CONF", ""))
        advice = "near the budget blocks of odd sizes may not fit: PYTORCH_ALLOC_CONF=expandable_segments:True"
        expands = "expandable_segments:True" in setting
        return Finding("device allocator", setting or "torch's defaults", "" if expands else advice)
    preloaded = environment.get("LD_PRELOAD", "")
    if any(name in preloaded for name in ("jemalloc", "tcmalloc", "mimalloc")):
        return Finding("malloc", preloaded)
    if environment.get(MALLOC_VARIABLE) == "0":
        advice = f"what is swapped stays resident; unset {MALLOC_VARIABLE} to have freed memory returned"
        return Finding("malloc", f"{MALLOC_VARIABLE}=0", advice)
    if environment.get("THP_MEM_ALLOC_ENABLE") == "1":
        return Finding("malloc", "the C library's, on huge pages")
    advice = "swapped steps are faster on huge pages: THP_MEM_ALLOC_ENABLE=1 in the shell"
    return Finding("malloc", "the C library's", advice)


def _numa(near: frozenset[int] | None, nodes: int) -> Finding:
    """`near`: the CPUs near the device, where it is known where it is."""
    if near is None and nodes <= 1:
        return Finding("NUMA", "one node")
    if near is None:
        found = f"{nodes} nodes, and neither the device nor npu-smi says which is near: copy threads are not bound"
        advice = "bind each rank to the CPUs near its device (numactl; npu-smi info -t topo lists them)"
        return Finding("NUMA", found, advice)
    mine = os.sched_getaffinity(0)
    if mine <= near:
        return Finding("NUMA", f"this process stays on the {len(near)} CPUs near the device")
    advice = "pinned memory is put on their node; bind each rank there (numactl, or torchrun --numa-binding)"
    return Finding("NUMA", f"{len(near)} of this process's {len(mine)} CPUs are near the device", advice)


def _disk(directory: str, root: Path) -> Finding:
    path = Path(directory)
    if not path.is_dir() or not os.access(path, os.W_OK):
        why = "no such directory" if not path.is_dir() else "it cannot be written"
        return Finding("disk", f"{directory}: {why}", "name another one: --disk PATH", is_bad=True)
    kind = file_system_type(path, str(root / "proc/self/mountinfo"))
    free_bytes = shutil.disk_usage(path).free
    found = f"{directory}: {format_bytes(free_bytes)} free" + (f", {kind}" if kind else "")
    if kind in ("tmpfs", "ramfs"):
        advice = "that is main memory: swapping there frees nothing; set memory.disk_path to a directory on a disk"
        return Finding("disk", found, advice, is_bad=True)
    is_far = kind in ("nfs", "nfs4", "cifs", "fuse", "overlay")
    advice = "a layered or remote file system: look at the measured link, and set memory.disk_path if it is slow"
    return Finding("disk", found, advice if is_far else "")


def _link(device: torch.device, directory: str) -> Finding:
    """Between the device and the tier below it: main memory for an accelerator, the disk for a CPU."""
    model = torch.nn.Linear(1, 1, device=device)
    plan = Plan(layers=(), min_bytes=0, disk_path=directory if device.type == "cpu" else None)
    try:
        engine = choose_engine(None, model, plan)
    except ConfigError as error:
        return Finding("link", "cannot be measured", str(error), is_bad=True)
    try:
        both = measure_link(engine, device)
        idle = engine.probe_bandwidth(_PROBE_BYTES)
    finally:
        engine.close()
    where = "disk" if device.type == "cpu" else "main memory"
    rates = [f"{format_bytes(round(rate))}/s" for rate in (idle.out_bytes_per_second, idle.in_bytes_per_second)]
    loaded = [f"{format_bytes(round(rate))}/s" for rate in (both.out_bytes_per_second, both.in_bytes_per_second)]
    return Finding(
        "link",
        f"to {where} {rates[0]}, back {rates[1]}; beside compute {loaded[0]} and {loaded[1]}, "
        f"which slows compute by {100 * both.compute_share:.0f} %",
    )
