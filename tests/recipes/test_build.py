"""Recipes give the same bytes: of every node of every model of the zoo, also on data that they were not written for."""

from __future__ import annotations

import dataclasses
import json
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.core.json_text import build
from lowtide.core.recipe import Recipe
from lowtide.profiling.observe_step import observe
from lowtide.recipes.build import MAX_STEPS, build_recipes
from lowtide.recipes.execute import CompiledRecipe
from tests.support import zoo
from tests.support.grid import one_of
from tests.support.recording import Recording, record

CPU = torch.device("cpu")
CHEAP = ("_to_copy", "pow", "mean", "add", "rsqrt", "mul", "silu", "as_strided", "neg", "cat", "cos", "sin")


def recipes_of(recording: Recording) -> dict[str, Recipe | str]:
    """By name of the node."""
    found = build_recipes(recording.calls, recording.targets)
    return {storage.name: found[storage.index] for storage, _ in recording.targets}


def nothing(module: str) -> bool:
    """No module catches retained inputs."""
    return False


def norms(module: str) -> bool:
    """Only norms catch retained inputs."""
    return "norm" in module


def through_json(recipe: Recipe) -> Recipe:
    again = build(Recipe, json.loads(json.dumps(dataclasses.asdict(recipe))))
    assert again == recipe
    return again


def gives_the_bytes(recipe: Recipe, name: str, truth: Recording) -> bool:
    inputs = [truth.input(entry.kind, entry.name, entry.geometry) for entry in recipe.inputs]
    made = CompiledRecipe(through_json(recipe)).run(inputs, CPU).untyped_storage()
    return torch.equal(torch.empty(0, dtype=torch.uint8).set_(made), truth.bits[name])


def ops_of(recipe: Recipe | str) -> list[str]:
    assert isinstance(recipe, Recipe), recipe
    return [step.op.split(".")[1] for step in recipe.steps]


def simple(forward: Callable[..., Tensor], *sizes: int) -> tuple[nn.Module, Callable[[], Tensor], Tensor]:
    """A model of one linear and a function, its loss and its batch."""

    class Simple(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_buffer("state", torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            return forward(self, self.linear(x))

    model, x = Simple(), torch.randn(*(sizes or (4, 8)))
    return model, lambda: model(x).sum(), x


def recipes_of_simple(forward: Callable[..., Tensor], *sizes: int) -> tuple[dict[str, Recipe | str], Recording]:
    model, loss, x = simple(forward, *sizes)
    recording = record(model, loss, x, catches=nothing)
    found = recipes_of(recording)
    for name, recipe in found.items():
        assert isinstance(recipe, str) or gives_the_bytes(recipe, name, recording), name
    return found, recording


# ---------------------------------------------------------------------------------------------------------------------
# Bits


@pytest.mark.parametrize("name", zoo.CASES)
def test_every_recipe_of_the_zoo_gives_the_bytes(name: str) -> None:
    case = zoo.CASES[name]
    model = case.build(0)
    batch = case.batch(0)
    first = record(model, lambda: case.loss(model, batch), batch)
    found = recipes_of(first)
    recipes = {node: recipe for node, recipe in found.items() if isinstance(recipe, Recipe)}
    wrong = [node for node, recipe in recipes.items() if not gives_the_bytes(recipe, node, first)]
    assert not wrong, f"{len(wrong)} of {len(recipes)}: {wrong[:5]}"
    order = {storage.name: rank for rank, (storage, _) in enumerate(first.targets)}
    assert all(order[below] < order[node] for node, recipe in recipes.items() for below in recipe.nodes)
    unexplained = {node: reason for node, reason in found.items() if isinstance(reason, str)}
    assert set(unexplained.values()) <= {
        "input", "random", "mutated", "unknown producer", "uninitialised", "not a plain tensor",
        "number read from data",
    }  # fmt: skip


@pytest.mark.parametrize("name", one_of(2, [name for name, case in zoo.CASES.items() if not case.varies]))
def test_recipes_hold_for_data_that_they_were_not_written_for(name: str) -> None:
    case = zoo.CASES[name]
    model = case.build(0)
    recordings = []
    for seed in (0, 1):
        batch = case.batch(seed)
        recordings.append(record(model, lambda batch=batch: case.loss(model, batch), batch))
    first, second = recordings
    assert [storage.name for storage, _ in first.targets] == [storage.name for storage, _ in second.targets]
    recipes = {node: recipe for node, recipe in recipes_of(first).items() if isinstance(recipe, Recipe)}
    wrong = [node for node, recipe in recipes.items() if not gives_the_bytes(recipe, node, second)]
    assert not wrong, f"{len(wrong)} of {len(recipes)}: {wrong[:5]}"


def test_experts_chosen_by_data_are_not_written_into_recipes() -> None:
    case = zoo.CASES["qwen3_moe_eager"]
    model = case.build(0)
    recordings = []
    for seed in (0, 1):
        batch = case.batch(seed)
        recordings.append(record(model, lambda batch=batch: case.loss(model, batch), batch))
    found = recipes_of(recordings[0])
    kinds = {storage.name: storage.nbytes for storage, _ in recordings[1].targets}
    same = [n for n, r in found.items() if isinstance(r, Recipe) and set(r.nodes) | {n} <= set(kinds)]
    fits = [n for n in same if all(recordings[0].bits[m].shape == recordings[1].bits[m].shape for m in found[n].nodes)]
    assert len(fits) > 40
    assert all(gives_the_bytes(found[n], n, recordings[1]) for n in fits)
    assert Counter(r for r in found.values() if isinstance(r, str))["number read from data"] > 10


@pytest.mark.parametrize(
    "name", one_of(2, ["llama", "llama_autocast", "qwen3_moe", "deepseek_v3", "gpt2_dropout", "unet"])
)
def test_the_observed_profile_has_the_recipes(name: str) -> None:
    case = zoo.CASES[name]
    model = case.build(0)
    batch = case.batch(0)
    profile = observe(model, lambda: case.loss(model, batch))
    recording = record(model, lambda: case.loss(model, batch), batch)
    truth = recipes_of(recording)
    names = {node.name for node in profile.nodes}
    for node in profile.nodes:
        if node.recipe is not None:
            assert set(node.recipe.nodes) <= names
            if isinstance(truth.get(node.name), Recipe) and set(node.recipe.nodes) <= set(recording.bits):
                assert gives_the_bytes(node.recipe, node.name, recording)
    assert sum(node.recipe is not None for node in profile.sites) >= 0.8 * len(profile.sites) - 8


# ---------------------------------------------------------------------------------------------------------------------
# What recipes look like


def llama(num_layers: int = 4, tokens: int = 32) -> tuple[nn.Module, Callable[[], Tensor], Tensor]:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=num_layers, num_attention_heads=4,
        num_key_value_heads=2, attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    batch = torch.randint(0, 256, (2, tokens))
    return model, lambda: model(input_ids=batch, labels=batch).loss, batch


def test_a_llama_layer_in_bf16() -> None:
    model, loss, batch = llama()
    recording = record(model, loss, batch, catches=norms)
    found = recipes_of(recording)
    layer = "model.layers.1"
    retained_inputs = recording.retained_inputs

    copy = found[f"{layer}.input_layernorm.to"]
    assert ops_of(copy) == ["_to_copy"]
    assert copy.nodes == ("model.layers.0.add_1",) and "model.layers.0.add_1" in retained_inputs
    assert ops_of(found[f"{layer}.input_layernorm.rsqrt"]) == ["pow", "mean", "add", "rsqrt"]
    normalised = found[f"{layer}.input_layernorm.to_1"]
    assert ops_of(normalised) == ["mul", "_to_copy"]
    assert set(normalised.nodes) == {f"{layer}.input_layernorm.to", f"{layer}.input_layernorm.rsqrt"}
    output = found[f"{layer}.input_layernorm.mul_1"]
    assert ops_of(output) == ["mul"]
    assert [entry.name for entry in output.inputs] == [
        f"{layer}.input_layernorm.weight",
        f"{layer}.input_layernorm.to_1",
    ]
    assert ops_of(found[f"{layer}.mlp.act_fn.silu"]) == ["silu"]
    product = found[f"{layer}.mlp.mul"]
    assert ops_of(product) == ["mul"]
    assert set(product.nodes) == {f"{layer}.mlp.act_fn.silu", f"{layer}.mlp.up_proj.mm"}
    gate = found[f"{layer}.mlp.gate_proj.mm"]
    assert ops_of(gate) == ["mm"]
    assert gate.nodes == (f"{layer}.post_attention_layernorm.mul_1",)
    attention = found[f"{layer}.self_attn.sdpa"]
    assert ops_of(attention)[-1] == "_scaled_dot_product_flash_attention_for_cpu"
    assert len(attention.nodes) == 3
    assert found[f"{layer}.self_attn.sdpa:1"].output == 1
    residual = found[f"{layer}.add_1"]
    assert set(ops_of(residual)) == {"mm", "as_strided", "add"}
    assert set(residual.nodes) == {f"{layer}.mlp.mul", f"{layer}.add"}


def test_more_than_the_first_trial() -> None:
    model, loss, batch = llama()
    recording = record(model, loss, batch)
    found = recipes_of(recording)
    sites = [storage for storage, _ in recording.targets if storage.name not in recording.retained_inputs]
    with_recipe = [site for site in sites if isinstance(found[site.name], Recipe)]
    # The trial gave recipes of at most 8 operators to 42 of 78, with 5 retained inputs; matmul and attention never.
    assert len(with_recipe) >= len(sites) - 2
    assert max(len(found[site.name].steps) for site in with_recipe) <= 12
    cheap = [site for site in with_recipe if set(ops_of(found[site.name])) <= set(CHEAP)]
    assert len(cheap) >= 42


def cheap_bytes(recording: Recording, recipes: dict[str, Recipe | str], layer: str) -> tuple[int, int, int]:
    """Of one layer: bytes of its sites; of those with a recipe of elementwise, norm and cast operators alone (whose
    chain ends at kept sites and held retained inputs); and of the retained inputs that must be held for that."""
    targets = {storage.name: storage for storage, _ in recording.targets}
    retained = recording.retained_inputs
    sites = {name for name in targets if name not in retained and name.startswith(f"{layer}.")}
    cheap = {n for n in targets if isinstance(recipes[n], Recipe) and set(ops_of(recipes[n])) <= set(CHEAP)}
    held: set[str] = set()
    pending = [name for name in sites if name in cheap]
    for name in pending:
        for below in recipes[name].nodes:
            if below in retained and (below not in cheap or not below.startswith(f"{layer}.")):
                held.add(below)  # what another layer made is not made again for this one
            elif below in retained and below not in pending:
                pending.append(below)
    size = {name: storage.nbytes for name, storage in targets.items()}
    return sum(size[n] for n in sites), sum(size[n] for n in sites & cheap), sum(size[n] for n in held)


def test_of_a_llama_3_8b_layer_480_mib_are_cheap() -> None:
    import transformers
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    tokens, scale = 64, 4096 // 64
    config = transformers.LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8,
        attn_implementation="sdpa", rope_theta=500000.0,
    )  # fmt: skip

    class OneLayer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones((), dtype=torch.bfloat16))
            with torch.device("meta"):
                layer = LlamaDecoderLayer(config, 0).to(torch.bfloat16)
            self.layer = layer.to_empty(device="cpu")
            self.rotary = LlamaRotaryEmbedding(config)

        def forward(self, x: Tensor) -> Tensor:
            positions = torch.arange(tokens)[None]
            return self.layer(x * self.scale, position_embeddings=self.rotary(x, positions))

    model, x = OneLayer(), torch.randn(1, tokens, 4096, dtype=torch.bfloat16)
    recording = record(model, lambda: model(x).sum(), x, catches=norms)
    total, cheap, retained_inputs = cheap_bytes(recording, recipes_of(recording), "layer")
    # One of the rotary tables and what is outside of the layer are not counted here.
    assert total * scale / 2**20 == pytest.approx(786.5, rel=0.01)
    assert cheap * scale / 2**20 >= 480
    assert retained_inputs * scale / 2**20 <= 64


def test_a_node_that_is_saved_later_is_made_on_the_way() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = x + 1
        return (y * 2).exp() + y.sin()  # exp saves its output before sin saves y

    found, _ = recipes_of_simple(forward)
    assert ops_of(found["exp"]) == ["addmm", "add", "mul", "exp"]
    assert found["add"].nodes == ("input",)


def test_parameters_are_cast_anew_and_views_of_them_are_inputs() -> None:
    model, _, x = simple(lambda self, x: x.exp())

    def cast_loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).sum()

    recording = record(model, cast_loss, x, catches=nothing)
    recipe = recipes_of(recording)["exp"]
    assert {"_to_copy", "addmm", "exp"} <= set(ops_of(recipe))
    assert {entry.name for entry in recipe.inputs if entry.kind == "parameter"} == {"linear.weight", "linear.bias"}
    assert gives_the_bytes(recipe, "exp", recording)


def test_seconds_and_transient_bytes() -> None:
    _, recording = recipes_of_simple(lambda self, x: (x + 1).double().float().sin(), 32, 8)
    recipe = recipes_of(recording)["to_1"]
    assert ops_of(recipe) == ["addmm", "add", "_to_copy", "_to_copy"]
    seconds = {call.name: call.seconds for call in recording.calls}
    assert recipe.seconds == pytest.approx(sum(seconds[name] for name in ("linear.addmm", "add", "to", "to_1")))
    assert recipe.transient_bytes == 32 * 8 * (8 + 4)  # the fp64 copy, and one fp32 tensor before or after it


# ---------------------------------------------------------------------------------------------------------------------
# Writes in place


def test_a_storage_completed_in_place_has_a_recipe() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        full = torch.zeros(4, 16)
        full[:, :8].copy_(x.detach())
        full[:, 8:].copy_(x.detach().exp())
        return (torch.zeros(4, 8).add_(x).relu_() * full[:, 4:12]).exp()

    found, recording = recipes_of_simple(forward)
    assert ops_of(found["add"])[-2:] == ["add_", "relu_"] if "add" in found else True
    assert not [name for name, recipe in found.items() if isinstance(recipe, str) and name != "input"]
    assert any("copy_" in ops_of(found[storage.name]) for storage, version in recording.targets if version == 2)


def test_a_version_that_is_gone_is_not_an_input() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = x.tanh()  # saved at version 0
        z = y.detach().exp() * self.linear.weight[:4]
        y.detach().mul_(2)  # what is in the storage now is not what exp read
        return z.sin()

    found, _ = recipes_of_simple(forward)
    assert found["tanh"] == "mutated"
    assert ops_of(found["exp"]) == ["addmm", "tanh", "exp"]  # made again from before it


def test_what_is_read_after_a_write_is_made_by_the_write() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = x.sigmoid()
        with torch.no_grad():
            z = y.clone()
            a = z.exp()
            z.mul_(3).add_(a)
        return (x * z).sin()

    found, _ = recipes_of_simple(forward)
    assert ops_of(found["clone"]) == ["clone", "exp", "mul_", "add_"]


@pytest.mark.parametrize(
    ("forward", "node", "reason"),
    [
        (lambda self, x: F.dropout(x, 0.5).exp(), "empty_like", "random"),
        (lambda self, x: (x + torch.rand(8)).exp(), "exp", "random"),
        (lambda self, x: (x * self.state.add_(1)).exp(), "exp", "mutated"),
        (lambda self, x: (x + torch.tensor(3.0)).exp(), "exp", "unknown producer"),
        (lambda self, x: (x.detach() * (1 + 2j) * self.linear.bias).abs(), "mul", "argument that cannot be written"),
        (lambda self, x: (x * x.detach().sum().item()).exp(), "exp", "number read from data"),
        (lambda self, x: (x + torch.empty(8)).exp(), "exp", "uninitialised"),
        (lambda self, x: (x + torch.empty(8).mul_(2)).exp(), "exp", "uninitialised"),
    ],
)
def test_reasons(forward: Callable[..., Tensor], node: str, reason: str) -> None:
    found, _ = recipes_of_simple(forward)
    assert found[node] == reason


def test_the_batch_has_no_recipe() -> None:
    found, _ = recipes_of_simple(lambda self, x: x.exp())
    assert found["input"] == "input"


def test_downstream_of_a_dropout_the_mask_is_an_input() -> None:
    found, _ = recipes_of_simple(lambda self, x: F.dropout(x.exp(), 0.5).tanh())
    assert found["empty_like"] == "random"
    assert found["tanh"].nodes == ("exp", "empty_like")


def test_no_recipe_is_too_long() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = x
            for _ in range(MAX_STEPS):
                y = y + 1
        return x * y

    found, _ = recipes_of_simple(forward)
    assert found[f"add_{MAX_STEPS - 1}"] == "too long"


def test_a_batch_norm_runs_again_without_its_statistics() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.conv(x)).exp()

    model, x = Model(), torch.randn(2, 3, 8, 8)
    recording = record(model, lambda: model(x).sum(), x, catches=nothing)
    before = model.norm.running_mean.clone()
    recipe = recipes_of(recording)["exp"]
    assert gives_the_bytes(recipe, "exp", recording)
    assert "native_batch_norm" in ops_of(recipe)
    assert torch.equal(before, model.norm.running_mean)


def test_thousands_of_nodes_in_a_second() -> None:
    model, loss, batch = llama(num_layers=60, tokens=4)
    recording = record(model, loss, batch)
    assert len(recording.targets) > 1_200
    start = time.process_time()
    build_recipes(recording.calls, recording.targets)
    assert time.process_time() - start < 1.0
