"""Our pairs inside torch's ScheduleDualPipeV, on two real ranks: gradients equal those of one process to the bit."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleDualPipeV, ScheduleGPipe

from lowtide.errors import ConfigError
from lowtide.pipeline.torch_schedules import attach_overlap
from tests.support import two_ranks
from tests.support.zoo import same_bits

NUM_MICRO_BATCHES = 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def trained(rank: int, order: str) -> dict[str, Any]:
    """What differs from one process, and how many pairs were carried out."""
    torch.manual_seed(0)
    blocks = [Block() for _ in range(4)]
    truth = copy.deepcopy(blocks)
    inputs, targets = torch.randn(2 * NUM_MICRO_BATCHES, 8), torch.randn(2 * NUM_MICRO_BATCHES, 8)
    wanted = []
    for x, y in zip(inputs.chunk(NUM_MICRO_BATCHES), targets.chunk(NUM_MICRO_BATCHES)):
        loss = loss_of(nn.Sequential(*truth)(x), y)
        loss.backward()
        wanted.append(loss.detach())
    own = (0, 3) if rank == 0 else (1, 2)
    stages = [PipelineStage(blocks[number], number, 4, torch.device("cpu")) for number in own]
    schedule = ScheduleDualPipeV(stages, NUM_MICRO_BATCHES, loss_fn=loss_of)
    pairs = []

    def run_pair(forward: Any, backward: Any) -> None:
        pairs.append(order)
        for half in (forward, backward) if order == "forward first" else (backward, forward):
            half()

    attach_overlap(schedule, run_pair)
    losses: list[Tensor] = []
    for _ in range(2):
        for block in blocks:
            block.zero_grad()
        schedule.step(*((inputs,) if rank == 0 else ()), target=targets if rank == 0 else None, losses=losses)
    different = [] if rank else [str(n) for n, pair in enumerate(zip(losses, wanted)) if not same_bits(*pair)]
    for number in own:
        for (name, got), want in zip(blocks[number].named_parameters(), truth[number].parameters()):
            if not same_bits(got.grad, want.grad / NUM_MICRO_BATCHES):
                different.append(f"{number} {name}")
    return {"different": different, "pairs": len(pairs)}


def test_gradients_are_those_of_one_process(tmp_path: Path) -> None:
    answers = two_ranks.run(__name__, [("trained", {"order": f"{o} first"}) for o in ("forward", "backward")], tmp_path)
    for answer in answers:
        assert [each["different"] for each in answer] == [[], []]
        # in each of two steps: 2M - 3P + r + 1 pairs, and one less on the last rank
        assert [each["pairs"] for each in answer] == [2 * (2 * NUM_MICRO_BATCHES - 5)] * 2


def test_a_schedule_without_pairs_is_refused() -> None:
    schedule = object.__new__(ScheduleGPipe)
    with pytest.raises(ConfigError) as caught:
        attach_overlap(schedule, SimpleNamespace())
    assert str(caught.value) == (
        "attach_overlap: ScheduleGPipe has no pairs of a forward and a backward; use ScheduleDualPipeV"
    )
