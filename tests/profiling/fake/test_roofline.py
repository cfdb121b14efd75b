"""Flops and bytes of operators, against counts made by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lowtide.profiling.fake.roofline import is_attention, op_bytes, op_flops, op_seconds
from lowtide.profiling.fake.trace import trace
from lowtide.recipes.graph import Call, Storage, Value
from lowtide.timeline.hardware import Hardware
from lowtide.timeline.step import Link

HARDWARE = Hardware(
    name="cpu-like",
    memory_bytes=2**30,
    flops_per_second={"float32": 1e9, "bfloat16": 2e9},
    attention_share=0.5,
    memory_bytes_per_second=1e9,
    launch_seconds=1e-6,
    link=Link(out_bytes_per_second=1e8, in_bytes_per_second=1e8),
)


def value(*size: int, dtype: torch.dtype = torch.float32, stride: tuple[int, ...] | None = None) -> Value:
    tensor = torch.empty(size, dtype=dtype, device="meta")
    storage = Storage(index=id(tensor), nbytes=0, dtype=dtype, name="", kind="made")
    strides = tensor.stride() if stride is None else stride
    return Value(storage, 0, size, strides, 0, dtype, torch.device("cpu"))


def call(func: object, *args: object, out: tuple[Value, ...], **kwargs: object) -> Call:
    return Call(0, func, args, kwargs, out, "", 0.0, False, False)


def test_a_product_counts_two_flops_for_each_multiplication() -> None:
    product = call(torch.ops.aten.mm.default, value(8, 16), value(16, 32), out=(value(8, 32),))
    assert op_flops(product) == 2 * 8 * 16 * 32
    assert op_bytes(product) == 4 * (8 * 16 + 16 * 32 + 8 * 32)
    assert op_seconds(product, HARDWARE) == pytest.approx(8192e-9)


def test_views_cost_nothing_and_small_operators_a_launch() -> None:
    x = value(4, 4)
    assert op_seconds(call(torch.ops.aten.t.default, x, out=(x,)), HARDWARE) == 0
    assert op_seconds(call(torch.ops.aten._unsafe_view.default, x, [16], out=(x,)), HARDWARE) == 0
    assert op_seconds(call(torch.ops.aten.neg.default, x, out=(value(4, 4),)), HARDWARE) == 1e-6


def test_an_expanded_tensor_is_read_once() -> None:
    wide = value(1000, 4, stride=(0, 1))
    assert op_bytes(call(torch.ops.aten.neg.default, wide, out=(value(1000, 4),))) == 4 * 4 + 4 * 4000


@pytest.mark.parametrize("is_causal", [False, True])
def test_causal_attention_counts_half(is_causal: bool) -> None:
    q, k, v = value(2, 8, 64, 16), value(2, 2, 128, 16), value(2, 2, 128, 16)
    out = (value(2, 8, 64, 16), value(2, 8, 64))
    forward = call(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default, q, k, v, 0.0, is_causal, out=out)
    full = 2 * 2 * 8 * 64 * 128 * 32
    assert is_attention(forward)
    assert op_flops(forward) == full / (2 if is_causal else 1)
    backward = call(
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        out[0], q, k, v, *out, 0.0, is_causal, out=(q, k, v),
    )  # fmt: skip
    assert op_flops(backward) == 2.5 * full / (2 if is_causal else 1)


def test_grouped_products_count_every_row_once() -> None:
    func = torch.ops.aten._grouped_mm.default
    rows, experts = value(100, 16), value(4, 16, 32)
    assert op_flops(call(func, rows, experts, value(4), out=(value(100, 32),))) == 2 * 100 * 16 * 32
    # The gradient of the experts: columns of the left belong to groups.
    assert op_flops(call(func, value(16, 100), value(100, 32), value(4), out=(experts,))) == 2 * 16 * 100 * 32


def test_a_model_takes_six_flops_for_each_weight_and_token() -> None:
    """Forward 2, backward 4, less the gradient of the first layer's input."""
    hardware = HARDWARE.__class__(**{**{f: getattr(HARDWARE, f) for f in HARDWARE.__slots__}, "launch_seconds": 0.0})
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256, bias=False) for _ in range(4)))
    profile = trace(model, (torch.empty(512, 256),), hardware=hardware, loss=lambda y: y.sum())
    products = [s for n, s in zip(profile.op_names, profile.op_seconds) if ".mm" in n]
    expected = 2 * 256 * 256 * 512 / 1e9
    assert sum(products) == pytest.approx((3 * 4 - 1) * expected, rel=0.01)


def test_convolutions_and_softmax_have_a_cost() -> None:
    model = torch.nn.Conv2d(3, 8, 3)
    profile = trace(model, (torch.empty(2, 3, 16, 16),), hardware=HARDWARE, loss=lambda y: F.softmax(y, -1).sum())
    flops = 2 * 2 * 8 * 14 * 14 * 27
    named = dict(zip(profile.op_names, profile.op_seconds))
    assert named["conv"] == pytest.approx(max(flops / 1e9, 1e-6))
