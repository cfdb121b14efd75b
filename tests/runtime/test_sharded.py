"""FSDP2 on two real ranks: observed without a trace, planned for a budget, followed by a file, and the same bits."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide
from lowtide.core.log import Listener
from lowtide.errors import ConfigError
from lowtide.mindformers.follow import follow, sections_in
from lowtide.profiling.observe_step import observe
from lowtide.tensors.fsdp import fsdp_modules, gathered_storages
from tests.support import two_ranks
from tests.support.virtual_engine import VirtualEngine, virtual

NUM_LAYERS, WIDTH, INNER, VOCABULARY = 3, 32, 96, 48
LAYER_BYTES = (3 * WIDTH * INNER + 2 * WIDTH) * 4
SLACK = LAYER_BYTES
"""A worker thread of gloo may let go of a gathered module a little late, in the observed step or in another."""


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.down_proj, self.act_fn = nn.Linear(INNER, WIDTH, bias=False), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), Mlp()

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        # With mixed precision FSDP2 casts the scale, in a hook; these casts are the module's own.
        return x + (self.mlp(self.norm(x)) * scale.to(torch.float32)).to(x.dtype)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(NUM_LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x, scale = self.embed(tokens), torch.linspace(0.5, 1.5, WIDTH)
        for layer in self.layers:
            x = layer(x, scale)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.flatten())


def net(way: str = "layers") -> Net:
    """The model, sharded in one of several ways."""
    torch.manual_seed(0)
    model = Net().train()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if way == "replicas":
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if way == "mixed precision" else MixedPrecisionPolicy()
    for layer in model.layers:
        if way == "nested":
            fully_shard(layer.mlp, mesh=mesh)
        fully_shard(layer, mesh=mesh, reshard_after_forward=way != "gathered until backward", mp_policy=policy)
    if way == "no root":
        return model
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


WAYS = ("layers", "nested", "gathered until backward", "no root", "mixed precision", "replicas")


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
# One rank, in this process


@pytest.fixture
def _group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_group_of_one")
def test_one_rank_alone() -> None:
    """The quick test of what follows: a budget, three steps, gradients that accumulate, and an optimizer."""
    truth = trained(net(), None)
    with lowtide.optimize(net(), budget="1GiB", memory={"min_bytes": 1}) as tide:
        step(tide.model, 0)
        plain, state = tide.plan.predicted.plain_peak_bytes, tide.profile.state
    assert state.gradients == state.parameters
    assert same(trained(net(), int(0.8 * plain)), truth)


def trained(model: nn.Module, budget: int | None) -> list[Tensor | None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    limited = {"memory": {"min_bytes": 1}, "optimizer": optimizer, "engine": virtual(3)}
    tide = lowtide.optimize(model, budget=budget, **limited) if budget is not None else contextlib.nullcontext()
    with tide:
        for seed in range(3):
            for micro_batch in range(2):
                model(tokens(2 * seed + micro_batch)).backward()
            optimizer.step()
            optimizer.zero_grad()
        if budget is not None:
            assert tide.stats.swapped_bytes + tide.stats.recomputed_bytes > 0
            assert tide.stats.num_divergences == 0
    return [local(p.detach()) for p in model.parameters()]


# ---------------------------------------------------------------------------------------------------------------------
# What runs on each of two ranks. Seeds differ between ranks, so gradients are really exchanged.


@functools.cache
def plain_steps(way: str, rank: int) -> list[list[Tensor | None]]:
    """Three steps without lowtide."""
    model = net(way)
    return [step(model, 10 * rank + seed) for seed in range(3)]


def trains_within(rank: int, way: str, shares: tuple[float, ...]) -> list[dict[str, Any]]:
    truth = plain_steps(way, rank)
    with lowtide.optimize(net(way), budget="1GiB", memory={"min_bytes": 1}, engine=virtual(0)) as tide:
        step(tide.model, rank)
        floor, plain = tide.profile.state.parameters, tide.plan.predicted.plain_peak_bytes
    found = []
    for share in shares:
        model = net(way)
        budget = int(floor + share * (plain - floor))
        with lowtide.optimize(model, budget=budget, memory={"min_bytes": 1}, engine=virtual(0)) as tide:
            bits = [same(step(model, 10 * rank + seed), expected) for seed, expected in enumerate(truth)]
            stats, digest, predicted = tide.stats, tide.plan.digest(), tide.plan.predicted
            with tide.tide.audit() as audit:
                step(model, 10 * rank)
        found.append(
            {
                "bits": bits,
                "budget": budget,
                "digest": digest,
                "predicted": predicted.peak_bytes,
                "audit": audit.peak_bytes,
                "moved": stats.swapped_bytes,
                "recomputed": stats.recomputed_bytes,
                "misses": (stats.num_divergences, stats.num_unknown),
            }
        )
    return found


def made_again(rank: int, way: str) -> dict[str, Any]:
    """As much as possible is made again by recipes, many of which read gathered parameters."""
    truth = plain_steps(way, rank)
    rules = {"min_bytes": 1, "swap": "none"}
    model = net(way)
    how: Any = {"budget": 1 << 10, "memory": rules, "strict": True}
    with pytest.raises(lowtide.BudgetError) as caught, lowtide.optimize(model, **how):
        step(model, rank)
    model = net(way)
    with lowtide.optimize(model, budget=caught.value.floor_bytes + SLACK, memory=rules, engine=virtual(0)) as tide:
        bits = [same(step(model, 10 * rank + seed), expected) for seed, expected in enumerate(truth)]
        sites, stats, profile = tide.plan.sites, tide.stats, tide.profile
    return {
        "bits": bits,
        "made": sorted(s.name for s in sites if s.recipe and any(e.kind == "parameter" for e in s.recipe.inputs)),
        "misses": (stats.num_divergences, stats.num_unknown),
        "refused": sorted(n.name for n in profile.nodes if n.why_no_recipe == "parameter sharded when it is read"),
    }


def leaves_no_trace(rank: int, way: str, reshards: bool) -> dict[str, Any]:
    """In the middle of accumulation: one micro-batch is reduced, one is not yet; then a step is observed."""
    model, twin = net(way), net(way)
    for each in (model, twin):
        step(each, rank)
        each(tokens(rank + 1)).backward()
        for module in fsdp_modules(each):
            module.set_requires_gradient_sync(False, recurse=False)
            module.set_reshard_after_backward(reshards, recurse=False)
            module.set_is_last_backward(False)
        each(tokens(rank + 2)).backward()
    before, hooks = picture(model), footprint(model)
    profile = observe(model, (tokens(rank + 3),))
    after, hooks_after, pending = picture(model), footprint(model), num_pending(model)
    for each in (model, twin):
        for module in fsdp_modules(each):
            module.set_requires_gradient_sync(True, recurse=False)
            module.set_reshard_after_backward(True, recurse=False)
            module.set_is_last_backward(True)
        each(tokens(rank + 3)).backward()
    return {
        "same": {key: same(value, after[key]) for key, value in before.items()},
        "hooks": hooks == hooks_after,
        "later": same(gradients(model), gradients(twin)),
        "pending": pending,
        "num ops": len(profile.op_names),
    }


def picture(model: nn.Module) -> dict[str, list[Tensor | None]]:
    """All that a step may change, FSDP2's own memory included."""
    numbers, partial = [], []
    for module in fsdp_modules(model):
        state = module._get_fsdp_state()
        context, comm = state._state_ctx, state._comm_ctx
        numbers += [context.iter_forward_root is None, context.is_last_backward, comm.all_gather_state is None]
        numbers += [context.post_backward_final_callback_queued, state._training_state.value]
        for group in state._fsdp_param_groups:
            numbers += [group._training_state.value, group._sharded_state.value]
            partial += [p._unsharded_param.grad for p in group.fsdp_params]
            partial += [p._unsharded_param.detach() for p in group.fsdp_params if group.is_unsharded]
            numbers += [p._unsharded_param.untyped_storage().nbytes() for p in group.fsdp_params]
    return {
        "parameters": [local(p.detach()).clone() for p in model.parameters()],
        "gradients": gradients(model),
        "partial gradients": [None if p is None else p.clone() for p in partial],
        "states": [torch.tensor(numbers), torch.get_rng_state()],
    }


def num_pending(model: nn.Module) -> int:
    """What FSDP2 still waits for. Where another backward is to come, it leaves something; a last one settles that."""
    states = [module._get_fsdp_state() for module in fsdp_modules(model)]
    waiting = [len(state._comm_ctx.post_forward_order) + len(state._comm_ctx.reduce_scatter_states) for state in states]
    return sum(waiting) + sum(
        len(group._post_forward_indices) for state in states for group in state._fsdp_param_groups
    )


def footprint(model: nn.Module) -> list[Any]:
    """What is on the modules; the gradients of the parameters are the same objects."""
    hooks = [(list(m._forward_pre_hooks), list(m._forward_hooks), sorted(vars(m))) for m in model.modules()]
    return [*hooks, *(id(p) for p in model.parameters()), *(id(p.grad) for p in model.parameters())]


def gathered_before_read(rank: int, way: str) -> list[bool]:
    """Plain FSDP2: is a module gathered whenever one of the tensors that it saved is unpacked?"""
    model, running, found = net(way), [], []
    modules = fsdp_modules(model)
    for module in modules:
        module.forward = following(module, module.forward, running)

    def unpack(saved: tuple[nn.Module, Tensor]) -> Tensor:
        module, tensor = saved
        if module is not None:
            below = [m for m in module.modules() if m is not module and isinstance(m, FSDPModule)]
            inner = {id(p) for m in below for p in m.parameters()}
            own = [p for p in module.parameters() if id(p) not in inner]
            found.append(not any(isinstance(p, DTensor) for p in own))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (running[-1] if running else None, tensor), unpack):
        loss = model(tokens(rank))
    loss.backward()
    return found


def following(layer: nn.Module, forward: Callable, running: list[nn.Module]) -> Callable:
    def around(*args: Any) -> Any:
        running.append(layer)
        try:
            return forward(*args)
        finally:
            running.pop()

    return around


def state_bytes(rank: int) -> list[bool]:
    """Shards, their gradients and their optimizer state; before the optimizer has a state, and after."""
    model, found = net(), []
    held = sum(local(p.detach()).untyped_storage().nbytes() for p in model.parameters())
    num_counters = len(list(model.parameters()))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        state = observe(model, (tokens(rank),), optimizer=optimizer).state
        found.append((state.parameters, state.gradients, state.optimizer) == (held, held, 2 * held + 4 * num_counters))
        model(tokens(rank)).backward()
        optimizer.step()
    return found


def goes_on_after_an_error(rank: int, way: str) -> bool:
    truth, model = step(net(way), rank), net(way)
    with lowtide.optimize(model, budget="1GiB", engine=virtual(0)):
        with pytest.raises(IndexError):
            model(tokens(rank) + VOCABULARY)
        is_right = same(step(model, rank), truth)
    model = net(way)
    before = footprint(model)
    with lowtide.optimize(model, budget=1 << 10, engine=virtual(0), strict=True):
        with pytest.raises(lowtide.BudgetError):
            model(tokens(rank))
        # The hook that says that this trains without a plan goes in the next forward pass.
        return is_right and same(step(model, rank), truth) and footprint(model) == before


def accumulates(rank: int, way: str) -> dict[str, Any]:
    """Two micro-batches a step: from the second one on there are gradients from the start."""
    truth, model = net(way), net(way)
    with lowtide.optimize(model, budget="1GiB", memory={"min_bytes": 1}, engine=virtual(0)) as tide:
        step(model, rank)
        budget = int(0.9 * tide.plan.predicted.plain_peak_bytes) + tide.profile.state.gradients
    peaks, bits = [], []
    with lowtide.optimize(model, budget=budget, memory={"min_bytes": 1}, engine=virtual(0)) as tide:
        for number in range(3):
            for micro_batch in range(2):
                truth(tokens(2 * rank + micro_batch)).backward()
                if number < 2:
                    model(tokens(2 * rank + micro_batch)).backward()
                    continue
                with tide.tide.audit() as audit:
                    model(tokens(2 * rank + micro_batch)).backward()
                peaks.append(audit.peak_bytes)
            bits.append(same(gradients(model), gradients(truth)))
            model.zero_grad()
            truth.zero_grad()
        found = {"whys": [event.why for event in tide.events], "predicted": tide.plan.predicted.peak_bytes}
        return {**found, "peak": max(peaks), "bits": bits, "budget": budget}


class Dice(VirtualEngine):
    """Steps take as long as the seed says."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._times = random.Random(seed)
        self._now = 0.0

    def mark_time(self) -> float:  # type: ignore[override]
        self._now += self._times.expovariate(1.0)
        return self._now

    def seconds_between(self, start: float, end: float) -> float:  # type: ignore[override]
        return end - start


CONFIGS: dict[str, dict[str, Any]] = {
    "layers": {"recompute_config": {"recompute": [2]}},
    "ops": {"recompute_config": {"select_recompute": [r"mlp\.act_fn", r"mlp\.gate_proj"]}},
    "module": {"recompute_config": {"select_recompute": {"mlp": [2]}}},
    "swap": {"swap_config": {"swap": True, "layer_swap": [{"backward_prefetch": 5, "layers": [0, 2]}]}},
    "mixed": {
        "recompute_config": {"recompute": [1], "select_recompute": {r"mlp\.act_fn": [0, 2]}},
        "swap_config": {"swap": True, "layer_swap": [{"backward_prefetch": 5, "layers": True}]},
    },
}


FOLLOWED = [(way, [*CONFIGS][(number + 3) % len(CONFIGS)]) for number, way in enumerate(WAYS)]
"""Each way and each file, in turn."""
MORE_FOLLOWED = [*(("nested", config) for config in CONFIGS), *((way, "mixed") for way in WAYS if way != "nested")]


def follows(rank: int, way: str, config: str) -> dict[str, Any]:
    truth = plain_steps(way, rank)
    model = net(way)
    with lowtide.apply(model, CONFIGS[config], engine=virtual(rank)) as tide:
        bits = [same(step(model, 10 * rank + seed), expected) for seed, expected in enumerate(truth)]
        rows = [(row.layer, row.part, row.fate, row.nbytes) for row in tide.source.file_plan.rows]
        freed = sum(row.nbytes for row in tide.source.file_plan.rows if row.fate == "recompute")
        moved = sum(row.nbytes for row in tide.source.file_plan.rows if row.fate == "swap")
        stats, digest = tide.stats, tide.plan.digest()
    plain = same(step(model, 10 * rank), truth[0])
    return {
        "bits": bits,
        "rows": rows,
        "bytes": stats.recomputed_bytes >= 3 * freed and stats.swapped_bytes == 3 * moved and freed + moved > 0,
        "misses": stats.num_divergences,
        "digest": digest,
        "plain again": plain,
    }


class Gathers(TorchDispatchMode):
    """Counts all-gathers."""

    num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.num += func is torch.ops.c10d._allgather_base_.default
        return func(*args, **(kwargs or {}))


def gathers(rank: int, way: str, flag: bool | None) -> dict[str, Any]:
    """Two of three layers are recomputed; how often are parameters gathered, and how much is held in between?"""
    truth = plain_steps(way, rank)[:2]
    model, lines = net(way), []
    step(model, rank)
    before = settings(model)
    config = {"recompute": [2]} | ({} if flag is None else {"parallel_optimizer_comm_recompute": flag})
    with Listener(lines.append), follow(model, sections_in({"recompute_config": config}), engine=virtual(0)):
        bits = [same(step(model, 10 * rank + seed), expected) for seed, expected in enumerate(truth)]
        with Gathers() as counted:
            loss = model(tokens(rank))
            held = sum(storage.nbytes() for layer in model.layers[:2] for storage in gathered_storages(layer))
            loss.backward()
    return {
        "bits": bits,
        "gathers": counted.num,
        "held": held,
        "restored": settings(model) == before,
        "notes": [line for line in lines if line.startswith("note: ")],
    }


def settings(model: nn.Module) -> list[Any]:
    states = [module._get_fsdp_state() for module in fsdp_modules(model)]
    return [
        (s._auto_reshard_after_forward, *(id(g.post_forward_mesh_info) for g in s._fsdp_param_groups)) for s in states
    ]


def refusals(rank: int) -> dict[str, str]:
    """What each call says to a model that it cannot take."""
    inner = net()
    found = {}
    for name, call in {
        "inside": lambda: inside(
            inner, lambda: observe(inner.layers, lambda: inner.layers[0](*torch.ones(2, 1, WIDTH)).sum())
        ),
    }.items():
        with pytest.raises(ConfigError) as caught:
            call()
        found[name] = str(caught.value)
    return found


def inside(model: nn.Module, call: Callable[[], Any]) -> None:
    """Run something in the middle of a forward pass."""
    hook = model.layers[1].register_forward_pre_hook(lambda module, args: call())
    try:
        model(tokens(0))
    finally:
        hook.remove()


RESHARDING = [(way, number % 2 == 0) for number, way in enumerate(WAYS)]
"""Each way with the setting after backward or without it, in turn."""
GATHERING = ("layers", "gathered until backward")


BUDGETED = ("layers", "mixed precision")
"""The other ways under a budget are `make test-extended`'s; replicas have one in test_mesh.py."""
JOBS: list[two_ranks.Job] = [
    *(("trains_within", {"way": way, "shares": (0.6,)}) for way in BUDGETED),
    ("made_again", {"way": "layers"}),
    *(("leaves_no_trace", {"way": way, "reshards": reshards}) for way, reshards in RESHARDING),
    *(("gathered_before_read", {"way": way}) for way in WAYS),
    *(("goes_on_after_an_error", {"way": way}) for way in ("no root",)),
    *(("follows", {"way": way, "config": config}) for way, config in FOLLOWED),
    *(("gathers", {"way": way, "flag": flag}) for way in GATHERING for flag in (None, True, False)),
    ("accumulates", {"way": "layers"}),
    ("refusals", {}),
    ("state_bytes", {}),
]
MORE_JOBS: list[two_ranks.Job] = [
    *(("trains_within", {"way": way, "shares": (0.75, 0.6)}) for way in WAYS),
    ("made_again", {"way": "nested"}),
    *(("follows", {"way": way, "config": config}) for way, config in MORE_FOLLOWED),
]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Any]]:
    return given(JOBS, tmp_path_factory)


@pytest.fixture(scope="module")
def more(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Any]]:
    return given(MORE_JOBS, tmp_path_factory)


def given(jobs: list[two_ranks.Job], tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Any]]:
    given = two_ranks.run(__name__, jobs, tmp_path_factory.mktemp("ranks"), seconds=300)
    named = [(name, {k: v for k, v in arguments.items() if k != "shares"}) for name, arguments in jobs]
    return {key(name, **arguments): both for (name, arguments), both in zip(named, given, strict=True)}


def key(name: str, way: str = "", config: str = "", reshards: bool = True, flag: bool | None = None) -> str:
    said = "" if flag is None else f", {flag}"
    return f"{name} {way} {config}".strip() + ("" if reshards else ", stays gathered") + said


@pytest.mark.slow
@pytest.mark.parametrize("way", BUDGETED)
def test_a_budget_is_kept_with_the_same_bits(answers: dict, way: str) -> None:
    assert_kept(answers, way)


@pytest.mark.extended
@pytest.mark.parametrize("way", WAYS)
def test_more_budgets_are_kept_with_the_same_bits(more: dict, way: str) -> None:
    assert_kept(more, way)


def assert_kept(answers: dict, way: str) -> None:
    for first, second in zip(*answers[f"trains_within {way}"], strict=True):
        for found in (first, second):
            assert found["bits"] == [True, True, True]
            assert found["misses"] == (0, 0)
            assert found["moved"] + found["recomputed"] > 0
            assert found["predicted"] <= found["budget"]
            assert abs(found["audit"] - found["predicted"]) <= SLACK
        assert first["digest"] == second["digest"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "jobs"), [("layers", "answers"), pytest.param("nested", "more", marks=pytest.mark.extended)]
)
def test_recipes_read_gathered_parameters_and_no_others(request: Any, way: str, jobs: str) -> None:
    answers = request.getfixturevalue(jobs)
    for found in answers[f"made_again {way}"]:
        assert found["bits"] == [True, True, True]
        assert found["misses"] == (0, 0)
        assert any(name.endswith("gate_proj.mm") for name in found["made"])
        # The next layer, or the one around, reads it when this one is sharded again.
        assert found["refused"] == [f"layers.{index}.mlp.down_proj.mm" for index in range(NUM_LAYERS)]


@pytest.mark.slow
@pytest.mark.parametrize(("way", "reshards"), RESHARDING)
def test_the_observed_step_leaves_no_trace(answers: dict, way: str, reshards: bool) -> None:
    for found in answers[key("leaves_no_trace", way, reshards=reshards)]:
        assert found["same"] == dict.fromkeys(("parameters", "gradients", "partial gradients", "states"), True)
        assert found["hooks"]
        assert found["pending"] == 0
        assert found["later"]
        assert found["num ops"] > 100


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_layer_is_gathered_before_backward_opens_what_it_saved(answers: dict, way: str) -> None:
    for found in answers[f"gathered_before_read {way}"]:
        assert len(found) > NUM_LAYERS
        assert all(found)


@pytest.mark.slow
def test_a_bad_batch_is_no_end(answers: dict) -> None:
    assert answers["goes_on_after_an_error no root"] == (True, True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "config", "jobs"),
    [
        *((*pair, "answers") for pair in FOLLOWED),
        *(pytest.param(*pair, "more", marks=pytest.mark.extended) for pair in MORE_FOLLOWED),
    ],
)
def test_the_sections_are_followed_with_the_same_bits(request: Any, way: str, config: str, jobs: str) -> None:
    answers = request.getfixturevalue(jobs)
    first, second = answers[key("follows", way, config)]
    assert first == second
    assert first["bits"] == [True, True, True]
    assert first["bytes"], first["rows"]
    assert first["misses"] == 0
    assert first["plain again"]


@pytest.mark.slow
def test_what_is_refused(answers: dict) -> None:
    first, second = answers["refusals"]
    assert first == second
    assert first == {
        "inside": "observe: this model was called inside the forward pass of a larger model that FSDP2 shards; give "
        "lowtide that larger model",
    }


@pytest.mark.slow
@pytest.mark.parametrize("way", GATHERING)
def test_parameters_of_recomputed_layers_are_gathered_again_or_not(answers: dict, way: str) -> None:
    found = {flag: answers[key("gathers", way, flag=flag)] for flag in (None, True, False)}
    for first, second in found.values():
        assert first == second
        assert first["bits"] == [True, True]
        assert first["restored"]
    notes = {flag: first.pop("notes") for flag, (first, _) in found.items()}
    kept = "the gathered parameters of layers 0-1 stay on the device from forward to backward; true frees them"
    assert notes == {None: [], True: [], False: [f"note: parallel_optimizer_comm_recompute is false: {kept}"]}
    again, once = found[True][0], found[False][0]
    assert again["gathers"] - once["gathers"] == 2
    assert (again["held"], once["held"]) == (0, 2 * LAYER_BYTES)
    assert found[None][0] == (once if way == "gathered until backward" else again)


@pytest.mark.slow
def test_state_counts_as_shards(answers: dict) -> None:
    assert answers["state_bytes"] == ([True, True], [True, True])


@pytest.mark.slow
def test_gradients_that_accumulate_are_in_the_plan(answers: dict) -> None:
    for found in answers["accumulates layers"]:
        assert found["bits"] == [True, True, True]
        assert found["whys"] == ["first step", "gradients stay"]
        assert found["predicted"] <= found["budget"]
        assert abs(found["peak"] - found["predicted"]) <= SLACK
