"""A model with experts on several ranks whose compute and link are emulated: question f without an accelerator.

What: layers of attention and experts, with an exchange before and after the experts. Attention and experts compute a
little and then *sleep*, which holds no core, like a device that computes. Rows really travel between the ranks, and
besides they are not there before a *deadline*: the link carries one exchange after the other, each for
latency + bytes / bandwidth.
Why: with compute of its own a machine of two cores cannot hide anything; real traffic over gloo is compute, too. This
way the engine, autograd, swap and recompute are real, and only durations are made up.
Cost: none is meant. Not covered: exchanges that slow compute down.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.overlap_figures import Link
from lowtide.pipeline import linear, start_all_to_all
from lowtide.pipeline.exchange import Route, start_on_group
from lowtide.pipeline.overlap import Event

WIDTH = 64


class _Sleeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None


class _SlowGradient(torch.autograd.Function):
    """A weight whose gradient takes as long as a forward, wherever it is computed."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None


class Part(nn.Module):
    """Takes `seconds` forward and twice that backward, half of which can be put off."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Linear(WIDTH, WIDTH)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        # At its beginning: a second run ends with the last tensor that backward needs.
        x, weight = _Sleeps.apply(x, self.seconds), _SlowGradient.apply(self.weight.weight, self.seconds)
        return torch.tanh(linear(x, weight, self.weight.bias))


class Layer(nn.Module):
    """As `split_experts` has a block: of the time of the experts `shared_share` is that of shared ones, and the others
    compute part by part."""

    def __init__(self, num_ranks: int, seconds: float, *, num_parts: int = 1, shared_share: float = 0.0) -> None:
        super().__init__()
        self.attention = Part(seconds)
        self.experts = nn.ModuleList(Part((1 - shared_share) * seconds / num_parts) for _ in range(num_parts))
        self.shared = Part(shared_share * seconds) if shared_share else None
        self.num_ranks = num_ranks

    def forward(self, x: Tensor) -> Tensor:
        h = x + self.attention(x)
        each = [len(h) // len(self.experts) // self.num_ranks] * self.num_ranks
        under_way = deque(start_all_to_all(rows, each, each) for rows in h.chunk(len(self.experts)))
        beside = 0.0 if self.shared is None else self.shared(h)
        coming_back = []
        for part in self.experts:
            coming_back.append(start_all_to_all(part(under_way.popleft().wait()), each, each))
        return h + torch.cat([pending.wait() for pending in coming_back]) + beside


class Model(nn.Module):
    def __init__(self, num_layers: int, num_ranks: int, seconds: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(num_ranks, seconds) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Stamps:
    """A log that says when."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.events: list[tuple[float, Event]] = []

    def append(self, event: Event) -> None:
        self.events.append((time.perf_counter(), event))


class DeadlineLink:
    """Starts exchanges, none of which is there before its time. `spans`: when the link was busy."""

    def __init__(self, link: Link, num_ranks: int) -> None:
        self._link = link
        self._begin = start_on_group if num_ranks > 1 else start_here
        self._free = 0.0
        self.spans: list[tuple[float, float]] = []

    def start(self, rows: Tensor, sent: Tensor, route: Route) -> Any:
        begin = max(self._free, time.perf_counter())
        self._free = begin + self._link.seconds(sent.nbytes)
        self.spans.append((begin, self._free))
        return _Due(self._begin(rows, sent, route), self._free)


class _Due:
    def __init__(self, work: Any, due: float) -> None:
        self._work = work
        self._due = due

    def wait(self) -> None:
        self._work.wait()
        time.sleep(max(0.0, self._due - time.perf_counter()))


class _Here:
    def wait(self) -> None:
        pass


def start_here(rows: Tensor, sent: Tensor, route: Route) -> Any:
    """No exchange at all: this rank keeps its rows."""
    rows.copy_(sent)
    return _Here()
