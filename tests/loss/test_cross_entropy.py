"""The sliced cross entropy against torch's own, to the bit, over random cases."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide
from lowtide.errors import ConfigError
from lowtide.loss.cross_entropy import (
    rows_of_slice,
    saves_memory,
    sliced_cross_entropy,
    without_autocast,
)
from tests.support.zoo import same_bits

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_NUM_CASES = 1_050
_LAYOUTS = (
    lambda x: x,
    lambda x: x.t().contiguous().t(),  # as of a head that gives words by rows
    lambda x: F.pad(x, (0, 3))[:, : x.shape[1]],  # of a padded vocabulary
    lambda x: x,
)


def _case(seed: int) -> tuple[Tensor, Tensor, dict[str, Any], bool]:
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    num_rows = draw.choice((1, 7, 63, 64, 65, 130, 200, 513))
    num_words = draw.choice((1, 2, 5, 17, 32, 33, 100, 257, 1000, 1537))
    ignored = draw.choice((-100, 0, min(3, num_words - 1)))
    logits = torch.randn(num_rows, num_words, generator=generator) * draw.choice((1, 10))
    if draw.random() < 0.05:
        logits[0, 0] = draw.choice((float("inf"), float("-inf"), float("nan")))
    target = torch.randint(num_words, (num_rows,), generator=generator)
    target[torch.rand(num_rows, generator=generator) < draw.choice((0.0, 0.3, 0.9, 1.0))] = ignored
    how = {
        "ignore_index": ignored,
        "reduction": draw.choice(("mean", "sum", "none")),
    }
    dtype = draw.choice(_DTYPES)
    upcast = dtype is not torch.float64 and draw.random() < 0.6
    return _LAYOUTS[seed % len(_LAYOUTS)](logits.to(dtype)), target, how, upcast


@pytest.mark.parametrize("first", range(0, _NUM_CASES, 350))
def test_random_cases_have_the_same_bits(first: int) -> None:
    for seed in range(first, first + 350):
        numbers, target, how, upcast = _case(seed)
        plain, sliced = (numbers.detach().requires_grad_() for _ in range(2))
        want = F.cross_entropy(plain.float() if upcast else plain, target, **how)
        got = sliced_cross_entropy(sliced, target, upcast=upcast, slice_rows=(64, 128, None)[seed % 3], **how)
        outer = torch.randn(want.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(
            want.dtype
        )
        want.backward(outer)
        got.backward(outer)
        assert plain.grad is not None and sliced.grad is not None
        what = f"seed {seed}: {list(numbers.shape)} {numbers.dtype} upcast={upcast} {how}"
        assert same_bits(want.detach(), got.detach()), what
        assert same_bits(plain.grad, sliced.grad), what


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", _LAYOUTS[:3], ids=["rows", "columns", "padded"])
def test_the_gradient_is_laid_out_as_plain_autograd_s(layout: Any, dtype: torch.dtype) -> None:
    """What comes behind the logits may choose its kernel, and so its bits, by the layout of its gradient."""
    generator = torch.Generator().manual_seed(0)
    logits, target = layout(torch.randn(130, 33, generator=generator).to(dtype)), torch.arange(130) % 33
    strides: list[tuple[int, ...]] = []
    for loss in (
        lambda numbers: F.cross_entropy(numbers.float(), target),
        lambda numbers: sliced_cross_entropy(numbers, target, upcast=True),
    ):
        seen = logits.detach().requires_grad_().view_as(logits)
        seen.register_hook(lambda gradient: strides.append(gradient.stride()))
        loss(seen).backward()
    assert strides[0] == strides[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_slices_use_the_same_memory(dtype: torch.dtype) -> None:
    """Fresh memory would cost a page fault for each page, in each slice."""

    def storages_made(num_rows: int) -> int:
        logits, target = torch.zeros(num_rows, 33, dtype=dtype), torch.zeros(num_rows, dtype=torch.int64)
        with _Made(least_bytes=64 * 33 * 4) as made:
            loss = sliced_cross_entropy(logits.requires_grad_(), target, upcast=True, slice_rows=64)
            torch.autograd.grad(loss, logits)
        return len(made.storages)

    # The logits and their gradient; log-probabilities in both passes and their gradient; upcast rows in both passes.
    assert storages_made(128) == storages_made(640) == (5 if dtype is torch.float32 else 7)


class _Made(TorchDispatchMode):
    """The storages that operators make, held so that none takes the memory of another."""

    def __init__(self, *, least_bytes: int) -> None:
        super().__init__()
        self.storages: dict[int, Any] = {}
        self._least_bytes = least_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.untyped_storage().nbytes() >= self._least_bytes:
            self.storages[result.untyped_storage().data_ptr()] = result
        return result


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_terms_that_read_the_same_logits(place: int, dtype: torch.dtype) -> None:
    """Autograd adds their gradients up in its own order."""
    numbers = torch.randn(130, 33, generator=torch.Generator().manual_seed(0)).to(dtype)
    target, upcast = torch.arange(130) % 33, dtype is torch.bfloat16

    def whole(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits.float() if upcast else logits, target)

    def gradient(loss: Callable[[Tensor], Tensor]) -> Tensor:
        leaf = numbers.clone().requires_grad_()
        logits = leaf * 1.5
        terms = [lambda x: x.tanh().float().sum() / 50, lambda x: x.softmax(1).float().square().sum()]
        terms.insert(place, loss)
        torch.stack([term(logits) for term in terms]).sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    assert same_bits(gradient(whole), gradient(lambda x: sliced_cross_entropy(x, target, upcast=upcast)))


def test_the_losses_of_slices_added_up_are_another_loss() -> None:
    """Why the sum over rows is not cut; and the cases above would see it."""
    same = []
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        logits, target = torch.randn(513, 100, generator=generator), torch.randint(100, (513,), generator=generator)
        parts = (slice(start, start + 64) for start in range(0, 513, 64))
        added = sum(sliced_cross_entropy(logits[part], target[part], reduction="sum") for part in parts)
        assert isinstance(added, Tensor)
        same.append(same_bits(added, F.cross_entropy(logits, target, reduction="sum")))
    assert not all(same)


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
def test_autocast_upcasts_as_it_does_for_the_whole(autocast: torch.dtype) -> None:
    for seed in range(120):
        numbers, target, how, _ = _case(seed)
        plain, sliced, door = (numbers.detach().requires_grad_() for _ in range(3))
        with torch.autocast("cpu", dtype=autocast):
            want = F.cross_entropy(plain, target, **how)
            got = sliced_cross_entropy(sliced, target, slice_rows=64, **how)
            through_the_door = lowtide.cross_entropy(door, target, **how)
        assert want.dtype == got.dtype == through_the_door.dtype, seed
        for loss in (want, got, through_the_door):
            loss.sum().backward()
        assert plain.grad is not None and sliced.grad is not None and door.grad is not None
        assert same_bits(want.detach(), got.detach()) and same_bits(plain.grad, sliced.grad), seed
        assert same_bits(want.detach(), through_the_door.detach()) and same_bits(plain.grad, door.grad), seed


def test_what_stays_for_the_backward_is_the_logits_and_vectors() -> None:
    numbers = torch.randn(130, 100, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    logits = numbers * 2
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (saved.append(tensor), tensor)[1], lambda held: held):
        sliced_cross_entropy(logits, torch.zeros(130, dtype=torch.int64), upcast=True)
    assert [tensor.shape for tensor in saved if tensor.dim() == 2 and tensor.shape[1] > 1] == [logits.shape]
    assert saved[0].untyped_storage().data_ptr() == logits.untyped_storage().data_ptr()


_SECOND = (
    "lowtide: a second derivative of a loss in slices is not covered; write loss: plain (memory.loss), or call "
    "torch.nn.functional.cross_entropy in place of lowtide.cross_entropy"
)


@pytest.mark.parametrize("how", ["backward", "grad", "grad of both", "by the outer gradient"])
def test_a_second_derivative_is_refused(how: str) -> None:
    """Also where the loss itself has a first one beside it: there torch's own mark leaves the second out in silence."""
    weight = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    loss = sliced_cross_entropy(weight * 2, torch.tensor([0, 1, 2, 3]))
    outer = torch.ones((), dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(loss, weight, outer, create_graph=True)
    penalty = gradient.pow(2).sum()
    value = penalty + loss if how == "grad of both" else penalty
    with pytest.raises(RuntimeError) as caught:
        value.backward() if how == "backward" else torch.autograd.grad(value, outer if "outer" in how else weight)
    assert str(caught.value) == _SECOND


@pytest.mark.parametrize("write", [lambda t: t.mul_(2), lambda t: t.detach().zero_(), lambda t: t[3:4].add_(1)])
def test_logits_that_are_written_to_before_the_backward_are_refused(write: Any) -> None:
    weight = torch.randn(4, 5, requires_grad=True)
    logits = weight * 2
    loss = sliced_cross_entropy(logits, torch.tensor([0, 1, 2, 3]))
    with torch.no_grad():
        write(logits)
    with pytest.raises(RuntimeError) as caught:
        loss.backward()
    assert str(caught.value) == (
        "lowtide: the logits were written to between the loss and its backward pass, where a loss in slices reads "
        "them again; write to a copy of them (logits.clone()), or write loss: plain (memory.loss)"
    )


def test_another_error_of_the_backward_pass_keeps_its_words() -> None:
    loss = sliced_cross_entropy(torch.randn(4, 5, requires_grad=True) * 2, torch.tensor([0, 1, 2, 3]))
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


@pytest.mark.parametrize(
    "habit", ["autocast around backward", "several gradients at once", "two losses", "retained", "deterministic"]
)
def test_habits_change_no_bit(habit: str) -> None:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(130, 33, generator=generator).bfloat16()
    target, other = (torch.randint(33, (130,), generator=generator) for _ in range(2))

    def gradients(loss: Any) -> Tensor:
        leaf = numbers.clone().requires_grad_()
        logits = leaf * 2
        if habit == "several gradients at once":
            rows, outer = loss(logits, target, reduction="none"), torch.eye(130).bfloat16()[:3]
            (result,) = torch.autograd.grad(rows, leaf, outer, is_grads_batched=True)
            return result
        value = loss(logits, target)
        if habit == "two losses":
            value = value + loss(logits, other)
        if habit == "retained":
            value.backward(retain_graph=True)
        with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in habit):
            value.backward()
        assert leaf.grad is not None
        return leaf.grad

    torch.use_deterministic_algorithms(habit == "deterministic")
    try:
        assert same_bits(gradients(F.cross_entropy), gradients(sliced_cross_entropy))
    finally:
        torch.use_deterministic_algorithms(False)


def test_kernels_run_without_autocast_and_its_cache_stays() -> None:
    """On the CPU autocast leaves log_softmax alone; on CUDA it would cast what comes in."""
    with torch.autocast("cpu", torch.bfloat16):
        with without_autocast("cpu"):
            assert not torch.is_autocast_enabled("cpu")
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32
        assert torch.is_autocast_enabled("cpu")
    with without_autocast("cpu"):
        assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("word", [5, -1])
def test_a_target_that_is_no_word_gets_torch_s_own_error(word: int) -> None:
    logits, target = torch.zeros(4, 5), torch.tensor([0, 1, word, 3])
    with pytest.raises(IndexError) as plain:
        F.cross_entropy(logits, target)
    with pytest.raises(IndexError) as sliced:
        sliced_cross_entropy(logits, target)
    assert str(sliced.value) == str(plain.value)


def test_a_slice_is_a_sixteenth_within_limits() -> None:
    assert rows_of_slice(16_384, 128_256, torch.float32) == 128
    assert rows_of_slice(512, 50_257, torch.float32) == 64
    assert rows_of_slice(16_384, 10_000_000, torch.float32) == 64
    assert rows_of_slice(1_000_000, 1000, torch.float32) == 16_768
    assert rows_of_slice(100, 0, torch.float32) % 64 == 0


def test_a_small_loss_is_not_worth_slices() -> None:
    assert saves_memory(16_384, 128_256, torch.float32)
    assert saves_memory(512, 50_257, torch.float32)
    assert not saves_memory(255, 128_256, torch.float32)
    assert not saves_memory(4096, 64, torch.float32)


@pytest.mark.parametrize(
    ("logits", "target", "how", "text"),
    [
        (
            torch.zeros(2, 3, 4),
            torch.zeros(2, 3, dtype=torch.int64),
            {},
            "lowtide.cross_entropy: needs logits of shape [rows, words] and targets of shape [rows], not [2, 3, 4] and "
            "[2, 3]; use logits.view(-1, words) and target.view(-1)",
        ),
        (
            torch.zeros(2, 3),
            torch.zeros(2),
            {},
            "lowtide.cross_entropy: needs floating-point logits and int64 targets, not float32 and float32; targets "
            "that are probabilities are not covered",
        ),
        (
            torch.zeros(2, 3),
            torch.zeros(2, dtype=torch.int64),
            {"reduction": "max"},
            "lowtide.cross_entropy: reduction must be mean, sum or none, not 'max'",
        ),
        (
            torch.zeros(2, 3),
            torch.zeros(2, dtype=torch.int64),
            {"label_smoothing": 1.5},
            "lowtide.cross_entropy: label_smoothing must be between 0 and 1, not 1.5",
        ),
        (
            torch.zeros(2, 3),
            torch.zeros(2, dtype=torch.int64),
            {"z_loss": -1},
            "lowtide.cross_entropy: z_loss must be 0 or more, not -1",
        ),
    ],
)
def test_mistakes_are_named(logits: Tensor, target: Tensor, how: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        lowtide.cross_entropy(logits, target, **how)
    assert str(caught.value) == text


def test_slices_must_be_whole_steps() -> None:
    with pytest.raises(ConfigError) as caught:
        sliced_cross_entropy(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), slice_rows=65)
    assert str(caught.value) == "lowtide.cross_entropy: slice_rows must be a multiple of 64, not 65"
