"""A swapped optimizer on a real device: same bits, none of the state there between steps, three buckets in a step."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import lowtide
from benchmarks.device_sizes import sizes_of
from lowtide.optimizer.swap import OptimizerSwap
from tests.support.zoo import same_bits

pytestmark = pytest.mark.gpu
MIB = 2**20
NUM_PARAMETERS = 24


def _device() -> torch.device:
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    return torch.device(kind.type, torch.accelerator.current_device_index())


@functools.lru_cache(maxsize=1)
def _side() -> int:
    """Of each parameter, a square."""
    return max(256, min(sizes_of(_device()).side, 1024))


def _bucket_bytes() -> int:
    """Of four parameters in float32."""
    return 16 * _side() ** 2


def _make(flags: dict[str, Any], dtype: torch.dtype) -> tuple[list[torch.nn.Parameter], torch.optim.Optimizer]:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(_side(), _side(), generator=generator).to(dtype) for _ in range(NUM_PARAMETERS)]
    parameters = [torch.nn.Parameter(value.to(_device())) for value in values]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    return parameters, torch.optim.AdamW(parameters, lr=0.01, **flags)


def _steps(parameters: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer, count: int) -> None:
    for step in range(count):
        for number, parameter in enumerate(parameters):
            assert parameter.grad is not None
            parameter.grad.copy_(parameter.detach().sin() * (0.1 * step + number))
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("flags", [{"fused": True}, {"foreach": True}, {"foreach": False}], ids=str)
def test_same_bits(flags: dict[str, Any], dtype: torch.dtype) -> None:
    plain_parameters, plain = _make(flags, dtype)
    _steps(plain_parameters, plain, 6)
    ways = [{"overlap": "step"}, {"overlap": "backward"}]
    if _device().type == "cuda":
        ways.append({"tier": "mapped"})
    for way in ways:
        parameters, optimizer = _make(flags, dtype)
        with lowtide.swap_optimizer(optimizer, bucket_bytes=_bucket_bytes(), **way):
            _steps(parameters, optimizer, 6)
            for parameter, twin in zip(parameters, plain_parameters, strict=True):
                for key in ("exp_avg", "exp_avg_sq"):
                    value = optimizer.state[parameter][key]
                    assert value.device.type == "cpu"
                    assert same_bits(value, plain.state[twin][key].cpu())
        for parameter, twin in zip(parameters, plain_parameters, strict=True):
            assert same_bits(parameter.detach(), twin.detach())
            assert same_bits(optimizer.state[parameter]["exp_avg"], plain.state[twin]["exp_avg"])


def test_the_device_holds_buckets_only() -> None:
    device = _device()
    module = torch.get_device_module(device)
    _parameters, optimizer = _make({"fused": True}, torch.float32)
    handle: OptimizerSwap = lowtide.swap_optimizer(optimizer, bucket_bytes=_bucket_bytes(), overlap="step")
    before = module.memory_allocated(device)
    for _ in range(4):
        module.reset_peak_memory_stats(device)
        optimizer.step()
        torch.accelerator.synchronize(device)
        assert module.memory_allocated(device) - before <= NUM_PARAMETERS * 512, "a `step` for each parameter"
        # The first step makes the state of one bucket beside the buckets.
        assert module.max_memory_allocated(device) - before <= 4 * _bucket_bytes() + MIB
    assert handle.stats.swapped_bytes == 8 * NUM_PARAMETERS * _side() ** 2
    handle.detach()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("flags", [{"fused": True}, {"foreach": True}, {"foreach": False}, {}], ids=str)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.RMSprop])
def test_a_parameter_that_steps_in_stretches_has_the_same_bits(kind: Any, flags: dict[str, Any], dtype: Any) -> None:
    if kind is torch.optim.RMSprop and flags.get("fused"):
        pytest.skip("torch has none")
    flags = {"lr": 0.01, "weight_decay": 0.1, **flags, **({"momentum": 0.9} if kind is not torch.optim.AdamW else {})}
    if kind is torch.optim.Adam:
        del flags["momentum"]
    results = []
    for is_swapped in (False, True):
        values = torch.linspace(-1, 1, 5 * 65_536 + 40_001, device=_device()).to(dtype)
        parameter = torch.nn.Parameter(values)
        optimizer = kind([parameter], **flags)
        handle = lowtide.swap_optimizer(optimizer, bucket_bytes="1MiB") if is_swapped else None
        for step in range(5):
            parameter.grad = (parameter.detach() * 37 + step).sin()
            optimizer.step()
        if handle is not None:
            assert handle.stats.num_buckets >= 2
            handle.detach()
        state = [value for value in optimizer.state[parameter].values() if isinstance(value, torch.Tensor)]
        results.append([parameter.detach(), *state])
    assert all(same_bits(one, other) for one, other in zip(*results, strict=True))
