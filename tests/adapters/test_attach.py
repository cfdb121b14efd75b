"""What adapters share, and the verb that they call."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch import nn

import lowtide
from lowtide.adapters.attach import Attached
from lowtide.core.log import LOG, Listener
from lowtide.runtime.session.forward_patch import patched_module
from tests.support.virtual_engine import virtual

BUDGET = {"budget": "1GiB", "min_bytes": 0}


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))


@pytest.mark.parametrize("form", ["mapping", "file"])
def test_a_budget_in_the_memory_of_apply_is_planned_for(form: str, tmp_path: Path) -> None:
    path = tmp_path / "memory.yaml"
    path.write_text("budget: 1GiB\nmin_bytes: 0\n", encoding="utf-8")
    said: list[str] = []
    model = _model()
    tide = lowtide.apply(model, BUDGET if form == "mapping" else path, engine=virtual(1))
    with Listener(said.append):
        model(torch.ones(4, 8)).sum().backward()
    assert tide.plan.budget_bytes == 2**30
    assert said[-1].startswith("lowtide: plan ")
    tide.remove()
    with (
        pytest.raises(lowtide.BudgetError, match=r"^budget 0\.001 MiB: no plan fits"),
        lowtide.apply(model, {"budget": "1KiB", "strict": True}, engine=virtual(1)),
    ):
        model(torch.ones(4, 8))
    assert patched_module(model) is None


def test_attaching_again_lets_go_first() -> None:
    attached = Attached("here", budget="1GiB", engine=virtual(1), say=lambda line: None)
    assert attached.scalars() == {}
    one, other = _model(), _model()
    attached.attach(one, None, speaks=True)
    assert attached.stats.kept_bytes == 0
    assert set(attached.scalars().values()) == {0.0}
    one(torch.ones(4, 8)).sum().backward()
    assert attached.scalars()["lowtide/kept_bytes"] == attached.stats.kept_bytes > 0
    attached.attach(other, None, speaks=False)
    assert patched_module(one) is None
    assert patched_module(other) is not None
    attached.remove()
    attached.remove()
    assert patched_module(other) is None


def test_nobody_listens_for_an_adapter_that_was_dropped_without_remove() -> None:
    before = list(LOG.handlers)
    attached, model = Attached("here", budget="1GiB", engine=virtual(1), say=lambda line: None), _model()
    attached.attach(model, None, speaks=True)
    del attached
    gc.collect()
    assert LOG.handlers == before
    lowtide.remove(model)


def test_a_plan_has_its_budget() -> None:
    plan = lowtide.plan(_model(), (torch.ones(4, 8),), budget="1GiB", loss=torch.sum)
    with pytest.raises(lowtide.ConfigError) as caught:
        Attached("TideCallback", budget="1GiB", memory=plan)
    assert str(caught.value) == "TideCallback: memory is a plan, which has its budget; leave budget out"


@pytest.mark.parametrize(
    ("budget", "why"),
    [
        ("banana", "'banana' is not a size; write a number and a unit, such as 20GiB, 512MiB or 20GB"),
        ("120%", "'120%' is not a share of a device; write more than 0% and at most 100%, such as 90%"),
        (-1, "-1 is not a size; a size is never negative"),
    ],
)
def test_a_bad_budget_is_refused_when_it_is_written_not_when_training_begins(budget: int | str, why: str) -> None:
    with pytest.raises(lowtide.ConfigError) as caught:
        Attached("TideCallback", budget=budget)
    assert str(caught.value) == f"TideCallback: budget: {why}"
