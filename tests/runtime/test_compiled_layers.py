"""Layers that are compiled, in every form: the bits of the same compiled model without lowtide, and nothing of lowtide
is ever compiled."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.profiling.layers import find_layers
from tests.support.compiled_models import FORMS, WIDTH, Block, Model, assert_same, build, num_frames, train
from tests.support.virtual_engine import virtual

PLANS: dict[str, dict[str, Any]] = {
    "swap": {"swap": "all", "min_bytes": 0},
    "recompute": {"recompute": "all"},
    "mixed": {"swap": ["layers.0"], "recompute": ["layers.1"], "min_bytes": 0},
}


@pytest.fixture(autouse=True, scope="module")
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _apply(model: nn.Module, plan: dict[str, Any]) -> Any:
    return lowtide.apply(model, plan, engine=virtual(1))


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("form", FORMS)
def test_the_bits_are_those_of_the_compiled_model_and_nothing_is_compiled_for_lowtide(form: str, plan: str) -> None:
    truth = train(build(form))
    before = num_frames()
    model = build(form)
    with _apply(model, PLANS[plan]) as tide:
        assert_same(train(model), truth)
        stats = tide.stats
        assert stats.num_divergences == 0
        assert (stats.swapped_bytes, stats.recomputed_bytes) != (0, 0)
    assert num_frames() == before
    del tide
    model.zero_grad(set_to_none=True)
    model.layers.load_state_dict(build(form).layers.state_dict())
    assert_same(train(model), truth)
    assert num_frames() == before


@pytest.mark.parametrize("plan", [*PLANS, "budget"])
def test_no_code_of_lowtides_is_compiled_where_a_graph_breaks_at_a_number(plan: str) -> None:
    """There torch runs operators between two graphs, and the hooks that they call with them."""
    truth = train(build(habits=("counts", "counts")))
    before = num_frames()
    with _apply(build(habits=("counts", "counts")), PLANS.get(plan, {"budget": "1GiB", "min_bytes": 0})) as tide:
        assert_same(train(tide.model), truth)
    assert num_frames() == before


def test_other_lengths_make_other_graphs_and_change_no_bit() -> None:
    """One graph is compiled for eight rows, one for any number of them; each saves something else."""
    lengths = (8, 12, 8, 5)
    truth = train(build(), lengths)
    before = num_frames()
    for plan in PLANS.values():
        with _apply(build(), plan) as tide:
            assert_same(train(tide.model, lengths), truth)
        assert num_frames() == before


def test_a_layer_that_was_compiled_anew_since_its_forward_is_not_recomputed_by_other_code() -> None:
    """Two forward passes before the first backward: the first layers would run again as the second ones did."""
    torch._dynamo.reset()
    model = build(habits=("", ""))
    with _apply(model, PLANS["recompute"]):
        first = model(torch.ones(8, WIDTH))
        second = model(torch.ones(12, WIDTH))
        second.backward()
        with pytest.raises(RuntimeError) as caught:
            first.backward()
    assert str(caught.value) == (
        "lowtide: the recomputed 'layers.1' (Block) ran through other compiled code when it was run again for its "
        "backward pass: it was compiled anew since its forward, for other shapes, say, and other code may give other "
        "bits. Run backward before the next forward pass, mark the dimension as dynamic from the start "
        "(torch._dynamo.mark_dynamic), or give this module the fate keep or swap."
    )
    # What is swapped needs no second run.
    torch._dynamo.reset()
    model = build(habits=("", ""))
    with _apply(model, PLANS["swap"]):
        losses = model(torch.ones(8, WIDTH)), model(torch.ones(12, WIDTH))
        for loss in losses:
            loss.backward()


def test_writes_in_place_autocast_and_buffers_that_move() -> None:
    how: dict[str, Any] = {"habits": ("writes", "", "")}
    truth = train(build(**how), dtype=torch.bfloat16)
    before = num_frames()
    for plan in PLANS.values():
        with _apply(build(**how), plan) as tide:
            assert_same(train(tide.model, dtype=torch.bfloat16), truth)
        assert num_frames() == before


def test_evaluation_in_between_and_remove() -> None:
    def run(model: nn.Module) -> list[Tensor]:
        first = train(model)
        with torch.no_grad():
            outputs = [model(torch.ones(8, WIDTH))]
        model.eval()
        outputs.append(model(torch.ones(8, WIDTH)).detach())
        model.train()
        return [*first, *outputs, *train(model)]

    truth = run(build())
    before = num_frames()
    model = build()
    keys, calls = list(model.state_dict()), [dict(vars(module)) for module in model.modules()]
    with _apply(model, PLANS["mixed"]) as tide:
        assert_same(run(model), truth)
        assert list(model.state_dict()) == keys
        assert tide.stats.num_forwards == 5
    assert [dict(vars(module)) for module in model.modules()] == calls
    assert num_frames() == before


def test_a_copy_of_a_model_with_compiled_layers_is_plain() -> None:
    model = build()
    with _apply(model, PLANS["swap"]):
        twins = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for twin in twins:
        assert not any("lowtide" in repr(value) for module in twin.modules() for value in vars(module).values())


def test_a_compiled_layer_inside_an_eager_one_and_a_compiled_part_that_is_no_layer() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.last = Block(), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.inner(x)).relu()

    def make() -> Model:
        model = Model(())
        model.embed.compile(backend="aot_eager")
        model.layers.extend(Outer() for _ in range(2))
        for outer in model.layers:
            outer.inner.compile(backend="aot_eager")
        return model

    torch.manual_seed(5)
    model = make()
    state = copy.deepcopy(model.state_dict())
    truth = train(model)
    before = num_frames()
    for plan in (PLANS["swap"], PLANS["recompute"], {"recompute": ["layers.*.inner", "embed"]}):
        model = make()
        model.load_state_dict(state)
        with _apply(model, plan) as tide:
            assert_same(train(model), truth)
            names = {site.name for site in tide.plan.sites}
        if "recompute" not in plan:
            assert {"tanh", "layers.0.inner.compiled", "layers.1.relu"} <= names
    assert num_frames() == before


def test_blocks_of_which_one_is_compiled_are_layers_and_what_repeats_inside_one_is_not() -> None:
    model = build("wrapped", which=(0,), habits=("", ""))
    assert find_layers(model) == ("layers.0", "layers.1")
    outer = nn.ModuleList([Model(("", "")), Model(("", ""))])
    outer[0].compile(backend="aot_eager")
    assert find_layers(outer) == ("0", "1")
    alone = nn.ModuleDict({"body": Model(("", ""))})
    alone["body"].compile(backend="aot_eager")
    assert find_layers(alone) == ()
    with pytest.raises(lowtide.ConfigError) as caught:
        lowtide.apply(alone, {"swap": "all", "layers": ["body.layers.0"]})
    assert str(caught.value) == (
        "memory.layers: 'body.layers.0' lies inside 'body', which is compiled, and so one node; name 'body'"
    )


def test_a_rule_about_a_part_of_a_compiled_layer_says_that_it_does_nothing() -> None:
    with pytest.warns(UserWarning, match="no effect") as caught:
        lowtide.apply(build(which=(0, 1)), {"swap": ["layers.*.up"], "min_bytes": 0}, engine=virtual(1)).remove()
    assert str(caught[0].message) == (
        "lowtide: memory.swap[0]: swap 'layers.*.up' has no effect inside 'layers.0' and 1 more: a compiled module is "
        "one node. Name the module itself, or compile only parts of it."
    )


def test_an_input_written_after_a_compiled_layer_saved_it_raises_what_plain_autograd_raises() -> None:
    class Writing(Model):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.embed(x)
            out = self.layers[0](hidden)
            hidden.detach().add_(1)
            return out.sum()

    def message(model: nn.Module) -> str:
        with pytest.raises(RuntimeError) as caught:
            model(torch.ones(8, WIDTH)).backward()
        return str(caught.value).partition(";")[0]

    def make() -> Writing:
        model = Writing(("",))
        model.layers[0].compile(backend="aot_eager")
        return model

    truth = message(make())
    assert "modified by an inplace operation" in truth
    for plan in ({"swap": "all", "min_bytes": 0}, {"swap": "none"}):
        model = make()
        with _apply(model, plan):
            assert message(model) == truth
