"""A model that fails in the forward pass that is observed: what the failure leaves behind is what it leaves without
lowtide, since a loop may leave such a batch out and go on."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from tests.support.virtual_engine import virtual


class BadBatch(Exception):
    """What a model says of a batch that it does not take."""


class Checked(nn.Module):
    """Draws and writes before it looks at what it has made."""

    def __init__(self, error: BaseException | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)) for _ in "ab")
        self.num_seen = 0
        self.error = error or BadBatch("not a number")

    def forward(self, x: Tensor) -> Tensor:
        self.num_seen += 1
        for layer in self.layers:
            x = layer(x)
        if not torch.isfinite(x).all():
            raise self.error
        return x.square().mean()


def _train(budget: str | None) -> list[Any]:
    torch.manual_seed(1)
    model = Checked()
    hooked: list[int] = []
    model.register_forward_pre_hook(lambda *_: hooked.append(len(torch.rand(1))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    tide = None if budget is None else lowtide.optimize(model, budget=budget, optimizer=optimizer, engine=virtual(1))
    found: list[Any] = []
    # Bad before anything is planned, at a shape that has a plan, and at one that has none.
    for num_rows, is_bad in ((4, True), (4, False), (4, True), (6, True), (6, False)):
        batch = torch.randn(num_rows, 8)
        if is_bad:
            batch[0] = torch.nan
            with pytest.raises(BadBatch, match="not a number") as caught:
                model(batch)
            assert caught.value is model.error
            with torch.no_grad():
                for norm in (layer[1] for layer in model.layers):
                    norm.running_mean.nan_to_num_()
                    norm.running_var.nan_to_num_()
        else:
            model(batch).backward()
            found += [None if p.grad is None else p.grad.tolist() for p in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
        found += [model.num_seen, len(hooked), torch.get_rng_state().tolist(), copy.deepcopy(model.state_dict())]
    if tide is not None:
        assert [event.why for event in tide.events if event.why in ("first step", "new shape")] == [
            "first step",
            "new shape",
        ]
        tide.remove()
    return [{k: v.tolist() for k, v in part.items()} if isinstance(part, dict) else part for part in found]


def test_a_batch_that_the_model_refuses_leaves_what_it_leaves_without_lowtide() -> None:
    assert _train("1GiB") == _train(None)


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("no memory"), lowtide.ConfigError("observe: no"), RuntimeError("lowtide: refused")],
)
def test_an_error_that_is_not_the_models_own_is_raised_at_once_and_leaves_nothing(error: Exception) -> None:
    model = Checked(error)
    bad = torch.full((4, 8), torch.nan)
    before = torch.get_rng_state()
    with lowtide.optimize(model, budget="1GiB", engine=virtual(1)):
        with pytest.raises(type(error)) as caught:
            model(bad)
        assert caught.value is error
        assert model.num_seen == 0
        assert torch.equal(torch.get_rng_state(), before)


class Left(BaseException):
    """No `Exception`, as Ctrl-C is none."""


@pytest.mark.parametrize("kind", [KeyboardInterrupt, Left])
def test_after_ctrl_c_it_is_as_if_the_pass_had_not_begun_and_the_next_one_says_so(kind: type[BaseException]) -> None:
    """At the first shape and at a new one. Where it falls is chance; a loop without lowtide keeps some of the pass."""

    def train(budget: str | None) -> list[Any]:
        torch.manual_seed(1)
        model = Checked()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        tide = (
            None if budget is None else lowtide.optimize(model, budget=budget, optimizer=optimizer, engine=virtual(1))
        )
        found: list[Any] = []
        for num_rows, is_ended in ((4, True), (4, False), (4, False), (6, True), (4, False), (6, False), (6, False)):
            batch = torch.randn(num_rows, 8)
            if is_ended:
                if tide is not None:
                    model.error = kind()
                    batch[0] = torch.nan
                    with pytest.raises(kind):
                        model(batch)
                is_new = tide is not None
                continue
            with pytest.warns(UserWarning, match=said) if is_new else contextlib.nullcontext():
                model(batch).backward()
            is_new = False
            found += [None if p.grad is None else p.grad.tolist() for p in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
            found += [model.num_seen, torch.get_rng_state().tolist(), [v.tolist() for v in model.state_dict().values()]]
        if tide is not None:
            tide.remove()
        return found

    said = rf"^lowtide: {kind.__name__} ended a forward pass of Checked while it was observed\. What it had drawn and "
    said += r"written by then was put back: training goes on as if it had not begun, where without lowtide a part "
    said += r"of it would have stayed\.$"
    assert train("1GiB") == train(None)


def test_an_error_that_does_not_come_twice_is_raised_all_the_same() -> None:
    class Once(Checked):
        def forward(self, x: Tensor) -> Tensor:
            numbers.append(len(numbers))
            if len(numbers) == 1:
                raise self.error
            return super().forward(x)

    numbers: list[int] = []
    once = Once()
    with lowtide.optimize(once, budget="1GiB", engine=virtual(1)):
        with pytest.raises(BadBatch):
            once(torch.ones(4, 8))
        once(torch.ones(4, 8)).backward()
