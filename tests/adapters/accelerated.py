"""A small Llama, its tokens, and a loop of one's own with Accelerate; ranks load no Trainer for it."""

from __future__ import annotations

import os
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import lowtide
from tests.support.virtual_engine import virtual

SMALL = {"min_bytes": 0}
BUDGET = "560KiB"


def llama(dropout: float = 0.0) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            use_cache=False,
            attention_dropout=dropout,
        )
    )


class Tokens(torch.utils.data.Dataset):
    def __init__(self) -> None:
        self.tokens = torch.randint(64, (16, 24), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def accelerated(call: str, rows: slice = slice(0, 2)) -> list[Tensor]:
    accelerator = Accelerator(cpu=True)
    model = llama()
    inside = torch.optim.AdamW(model.parameters(), lr=1e-2)
    prepared, optimizer = accelerator.prepare(model, inside)
    groups, state = inside.param_groups, inside.state
    tide: Any = None
    if call == "optimize":
        tide = lowtide.optimize(prepared, budget=BUDGET, memory=SMALL, optimizer=optimizer, engine=virtual(1))
    elif call == "inside":  # the module that DDP calls: the same, one wrapper further in
        inner = accelerator.unwrap_model(prepared)
        tide = lowtide.optimize(inner, budget=BUDGET, memory=SMALL, optimizer=optimizer, engine=virtual(1))
    elif call == "apply":
        tide = lowtide.apply(prepared, {"swap": "all", "min_bytes": 0}, optimizer=optimizer, engine=virtual(1))
    tokens = Tokens().tokens[rows]
    for _ in range(3):
        accelerator.backward(prepared(input_ids=tokens, labels=tokens).loss)
        optimizer.step()
        optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in model.parameters())
    assert inside.param_groups is groups
    assert inside.state is state
    assert {id(p) for p in state} == {id(p) for p in model.parameters()}
    if tide is not None:
        assert tide.stats.swapped_bytes + tide.stats.recomputed_bytes
        tide.remove()
    return [parameter.detach().clone() for parameter in model.parameters()]


def environment_of(rank: int) -> None:
    """As `accelerate launch` sets it."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="1")
    assert Accelerator(cpu=True).num_processes == 2


def on_a_rank(rank: int, call: str) -> list[Any]:
    environment_of(rank)
    return [weight.tolist() for weight in accelerated(call, slice(2 * rank, 2 * rank + 2))]
