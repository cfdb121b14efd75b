"""Storages that are stored smaller: the same bits, the promised bytes, and whole where values do not fit."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
import lowtide.profiling.smaller
from lowtide.config.memory import load_memory
from lowtide.core.fate import Fate
from lowtide.core.log import Listener
from lowtide.core.plan import Plan
from lowtide.core.profile import Profile, Site
from lowtide.planner.plan_profile import plan_profile
from lowtide.tensors.live_bytes import LiveBytes
from lowtide.timeline.step import Link
from tests.support import zoo
from tests.support.small_models import WIDTH, Gated, rows, small_loss, stack
from tests.support.small_models import profiled as profile_of
from tests.support.solved import plan_with
from tests.support.virtual_engine import VirtualEngine

ROWS = 512
LINK = Link(out_bytes_per_second=1e9, in_bytes_per_second=1e9)


class Dropping(nn.Module):
    """A float noise of two values, a bool mask that is saved as several views, and a product that a recipe can make."""

    def __init__(self, *, has_rrelu: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.has_rrelu = has_rrelu
        self.levels = [2]  # in a list: a number of its own would be another model
        self.mask = torch.empty(0)
        self.keeps_mask = False

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randint(1, 1 + self.levels[0], x.shape).to(x.dtype).div_(0.9)
        x = self.linear(x * noise)
        dropped, mask = torch.native_dropout(x, 0.3, True)
        if self.keeps_mask:
            self.mask = mask
        x = torch.where(mask, dropped, x * 0.5)
        filled = x.t().masked_fill(mask.t(), 0.25).t()
        return filled + F.rrelu(x, 0.25, 0.25, training=True) if self.has_rrelu else filled


def model_of() -> nn.Module:
    return stack(Dropping(), Dropping())


def profiled(model: nn.Module) -> Profile:
    return profile_of(model, rows(ROWS))


def smaller(profile: Profile, fate: Fate = Fate.KEEP, **others: Fate) -> Plan:
    """A plan that stores smaller whatever fits a codec and has no recipe."""
    able = (node for node in profile.sites if node.codec is not None and node.recipe is None)
    codecs = {node.name: node.codec for node in able if node.name not in others}
    assert codecs
    plan = plan_with(profile, {**dict.fromkeys(codecs, fate), **others})
    return plan.with_sites(dataclasses.replace(site, codec=codecs.get(site.name)) for site in plan.sites)


def saved_bytes(plan: Plan) -> int:
    return sum(site.nbytes - site.stored_bytes for site in plan.sites)


def step(model: nn.Module, seed: int = 0) -> list[Tensor]:
    torch.manual_seed(seed)
    loss = small_loss(model, rows(ROWS, seed))
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def same(got: list[Tensor], want: list[Tensor]) -> bool:
    return all(zoo.same_bits(*pair) for pair in zip(got, want, strict=True))


@pytest.mark.parametrize("fate", [Fate.KEEP, Fate.SWAP])
@pytest.mark.parametrize("engine", ["host", "virtual"])
def test_the_same_bits(fate: Fate, engine: str) -> None:
    model = model_of()
    plan = smaller(profiled(model), fate)
    kinds = {site.codec.kind for site in plan.sites if site.codec is not None}
    assert kinds == {"bits", "two values"}
    want = [step(model, seed) for seed in range(3)]
    virtual, read = VirtualEngine(1), Plan.from_json(plan.to_json())
    with lowtide.apply(model, read, engine=virtual if engine == "virtual" else engine) as tide:
        assert all(same(step(model, seed), want[seed]) for seed in range(3))
        stats = tide.stats
    assert (stats.num_divergences, tide.failed_recipes) == (0, {})
    assert stats.narrowed_bytes == 3 * saved_bytes(plan)
    assert stats.saved_bytes == 3 * sum(site.nbytes for site in plan.sites)
    moved = sum(site.stored_bytes for site in plan.sites if site.fate is Fate.SWAP)
    assert stats.swapped_bytes == stats.copied_in_bytes == 3 * moved
    gc.collect()
    assert virtual.violations == []
    assert virtual.num_slots == 0


def held_after_forward(model: nn.Module, tide: lowtide.Tide | None = None) -> int:
    torch.manual_seed(0)
    with LiveBytes(model=model) as live:
        if tide is not None:  # what is made at the end of the forward is made under no mode
            tide._scheduler.on_buffer = live.add
        loss = small_loss(model, rows(ROWS))
        return live.now_bytes - loss.nbytes


def test_the_bytes_between_forward_and_backward_are_those_of_the_plan() -> None:
    model = model_of()
    plan = smaller(profiled(model))
    plain = held_after_forward(model)
    with lowtide.apply(model, plan, engine="host") as tide:
        step(model)  # observed
        assert held_after_forward(model, tide) == plain - saved_bytes(plan)
    assert saved_bytes(plan) > plain / 3


def test_a_backward_pass_in_a_thread_of_its_own() -> None:
    """A new thread computes with as many threads as OpenMP says, until somebody asks torch for the number."""
    model = stack(*(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.Dropout(0.4)) for _ in range(2)))
    images, threads = rows(243).view(6, 8, 9, 9), torch.get_num_threads()
    profile = profile_of(model, images)

    def in_a_thread() -> list[Tensor]:
        torch.manual_seed(0)
        loss = small_loss(model, images)
        with ThreadPoolExecutor(max_workers=1) as fresh:
            return list(fresh.submit(torch.autograd.grad, loss, list(model.parameters())).result())

    torch.set_num_threads(2)
    try:
        want = in_a_thread()
        with lowtide.apply(model, smaller(profile), engine="host") as tide:
            assert all(same(in_a_thread(), want) for _ in range(2))
            assert tide.stats.narrowed_bytes > 0
    finally:
        torch.set_num_threads(threads)


def test_what_a_recipe_starts_from_may_be_stored_smaller() -> None:
    model = model_of()
    profile = profiled(model)
    made = {node.name: Fate.RECOMPUTE for node in profile.sites if node.recipe is not None}
    starts = {name for node in profile.sites if node.name in made for name in node.recipe.nodes}
    retained_inputs = {
        node.name: Fate.KEEP for node in profile.nodes if node.retained_input is not None and node.name in starts
    }
    for fate in (Fate.KEEP, Fate.SWAP):
        plan = smaller(profile, fate, **made, **retained_inputs)
        assert any(site.codec is not None and site.name in starts for site in plan.sites)
        want = step(model)
        with lowtide.apply(model, plan, engine=VirtualEngine(2)) as tide:
            for _ in range(2):
                assert same(step(model), want)
            assert tide.failed_recipes == {}
            assert tide.stats.recomputed_bytes > 0


def test_graphs_that_live_long_and_run_often() -> None:
    model = model_of()
    weights = list(model.parameters())

    def lives() -> list[Tensor]:
        torch.manual_seed(3)
        small_loss(model, rows(ROWS, 4))  # dropped
        first, second = small_loss(model, rows(ROWS, 1)), small_loss(model, rows(ROWS, 2))
        grads = list(torch.autograd.grad(first, weights, retain_graph=True))
        grads += torch.autograd.grad(second, weights)
        grads += torch.autograd.grad(first, weights[:1], retain_graph=True)
        grads += torch.autograd.grad(first, weights)
        third = torch.autograd.grad(small_loss(model, rows(ROWS, 3)), weights, create_graph=True)
        return [*grads, *torch.autograd.grad(sum(grad.square().sum() for grad in third), weights)]

    want = lives()
    for fate in (Fate.KEEP, Fate.SWAP):
        with lowtide.apply(model, smaller(profiled(model), fate), engine="host") as tide:
            step(model)
            assert same(lives(), want)
            gc.collect()
            tide.settle()
            assert tide._scheduler.ledger.now_bytes == 0


def test_a_write_after_the_save_raises_as_it_does_without() -> None:
    model = model_of()
    plan = smaller(profiled(model))

    def written(when: str) -> str:
        torch.manual_seed(0)
        model.layers[1].keeps_mask = True
        loss = small_loss(model, rows(ROWS))
        model.layers[1].mask.logical_not_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
            loss.backward()
        return str(caught.value)

    plain = written("plain")
    with lowtide.apply(model, plan, engine="host"):
        assert written("first forward") == plain
        assert written("later forward") == plain
    model.layers[1].mask = torch.empty(0)


class Writing(nn.Module):
    """Writes to its mask before the next operator saves anything, and never needs it again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.writes = False

    def forward(self, x: Tensor) -> Tensor:
        dropped, mask = torch.native_dropout(self.linear(x), 0.3, True)
        if self.writes:
            mask.logical_not_()
        return dropped


def test_a_write_before_it_is_encoded() -> None:
    model = stack(Gated(), Writing())
    plan = smaller(profiled(model))
    model.layers[1].writes = True
    with lowtide.apply(model, plan, engine="host") as tide:
        torch.manual_seed(0)
        with pytest.warns(UserWarning, match="does not fit its codec, and is kept whole"):
            loss = small_loss(model, rows(ROWS))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        assert tide.failed_recipes == {"layers.1.dropout:1": "it was written to after it had been saved"}


def test_values_that_do_not_fit_any_more_are_stored_whole() -> None:
    model = model_of()
    profile = profiled(model)
    noise = "layers.1.div"
    plan = smaller(profile)
    with lowtide.apply(model, plan, engine="host") as tide:
        assert same(step(model), _plainly(tide, model))
        model.layers[1].levels[0] = 3
        got = step(model)
        assert tide.failed_recipes == {noise: "it does not fit its codec any more (two values)"}
        assert tide.stats.num_divergences == 1
        assert same(got, _plainly(tide, model))
        model.layers[1].levels[0] = 2  # it is not tried again
        before = tide.stats.narrowed_bytes
        assert same(step(model), _plainly(tide, model))
        whole = next(site for site in plan.sites if site.name == noise)
        assert tide.stats.narrowed_bytes - before == saved_bytes(plan) - (whole.nbytes - whole.stored_bytes)


def _plainly(tide: lowtide.Tide, model: nn.Module) -> list[Tensor]:
    tide.suspend()
    try:
        return step(model)
    finally:
        tide.resume()


def test_what_something_else_holds_stays_beside_its_smaller_form() -> None:
    model = model_of()
    plan = smaller(profiled(model))
    model.layers[0].keeps_mask = True
    plain = held_after_forward(model)
    want = step(model)
    with lowtide.apply(model, plan, engine="host") as tide:
        step(model)
        mask = ROWS * WIDTH
        assert held_after_forward(model, tide) == plain - saved_bytes(plan) + mask
        assert same(step(model), want)


def test_nothing_holds_the_whole_storage_after_it_was_encoded() -> None:
    model = stack(Writing(), Gated())
    plan = smaller(profiled(model))
    seen: list[weakref.ref] = []
    with lowtide.apply(model, plan, engine="host"):
        step(model)
        native_dropout = torch.native_dropout

        def noticed(*args: object) -> tuple[Tensor, Tensor]:
            dropped, mask = native_dropout(*args)
            seen.append(weakref.ref(mask.untyped_storage()))
            return dropped, mask

        torch.native_dropout = noticed
        try:
            loss = small_loss(model, rows(ROWS))
        finally:
            torch.native_dropout = native_dropout
        assert [storage() for storage in seen] == [None]
        loss.backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    model = stack(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)), Gated())
    x = rows(ROWS)

    def cast() -> list[Tensor]:
        torch.manual_seed(0)
        with torch.autocast("cpu", dtype):
            loss = small_loss(model, x)
        return list(torch.autograd.grad(loss, list(model.parameters())))

    with torch.autocast("cpu", dtype):
        profile = profile_of(model, x)
    want = cast()
    with lowtide.apply(model, smaller(profile), engine="host") as tide:
        for _ in range(2):
            assert same(cast(), want)
        assert tide.stats.narrowed_bytes > 0
        assert tide.stats.num_divergences == 0


@pytest.mark.filterwarnings("ignore:lowtide")
def test_a_budget_is_kept_in_the_step_in_which_a_codec_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks are dear to encode here, so the plan takes the noise, and masks once the noise does not fit."""
    monkeypatch.setattr(lowtide.profiling.smaller, "_seconds", lambda kind, *_: 1e-9 if kind == "two values" else 1.0)
    model = stack(*(Dropping(has_rrelu=False) for _ in range(4)))
    memory = {"recompute": "none", "swap": "none", "min_bytes": "1B"}
    profile = profiled(model)
    config = load_memory({**memory, "budget": "1GiB"})
    noises = {node.name for node in profile.sites if node.codec is not None and node.codec.kind == "two values"}
    plain_bytes = plan_profile(profile, config, link=LINK).predicted.plain_peak_bytes
    with pytest.raises(lowtide.BudgetError) as caught:
        plan_profile(profile.without_codecs(noises), config, link=LINK, budget_bytes=1)
    budget = (caught.value.floor_bytes + plain_bytes) // 2
    assert budget < plain_bytes
    steps = ((2, 0), (2, 1), (3, 2), (3, 3), (2, 4))

    def run(levels: int, seed: int) -> list[Tensor]:
        for layer in model.layers:
            layer.levels[0] = levels
        return step(model, seed)

    want = [run(*each) for each in steps]
    lines: list[str] = []
    with Listener(lines.append), lowtide.optimize(model, budget=budget, memory=memory, engine="host") as auto:
        for (levels, seed), truth in zip(steps, want, strict=True):
            with LiveBytes(model=model) as live:
                if auto.tide is not None:
                    auto.tide._scheduler.on_buffer = live.add
                got = run(levels, seed)
            assert same(got, truth)
            if seed:  # before the first there is no plan
                assert live.peak_bytes <= budget, (levels, seed)
        assert "recipes do not hold" in [event.why for event in auto.events]
        assert any("it does not fit its codec any more (two values)" in line for line in lines)
        stored = {site.codec.kind for site in auto.plan.sites if site.codec is not None}
        assert stored
        assert "two values" not in stored


class Wide(nn.Module):
    """Storages that are wider than their values: indices. Nothing can make them again."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.most = WIDTH

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        picked = x.repeat(1, 2).gather(1, torch.randint(0, self.most, x.shape))
        return x * torch.randn(x.shape) + picked


def test_indices() -> None:
    model = stack(Wide(), Wide())
    profile = profiled(model)
    for fate in (Fate.KEEP, Fate.SWAP):
        plan = smaller(profile, fate)
        stored = {site.codec.kind: site for site in plan.sites if site.codec is not None}
        assert stored.keys() == {"uint8"}
        assert stored["uint8"].stored_bytes * 8 == stored["uint8"].nbytes
        want = [step(model, seed) for seed in range(3)]
        with lowtide.apply(model, plan, engine=VirtualEngine(3)) as tide:
            assert all(same(step(model, seed), want[seed]) for seed in range(3))
            assert (tide.stats.num_divergences, tide.failed_recipes) == (0, {})
            assert tide.stats.narrowed_bytes == 3 * saved_bytes(plan)
            assert tide.stats.saved_bytes == 3 * sum(site.nbytes for site in plan.sites)


def test_indices_that_still_fit_their_type() -> None:
    model = stack(Wide(), Wide())
    plan = smaller(profiled(model))
    model.layers[1].most = 2 * WIDTH
    want = step(model)
    with lowtide.apply(model, plan, engine="host") as tide:
        assert same(step(model), want)
        assert tide.failed_recipes == {}


@pytest.mark.filterwarnings("ignore:lowtide")
def test_the_audited_peak_is_the_predicted_one() -> None:
    """The form beside the storage while either is made, and what encoding and decoding take, are in the account."""
    model = stack(*(Dropping() for _ in range(3)), *(Wide() for _ in range(3)))
    profile = profiled(model)
    config = load_memory({"budget": "1GiB", "min_bytes": "1B", "recompute": "none", "swap": "none"})
    plain_bytes = plan_profile(profile, config, link=LINK).predicted.plain_peak_bytes
    with pytest.raises(lowtide.BudgetError) as caught:
        plan_profile(profile, config, link=LINK, budget_bytes=1)
    floor_bytes = caught.value.floor_bytes
    assert floor_bytes < 0.8 * plain_bytes
    for share in (0.0, 0.3, 0.6):
        budget = int(floor_bytes + share * (plain_bytes - floor_bytes))
        plan = plan_profile(profile, config, link=LINK, budget_bytes=budget)
        assert plan.predicted is not None
        with lowtide.apply(model, plan, engine="host") as tide:
            step(model)
            with tide.audit() as audit:
                step(model, 1)
            assert tide.failed_recipes == {}
        assert audit.peak_bytes <= plan.predicted.peak_bytes <= budget
        assert audit.peak_bytes > 0.95 * plan.predicted.peak_bytes


class Pooled(nn.Module):
    """Each of its large storages fits a codec and has a recipe: outputs of ReLU, indices of a max-pool."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.linear(x))
        return F.max_pool1d(x[None], 3, stride=1, padding=1)[0] * x


def priced(profile: Profile, cheap_codecs: str) -> Profile:
    """The profile with given times: where a name ends so, the codec is cheaper than the recipe; elsewhere dearer."""

    def with_price(node: Site) -> Site:
        recipe = None if node.recipe is None else dataclasses.replace(node.recipe, seconds=1e-4)
        seconds = 1e-5 if node.name.endswith(cheap_codecs) else 1e-3
        codec = None if node.codec is None else dataclasses.replace(node.codec, seconds=seconds)
        return dataclasses.replace(node, recipe=recipe, codec=codec)

    ops = len(profile.op_seconds)
    return dataclasses.replace(profile, nodes=tuple(map(with_price, profile.nodes)), op_seconds=(1e-3,) * ops)


@pytest.mark.filterwarnings("ignore:lowtide")
@pytest.mark.parametrize("swap", ["none", "auto"])
def test_a_codec_beside_a_recipe(swap: str) -> None:
    """Each where it is cheaper: the same bits, also of NaN, infinities and -0.0, and within the budget."""
    model = stack(*(Pooled() for _ in range(4)))
    profile = priced(profiled(model), ":1")
    both = {node.name for node in profile.sites if node.codec is not None and node.recipe is not None}
    config = load_memory({"budget": "1GiB", "min_bytes": "1B", "swap": swap})
    slow = Link(out_bytes_per_second=1e7, in_bytes_per_second=1e7)  # 6.5 ms for indices, 0.8 ms for their form
    plain_bytes = plan_profile(profile, config, link=slow).predicted.plain_peak_bytes
    with pytest.raises(lowtide.BudgetError) as caught:
        plan_profile(profile, config, link=slow, budget_bytes=1)
    floor_bytes = caught.value.floor_bytes
    ways: set[str] = set()
    beyond_bytes: list[int] = []

    def special(seed: int) -> list[Tensor]:
        x = rows(ROWS, seed)
        x[:4, 0] = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0])
        loss = small_loss(model, x)
        return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]

    for share in (0.0, 0.2, 0.5):
        budget = int(floor_bytes + share * (plain_bytes - floor_bytes))
        plan = plan_profile(profile, config, link=slow, budget_bytes=budget)
        for site in plan.sites:
            if site.name in both:
                ways.add(f"{site.fate.value} {site.codec.kind if site.codec else 'whole'}")
        want = [step(model), special(1), step(model, 2)]
        with lowtide.apply(model, plan, engine="host" if swap == "none" else VirtualEngine(7)) as tide:
            assert same(step(model), want[0])
            if swap == "none":
                with tide.audit() as audit:
                    assert same(step(model, 2), want[2])
                assert audit.peak_bytes <= plan.predicted.peak_bytes <= budget
                beyond_bytes.append(plan.predicted.peak_bytes - audit.peak_bytes)
            assert same(special(1), want[1])
            assert tide.failed_recipes == {}
    assert {"keep uint8", "recompute whole" if swap == "none" else "swap whole"} <= ways
    # A plan counts what recipes need beside their result as if it were there in each of their steps.
    assert sorted(beyond_bytes) in ([], [0, 0, rows(ROWS).nbytes])
