"""The accelerator engine's logic on simulated streams: what waits for what, and that a missing wait would be seen."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import threading
import time
import types
from collections.abc import Callable

import pytest
import torch

import lowtide
from lowtide.engines import accelerator, device_ops, staging
from lowtide.engines.accelerator import AcceleratorEngine
from lowtide.engines.base import Lane, Slot
from lowtide.engines.device_ops import (
    TorchDevice,
    _in_thread_on,
    allocated_bytes,
    reset_peak,
)
from lowtide.engines.tiers.disk import DiskTier
from lowtide.engines.tiers.host_limit import Cap, parse_cpu_list
from lowtide.errors import ConfigError, TierFull
from lowtide.profiling.op_timer import DeviceClock
from lowtide.tensors.view import byte_view
from tests.engines.sim_device import SimDevice, SimEvent
from tests.support import zoo

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
        self.may_fail = threading.Event()
        self.error: OSError | None = None
        self.failing: tuple[OSError, int] | None = None
        self.used_bytes = 0
        self.cap = Cap(None)
        self.next_offset = 0
        self.num_closed = 0

    def allocate(self, nbytes: int) -> int:
        self.used_bytes += nbytes
        self.next_offset += 2**30
        return self.next_offset

    def free(self, offset: int, nbytes: int) -> None:
        self.used_bytes -= nbytes

    def fail_next(self, error: OSError, *, after: int) -> None:
        """Fail one transfer, `after` so many others; that one first waits for `may_fail`."""
        self.failing = (error, after)
        self.may_fail.clear()

    def _fail(self) -> None:
        if self.error is not None:
            raise self.error
        if self.failing is not None:
            error, left = self.failing
            self.failing = (error, left - 1) if left else None
            if not left:
                assert self.may_fail.wait(120)
                raise error

    def write(self, offset: int, address: int, nbytes: int) -> None:
        self.has_begun.set()
        assert self.may_write.wait(120)
        self._fail()
        self.data[offset] = ctypes.string_at(address, nbytes)

    def read(self, offset: int, address: int, nbytes: int) -> None:
        assert self.may_read.wait(120)
        self._fail()
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
    deadline = time.monotonic() + 120
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
    assert int(host.place.ranges()[0][0]) == 2
    assert engine.failure(event) is None
    assert engine.wait(Lane.COMPUTE, event) == 0.0


def test_a_fetch_waits_for_its_own_write_without_blocking_the_caller(held, monkeypatch):
    engine, disk, device = held
    slot, buffer = engine.allocate(9000, "disk"), engine.new_buffer(9000, device.device)
    disk.may_read.set()
    engine.copy_out(filled(9000, 7), slot)
    left = engine.record(Lane.OUT)
    assert engine.wait(Lane.IN, left) == 0.0  # the write is held: whoever waited for it would do so for ever
    engine.copy_in(slot, buffer)
    arrival = engine.record(Lane.IN)
    assert not engine.query(arrival)

    def clock() -> float:
        """The first who asks is about to wait: seven seconds pass until the write is over."""
        if disk.may_write.is_set():
            return 8.0 if arrival.job.settled.is_set() else 2.0
        disk.may_write.set()
        return 1.0

    monkeypatch.setattr(accelerator, "time", types.SimpleNamespace(perf_counter=clock))
    assert engine.wait(Lane.COMPUTE, arrival) == 7.0
    device.drain()
    assert bool((byte_view(buffer) == 7).all())


def test_cancel_drops_what_has_not_started_and_only_that(held):
    engine, disk, _ = held
    slots = [engine.allocate(3000, "disk") for _ in range(2)]
    events = []
    for slot in slots:
        engine.copy_out(filled(3000, 5), slot)
        events.append(engine.record(Lane.OUT))
    assert disk.has_begun.wait(120)
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


@pytest.fixture
def held_late(small_stages):
    """Streams that run nothing before they must."""
    device = SimDevice("late")
    disk = HeldDisk()
    disk.may_write.set()
    disk.may_read.set()
    engine = AcceleratorEngine(device.device, 64 * MIB, disk, ops=device)
    yield engine, disk, device
    engine.close()


def test_a_read_that_fails_in_the_middle_is_not_over_while_its_first_piece_is_on_its_way(held_late):
    """Else the buffer would be given to somebody else, and the piece written into that."""
    engine, disk, device = held_late
    slot = engine.allocate(12_000, "disk")
    engine.copy_out(filled(12_000, 1), slot)
    engine.wait(Lane.COMPUTE, engine.record(Lane.OUT))
    disk.fail_next(OSError(5, "Input/output error"), after=1)
    engine.copy_in(slot, engine.new_buffer(12_000, device.device))
    arrival = engine.record(Lane.IN)
    disk.may_fail.set()
    assert arrival.job.settled.wait(120)
    assert isinstance(engine.failure(arrival), OSError)
    assert not engine.query(arrival)
    device.drain()
    assert engine.query(arrival)


def test_a_write_that_fails_in_the_middle_is_not_over_while_its_source_is_being_read(held_late):
    engine, disk, device = held_late
    disk.fail_next(OSError(28, "No space left on device"), after=1)
    source = filled(40_000, 1)
    engine.copy_out(source, engine.allocate(40_000, "disk"))
    left = engine.record(Lane.OUT)
    disk.may_fail.set()
    assert left.job.settled.wait(120)
    assert isinstance(engine.failure(left), OSError)
    assert not engine.query(left)
    device.drain()
    assert engine.query(left)


def test_close_drops_queued_jobs_and_is_idempotent(held, monkeypatch):
    engine, disk, _ = held
    for _ in range(3):
        engine.copy_out(filled(3000, 5), engine.allocate(3000, "disk"))
        engine.wait(Lane.IN, engine.record(Lane.OUT))
    worker = engine._lanes[Lane.OUT]
    join = worker.join
    monkeypatch.setattr(worker, "join", lambda: (disk.may_write.set(), join()))
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


def test_time_is_the_compute_streams_and_nobody_waits_for_it():
    device = SimDevice("late")
    engine = AcceleratorEngine(device.device, MIB, ops=device)
    start = engine.mark_time()
    device.compute.launch(lambda: None, 3.0)
    end = engine.mark_time()
    assert engine.seconds_between(start, end) is None
    assert engine.seconds_between(start, end) is None  # asking does not make it run
    device.drain()
    assert engine.seconds_between(start, end) == pytest.approx(3.0)


def test_the_stall_ring_is_bounded(monkeypatch):
    monkeypatch.setattr(device_ops, "STALL_RING", 4)
    device = SimDevice("late")
    engine = AcceleratorEngine(device.device, MIB, ops=device)
    slot = engine.allocate(1000, "host")
    for _ in range(20):
        engine.copy_out(filled(1000, 1), slot)
        engine.wait(Lane.COMPUTE, engine.record(Lane.OUT))
    assert len(engine._stalls._pairs) == 4
    device.drain()
    assert engine.stall_seconds() == pytest.approx(4e-3)
    # Not all of them are timed, and all are waited for.
    assert device.compute.now == pytest.approx(20e-3)


def test_closing_waits_for_copies_that_are_under_way():
    device = SimDevice("late")
    engine = AcceleratorEngine(device.device, MIB, ops=device)
    slot = engine.allocate(1000, "host")
    engine.copy_out(filled(1000, 1), slot)
    left = engine.record(Lane.OUT)
    assert not engine.query(left)
    engine.close()
    assert engine.query(left)


def test_a_thousand_swaps_leave_nothing_behind():
    def num_events() -> int:
        return sum(type(found) is SimEvent for found in gc.get_objects())

    device = SimDevice(3)
    engine = AcceleratorEngine(device.device, 64 * MIB, ops=device)
    for step in range(112):
        assert all(swap_pass(engine, device, ["host"]))
        gc.collect(0)
        if step == 10:
            before = (num_events(), engine._arena.bytes_reserved)
    assert engine.memory_in_use() == {"host": 0}
    assert engine._arena.bytes_reserved == before[1]
    assert num_events() - before[0] < 20


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


@pytest.mark.parametrize("seed", range(6))
def test_blocks_in_several_pieces_come_back(seed, monkeypatch):
    """A full arena gives blocks that lie in pieces; of each piece the last copy is a short one."""
    monkeypatch.setattr(accelerator, "COPY_BYTES", 1000)
    draw = random.Random(seed)
    device = SimDevice(seed)
    engine = AcceleratorEngine(device.device, MIB, ops=device)
    held, most_pieces = {}, 0
    for number in range(100):
        nbytes = draw.choice((999, 1000, 20_001, 30_000, 70_001, 300_000))
        try:
            slot = engine.allocate(nbytes, "host")
        except TierFull:
            for key in sorted(held)[::2]:
                engine.free(held.pop(key)[0])
            continue
        source = torch.randint(256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(number))
        most_pieces = max(most_pieces, len(slot.place.ranges()))
        engine.copy_out(source.untyped_storage(), slot)
        held[number] = (slot, source)
        engine.wait(Lane.IN, engine.record(Lane.OUT))
        target = engine.new_buffer(nbytes, device.device)
        other_slot, other = held[draw.choice(sorted(held))]
        if other_slot.nbytes == nbytes:
            engine.copy_in(other_slot, target)
            device.drain()
            assert torch.equal(byte_view(target), other)
    assert most_pieces > 1
    for slot, source in held.values():
        target = engine.new_buffer(slot.nbytes, device.device)
        engine.copy_in(slot, target)
        device.drain()
        assert torch.equal(byte_view(target), source)


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


# -- what the device and its allocator are asked -----------------------------------------------------------------------


class Allocator:
    """A device module: flat statistics, as every allocator of torch has them."""

    def __init__(self) -> None:
        self.num_resets = 0

    def memory_stats(self, device: torch.device) -> dict[str, int]:
        return {"allocated_bytes.all.current": 5, "allocated_bytes.all.peak": 7}

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.num_resets += 1


class Nested(Allocator):
    """One that has them as they are."""

    def memory_stats_as_nested_dict(self, device: torch.device) -> dict:
        return {"allocated_bytes": {"all": {"current": 50, "peak": 70}}}


class Pluggable:
    """`CUDAPluggableAllocator` has none."""

    def memory_stats(self, device: torch.device) -> dict[str, int]:
        raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats.")

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        raise RuntimeError("CUDAPluggableAllocator does not yet support resetPeakStats.")


def test_bytes_come_from_the_first_allocator_that_counts_them():
    device = torch.device("cpu")
    assert [allocated_bytes([Nested()], device, which) for which in ("current", "peak")] == [50, 70]
    assert [allocated_bytes([Pluggable(), Allocator()], device, which) for which in ("current", "peak")] == [5, 7]
    assert allocated_bytes([object(), Nested()], device, "peak") == 70
    counting = Allocator()
    reset_peak([Pluggable(), counting], device)
    assert counting.num_resets == 1


def test_an_allocator_without_statistics_has_no_peak_and_is_no_error():
    device = torch.device("cpu")
    assert allocated_bytes([Pluggable(), Pluggable()], device, "peak") is None
    reset_peak([Pluggable(), Pluggable()], device)


def test_stats_without_the_allocators_are_the_ledgers():
    device = SimDevice("early", computes_on_host=True)
    device.allocated_bytes = lambda which: None
    engine = AcceleratorEngine(device.device, 64 * MIB, ops=device)
    case = zoo.CASES["mlp"]
    model = case.build(0)
    with lowtide.apply(model, {"swap": "none"}, engine=engine) as tide:
        tide.set_limit(1 << 40)
        case.loss(model, case.batch(0)).backward()
        assert tide.stats.peak_device_bytes > sum(p.nbytes for p in model.parameters())
        tide.reset_stats()
    engine.close()


def test_each_lanes_thread_enters_the_device_once(held):
    engine, disk, device = held
    disk.may_write.set()
    disk.may_read.set()
    for _ in range(3):
        slot = engine.allocate(9000, "disk")
        engine.copy_out(filled(9000, 1), slot)
        engine.wait(Lane.IN, engine.record(Lane.OUT))
        engine.copy_in(slot, engine.new_buffer(9000, device.device))
        engine.wait(Lane.COMPUTE, engine.record(Lane.IN))
    assert device.threads == ["lowtide-out", "lowtide-in"]


def test_zero_bytes_take_no_place_on_the_disk(tmp_path):
    device = SimDevice("early")
    engine = AcceleratorEngine(device.device, 80 * MIB, DiskTier(tmp_path), ops=device)
    slots = [engine.allocate(nbytes, "disk") for nbytes in (0, 4096, 0)]
    for slot in slots:
        engine.copy_out(filled(slot.nbytes, 3), slot)
        engine.wait(Lane.IN, engine.record(Lane.OUT))
        back = engine.new_buffer(slot.nbytes, device.device)
        engine.copy_in(slot, back)
        arrival = engine.record(Lane.IN)
        engine.wait(Lane.COMPUTE, arrival)
        device.drain()
        assert engine.failure(arrival) is None
        assert set(back) <= {3}
    assert engine.memory_in_use()["disk"] == 4096
    for slot in slots:
        engine.free(slot)
    assert engine.memory_in_use()["disk"] == 0
    engine.close()


def test_remove_leaves_the_programs_pinned_memory_alone(monkeypatch):
    flushed = []
    monkeypatch.setattr(torch.accelerator, "empty_host_cache", lambda: flushed.append(1), raising=False)
    device = SimDevice("early")
    engine = AcceleratorEngine(device.device, 64 * MIB, ops=device)
    engine.allocate(1000, "host")
    engine.close()
    assert flushed == []


@pytest.mark.parametrize("apply", [lowtide.apply, lowtide.optimize], ids=["apply", "optimize"])
def test_a_forward_that_is_captured_as_a_graph_is_refused_by_name(apply):
    device = SimDevice("early", computes_on_host=True)
    engine = AcceleratorEngine(device.device, 64 * MIB, ops=device)
    case = zoo.CASES["mlp"]
    model = case.build(0)
    memory = {"swap": "all", "min_bytes": 0} if apply is lowtide.apply else {"budget": 1 << 30}
    given = {"memory": memory, "engine": engine}
    with apply(model, **given):
        device.is_graph = True
        with pytest.raises(ConfigError) as caught:
            case.loss(model, case.batch(0))
        assert str(caught.value) == (
            f"lowtide: a graph of the device is being captured around the forward of {type(model).__name__}; a replay "
            "would copy to host memory that belongs to another step by then. Call remove() on the tide before the "
            "capture, or capture nothing that is trained under a plan."
        )
        with torch.no_grad():
            case.loss(model, case.batch(0))
        device.is_graph = False
        if apply is lowtide.apply:
            case.loss(model, case.batch(0)).backward()
    engine.close()


def test_what_another_device_saves_is_kept_and_the_plan_says_why():
    device = SimDevice("early", computes_on_host=True)
    engine = AcceleratorEngine(device.device, 64 * MIB, ops=device)
    engine.device = torch.device("cuda", 1)  # the model is on another one than the engine
    plan = {"swap": "all", "min_bytes": 0}
    result, stats = zoo.lowtide_step(zoo.CASES["llama"], 3, plan, engine=engine, num_steps=2)
    zoo.assert_same(result, zoo.plain_result("llama", 3, num_steps=2))
    assert stats.swapped_bytes == 0 < stats.kept_bytes
    model = zoo.CASES["llama"].build(0)
    with lowtide.apply(model, plan, engine=engine) as tide:
        zoo.CASES["llama"].loss(model, zoo.CASES["llama"].batch(0))
        assert {site.reason.split(";")[0] for site in tide.plan.sites} == {"not a plain tensor on cuda:1"}
    engine.close()


def test_a_device_clock_times_the_stream_that_computes():
    device = SimDevice("late")
    device.current = device.new_stream()
    clock = DeviceClock(device)
    marks = [(clock.run(lambda: device.current.launch(lambda: None, 2.0), (), {})[1], "launch") for _ in range(3)]
    device.compute.launch(lambda: None, 50.0)  # the default stream has nothing to do with it
    assert clock.settle(marks) == pytest.approx([2.0] * 3)


def test_unasked_each_rank_of_a_machine_takes_its_share_of_the_host(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    alone = accelerator._host_cap_bytes(None)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert 0.2 * alone < accelerator._host_cap_bytes(None) < 0.3 * alone


def test_no_copy_is_under_way_when_the_engine_is_closed():
    device = SimDevice("late")
    engine = AcceleratorEngine(device.device, 64 * MIB, ops=device)
    engine.copy_out(filled(5000, 1), engine.allocate(5000, "host"))
    assert engine._lanes[Lane.OUT].stream.queue
    engine.close()
    assert not engine._lanes[Lane.OUT].stream.queue


def test_a_visible_slot_shows_what_was_sent(tmp_path):
    device = SimDevice("late")
    engine = AcceleratorEngine(device.device, 256 * MIB, DiskTier(tmp_path), ops=device)
    for tier in engine.tiers:
        slot, view = engine.allocate_visible(3 * MIB, tier)
        source = torch.arange(3 * MIB).to(torch.uint8)
        engine.wait(Lane.OUT, engine.record(Lane.COMPUTE))
        engine.copy_out(source.untyped_storage(), slot)
        sent = engine.record(Lane.OUT)
        engine.wait(Lane.COMPUTE, sent)
        engine._lanes[Lane.OUT].stream.synchronize()
        assert torch.equal(view, source)
        part = engine.part_of(slot, MIB, MIB)
        engine.copy_out(torch.full((MIB,), 7, dtype=torch.uint8).untyped_storage(), part)
        target = engine.new_buffer(MIB, device.device)
        engine.wait(Lane.IN, engine.record(Lane.OUT))
        engine.copy_in(part, target)
        engine.wait(Lane.COMPUTE, engine.record(Lane.IN))
        for lane in (Lane.OUT, Lane.IN):
            engine._lanes[lane].stream.synchronize()
        assert (byte_view(target) == 7).all()
        assert torch.equal(view, torch.cat([source[:MIB], torch.full((MIB,), 7, dtype=torch.uint8), source[2 * MIB :]]))
        engine.free(slot)
    engine.close()
