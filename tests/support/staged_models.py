"""A small language model in pieces, for pipelines: cut into stages, and trained by one process as the truth.

Between stages travel three tensors: the hidden state; a scale that every layer reads and that has a gradient; token
numbers, which have none.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.pipeline.weight_gradients import linear

WIDTH, INNER, VOCABULARY = 8, 16, 24
NUM_PIECES = 10
"""Embedding, eight blocks, head."""
LENGTHS = (5, 3, 6, 1, 4, 7, 2, 5, 3, 4)
"""Of the texts, one for each micro-batch: as many as are no power of two, or dividing early would not show."""
MANY = len(LENGTHS)


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH))
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return F.embedding(tokens, self.weight), self.scale * 1.5, tokens


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor, scale: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        inner = torch.tanh(self.up(self.norm(x) * scale))
        return x + linear(inner, self.down.weight) * (tokens > 2).unsqueeze(-1), scale, tokens


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH))

    def forward(self, x: Tensor, scale: Tensor, tokens: Tensor) -> Tensor:
        return linear(self.norm(x) + scale, self.weight)


class Stage(nn.Module):
    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        for layer in self.layers:
            inputs = layer(*inputs)
        return inputs


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def pieces(*, tied: bool = False) -> list[nn.Module]:
    torch.manual_seed(0)
    made = [Embedding(), *(Block() for _ in range(NUM_PIECES - 2)), Head()]
    if tied:
        made[-1].weight = made[0].weight
    return made


def cut(layers: list[nn.Module], num_stages: int, *, uneven: bool = False) -> list[Stage]:
    """Nearly as many in each, or all that can be in the first stage but one."""
    bounds = [round(number * len(layers) / num_stages) for number in range(num_stages + 1)]
    if uneven:
        bounds = [0, *range(len(layers) - num_stages + 1, len(layers) + 1)]
    return [Stage(layers[first:last]) for first, last in itertools.pairwise(bounds)]


def batches(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randint(0, VOCABULARY, (2, length), generator=generator) for length in LENGTHS]


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@dataclass
class Truth:
    """What one process gives that takes the micro-batches in order, adds raw and divides last."""

    losses: list[list[Tensor]] = field(default_factory=list)
    """Of each step, by micro-batch."""
    gradients: list[list[dict[str, Tensor]]] = field(default_factory=list)
    """Of each step, by piece."""

    def named(self, step: int, numbers: Sequence[int]) -> Iterator[tuple[str, Tensor]]:
        """The gradients of pieces as a stage names them."""
        for place, number in enumerate(numbers):
            for name, gradient in self.gradients[step][number].items():
                yield f"layers.{place}.{name}", gradient


def truth(num_steps: int, *, tied: bool = False, divide_by: float = MANY) -> Truth:
    """Tied weights are added up apart, once for each use, and the two sums last."""
    layers = pieces()
    embedding, head = layers[0], layers[-1]
    if tied:
        head.weight.data.copy_(embedding.weight)
    model = Stage(layers)
    optimizer = make_optimizer(model)
    found = Truth()
    for step in range(num_steps):
        optimizer.zero_grad()
        losses = []
        for tokens in batches(step):
            loss = loss_of(model(tokens), tokens)
            loss.backward()
            losses.append(loss.detach())
        if tied:
            embedding.weight.grad = embedding.weight.grad + head.weight.grad
            head.weight.grad = embedding.weight.grad.clone()
        for parameter in model.parameters():
            parameter.grad.div_(divide_by)
        found.losses.append(losses)
        found.gradients.append([{n: p.grad.clone() for n, p in layer.named_parameters()} for layer in layers])
        optimizer.step()
    return found
