"""A parameter that is larger than a bucket steps in stretches: the same bits, in buckets as small as were asked for."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.engines.accelerator import AcceleratorEngine
from lowtide.engines.base import Lane
from lowtide.engines.host import HostEngine
from lowtide.engines.tiers.disk import DiskTier
from lowtide.optimizer.transfers import NUM_BUFFERS
from lowtide.tensors.optimizers import CUT_ELEMENTS, ELEMENTWISE
from tests.engines.sim_device import SimDevice
from tests.support.optimizer_zoo import FOREACH, FUSED, LOOP, OPTIMIZERS, Result, assert_same, result_of, swapped
from tests.support.virtual_engine import VirtualEngine

LARGE = 2 * CUT_ELEMENTS + 19_001
"""Elements of the large parameter: three stretches, the last one odd."""
NUM_STRETCHES = 3
STEPS = 4
BUCKET_BYTES = 130_000
IMPLEMENTATIONS = {"for-loop": LOOP, "foreach": FOREACH, "fused": FUSED}
CUT = [(kind, name) for kind, (_, names) in OPTIMIZERS.items() if kind.split()[0] in ELEMENTWISE for name in names]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """In half precision torch's kernels for main memory round by thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Large:
    """Small parameters and a large one, which comes late and is left out once."""

    kind: str = "AdamW"
    implementation: str = "foreach"
    dtype: torch.dtype = torch.float32
    is_transposed: bool = False

    def build(self) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
        generator = torch.Generator().manual_seed(1)
        sizes: list[tuple[int, ...]] = [(40, 30), (LARGE,) if not self.is_transposed else (3, LARGE // 3), (19,)]
        values = [torch.randn(size, generator=generator).to(self.dtype) for size in sizes]
        if self.is_transposed:
            values[1] = values[1].t()
        parameters = [nn.Parameter(value) for value in values]
        groups = [{"params": parameters[:1]}, {"params": parameters[1:], "lr": 3e-2}]
        return parameters, OPTIMIZERS[self.kind][0](groups, IMPLEMENTATIONS[self.implementation])

    def set_gradients(self, parameters: list[nn.Parameter], step: int) -> None:
        generator = torch.Generator().manual_seed(100 + step)
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter).copy_(torch.randn(parameter.shape, generator=generator))
        if step == 2 and not (self.kind.startswith("SGD") and self.implementation == "fused"):
            parameters[1].grad = None


def train(case: Large, swap: Any = None, steps: int = STEPS) -> Result:
    parameters, optimizer = case.build()
    handle = swap(optimizer) if swap else None
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    for step in range(steps):
        case.set_gradients(parameters, step)
        optimizer.step()
        scheduler.step()
    result = result_of(parameters, optimizer)
    if handle:
        handle.detach()
        assert_same(result_of(parameters, optimizer), result)
    return result


@functools.cache
def plain(case: Large) -> Result:
    return train(case)


def _stretches(handle: Any) -> list[int]:
    """Of each bucket, how many pieces."""
    return [len(bucket.chunks) for bucket in handle._store.buckets]


@pytest.mark.parametrize(("kind", "implementation"), CUT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_same_bits(kind: str, implementation: str, dtype: torch.dtype) -> None:
    if kind.startswith("SGD") and implementation == "fused" and dtype == torch.bfloat16:
        pytest.skip("does not repeat its own bits in plain torch")
    case = Large(kind, implementation, dtype)
    engine = VirtualEngine(2)
    truth = train(case)
    parameters, optimizer = case.build()
    handle = swapped(optimizer, engine, bucket_bytes=BUCKET_BYTES)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    counts = []
    for step in range(STEPS):
        case.set_gradients(parameters, step)
        optimizer.step()
        scheduler.step()
        counts.append(max(_stretches(handle), default=0))
    assert_same(result_of(parameters, optimizer), truth)
    handle.detach()
    assert_same(result_of(parameters, optimizer), truth)
    assert (engine.violations, engine.num_slots) == ([], 0)
    assert set(counts) == ({NUM_STRETCHES} if kind != "SGD plain" else {0})


@pytest.mark.parametrize("is_transposed", [False, True])
def test_no_more_than_three_stretches_are_on_the_device(is_transposed: bool) -> None:
    """In the first step too, in which the optimizer makes its state."""
    case = Large(is_transposed=is_transposed)
    parameters, optimizer = case.build()
    handle = swapped(optimizer, VirtualEngine(3), bucket_bytes=BUCKET_BYTES)
    for step in range(STEPS):
        case.set_gradients(parameters, step)
        optimizer.step()
        assert handle.stats.bucket_peak_bytes <= NUM_BUFFERS * 8 * CUT_ELEMENTS
        assert handle._store.transfers.held_bytes == 0
        assert handle.stats.num_buckets == NUM_STRETCHES + 2
    shapes = {value.shape for value in optimizer.state[parameters[1]].values()}
    assert shapes == {torch.Size([]), parameters[1].shape}
    assert optimizer.state[parameters[1]]["exp_avg"].stride() == parameters[1].stride()
    handle.detach()
    assert_same(result_of(parameters, optimizer), _without_scheduler(case))


def test_state_that_the_optimizer_replaces_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Large()
    parameters, optimizer = case.build()
    handle = swapped(optimizer, VirtualEngine(3), bucket_bytes=BUCKET_BYTES)

    def step(own: torch.optim.Optimizer) -> None:
        torch.optim.AdamW.step.__wrapped__(own)  # type: ignore[attr-defined]
        for group in own.param_groups:
            for parameter in group["params"]:
                before = own.state[parameter]
                own.state[parameter] = {key: value.clone() for key, value in before.items()}
                for value in before.values():
                    value.fill_(9)

    monkeypatch.setattr(handle, "_bare_step", step)
    for number in range(STEPS):
        case.set_gradients(parameters, number)
        optimizer.step()
    handle.detach()
    assert_same(result_of(parameters, optimizer), _without_scheduler(case))


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_same_bits_on_streams(tier: str, tmp_path: Path) -> None:
    for policy in ("late", 1):
        device = SimDevice(policy, computes_on_host=True)
        engine = AcceleratorEngine(device.device, 64 * 2**20, DiskTier(tmp_path), ops=device)
        assert_same(train(Large(), lambda o: swapped(o, engine, tier=tier, bucket_bytes=BUCKET_BYTES)), plain(Large()))  # noqa: B023
        assert engine.memory_in_use() == {"host": 0, "disk": 0}
        engine.close()


def test_same_bits_through_a_file(tmp_path: Path) -> None:
    engine = HostEngine(directory=tmp_path)
    case = Large(dtype=torch.bfloat16)
    assert_same(train(case, lambda o: swapped(o, engine, bucket_bytes=BUCKET_BYTES)), plain(case))
    assert engine.memory_in_use() == {"disk": 0}
    engine.close()


class Vocabulary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(LARGE // 32, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.head = nn.Linear(32, LARGE // 32, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(x)


@pytest.mark.parametrize("overlap", ["backward", "in_backward"])
def test_same_bits_in_each_mode(overlap: str) -> None:
    results = []
    for is_swapped in (False, True):
        torch.manual_seed(0)
        model = Vocabulary()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        engine = VirtualEngine(4)
        handle = swapped(optimizer, engine, overlap=overlap, bucket_bytes=BUCKET_BYTES) if is_swapped else None
        for step in range(STEPS):
            model(torch.tensor([[step, 5, 9 * step]])).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if handle:
            assert sorted(_stretches(handle)) == [1, NUM_STRETCHES, NUM_STRETCHES]
            handle.flush()
        results.append(result_of(list(model.parameters()), optimizer))
        if handle:
            handle.detach()
            assert (engine.violations, engine.num_slots) == ([], 0)
    assert_same(results[1], results[0])


# -- what stays whole --------------------------------------------------------------------------------------------------


class Own(torch.optim.AdamW):
    """A user's: nobody knows what it looks at."""


@pytest.mark.parametrize(
    ("make", "dtype", "threads", "expected"),
    [
        (torch.optim.AdamW, torch.float32, 2, NUM_STRETCHES),
        (torch.optim.AdamW, torch.bfloat16, 1, NUM_STRETCHES),
        (torch.optim.AdamW, torch.bfloat16, 2, 1),
        (functools.partial(torch.optim.AdamW, fused=True), torch.bfloat16, 2, NUM_STRETCHES),
        (functools.partial(torch.optim.SGD, momentum=0.9, fused=True), torch.bfloat16, 2, 1),
        (torch.optim.Adafactor, torch.float32, 1, 1),
        (torch.optim.Muon, torch.float32, 1, 1),
        (Own, torch.float32, 1, 1),
        (torch.optim.AdamW, torch.complex64, 1, 1),
    ],
)  # fmt: skip
def test_what_is_cut(make: Any, dtype: torch.dtype, threads: int, expected: int) -> None:
    torch.set_num_threads(threads)
    parameter = nn.Parameter(torch.ones(32, LARGE // 32, dtype=dtype))
    optimizer = make([parameter])
    handle = swapped(optimizer, VirtualEngine(0), bucket_bytes=BUCKET_BYTES)
    for _ in range(2):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert _stretches(handle) == [expected]
    handle.detach()


def test_a_gradient_that_lies_otherwise_steps_whole() -> None:
    results = []
    for is_swapped in (False, True):
        parameter = nn.Parameter(torch.ones(32, LARGE // 32))
        optimizer = torch.optim.AdamW([parameter], lr=0.1)
        engine = VirtualEngine(0)
        handle = swapped(optimizer, engine, bucket_bytes=BUCKET_BYTES) if is_swapped else None
        for step in range(STEPS):
            gradient = torch.linspace(-1, step, parameter.numel())
            lies_otherwise = step == 2
            parameter.grad = gradient.view(-1, 32).t() if lies_otherwise else gradient.view(32, -1)
            before = handle._store.transfers.fetched_bytes if handle else 0
            optimizer.step()
            if handle and step:
                assert handle._store.transfers.fetched_bytes - before >= 8 * parameter.numel()
                assert (handle.stats.bucket_peak_bytes > 8 * parameter.numel()) == (step >= 2)
        if handle:
            handle.detach()
            assert (engine.violations, engine.num_slots) == ([], 0)
        results.append(result_of([parameter], optimizer))
    assert_same(results[1], results[0])


# -- counters, scaling and checkpoints ---------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["foreach", "fused"])
def test_a_grad_scaler_skips_steps_with_infs(implementation: str) -> None:
    """With fused=True the kernel sees the inf, in each stretch."""
    case = Large(implementation=implementation)
    results = []
    for is_swapped in (False, True):
        parameters, optimizer = case.build()
        engine = VirtualEngine(1)
        handle = swapped(optimizer, engine, bucket_bytes=BUCKET_BYTES) if is_swapped else None
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        scaler.scale(torch.ones(()))
        for step in (0, 1, 3, 4):
            case.set_gradients(parameters, step)
            with torch.no_grad():
                for parameter in parameters:
                    parameter.grad.mul_(scaler.get_scale())
                if step == 3:
                    parameters[1].grad[-1] = float("inf")
            scaler.step(optimizer)
            scaler.update()
        results.append(result_of(parameters, optimizer))
        if handle:
            handle.detach()
            assert engine.violations == []
    assert float(results[0].state[1]["step"]) == 3
    assert_same(results[1], results[0])


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize(("saving", "loading"), [("plain", "swapped"), ("swapped", "plain")])
def test_checkpoints_go_both_ways(tier: str, saving: str, loading: str) -> None:
    case = Large()
    engine = VirtualEngine(1)

    def swap(optimizer: torch.optim.Optimizer) -> Any:
        return swapped(optimizer, engine, bucket_bytes=BUCKET_BYTES, tier=tier)

    parameters, optimizer = case.build()
    handle = swap(optimizer) if saving == "swapped" else None
    for step in range(2):
        case.set_gradients(parameters, step)
        optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    values = [p.detach().clone() for p in parameters]
    if handle:
        handle.detach()
    parameters, optimizer = case.build()
    handle = swap(optimizer) if loading == "swapped" else None
    optimizer.load_state_dict(saved)
    with torch.no_grad():
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)
    for step in range(2, STEPS):
        case.set_gradients(parameters, step)
        optimizer.step()
    if handle:
        assert max(_stretches(handle)) == NUM_STRETCHES
        assert handle.stats.bucket_peak_bytes <= NUM_BUFFERS * 8 * CUT_ELEMENTS
        handle.detach()
        assert (engine.violations, engine.num_slots) == ([], 0)
    assert_same(result_of(parameters, optimizer), _without_scheduler(case))


@functools.cache
def _without_scheduler(case: Large) -> Result:
    parameters, optimizer = case.build()
    for step in range(STEPS):
        case.set_gradients(parameters, step)
        optimizer.step()
    return result_of(parameters, optimizer)


# -- where it stops ----------------------------------------------------------------------------------------------------


class Failing(VirtualEngine):
    """The copies of given numbers fail, each way; those out leave other bytes."""

    failing_in = -1
    failing_out = range(0)

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.num_in = self.num_out = 0
        self._failed: dict[Any, Any] = {}

    def copy_in(self, slot, target):
        super().copy_in(slot, target)
        self.num_in += 1
        if self.num_in == self.failing_in:
            self._failed[super().record(Lane.IN)] = None

    def copy_out(self, source, slot):
        super().copy_out(source, slot)
        self.num_out += 1
        if self.num_out in self.failing_out:
            self._failed[super().record(Lane.OUT)] = slot

    def failure(self, event):
        if event not in self._failed:
            return None
        if self._failed[event] is not None:
            self._failed[event].place.fill_(9)  # now that the copy has run
        return OSError("no such bytes")


@pytest.mark.parametrize("way", ["resume", "load"])
def test_a_failed_fetch_of_every_stretch(way: str) -> None:
    case, num_failures = Large(), 0
    truth = _without_scheduler(case)
    for failing in range(1, 20):
        engine = Failing(failing)
        engine.failing_in = failing
        parameters, optimizer = case.build()
        handle = swapped(optimizer, engine, bucket_bytes=BUCKET_BYTES)
        has_failed = False
        for step in range(STEPS):
            case.set_gradients(parameters, step)
            saved = copy.deepcopy((optimizer.state_dict(), [p.detach() for p in parameters]))
            try:
                optimizer.step()
            except lowtide.PartialStepError:
                has_failed = True
                if way == "resume":
                    handle.resume()
                    continue
                with torch.no_grad():
                    for parameter, value in zip(parameters, saved[1], strict=True):
                        parameter.copy_(value)
                optimizer.load_state_dict(saved[0])
                optimizer.step()
        assert_same(result_of(parameters, optimizer), truth)
        handle.detach()
        assert (engine.violations, engine.num_slots) == ([], 0)
        if not has_failed:
            break
        num_failures += 1
    assert num_failures >= 2 * 2 * NUM_STRETCHES


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("first", [1, 3, 5, 9, 14, 16])
def test_stretches_that_cannot_be_written_stay_on_the_device(first: int, count: int) -> None:
    """Copies out fail, in the first step too."""
    engine = Failing(first)
    engine.failing_out = range(first, first + count)
    with pytest.warns(RuntimeWarning, match=r"could not be written to the tier 'host' \(no such bytes\); they stay"):
        result = train(Large(), lambda o: swapped(o, engine, bucket_bytes=BUCKET_BYTES))
    assert_same(result, plain(Large()))
    assert (engine.violations, engine.num_slots) == ([], 0)


def test_the_next_stretch_arrives_while_one_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    parameter = nn.Parameter(torch.ones(LARGE))
    optimizer = torch.optim.AdamW([parameter])
    engine = Failing(0)
    handle = swapped(optimizer, engine, bucket_bytes=BUCKET_BYTES)
    begun: list[int] = []

    def step(own: torch.optim.Optimizer) -> None:
        begun.append(engine.num_in)
        torch.optim.AdamW.step.__wrapped__(own)  # type: ignore[attr-defined]

    monkeypatch.setattr(handle, "_bare_step", step)
    for _ in range(2):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert begun == [0, 0, 0, 4, 6, 6]
    handle.detach()


@pytest.mark.parametrize("way", ["load", "detach"])
def test_an_optimizer_that_fails_inside_a_stretch_cannot_be_resumed(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first step: nothing of the state that was begun is left."""
    case = Large()
    engine = VirtualEngine(0)
    parameters, optimizer = case.build()
    handle = swapped(optimizer, engine, bucket_bytes=BUCKET_BYTES)
    saved = copy.deepcopy((optimizer.state_dict(), [p.detach() for p in parameters]))
    case.set_gradients(parameters, 0)
    calls = []

    def step(*args: Any) -> None:
        calls.append(1)
        torch.optim.AdamW.step.__wrapped__(*args)  # type: ignore[attr-defined]
        if len(calls) == 4:
            raise ValueError("inside")

    monkeypatch.setattr(handle, "_bare_step", step)
    with pytest.raises(lowtide.PartialStepError, match="cannot be resumed: load a checkpoint"):
        optimizer.step()
    assert parameters[1] not in optimizer.state
    assert all(any(key is p for p in parameters) for key in optimizer.state)
    if way == "detach":
        handle.detach()
        assert engine.num_slots == 0
        return
    optimizer.load_state_dict(saved[0])
    assert engine.num_slots == 0
    with torch.no_grad():
        for parameter, value in zip(parameters, saved[1], strict=True):
            parameter.copy_(value)
    for number in range(STEPS):
        case.set_gradients(parameters, number)
        optimizer.step()
    assert_same(result_of(parameters, optimizer), _without_scheduler(case))
    handle.detach()
    assert (engine.violations, engine.num_slots) == ([], 0)


def test_stretches_for_which_there_is_no_memory_are_cut_in_two() -> None:
    case = Large()
    device = SimDevice(3, computes_on_host=True)
    engine = AcceleratorEngine(device.device, 64 * 2**20, ops=device)
    parameters, optimizer = case.build()
    handle = swapped(optimizer, engine, bucket_bytes=12 * 2 * CUT_ELEMENTS)
    counts = []
    for step in range(STEPS):
        case.set_gradients(parameters, step)
        if step == 1:
            device.room_bytes = 8 * CUT_ELEMENTS + 4096
            with pytest.warns(RuntimeWarning, match="^lowtide: no memory on cpu for 1048576 bytes of optimizer state"):
                optimizer.step()
        else:
            optimizer.step()
        counts.append(max(_stretches(handle)))
    assert counts == [2, 3, 3, 3]
    assert_same(result_of(parameters, optimizer), _without_scheduler(case))
    device.room_bytes = None
    handle.detach()
    assert engine.memory_in_use() == {"host": 0}
    engine.close()


def test_what_no_tier_has_room_for_is_put_together_on_the_device() -> None:
    engine = VirtualEngine(0, host_bytes=20_000, disk_bytes=0)
    with pytest.warns(RuntimeWarning, match=r"bytes of optimizer state stay on cpu: host: .* more wanted"):
        result = train(Large(), lambda o: swapped(o, engine, bucket_bytes=BUCKET_BYTES))
    assert_same(result, plain(Large()))
    assert engine.violations == []
