"""State by kind of optimizer: what torch's own make, to the byte; and the published sizes of the others."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from lowtide.core.decisions import Prediction
from lowtide.core.profile import StateBytes
from lowtide.planner.optimizer_kinds import NOT_OF_SHARDS, Weight, shard_of, state_by_kind
from lowtide.report.budget_sweep import forecast_lines, optimizer_forecast
from lowtide.tensors.live_bytes import optimizer_tensors, unique_bytes
from lowtide.units import GIB

SHAPES = {"embedding": (64, 32), "layer.mix": (32, 32), "layer.narrow": (8, 32), "layer.norm": (32,), "head": (64, 32)}


def weights(dtype: torch.dtype) -> list[Weight]:
    return [
        Weight(shape=shape, element_bytes=dtype.itemsize, is_in_layer=name.startswith("layer"))
        for name, shape in SHAPES.items()
    ]


def state_of(kind: Any, names: tuple[str, ...], dtype: torch.dtype, **how: Any) -> int:
    """Of a real optimizer after a step, without counters of steps."""
    parameters = [nn.Parameter(torch.ones(SHAPES[name], dtype=dtype)) for name in names]
    optimizer = kind(parameters, lr=1e-3, **how)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return unique_bytes(tensor for tensor in optimizer_tensors(optimizer) if tensor.dim())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_torch_makes(dtype: torch.dtype) -> None:
    found, every = state_by_kind(weights(dtype)), tuple(SHAPES)
    inside = ("layer.mix", "layer.narrow")
    others = tuple(name for name in every if name not in inside)
    assert found["SGD"] == state_of(torch.optim.SGD, every, dtype) == 0
    assert found["SGD with momentum"] == state_of(torch.optim.SGD, every, dtype, momentum=0.9)
    assert found["AdamW"] == state_of(torch.optim.AdamW, every, dtype)
    assert found["Adafactor"] == state_of(torch.optim.Adafactor, every, dtype)
    assert found["Muon"] == state_of(torch.optim.Muon, inside, dtype) + state_of(torch.optim.AdamW, others, dtype)


def test_published_sizes() -> None:
    half, whole = state_by_kind(weights(torch.bfloat16)), state_by_kind(weights(torch.float32))
    num = 2 * 2048 + 1024 + 256 + 32
    assert half["AdamW with fp32 masters"] == 12 * num  # ZeRO: 12 bytes beside 2 of weights and 2 of gradients
    assert whole["AdamW with fp32 masters"] == 8 * num
    assert half["AdamW in 8 bits"] == 8 * num  # all below 4,096 elements
    large = [Weight(shape=(4096, 4097), element_bytes=2, is_in_layer=True)]
    count = 4096 * 4097
    assert state_by_kind(large)["AdamW in 8 bits"] == 2 * count + 8 * (count // 256)
    experts = [Weight(shape=(8, 100, 10), element_bytes=4, is_in_layer=True)]
    assert state_by_kind(experts)["Adafactor"] == 8 * 110 * 4


MOMENTUM = functools.partial(torch.optim.SGD, momentum=0.9)


def state_of_shards(kind: Any) -> int:
    """Of a real optimizer of the first of 3 ranks; the others are not there, and none of their bytes is asked for."""
    dist.init_process_group("fake", rank=0, world_size=3, store=FakeStore())
    try:
        layer = nn.Module()
        for name, shape in SHAPES.items():
            layer.register_parameter(name.replace(".", "_"), nn.Parameter(torch.ones(shape, dtype=torch.bfloat16)))
        fully_shard(layer, mesh=init_device_mesh("cpu", (3,)))
        optimizer = kind(layer.parameters(), lr=1e-3)
        for parameter in layer.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        tensors = [tensor for state in optimizer.state.values() for tensor in state.values() if tensor.dim()]
        return unique_bytes(tensor.to_local() for tensor in tensors)
    finally:
        dist.destroy_process_group()


def test_what_the_first_of_several_ranks_has() -> None:
    """3 ranks: 22, 11 and 3 rows of 64, 32 and 8, and 11 elements of the norm, as `fully_shard` deals them."""
    found = state_by_kind([shard_of(weight, 3) for weight in weights(torch.bfloat16)])
    num = 2 * 22 * 32 + 11 * 32 + 3 * 32 + 11
    assert found["AdamW"] == 2 * num * 2 and found["AdamW with fp32 masters"] == 12 * num
    assert found["SGD with momentum"] == num * 2 and found["Muon"] == (2 * num - 14 * 32) * 2
    assert not set(NOT_OF_SHARDS) & set(found)
    assert (found["AdamW"], found["SGD with momentum"]) == tuple(map(state_of_shards, (torch.optim.AdamW, MOMENTUM)))


def test_every_peak_moves_by_the_difference() -> None:
    predicted = Prediction(
        peak_bytes=9 * GIB, step_seconds=1.0, stall_seconds=0.0, recompute_seconds=0.0, gap=0.0,
        plain_peak_bytes=20 * GIB, plain_seconds=1.0, floor_bytes=8 * GIB, certainty="",
    )  # fmt: skip
    state = StateBytes(parameters=2 * GIB, gradients=2 * GIB, optimizer=4 * GIB)
    weight = Weight(shape=(1 << 15, 1 << 15), element_bytes=2, is_in_layer=True)
    assert forecast_lines(optimizer_forecast(predicted, state, [weight]), state) == [
        "what other optimizers would need",
        "optimizer                its state  everything kept     floor",
        "SGD                          0 MiB         16.0 GiB   4.0 GiB",
        "SGD with momentum          2.0 GiB         18.0 GiB   6.0 GiB",
        "Adafactor                  0.1 MiB         16.0 GiB   4.0 GiB",
        "AdamW in 8 bits            2.0 GiB         18.0 GiB   6.0 GiB",
        "Muon                       2.0 GiB         18.0 GiB   6.0 GiB",
        "AdamW                      4.0 GiB         20.0 GiB   8.0 GiB",
        "AdamW with fp32 masters   12.0 GiB         28.0 GiB  16.0 GiB",
        "gradients: 2.0 GiB when backward is over; none are there before it begins",
    ]
