"""Optimizer state under `lowtide.swap_optimizer` on a device."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn

from lowtide.optimizer.swap import swap_optimizer
from tests.standin import device
from tests.standin.swaps import HERE
from tests.support import zoo

WIDTH, NUM_LAYERS = 256, 8
STATE = 8 * WIDTH * WIDTH
"""Bytes of a layer's moments."""


class Training:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS))).to(HERE)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def step(self, number: int) -> None:
        self.optimizer.param_groups[0]["lr"] = 1e-3 * 0.9**number
        x = torch.full((4, WIDTH), 0.01 * (number + 1), device=HERE)
        self.model(x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def result(self) -> list[torch.Tensor]:
        state = [s[key].cpu() for s in self.optimizer.state.values() for key in ("exp_avg", "exp_avg_sq", "step")]
        return [*(p.detach().cpu() for p in self.model.parameters()), *state]


@pytest.mark.parametrize("overlap", ["step", "backward"])
@pytest.mark.parametrize("policy", ["late", 1])
def test_a_share_stays_on_the_device_until_it_is_sent_away(overlap: str, policy: Any) -> None:
    plain = Training()
    for number in range(12):
        plain.step(number)
    truth = plain.result()
    del plain
    device.play(policy)
    training = Training()
    handle = swap_optimizer(training.optimizer, overlap=overlap, bucket_bytes=STATE, resident=0.4)
    for number in range(8):
        training.step(number)
    assert on_device(training) == 3
    saved = io.BytesIO()
    torch.save(training.optimizer.state_dict(), saved)
    saved.seek(0)
    training.optimizer.load_state_dict(torch.load(saved, map_location="cpu"))
    assert on_device(training) == 3
    handle.keep_no_more_than(0.2)
    assert on_device(training) == 1
    for number in range(8, 12):
        training.step(number)
    assert all(zoo.same_bits(one, other) for one, other in zip(training.result(), truth, strict=True))
    handle.detach()
    assert on_device(training) == NUM_LAYERS
    assert all(zoo.same_bits(one, other) for one, other in zip(training.result(), truth, strict=True))


def on_device(training: Training) -> int:
    """How many layers have their moments there."""
    return sum(state["exp_avg"].device == HERE for state in training.optimizer.state.values())
