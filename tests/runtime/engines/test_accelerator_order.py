"""The accelerator engine's logic on simulated streams: what waits for what, and that a missing wait would be seen."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import time
from collections.abc import Callable

import pytest
import torch

from lowtide.errors import ConfigError
from lowtide.runtime.affinity import parse_cpu_list
from lowtide.runtime.disk import DiskTier
from lowtide.runtime.engines import accelerator, staging, stall_meter
from lowtide.runtime.engines.accelerator import AcceleratorEngine
from lowtide.runtime.engines.base import Lane, Slot, TierFull
from lowtide.runtime.engines.device_ops import TorchDevice, _in_thread_on, byte_view
from tests import zoo
from tests.runtime.engines.sim_device import SimDevice

POLICIES = ["late", "early", *range(12)]
MIB = 2**20


class Forgetful(AcceleratorEngine):
    """An engine whose waits of one lane for another are lost."""

    forgotten: tuple[Lane, Lane] | None = None

    def wait(self, lane, event):
        return 0.0 if (lane, event.lane) == self.forgotten else super().wait(lane, event)


class HeldDisk:
    """A disk in memory that works only while its gates are open, and fails on request."""

    def __init__(self) -> None:
        self.data: dict[int, bytes] = {}
        self.has_begun = threading.Event()
        self.may_write = threading.Event()
        self.may_read = threading.Event()
        self.error: OSError | None = None
        self.used_bytes = 0
        self.next_offset = 0
        self.num_closed = 0

    def allocate(self, nbytes: int) -> int:
        self.used_bytes += nbytes
        self.next_offset += 2**30
        return self.next_offset

    def free(self, offset: int, nbytes: int) -> None:
        self.used_bytes -= nbytes

    def write(self, offset: int, address: int, nbytes: int) -> None:
        self.has_begun.set()
        assert self.may_write.wait(20)
        if self.error is not None:
            raise self.error
        self.data[offset] = ctypes.string_at(address, nbytes)

    def read(self, offset: int, address: int, nbytes: int) -> None:
        assert self.may_read.wait(20)
        if self.error is not None:
            raise self.error
        ctypes.memmove(address, self.data[offset], nbytes)

    def close(self) -> None:
        self.num_closed += 1


@pytest.fixture
def small_stages(monkeypatch):
    """Chunks so small that every copy takes several, and more than the ring holds."""
    monkeypatch.setattr(accelerator, "STAGE_BYTES", 4096)


def filled(nbytes: int, value: int) -> torch.UntypedStorage:
    return torch.full((nbytes,), value, dtype=torch.uint8).untyped_storage()


def swap_pass(engine: AcceleratorEngine, device: SimDevice, tiers: list[str], num_sites: int = 9) -> list[bool]:
    """A forward that swaps every site out of three reused places and a backward that fetches two ahead into three
    reused buffers: every wait that the runtime makes, and none more. Returns which sites came back right."""
    num_places, nbytes, compute = 3, 30_000, device.compute
    places = [filled(nbytes, 0) for _ in range(num_places)]
    slots: list[Slot] = []
    left = []
    for i in range(num_sites):
        place = byte_view(places[i % num_places])
        if i >= num_places:
            engine.wait(Lane.COMPUTE, left[i - num_places])
        compute.launch(lambda place=place, i=i: place.fill_(i + 1))
        slots.append(engine.allocate(nbytes, tiers[i % len(tiers)]))
        engine.wait(Lane.OUT, engine.record(Lane.COMPUTE))
        engine.copy_out(place.untyped_storage(), slots[i])
        left.append(engine.record(Lane.OUT))
    buffers = [engine.new_buffer(nbytes, device.device) for _ in range(num_places)]
    arrived: dict[int, object] = {}
    right: dict[int, bool] = {}

    def fetch(i: int) -> None:
        engine.wait(Lane.IN, engine.record(Lane.COMPUTE))
        engine.wait(Lane.IN, left[i])
        engine.copy_in(slots[i], buffers[i % num_places])
        arrived[i] = engine.record(Lane.IN)

    for i in reversed(range(num_sites)):
        for ahead in range(i, max(i - 3, -1), -1):
            if ahead not in arrived:
                fetch(ahead)
        engine.wait(Lane.COMPUTE, arrived[i])
        buffer = byte_view(buffers[i % num_places])
        compute.launch(lambda buffer=buffer, i=i: right.update({i: bool((buffer == i + 1).all())}))
        compute.launch(lambda buffer=buffer: buffer.fill_(99))  # the memory serves later compute
    device.drain()
    for event, slot in zip(left, slots, strict=True):
        assert engine.query(event)
        engine.free(slot)
    return [right[i] for i in range(num_sites)]


@pytest.mark.parametrize("policy", POLICIES)
def test_host_swaps_are_right_under_every_interleaving(policy):
    device = SimDevice(policy)
    engine = AcceleratorEngine(device.device, 64 * MIB, ops=device)
    assert all(swap_pass(engine, device, ["host"]))
    assert engine.memory_in_use() == {"host": 0}
    engine.close()


@pytest.mark.parametrize(
    "forgotten",
    [
        (Lane.OUT, Lane.COMPUTE),
        (Lane.COMPUTE, Lane.OUT),
        (Lane.IN, Lane.COMPUTE),
        (Lane.IN, Lane.OUT),
        (Lane.COMPUTE, Lane.IN),
    ],
    ids=lambda pair: f"{pair[0].value}-for-{pair[1].value}",
)
def test_each_forgotten_wait_is_seen(forgotten):
    is_right = []
    for policy in POLICIES:
        device = SimDevice(policy)
        engine = Forgetful(device.device, 64 * MIB, ops=device)
        engine.forgotten = forgotten
        is_right.append(all(swap_pass(engine, device, ["host"])))
        engine.close()
    assert not all(is_right)


def test_a_wait_that_never_reaches_the_stream_is_seen():
    device = SimDevice("late")
    device.are_waits_ignored = True
    engine = AcceleratorEngine(device.device, 64 * MIB, ops=device)
    assert not all(swap_pass(engine, device, ["host"]))


@pytest.mark.parametrize("tiers", [["disk"], ["host", "disk"], ["disk", "host", "host"]], ids="-".join)
@pytest.mark.parametrize("policy", ["late", "early", 1, 2, 3])
def test_disk_and_mixed_swaps_are_right(policy, tiers, tmp_path, small_stages):
    device = SimDevice(policy)
    engine = AcceleratorEngine(device.device, 64 * MIB, DiskTier(tmp_path), ops=device)
    assert engine.tiers == ("host", "disk")
    for _ in range(3):
        assert all(swap_pass(engine, device, tiers))
    assert engine.memory_in_use() == {"host": 0, "disk": 0}
    engine.close()


@pytest.mark.parametrize("policy", ["late", "early", 1, 2])
@pytest.mark.parametrize("swap", ["all", [{"match": "layers.1", "tier": "disk"}, "layers.0"]], ids=["host", "mixed"])
@pytest.mark.parametrize("name", ["llama", "strided_views"])
def test_a_model_trains_to_the_same_bits(name, swap, policy, tmp_path, small_stages):
    device = SimDevice(policy, computes_on_host=True)
    engine = AcceleratorEngine(device.device, 256 * MIB, DiskTier(tmp_path), ops=device)
    plan = {"swap": swap, "min_bytes": 0}
    result, stats = zoo.lowtide_step(zoo.CASES[name], 3, plan, engine=engine, num_steps=2, accumulate=2)
    zoo.assert_same(result, zoo.plain_result(name, 3, num_steps=2, accumulate=2))
    assert stats.swapped_bytes > 0
    assert engine.memory_in_use() == {"host": 0, "disk": 0}
    engine.close()


@pytest.fixture
def held(small_stages):
    device = SimDevice("early")
    disk = HeldDisk()
    engine = AcceleratorEngine(device.device, 64 * MIB, disk, ops=device)
    yield engine, disk, device
    disk.may_write.set()
    disk.may_read.set()
    engine.close()
    assert disk.num_closed == 1


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(1e-3)


def test_an_event_behind_a_disk_write_covers_it_and_what_follows(held):
    engine, disk, device = held
    engine.copy_out(filled(4000, 1), engine.allocate(4000, "disk"))
    host = engine.allocate(4000, "host")
    engine.copy_out(filled(4000, 2), host)
    event = engine.record(Lane.OUT)
    device.drain()
    assert not engine.query(event)
    assert not engine.cancel(engine.record(Lane.COMPUTE))
    disk.may_write.set()
    eventually(lambda: engine.query(event))
    assert int(host.place.pieces()[0][0]) == 2
    assert engine.failure(event) is None
    assert engine.wait(Lane.COMPUTE, event) == 0.0


def test_a_fetch_waits_for_its_own_write_without_blocking_the_caller(held):
    engine, disk, device = held
    slot, buffer = engine.allocate(9000, "disk"), engine.new_buffer(9000, device.device)
    disk.may_read.set()
    engine.copy_out(filled(9000, 7), slot)
    left = engine.record(Lane.OUT)
    start = time.perf_counter()
    assert engine.wait(Lane.IN, left) == 0.0
    engine.copy_in(slot, buffer)
    arrival = engine.record(Lane.IN)
    assert time.perf_counter() - start < 5.0
    assert not engine.query(arrival)
    threading.Timer(0.05, disk.may_write.set).start()
    assert engine.wait(Lane.COMPUTE, arrival) > 0.01
    device.drain()
    assert bool((byte_view(buffer) == 7).all())


def test_cancel_drops_what_has_not_started_and_only_that(held):
    engine, disk, _ = held
    slots = [engine.allocate(3000, "disk") for _ in range(2)]
    events = []
    for slot in slots:
        engine.copy_out(filled(3000, 5), slot)
        events.append(engine.record(Lane.OUT))
    assert disk.has_begun.wait(10)
    assert not engine.cancel(events[0])
    assert engine.cancel(events[1])
    assert engine.query(events[1])
    assert engine.wait(Lane.COMPUTE, events[1]) == 0.0
    after = engine.record(Lane.OUT)
    assert not engine.query(after)
    disk.may_write.set()
    engine.wait(Lane.COMPUTE, after)
    eventually(lambda: engine.query(events[0]))
    assert list(disk.data) == [slots[0].place]


def test_a_host_copy_cannot_be_cancelled():
    device = SimDevice("late")
    engine = AcceleratorEngine(device.device, MIB, ops=device)
    engine.copy_out(filled(10, 1), engine.allocate(10, "host"))
    assert not engine.cancel(engine.record(Lane.OUT))


def test_a_failed_write_is_known_after_the_wait_and_holds_no_memory(held):
    engine, disk, _ = held
    disk.error = OSError(28, "No space left on device")
    disk.may_write.set()
    engine.copy_out(filled(40_000, 1), engine.allocate(40_000, "disk"))
    event = engine.record(Lane.OUT)
    engine.wait(Lane.COMPUTE, event)
    failure = engine.failure(event)
    assert failure is disk.error
    assert failure.__traceback__ is None
    disk.error = None
    engine.copy_out(filled(9000, 1), engine.allocate(9000, "disk"))
    event = engine.record(Lane.OUT)
    engine.wait(Lane.COMPUTE, event)
    assert engine.failure(event) is None


def test_a_copy_after_a_failed_one_has_not_failed(held):
    engine, disk, _ = held
    disk.error = OSError(28, "No space left on device")
    disk.may_write.set()
    engine.copy_out(filled(9000, 1), engine.allocate(9000, "disk"))
    engine.wait(Lane.COMPUTE, engine.record(Lane.OUT))
    assert engine.failure(engine.record(Lane.OUT)) is disk.error
    engine.copy_out(filled(9000, 1), engine.allocate(9000, "host"))
    assert engine.failure(engine.record(Lane.OUT)) is None


def test_a_failed_read_is_reported(held):
    engine, disk, device = held
    disk.may_write.set()
    disk.may_read.set()
    slot = engine.allocate(9000, "disk")
    engine.copy_out(filled(9000, 1), slot)
    engine.wait(Lane.IN, engine.record(Lane.OUT))
    eventually(lambda: len(disk.data) == 3)
    disk.error = OSError(5, "Input/output error")
    engine.copy_in(slot, engine.new_buffer(9000, device.device))
    arrival = engine.record(Lane.IN)
    engine.wait(Lane.COMPUTE, arrival)
    assert isinstance(engine.failure(arrival), OSError)


def test_close_drops_queued_jobs_and_is_idempotent(held):
    engine, disk, _ = held
    for _ in range(3):
        engine.copy_out(filled(3000, 5), engine.allocate(3000, "disk"))
        engine.wait(Lane.IN, engine.record(Lane.OUT))
    threading.Timer(0.05, disk.may_write.set).start()
    engine.close()
    engine.close()
    assert len(disk.data) <= 1
    assert engine._arena.bytes_reserved == 0


def test_stalls_are_the_compute_streams_waiting_time():
    device = SimDevice("late")
    engine = AcceleratorEngine(device.device, 16 * MIB, ops=device)
    device.compute.launch(lambda: None, 1.0)
    engine.wait(Lane.OUT, engine.record(Lane.COMPUTE))
    engine.copy_out(filled(3_000_000, 1), engine.allocate(3_000_000, "host"))  # from 1 s to 4 s
    event = engine.record(Lane.OUT)
    device.compute.launch(lambda: None, 1.0)
    assert engine.wait(Lane.COMPUTE, event) == 0.0  # the caller is never blocked by a stream
    assert engine.stall_seconds() == 0.0  # nothing has run, and asking does not make it run
    device.drain()
    assert engine.stall_seconds() == pytest.approx(2.0)
    num_events = device.num_events
    engine.wait(Lane.COMPUTE, event)  # complete: no timing, no new events
    assert (engine.stall_seconds(), device.num_events) == (pytest.approx(2.0), num_events)


def test_the_stall_ring_is_bounded(monkeypatch):
    monkeypatch.setattr(stall_meter, "STALL_RING", 4)
    device = SimDevice("late")
    engine = AcceleratorEngine(device.device, MIB, ops=device)
    slot = engine.allocate(1000, "host")
    for _ in range(20):
        engine.copy_out(filled(1000, 1), slot)
        engine.wait(Lane.COMPUTE, engine.record(Lane.OUT))
    assert len(engine._stalls._pairs) == 4
    device.drain()
    assert engine.stall_seconds() == pytest.approx(4e-3)


def test_a_thousand_swaps_leave_nothing_behind():
    device = SimDevice(3)
    engine = AcceleratorEngine(device.device, 64 * MIB, ops=device)
    for step in range(112):
        assert all(swap_pass(engine, device, ["host"]))
        gc.collect(0)
        if step == 10:
            before = (device.num_events, engine._arena.bytes_reserved)
    assert engine.memory_in_use() == {"host": 0}
    assert engine._arena.bytes_reserved == before[1]
    assert device.num_events - before[0] < 20  # events come from the pool


def test_the_host_cap_holds():
    device = SimDevice()
    engine = AcceleratorEngine(device.device, 100_000, ops=device)
    engine.allocate(90_000, "host")
    with pytest.raises(TierFull):
        engine.allocate(20_000, "host")
    assert engine.memory_in_use() == {"host": 90_112}


def test_staging_counts_against_the_host_cap():
    device = SimDevice()
    with pytest.raises(ConfigError) as caught:
        AcceleratorEngine(device.device, 40 * MIB, HeldDisk(), ops=device)
    assert str(caught.value) == (
        "host_budget: 41943040 bytes are too few for the disk tier, which sends everything through 67108864 bytes of "
        "pinned host memory; raise it or drop the disk"
    )
    assert 2 * staging.NUM_STAGES * staging.STAGE_BYTES == 67108864


def test_large_copies_go_in_pieces(monkeypatch):
    monkeypatch.setattr(accelerator, "COPY_BYTES", 1000)
    device = SimDevice("late")
    engine = AcceleratorEngine(device.device, MIB, ops=device)
    slot = engine.allocate(4500, "host")
    source = torch.arange(4500).to(torch.uint8).untyped_storage()
    target = engine.new_buffer(4500, device.device)
    engine.copy_out(source, slot)
    assert len(engine._lanes[Lane.OUT].stream.queue) == 5
    engine.wait(Lane.IN, engine.record(Lane.OUT))
    engine.copy_in(slot, target)
    device.drain()
    assert torch.equal(byte_view(target), byte_view(source))


def test_bandwidth_is_measured_in_both_directions():
    device = SimDevice(5)
    engine = AcceleratorEngine(device.device, 16 * MIB, ops=device)
    measured = engine.probe_bandwidth(200_000)
    assert measured.out_bytes_per_second == pytest.approx(1e6)
    assert measured.in_bytes_per_second == pytest.approx(1e6)
    assert engine.memory_in_use() == {"host": 0}


def test_empty_storages_travel_too(held):
    engine, disk, device = held
    disk.may_write.set()
    disk.may_read.set()
    for tier in engine.tiers:
        slot = engine.allocate(0, tier)
        engine.copy_out(filled(0, 0), slot)
        engine.wait(Lane.IN, engine.record(Lane.OUT))
        engine.copy_in(slot, engine.new_buffer(0, device.device))
        engine.wait(Lane.COMPUTE, engine.record(Lane.IN))


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_no_accelerator_is_said_plainly():
    with pytest.raises(ConfigError) as caught:
        TorchDevice(torch.device("cuda", 0))
    assert str(caught.value) == (
        "device 'cuda:0' cannot be swapped by the accelerator engine: the accelerator of this torch is none. "
        "Move the model to that device, or use the host engine."
    )


def test_cpu_lists_of_the_kernel():
    assert parse_cpu_list("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert parse_cpu_list("\n") == frozenset()


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="threads cannot be bound to CPUs here")
def test_slabs_are_touched_on_the_cpus_near_the_device_and_the_caller_stays_where_it_is():
    before = os.sched_getaffinity(0)
    near = frozenset([max(before)])
    seen = []

    def make() -> torch.Tensor:
        seen.append(os.sched_getaffinity(0))
        return torch.zeros(1, dtype=torch.uint8)

    assert _in_thread_on(near, make).numel() == 1
    assert seen == [near]
    assert os.sched_getaffinity(0) == before
    with pytest.raises(RuntimeError, match="no more"):
        _in_thread_on(near, lambda: (_ for _ in ()).throw(RuntimeError("no more")))
