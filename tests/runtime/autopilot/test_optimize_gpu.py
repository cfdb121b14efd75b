"""The autopilot on a real accelerator: budgets kept by the allocator's own count, gradients to the bit.

The model's size follows the device's memory and speed (benchmarks/device_sizes.py)."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from benchmarks.device_sizes import sizes_of

pytestmark = pytest.mark.gpu

_STEP_SECONDS = 0.05


@functools.lru_cache(maxsize=1)
def shape() -> tuple[int, int, int]:
    """Layers, width and tokens."""
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    width = sizes_of(accelerator).width(layers=12, seconds=_STEP_SECONDS, most=1024)
    return (12 if width >= 512 else 4), width, 2 * width


def rules(**more: Any) -> dict[str, Any]:
    """Small storages count where the model is small."""
    _, width, tokens = shape()
    return {"min_bytes": min(2**20, width * tokens // 4), **more}


def make() -> tuple[nn.Module, torch.Tensor]:
    from transformers import LlamaConfig, LlamaForCausalLM

    layers, width, tokens = shape()
    config = LlamaConfig(vocab_size=512, hidden_size=width, intermediate_size=width * 11 // 4, num_hidden_layers=layers,
                         num_attention_heads=width // 64, max_position_embeddings=tokens, use_cache=False)  # fmt: skip
    torch.manual_seed(0)
    with torch.device(torch.accelerator.current_accelerator()):
        return LlamaForCausalLM(config).to(torch.bfloat16).train(), torch.randint(512, (1, tokens))


def take_step(model: nn.Module, ids: torch.Tensor) -> tuple[int, list[torch.Tensor]]:
    """The allocator's peak of one step, and its loss and gradients on the host."""
    model.zero_grad(set_to_none=True)
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    torch.accelerator.synchronize()
    peak_bytes = int(torch.accelerator.max_memory_allocated())
    return peak_bytes, [loss.detach().cpu(), *(parameter.grad.cpu() for parameter in model.parameters())]


@pytest.mark.parametrize("share", [0.7, 0.5, 0.3])
def test_a_budget_is_kept(share: float) -> None:
    model, ids = make()
    take_step(model, ids)
    plain_bytes, plain = take_step(model, ids)
    again = take_step(model, ids)[1]
    is_repeatable = all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    saved_bytes = lowtide.observe(model, {"input_ids": ids, "labels": ids}).saved_bytes
    budget = int(plain_bytes - (1 - share) * saved_bytes)
    with lowtide.optimize(model, budget=budget, memory=rules()) as tide:
        results = [take_step(model, ids) for _ in range(6)]
        assert tide.plan is not None and tide.plan.predicted is not None
        predicted_bytes = tide.plan.predicted.peak_bytes
        assert len(tide.events) <= 3
    # the first step learns tables and tries recipes out, the next two may correct
    peak_bytes = max(peak for peak, _ in results[3:])
    assert peak_bytes <= budget, f"{peak_bytes} of {budget}, predicted {predicted_bytes}, plain {plain_bytes}"
    if is_repeatable:
        for _, result in results:
            assert all(torch.equal(a, b) for a, b in zip(plain, result, strict=True))


def test_plans_race_on_the_clock_of_the_device() -> None:
    model, ids = make()
    take_step(model, ids)
    plain_bytes, plain = take_step(model, ids)
    is_repeatable = all(torch.equal(a, b) for a, b in zip(plain, take_step(model, ids)[1], strict=True))
    saved_bytes = lowtide.observe(model, {"input_ids": ids, "labels": ids}).saved_bytes
    budget = int(plain_bytes - 0.5 * saved_bytes)
    with lowtide.optimize(model, budget=budget, memory=rules()):
        results = [take_step(model, ids) for _ in range(24)]
    assert max(peak for peak, _ in results[18:]) <= budget
    if is_repeatable:
        for _, result in results:
            assert all(torch.equal(a, b) for a, b in zip(plain, result, strict=True))
