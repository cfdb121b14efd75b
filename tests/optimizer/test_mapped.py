"""Tier 'mapped': an optimizer steps its state where it is, in a file or in main memory, without a copy."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lowtide
from lowtide.engines.accelerator import AcceleratorEngine
from lowtide.engines.device_ops import TorchDevice
from lowtide.engines.host import HostEngine
from tests.engines.sim_device import SimDevice
from tests.optimizer.test_cuts import BUCKET_BYTES, Large
from tests.support import processes
from tests.support.grid import one_of
from tests.support.optimizer_zoo import NAMES, Case, assert_same, cases, result_of, swapped, train

MIB = 2**20


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[HostEngine]:
    engine = HostEngine(tmp_path)
    yield engine
    engine.close()


@pytest.mark.parametrize(("kind", "implementation"), one_of(2, NAMES))
def test_same_bits(kind: str, implementation: str, engine: HostEngine) -> None:
    """Every optimizer of the zoo, with gradients that are missing in turn."""
    handles: list[Any] = []

    def swap(optimizer: torch.optim.Optimizer) -> Any:
        handles.append(swapped(optimizer, engine, tier="mapped"))
        return handles[-1]

    for case in cases(kind, implementation):
        assert_same(train(case, swap), train(case, None))
        stats = handles.pop().stats
        assert (stats.sent_bytes, stats.bucket_peak_bytes, stats.overlap) == (0, 0, "step")
        assert engine.memory_in_use() == {"disk": 0}


def _trained(kind: str, engine: HostEngine | None, overlap: str, *, is_clipped: bool, num_micro_batches: int) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(24, 40), torch.nn.Tanh(), torch.nn.Linear(40, 8))
    parameters = list(model.parameters())
    optimizer = getattr(torch.optim, kind)(parameters, lr=1e-2)
    handle = swapped(optimizer, engine, tier="mapped", overlap=overlap) if engine else None
    for step in range(6):
        for micro in range(num_micro_batches):
            model(torch.full((3, 24), 0.1 * (step + micro + 1))).square().mean().backward()
        if is_clipped:
            torch.nn.utils.clip_grad_norm_(parameters, 0.05)
        optimizer.step()
        optimizer.zero_grad()
    result = result_of(parameters, optimizer)
    if handle:
        assert handle.stats.swapped_bytes > 0
        handle.detach()
    return result


@pytest.mark.parametrize("kind", ["AdamW", "Adagrad", "RMSprop", "NAdam", "Adafactor"])
@pytest.mark.parametrize(
    ("overlap", "is_clipped", "num_micro_batches"),
    [("step", False, 1), ("step", True, 1), ("step", False, 3), ("step", True, 3), ("in_backward", False, 1)],
)
def test_same_bits_in_training(
    kind: str, overlap: str, is_clipped: bool, num_micro_batches: int, engine: HostEngine
) -> None:
    setting: dict[str, Any] = {"is_clipped": is_clipped, "num_micro_batches": num_micro_batches}
    truth = _trained(kind, None, overlap, **setting)
    assert_same(_trained(kind, engine, overlap, **setting), truth)


@pytest.mark.parametrize("resident", [0.0, 0.4, 1.0])
@pytest.mark.parametrize(("saving", "loading"), [("plain", "mapped"), ("mapped", "plain"), ("mapped", "mapped")])
def test_checkpoints_go_both_ways(saving: str, loading: str, resident: float, engine: HostEngine) -> None:
    """A parameter with more state than a bucket among them, and a share of the state that stays."""
    case = Large()

    def swap(optimizer: torch.optim.Optimizer, kind: str) -> Any:
        if kind == "plain":
            return None
        return swapped(optimizer, engine, bucket_bytes=BUCKET_BYTES, tier="mapped", resident=resident)

    parameters, optimizer = case.build()
    truth_parameters, truth_optimizer = case.build()
    handle = swap(optimizer, saving)
    for step in range(2):
        for values, stepped in ((parameters, optimizer), (truth_parameters, truth_optimizer)):
            case.set_gradients(values, step)
            stepped.step()
    saved = copy.deepcopy(optimizer.state_dict())
    if handle:
        handle.detach()
    again, optimizer = case.build()
    handle = swap(optimizer, loading)
    optimizer.load_state_dict(saved)
    with torch.no_grad():
        for parameter, value in zip(again, parameters, strict=True):
            parameter.copy_(value)
    for step in range(2, 4):
        for values, stepped in ((again, optimizer), (truth_parameters, truth_optimizer)):
            case.set_gradients(values, step)
            stepped.step()
    assert_same(result_of(again, optimizer), result_of(truth_parameters, truth_optimizer))
    if handle:
        handle.detach()


def test_what_is_written_by_hand_between_steps_is_used(engine: HostEngine) -> None:
    case = Case("AdamW", "foreach", torch.float32, has_missing=False)
    results = []
    for chosen in (None, engine):
        parameters, optimizer = case.build()
        handle = swapped(optimizer, chosen, tier="mapped") if chosen else None
        for step in range(4):
            case.set_gradients(parameters, step)
            optimizer.step()
            optimizer.state[parameters[2]]["exp_avg"].mul_(0.5)
            optimizer.state[parameters[5]]["exp_avg_sq"] = optimizer.state[parameters[5]]["exp_avg_sq"] + 1.0
        results.append(result_of(parameters, optimizer))
        if handle:
            handle.detach()
    assert_same(results[1], results[0])


class _Late(torch.optim.Optimizer):
    """Counts in its state, on a stream: the host comes back before it has counted."""

    device: Any = None

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "count" not in state:
                    state["count"] = torch.zeros_like(parameter)
                count = state["count"]
                if self.device is None:
                    count.add_(1.0)
                else:
                    self.device.current.launch(functools.partial(_add_one, count))


def _add_one(count: torch.Tensor) -> None:
    with torch.no_grad():
        count.add_(1.0)


@pytest.mark.parametrize("policy", ["early", 1, 2, 3])
def test_the_host_reads_behind_the_kernels(policy: Any) -> None:
    """What a forgotten wait shows: the count of the step before."""
    device = SimDevice(policy)
    engine = AcceleratorEngine(device.device, 64 * MIB, ops=device)
    parameter = torch.nn.Parameter(torch.zeros(64, 64))
    optimizer = _Late([parameter])
    optimizer.device = None
    handle = swapped(optimizer, engine, tier="mapped")
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # made and adopted
    optimizer.device = device
    for step in range(2, 6):
        optimizer.step()
        assert bool((optimizer.state[parameter]["count"] == step).all()), step
    handle.detach()
    engine.close()


def test_buckets_take_no_memory_of_the_device() -> None:
    case = Case("AdamW", "foreach", torch.float32, has_missing=False)
    device = SimDevice(2, computes_on_host=True)
    device.room_bytes = 0
    engine = AcceleratorEngine(device.device, 64 * MIB, ops=device)
    assert_same(train(case, lambda o: swapped(o, engine, tier="mapped")), train(case, None))
    engine.close()


def test_pages_leave_the_process_behind_the_step(tmp_path: Path) -> None:
    """A step's resident memory rises by a few buckets, not by the state of 192 MiB."""
    program = """
import gc, threading, time, torch, lowtide
from lowtide.engines.tiers.host_buffers import configure_malloc

configure_malloc()
torch.set_num_threads(1)


def resident_mib():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 2**20


parameters = [torch.nn.Parameter(torch.full((1024, 1024), 0.5)) for _ in range(24)]
optimizer = torch.optim.AdamW(parameters, lr=0.1, fused=True)
gradient = torch.full((1024, 1024), 0.25)
for parameter in parameters:
    parameter.grad = gradient
before, most, over = resident_mib(), 0.0, False
handle = lowtide.swap_optimizer(optimizer, tier="mapped", bucket_bytes="8MiB")
optimizer.step()


def watch():
    global most
    while not over:
        most = max(most, resident_mib())
        time.sleep(0.001)


gc.collect()
thread = threading.Thread(target=watch)
thread.start()
for _ in range(2):
    optimizer.step()
over = True
thread.join()
print(handle.stats.swapped_bytes / 2**20, most - before)
"""
    status, out, err = processes.program(program, tmp_path)
    assert status == 0, err
    state_mib, most_mib = map(float, out.split())
    assert state_mib == 192
    assert most_mib <= 64


def _refusal(**options: Any) -> str:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(64, 64))])
    with pytest.raises(lowtide.ConfigError) as caught:
        lowtide.swap_optimizer(optimizer, tier="mapped", **options)
    assert "step" not in vars(optimizer)
    return str(caught.value).removeprefix("lowtide.swap_optimizer: ")


def test_refusals() -> None:
    assert _refusal(overlap="backward") == (
        "tier 'mapped' has no copies that backward could hide; use overlap 'step' or 'in_backward'"
    )

    class Other(SimDevice):
        def in_place(self, pinned: torch.Tensor) -> torch.UntypedStorage:
            return TorchDevice.in_place(self, pinned)  # type: ignore[arg-type]

    device = Other()
    engine = AcceleratorEngine(device.device, 64 * MIB, ops=device)
    assert _refusal(engine=engine) == (
        "tier 'mapped': kernels of 'cpu' cannot be shown main memory that the host sees too; use tier 'host'"
    )
    assert engine.memory_in_use() == {"host": 0}
    engine.close()
