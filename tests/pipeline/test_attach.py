"""Rules and put-off weight gradients on torch's own schedules, on two real ranks: the bits of one process, and a layer
that is recomputed runs once more, not twice."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

from lowtide.errors import ConfigError
from lowtide.pipeline import attach, linear
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
        inner = Counted.apply(linear(self.norm(x), self.up.weight, self.up.bias))
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
    stages = [PipelineStage(every[number], number, num_stages, torch.device("cpu")) for number in own]
    given: Any = stages[0] if name == "Schedule1F1B" else stages
    schedule = getattr(pipelining, name)(given, M, loss_fn=loss_of)
    attached = attach(schedule, memory=RULES[rules], engine=virtual(rank))
    different: list[str] = []
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
        different += [f"loss {n}" for n, pair in enumerate(zip(losses, wanted)) if not same_bits(*pair)]
        for number in own:
            for (where, got), want in zip(every[number].named_parameters(), truth[number].parameters(), strict=True):
                if not same_bits(got.grad, want.grad / M):
                    different.append(f"step {step}, stage {number}: {where}")
    # Where all backwards are split, the gradient of the input goes first.
    different += ["not put off"] * (events[:1] == ["weight"] and name == "ScheduleZBVZeroBubble")
    return different, counts[1]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], tuple[Any, ...]]:
    cases = [(name, rules) for name in SCHEDULES for rules in RULES]
    jobs = [("trained", {"name": name, "rules": rules}) for name, rules in cases]
    return dict(zip(cases, two_ranks.run(__name__, jobs, tmp_path_factory.mktemp("ranks")), strict=True))


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("name", SCHEDULES)
def test_bits_are_those_of_one_process(told: dict[tuple[str, str], tuple[Any, ...]], name: str, rules: str) -> None:
    num_runs = 2 * M * len(SCHEDULES[name][0]) * (2 if rules == "recompute" else 1)
    assert told[name, rules] == (([], num_runs),) * 2


def test_what_is_refused() -> None:
    stage = SimpleNamespace(stage_index=3, dw_builder=None)
    with pytest.raises(ConfigError) as caught:
        attach(SimpleNamespace(_stages=[stage]), memory={"budget": "1GiB"})
    assert str(caught.value) == (
        "lowtide.pipeline.attach: a budget cannot be planned for a schedule of torch's; write rules (recompute, swap), "
        "or use lowtide.pipeline.Pipeline with fit_stages"
    )
    stage.dw_builder = print
    with pytest.raises(ConfigError) as caught:
        attach(SimpleNamespace(_stages=[stage]))
    assert str(caught.value) == (
        "lowtide.pipeline.attach: stage 3 has a dw_builder already; attach puts one of its own there. Take one of them "
        "out"
    )
