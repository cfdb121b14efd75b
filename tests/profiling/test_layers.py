"""Which modules are layers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import ConfigError
from lowtide.profiling.layers import find_layers, named_layers
from tests.support import zoo


def test_the_layers_of_transformers_models_are_found() -> None:
    assert find_layers(zoo.CASES["llama"].build(0)) == ("model.layers.0", "model.layers.1")
    assert find_layers(zoo.CASES["gpt2_dropout"].build(0)) == ("transformer.h.0", "transformer.h.1")
    names = find_layers(zoo.CASES["t5"].build(0))
    assert names == ("encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1")


def test_the_outermost_list_wins() -> None:
    expert = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    block = nn.Module()
    block.experts = nn.ModuleList([expert, expert])
    model = nn.Module()
    model.blocks = nn.ModuleList([block, nn.TransformerEncoderLayer(4, 1), nn.TransformerEncoderLayer(4, 1)])
    assert find_layers(model) == ("blocks.0", "blocks.1", "blocks.2")


def test_a_single_block_in_a_list_is_a_layer_and_a_pair_of_different_ones_is_not() -> None:
    one = nn.Module()
    one.layers = nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.ReLU())])
    assert find_layers(one) == ("layers.0",)
    assert find_layers(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.LayerNorm(2))) == ()


def test_layers_that_the_user_names_are_checked() -> None:
    model = zoo.CASES["llama"].build(0)
    assert named_layers(model, ["model.layers.0.mlp"]) == ("model.layers.0.mlp",)
    with pytest.raises(ConfigError) as unknown:
        named_layers(model, ["model.layer.0"])
    assert str(unknown.value) == (
        "memory.layers: 'model.layer.0' is no module of this model; did you mean 'model.layers.0'?"
    )
    with pytest.raises(ConfigError) as nested:
        named_layers(model, ["model.layers.0", "model.layers.0.mlp"])
    assert str(nested.value) == (
        "memory.layers: 'model.layers.0.mlp' lies inside 'model.layers.0'; a layer cannot contain another"
    )


def test_a_dictionary_of_numbers_is_a_list() -> None:
    stage = nn.Module()
    stage.layers = nn.ModuleDict({str(index): nn.Linear(2, 2) for index in (2, 3)})
    assert find_layers(stage) == ("layers.2", "layers.3")
    stage.layers = nn.ModuleDict({"3": nn.Linear(2, 2)})
    assert find_layers(stage) == ("layers.3",)
    stage.layers = nn.ModuleDict({"encoder": nn.Linear(2, 2), "decoder": nn.Linear(2, 2)})
    assert find_layers(stage) == ()


def test_a_layer_in_two_lists_has_one_name() -> None:
    """The name that torch gives it; a plan on the model has that one, and the other list is called through it."""
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
    model.blocks = nn.ModuleList([model.layers[0], nn.Sequential(nn.Linear(4, 4), nn.Tanh())])
    assert find_layers(model) == ("layers.0", "layers.1", "layers.2", "blocks.1")
    model.forward = lambda x: model.blocks[0](model.blocks[1](x))
    with lowtide.apply(model, {"recompute": "all"}) as tide:
        model(torch.ones(2, 4, requires_grad=True)).sum().backward()
    assert tide.stats.recomputed_bytes > 0
