"""Step time over tokens a step of a model whose weights come for their layer's turn, beside what others published.

    python -m benchmarks.weights_curve [--model examples/llama_3_8b.json] [--hardware h100] [--tokens 4096 16384]

A row is a step of so many tokens, in sequences of 4,096, with AdamW in bf16, by the timeline: weights, gradients and
state elsewhere (`memory.weights: swap`), and every layer run again, as the systems beside it do. "x checkpointed" is
over the same step with all of it on a device without a limit. "of peak" is 6 FLOP for each parameter and token, over
the seconds of the step and the dense rate in the vendor's datasheet, as published rates are counted here. N*: tokens
from which the link has time for all that must move.
Nothing runs. Cost: 10 s of a processor for each row.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from lowtide.cli.alternatives import settings_of
from lowtide.cli.run_step import trace_run, weights_of_run
from lowtide.config.memory import load_memory
from lowtide.planner.plan_profile import plan_profile
from lowtide.timeline.hardware import load_hardware, memory_of_hardware

PEAK = {"h100": 989e12, "rtx4090": 165e12}
"""Dense bf16 products a second, by the vendor."""
PUBLISHED = {
    "ZeRO-Offload, 10B, one V100, 40 TFLOPS (arXiv 2101.06840)": 40 / 125,
    "MegaTrain, Qwen2.5-7B, one H100, 272 TFLOPS (README of DLYuanGod/MegaTrain, 919520f)": 272 / 989,
}
SEQUENCE = 4096
MEMORY = {"budget": "auto", "weights": "swap", "recompute": "all", "swap": "none"}


def row_of(model: str, name: str, tokens: int) -> str:
    """One line of the table."""
    hardware = load_hardware(name)
    shape: Any = {"sequence": min(tokens, SEQUENCE), "batch": max(tokens // SEQUENCE, 1)}
    words = argparse.Namespace(model=model, lora=None, precision=None, rows=None, **shape)
    run = settings_of(words, "adamw")
    memory, budget_bytes, _ = load_memory(MEMORY).settled(lambda: memory_of_hardware(hardware))
    profile = trace_run(dataclasses.replace(run, memory=memory), hardware, say=lambda text: None)
    plan = plan_profile(profile, memory, link=hardware.link, budget_bytes=budget_bytes)
    found, weights = plan.predicted, plan.weights
    assert found is not None and weights is not None
    count = sum(weight.numel() for weight in weights_of_run(run).values())
    alone = found.step_seconds - found.stall_seconds
    share = 6 * count * tokens / found.step_seconds / PEAK[name]
    return (
        f"| {tokens:,} | {found.step_seconds:.2f} s | {found.step_seconds / alone:.2f} | {found.stall_seconds:.2f} s "
        f"| {tokens / found.step_seconds:,.0f} | {100 * share:.0f} % | {weights.hidden_from_tokens:,} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="examples/llama_3_8b.json")
    parser.add_argument("--hardware", default="h100", choices=sorted(PEAK))
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192, 16384, 32768, 65536])
    args = parser.parse_args()
    print("| tokens a step | step | x checkpointed | waits | tokens/s | of peak | N* |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for tokens in args.tokens:
        print(row_of(args.model, args.hardware, tokens), flush=True)
    for name, share in PUBLISHED.items():
        print(f"{name}: {100 * share:.0f} % of peak")


if __name__ == "__main__":
    main()
