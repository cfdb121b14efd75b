"""Codecs: every bit comes back, whatever the values; what does not fit is refused; no more memory than is said."""

from __future__ import annotations

import contextlib
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.tensors.codecs import KINDS, always_fits, encode, encoded_bytes, kinds_of, work_bytes
from lowtide.tensors.live_bytes import LiveBytes
from lowtide.tensors.view import byte_view

DTYPES = {
    1: (torch.uint8, torch.int8, torch.float8_e4m3fn),
    2: (torch.float16, torch.bfloat16, torch.int16),
    4: (torch.float32, torch.int32),
    8: (torch.float64, torch.int64),
}
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SPECIAL = (0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-45, -1e-45, 1.0, 1 / 0.9)
"""1e-45 is a denormal of float32."""
PYTHON_BYTES = 20_000
"""Of objects that are no arrays, while a codec runs and is watched."""
NUMBERS = st.one_of(st.integers(1, 70), st.sampled_from((4095, 4096, 4097, 8191, 8193, 200_003)))


def back(tensor: Tensor, kind: str) -> Tensor:
    encoded = encode(kind, tensor.untyped_storage(), tensor.dtype)
    assert encoded is not None
    assert encoded.data.untyped_storage().nbytes() == encoded_bytes(kind, tensor.nbytes, tensor.dtype)
    return encoded.decoder.run([encoded.data], tensor.device)


def assert_back(tensor: Tensor, kind: str) -> None:
    made = back(tensor, kind)
    assert made.dtype is tensor.dtype
    assert torch.equal(byte_view(made.untyped_storage()), byte_view(tensor.untyped_storage()))


def drawn(count: int, seed: int) -> Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(seed)) < 0.3


@given(count=NUMBERS, seed=st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_bits_of_bool(count: int, seed: int) -> None:
    assert_back(drawn(count, seed), "bits")


@given(
    count=NUMBERS,
    seed=st.integers(0, 1000),
    width=st.sampled_from((1, 2, 4, 8)),
    patterns=st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)),
)
@settings(max_examples=80, deadline=None)
def test_any_two_bit_patterns(count: int, seed: int, width: int, patterns: tuple[int, int]) -> None:
    """Among them NaN with payloads, signalling ones too; as integers, so that nothing on the way makes them quiet."""
    one, other = (torch.tensor([p % 2**63]).view(INTEGERS[width])[:1] for p in patterns)
    elements = torch.where(drawn(count, seed), one, other)
    for dtype in DTYPES[width]:
        assert_back(elements.view(dtype), "two values")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_special_values(dtype: torch.dtype) -> None:
    for one in SPECIAL:
        for other in SPECIAL:
            where = drawn(100, 1)
            values = torch.tensor([one, other], dtype=dtype)
            assert_back(values[where.long()], "two values")


@pytest.mark.parametrize("kind", ["uint8", "int16", "int32"])
@pytest.mark.parametrize("wide", [torch.int16, torch.int32, torch.int64])
def test_indices_up_to_the_limits_of_the_type_and_not_beyond(kind: str, wide: torch.dtype) -> None:
    limits = torch.iinfo(getattr(torch, kind))
    if limits.bits >= torch.iinfo(wide).bits:
        assert kind not in kinds_of(wide)
        return
    for least, most in ((limits.min, limits.max), (0, 1), (limits.max, limits.max)):
        assert_back(torch.tensor([least, most] * 3000 + [least], dtype=wide), kind)
    for outside in (limits.min - 1, limits.max + 1):
        for place in (0, 5999):
            tensor = torch.zeros(6000, dtype=wide)
            tensor[place] = outside
            assert encode(kind, tensor.untyped_storage(), wide) is None


def test_a_third_value_is_refused_wherever_it_is() -> None:
    """The sign of zero is a value of its own, and so is another NaN."""
    for third in (-0.0, 2.0, float("nan")):
        for place in (0, 1, 4095, 4096, 200_000, 299_999):
            noise = drawn(300_000, place).float()
            noise[place] = third
            assert encode("two values", noise.untyped_storage(), noise.dtype) is None
    nans = torch.tensor([0x7FC00000, 0x7FC00001, 0x7FC00002], dtype=torch.int32).repeat(10).view(torch.float32)
    assert encode("two values", nans.untyped_storage(), nans.dtype) is None


def test_what_no_kernel_writes_as_bool_is_refused_on_the_host() -> None:
    for count in (9, 300_000):
        odd = drawn(count, 2).view(torch.uint8)
        odd[-1] = 2
        assert encode("bits", odd.untyped_storage(), torch.bool) is None


def test_storages_that_are_no_whole_number_of_aligned_elements() -> None:
    odd = torch.zeros(13, dtype=torch.uint8).untyped_storage()
    assert encode("two values", odd, torch.float32) is None
    assert encode("two values", torch.empty(0).untyped_storage(), torch.float32) is None
    buffer = bytearray(64)
    shifted = torch.frombuffer(memoryview(buffer)[1:41], dtype=torch.uint8)
    assert encode("bits", shifted.untyped_storage(), torch.bool) is None


def test_the_whole_storage_comes_back_for_a_view_of_it() -> None:
    noise = drawn(10_000, 3).float().div(0.9).reshape(100, 100)
    view = noise.t()[5:, ::2]
    encoded = encode("two values", view.untyped_storage(), view.dtype)
    assert encoded is not None
    made = encoded.decoder.run([encoded.data], view.device)
    again = torch.empty(0).set_(made.untyped_storage(), view.storage_offset(), view.size(), view.stride())
    assert torch.equal(again, view)


@pytest.mark.parametrize("count", [100, 4_097, 5_000_003])
@pytest.mark.parametrize("kind", KINDS)
def test_no_more_memory_than_is_said(kind: str, count: int) -> None:
    dtype = {"bits": torch.bool, "two values": torch.int16}.get(kind, torch.int64)
    tensor = drawn(count, 4).to(dtype)
    told = work_bytes(kind, tensor.nbytes, tensor.dtype)
    assert told < max(tensor.nbytes / 7, 600_000)
    with peak_of(tensor):
        back(tensor, kind)  # the first dispatch mode imports sympy
    with peak_of(tensor) as peak:
        encoded = encode(kind, tensor.untyped_storage(), tensor.dtype)
    assert encoded is not None
    assert peak() <= tensor.nbytes + encoded.data.nbytes + told
    with peak_of(encoded.data) as peak:
        made = encoded.decoder.run([encoded.data], tensor.device)
    assert peak() <= made.nbytes + encoded.data.nbytes + told


@contextlib.contextmanager
def peak_of(tensor: Tensor) -> Iterator[Any]:
    """Most bytes at once, `tensor`'s too: of torch's storages, and of numpy's arrays at their own worst moment."""
    live = LiveBytes(device_type="cpu")
    live.add(tensor.untyped_storage())
    tracemalloc.start()
    try:
        with live:
            yield lambda: live.peak_bytes + max(0, arrays - PYTHON_BYTES)
        arrays = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


class Operators(TorchDispatchMode):
    """Which operators run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", KINDS)
def test_the_host_launches_no_operator_that_asks_for_threads(kind: str) -> None:
    """In a new thread, to ask for their number is to set it. And each launch costs more than the bytes of a piece."""
    dtype = {"bits": torch.bool, "two values": torch.float32}.get(kind, torch.int64)
    tensor = drawn(300_000, 5).to(dtype)
    with Operators() as ran:
        back(tensor, kind)
    of_numpy = {"detach", "to", "resolve_conj", "resolve_neg"}
    assert {name.split(".")[1] for name in ran.names} <= {"empty", "set_", "view", *of_numpy}
    assert len([name for name in ran.names if name.split(".")[1] not in of_numpy]) <= 8


def test_kinds() -> None:
    assert always_fits(torch.bool) == "bits"
    assert always_fits(torch.float32) is None
    assert kinds_of(torch.bool) == ("bits",)
    assert kinds_of(torch.complex64) == ()
    assert kinds_of(torch.int32) == ("two values", "uint8", "int16")
    assert kinds_of(torch.float32) == ("two values",)
    assert {kind for dtype in (torch.bool, torch.int64, torch.float32) for kind in kinds_of(dtype)} == set(KINDS)


def test_nothing_of_autograd_or_autocast_takes_part() -> None:
    noise = drawn(100, 5).float()
    with torch.enable_grad(), torch.autocast("cpu", torch.bfloat16):
        made = back(noise, "two values")
    assert not made.requires_grad
    assert made.dtype is torch.float32
