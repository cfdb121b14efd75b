"""`lowtide.cross_entropy`, with its self-test."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import lowtide
from lowtide.loss import checked, cross_entropy
from lowtide.loss.cross_entropy import same_bits as agree
from tests.support.zoo import same_bits


def _numbers() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(300, 37, generator=generator).bfloat16(), torch.randint(37, (300,), generator=generator)


def _nodes(node: Any) -> set[str]:
    """Names of an autograd node and all behind it."""
    return set() if node is None else {node.name()}.union(*(_nodes(behind) for behind, _ in node.next_functions))


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "_LEAST_BYTES", 1)


@pytest.mark.parametrize("upcast", [False, True])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("z_loss", [0.0, 1e-3])
def test_it_is_torch_s_loss(upcast: bool, label_smoothing: float, z_loss: float) -> None:
    numbers, labels = _numbers()
    plain, sliced = (numbers.clone().requires_grad_() for _ in range(2))
    whole = plain.float() if upcast else plain
    loss = F.cross_entropy(whole, labels, label_smoothing=label_smoothing)
    if z_loss:
        loss = loss + z_loss * (torch.logsumexp(whole, 1).square().sum() / len(labels))
    loss.backward()
    how: dict[str, Any] = {"label_smoothing": label_smoothing, "z_loss": z_loss, "upcast": upcast}
    made = lowtide.cross_entropy(sliced, labels, **how)
    assert ("_OfRowsBackward" in _nodes(made.grad_fn)) == (not label_smoothing and not z_loss)
    made.backward()
    assert plain.grad is not None and sliced.grad is not None
    assert same_bits(plain.grad, sliced.grad)


def test_weights_of_classes_leave_it_plain() -> None:
    numbers, labels = _numbers()
    weight = torch.rand(37).bfloat16()
    loss = lowtide.cross_entropy(numbers.requires_grad_(), labels, weight=weight)
    assert "_OfRowsBackward" not in _nodes(loss.grad_fn)
    assert same_bits(loss.detach(), F.cross_entropy(numbers.detach(), labels, weight=weight))


def test_a_loss_under_forward_mode_or_torch_func_is_plain() -> None:
    from torch.autograd import forward_ad

    numbers, labels = _numbers()
    numbers = numbers.float()
    tangents = []
    for loss in (F.cross_entropy, lowtide.cross_entropy):
        with forward_ad.dual_level():
            made = loss(forward_ad.make_dual(numbers, numbers.cos()), labels)
            tangents.append(forward_ad.unpack_dual(made).tangent)
        tangents.append(torch.func.grad(loss)(numbers, labels))
    assert same_bits(tangents[0], tangents[2]) and same_bits(tangents[1], tangents[3])


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
    monkeypatch.setattr(cross_entropy, "same_bits", lambda *_: False)
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
