"""Solved plans, carried out: the same bits, made once, held no longer than needed, said when wrong."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import re
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.catalog.observe import observe
from lowtide.catalog.site import Profile, Recipe
from lowtide.errors import ConfigError
from lowtide.planner.fate import Fate
from lowtide.planner.plan import Plan, Prediction
from lowtide.runtime import cells
from lowtide.runtime.engines.clocked import ClockedEngine
from lowtide.runtime.engines.virtual import VirtualEngine
from lowtide.runtime.patch import ForwardPatch
from tests import zoo
from tests.solved import plan_with, random_plan

SHARES = ((0.5, 0.3), (1.0, 0.3), (0.8, 0.8), (0.3, 1.0))
"""Of nodes that are made and of those that are swapped, by seed."""

SEEDS = (0, 1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow))


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
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", zoo.CASES)
def test_random_plans_are_the_same_to_the_bit(name: str, seed: int) -> None:
    engine = VirtualEngine(seed)
    steps = {"num_steps": 3, "accumulate": 2}
    result, stats = zoo.lowtide_step(zoo.CASES[name], 3, plan_of(name, seed), engine=engine, **steps)
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
    for seed in range(4):
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


@pytest.mark.filterwarnings("ignore:lowtide")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "name", ["llama_eager", "mlp", "strided_views", "shared_layer", "tied", "keyword_inputs", "structured_outputs"]
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
    assert (engine.num_slots, tide._ledger.now_bytes, tide._mover.num_open()) == (0, 0, 0)


# -- one small model, by hand ----------------------------------------------------------------------------------------

WIDTH = 16


class Gated(nn.Module):
    """down(silu(gate(x)) * up(x)): the product and the silu can be made again from gate and up."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.after: Callable[[Tensor], None] = lambda product: None

    def forward(self, x: Tensor) -> Tensor:
        product = torch.nn.functional.silu(self.gate(x)) * self.up(x)
        output = self.down(product)
        self.after(product)
        return x + output


class Normed(nn.Module):
    """A norm whose input nobody saves in the dtype that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.before: Callable[[Tensor], None] = lambda x: None

    def forward(self, x: Tensor) -> Tensor:
        self.before(x)
        wide = x.to(torch.float64)
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def stack(*layers: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    model = zoo.Stack(*layers)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def rows(num_rows: int = 8, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, WIDTH, generator=torch.Generator().manual_seed(seed))


def small_loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def profiled(model: nn.Module, x: Tensor | None = None) -> Profile:
    batch = rows() if x is None else x
    layers = tuple(f"layers.{i}" for i in range(len(model.layers)))
    return observe(model, lambda: small_loss(model, batch), layers=layers)


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(small_loss(model, x), list(model.parameters())))


def assert_plain(model: nn.Module, x: Tensor, got: list[Tensor]) -> None:
    want = gradients(model, x)
    assert all(zoo.same_bits(*pair) for pair in zip(got, want, strict=True))


ALL_MADE = {"layers.0.silu": Fate.RECOMPUTE, "layers.0.mul": Fate.RECOMPUTE}


def only_made(profile: Profile, **fates: Fate) -> Plan:
    """Every saved site that can be made again is; anchors that this needs are kept, or get another fate by name."""
    chosen = {node.name: Fate.RECOMPUTE for node in profile.sites if node.recipe is not None}
    needed = {name for node in profile.sites if node.recipe is not None for name in node.recipe.nodes}
    anchors = {node.name for node in profile.nodes if node.anchor is not None}
    return plan_with(profile, {**dict.fromkeys(needed & anchors, Fate.KEEP), **chosen, **fates})


def test_the_small_model_has_the_recipes_that_the_other_tests_are_about() -> None:
    profile = profiled(stack(Gated()))
    recipes = {node.name: node.recipe.nodes for node in profile.sites if node.recipe is not None}
    assert set(ALL_MADE) <= set(recipes)
    assert recipes["layers.0.mul"] == ("layers.0.silu", "layers.0.up.mm")
    assert recipes["layers.0.silu"] == ("layers.0.gate.mm",)


def test_what_is_made_again_is_not_held_between_forward_and_backward() -> None:
    model = stack(Gated())
    plan = plan_with(profiled(model), ALL_MADE)
    references: list[weakref.ref] = []
    model.layers[0].after = lambda product: references.append(weakref.ref(product.untyped_storage()))
    with lowtide.apply(model, plan, engine="virtual:0") as tide:
        for step in range(3):
            loss = small_loss(model, rows(seed=step))
            assert references[-1]() is None
            got = torch.autograd.grad(loss, list(model.parameters()))
            del loss
            stats = tide.stats
            assert stats.num_divergences == 0
            assert stats.recomputed_bytes == (step + 1) * 2 * 8 * WIDTH * 4
    model.layers[0].after = lambda product: None
    assert_plain(model, rows(seed=2), list(got))


def test_a_recipe_runs_once_in_a_backward_however_many_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[str] = []
    run = cells.MadeCell.run
    monkeypatch.setattr(cells.MadeCell, "run", lambda cell: (runs.append(cell.name), run(cell))[1])
    model = stack(Gated())
    with lowtide.apply(model, plan_with(profiled(model), ALL_MADE), engine="virtual:0"):
        small_loss(model, rows()).backward()
        assert sorted(runs) == sorted(ALL_MADE)
        runs.clear()
        loss = small_loss(model, rows())
        assert runs == []
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        assert sorted(runs) == sorted([*ALL_MADE, *ALL_MADE])


def test_kept_inputs_of_recipes_are_let_go_as_soon_as_all_are_made() -> None:
    """Also when the graph outlives its first backward: then they stay, and are needed again."""
    model = stack(Normed(), Gated())
    profile = profiled(model)
    plan = only_made(profile)
    with lowtide.apply(model, plan, engine="virtual:0") as tide:
        small_loss(model, rows()).backward()
        for _ in range(2):
            loss = small_loss(model, rows())
            held_bytes = tide._ledger.now_bytes
            loss.backward(retain_graph=True)
            assert tide._ledger.now_bytes == held_bytes
        loss.backward()
        del loss
        assert tide._ledger.now_bytes == 0


@pytest.mark.slow
def test_a_chain_of_recipes_may_be_as_long_as_the_model_is_deep() -> None:
    model = stack(*(Normed() for _ in range(300)))
    plan = only_made(profiled(model))
    assert sum(site.fate is Fate.RECOMPUTE for site in plan.sites) > 890
    with lowtide.apply(model, plan, engine="virtual:0"):
        got = gradients(model, rows())
    assert_plain(model, rows(), got)


def test_swapped_inputs_of_recipes_are_fetched_for_them() -> None:
    model = stack(Gated(), Gated())
    profile = profiled(model)
    swapped = {f"layers.{i}.{name}.mm": Fate.SWAP for i in range(2) for name in ("gate", "up")}
    plan = only_made(profile, **swapped)
    for seed in range(20):
        engine = VirtualEngine(seed)
        with lowtide.apply(model, plan, engine=engine) as tide:
            gradients(model, rows(seed=1))
            got = gradients(model, rows())
            assert tide.stats.copied_in_bytes > 0
            assert tide.stats.num_divergences == 0
        assert_plain(model, rows(), got)
        assert engine.violations == []


# -- versions --------------------------------------------------------------------------------------------------------


def _message(call: Callable[[], Any]) -> str:
    with pytest.raises(RuntimeError) as raised:
        call()
    return str(raised.value)


def test_a_made_tensor_that_was_modified_raises_what_plain_autograd_raises() -> None:
    model = stack(Gated())
    plan = plan_with(profiled(model), ALL_MADE)

    def write(product: Tensor) -> None:
        with torch.no_grad():
            product.mul_(2)

    def broken() -> None:
        model.layers[0].after = write
        small_loss(model, rows()).backward()

    want = _message(broken)
    model.layers[0].after = lambda product: None
    with lowtide.apply(model, plan, engine="virtual:0"):
        small_loss(model, rows()).backward()
        assert _message(broken) == want


@pytest.mark.parametrize("fate", [Fate.KEEP, Fate.SWAP])
def test_an_anchor_that_was_modified_is_named(fate: Fate) -> None:
    model = stack(Gated(), Normed())
    anchor = "layers.0.add"
    profile = profiled(model)
    assert next(node for node in profile.nodes if node.name == anchor).anchor is not None
    plan = only_made(profile, **{anchor: fate})
    caught: list[Tensor] = []
    model.layers[1].before = caught.append
    with lowtide.apply(model, plan, engine="virtual:0"):
        small_loss(model, rows()).backward()
        loss = small_loss(model, rows())
        with torch.no_grad():
            caught[-1].mul_(2)
        text = _message(loss.backward)
    assert re.fullmatch(
        r"lowtide: 'layers\.0\.add' was modified in place after the forward had used it, so 'layers\.1\.\w+' cannot be "
        r"made again from it\. Plain autograd may not need it; give this site the fate keep or swap, or do not write "
        r"into it before the backward pass\.",
        text,
    )


def test_a_parameter_of_a_recipe_that_was_stepped_is_noticed() -> None:
    model = stack(Gated(), Normed(), Gated())
    profile = profiled(model)
    uses = [n.name for n in profile.sites if n.recipe and any(i.kind == "parameter" for i in n.recipe.inputs)]
    assert uses
    with lowtide.apply(model, only_made(profile), engine="virtual:0"):
        loss = small_loss(model, rows())
        with torch.no_grad():
            model.layers[1].weight.add_(1)
        _message(loss.backward)


# -- a recipe is trusted only where it fits --------------------------------------------------------------------------


def _with_recipe(plan: Plan, name: str, change: Callable[[Recipe], Recipe]) -> Plan:
    sites = [dataclasses.replace(s, recipe=change(s.recipe)) if s.name == name else s for s in plan.sites]
    return dataclasses.replace(plan, sites=tuple(sites))


def test_a_recipe_that_gives_other_bytes_is_found_out_in_the_first_forward() -> None:
    model = stack(Gated())

    def subtract(recipe: Recipe) -> Recipe:
        return dataclasses.replace(recipe, steps=(dataclasses.replace(recipe.steps[0], op="aten.sub.Tensor"),))

    plan = _with_recipe(plan_with(profiled(model), ALL_MADE), "layers.0.mul", subtract)
    with lowtide.apply(model, plan, engine="virtual:0") as tide:
        with pytest.warns(UserWarning, match="gave other values") as caught:
            gradients(model, rows())
        got = gradients(model, rows())
        assert tide.stats.num_divergences == 2
        assert tide.stats.recomputed_bytes == 2 * 8 * WIDTH * 4
    assert [str(w.message) for w in caught if "lowtide" in str(w.message)] == [
        "lowtide: the first forward was not the one that the plan was made for: recipes of the plan gave other values, "
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
    with lowtide.apply(model, plan, engine="virtual:0") as tide:
        small_loss(model, rows()).backward()
        assert tide.stats.num_divergences == 0
        tide.reset_stats()
        model.layers[1].uses_other = True
        loss = small_loss(model, rows())
        got = list(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True))
        assert tide.stats.num_divergences > 0
    want = torch.autograd.grad(small_loss(model, rows()), list(model.parameters()), allow_unused=True)
    assert [g is None for g in got] == [w is None for w in want]
    assert all(zoo.same_bits(g, w) for g, w in zip(got, want, strict=True) if g is not None)


def test_recipes_without_sizes_follow_other_shapes_and_others_stay() -> None:
    model = stack(Gated())
    profile = profiled(model)
    assert all(node.recipe.is_shape_free for node in profile.sites if node.name in ALL_MADE)
    plan = plan_with(profile, ALL_MADE)

    def with_sizes(recipe: Recipe) -> Recipe:
        return dataclasses.replace(recipe, is_shape_free=False)

    for num_fixed, named in ((0, ()), (1, ("layers.0.mul",)), (2, tuple(ALL_MADE))):
        for name in named:
            plan = _with_recipe(plan, name, with_sizes)
        with lowtide.apply(model, plan, engine="virtual:0") as tide:
            gradients(model, rows())
            tide.reset_stats()
            got = gradients(model, rows(5))
            assert tide.stats.num_divergences == num_fixed
            assert tide.stats.recomputed_bytes == (2 - num_fixed) * 5 * WIDTH * 4
        assert_plain(model, rows(5), got)


def test_a_first_batch_of_another_shape_does_no_harm() -> None:
    model = stack(Gated(), Normed())
    plan = only_made(profiled(model))
    with lowtide.apply(model, plan, engine="virtual:0") as tide:
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
    with lowtide.apply(model, plan, engine="virtual:0") as tide:
        with pytest.warns(UserWarning, match="% of what it saved is not in the plan and is kept \\('layers.1"):
            got = gradients(model, rows())
        assert tide.stats.num_unplanned > 0
        assert tide.plan.sites[: len(plan.sites)] == plan.sites
        assert {site.reason for site in tide.plan.sites[len(plan.sites) :]} == {"the plan does not know it"}
    assert_plain(model, rows(), got)


def test_planned_sites_that_do_not_appear_are_said() -> None:
    model = stack(Gated(), Gated())
    plan = plan_with(profiled(model), {"layers.1.gate.mm": Fate.SWAP, **ALL_MADE})
    model.layers[1] = nn.Identity()
    with (
        lowtide.apply(model, plan, engine="virtual:0"),
        pytest.warns(
            UserWarning, match=r"did not save what the plan wants swapped or recomputed \('layers.1.gate.mm'\)"
        ),
    ):
        gradients(model, rows())


def test_a_plan_for_another_model_is_refused() -> None:
    plan = only_made(profiled(stack(Gated(), Normed(), Gated())))
    model = stack(Gated(), Gated(), Gated())
    with pytest.raises(ConfigError, match="made for another model, plan again"):
        lowtide.apply(model, plan, engine="virtual:0")
    broken = dataclasses.replace(plan, sites=tuple(site for site in plan.sites if site.name != "layers.0.gate.mm"))
    with pytest.raises(ConfigError) as refused:
        lowtide.apply(stack(Gated(), Normed(), Gated()), broken, engine="virtual:0")
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
    with lowtide.apply(model, Plan.from_json(plan.to_json()), engine="virtual:0") as tide:
        gradients(model, rows())
        assert tide.plan == plan


# -- anchors ---------------------------------------------------------------------------------------------------------


def test_anchors_leave_no_trace_and_are_not_copied() -> None:
    model = stack(Gated(), Normed(), Gated())
    before = zoo.footprint(model)
    plan = only_made(profiled(model))
    assert any(site.anchor is not None for site in plan.sites)
    with lowtide.apply(model, plan, engine="virtual:0") as tide:
        gradients(model, rows())
        assert tide.stats.anchor_bytes > 0
        assert tide.stats.num_divergences == 0
        twin = copy.deepcopy(model)
    assert zoo.footprint(model) == before
    assert not any(isinstance(vars(module).get("forward"), ForwardPatch) for module in twin.modules())
    assert_plain(twin, rows(), gradients(model, rows()))


def test_an_anchor_dies_with_the_graph_or_before() -> None:
    model = stack(Gated(), Normed())
    plan = only_made(profiled(model))
    caught: list[weakref.ref] = []
    model.layers[1].before = lambda x: caught.append(weakref.ref(x.untyped_storage()))
    with lowtide.apply(model, plan, engine="virtual:0"):
        for _ in range(3):
            loss = small_loss(model, rows())
            assert caught[-1]() is not None
            loss.backward()
            assert caught[-1]() is None
            small_loss(model, rows())
            assert caught[-1]() is None


def test_an_anchor_of_the_second_call_of_a_module() -> None:
    block = stack(Normed()).layers[0]

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.linear = block, nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.block(x + self.block(x + self.linear(x).relu()))

    model = stack(Twice())
    profile = profiled(model)
    needed = {name for node in profile.sites if node.recipe for name in node.recipe.nodes}
    calls = {
        n.anchor.call for n in profile.nodes if n.name in needed and n.anchor and n.anchor.module.endswith("block")
    }
    assert calls == {0, 1}
    with lowtide.apply(model, only_made(profile), engine="virtual:0") as tide:
        gradients(model, rows())
        got = gradients(model, rows())
        assert tide.stats.num_divergences == 0
    assert_plain(model, rows(), got)


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
@pytest.mark.parametrize("engine", ["virtual:0", "virtual:1"])
def test_nothing_grows_over_a_thousand_steps(engine: str) -> None:
    model = stack(Gated(), Normed(), Failing(), Gated())
    plan = random_plan(profiled(model), 5, made=0.8, swapped=0.5)
    assert {site.fate for site in plan.sites} == set(Fate)
    with lowtide.apply(model, plan, engine=engine) as tide:
        for step in range(70):
            _bad_day(model, step)
        tide.settle()
        before = _num_objects()
        for step in range(1_001):  # ends, as the warm-up did, with an ordinary day
            _bad_day(model, step)
        tide.settle()
        assert _num_objects() == before
        assert (tide._mover.num_open(), tide._ledger.now_bytes, tide.engine.num_slots) == (0, 0, 0)
        assert not tide._mover._open_sites or not any(tide._mover._open_sites.values())


# -- the exact peak --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "mlp", "unet", "t5"])
def test_the_audited_peak_of_a_tide_that_keeps_everything_is_that_of_the_bare_model(name: str) -> None:
    from lowtide.catalog.live import LiveBytes

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
    with lowtide.apply(model, plan_with(profile_of(name), {}), engine="virtual:0") as tide:
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

    kept = audited(plan_with(profile, {}), "virtual:0")
    swap = {node.name: Fate.SWAP for node in profile.sites}
    near = audited(plan_with(profile, swap, prefetch=0, leave=0), "virtual:0")
    far = audited(plan_with(profile, swap, prefetch=1000, leave=0), "virtual:0")
    assert near < kept
    assert near < far
    assert audited(plan_with(profile, swap, prefetch=0, leave=0), "host") == near


def test_trying_recipes_out_does_not_call_swapped_inputs_back() -> None:
    """Copies that are complete at once: in the first forward a recipe is tried out on bytes that have left."""
    model = stack(Gated(), Gated())
    profile = profiled(model)
    swapped = {f"layers.{i}.{name}.mm": Fate.SWAP for i in range(2) for name in ("gate", "up")}
    plan = only_made(profile, **swapped)
    engine = ClockedEngine(out_bytes_per_second=1e12, in_bytes_per_second=1e12)
    with lowtide.apply(model, plan, engine=engine) as tide:
        loss = small_loss(model, rows())
        assert tide.stats.copied_out_bytes == tide.stats.swapped_bytes == 4 * 8 * WIDTH * 4
        loss.backward()
        assert tide.stats.num_divergences == 0
