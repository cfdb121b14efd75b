"""Optimizer state under `lowtide.swap_optimizer`: what stays is what the device's allocator has room for."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn

from lowtide.core.budget import DeviceMemory
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
def test_what_stays_is_what_there_is_room_for(overlap: str, policy: Any) -> None:
    plain = Training()
    for number in range(12):
        plain.step(number)
    truth = plain.result()
    del plain
    device.play(policy)
    training = Training()
    total = free = 1 << 30

    def memory() -> DeviceMemory:  # the stand-in's driver does not count what the allocator keeps for reuse
        return DeviceMemory(total_bytes=total, free_bytes=free, where="of a test")

    handle = swap_optimizer(training.optimizer, overlap=overlap, bucket_bytes=STATE, memory=memory)
    torch.accelerator.reset_peak_memory_stats(HERE)
    for number in range(4):
        training.step(number)
    # Room for some three layers' moments beside the headroom.
    total = free = int((torch.accelerator.max_memory_allocated(HERE) + 3.75 * STATE) / 0.95)
    for number in range(4, 8):
        training.step(number)
    choice = handle.residency
    assert choice is not None
    assert STATE <= choice.resident_bytes <= 3 * STATE
    assert choice.moved_bytes + choice.resident_bytes == NUM_LAYERS * STATE
    assert torch.accelerator.max_memory_allocated(HERE) <= 0.95 * total
    assert on_device(training) * STATE == choice.resident_bytes
    saved = io.BytesIO()
    torch.save(training.optimizer.state_dict(), saved)
    saved.seek(0)
    training.optimizer.load_state_dict(torch.load(saved, map_location="cpu"))
    assert on_device(training) * STATE == choice.resident_bytes
    # Somebody else takes some: more than is left beside the headroom.
    free -= 9 * STATE // 2
    with pytest.warns(RuntimeWarning, match="runs short"):
        training.step(8)
    assert handle.residency is not None
    assert on_device(training) * STATE == handle.residency.resident_bytes < choice.resident_bytes
    for number in range(9, 12):
        training.step(number)
    assert all(zoo.same_bits(one, other) for one, other in zip(training.result(), truth, strict=True))
    handle.detach()
    assert on_device(training) == NUM_LAYERS
    assert all(zoo.same_bits(one, other) for one, other in zip(training.result(), truth, strict=True))


def on_device(training: Training) -> int:
    """How many layers have their moments there."""
    return sum(state["exp_avg"].device == HERE for state in training.optimizer.state.values())
