"""Threads that are in the middle of their forward passes at the same moment: arranged, not left to the scheduler."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from tests.support.virtual_engine import VirtualEngine

NUM_THREADS = 3


class _Meets(nn.Module):
    """In its forward all threads wait for one another, if they can be there together."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x).tanh()
        MEETING.enter()
        return self.linear(h).sin() * h


class _Meeting:
    def __init__(self) -> None:
        self.changed, self.num_inside, self.most_inside = threading.Condition(), 0, 0

    def enter(self) -> None:
        with self.changed:
            self.num_inside += 1
            self.most_inside = max(self.most_inside, self.num_inside)
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.most_inside >= NUM_THREADS, timeout=0.3)
            self.num_inside -= 1

    def restart(self) -> None:
        with self.changed:
            self.num_inside = self.most_inside = 0


MEETING = _Meeting()


def _gradients(model: nn.Module, seed: int) -> list[Tensor]:
    # Of other shapes in each thread: a tensor of one is never taken for one of another.
    x = torch.randn(2 + seed, 8, generator=torch.Generator().manual_seed(seed))
    return list(torch.autograd.grad(model(x).square().mean(), list(model.parameters())))


def _in_threads(model: nn.Module) -> dict[int, Any]:
    found: dict[int, Any] = {}

    def work(seed: int) -> None:
        try:
            found[seed] = _gradients(model, seed)
        except BaseException as error:
            found[seed] = error

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("memory", [{"swap": "all"}, {"recompute": ["0", "1"], "layers": ["0", "1"], "swap": "all"}])
def test_first_tables_are_learned_by_one_thread_and_later_passes_run_side_by_side(memory: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(_Meets(), _Meets())
    wanted = [_gradients(model, seed) for seed in range(NUM_THREADS)]
    engine = VirtualEngine(0)
    with lowtide.apply(model, {"min_bytes": 0, **memory}, engine=engine) as tide:
        for is_first in (True, False):
            MEETING.restart()
            found = _in_threads(model)
            for seed in range(NUM_THREADS):
                assert isinstance(found[seed], list), found[seed]
                assert all(torch.equal(a, b) for a, b in zip(found[seed], wanted[seed], strict=True))
            if "recompute" not in memory:  # else layers run again in backward, which no lock is for
                assert MEETING.most_inside == (1 if is_first else NUM_THREADS)
            if is_first:
                assert len({site.name for site in tide.plan.sites}) == len(tide.plan.sites)
        assert tide.stats.num_divergences == 0
    assert not engine.violations
