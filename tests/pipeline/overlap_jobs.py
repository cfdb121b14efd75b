"""What each of two ranks does for test_overlap_ranks.py. A job gives back what differed, and the log of its pairs."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.errors import ConfigError
from lowtide.pipeline import Overlap, Pipeline, WeightGradients, all_to_all, find_ties, linear, split_experts
from lowtide.pipeline.exchange import Route, start_on_group
from lowtide.pipeline.generators import make_schedule
from lowtide.pipeline.overlap import Event
from lowtide.pipeline.schedule import Schedule
from tests.pipeline import moe
from tests.support import moe_models
from tests.support.exposed import exposed
from tests.support.solved import random_plan
from tests.support.virtual_engine import VirtualEngine
from tests.support.zoo import same_bits

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
    for layer in getattr(model, "layers", (model,)):
        for part in (layer.attention, layer.experts):
            forward = part.forward
            part.forward = lambda *args, forward=forward: checkpoint(forward, *args, use_reentrant=False)
    return model


def _in_bf16_but_attention(block: nn.Module) -> nn.Module:
    inner = block.attention.forward

    def uncast(x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return inner(x)

    block.attention.forward = uncast
    return _in_bf16(block)


CHANGES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "autocast": _in_bf16,
    "partly autocast": _in_bf16_but_attention,
    "checkpoint": _checkpointed,
}


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
        runs = [_in_series(Overlap()), Overlap().run, Overlap(log=log.append).run]
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
    Overlap(log=log.append).run(model, moe.batches(rank))
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


NUM_MICRO_BATCHES = 10


def pipeline(
    rank: int,
    schedule: str,
    memory: dict[str, Any] | None = None,
    most_kept: int | None = None,
    change: str | None = None,
) -> dict[str, Any]:
    """Two steps of a pipeline whose stages are blocks with experts, each with a group of its own for them.

    most_kept: weight gradients are put off, the first and the last stage share some, and blocks use some twice."""
    own_group = [dist.new_group([each]) for each in range(2)][rank]

    def start(rows: Tensor, sent: Tensor, route: Route) -> Any:
        return start_on_group(rows, sent, dataclasses.replace(route, group=own_group))

    made = make_schedule(schedule, num_ranks=2, num_micro_batches=NUM_MICRO_BATCHES)
    inputs = [torch.randn(2, 5 + number % 3, moe.WIDTH, generator=torch.Generator().manual_seed(number))
              for number in range(NUM_MICRO_BATCHES)]  # fmt: skip
    truth, losses = _stages(made, most_kept, change, is_plain=True), []
    overlap = Overlap(start=start)
    for batch in inputs:
        found: list[Tensor] = []

        def whole(batch: Tensor = batch, found: list[Tensor] = found) -> None:
            found.append(_loss(nn.Sequential(*truth)(batch), batch))

        overlap.run_pair(whole, None)
        overlap.run_pair(None, found[0].backward)
        losses.append(found[0].detach())

    if most_kept is not None:
        one, other = (truth[number].get_submodule("0.attention.outer").weight for number in (0, -1))
        one.grad = other.grad = one.grad + other.grad
    log: list[Event] = []
    stages = _stages(made, most_kept, change)
    if most_kept is not None:
        stages[-1].get_submodule("0.attention.outer").weight = stages[0].get_submodule("0.attention.outer").weight
    own = {stage: stages[stage] for stage in made.stages_of(rank)}
    has_last = made.num_stages - 1 in own
    with contextlib.ExitStack() as stack:
        for stage in own.values() if memory is not None else ():
            stack.enter_context(lowtide.apply(stage, memory, group=own_group))
        weights = None if most_kept is None else WeightGradients(most_kept=most_kept)
        run_pair = Overlap(start=start, log=log.append, weight_gradients=weights).run_pair
        runner = Pipeline(made, own, loss=_loss if has_last else None, run_pair=run_pair, weight_gradients=weights,
                          tied=None if most_kept is None else find_ties(stages))  # fmt: skip
        stack.callback(runner.close)
        different = []
        for _ in range(2):
            got = runner.step(inputs if 0 in own else None, inputs if has_last else None)
            different.append([number for number, loss in enumerate(got) if not same_bits(loss, losses[number])])
            for number, stage in own.items():
                wanted = dict(truth[number].named_parameters())
                for name, parameter in stage.named_parameters():
                    gradient, whole_gradient = parameter.grad, wanted[name].grad
                    assert (gradient is None) == (whole_gradient is None)
                    if gradient is not None and not same_bits(gradient, whole_gradient / NUM_MICRO_BATCHES):
                        different[-1].append(f"{number} {name}")
            nn.ModuleList(own.values()).zero_grad()
    both = {event.pair for event in log if event.half == "forward"} & {e.pair for e in log if e.half == "backward"}
    issues = [event for event in log if event.kind == "issue"]
    return {
        "different": different,
        "num_issues": len(issues),
        "num_alone": sum(event.pair not in both for event in issues),
        "num_exposed": len(exposed(log)),
        "num_filled": sum(event.kind == "fill" for event in log),
    }


class _Residual(nn.Module):
    """A stage: a block of DeepSeek-V3, with shared experts and with others."""

    def __init__(self, seed: int, implementation: str) -> None:
        super().__init__()
        self.mlp = moe_models.make_model("deepseek_v3", implementation, seed=seed).model.layers[1].mlp

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x)


def split_blocks(rank: int, implementation: str, num_parts: int, memory: dict[str, Any] | None) -> dict[str, Any]:
    """A step of a pipeline of such stages, each with a group of its own; what differs from one process."""
    own_group = [dist.new_group([each]) for each in range(2)][rank]
    schedule = make_schedule("dualpipev", num_ranks=2, num_micro_batches=NUM_MICRO_BATCHES)
    stages = [_Residual(seed, implementation) for seed in range(schedule.num_stages)]
    truth = copy.deepcopy(stages)
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(2, 5 + number % 3, 32, generator=generator) for number in range(NUM_MICRO_BATCHES)]
    losses = []
    for batch in inputs:
        loss = _loss(nn.Sequential(*truth)(batch), batch)
        loss.backward()
        losses.append(loss.detach())
    own = {stage: stages[stage] for stage in schedule.stages_of(rank)}
    for stage in own.values():
        split_experts(stage, group=own_group, num_parts=num_parts)
    has_last = schedule.num_stages - 1 in own
    log: list[Event] = []
    weights = WeightGradients(most_kept=2)
    run_pair = Overlap(log=log.append, weight_gradients=weights).run_pair
    with contextlib.ExitStack() as stack:
        for stage in own.values() if memory is not None else ():
            stack.enter_context(lowtide.apply(stage, memory, group=own_group))
        runner = Pipeline(schedule, own, loss=_loss if has_last else None, run_pair=run_pair, weight_gradients=weights)
        stack.callback(runner.close)
        got = runner.step(inputs if 0 in own else None, inputs if has_last else None)
    wanted = {f"{number} {name}": p for number in own for name, p in truth[number].named_parameters()}
    found = {f"{number} {name}": p for number, stage in own.items() for name, p in stage.named_parameters()}
    different = [name for name, p in found.items() if not same_bits(p.grad, wanted[name].grad / NUM_MICRO_BATCHES)]
    different += [str(number) for number, loss in enumerate(got) if not same_bits(loss, losses[number])]
    return {"different": different, "num_filled": sum(event.kind == "fill" for event in log), "num": len(found)}


def _stages(
    schedule: Schedule, most_kept: int | None, change: str | None, *, is_plain: bool = False
) -> list[nn.Module]:
    """is_plain: with torch's own linear layers, for one process."""
    stages = []
    for stage in range(schedule.num_stages):
        torch.manual_seed(stage if most_kept is None else min(stage, schedule.num_stages - 1 - stage))
        block = moe.Block(1, hides=False)
        block.attention.dropout.p = 0.0
        if most_kept is not None:
            for name, module in block.experts.each[0].named_modules():
                if type(module) is nn.Linear:  # not the bias, which may not be used twice under autocast
                    block.shared.get_submodule(name).weight = module.weight
            for module in block.modules():
                if type(module) is nn.Linear and not is_plain:
                    module.forward = functools.partial(_linear, module)
        if change is not None:
            CHANGES[change](block)
        stages.append(nn.Sequential(block))
    return stages


def _linear(module: nn.Linear, x: Tensor) -> Tensor:
    return linear(x, module.weight, module.bias)


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return (output * target).mean()
