"""Pipelines on real ranks: loss and every gradient equal those of one process to the bit; mistakes end all ranks."""

from __future__ import annotations

import functools
import gc
import os
import re
import signal
import threading
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lowtide
from lowtide.errors import ConfigError, PipelineError
from lowtide.pipeline.execute import Pipeline
from lowtide.pipeline.figures import peak_live_chunks, peak_receives
from lowtide.pipeline.generators import GENERATORS, make_schedule
from lowtide.pipeline.schedule import Schedule
from lowtide.pipeline.transfers import with_transfers
from lowtide.pipeline.weight_gradients import WeightGradients, linear
from lowtide.tensors.ranks import ALONE
from tests import staged_models, two_ranks
from tests.staged_models import MANY, Stage
from tests.zoo import mixed, same_bits

SPLIT = ("zb_v", "dualpipev")
RECOMPUTE = mixed(recompute=["layers.*"])
SWAP = mixed(swap=["layers.*"])
SEVERAL = [name for name in GENERATORS if name != "one_stage_overlap"]
"""Schedules of more than one rank."""


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
        tides = [lowtide.apply(stage, memory, engine=f"virtual:{rank}", group=ALONE) for stage in stages.values()]
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
    return told


class Counting:
    """A transport that counts what was asked for and not read."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.waiting, self.peak = inner, 0, 0

    def send(self, *args: Any, **more: Any) -> None:
        self.inner.send(*args, **more)

    def ask(self, *args: Any, **more: Any) -> None:
        self.waiting += 1
        self.peak = max(self.peak, self.waiting)
        self.inner.ask(*args, **more)

    def read(self, result: Any) -> Any:
        self.waiting -= 1
        return self.inner.read(result)

    def finish(self) -> None:
        self.inner.finish()

    def give_up(self) -> None:
        self.inner.give_up()


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
    return Pipeline(schedule, stages, loss=loss, weight_gradients=WeightGradients()), alive


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


Job = two_ranks.Job


def _jobs_of(name: str) -> dict[str, Job]:
    """Of one schedule."""
    jobs: dict[str, Job] = {
        name: ("trained", {"name": name, "num_steps": 2}),
        f"{name}, uneven, recompute": ("trained", {"name": name, "uneven": True, "memory": RECOMPUTE}),
        f"{name}, swap": ("trained", {"name": name, "memory": SWAP}),
        f"{name}, counted": ("counted", {"name": name}),
    }
    if name in SPLIT:
        jobs[f"{name}, tied"] = ("trained", {"name": name, "tied": True})
        jobs[f"{name}, split, tied"] = ("trained", {"name": name, "split": True, "tied": True, "num_steps": 2})
        jobs[f"{name}, split, recompute"] = ("trained", {"name": name, "split": True, "memory": RECOMPUTE})
        jobs[f"{name}, split, swap"] = ("trained", {"name": name, "split": True, "memory": SWAP})
    return jobs


JOBS = {words: job for name in SEVERAL for words, job in _jobs_of(name).items()}
JOBS["refused"] = ("refused", {})
for _how in ("raises", "other width", "too few inputs"):
    JOBS[_how] = ("broken_step", {"name": "1f1b", "how": _how})
FOR_TWO: dict[str, Job] = {"200 steps": ("many_steps", {"num_steps": 200})}
"""Jobs that more ranks would only make longer."""


@pytest.fixture(params=[2, 4], ids=["two", "four"], scope="module")
def answers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, ...]]:
    jobs = JOBS | FOR_TWO if request.param == 2 else JOBS
    given = two_ranks.run(__name__, list(jobs.values()), tmp_path_factory.mktemp("ranks"), num_ranks=request.param)
    return dict(zip(jobs, given, strict=True))


@pytest.mark.parametrize("job", [name for name, (function, _) in JOBS.items() if function == "trained"])
def test_bits_are_those_of_one_process(answers: dict[str, tuple[Any, ...]], job: str) -> None:
    assert [answer["different"] for answer in answers[job]] == [[]] * len(answers[job])
    memory = JOBS[job][1].get("memory")
    if memory is not None:
        which = 0 if memory is RECOMPUTE else 1
        assert all(sum(done[which] for done in answer["done"]) > 0 for answer in answers[job])


@pytest.mark.parametrize("name", SEVERAL)
def test_memory_is_what_the_figures_say(answers: dict[str, tuple[Any, ...]], name: str) -> None:
    given = answers[f"{name}, counted"]
    schedule = with_transfers(make_schedule(name, num_ranks=len(given), num_micro_batches=MANY))
    assert given == tuple(zip(peak_live_chunks(schedule), peak_receives(schedule), strict=True))


def test_ranks_that_do_not_fit_together_refuse_together(answers: dict[str, tuple[Any, ...]]) -> None:
    told = answers["refused"]
    num_ranks = len(told)
    assert len({tuple(each) for each in told}) == 1
    missing, no_loss, two_losses, schedules, smaller, no_module = told[0]
    last = 2 * num_ranks - 1
    assert missing == f"pipeline: 'dualpipev' has stages 0, {last} on this rank, and it was given 0 (rank 0)"
    assert no_loss == f"pipeline: this rank has the last stage, {last}, and no loss (rank 0)"
    assert two_losses == (
        f"pipeline: this rank has a loss, and not the last stage, {last}; give the loss to rank 0 (rank 1)"
    )
    assert re.fullmatch(
        "pipeline: ranks have different schedules: rank 0 has [0-9a-f]{16}, rank 1 has [0-9a-f]{16}", schedules
    )
    assert smaller == f"pipeline: the schedule '1f1b' is for {num_ranks - 1} ranks, not {num_ranks} (rank 0)"
    assert no_module == "pipeline: stage 0 is a str, not a torch.nn.Module (rank 0)"


@pytest.mark.parametrize(
    ("how", "place", "error"),
    [
        ("raises", "rank 1 failed at 1F2 of step 1", "RuntimeError: no more"),
        (
            "other width",
            "rank 1 failed at 1F0 of step 1",
            "RuntimeError: Given normalized_shape=[8], expected input with shape [*, 8], "
            "but got input of size[2, 5, 9]",
        ),
        (
            "too few inputs",
            "rank 0 failed at its start of step 1",
            "ConfigError: pipeline: rank 0 has stage 0 and needs inputs for 8 micro-batches; it was given 7",
        ),
    ],
)
def test_a_failure_of_one_rank_ends_all_with_one_text(
    answers: dict[str, tuple[Any, ...]], how: str, place: str, error: str
) -> None:
    failed = int(place.split()[1])
    for rank, told in enumerate(answers[how]):
        if rank == failed:
            assert told == f"{error}; lowtide: {place}"
        else:
            assert told == f"PipelineError: pipeline: {place}: {error}"


def test_a_killed_rank_ends_all_with_one_text(tmp_path: Path) -> None:
    (told,) = two_ranks.run(__name__, [("killed", {})], tmp_path, num_ranks=3, killed=frozenset({1}))
    assert told[0] == told[2]
    assert re.match(r"pipeline: rank 1 ended without a word; rank (0|2) waited for 1(SEND_F1|SEND_B0) of it", told[0])


@pytest.mark.parametrize("answers", [2], indirect=True, ids=["two"])
def test_nothing_grows_over_200_steps(answers: dict[str, tuple[Any, ...]]) -> None:
    assert answers["200 steps"] == ({"tensors": 0, "threads": 0},) * 2


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb_v", "dualpipev", "one_stage_overlap"])
@pytest.mark.parametrize("split", [False, True])
def test_one_rank_needs_no_process_group(name: str, split: bool) -> None:
    assert trained(0, name, split=split, num_steps=1)["different"] == []
