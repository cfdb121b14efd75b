"""What stays on the device with `resident='auto'`: chosen by its memory, and never by a bit."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lowtide.core.budget import DeviceMemory
from lowtide.engines.accelerator import AcceleratorEngine
from lowtide.engines.base import Lane
from lowtide.engines.tiers.disk import DiskTier
from lowtide.errors import PartialStepError
from lowtide.optimizer import store
from lowtide.optimizer.residency import NUM_WATCHED
from lowtide.optimizer.swap import OptimizerSwap, swap_optimizer
from tests.engines.sim_device import SimDevice
from tests.support.optimizer_zoo import BUCKET_BYTES, Case, assert_same, assert_same_value, result_of
from tests.support.virtual_engine import VirtualEngine, virtual

TOTAL = 100_000
HEADROOM = TOTAL // 20
CHOSEN = NUM_WATCHED + 2
"""Steps after which the choice is made: the first one makes the state."""
CASE = Case("AdamW", "foreach", torch.float32, has_missing=True)


class Device:
    """Memory of a device: what others leave, and what activations take at the worst moment. The engine's counters
    have the state that stays beside that."""

    def __init__(self, room: int = 0) -> None:
        self.free_bytes = TOTAL
        self.activations = TOTAL - HEADROOM - room
        self.handle: OptimizerSwap | None = None

    def __call__(self) -> DeviceMemory:
        return DeviceMemory(total_bytes=TOTAL, free_bytes=self.free_bytes, where="of a test")

    @property
    def in_use(self) -> int:
        return 1000 + (self.handle._store.staying_bytes if self.handle else 0)


class Counted(VirtualEngine):
    """An engine whose device has counters."""

    device_: Device
    seconds_a_fetch = 0.0
    peak = 0

    def device_bytes(self) -> int | None:
        return self.device_.in_use

    def device_peak_bytes(self) -> int | None:
        self.peak = max(self.peak, self.device_.in_use + self.device_.activations - 1000)
        return self.peak

    def wait(self, lane: Lane, event: Any) -> float:
        super().wait(lane, event)
        return self.seconds_a_fetch if lane is Lane.COMPUTE else 0.0


def _engine(device: Device, seed: int = 0) -> Counted:
    engine = Counted(seed)
    engine.device_ = device
    return engine


def _swap(optimizer: Any, engine: Any, device: Device, **options: Any) -> OptimizerSwap:
    options = {"bucket_bytes": BUCKET_BYTES, "min_bytes": 1, "overlap": "step", **options}
    device.handle = swap_optimizer(optimizer, engine=engine, memory=device, **options)
    return device.handle


def _step(case: Case, parameters: Any, optimizer: Any, numbers: Any) -> None:
    for step in numbers:
        case.set_gradients(parameters, step)
        optimizer.param_groups[0]["lr"] = 0.01 * 0.9**step
        optimizer.step()


@functools.cache
def _plain(case: Case, steps: int) -> Any:
    parameters, optimizer = case.build()
    _step(case, parameters, optimizer, range(steps))
    return result_of(parameters, optimizer)


KINDS = [
    ("AdamW", "foreach"),
    ("AdamW amsgrad", "fused"),
    ("SGD", "foreach"),
    ("Adafactor", "for-loop"),
    ("Muon", "for-loop"),
    ("Counted", "for-loop"),
]


@pytest.mark.parametrize(("kind", "implementation"), KINDS)
def test_same_bits_while_state_comes_to_stay_and_leaves_again(kind: str, implementation: str) -> None:
    for seed, (dtype, has_missing) in enumerate(itertools.product((torch.float32, torch.bfloat16), (True, False))):
        case = Case(kind, implementation, dtype, has_missing)
        device = Device(room=9000)
        engine = _engine(device, seed)
        parameters, optimizer = case.build()
        handle = _swap(optimizer, engine, device)
        _step(case, parameters, optimizer, range(CHOSEN))
        assert handle.residency is not None
        came = handle.residency.resident_bytes
        assert 0 < came <= 9000
        _step(case, parameters, optimizer, range(CHOSEN, 9))
        moved = handle._store.moved_bytes
        device.free_bytes -= 9000 - came + HEADROOM
        with pytest.warns(RuntimeWarning, match="memory on cpu runs short"):
            _step(case, parameters, optimizer, range(9, 10))
        assert handle.residency.resident_bytes < came
        assert handle.residency.moved_bytes > moved
        _step(case, parameters, optimizer, range(10, 12))
        assert_same(result_of(parameters, optimizer), _plain(case, 12))
        handle.detach()
        assert_same(result_of(parameters, optimizer), _plain(case, 12))
        assert (engine.violations, engine.num_slots) == ([], 0)


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(6))

    def forward(self, x: torch.Tensor, skip: int) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x).tanh() if number != skip else x
        return x


@pytest.mark.parametrize("overlap", ["step", "backward", "in_backward"])
def test_same_bits_in_each_mode(overlap: str) -> None:
    results = []
    for is_swapped in (False, True):
        torch.manual_seed(0)
        model, device = Tower(), Device(room=9000)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        engine = _engine(device, 3)
        handle = _swap(optimizer, engine, device, bucket_bytes=8192, overlap=overlap) if is_swapped else None
        for step in range(14):
            model(torch.full((3, 24), 0.1 * step), skip=step % 5 + 1).square().mean().backward()
            if overlap != "in_backward":
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            with contextlib.ExitStack() as stack:
                if step == 10:
                    device.free_bytes -= TOTAL // 2
                    if handle:
                        stack.enter_context(pytest.warns(RuntimeWarning, match="runs short"))
                optimizer.step()
            optimizer.zero_grad()
            if handle and handle.residency:
                assert (handle.residency.resident_bytes > 0) is (step < 10)
        if handle:
            handle.detach()
            assert (engine.violations, engine.num_slots) == ([], 0)
        results.append(result_of(list(model.parameters()), optimizer))
    assert_same(results[1], results[0])


@pytest.mark.parametrize("implementation", ["foreach", "fused"])
def test_a_grad_scaler_skips_steps_with_infs(implementation: str) -> None:
    results = []
    for is_swapped in (False, True):
        case = Case("AdamW", implementation, torch.float32, has_missing=False)
        parameters, optimizer = case.build()
        device = Device(room=9000)
        handle = _swap(optimizer, _engine(device, 1), device) if is_swapped else None
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
        for step in range(12):
            case.set_gradients(parameters, step)
            for parameter in parameters:
                assert parameter.grad is not None
                parameter.grad.mul_(scaler.get_scale())
            if step in (2, 5, 9):
                parameters[step % 3].grad[0] = float("inf")
            scaler.scale(torch.ones(()))
            scaler.step(optimizer)
            scaler.update()
        if handle:
            assert handle.residency is not None and handle.residency.resident_bytes > 0
        results.append((result_of(parameters, optimizer), scaler.get_scale()))
    assert results[1][1] == results[0][1]
    assert_same(results[1][0], results[0][0])


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_same_bits_on_streams(tier: str, tmp_path: Path) -> None:
    """Also where no memory is left for a bucket: it is cut, and what stays leaves after that step, by the host."""
    for policy in ("late", "early", 4):
        sim, device = SimDevice(policy, computes_on_host=True), Device(room=9000)
        engine = AcceleratorEngine(sim.device, 64 << 20, DiskTier(tmp_path), ops=sim)
        engine.device_bytes = lambda: device.in_use  # type: ignore[method-assign] # noqa: B023
        engine.device_peak_bytes = lambda: device.activations + device.in_use - 1000  # type: ignore[method-assign] # noqa: B023
        parameters, optimizer = CASE.build()
        handle = _swap(optimizer, engine, device, tier=tier)
        _step(CASE, parameters, optimizer, range(8))
        assert handle.residency is not None and handle.residency.resident_bytes > 0
        handle.flush()
        sim.room_bytes = sim.given_bytes + 10_500
        with pytest.warns(RuntimeWarning, match="runs short"):
            _step(CASE, parameters, optimizer, range(8, 10))
        assert handle.residency.resident_bytes == 0
        sim.room_bytes = None
        _step(CASE, parameters, optimizer, range(10, 12))
        assert_same(result_of(parameters, optimizer), _plain(CASE, 12))
        handle.detach()
        assert not any(engine.memory_in_use().values())
        engine.close()


# -- how much ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("room", "most"), [(0, 0), (5000, 5000), (12_000, 12_000), (10**6, 40_000)])
def test_what_stays_fits_beside_the_headroom(room: int, most: int) -> None:
    device = Device(room=min(room, TOTAL - HEADROOM - 1000))
    engine = _engine(device)
    case = Case("AdamW", "foreach", torch.float32, has_missing=False)
    parameters, optimizer = case.build()
    handle = _swap(optimizer, engine, device)
    _step(case, parameters, optimizer, range(9))
    choice = handle.residency
    assert choice is not None
    assert choice.resident_bytes <= min(most, room)
    assert choice.resident_bytes > room - 2 * BUCKET_BYTES or choice.moved_bytes == 0 or room == 0
    assert engine.peak <= TOTAL - HEADROOM
    assert choice.moved_bytes == handle._store.moved_bytes
    assert (choice.resident_bytes > 0) == (room > 0)
    handle.detach()


def test_another_optimizers_state_that_came_to_stay_is_counted() -> None:
    device = Device(room=9000)
    engine = _engine(device)
    first, second = CASE.build(), CASE.build()
    handles = []
    for _, optimizer in (first, second):
        handles.append(_swap(optimizer, engine, device))

    peak = [0]
    engine.device_bytes = lambda: 1000 + sum(handle._store.staying_bytes for handle in handles)  # type: ignore[method-assign]
    engine.device_peak_bytes = lambda: peak[0]  # type: ignore[method-assign]
    for step in range(8):
        peak[0] = max(peak[0], engine.device_bytes() + device.activations - 1000)  # in backward
        for parameters, optimizer in (first, second):
            _step(CASE, parameters, optimizer, [step])
    assert 0 < sum(handle._store.staying_bytes for handle in handles) <= 9000


def test_where_memory_runs_out_on_the_way_the_rest_is_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(room=30_000)
    engine = _engine(device)
    parameters, optimizer = CASE.build()
    handle = _swap(optimizer, engine, device)
    _step(CASE, parameters, optimizer, range(CHOSEN - 1))
    copy_, calls = store._copy, []

    def short(*args: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 6:
            raise torch.OutOfMemoryError("none left")
        return copy_(*args)

    with monkeypatch.context() as patch:
        patch.setattr(store, "_copy", short)
        _step(CASE, parameters, optimizer, [CHOSEN - 1])
    assert handle.residency is not None
    assert 0 < handle.residency.resident_bytes < 15_000
    _step(CASE, parameters, optimizer, range(CHOSEN, 12))
    assert_same(result_of(parameters, optimizer), _plain(CASE, 12))
    handle.detach()


def test_checkpoints_are_those_of_plain_with_a_part_resident() -> None:
    case = Case("AdamW", "for-loop", torch.bfloat16, has_missing=True)
    truth = _plain(case, 12)
    device = Device(room=9000)
    parameters, optimizer = case.build()
    handle = _swap(optimizer, _engine(device), device)
    _step(case, parameters, optimizer, range(8))
    assert handle.residency is not None and handle.residency.resident_bytes > 0
    saved = copy.deepcopy((parameters, optimizer.state_dict()))
    plain_parameters, plain = case.build()
    _step(case, plain_parameters, plain, range(8))
    assert_same_value(optimizer.state_dict(), plain.state_dict(), "state_dict")
    # Into a plain one, and into one with a part resident.
    resident = device.handle
    for others, target in (case.build(), (parameters, optimizer)):
        with torch.no_grad():
            for one, other in zip(others, saved[0], strict=True):
                one.copy_(other)
        target.load_state_dict(copy.deepcopy(saved[1]))
        _step(case, others, target, range(8, 12))
        assert_same(result_of(others, target), truth)
    assert resident is handle and handle.residency.resident_bytes > 0
    handle.detach()


class WithoutCopy(Counted):
    """The copy in of one number fails."""

    failing, num_copies, failed = -1, 0, None

    def copy_in(self, slot: Any, target: Any) -> None:
        super().copy_in(slot, target)
        self.num_copies += 1
        if self.num_copies == self.failing:
            self.failed = super().record(Lane.IN)

    def failure(self, event: Any) -> BaseException | None:
        return OSError("no such bytes") if self.failed is not None and event == self.failed else None


@pytest.mark.parametrize("number", range(1, 5))
def test_a_step_that_stops_at_any_bucket_goes_on_to_the_same_bits(number: int) -> None:
    device = Device(room=9000)
    engine = WithoutCopy(2)
    engine.device_ = device
    parameters, optimizer = CASE.build()
    handle = _swap(optimizer, engine, device)
    _step(CASE, parameters, optimizer, range(8))
    engine.failing = engine.num_copies + number
    with pytest.raises(PartialStepError, match=r"call handle.resume\(\)"):
        _step(CASE, parameters, optimizer, range(8, 12))
    with pytest.raises(RuntimeError, match=r"^lowtide: keep_no_more_than: the last step stopped half-way"):
        handle.keep_no_more_than(0.0)
    step = next(n for n in range(8, 12) if optimizer.param_groups[0]["lr"] == 0.01 * 0.9**n)
    handle.resume()
    _step(CASE, parameters, optimizer, range(step + 1, 12))
    assert_same(result_of(parameters, optimizer), _plain(CASE, 12))
    handle.detach()
    assert engine.violations == []


# -- what is said ------------------------------------------------------------------------------------------------------


def test_it_says_what_it_chose_and_what_came_of_it() -> None:
    device = Device(room=9000)
    engine = _engine(device)
    engine.seconds_a_fetch = 0.25
    case = Case("AdamW", "foreach", torch.float32, has_missing=False)
    parameters, optimizer = case.build()
    handle = _swap(optimizer, engine, device)
    _step(case, parameters, optimizer, range(CHOSEN))
    choice = handle.residency
    assert choice is not None
    assert choice.waited_seconds == 0.25 * 2 * len(handle._store.buckets + handle._store._brought)
    share = choice.moved_bytes / (choice.moved_bytes + choice.resident_bytes)
    assert choice.predicted_seconds == pytest.approx(choice.waited_seconds * share)
    assert "not yet measured" in str(handle)
    _step(case, parameters, optimizer, range(CHOSEN, CHOSEN + NUM_WATCHED + 1))
    choice = handle.residency
    assert choice.measured_seconds == 0.25 * 2 * len(handle._store.buckets)
    assert "stay, of 0.009 MiB that the device has free at its worst moment; a step waits " in str(handle)
    handle.detach()


@pytest.mark.parametrize("overlap", ["step", "auto"])
def test_free_from_is_said_where_backward_hides(overlap: str) -> None:
    device = Device(room=0)
    engine = _engine(device)
    model = Tower()
    optimizer = torch.optim.AdamW(model.parameters())
    handle = _swap(optimizer, engine, device, overlap=overlap)
    for _ in range(14):
        engine.seconds_a_fetch = {"step": 1.0, "backward": 0.25}[handle._overlap.mode]
        model(torch.ones(3, 24), skip=-1).sum().backward()
        optimizer.step()
    choice = handle.residency
    assert choice is not None and choice.resident_bytes == 0
    # Of four parts three are hidden.
    assert choice.free_from == (None if overlap == "step" else pytest.approx(4 / 3, rel=0.1))
    assert ("times the tokens of a step" in str(choice)) is (overlap == "auto")


def test_where_no_step_waits_nothing_stays() -> None:
    device = Device(room=9000)
    engine = _engine(device)
    parameters, optimizer = CASE.build()
    handle = _swap(optimizer, engine, device)
    handle._residency._is_alone = True  # type: ignore[union-attr]
    _step(CASE, parameters, optimizer, range(CHOSEN + NUM_WATCHED + 1))
    assert handle.residency is not None
    assert (handle.residency.resident_bytes, handle.residency.reason) == (0, "no step waits for copies")
    assert handle.residency.predicted_seconds == handle.residency.measured_seconds == 0.0


def test_without_a_counter_and_with_several_ranks_none_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(room=9000)
    parameters, optimizer = CASE.build()
    with _swap(optimizer, VirtualEngine(0), device) as handle:
        _step(CASE, parameters, optimizer, range(8))
        assert str(handle.residency).endswith("0 MiB (0%) stay, cpu has no counter of its memory")

    def unknown() -> DeviceMemory:
        raise RuntimeError("not for this backend")

    with swap_optimizer(optimizer, engine=_engine(device), memory=unknown) as handle:
        assert handle.residency is not None
        assert handle.residency.reason == "nothing says how much memory cpu has (not for this backend)"
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 2)
    with _swap(optimizer, _engine(device), device) as handle:
        assert handle.residency is not None
        assert handle.residency.reason == "there are several ranks, which must step alike: give a share"
    with _swap(optimizer, _engine(device), device, resident=0.5) as handle:
        assert handle.residency is None


def test_what_stays_steps_bucket_by_bucket() -> None:
    """So that temporaries are those of one bucket, as plans count them."""

    class Watched(torch.optim.AdamW):
        most = 0

        def step(self, closure: Any = None) -> Any:
            groups = self.param_groups
            sizes = [p.numel() for group in groups for p in group["params"] if p.grad is not None]
            Watched.most = max(Watched.most, 8 * sum(sizes) if len(sizes) > 1 else 0)
            return super().step(closure)

    parameters = [nn.Parameter(torch.ones(16, 16)) for _ in range(8)]
    optimizer = Watched(parameters, foreach=True)
    with swap_optimizer(optimizer, engine=virtual(0), resident=1.0, bucket_bytes=8192, min_bytes=1) as handle:
        Watched.most = 0
        for _ in range(3):
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        assert handle.stats.swapped_bytes == 0
        assert Watched.most == 3 * 8 * 256, "of eight parameters three have a bucket of state"


@pytest.mark.parametrize("overlap", ["step", "backward"])
def test_a_checkpoint_of_any_moment_is_plains(overlap: str) -> None:
    """After each micro-batch and each step, with all of the state elsewhere and with a part of it resident."""
    found: list[list[Any]] = [[], []]
    for is_swapped in (False, True):
        torch.manual_seed(0)
        model, device = Tower(), Device(room=9000)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        handle = (
            _swap(optimizer, _engine(device, 4), device, bucket_bytes=8192, overlap=overlap) if is_swapped else None
        )
        for step in range(8):
            for micro in range(2):
                model(torch.full((3, 24), 0.1 * (step + micro)), skip=-1).square().mean().backward()
                found[is_swapped].append(copy.deepcopy((model.state_dict(), optimizer.state_dict())))
            optimizer.step()
            optimizer.zero_grad()
            found[is_swapped].append(copy.deepcopy((model.state_dict(), optimizer.state_dict())))
        if handle:
            assert handle.residency is not None
            assert handle.residency.resident_bytes > 0
            handle.detach()
    assert len(found[0]) == 24
    for number, (one, other) in enumerate(zip(found[1], found[0], strict=True)):
        assert_same_value(one, other, f"checkpoint {number}")
