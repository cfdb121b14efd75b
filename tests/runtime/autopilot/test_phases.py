"""The phases of a handle under a budget, and every way from one to another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.config.memory import load_memory
from lowtide.planner.plan_profile import plan_profile
from lowtide.profiling.observe_step import observe
from lowtide.runtime.session.tides import IN_FORCE, Phase, StepObserver, Tides
from lowtide.timeline.step import Link
from tests.support.virtual_engine import VirtualEngine, virtual

MEMORY = {"min_bytes": 256}
LINK = Link(out_bytes_per_second=1e9, in_bytes_per_second=1e9)


WAYS = {
    (Phase.WAITING, Phase.OBSERVING), (Phase.OBSERVING, Phase.WAITING), (Phase.WAITING, Phase.COMPARED),
    (Phase.WAITING, Phase.SETTLED), (Phase.COMPARED, Phase.SETTLED), (Phase.COMPARED, Phase.WAITING),
    (Phase.SETTLED, Phase.WAITING), (Phase.WAITING, Phase.REFUSED), (Phase.WAITING, Phase.REMOVED),
    (Phase.OBSERVING, Phase.REMOVED), (Phase.COMPARED, Phase.REMOVED), (Phase.SETTLED, Phase.REMOVED),
    (Phase.REFUSED, Phase.REMOVED),
}  # fmt: skip
"""Every way from one phase to another. WAITING is also the moment in which one plan is off, and the next not yet on."""


class Net(nn.Module):
    """Layers that save something, and fail when they are told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(3))
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:  # (N, 32) -> scalar
        for layer in self.layers:
            x = x + layer(x).tanh()
        if self.fails:
            raise KeyError("no such expert")
        return x.square().mean()


def rows(num_rows: int = 64) -> Tensor:
    return torch.randn(num_rows, 32, generator=torch.Generator().manual_seed(0))


def step(model: nn.Module, num_rows: int = 64, *, accumulates: bool = False) -> None:
    if not accumulates:
        model.zero_grad(set_to_none=True)
    model(rows(num_rows)).backward()


def budget_of(model: nn.Module) -> int:
    found = plan_profile(observe(model, (rows(),)), load_memory({"budget": 1 << 40, **MEMORY}), link=LINK).predicted
    assert found is not None
    return 8 * found.plain_peak_bytes  # larger batches fit as well


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Phase, Phase]]:
    """Where every handle of a test goes, in order: its phase is read after each fact that it keeps has changed."""
    gone: list[tuple[Phase, Phase]] = []
    last: dict[int, Phase] = {}
    handles: dict[int, Tides] = {}

    def look(handle: Tides) -> None:
        if not hasattr(handle, "_inside"):  # it is being made
            return
        before, now = last.get(id(handle), Phase.WAITING), handle.phase
        handles[id(handle._observer)] = handle
        last[id(handle)] = now
        if before is not now:
            gone.append((before, now))

    def set_fact(handle: Tides, name: str, value: Any) -> None:
        object.__setattr__(handle, name, value)
        look(handle)

    def set_fact_of_observer(observer: StepObserver, name: str, value: Any) -> None:
        object.__setattr__(observer, name, value)
        if id(observer) in handles:
            look(handles[id(observer)])

    monkeypatch.setattr(Tides, "__setattr__", set_fact)
    monkeypatch.setattr(StepObserver, "__setattr__", set_fact_of_observer)
    return gone


VIRTUAL = virtual(1)


def start(budget_bytes: int | None = None, engine: Any = VIRTUAL) -> tuple[Net, Tides]:
    torch.manual_seed(0)
    model = Net()
    budget = budget_bytes or budget_of(model)
    return model, lowtide.optimize(model, budget=budget, memory=MEMORY, engine=engine, strict=True)


def test_from_start_to_settled(ways: list[tuple[Phase, Phase]]) -> None:
    model, tide = start()
    assert tide.phase is Phase.WAITING and tide.plan is None
    step(model)
    assert tide.phase is Phase.COMPARED and tide.plan is not None
    for _ in range(3):
        step(model)
    assert tide.phase is Phase.SETTLED
    tide.remove()
    tide.remove()
    assert tide.phase is Phase.REMOVED
    assert tide.stats is not None and tide.profile is not None
    assert ways == [
        (Phase.WAITING, Phase.OBSERVING), (Phase.OBSERVING, Phase.WAITING), (Phase.WAITING, Phase.COMPARED),
        (Phase.COMPARED, Phase.SETTLED), (Phase.SETTLED, Phase.REMOVED),
    ]  # fmt: skip


def test_a_plan_that_is_made_again_for_gradients_has_one_comparison_left() -> None:
    model, tide = start()
    with tide:
        for phase in (Phase.COMPARED, Phase.COMPARED, Phase.SETTLED):
            step(model, accumulates=True)
            assert tide.phase is phase


def test_what_was_removed_is_not_tightened() -> None:
    model, tide = start()
    step(model)
    tide.remove()
    tide.source.for_less()
    tide.reset_stats()
    assert tide.phase is Phase.REMOVED and "forward" not in vars(model)


def refused() -> None:
    model, tide = start(1 << 10)
    with tide, pytest.raises(lowtide.BudgetError):
        step(model)
    assert "forward" not in vars(model)


def never_run() -> None:
    start()[1].remove()


def once() -> None:
    model, tide = start()
    with tide:
        step(model)


def other_shapes() -> None:
    """One that is observed while the plan is compared; back to one that has settled; and one of both after an error."""
    model, tide = start()
    with tide:
        step(model)
        step(model, 128)
        for num_rows in (64, 64, 64, 128, 64):
            step(model, num_rows)
        model.fails = True
        with pytest.raises(KeyError):
            step(model, 256)
        assert tide.phase is Phase.WAITING and tide.plan is None
        model.fails = False
        step(model)
        step(model, 256)


def accumulated() -> None:
    model, tide = start()
    with tide:
        for _ in range(5):
            step(model, accumulates=True)


def held_up() -> None:
    """A plan of somebody else on a part of the model: no other plan goes on until it is removed."""
    model, tide = start()
    with tide:
        step(model)
        other = lowtide.apply(model.layers[0][0], {"recompute": "none"}, engine=virtual(2))
        with pytest.raises(lowtide.ConfigError, match="already under a lowtide plan"):
            step(model, accumulates=True)
        assert tide.phase is Phase.WAITING and tide.plan is None
        with pytest.raises(lowtide.ConfigError, match="already under a lowtide plan"):
            step(model, accumulates=True)
        other.remove()
        step(model, accumulates=True)
        assert tide.phase in IN_FORCE


def removed_while_observing() -> None:
    """By a hook of the user's: that forward, and those after it, are plain ones."""
    model, tide = start()
    hook = model.layers[1].register_forward_pre_hook(lambda *_: tide.remove())
    step(model)
    assert tide.phase is Phase.REMOVED and "forward" not in vars(model)
    got = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    hook.remove()
    step(model)
    assert got and all(torch.equal(then, p.grad) for then, p in zip(got, model.parameters(), strict=True))


class Ticking(VirtualEngine):
    """Each step takes a little less than the one before it."""

    def __init__(self) -> None:
        super().__init__(1)
        self.now = 0.0

    def mark_time(self) -> float:  # type: ignore[override]
        self.now = 0.9 * self.now + 1.0
        return self.now

    def seconds_between(self, start: float, end: float) -> float:  # type: ignore[override]
        return end - start


LIVES: tuple[Callable[[], None], ...] = (
    refused, never_run, once, other_shapes, accumulated, held_up, removed_while_observing,
)  # fmt: skip


def test_micro_batches_after_a_refusal_are_plain_ones() -> None:
    """Also one that runs out of memory: nothing is wrapped again, and the one after it is no surprise."""
    model, tide = start(1 << 10)
    with pytest.raises(lowtide.BudgetError):
        tide.step(lambda: step(model))

    def without_memory() -> None:
        raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        tide.step(without_memory)
    tide.step(lambda: step(model))
    assert tide.phase is Phase.REFUSED and "forward" not in vars(model)
    tide.remove()


def start_at_the_floor() -> tuple[Net, Tides]:
    torch.manual_seed(0)
    found = plan_profile(observe(Net(), (rows(),)), load_memory({"budget": 1 << 40, **MEMORY}), link=LINK).predicted
    assert found is not None
    return start(found.floor_bytes + 64)


def test_what_no_plan_fits_is_refused_each_time_and_leaves_nothing(recwarn: pytest.WarningsRecorder) -> None:
    model, tide = start_at_the_floor()
    with tide:
        step(model)
        for _ in range(2):
            with pytest.raises(lowtide.BudgetError):
                step(model, 256)
        step(model)  # whose output is not compared with that of the larger batch
        for _ in range(2):
            with pytest.raises(lowtide.BudgetError):
                step(model, accumulates=True)
            assert not tide.source.has_gradients
    assert not [str(warning.message) for warning in recwarn if "another output" in str(warning.message)]


def test_an_engine_that_no_step_has_used_closes_with_remove(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[VirtualEngine] = []

    def close(engine: VirtualEngine) -> None:
        closed.append(engine)

    monkeypatch.setattr(VirtualEngine, "close", close)
    _, tide = start()
    tide.remove()
    assert closed == [tide.engine]


def test_a_plan_for_less_that_does_not_exist_leaves_the_budget_as_it_is() -> None:
    model, tide = start_at_the_floor()
    with tide:
        step(model)
        before = [shape.unforeseen_bytes for shape in tide.source.table]
        for _ in range(2):
            with pytest.raises(lowtide.BudgetError):
                tide.source.for_less()
        assert [shape.unforeseen_bytes for shape in tide.source.table] == before


def test_a_batch_that_fails_after_it_was_observed_is_not_compared_with_the_next(
    recwarn: pytest.WarningsRecorder,
) -> None:
    model, tide = start()
    with tide:
        model.layers[2].register_forward_hook(lambda *_: _raise_if(tide.phase is not Phase.OBSERVING and not recovered))
        recovered: list[int] = []
        with pytest.raises(KeyError):
            step(model)
        recovered.append(1)
        model(2 * rows()).backward()
    assert not [str(warning.message) for warning in recwarn if "another output" in str(warning.message)]


def _raise_if(condition: bool) -> None:
    if condition:
        raise KeyError("a bad batch")


def test_nothing_outside_of_the_table_happens_and_everything_in_it_does(ways: list[tuple[Phase, Phase]]) -> None:
    for live in LIVES:
        live()
    assert set(ways) <= WAYS
    missing = WAYS - set(ways)
    assert not missing, [f"{a.value} -> {b.value}" for a, b in missing]


def test_the_handle_says_where_it_stands() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    tide = lowtide.optimize(model, budget="1GiB", memory={}, engine=virtual(1))
    assert repr(tide) == "<lowtide.Tides waiting: engine 'virtual:1', budget 1.0 GiB>"
    for _ in range(4):
        model(torch.ones(2, 8)).sum().backward()
    assert tide.plan is not None
    assert repr(tide) == f"<lowtide.Tides settled: engine 'virtual:1', budget 1.0 GiB, plan {tide.plan.digest()}>"
    tide.remove()
    assert repr(tide).startswith("<lowtide.Tides removed: ")
