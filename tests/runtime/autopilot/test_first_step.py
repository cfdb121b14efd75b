"""After the first planned step one line says what it needed and took, and an error out of memory says what held it."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.core.decisions import AccountLine, Prediction
from lowtide.core.log import Listener
from lowtide.core.plan import Plan
from lowtide.runtime.autopilot.measure import StepWatch
from lowtide.runtime.session.handle import plan_message
from lowtide.units import GIB, MIB
from tests.support.virtual_engine import VirtualEngine, virtual

PREDICTED = Prediction(
    peak_bytes=19 * GIB, step_seconds=1.6, stall_seconds=0.0, recompute_seconds=0.0, gap=0.0, plain_peak_bytes=30 * GIB,
    plain_seconds=1.0, floor_bytes=GIB, optimizer_seconds=0.1, certainty="",
)  # fmt: skip


class Clocked:
    """An engine whose clock goes on by a second with each look."""

    device_type = "virtual"

    def __init__(self) -> None:
        self.now = 0.0

    def mark_time(self) -> float:
        self.now += 1.0
        return self.now

    def seconds_between(self, start: float, end: float) -> float:
        return end - start


def backward(first: StepWatch) -> None:
    first.begin_pass()
    output = torch.ones(2, requires_grad=True) * 2
    first.follow(output, Clocked(), is_compared=False)  # type: ignore[arg-type]
    output.sum().backward()


def test_the_line_of_an_accelerator() -> None:
    first = StepWatch(Clocked())  # type: ignore[arg-type]
    first.begin_pass()  # a forward pass whose graph is dropped
    backward(first)
    backward(first)  # the second one is not the first
    assert first.first_line(PREDICTED, peak_bytes=int(19.3 * GIB), counted_bytes=0) == (
        "lowtide: step 1: peak 19.3 GiB, predicted 19.0 GiB (+1.6 %); forward and backward 1.00 s (slower in a first "
        "step); later ones, predicted: 1.50 s"
    )
    assert first.is_first_told


def test_a_graph_that_goes_backward_twice_counts_once() -> None:
    """`retain_graph`: its hook runs again in the second backward pass, which is not the first step's."""
    first = StepWatch(Clocked())  # type: ignore[arg-type]
    first.begin_pass()
    output = torch.ones(2, requires_grad=True) * 2
    first.follow(output, Clocked(), is_compared=False)  # type: ignore[arg-type]
    loss = output.sum()
    loss.backward(retain_graph=True)
    loss.backward()
    line = first.first_line(PREDICTED, peak_bytes=None, counted_bytes=0)
    assert line.endswith("; forward and backward 1.00 s (slower in a first step); later ones, predicted: 1.50 s")


def test_the_line_of_the_host_compares_no_peak() -> None:
    assert StepWatch(Clocked()).first_line(PREDICTED, peak_bytes=None, counted_bytes=17 * GIB) == (  # type: ignore[arg-type]
        "lowtide: step 1: predicted peak 19.0 GiB; 17.0 GiB counted without temporaries (tide.audit() counts all)"
    )


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3))
        self.runs_out: list[bool] = []  # in a list: a flag of its own would be another model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        if self.runs_out:
            raise torch.OutOfMemoryError("no more")
        return x


def test_it_is_said_once_and_an_error_has_the_words_of_the_plan() -> None:
    model, said = Net(), []
    memory: Any = {"budget": "1GiB", "min_bytes": 1}
    with Listener(said.append), lowtide.optimize(model, memory=memory, engine=VirtualEngine(0)):
        for _ in range(4):
            model(torch.ones(512, 64)).sum().backward()
        lines = [line for line in said if line.startswith("lowtide: step 1: ")]
        assert len(lines) == 1 and re.match(r"lowtide: step 1: predicted peak .* counted without temporaries", lines[0])
        model.runs_out.append(True)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            model(torch.ones(512, 64))
    (note,) = caught.value.__notes__
    assert note.startswith(
        "lowtide: out of memory in a forward pass. Parameters, gradients, buffers and optimizer state"
    )
    assert "The plan had said: peak " in note and "What would help most: " in note


class RunsOut(torch.autograd.Function):
    """Memory runs out in its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("no more")


def test_an_error_of_backward_in_a_plain_loop_has_the_words_too() -> None:
    memory: Any = {"budget": "1GiB", "min_bytes": 1}

    def train() -> None:
        with lowtide.optimize(Net(), memory=memory, engine=VirtualEngine(0)) as tide:
            for _ in range(2):
                tide.model(torch.ones(512, 64)).sum().backward()
            RunsOut.apply(tide.model(torch.ones(512, 64))).sum().backward()

    with pytest.raises(torch.OutOfMemoryError) as caught:
        train()
    (note,) = caught.value.__notes__
    assert note.startswith(
        "lowtide: out of memory outside of a forward pass (backward, or the optimizer's step). Parameters, gradients"
    )
    assert "The plan had said: peak " in note and "What would help most: " in note
    with pytest.raises(torch.OutOfMemoryError) as caught, lowtide.apply(Net(), {"swap": "all", "min_bytes": 1}) as tide:
        RunsOut.apply(tide.model(torch.ones(512, 64))).sum().backward()
    assert len(caught.value.__notes__) == 1
    with pytest.raises(ValueError, match="other") as other, lowtide.apply(Net(), {"swap": "all"}):
        raise ValueError("other")
    assert not hasattr(other.value, "__notes__")


def test_words_of_a_plan() -> None:
    def account(**planned_mib: int) -> tuple[AccountLine, ...]:
        return tuple(
            AccountLine(what=what.replace("_", " "), plain_bytes=0, planned_bytes=mib * MIB)
            for what, mib in planned_mib.items()
        )

    plan = Plan(layers=(), min_bytes=0, is_solved=True, budget_bytes=20 * GIB, predicted=PREDICTED)
    assert not plan_message(plan)
    assert not plan_message(dataclasses.replace(plan, predicted=None, account=account(weights=1)))
    full = account(weights=512, optimizer_state=1024, activations=10, peak=2048)
    assert plan_message(dataclasses.replace(plan, account=full)) == (
        " The plan had said: peak 19.0 GiB of a budget of 20.0 GiB, of which optimizer state: 1.0 GiB. What would help "
        "most: write memory.optimizer: swap."
    )


@pytest.mark.parametrize(("is_inside", "caches"), [(True, True), (True, False), (False, True)])
def test_a_backward_pass_inside_of_an_autocast_that_remembers_casts_is_warned_about_once(
    is_inside: bool, caches: bool, recwarn: pytest.WarningsRecorder
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(512, 512, bias=False), torch.nn.Linear(512, 512, bias=False))
    model[1].requires_grad_(False)  # torch remembers casts of what is trained
    with lowtide.optimize(model, budget="1GiB", engine=virtual(1)):
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=caches):
                loss = model(torch.ones(8, 512)).float().sum()
                if is_inside:
                    loss.backward()
            if not is_inside:
                loss.backward()
    said = [str(warning.message) for warning in recwarn if "autocast" in str(warning.message)]
    assert said == [
        "lowtide: this backward pass began inside of torch.autocast, which holds on to its casts of weights until its "
        "context is left, up to 0.5 MiB. Plans count them until the forward pass is over, so steps may pass the budget "
        "by that much. Call backward() after the context, as torch advises."
    ] * (is_inside and caches)
