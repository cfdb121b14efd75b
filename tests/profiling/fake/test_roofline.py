"""Flops and bytes of operators, against counts made by hand."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from lowtide.profiling.fake.roofline import (
    attention_kernel,
    is_attention,
    op_bytes,
    op_flops,
    op_seconds,
    workspace_bytes,
)
from lowtide.profiling.fake.trace import trace
from lowtide.recipes.graph import OpCall, Storage, Value
from tests.support.profiles import ROUND_HARDWARE as HARDWARE


def value(*size: int, dtype: torch.dtype = torch.float32, stride: tuple[int, ...] | None = None) -> Value:
    tensor = torch.empty(size, dtype=dtype, device="meta")
    storage = Storage(index=id(tensor), nbytes=0, dtype=dtype, name="", kind="made")
    strides = tensor.stride() if stride is None else stride
    return Value(storage, 0, size, strides, 0, dtype, torch.device("cpu"))


def call(func: object, *args: object, out: tuple[Value, ...], **kwargs: object) -> OpCall:
    return OpCall(0, func, args, kwargs, out, "", 0.0, False)


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


def test_a_gather_reads_what_it_is_asked_for() -> None:
    table, index = value(64, 1000), value(64, 1, dtype=torch.int64)
    picked = call(torch.ops.aten.gather.default, table, 1, index, out=(value(64, 1),))
    assert op_bytes(picked) == 64 * (4 + 8 + 4)
    written = call(torch.ops.aten.scatter_.src, table, 1, index, value(64, 1), out=(table,))
    assert op_bytes(written) == 64 * (4 + 8 + 4)
    many = value(64, 5000, dtype=torch.int64)
    wide = call(torch.ops.aten.gather.default, table, 1, many, out=(value(64, 5000),))
    assert op_bytes(wide) == 64 * (4000 + 5000 * 8 + 5000 * 4)


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


def attention_call(
    *, dtype: torch.dtype = torch.bfloat16, mask: Value | None = None, is_backward: bool = False, tokens: int = 4096
) -> OpCall:
    q, k, v, out = (value(1, 8, tokens, 128, dtype=dtype) for _ in range(4))
    sums = value(1, 8, tokens)
    ops = torch.ops.aten
    if is_backward:
        func = ops._scaled_dot_product_flash_attention_for_cpu_backward.default
        return call(func, out, q, k, v, out, sums, 0.0, True, out=(q, k, v), attn_mask=mask)
    func = ops._scaled_dot_product_flash_attention_for_cpu.default
    return call(func, q, k, v, 0.0, True, out=(out, sums), attn_mask=mask)


def test_attention_takes_the_kernel_that_torch_takes_by_default() -> None:
    assert attention_kernel(attention_call()) == "flash"
    assert attention_kernel(attention_call(is_backward=True)) == "flash"
    assert attention_kernel(attention_call(mask=value(4096, 4096))) == "efficient"
    assert attention_kernel(attention_call(mask=value(4096, 4096), is_backward=True)) == "efficient"
    assert attention_kernel(attention_call(dtype=torch.float32)) == "efficient"


def test_each_pass_of_each_kernel_has_a_rate_of_its_own() -> None:
    flops = 2 * 8 * 4096 * 4096 * 256 / 2
    mask = value(4096, 4096)
    assert op_seconds(attention_call(), HARDWARE) == pytest.approx(flops / 1e9)
    assert op_seconds(attention_call(is_backward=True), HARDWARE) == pytest.approx(2.5 * flops / 5e8)
    assert op_seconds(attention_call(mask=mask), HARDWARE) == pytest.approx(flops / 4e8)
    # Of another dtype as much less as its products are.
    assert op_seconds(attention_call(dtype=torch.float32), HARDWARE) == pytest.approx(flops / 2e8)
    ramped = dataclasses.replace(HARDWARE, ramp_tokens=1024.0)
    assert op_seconds(attention_call(), ramped) == pytest.approx(1.25 * flops / 1e9)
    del_efficient = dataclasses.replace(HARDWARE, attention={"flash": (1e9, 5e8)})
    assert op_seconds(attention_call(mask=mask), del_efficient) == pytest.approx(flops / 1e9)


def test_a_product_takes_whole_waves_of_whole_tiles() -> None:
    hardware = dataclasses.replace(HARDWARE, multiprocessors=4)

    def seconds(rows: int, columns: int) -> float:
        left, right = value(rows, 4096), value(4096, columns)
        return op_seconds(call(torch.ops.aten.mm.default, left, right, out=(value(rows, columns),)), hardware)

    full = seconds(256, 512)  # four tiles of 128 x 256: one wave
    assert full == pytest.approx(2 * 256 * 512 * 4096 / 1e9)
    assert seconds(128, 512) == full  # half a wave takes as long
    assert seconds(512, 256) == full  # the tile lies the other way
    assert seconds(640, 256) == pytest.approx(2 * full)  # a fifth tile begins a second wave
    assert hardware.tile_share(256, 512) == 1.0 and hardware.tile_share(0, 512) == 1.0
    assert HARDWARE.tile_share(3, 5) == 1.0  # of no known number of multiprocessors


def test_eager_operators_have_the_rate_that_they_reach() -> None:
    hardware = dataclasses.replace(HARDWARE, eager_bytes_per_second=5e8)
    x, y = value(1000, 1000), value(1000, 1000, stride=(1, 1000))
    assert op_seconds(call(torch.ops.aten.neg.default, x, out=(y,)), hardware) == pytest.approx(8e6 / 5e8)
    assert hardware.op_seconds(0.0, 8e6, "float32", is_fused=True) == pytest.approx(8e6 / 1e9)
    thin = call(torch.ops.aten.mm.default, value(1000, 1), value(1, 1000), out=(value(1000, 1000),))
    assert op_seconds(thin, hardware) == pytest.approx(4.008e6 / 1e9)  # a product's traffic is a copy's


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


def _attention_backward(heads: int, keys: int, tokens: int, width: int, dtype: torch.dtype) -> OpCall:
    q, k = value(1, heads, tokens, width, dtype=dtype), value(1, keys, tokens, width, dtype=dtype)
    func = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    return call(func, q, q, k, k, q, value(1, heads, tokens), 0.0, True, out=(q, k, k))


@pytest.mark.parametrize(
    ("sizes", "dtype", "nbytes"),
    [
        # Llama-3-8B: dQ in fp32 and a number a row, then dK and dV for each head of queries: 16 + 1/8 + 16 KiB a token.
        ((32, 8, 1024, 128), torch.bfloat16, 1024 * (32 * 4 * 129 + 2 * 32 * 128 * 2)),
        ((32, 32, 1024, 128), torch.bfloat16, 1024 * 32 * 4 * 129),
        ((4, 4, 1000, 80), torch.float16, 1024 * 4 * 4 * 97),  # rows and widths are rounded up
        ((32, 8, 1024, 128), torch.float32, 1024 * 32 * 4 * 129),  # the memory-efficient kernel
    ],
)
def test_what_attention_takes_for_itself_in_backward(
    sizes: tuple[int, int, int, int], dtype: torch.dtype, nbytes: int
) -> None:
    backward = _attention_backward(*sizes, dtype)
    assert workspace_bytes(backward) == nbytes
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    assert workspace_bytes(call(forward, *backward.args[1:4], 0.0, True, out=())) == 0
    assert workspace_bytes(call(torch.ops.aten.neg.default, value(4), out=(value(4),))) == 0
