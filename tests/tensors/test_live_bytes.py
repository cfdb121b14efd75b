"""Live bytes: exact from birth to death, whoever holds the storage."""

from __future__ import annotations

import gc
from collections.abc import Iterable

import torch
from torch import nn

from lowtide.tensors.live_bytes import LiveBytes, plain_parts, unique_bytes


class Curve(LiveBytes):
    """With what was alive after each operator, while its inputs and outputs were."""

    def __init__(self) -> None:
        self.values: list[int] = []
        super().__init__()
        self.values.clear()

    def add_all(self, tensors: Iterable[torch.Tensor]) -> None:
        super().add_all(tensors)
        self.values.append(self.now_bytes)


def test_a_storage_counts_from_its_operator_to_its_death() -> None:
    with Curve() as live:
        first = torch.ones(100)
        assert live.now_bytes == 400
        second = first * 2
        view = second[:10]
        del second
        assert live.now_bytes == 800
        del view
        assert live.now_bytes == 400
    assert live.peak_bytes == 800
    assert live.values == [400, 800, 800]
    del first
    assert live.now_bytes == 0


def test_an_address_that_is_used_again_is_another_storage() -> None:
    with LiveBytes() as live:
        for _ in range(200):
            held = torch.ones(64) * 3
            assert live.now_bytes == 256
            del held
            assert live.now_bytes == 0


def test_what_only_autograd_holds_is_alive() -> None:
    x = torch.ones(10, requires_grad=True)
    with LiveBytes() as live:
        live.add(x.untyped_storage())
        loss = (x * 2).exp().sum()
        assert live.now_bytes == 40 + 40 + 4  # x, the result of exp, the loss
        loss.backward()
        del loss
        assert live.now_bytes == 40 + 40  # x and its gradient


def test_model_and_optimizer_are_there_before_the_step() -> None:
    model = nn.Linear(10, 10)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 10)).sum().backward()
    optimizer.step()
    live = LiveBytes(model=model, optimizer=optimizer)
    weights = 110 * 4
    assert live.now_bytes == weights * 4 + 8  # weights, gradients, two moments, two step counters
    assert live.peak_bytes == live.now_bytes


def test_a_peak_starts_anew() -> None:
    with LiveBytes() as live:
        big = torch.ones(1000)
        del big
        small = torch.ones(10)
        live.peak_bytes = live.now_bytes
        assert live.peak_bytes == small.numel() * 4


def test_cycles_count_until_they_are_collected() -> None:
    gc.disable()
    try:
        with LiveBytes() as live:
            cycle: list = [torch.ones(5)]
            cycle.append(cycle)
            del cycle
            assert live.now_bytes == 20
            gc.collect()
            assert live.now_bytes == 0
    finally:
        gc.enable()


def test_sparse_tensors_are_their_parts() -> None:
    sparse = torch.eye(4).to_sparse()
    assert len(list(plain_parts(sparse))) == 2
    assert unique_bytes([sparse, sparse]) == 4 * 4 + 2 * 4 * 8


def test_a_resized_storage_counts_with_its_new_size() -> None:
    tensor = torch.ones(10)
    with LiveBytes() as live:
        live.add_all([tensor])
        tensor.resize_(20)
        assert live.now_bytes == 80
