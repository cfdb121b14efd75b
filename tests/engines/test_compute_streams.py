"""Several compute streams: whichever one saves, sends, reads or frees, on simulated streams under every interleaving.

Memory is that of `SimDevice`: a block whose storage dies is poisoned as soon as its own stream gets to it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from random import Random

import pytest

from lowtide.engines import accelerator
from lowtide.engines.accelerator import AcceleratorEngine
from lowtide.engines.base import Lane
from lowtide.engines.tiers.disk import padded
from lowtide.runtime.offload.scheduler import OffloadScheduler
from lowtide.runtime.offload.site import OffloadedStorage, PrefetchQueue
from tests.engines.sim_device import SimDevice, SimStream

POLICIES = ["late", "early", *range(16)]
NBYTES = 20_000
MIB = 2**20


class Rig:
    """A scheduler on a simulated device; forward and backward passes by hand."""

    def __init__(self, policy: str | int, num_streams: int = 2) -> None:
        self.device = SimDevice(policy)
        self.streams = [self.device.compute, *(self.device.new_stream() for _ in range(num_streams - 1))]
        self.engine = AcceleratorEngine(self.device.device, 64 * MIB, ops=self.device)
        self.scheduler = OffloadScheduler(self.engine)
        self.queue = PrefetchQueue()
        self.are_right: list[bool] = []
        self.made_at: dict[int, int] = {}

    def on(self, stream: SimStream) -> None:
        self.device.current = stream

    def save(self, value: int) -> OffloadedStorage:
        """The operator of the current stream saves a tensor, and fills it after."""
        storage = self.engine.new_buffer(NBYTES, self.device.device)
        site = self.scheduler.enroll(self.queue, storage, 0, None, None)
        site.num_readers = 1
        address = self.made_at[id(site)] = storage.data_ptr()
        self.device.current.launch(lambda: ctypes.memset(address, value, NBYTES))
        return site

    def read(self, site: OffloadedStorage, value: int) -> None:
        """An operator of the current stream reads it, and lets it go. As in plain PyTorch, the program orders a stream
        that reads the memory of another one, before and after."""
        owner, reader = site.stream, self.device.current
        self._order(owner, reader)
        storage = site.read()
        address, wanted = storage.data_ptr(), bytes([value]) * NBYTES
        reader.launch(lambda: self.are_right.append(ctypes.string_at(address, NBYTES) == wanted))
        if address == self.made_at[id(site)]:
            self._order(reader, owner)

    def _order(self, first: SimStream, then: SimStream) -> None:
        if first is not then:
            event = self.device.new_event()
            event.record(first)
            then.wait_event(event)

    def finish(self) -> None:
        self.device.drain()
        self.scheduler.settle()
        self.device.drain()
        assert self.engine.memory_in_use() == {"host": 0}
        assert (self.scheduler.num_open(), self.scheduler.ledger.now_bytes) == (0, 0)
        self.engine.close()


@pytest.fixture(params=POLICIES)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    made = Rig(request.param)
    yield made
    made.device.drain()
    assert made.are_right and all(made.are_right)
    made.finish()


def test_what_one_stream_saves_is_sent_while_another_is_current(rig: Rig) -> None:
    first, second = rig.streams
    rig.on(first)
    site = rig.save(7)
    rig.on(second)
    rig.scheduler.start_offload(site, None)
    rig.scheduler.retire(0)
    rig.read(site, 7)


def test_memory_goes_back_to_its_stream_only_after_the_copy(rig: Rig) -> None:
    first, second = rig.streams
    rig.on(first)
    site = rig.save(7)
    rig.scheduler.start_offload(site, None)
    rig.on(second)
    rig.scheduler.retire(0)  # the last holder of the source lets go of it, and its own stream reuses the block
    assert site.copy.source is None
    rig.on(first)
    rig.read(site, 7)


def test_settling_on_another_stream(rig: Rig) -> None:
    first, second = rig.streams
    rig.on(second)
    site = rig.save(7)
    rig.scheduler.start_offload(site, None)
    rig.on(first)
    rig.scheduler.settle()
    rig.on(second)
    rig.read(site, 7)


def test_a_fetch_ahead_takes_no_memory_of_the_wrong_stream(rig: Rig) -> None:
    sites = []
    for number, stream in enumerate(rig.streams * 2):
        rig.on(stream)
        sites.append(rig.save(number + 1))
        rig.scheduler.start_offload(sites[-1], None)
    rig.scheduler.retire(0)
    for number, stream in reversed(list(enumerate(rig.streams * 2))):
        rig.on(stream)
        rig.read(sites[number], number + 1)


def test_two_streams_read_one_site(rig: Rig) -> None:
    first, second = rig.streams
    rig.on(first)
    site = rig.save(7)
    site.num_readers = 3
    rig.scheduler.start_offload(site, None)
    rig.scheduler.retire(0)
    for stream in (second, first, second):
        rig.on(stream)
        rig.read(site, 7)


@pytest.mark.parametrize("seed", range(60))
def test_any_order_of_anything(seed: int) -> None:
    draw = Random(seed)
    rig = Rig(draw.choice(["late", "early", seed]), num_streams=3)
    for _ in range(3):
        sites: list[tuple[OffloadedStorage, int]] = []
        waiting: list[OffloadedStorage] = []
        for number in range(8):
            rig.on(draw.choice(rig.streams))
            sites.append((rig.save(number + 1), number + 1))
            waiting.append(sites[-1][0])
            if draw.random() < 0.7:
                rig.on(draw.choice(rig.streams))
            while waiting and draw.random() < 0.7:
                rig.scheduler.start_offload(waiting.pop(0), None)
            if draw.random() < 0.3:
                rig.scheduler.retire(draw.choice([0, NBYTES]))
        for site in waiting:
            rig.scheduler.start_offload(site, None)
        rig.queue = PrefetchQueue()
        if draw.random() < 0.5:
            draw.shuffle(sites)
        while sites:
            site, value = sites.pop()
            rig.on(site.stream if draw.random() < 0.7 else draw.choice(rig.streams))
            rig.read(site, value)
            del site
    waiting.clear()
    assert len(rig.are_right) <= 24
    rig.device.drain()
    assert rig.are_right == [True] * 24
    rig.finish()


def test_one_stream_alone_never_blocks_the_caller() -> None:
    rig = Rig("late")
    rig.on(rig.streams[0])
    site = rig.save(7)
    rig.scheduler.start_offload(site, None)
    rig.scheduler.retire(0)
    assert not rig.engine.query(site.copy.event)  # nothing has run yet, and the source is gone
    assert site.copy.source is None
    rig.read(site, 7)
    assert rig.scheduler.counters.stall_seconds == 0.0
    del site
    rig.finish()


def test_a_recording_of_the_compute_lane_is_one_of_every_stream() -> None:
    rig = Rig("late")
    for stream in rig.streams:
        rig.on(stream)
        rig.engine.compute_stream()
    rig.streams[0].launch(lambda: None)
    event = rig.engine.record(Lane.COMPUTE)
    rig.streams[1].synchronize()
    assert not rig.engine.query(event)
    rig.streams[0].synchronize()
    assert rig.engine.query(event)


def test_a_slot_stays_until_the_copies_from_it_are_complete() -> None:
    rig = Rig("late")
    sites = [rig.save(value) for value in (1, 2)]
    for site in sites:
        rig.scheduler.start_offload(site, None)
    rig.device.drain()
    rig.scheduler.retire(0)
    sites[1].read()  # fetches the other one, too; nothing of it has run
    del site, sites
    last = rig.save(3)
    rig.scheduler.start_offload(last, None)
    assert rig.engine.memory_in_use() == {"host": 3 * rig_block_bytes()}
    rig.device.drain()
    rig.scheduler.retire(0)
    rig.read(last, 3)
    del last
    rig.finish()
    assert rig.are_right == [True]


@pytest.mark.parametrize("is_read", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_settling_waits_for_every_copy(seed: int, is_read: bool) -> None:
    rig = Rig(seed)
    sites = [rig.save(value) for value in (1, 2, 3)]
    for site in sites:
        rig.scheduler.start_offload(site, None)
    if is_read:
        rig.scheduler.retire(0)
        sites[-1].read()
        rig.scheduler.settle()  # also what a graph that is alive has fetched ahead
        assert not any(lane.stream.queue for lane in rig.engine._lanes.values())
    del site, sites
    rig.scheduler.settle()
    assert not any(lane.stream.queue for lane in rig.engine._lanes.values())
    assert rig.device.given_bytes == 0
    assert rig.engine.memory_in_use() == {"host": 0}
    rig.engine.close()


@pytest.mark.parametrize("direction", ["out", "in"])
def test_a_copy_that_could_only_be_begun_keeps_what_it_uses(direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "COPY_BYTES", NBYTES // 2)
    rig = Rig("late")
    site = rig.save(7)
    if direction == "in":
        rig.scheduler.start_offload(site, None)
        rig.device.drain()
        rig.scheduler.retire(0)
        assert rig.device.given_bytes == 0
    rig.device.copies_left = 1
    with pytest.raises(RuntimeError, match="the device refuses to copy"):
        rig.scheduler.start_offload(site, None) if direction == "out" else site.read()
    rig.device.copies_left = 10**9
    del site
    # The graph is gone; half of the copy is under way. An ordinary call gives back what nobody uses.
    last = rig.save(3)
    rig.scheduler.start_offload(last, None)
    assert rig.engine.memory_in_use() == {"host": 2 * rig_block_bytes()}
    assert rig.device.given_bytes == 2 * NBYTES
    rig.device.drain()
    rig.scheduler.retire(0)
    rig.read(last, 3)
    del last
    rig.finish()
    assert rig.device.given_bytes == 0
    assert rig.are_right == [True]


def test_a_mover_that_goes_leaves_what_is_under_way_to_the_engine() -> None:
    """A graph that fails in backward, after its plan was replaced: buffers are being filled, and nobody is left."""
    rig = Rig("late")
    sites = [rig.save(value) for value in (1, 2)]
    for site in sites:
        rig.scheduler.start_offload(site, None)
    rig.scheduler.retire(0)
    assert rig.device.given_bytes == 0
    sites[1].read()
    assert sites[0].copy.buffer is not None  # fetched ahead, and never read
    del site, sites
    rig.scheduler = OffloadScheduler(rig.engine)
    assert rig.device.given_bytes == NBYTES  # the copy is not done: nobody else may have that memory
    assert rig.engine.memory_in_use() == {"host": 2 * rig_block_bytes()}
    rig.scheduler.start_offload(rig.save(3), None)  # looks after it, and finds that it is not over
    assert rig.engine.memory_in_use() == {"host": 3 * rig_block_bytes()}
    assert rig.device.given_bytes == 2 * NBYTES
    rig.device.drain()
    rig.scheduler.settle()
    assert len(rig.engine.leftovers) == 0
    assert rig.device.given_bytes == 0
    assert rig.engine.memory_in_use() == {"host": 0}
    rig.engine.close()


def rig_block_bytes() -> int:
    """Of the arena for one storage."""
    return padded(NBYTES)


def test_a_graph_without_a_tide_gives_its_slots_back_to_a_shared_engine() -> None:
    rig = Rig("early")
    site = rig.save(7)
    rig.scheduler.start_offload(site, None)
    rig.scheduler.close()
    rig.scheduler = OffloadScheduler(rig.engine)  # the next plan's; the old one lives with its site
    assert rig.engine.memory_in_use()["host"] >= NBYTES
    del site
    rig.scheduler.settle()
    assert rig.engine.memory_in_use() == {"host": 0}
    rig.engine.close()
