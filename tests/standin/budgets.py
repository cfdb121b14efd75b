"""Training on the stand-in under a budget: what `lowtide.optimize` promises, held against the device's own count.

Which plan the solver takes depends on prices: those of the link and of the device are given (`at_given_prices`), and no
clock of the host's ends a search. So a run is the same one on every machine.
"""

from __future__ import annotations

import contextlib
import gc
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any
from unittest import mock

import torch
from torch import nn

import lowtide
from lowtide.core.log import Listener
from lowtide.errors import BudgetError
from lowtide.timeline.step import Link
from tests.standin import device

HERE = torch.device(device.NAME, 0)


@dataclass(frozen=True, kw_only=True)
class Training:
    """A small Llama, and the habits of the loop around it."""

    width: int = 64
    tokens: int = 64
    num_layers: int = 4
    dtype: torch.dtype = torch.float32
    num_steps: int = 5
    accumulate: int = 1
    has_optimizer: bool = False
    resets: str = "never"
    """When the loop resets torch's peak counter: 'never', 'each step', 'between' (forward and backward)."""
    own_loss: bool = False
    """The loss is the loop's, not the model's."""
    min_bytes: int = 0
    """What is smaller is kept. By default all that is saved here would be: then plans only run whole layers again."""

    def model(self) -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        sizes = {"hidden_size": self.width, "intermediate_size": 2 * self.width, "num_hidden_layers": self.num_layers}
        config = LlamaConfig(vocab_size=64, num_attention_heads=4, use_cache=False, **sizes)
        return LlamaForCausalLM(config).to(HERE, self.dtype).train()

    def batch(self, step: int, micro: int) -> torch.Tensor:
        return torch.randint(64, (2, self.tokens), generator=torch.Generator().manual_seed(10 * step + micro)).to(HERE)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer | None:
        return torch.optim.AdamW(model.parameters(), lr=1e-3) if self.has_optimizer else None

    def run(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, after: Callable[[], None] = lambda: None
    ) -> list[torch.Tensor]:
        """What each step leaves, on the host. Calls `after` when a step is over."""
        found = []
        for step in range(self.num_steps):
            if self.resets == "each step":
                torch.accelerator.reset_peak_memory_stats()
            model.zero_grad()
            for micro in range(self.accumulate):
                ids = self.batch(step, micro)
                loss = self._loss(model, ids)
                if self.resets == "between":
                    torch.accelerator.reset_peak_memory_stats()
                loss.backward()
                found.append(loss.detach().cpu())
                del loss
            found += [parameter.grad.cpu() for parameter in model.parameters()]
            if optimizer is not None:
                optimizer.step()
            after()
        return found + [parameter.detach().cpu() for parameter in model.parameters()]

    def _loss(self, model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        if not self.own_loss:
            return model(input_ids=ids, labels=ids).loss
        return model(input_ids=ids).logits.float().square().mean()


@dataclass(frozen=True, kw_only=True)
class Prices:
    """What copies and computation take. With a slow link plans recompute, with a fast one they swap."""

    link: Link
    speeds: dict[str, float] = field(default_factory=dict)
    """Of the device's clock (`device.set_speeds`)."""

    @classmethod
    def drawn(cls, seed: int, number: int) -> Prices:
        """The `number`-th prices of a seed; each of three in a row is of another kind."""
        draw = Random(1000 * seed + number)
        rate = 10 ** draw.uniform(*((6, 8), (11, 13), (8, 11))[number % 3])
        link = Link(
            out_bytes_per_second=rate,
            in_bytes_per_second=rate * draw.choice([0.3, 1.0, 1.0, 3.0]),
            latency_seconds=draw.choice([0.0, 1e-6]),
            compute_share=draw.choice([0.0, 0.05]),
        )
        speeds = {"flops": 10 ** draw.uniform(11, 14), "memory": 10 ** draw.uniform(10, 12), "launch": 1e-6}
        copies = {"out": link.out_bytes_per_second, "into": link.in_bytes_per_second}
        return cls(link=link, speeds={**speeds, **copies})


@contextlib.contextmanager
def at_given_prices(prices: Prices) -> Iterator[None]:
    """Inside, the link is as fast as these say, the device too, and solvers take their time."""
    still = types.SimpleNamespace(perf_counter=lambda: 0.0)
    device.set_speeds(**prices.speeds)
    with (
        mock.patch("lowtide.runtime.autopilot.planner.measure_link", return_value=prices.link),
        mock.patch("lowtide.planner.solve.time", still),
        mock.patch("lowtide.planner.local_search.time", still),
    ):
        yield


@dataclass(frozen=True, kw_only=True)
class Plain:
    """A run without lowtide."""

    results: list[torch.Tensor]
    peak_bytes: int
    resting_bytes: int


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A run under a budget. `peaks`: of each step from the first planned forward pass on."""

    results: list[torch.Tensor]
    peaks: list[int]
    budget_bytes: int
    events: list[Any]
    warned: list[str]
    left_bytes: int
    """On the device, when everything is gone."""
    fates: frozenset[str]
    """Those of the plan that was in force at the end."""


def plain(training: Training) -> Plain:
    before_bytes = _allocated_bytes()
    model = training.model()
    optimizer = training.optimizer(model)
    device.take_peak()
    results = training.run(model, optimizer)
    resting_bytes = torch.accelerator.memory_allocated()
    return Plain(
        results=results, peak_bytes=device.take_peak() - before_bytes, resting_bytes=resting_bytes - before_bytes
    )


def planned(training: Training, budget_bytes: int, look: Callable[[Any | None], None] = lambda tide: None) -> Planned:
    """With this budget or, where no plan fits it, the least that the error says would do.

    There may be several such errors: when gradients are found to stay from one micro-batch to the next, and when a
    step shows what the loop computes around the model. Calls `look` when the first plan is there, and after each step,
    then with the autopilot."""
    for _ in range(4):
        try:
            return _planned(training, budget_bytes, look)
        except BudgetError as error:
            budget_bytes = max(error.floor_bytes, budget_bytes)
    raise AssertionError(f"no plan fits {budget_bytes}, which was said to be enough")


def _planned(training: Training, budget_bytes: int, look: Callable[[Any | None], None]) -> Planned:
    before_bytes = _allocated_bytes()
    peaks: list[int] = []

    def hear(line: str) -> None:
        if line.startswith("lowtide: plan ") and "(first step)" in line:
            device.take_peak()  # the observed step is no planned one
            look(None)

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        model = training.model()
        optimizer = training.optimizer(model)
        memory: dict[str, Any] = {"min_bytes": training.min_bytes, "strict": True}
        budget = budget_bytes + before_bytes
        with Listener(hear), lowtide.optimize(model, budget=budget, optimizer=optimizer, memory=memory) as tide:

            def after(tide: Any = tide) -> None:
                peaks.append(device.take_peak() - before_bytes)
                look(tide)

            results = training.run(model, optimizer, after)
            events = list(tide.events)
            fates = frozenset(site.fate.value for site in tide.plan.sites)
    texts = [str(each.message) for each in warned if "lowtide" in str(each.message)]
    del model, optimizer, tide, hear, after
    left_bytes = _allocated_bytes() - before_bytes
    return Planned(
        results=results,
        peaks=peaks,
        budget_bytes=budget_bytes,
        events=events,
        warned=texts,
        left_bytes=left_bytes,
        fates=fates,
    )


def _allocated_bytes() -> int:
    gc.collect()
    torch.accelerator.synchronize()
    return torch.accelerator.memory_allocated()
