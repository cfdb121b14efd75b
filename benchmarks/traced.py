"""The profile of a model that does not exist yet, from its configuration alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lowtide.core.profile import Profile
from lowtide.profiling.fake.trace import trace
from lowtide.timeline.hardware import Hardware


def trace_config(
    config: Any,
    *,
    tokens: int,
    hardware: Hardware,
    samples: int = 1,
    optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer] | None = None,
    **options: Any,
) -> Profile:
    """`trace` of the causal language model of this configuration of transformers, built on the meta device in bfloat16.

    The batch is `samples` rows of `tokens` tokens that are their own labels. `optimizer` makes one from the parameters.
    `options` go to `trace`.
    """
    from transformers import AutoModelForCausalLM

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    finally:
        torch.set_default_dtype(before)
    ids = torch.empty(samples, tokens, dtype=torch.int64, device="meta")
    batch = {"input_ids": ids, "labels": ids}
    made = None if optimizer is None else optimizer([p for p in model.parameters() if p.requires_grad])
    return trace(model, batch, hardware=hardware, optimizer=made, **options)
