"""How many objects of the autopilot's are alive behind a handle: none for a fixed plan, few for a budget."""

from __future__ import annotations

import gc
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import lowtide
from tests.support import processes
from tests.support.small_models import Residual as Net
from tests.support.virtual_engine import virtual

ROOM = "lowtide.runtime.autopilot"
MOST = 10
FILE: dict[str, Any] = {"recompute_config": {"recompute": [1]}, "swap_config": {"swap": False}}


def alive() -> Counter[str]:
    """Names of classes of the room, with how many objects of each there are."""
    gc.collect()
    kinds = (type(each) for each in gc.get_objects())
    return Counter(kind.__qualname__ for kind in kinds if str(kind.__module__).startswith(ROOM))


def train(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for num_rows in (8, 8, 8, 6, 8):
        model(torch.randn(num_rows, 16)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def test_a_budget_has_few() -> None:
    before = alive()
    with lowtide.optimize(model := Net(), budget="1GiB", engine=virtual(1)) as tide:
        train(model)
        assert len(tide.events) > 0
        found = alive() - before
    assert 1 <= found.total() <= MOST, found


def test_a_fixed_plan_has_none() -> None:
    """Where another test has loaded the room, none is made; see below for a process that has not."""
    before = alive()
    with lowtide.apply(model := Net(), FILE, engine=virtual(1)) as tide:
        train(model)
        assert tide.plan is not None and tide.stats.recomputed_bytes > 0
        assert not alive() - before


def test_a_fixed_plan_does_not_load_the_room(tmp_path: Path) -> None:
    code = textwrap.dedent(f"""
        import sys
        from tests.runtime.autopilot.test_objects_alive import FILE, Net, alive, lowtide, train
        with lowtide.apply(model := Net(), FILE, engine="host") as tide:
            train(model)
            assert tide.stats.recomputed_bytes > 0
            print(alive().total(), [name for name in sys.modules if name.startswith("{ROOM}")])
    """)
    _, out, err = processes.program(code, tmp_path)
    assert out == "0 []\n", err


def test_what_looks_for_optimizers_may_die_while_one_steps() -> None:
    """torch walks over these hooks in Python: one that takes itself off meanwhile would end the user's step."""
    from lowtide.runtime.autopilot.facts import SteppingOptimizers

    finder, calls = SteppingOptimizers(Net()), []
    hooks = [register_optimizer_step_pre_hook(lambda *_: calls.append(1)) for _ in range(2)]
    del finder
    gc.collect()
    try:
        torch.optim.SGD(Net().parameters()).step()
    finally:
        for hook in hooks:
            hook.remove()
    assert calls == [1, 1]
