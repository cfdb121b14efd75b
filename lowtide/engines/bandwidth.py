"""How fast the next tier really is: both directions at once, while the device computes.

A link that is measured idle promises too much, and a plan made on it breaks memory, not only time: at a real bandwidth
of 0.82 of the planned one, peak was 1.11 of the budget in simulation. So the link is measured under load, several
times, and the plan uses the 10th percentile. The same measurement says what each copy costs however small it is; on the
host engine also what memory costs that went back to the system. How much computing suffers is measured apart, with
copies of a step's kind: one direction at a time, many storages of 2 MiB that the device's allocator gave out. Probes do
not show it: they copy one aligned buffer again and again, which takes the host engine's memory nowhere (two cores: 0.09
by the probes, 0.6 to 0.8 in steps that swap).

What: `measure_link` probes an engine while a thread computes on the device. The answer is kept in a file per
machine, since hardware does not change between runs; for ten minutes where others computed, too. Where these, or this
process, have all cores, copies take `_LEAST_SHARE` from computing at least, whatever was measured.
Cost: about a second, once per machine and engine. Not covered: other ranks of the machine that copy at the same
time (run it under torchrun, and they do); links that change during a run (the autopilot corrects its plan).
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from lowtide.engines.base import Engine, Lane, Slot
from lowtide.timeline.step import Link

_PROBE_BYTES = 32 << 20
_SMALL_PROBE_BYTES = 256 << 10
_NUM_PROBES = 10
_IDLE_SECONDS = 0.05
_MATRIX = 512
_VECTOR = 1 << 20
_STORAGE_BYTES = 2 << 20
_NUM_STORAGES = 16
_NUM_ROUNDS = 3
_LOOK_SECONDS = 5e-4
_MOST_SECONDS = 60
_QUIET_SHARE = 0.9
"""Of the processor time that computing asks for: less means that others computed, too."""
_LEAST_SHARE = 0.6
"""What copies of the host engine take from computing that has all cores, at least, by steps that swap: 0.6 to 1.0. The
measurement said 0.18 there, on a quiet machine, and 0.0 on a busy one."""
_BUSY_SECONDS = 600
_BUSY_AT = "busy_at"
"""In the file: when a machine was too busy to say."""
_EDITION = "3rd"
"""Of this measurement. A link that was measured in another way is measured anew."""
# An engine without time of its own (the virtual one): copies take next to none, but numbers stay finite.
_NO_TIME = 1e15


def cache_path() -> Path:
    """`$XDG_CACHE_HOME/lowtide/links.json`, or the same under `~/.cache`."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "lowtide" / "links.json"


def measure_link(engine: Engine, device: torch.device, *, place: str = "", cache: Path | None = None) -> Link:
    """The link of `engine` under load, from `cache` if this machine was measured before.

    `place` tells apart links of one engine (the directory of the disk tier). `cache=None` measures anew and writes
    nothing.
    """
    key = f"{platform.node()} {engine.name} {_device_name(device)} {torch.get_num_threads()} {_EDITION} {place}".strip()
    known = _read(cache)
    entry = dict(known.get(key, {}))
    is_old = time.time() - entry.pop(_BUSY_AT, math.inf) > _BUSY_SECONDS
    if entry.keys() == {each.name for each in dataclasses.fields(Link)} and not is_old:  # else another version wrote it
        return Link(**entry)
    link, is_quiet = _measure(engine, device)
    if cache is not None:
        busy = {} if is_quiet else {_BUSY_AT: time.time()}
        _write(cache, {**known, key: dataclasses.asdict(link) | busy})
    return link


def _device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return platform.processor() or platform.machine()
    get_name = getattr(torch.get_device_module(device.type), "get_device_name", None)
    return device.type if get_name is None else str(get_name(device))


def _measure(engine: Engine, device: torch.device) -> tuple[Link, bool]:
    """And whether no other process computed meanwhile."""
    first = engine.probe_bandwidth(_PROBE_BYTES)
    if first.out_bytes_per_second == float("inf"):
        return Link(out_bytes_per_second=_NO_TIME, in_bytes_per_second=_NO_TIME), True
    with _Load(device) as load:
        is_quiet = device.type != "cpu" or load.is_alone()
        probes = [engine.probe_bandwidth(_PROBE_BYTES) for _ in range(_NUM_PROBES)]
        small = [engine.probe_bandwidth(_SMALL_PROBE_BYTES).out_bytes_per_second for _ in range(_NUM_PROBES)]
        lost_seconds = statistics.median(_lost_seconds(engine, device, load) for _ in range(_NUM_ROUNDS))
        is_quiet = is_quiet and (device.type != "cpu" or load.is_alone())
    out_rate = _tenth_percentile([probe.out_bytes_per_second for probe in probes])
    in_rate = _tenth_percentile([probe.in_bytes_per_second for probe in probes])
    latency = max(0.0, _SMALL_PROBE_BYTES / statistics.median(small) - _SMALL_PROBE_BYTES / out_rate)
    copy_seconds = _NUM_STORAGES * (_STORAGE_BYTES / out_rate + _STORAGE_BYTES / in_rate + 2 * latency)
    is_crowded = device.type == "cpu" and not (is_quiet and torch.get_num_threads() < (os.cpu_count() or 1))
    share = max(lost_seconds / copy_seconds, _LEAST_SHARE if is_crowded else 0.0)
    link = Link(
        out_bytes_per_second=out_rate,
        in_bytes_per_second=in_rate,
        latency_seconds=latency,
        compute_share=min(share, 1.0),
        page_fault_seconds_per_byte=probes[-1].page_fault_seconds_per_byte,
    )
    return link, is_quiet


def _lost_seconds(engine: Engine, device: torch.device, load: _Load) -> float:
    """By how much the load falls behind while as many storages as a layer saves are copied away, and fetched again."""
    load.rate_since_last()
    time.sleep(_IDLE_SECONDS)
    idle_rate = load.rate_since_last()
    if not idle_rate:
        return 0.0  # a machine too busy to say
    sources = [torch.ones(_STORAGE_BYTES, dtype=torch.uint8, device=device) for _ in range(_NUM_STORAGES)]
    slots: list[Slot] = []
    targets: list[torch.UntypedStorage] = []

    def send() -> None:
        engine.wait(Lane.OUT, engine.record(Lane.COMPUTE))
        for source, slot in zip(sources, slots, strict=True):
            engine.copy_out(source.untyped_storage(), slot)

    def fetch() -> None:
        targets.extend(engine.new_buffer(_STORAGE_BYTES, device) for _ in slots)
        engine.wait(Lane.IN, engine.record(Lane.COMPUTE))
        for target, slot in zip(targets, slots, strict=True):
            engine.copy_in(slot, target)

    try:
        for _ in sources:
            slots.append(engine.allocate(_STORAGE_BYTES, engine.tiers[0]))
        return _lost(engine, Lane.OUT, send, load, idle_rate) + _lost(engine, Lane.IN, fetch, load, idle_rate)
    finally:
        # Where copies never ended, their slots stay reserved.
        if all(engine.query(engine.record(lane)) for lane in (Lane.OUT, Lane.IN)):
            for slot in slots:
                engine.free(slot)


def _lost(engine: Engine, lane: Lane, start: Callable[[], None], load: _Load, idle_rate: float) -> float:
    """In a step the thread that computes starts the copies, too."""
    load.rate_since_last()
    started = time.perf_counter()
    start()
    start_seconds = time.perf_counter() - started
    _finish(engine, lane)
    behind_seconds = (time.perf_counter() - started) * max(0.0, 1.0 - load.rate_since_last() / idle_rate)
    return start_seconds + behind_seconds


def _finish(engine: Engine, lane: Lane) -> None:
    """Until all copies of `lane` are complete. Raises RuntimeError where the last one failed, or none ends."""
    event = engine.record(lane)
    if engine.device_type == "cpu":
        engine.wait(Lane.COMPUTE, event)
    end = time.perf_counter() + _MOST_SECONDS
    # On an accelerator to wait on the compute lane would hold up the load, which is on the same stream.
    while not engine.query(event):
        if time.perf_counter() > end:
            raise RuntimeError(f"bandwidth probe failed: copies were not complete after {_MOST_SECONDS} s")
        time.sleep(_LOOK_SECONDS)
    error = engine.failure(event)
    if error is not None:
        raise RuntimeError(f"bandwidth probe failed: {error}")


def _tenth_percentile(values: list[float]) -> float:
    return sorted(values)[len(values) // 10]


class _Load:
    """A thread that multiplies matrices and adds vectors on the device, and counts."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._count = 0
        self._seen = (0, 0.0)
        self._clocks = (0.0, 0.0)
        """Processor and other seconds of its thread when a round ended."""
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        a = torch.ones(_MATRIX, _MATRIX, device=self._device)
        out = torch.empty_like(a)
        vector = torch.ones(_VECTOR, device=self._device)
        vector_sum = torch.empty_like(vector)
        with torch.no_grad():
            while not self._is_over.is_set():
                torch.mm(a, a, out=out)
                torch.add(vector, vector, out=vector_sum)
                if self._device.type != "cpu":
                    torch.accelerator.synchronize(self._device)
                self._count += 1
                self._clocks = (time.thread_time(), time.perf_counter())

    def rate_since_last(self) -> float:
        """Rounds per second since the last call."""
        count, seen_at = self._seen
        now = (self._count, time.perf_counter())
        self._seen = now
        return (now[0] - count) / (now[1] - seen_at)

    def is_alone(self) -> bool:
        """Whether its thread gets the processor time that it asks for."""
        busy, wall = self._clocks
        time.sleep(_IDLE_SECONDS)
        busy_now, wall_now = self._clocks
        return busy_now - busy >= _QUIET_SHARE * (wall_now - wall) > 0

    def __enter__(self) -> _Load:
        self._thread.start()
        while self._count < 2:  # the first product starts threads and libraries
            time.sleep(0.001)
        self.rate_since_last()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()


def _read(cache: Path | None) -> dict[str, dict[str, float]]:
    if cache is None or not cache.exists():
        return {}
    try:
        return dict(json.loads(cache.read_text()))
    except (OSError, ValueError):
        return {}  # a broken cache costs a measurement, nothing else


def _write(cache: Path, links: dict[str, dict[str, float]]) -> None:
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        temporary = cache.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(links, indent=2) + "\n")
        temporary.replace(cache)
    except OSError:
        return  # a home that cannot be written: measure again next time
