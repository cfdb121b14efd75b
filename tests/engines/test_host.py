"""The host engine on real files and threads: order, cancellation, failure, fork, leaks, and resident memory."""

from __future__ import annotations

import errno
import gc
import os
import random
import threading
import time
import types
import weakref
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from lowtide.engines import host
from lowtide.engines.base import Engine, Lane, Slot
from lowtide.engines.host import HostEngine
from lowtide.errors import ConfigError, TierFull
from lowtide.tensors.view import byte_view
from tests.support import processes

CPU = torch.device("cpu")
MIB = 1 << 20


def _num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def engine(tmp_path) -> Iterator[HostEngine]:
    engine = HostEngine(tmp_path)
    yield engine
    engine.close()


class _Gate:
    """Holds the disk's `write` (or `read`) back until it is opened."""

    def __init__(self, engine: HostEngine, name: str) -> None:
        self.opened = threading.Event()
        self.entered = threading.Semaphore(0)
        self.calls: list[int] = []
        self._real = getattr(engine.disk, name)
        setattr(engine.disk, name, self)

    def __call__(self, offset: int, address: int, nbytes: int) -> None:
        self.calls.append(offset)
        self.entered.release()
        assert self.opened.wait(120)
        self._real(offset, address, nbytes)


def _storage(nbytes: int, mark: int) -> torch.UntypedStorage:
    return torch.full((nbytes,), mark, dtype=torch.uint8).untyped_storage()


def _mark(storage: torch.UntypedStorage) -> int:
    values = torch.empty(0, dtype=torch.uint8).set_(storage)
    assert bool((values == values[0]).all())
    return int(values[0])


def _write(engine: HostEngine, mark: int, nbytes: int = MIB) -> tuple[Slot, object]:
    slot = engine.allocate(nbytes, "disk")
    engine.copy_out(_storage(nbytes, mark), slot)
    return slot, engine.record(Lane.OUT)


def test_it_is_an_engine(tmp_path):
    engine: Engine = HostEngine(tmp_path)
    assert (engine.name, engine.device_type, engine.tiers) == ("host", "cpu", ("disk",))
    assert engine.device_peak_bytes() is None
    assert engine.stall_seconds() == 0.0
    engine.reset_device_peak()
    engine.close()


@pytest.mark.parametrize("nbytes", [1, 5000, MIB, 9 * MIB + 3])
def test_round_trip(engine, nbytes):
    data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(nbytes))
    slot = engine.allocate(nbytes, "disk")
    engine.copy_out(data.untyped_storage(), slot)
    engine.wait(Lane.IN, engine.record(Lane.OUT))
    target = engine.new_buffer(nbytes, CPU)
    assert target.nbytes() == nbytes
    engine.copy_in(slot, target)
    event = engine.record(Lane.IN)
    assert engine.wait(Lane.COMPUTE, event) >= 0.0
    assert engine.query(event)
    assert engine.failure(event) is None
    assert torch.equal(torch.empty(0, dtype=torch.uint8).set_(target), data)
    engine.free(slot)
    assert engine.memory_in_use() == {"disk": 0}


def test_compute_is_always_complete(engine):
    event = engine.record(Lane.COMPUTE)
    assert engine.query(event)
    assert engine.wait(Lane.OUT, event) == 0.0
    assert engine.failure(event) is None
    assert not engine.cancel(event)
    assert engine.query(engine.record(Lane.OUT))  # nothing enqueued yet


def test_an_event_waits_for_everything_before_it(engine):
    gate = _Gate(engine, "write")
    real, first_done = gate._real, threading.Event()

    def slow_first(offset: int, address: int, nbytes: int) -> None:
        if offset == slots[0].place:
            assert first_done.wait(120)
        real(offset, address, nbytes)

    slots = [engine.allocate(MIB, "disk") for _ in range(3)]
    engine.disk.write = slow_first
    events = []
    for slot in slots:
        engine.copy_out(_storage(MIB, 1), slot)
        events.append(engine.record(Lane.OUT))
    time.sleep(0.05)  # with three threads the later two copies are over by now
    assert [engine.query(event) for event in events] == [False, False, False]
    first_done.set()
    engine.wait(Lane.COMPUTE, events[-1])
    assert all(engine.query(event) for event in events)


def test_wait_on_compute_blocks_and_says_for_how_long(engine, monkeypatch):
    gate = _Gate(engine, "write")
    write = gate._real
    gate._real = lambda *place: (time.sleep(0.05), write(*place))  # who does not wait is back before that
    _, event = _write(engine, 1)
    assert not engine.query(event)

    def clock() -> float:
        """The first who asks is about to wait: seven seconds pass until the write is over."""
        if gate.opened.is_set():
            return 8.0 if engine.query(event) else 2.0
        gate.opened.set()
        return 1.0

    monkeypatch.setattr(host, "time", types.SimpleNamespace(perf_counter=clock))
    assert engine.wait(Lane.COMPUTE, event) == 7.0
    assert engine.wait(Lane.COMPUTE, event) == 0.0


def test_a_copy_in_waits_for_its_own_copy_out(engine):
    gate = _Gate(engine, "write")
    slot, written = _write(engine, 7)
    target = engine.new_buffer(MIB, CPU)
    torch.empty(0, dtype=torch.uint8).set_(target).fill_(0)
    engine.wait(Lane.IN, written)
    engine.copy_in(slot, target)
    fetched = engine.record(Lane.IN)
    time.sleep(0.02)
    assert not engine.query(fetched)
    gate.opened.set()
    engine.wait(Lane.COMPUTE, fetched)
    assert _mark(target) == 7


def test_lanes_start_in_order_and_a_barrier_outlives_a_cancelled_copy(tmp_path):
    engine = HostEngine(tmp_path)
    gate = _Gate(engine, "write")
    slot, written = _write(engine, 5)
    engine.wait(Lane.IN, written)
    first, second = engine.new_buffer(MIB, CPU), engine.new_buffer(MIB, CPU)
    engine.copy_in(slot, first)
    dropped = engine.record(Lane.IN)
    engine.copy_in(slot, second)
    fetched = engine.record(Lane.IN)
    assert engine.cancel(dropped)
    assert engine.query(dropped)
    assert engine.failure(dropped) is None
    time.sleep(0.02)
    assert not engine.query(fetched)
    gate.opened.set()
    engine.wait(Lane.COMPUTE, fetched)
    assert _mark(second) == 5
    engine.close()


def test_cancel_drops_what_has_not_started_and_nothing_else(tmp_path):
    engine = HostEngine(tmp_path)
    gate = _Gate(engine, "write")
    running_slot, running = _write(engine, 1)
    assert gate.entered.acquire(timeout=120)
    source = _storage(MIB, 2)
    alive = weakref.ref(source)
    slot = engine.allocate(MIB, "disk")
    engine.copy_out(source, slot)
    queued = engine.record(Lane.OUT)
    last_slot, last = _write(engine, 3)
    del source
    assert alive() is not None  # the engine holds it
    assert engine.cancel(queued)
    assert engine.cancel(queued)
    assert alive() is None
    assert engine.query(queued)
    assert not engine.query(last)
    assert not engine.cancel(running)
    gate.opened.set()
    engine.wait(Lane.COMPUTE, last)
    assert not engine.cancel(last)
    assert gate.calls == [running_slot.place, last_slot.place]
    engine.close()


def test_sources_are_let_go_when_the_copy_is_over(engine):
    source = _storage(MIB, 1)
    alive = weakref.ref(source)
    slot = engine.allocate(MIB, "disk")
    engine.copy_out(source, slot)
    event = engine.record(Lane.OUT)
    del source
    engine.wait(Lane.COMPUTE, event)
    assert alive() is None


def test_a_failed_write_is_reported_and_the_lane_goes_on(engine, monkeypatch):
    real, calls = os.pwrite, []

    def full_in_the_middle(descriptor, view, offset):
        calls.append(offset)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, view, offset)

    slot = engine.allocate(9 * MIB, "disk")
    source = _storage(9 * MIB, 4)
    monkeypatch.setattr(os, "pwrite", full_in_the_middle)
    engine.copy_out(source, slot)
    event = engine.record(Lane.OUT)
    engine.wait(Lane.COMPUTE, event)
    error = engine.failure(event)
    assert isinstance(error, OSError)
    assert error.errno == errno.ENOSPC
    assert _mark(source) == 4
    engine.copy_out(source, slot)
    event = engine.record(Lane.OUT)
    engine.wait(Lane.COMPUTE, event)
    assert engine.failure(event) is None


def test_a_full_tier_says_so(tmp_path):
    engine = HostEngine(tmp_path, disk_budget_bytes=2 * MIB)
    slot = engine.allocate(2 * MIB, "disk")
    with pytest.raises(TierFull):
        engine.allocate(1, "disk")
    engine.free(slot)
    engine.allocate(1, "disk")
    engine.close()


def test_a_bad_directory_is_the_users_mistake():
    with pytest.raises(ConfigError, match="swap directory '/proc': cannot write there"):
        HostEngine("/proc")


def test_random_traffic_keeps_every_byte(engine):
    """Slots and buffers are reused all the time; each read must see what was written to its slot last."""
    random_source = random.Random(0)
    held: list[tuple[Slot, object, int, torch.UntypedStorage]] = []
    for step in range(400):
        if len(held) < 8 and random_source.random() < 0.6:
            nbytes, mark = random_source.choice([4096, 300_000, MIB]), step % 251
            slot, source = engine.allocate(nbytes, "disk"), _storage(nbytes, mark)
            engine.copy_out(source, slot)
            held.append((slot, engine.record(Lane.OUT), mark, source))
        elif held:
            slot, written, mark, source = held.pop(random_source.randrange(len(held)))
            target = engine.new_buffer(slot.nbytes, CPU)
            engine.wait(Lane.IN, written)
            engine.copy_in(slot, target)
            engine.wait(Lane.COMPUTE, engine.record(Lane.IN))
            assert _mark(target) == mark
            engine.free(slot)
    assert engine.memory_in_use()["disk"] == sum(-(-slot.nbytes // 4096) * 4096 for slot, *_ in held)


def test_no_leaks_over_4_000_copies(tmp_path):
    engine = HostEngine(tmp_path)
    engine.disk.write = engine.disk.read = lambda *_: None  # the bookkeeping is what may leak
    source = _storage(4096, 1)
    slot = engine.allocate(4096, "disk")

    def traffic(rounds: int) -> None:
        for _ in range(rounds):
            engine.copy_out(source, slot)
            written = engine.record(Lane.OUT)
            engine.wait(Lane.IN, written)
            engine.copy_in(slot, source)
            engine.wait(Lane.COMPUTE, engine.record(Lane.IN))

    traffic(500)
    gc.collect()
    objects, resident = len(gc.get_objects()), psutil.Process().memory_info().rss
    for _ in range(40):
        for _ in range(49):
            engine.copy_out(source, slot)
            engine.copy_in(slot, source)
        traffic(1)
    gc.collect()
    assert len(gc.get_objects()) - objects < 40
    assert psutil.Process().memory_info().rss - resident < 16 * MIB
    engine.close()


def test_close_ends_threads_and_descriptors_and_is_idempotent(tmp_path):
    descriptors, threads = _num_descriptors(), threading.active_count()
    engine = HostEngine(tmp_path)
    assert threading.active_count() == threads  # started lazily
    for mark in range(5):
        _write(engine, mark)
    engine.close()
    engine.close()
    assert threading.active_count() == threads
    assert _num_descriptors() == descriptors


def test_close_drops_what_has_not_started(tmp_path, monkeypatch):
    engine = HostEngine(tmp_path)
    gate = _Gate(engine, "write")
    _, running = _write(engine, 1)
    assert gate.entered.acquire(timeout=120)
    _, queued = _write(engine, 2)
    thread = engine._lanes[Lane.OUT]._thread
    join = thread.join
    monkeypatch.setattr(thread, "join", lambda: (gate.opened.set(), join()))
    engine.close()
    assert engine.query(running)
    assert engine.failure(running) is None
    assert engine.query(queued)
    assert str(engine.failure(queued)) == "the swap engine was closed before this copy started"


def test_a_forgotten_engine_is_collected(tmp_path):
    descriptors, threads = _num_descriptors(), threading.active_count()
    engine = HostEngine(tmp_path)
    _, event = _write(engine, 1)
    engine.wait(Lane.COMPUTE, event)
    del engine, event
    gc.collect()
    deadline = time.monotonic() + 120
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.01)
    gc.collect()
    assert threading.active_count() == threads
    assert _num_descriptors() == descriptors


_FORK = """
import os, sys, torch
from lowtide.engines.base import Lane
from lowtide.engines.host import HostEngine
engine = HostEngine(sys.argv[1])
slot = engine.allocate(1 << 20, "disk")
engine.copy_out(torch.ones(1 << 18).untyped_storage(), slot)
engine.wait(Lane.COMPUTE, engine.record(Lane.OUT))
child = os.fork()
if child == 0:
    engine.free(slot)  # a handle that dies in the child does no harm
    try:
        engine.allocate(1, "disk")
    except RuntimeError as error:
        print("refused:", error, flush=True)
    engine.close()
    own = HostEngine(sys.argv[1])
    mine = own.allocate(1 << 20, "disk")
    own.copy_out(torch.zeros(1 << 18).untyped_storage(), mine)
    own.wait(Lane.COMPUTE, own.record(Lane.OUT))
    own.close()
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
back = engine.new_buffer(1 << 20, torch.device("cpu"))
engine.copy_in(slot, back)
engine.wait(Lane.COMPUTE, engine.record(Lane.IN))
print(torch.empty(0).set_(back).sum().item(), engine.memory_in_use())
print(os.getpid())
"""


def test_a_fork_refuses_the_parents_engine_and_the_parent_goes_on(tmp_path):
    _, out, _ = processes.program(_FORK, tmp_path, str(tmp_path))
    refused, values, parent = out.splitlines()
    assert refused.startswith(f"refused: this swap engine belongs to process {parent} and this is its fork ")
    assert refused.endswith(": apply lowtide after forking, or start the child with the 'spawn' method")
    assert values == "262144.0 {'disk': 1048576}"


_RESIDENT = """
import sys, psutil, torch
from lowtide.engines.base import Lane
from lowtide.engines.host import HostEngine
from lowtide.engines.tiers.host_buffers import configure_malloc
configure_malloc()
torch.set_num_threads(1)
engine = HostEngine(sys.argv[1])
resident = lambda: psutil.Process().memory_info().rss >> 20
before, peak, slots = resident(), 0, []
for mark in range(64):
    source = torch.full((1 << 20,), float(mark)).untyped_storage()  # 4 MiB
    slots.append(engine.allocate(source.nbytes(), "disk"))
    engine.copy_out(source, slots[-1])
    engine.wait(Lane.COMPUTE, engine.record(Lane.OUT))
    del source
    peak = max(peak, resident() - before)
for mark in reversed(range(64)):
    target = engine.new_buffer(4 << 20, torch.device("cpu"))
    engine.copy_in(slots[mark], target)
    engine.wait(Lane.COMPUTE, engine.record(Lane.IN))
    assert torch.empty(0).set_(target).unique().tolist() == [float(mark)]
    del target
    peak = max(peak, resident() - before)
engine.close()
print(peak)
"""


def test_256_mib_go_through_little_resident_memory(tmp_path):
    status, out, err = processes.program(_RESIDENT, tmp_path, str(tmp_path))
    assert status == 0, err
    assert int(out) < 72  # slack, a chunk of bounce buffer per lane, and torch's own


def test_bandwidth_is_measured_both_ways(engine):
    start = time.perf_counter()
    bandwidth = engine.probe_bandwidth(4 * MIB)
    least = 4 * MIB / (time.perf_counter() - start)  # what is timed is a part of the call
    assert least < bandwidth.out_bytes_per_second < 1e13
    assert least < bandwidth.in_bytes_per_second < 1e13
    assert engine.memory_in_use() == {"disk": 0}


def test_parts_of_a_visible_slot_are_copied_by_themselves(tmp_path):
    """Also with lengths that direct transfers round up: the part behind is not touched."""
    engine = HostEngine(directory=tmp_path)
    slot, view = engine.allocate_visible(12288 + 10, "disk")
    parts = [(0, 4096), (4096, 4000), (8192, 4096), (12288, 10)]
    for number in (3, 2, 1, 0):
        source = torch.full((parts[number][1],), number + 1, dtype=torch.uint8)
        engine.copy_out(source.untyped_storage(), engine.part_of(slot, *parts[number]))
    engine.wait(Lane.COMPUTE, engine.record(Lane.OUT))
    for number, (start, nbytes) in enumerate(parts):
        assert (view[start : start + nbytes] == number + 1).all()
        target = engine.new_buffer(nbytes, torch.device("cpu"))
        engine.copy_in(engine.part_of(slot, start, nbytes), target)
        engine.wait(Lane.COMPUTE, engine.record(Lane.IN))
        assert (byte_view(target) == number + 1).all()
    engine.free(slot)
    engine.close()


def test_a_visible_slot_shows_the_file(tmp_path):
    engine = HostEngine(directory=tmp_path)
    slot, view = engine.allocate_visible(10_000, "disk")
    source = torch.arange(10_000).to(torch.uint8)
    engine.copy_out(source.untyped_storage(), slot)
    engine.wait(Lane.COMPUTE, engine.record(Lane.OUT))
    assert torch.equal(view, source)
    view[:4] = 7
    target = engine.new_buffer(10_000, torch.device("cpu"))
    engine.copy_in(slot, target)
    engine.wait(Lane.COMPUTE, engine.record(Lane.IN))
    assert torch.equal(byte_view(target), view)
    engine.free(slot)
    engine.close()
