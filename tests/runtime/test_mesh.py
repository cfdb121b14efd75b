"""Four real ranks: tensor parallelism x FSDP2, and hybrid sharding, under budgets and rules, with the same bits."""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import lowtide
from lowtide.errors import ConfigError
from tests.support import tensor_parallel_llama, two_ranks
from tests.support.recording import Collectives
from tests.support.virtual_engine import virtual

NUM_LAYERS, WIDTH, INNER, VOCABULARY = 3, 33, 64, 49
"""Neither the width nor the vocabulary divides by two."""
SLACK = (2 * WIDTH * INNER + 3 * WIDTH + INNER) * 4
"""A layer that was gathered: a worker thread of gloo may let go of it a little late."""
QUIET: dict[str, Any] = {"min_bytes": 1}


_OWN = ("allgather_",)
"""What lowtide asks other ranks by."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.act_fn = nn.LayerNorm(WIDTH), nn.GELU()
        self.up_proj, self.down_proj = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down_proj(self.act_fn(self.up_proj(self.norm(x))))


class Net(nn.Module):
    """Biases, tied words, a frozen matrix, shards of unequal size, sums that every rank has the whole of."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(NUM_LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.layers[1].up_proj.weight.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.flatten())


@functools.cache
def mesh(name: str) -> Any:
    names = ("dp", "tp") if name == "2-D" else ("replicate", "shard")
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=names)


def build(kind: str, way: str) -> nn.Module:
    """This rank's part of a model."""
    torch.manual_seed(0)
    over = mesh("hybrid")
    if way != "hybrid":
        tp, over = mesh("2-D")["tp"], mesh("2-D")["dp"]
    if kind == "net":
        model: nn.Module = Net().train()
        for layer in model.layers if way != "hybrid" else ():
            parallelize_module(layer, tp, {"up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()})
        layers = model.layers
    else:
        model = tensor_parallel_llama.build(tp, num_layers=NUM_LAYERS)
        layers = model.model.layers
    for layer in layers:
        if way == "2-D, nested":
            fully_shard(layer.down_proj, mesh=over)
        fully_shard(layer, mesh=over)
    fully_shard(model, mesh=over)
    return model


def reader(rank: int, way: str) -> int:
    """Ranks that share products read the same text."""
    return rank if way == "hybrid" else rank // 2


def tokens(seed: int, length: int = 16) -> Tensor:
    return torch.randint(0, 32, (2, length), generator=torch.Generator().manual_seed(seed))


def loss_of(model: nn.Module, words: Tensor) -> Tensor:
    if isinstance(model, Net):
        return model(words)
    # The model would count positions by its share of the sequence.
    return model(input_ids=words, labels=words, position_ids=torch.arange(words.shape[1])[None]).loss


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else local(p.grad).clone() for p in model.parameters()]


def step(model: nn.Module, words: Tensor) -> list[Tensor | None]:
    loss = loss_of(model, words)
    loss.backward()
    found = [local(loss.detach()).clone(), *gradients(model)]
    model.zero_grad()
    return found


def same(one: list[Tensor | None], other: list[Tensor | None]) -> bool:
    return all((a is None) == (b is None) and (a is None or torch.equal(a, b)) for a, b in zip(one, other, strict=True))


# ---------------------------------------------------------------------------------------------------------------------
# What runs on each of the four ranks


@functools.cache
def truth(kind: str, way: str, rank: int) -> tuple[list[list[Tensor | None]], Counter[str]]:
    """Three steps without lowtide, and the collectives of one."""
    model, found = build(kind, way), []
    for seed in range(3):
        with Collectives(_OWN) as seen:
            found.append(step(model, tokens(10 * reader(rank, way) + seed)))
    return found, seen.counts


def within(rank: int, kind: str, way: str, memory: dict[str, Any], budgets: list[int]) -> list[dict[str, Any]]:
    """`optimize` at these budgets."""
    found = []
    for budget in budgets:
        model = build(kind, way)
        with lowtide.optimize(model, budget=budget, memory={**QUIET, **memory}, engine=virtual(3)) as tide:
            steps = []
            for seed in range(3):
                with Collectives(_OWN) as seen:
                    steps.append(step(model, tokens(10 * reader(rank, way) + seed)))
            with tide.tide.audit() as audit:
                step(model, tokens(10 * reader(rank, way)))
            stats, plan = tide.stats, tide.plan
            # Not before: DTensor has not met this model's operators yet, and asks what they would give.
            plain, counts = truth(kind, way, rank)
            recipe = next((n.recipe for n in tide.profile.nodes if n.name == "model.layers.1.add"), None)
            found.append(
                {
                    "bits": list(map(same, steps, plain)),
                    "peaks": (audit.peak_bytes, plan.predicted.peak_bytes, budget),
                    "digest": plan.digest(),
                    "moved": stats.swapped_bytes > 0 or stats.recomputed_bytes > 0,
                    "misses": (stats.num_divergences, stats.num_unknown, stats.num_spills),
                    "more": dict(seen.counts - counts) | dict(counts - seen.counts),
                    "why": [event.why for event in tide.events],
                    "residual": [entry.name for entry in recipe.inputs] if recipe else [],
                }
            )
    return found


def follows(rank: int, way: str, rules: dict[str, Any]) -> dict[str, Any]:
    """`apply` with rules, on two micro-batches a step."""
    model, plain = build("net", way), build("net", way)
    bits, seen, counts = [], Collectives(_OWN), Collectives(_OWN)
    with lowtide.apply(model, {"min_bytes": 1, **rules}, engine=virtual(3)) as tide:
        for seed in range(2):
            for micro_batch in range(2):
                words = tokens(100 * reader(rank, way) + 10 * seed + micro_batch)
                with counts:
                    loss_of(plain, words).backward()
                with seen:
                    loss_of(model, words).backward()
            bits.append(same(gradients(model), gradients(plain)))
            for one in (model, plain):
                one.zero_grad()
        stats = tide.stats
    again = {name: number / 4 for name, number in (seen.counts - counts.counts).items()}
    return {"bits": bits, "again": again, "fewer": dict(counts.counts - seen.counts), "misses": stats.num_divergences}


def by_a_file(rank: int) -> str:
    with pytest.raises(ConfigError) as error:
        lowtide.apply(build("net", "2-D"), {"recompute_config": {"recompute": [1]}})
    return str(error.value)


def steps_in_backward(rank: int) -> dict[str, Any]:
    """Each parameter is stepped as soon as its gradient is there, which the observed step must not do."""
    models, calls = [build("net", "2-D") for _ in range(2)], [[], []]

    def hook(calls: list[int], number: int, parameter: Tensor) -> None:
        calls.append(number)
        with torch.no_grad():
            parameter.add_(parameter.grad, alpha=-0.1)
        parameter.grad = None

    for model, called in zip(models, calls, strict=True):
        for number, parameter in enumerate(p for p in model.parameters() if p.requires_grad):
            parameter.register_post_accumulate_grad_hook(functools.partial(hook, called, number))
    losses: list[list[Tensor]] = [[], []]
    with lowtide.optimize(models[1], budget=NET_BUDGET, memory=QUIET, engine=virtual(3)) as tide:
        for seed in range(3):
            for model, said in zip(models, losses, strict=True):
                loss = loss_of(model, tokens(10 * reader(rank, "2-D") + seed))
                loss.backward()
                said.append(loss.detach())
        moved = tide.stats.swapped_bytes + tide.stats.recomputed_bytes
    after = [[local(p.detach()) for p in model.parameters()] for model in models]
    return {"bits": same(*losses) and same(*after), "calls": calls[0] == calls[1] and len(calls[0]), "moved": moved}


def longer_on_one(rank: int) -> dict[str, Any]:
    """The ranks of one reader get a longer text, in the third step."""
    model, plain, bits = build("net", "2-D"), build("net", "2-D"), []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with lowtide.optimize(model, budget=NET_BUDGET, memory=QUIET, engine=virtual(3)):
            for seed in range(4):
                words = tokens(
                    10 * reader(rank, "2-D") + seed, length=24 if (seed, reader(rank, "2-D")) == (2, 1) else 16
                )
                bits.append(same(step(model, words), step(plain, words)))
    return {"bits": bits, "warned": any("on this rank alone" in str(one.message) for one in said)}


NET_BUDGET, HYBRID_BUDGET = 90_500, 144_700
RULES = {"recompute": ["layers.0", "layers.1.act_fn"], "swap": ["layers.2"]}
LLAMA: two_ranks.Job = (
    "within",
    {"kind": "llama", "way": "2-D", "memory": {"swap": "none"}, "budgets": [180_000]},
)
JOBS: dict[str, two_ranks.Job] = {
    "net": ("within", {"kind": "net", "way": "2-D", "memory": {}, "budgets": [NET_BUDGET]}),
    "hybrid": ("within", {"kind": "net", "way": "hybrid", "memory": {}, "budgets": [HYBRID_BUDGET]}),
    "rules": ("follows", {"way": "2-D, nested", "rules": RULES}),
    "by a file": ("by_a_file", {}),
    "steps in backward": ("steps_in_backward", {}),
    "longer on one": ("longer_on_one", {}),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, ...]]:
    jobs = [*JOBS.values()]
    found = two_ranks.run(__name__, jobs, tmp_path_factory.mktemp("ranks"), seconds=300, num_ranks=4)
    return dict(zip(JOBS, found, strict=True))


@pytest.mark.parametrize("name", ["net", "hybrid"])
def test_a_budget_is_kept_with_the_same_bits(answers: dict[str, tuple[Any, ...]], name: str) -> None:
    assert_kept(answers[name])


def assert_kept(answer: tuple[Any, ...]) -> None:
    for ranks in zip(*answer, strict=True):
        assert len({found["digest"] for found in ranks}) == 1
        for found in ranks:
            counted, predicted, budget = found["peaks"]
            assert found["bits"] == [True, True, True]
            assert predicted <= budget
            assert counted <= predicted + SLACK
            assert found["moved"]
            assert found["misses"] == (0, 0, 0)
            assert found["more"] == {}
            assert found["why"] == ["first step"]


@pytest.mark.extended
def test_recipes_start_from_what_tensor_parallel_ranks_have_summed(tmp_path: Path) -> None:
    """A Llama; on two ranks that share products alone: recompute/test_collectives.py."""
    (answer,) = two_ranks.run(__name__, [LLAMA], tmp_path, seconds=300, num_ranks=4)
    assert_kept(answer)
    for (found,) in answer:
        assert found["residual"] == ["model.layers.0.add_1", "model.layers.1.self_attn.o_proj.reduce_scatter_tensor"]


def test_rules(answers: dict[str, tuple[Any, ...]]) -> None:
    for found in answers["rules"]:
        # Nothing in a layer reads the sum at its end, so a second run stops before it, but for the first one.
        once = {"all_reduce": 0.25}
        assert found == {"bits": [True, True], "again": once, "fewer": {}, "misses": 0}


def test_files_are_refused(answers: dict[str, tuple[Any, ...]]) -> None:
    text = (
        "lowtide.apply: recompute_config and swap_config are not covered for a model that both FSDP2 and tensor "
        "parallelism cut; use rules (the section 'memory')"
    )
    assert answers["by a file"] == (text,) * 4


def test_the_observed_step_steps_no_parameter(answers: dict[str, tuple[Any, ...]]) -> None:
    for found in answers["steps in backward"]:
        assert found["bits"]
        assert found["calls"] == 3 * 20
        assert found["moved"] > 0


def test_a_longer_batch_on_some_ranks_changes_no_bit_and_hangs_nobody(answers: dict[str, tuple[Any, ...]]) -> None:
    assert [found["bits"] for found in answers["longer on one"]] == [[True] * 4] * 4
    assert [found["warned"] for found in answers["longer on one"]] == [False, False, True, True]
