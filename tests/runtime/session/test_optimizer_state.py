"""Plans that have the optimizer's state elsewhere between steps, carried out: by rules, by a budget, beside a file."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.config.memory import load_memory, plan_from_rules
from lowtide.core.decisions import OptimizerPlacement
from lowtide.core.log import Listener
from lowtide.mindformers.follow import follow, sections_in
from lowtide.optimizer import store
from lowtide.profiling.observe_step import observe
from lowtide.profiling.state_bytes import state_bytes
from lowtide.runtime.autopilot.facts import Facts
from lowtide.runtime.autopilot.planner import Planner
from lowtide.runtime.session.optimizer_state import PlacedState
from lowtide.runtime.session.tides import IN_FORCE, Phase
from lowtide.tensors.live_bytes import LiveBytes, optimizer_tensors, unique_bytes
from lowtide.tensors.ranks import ALONE
from lowtide.timeline.step import Link
from tests.support.virtual_engine import VirtualEngine, virtual
from tests.support.zoo import same_bits

WIDTH = 128
STATE_BYTES = 2 * 3 * WIDTH * WIDTH * 4
"""Both moments of three square matrices; what belongs to biases is too small to move."""


class Net(nn.Module):
    def __init__(self, num_layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def build(num_layers: int = 3) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net(num_layers)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def rows(seed: int, num_rows: int = 64) -> Tensor:
    return torch.randn(num_rows, WIDTH, generator=torch.Generator().manual_seed(seed))


def train(model: nn.Module, optimizer: Any, sizes: tuple[int, ...] = (64, 64, 64, 64)) -> list[Tensor]:
    losses = []
    for seed, num_rows in enumerate(sizes):
        loss = model(rows(seed, num_rows))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def everything(losses: list[Tensor], model: nn.Module, optimizer: Any) -> list[Tensor]:
    moments = [value for p in model.parameters() for value in optimizer.state[p].values()]
    return [*losses, *(parameter.detach() for parameter in model.parameters()), *moments]


def assert_plain(found: list[Tensor], sizes: tuple[int, ...] = (64, 64, 64, 64), num_layers: int = 3) -> None:
    model, optimizer = build(num_layers)
    expected = everything(train(model, optimizer, sizes), model, optimizer)
    assert all(same_bits(*pair) for pair in zip(found, expected, strict=True))


def by_rules(model: nn.Module, optimizer: Any, engine: str) -> Any:
    memory = {"optimizer": "swap", "swap": ["layers.1"], "min_bytes": "1B"}
    return lowtide.apply(model, memory, optimizer=optimizer, engine=engine)


def by_a_budget(model: nn.Module, optimizer: Any, engine: str) -> Any:
    memory = {"optimizer": "swap", "min_bytes": "1KiB"}
    return lowtide.optimize(model, budget="64MiB", memory=memory, optimizer=optimizer, engine=engine)


def beside_a_file(model: nn.Module, optimizer: Any, engine: str) -> Any:
    sections = sections_in({"recompute_config": {"recompute": True}})
    return follow(model, sections, memory=load_memory({"optimizer": "swap"}), optimizer=optimizer, engine=engine)


@pytest.mark.parametrize("engine", [virtual(3), "host"])
@pytest.mark.parametrize("way", [by_rules, by_a_budget, beside_a_file])
def test_state_that_is_elsewhere_changes_no_bit(way: Callable, engine: str) -> None:
    model, optimizer = build()
    with way(model, optimizer, engine) as tide:
        losses = train(model, optimizer)
        stats = tide.optimizer_swap.stats
        assert (stats.num_steps, stats.swapped_bytes) == (4, STATE_BYTES)
        assert unique_bytes(optimizer_tensors(optimizer)) == stats.resident_bytes < STATE_BYTES / 10
        found = everything(losses, model, optimizer)
        assert_plain(found)
    assert tide.optimizer_swap is None
    assert "step" not in vars(optimizer) and type(optimizer.state).__name__ == "defaultdict"
    assert unique_bytes(optimizer_tensors(optimizer)) > STATE_BYTES
    assert_plain(everything(losses, model, optimizer))


def test_a_budget_that_only_moved_state_can_keep() -> None:
    """Also for batches of other sizes, which get plans of their own."""
    model, optimizer = build(8)
    moved_bytes = STATE_BYTES // 3 * 8
    sizes = (64, 64, 96, 64, 96)
    memory = {"min_bytes": "1KiB", "optimizer": "keep"}
    with pytest.raises(lowtide.BudgetError) as caught:
        lowtide.plan(model, (rows(0, 96),), budget=1024, memory=memory, optimizer=optimizer)
    floor_bytes = caught.value.floor_bytes
    memory["optimizer"] = "auto"
    budget = floor_bytes - moved_bytes // 4
    with lowtide.optimize(model, budget=budget, memory=memory, optimizer=optimizer, engine=virtual(1)) as tide:
        losses = []
        for seed, num_rows in enumerate(sizes):
            live = LiveBytes(model=model, optimizer=optimizer)
            live.add_all([batch := rows(seed, num_rows)])
            with live:
                loss = model(batch)
                loss.backward()
            is_first = num_rows not in sizes[:seed]  # the first forward pass of a size is observed before it is planned
            assert is_first or live.peak_bytes <= budget
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        assert tide.plan is not None and tide.plan.optimizer is not None and tide.plan.optimizer.moves
        assert tide.optimizer_swap is not None and tide.optimizer_swap.stats.swapped_bytes >= moved_bytes // 4
        assert_plain(everything(losses, model, optimizer), sizes, num_layers=8)


@pytest.mark.parametrize(("optimizer_state", "foreach"), [("auto", False), ("swap", True)])
def test_the_least_that_is_named_holds_the_step_of_the_optimizer_too(optimizer_state: Any, foreach: bool) -> None:
    """With few rows nothing is larger: buckets, what the optimizer needs beside one, gradients and the batch."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), amsgrad=True, foreach=foreach)
    memory = {"min_bytes": 0, "optimizer": optimizer_state}

    def optimize(budget: int) -> Any:
        return lowtide.optimize(
            model, budget=budget, memory=memory, optimizer=optimizer, engine=virtual(1), strict=True
        )

    with optimize(1024) as refused, pytest.raises(lowtide.BudgetError) as caught:
        refused.model(rows(0, 4))
    budget = caught.value.floor_bytes + 64
    with optimize(budget) as tide:
        for seed in range(3):
            batch = rows(seed, 4)
            with tide.audit() if seed else contextlib.nullcontext() as audit:
                model(batch).backward()
                optimizer.step()
                optimizer.zero_grad()
            assert audit is None or audit.peak_bytes <= budget


def test_on_autopilot_what_fits_stays() -> None:
    """Also for batches of other sizes: no step passes the budget, and not all of the state travels."""
    model, optimizer = build(6)
    all_bytes = 2 * STATE_BYTES
    memory = {"min_bytes": "1KiB", "optimizer": "keep"}
    with pytest.raises(lowtide.BudgetError) as caught:
        lowtide.plan(model, (rows(0, 96),), budget=1024, memory=memory, optimizer=optimizer)
    budget, sizes = caught.value.floor_bytes - all_bytes // 4, (64, 64, 96, 64)
    memory["optimizer"] = "auto"
    losses = []
    with lowtide.optimize(model, budget=budget, memory=memory, optimizer=optimizer, engine=virtual(1)) as tide:
        for seed, num_rows in enumerate(sizes):
            batch = rows(seed, num_rows)
            if num_rows in sizes[:seed]:  # the first of a size is observed before it is planned
                handle = tide.optimizer_swap
                assert handle is not None
                there = [t for t in optimizer_tensors(optimizer) if id(t) not in handle.ids_elsewhere()]
                live = LiveBytes(device_type="cpu")
                live.add_all([batch, *model.parameters(), *there])
                with live:
                    loss = model(batch)
                    loss.backward()
                assert live.peak_bytes <= budget
            else:
                loss = model(batch)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        assert tide.plan is not None and tide.plan.optimizer is not None and tide.optimizer_swap is not None
        placement, stats = tide.plan.optimizer, tide.optimizer_swap.stats
        assert 0 < all_bytes - stats.swapped_bytes <= placement.resident_bytes
        assert placement.resident_bytes + (placement.moved_bytes or 0) == all_bytes
        assert_plain(everything(losses, model, optimizer), sizes, 6)


def test_a_plan_that_cannot_be_put_on_is_tried_again(tmp_path: Any) -> None:
    """The first planned forward finds no place for the state: it says so, and so does the next one, until there is."""
    folder = tmp_path / "swap"
    folder.mkdir()
    model, optimizer = build()
    memory = {"optimizer": "swap", "min_bytes": "1KiB", "disk_path": str(folder)}
    with lowtide.optimize(model, budget="64MiB", memory=memory, optimizer=optimizer, engine="host") as tide:
        folder.rmdir()
        for _ in range(2):
            with pytest.raises(lowtide.ConfigError, match=r"^swap directory .*: cannot write there"):
                model(rows(0))
            assert tide.phase is Phase.WAITING and tide.plan is None
        folder.mkdir()
        losses = train(model, optimizer)
        assert tide.phase in IN_FORCE
        assert tide.optimizer_swap is not None and tide.optimizer_swap.stats.swapped_bytes == STATE_BYTES
        assert_plain(everything(losses, model, optimizer))
    assert "forward" not in vars(model) and "step" not in vars(optimizer)


def test_activations_and_state_share_what_the_host_may_take() -> None:
    model, optimizer = build()
    memory = {"optimizer": "swap", "swap": "all", "min_bytes": "1B", "host_budget": STATE_BYTES + 40_000}
    with lowtide.apply(model, memory, optimizer=optimizer, engine=virtual(0)) as tide:
        losses = train(model, optimizer)
        assert tide.placed is not None and tide.placed._engine is not None
        engines = (tide.placed.beside, tide.placed._engine)
        loss = model(rows(9))
        activations, state = (engine.memory_in_use() for engine in engines)
        assert state == {"host": STATE_BYTES, "disk": 0}
        assert 0 < activations["host"] <= 40_000
        assert activations["disk"] > 0
        loss.backward()
        optimizer.zero_grad()
        assert_plain(everything(losses, model, optimizer))


def test_state_that_may_stay_stays() -> None:
    model, optimizer = build()
    memory = {"optimizer": "auto"}
    with lowtide.optimize(model, budget="1GiB", memory=memory, optimizer=optimizer, engine=virtual(0)) as tide:
        assert_plain(everything(train(model, optimizer), model, optimizer))
        assert tide.optimizer_swap is None
    rules = plan_from_rules(load_memory({"optimizer": "swap"}), [])
    assert rules.optimizer == OptimizerPlacement(moved_bytes=None, reason="memory.optimizer asks for it")
    assert plan_from_rules(load_memory({"optimizer": "auto"}), []).optimizer is None


def test_a_plan_that_leaves_a_part_on_the_device() -> None:
    model, optimizer = build()
    half = OptimizerPlacement(moved_bytes=STATE_BYTES // 2, resident_bytes=STATE_BYTES // 2, reason="")
    layers = [f"layers.{number}" for number in range(3)]
    plan = dataclasses.replace(plan_from_rules(load_memory({}), layers), optimizer=half)
    with lowtide.apply(model, plan, optimizer=optimizer, engine=virtual(0)) as tide:
        losses = train(model, optimizer)
        assert tide.optimizer_swap is not None
        assert tide.optimizer_swap.stats.swapped_bytes == STATE_BYTES * 2 // 3  # half of three matrices is one of them
        assert_plain(everything(losses, model, optimizer))


@pytest.mark.parametrize("num_slots", [2, 3])
def test_a_step_has_as_many_buckets_on_the_device_as_the_plan_counts(num_slots: int) -> None:
    model, optimizer = build()
    matrix_bytes = STATE_BYTES // 3
    all_of_it = OptimizerPlacement(moved_bytes=None, bucket_bytes=matrix_bytes, num_slots=num_slots, reason="")
    layers = [f"layers.{number}" for number in range(3)]
    plan = dataclasses.replace(plan_from_rules(load_memory({}), layers), optimizer=all_of_it)
    with lowtide.apply(model, plan, optimizer=optimizer, engine=virtual(0)) as tide:
        losses = train(model, optimizer)
        assert tide.optimizer_swap is not None
        stats = tide.optimizer_swap.stats
        assert (stats.num_buckets, stats.bucket_peak_bytes) == (3, num_slots * matrix_bytes)
        assert_plain(everything(losses, model, optimizer))


@pytest.mark.parametrize(
    ("way", "call"), [(by_rules, "lowtide.apply"), (by_a_budget, "lowtide.optimize"), (beside_a_file, "lowtide.apply")]
)
def test_without_an_optimizer_every_way_in_says_so(way: Callable, call: str) -> None:
    model = Net()
    with pytest.raises(lowtide.ConfigError) as caught:
        way(model, None, virtual(0))
    assert str(caught.value) == (
        f"memory.optimizer: the state of an optimizer is to be elsewhere between steps, and {call} was given none: "
        "pass optimizer=, or write optimizer: keep"
    )
    assert "forward" not in vars(model)


@pytest.mark.parametrize("way", [by_rules, beside_a_file])
def test_an_optimizer_that_cannot_leaves_the_model_as_it_was(way: Callable) -> None:
    model = Net()
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(lowtide.ConfigError, match=r"^lowtide\.swap_optimizer: "):
        way(model, optimizer, virtual(0))
    assert "forward" not in vars(model) and "step" not in vars(optimizer)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("has_scheduler", [False, True])
def test_swapped_state_is_counted_as_what_it_is(has_scheduler: bool) -> None:
    """A copy of the optimizer steps for it, and must not reach the original."""
    counts = []
    for is_swapped in (False, True):
        model, optimizer = build()
        if has_scheduler:
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        train(model, optimizer, (64,))
        handle = lowtide.swap_optimizer(optimizer, engine=virtual(0)) if is_swapped else None
        before = [parameter.detach().clone() for parameter in model.parameters()]
        how: dict = {"inputs": 0, "device_type": "cpu", "is_accelerator": False}
        counts.append(state_bytes(model, optimizer=optimizer, **how))
        assert all(same_bits(*pair) for pair in zip(before, model.parameters(), strict=True))
        if handle is not None:
            handle.detach()
    assert counts[0] == counts[1]


class OneNorm(torch.optim.AdamW):
    """Scales all gradients by their common norm: not the same in parts."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        for gradient in gradients:
            gradient.div_(1.0 + norm)
        return super().step(closure)


def test_under_a_budget_an_optimizer_that_cannot_keeps_its_state_or_is_refused_at_once() -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = OneNorm(model.parameters(), lr=1e-2)
    said: list[str] = []
    memory = {"optimizer": "auto"}
    how: Any = {"memory": memory, "optimizer": optimizer, "engine": virtual(0)}
    with Listener(said.append), lowtide.optimize(model, budget="64MiB", **how) as tide:
        train(model, optimizer)
        assert tide.optimizer_swap is None
    assert said[0].startswith("lowtide: the optimizer's state stays on the device: lowtide.swap_optimizer: OneNorm ")
    with pytest.raises(lowtide.ConfigError) as caught:
        by_a_budget(model, optimizer, virtual(0))
    assert said[0].endswith(str(caught.value))
    assert "forward" not in vars(model)


def test_a_parameter_larger_than_any_bucket_can_be_asked_for() -> None:
    model, optimizer = build()
    huge = OptimizerPlacement(moved_bytes=None, bucket_bytes=1 << 32, reason="")
    plan = dataclasses.replace(plan_from_rules(load_memory({}), ["layers.0", "layers.1", "layers.2"]), optimizer=huge)
    with lowtide.apply(model, plan, optimizer=optimizer, engine=virtual(0)):
        assert_plain(everything(train(model, optimizer), model, optimizer))


@pytest.mark.parametrize("way", [by_rules, by_a_budget])
def test_remove_again_after_memory_ran_out(way: Callable, monkeypatch: Any) -> None:
    model, optimizer = build()
    applied = way(model, optimizer, virtual(1))
    losses = train(model, optimizer)

    def no_memory(*_: Any) -> Tensor:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(store, "_copy", no_memory)
        with pytest.raises(torch.OutOfMemoryError):
            applied.remove()
    assert applied.optimizer_swap is not None
    applied.remove()
    assert applied.optimizer_swap is None
    assert "step" not in vars(optimizer)
    assert_plain(everything(losses, model, optimizer))


def test_of_several_plans_the_one_that_leaves_the_least_on_the_device_counts() -> None:
    model, optimizer = build()
    placed = PlacedState(optimizer, VirtualEngine(0), "lowtide.optimize")
    losses, swapped_bytes = train(model, optimizer, (64,)), []
    for seed, num_resident in enumerate((2, 1, 2, 0, 1)):
        resident_bytes = num_resident * STATE_BYTES // 3
        placement = OptimizerPlacement(
            moved_bytes=STATE_BYTES - resident_bytes, resident_bytes=resident_bytes, reason=""
        )
        placed.follow(dataclasses.replace(plan_from_rules(load_memory({}), []), optimizer=placement))
        for number in (0, 1):
            loss = model(rows(1 + 2 * seed + number))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        assert placed.handle is not None
        swapped_bytes.append(placed.handle.stats.swapped_bytes * 3 // STATE_BYTES)
    assert swapped_bytes == [1, 2, 2, 3, 3]
    assert placed.resident_bytes == 0
    assert_plain(everything(losses, model, optimizer), (64,) * 11)
    placed.remove()
    assert placed.resident_bytes is None


def test_what_leaves_in_the_middle_leaves_at_once() -> None:
    model, optimizer = build()
    train(model, optimizer, (64,))
    with lowtide.swap_optimizer(optimizer, engine=virtual(0), resident=0.7) as handle:
        assert handle.stats.swapped_bytes == STATE_BYTES // 3
        handle.keep_no_more_than(0.4)
        assert handle.stats.swapped_bytes == STATE_BYTES * 2 // 3
        handle.keep_no_more_than(1.0)
        optimizer.load_state_dict(optimizer.state_dict())
        assert handle.stats.swapped_bytes == STATE_BYTES * 2 // 3


def test_once_state_has_moved_plans_for_all_shapes_count_it_as_moved() -> None:
    model, optimizer = build()
    profile = observe(model, (rows(0),), optimizer=optimizer)
    source = Planner(model, load_memory({"budget": "1GiB", "optimizer": "auto"}), VirtualEngine(0), ALONE)
    source.facts = Facts(link=Link(out_bytes_per_second=1e9, in_bytes_per_second=1e9))
    for resident_bytes in (None, 0, STATE_BYTES // 3):  # there is room for all of it
        source.know(resident_state_bytes=resident_bytes)
        plan = source.make(profile, 1 << 30)
        assert plan.optimizer is not None
        stays = STATE_BYTES if resident_bytes is None else resident_bytes
        assert (plan.optimizer.resident_bytes, plan.optimizer.moved_bytes) == (stays, STATE_BYTES - stays)


def test_plans_for_all_shapes_keep_to_the_host_budget() -> None:
    """Which `auto` has moved a part of the state for; to move all of it would be refused."""
    model, optimizer = build()
    profile = observe(model, (rows(0),), optimizer=optimizer)
    memory = load_memory({"budget": "1GiB", "optimizer": "auto", "host_budget": STATE_BYTES * 2 // 3})
    source = Planner(model, memory, VirtualEngine(0), ALONE)
    link = Link(out_bytes_per_second=1e9, in_bytes_per_second=1e9)
    source.facts = Facts(link=link, resident_state_bytes=STATE_BYTES // 3)
    plan = source.make(profile, 1 << 30)
    assert plan.optimizer is not None and plan.optimizer.moved_bytes == STATE_BYTES * 2 // 3
    source.know(resident_state_bytes=0)
    with pytest.raises(lowtide.ConfigError, match="more than the host budget"):
        source.make(profile, 1 << 30)


def test_where_what_stays_does_not_fit_plans_are_made_without() -> None:
    model, optimizer = build()
    profile = observe(model, (rows(0),), optimizer=optimizer)
    source = Planner(model, load_memory({"budget": 1024, "optimizer": "swap"}), VirtualEngine(0), ALONE)
    source.facts = Facts(link=Link(out_bytes_per_second=1e9, in_bytes_per_second=1e9))
    with pytest.raises(lowtide.BudgetError) as caught:
        source.make(profile, 1024)
    floor_bytes = caught.value.floor_bytes
    source.know(resident_state_bytes=STATE_BYTES // 3)
    plan = source.make(profile, floor_bytes)
    assert plan.optimizer is not None
    assert (plan.optimizer.resident_bytes, plan.optimizer.moved_bytes) == (0, STATE_BYTES)
    with pytest.raises(lowtide.BudgetError) as caught:
        source.make(profile, 1024)
    assert caught.value.floor_bytes == floor_bytes
