"""Line 1 of the runtime's contract, tried on the whole zoo: lowtide changes no bit of what a step computes.

Three steps each, two micro-batches a step: the first is the observed one, the later ones run on the plan. Compared
are losses, gradients, buffers, parameters, optimizer state and random state, all as bytes.
"""

from __future__ import annotations

import copy
from pathlib import Path
from random import Random

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import lowtide
from tests.support import two_ranks, zoo
from tests.support.grid import in_turn, one_of
from tests.support.virtual_engine import virtual

SWAP = {"swap": "all", "min_bytes": 0}
RECOMPUTE = {"recompute": "all", "min_bytes": 0}
SEED = 3


def _plans(case: zoo.Case) -> dict[str, dict]:
    return {"swap": SWAP, "recompute": RECOMPUTE, **{f"mixed{i}": dict(p) for i, p in enumerate(case.mixed_plans)}}


def _is_more(number: int, case: zoo.Case, kind: str) -> bool:
    """Of several mixed plans every other one, in turn, and beside a mixed plan one of the two others, in turn; the rest
    is `make test-extended`'s."""
    if not kind.startswith("mixed"):
        return bool(case.mixed_plans) and (kind == "swap") == (number % 2 == 0)
    return len(case.mixed_plans) > 1 and (int(kind.removeprefix("mixed")) + number) % 2 == 1


PAIRS = [
    pytest.param(
        case, kind, plan, id=f"{case.name}-{kind}", marks=[pytest.mark.extended] if _is_more(number, case, kind) else []
    )
    for number, case in enumerate(zoo.CASES.values())
    for kind, plan in _plans(case).items()
]
every_plan = pytest.mark.parametrize(("case", "kind", "plan"), PAIRS)


@every_plan
def test_three_steps_on_the_virtual_engine_are_the_same_to_the_bit(case: zoo.Case, kind: str, plan: dict) -> None:
    truth = zoo.plain_result(case.name, SEED, num_steps=3, accumulate=2)
    result, stats = zoo.lowtide_step(case, SEED, plan, engine=virtual(SEED), num_steps=3, accumulate=2)
    zoo.assert_same(result, truth)
    assert stats.saved_bytes == stats.kept_bytes + stats.swapped_bytes + stats.recomputed_bytes
    # A run in which nothing was swapped or recomputed would be equal to the bit and prove nothing.
    if kind == "swap":
        assert stats.swapped_bytes > 0
        assert stats.recomputed_bytes == 0
    if kind == "recompute":
        # The layers of one are bare linears, which save nothing but their input; those of the other recompute already.
        assert stats.recomputed_bytes > 0 or case.name in ("mlp", "llama_checkpointed")
        assert stats.swapped_bytes == 0


@pytest.mark.parametrize("name", ["llama_bf16", "unet", "gpt2_dropout"])
@pytest.mark.parametrize("plan", [SWAP, {**RECOMPUTE, "swap": "all"}], ids=["swap", "both"])
def test_three_steps_on_the_host_engine_are_the_same_to_the_bit(name: str, plan: dict, tmp_path: Path) -> None:
    truth = zoo.plain_result(name, SEED, num_steps=3, accumulate=2)
    plan = {**plan, "disk_path": str(tmp_path)}
    result, stats = zoo.lowtide_step(zoo.CASES[name], SEED, plan, engine="host", num_steps=3, accumulate=2)
    zoo.assert_same(result, truth)
    assert stats.swapped_bytes > 0
    assert list(tmp_path.iterdir()) == []


def _leaves(case: zoo.Case) -> list[str]:
    return [name for name, module in case.build(SEED).named_modules() if name and not list(module.children())]


@pytest.mark.parametrize(("case", "swap"), in_turn(4, zoo.CASES.values(), ["none", "all"]))
def test_recomputing_every_module_without_children_is_the_same_to_the_bit(case: zoo.Case, swap: str) -> None:
    """Activations, norms and dropouts drop their outputs; linears and convolutions drop nothing, and must not mind."""
    truth = zoo.plain_result(case.name, SEED, num_steps=2, accumulate=2)
    # Every leaf in half of the cases; in the others every other one beside what is swapped, the first or the second.
    leaves = _leaves(case)
    chosen = leaves if swap == "none" else leaves[list(zoo.CASES).index(case.name) % 2 :: 2] or leaves
    plan = {"recompute": chosen, "swap": swap, "min_bytes": 0}
    result, _ = zoo.lowtide_step(case, SEED, plan, engine=virtual(2), num_steps=2, accumulate=2)
    zoo.assert_same(result, truth)


def _random_plan(case: zoo.Case, random: Random) -> dict:
    """Any fates for any modules, nested ones included; what contradicts itself is decided by precedence."""
    names = [name for name, _ in case.build(SEED).named_modules() if name]
    some = {fate: random.sample(names, min(len(names), random.choice((0, 1, 2, 5)))) for fate in ("recompute", "keep")}
    swap = [
        {
            "match": random.choice((*names, "*")),
            "prefetch": random.choice((0, 1, 3)),
            "tier": random.choice(("host", "disk")),
        }
        for _ in range(random.choice((0, 1, 4)))
    ]
    return {"swap": swap, **some, "min_bytes": random.choice((0, 0, 600, 2000))}


@pytest.mark.slow
@pytest.mark.parametrize("case", one_of(2, zoo.CASES.values()))
@pytest.mark.parametrize(
    "numbers", [range(1), pytest.param(range(1, 20), marks=pytest.mark.extended)], ids=["", "more"]
)
def test_random_plans_are_the_same_to_the_bit(case: zoo.Case, numbers: range) -> None:
    truth = zoo.plain_result(case.name, SEED, num_steps=2, accumulate=2)
    for number in numbers:
        plan = _random_plan(case, Random(f"{case.name}{number}"))
        try:
            result, _ = zoo.lowtide_step(case, SEED, plan, engine=virtual(number), num_steps=2, accumulate=2)
            zoo.assert_same(result, truth)
        except Exception as error:
            error.add_note(f"number {number}: {plan}")
            raise


@pytest.mark.parametrize("case", one_of(2, zoo.CASES.values()))
def test_after_remove_the_model_is_plain_again(case: zoo.Case) -> None:
    model, twin = case.build(SEED), case.build(SEED)
    optimizer, twin_optimizer = zoo.make_optimizer(model), zoo.make_optimizer(twin)
    before = zoo.footprint(model)
    values = {key: value.clone() for key, value in model.state_dict().items()}
    tide = lowtide.apply(model, SWAP, optimizer=optimizer, engine=virtual(0))
    assert list(model.state_dict()) == list(values)
    tide.remove()
    tide.remove()  # twice is harmless
    assert zoo.footprint(model) == before
    assert all(zoo.same_bits(value, values[key]) for key, value in model.state_dict().items())
    with lowtide.apply(model, SWAP, optimizer=optimizer, engine=virtual(0)):
        zoo.train(case, model, optimizer, SEED)
        zoo.train(case, twin, twin_optimizer, SEED)
    assert zoo.footprint(model) == zoo.plain_footprint(case.name)
    result = zoo.train(case, model, optimizer, SEED + 1, num_steps=2)
    zoo.assert_same(result, zoo.train(case, twin, twin_optimizer, SEED + 1, num_steps=2))


@pytest.mark.parametrize("name", ["llama", "gpt2_dropout", "unet", "shared_layer"])
def test_accumulating_more_micro_batches_than_were_observed(name: str) -> None:
    truth = zoo.plain_result(name, SEED, num_steps=2, accumulate=5)
    plan = zoo.CASES[name].mixed_plans[0]
    result, _ = zoo.lowtide_step(zoo.CASES[name], SEED, plan, engine=virtual(7), num_steps=2, accumulate=5)
    zoo.assert_same(result, truth)


@pytest.mark.parametrize("name", ["llama", "mlp"])
def test_applying_again_after_remove_and_another_plan(name: str) -> None:
    case = zoo.CASES[name]
    model, twin = case.build(SEED), case.build(SEED)
    optimizer, twin_optimizer = zoo.make_optimizer(model), zoo.make_optimizer(twin)
    for round_, plan in enumerate((SWAP, RECOMPUTE, *case.mixed_plans)):
        with lowtide.apply(model, plan, optimizer=optimizer, engine=virtual(round_)):
            result = zoo.train(case, model, optimizer, round_, num_steps=2)
        zoo.assert_same(result, zoo.train(case, twin, twin_optimizer, round_, num_steps=2))


@pytest.mark.parametrize("name", ["llama", "gpt2_dropout", "tied"])
def test_eval_under_no_grad_between_steps(name: str) -> None:
    case = zoo.CASES[name]
    model, twin = case.build(SEED), case.build(SEED)
    optimizer, twin_optimizer = zoo.make_optimizer(model), zoo.make_optimizer(twin)
    with lowtide.apply(model, case.mixed_plans[0], optimizer=optimizer, engine=virtual(5)):
        for round_ in range(2):
            result = zoo.train(case, model, optimizer, round_, num_steps=2)
            zoo.assert_same(result, zoo.train(case, twin, twin_optimizer, round_, num_steps=2))
            losses = []
            for tried in (model, twin):
                tried.eval()
                with torch.no_grad():
                    losses.append(case.loss(tried, case.batch(99)))
                tried.train()
            assert zoo.same_bits(*losses)


def test_a_deep_copy_and_a_state_dict_made_meanwhile_are_plain(tmp_path: Path) -> None:
    case = zoo.CASES["mlp"]
    model = case.build(SEED)
    with lowtide.apply(model, SWAP, engine=virtual(0)):
        case.loss(model, case.batch(0)).backward()
        torch.save(model.state_dict(), tmp_path / "weights.pt")
    fresh = case.build(SEED + 1)
    fresh.load_state_dict(torch.load(tmp_path / "weights.pt"))
    twin = copy.deepcopy(model)
    torch.manual_seed(0)
    first = case.loss(fresh, case.batch(1))
    torch.manual_seed(0)
    assert zoo.same_bits(case.loss(twin, case.batch(1)), first)


# ---------------------------------------------------------------------------------------------------------------------
# Two ranks


def train_distributed(rank: int, name: str, how: str, plan: dict | None = None) -> dict[str, dict]:
    """One (case, plan, way of being distributed) on one rank."""
    case = zoo.CASES[name]
    model = case.build(SEED)
    if how == "sharded":
        _shard(case, model)
    optimizer = zoo.make_optimizer(model)
    if how == "replicated":
        model = torch.nn.parallel.DistributedDataParallel(model)
    tide = lowtide.apply(model, plan, optimizer=optimizer, engine=virtual(rank)) if plan else None
    if how == "replicated later":
        model = torch.nn.parallel.DistributedDataParallel(model)
    result = zoo.train(case, model, optimizer, SEED + 10 * rank, num_steps=3, accumulate=2)
    if tide:
        assert tide.stats.swapped_bytes + tide.stats.recomputed_bytes > 0
        assert tide.stats.num_divergences == 0
        tide.remove()
    return {part: {k: _local(v).numpy() for k, v in values.items()} for part, values in vars(result).items()}


def _shard(case: zoo.Case, model: torch.nn.Module) -> None:
    mesh = init_device_mesh("cpu", (2,))
    for name in case.layers:
        fully_shard(model.get_submodule(name), mesh=mesh)
    fully_shard(model, mesh=mesh)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


RANKED = ("llama", "nested", "lora")


@pytest.mark.slow
@pytest.mark.parametrize("ways", [("replicated", "replicated later"), ("sharded",)], ids=["replicated", "sharded"])
def test_two_ranks_equal_plain_torch(ways: tuple[str, ...], tmp_path: Path) -> None:
    """DistributedDataParallel, wrapped around a tide or inside one, and fully sharded parameters."""
    truths = [{"name": name, "how": ways[0]} for name in RANKED]
    jobs = []
    for number, name in enumerate(RANKED):
        alone, side_by_side = (SWAP, RECOMPUTE)[number % 2], dict(zoo.CASES[name].mixed_plans[0])
        jobs += [{"name": name, "how": ways[0], "plan": alone}]
        jobs += [{"name": name, "how": how, "plan": side_by_side} for how in ways]
    answers = two_ranks.run(__name__, [("train_distributed", job) for job in truths + jobs], tmp_path)
    results = [[_as_result(answer) for answer in both] for both in answers]
    truth = dict(zip(RANKED, results, strict=False))
    for job, both in zip(jobs, results[len(truths) :], strict=True):
        for rank in (0, 1):
            zoo.assert_same(both[rank], truth[job["name"]][rank])
    assert not zoo.same_bits(*(result.loss["0.0"] for result in results[0])), "both ranks had the same data"


def _as_result(answer: dict[str, dict]) -> zoo.Result:
    tensors = {part: {k: torch.from_numpy(v) for k, v in values.items()} for part, values in answer.items()}
    return zoo.Result(**tensors)
