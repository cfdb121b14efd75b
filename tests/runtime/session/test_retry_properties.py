"""What holds between the attempts of a micro-batch, wherever it failed and with whatever kind of error.

Each draw fails once or twice, in forward or backward, with an error of its own or one in a chain of errors, with graphs
in reference cycles or not, under one plan of several. Before each further attempt nothing of the failed one is alive;
after the last one gradients, also those of weights outside of the model, are those of a run that never failed, totals
are those of its last attempt, and what held the plan's budget holds it still.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lowtide
from tests.support.solved import random_plan
from tests.support.virtual_engine import VirtualEngine
from tests.support.zoo import same_bits

pytestmark = pytest.mark.filterwarnings("ignore:lowtide. :UserWarning")
PLANS: dict[str, dict[str, Any]] = {
    "keep": {"swap": "none", "min_bytes": 0, "layers": ["0", "1", "2"]},
    "swap": {"swap": "all", "min_bytes": 0},
    "recompute": {"recompute": "all", "swap": "none", "layers": ["0", "1", "2"]},
}


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh() + x.sin()


def _made(seed: int) -> tuple[nn.Module, nn.Linear, torch.optim.Optimizer]:
    """A model, the head of its loss, and an optimizer of both."""
    torch.manual_seed(seed)
    model, head = nn.Sequential(_Layer(), _Layer(), _Layer()), nn.Linear(8, 1)
    return model, head, torch.optim.AdamW([*model.parameters(), *head.parameters()])


class _Failures:
    """Fails at drawn places of the first attempts, and keeps what it can of each failed graph in its error alone."""

    def __init__(self, seed: int, most: int) -> None:
        r = Random(seed)
        self.left = r.choice((1, most))
        self.is_backward, self.kind, self.has_cycle = r.random() < 0.5, r.choice(("plain", "from", "during")), seed % 2
        self.alive: list[weakref.ref[Any]] = []

    def begin(self, loss: Tensor) -> None:
        """The forward is over: fail now, or in the backward of a weight."""
        self.alive.append(weakref.ref(loss))
        if not self.is_backward:
            self.fail(loss)

    def fail(self, held: Tensor) -> None:
        """Its frames hold the graph, or the gradient."""
        if not self.left:
            return
        self.left -= 1
        self.alive.append(weakref.ref(held))
        if self.has_cycle:
            cycle: list[Any] = [held]
            cycle.append(cycle)
        if self.kind == "plain":
            raise torch.OutOfMemoryError("made up")
        try:
            twice = held * 2  # in the frame of the inner error
            self.alive.append(weakref.ref(twice))
            raise ValueError("inner")
        except ValueError as error:
            if self.kind == "from":
                raise torch.OutOfMemoryError("made up") from error
            raise torch.OutOfMemoryError("made up")  # noqa: B904

    def in_flight(self) -> int:
        return sum(node() is not None for node in self.alive)


def _closure(model: nn.Module, head: nn.Module, seed: int, failures: _Failures | None, note: Callable) -> Callable:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))

    def closure() -> None:
        note()
        loss = head(model(x)).square().mean()
        if failures is not None:
            failures.begin(loss)
        loss.backward()

    return closure


@pytest.mark.parametrize("plan", PLANS)
def test_a_retry_begins_with_nothing_and_ends_as_if_nothing_had_been(plan: str) -> None:
    for seed in range(12):
        wanted = _made(seed)
        for _ in range(2):
            _closure(wanted[0], wanted[1], seed, None, lambda: None)()
        model, head, optimizer = _made(seed)
        engine, failures = VirtualEngine(seed), _Failures(seed, 2 if plan == "keep" else 1)
        _closure(model, head, seed, None, lambda: None)()  # so that there are gradients to be added to
        if failures.is_backward:
            model[seed % 3].linear.weight.register_hook(failures.fail)
        num_alive: list[tuple[int, int]] = []
        note = functools.partial(_note, num_alive, failures, engine)
        with lowtide.apply(model, PLANS[plan], optimizer=optimizer, engine=engine) as tide:
            closure = _closure(model, head, seed, failures, note)
            tide.step(closure)
            assert num_alive == [(0, 0)] * tide.stats.num_retries + [(0, 0)], f"seed {seed}"
            assert tide.stats.num_retries >= 1, f"seed {seed}"
        for parameter, want in zip([*model.parameters(), *head.parameters()], _parameters(*wanted[:2]), strict=True):
            assert same_bits(parameter.grad, want.grad), f"seed {seed}"


def _note(num_alive: list[tuple[int, int]], failures: _Failures, engine: VirtualEngine) -> None:
    num_alive.append((failures.in_flight(), engine.num_slots))


def _parameters(model: nn.Module, head: nn.Module) -> list[nn.Parameter]:
    return [*model.parameters(), *head.parameters()]


def _failing_once(model: nn.Module, is_wrong: Callable[[], bool] = lambda: True) -> Callable[[], None]:
    x, failed = torch.ones(4, 8), []

    def closure() -> None:
        loss = model(x).square().mean()
        if not failed and is_wrong():
            failed.append(True)
            raise torch.OutOfMemoryError("made up")
        loss.backward()

    return closure


def test_totals_are_those_of_the_attempt_that_counts() -> None:
    stats = []
    for fails in (False, True):
        model, _, _ = _made(0)
        with lowtide.apply(model, PLANS["recompute"], engine=VirtualEngine(0)) as tide:
            closure = _failing_once(model, lambda fails=fails: fails)
            for _ in range(2):
                tide.step(closure)
            stats.append((tide.stats.recomputed_bytes, tide.stats.kept_bytes, tide.stats.num_forwards))
    assert stats[0][2] == stats[1][2] == 2
    assert stats[0][0] > 0


def test_what_held_the_budget_holds_it_after_a_retry() -> None:
    model, _, _ = _made(0)
    with lowtide.apply(model, PLANS["keep"], engine=VirtualEngine(0)) as tide:
        tide.set_limit(0)
        guard, slices = tide._context.guard, object()
        tide._context.slices = slices  # type: ignore[assignment]
        with tide.audit():
            model(torch.ones(4, 8)).sum().backward()
        assert tide.plan.audited_peak_bytes is not None
        tide._context.slices = None
        tide.step(_failing_once(model))
        assert tide._context.guard is guard is not None
        assert tide.plan.audited_peak_bytes is None  # of another plan
        tide._context.slices = slices  # type: ignore[assignment]
        tide._tighten(torch.OutOfMemoryError("made up"), 1)
        assert tide._context.slices is slices


def test_where_the_host_is_full_a_retry_does_not_swap_more() -> None:
    model, _, _ = _made(0)
    memory = {"swap": ["0"], "layers": ["0", "1", "2"], "min_bytes": 0}
    for host_bytes, how in ((None, "everything is swapped now"), (64, "all layers are recomputed now")):
        engine = VirtualEngine(0, host_bytes=host_bytes, disk_bytes=0)
        with lowtide.apply(model, memory, engine=engine) as tide:
            model(torch.ones(4, 8)).square().mean().backward()
            with pytest.warns(UserWarning, match=f"out of memory .*; {how}, and the micro-batch is run again"):
                tide.step(_failing_once(model))


def test_ranks_do_not_run_again_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the closure says that it has no collectives."""
    model, _, _ = _made(0)
    with lowtide.apply(model, PLANS["keep"], engine=VirtualEngine(0)) as tide, monkeypatch.context() as patch:
        patch.setattr(dist, "is_initialized", lambda: True)
        patch.setattr(dist, "get_world_size", lambda group=None: 2)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            tide.step(_failing_once(model))
        assert caught.value.__notes__[0].startswith(
            "lowtide: this micro-batch was not run again: this process is one of 2 ranks, and a rank cannot repeat its "
        )
        tide.step(_failing_once(model), is_local=True)
        assert tide.stats.num_retries == 1


def test_one_recipe_that_does_not_hold_is_given_up_alone() -> None:
    class Scaled(_Layer):
        def forward(self, x: Tensor) -> Tensor:
            return (self.linear(x).sigmoid() * self.scale).tanh() + x.sin().cos()  # type: ignore[operator]

    torch.manual_seed(0)
    model = nn.Sequential(*(Scaled() for _ in range(3)))
    for layer in model:
        layer.register_buffer("scale", torch.full((8,), 1.5))
    x = torch.randn(4, 8)
    profile = lowtide.observe(model, (x,), loss=lambda out: out.square().mean())
    plan = random_plan(profile, 1, made=1.0, swapped=0.0)
    with lowtide.apply(model, plan, engine=VirtualEngine(0)) as tide:

        def closure() -> None:
            loss = model(x).square().mean()
            if not tide.failed_recipes:
                model[1].scale.data.mul_(1.25)  # type: ignore[operator]
            try:
                loss.backward()
            finally:
                model[1].scale.data.fill_(1.5)  # type: ignore[operator]

        tide.step(closure)
        assert 1 <= len(tide.failed_recipes) <= 2, tide.failed_recipes
        assert all(name.startswith("1") for name in tide.failed_recipes), tide.failed_recipes
