"""Ctrl-C in the worst places: Python swallows it inside a finalizer, and what that had to do is then never done.

So nothing of the runtime is done by finalizers in Python: accounts and slots are given back by callbacks in C code. In
each test a graph dies under a tracer that raises `KeyboardInterrupt` at the n-th bytecode, for every n that there is.
"""

from __future__ import annotations

import gc
import importlib
import os
import pkgutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
import lowtide.runtime
from lowtide.profiling.untouched import items_set_aside, untouched
from lowtide.runtime.saved.stats import Ledger
from tests.support import zoo
from tests.support.small_models import ALL_MADE, Gated, only_made, profiled, rows, small_loss, stack
from tests.support.solved import plan_with
from tests.support.virtual_engine import virtual

MEMORY = {
    "keep": {"swap": "none"},
    "swap": {"swap": "all", "min_bytes": 0},
    "recompute": {"recompute": "all", "min_bytes": 0},
    "both": {"swap": "all", "recompute": "all", "min_bytes": 0},
}


# Not "lowtide" anywhere in the path: a clone, and so the virtual environment in it, may be called so too.
PACKAGE = str(Path(lowtide.__file__).parent) + os.sep


class Interrupt:
    """Inside, Ctrl-C comes at the n-th bytecode of the runtime's functions with such names."""

    def __init__(self, at: int, is_hit: Callable[[str], bool]) -> None:
        self.at = at
        self.num_passed = 0
        self._is_hit = is_hit

    def __enter__(self) -> Interrupt:
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE) or not self._is_hit(code.co_name):
            return None
        frame.f_trace_opcodes = True
        return self._step

    def _step(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "opcode":
            self.num_passed += 1
            if self.num_passed == self.at + 1:
                raise KeyboardInterrupt
        return self._step


def assert_nothing_left(tide: lowtide.Tide, where: object) -> None:
    gc.collect()
    tide.settle()
    left = (tide._scheduler.ledger.now_bytes, tide._scheduler.num_open(), tide.engine.num_slots)
    assert left == (0, 0, 0), f"at bytecode {where}"


def interrupt_everywhere(
    tide: lowtide.Tide,
    begin: Callable[[], Tensor],
    *,
    end: Callable[[Tensor], None] = lambda loss: None,
    is_hit: Callable[[str], bool] = lambda name: True,
) -> None:
    """`end` a graph and let go of it, with a Ctrl-C at each bytecode in turn; nothing of it may be left."""
    at, is_over = 0, False
    while not is_over:
        losses = [begin()]
        with Interrupt(at, is_hit) as interrupt:
            end(losses[0])
            losses.clear()
        assert_nothing_left(tide, at)
        is_over = interrupt.num_passed <= at
        at += 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("limit", [None, 0], ids=["plan", "spilled"])
@pytest.mark.parametrize("plan", MEMORY)
def test_a_graph_that_dies_under_ctrl_c_gives_everything_back(plan: str, limit: int | None) -> None:
    case = zoo.CASES["mlp"]
    model = case.build(3)
    with lowtide.apply(model, MEMORY[plan], engine=virtual(0)) as tide:
        case.loss(model, case.batch(0)).backward()
        tide.set_limit(limit)
        interrupt_everywhere(tide, lambda: case.loss(model, case.batch(1)))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_recomputed_storages_that_die_under_ctrl_c_give_everything_back() -> None:
    model = stack(Gated())
    profile = profiled(model)
    for plan in (only_made(profile), plan_with(profile, ALL_MADE)):
        with lowtide.apply(model, plan, engine=virtual(0)) as tide:
            small_loss(model, rows()).backward()
            interrupt_everywhere(tide, lambda: small_loss(model, rows()))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_while_finalizers_run_in_a_backward_changes_no_account() -> None:
    """Where handles die one by one."""
    case = zoo.CASES["mlp"]
    model = case.build(3)
    with lowtide.apply(model, MEMORY["both"], engine=virtual(1)) as tide:
        case.loss(model, case.batch(0)).backward()
        interrupt_everywhere(
            tide,
            lambda: case.loss(model, case.batch(1)),
            end=torch.Tensor.backward,
            is_hit=lambda name: name == "__del__",
        )


def test_ctrl_c_while_the_observed_step_is_undone_loses_nothing() -> None:
    """At each bytecode of what puts the model, its gradients and its hooks back; and it is raised. (Not within the
    context managers of torch that `restore` enters: between their bytecodes Python lets no signal in.)"""
    model, batch = nn.BatchNorm1d(4), torch.ones(2, 4)
    model.register_forward_hook(lambda *_: None)
    model.weight.grad = torch.ones(4)

    def state() -> list[Any]:
        assert model.weight.grad is not None
        tensors = [*model.state_dict().values(), model.weight.grad, torch.get_rng_state()]
        return [[each.tolist() for each in tensors], len(model._forward_hooks), model.training]

    before, at, is_over = state(), 0, False
    while not is_over:
        has_come = False
        interrupt = Interrupt(at, lambda name: name == "put_back")
        try:
            with untouched(model, batch, torch.device("cpu")), items_set_aside([vars(model)["_forward_hooks"]]):
                model.eval().running_mean.add_(torch.rand(4))
                model.weight.grad = None
                interrupt.__enter__()
        except KeyboardInterrupt:
            has_come = True
        finally:
            interrupt.__exit__()
        assert state() == before, f"at bytecode {at}"
        is_over = interrupt.num_passed <= at
        assert has_come != is_over
        at += 1
    assert at > 20


def test_ctrl_c_while_the_ledger_settles_loses_nothing() -> None:
    class Owner:
        pass

    at, is_over = 0, False
    while not is_over:
        ledger, owners = Ledger(), [Owner() for _ in range(3)]
        shares = [ledger.hold(owner, 10**number) for number, owner in enumerate(owners)]
        del owners[0], owners[-1]
        try:
            # At a call: between two bytecodes that call nothing Python lets no signal in.
            with Interrupt(at, lambda name: name == "hold") as interrupt:
                ledger.hold(owners[0], 1000)
        except KeyboardInterrupt:
            assert ledger.now_bytes in (10, 1010)
        else:
            assert ledger.now_bytes == 1010
        del owners, shares
        assert ledger.now_bytes == 0
        is_over = interrupt.num_passed <= at
        at += 1


def test_the_ledger_counts_owners_and_their_changes() -> None:
    class Owner:
        pass

    ledger, owners = Ledger(), [Owner(), Owner()]
    shares = [ledger.hold(owner, 100) for owner in owners]
    assert (ledger.now_bytes, ledger.peak_bytes) == (200, 200)
    ledger.change(shares[0], 30)
    assert (ledger.now_bytes, ledger.peak_bytes) == (130, 200)
    ledger.restart_peak()
    assert ledger.peak_bytes == 130
    del owners[1]
    ledger.change(shares[0], 50)
    # The dead one had gone before: it is not part of the peak.
    assert (ledger.now_bytes, ledger.peak_bytes) == (50, 130)
    del owners[0]
    assert ledger.now_bytes == 0


def test_no_finalizer_is_written_in_python_but_one_that_may_be_skipped() -> None:
    found = []
    for module in pkgutil.walk_packages(lowtide.runtime.__path__, "lowtide.runtime."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, type) and value.__module__ == module.name and "__del__" in vars(value):
                found.append(f"{module.name}.{value.__name__}")
    assert found == ["lowtide.runtime.offload.site._Farewell"]


def test_a_model_and_its_graphs_still_train_after_ctrl_c_in_the_middle_of_a_step() -> None:
    case = zoo.CASES["mlp"]
    model: nn.Module = case.build(3)
    twin = case.build(3)
    torch.manual_seed(1)
    case.loss(twin, case.batch(2)).backward()
    with lowtide.apply(model, MEMORY["swap"], engine=virtual(0)) as tide:
        case.loss(model, case.batch(0)).backward()
        for at in range(0, 6000, 397):
            with pytest.raises(KeyboardInterrupt), Interrupt(at, lambda name: name not in ("send", "_allocate")):
                case.loss(model, case.batch(1)).backward()
            assert_nothing_left(tide, at)
            model.zero_grad(set_to_none=True)
            torch.manual_seed(1)
            case.loss(model, case.batch(2)).backward()
            pairs = zip(model.parameters(), twin.parameters(), strict=True)
            assert all(zoo.same_bits(p.grad, q.grad) for p, q in pairs), at
            model.zero_grad(set_to_none=True)
