"""What a step costs at a share of its activation memory, beside what people do today.

    python -m benchmarks.budget [--rounds 10] [--shares 0.5 0.3 0.1] [--device cuda --dtype bfloat16 ...] [--out FILE]

A Llama stack, forward and backward, all variants in turn in one run; gradients exist throughout. The budget of a share
s is plain's peak less (1 - s) of the bytes that plain autograd saves. Variants:

- plain: no lowtide, unlimited memory;
- full recompute: transformers' own activation checkpointing of every layer;
- uniform s: the fewest layers under such checkpointing whose peak is within the budget of s, found by trying;
- save_on_cpu: `torch.autograd.graph.save_on_cpu` around the step (on a CPU this moves nothing: it is already there);
- lowtide s: `lowtide.optimize` with the budget of s, after it is stable.

Reported: seconds a step and their ratio to plain round by round; the peak, which is the allocator's own on an
accelerator, and on the CPU an audit of every live byte in a step of its own before the clock runs; and whether loss and
gradients are plain's to the bit.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.interleave import Variant, median, ratio, run_interleaved, serve

MIB = 2**20
ENVIRONMENT = {"THP_MEM_ALLOC_ENABLE": "1"}
SHAPE = ("layers", "hidden", "intermediate", "batch", "sequence", "threads", "device", "dtype", "check", "min_bytes")


class Subject:
    """The model, its batch, and how its peak is measured."""

    def __init__(self, args: argparse.Namespace) -> None:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        self.device = torch.device(args.device)
        torch.set_num_threads(args.threads)
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=256,
            hidden_size=args.hidden,
            intermediate_size=args.intermediate or args.hidden * 8 // 3,
            num_hidden_layers=args.layers,
            num_attention_heads=args.hidden // (128 if args.hidden >= 2048 else 64),
            max_position_embeddings=args.sequence,
            use_cache=False,
        )
        with torch.device(self.device):
            self.model = LlamaForCausalLM(config).to(getattr(torch, args.dtype)).train()
            self.ids = torch.randint(0, 256, (args.batch, args.sequence))
        self.around: Any = contextlib.nullcontext

        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def step(self) -> Any:
        # Gradients stay where they are, as with accumulation: else the peak of a small budget is theirs alone.
        self.model.zero_grad(set_to_none=False)
        with self.around():
            loss = self.model(input_ids=self.ids, labels=self.ids).loss
        loss.backward()
        return loss.detach()

    def synchronize(self) -> None:
        if self.device.type != "cpu":
            import torch

            torch.get_device_module(self.device.type).synchronize()

    def peak_bytes(self, tide: Any = None) -> int:
        """Of one step."""
        if self.device.type != "cpu":
            import torch

            torch.accelerator.reset_peak_memory_stats(self.device)
            self.step()
            return int(torch.accelerator.max_memory_allocated(self.device))
        from lowtide.catalog.live import LiveBytes

        with tide.tide.audit() if tide is not None else LiveBytes(model=self.model) as live:
            self.step()
        return int(live.peak_bytes)

    def budget_bytes(self, share: float) -> int:
        import lowtide

        profile = lowtide.observe(self.model, {"input_ids": self.ids, "labels": self.ids})
        plain = self.peak_bytes()
        return int(plain - (1 - share) * profile.saved_bytes)

    def checkpoint(self, count: int) -> None:
        """Put the first `count` layers under transformers' checkpointing."""
        self.model.activation_checkpointing_enable()
        for index, layer in enumerate(self.model.model.layers):
            layer.gradient_checkpointing = index < count


def make_step(args: argparse.Namespace) -> tuple[Any, dict]:
    import torch

    import lowtide
    from lowtide.runtime.malloc import configure_malloc

    if args.device == "cpu":
        configure_malloc()
    subject = Subject(args)
    ready: dict[str, Any] = {"threads": torch.get_num_threads(), "torch": torch.__version__}
    tide = None
    kind, _, share_text = args.mode.partition(" ")
    if kind == "full":
        subject.checkpoint(args.layers)
    elif kind == "uniform":
        budget = subject.budget_bytes(float(share_text))
        ready |= {"budget_mib": budget / MIB, "num_layers": _fewest_layers(subject, args.layers, budget)}
    elif kind == "save_on_cpu":
        subject.around = lambda: torch.autograd.graph.save_on_cpu(pin_memory=args.device != "cpu")
    elif kind == "lowtide":
        budget = subject.budget_bytes(float(share_text))
        ready["budget_mib"] = budget / MIB
        memory = {"min_bytes": args.min_bytes}
        tide = lowtide.optimize(subject.model, budget=budget, memory=memory)
        for _ in range(4):
            subject.step()
        assert tide.plan is not None and tide.plan.predicted is not None
        ready |= {
            "predicted_peak_mib": tide.plan.predicted.peak_bytes / MIB,
            "predicted_ratio": tide.plan.predicted.step_seconds / tide.plan.predicted.plain_seconds,
            "gap": tide.plan.predicted.gap,
            "events": [event.why for event in tide.events],
        }
    subject.step()
    ready["peak_mib"] = subject.peak_bytes(tide) / MIB

    def step() -> dict:
        subject.synchronize()
        started = time.perf_counter()
        loss = subject.step()
        subject.synchronize()
        answer = {"seconds": time.perf_counter() - started, "loss": loss.item()}
        if args.check:
            digest = hashlib.sha256()
            for parameter in subject.model.parameters():
                digest.update(parameter.grad.cpu().view(torch.uint8).numpy().tobytes())
            answer["gradients"] = digest.hexdigest()[:16]
        return answer

    return step, ready


def _fewest_layers(subject: Subject, num_layers: int, budget: int) -> int:
    for count in range(num_layers + 1):
        subject.checkpoint(count)
        if subject.peak_bytes() <= budget:
            return count
    raise ValueError("does not fit: every layer under checkpointing needs more")


def report(variants: list[Variant]) -> dict:
    plain = variants[0]
    rows = {}
    for variant in variants:
        if variant.error is not None:
            rows[variant.name] = {"error": variant.error}
            continue
        rows[variant.name] = {
            "seconds": median(variant, "seconds"),
            "ratio": ratio(variant, plain),
            **{key: value for key, value in variant.ready.items() if key not in ("threads", "torch")},
            "is_equal": all(a.get("gradients") == b.get("gradients") and a["loss"] == b["loss"]
                            for a, b in zip(variant.steps, plain.steps, strict=False)),
        }  # fmt: skip
    return rows


def table(rows: dict) -> str:
    lines = [f"{'variant':<16}{'s/step':>8}{'x plain (min-max)':>22}{'peak MiB':>10}{'budget':>9}  equal"]
    for name, row in rows.items():
        if "error" in row:
            lines.append(f"{name:<16}{row['error']}")
            continue
        spread = "{median:.3f} ({min:.2f}-{max:.2f})".format(**row["ratio"])
        budget = f"{row['budget_mib']:.0f}" if "budget_mib" in row else "-"
        equal = "yes" if row["is_equal"] else "NO"
        lines.append(f"{name:<16}{row['seconds']:>8.2f}{spread:>22}{row['peak_mib']:>10.0f}{budget:>9}  {equal}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--mode", default="plain", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.5, 0.3, 0.1])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--intermediate", type=int, default=0, help="0: 8/3 of the hidden size")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--min-bytes", type=int, default=MIB)
    parser.add_argument("--check", type=int, default=1, help="hash every gradient after every step (0 = do not)")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.child:
        serve(lambda: make_step(args))
        return 0
    shape = [f"--{key.replace('_', '-')}={getattr(args, key)}" for key in SHAPE]
    modes = ["plain", "full recompute", "save_on_cpu"]
    modes += [f"{kind} {share}" for share in args.shares for kind in ("uniform", "lowtide")]
    variants = [Variant(mode, [f"--mode={mode}", *shape], ENVIRONMENT) for mode in modes]
    run_interleaved("benchmarks.budget", variants, args.rounds)
    rows = report(variants)
    print(table(rows))
    if args.out is not None:
        document = {
            "question": "budget",
            "command": "python -m benchmarks.budget " + " ".join(sys.argv[1:]),
            "machine": {"processor": platform.processor() or platform.machine(), "threads": args.threads},
            "shape": {key: getattr(args, key) for key in SHAPE},
            "versions": {key: variants[0].ready.get(key) for key in ("threads", "torch")},
            "rows": rows,
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(document, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
