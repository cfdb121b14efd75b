"""The error for a saved tensor that was written to: the words of the torch that is installed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lowtide.tensors.view import Shape, View, may_overlap

ROWS = 3


def of_a_leaf(x: Tensor) -> Tensor:
    return x


def of_an_operator(x: Tensor) -> Tensor:
    return x.sin()


def of_a_second_output(x: Tensor) -> Tensor:
    return torch.topk(x, 2).values


def of_a_view(x: Tensor) -> Tensor:
    return x.sin()[1:]


def of_another_view(x: Tensor) -> Tensor:
    return x.sin().t()


@pytest.mark.filterwarnings("ignore:.*Anomaly Detection:UserWarning", "ignore:Error detected:UserWarning")
@pytest.mark.parametrize("is_anomaly", [False, True])
@pytest.mark.parametrize("make", [of_a_leaf, of_an_operator, of_a_second_output, of_a_view, of_another_view])
def test_the_error_has_the_words_of_autograd(make: Callable[[Tensor], Tensor], is_anomaly: bool) -> None:
    saved = make(torch.rand(ROWS, 4, requires_grad=True))
    with torch.autograd.set_detect_anomaly(is_anomaly):
        words, plain = _both_words(saved, (saved * torch.ones_like(saved).requires_grad_()).sum())
    assert words == plain


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.complex64])
def test_the_words_are_those_for_any_type(dtype: torch.dtype) -> None:
    saved = torch.rand(ROWS, 4, requires_grad=True).to(dtype)
    words, plain = _both_words(saved, (saved * torch.ones_like(saved).requires_grad_()).abs().sum())
    assert words == plain


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool])
def test_the_words_are_those_for_what_has_no_gradient(dtype: torch.dtype) -> None:
    saved = torch.zeros(2, dtype=dtype)
    source = torch.rand(2, requires_grad=True)
    result = source.masked_fill(saved, 1.0) if dtype is torch.bool else source.index_select(0, saved)
    words, plain = _both_words(saved, result.sum())
    assert words == plain


def _both_words(saved: Tensor, result: Tensor) -> tuple[str, str]:
    """Of our error and of autograd's, once `saved` was written to."""
    view = View(saved)
    with torch.no_grad():
        saved.bitwise_not_() if saved.dtype is torch.bool else saved.add_(1)
    with pytest.raises(RuntimeError) as ours:
        view.check()
    with pytest.raises(RuntimeError) as plain:
        result.backward()
    return str(ours.value), str(plain.value)


def _elements(shape: Shape) -> set[int]:
    indices = itertools.product(*map(range, shape.size))
    return {shape.offset + sum(i * step for i, step in zip(index, shape.stride, strict=True)) for index in indices}


def test_views_that_share_an_element_may_overlap() -> None:
    draw = random.Random(0)
    num_apart = 0
    for _ in range(3000):
        strides = [tuple(draw.choice((0, 1, 2, 3, 4, 6, 8, 12)) for _ in range(draw.randint(0, 3)))] * 2
        if draw.random() < 0.2:
            strides[1] = tuple(draw.choice((1, 2, 4, 8)) for _ in strides[0])
        one, other = (
            Shape(tuple(draw.randint(0, 4) for _ in stride), stride, draw.randint(0, 20), torch.float32)
            for stride in strides
        )
        assert may_overlap(one, other) == may_overlap(other, one)
        if _elements(one) & _elements(other):
            assert may_overlap(one, other)
        else:
            num_apart += not may_overlap(one, other)
    assert num_apart > 1000


@pytest.mark.parametrize(("dim", "count"), [(0, 2), (1, 3), (2, 2), (-1, 5)])
def test_chunks_of_a_tensor_lie_apart(dim: int, count: int) -> None:
    base = torch.empty(6, 9, 10)
    for one, other in itertools.combinations(map(Shape.of, base.chunk(count, dim)), 2):
        assert not may_overlap(one, other)
        assert may_overlap(one, Shape.of(base))
