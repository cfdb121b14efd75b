"""FSDP2 on two real ranks: observed without a trace, planned for a budget, followed by a file, and the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import two_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.functional import silu

import lowtide
from lowtide.catalog.observe import observe
from lowtide.catalog.sharded import fsdp_modules
from lowtide.errors import ConfigError

NUM_LAYERS, WIDTH, INNER, VOCABULARY = 4, 32, 96, 48
MIB = 2**20


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(NUM_LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.flatten())


def net(way: str = "layers") -> Net:
    """The model, sharded in one of several ways."""
    torch.manual_seed(0)
    model = Net().train()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if way == "mixed precision" else MixedPrecisionPolicy()
    for layer in model.layers:
        if way == "nested":
            fully_shard(layer.mlp, mesh=mesh)
        fully_shard(layer, mesh=mesh, reshard_after_forward=way != "gathered until backward", mp_policy=policy)
    if way == "no root":
        return model
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


WAYS = ("layers", "nested", "gathered until backward", "no root", "mixed precision")


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def tokens(seed: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (4, 32), generator=torch.Generator().manual_seed(seed))


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else local(p.grad).clone() for p in model.parameters()]


def step(model: nn.Module, seed: int) -> list[Tensor | None]:
    loss = model(tokens(seed))
    loss.backward()
    found = [loss.detach(), *gradients(model)]
    model.zero_grad()
    return found


def same(one: list[Tensor | None], other: list[Tensor | None]) -> bool:
    return all((a is None) == (b is None) and (a is None or torch.equal(a, b)) for a, b in zip(one, other, strict=True))


# ---------------------------------------------------------------------------------------------------------------------
# What runs on each of two ranks. Seeds differ between ranks, so gradients are really exchanged.


def trains_within(rank: int, way: str, shares: tuple[float, ...]) -> list[dict[str, Any]]:
    truth = [step(model, 10 * rank + seed) for model in [net(way)] for seed in range(3)]
    with lowtide.optimize(net(way), budget="1GiB", memory={"min_bytes": 1}, engine="virtual:0") as tide:
        step(tide.model, rank)
        predicted = tide.plan.predicted
        floor, plain = tide.profile.state.parameters, predicted.plain_peak_bytes
    found = []
    for share in shares:
        model = net(way)
        budget = int(floor + share * (plain - floor))
        with lowtide.optimize(model, budget=budget, memory={"min_bytes": 1}, engine="virtual:0") as tide:
            bits = [same(step(model, 10 * rank + seed), expected) for seed, expected in enumerate(truth)]
            stats, digest, predicted = tide.stats, tide.plan.digest(), tide.plan.predicted
            with tide.tide.audit() as audit:
                step(model, 10 * rank)
            made = sorted(s.name for s in tide.plan.sites if s.recipe and any(e.kind == "parameter" for e in s.recipe.inputs))
        found.append(
            {
                "bits": bits,
                "budget": budget,
                "digest": digest,
                "predicted": predicted.peak_bytes,
                "audit": audit.peak_bytes,
                "moved": stats.swapped_bytes,
                "made again": stats.recomputed_bytes,
                "made from parameters": made,
                "misses": (stats.num_divergences, stats.num_unplanned),
            }
        )
    return found


def without_swap(rank: int, way: str) -> dict[str, Any]:
    truth = [step(model, 10 * rank + seed) for model in [net(way)] for seed in range(3)]
    model = net(way)
    rules = {"min_bytes": 1, "swap": "none"}
    with lowtide.optimize(model, budget="1GiB", memory=rules, engine="virtual:0") as tide:
        step(model, rank)
        profile, plain = tide.profile, tide.plan.predicted.plain_peak_bytes
    budget = plain
    while True:  # as little as recipes alone can do
        model = net(way)
        try:
            with lowtide.optimize(model, budget=budget, memory=rules, engine="virtual:0") as tide:
                bits = [same(step(model, 10 * rank + seed), expected) for seed, expected in enumerate(truth)]
                stats = tide.stats
                made = sorted(
                    s.name for s in tide.plan.sites if s.recipe and any(e.kind == "parameter" for e in s.recipe.inputs)
                )
                last = {"bits": bits, "made": made, "misses": (stats.num_divergences, stats.num_unplanned)}
        except lowtide.BudgetError as error:
            budget = budget if error.floor_bytes < budget else error.floor_bytes
            if budget == plain:
                raise
            continue
        if budget < plain:
            return {**last, "refused": sorted(n.name for n in profile.nodes if "sharded" in n.why_no_recipe)}
        budget = 1000


JOBS: list[two_ranks.Job] = [
    *(("trains_within", {"way": way, "shares": (0.9, 0.75, 0.6)}) for way in WAYS),
    ("without_swap", {"way": "layers"}),
]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Any]]:
    given = two_ranks.run(__name__, JOBS, tmp_path_factory.mktemp("ranks"), seconds=300)
    return {f"{name} {arguments.get('way', '')}".strip(): both for (name, arguments), both in zip(JOBS, given)}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_budget_is_kept_with_the_same_bits(answers: dict, way: str) -> None:
    for first, second in zip(*answers[f"trains_within {way}"], strict=True):
        for found in (first, second):
            assert found["bits"] == [True, True, True]
            assert found["misses"] == (0, 0)
            assert found["moved"] + found["made again"] > 0
            assert found["audit"] == found["predicted"] <= found["budget"]
        assert first["digest"] == second["digest"]
