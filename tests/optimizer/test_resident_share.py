"""State of which a share stays on the device, and what is sent away later: never seen in a bit."""

from __future__ import annotations

import copy
import functools
import itertools
from typing import Any

import pytest
import torch
from torch import nn

from lowtide.engines.base import Lane
from lowtide.errors import PartialStepError
from lowtide.optimizer.swap import OptimizerSwap, swap_optimizer
from tests.support.optimizer_zoo import BUCKET_BYTES, Case, assert_same, assert_same_value, result_of
from tests.support.virtual_engine import VirtualEngine, virtual

CASE = Case("AdamW", "foreach", torch.float32, has_missing=True)


def _swap(optimizer: Any, engine: Any, **options: Any) -> OptimizerSwap:
    options = {"bucket_bytes": BUCKET_BYTES, "min_bytes": 1, "overlap": "step", "resident": 0.5, **options}
    return swap_optimizer(optimizer, engine=engine, **options)


def _step(case: Case, parameters: Any, optimizer: Any, numbers: Any) -> None:
    for step in numbers:
        case.set_gradients(parameters, step)
        optimizer.param_groups[0]["lr"] = 0.01 * 0.9**step
        optimizer.step()


@functools.cache
def _plain(case: Case, steps: int) -> Any:
    parameters, optimizer = case.build()
    _step(case, parameters, optimizer, range(steps))
    return result_of(parameters, optimizer)


KINDS = [
    ("AdamW", "foreach"),
    ("AdamW amsgrad", "fused"),
    ("SGD", "foreach"),
    ("Adafactor", "for-loop"),
    ("Muon", "for-loop"),
    ("Counted", "for-loop"),
]


@pytest.mark.parametrize(("kind", "implementation"), KINDS)
def test_same_bits_while_a_share_stays_and_leaves(kind: str, implementation: str) -> None:
    for seed, (dtype, has_missing) in enumerate(itertools.product((torch.float32, torch.bfloat16), (True, False))):
        case = Case(kind, implementation, dtype, has_missing)
        engine = VirtualEngine(seed)
        parameters, optimizer = case.build()
        handle = _swap(optimizer, engine)
        _step(case, parameters, optimizer, range(9))
        before = handle.stats
        assert before.resident_bytes > 0
        handle.keep_no_more_than(0.2)
        assert handle.stats.resident_bytes < before.resident_bytes
        assert handle.stats.swapped_bytes > before.swapped_bytes
        _step(case, parameters, optimizer, range(9, 12))
        assert_same(result_of(parameters, optimizer), _plain(case, 12))
        handle.detach()
        assert_same(result_of(parameters, optimizer), _plain(case, 12))
        assert (engine.violations, engine.num_slots) == ([], 0)


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(6))

    def forward(self, x: torch.Tensor, skip: int) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x).tanh() if number != skip else x
        return x


@pytest.mark.parametrize("overlap", ["step", "backward", "in_backward"])
def test_same_bits_in_each_mode(overlap: str) -> None:
    results = []
    for is_swapped in (False, True):
        torch.manual_seed(0)
        model = Tower()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        engine = VirtualEngine(3)
        handle = _swap(optimizer, engine, bucket_bytes=8192, overlap=overlap) if is_swapped else None
        for step in range(14):
            model(torch.full((3, 24), 0.1 * step), skip=step % 5 + 1).square().mean().backward()
            if overlap != "in_backward":
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            if handle and step == 10:
                assert handle.stats.resident_bytes > 0
                handle.keep_no_more_than(0.0)
        if handle:
            handle.detach()
            assert (engine.violations, engine.num_slots) == ([], 0)
        results.append(result_of(list(model.parameters()), optimizer))
    assert_same(results[1], results[0])


def test_checkpoints_are_those_of_plain_with_a_part_resident() -> None:
    case = Case("AdamW", "for-loop", torch.bfloat16, has_missing=True)
    truth = _plain(case, 12)
    parameters, optimizer = case.build()
    handle = _swap(optimizer, VirtualEngine(0))
    _step(case, parameters, optimizer, range(8))
    assert handle.stats.resident_bytes > 0
    saved = copy.deepcopy((parameters, optimizer.state_dict()))
    plain_parameters, plain = case.build()
    _step(case, plain_parameters, plain, range(8))
    assert_same_value(optimizer.state_dict(), plain.state_dict(), "state_dict")
    # Into a plain one, and into one with a part resident.
    for others, target in (case.build(), (parameters, optimizer)):
        with torch.no_grad():
            for one, other in zip(others, saved[0], strict=True):
                one.copy_(other)
        target.load_state_dict(copy.deepcopy(saved[1]))
        _step(case, others, target, range(8, 12))
        assert_same(result_of(others, target), truth)
    assert handle.stats.resident_bytes > 0
    handle.detach()


class WithoutCopy(VirtualEngine):
    """The copy in of one number fails."""

    failing, num_copies, failed = -1, 0, None

    def copy_in(self, slot: Any, target: Any) -> None:
        super().copy_in(slot, target)
        self.num_copies += 1
        if self.num_copies == self.failing:
            self.failed = super().record(Lane.IN)

    def failure(self, event: Any) -> BaseException | None:
        return OSError("no such bytes") if self.failed is not None and event == self.failed else None


@pytest.mark.parametrize("number", range(1, 5))
def test_a_step_that_stops_at_any_bucket_goes_on_to_the_same_bits(number: int) -> None:
    engine = WithoutCopy(2)
    parameters, optimizer = CASE.build()
    handle = _swap(optimizer, engine)
    _step(CASE, parameters, optimizer, range(8))
    engine.failing = engine.num_copies + number
    with pytest.raises(PartialStepError, match=r"call handle.resume\(\)"):
        _step(CASE, parameters, optimizer, range(8, 12))
    with pytest.raises(RuntimeError, match=r"^lowtide: keep_no_more_than: the last step stopped half-way"):
        handle.keep_no_more_than(0.0)
    step = next(n for n in range(8, 12) if optimizer.param_groups[0]["lr"] == 0.01 * 0.9**n)
    handle.resume()
    _step(CASE, parameters, optimizer, range(step + 1, 12))
    assert_same(result_of(parameters, optimizer), _plain(CASE, 12))
    handle.detach()
    assert engine.violations == []


def test_what_stays_steps_bucket_by_bucket() -> None:
    """So that temporaries are those of one bucket, as plans count them."""

    class Watched(torch.optim.AdamW):
        most = 0

        def step(self, closure: Any = None) -> Any:
            groups = self.param_groups
            sizes = [p.numel() for group in groups for p in group["params"] if p.grad is not None]
            Watched.most = max(Watched.most, 8 * sum(sizes) if len(sizes) > 1 else 0)
            return super().step(closure)

    parameters = [nn.Parameter(torch.ones(16, 16)) for _ in range(8)]
    optimizer = Watched(parameters, foreach=True)
    with swap_optimizer(optimizer, engine=virtual(0), resident=1.0, bucket_bytes=8192, min_bytes=1) as handle:
        Watched.most = 0
        for _ in range(3):
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        assert handle.stats.swapped_bytes == 0
        assert Watched.most == 3 * 8 * 256, "of eight parameters three have a bucket of state"


@pytest.mark.parametrize("overlap", ["step", "backward"])
def test_a_checkpoint_of_any_moment_is_plains(overlap: str) -> None:
    """After each micro-batch and each step, with all of the state elsewhere and with a part of it resident."""
    found: list[list[Any]] = [[], []]
    for is_swapped in (False, True):
        torch.manual_seed(0)
        model = Tower()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        handle = _swap(optimizer, VirtualEngine(4), bucket_bytes=8192, overlap=overlap) if is_swapped else None
        for step in range(8):
            for micro in range(2):
                model(torch.full((3, 24), 0.1 * (step + micro)), skip=-1).square().mean().backward()
                found[is_swapped].append(copy.deepcopy((model.state_dict(), optimizer.state_dict())))
            optimizer.step()
            optimizer.zero_grad()
            found[is_swapped].append(copy.deepcopy((model.state_dict(), optimizer.state_dict())))
        if handle:
            assert handle.stats.resident_bytes > 0
            handle.detach()
    assert len(found[0]) == 24
    for number, (one, other) in enumerate(zip(found[1], found[0], strict=True)):
        assert_same_value(one, other, f"checkpoint {number}")
