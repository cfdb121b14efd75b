"""The stand-in device itself: tensors and autograd with the CPU's bits, streams that queue, memory that is reused."""

from __future__ import annotations

import copy
import gc
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.standin import device
from tests.support import zoo

HERE = torch.device(device.NAME, 0)
THERE = torch.device(device.NAME, 1)
MIB = 2**20


def pinned(nbytes: int = MIB) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def filled(value: int, nbytes: int = MIB, where: torch.device = HERE) -> torch.Tensor:
    return torch.full((nbytes,), value, dtype=torch.uint8, device=where)


def event(*, timing: bool = False) -> torch.Event:
    return torch.Event(HERE, enable_timing=timing)


# -- tensors and autograd ----------------------------------------------------------------------------------------------


def gradients(model: nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    loss.backward()
    found = [loss.detach().cpu()]
    found += [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    return found


def test_an_mlp_has_the_bits_of_the_cpu() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 4)
    )
    data = torch.randn(8, 16)
    there = copy.deepcopy(model).to(HERE)
    on_cpu = gradients(model, model(data).square().mean())
    on_device = gradients(there, there(data.to(HERE)).square().mean())
    assert all(torch.equal(a, b) for a, b in zip(on_cpu, on_device, strict=True))


@pytest.mark.parametrize("name", ["llama", "unet"])
def test_models_have_the_bits_of_the_cpu(name: str) -> None:
    case = zoo.CASES[name]
    results = []
    for where in (torch.device("cpu"), HERE):
        model = case.build(3, where)
        with sdpa_kernel(SDPBackend.MATH):  # the device has no other
            results.append(gradients(model, case.loss(model, case.batch(3, where))))
    assert len(results[0]) > 3
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_views_types_and_sizes() -> None:
    data = torch.randn(6, 8)
    there = data.to(HERE)
    pairs = [
        (data.t()[2:].contiguous(), there.t()[2:].contiguous()),
        (data.to(torch.bfloat16), there.to(torch.bfloat16)),
        (data[data > 0], there[there > 0]),
        (torch.cat([data, data.roll(1, 0)]), torch.cat([there, there.roll(1, 0)])),
        (data.sort(1)[0], there.sort(1)[0]),
        (data.view(2, 24).unfold(1, 3, 2), there.view(2, 24).unfold(1, 3, 2)),
        (F.one_hot(torch.arange(4)), F.one_hot(torch.arange(4, device=HERE))),
    ]
    assert all(torch.equal(on_cpu, on_device.cpu()) for on_cpu, on_device in pairs)
    assert there.sum().item() == data.sum().item()
    assert torch.equal(there.to(THERE).cpu(), data)
    with pytest.raises(RuntimeError, match="xpected all tensors to be on the same device"):
        there + there.to(THERE)


def test_a_seed_repeats_what_is_drawn() -> None:
    torch.manual_seed(5)
    first = torch.rand(4, device=HERE)
    state = torch.get_device_module(device.NAME).get_rng_state(HERE)
    second = torch.rand(4, device=HERE)
    torch.get_device_module(device.NAME).set_rng_state(state, HERE)
    assert torch.equal(second, torch.rand(4, device=HERE))
    torch.manual_seed(5)
    assert torch.equal(first, torch.rand(4, device=HERE))


# -- streams and events ------------------------------------------------------------------------------------------------


def test_a_copy_runs_when_it_must() -> None:
    source, target, stream, after = filled(7), pinned(), torch.Stream(HERE), event()
    stream.wait_event(HERE_now())
    with stream:
        target.copy_(source, non_blocking=True)
    after.record(stream)
    assert device.num_queued() == 1
    assert not after.query()
    assert not (target == 7).any()
    after.synchronize()
    assert after.query()
    assert (target == 7).all()


def HERE_now() -> torch.Event:  # noqa: N802
    """An event of the current stream."""
    made = event()
    made.record()
    return made


def test_a_copy_may_run_early() -> None:
    device.play("early")
    source, target, stream = filled(7), pinned(), torch.Stream(HERE)
    stream.wait_event(HERE_now())
    with stream:
        target.copy_(source, non_blocking=True)
    assert device.num_queued() == 0
    assert (target == 7).all()
    stream.synchronize()


def test_an_event_that_nobody_waits_for_completes_at_last() -> None:
    source, target, stream, after = filled(7), pinned(), torch.Stream(HERE), event()
    stream.wait_event(HERE_now())
    with stream:
        target.copy_(source, non_blocking=True)
    after.record(stream)
    assert [after.query() for _ in range(60)].count(False) == 40
    assert (target == 7).all()


def test_a_wait_is_for_the_recording_that_there_was() -> None:
    source, target, lane, compute = filled(7), pinned(), torch.Stream(HERE), torch.accelerator.current_stream(HERE)
    done = HERE_now()
    lane.wait_event(done)
    done.record(compute)  # another recording: the lane does not wait for it
    with lane:
        target.copy_(source, non_blocking=True)
    sent = event()
    sent.record(lane)
    other = pinned()
    with lane:
        other.copy_(source, non_blocking=True)
    compute.wait_event(sent)
    sent.record(lane)
    source.add_(1)  # must be behind the first copy only
    assert device.num_queued() == 1
    assert (target == 7).all()
    assert len(device.violations()) == 1  # the second copy reads what compute has written over
    device.forget_violations()


def test_a_forgotten_wait_is_reported_and_gives_poison() -> None:
    source, target, lane = filled(7), pinned(), torch.Stream(HERE)
    with lane:
        target.copy_(source, non_blocking=True)
    lane.synchronize()
    assert (target == 255).all()
    (violation,) = device.violations()
    number = lane.stream_id % 33
    assert violation == (
        f"copy out on stream {number} of device 0 is not ordered after aten::fill_ on stream 0 of device 0, "
        "which wrote the same 1048576 bytes"
    )
    device.forget_violations()


@pytest.mark.parametrize("policy", ["late", "early", 3])
def test_what_the_host_has_waited_for_is_in_order(policy: str | int) -> None:
    device.play(policy)
    source, target, lane = filled(7), pinned(), torch.Stream(HERE)
    torch.accelerator.synchronize(HERE)
    with lane:
        target.copy_(source, non_blocking=True)
    lane.synchronize()
    source.fill_(8)
    assert (target == 7).all()
    assert device.violations() == []


def test_two_compute_streams_need_a_wait() -> None:
    data, side = torch.ones(1000, device=HERE), torch.Stream(HERE)
    before = HERE_now()
    with side:
        wrong = data + 1
    assert len(device.violations()) == 1
    assert bool(wrong.isnan().all())
    device.forget_violations()
    side.wait_event(before)
    with side:
        right = data + 1
    side.synchronize()
    assert bool((right == 2).all())


def test_each_device_has_its_own_streams() -> None:
    with torch.accelerator.device_index(1):
        assert torch.accelerator.current_stream() == torch.accelerator.current_stream(THERE)
        stream = torch.Stream()
        assert stream.device == THERE
    assert torch.accelerator.current_device_index() == 0
    assert torch.accelerator.current_stream() != torch.accelerator.current_stream(THERE)
    target = pinned()
    data = filled(3, where=THERE)
    with torch.Stream(HERE):  # not the one that a copy of the other device goes to
        target.copy_(data, non_blocking=True)
    torch.accelerator.synchronize(THERE)
    assert (target == 3).all()


# -- memory ------------------------------------------------------------------------------------------------------------


def test_freed_memory_is_poisoned_and_reused_at_once() -> None:
    data = filled(7)
    address = data.data_ptr()
    del data
    again = torch.empty(MIB, dtype=torch.uint8, device=HERE)
    assert again.data_ptr() == address
    assert (again.cpu() == 255).all()
    with torch.Stream(HERE):
        assert torch.empty(MIB, dtype=torch.uint8, device=HERE).data_ptr() != address


@pytest.mark.parametrize("policy", ["late", "early", 1, 2])
def test_a_source_that_was_freed_too_early_is_found(policy: str | int) -> None:
    device.play(policy)
    data, target, lane = filled(7), pinned(), torch.Stream(HERE)
    lane.wait_event(HERE_now())
    with lane:
        target.copy_(data, non_blocking=True)
    del data
    assert len(device.violations()) == 1
    assert device.violations()[0].startswith("free on stream 0 of device 0 is not ordered after a read")
    device.forget_violations()
    lane.synchronize()
    assert policy != "late" or (target == 255).all()


def test_a_source_may_go_once_compute_waits() -> None:
    data, target, lane, sent = filled(7), pinned(), torch.Stream(HERE), event()
    lane.wait_event(HERE_now())
    with lane:
        target.copy_(data, non_blocking=True)
    sent.record(lane)
    torch.accelerator.current_stream(HERE).wait_event(sent)
    del data
    assert device.num_queued() == 1
    filled(9)
    assert (target == 7).all()


def test_the_cap_and_the_count() -> None:
    gc.collect()
    before = torch.accelerator.memory_allocated(HERE)
    torch.accelerator.reset_peak_memory_stats(HERE)
    device.set_cap(before + 3 * MIB)
    first, second = filled(1), filled(2)
    with pytest.raises(torch.OutOfMemoryError, match=r"stand-in out of memory\. Tried to allocate 2097152 bytes"):
        filled(3, 2 * MIB)
    assert torch.accelerator.memory_allocated(HERE) == before + 2 * MIB
    assert torch.accelerator.max_memory_allocated(HERE) == before + 2 * MIB
    del first
    filled(3, 2 * MIB)
    assert torch.accelerator.max_memory_allocated(HERE) == before + 3 * MIB
    torch.accelerator.reset_peak_memory_stats(HERE)
    assert torch.accelerator.max_memory_allocated(HERE) == before + MIB
    assert torch.accelerator.memory_reserved(HERE) >= before + MIB
    assert torch.accelerator.memory_allocated(THERE) == 0 or second is not None


def test_one_allocation_finds_no_memory() -> None:
    with device.refusing(2):
        filled(1), filled(2)
        with pytest.raises(torch.OutOfMemoryError):
            filled(3)
        filled(4)


def test_pinned_memory_lives_until_the_copy_has_run() -> None:
    target, lane = torch.empty(MIB, dtype=torch.uint8, device=HERE), torch.Stream(HERE)
    source = pinned()
    assert source.is_pinned() and source[5:].is_pinned() and not torch.empty(8).is_pinned()
    source.fill_(7)
    lane.wait_event(HERE_now())
    with lane:
        target.copy_(source, non_blocking=True)
    del source
    gc.collect()
    lane.synchronize()
    assert bool((target == 7).all())


# -- the clock ---------------------------------------------------------------------------------------------------------


def test_copies_and_products_take_the_time_that_they_should() -> None:
    device.set_speeds(out=1e6, into=2e6, flops=1e9, memory=1e18, launch=0.0)
    compute, lane, host = torch.accelerator.current_stream(HERE), torch.Stream(HERE), pinned()
    data, square = filled(7), torch.ones(100, 100, device=HERE)
    marks = [event(timing=True) for _ in range(4)]
    torch.accelerator.synchronize(HERE)
    marks[0].record(compute)
    square @ square  # 2e6 operations
    marks[1].record(compute)
    lane.wait_event(marks[1])
    with lane:
        host.copy_(data, non_blocking=True)
        data.copy_(host, non_blocking=True)
    marks[2].record(lane)
    compute.wait_event(marks[2])
    marks[3].record(compute)
    torch.accelerator.synchronize(HERE)
    times = [marks[0].elapsed_time(mark) for mark in marks]
    assert times == pytest.approx([0.0, 2.0, 2.0 + 1.5 * MIB / 1e3, 2.0 + 1.5 * MIB / 1e3])


def test_on_the_clock_the_host_sees_what_is_over() -> None:
    device.play("clock")
    device.set_speeds(out=1e6, flops=1e9, memory=1e18, launch=0.0)
    data, lane, host, square = filled(7, 2000), torch.Stream(HERE), pinned(2000), torch.ones(100, 100, device=HERE)
    torch.accelerator.synchronize(HERE)
    with lane:
        host.copy_(data, non_blocking=True)  # 2 ms
    sent = event()
    sent.record(lane)
    assert not sent.query()
    (square @ square)[0]
    assert sent.query()


def test_operators_take_what_they_read_and_make_and_views_take_nothing() -> None:
    device.set_speeds(memory=1e6, launch=5e-6)
    one, row = filled(1, 1000), torch.ones(1, 10, device=HERE)
    torch.accelerator.synchronize(HERE)
    times = [device.now()]
    for work in (
        lambda: one + 1,  # reads and makes 1,000 bytes each
        lambda: one.view(10, 100)[3:],
        lambda: row.expand(50, 10) * 2.0,  # reads 40 bytes, makes 2,000
        lambda: one[:1] + 1,  # a launch takes longer
    ):
        work()
        times.append(device.now())
    took = [after - before for before, after in itertools.pairwise(times)]
    assert took == pytest.approx([2e-3, 0.0, 2.04e-3, 5e-6])


def test_copies_have_a_latency_and_slow_down_what_runs_beside_them() -> None:
    device.set_speeds(out=1e6, memory=1e6, launch=0.0, latency=1e-3, share=0.25)
    data, other, lane, host = filled(7, 1000), filled(1, 1500), torch.Stream(HERE), pinned(1000)
    torch.accelerator.synchronize(HERE)
    with lane:
        host.copy_(data, non_blocking=True)  # a millisecond, and one before it
        sent = device.now()
    begin = device.now()
    assert sent - begin == pytest.approx(2e-3)
    other + 1  # 3 ms alone; in the first two it does the work of 1.5
    assert device.now() - begin == pytest.approx(3.5e-3)
    other + 1
    assert device.now() - begin == pytest.approx(6.5e-3)
    torch.accelerator.synchronize(HERE)
