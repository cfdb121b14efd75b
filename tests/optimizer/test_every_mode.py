"""Each optimizer in each implementation and each way of overlapping: the same bits as plain, over twelve steps.
And what else has to hold in each way: gradients that are sparse, and fetches that fail.

What: a real backward pass, so that the ways that follow it are followed; two groups, a tied weight, a scheduler that
changes the learning rate after each step; fp32 and bf16; with and without gradients that are None in turn; and where
the way allows it a `GradScaler` with gradients that are inf in two steps, with clipping.
Cost: some three minutes of one core; that is why the matrix is `extended`. test_bit_equality.py has the same optimizers
with one way in each run of the suite.
Named exceptions: as in optimizer_zoo.py, SGD with fused=True in bfloat16 or where a momentum is missing; and
`GradScaler` with `in_backward`, which is refused (test_in_backward.py).
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.engines.base import Lane
from tests.support.optimizer_zoo import (
    IMPLEMENTATIONS,
    NAMES,
    OPTIMIZERS,
    STEPS,
    Result,
    assert_same,
    result_of,
    swapped,
)
from tests.support.virtual_engine import VirtualEngine

OVERLAPS = ("step", "backward", "in_backward")
WIDTH = 24


class Tower(nn.Module):
    def __init__(self, *, has_biases: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=has_biases) for _ in range(6))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.layers[0].weight

    def forward(self, x: Tensor, skip: int) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number != skip:
                x = layer(x).tanh()
        return self.head(x)


def _train(
    kind: str, implementation: str, dtype: torch.dtype, *, has_missing: bool, is_scaled: bool, overlap: str = ""
) -> Result:
    """`overlap` empty: plain."""
    torch.manual_seed(3)
    model = Tower(has_biases=kind != "Muon").to(dtype)
    parameters = list(model.parameters())
    groups = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 3e-2}]
    optimizer = OPTIMIZERS[kind][0](groups, IMPLEMENTATIONS[implementation])
    engine = VirtualEngine(5)
    handle = swapped(optimizer, engine, overlap=overlap) if overlap else None
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, enabled=is_scaled)
    for step in range(STEPS):
        x = torch.full((3, WIDTH), 0.1 * (step + 1), dtype=dtype)
        loss = model(x, step % 5 + 1 if has_missing else -1).square().mean()
        scaler.scale(loss * torch.inf if is_scaled and step in (3, 7) else loss).backward()
        if is_scaled and implementation != "fused":  # a fused optimizer is told of infs instead, and unscales itself
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(parameters, 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scheduler.step()
    if handle:
        handle.flush()
    result = result_of(parameters, optimizer)
    if handle:
        assert handle.stats.swapped_bytes > 0 or kind == "SGD plain"
        handle.detach()
        assert (engine.violations, engine.num_slots) == ([], 0)
    return result


_plain = functools.cache(_train)


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize(("kind", "implementation"), NAMES)
def test_same_bits(kind: str, implementation: str, overlap: str) -> None:
    for dtype, has_missing, is_scaled in itertools.product(
        (torch.float32, torch.bfloat16), (False, True), (False, True)
    ):
        if kind.startswith("SGD") and implementation == "fused" and (dtype == torch.bfloat16 or has_missing):
            continue
        if is_scaled and overlap == "in_backward":
            continue
        setting = {"has_missing": has_missing, "is_scaled": is_scaled}
        truth = _plain(kind, implementation, dtype, **setting)
        assert_same(_train(kind, implementation, dtype, **setting, overlap=overlap), truth)


class Sparse(nn.Module):
    """An embedding whose gradient is sparse, large enough to be cut where gradients are dense."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9000, 16, sparse=True)
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.layers(self.embedding(tokens))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("kind", ["SparseAdam", "Adagrad"])
def test_sparse_gradients_step_whole(kind: str, overlap: str) -> None:
    results = []
    for engine in (None, VirtualEngine(1)):
        torch.manual_seed(0)
        model = Sparse()
        parameters = [model.embedding.weight] if kind == "SparseAdam" else list(model.parameters())
        optimizer = getattr(torch.optim, kind)(parameters, lr=1e-2)
        handle = swapped(optimizer, engine, overlap=overlap) if engine else None
        for step in range(4):
            model(torch.tensor([[step, 3, 2 * step]])).square().mean().backward()
            optimizer.step()
            model.zero_grad()
        if handle:
            handle.detach()
            assert (engine.violations, engine.num_slots) == ([], 0)
        results.append(result_of(parameters, optimizer))
    assert_same(results[1], results[0])


class Failing(VirtualEngine):
    """The copy in of a given number fails."""

    failing = -1
    num_copies = 0
    _failed: object = None

    def copy_in(self, slot: Any, target: Any) -> None:
        super().copy_in(slot, target)
        self.num_copies += 1
        if self.num_copies == self.failing:
            self._failed = super().record(Lane.IN)

    def failure(self, event: Any) -> BaseException | None:
        return OSError("no such bytes") if event == self._failed else None


def _with_a_failure(overlap: str, failing: int) -> tuple[Result, int]:
    """Three steps of which one stops where the copy in of this number failed, and how often it did stop."""
    torch.manual_seed(3)
    model = Tower(has_biases=True)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    engine = Failing(failing)
    engine.failing = failing
    handle = swapped(optimizer, engine, overlap=overlap)
    num_failures = 0

    def has_stopped(call: Any) -> bool:
        nonlocal num_failures
        try:
            call()
        except lowtide.PartialStepError:
            num_failures += 1
            handle.resume()
            return True
        return False

    for step in range(4):
        x = torch.full((3, WIDTH), 0.1 * (step + 1))
        model(x, -1).square().mean().backward()
        has_stopped(optimizer.step)
        optimizer.zero_grad()
    has_stopped(handle.flush)
    assert handle.stats.num_steps == 4
    result = result_of(parameters, optimizer)
    handle.detach()
    assert (engine.violations, engine.num_slots) == ([], 0)
    return result, num_failures


def test_a_failed_fetch_is_resumed_to_the_same_bits() -> None:
    truth, _ = _with_a_failure("backward", -1)
    result, num_failures = _with_a_failure("backward", 10)
    assert num_failures == 1
    assert_same(result, truth)


@pytest.mark.extended
@pytest.mark.parametrize("overlap", ["step", "backward"])
def test_a_failed_fetch_at_every_bucket_is_resumed_to_the_same_bits(overlap: str) -> None:
    truth, num_failures = _with_a_failure(overlap, -1)
    assert num_failures == 0
    failing = 0
    while True:
        failing += 1
        result, num_failures = _with_a_failure(overlap, failing)
        assert_same(result, truth)
        if not num_failures:
            break
    assert failing > 12, "each bucket of three steps"
