"""The scheduler: how much is under way at a time, and what happens where a fetch finds no room."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from lowtide.engines.accelerator import AcceleratorEngine
from lowtide.engines.host import HostEngine
from lowtide.runtime.offload.scheduler import OffloadScheduler
from lowtide.runtime.offload.site import PrefetchQueue
from lowtide.tensors.view import part_of
from tests.engines.sim_device import SimDevice
from tests.support import zoo
from tests.support.virtual_engine import VirtualEngine

WIDTH = 64
SITE_BYTES = WIDTH * WIDTH * 4
NUM_SITES = 24
SWAP = {"swap": "all", "min_bytes": 0}
FAR = {"swap": [{"match": "*", "prefetch": 1000}], "min_bytes": 0}


class Waves(nn.Module):
    """cos(cos(...)): one site an operator, all of one size."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.weight + x
        for _ in range(NUM_SITES):
            y = y.cos()
        return y


X = torch.linspace(-1, 1, WIDTH)


def truth() -> Tensor:
    model = Waves()
    model(X).sum().backward()
    assert model.weight.grad is not None
    return model.weight.grad


def applied(memory: dict, engine: Any) -> tuple[nn.Module, lowtide.Tide]:
    model = Waves()
    tide = lowtide.apply(model, memory, engine=engine)
    model(X).sum().backward()
    model.zero_grad(set_to_none=True)
    tide.settle()
    return model, tide


@pytest.mark.parametrize("seed", range(6))
def test_fetches_ahead_of_need_stay_within_the_window(seed: int) -> None:
    model, tide = applied(SWAP, VirtualEngine(seed))
    tide._scheduler.window.min_bytes = 0
    loss = model(X).sum()
    tide.settle()
    tide._scheduler.ledger.restart_peak()
    assert tide._scheduler.ledger.now_bytes == 0
    loss.backward()
    # Two ahead, one that is being read, and one that its reader has just let go of.
    assert 2 * SITE_BYTES <= tide._scheduler.ledger.peak_bytes <= 4 * SITE_BYTES
    assert zoo.same_bits(model.weight.grad, truth())
    tide.remove()


@pytest.mark.parametrize("seed", range(6))
def test_copies_out_stay_within_the_window(seed: int) -> None:
    model, tide = applied(SWAP, VirtualEngine(seed))
    tide._scheduler.window.min_bytes = 0
    tide._scheduler.ledger.restart_peak()
    loss = model(X).sum()
    # Two leaving, one that is about to, one that its operator is making.
    assert tide._scheduler.ledger.peak_bytes <= 4 * SITE_BYTES
    loss.backward()
    assert zoo.same_bits(model.weight.grad, truth())
    tide.remove()


def test_what_is_small_goes_in_one_piece() -> None:
    model, tide = applied(SWAP, VirtualEngine(0))
    assert tide._scheduler.window.nbytes() == 16 * 2**20
    model(X).sum().backward()
    assert tide._scheduler.ledger.peak_bytes > 8 * SITE_BYTES
    tide.remove()


def test_a_part_with_a_counter_of_its_own_is_no_site_of_another_part() -> None:
    """Both halves are of one storage and at version 0: a copy of it for the one may be older than the other."""
    scheduler, whole = OffloadScheduler(VirtualEngine(0)), torch.ones(4, 8)
    storage, (one, other) = whole.untyped_storage(), whole.unsafe_chunk(2, 1)
    site = scheduler.enroll(PrefetchQueue(), storage, 0, None, part_of(one))
    assert scheduler.find(storage, 0, part_of(one)) is site
    assert scheduler.find(storage, 0, part_of(one[:1])) is site  # a view of that half has its counter
    assert scheduler.find(storage, 0, part_of(other)) is None
    assert scheduler.find(storage, 0, part_of(whole)) is None


def test_fetches_that_start_together_come_in_the_order_of_need() -> None:
    """A storage that was saved first may be saved again last (positions of a rotation, say): it is needed first."""
    scheduler, queue = OffloadScheduler(VirtualEngine(0)), PrefetchQueue()
    needs, start = (30, 10, 20), 30
    storages = [torch.ones(4).untyped_storage() for _ in needs]
    sites = [scheduler.enroll(queue, storage, 0, start + 1 - need, None) for storage, need in zip(storages, needs)]
    for site, need in zip(sites, needs, strict=True):
        site.last_use = need
    queue.arrange()
    assert queue.is_timed and {site.start_at for site in sites} == {start}
    order = [reference().last_use for reference in reversed(queue.sites)]  # type: ignore[union-attr]
    assert order == [30, 20, 10]


# -- no room --------------------------------------------------------------------------------------------------------


def tight(num_buffers: int, policy: str | int) -> tuple[SimDevice, AcceleratorEngine]:
    device = SimDevice(policy, computes_on_host=True)
    device.room_bytes = num_buffers * SITE_BYTES
    return device, AcceleratorEngine(device.device, 64 * 2**20, ops=device)


@pytest.mark.parametrize("policy", ["late", "early", 1, 2])
@pytest.mark.parametrize("memory", [SWAP, FAR], ids=["window", "distance"])
def test_a_fetch_ahead_of_need_without_room_is_given_up(memory: dict, policy: str | int) -> None:
    device, engine = tight(3, policy)
    model, tide = applied(memory, engine)
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        loss = model(X).sum()
        tide.settle()
        loss.backward()
        assert zoo.same_bits(model.weight.grad, truth())
    del loss
    tide.settle()
    assert (device.given_bytes, tide._scheduler.num_open(), tide._scheduler.ledger.now_bytes) == (0, 0, 0)
    tide.remove()
    engine.close()


class Branches(nn.Module):
    """Two chains from one weight. One saves a large site first and small ones last; between them the other saves small
    ones, which a backward of the first chain alone passes by."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        start = self.weight + x
        wanted = start.cos()
        other = start[: WIDTH // 4] * 1
        for _ in range(5):
            other = other.cos()
        wanted = wanted[: WIDTH // 4] * 1
        for _ in range(2):
            wanted = wanted.cos()
        return wanted.sum(), other.sum()


@pytest.mark.parametrize("policy", ["late", "early", 1, 2])
def test_what_was_fetched_ahead_makes_room_for_a_reader_that_is_there(policy: str | int) -> None:
    device, engine = tight(1, policy)
    twin, model = Branches(), Branches()
    (wanted,) = torch.autograd.grad(twin(X)[0], twin.weight)
    with lowtide.apply(model, SWAP, engine=engine) as tide:
        sum(model(X)).backward()
        first, _ = losses = model(X)
        tide.settle()
        # Its small sites leave room for what is next on the queue: the other chain's, which nobody will read.
        (found,) = torch.autograd.grad(first, model.weight, retain_graph=True)
        assert zoo.same_bits(found, wanted)
        model.zero_grad(set_to_none=True)
        sum(losses).backward()
        twin.zero_grad(set_to_none=True)
        sum(twin(X)).backward()
        assert zoo.same_bits(model.weight.grad, twin.weight.grad)
        del first, losses, _
        tide.settle()
        assert (device.given_bytes, tide._scheduler.num_open(), tide._scheduler.ledger.now_bytes) == (0, 0, 0)
    engine.close()


def test_a_reader_without_any_room_fails_as_out_of_memory() -> None:
    device, engine = tight(3, "early")
    model, tide = applied(SWAP, engine)
    loss = model(X).sum()
    tide.settle()
    device.room_bytes = 0
    with pytest.raises(torch.OutOfMemoryError, match=f"0 of 0 given, {SITE_BYTES} more wanted"):
        loss.backward(retain_graph=True)
    device.room_bytes = SITE_BYTES
    loss.backward()
    assert zoo.same_bits(model.weight.grad, truth())
    tide.remove()
    engine.close()


def test_bytes_that_cannot_be_read_back_are_an_error_never_a_gradient(tmp_path: Path) -> None:
    engine = HostEngine(tmp_path)
    read, failing = engine.disk.read, []

    def read_or_fail(offset: int, address: int, nbytes: int) -> None:
        if failing:
            raise OSError(5, "Input/output error")
        read(offset, address, nbytes)

    engine.disk.read = read_or_fail  # type: ignore[method-assign]
    model, tide = applied(SWAP, engine)
    loss = model(X).sum()
    tide.settle()
    failing.append(True)
    with pytest.raises(RuntimeError) as caught:
        loss.backward()
    assert str(caught.value) == (
        f"lowtide: a swapped activation of {SITE_BYTES} bytes could not be read back from tier 'disk': "
        "[Errno 5] Input/output error"
    )
    assert model.weight.grad is None
    tide.remove()
    engine.close()


def test_what_could_not_be_written_counts_as_kept_and_not_as_swapped(tmp_path: Path) -> None:
    engine = HostEngine(tmp_path)

    def fail(offset: int, address: int, nbytes: int) -> None:
        raise OSError(28, "No space left on device")

    engine.disk.write = fail  # type: ignore[method-assign]

    def forward() -> tuple[Any, Any, torch.Tensor]:
        model, tide = applied(SWAP, engine)
        tide.reset_stats()
        loss = model(X).sum()
        tide.settle()  # on a busy machine the backward pass before may have come ahead of the disk's failure
        return model, tide, loss

    with pytest.warns(UserWarning, match="writing an activation to a slower tier failed"):
        model, tide, loss = forward()
    stats = tide.stats
    assert (stats.swapped_bytes, stats.kept_bytes) == (0, NUM_SITES * SITE_BYTES)
    assert (stats.num_kept_for_lack_of_room, stats.copied_out_bytes) == (NUM_SITES, 0)
    loss.backward()
    assert zoo.same_bits(model.weight.grad, truth())
    tide.remove()
    engine.close()


def test_a_written_distance_counts_operators() -> None:
    """One site without a distance among many with one: each keeps its own word."""
    memory = {"swap": [{"match": "*", "prefetch": 1}, "add"], "min_bytes": 0}
    model, tide = applied(memory, VirtualEngine(0))
    loss = model(X).sum()
    tide.settle()
    tide._scheduler.ledger.restart_peak()
    loss.backward()
    # What is being read, what comes one operator later, and what somebody has just let go of.
    assert 2 * SITE_BYTES <= tide._scheduler.ledger.peak_bytes <= 4 * SITE_BYTES
    assert zoo.same_bits(model.weight.grad, truth())
    tide.remove()


@pytest.mark.parametrize("seed", range(3))
def test_with_a_graph_that_stays_each_site_goes_with_its_last_reader(seed: int) -> None:
    model, tide = applied(SWAP, VirtualEngine(seed))
    tide._scheduler.window.min_bytes = 0
    loss = model(X).sum()
    tide.settle()
    for _ in range(2):
        tide._scheduler.ledger.restart_peak()
        loss.backward(retain_graph=True)
        assert tide._scheduler.ledger.peak_bytes <= 4 * SITE_BYTES
        assert tide._scheduler.ledger.now_bytes == 0
    tide.remove()


def test_what_was_fetched_ahead_and_not_read_goes_with_its_backward() -> None:
    model = Branches()
    with lowtide.apply(model, SWAP, engine=VirtualEngine(1)) as tide:
        sum(model(X)).backward()
        first, other = model(X)
        tide.settle()
        torch.autograd.grad(first, model.weight, retain_graph=True)
        assert tide._scheduler.ledger.now_bytes == 0
        assert other is not None


def test_where_one_tier_is_full_the_next_one_is_taken() -> None:
    model, tide = applied(SWAP, VirtualEngine(0, host_bytes=2 * SITE_BYTES))
    loss = model(X).sum()
    tide.settle()
    assert (tide.stats.host_bytes, tide.stats.disk_bytes) == (2 * SITE_BYTES, (NUM_SITES - 2) * SITE_BYTES)
    assert tide.stats.num_kept_for_lack_of_room == 0
    loss.backward()
    assert zoo.same_bits(model.weight.grad, truth())
    tide.remove()


def test_a_copy_that_was_cancelled_gives_its_slot_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = HostEngine(tmp_path)
    has_begun, may_write, write = threading.Event(), threading.Event(), engine.disk.write

    def held(*place: int) -> None:
        has_begun.set()
        may_write.wait(120)
        write(*place)

    monkeypatch.setattr(engine.disk, "write", held)
    model = Waves()
    with lowtide.apply(model, SWAP, engine=engine) as tide:
        loss = model(X).sum()
        assert has_begun.wait(120)
        loss.backward()
        # One copy has begun; backward overtook all others.
        assert tide.stats.disk_bytes == SITE_BYTES
        may_write.set()
        del loss
        tide.settle()
        assert tide.stats.disk_bytes == 0
        assert tide.stats.copied_out_bytes == SITE_BYTES
    assert zoo.same_bits(model.weight.grad, truth())
    engine.close()


def test_what_the_program_holds_is_not_fetched() -> None:
    held: list[Tensor] = []

    class Held(Waves):
        def forward(self, x: Tensor) -> Tensor:
            y = self.weight + x
            for _ in range(NUM_SITES):
                held.append(y.detach())
                y = y.cos()
            return y

    model = Held()
    with lowtide.apply(model, SWAP, engine=VirtualEngine(0)) as tide:
        loss = model(X).sum()
        tide.settle()
        loss.backward()
        assert (tide.stats.copied_in_bytes, tide.stats.aliased_bytes) == (0, NUM_SITES * SITE_BYTES)
    assert zoo.same_bits(model.weight.grad, truth())


class Noisy(nn.Module):
    """Its operator saves its input, then the noise, and draws the noise after that."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, WIDTH * WIDTH).reshape(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.weight + x
        for _ in range(3):
            y = F.rrelu(y, training=True).sin()
        return y


@pytest.mark.parametrize("seed", range(3))
def test_what_is_saved_before_it_is_filled_is_sent_after(seed: int) -> None:
    found = []
    for plan in (None, SWAP, {**SWAP, "swap": "none"}):
        model = Noisy()
        tide = None if plan is None else lowtide.apply(model, plan, engine=VirtualEngine(seed))
        if tide is not None and plan is not SWAP:
            tide.set_limit(0)
        for step in range(2):
            torch.manual_seed(step)
            model.zero_grad(set_to_none=True)
            model(X).sum().backward()
        found.append(model.weight.grad)
        if tide is not None:
            assert tide.engine.violations == []
            tide.remove()
    assert zoo.same_bits(found[1], found[0]) and zoo.same_bits(found[2], found[0])
