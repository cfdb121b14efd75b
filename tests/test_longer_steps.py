"""Steps that are longer than the one that was planned for, at the same shapes: the budget holds in each of them.

What: twelve loops. In each of them a layer runs two or three times more often from some step on, or more micro-batches
are accumulated, or more forward passes come before a backward pass, or the graph is longer for another reason, and
nothing that is compared before a step tells of it. Every planned step is counted operator by operator, by lowtide's own
audit and by a count that shares nothing with it (independent_count.py).
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lowtide
from lowtide.config.memory import load_memory
from lowtide.core.log import Listener
from lowtide.planner.plan_profile import plan_profile
from lowtide.profiling.observe_step import observe
from lowtide.tensors.live_bytes import LiveBytes
from lowtide.timeline.step import Link
from tests.support.independent_count import IndependentCount, state_tensors
from tests.support.virtual_engine import virtual
from tests.support.zoo import same_bits

WIDTH = 64
LINK = Link(out_bytes_per_second=1e9, in_bytes_per_second=1e9)


class Repeats(nn.Module):
    """Layers that run as often as the first token says."""

    def __init__(self, layers: Sequence[nn.Module], *, is_inner: bool = False) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(64, WIDTH), nn.Linear(WIDTH, 64)
        self.layers = nn.ModuleList(layers)
        self.is_inner = is_inner
        """Each layer runs so often in a row, not all of them."""

    def forward(self, ids: Tensor) -> Tensor:  # (N, T) -> scalar
        num_runs, x = int(ids[0, 0]), self.embedding(ids)
        layers = list(self.layers)
        order = [layer for layer in layers for _ in range(num_runs)] if self.is_inner else layers * num_runs
        for layer in order:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


class Mlp(nn.Module):
    def __init__(self, *, times: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.gate = nn.Linear(WIDTH, times * WIDTH), nn.Linear(WIDTH, times * WIDTH)
        self.down = nn.Linear(times * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.norm(self.convolution(x.transpose(1, 2)))).transpose(1, 2)


class Cell(nn.Module):
    """The gates of an LSTM, each written in place: tensors over one storage with a version each."""

    def __init__(self) -> None:
        super().__init__()
        self.given, self.held = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(WIDTH, 4 * WIDTH)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        gates = (self.given(x) + self.held(state[0])).unsafe_chunk(4, 1)
        enter, forget, leave = (gate.sigmoid_() for gate in gates[:3])
        cell = forget * state[1] + enter * gates[3].tanh_()
        return leave * cell.tanh(), cell


class Recurrent(nn.Module):
    """A cell over as many rounds of time as the first token says: there are no layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.cell, self.head = nn.Embedding(64, WIDTH), Cell(), nn.Linear(WIDTH, 64)

    def forward(self, ids: Tensor) -> Tensor:
        x, outputs = self.embedding(ids), []
        state = (torch.zeros_like(x[:, 0]), torch.zeros_like(x[:, 0]))
        for _ in range(int(ids[0, 0])):
            outputs.clear()
            for time in range(ids.shape[1]):
                state = self.cell(x[:, time], state)
                outputs.append(state[0])
        return F.cross_entropy(self.head(torch.stack(outputs, 1)).flatten(0, 1), ids.flatten())


class Skipping(Repeats):
    """Layers that are left out while the first token says so."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in list(self.layers)[: int(ids[0, 0])]:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def attention() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)


def dropping() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.2, batch_first=True, norm_first=True)


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A model, and in each step for each micro-batch how long it is."""

    model: Callable[[], nn.Module]
    steps: tuple[tuple[int, ...], ...]
    share: float = 0.9
    """Where its budget lies between the floor and all of the first step's peak."""
    rows: int = 64
    is_joint: bool = False
    """All forward passes of a step come before its one backward pass."""
    memory: tuple[tuple[str, Any], ...] = ()

    def batch(self, step: int, micro: int) -> Tensor:
        ids = torch.randint(64, (self.rows, 16), generator=torch.Generator().manual_seed(10 * step + micro))
        ids[0, 0] = self.steps[step][micro]
        return ids

    def build(self, device: torch.device | str = "cpu") -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = self.model().to(device).train()
        return model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def losses(self, model: nn.Module, step: int) -> list[Tensor]:
        """Forward and backward of one step."""
        found, total = [], None
        for micro in range(len(self.steps[step])):
            loss = model(self.batch(step, micro).to(next(model.parameters()).device))
            found.append(loss.detach().clone())
            if self.is_joint:
                total = loss if total is None else total + loss
            else:
                loss.backward()
            del loss
        if total is not None:
            total.backward()
        return found


LOOPS = {
    "layers_twice": Loop(model=lambda: Repeats([Mlp() for _ in range(4)]), steps=((1,), (1,), (2,), (2,), (1,), (2,))),
    "layers_three_times": Loop(
        model=lambda: Repeats([Mlp() for _ in range(3)]), steps=((1,), (3,), (3,), (3,)), share=0.6
    ),
    "attention_twice": Loop(model=lambda: Repeats([attention() for _ in range(3)]), steps=((1,), (1,), (2,), (2,))),
    "attention_low": Loop(
        model=lambda: Repeats([dropping() for _ in range(3)]), steps=((1,), (3,), (1,), (3,)), share=0.2
    ),
    "inner_runs": Loop(
        model=lambda: Repeats([Mlp() for _ in range(3)], is_inner=True), steps=((1,), (3,), (2,), (3,)), share=0.5
    ),
    "convolutions": Loop(
        model=lambda: Repeats([Convolution() for _ in range(4)]), steps=((2,), (4,), (6,), (2,)), share=0.9
    ),
    "cells_over_time": Loop(model=Recurrent, steps=((1,), (3,), (2,), (3,)), share=1.5),
    "recompute_only": Loop(
        model=lambda: Repeats([Mlp() for _ in range(4)]), steps=((1,), (3,), (3,)), share=0.3,
        memory=(("swap", "none"),),
    ),
    "swap_only": Loop(
        model=lambda: Repeats([Mlp() for _ in range(4)]), steps=((1,), (3,), (3,)), share=0.3,
        memory=(("recompute", "none"),),
    ),
    "more_micro_batches": Loop(
        model=lambda: Repeats([Mlp(times=6) for _ in range(3)]), steps=((1,), (2, 1), (1, 3, 1), (2,)), share=0.9
    ),
    "joint_passes": Loop(
        model=lambda: Repeats([Mlp() for _ in range(3)]), steps=((1,), (2, 1), (2, 2)), share=0.9,
        is_joint=True,
    ),
    "skipped_layers": Loop(
        model=lambda: Skipping([Mlp() for _ in range(6)]), steps=((2,), (6,), (2,), (6,), (6,)), share=0.9
    ),
}  # fmt: skip


OFTEN = ("layers_twice", "cells_over_time", "recompute_only", "joint_passes")
"""On the virtual engine, and the first one on the host; the others are `make test-extended`'s."""
EXTENDED = [pytest.mark.extended]
WAYS = [pytest.param(name, virtual(3), marks=[] if name in OFTEN else EXTENDED) for name in LOOPS] + [
    pytest.param(name, "host", marks=[] if name in OFTEN[:1] else EXTENDED) for name in LOOPS
]


@functools.cache
def budget_of(name: str) -> int:
    loop = LOOPS[name]
    model, optimizer = loop.build()
    profile = observe(model, (loop.batch(0, 0),), optimizer=optimizer)
    memory = load_memory({"budget": 1 << 40, "min_bytes": 4096, **dict(loop.memory)})
    most = max(len(step) for step in loop.steps)
    found = plan_profile(profile, memory, link=LINK, has_gradients=most > 1).predicted
    assert found is not None
    state = profile.state
    # The optimizer's state comes with the first step.
    floor_bytes = found.floor_bytes + state.parameters
    if loop.is_joint:
        floor_bytes = int(floor_bytes * 1.5)
    return floor_bytes + int(loop.share * (found.plain_peak_bytes - found.floor_bytes))


class Counted:
    """A loop under a budget. `peaks`: of each planned step, by the audit and by the independent count."""

    def __init__(self, loop: Loop, budget_bytes: int, engine: str) -> None:
        self.loop = loop
        self.model, self.optimizer = loop.build()
        memory = {"min_bytes": 4096, **dict(loop.memory)}
        self.tide: Any = lowtide.optimize(
            self.model, budget=budget_bytes, memory=memory, optimizer=self.optimizer, engine=engine
        )
        self.counts: list[Any] = []
        self.peaks: list[tuple[int, int]] = []
        self.results: list[Tensor] = []

    def _planned(self, line: str) -> None:
        """A plan was put in force: what it took to make it is not the planned step's."""
        if self.counts and line.startswith("lowtide: plan"):
            independent, audit = self.counts
            independent.restart()
            audit.peak_bytes = audit.now_bytes
            self.tide.tide._scheduler.on_buffer = audit.add

    def run(self) -> list[tuple[int, int]]:
        torch.manual_seed(1)
        for step in range(len(self.loop.steps)):
            self.optimizer.zero_grad()
            state = state_tensors(self.model, self.optimizer)
            audit = LiveBytes(model=self.model, optimizer=self.optimizer)
            independent = IndependentCount(state, engine=self.tide.engine)
            del state
            self.counts = [independent, audit]
            if self.tide.tide is not None:
                self.tide.tide._scheduler.on_buffer = audit.add
            with Listener(self._planned), independent, audit:
                self.results += self.loop.losses(self.model, step)
                self.optimizer.step()
            self.tide.tide._scheduler.on_buffer = None
            del self.tide.engine.new_buffer
            self.peaks.append((audit.peak_bytes, independent.peak_bytes))
            self.counts = []
        return self.peaks


def assert_plain_bits(loop: Loop, counted: Any, device: torch.device | str = "cpu") -> None:
    model, optimizer = loop.build(device)
    torch.manual_seed(1)
    truth: list[Tensor] = []
    for step in range(len(loop.steps)):
        optimizer.zero_grad()
        truth += loop.losses(model, step)
        optimizer.step()
    found = [*counted.results, *(parameter.detach() for parameter in counted.model.parameters())]
    expected = [*truth, *(parameter.detach() for parameter in model.parameters())]
    assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.filterwarnings("error:lowtide. no plan:UserWarning")
@pytest.mark.parametrize(("name", "engine"), WAYS)
def test_the_budget_holds_in_every_step(name: str, engine: str) -> None:
    loop, budget_bytes = LOOPS[name], budget_of(name)
    counted = Counted(loop, budget_bytes, engine)
    with counted.tide as tide:
        peaks = counted.run()
        assert any("saves other tensors" in event.why for event in tide.events)  # the longer step has a plan of its own
        what = [(round(a / budget_bytes, 3), round(b / budget_bytes, 3)) for a, b in peaks]
        assert max(map(max, peaks)) <= budget_bytes, (what, [event.why for event in tide.events])
    assert_plain_bits(loop, counted)
    gc.collect()
