"""Recipes in the sizes of each forward pass: the same bits in batches of any length, or the tensor stays."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from lowtide.core.profile import Profile
from lowtide.runtime.session.tide import Tide
from tests.support.solved import random_plan
from tests.support.virtual_engine import virtual

WIDTH = 8


class Layer(nn.Module):
    """Made of a function of itself and the rows."""

    def __init__(self, body: Callable[[Layer, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("table", torch.randn(64, WIDTH))
        self.body = body
        self.number = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, self.linear(x))


class Net(nn.Module):
    def __init__(self, body: Callable[[Layer, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(body), Layer(body)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return (x * x).sum()


def mean_by_hand(layer: Layer, x: Tensor) -> Tensor:
    return torch.exp((x.sum(1, keepdim=True) / x.shape[1]).tanh()) * x


def positions(layer: Layer, x: Tensor) -> Tensor:
    angles = torch.arange(x.shape[1]).float()[None, :, None] * 0.1
    return torch.sin(angles.cos() * x)


def rows_of_a_table(layer: Layer, x: Tensor) -> Tensor:
    return torch.sin(layer.table[: x.shape[1]].tanh() * x).exp()


def last_half(layer: Layer, x: Tensor) -> Tensor:
    first, second = x[:, : x.shape[1] // 2], x[:, x.shape[1] // 2 :]
    return torch.cat([torch.sin(second), torch.exp(first.tanh())], 1).tanh()


def heads(layer: Layer, x: Tensor) -> Tensor:
    # As many heads as rows in the observed step, and as wide as long: 4 is a batch, a head and its width.
    split = x.view(x.shape[0], x.shape[1], 4, 2).transpose(1, 2).tanh()
    scores = torch.softmax(split @ split.transpose(2, 3) / x.shape[1] ** 0.5, -1)
    return torch.sin((scores @ split).transpose(1, 2).reshape(x.shape)).exp()


def written_in_place(layer: Layer, x: Tensor) -> Tensor:
    made = torch.zeros(x.shape[0], x.shape[1], WIDTH)
    made[:, : x.shape[1] // 2] = x[:, : x.shape[1] // 2].tanh()
    made.add_(x.sin())
    return torch.sin(made).exp()


def shorter_twice(layer: Layer, x: Tensor) -> Tensor:
    # One input of a recipe in two shapes that are equal in the observed step only.
    both = x[:, : min(4, x.shape[1])], x[:, : x.shape[1]]
    return torch.exp(both[0].sum(1, keepdim=True) * both[1].tanh())


def padded(layer: Layer, x: Tensor) -> Tensor:
    return F.pad(x.tanh(), (0, 0, 1, x.shape[1] % 3))[:, 1 : 1 + x.shape[1]].exp().sin()


def two_halves_of_one(layer: Layer, x: Tensor) -> Tensor:
    made, half = x + 1, x.shape[1] // 2
    return torch.exp(torch.cat([made[:, half:], made[:, :half] * 0.5], 1).tanh())


BODIES = [
    mean_by_hand, positions, rows_of_a_table, last_half, heads, written_in_place, shorter_twice, padded,
    two_halves_of_one,
]  # fmt: skip


def gradients(model: nn.Module, *args: Any, **kwargs: Any) -> list[Tensor | None]:
    torch.manual_seed(3)
    out = model(*args, **kwargs)
    loss = out if isinstance(out, Tensor) else out.loss
    return list(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True))


def is_as_plain(tide: Tide, *args: Any, **kwargs: Any) -> bool:
    want = gradients(copy.deepcopy(tide.model), *args, **kwargs)
    tide.reset_stats()
    got = gradients(tide.model, *args, **kwargs)
    return all(g is w or (g is not None and torch.equal(g, w)) for g, w in zip(got, want, strict=True))


def recipe_bytes(profile: Profile) -> int:
    return sum(site.nbytes for site in profile.sites if site.recipe is not None)


@pytest.mark.parametrize("body", BODIES)
def test_every_size_has_the_bits_of_plain(body: Callable[[Layer, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model = Net(body)
    profile = lowtide.observe(model, (torch.randn(4, 4, WIDTH),))
    free = profile.without_sizes()
    assert recipe_bytes(free) == recipe_bytes(profile)
    with lowtide.apply(model, random_plan(free, 0, made=1.0, swapped=0.0), engine=virtual(0)) as tide:
        for size in ((4, 4), (4, 3), (2, 4), (3, 2), (4, 9), (6, 6), (2, 7), (4, 4)):
            assert is_as_plain(tide, torch.randn(*size, WIDTH)), size
            assert not tide.failed_recipes, size
            assert tide.stats.num_divergences == 0
            assert tide.stats.recomputed_bytes > 0


def test_a_number_is_followed_in_another_size_and_refused_in_the_same() -> None:
    def body(layer: Layer, x: Tensor) -> Tensor:
        return torch.exp((x * layer.number).tanh())

    torch.manual_seed(0)
    model = Net(body)
    profile = lowtide.observe(model, (torch.randn(4, 4, WIDTH),))
    plan = random_plan(profile, 0, made=1.0, swapped=0.0)
    with lowtide.apply(model, plan, engine=virtual(0)) as tide:
        assert is_as_plain(tide, torch.randn(4, 4, WIDTH))
        model.layers[0].number = 0.5
        assert is_as_plain(tide, torch.randn(4, 3, WIDTH))
        assert not tide.failed_recipes
        assert is_as_plain(tide, torch.randn(4, 4, WIDTH))
        assert tide.failed_recipes == {"layers.0.tanh": "aten.mul.Tensor got 0.5 in place of 1.0"}


def test_other_operators_in_another_size_are_refused_by_name_and_stay() -> None:
    def body(layer: Layer, x: Tensor) -> Tensor:
        return torch.exp(torch.tanh(x + 1 if x.shape[1] > 3 else x - 1))

    torch.manual_seed(0)
    model = Net(body)
    profile = lowtide.observe(model, (torch.randn(4, 4, WIDTH),))
    with lowtide.apply(model, random_plan(profile, 0, made=1.0, swapped=0.0), engine=virtual(0)) as tide:
        for length in (4, 5, 3, 4, 2):
            assert is_as_plain(tide, torch.randn(4, length, WIDTH)), length
        words = "aten.tanh.default started from what another operator than aten.add.Tensor made"
        assert tide.failed_recipes == {"layers.0.tanh": words, "layers.1.tanh": words}


def test_two_operators_in_the_place_of_one_are_refused_in_another_size() -> None:
    def body(layer: Layer, x: Tensor) -> Tensor:
        once = x + 1
        again = once if x.shape[1] == 4 else x + 2
        return torch.exp((once + again).tanh())

    torch.manual_seed(0)
    model = Net(body)
    profile = lowtide.observe(model, (torch.randn(4, 4, WIDTH),))
    with lowtide.apply(model, random_plan(profile, 0, made=1.0, swapped=0.0), engine=virtual(0)) as tide:
        for length in (4, 3, 4):
            assert is_as_plain(tide, torch.randn(4, length, WIDTH)), length
        words = "aten.add.Tensor read the result of another aten.add.Tensor than the recipe"
        assert tide.failed_recipes == {"layers.0.tanh": words, "layers.1.tanh": words}


def test_another_weight_in_another_size_is_refused() -> None:
    def body(layer: Layer, x: Tensor) -> Tensor:
        other = layer.table if x.shape[1] == 4 else layer.table.flip(0)
        return torch.exp(other[: x.shape[1]].tanh() * x)

    torch.manual_seed(0)
    model = Net(body)
    profile = lowtide.observe(model, (torch.randn(4, 4, WIDTH),))
    with lowtide.apply(model, random_plan(profile, 0, made=1.0, swapped=0.0), engine=virtual(0)) as tide:
        for length in (4, 3, 4):
            assert is_as_plain(tide, torch.randn(4, length, WIDTH)), length
        assert tide.failed_recipes


def _models() -> dict[str, Callable[[], nn.Module]]:
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    same: dict[str, Any] = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    same |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    gpt2 = {"vocab_size": 128, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 0}
    return {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**same)),
        "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**gpt2, eos_token_id=0)),
        "qwen3_moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**same, **experts)),
    }


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3_moe"])
def test_plans_that_serve_smaller_batches_lose_no_recipe(name: str) -> None:
    torch.manual_seed(0)
    model = _models()[name]()

    def batch(rows: int, length: int) -> dict[str, Any]:
        ids = torch.randint(128, (rows, length))
        return {"input_ids": ids, "labels": ids, "use_cache": False}

    profile = lowtide.observe(model, batch(4, 48))
    free = profile.without_sizes()
    assert recipe_bytes(free) == recipe_bytes(profile)
    draw = random.Random(0)
    with lowtide.apply(model, random_plan(free, 0, made=1.0, swapped=0.0), engine=virtual(0)) as tide:
        for _ in range(6):
            size = draw.randint(2, 4), draw.randint(2, 48)
            assert is_as_plain(tide, **batch(*size)), size
            assert not tide.failed_recipes, size
            assert tide.stats.num_divergences == 0
