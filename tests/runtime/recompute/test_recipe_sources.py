"""Cells and retained inputs: what recipes start from and make, held no longer than needed, and who may write to it."""

from __future__ import annotations

import copy
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.core.fate import Fate
from lowtide.core.plan import Plan
from lowtide.recipes import execute as recipes
from lowtide.runtime.offload.scheduler import OffloadScheduler
from lowtide.runtime.offload.site import PrefetchQueue
from lowtide.runtime.offload.spill import Guard
from lowtide.runtime.recompute import recipe_sources as sources
from lowtide.tensors.compiled import ForwardPatch
from lowtide.tensors.modes import Modes
from tests.engines.clocked import ClockedEngine
from tests.support import zoo
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
from tests.support.solved import plan_with
from tests.support.virtual_engine import VirtualEngine, virtual


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
    with lowtide.apply(model, plan, engine=virtual(0)) as tide:
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
    run = sources.RecomputedSource.run
    monkeypatch.setattr(sources.RecomputedSource, "run", lambda source: (runs.append(source.name), run(source))[1])
    model = stack(Gated())
    with lowtide.apply(model, plan_with(profiled(model), ALL_MADE), engine=virtual(0)):
        small_loss(model, rows()).backward()
        assert sorted(runs) == sorted(ALL_MADE)
        runs.clear()
        loss = small_loss(model, rows())
        assert runs == []
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        assert sorted(runs) == sorted([*ALL_MADE, *ALL_MADE])


class Forked(nn.Module):
    """Two values made of one input, each read twice in backward: first by the operator after it, last by its own."""

    def __init__(self) -> None:
        super().__init__()
        self.before: Callable[[Tensor], None] = lambda x: None
        self.after: Callable[[Tensor, Tensor], None] = lambda left, right: None

    def forward(self, x: Tensor) -> Tensor:
        self.before(x)
        left = x.tanh()
        below_left = left.cos()
        right = x.exp()
        below_right = right.sin()
        self.after(left, right)
        return below_left + below_right


FORK = "layers.0.add"
"""The input of `Forked`, which autograd does not save."""
FORKED = ("layers.1.tanh", "layers.1.exp")


def forked(fate: Fate) -> tuple[nn.Module, Plan]:
    """A model and a plan in which two made cells start from one retained input of this fate."""
    model = stack(Gated(), Forked())
    profile = profiled(model)
    recipes = {node.name: node.recipe.nodes for node in profile.sites if node.recipe is not None}
    assert [recipes[name] for name in FORKED] == [(FORK,), (FORK,)]
    return model, plan_with(profile, {FORK: fate, **dict.fromkeys(FORKED, Fate.RECOMPUTE)})


def test_kept_inputs_of_recipes_are_let_go_as_soon_as_all_are_made() -> None:
    """While what was made of them is still to be read. In a backward that keeps the graph they stay."""
    model, plan = forked(Fate.KEEP)
    layer = model.layers[1]
    inputs: list[weakref.ref] = []
    is_alive: list[bool] = []

    def watch(left: Tensor, right: Tensor) -> None:
        # When all is made but one, and when all is made; each has its last reader still to come.
        for tensor in (right, left):
            tensor.register_hook(lambda grad: is_alive.append(inputs[-1]() is not None))

    layer.before = lambda x: inputs.append(weakref.ref(x.untyped_storage()))
    layer.after = watch
    with lowtide.apply(model, plan, engine=virtual(0)) as tide:
        for keeps_graph in (False, True, False):
            loss = small_loss(model, rows())
            held_bytes = tide._scheduler.ledger.now_bytes
            if keeps_graph:
                loss.backward(retain_graph=True)
                assert is_alive == [True, True]
                assert tide._scheduler.ledger.now_bytes == held_bytes
                is_alive.clear()
            loss.backward()
            assert is_alive == [True, False]
            is_alive.clear()
            del loss
            assert tide._scheduler.ledger.now_bytes == 0
        assert tide.stats.num_divergences == 0


@pytest.mark.parametrize("keeps_graph", [False, True])
def test_a_swapped_input_is_fetched_once_for_all_that_is_made_from_it(keeps_graph: bool) -> None:
    model, plan = forked(Fate.SWAP)
    # Copies are complete at once: none is cancelled because backward came early.
    engine = ClockedEngine(out_bytes_per_second=1e12, in_bytes_per_second=1e12)
    with lowtide.apply(model, plan, engine=engine) as tide:
        small_loss(model, rows()).backward()
        tide.reset_stats()
        loss = small_loss(model, rows())
        assert tide.stats.copied_in_bytes == 0
        for backward in range(1, 3):
            loss.backward(retain_graph=keeps_graph or backward == 1)
            assert tide.stats.copied_in_bytes == backward * 8 * WIDTH * 4
        del loss
        assert tide._scheduler.ledger.now_bytes == 0


class Delayed(nn.Module):
    """A value that is read early in the forward, and again, through what is made of it, much later."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.after: Callable[[Tensor], None] = lambda product: None

    def forward(self, x: Tensor) -> Tensor:
        chain = self.inner(x).sin().cos() * 2
        other = self.outer(x)
        for _ in range(6):
            other = other.cos()
        product = other * chain
        self.after(product)
        return product.cos()


def test_a_fetch_starts_for_the_recipe_that_needs_it_first() -> None:
    """Its distance counts from there, through a chain of recipes too, not from its own reader."""
    model = stack(Delayed())
    profile = profiled(model)
    recipes = {node.name: node.recipe.nodes for node in profile.sites if node.recipe is not None}
    source, *made = "layers.0.inner.mm", "layers.0.sin", "layers.0.mul"
    assert [recipes[name] for name in made] == [(source,), ("layers.0.sin",)]
    engine = ClockedEngine(out_bytes_per_second=1e12, in_bytes_per_second=1e12)
    plan = plan_with(profile, {source: Fate.SWAP, **dict.fromkeys(made, Fate.RECOMPUTE)}, prefetch=1)
    seen_bytes: list[int] = []
    with lowtide.apply(model, plan, engine=engine) as tide:
        for _ in range(2):
            tide.reset_stats()
            model.layers[0].after = lambda product: product.register_hook(
                lambda grad: seen_bytes.append(tide.stats.copied_in_bytes)
            )
            small_loss(model, rows()).backward()
        assert tide.stats.num_divergences == 0
    # Before the product's own backward, the first that needs it.
    assert seen_bytes == [8 * WIDTH * 4] * 2


class Rejoined(nn.Module):
    """Two values of the same kind, one of which is read again: the same one in each forward, or not."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, bias=False)
        self.takes_other = False
        self.writes = False

    def forward(self, x: Tensor) -> Tensor:
        start = self.inner(x)
        kept = start.sin()
        one, other = start * 3, start * 5
        dropped = one.cos(), other.cos()
        if self.writes:
            with torch.no_grad():
                one.mul_(2)
        again = other if self.takes_other else one
        del dropped
        return kept + again.cos()


@pytest.mark.filterwarnings("ignore:lowtide. the first forward:UserWarning")  # what is dropped is not in the plan
@pytest.mark.parametrize("change", ["takes_other", "writes"])
def test_a_source_is_found_by_storage_and_version_not_by_name(change: str) -> None:
    """The same producer, dtype and shape at the same position, but another tensor, or the tensor after a write."""
    model = stack(Rejoined())
    profile = profiled(model)
    recipes = {node.name: node.recipe.nodes for node in profile.sites if node.recipe is not None}
    made = [name for name, nodes in recipes.items() if nodes == ("layers.0.inner.mm",)]
    assert made == ["layers.0.mul"]
    with lowtide.apply(model, plan_with(profile, dict.fromkeys(made, Fate.RECOMPUTE)), engine=virtual(0)) as tide:
        gradients(model, rows())
        assert tide.stats.num_divergences == 0
        setattr(model.layers[0], change, True)
        got = gradients(model, rows())
        assert tide.stats.num_divergences > 0
    assert_plain(model, rows(), got)


@pytest.mark.slow
def test_a_chain_of_recipes_may_be_as_long_as_the_model_is_deep() -> None:
    model = stack(*(Normed() for _ in range(300)))
    plan = only_made(profiled(model))
    assert sum(site.fate is Fate.RECOMPUTE for site in plan.sites) > 890
    with lowtide.apply(model, plan, engine=virtual(0)):
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
    with lowtide.apply(model, plan, engine=virtual(0)):
        small_loss(model, rows()).backward()
        assert _message(broken) == want


@pytest.mark.parametrize("fate", [Fate.KEEP, Fate.SWAP])
def test_a_retained_input_that_was_modified_is_named(fate: Fate) -> None:
    model = stack(Gated(), Normed())
    retained_input = "layers.0.add"
    profile = profiled(model)
    assert next(node for node in profile.nodes if node.name == retained_input).retained_input is not None
    plan = only_made(profile, **{retained_input: fate})
    caught: list[Tensor] = []
    model.layers[1].before = caught.append
    with lowtide.apply(model, plan, engine=virtual(0)):
        small_loss(model, rows()).backward()
        loss = small_loss(model, rows())
        with torch.no_grad():
            caught[-1].mul_(2)
        text = _message(loss.backward)
    assert re.fullmatch(
        r"lowtide: 'layers\.0\.add' was modified in place after the forward had used it, so 'layers\.1\.\w+' cannot be "
        r"recomputed from it\. Plain autograd may not need it; give this site the fate keep or swap, or do not write "
        r"into it before the backward pass\.",
        text,
    )


def test_a_parameter_of_a_recipe_that_was_stepped_is_noticed() -> None:
    model = stack(Gated(), Normed(), Gated())
    profile = profiled(model)
    uses = [n.name for n in profile.sites if n.recipe and any(i.kind == "parameter" for i in n.recipe.inputs)]
    assert uses
    with lowtide.apply(model, only_made(profile), engine=virtual(0)):
        loss = small_loss(model, rows())
        with torch.no_grad():
            model.layers[1].weight.add_(1)
        _message(loss.backward)


class Shifted(nn.Module):
    """A parameter that no operator's backward needs, and that what is dropped is made from."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, bias=False)
        self.shift = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.inner(x) + self.shift).sin()


def test_a_parameter_that_autograd_does_not_save_is_watched() -> None:
    model = stack(Shifted())
    with lowtide.apply(model, only_made(profiled(model)), engine=virtual(0)) as tide:
        loss = small_loss(model, rows())
        assert tide.stats.recomputed_bytes == 8 * WIDTH * 4
        with torch.no_grad():
            model.layers[0].shift.add_(1)
        # By its version: a fingerprint would tell of other bytes, and need not see them.
        assert _message(loss.backward).startswith(
            "lowtide: 'layers.0.shift' was modified in place after the forward had used it, so 'layers.0.add' cannot "
            "be recomputed from it."
        )


def test_with_a_graph_that_stays_what_was_made_goes_with_its_last_reader() -> None:
    model = stack(*(Gated() for _ in range(6)))
    names = [name.replace("layers.0", f"layers.{layer}") for layer in range(6) for name in ALL_MADE]
    with lowtide.apply(model, plan_with(profiled(model), dict.fromkeys(names, Fate.RECOMPUTE)), engine=virtual(0)) as t:
        loss = small_loss(model, rows())
        held_bytes = t._scheduler.ledger.now_bytes
        for _ in range(2):
            t._scheduler.ledger.restart_peak()
            loss.backward(retain_graph=True)
            # Those of one layer, not of all six.
            assert 0 < t._scheduler.ledger.peak_bytes - held_bytes <= len(ALL_MADE) * 8 * WIDTH * 4
            assert t._scheduler.ledger.now_bytes == held_bytes


def test_a_recipe_runs_under_the_settings_of_its_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    run = recipes.CompiledRecipe.run

    def watched(self: recipes.CompiledRecipe, *args: Any) -> Tensor:
        seen.append(torch.are_deterministic_algorithms_enabled())
        return run(self, *args)

    monkeypatch.setattr(recipes.CompiledRecipe, "run", watched)
    model = stack(Gated())
    with lowtide.apply(model, plan_with(profiled(model), ALL_MADE), engine=virtual(0)):
        torch.use_deterministic_algorithms(True)
        try:
            loss = small_loss(model, rows())
        finally:
            torch.use_deterministic_algorithms(False)
        loss.backward()
        assert seen == [True] * len(ALL_MADE)
        assert not torch.are_deterministic_algorithms_enabled()


# -- retained inputs
# ---------------------------------------------------------------------------------------------------------


def test_retained_inputs_leave_no_trace_and_are_not_copied() -> None:
    model = stack(Gated(), Normed(), Gated())
    before = zoo.footprint(model)
    plan = only_made(profiled(model))
    assert any(site.retained_input is not None for site in plan.sites)
    with lowtide.apply(model, plan, engine=virtual(0)) as tide:
        gradients(model, rows())
        assert tide.stats.retained_input_bytes > 0
        assert tide.stats.num_divergences == 0
        twin = copy.deepcopy(model)
    assert zoo.footprint(model) == before
    assert not any(isinstance(vars(module).get("forward"), ForwardPatch) for module in twin.modules())
    assert_plain(twin, rows(), gradients(model, rows()))


def test_a_retained_input_dies_with_the_graph_or_before() -> None:
    model = stack(Gated(), Normed())
    plan = only_made(profiled(model))
    caught: list[weakref.ref] = []
    model.layers[1].before = lambda x: caught.append(weakref.ref(x.untyped_storage()))
    with lowtide.apply(model, plan, engine=virtual(0)):
        for _ in range(3):
            loss = small_loss(model, rows())
            assert caught[-1]() is not None
            loss.backward()
            assert caught[-1]() is None
            small_loss(model, rows())
            assert caught[-1]() is None


def test_a_retained_input_of_the_second_call_of_a_module() -> None:
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
        n.retained_input.call
        for n in profile.nodes
        if n.name in needed and n.retained_input and n.retained_input.module.endswith("block")
    }
    assert calls == {0, 1}
    with lowtide.apply(model, only_made(profile), engine=virtual(0)) as tide:
        gradients(model, rows())
        got = gradients(model, rows())
        assert tide.stats.num_divergences == 0
    assert_plain(model, rows(), got)


@pytest.mark.parametrize("room", [{}, {"host_bytes": 0, "disk_bytes": 0}], ids=["away", "no room"])
@pytest.mark.filterwarnings("ignore:lowtide. no room left:UserWarning")
def test_what_the_guard_sent_away_is_still_known_by_its_version(room: dict[str, int]) -> None:
    """Its copy may be under way, or have found no room: what is written then would be read by other recipes."""
    tensor = torch.arange(64.0)
    scheduler = OffloadScheduler(VirtualEngine(0, **room))
    prints: Any = None
    source = sources.RecomputedSource("retained_input", None, tensor, scheduler, fingerprints=prints, modes=Modes())
    source.stay(Guard(1 << 40, scheduler=scheduler, min_bytes=0, state_bytes=int), PrefetchQueue())
    assert source.kept is not None
    source.kept.spill()
    assert source.is_intact()
    tensor.mul_(-1)
    assert not source.is_intact()
