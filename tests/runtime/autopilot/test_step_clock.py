"""What counts as a step, and how long it takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowtide.runtime.autopilot.step_clock import StepClock
from tests.engines.clocked import ClockedEngine, ClockEvent


class Told:
    """Who asked for a step."""

    def __init__(self) -> None:
        self.num_over = 0
        self.seconds: list[float] = []
        self.pass_seconds: list[float] = []

    def over(self) -> None:
        self.num_over += 1

    def note(self, seconds: float, pass_seconds: float) -> None:
        self.seconds.append(seconds)
        self.pass_seconds.append(pass_seconds)


class Late(ClockedEngine):
    """Its clock is read two seconds later, as that of a device that is behind."""

    def seconds_between(self, start: ClockEvent, end: ClockEvent) -> float | None:  # type: ignore[override]
        return end.at - start.at if self.clock.now >= end.at + 2.0 else None


class Trained:
    """A model, an optimizer and a clock; forward takes 1 s, backward 2, the optimizer's step 4."""

    def __init__(self, engine: ClockedEngine | None = None) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(4, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.engine = engine or ClockedEngine(out_bytes_per_second=1, in_bytes_per_second=1)
        self.clock = StepClock(self.engine, list(self.model.parameters()))

    def forward(self, told: Told | None) -> Tensor:
        self.clock.stop()
        self.clock.read()
        self.clock.start(told)
        output = self.model(torch.ones(2, 4)).square()
        self.engine.clock.now += 1.0
        self.clock.follow({"hidden": output, "text": "none", "loss": output.sum()})
        return output

    def backward(self, output: Tensor) -> None:
        output.sum().backward()
        self.engine.clock.now += 2.0

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        self.engine.clock.now += 4.0


def test_a_step_has_forward_and_backward_and_the_optimizer_in_it() -> None:
    trained, told = Trained(), Told()
    for _ in range(4):
        trained.backward(trained.forward(told))
        trained.step()
    assert told.seconds == [7.0] * 3 and told.num_over == 3


def test_the_passes_of_a_step_end_with_its_last_backward() -> None:
    trained, told = Trained(), Told()
    for _ in range(3):
        output = trained.forward(told)
        output.sum().backward(retain_graph=True)
        trained.engine.clock.now += 2.0
        output.sum().backward()  # ends now, after 1 s and 2 s
        trained.engine.clock.now += 2.0
        trained.step()
    assert told.seconds == [9.0] * 2 and told.pass_seconds == [3.0] * 2


@pytest.mark.parametrize("num_micro", [2, 3, 4])
def test_where_gradients_accumulate_it_is_a_micro_batch_without_the_optimizer(num_micro: int) -> None:
    trained = Trained()
    tolds = []
    for number in range(5 * num_micro):
        tolds.append(Told())
        trained.backward(trained.forward(tolds[-1]))
        if number % num_micro == num_micro - 1:
            trained.step()
    for number, told in enumerate(tolds[:-1]):
        has_optimizer = number % num_micro == num_micro - 1
        assert told.seconds == ([] if has_optimizer else [3.0])
        assert told.num_over == len(told.seconds)


def test_a_step_that_the_optimizer_skipped_stops_nothing() -> None:
    """As a scaler of losses does when gradients overflow, often in the first steps."""
    trained, told = Trained(), Told()
    for number in range(20):
        trained.backward(trained.forward(told))
        if number not in (0, 1, 9):
            trained.step()
    assert told.seconds.count(3.0) == 2 and told.seconds.count(7.0) >= 10


def test_two_forwards_before_one_backward_are_one_step() -> None:
    trained, first, second = Trained(), Told(), Told()
    for _ in range(3):
        one = trained.forward(first)
        trained.backward(one + trained.forward(second))
        trained.step()
    assert first.seconds == [8.0] * 2 and second.seconds == []


def test_a_step_that_was_forgotten_is_not_timed() -> None:
    trained, told = Trained(), Told()
    trained.forward(told)
    trained.clock.forget()
    for _ in range(2):
        trained.backward(trained.forward(told))
    assert told.seconds == [3.0]


def test_a_time_is_told_when_the_device_has_got_there() -> None:
    trained, told = Trained(Late(out_bytes_per_second=1, in_bytes_per_second=1)), Told()
    found: list[Any] = []
    for _ in range(4):
        trained.backward(trained.forward(told))
        found.append((told.num_over, len(told.seconds), trained.clock.has_pending))
    assert found == [(0, 0, False), (1, 0, True), (2, 1, True), (3, 2, True)]


def test_a_graph_that_outlives_the_clock_runs_backward() -> None:
    trained = Trained()
    output = trained.forward(Told())
    trained.clock.forget()
    del trained.clock
    trained.backward(output)
