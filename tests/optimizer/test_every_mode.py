"""Each optimizer in each implementation and each way of overlapping: the same bits as plain, over twelve steps.

What: a real backward pass, so that the ways that follow it are followed; two groups, a tied weight, a scheduler that
changes the learning rate after each step; fp32 and bf16; with and without gradients that are None in turn; and where
the way allows it a `GradScaler` with gradients that are inf in two steps, with clipping.
Cost: some four minutes of one core; that is why all of it is `extended`. test_bit_equality.py has the same optimizers
with one way in each run of the suite.
Named exceptions: as in optimizer_zoo.py, SGD with fused=True in bfloat16 or where a momentum is missing; and
`GradScaler` with `in_backward`, which is refused (test_in_backward.py).
"""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from optimizer_zoo import IMPLEMENTATIONS, NAMES, OPTIMIZERS, STEPS, Result, assert_same, result_of, swapped
from torch import Tensor, nn

from lowtide.engines.virtual import VirtualEngine

OVERLAPS = ("step", "backward", "deferred", "in_backward")
WIDTH = 24


class Tower(nn.Module):
    def __init__(self, *, has_biases: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=has_biases) for _ in range(6))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.layers[0].weight

    def forward(self, x: Tensor, skip: int) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number != skip:
                x = layer(x).tanh()
        return self.head(x)


def _train(
    kind: str, implementation: str, dtype: torch.dtype, *, has_missing: bool, is_scaled: bool, overlap: str = ""
) -> Result:
    """`overlap` empty: plain."""
    torch.manual_seed(3)
    model = Tower(has_biases=kind != "Muon").to(dtype)
    parameters = list(model.parameters())
    groups = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 3e-2}]
    optimizer = OPTIMIZERS[kind][0](groups, IMPLEMENTATIONS[implementation])
    engine = VirtualEngine(5)
    options = {"model": model} if overlap == "deferred" else {}
    handle = swapped(optimizer, engine, overlap=overlap, **options) if overlap else None
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, enabled=is_scaled)
    for step in range(STEPS):
        x = torch.full((3, WIDTH), 0.1 * (step + 1), dtype=dtype)
        loss = model(x, step % 5 + 1 if has_missing else -1).square().mean()
        scaler.scale(loss * torch.inf if is_scaled and step in (3, 7) else loss).backward()
        if is_scaled and implementation != "fused":  # a fused optimizer is told of infs instead, and unscales itself
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(parameters, 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scheduler.step()
    if handle:
        handle.flush()
    result = result_of(parameters, optimizer)
    if handle:
        assert handle.stats.swapped_bytes > 0 or kind == "SGD plain"
        handle.detach()
        assert (engine.violations, engine.num_slots) == ([], 0)
    return result


_plain = functools.cache(_train)


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize(("kind", "implementation"), NAMES)
def test_same_bits(kind: str, implementation: str, overlap: str) -> None:
    for dtype, has_missing, is_scaled in itertools.product(
        (torch.float32, torch.bfloat16), (False, True), (False, True)
    ):
        if kind.startswith("SGD") and implementation == "fused" and (dtype == torch.bfloat16 or has_missing):
            continue
        if is_scaled and overlap == "in_backward":
            continue
        setting = {"has_missing": has_missing, "is_scaled": is_scaled}
        truth = _plain(kind, implementation, dtype, **setting)
        assert_same(_train(kind, implementation, dtype, **setting, overlap=overlap), truth)
