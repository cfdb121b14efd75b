"""`tide.step(closure, is_joint=True)` on two ranks: memory runs out on one, and both take the micro-batch back."""

from __future__ import annotations

import contextlib
import functools
import warnings
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide
from tests.support import two_ranks
from tests.support.virtual_engine import virtual

WIDTH, ROWS, NUM_LAYERS, NUM_STEPS, NUM_PARTS = 16, 8, 3, 2, 2
PLAN = {"swap": "none", "min_bytes": 0, "layers": [f"layers.{index}" for index in range(NUM_LAYERS)]}
warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")


class Summed(torch.autograd.Function):
    """The sum over all ranks, by one of two interfaces; so is its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, is_functional: bool) -> Tensor:
        ctx.is_functional = is_functional
        return _summed(x, is_functional)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _summed(grad, ctx.is_functional), None


def _summed(x: Tensor, is_functional: bool) -> Tensor:
    if is_functional:
        return functional.wait_tensor(functional.all_reduce(x.contiguous(), "sum", dist.group.WORLD))
    total = x.contiguous().clone()
    dist.all_reduce(total)
    return total


class Layer(nn.Module):
    def __init__(self, rank: int, is_functional: bool) -> None:
        super().__init__()
        up, down = torch.randn(2 * WIDTH, WIDTH) / 4, torch.randn(WIDTH, 2 * WIDTH) / 4
        self.up, self.down = nn.Parameter(up.chunk(2, 0)[rank].clone()), nn.Parameter(down.chunk(2, 1)[rank].clone())
        self.is_functional = is_functional

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.dropout((x @ self.up.t()).tanh(), 0.1)
        return x + Summed.apply(hidden @ self.down.t(), self.is_functional)


class Model(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(rank, index % 2 == 0) for index in range(NUM_LAYERS))
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x).square().mean() * x.sum()


class FailsAt(TorchDispatchMode):
    """Raises at one operator."""

    def __init__(self, place: int, error: str = "memory") -> None:
        super().__init__()
        self.left = place
        self.error = error
        self.num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.num += 1
        if self.num == self.left:
            raise torch.OutOfMemoryError("made up") if self.error == "memory" else ValueError("made up")
        return func(*args, **(kwargs or {}))


def batch(step: int, part: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(10 * step + part))


def _micro_batch(model: nn.Module, x: Tensor, mode: Any) -> Tensor:
    with mode:
        loss = model(x)
        loss.backward()
    return loss.detach()


def train(model: nn.Module, step_of: Any, fails: FailsAt | None = None, when: tuple[int, int] = (-1, -1)) -> list:
    """Losses, gradients and buffers of two steps of two micro-batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    found = []
    torch.manual_seed(3)
    for step in range(NUM_STEPS):
        for part in range(NUM_PARTS):
            mode = fails if fails is not None and when == (step, part) else contextlib.nullcontext()
            found.append(step_of(functools.partial(_micro_batch, model, batch(step, part), mode)))
        found += [parameter.grad.clone() for parameter in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *model.buffers(), torch.get_rng_state()]


def _handle(model: nn.Module, kind: str) -> Any:
    if kind == "budget":
        return lowtide.optimize(model, budget="1GiB", engine=virtual(0), memory={"min_bytes": 0})
    if kind == "recompute":
        return lowtide.apply(model, {**PLAN, "recompute": "all"}, engine=virtual(0))
    tide = lowtide.apply(model, PLAN, engine=virtual(0))
    if kind == "guard":
        tide.set_limit(2**30)
    return tide


# -- what runs on each rank --------------------------------------------------------------------------------------------


def drawn(rank: int, seeds: list[int], kind: str) -> list[tuple[bool, int]]:
    """Of each draw: whether all is as without the error, and how often a micro-batch was run again."""
    truth = train(Model(rank), lambda closure: closure())
    answers = []
    for seed in seeds:
        draw = Random(seed)
        failing, when = draw.randrange(2), (draw.randrange(NUM_STEPS), draw.randrange(NUM_PARTS))
        when = (1, when[1]) if kind == "budget" else when  # the first step is observed
        place = draw.randrange(1, 100)
        model = Model(rank)
        mode = FailsAt(place if rank == failing else -1)
        with warnings.catch_warnings(), _handle(model, kind) as tide:
            warnings.simplefilter("ignore")
            found = train(model, lambda closure, tide=tide: tide.step(closure, is_joint=True), mode, when)
            answers.append((all(torch.equal(a, b) for a, b in zip(found, truth, strict=True)), tide.stats.num_retries))
    return answers


def ended(rank: int, why: str) -> list[str]:
    """The error on this rank, and its notes, where one rank fails for good, or cannot take anything back."""
    model = Model(rank)
    error = "value" if why == "error" else "memory"
    with lowtide.apply(model, PLAN, engine=virtual(0)) as tide, warnings.catch_warnings():
        warnings.simplefilter("ignore")

        def closure() -> None:
            loss = model(batch(0, 0))
            if why == "send" and rank == 0:
                dist.send(torch.zeros(1), 1)
            elif why == "send":
                dist.recv(torch.zeros(1), 0)
            with FailsAt(20 if rank == 1 else -1, error):
                loss.backward()

        try:
            tide.step(closure, is_joint=True)
        except Exception as caught:
            notes = [note for note in getattr(caught, "__notes__", []) if not note.startswith("Memory")]
            return [type(caught).__name__, str(caught), *notes]
    return []


KINDS = ["keep", "guard", "recompute", "budget"]
JOBS: list[two_ranks.Job] = [
    *(("drawn", {"seeds": [0, 1, 2], "kind": kind}) for kind in KINDS),
    *(("ended", {"why": why}) for why in ("error", "send", "always")),
]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, Any]]:
    return two_ranks.run(__name__, JOBS, tmp_path_factory.mktemp("ranks"), seconds=200)


def answer(answers: list, name: str, **arguments: Any) -> tuple[Any, Any]:
    return answers[JOBS.index((name, arguments))]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_those_without_the_error(answers: list, kind: str) -> None:
    for found in answer(answers, "drawn", seeds=[0, 1, 2], kind=kind):
        assert found == [(True, 1)] * 3


@pytest.mark.slow
def test_all_ranks_end_with_the_reason(answers: list) -> None:
    other, own = answer(answers, "ended", why="error")
    assert own == ["ValueError", "made up"]
    assert other == ["JointStepError", "lowtide: rank 1 failed: made up"]
    other, own = answer(answers, "ended", why="send")
    note = (
        "lowtide: this micro-batch was not run again: rank 0: it has sent to or received from a single rank, which may "
        "wait for the rest for ever."
    )
    assert own == ["OutOfMemoryError", "made up", note]
    assert other == ["JointStepError", "lowtide: rank 1 ran out of memory: made up", note]


@pytest.mark.slow
def test_where_memory_runs_out_each_time_all_ranks_end(answers: list) -> None:
    other, own = answer(answers, "ended", why="always")
    assert own[:2] == ["OutOfMemoryError", "made up"]
    assert other[:2] == ["JointStepError", "lowtide: rank 1 ran out of memory: made up"]
    for notes in (own[2:], other[2:]):
        assert notes[0].startswith("lowtide: memory ran out 3 times in this micro-batch (")


@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_those_without_the_error_at_fifty_places(tmp_path: Any, kind: str) -> None:
    job = ("drawn", {"seeds": [*range(10, 60)], "kind": kind})
    for found in two_ranks.run(__name__, [job], tmp_path, seconds=400)[0]:
        assert [bits for bits, _ in found] == [True] * 50
        assert sum(num for _, num in found) >= 40  # the others fail past the end of the micro-batch
