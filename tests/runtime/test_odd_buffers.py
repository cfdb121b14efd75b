"""Buffers of kinds that torch treats apart. Quantized: it ends the process where their bytes are looked at as those of
other tensors. Expanded: it does not write to them. On the meta device: there is nothing to compare."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from lowtide.tensors.view import same_bytes
from tests.support.virtual_engine import virtual

pytestmark = pytest.mark.filterwarnings("ignore:torch.quantize_per_:UserWarning")


def _quantized(scale: float = 0.01, num: int = 16) -> Tensor:
    return torch.quantize_per_tensor(torch.linspace(-1, 1, num * num).view(num, num), scale, 0, torch.qint8)


def _quantized_by_row(scale: float = 0.01, zeros: torch.dtype = torch.int64) -> Tensor:
    scales, values = torch.linspace(scale, 2 * scale, 16), torch.linspace(-1, 1, 256).view(16, 16)
    kind = torch.quint8 if zeros.is_floating_point else torch.qint8
    return torch.quantize_per_channel(values, scales, torch.zeros(16, dtype=zeros), 0, kind)


def test_so_are_those_with_a_scale_for_each_row() -> None:
    one = _quantized_by_row()
    assert same_bytes(one, one.clone())
    other = one.clone()
    other.copy_(-one.dequantize())
    assert not same_bytes(one, other)
    other.copy_(one.dequantize())
    assert same_bytes(one, other)
    assert not same_bytes(one, _quantized_by_row(0.011))


def test_quantized_tensors_are_the_same_if_numbers_and_scale_are() -> None:
    one = _quantized()
    assert same_bytes(one, one.clone())
    assert not same_bytes(one, torch.quantize_per_tensor(-one.dequantize(), 0.01, 0, torch.qint8))
    same_numbers = torch.quantize_per_tensor(one.int_repr() * 0.02, 0.02, 0, torch.qint8)
    assert torch.equal(same_numbers.int_repr(), one.int_repr())
    assert not same_bytes(one, same_numbers)


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("code", _quantized())
        self.register_buffer("rows", _quantized_by_row())
        self.register_buffer("table", _quantized_by_row(zeros=torch.float32))  # which torch does not clone
        self.register_buffer("row", torch.linspace(-1, 1, 16).expand(4, 16))
        self.sizes = torch.empty(3, 4, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.linear(self.linear(x).tanh() + self.row, self.code.dequantize()) * len(self.sizes)
        self.rows.copy_(self.rows.dequantize().roll(1, 1))
        return x + F.linear(hidden, self.rows.dequantize() + self.table.dequantize())


@pytest.mark.parametrize("memory", [{"recompute": "all"}, {"swap": "all"}, {"budget": "1GiB"}])
def test_a_layer_with_such_buffers_trains_to_the_same_bits(memory: dict[str, Any]) -> None:
    def run(is_planned: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*(_Layer() for _ in range(3)))
        tide = lowtide.apply(model, {**memory, "min_bytes": 0}, engine=virtual(1)) if is_planned else None
        for step in range(3):
            model[1].code = torch.quantize_per_tensor(torch.randn(16, 16), 0.02, step, torch.qint8)
            model(torch.randn(4, 16)).square().mean().backward()
        if tide is not None:
            tide.remove()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    assert all(map(torch.equal, run(True), run(False)))
