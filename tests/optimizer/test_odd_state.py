"""Optimizers whose state is odd: shared, aliased, replaced, late, of another dtype. Swapped, they step as alone.

Each draw puts some odd habits into one optimizer and trains with it swapped and not. Also where the device was full for
a while, after a load, and after the mapping of the state was replaced: the same bits, and no slot is lost.
"""

from __future__ import annotations

import collections
import gc
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from tests.support.virtual_engine import VirtualEngine
from tests.support.zoo import same_bits

pytestmark = pytest.mark.filterwarnings("ignore:lowtide")
HABITS = ("shares", "is_view", "keeps_gradient", "replaces", "widens", "comes_late", "becomes_wide")
NUM_STEPS = 4


class Odd(torch.optim.Optimizer):
    """Momentum by hand, with the given habits."""

    def __init__(self, parameters: Any, habits: frozenset[str]) -> None:
        super().__init__(parameters, {"lr": 0.05})
        self.habits = habits

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, self.state[parameter], group["lr"])

    def _step(self, parameter: Tensor, state: dict[str, Any], lr: float) -> None:
        gradient = parameter.grad
        assert gradient is not None
        if not state:
            state["number"] = 0
            state["mean"] = torch.zeros_like(parameter)
            if "shares" in self.habits:  # the same memory under two names
                state["twin"] = state["mean"]
            if "is_view" in self.habits:
                state["rows"] = state["mean"].view(-1)[: parameter.numel() // 2]
            if "keeps_gradient" in self.habits:
                state["last"] = gradient
        state["number"] += 1
        if "replaces" in self.habits and "shares" not in self.habits and "is_view" not in self.habits:
            state["mean"] = state["mean"] * 0.9 + gradient
        else:
            state["mean"].mul_(0.9).add_(gradient)
        if "becomes_wide" in self.habits and state["number"] == 3:
            state["mean"] = state["mean"].double() / 3
        if "shares" in self.habits:
            state["twin"].add_(0.25)
        if "is_view" in self.habits:
            state["rows"].mul_(0.5)
        if "keeps_gradient" in self.habits:
            parameter.add_(state["last"], alpha=-lr)
            state["last"] = gradient
        if "widens" in self.habits and state["number"] == 2:
            state["wide"] = state["mean"].double() / 3
        if "wide" in state:
            state["wide"] = (
                state["wide"].mul(0.9).add(gradient) if state["number"] % 2 else state["wide"].add_(gradient)
            )
            parameter.add_(state["wide"].to(parameter.dtype), alpha=-lr)
        if "comes_late" in self.habits and state["number"] >= 2:
            late = state.setdefault("late", torch.zeros_like(parameter))
            late.add_(gradient.square())
            parameter.add_(late.sqrt(), alpha=-0.1 * lr)
        parameter.add_(state["mean"], alpha=-lr)


def _made(seed: int, habits: frozenset[str]) -> tuple[nn.Module, Odd]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 4))
    return model, Odd(model.parameters(), habits)


def _backward(model: nn.Module, step: int) -> None:
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
    model(x).square().mean().backward()


def _train(model: nn.Module, optimizer: Odd, steps: range) -> None:
    for step in steps:
        _backward(model, step)
        optimizer.step()
        # Written to in place, a gradient changes what shares its memory.
        optimizer.zero_grad(set_to_none="keeps_gradient" not in optimizer.habits)


def _compare(model: nn.Module, optimizer: Odd, seed: int, habits: frozenset[str], num_steps: int = NUM_STEPS) -> None:
    twin, plain = _made(seed, habits)
    _train(twin, plain, range(num_steps))
    for got, want in zip(model.parameters(), twin.parameters(), strict=True):
        assert same_bits(got.data, want.data), f"seed {seed}: {sorted(habits)}"
        for key, value in plain.state[want].items():
            found = optimizer.state[got][key]
            assert same_bits(found, value) if isinstance(value, Tensor) else found == value, f"seed {seed}: {key}"


def _swapped(optimizer: Odd, engine: VirtualEngine) -> Any:
    try:
        return lowtide.swap_optimizer(
            optimizer, engine=engine, bucket_bytes=4096, min_bytes=1, overlap="step", resident=0.0
        )
    except lowtide.ConfigError:
        return None


def _drawn(seed: int) -> frozenset[str]:
    r = Random(seed)
    return frozenset(r.sample(HABITS, r.choice((1, 1, 2, 3))))


def test_odd_state_is_stepped_as_it_is_alone_and_no_slot_is_lost() -> None:
    num_swapped = 0
    for seed in range(24):
        habits, engine = _drawn(seed), VirtualEngine(seed)
        model, optimizer = _made(seed, habits)
        _train(model, optimizer, range(seed % 3))  # state that was there before, or not
        handle = _swapped(optimizer, engine)
        if handle is None:
            continue
        num_swapped += 1
        _train(model, optimizer, range(seed % 3, NUM_STEPS))
        _compare(model, optimizer, seed, habits)
        handle.detach()
        _compare(model, optimizer, seed, habits)
        gc.collect()
        assert engine.num_slots == 0 and not engine.violations, f"seed {seed}: {sorted(habits)}"
    assert num_swapped > 12


def test_after_a_load_the_old_slots_are_given_back() -> None:
    model, optimizer = _made(0, frozenset({"replaces"}))
    engine = VirtualEngine(0)
    handle = _swapped(optimizer, engine)
    _train(model, optimizer, range(2))
    handle.flush()
    num_slots = engine.num_slots
    for _ in range(3):
        optimizer.load_state_dict(optimizer.state_dict())
        handle.flush()
        assert engine.num_slots == num_slots
    handle.detach()


def test_a_mapping_that_the_user_put_in_place_is_his_after_detach() -> None:
    """And makes entries as his does."""
    model, optimizer = _made(0, frozenset())
    handle = _swapped(optimizer, VirtualEngine(0))
    _train(model, optimizer, range(1))
    mine: Any = collections.defaultdict(dict, {p: dict(entries) for p, entries in optimizer.state.items()})
    optimizer.state = mine
    _train(model, optimizer, range(1, 2))
    extra = nn.Parameter(torch.ones(16))
    extra.grad = torch.ones(16)
    optimizer.add_param_group({"params": [extra]})
    optimizer.step()
    assert extra in optimizer.state
    handle.detach()
    assert optimizer.state is mine and set(mine) == {*model.parameters(), extra}


class _Failing(VirtualEngine):
    """The device, or its slower tier, is full for a while."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.num_full = 0

    def new_buffer(self, nbytes: int, device: torch.device) -> torch.UntypedStorage:
        if self.num_full:
            self.num_full -= 1
            raise torch.OutOfMemoryError("made up")
        return super().new_buffer(nbytes, device)


def test_a_device_that_is_full_for_a_while_loses_no_slot() -> None:
    for seed in range(6):
        engine = _Failing(seed)
        model, optimizer = _made(seed, frozenset())
        handle = _swapped(optimizer, engine)
        for step in range(NUM_STEPS):
            _backward(model, step)
            engine.num_full = 8 if step < 2 else 0  # state that is made now finds no bucket
            try:
                optimizer.step()
            except (lowtide.PartialStepError, torch.OutOfMemoryError):
                engine.num_full = 0
                shown = [v for entries in optimizer.state.values() for v in entries.values() if isinstance(v, Tensor)]
                assert all(torch.isfinite(value).all() for value in shown)
                handle.resume()
            optimizer.zero_grad()
        _compare(model, optimizer, seed, frozenset())
        handle.detach()
        assert engine.num_slots == 0, f"seed {seed}"
