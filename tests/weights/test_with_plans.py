"""Weights that come and go under a plan: what the plan keeps, swaps and recomputes beside them."""

from __future__ import annotations

import functools
import gc

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import lowtide
from tests.support import zoo
from tests.support.grid import one_of
from tests.support.virtual_engine import VirtualEngine
from tests.weights.test_bit_equality import Small

PLANS = {
    "keep": {"swap": "none", "recompute": "none"},
    "swap": {"swap": ["layers.*"], "recompute": "none", "min_bytes": 0},
    "recompute": {"swap": "none", "recompute": "all"},
    "mixed": {"swap": ["layers.0", "layers.2"], "recompute": ["layers.1", "layers.3.up"], "min_bytes": 0},
}
NAMES = sorted(name for name, case in zoo.CASES.items() if case.layers)


def both(name: str, plan: dict, engine: VirtualEngine | None = None) -> None:
    case = zoo.CASES[name]
    model = case.build(3)
    optimizer = zoo.make_optimizer(model)
    with lowtide.swap_weights(model, optimizer, min_bytes=1, engine=engine):
        tide = lowtide.apply(model, plan, optimizer=optimizer, engine=engine)
        result = zoo.train(case, model, optimizer, 3, num_steps=2, accumulate=2)
        tide.remove()
    zoo.assert_same(result, zoo.plain_result(name, 3, 2, 2))


@pytest.mark.parametrize("name", one_of(4, NAMES))
def test_layers_that_are_swapped_and_recomputed(name: str) -> None:
    both(name, zoo.mixed(swap=list(zoo.CASES[name].layers)[::2], recompute=list(zoo.CASES[name].layers)[1::2]))


@pytest.mark.parametrize("seed", one_of(3, range(6)))
@pytest.mark.parametrize("plan", ["swap", "recompute"])
def test_on_an_adversarial_engine(plan: str, seed: int) -> None:
    engine = VirtualEngine(seed)
    both("llama", {**PLANS[plan]} if plan == "recompute" else {**PLANS[plan], "swap": ["model.layers.*"]}, engine)
    assert not engine.violations, engine.violations


@pytest.mark.parametrize("plan", [None, *PLANS])
def test_a_graph_holds_no_weights(plan: str | None) -> None:
    """After a forward the only weights on the device are those of the window."""
    model = Small(width=64, num_layers=6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lowtide.swap_weights(model, optimizer, min_bytes=1):
        tide = lowtide.apply(model, PLANS[plan]) if plan is not None else None
        for _ in range(2):
            shown: list[StorageWeakRef] = []
            see = functools.partial(_see, shown)
            hooks = [layer.up.register_forward_hook(see) for layer in model.layers]
            loss = model(torch.randint(32, (2, 8)))
            gc.collect()
            alive = [not storage.expired() for storage in shown]
            assert alive[:3] == [False] * 3, alive
            loss.backward()
            optimizer.zero_grad()
            for hook in hooks:
                hook.remove()
        if tide is not None:
            tide.remove()


def _see(shown: list[StorageWeakRef], module: torch.nn.Linear, *_: object) -> None:
    shown.append(StorageWeakRef(module.weight.data.untyped_storage()))


def test_a_plan_comes_after_the_weights() -> None:
    model = Small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lowtide.apply(model, PLANS["keep"]), pytest.raises(lowtide.ConfigError, match="apply the plan after that"):
        lowtide.swap_weights(model, optimizer, min_bytes=1)
