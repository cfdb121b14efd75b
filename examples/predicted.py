"""Prints the two tables of predictions in README.md: what a step of an 8B model needs and takes, before it is run.

    python examples/predicted.py [--full] [--lora]

The model is built on torch's `meta` device, so this needs neither a GPU nor the weights, only the extra `train`, and
`peft` for `--lora`. Times are rooflines of the named device. Nothing here is measured.

Rows: *plain* keeps every activation; *every layer checkpointed* recomputes all layers, as gradient checkpointing does;
*lowtide* is the plan for the budget `auto` (the memory of the device less 5 %). The first two have no budget, so that
it can be seen whether they would fit.
"""

from __future__ import annotations

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import lowtide

TOKENS = 8192
KEPT = {"recompute": "none", "swap": "none", "loss": "plain"}
CHECKPOINTED = {"recompute": "all", "swap": "none", "loss": "plain"}


def llama_8b() -> LlamaForCausalLM:
    """Llama-3-8B in bf16 without its weights: 8.0 billion parameters."""
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        use_cache=False,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config).to(torch.bfloat16)


def with_lora(model: torch.nn.Module) -> torch.nn.Module:
    """The same model with LoRA of rank 16 on all of its linear layers."""
    from peft import LoraConfig, get_peft_model

    with torch.device("meta"):
        return get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))


def table(model: torch.nn.Module, hardware: str) -> list[str]:
    """The rows for one micro-batch of one sequence of `TOKENS` tokens, on a named device."""
    batch = dict.fromkeys(("input_ids", "labels"), torch.zeros(1, TOKENS, dtype=torch.long, device="meta"))
    optimizer = torch.optim.AdamW((w for w in model.parameters() if w.requires_grad), fused=True)

    def plan(budget: str, **memory: str) -> lowtide.Plan:
        return lowtide.plan(model, batch, budget, memory=memory, optimizer=optimizer, hardware=hardware)

    rows = {
        "plain": plan("1TiB", **KEPT),
        "every layer checkpointed": plan("1TiB", **CHECKPOINTED),
        "lowtide, budget `auto`": plan("auto"),
    }
    plain = rows["plain"].predicted.step_seconds
    lines = ["| predicted | peak | step | over plain | tokens/s |", "|---|---:|---:|---:|---:|"]
    for name, made in rows.items():
        peak, seconds = made.predicted.peak_bytes, made.predicted.step_seconds
        lines.append(
            f"| {name} | {peak / 2**30:.1f} GiB | {seconds:.2f} s | {100 * (seconds / plain - 1):+.1f} % "
            f"| {TOKENS / seconds:,.0f} |"
        )
    return lines


def main() -> None:
    """Prints both tables, or the one that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="all weights, on an H100 with 80 GB")
    parser.add_argument("--lora", action="store_true", help="LoRA of rank 16, on an RTX 4090 with 24 GB")
    asked = parser.parse_args()
    if asked.full or not asked.lora:
        print("8B, all weights, 1 x 8,192 tokens, bf16, AdamW, H100 80 GB", *table(llama_8b(), "h100"), sep="\n")
    if asked.lora or not asked.full:
        print("8B, LoRA, 1 x 8,192 tokens, bf16, AdamW, RTX 4090 24 GB", sep="\n")
        print(*table(with_lora(llama_8b()), "rtx4090"), sep="\n")


if __name__ == "__main__":
    main()
