"""`memory.optimizer: in_backward`: one plan for activations and updates while backward runs, carried out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import ConfigError
from lowtide.units import MIB
from tests.support.grid import one_of

MEMORY = {"optimizer": "in_backward"}
WIDTH, TOKENS = 128, 1024


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS)
        self.layers = nn.ModuleList(Block() for _ in range(6))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.roll(1, 1).flatten())


def batch(step: int, rows: int = 8) -> torch.Tensor:
    return torch.randint(0, TOKENS, (rows, 32), generator=torch.Generator().manual_seed(step))


def trained(
    make: Callable[[Any], torch.optim.Optimizer],
    budget: str | None,
    *,
    set_to_none: bool,
    ends: Callable[[Any], None] = lambda tide: None,
) -> list[torch.Tensor]:
    """Losses, and then parameters and state. Later batches are larger, and smaller again."""
    torch.manual_seed(0)
    model = Model()
    optimizer = make(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    tide = None if budget is None else lowtide.optimize(model, budget, memory=MEMORY, optimizer=optimizer)
    found = []
    for step, rows in enumerate((8, 8, 8, 12, 12, 8)):
        loss = model(batch(step, rows))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        schedule.step()
        found.append(loss.detach())
    if tide is not None:
        ends(tide)
        tide.remove()
    state = [value for p in model.parameters() for value in optimizer.state[p].values() if torch.is_tensor(value)]
    return [*found, *(p.detach() for p in model.parameters()), *state]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, foreach=False)


@pytest.mark.parametrize(
    ("make", "set_to_none", "num_mib"),
    one_of(2, [(adamw, False, 20), (adamw, True, 20), (momentum, True, 15)]),
)
def test_planned_steps_have_the_bits_of_plain_ones_and_keep_the_budget(
    make: Any, set_to_none: bool, num_mib: int
) -> None:
    seen: dict[str, Any] = {}

    def look(tide: Any) -> None:
        predicted = tide.plan.predicted
        assert predicted.plain_peak_bytes > num_mib * MIB >= predicted.peak_bytes
        seen.update(plan=tide.plan, counted=tide.stats.peak_device_bytes, stats=tide.optimizer_swap.stats)

    plain = trained(make, None, set_to_none=set_to_none)
    planned = trained(make, f"{num_mib}MiB", set_to_none=set_to_none, ends=look)
    assert all(torch.equal(one, other) for one, other in zip(plain, planned, strict=True))
    placement, stats = seen["plan"].optimizer, seen["stats"]
    assert placement.overlap == stats.overlap == "in_backward"
    assert seen["counted"] <= num_mib * MIB
    assert stats.bucket_peak_bytes <= placement.num_slots * placement.bucket_bytes


def test_without_a_budget_it_is_the_way_of_the_optimizer_alone() -> None:
    torch.manual_seed(0)
    model = Model()
    optimizer = adamw(model.parameters())
    with lowtide.apply(model, MEMORY, optimizer=optimizer) as tide:
        for step in range(2):
            model(batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert tide.optimizer_swap is not None
        assert tide.optimizer_swap.stats.overlap == "in_backward"


def test_a_second_backward_pass_before_the_step_is_refused() -> None:
    torch.manual_seed(0)
    model = Model()
    optimizer = adamw(model.parameters())
    with lowtide.optimize(model, "20MiB", memory=MEMORY, optimizer=optimizer):
        model(batch(0)).backward()
        with pytest.raises(RuntimeError, match=r"a second backward pass before optimizer.step\(\)"):
            model(batch(1)).backward()


def test_it_needs_an_optimizer() -> None:
    with pytest.raises(ConfigError, match="was given none"):
        lowtide.optimize(Model(), "20MiB", memory=MEMORY)
