"""`memory.weights`: one plan for activations, optimizer state and weights, carried out with plain's bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import ConfigError
from lowtide.units import MIB
from tests.optimizer.test_planned_in_backward import Model, adamw, batch, momentum
from tests.support.grid import one_of
from tests.support.virtual_engine import VirtualEngine

MEMORY = {"budget": "40MiB", "weights": "swap", "recompute": "none", "swap": "none"}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2)


def trained(
    make: Callable[[Any], torch.optim.Optimizer],
    memory: dict[str, Any] | None,
    *,
    set_to_none: bool = True,
    ends: Callable[[Any], None] = lambda tide: None,
    prepare: Callable[[nn.Module], None] = lambda model: None,
    between: Callable[[int, nn.Module, torch.optim.Optimizer], Any] = lambda *words: None,
    engine: Any = None,
    rows: tuple[int, ...] = (8, 8, 8, 8),
) -> list[Any]:
    """Losses, what `between` saw, and then parameters and state. Later batches are larger, and smaller again."""
    torch.manual_seed(0)
    model = Model()
    prepare(model)
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    tide = None if memory is None else lowtide.optimize(model, memory=memory, optimizer=optimizer, engine=engine)
    found = []
    for step, number in enumerate(rows):
        loss = model(batch(step, number))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        schedule.step()
        found += [loss.detach(), between(step, model, optimizer)]
    if tide is not None:
        ends(tide)
        tide.remove()
    state = [v for p in model.parameters() for v in optimizer.state.get(p, {}).values() if torch.is_tensor(v)]
    return [*found, *(p.detach().clone() for p in model.parameters()), *state]


def assert_same(found: list[Any], plain: list[Any]) -> None:
    assert len(found) == len(plain)
    for number, (one, other) in enumerate(zip(found, plain, strict=True)):
        same = torch.equal(one, other) if torch.is_tensor(one) else one == other
        assert same, number


@pytest.mark.parametrize(
    ("make", "set_to_none", "num_mib"),
    [(adamw, True, 14), pytest.param(momentum, False, 20, marks=pytest.mark.extended)],
)
def test_planned_steps_have_the_bits_of_plain_ones(make: Any, set_to_none: bool, num_mib: int) -> None:
    seen: dict[str, Any] = {}

    def look(tide: Any) -> None:
        assert tide.plan.predicted.peak_bytes <= num_mib * MIB
        seen.update(plan=tide.plan, weights=tide.placed.weights.stats)

    rows = (8, 8, 8, 12, 12, 8)
    plain = trained(make, None, set_to_none=set_to_none, rows=rows)
    memory = {"budget": f"{num_mib}MiB", "weights": "swap"}
    assert_same(trained(make, memory, set_to_none=set_to_none, ends=look, rows=rows), plain)
    plan, stats = seen["plan"], seen["weights"]
    assert plan.moves_weights
    staying = stats.swapped_bytes - plan.weights.moved_bytes
    assert stats.peak_bytes <= plan.weights.window_bytes + staying
    assert stats.fetched_bytes > 2 * plan.weights.moved_bytes


def test_auto_moves_them_only_where_it_must() -> None:
    seen = []
    for budget in ("10MiB", "200MiB"):
        memory = {"budget": budget, "weights": "auto", "recompute": "none"}
        found = trained(adamw, memory, ends=lambda tide: seen.append(tide.plan.moves_weights))
        assert_same(found, trained(adamw, None))
    assert seen == [True, False]


@pytest.mark.parametrize("seed", one_of(2, range(4)))
def test_on_an_adversarial_engine(seed: int) -> None:
    engine = VirtualEngine(seed)
    found = trained(adamw, MEMORY, engine=engine)
    assert not engine.violations, engine.violations
    assert_same(found, trained(adamw, None))


def tie(model: nn.Module) -> None:
    model.head.weight = model.embed.weight


def tie_layers(model: nn.Module) -> None:
    model.layers[3].up.weight = model.layers[0].up.weight


def freeze(model: nn.Module) -> None:
    for parameter in (*model.embed.parameters(), *model.layers[:3].parameters()):
        parameter.requires_grad_(requires_grad=False)


def half(model: nn.Module) -> None:
    model.to(torch.bfloat16)


@pytest.mark.parametrize("prepare", [tie, tie_layers, freeze, half])
def test_models(prepare: Callable[[nn.Module], None]) -> None:
    assert_same(trained(adamw, MEMORY, prepare=prepare), trained(adamw, None, prepare=prepare))


def evaluated(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    model.eval()
    with torch.no_grad():
        loss = model(batch(step + 100, 4))
    model.train()
    return loss


def saved(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    sums = {name: value.double().sum().item() for name, value in model.state_dict().items()}
    states = optimizer.state_dict()["state"].items()
    return sums, {(i, k): v.double().sum().item() for i, s in states for k, v in s.items() if torch.is_tensor(v)}


def loaded(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})


def written(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    with torch.no_grad():
        model.layers[step % 6].up.weight.mul_(0.9)


@pytest.mark.parametrize("between", one_of(2, [evaluated, saved, loaded, written]))
def test_habits_between_steps(between: Any) -> None:
    assert_same(trained(adamw, MEMORY, between=between), trained(adamw, None, between=between))


def groups(parameters: Any) -> torch.optim.Optimizer:
    found = list(parameters)
    return torch.optim.AdamW([{"params": found[::2], "lr": 1e-3}, {"params": found[1::2], "weight_decay": 0.0}])


@pytest.mark.parametrize("make", [groups, sgd, lambda p: torch.optim.Adagrad(p, lr=1e-2)])
def test_optimizers(make: Any) -> None:
    assert_same(trained(make, MEMORY), trained(make, None))


def test_a_second_backward_pass_before_the_step_is_refused() -> None:
    torch.manual_seed(0)
    model = Model()
    optimizer = adamw(model.parameters())
    with lowtide.optimize(model, memory=MEMORY, optimizer=optimizer):
        model(batch(0)).backward()
        with pytest.raises(RuntimeError, match=r"a second backward pass before optimizer.step\(\)"):
            model(batch(1)).backward()


def test_what_cannot_be_combined_is_refused_by_name() -> None:
    model = Model()
    optimizer = adamw(model.parameters())
    with pytest.raises(ConfigError, match="was given none"):
        lowtide.optimize(model, "14MiB", memory={"weights": "swap"})
    with pytest.raises(ConfigError, match="optimizer: auto does not; write optimizer: in_backward, or leave it out"):
        lowtide.optimize(model, "14MiB", memory={"weights": "swap", "optimizer": "auto"}, optimizer=optimizer)
    with pytest.raises(ConfigError, match="weights: swap needs a budget to plan for"):
        lowtide.apply(model, {"weights": "swap"}, optimizer=optimizer)
    with lowtide.swap_weights(model, optimizer), pytest.raises(ConfigError, match="swapped already"):
        lowtide.optimize(model, "14MiB", memory={"weights": "swap"}, optimizer=optimizer)


def test_nothing_is_left_behind() -> None:
    model = Model()
    optimizer = adamw(model.parameters())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    tide = lowtide.optimize(model, "14MiB", memory={"weights": "swap"}, optimizer=optimizer)
    tide.remove()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert "forward" not in vars(model) and not any("forward" in vars(module) for module in model.modules())
    assert "step" not in vars(optimizer)


def test_the_advice_for_small_weights_can_be_followed() -> None:
    """`min_bytes` of the memory section is that of the weights, where it is smaller than theirs."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    memory = {"budget": "40MiB", "weights": "swap", "layers": ["0", "1", "2", "3"]}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with pytest.raises(ConfigError, match="and more that could move; give a smaller min_bytes"):
        lowtide.optimize(model, memory=memory, optimizer=optimizer)(torch.ones(1, 64))
    lowtide.remove(model)
    with lowtide.optimize(model, memory={**memory, "min_bytes": 1024}, optimizer=optimizer) as tide:
        model(torch.ones(1, 64)).sum().backward()
        assert tide.placed.weights.stats.swapped_bytes >= 4 * 64 * 64 * 4
