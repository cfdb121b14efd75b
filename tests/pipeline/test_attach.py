"""Rules, budgets, put-off weight gradients and pairs on torch's own schedules, on two real ranks: the bits of one
process, and a layer that is recomputed runs once more, not twice."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

from lowtide.errors import ConfigError
from lowtide.pipeline import attach, linear
from lowtide.tensors.ranks import gather
from tests.support import two_ranks
from tests.support.virtual_engine import virtual
from tests.support.zoo import mixed, same_bits

M = 6
SCHEDULES = {
    "Schedule1F1B": ((0,), (1,)),
    "ScheduleInterleaved1F1B": ((0, 2), (1, 3)),
    "ScheduleInterleavedZeroBubble": ((0, 2), (1, 3)),
    "ScheduleZBVZeroBubble": ((0, 3), (1, 2)),
    "ScheduleDualPipeV": ((0, 3), (1, 2)),
}
"""The stages of both ranks."""
RULES = {"plain": None, "recompute": mixed(recompute=["layers.*"]), "swap": mixed(swap=["layers.*"])}
CASES = [
    (name, rules) for number, name in enumerate(SCHEDULES) for rules in ("plain", ("recompute", "swap")[number % 2])
]
"""Our own schedules recompute and swap in test_execute.py."""


class Counted(torch.autograd.Function):
    """How often a layer runs."""

    num_runs = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Counted.num_runs += 1
        ctx.save_for_backward(x)
        return torch.tanh(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (1 - torch.tanh(x).square())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        inner = Counted.apply(self.up(self.norm(x)))
        return x + linear(inner, self.down.weight, self.down.bias)


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def trained(rank: int, name: str, rules: str) -> tuple[list[str], int]:
    """What differs from one process in two steps, and after `remove()` in one more; how often a layer ran in a step."""
    torch.manual_seed(0)
    own = SCHEDULES[name][rank]
    num_stages = sum(map(len, SCHEDULES[name]))
    every = [Stage() for _ in range(num_stages)]
    truth = copy.deepcopy(every)
    inputs, targets = torch.randn(2 * M, 8), torch.randn(2 * M, 8)
    wanted = []
    for x, y in zip(inputs.chunk(M), targets.chunk(M), strict=True):
        loss = loss_of(nn.Sequential(*truth)(x), y)
        loss.backward()
        wanted.append(loss.detach())
    schedule = torchs(rank, name, every)
    attached = attach(schedule, memory=RULES[rules], engine=virtual(rank))
    found: list[str] = []
    counts = []
    events: list[str] = []
    """Of one weight and its layer: when a weight gradient was added, and when that of the layer's input was there."""
    block = every[own[0]].layers[1]
    if rules == "plain":
        block.up.weight.register_post_accumulate_grad_hook(lambda _: events.append("weight"))
        block.norm.register_full_backward_hook(lambda *_: events.append("input"))
    for step in range(3):
        if step == 2:
            attached.remove()
        for number in own:
            every[number].zero_grad()
        Counted.num_runs = 0
        losses: list[Tensor] = []
        is_last = num_stages - 1 in own
        how: dict[str, Any] = {"losses": losses, "target": targets if is_last else None}
        schedule.step(*((inputs,) if 0 in own else ()), **how)
        counts.append(Counted.num_runs)
        found += [f"loss {n}" for n, pair in enumerate(zip(losses, wanted)) if not same_bits(*pair)]
        for number in own:
            for (where, got), want in zip(every[number].named_parameters(), truth[number].parameters(), strict=True):
                if not same_bits(got.grad, want.grad / M):
                    found.append(f"step {step}, stage {number}: {where}")
    # Where all backwards are split, the gradient of the input goes first.
    found += ["not put off"] * (events[:1] == ["weight"] and name == "ScheduleZBVZeroBubble")
    return found, counts[1]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], tuple[Any, ...]]:
    jobs = [("trained", {"name": name, "rules": rules}) for name, rules in CASES]
    return dict(zip(CASES, two_ranks.run(__name__, jobs, tmp_path_factory.mktemp("ranks")), strict=True))


@pytest.mark.parametrize(("name", "rules"), CASES)
def test_bits_are_those_of_one_process(told: dict[tuple[str, str], tuple[Any, ...]], name: str, rules: str) -> None:
    num_runs = 2 * M * len(SCHEDULES[name][0]) * (2 if rules == "recompute" else 1)
    assert told[name, rules] == (([], num_runs),) * 2


def torchs(rank: int, name: str, every: list[nn.Module], num_micro_batches: int = M, **how: Any) -> Any:
    """A schedule of torch's on the stages of this rank."""
    own = SCHEDULES[name][rank]
    stages = [PipelineStage(every[number], number, len(every), torch.device("cpu")) for number in own]
    given: Any = stages[0] if name == "Schedule1F1B" else stages
    return getattr(pipelining, name)(given, num_micro_batches, loss_fn=loss_of, **how)


def different(rank: int, name: str, every: list[nn.Module], truth: list[nn.Module], scale: float) -> list[str]:
    return [
        f"{number}: {where}"
        for number in SCHEDULES[name][rank]
        for (where, got), want in zip(every[number].named_parameters(), truth[number].parameters(), strict=True)
        if not same_bits(got.grad, want.grad / scale)
    ]


class Widened(Stage):
    """Takes an argument by keyword on every rank, as masks are given."""

    def forward(self, x: Tensor, *, factor: Tensor) -> Tensor:
        return super().forward(x * factor)


def one_process(stages: list[nn.Module], inputs: Tensor, targets: Tensor, **keywords: Tensor) -> list[Tensor]:
    outputs = []
    for number, (x, y) in enumerate(zip(inputs.chunk(M), targets.chunk(M), strict=True)):
        output = x
        for stage in stages:
            output = stage(output, **{name: value.chunk(M)[number] for name, value in keywords.items()})
        loss_of(output, y).backward()
        outputs.append(output.detach())
    return outputs


def with_keywords(rank: int) -> list[str]:
    """What differs with keyword arguments, outputs that are given back, sums instead of means, and in `eval`."""
    torch.manual_seed(0)
    name = "ScheduleInterleaved1F1B"  # torch cannot eval on a V
    every = [Widened() for _ in range(4)]
    truth = copy.deepcopy(every)
    inputs, targets, factor = torch.randn(2 * M, 8), torch.randn(2 * M, 8), torch.rand(2 * M, 1)
    outputs = one_process(truth, inputs, targets, factor=factor)
    schedule = torchs(rank, name, every, scale_grads=False)
    attached = attach(schedule, memory=RULES["recompute"], engine=virtual(rank))
    how: dict[str, Any] = {"target": targets if rank == 1 else None, "losses": [], "factor": factor}
    given = schedule.step(*((inputs,) if rank == 0 else ()), **how)
    found = different(rank, name, every, truth, 1)
    if rank == 1:
        found += [] if same_bits(given.detach(), torch.cat(outputs)) else ["outputs"]
    given = schedule.eval(*((inputs,) if rank == 0 else ()), **how)
    if rank == 1:
        found += [] if same_bits(given, torch.cat(outputs)) else ["eval"]
    attached.remove()
    return found


class Turned(Stage):
    """Passes on what is transposed in memory."""

    given: ClassVar[set[tuple[int, ...]]] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.given.add(x.stride())
        return super().forward(x).t().contiguous().t()


def transposed(rank: int) -> list[str]:
    """What differs where products read transposed tensors, whose bits are others on some machines."""
    torch.manual_seed(0)
    every = [Turned() for _ in range(2)]
    truth = copy.deepcopy(every)
    inputs, targets = torch.randn(5 * M, 8), torch.randn(5 * M, 8)
    one_process(truth, inputs, targets)
    attached = attach(schedule := torchs(rank, "Schedule1F1B", every))
    Turned.given.clear()
    schedule.step(*((inputs,) if rank == 0 else ()), target=targets if rank == 1 else None, return_outputs=False)
    attached.remove()
    found = different(rank, "Schedule1F1B", every, truth, M)
    return found if Turned.given == {(8, 1) if rank == 0 else (1, 5)} else [*found, f"strides {Turned.given}"]


def misnamed(rank: int) -> str:
    """What each rank is told of a rule that names nothing in the stage of the second one."""
    schedule = torchs(rank, "Schedule1F1B", [Stage(), nn.Linear(8, 8)])
    with pytest.raises(ConfigError) as caught:
        attach(schedule, memory=RULES["recompute"], engine=virtual(rank))
    attach(schedule).remove()  # the first one has left nothing
    return str(caught.value)


def under_autocast(rank: int) -> list[str]:
    """What differs where an autocast around the step holds on to its casts, of layers that run again."""
    torch.manual_seed(0)
    name = "ScheduleZBVZeroBubble"
    every = [Stage() for _ in range(4)]
    truth = copy.deepcopy(every)
    inputs, targets = torch.randn(2 * M, 8), torch.randn(2 * M, 8)
    with torch.autocast("cpu", torch.bfloat16):
        one_process(truth, inputs, targets)
    attached = attach(schedule := torchs(rank, name, every), memory=RULES["recompute"], engine=virtual(rank))
    how: dict[str, Any] = {"target": targets if rank == 0 else None, "return_outputs": False}
    with torch.autocast("cpu", torch.bfloat16):
        schedule.step(*((inputs,) if rank == 0 else ()), **how)
    attached.remove()
    return different(rank, name, every, truth, M)


def within(rank: int, name: str) -> dict[str, Any]:
    """A budget of three quarters of what all kept takes: what differs, and peaks."""
    torch.manual_seed(0)
    every = [Stage() for _ in range(sum(map(len, SCHEDULES[name])))]
    truth = copy.deepcopy(every)
    inputs, targets = torch.randn(512 * M, 8), torch.randn(512 * M, 8)
    one_process(truth, inputs, targets)
    own = nn.ModuleList(every[number] for number in SCHEDULES[name][rank])
    optimizer = torch.optim.SGD(own.parameters(), lr=0.0)
    puts_off: list[bool] = []

    def step(budget: int, num_steps: int) -> tuple[Any, list[int], list[str]]:
        schedule = torchs(rank, name, every)
        attached = attach(schedule, memory={"min_bytes": 0}, budget=budget, optimizer=optimizer, engine=virtual(rank))
        peaks, found = [], []
        ends = (0 in SCHEDULES[name][rank], len(every) - 1 in SCHEDULES[name][rank])
        try:
            for number in range(num_steps):
                own.zero_grad()
                counted = contextlib.nullcontext() if attached.plans is None else attached.plans.audit()
                with counted as live:
                    if live is not None:
                        live.add_all(each for each, has in zip((inputs, targets), ends, strict=True) if has)
                    target = targets if ends[1] else None
                    schedule.step(*((inputs,) if ends[0] else ()), target=target, losses=[], return_outputs=False)
                found += [f"step {number}, {each}" for each in different(rank, name, every, truth, M)]
                peaks += [] if live is None else [live.peak_bytes]
            weights = attached.pipeline.weight_gradients
            puts_off.append(weights is not None and len(weights._linears) > 0)
            return attached.plans.found, peaks, found
        finally:
            attached.remove()

    plain, _, _ = step(1 << 30, 1)
    budget = max(gather(plain.peak_bytes, None)) * 3 // 4
    plan, peaks, found = step(budget, 3)
    does = sorted({not each.does_nothing for each in plan.plans.values()})
    told = {"different": found, "peaks": peaks, "said": plan.peak_bytes, "budget": budget, "does": does[-1]}
    return told | {"puts_off": puts_off[-1]}


def in_pairs(rank: int, order: str) -> tuple[list[str], int]:
    """What differs where pairs are carried out by a function of one's own, and how many there were."""
    torch.manual_seed(0)
    name = "ScheduleDualPipeV"
    every = [Stage() for _ in range(4)]
    truth = copy.deepcopy(every)
    inputs, targets = torch.randn(2 * M, 8), torch.randn(2 * M, 8)
    one_process(truth, inputs, targets)
    pairs = []

    def run_pair(forward: Any, backward: Any) -> None:
        halves = [half for half in (forward, backward) if half is not None]
        pairs.extend([order] * (len(halves) - 1))
        for half in halves if order == "forward first" else reversed(halves):
            half()

    schedule = torchs(rank, name, every)
    attached = attach(schedule, run_pair=run_pair)
    schedule.step(*((inputs,) if rank == 0 else ()), target=targets if rank == 0 else None, return_outputs=False)
    attached.remove()
    return different(rank, name, every, truth, M), len(pairs)


def test_keywords_outputs_eval_layouts_casts_and_a_rule_that_names_nothing_on_one_rank(tmp_path: Path) -> None:
    jobs = [("with_keywords", {}), ("transposed", {}), ("under_autocast", {}), ("misnamed", {})]
    *told, refusals = two_ranks.run(__name__, jobs, tmp_path)
    assert told == [([], [])] * 3
    text = (
        "memory.recompute[0]: pattern 'layers.*' matches no layer, module or op of this model; print the plan to see "
        "the names (recompute acts on layers and modules; single operators can be kept or swapped)"
    )
    assert refusals == (f"{text} (rank 1)", text)


@pytest.mark.parametrize(
    "name",
    [
        "ScheduleZBVZeroBubble",
        *(pytest.param(n, marks=pytest.mark.extended) for n in ("Schedule1F1B", "ScheduleDualPipeV")),
    ],
)
def test_a_budget_holds_for_the_stages_of_a_rank(name: str, tmp_path: Path) -> None:
    """Also where weight gradients are put off. Our own schedules within budgets: test_budget.py."""
    (answer,) = two_ranks.run(__name__, [("within", {"name": name})], tmp_path)
    assert any(rank["does"] for rank in answer)
    for rank in answer:
        assert rank["different"] == []
        assert max(rank["peaks"]) <= rank["said"] <= rank["budget"]
        assert rank["puts_off"] == (name != "Schedule1F1B")


def test_pairs_are_carried_out_by_what_is_given(tmp_path: Path) -> None:
    jobs = [("in_pairs", {"order": f"{order} first"}) for order in ("forward", "backward")]
    # 2M - 3P + r + 1 pairs, and one less on the last rank
    assert two_ranks.run(__name__, jobs, tmp_path) == [(([], 2 * M - 5),) * 2] * 2


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_what_is_refused() -> None:
    def schedule(kind: Any = pipelining.ScheduleGPipe, **more: Any) -> Any:
        return kind(PipelineStage(Stage(), 0, 1, torch.device("cpu"), **more), M, loss_fn=loss_of)

    def attempt(given: Any, *batch: Any, step: dict[str, Any] | None = None, **how: Any) -> None:
        attached = attach(given, **how)
        try:
            given.step(*batch, target=torch.ones(M, 8), **(step or {}))
        finally:
            attached.remove()

    def told(*given: Any, **how: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            attempt(*given, **how)
        return str(caught.value).removeprefix("lowtide.pipeline.attach: ")

    assert told(schedule(dw_builder=lambda: print)) == (
        "stage 0 has a dw_builder, and attach puts weight gradients off by itself; leave dw_builder out"
    )
    assert told(schedule(), run_pair=lambda forward, backward: None) == (
        "ScheduleGPipe has no pairs of a forward and a backward; use ScheduleDualPipeV"
    )
    x = torch.ones(M, 8)
    assert told(schedule(), x, step={"loss_kwargs": {"a": 1}}) == (
        "loss_kwargs cannot be handed on; give the schedule a loss that has them"
    )
    assert told(schedule(), x, budget="1GiB") == (
        "a budget has no room for the outputs of all micro-batches; call step(..., return_outputs=False)"
    )
    assert told(schedule(), x, budget="1GiB", step={"return_outputs": False, "factor": x}) == (
        "a budget cannot be planned for stages with keyword arguments (factor); write rules: recompute, swap, keep"
    )
