"""The accelerator engine on a real device. Run where there is one; `test_accelerator_order.py` covers the logic."""

from __future__ import annotations

import gc
import threading
import time

import pytest
import torch

from benchmarks.device_sizes import Sizes, sizes_of
from lowtide.engines.accelerator import AcceleratorEngine
from lowtide.engines.base import Lane
from lowtide.engines.tiers.disk import DiskTier
from lowtide.errors import TierFull
from lowtide.tensors.view import byte_view

pytestmark = pytest.mark.gpu
MIB = 2**20


@pytest.fixture
def device():
    kind = torch.accelerator.current_accelerator()
    return torch.device(kind.type, torch.accelerator.current_device_index())


@pytest.fixture
def engine(device, tmp_path):
    made = AcceleratorEngine(device, 512 * MIB, DiskTier(tmp_path))
    yield made
    made.close()


@pytest.fixture(scope="module")
def sizes() -> Sizes:
    kind = torch.accelerator.current_accelerator()
    return sizes_of(torch.device(kind.type, torch.accelerator.current_device_index()))


class Busy:
    """Keeps the current stream busy with plain matmuls, for about as long as asked."""

    def __init__(self, device: torch.device, side: int) -> None:
        self.factor = torch.randn(side, side, device=device)
        self.result = torch.empty_like(self.factor)
        self.num_per_second = 0.0
        self.run(5)
        torch.accelerator.synchronize(device)
        start = time.perf_counter()
        self.run(50)
        torch.accelerator.synchronize(device)
        self.num_per_second = 50 / (time.perf_counter() - start)

    def run(self, num_matmuls: int) -> None:
        for _ in range(num_matmuls):
            torch.mm(self.factor, self.factor, out=self.result)

    def seconds(self, seconds: float) -> None:
        self.run(max(1, int(seconds * self.num_per_second)))


@pytest.fixture
def busy(device, sizes):
    return Busy(device, min(sizes.side, 2048))


def send(engine: AcceleratorEngine, tensor: torch.Tensor, tier: str = "host"):
    slot = engine.allocate(tensor.untyped_storage().nbytes(), tier)
    engine.wait(Lane.OUT, engine.record(Lane.COMPUTE))
    engine.copy_out(tensor.untyped_storage(), slot)
    return slot, engine.record(Lane.OUT)


def fetch(engine: AcceleratorEngine, slot, left, device: torch.device):
    buffer = engine.new_buffer(slot.nbytes, device)
    engine.wait(Lane.IN, engine.record(Lane.COMPUTE))
    engine.wait(Lane.IN, left)
    engine.copy_in(slot, buffer)
    return buffer, engine.record(Lane.IN)


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("nbytes", [0, 1, 4097, 8 * MIB, 70 * MIB + 3])
def test_bytes_come_back(engine, device, tier, nbytes):
    original = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=device)
    slot, left = send(engine, original, tier)
    buffer, arrival = fetch(engine, slot, left, device)
    engine.wait(Lane.COMPUTE, arrival)
    assert torch.equal(byte_view(buffer), original)
    assert engine.failure(left) is None
    assert engine.failure(arrival) is None
    engine.free(slot)
    assert engine.memory_in_use() == {"host": 0, "disk": 0}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.bool, torch.complex64])
def test_dtypes_and_views_are_no_concern(engine, device, dtype):
    base = torch.arange(10_000, device=device).to(dtype)
    view = base.view(100, 100).t()[3:]
    slot, left = send(engine, view)
    buffer, arrival = fetch(engine, slot, left, device)
    engine.wait(Lane.COMPUTE, arrival)
    again = torch.empty(0, dtype=dtype, device=device).set_(buffer, view.storage_offset(), view.shape, view.stride())
    assert torch.equal(again, view)


def test_slabs_are_pinned(engine):
    slot = engine.allocate(MIB, "host")
    assert all(piece.is_pinned() for piece in slot.place.ranges())
    assert all(piece.data_ptr() % 4096 == 0 for piece in slot.place.ranges())


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_copy_waits_for_the_kernel_that_makes_the_data(engine, device, busy, tier):
    data = torch.zeros(32 * MIB, dtype=torch.uint8, device=device)
    busy.seconds(0.2)
    data.fill_(7)
    slot, left = send(engine, data, tier)
    if tier == "host":  # a copy to disk is the worker's, who may be quick on a device that computes at once
        assert not engine.query(left)
    buffer, arrival = fetch(engine, slot, left, device)
    engine.wait(Lane.COMPUTE, arrival)
    assert bool((byte_view(buffer) == 7).all())


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_memory_may_be_reused_after_the_wait(engine, device, sizes, tier):
    ahead = torch.zeros(sizes.copy_bytes, dtype=torch.uint8, device=device)
    data = torch.full((32 * MIB,), 1, dtype=torch.uint8, device=device)
    _, _ = send(engine, ahead)  # keeps the lane busy, so that the copy that matters is late
    slot, left = send(engine, data, tier)
    address = data.data_ptr()
    engine.wait(Lane.COMPUTE, left)
    del data
    other = torch.full((32 * MIB,), 2, dtype=torch.uint8, device=device)
    assert other.data_ptr() == address, "the allocator did not reuse the block: the test shows nothing"
    buffer, arrival = fetch(engine, slot, left, device)
    engine.wait(Lane.COMPUTE, arrival)
    assert bool((byte_view(buffer) == 1).all())


def test_a_fetch_waits_for_the_kernels_that_still_use_its_memory(engine, device, busy):
    data = torch.full((32 * MIB,), 3, dtype=torch.uint8, device=device)
    slot, left = send(engine, data)
    torch.accelerator.synchronize(device)
    old = torch.full((32 * MIB,), 5, dtype=torch.uint8, device=device)
    busy.seconds(0.2)
    late_copy = old.clone()  # runs after the busy kernels, and reads the memory that is freed now
    address = old.data_ptr()
    del old
    buffer, arrival = fetch(engine, slot, left, device)
    assert buffer.data_ptr() == address, "the allocator did not reuse the block: the test shows nothing"
    engine.wait(Lane.COMPUTE, arrival)
    assert bool((byte_view(buffer) == 3).all())
    assert bool((late_copy == 5).all())


def test_compute_is_the_callers_stream(engine, device, busy):
    stream = torch.Stream(device)
    before = torch.accelerator.current_stream(device)
    with stream:
        data = torch.zeros(8 * MIB, dtype=torch.uint8, device=device)
        Busy.seconds(busy, 0.1)
        data.fill_(9)
        slot, left = send(engine, data)
        buffer, arrival = fetch(engine, slot, left, device)
        engine.wait(Lane.COMPUTE, arrival)
        assert bool((byte_view(buffer) == 9).all())
        assert torch.accelerator.current_stream(device) == stream
    assert torch.accelerator.current_stream(device) == before


def test_calls_from_several_threads_while_workers_share_the_streams(engine, device):
    lock = threading.RLock()  # the runtime's lock
    wrong: list[str] = []

    def swap(value: int) -> None:
        try:
            torch.accelerator.set_device_index(device.index)
            for round_index in range(10):
                data = torch.full((3 * MIB,), value, dtype=torch.uint8, device=device)
                with lock:
                    slot, left = send(engine, data, engine.tiers[round_index % 2])
                    buffer, arrival = fetch(engine, slot, left, device)
                    engine.wait(Lane.COMPUTE, arrival)
                if not bool((byte_view(buffer) == value).all()):
                    wrong.append(f"{value} in round {round_index}")
        except BaseException as error:
            wrong.append(repr(error))

    threads = [threading.Thread(target=swap, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_stalls_are_measured(engine, device, sizes, busy):
    data = torch.zeros(sizes.copy_bytes, dtype=torch.uint8, device=device)
    torch.accelerator.synchronize(device)
    before = engine.stall_seconds()
    start = engine.mark_time()
    _, left = send(engine, data)
    assert engine.wait(Lane.COMPUTE, left) == 0.0
    end = engine.mark_time()
    torch.accelerator.synchronize(device)
    took = engine.seconds_between(start, end)
    stalled = engine.stall_seconds() - before
    assert 0.5 * took < stalled < 1.01 * took
    _, left = send(engine, data[:MIB].clone())
    busy.seconds(0.3)  # far longer than the copy
    engine.wait(Lane.COMPUTE, left)
    torch.accelerator.synchronize(device)
    assert engine.stall_seconds() - before - stalled < 1e-3


def test_the_host_cap_is_the_end(device):
    engine = AcceleratorEngine(device, 8 * MIB)
    engine.allocate(6 * MIB, "host")
    with pytest.raises(TierFull):
        engine.allocate(4 * MIB, "host")
    engine.close()


def test_bandwidth_is_plausible(engine):
    measured = engine.probe_bandwidth(64 * MIB)
    for bytes_per_second in (measured.out_bytes_per_second, measured.in_bytes_per_second):
        assert 1e8 < bytes_per_second < 2e12
    assert engine.memory_in_use()["host"] == 0


def test_the_peak_counts_fetch_buffers(engine, device):
    gc.collect()
    engine.reset_device_peak()
    before = engine.device_peak_bytes()
    buffer = engine.new_buffer(64 * MIB, device)
    assert engine.device_peak_bytes() - before == 64 * MIB
    del buffer


def test_a_thousand_swaps_leave_nothing_behind(engine, device):
    data = torch.full((MIB,), 1, dtype=torch.uint8, device=device)

    def device_bytes() -> int:
        gc.collect()
        torch.accelerator.synchronize(device)
        return torch.get_device_module(device).memory_allocated(device)

    for step in range(1000):
        slot, left = send(engine, data, "disk" if step % 50 == 0 else "host")
        buffer, arrival = fetch(engine, slot, left, device)
        engine.wait(Lane.COMPUTE, arrival)
        byte_view(buffer).add_(1)
        del buffer
        torch.accelerator.synchronize(device)
        assert engine.query(left)
        assert engine.query(arrival)
        engine.free(slot)
        if step == 10:
            before = device_bytes()
    assert device_bytes() == before
    assert engine.memory_in_use() == {"host": 0, "disk": 0}
    assert len(engine.leftovers) == 0
    assert len(engine._stalls._pairs) + len(engine._stalls._pool) < 100
