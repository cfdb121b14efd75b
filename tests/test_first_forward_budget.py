"""Budgets from the first planned forward on, counted twice: by lowtide's own audit and by a count that shares nothing
with it (independent_count.py). On models that the zoo does not have, over several budgets each."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
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
from lowtide.runtime.autopilot.measure import Correction
from lowtide.runtime.session.tides import Tides
from lowtide.tensors.live_bytes import LiveBytes
from lowtide.timeline.step import Link
from tests.support.grid import one_of
from tests.support.independent_count import IndependentCount, state_tensors
from tests.support.virtual_engine import virtual
from tests.support.zoo import same_bits

MIN_BYTES = 4096
LINK = Link(out_bytes_per_second=1e9, in_bytes_per_second=1e9)


class GatedRecurrence(nn.Module):
    """GRU or LSTM cells over time, whose gates are written in place part by part, then a layer of attention."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 64)
        self.cells = nn.ModuleList(kind(64, 64) for _ in range(2))
        self.attention = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
        self.head = nn.Linear(64, 50)

    def forward(self, ids: Tensor) -> Tensor:  # (N, T) -> scalar
        x, outputs = self.embedding(ids), []
        states: list[Any] = [None for _ in self.cells]
        for time in range(ids.shape[1]):
            y = x[:, time]
            for index, cell in enumerate(self.cells):
                states[index] = cell(y, states[index])
                y = states[index] if isinstance(states[index], Tensor) else states[index][0]
            outputs.append(y)
        scores = self.head(self.attention(torch.stack(outputs, 1)))
        return F.cross_entropy(scores.flatten(0, 1), ids.flatten())


class Bert(nn.Module):
    def __init__(self) -> None:
        from transformers import BertConfig, BertForMaskedLM

        super().__init__()
        shape = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128}
        self.model = BertForMaskedLM(BertConfig(vocab_size=50, max_position_embeddings=64, **shape))

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids, labels=ids).loss


class Convolutions(nn.Module):
    """Batch statistics and activations in place."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.GELU())
            for _ in range(4)
        )
        self.head = nn.Linear(16, 10)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.stem(F.pad(ids.float()[:, None, None, :], (0, 0, 0, 15)))
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), ids[:, 0] % 10)


class Experts(nn.Module):
    """Tokens go to the better of three experts, so that sizes follow the data."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.gate, self.head = nn.Embedding(50, 48), nn.Linear(48, 3), nn.Linear(48, 50)
        self.layers = nn.ModuleList(
            nn.ModuleList(nn.Sequential(nn.Linear(48, 96), nn.SiLU(), nn.Linear(96, 48)) for _ in range(3))
            for _ in range(3)
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids).flatten(0, 1)
        for experts in self.layers:
            share, chosen = self.gate(x).softmax(-1).max(-1)
            mixed = torch.zeros_like(x)
            for number, expert in enumerate(experts):
                (rows,) = torch.where(chosen == number)
                mixed = mixed.index_add(0, rows, expert(x[rows]) * share[rows, None])
            x = x + mixed
        return F.cross_entropy(self.head(x), ids.flatten())


class SharedLayers(nn.Module):
    """One block that runs four times, and a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 64)
        self.block = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 192), nn.GELU(), nn.Dropout(0.1), nn.Linear(192, 64))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for _ in range(4):
            x = x + self.block(x)
        return F.cross_entropy((x @ self.embedding.weight.t()).flatten(0, 1), ids.flatten())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gru_and_attention": lambda: GatedRecurrence(nn.GRUCell),
    "lstm_and_attention": lambda: GatedRecurrence(nn.LSTMCell),
    "bert": Bert,
    "convolutions": Convolutions,
    "experts": Experts,
    "shared_layers": SharedLayers,
}


def tokens(seed: int = 0) -> Tensor:
    return torch.randint(50, (16, 6), generator=torch.Generator().manual_seed(seed))


def build(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Nothing grows after the first step, and experts are chosen alike in all of them."""
    torch.manual_seed(0)
    model = MODELS[name]().train()
    return model, torch.optim.SGD(model.parameters(), lr=1e-6)


@functools.cache
def range_of(name: str) -> tuple[int, int]:
    """The floor, and the peak with everything kept."""
    model, optimizer = build(name)
    profile = observe(model, (tokens(),), optimizer=optimizer)
    memory = load_memory({"budget": 1 << 40, "min_bytes": MIN_BYTES})
    found = plan_profile(profile, memory, link=LINK).predicted
    assert found is not None
    return found.floor_bytes, found.plain_peak_bytes


def budget_of(name: str, share: float) -> int:
    """So much of the way from the floor to everything kept."""
    floor_bytes, plain_bytes = range_of(name)
    return floor_bytes + int(share * (plain_bytes - floor_bytes))


class Counted:
    """Planned steps, each counted twice from its first planned operator on."""

    def __init__(self, name: str, budget_bytes: int, engine: str, **memory: Any) -> None:
        self.model, self.optimizer = build(name)
        self.tide: Tides = lowtide.optimize(
            self.model, budget=budget_bytes, memory={"min_bytes": MIN_BYTES, **memory}, optimizer=self.optimizer,
            engine=engine,
        )  # fmt: skip
        self.counts: list[Any] = []
        self.results: list[Tensor] = []

    def _planned(self, line: str) -> None:
        """The autopilot has just put a plan in force: what it did for that is not the planned step's."""
        if self.counts and line.startswith("lowtide: plan"):
            independent, audit = self.counts
            independent.restart()
            audit.peak_bytes = audit.now_bytes
            self._follow(audit)

    def _follow(self, audit: LiveBytes) -> None:
        assert self.tide.tide is not None
        self.tide.tide._scheduler.on_buffer = audit.add

    def step(self, batch: Tensor) -> tuple[int, int]:
        """Peaks of the independent count and of the audit."""
        self.optimizer.zero_grad()
        independent = IndependentCount(state_tensors(self.model, self.optimizer, [batch]), engine=self.tide.engine)
        audit = LiveBytes(model=self.model, optimizer=self.optimizer)
        audit.add_all([batch])
        self.counts = [independent, audit]
        if self.tide.tide is not None:
            self._follow(audit)
        with Listener(self._planned), independent, audit:
            loss = self.model(batch)
            loss.backward()
        assert self.tide.tide is not None
        self.tide.tide._scheduler.on_buffer = None
        del self.tide.engine.new_buffer
        self.results.append(loss.detach().clone())
        self.optimizer.step()
        return independent.peak_bytes, audit.peak_bytes

    def assert_plain_bits(self, name: str, batches: list[Tensor]) -> None:
        torch.manual_seed(1)
        model, optimizer = build_after_seed(name)
        truth = []
        for batch in batches:
            optimizer.zero_grad()
            loss = model(batch)
            loss.backward()
            truth.append(loss.detach().clone())
            optimizer.step()
        found = [*self.results, *(parameter.detach() for parameter in self.model.parameters())]
        expected = [*truth, *(parameter.detach() for parameter in model.parameters())]
        assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))


def build_after_seed(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """`build`, with the random state as it was before."""
    with torch.random.fork_rng(devices=[]):
        return build(name)


ON_THE_HOST = ("bert",)
"""All but the second recurrence on the virtual engine, at the floor; the others, and on the host the other five, are
`make test-extended`'s."""
WAYS = [
    pytest.param(name, 0.0, virtual(3), marks=[pytest.mark.extended] if name == "lstm_and_attention" else [])
    for name in MODELS
] + [pytest.param(name, 0.4, "host", marks=[] if name in ON_THE_HOST else [pytest.mark.extended]) for name in MODELS]


@pytest.mark.parametrize(("name", "share", "engine"), WAYS)
def test_every_planned_step_keeps_the_budget(name: str, share: float, engine: str) -> None:
    counted = Counted(name, budget_of(name, share), engine)
    torch.manual_seed(1)
    assert_kept(name, counted, budget_of(name, share), [tokens()] * 3)


@pytest.mark.parametrize("name", one_of(3, ["gru_and_attention", "bert", "shared_layers"], first=2))
def test_the_first_step_after_each_correction_keeps_the_budget(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind of correction, injected: bytes that nobody foresaw, and a link that is slower than it was measured."""
    budget = budget_of(name, 0.5)
    counted = Counted(name, budget, virtual(2))
    unforeseen_bytes = (budget - range_of(name)[0]) // 4
    wrong = iter([Correction(why="peak: injected", unforeseen_bytes=unforeseen_bytes)])

    def correction(shape: Any, stats: Any, link: Link, budget_bytes: int) -> Correction:
        slower = dataclasses.replace(
            link, out_bytes_per_second=link.out_bytes_per_second / 9, in_bytes_per_second=link.in_bytes_per_second / 9
        )
        return next(wrong, Correction(why="stalls: injected", link=slower))

    monkeypatch.setattr(counted.tide.source.watch, "correction", correction)
    torch.manual_seed(1)
    assert_kept(name, counted, budget, [tokens()] * 4)
    events = [(event.why, event.budget_bytes) for event in counted.tide.events]
    less = budget - unforeseen_bytes
    assert events == [("first step", budget), ("peak: injected", less), ("stalls: injected", less)]


def assert_kept(name: str, counted: Counted, budget: int, batches: list[Tensor]) -> None:
    with counted.tide as tide:
        for number, batch in enumerate(batches):
            independent_bytes, audited_bytes = counted.step(batch)
            assert audited_bytes <= budget, f"step {number}: audited {audited_bytes} of {budget}"
            assert independent_bytes <= budget, f"step {number}: counted {independent_bytes} of {budget}"
            # How soon a real copy is complete, and frees its source, depends on how busy the machine is: it may be
            # between the looks of the two counts.
            is_timed = tide.engine.name == "host"
            assert is_timed or independent_bytes == audited_bytes, f"step {number}"
            assert tide.plan is not None and tide.plan.predicted is not None
            assert number == 0 or is_timed or audited_bytes >= 0.95 * tide.plan.predicted.peak_bytes
        assert tide.stats is not None and tide.stats.num_divergences == tide.stats.num_unknown == 0
        counted.assert_plain_bits(name, batches)


@pytest.mark.parametrize("cell", [nn.GRUCell, nn.LSTMCell])
@pytest.mark.parametrize("engine", ["host", virtual(1), virtual(2)])
def test_parts_of_a_storage_that_are_written_one_by_one(cell: type[nn.Module], engine: str) -> None:
    """Gates come out of `unsafe_chunk`: tensors on one storage with a version counter each. A copy made when the first
    was saved has old bytes of the others, at the same version."""
    results = []
    for memory in (None, {"swap": ["*"], "min_bytes": 1}):
        torch.manual_seed(0)
        model = GatedRecurrence(cell).train()
        torch.manual_seed(1)
        if memory is None:
            model(tokens()).backward()
        else:
            with lowtide.apply(model, memory, engine=engine) as tide:
                for _ in range(2):  # learned, then by position
                    model.zero_grad()
                    torch.manual_seed(1)
                    model(tokens()).backward()
                assert tide.stats.num_divergences == 0
        results.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))


def test_a_guard_spills_parts_of_a_storage_as_they_were() -> None:
    results = []
    for limit in (None, 0):
        torch.manual_seed(0)
        model = GatedRecurrence(nn.LSTMCell).train()
        with lowtide.apply(model, {"swap": "none", "min_bytes": 1}, engine=virtual(1)) as tide:
            tide.set_limit(limit)
            torch.manual_seed(1)
            model(tokens()).backward()
            assert (tide.stats.num_spills > 0) == (limit is not None)
        results.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))


def test_what_is_written_in_parts_stays_and_is_counted() -> None:
    """No plan decides about such a storage, and the plan says why."""
    model, _ = build("gru_and_attention")
    profile = observe(model, (tokens(),))
    reasons = {entry.name: entry.reason for entry in profile.staying}
    assert reasons["cells.0.sigmoid"] == "written in parts that do not know of each other"
    assert "cells.0.sigmoid" not in {node.name for node in profile.nodes}


class Forces(nn.Module):
    """An energy, and its gradient with respect to the positions."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.SiLU()) for _ in range(2))

    def forward(self, positions: Tensor) -> Tensor:  # (N, 8) -> scalar
        positions = positions.detach().requires_grad_()
        energy = positions
        for layer in self.layers:
            energy = layer(energy)
        (forces,) = torch.autograd.grad(energy.sum(), positions, create_graph=True)
        return energy.square().mean() + forces.square().mean()


def test_gradients_within_the_forward_pass_are_exact_under_rules_and_refused_under_a_budget() -> None:
    torch.manual_seed(0)
    model, positions = Forces(), torch.randn(4, 8)
    model(positions).backward()
    truth = [parameter.grad.clone() for parameter in model.parameters()]
    for memory in ({"swap": ["*"], "min_bytes": 1}, {"recompute": "all", "min_bytes": 1}):
        for engine in ("host", virtual(1)):
            with lowtide.apply(model, memory, engine=engine):
                for _ in range(2):
                    model.zero_grad()
                    model(positions).backward()
                    found = [parameter.grad for parameter in model.parameters()]
                    assert all(same_bits(a, b) for a, b in zip(found, truth, strict=True))
    said = (
        "lowtide: 'layers.1.0.addmm' is read within the forward pass: Forces takes gradients there itself "
        "(torch.autograd.grad, for forces of an energy, say), and a plan for a budget does not cover that. Use "
        "lowtide.apply with rules"
    )
    with lowtide.optimize(model, budget="1GiB", engine=virtual(1)):
        for _ in range(2):
            with pytest.raises(lowtide.ConfigError) as caught:
                model(positions)
            assert str(caught.value) == said
    with pytest.raises(lowtide.ConfigError) as caught:
        lowtide.plan(model, (positions,), budget="1GiB")
    assert str(caught.value) == said
    model.zero_grad()
    model(positions).backward()
    assert all(same_bits(p.grad, t) for p, t in zip(model.parameters(), truth, strict=True))
