"""What the ranks of tests/pipeline/test_execute.py do: one function a job, run by every rank of a process group."""

from __future__ import annotations

import copy
import functools
import gc
import io
import itertools
import os
import re
import signal
import threading
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleZBVZeroBubble

import lowtide
from lowtide.errors import ConfigError, PipelineError
from lowtide.pipeline import attach
from lowtide.pipeline.exchange import all_to_all
from lowtide.pipeline.execute import Pipeline
from lowtide.pipeline.generators import make_schedule
from lowtide.pipeline.schedule import Kind, Result, Schedule
from lowtide.pipeline.weight_gradients import WeightGradients, linear
from lowtide.tensors.fsdp import whole_of
from lowtide.tensors.ranks import ALONE
from tests.support import budget_jobs, staged_models
from tests.support.staged_models import LENGTHS, MANY, NUM_PIECES, Stage
from tests.support.virtual_engine import virtual
from tests.support.zoo import same_bits


@functools.cache
def _truth(tied: bool) -> staged_models.Truth:
    return staged_models.truth(2, tied=tied)


def _own_stages(schedule: Schedule, rank: int, *, tied: bool = False, uneven: bool = False) -> dict[int, Stage]:
    every = staged_models.cut(staged_models.pieces(tied=tied), schedule.num_stages, uneven=uneven)
    return {stage: every[stage] for stage in schedule.stages_of(rank)}


def _pipeline(schedule: Schedule, stages: dict[int, Stage], **more: Any) -> Pipeline:
    has_loss = schedule.num_stages - 1 in stages
    return Pipeline(schedule, stages, loss=staged_models.loss_of if has_loss else None, **more)


def _batch(pipeline: Pipeline, step: int) -> tuple[list[Tensor] | None, list[Tensor] | None]:
    tokens = staged_models.batches(step)
    has_end = pipeline.schedule.num_stages - 1 in pipeline.stages
    return tokens if 0 in pipeline.stages else None, tokens if has_end else None


def trained(
    rank: int,
    name: str,
    *,
    tied: bool = False,
    uneven: bool = False,
    split: bool = False,
    memory: dict[str, Any] | None = None,
    budget: str | None = None,
    num_steps: int = 1,
) -> dict[str, Any]:
    """What differs from one process in some steps, and what the tides of the stages did."""
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    schedule = make_schedule(name, num_ranks=num_ranks, num_micro_batches=MANY)
    stages = _own_stages(schedule, rank, tied=tied, uneven=uneven)
    sizes = [
        len(stage.layers) for stage in staged_models.cut(staged_models.pieces(), schedule.num_stages, uneven=uneven)
    ]
    model = nn.ModuleList(stages.values())
    optimizer = staged_models.make_optimizer(model)
    tides = []
    if memory is not None:
        tides = [lowtide.apply(stage, memory, engine=virtual(rank), group=ALONE) for stage in stages.values()]
    if budget is not None:
        tides = [lowtide.optimize(stage, budget=budget, engine=virtual(rank), group=ALONE) for stage in stages.values()]
    pipeline = _pipeline(schedule, stages, weight_gradients=WeightGradients() if split else None)
    truth = _truth(tied)
    different = []
    for step in range(num_steps):
        optimizer.zero_grad()
        losses = pipeline.step(*_batch(pipeline, step))
        if schedule.num_stages - 1 in stages:
            pairs = zip(losses, truth.losses[step], strict=True)
            different += [f"loss {number}" for number, pair in enumerate(pairs) if not same_bits(*pair)]
        for number, stage in stages.items():
            own = range(sum(sizes[:number]), sum(sizes[: number + 1]))
            gradients = {name: parameter.grad for name, parameter in stage.named_parameters(remove_duplicate=False)}
            wanted = dict(truth.named(step, own))
            assert gradients.keys() == wanted.keys()
            different += [
                f"step {step} stage {number} {name}" for name in wanted if not same_bits(gradients[name], wanted[name])
            ]
        optimizer.step()
    pipeline.close()
    done = [(tide.stats.recomputed_bytes, tide.stats.swapped_bytes) for tide in tides]
    for tide in tides:
        tide.remove()
    return {"different": different, "done": done}


def _words(error: BaseException) -> str:
    """Its type, its text, and the notes on it."""
    return "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])


class Raising(nn.Module):
    """Raises in its third call."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        self.num_calls += 1
        if self.num_calls == 3:
            raise RuntimeError("no more")
        return inputs


class Killing(nn.Module):
    """Ends its process in its second call, as the kernel does when memory runs out."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        self.num_calls += 1
        if self.num_calls == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return inputs


def killed(rank: int) -> str:
    """What the others are told when the last rank but one is killed."""
    schedule = make_schedule("1f1b", num_ranks=dist.get_world_size(), num_micro_batches=MANY)
    stages = _own_stages(schedule, rank)
    pipeline = _pipeline(schedule, stages)
    if rank == schedule.num_ranks - 2:
        stages[rank].layers.insert(0, Killing())
    with pytest.raises(PipelineError) as caught:
        pipeline.step(*_batch(pipeline, 0))
    return str(caught.value)


def broken_step(rank: int, name: str, how: str) -> str:
    """What each rank is told when something is wrong on one; its gradients must be as they were."""
    schedule = make_schedule(name, num_ranks=dist.get_world_size(), num_micro_batches=MANY)
    stages = _own_stages(schedule, rank)
    pipeline = _pipeline(schedule, stages)
    inputs, targets = _batch(pipeline, 0)
    if rank == 1 and how == "raises":
        stages[1].layers.insert(0, Raising())
    if rank == 0 and how == "other width":
        stages[0].layers.append(Other())
    if rank == 0 and how == "too few inputs":
        inputs = inputs[:-1]
    if rank == 0 and how == "generator":
        inputs = (entry for entry in inputs)
    for stage in stages.values():
        for parameter in stage.parameters():
            parameter.grad = torch.ones_like(parameter)
    with pytest.raises((RuntimeError, ConfigError)) as caught:
        pipeline.step(inputs, targets)
    assert all(bool((p.grad == 1).all()) for stage in stages.values() for p in stage.parameters())
    return _words(caught.value)


class Other(nn.Module):
    """Makes the hidden state wider."""

    def forward(self, x: Tensor, scale: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
        return torch.cat([x, x[..., :1]], dim=-1), scale, tokens


def refused(rank: int) -> list[str]:
    """What each rank is told when ranks do not fit together, before any waits."""
    num_ranks = dist.get_world_size()
    good = make_schedule("dualpipev", num_ranks=num_ranks, num_micro_batches=MANY)
    stages = _own_stages(good, rank)
    has_loss = good.num_stages - 1 in stages
    loss = staged_models.loss_of if has_loss else None
    other = make_schedule("dualpipev", num_ranks=num_ranks, num_micro_batches=MANY + rank)
    smaller = make_schedule("1f1b", num_ranks=num_ranks - 1, num_micro_batches=MANY)
    without_last = {stage: module for stage, module in stages.items() if stage != good.num_stages - 1}
    attempts: list[tuple[Any, ...]] = [
        (good, without_last, loss),
        (good, stages, None),
        (good, stages, staged_models.loss_of),
        (other, stages, loss),
        (smaller, stages, loss),
        (good, dict.fromkeys(stages, "no module"), loss),
    ]
    told = []
    for schedule, given, which in attempts:
        with pytest.raises(ConfigError) as caught:
            Pipeline(schedule, given, loss=which)
        told.append(str(caught.value))
    alone = [dist.new_group([number]) for number in range(num_ranks)][rank]
    parallel = nn.parallel.DistributedDataParallel
    replicas = {stage: parallel(module, process_group=alone) for stage, module in stages.items()}
    inside = {stage: nn.Sequential(replica) for stage, replica in replicas.items()}
    hooked = {stage: parallel(module, process_group=alone) for stage, module in stages.items()}
    for replica in hooked.values():
        replica.register_comm_hook(None, allreduce_hook)
    for given in (inside, hooked):
        with pytest.raises(ConfigError) as caught:
            Pipeline(good, given, loss=loss)
        told.append(str(caught.value))
    mesh = DeviceMesh.from_group(alone, "cpu")
    for stage in stages.values():
        fully_shard(stage.layers[0], mesh=mesh)
    with pytest.raises(ConfigError) as caught:
        Pipeline(good, stages, loss=loss, run_pair=lambda forward, backward: None)
    told.append(str(caught.value))
    return told


class Counting:
    """A transport that counts what was asked for and not read."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.waiting, self.peak = inner, 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def ask(self, *args: Any, **more: Any) -> None:
        self.waiting += 1
        self.peak = max(self.peak, self.waiting)
        self.inner.ask(*args, **more)

    def read(self, result: Any) -> Any:
        self.waiting -= 1
        return self.inner.read(result)


class Watched(nn.Module):
    """One layer that counts how many of its inputs are alive."""

    def __init__(self, alive: Counter[str]) -> None:
        super().__init__()
        self.weight, self.alive = nn.Parameter(torch.randn(4, 4)), alive

    def forward(self, x: Tensor) -> Tensor:
        held = x * 1  # nobody has it but the backward of the next line
        self.alive["now"] += 1
        self.alive["most"] = max(self.alive["most"], self.alive["now"])
        weakref.finalize(held, self.alive.subtract, ["now"])
        return linear(held, self.weight)


def _watched(schedule: Schedule, rank: int) -> tuple[Pipeline, Counter[str]]:
    alive: Counter[str] = Counter()
    torch.manual_seed(0)
    stages = {stage: Watched(alive) for stage in schedule.stages_of(rank)}
    loss = (lambda output, _: output.sum()) if schedule.num_stages - 1 in stages else None
    return Pipeline(schedule, stages, loss=loss, weight_gradients=WeightGradients(), tied=()), alive


def counted(rank: int, name: str) -> tuple[int, int]:
    """The most chunks alive and the most messages outstanding, in a step."""
    schedule = make_schedule(name, num_ranks=dist.get_world_size(), num_micro_batches=MANY)
    pipeline, alive = _watched(schedule, rank)
    counting = pipeline.transport = Counting(pipeline.transport)
    batch = [torch.randn(2, 4) for _ in range(MANY)]
    pipeline.step(batch if rank == 0 else None, batch if pipeline.loss is not None else None)
    pipeline.close()
    assert alive["now"] == 0
    return alive["most"], counting.peak


def many_steps(rank: int, num_steps: int) -> dict[str, int]:
    """What has grown between the third step and the last."""
    schedule = make_schedule("dualpipev", num_ranks=dist.get_world_size(), num_micro_batches=2 * dist.get_world_size())
    pipeline, _ = _watched(schedule, rank)
    batch = [torch.randn(2, 4) for _ in range(schedule.num_micro_batches)] if rank == 0 else None
    counts = []
    for step in range(num_steps):
        for stage in pipeline.stages.values():
            stage.zero_grad()
        pipeline.step(batch, batch)
        if step in (2, num_steps - 1):
            gc.collect()
            tensors = sum(issubclass(type(each), Tensor) for each in gc.get_objects())
            counts.append({"tensors": tensors, "threads": threading.active_count()})
    pipeline.close()
    return {what: counts[1][what] - counts[0][what] for what in counts[0]}


def resumed(rank: int) -> list[str]:
    """What differs between steps in one go, and the same with a restart from the state of stages and optimizer."""
    schedule = make_schedule("dualpipev", num_ranks=dist.get_world_size(), num_micro_batches=MANY)

    def begin(state: bytes | None) -> tuple[Pipeline, nn.Module, torch.optim.Optimizer]:
        stages = _own_stages(schedule, rank, tied=True)
        model = nn.ModuleDict({str(number): stage for number, stage in stages.items()})
        optimizer = staged_models.make_optimizer(model)
        if state is not None:
            loaded = torch.load(io.BytesIO(state))
            model.load_state_dict(loaded["model"])
            optimizer.load_state_dict(loaded["optimizer"])
        return _pipeline(schedule, stages, weight_gradients=WeightGradients()), model, optimizer

    def train(pipeline: Pipeline, optimizer: torch.optim.Optimizer, steps: range) -> list[Tensor]:
        losses = []
        for step in steps:
            optimizer.zero_grad()
            losses += pipeline.step(*_batch(pipeline, step))
            optimizer.step()
        pipeline.close()
        return losses

    pipeline, whole, optimizer = begin(None)
    curve = train(pipeline, optimizer, range(4))
    pipeline, model, optimizer = begin(None)
    train(pipeline, optimizer, range(2))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    pipeline, model, optimizer = begin(file.getvalue())
    rest = train(pipeline, optimizer, range(2, 4))
    different = [f"loss {number}" for number, pair in enumerate(zip(curve[len(rest) :], rest)) if not same_bits(*pair)]
    for (name, one), other in zip(whole.named_parameters(), model.parameters(), strict=True):
        if not same_bits(one, other):
            different.append(name)
    return different


def swapped(rank: int) -> list[str]:
    """What two ranks are told when one asks for two messages in another order than they are sent."""
    schedule = make_schedule("gpipe", num_ranks=2, num_micro_batches=MANY)
    pipeline = _pipeline(schedule, _own_stages(schedule, rank))
    results = [Result(Kind.FORWARD, 0, number) for number in range(2)]
    transport = pipeline.transport
    assert transport is not None
    if rank == 0:
        for number, result in enumerate(results):
            transport.send(result, [torch.full((3,), float(number))], to=1)
        with pytest.raises(PipelineError) as caught:
            transport.finish()
    else:
        with pytest.raises(PipelineError) as caught:
            transport.ask(results[1], source=0)
        transport.give_up()
    return [str(caught.value).partition(" (")[0]]


def kept_gradients(rank: int) -> list[str]:
    """What differs when gradients of one step are added to those of another, and divided by a number of one's own."""
    schedule = make_schedule("dualpipev", num_ranks=dist.get_world_size(), num_micro_batches=MANY)
    stages = _own_stages(schedule, rank)
    pipeline = _pipeline(schedule, stages)
    model = nn.ModuleList(stages.values())
    apart = []
    for step in range(2):
        model.zero_grad()
        pipeline.step(*_batch(pipeline, step), divide_by=3.0)
        apart.append([parameter.grad for parameter in model.parameters()])
    model.zero_grad()
    for step in range(2):
        pipeline.step(*_batch(pipeline, step), divide_by=3.0)
    pipeline.close()
    wanted = staged_models.truth(1, divide_by=3.0).gradients[0]
    own = [wanted[piece][name] for piece, name in _names(schedule, stages)]
    different = ["divided" for got, want in zip(apart[0], own, strict=True) if not same_bits(got, want)]
    for parameter, first, second in zip(model.parameters(), *apart, strict=True):
        if not same_bits(parameter.grad, first + second):
            different.append("added")
    return different


def changing(rank: int) -> list[str]:
    """What differs when the first half of the pieces is frozen after a step, and thawed after one more; and what is
    said where a stage gives other shapes for a batch of the same shape."""
    schedule = make_schedule("1f1b", num_ranks=dist.get_world_size(), num_micro_batches=MANY)
    pieces = staged_models.pieces()
    every = staged_models.cut(pieces, schedule.num_stages)
    pipeline = _pipeline(schedule, {rank: every[rank]})
    other = staged_models.pieces()
    different = []
    for step, is_frozen in enumerate((False, True, False)):
        for one in (pieces, other):
            nn.ModuleList(one).zero_grad()
            nn.ModuleList(one[: NUM_PIECES // 2]).requires_grad_(not is_frozen)
        pipeline.step(*_batch(pipeline, step))
        for tokens in staged_models.batches(step):
            staged_models.loss_of(Stage(other)(tokens), tokens).backward()
        for name, parameter in nn.ModuleList(pieces).named_parameters():
            wanted = nn.ModuleList(other).get_parameter(name).grad
            if parameter in set(every[rank].parameters()) and not (
                parameter.grad is wanted is None or same_bits(parameter.grad, wanted / MANY)
            ):
                different.append(f"step {step}: {name}")
    every[0].layers.append(Shrinking())
    with pytest.raises((ConfigError, PipelineError)) as caught:
        pipeline.step(*_batch(pipeline, 0))
    return [*different, str(caught.value)]


class Shrinking(nn.Module):
    """Gives one row less in its eighth call, whose batch has the shape of an earlier one."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        self.num_calls += 1
        return tuple(each[:1] if self.num_calls == 8 and each.dim() > 1 else each for each in inputs)


class Passing(nn.Module):
    """Passes on what `how` makes of its own result; reads a number for each element, whatever it was made into."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.layer = how, nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(2))

    def forward(self, x: Tensor, *more: Tensor) -> Any:
        x = self.layer(x.real - x.imag if x.is_complex() else x) * (1 + sum(each.sum() for each in more))
        self.count += 1
        if self.how == "conjugated":
            return torch.complex(x, x.square()).conj()
        if self.how == "negated":
            return x, torch.complex(x, x.square()).conj()[0, 0].imag
        if self.how == "expanded":
            return x.mean(0, keepdim=True).expand(3, 4)
        return {"transposed": x.t().contiguous().t(), "written": (x, self.count), "copied": (x, self.count.clone())}[
            self.how
        ]


def passed_on(rank: int, how: str, name: str) -> list[str]:
    """What differs from one process where stages pass on such tensors, or what is said."""
    schedule = make_schedule(name, num_ranks=dist.get_world_size(), num_micro_batches=MANY)
    torch.manual_seed(0)
    every = [Passing(how) for _ in range(schedule.num_stages)]
    plain = copy.deepcopy(every)
    batch = [torch.randn(3, 4) for _ in range(MANY)]

    def loss_of(output: Any, target: Tensor) -> Tensor:
        output = output[0] if isinstance(output, tuple) else output
        return nn.functional.mse_loss(output.real - output.imag if output.is_complex() else output, target)

    wanted = []
    for x in batch:
        given: Any = (x,)
        for stage in plain:
            given = stage(*given)
            given = given if isinstance(given, tuple) else (given,)
        wanted.append(loss_of(given, x))
        wanted[-1].backward()
    own = {stage: every[stage] for stage in schedule.stages_of(rank)}
    has_loss = schedule.num_stages - 1 in own
    pipeline = Pipeline(schedule, own, loss=loss_of if has_loss else None)
    try:
        losses = pipeline.step(batch if 0 in own else None, batch if has_loss else None)
    except (ConfigError, PipelineError) as error:
        return [re.sub(r"\d+", "N", str(error).rpartition("ConfigError: ")[2])]
    different = [str(number) for number, loss in enumerate(losses) if not same_bits(loss, wanted[number].detach())]
    for stage, module in own.items():
        for (each, mine), theirs in zip(module.named_parameters(), plain[stage].parameters(), strict=True):
            different += [f"{stage}.{each}"] * (not same_bits(mine.grad, theirs.grad / MANY))
    return different


def norm_of_some(rank: int, how: str) -> str:
    """What is said where one rank alone asks for the norm, or cannot tell its own."""
    schedule = make_schedule("1f1b", num_ranks=dist.get_world_size(), num_micro_batches=MANY)
    pipeline = _pipeline(schedule, _own_stages(schedule, rank))
    if how != "too early":
        pipeline.step(*_batch(pipeline, 0))
    if how == "sparse" and rank == 0:
        weight = pipeline.stages[0].layers[0].weight
        weight.grad = weight.grad.to_sparse()
    asks = how == "sparse" or rank == 0
    with pytest.raises((ConfigError, PipelineError, NotImplementedError)) as caught:
        pipeline.gradient_norm() if asks else pipeline.step(*_batch(pipeline, 1))
    return _words(caught.value)


def _names(schedule: Schedule, stages: dict[int, Stage]) -> list[tuple[int, str]]:
    """Of each parameter, in order: the number of its piece, and its name there."""
    sizes = [len(stage.layers) for stage in staged_models.cut(staged_models.pieces(), schedule.num_stages)]
    return [
        (sum(sizes[:number]) + place, name)
        for number, stage in stages.items()
        for place, layer in enumerate(stage.layers)
        for name, _ in layer.named_parameters()
    ]


def fully_sharded(rank: int, names: list[str]) -> list[str]:
    """What differs from the mean of two processes in two pipelines of two ranks whose stages FSDP2 shards, or have
    DistributedDataParallel around them."""
    pipelines = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    which, place = rank % 2, rank // 2
    group = [dist.new_group(pair) for pair in ([0, 1], [2, 3])][place]
    mesh = DeviceMesh.from_group(group, "cpu")
    tokens = [staged_models.batches(replica) for replica in range(2)]
    different = []
    gradients, losses = [], []
    for replica in range(2):
        model = Stage(staged_models.pieces())
        losses.append([staged_models.loss_of(model(x), x) for x in tokens[replica]])
        for loss in losses[-1]:
            loss.backward()
        gradients.append([[p.grad for p in layer.parameters()] for layer in model.layers])
    # Whether weights stay gathered is FSDP2's, so each schedule has one of the two, and the last one both.
    each: list[tuple[str, bool | None]] = [(name, number % 2 == 0) for number, name in enumerate([*names, names[-1]])]
    for name, reshards in (*each, *((name, None) for name in names)):
        schedule = make_schedule(name, num_ranks=2, num_micro_batches=MANY)
        every = staged_models.cut(staged_models.pieces(), schedule.num_stages)
        stages = {number: every[number] for number in schedule.stages_of(place)}
        around: dict[int, Any] = dict(stages)
        for number, stage in stages.items():
            if reshards is None:
                around[number] = nn.parallel.DistributedDataParallel(stage, process_group=group)
                continue
            for layer in stage.layers:
                fully_shard(layer, mesh=mesh, reshard_after_forward=reshards)
            fully_shard(stage, mesh=mesh, reshard_after_forward=reshards)
        weights = WeightGradients() if name in ("zb_v", "dualpipev") else None
        pipeline = _pipeline(schedule, around, group=pipelines[which], weight_gradients=weights, tied=())
        given = (tokens[which] if 0 in stages else None, tokens[which] if pipeline.loss is not None else None)
        for _ in range(2):
            nn.ModuleList(stages.values()).zero_grad()
            found = pipeline.step(*given)
        every_wanted = [(one + other) / 2 / MANY for pair in zip(*gradients, strict=True) for one, other in zip(*pair)]
        norm = torch.nn.utils.get_total_norm(every_wanted)
        different += [] if torch.allclose(pipeline.gradient_norm(), norm, rtol=1e-6) else [f"{name}: norm"]
        if pipeline.loss is not None:
            pairs = zip(found, losses[which], strict=True)
            different += [f"{name}: loss" for one, other in pairs if not same_bits(one, other.detach())]
        first = 0
        for number, stage in enumerate(every):
            for piece, layer in enumerate(stage.layers if number in stages else (), start=first):
                for (where, parameter), *both in zip(
                    layer.named_parameters(), *(g[piece] for g in gradients), strict=True
                ):
                    wanted = (both[0] + both[1]) / 2 / MANY
                    if not same_bits(whole_of(parameter.grad), wanted):
                        different.append(f"{name}: {piece} {where}")
            first += len(stage.layers)
        pipeline.close()
    return different


def within_budgets(rank: int, each: list[tuple[str, dict[str, Any], dict[str, Any]]]) -> list[dict[str, Any]]:
    """Of two pipelines of two ranks with these schedules, stages and rules: what differs, and what was needed."""
    return [
        budget_jobs.budgets(rank, name, share=0.75, is_of_plain=True, about={"num_micro_batches": 4, **about}, **rules)
        for name, about, rules in each
    ]


def needs(rank: int, each: list[tuple[str, dict[str, Any]]]) -> list[tuple[int, int]]:
    """Of such pipelines: what a rank is said to need with everything kept, and what it needs."""
    found = []
    for name, about in each:
        found += budget_jobs.kept(rank, [name], about={"num_micro_batches": 4, **about})
    return found


class Plain(nn.Module):
    """A layer of one tensor, as torch's own stages take it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + linear(torch.tanh(self.up(self.norm(x))), self.down.weight)


def sharded_under_torch(rank: int) -> dict[tuple[bool, bool], list[str]]:
    """Parameters whose gradient is not the mean of two processes, in torch's ScheduleZBVZeroBubble on two pipelines of
    two ranks, whose stages FSDP2 shards. By (whether lowtide is attached, `reshard_after_forward`)."""
    num_micro_batches = 6
    pipelines = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    which, place = rank % 2, rank // 2
    mesh = DeviceMesh.from_group([dist.new_group(pair) for pair in ([0, 1], [2, 3])][place], "cpu")
    torch.manual_seed(0)
    layers = [nn.Sequential(Plain(), Plain()) for _ in range(4)]
    batches = [(torch.randn(2 * num_micro_batches, 8), torch.randn(2 * num_micro_batches, 8)) for _ in range(2)]
    gradients = []
    for inputs, targets in batches:
        truth = copy.deepcopy(layers)
        for x, y in zip(inputs.chunk(num_micro_batches), targets.chunk(num_micro_batches), strict=True):
            nn.functional.mse_loss(nn.Sequential(*truth)(x), y).backward()
        gradients.append([[p.grad for p in layer.parameters()] for layer in truth])
    own, (inputs, targets), found = (0, 3) if place == 0 else (1, 2), batches[which], {}
    for is_attached, reshards in itertools.product((False, True), (False, True)):
        stages = []
        for number in own:
            stage = copy.deepcopy(layers[number])
            for layer in stage:
                fully_shard(layer, mesh=mesh, reshard_after_forward=reshards)
            fully_shard(stage, mesh=mesh, reshard_after_forward=reshards)
            stages.append(PipelineStage(stage, number, 4, torch.device("cpu"), group=pipelines[which]))
        schedule = ScheduleZBVZeroBubble(stages, num_micro_batches, loss_fn=nn.functional.mse_loss)
        budget: Any = {"budget": 2**40, "together": dist.group.WORLD} if reshards else {}
        attached = attach(schedule, tied=(), engine=virtual(rank), **budget) if is_attached else None
        how: dict[str, Any] = {"target": targets if place == 0 else None, "return_outputs": False}
        schedule.step(*((inputs,) if place == 0 else ()), **how)
        found[is_attached, reshards] = [
            f"{number}: {name}"
            for number, stage in zip(own, stages, strict=True)
            for (name, parameter), *both in zip(stage.submod.named_parameters(), *(g[number] for g in gradients))
            if parameter.grad is None
            or not same_bits(parameter.grad.full_tensor(), (both[0] + both[1]) / 2 / num_micro_batches)
        ]
        if attached is not None:
            attached.remove()
    return found


class Experts(nn.Module):
    """Top-1 experts, half of them on each of two ranks."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.norm, self.router, self.shared = nn.LayerNorm(8), nn.Linear(8, 4), nn.Linear(8, 8)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        h = x + torch.tanh(linear(self.norm(x), self.shared.weight, self.shared.bias))
        tokens = h.flatten(0, 1)
        share, chosen = torch.softmax(self.router(tokens), -1).max(-1)
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=4)
        theirs = all_to_all(counts, [2, 2], [2, 2], group=self.group).view(2, 2)
        sent, got = counts.view(2, 2).sum(1).tolist(), theirs.sum(1).tolist()
        parts = all_to_all(tokens[order], got, sent, group=self.group).split(theirs.flatten().tolist())
        made = torch.cat([self.experts[number % 2](part) for number, part in enumerate(parts)])
        back = all_to_all(made, sent, got, group=self.group)
        return h + (torch.zeros_like(tokens).index_copy(0, order, back) * share[:, None]).view_as(h)


def with_experts(rank: int, names: list[str]) -> list[tuple[list[bytes], dict[int, list[bytes]]]]:
    """Two pipelines of two ranks side by side, whose stages share experts: bytes of losses and gradients, of each
    schedule."""
    pipelines = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    sharing = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    which, place = rank % 2, rank // 2
    generator = torch.Generator().manual_seed(which)
    batch = [torch.randn(2, length, 8, generator=generator) for length in LENGTHS]
    found = []
    for name in names:
        schedule = make_schedule(name, num_ranks=2, num_micro_batches=MANY)
        torch.manual_seed(which)
        every = nn.ModuleList(Experts(sharing[place]) for _ in range(4))
        each = 4 // schedule.num_stages
        stages = {
            number: nn.Sequential(*every[number * each : (number + 1) * each]) for number in schedule.stages_of(place)
        }
        has_end = schedule.num_stages - 1 in stages
        loss = nn.functional.mse_loss if has_end else None
        pipeline = Pipeline(schedule, stages, loss=loss, group=pipelines[which], weight_gradients=WeightGradients())
        losses = pipeline.step(batch if 0 in stages else None, batch if has_end else None)
        pipeline.close()
        bits = [loss.numpy().tobytes() for loss in losses]
        own = {
            number: [p.grad.numpy().tobytes() for p in block.parameters()]
            for number, block in enumerate(every)
            if block.norm.weight.grad is not None
        }
        found.append((bits, own))
    return found
