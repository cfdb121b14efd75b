"""DDP and FSDP2 on two real ranks: the same bits as without a swap, also through `torch.distributed.checkpoint`."""

from __future__ import annotations

import copy
import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import lowtide
from lowtide.tensors.optimizers import CUT_ELEMENTS
from lowtide.tensors.wrappers import inside, is_distributed
from tests.support import two_ranks
from tests.support.virtual_engine import VirtualEngine

STEPS = 6
NUM_STRETCHES = 3


def _model(way: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 24)) for _ in range(4)))
    if way == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if way == "fsdp large":
        model.append(nn.Linear(24, 2 * NUM_STRETCHES * CUT_ELEMENTS // 24, bias=False))
    mesh = init_device_mesh("cpu", (2,))
    for block in model:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)


def _swap(optimizer: torch.optim.Optimizer, overlap: str) -> tuple[Any, VirtualEngine]:
    engine = VirtualEngine(3)
    handle = lowtide.swap_optimizer(optimizer, engine=engine, bucket_bytes=4096, min_bytes=1, overlap=overlap)
    return handle, engine


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, numbers: range) -> None:
    for step in numbers:
        optimizer.zero_grad()
        torch.manual_seed(10 * step + rank)
        model(torch.randn(3, 24)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()


def _left(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """This rank's part of parameters and state. Copies."""
    tensors = list(model.parameters())
    for parameter in model.parameters():
        tensors += [value for _, value in sorted(optimizer.state[parameter].items())]
    return [inside(tensor.detach()).clone() for tensor in tensors]


@functools.cache
def _plain(way: str, rank: int) -> list[torch.Tensor]:
    model = _model(way)
    optimizer = _optimizer(model)
    _steps(model, optimizer, rank, range(STEPS))
    return _left(model, optimizer)


def _same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def trained(rank: int, way: str, overlap: str) -> dict[str, Any]:
    truth = _plain(way, rank)
    model = _model(way)
    optimizer = _optimizer(model)
    handle, engine = _swap(optimizer, overlap)
    _steps(model, optimizer, rank, range(STEPS))
    between = _same(_left(model, optimizer), truth)
    kinds = {type(optimizer.state[p]["exp_avg"]).__name__ for p in model.parameters()}
    moved = handle.stats.swapped_bytes
    stretches = max(len(bucket.chunks) for bucket in handle._store.buckets)
    handle.detach()
    return {
        "between": between,
        "after": _same(_left(model, optimizer), truth),
        "kinds": kinds,
        "moved": moved == sum(8 * inside(p.detach()).numel() for p in model.parameters()),
        "violations": engine.violations,
        "distributed": all(is_distributed(optimizer.state[p]["exp_avg"]) == (way != "ddp") for p in model.parameters()),
        "stretches": stretches == (NUM_STRETCHES if way == "fsdp large" else 1),
    }


def resumed(rank: int, way: str, saving: str, loading: str) -> dict[str, Any]:
    truth = _plain(way, rank)
    model = _model(way)
    optimizer = _optimizer(model)
    handle = _swap(optimizer, "step")[0] if saving == "swapped" else None
    _steps(model, optimizer, rank, range(3))
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    if handle:
        handle.detach()
    optimizer = _optimizer(model)
    handle = _swap(optimizer, "step")[0] if loading == "swapped" else None
    set_optimizer_state_dict(model, optimizer, saved)
    moved = handle.stats.swapped_bytes if handle else 1
    _steps(model, optimizer, rank, range(3, STEPS))
    same = _same(_left(model, optimizer), truth)
    if handle:
        handle.detach()
    return {"same": same, "moved": moved > 0}


def saved_in_the_background(rank: int) -> dict[str, Any]:
    """`async_save` of a swapped optimizer that goes on stepping."""
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    truth = _plain("fsdp", rank)
    model = _model("fsdp")
    optimizer = _optimizer(model)
    handle, _ = _swap(optimizer, "step")
    _steps(model, optimizer, rank, range(3))
    state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    future = dcp.async_save(state, checkpoint_id=folder[0], process_group=dist.new_group(backend="gloo"))
    parameters = [inside(p.detach()).clone() for p in model.parameters()]
    _steps(model, optimizer, rank, range(3, STEPS))
    went_on = _same(_left(model, optimizer), truth)
    future.result()
    handle.detach()
    optimizer = _optimizer(model)
    handle, _ = _swap(optimizer, "step")
    optimizer.zero_grad()  # where there are gradients, torch makes no state to load into
    loaded = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(loaded, checkpoint_id=folder[0])
    set_optimizer_state_dict(model, optimizer, loaded["optimizer"])
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), parameters, strict=True):
            inside(parameter.detach()).copy_(value)
    _steps(model, optimizer, rank, range(3, STEPS))
    same = _same(_left(model, optimizer), truth)
    handle.detach()
    return {"went on": went_on, "same": same}


JOBS: list[two_ranks.Job] = [
    ("saved_in_the_background", {}),
    ("trained", {"way": "fsdp large", "overlap": "backward"}),
    *(("trained", {"way": way, "overlap": overlap}) for way in ("ddp", "fsdp") for overlap in ("step", "backward")),
    *(
        ("resumed", {"way": way, "saving": saving, "loading": loading})
        for way in ("ddp", "fsdp")
        for saving, loading in (("swapped", "swapped"), ("plain", "swapped"), ("swapped", "plain"))
    ),
]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, Any]]:
    return two_ranks.run(__name__, JOBS, Path(tmp_path_factory.mktemp("ranks")), seconds=200)


def _name(number: int) -> str:
    return " ".join([JOBS[number][0], *JOBS[number][1].values()])


@pytest.mark.parametrize("number", range(len(JOBS)), ids=_name)
def test_the_same_bits_on_two_ranks(number: int, answers: list[tuple[Any, Any]]) -> None:
    name, arguments = JOBS[number]
    for answer in answers[number]:
        if name == "saved_in_the_background":
            assert answer == {"went on": True, "same": True}
            continue
        if name == "resumed":
            assert answer == {"same": True, "moved": True}
            continue
        assert answer == {
            "between": True,
            "after": True,
            "kinds": {"Tensor" if arguments["way"] == "ddp" else "DTensor"},
            "moved": True,
            "violations": [],
            "distributed": True,
            "stretches": True,
        }
