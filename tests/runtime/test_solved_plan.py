"""Solved plans, carried out: the same bits, a recipe trusted only where it fits, nothing left, said when wrong."""

from __future__ import annotations

import dataclasses
import functools
import gc
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.core.decisions import Prediction
from lowtide.core.fate import Fate
from lowtide.core.plan import Plan
from lowtide.core.profile import Profile
from lowtide.core.recipe import Recipe
from lowtide.errors import ConfigError
from lowtide.profiling.observe_step import observe
from tests.support import zoo
from tests.support.grid import in_turn
from tests.support.small_models import (
    ALL_MADE,
    WIDTH,
    Gated,
    Normed,
    assert_plain,
    gradients,
    only_made,
    profiled,
    rows,
    small_loss,
    stack,
)
from tests.support.solved import plan_with, random_plan
from tests.support.virtual_engine import VirtualEngine, virtual

SHARES = ((0.5, 0.3), (1.0, 0.3), (0.8, 0.8), (0.3, 1.0))
"""Of nodes that are made and of those that are swapped, by seed."""

EVERY_PLAN = [
    # One kind of plans of every fourth model, in turn; the others are `make test-extended`'s.
    pytest.param(name, seed, marks=[pytest.mark.extended] if (number + 2 * seed) % (4 * len(SHARES)) else [])
    for number, name in enumerate(zoo.CASES)
    for seed in range(len(SHARES))
]


@functools.cache
def profile_of(name: str) -> Profile:
    case = zoo.CASES[name]
    model = case.build(3)
    return observe(model, lambda: case.loss(model, case.batch(0)), layers=case.layers)


def plan_of(name: str, seed: int) -> Plan:
    made, swapped = SHARES[seed % len(SHARES)]
    return random_plan(profile_of(name), seed, made=made, swapped=swapped)


# -- the same bits ---------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:lowtide")
@pytest.mark.parametrize(("name", "seed"), EVERY_PLAN)
def test_random_plans_are_the_same_to_the_bit(name: str, seed: int) -> None:
    engine = VirtualEngine(seed)
    steps = {"num_steps": 3, "accumulate": 2}
    plan = plan_of(name, seed)
    result, stats = zoo.lowtide_step(zoo.CASES[name], 3, plan, engine=engine, **steps)
    zoo.assert_same(result, zoo.plain_result(name, 3, 3, 2))
    assert engine.violations == []
    gc.collect()
    assert engine.num_slots == 0
    if name in ("llama", "t5", "vit", "mlp", "strided_views", "transformer_encoder", "deepseek_v3"):
        assert stats.num_divergences == 0
        assert stats.recomputed_bytes > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:lowtide")
@pytest.mark.parametrize("name", ["llama", "llama_autocast", "gpt2_dropout", "unet", "qwen3_moe_eager", "lora"])
def test_random_plans_on_the_host_engine_are_the_same_to_the_bit(name: str) -> None:
    for seed in range(2):
        result, _ = zoo.lowtide_step(zoo.CASES[name], 3, plan_of(name, seed), engine="host", num_steps=2)
        zoo.assert_same(result, zoo.plain_result(name, 3, 2, 1))


def _lives(case: zoo.Case, model: nn.Module) -> dict[str, Tensor]:
    """Graphs that are dropped, kept, run twice, run in another order, run in part, and differentiated twice."""
    torch.manual_seed(7)
    seen: dict[str, Tensor] = {}

    def collect(when: str) -> None:
        seen.update({f"{when}:{key}": p.grad for key, p in model.named_parameters() if p.grad is not None})
        model.zero_grad(set_to_none=True)

    def loss(batch: int) -> Tensor:
        return case.loss(model, case.batch(batch))

    loss(0)
    loss(0).backward()
    collect("after a dropped graph")
    first, second = loss(1), loss(2)
    first.backward(retain_graph=True)
    collect("retained")
    second.backward()
    collect("second")
    first.backward(retain_graph=True)
    first.backward()
    collect("again")
    weights = [p for p in model.parameters() if p.requires_grad]
    partly = torch.autograd.grad(loss(3), weights[-1], allow_unused=True)[0]
    if partly is not None:
        seen["partly"] = partly
    grads = torch.autograd.grad(loss(4), weights, create_graph=True, allow_unused=True)
    sum(grad.square().sum() for grad in grads if grad is not None).backward()
    collect("double")
    return seen


LIVED = ("llama_eager", "mlp", "strided_views", "shared_layer", "tied", "keyword_inputs", "structured_outputs")


@pytest.mark.filterwarnings("ignore:lowtide")
@pytest.mark.parametrize(
    ("name", "seed"),
    in_turn(2, LIVED, range(len(SHARES))),
)
def test_unusual_lives_of_a_graph(name: str, seed: int) -> None:
    case = zoo.CASES[name]
    truth = _lives(case, case.build(3))
    model = case.build(3)
    engine = VirtualEngine(seed)
    with lowtide.apply(model, plan_of(name, seed), engine=engine) as tide:
        seen = _lives(case, model)
    assert seen.keys() == truth.keys()
    assert [key for key in truth if not zoo.same_bits(seen[key], truth[key])] == []
    assert engine.violations == []
    gc.collect()
    tide.settle()
    assert (engine.num_slots, tide._scheduler.ledger.now_bytes, tide._scheduler.num_open()) == (0, 0, 0)


# -- a recipe is trusted only where it fits --------------------------------------------------------------------------


def _with_recipe(plan: Plan, name: str, change: Callable[[Recipe], Recipe]) -> Plan:
    sites = [dataclasses.replace(s, recipe=change(s.recipe)) if s.name == name else s for s in plan.sites]
    return dataclasses.replace(plan, sites=tuple(sites))


def test_a_recipe_that_gives_other_bytes_is_found_out_in_the_first_forward() -> None:
    model = stack(Gated())

    def subtract(recipe: Recipe) -> Recipe:
        return dataclasses.replace(recipe, steps=(dataclasses.replace(recipe.steps[0], op="aten.sub.Tensor"),))

    plan = _with_recipe(plan_with(profiled(model), ALL_MADE), "layers.0.mul", subtract)
    with lowtide.apply(model, plan, engine=virtual(0)) as tide:
        with pytest.warns(UserWarning, match="do not hold in it") as caught:
            gradients(model, rows())
        got = gradients(model, rows())
        assert tide.stats.num_divergences == 2
        assert tide.stats.recomputed_bytes == 2 * 8 * WIDTH * 4
    assert [str(w.message) for w in caught if "lowtide" in str(w.message)] == [
        "lowtide: the first forward was not the one that the plan was made for: recipes of the plan do not hold in it, "
        "and their sites are kept ('layers.0.mul'). Memory may differ from what was predicted; plan again for this "
        "model and batch."
    ]
    assert_plain(model, rows(), got)


class Fickle(nn.Module):
    """Goes through one of two weights: the same shapes, the same operators, other values."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (nn.Parameter(torch.zeros(1, WIDTH)) for _ in range(2))
        self.uses_other = False

    def forward(self, x: Tensor) -> Tensor:
        y = (x + (self.other if self.uses_other else self.one)).exp()
        return (y * y.sin()).tanh()


def test_a_recipe_is_not_used_when_the_graph_behind_it_has_another_weight() -> None:
    model = stack(Fickle(), Fickle())
    plan = only_made(profiled(model))
    with lowtide.apply(model, plan, engine=virtual(0)) as tide:
        small_loss(model, rows()).backward()
        assert tide.stats.num_divergences == 0
        model.layers[1].uses_other = True
        loss = small_loss(model, rows())
        got = list(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True))
        assert tide.stats.num_divergences > 0
    want = torch.autograd.grad(small_loss(model, rows()), list(model.parameters()), allow_unused=True)
    assert [g is None for g in got] == [w is None for w in want]
    assert all(zoo.same_bits(g, w) for g, w in zip(got, want, strict=True) if g is not None)


def test_recipes_follow_other_shapes() -> None:
    model = stack(Gated())
    profile = profiled(model)
    plan = plan_with(profile, ALL_MADE)
    with lowtide.apply(model, plan, engine=virtual(0)) as tide:
        gradients(model, rows())
        before = tide.stats
        got = gradients(model, rows(5))
        assert tide.stats.num_divergences == 0
        assert tide.stats.recomputed_bytes - before.recomputed_bytes == 2 * 5 * WIDTH * 4
    assert_plain(model, rows(5), got)


def test_a_first_batch_of_another_shape_does_no_harm() -> None:
    model = stack(Gated(), Normed())
    plan = only_made(profiled(model))
    with lowtide.apply(model, plan, engine=virtual(0)) as tide:
        for num_rows in (5, 8, 3, 8):
            got = gradients(model, rows(num_rows))
            assert tide.stats.recomputed_bytes > 0
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                tide.reset_stats()
    assert_plain(model, rows(8), got)


def test_sites_that_the_plan_does_not_know_are_kept_and_said() -> None:
    plan = plan_with(profiled(stack(Gated())), ALL_MADE)
    model = stack(Gated(), Normed())
    plan = dataclasses.replace(plan, layers=("layers.0", "layers.1"))
    with lowtide.apply(model, plan, engine=virtual(0)) as tide:
        with pytest.warns(UserWarning, match="% of what it saved is not in the plan and is kept \\('layers.1"):
            got = gradients(model, rows())
        assert tide.stats.num_unknown > 0
        assert tide.plan.sites[: len(plan.sites)] == plan.sites
        assert {site.reason for site in tide.plan.sites[len(plan.sites) :]} == {"the plan does not know it"}
    assert_plain(model, rows(), got)


def test_planned_sites_that_do_not_appear_are_said() -> None:
    model = stack(Gated(), Gated())
    plan = plan_with(profiled(model), {"layers.1.gate.mm": Fate.SWAP, **ALL_MADE})
    model.layers[1] = nn.Identity()
    with (
        lowtide.apply(model, plan, engine=virtual(0)),
        pytest.warns(
            UserWarning, match=r"did not save what the plan wants swapped or recomputed \('layers.1.gate.mm'\)"
        ),
    ):
        gradients(model, rows())


def test_a_plan_for_another_model_is_refused() -> None:
    plan = only_made(profiled(stack(Gated(), Normed(), Gated())))
    model = stack(Gated(), Gated(), Gated())
    with pytest.raises(ConfigError, match="made for another model, plan again"):
        lowtide.apply(model, plan, engine=virtual(0))
    broken = dataclasses.replace(plan, sites=tuple(site for site in plan.sites if site.name != "layers.0.gate.mm"))
    with pytest.raises(ConfigError) as refused:
        lowtide.apply(stack(Gated(), Normed(), Gated()), broken, engine=virtual(0))
    assert str(refused.value) == (
        "lowtide.apply: the recipe of 'layers.0.silu' starts from node 'layers.0.gate.mm', which the plan does not "
        "list; the plan was made for another model, plan again"
    )


def test_a_solved_plan_stays_what_it_was() -> None:
    model = stack(Gated())
    plan = plan_with(profiled(model), ALL_MADE)
    predicted = Prediction(
        peak_bytes=1, step_seconds=1.0, stall_seconds=0.0, recompute_seconds=0.0, gap=0.0, plain_peak_bytes=2,
        plain_seconds=1.0, floor_bytes=1, certainty="none",
    )  # fmt: skip
    plan = dataclasses.replace(plan, predicted=predicted)
    assert Plan.from_json(plan.to_json()) == plan
    with lowtide.apply(model, Plan.from_json(plan.to_json()), engine=virtual(0)) as tide:
        gradients(model, rows())
        assert tide.plan == plan


# -- nothing is left -------------------------------------------------------------------------------------------------


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise ZeroDivisionError
        return x.tanh()


def _num_objects() -> int:
    gc.collect()
    return sum(str(getattr(type(o), "__module__", "")).startswith("lowtide.runtime") for o in gc.get_objects())


def _bad_day(model: nn.Module, step: int) -> None:
    kind = step % 7
    loss = small_loss(model, rows(8 if kind else 5))
    if kind == 1:
        model.layers[2].fails = True
        with pytest.raises(ZeroDivisionError):
            small_loss(model, rows())
        model.layers[2].fails = False
    elif kind == 2:
        loss.backward(retain_graph=True)
    elif kind == 3:
        torch.autograd.grad(loss, model.layers[3].down.weight)
    elif kind == 4:

        def fail(_grad: Tensor) -> None:
            raise ZeroDivisionError

        hook = model.layers[1].weight.register_hook(fail)
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        hook.remove()
    elif kind == 5:
        return
    else:
        loss.backward()
    model.zero_grad(set_to_none=True)


@pytest.mark.slow
@pytest.mark.parametrize("engine", [virtual(0), pytest.param(virtual(1), marks=pytest.mark.extended)])
def test_nothing_grows_over_two_hundred_steps(engine: str) -> None:
    """To the object; over a thousand steps: test_leaks.py."""
    model = stack(Gated(), Normed(), Failing(), Gated())
    plan = random_plan(profiled(model), 5, made=0.8, swapped=0.5)
    assert {site.fate for site in plan.sites} == set(Fate)
    with lowtide.apply(model, plan, engine=engine) as tide:
        for step in range(70):
            _bad_day(model, step)
        tide.settle()
        before = _num_objects()
        for step in range(211):  # ends, as the warm-up did, with an ordinary day
            _bad_day(model, step)
        tide.settle()
        assert _num_objects() == before
        assert (tide._scheduler.num_open(), tide._scheduler.ledger.now_bytes, tide.engine.num_slots) == (0, 0, 0)
        assert not tide._scheduler._open_sites or not any(tide._scheduler._open_sites.values())


# -- the exact peak --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "mlp", "unet", "t5"])
def test_the_audited_peak_of_a_tide_that_keeps_everything_is_that_of_the_bare_model(name: str) -> None:
    from lowtide.tensors.live_bytes import LiveBytes

    case = zoo.CASES[name]

    def step(model: nn.Module) -> None:
        case.loss(model, batch).backward()
        model.zero_grad(set_to_none=True)

    batch = case.batch(0)
    bare = case.build(3)
    step(bare)
    with LiveBytes(model=bare) as live:
        step(bare)
    model = case.build(3)
    with lowtide.apply(model, plan_with(profile_of(name), {}), engine=virtual(0)) as tide:
        step(model)
        with tide.audit() as audit:
            step(model)
    assert audit.peak_bytes == live.peak_bytes


def test_the_audit_counts_what_was_fetched_and_not_what_is_elsewhere() -> None:
    model = stack(*(Gated() for _ in range(6)))
    profile = profiled(model)

    def audited(plan: Plan, engine: str) -> int:
        with lowtide.apply(model, plan, engine=engine) as tide:
            gradients(model, rows(512))
            with tide.audit() as audit:
                gradients(model, rows(512))
        return audit.peak_bytes

    kept = audited(plan_with(profile, {}), virtual(0))
    swap = {node.name: Fate.SWAP for node in profile.sites}
    near = audited(plan_with(profile, swap, prefetch=0, leave=0), virtual(0))
    far = audited(plan_with(profile, swap, prefetch=1000, leave=0), virtual(0))
    assert near < kept
    assert near < far
    assert audited(plan_with(profile, swap, prefetch=0, leave=0), "host") == near
