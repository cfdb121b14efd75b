"""A loop that leaves bad batches out by `except ValueError` catches a `BudgetError` too: the next step says so."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import lowtide
from tests.support import zoo
from tests.support.virtual_engine import virtual

WORDS = (
    r"^lowtide: Sequential trains without a plan from here on, since the BudgetError of a forward pass before was "
    r"caught \(budget 0\.001 MiB: no plan fits; the least that can be reached is .*\)\. "
    r"Call remove\(\) on the handle if that is what you want\.$"
)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.2), nn.GELU()) for _ in range(3)))


def _refused() -> tuple[nn.Module, lowtide.Tide]:
    model = _model()
    tide = lowtide.optimize(model, budget=1 << 10, memory={"min_bytes": 0, "strict": True}, engine=virtual(1))
    try:
        model(torch.ones(4, 16))
    except ValueError:
        return model, tide
    raise AssertionError("a budget of 1,000 bytes was not refused")


def _said(recwarn: pytest.WarningsRecorder) -> list[str]:
    return [str(warning.message) for warning in recwarn if "without a plan" in str(warning.message)]


def test_the_next_forward_pass_that_trains_says_so_once(recwarn: pytest.WarningsRecorder) -> None:
    model, tide = _refused()
    torch.manual_seed(1)
    with torch.no_grad():
        model(torch.ones(4, 16))
    lowtide.observe(model, (torch.ones(4, 16),), loss=torch.Tensor.sum)
    with pytest.raises(lowtide.BudgetError):
        lowtide.plan(model, (torch.ones(4, 16),), loss=torch.Tensor.sum, budget=1 << 10)
    assert not _said(recwarn)
    with pytest.warns(UserWarning, match=WORDS):
        model(torch.ones(4, 16)).sum().backward()
    truth = _model()
    torch.manual_seed(1)
    with torch.no_grad():
        truth(torch.ones(4, 16))
    truth(torch.ones(4, 16)).sum().backward()
    assert all(zoo.same_bits(a.grad, b.grad) for a, b in zip(model.parameters(), truth.parameters(), strict=True))
    model(torch.ones(4, 16)).sum().backward()
    assert not _said(recwarn)
    assert zoo.footprint(model) == zoo.footprint(truth)
    tide.remove()


def test_who_knows_it_hears_nothing(recwarn: pytest.WarningsRecorder) -> None:
    model, tide = _refused()
    tide.remove()
    assert zoo.footprint(model) == zoo.footprint(_model())
    model(torch.ones(4, 16))
    model, _ = _refused()  # another budget, on the same model
    with lowtide.optimize(model, budget="1GiB", engine=virtual(1)):
        model(torch.ones(4, 16))
    model(torch.ones(4, 16))
    assert not _said(recwarn)


def test_so_does_a_copy(recwarn: pytest.WarningsRecorder) -> None:
    model, _ = _refused()
    other = copy.deepcopy(model)
    for each in (model, other):
        with pytest.warns(UserWarning, match="without a plan"):
            each(torch.ones(4, 16))
        each(torch.ones(4, 16))
    assert not _said(recwarn)
