"""The link under load: measured on a real engine, remembered per machine."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lowtide.engines import bandwidth
from lowtide.engines.bandwidth import _Load, cache_path, measure_link
from lowtide.engines.base import Slot
from lowtide.engines.host import HostEngine
from lowtide.timeline.step import Link
from lowtide.units import MIB
from tests.support.virtual_engine import VirtualEngine

CPU = torch.device("cpu")


class Counted:
    """An engine whose probes have a known speed and are counted. Its copies are the host engine's; to start one takes
    `start_seconds` more."""

    name = "counted"

    def __init__(self, start_seconds: float = 0.0) -> None:
        self._host = HostEngine()
        self._start_seconds = start_seconds
        self.rates = iter([9e9, *(float(rate) * 1e9 for rate in (5, 3, 8, 1, 9, 2, 7, 4, 6, 10)), *[1e8] * 10])
        self.num_probes = 0

    def probe_bandwidth(self, nbytes: int) -> Link:
        self.num_probes += 1
        rate = next(self.rates)
        return Link(out_bytes_per_second=rate, in_bytes_per_second=2 * rate)

    def copy_out(self, source: torch.UntypedStorage, slot: Slot) -> None:
        time.sleep(self._start_seconds)
        self._host.copy_out(source, slot)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._host, name)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The text of a cache with one link."""
    cache = tmp_path_factory.mktemp("links") / "links.json"
    measure_link(Counted(), CPU, cache=cache)
    return cache.read_text()


def test_the_host_engine_is_measured(tmp_path: Path) -> None:
    engine = HostEngine(directory=str(tmp_path))
    try:
        link = measure_link(engine, CPU)
    finally:
        engine.close()
    assert 1e6 < link.out_bytes_per_second < 1e12
    assert 1e6 < link.in_bytes_per_second < 1e12
    assert 0 <= link.compute_share <= 1
    assert 0 <= link.latency_seconds < 1
    assert 0 <= link.page_fault_seconds_per_byte < 1e-6
    assert (link.page_fault_seconds_per_byte > 0) == engine.trimmer.works


def test_the_tenth_percentile_counts_and_is_remembered(tmp_path: Path) -> None:
    cache = tmp_path / "below" / "links.json"
    engine = Counted()
    link = measure_link(engine, CPU, cache=cache)
    assert (link.out_bytes_per_second, link.in_bytes_per_second) == (2e9, 4e9)
    # 256 KiB take 2.62 ms at 0.1 GB/s, of which 0.13 ms are transfer
    assert link.latency_seconds == pytest.approx((256 << 10) / 1e8 - (256 << 10) / 2e9)
    num_probes = engine.num_probes
    assert measure_link(engine, CPU, cache=cache) == link
    assert engine.num_probes == num_probes


def test_what_it_takes_to_start_copies_is_lost_to_compute() -> None:
    engine = Counted(start_seconds=5e-3)
    link = measure_link(engine, CPU)
    # 16 copies of 2 MiB out and as many in: 0.10 s as the probes have it, of which starting them takes 0.08 alone
    copy_seconds = 16 * (2 * MIB / 2e9 + 2 * MIB / 4e9 + 2 * link.latency_seconds)
    assert 16 * 5e-3 / copy_seconds <= link.compute_share <= 1
    assert engine.memory_in_use() == {"disk": 0}


def test_places_are_links_of_their_own(tmp_path: Path, measured: str) -> None:
    cache = tmp_path / "links.json"
    cache.write_text(measured)
    measure_link(Counted(), CPU, cache=cache, place="/fast")
    assert len(json.loads(cache.read_text())) == 2


def test_a_broken_cache_costs_a_measurement(tmp_path: Path) -> None:
    cache = tmp_path / "links.json"
    cache.write_text("{")
    engine = Counted()
    measure_link(engine, CPU, cache=cache)
    assert engine.num_probes > 0
    assert len(json.loads(cache.read_text())) == 1


def test_an_engine_without_time_has_a_finite_link() -> None:
    link = measure_link(VirtualEngine(0), CPU)
    assert link.out_bytes_per_second == 1e15


def test_where_it_is_remembered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_path() == tmp_path / "lowtide" / "links.json"


def test_what_was_measured_in_another_way_is_measured_anew(tmp_path: Path, measured: str) -> None:
    cache = tmp_path / "links.json"
    ((key, known),) = json.loads(measured).items()
    cache.write_text(json.dumps({key.replace(" 3rd", ""): known}))
    engine = Counted()
    measure_link(engine, CPU, cache=cache)
    assert engine.num_probes > 0


def test_what_another_version_has_written_is_measured_anew(tmp_path: Path) -> None:
    cache = tmp_path / "links.json"
    link = measure_link(Counted(), CPU, cache=cache)
    ((key, known),) = json.loads(cache.read_text()).items()
    del known["page_fault_seconds_per_byte"]
    cache.write_text(json.dumps({key: known}))
    engine = Counted()
    again = measure_link(engine, CPU, cache=cache)
    assert dataclasses.replace(again, compute_share=link.compute_share) == link and engine.num_probes > 0
    assert "page_fault_seconds_per_byte" in json.loads(cache.read_text())[key]


def test_a_busy_machine_is_asked_again_later(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cache = tmp_path / "links.json"
    monkeypatch.setattr(_Load, "is_alone", lambda self: False)
    link = measure_link(Counted(), CPU, cache=cache)
    assert link.compute_share >= 0.6, "what was measured may be 0"
    engine = Counted()
    assert measure_link(engine, CPU, cache=cache) == link and engine.num_probes == 0
    ((key, known),) = json.loads(cache.read_text()).items()
    cache.write_text(json.dumps({key: {**known, "busy_at": known["busy_at"] - 601}}))
    monkeypatch.setattr(_Load, "is_alone", lambda self: True)
    measure_link(engine, CPU, cache=cache)
    assert engine.num_probes > 0
    assert "busy_at" not in json.loads(cache.read_text())[key]


def test_copies_take_from_computing_that_has_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quiet machine says 0.18 there, and steps that swap 0.6 to 1.0."""
    monkeypatch.setattr(_Load, "is_alone", lambda self: True)
    monkeypatch.setattr(bandwidth, "_lost_seconds", lambda *_: 0.0)
    monkeypatch.setattr(bandwidth.os, "cpu_count", lambda: torch.get_num_threads() + 1)
    assert measure_link(Counted(), CPU).compute_share == 0.0
    monkeypatch.setattr(bandwidth.os, "cpu_count", torch.get_num_threads)
    assert measure_link(Counted(), CPU).compute_share == 0.6
