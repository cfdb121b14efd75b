"""`recompute_slice_activation` on two real tensor-parallel ranks: half of each layer's input, and the same bits."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.functional import silu
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide
from lowtide.core.log import Listener
from lowtide.errors import ConfigError
from lowtide.mindformers.follow import follow, sections_in, tensor_parallel_group
from lowtide.tensors.live_bytes import LiveBytes
from tests.support import two_ranks
from tests.support.virtual_engine import virtual

NUM_LAYERS, WIDTH, INNER, VOCABULARY, NUM_ROWS, NUM_TOKENS = 4, 32, 64, 48, 2, 24
INPUT_BYTES = NUM_ROWS * NUM_TOKENS * WIDTH * 4
KEY = "recompute_slice_activation"


class ToAll(torch.autograd.Function):
    """The same on all ranks; gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return summed(gradient)


class FromAll(torch.autograd.Function):
    """The sum over all ranks; the gradient is the same on all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return summed(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clone()


def summed(x: Tensor) -> Tensor:
    total = x.contiguous().clone()
    dist.all_reduce(total)
    return total


class Block(nn.Module):
    """A column-parallel and a row-parallel matrix: each rank has its half of both."""

    def __init__(self, rank: int, width: int, has_norm: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width) if has_norm else nn.Identity()
        up, down = torch.randn(INNER, width) / 6, torch.randn(width, INNER) / 8
        self.up = nn.Parameter(up.chunk(2, 0)[rank].clone())
        self.down = nn.Parameter(down.chunk(2, 1)[rank].clone())

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        made = FromAll.apply(silu(ToAll.apply(self.norm(x)) @ self.up.t()) @ self.down.t())
        return x + (made if context is None else made * context)


class Net(nn.Module):
    def __init__(self, rank: int, width: int = WIDTH, has_context: bool = False, has_norm: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Block(rank, width, has_norm) for _ in range(NUM_LAYERS))
        self.has_context = has_context

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        context = x.sin().transpose(0, 1).contiguous().transpose(0, 1) if self.has_context else None
        for layer in self.layers:
            x = layer(x, context)
        return nn.functional.cross_entropy((x @ self.embed.weight.t()).flatten(0, 1), tokens.flatten())


def tokens(seed: int, num_tokens: int = NUM_TOKENS) -> Tensor:
    return torch.randint(0, VOCABULARY, (NUM_ROWS, num_tokens), generator=torch.Generator().manual_seed(seed))


def step(model: nn.Module, seed: int) -> list[Tensor]:
    loss = model(tokens(seed))
    loss.backward()
    found = [loss.detach(), *(parameter.grad for parameter in model.parameters())]
    model.zero_grad()
    return found


class Gathers(TorchDispatchMode):
    """Counts all-gathers."""

    num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.num += func is torch.ops.c10d._allgather_base_.default
        return func(*args, **(kwargs or {}))


def config(slices: bool, recompute: Any = True, compat: bool = False) -> dict[str, Any]:
    return {"recompute_config": {"recompute": recompute, KEY: slices}, "compat": compat}


# ---------------------------------------------------------------------------------------------------------------------
# What runs on each of two ranks


def trains(rank: int, slices: bool, recompute: Any = True, compat: bool = False, **model_with: Any) -> dict[str, Any]:
    truth = [step(model, seed) for model in [Net(rank, **model_with)] for seed in range(3)]
    model, lines = Net(rank, **model_with), []
    sections = sections_in(config(slices, recompute, compat))
    with Listener(lines.append), follow(model, sections, engine=virtual(0), tp_group=dist.group.WORLD) as tide:
        bits = [all(map(torch.equal, step(model, seed), expected)) for seed, expected in enumerate(truth)]
        tide.reset_stats()
        with Gathers() as counted, LiveBytes(model=model) as live:
            loss = model(tokens(0))
            time.sleep(0.1)  # a worker thread of gloo lets go of what it has sent
            between = live.now_bytes
            loss.backward()
        del loss
        time.sleep(0.1)  # the same
        stats, left = tide.stats, tide.tide._scheduler.ledger.now_bytes
    return {
        "bits": bits,
        "gathers": counted.num,
        "kept": stats.kept_bytes,
        "between": between,
        "left": left,
        "misses": stats.num_divergences,
        "notes": [line for line in lines if KEY in line],
    }


def new_shapes(rank: int) -> bool:
    """Inputs are compared again for a new shape; gradients are right for both."""
    truth = [shaped_step(model, n) for model in [Net(rank)] for n in (24, 10, 24)]
    model = Net(rank)
    with lowtide.apply(model, config(True), engine=virtual(0), tp_group=dist.group.WORLD):
        return all(all(map(torch.equal, shaped_step(model, n), e)) for n, e in zip((24, 10, 24), truth, strict=True))


def shaped_step(model: nn.Module, num_tokens: int) -> list[Tensor]:
    model(tokens(0, num_tokens)).backward()
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return found


def other_inputs(rank: int) -> str:
    """Each rank has a batch of its own, as it would have a part of the sequence."""
    with lowtide.apply(model := Net(rank), config(True), engine=virtual(0), tp_group=dist.group.WORLD):
        with pytest.raises(ConfigError) as caught:
            model(tokens(rank))
        return str(caught.value)


def modified(rank: int, has_norm: bool) -> str:
    """An input is written to after the layer has run; with a norm the layer has saved it."""
    model = Net(rank, has_norm=has_norm)
    with lowtide.apply(model, config(True), engine=virtual(0), tp_group=dist.group.WORLD):
        step(model, 0)
        held: list[Tensor] = []
        hook = model.layers[2].register_forward_pre_hook(lambda module, args: held.append(args[0]))
        loss = model(tokens(0))
        hook.remove()
        with torch.no_grad():
            held[0].add_(1)
        with pytest.raises(RuntimeError) as caught:
            loss.backward()
    return str(caught.value)


def without_group(rank: int) -> tuple[str, list[str], str]:
    with pytest.raises(ConfigError) as caught:
        lowtide.apply(Net(rank), config(True))
    with pytest.raises(ConfigError) as misplaced:
        lowtide.apply(Net(rank), {"recompute": "all"}, tp_group=dist.group.WORLD)
    lines: list[str] = []
    with Listener(lines.append), follow(model := Net(rank), sections_in(config(True, compat=True)), engine=virtual(0)):
        step(model, 0)
    return str(caught.value), [line for line in lines if KEY in line], str(misplaced.value)


def inferred(rank: int) -> tuple[bool, bool]:
    """The group from a mesh, and that there is none."""
    model = nn.Linear(4, 4)
    none = tensor_parallel_group(model) is None
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Replicate(), Replicate()]))
    return none, dist.get_world_size(tensor_parallel_group(model)) == 2


JOBS: list[two_ranks.Job] = [
    ("trains", {"slices": False}),
    ("trains", {"slices": True}),
    ("trains", {"slices": False, "recompute": [3]}),
    ("trains", {"slices": True, "recompute": [3]}),
    ("trains", {"slices": True, "recompute": [3], "compat": True}),
    ("trains", {"slices": False, "has_context": True}),
    ("trains", {"slices": True, "has_context": True}),
    ("new_shapes", {}),
    ("other_inputs", {}),
    ("modified", {"has_norm": True}),
    ("modified", {"has_norm": False}),
    ("without_group", {}),
    ("inferred", {}),
]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, Any]]:
    return two_ranks.run(__name__, JOBS, tmp_path_factory.mktemp("ranks"), seconds=200)


def answer(answers: list, name: str, **arguments: Any) -> tuple[Any, Any]:
    return answers[JOBS.index((name, arguments))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "num_inputs", "num_gathers"),
    # The context is cut once and gathered four times; it is made from the first layer's input, which so stays whole.
    [({}, 4, 4), ({"recompute": [3]}, 3, 3), ({"has_context": True}, 4, 7)],
    ids=["all layers", "three layers", "one input of all layers"],
)
def test_half_of_each_input_is_kept_with_the_same_bits(
    answers: list, more: dict, num_inputs: int, num_gathers: int
) -> None:
    whole, sliced = answer(answers, "trains", slices=False, **more), answer(answers, "trains", slices=True, **more)
    for rank in (0, 1):
        assert whole[rank]["bits"] == sliced[rank]["bits"] == [True, True, True]
        assert (whole[rank]["gathers"], sliced[rank]["gathers"]) == (0, num_gathers)
        for measure in ("kept", "between"):
            assert whole[rank][measure] - sliced[rank][measure] == num_inputs * INPUT_BYTES // 2, measure
        assert whole[rank]["misses"] == sliced[rank]["misses"] == 0
        assert whole[rank]["left"] == sliced[rank]["left"] == 0
        assert sliced[rank]["notes"] == [f"note: {KEY}: each of 2 ranks keeps 1/2 of the inputs of recomputed layers"]


@pytest.mark.slow
def test_where_a_list_drops_the_flag_inputs_stay_whole(answers: list) -> None:
    whole = answer(answers, "trains", slices=False, recompute=[3])
    for rank, found in enumerate(answer(answers, "trains", slices=True, recompute=[3], compat=True)):
        text = f"recompute_config.{KEY}, because upstream drops it unless recompute is true"
        assert found.pop("notes")[0] == f"note: no effect: {text}"
        assert found == {key: value for key, value in whole[rank].items() if key != "notes"}


@pytest.mark.slow
def test_new_shapes(answers: list) -> None:
    assert answer(answers, "new_shapes") == (True, True)


@pytest.mark.slow
def test_inputs_that_differ_are_refused_on_all_ranks(answers: list) -> None:
    text = (
        "recompute_slice_activation: an input of 'layers.0' is not the same on ranks 0 and 1 of the tensor-parallel "
        "group, so a slice of it would give wrong gradients. With sequence parallelism each rank has its own slice "
        "already; set recompute_slice_activation to false"
    )
    assert answer(answers, "other_inputs") == (text, text)


@pytest.mark.slow
def test_an_input_that_was_written_to_is_no_input(answers: list) -> None:
    for found in answer(answers, "modified", has_norm=True):
        assert "modified by an inplace operation: [torch.FloatTensor [2, 24, 32]]" in found
    for found in answer(answers, "modified", has_norm=False):
        assert found.startswith(
            "lowtide: an input of the recomputed 'layers.2' (Block) was modified in place after it had run"
        )


@pytest.mark.slow
def test_the_group_is_asked_for(answers: list) -> None:
    needs = "needs the tensor-parallel group, and no parameter of this model is a DTensor on a mesh dimension 'tp'; "
    for strict, compat, misplaced in answer(answers, "without_group"):
        assert strict == (
            f"recompute_config.{KEY}: {needs}give the group, lowtide.apply(..., tp_group=group), or set it to false"
        )
        how = "it has no effect; give the group: lowtide.apply(..., tp_group=group)"
        assert compat == [f"note: recompute_config.{KEY}: {needs}{how}"]
        assert misplaced == f"lowtide.apply: tp_group is for {KEY} of recompute_config; leave it out"
    assert answer(answers, "inferred") == ((True, True), (True, True))
