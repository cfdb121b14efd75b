"""The pieces of details.py that are about steps: hooks, prefetch, the host's time, what the allocator keeps.

Cost: seconds each. Not covered: steps with an optimizer.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import lowtide
from benchmarks.rows import Row
from benchmarks.steps import peak_bytes_of, synchronize, timed

_WARM_STEPS = 3
FATES: dict[str, dict[str, Any]] = {
    "all kept": {},
    "all recomputed": {"recompute": "all"},
    "all swapped": {"swap": "all"},
}
LEADS = (0, 2, 5, 10, 20, 40)
"""Operators of the backward pass."""


# -- hooks -------------------------------------------------------------------------------------------------------------


class Sines(nn.Module):
    """Operators that do next to nothing, and save one tensor each."""

    def __init__(self, num_layers: int, num_ops: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Block(num_ops) for _ in range(num_layers))
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self) -> Tensor:
        x = self.scale
        for layer in self.layers:
            x = layer(x)
        return x.sum()


class _Block(nn.Module):
    def __init__(self, num_ops: int) -> None:
        super().__init__()
        self.num_ops = num_ops

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.num_ops):
            x = torch.sin(x)
        return x


def hooks(args: argparse.Namespace) -> list[Row]:
    """Plain and with everything kept, over the same number of tensors in few layers and in many."""
    device = torch.device(args.device)
    rows = []
    for num_layers, num_ops in ((8, 64), (128, 4)):
        model = Sines(num_layers, num_ops).to(device)
        plain = _median_seconds(model, device, args.rounds)
        with lowtide.apply(model, {}):
            hooked = _median_seconds(model, device, args.rounds)
        num_tensors = num_layers * num_ops
        rows.append(
            {
                "num_layers": num_layers,
                "num_tensors": num_tensors,
                "plain_seconds": plain,
                "hooked_seconds": hooked,
                "added_per_tensor_seconds": (hooked - plain) / num_tensors,
            }
        )
    return rows


def _median_seconds(model: nn.Module, device: torch.device, rounds: int) -> float:
    def step() -> None:
        model.zero_grad(set_to_none=False)
        model().backward()

    for _ in range(_WARM_STEPS):
        step()
    return statistics.median(timed(step, device) for _ in range(3 * rounds))


# -- a Llama under fates -----------------------------------------------------------------------------------------------


class Subject:
    """A small Llama and its step."""

    def __init__(self, args: argparse.Namespace) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        self.device = torch.device(args.device)
        heads = max(args.hidden // 128, 2)
        config = LlamaConfig(
            vocab_size=256, hidden_size=args.hidden, intermediate_size=args.hidden * 8 // 3,
            num_hidden_layers=args.layers, num_attention_heads=heads, num_key_value_heads=heads, use_cache=False,
            max_position_embeddings=args.sequence,
        )  # fmt: skip
        torch.manual_seed(0)
        dtype = torch.float32 if self.device.type == "cpu" else torch.bfloat16
        with torch.device(self.device):
            self.model = LlamaForCausalLM(config).to(dtype).train()
            self.ids = torch.randint(256, (1, args.sequence))

    def step(self) -> None:
        self.model.zero_grad(set_to_none=False)
        self.model(input_ids=self.ids, labels=self.ids).loss.backward()

    def seconds(self, rounds: int) -> float:
        """Median of so many steps, after some that do not count."""
        for _ in range(_WARM_STEPS):
            self.step()
        return statistics.median(timed(self.step, self.device) for _ in range(rounds))

    def under(self, memory: dict[str, Any], measure: Callable[[Any], Row]) -> Row:
        """`measure(tide)` under the rules, after some steps."""
        with lowtide.apply(self.model, memory) as tide:
            for _ in range(_WARM_STEPS):
                self.step()
            tide.reset_stats()
            return measure(tide)


def prefetch_lead(args: argparse.Namespace) -> list[Row]:
    """Everything swapped; fetches start so many operators before their need, or by bytes."""
    subject = Subject(args)
    plain = subject.seconds(args.rounds)

    def measure(tide: Any) -> Row:
        seconds = [timed(subject.step, subject.device) for _ in range(args.rounds)]
        stall = tide.stats.stall_seconds / args.rounds
        median = statistics.median(seconds)
        peak = peak_bytes_of(subject.step, subject.model, tide)
        return {"ratio_median": median / plain, "peak_bytes": peak, "seconds_median": median, "stall_seconds": stall}

    rows: list[Row] = []
    for lead in (*LEADS, None):
        rule: dict[str, Any] = {"match": "*"} if lead is None else {"match": "*", "prefetch": lead}
        name = "by bytes" if lead is None else f"{lead} operators ahead"
        rows.append({"setting": name, **subject.under({"swap": [rule], "min_bytes": 65536}, measure)})
    return rows


def issue(args: argparse.Namespace) -> list[Row]:
    """The host's time from the start of a step until `backward` returns, beside the device's."""
    subject = Subject(args)
    if subject.device.type == "cpu":
        raise ValueError("a CPU issues nothing: the host's time is the step's")

    def measure(tide: Any) -> Row:
        issued, done = [], []
        for _ in range(args.rounds):
            synchronize(subject.device)
            started = time.perf_counter()
            subject.step()
            issued.append(time.perf_counter() - started)
            synchronize(subject.device)
            done.append(time.perf_counter() - started)
        return {"issue_seconds": statistics.median(issued), "seconds_median": statistics.median(done)}

    for _ in range(_WARM_STEPS):
        subject.step()
    rows: list[Row] = [{"setting": "plain", **measure(None)}]
    rows += [{"setting": name, **subject.under(memory, measure)} for name, memory in FATES.items()]
    plain = rows[0]["issue_seconds"]
    return [{**row, "added_per_layer_seconds": (row["issue_seconds"] - plain) / args.layers} for row in rows]


def fragmentation(args: argparse.Namespace) -> list[Row]:
    """Most bytes given out and most reserved over some steps, from an empty pool."""
    device = torch.device(args.device)
    if device.type == "cpu":
        raise ValueError("main memory has no allocator that tells what it reserves")
    rows = []
    for name, memory in (("plain", None), *FATES.items()):
        torch.accelerator.empty_cache()
        rows.append({"setting": name, **_reserved(args, memory)})
    return rows


def _reserved(args: argparse.Namespace, memory: dict[str, Any] | None) -> Row:
    subject = Subject(args)

    def measure(tide: Any) -> Row:
        torch.accelerator.reset_peak_memory_stats(subject.device)
        for _ in range(args.rounds):
            subject.step()
        synchronize(subject.device)
        given = torch.accelerator.max_memory_allocated(subject.device)
        reserved = torch.accelerator.max_memory_reserved(subject.device)
        retries = torch.accelerator.memory_stats(subject.device).get("num_alloc_retries")
        return {
            "peak_bytes": given,
            "reserved_bytes": reserved,
            "unused_share": (reserved - given) / reserved,
            "num_retries": retries,
        }

    for _ in range(_WARM_STEPS):
        subject.step()
    return measure(None) if memory is None else subject.under(memory, measure)
