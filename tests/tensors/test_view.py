"""The error for a saved tensor that was written to: the words of the torch that is installed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lowtide.tensors.view import View

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
