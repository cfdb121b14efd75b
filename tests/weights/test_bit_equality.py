"""A model whose weights come and go has plain's bits: losses, gradients, weights, optimizer state."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from tests.support import zoo
from tests.support.grid import in_turn, one_of
from tests.support.virtual_engine import VirtualEngine


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Small(nn.Module):
    def __init__(self, width: int = 24, num_layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(num_layers))
        self.head = nn.Linear(width, 32, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-2),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
}


def train(
    swap: Callable[[nn.Module, torch.optim.Optimizer], Any] | None,
    kind: str = "adamw",
    *,
    num_steps: int = 4,
    accumulate: int = 1,
    clip: float | None = None,
    tie: bool = False,
    dtype: torch.dtype = torch.float32,
) -> dict[str, torch.Tensor]:
    """Everything that some steps leave, by name."""
    torch.manual_seed(1)
    model = Small().to(dtype)
    if tie:
        model.head.weight = model.embed.weight
    optimizer = OPTIMIZERS[kind](model.parameters())
    handle = None if swap is None else swap(model, optimizer)
    left = {}
    for step in range(num_steps):
        optimizer.zero_grad()
        for micro in range(accumulate):
            loss = model(torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(7 * step + micro)))
            loss.backward()
            left[f"loss {step}.{micro}"] = loss.detach().clone()
        if clip is not None:
            left[f"norm {step}"] = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        left |= {f"gradient {step} {name}": gradient.clone() for name, gradient in gradients.items()}
        optimizer.step()
    left |= {f"before removal {n}": p.detach().clone() for n, p in model.state_dict().items()}
    if handle is not None:
        handle.remove()
    return left | weights_and_state(model, optimizer)


plain = functools.cache(functools.partial(train, None))
"""Training without lowtide, remembered."""


def weights_and_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Copies, by name."""
    left = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for number, entries in optimizer.state_dict()["state"].items():
        left |= {f"state {number} {k}": v.clone() for k, v in entries.items() if isinstance(v, torch.Tensor)}
    return left


def assert_same(found: dict[str, torch.Tensor], plain: dict[str, torch.Tensor], *, gradients: bool = True) -> None:
    names = {name for name in plain if gradients or not name.startswith("gradient")}
    assert names <= found.keys()
    different = sorted(name for name in names if not torch.equal(found[name], plain[name]))
    assert not different, different


@pytest.mark.parametrize("update", ["step", "in_backward"])
@pytest.mark.parametrize("kind", list(OPTIMIZERS))
def test_training_has_the_bits_of_plain(kind: str, update: str) -> None:
    wanted = plain(kind)
    found = train(lambda m, o: lowtide.swap_weights(m, o, update=update, min_bytes=1), kind)
    assert_same(found, wanted, gradients=update == "step")


@pytest.mark.parametrize("habit", [{"accumulate": 3}, {"clip": 0.1}, {"tie": True}, {"dtype": torch.bfloat16}])
def test_habits_of_training_loops(habit: dict[str, Any]) -> None:
    assert_same(train(lambda m, o: lowtide.swap_weights(m, o, min_bytes=1), **habit), plain(**habit))


@pytest.mark.parametrize(("seed", "update"), in_turn(2, range(6), ["step", "in_backward"]))
def test_on_an_adversarial_engine(seed: int, update: str) -> None:
    engine = VirtualEngine(seed)
    found = train(lambda m, o: lowtide.swap_weights(m, o, update=update, min_bytes=1, engine=engine), tie=seed == 3)
    assert not engine.violations, engine.violations
    assert engine.num_slots == 0
    assert_same(found, plain(tie=seed == 3), gradients=update == "step")


@pytest.mark.parametrize("name", one_of(2, sorted(zoo.CASES), first=1))
def test_the_zoo(name: str) -> None:
    case = zoo.CASES[name]
    plain = zoo.plain_result(name, 3, 2, 2)
    model = case.build(3)
    optimizer = zoo.make_optimizer(model)
    handle = lowtide.swap_weights(model, optimizer, min_bytes=1)
    result = zoo.train(case, model, optimizer, 3, num_steps=2, accumulate=2)
    handle.remove()
    zoo.assert_same(result, plain)
