"""`lowtide.cross_entropy`, with its self-test."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import lowtide
from lowtide.loss import checked, cross_entropy
from lowtide.loss.self_test import same_bits as agree
from tests.zoo import same_bits


def _numbers() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(300, 37, generator=generator).bfloat16(), torch.randint(37, (300,), generator=generator)


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "_LEAST_BYTES", 1)


@pytest.mark.parametrize("upcast", [False, True])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_it_is_torch_s_loss(upcast: bool, label_smoothing: float) -> None:
    numbers, labels = _numbers()
    plain, sliced = (numbers.clone().requires_grad_() for _ in range(2))
    whole = plain.float() if upcast else plain
    F.cross_entropy(whole, labels, label_smoothing=label_smoothing).backward()
    lowtide.cross_entropy(sliced, labels, label_smoothing=label_smoothing, upcast=upcast).backward()
    assert plain.grad is not None and sliced.grad is not None
    assert same_bits(plain.grad, sliced.grad)


def test_the_self_test_leaves_no_trace_in_the_caller_s_thread() -> None:
    numbers, labels = _numbers()
    numbers.requires_grad_()
    checked._keeps_bits.cache_clear()
    state = torch.get_rng_state()
    packed: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (packed.append(t), t)[1], lambda t: t):
        lowtide.cross_entropy(numbers, labels)
        first = len(packed)
        lowtide.cross_entropy(numbers, labels)
    assert torch.equal(state, torch.get_rng_state())
    assert len(packed) == 2 * first
    checked._keeps_bits.cache_clear()
    with torch.no_grad():
        assert not lowtide.cross_entropy(numbers, labels).requires_grad


def test_where_the_self_test_fails_the_loss_is_plain_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers, labels = _numbers()
    numbers.requires_grad_()
    monkeypatch.setattr(checked, "same_bits", lambda *_: False)
    checked._keeps_bits.cache_clear()
    try:
        with pytest.warns(UserWarning, match="stays plain") as caught:
            loss = lowtide.cross_entropy(numbers, labels)
    finally:
        checked._keeps_bits.cache_clear()
    assert [str(each.message) for each in caught] == [
        "lowtide: cross_entropy stays plain: in slices it has other bits here "
        f"(torch {torch.__version__}, cpu, bfloat16, 37 words)"
    ]
    assert "NllLoss" in loss.grad_fn.name() and "LogSoftmax" in loss.grad_fn.next_functions[0][0].name()  # type: ignore[union-attr]


def test_a_compiler_gets_the_whole_loss() -> None:
    numbers, labels = _numbers()
    compiled = torch.compile(lambda logits: lowtide.cross_entropy(logits, labels), backend="eager", fullgraph=True)
    assert same_bits(compiled(numbers), F.cross_entropy(numbers, labels))


def test_the_self_test_sees_another_loss() -> None:
    def plain(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.view(-1, 37), labels.view(-1))

    def in_two_parts(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        rows, words = logits.view(-1, 37), labels.view(-1)
        parts = [F.cross_entropy(rows[part], words[part], reduction="sum") for part in (slice(50), slice(50, None))]
        return (parts[0] + parts[1]) / (words != -100).sum()

    cpu = torch.device("cpu")
    assert agree(plain, plain, cpu, torch.float32, 37)
    assert not agree(in_two_parts, plain, cpu, torch.float32, 37)
