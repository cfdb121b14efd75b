"""A small model whose layers are compiled in several ways, and its training steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.tensors.private import num_compiled_graphs

WIDTH = 16


class Block(nn.Module):
    """Norm, two projections, dropout, a residual. `habit`: what else it does."""

    def __init__(self, habit: str = "") -> None:
        super().__init__()
        self.habit = habit
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros(()))
        self.counting = nn.BatchNorm1d(2 * WIDTH, momentum=None) if habit == "counts" else None

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.up(self.norm(x)))
        if self.habit == "counts":
            hidden = self.counting(hidden)  # its batches, in a tensor that it makes a number of
        if self.habit == "breaks":
            torch._dynamo.graph_break()
            hidden = hidden.sin()
        if self.habit == "writes":
            hidden.mul_(2)
            self.calls.add_(1)
        return x + F.dropout(self.down(hidden), 0.1)


class Model(nn.Module):
    def __init__(self, habits: Iterable[str] = ("", "breaks", "")) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block(habit) for habit in habits)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).tanh()
        for layer in self.layers:
            x = layer(x)
        return x.square().tanh().sum()


def _wrapped(layers: nn.ModuleList, index: int, **how: Any) -> None:
    layers[index] = torch.compile(layers[index], **how)  # type: ignore[assignment]


def _in_place(layers: nn.ModuleList, index: int, **how: Any) -> None:
    layers[index].compile(**how)


def _forward(layers: nn.ModuleList, index: int, **how: Any) -> None:
    layer: Any = layers[index]
    layer.forward = torch.compile(layer.forward, **how)


FORMS: dict[str, Callable[..., None]] = {"wrapped": _wrapped, "in place": _in_place, "forward": _forward}


def build(form: str = "in place", which: Iterable[int] = (0, 1), backend: str = "aot_eager", **how: Any) -> Model:
    """A model of which some layers are compiled."""
    model = Model(**how)
    for index in which:
        FORMS[form](model.layers, index, backend=backend)
    return model


def train(model: nn.Module, lengths: Iterable[int] = (8, 8), dtype: torch.dtype | None = None) -> list[Tensor]:
    """Losses, gradients that accumulate, buffers, and the random state, after a few micro-batches."""
    torch.manual_seed(1)
    losses = []
    for length in lengths:
        x = torch.randn(length, WIDTH)
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            loss = model(x)
        loss.backward()
        losses.append(loss.detach())
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [*losses, *gradients, *model.buffers(), torch.get_rng_state()]


def assert_same(one: list[Tensor], other: list[Tensor]) -> None:
    assert len(one) == len(other)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def num_frames() -> tuple[int, int]:
    """How many frames the compiler has looked at, and how many graphs it made."""
    return torch._dynamo.utils.counters["frames"]["total"], num_compiled_graphs()
