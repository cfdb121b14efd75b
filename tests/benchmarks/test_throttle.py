"""A throttled link takes the time of a slow one, and moves the same bytes."""

from __future__ import annotations

import pytest
import torch

from benchmarks.throttle import ThrottledEngine
from lowtide.engines.base import Lane
from lowtide.engines.host import HostEngine
from tests.engines.clocked import ClockedEngine
from tests.support.grid import one_of

CPU = torch.device("cpu")
MIB = 2**20


def filled(nbytes: int, value: int) -> torch.UntypedStorage:
    return torch.full((nbytes,), value, dtype=torch.uint8).untyped_storage()


def tensor(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


@pytest.mark.parametrize("rate", [5e9, 8e9, 19e9])
def test_copies_take_what_the_slow_link_would_take(rate: float) -> None:
    inner = ClockedEngine(out_bytes_per_second=20e9, in_bytes_per_second=40e9)
    engine = ThrottledEngine(inner, rate, CPU)
    assert engine.is_slower
    slot = engine.allocate(10 * MIB, "host")
    # The clock of the inner engine counts its own copies; what was copied before does not.
    starts = {lane: inner.record(lane).at for lane in (Lane.OUT, Lane.IN)}
    for _ in range(3):
        engine.copy_out(filled(10 * MIB, 1), slot)
        engine.copy_in(slot, torch.UntypedStorage(10 * MIB))
    for lane, start in starts.items():
        assert inner.record(lane).at - start == pytest.approx(30 * MIB / rate, rel=1e-4), lane


def test_a_link_that_is_slow_already_is_left_alone() -> None:
    inner = ClockedEngine(out_bytes_per_second=1e9, in_bytes_per_second=1e9)
    engine = ThrottledEngine(inner, 2e9, CPU)
    assert not engine.is_slower
    assert inner.memory_in_use() == {"host": 0}
    engine.copy_out(filled(MIB, 1), engine.allocate(MIB, "host"))
    assert inner.record(Lane.OUT).at == pytest.approx(MIB / 1e9)
    assert engine.probe_bandwidth(MIB).out_bytes_per_second == 1e9


def test_bytes_arrive_and_scratch_is_not_counted() -> None:
    engine = ThrottledEngine(HostEngine(), 1e8, CPU)
    try:
        assert engine.memory_in_use() == {"disk": 0}
        slot = engine.allocate(3 * MIB, "disk")
        engine.copy_out(filled(3 * MIB, 7), slot)
        engine.wait(Lane.IN, engine.record(Lane.OUT))
        target = torch.UntypedStorage(3 * MIB)
        engine.copy_in(slot, target)
        arrived = engine.record(Lane.IN)
        engine.wait(Lane.COMPUTE, arrived)
        assert engine.query(arrived) and engine.failure(arrived) is None
        assert bool((tensor(target) == 7).all())
        assert engine.memory_in_use() == {"disk": 3 * MIB}
        assert engine.probe_bandwidth(MIB).in_bytes_per_second <= 1e8
    finally:
        engine.close()


def test_a_model_under_it_has_plain_gradients() -> None:
    import lowtide
    from benchmarks.gpt_slice import GptSlice
    from benchmarks.steps import checksum

    torch.manual_seed(0)
    model = GptSlice(num_layers=2, hidden=64, heads=2, head_size=16, ffn=128)
    hidden = torch.randn(2, 32, 64)

    def step() -> str:
        model.zero_grad(set_to_none=True)
        loss = model(hidden)
        loss.backward()
        return checksum(loss, model)

    plain = step()
    engine = ThrottledEngine(HostEngine(), 1e8, CPU)
    with lowtide.apply(model, {"swap": "all", "min_bytes": 1024}, engine=engine) as tide:
        assert [step() for _ in range(3)] == [plain] * 3
        assert tide.stats.swapped_bytes > 0


def test_a_checksum_sees_a_bit_of_loss_and_gradients() -> None:
    from benchmarks.steps import checksum

    model = torch.nn.Linear(2, 2)
    loss = model(torch.ones(2)).sum()
    loss.backward()
    before = checksum(loss, model)
    assert checksum(loss, model) == before
    assert checksum(torch.nextafter(loss, loss + 1), model) != before
    model.bias.grad[1] = torch.nextafter(model.bias.grad[1], torch.tensor(2.0))
    assert checksum(loss, model) != before


@pytest.mark.parametrize("policy", one_of(2, ["late", "early", 1, 2]))
def test_padding_keeps_the_order_of_an_accelerator(policy: str | int) -> None:
    """Streams that run as late, as early, or as unevenly as they may."""
    from lowtide.engines.accelerator import AcceleratorEngine
    from tests.engines.sim_device import SimDevice
    from tests.support import zoo

    device = SimDevice(policy, computes_on_host=True)
    inner = AcceleratorEngine(device.device, 512 * MIB, ops=device)
    engine = ThrottledEngine(inner, inner.probe_bandwidth(8 * MIB).out_bytes_per_second / 3, device.device)
    name = next(iter(zoo.CASES))
    result, stats = zoo.lowtide_step(zoo.CASES[name], 3, {"swap": "all", "min_bytes": 0}, engine=engine, num_steps=2)
    zoo.assert_same(result, zoo.plain_result(name, 3, num_steps=2))
    assert stats.swapped_bytes > 0
    assert engine.memory_in_use() == {"host": 0}
    engine.close()
