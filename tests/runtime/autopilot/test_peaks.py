"""Reviews on a device whose allocator counts: whoever resets the counter, and whatever it remembers.

The device is main memory; its counter is a count of live storages around the whole run.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.config.memory import load_memory
from lowtide.errors import BudgetError
from lowtide.planner.plan_profile import plan_profile
from lowtide.profiling.observe_step import observe
from lowtide.runtime.autopilot.measure import StepWatch
from lowtide.runtime.session.tides import Phase, Tides
from lowtide.tensors.live_bytes import LiveBytes
from lowtide.timeline.step import Link
from lowtide.units import format_bytes
from tests.support.virtual_engine import VirtualEngine

LINK = Link(out_bytes_per_second=1e9, in_bytes_per_second=1e9)


class Net(nn.Module):
    """No operator of it is cheap enough to be made again: plans swap, and nothing is tried out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6))
        self.unforeseen_bytes = [0]  # a list: plans do not look into it

    def forward(self, x: Tensor) -> Tensor:  # (N, 64) -> scalar
        for layer in self.layers:
            x = layer(x)
        if any(self.unforeseen_bytes):
            torch.zeros(*self.unforeseen_bytes, dtype=torch.uint8).sum()
        return x.square().mean()


def rows(seed: int = 0) -> Tensor:
    return torch.randn(256, 64, generator=torch.Generator().manual_seed(seed))


class Counter:
    """What `torch.cuda.max_memory_allocated` and `reset_peak_memory_stats` are elsewhere."""

    def __init__(self, live: LiveBytes) -> None:
        self.live = live

    def peak(self) -> int:
        return self.live.peak_bytes

    def reset(self) -> None:
        self.live.peak_bytes = self.live.now_bytes


@contextmanager
def counting(model: nn.Module, share: float, more_bytes: int = 0) -> Iterator[tuple[Tides, Counter, int]]:
    """The model under so much of the way from its floor to plain, and more, on a device that counts."""
    memory = {"min_bytes": 256, "recompute": "none"}
    found = plan_profile(observe(model, (rows(),)), load_memory({"budget": 1 << 40, **memory}), link=LINK).predicted
    assert found is not None
    budget = found.floor_bytes + int(share * (found.plain_peak_bytes - found.floor_bytes)) + more_bytes
    engine = VirtualEngine(seed=1)
    with LiveBytes(model=model) as live:
        counter = Counter(live)
        engine.device_peak_bytes = counter.peak  # type: ignore[method-assign]
        engine.reset_device_peak = counter.reset  # type: ignore[method-assign]
        make = engine.new_buffer

        def new_buffer(*args: Any) -> torch.UntypedStorage:
            buffer = make(*args)
            live.add(buffer)
            return buffer

        engine.new_buffer = new_buffer  # type: ignore[method-assign]
        with lowtide.optimize(model, budget=budget, memory=memory, engine=engine, strict=True) as tide:
            yield tide, counter, budget


def step(model: nn.Module, seed: int) -> None:
    model.zero_grad(set_to_none=True)
    model(rows(seed)).backward()


def steps(model: nn.Module, seeds: range) -> None:
    for seed in seeds:
        step(model, seed)


def test_a_fresh_plan_is_not_compared_with_what_was_before_it() -> None:
    model = Net()
    with counting(model, 0.4) as (tide, counter, budget):
        torch.zeros(1 << 24)  # long gone when the plan comes into force, and in the counter
        for number in range(4):
            step(model, number)
            assert counter.peak() <= budget, number
        assert [event.why for event in tide.events] == ["first step"]


def test_a_loop_that_resets_the_counter_before_each_step_does_not_raise_the_budget() -> None:
    model = Net()
    with counting(model, 0.4) as (tide, counter, budget):
        for number in range(5):
            counter.reset()
            step(model, number)
            assert number == 0 or counter.peak() <= budget, number
        assert {event.budget_bytes for event in tide.events} == {budget}
        assert [event.why for event in tide.events] == ["first step"]


def test_bytes_that_nobody_foresaw_are_taken_from_the_budget_also_where_the_counter_is_reset() -> None:
    for resets in (False, True):
        model = Net()
        with counting(model, 0.6) as (tide, counter, budget):
            step(model, 0)
            peaks = []
            # Where forward is fullest, so much more than the profile has.
            model.unforeseen_bytes = [budget // 5]
            for number in range(1, 5):
                counter.reset() if resets else None
                step(model, number)
                peaks.append(counter.peak())
                if not resets:
                    counter.live.peak_bytes = counter.live.now_bytes
        assert any(event.why.startswith("peak: ") for event in tide.events) == (max(peaks) > budget)
        assert peaks[-1] <= budget


def test_a_review_that_finds_no_plan_keeps_the_old_one_and_says_so() -> None:
    model, truth = Net(), Net()
    truth.load_state_dict(model.state_dict())
    with counting(model, 0.05) as (tide, _, budget):
        step(model, 0)
        digest = tide.events[-1].digest
        model.unforeseen_bytes = [budget]
        with pytest.warns(UserWarning, match="a planned step was not as predicted") as caught:
            steps(model, range(1, 4))
        text = str(caught[0].message)
        assert len(caught) == 1
        assert text.startswith("lowtide: a planned step was not as predicted (peak: ")
        assert "; the plan in force stays, and steps may need more than the budget. Raise it to " in text
        assert [event.digest for event in tide.events] == [digest]
        assert [shape.unforeseen_bytes for shape in tide.source.table] == [0]
    step(truth, 3)
    pairs = zip(model.parameters(), truth.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)  # type: ignore[arg-type]


def test_a_first_step_above_the_budget_that_no_plan_mends_is_refused_with_the_true_floor() -> None:
    """What the loop computes around the model shows in the first planned step; then nothing is lost but that step."""
    model, beside_bytes = Net(), 1 << 20

    def train(num_steps: int) -> None:
        for number in range(num_steps):
            model.zero_grad(set_to_none=True)
            loss = model(rows(number))
            beside = torch.zeros(beside_bytes, dtype=torch.uint8)
            loss.backward()
            del beside

    with counting(model, 0.05) as (tide, counter, budget):
        train(1)
        peak_bytes = counter.peak()
        assert peak_bytes > budget
        with pytest.raises(BudgetError) as caught:
            train(1)
        text, needed_bytes = str(caught.value), caught.value.floor_bytes
        assert text == (
            f"budget {format_bytes(budget)}: the first planned step took {format_bytes(peak_bytes)}, which no "
            "observation of the model shows (a loss of the loop's own, or what else is on the device), and no plan "
            f"fits with that; the least that can be reached is {format_bytes(needed_bytes)}; raise the budget to that, "
            "or make the micro-batch smaller"
        )
        assert tide.phase is Phase.REMOVED
        train(1)  # the model is as it was
        assert "forward" not in vars(model)
    with counting(model, 0.05, more_bytes=needed_bytes - budget) as (tide, counter, budget):
        train(2)
        counter.reset()
        train(2)
        assert counter.peak() <= budget


def test_the_watch_remembers_the_most_also_where_the_counter_is_reset() -> None:
    shown: list[int | None] = [5, 9, 3, 4, None]
    watch = StepWatch(Readings([], shown))
    for peak_bytes in (5, 9, 9):
        watch.note_peak()
        assert watch.peak_bytes == peak_bytes
    watch.restart_totals(Totals())
    for _ in range(2):
        watch.note_peak()
        assert watch.peak_bytes == 4


def test_a_plan_that_fits_nothing_holds_no_output_of_the_forward_pass_that_asked_for_it() -> None:
    """A `BudgetError` that is put aside refers to its frames, and those to all that are above them."""
    model = Net()
    outputs: list[weakref.ref[torch.Tensor]] = []
    with counting(model, 0.05) as (_, _, budget), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()
        gc.disable()
        try:
            for number in range(4):
                model.unforeseen_bytes = [budget if number == 1 else 0]
                model.zero_grad(set_to_none=True)
                output = model(rows(number))
                output.backward()
                outputs.append(weakref.ref(output))
                del output
            assert [each() is None for each in outputs] == [True] * 4
        finally:
            gc.enable()


def test_the_watch_looks_at_the_end_of_each_backward_pass() -> None:
    watch = StepWatch(Readings([], list(range(10))))
    watch.is_first_told = True
    x = torch.ones(2, requires_grad=True)
    loss = x.exp().sum()
    watch.follow({"loss": loss}, Totals(), is_compared=True)
    assert watch.peak_bytes == 0
    loss.backward(retain_graph=True)
    loss.backward()
    assert watch.peak_bytes == 2
    watch.follow(torch.ones(1), Totals(), is_compared=True)  # nothing to wait for
    assert watch.peak_bytes == 3


class Totals:
    """As much of a tide as is measured anew."""

    def __init__(self) -> None:
        self.num_resets = 0

    def reset_stats(self) -> None:
        self.num_resets += 1


class Readings:
    """An engine that reads one number of bytes after the other, of what is there and of the peak."""

    device_type = "virtual"

    def __init__(self, current: list[int | None], peaks: list[int | None]) -> None:
        self.current, self.peaks = current, peaks
        self.num_resets = 0

    def device_bytes(self) -> int | None:
        return self.current.pop(0)

    def device_peak_bytes(self) -> int | None:
        return self.peaks.pop(0)

    def reset_device_peak(self) -> None:
        self.num_resets += 1


def test_what_the_loop_takes_is_measured_from_the_end_of_forward_to_the_start_of_backward() -> None:
    engine: Any = Readings([100, 100], [190, 150])
    watch = StepWatch(engine)
    x = torch.ones(5, requires_grad=True)
    for extra, peak in ((70, 190), (70, 190)):  # 190 - 100 - 20 of the gradient; the second time less
        output = x.exp()
        is_over = watch.begin_loop(output)
        assert is_over is not None
        is_over()
        assert (watch.loop_extra_bytes, watch.loop_peak_bytes) == (extra, peak)
    assert engine.num_resets == 4
    watch.restart_totals(Totals())
    assert (watch.loop_extra_bytes, watch.loop_peak_bytes) == (0, 0)


def test_a_loss_of_the_model_itself_and_two_forward_passes_are_not_measured() -> None:
    engine: Any = Readings([100, None], [])
    watch = StepWatch(engine)
    x = torch.ones(5, requires_grad=True)
    loss = x.exp().sum()
    assert watch.begin_loop(loss) is None
    assert watch.begin_loop(None) is None
    assert engine.num_resets == 0
    is_over = watch.begin_loop(x.exp())
    assert watch.begin_loop(x.exp()) is None
    assert is_over is not None
    is_over()
    assert (watch.loop_extra_bytes, engine.num_resets) == (0, 1)
    assert watch.begin_loop(x.exp()) is None  # a device that does not count
    assert engine.num_resets == 1


def watched() -> tuple[StepWatch, Any]:
    watch = StepWatch(VirtualEngine(seed=1))
    watch.peak_bytes, watch.loop_peak_bytes, watch.loop_extra_bytes = 3, 5, 1
    watch.was_smaller = True
    watch.backward_seconds.append(1.0)
    return watch, Totals()


def test_a_new_measurement_knows_nothing_of_the_one_before() -> None:
    watch, tide = watched()
    assert watch.highest_bytes == 5
    watch.begin(tide)
    assert (watch.highest_bytes, watch.loop_extra_bytes, tide.num_resets) == (0, 0, 1)
    assert not watch.was_smaller and watch.backward_seconds == []


def test_totals_that_start_anew_leave_the_steps_that_have_run() -> None:
    watch, tide = watched()
    watch.restart_totals(tide)
    assert (watch.highest_bytes, watch.loop_extra_bytes, tide.num_resets) == (0, 0, 1)
    assert watch.was_smaller and watch.backward_seconds == [1.0]
