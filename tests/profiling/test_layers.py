"""Which modules are layers."""

from __future__ import annotations

import pytest
from torch import nn

from lowtide.errors import ConfigError
from lowtide.profiling.layers import find_layers, named_layers
from tests.support import zoo


def test_the_layers_of_transformers_models_are_found() -> None:
    assert find_layers(zoo.CASES["llama"].build(0)) == ("model.layers.0", "model.layers.1")
    assert find_layers(zoo.CASES["gpt2_dropout"].build(0)) == ("transformer.h.0", "transformer.h.1")
    names = find_layers(zoo.CASES["t5"].build(0))
    assert names == ("encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1")


@pytest.mark.parametrize("case", zoo.CASES.values(), ids=zoo.CASES.keys())
def test_every_case_has_the_layers_it_names(case: zoo.Case) -> None:
    assert find_layers(case.build(0)) == tuple(case.layers)


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
