"""What each of two ranks does for test_overlap_ranks.py. A job gives back what differed, and the log of its pairs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from pipeline import moe
from solved import random_plan
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from zoo import same_bits

import lowtide
from lowtide.engines.virtual import VirtualEngine
from lowtide.errors import ConfigError
from lowtide.pipeline import Overlap, all_to_all
from lowtide.pipeline.exchange import Route, start_on_group
from lowtide.pipeline.overlap_figures import Event, exposed

Run = Callable[[nn.Module, list[Tensor]], list[Tensor]]


def _result(model: nn.Module, run: Run, batches: list[Tensor]) -> dict[str, Tensor]:
    torch.manual_seed(5)
    return moe.result(model, run(model, batches))


def _in_series(overlap: Overlap) -> Run:
    """Through the engine, and never two halves at once."""

    def run(model: nn.Module, batches: list[Tensor]) -> list[Tensor]:
        losses = []
        for batch in batches:
            made: list[Tensor] = []
            overlap.run_pair(lambda made=made, batch=batch: made.append(model(batch)), None)
            overlap.run_pair(None, made[0].backward)
            losses.append(made[0].detach())
        return losses

    return run


def _in_bf16(model: nn.Module) -> nn.Module:
    forward = model.forward

    def cast(tokens: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return forward(tokens)

    model.forward = cast
    return model


def _checkpointed(model: nn.Module) -> nn.Module:
    for layer in model.layers:
        for part in (layer.attention, layer.experts):
            forward = part.forward
            part.forward = lambda *args, forward=forward: checkpoint(forward, *args, use_reentrant=False)
    return model


CHANGES: dict[str, Callable[[nn.Module], nn.Module]] = {"autocast": _in_bf16, "checkpoint": _checkpointed}


def bits(
    rank: int, memory: Any = None, *, hides: bool = False, change: str | None = None, seed: int | None = None
) -> dict[str, Any]:
    """Plain autograd, in series, and in pairs; in pairs twice, the second time by what the first has learned.

    memory: "solved" for a plan with recipes of operators, and fetches at the distances of a solver.
    """
    model = moe.make(rank, hides=hides)
    if change is not None:
        model = CHANGES[change](model)
    batches = moe.batches(rank)
    truth = _result(model, moe.plain, batches)
    log: list[Event] = []
    group = None
    if memory == "solved":
        group = [dist.new_group([each]) for each in range(2)][
            rank
        ]  # tokens differ between ranks, and so do their plans
        memory = random_plan(lowtide.observe(model, lambda: model(batches[2])), seed or 0)
    engine = "host" if seed is None else VirtualEngine(seed=seed)
    tide = contextlib.nullcontext() if memory is None else lowtide.apply(model, memory, engine=engine, group=group)
    with tide:
        runs = [_in_series(Overlap()), Overlap().run, Overlap(log=log).run]
        found = [_result(model, run, batches) for run in runs]
        stats = None if memory is None else tide.stats
    return {
        "different": [[name for name in truth if not same_bits(truth[name], result[name])] for result in found],
        "num": [len(result) for result in (truth, *found)],
        "log": log,
        "stats": None if stats is None else (stats.swapped_bytes > 0, stats.recomputed_bytes > 0),
    }


def order(rank: int, num_layers: int = 3) -> list[Event]:
    log: list[Event] = []
    model = moe.make(rank, num_layers=num_layers)
    Overlap(log=log).run(model, moe.batches(rank))
    assert exposed(event for event in log if event.pair in (1, 2, 3)) == []
    return log


def raises(rank: int, where: str) -> dict[str, Any]:
    """Both ranks raise at the same place; the next step is right."""
    model, batches = moe.make(rank), moe.batches(rank)
    truth = _result(model, moe.plain, batches)
    overlap = Overlap()
    first: list[Tensor] = []
    overlap.run_pair(lambda: first.append(model(batches[0])), None)

    def broken(*_: Any) -> None:
        raise RuntimeError("this one")

    part = model.layers[1].experts
    if where == "forward":
        handle = part.register_forward_pre_hook(broken)
    else:
        handle = model.layers[0].norm.weight.register_hook(broken)
    text = ""
    try:
        overlap.run_pair(lambda: model(batches[1]), first[0].backward)
    except RuntimeError as error:
        text = str(error)
    handle.remove()
    model.zero_grad()
    dist.barrier()
    found = _result(model, overlap.run, batches)
    return {"text": text, "different": [name for name in truth if not same_bits(truth[name], found[name])]}


def independent(rank: int) -> dict[str, Any]:
    """Two exchanges that do not need each other, with graphs behind them that differ between ranks."""
    log: list[str] = []

    def link(rows: Tensor, sent: Tensor, route: Route) -> Any:
        log.append(str(rows.shape[1]))
        return start_on_group(rows, sent, route)

    overlap, made = Overlap(start=link), []
    x = torch.ones(4, 8, requires_grad=True)

    def forward() -> None:
        first, second = all_to_all(x[:, :3] * 2, [2, 2], [2, 2]), all_to_all(x[:, 3:] * 3, [2, 2], [2, 2])
        for _ in range(20):
            first, second = (first.sin(), second) if rank else (first, second.sin())
        made.append(first.sum() + second.sum())

    overlap.run_pair(forward, None)
    overlap.run_pair(None, made[0].backward)
    return {"log": log, "has_gradient": x.grad is not None}


def sharded(rank: int) -> str:
    """A model whose attention FSDP2 has sharded."""
    model = moe.make(rank)
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.layers:
        fully_shard(layer.attention, mesh=mesh)
    try:
        Overlap().run(model, moe.batches(rank))
    except ConfigError as error:
        return str(error)
    return ""
