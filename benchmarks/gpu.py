"""A first table for one accelerator: plain, layer checkpointing, `save_on_cpu`, and lowtide's fates, side by side.

    python -m benchmarks.gpu [--out benchmarks/results/<hardware>/first_table.json]

The model is a stack of Llama layers (bf16, random weights) as wide as the device's memory and speed let it be, up to
those of Llama-7B (benchmarks/device_sizes.py); forward and backward of one sequence. Variants run in one process,
interleaved round by round; each is checked against plain, loss and gradients to the bit. Reported: seconds a step (the
device is synchronised before and after), its ratio to plain, the allocator's peak, the driver's view, bytes copied,
stalls. The file is written after each round.

With `--device cpu` and a tiny shape the same code runs on a machine without an accelerator, to be tested, not timed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import lowtide
from benchmarks.device_sizes import memory_info, sizes_of

GIB = 2**30
_STEP_SECONDS = 0.5
PLANS: dict[str, dict[str, Any]] = {
    "keep": {},
    "recompute": {"recompute": "all"},
    "swap": {"swap": "all"},
    "recompute, inputs swapped": {"recompute": "all", "swap": "all"},
    "norms and activations recomputed": {"recompute": ["*.input_layernorm", "*.post_attention_layernorm", "*.act_fn"]},
    "norms recomputed, mlp swapped": {
        "recompute": ["*.input_layernorm", "*.post_attention_layernorm", "*.act_fn"],
        "swap": ["layers.*.mlp"],
    },
}


def build(args: argparse.Namespace) -> tuple[torch.nn.Module, torch.Tensor]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 8 // 3,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 128,
        num_key_value_heads=args.hidden // 128,
        max_position_embeddings=args.sequence,
        use_cache=False,
    )
    with torch.device(args.device):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        ids = torch.randint(0, args.vocab, (args.batch, args.sequence))
    return model.train(), ids


class Bench:
    """One model, many ways to run its step."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.device = torch.device(args.device)
        self.has_device = self.device.type != "cpu"
        self.model, self.ids = build(args)
        self.truth: list[torch.Tensor] | None = None

    def step(self, around: Callable[[], Any]) -> tuple[torch.Tensor, float]:
        """Loss and seconds of one forward and backward."""
        self.model.zero_grad(set_to_none=False)
        self.synchronize()
        started = time.perf_counter()
        with around():
            loss = self.model(input_ids=self.ids, labels=self.ids).loss
            loss.backward()
        self.synchronize()
        return loss.detach(), time.perf_counter() - started

    def synchronize(self) -> None:
        if self.has_device:
            torch.accelerator.synchronize(self.device)

    def measure(self, around: Callable[[], Any], tide: lowtide.Tide | None) -> dict[str, Any]:
        if self.has_device:
            self._count("reset_peak_memory_stats")
        if tide is not None:
            tide.reset_stats()
        loss, seconds = self.step(around)
        answer: dict[str, Any] = {"seconds": seconds, "is_equal": self.is_equal(loss)}
        if self.has_device:
            free_bytes, total_bytes = memory_info(self.device)
            answer["peak_gib"] = self._count("max_memory_allocated") / GIB
            answer["reserved_gib"] = self._count("max_memory_reserved") / GIB
            answer["driver_gib"] = (total_bytes - free_bytes) / GIB
        if tide is not None:
            stats = tide.stats
            answer |= {
                "kept_gib": stats.kept_bytes / GIB,
                "swapped_gib": stats.swapped_bytes / GIB,
                "recomputed_gib": stats.recomputed_bytes / GIB,
                "copied_out_gib": stats.copied_out_bytes / GIB,
                "copied_in_gib": stats.copied_in_bytes / GIB,
                "host_gib": stats.host_bytes / GIB,
                "stall_seconds": stats.stall_seconds,
            }
        return answer

    def _count(self, name: str) -> Any:
        """A function of the device's own module, or of `torch.accelerator`."""
        own = getattr(torch.get_device_module(self.device), name, None)
        return (own or getattr(torch.accelerator, name))(self.device)

    def is_equal(self, loss: torch.Tensor) -> bool:
        now = [loss, *(parameter.grad for parameter in self.model.parameters())]
        if self.truth is None:
            self.truth = [tensor.clone() for tensor in now]
            return True
        return all(torch.equal(a, b) for a, b in zip(now, self.truth, strict=True))


def variants(bench: Bench) -> dict[str, Callable[[], Any]]:
    """Name -> a context manager that yields the tide (or None) while the variant is in force."""

    @contextlib.contextmanager
    def plain():
        yield None

    @contextlib.contextmanager
    def checkpointing():
        bench.model.gradient_checkpointing_enable({"use_reentrant": False})
        try:
            yield None
        finally:
            bench.model.gradient_checkpointing_disable()

    def under(plan: dict[str, Any]) -> Callable[[], Any]:
        @contextlib.contextmanager
        def run():
            with lowtide.apply(bench.model, plan) as tide:
                yield tide

        return run

    return {
        "plain": plain,
        "layer checkpointing": checkpointing,
        "save_on_cpu": plain,
        **{f"lowtide: {name}": under(plan) for name, plan in PLANS.items()},
    }


def run(args: argparse.Namespace, keep: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """All rounds; `keep` gets what there is after each."""
    bench = Bench(args)
    rows: dict[str, list[dict[str, Any]]] = {}
    errors: dict[str, str] = {}
    for index in range(args.rounds):
        for name, enter in variants(bench).items():
            if name in errors:
                continue
            try:
                rows.setdefault(name, []).append(one_round(bench, name, enter))
            except Exception as error:  # a baseline that cannot run is reported, not dropped
                errors[name] = f"{type(error).__name__}: {error}"
        result = {
            "rows": {name: summary(steps, rows["plain"]) for name, steps in rows.items() if steps},
            "errors": errors,
        }
        keep(result)
        print(f"round {index + 1}/{args.rounds}", file=sys.stderr, flush=True)
    return result


def one_round(bench: Bench, name: str, enter: Callable[[], Any]) -> dict[str, Any]:
    pinned = {"pin_memory": True, "device_type": bench.device.type} if bench.has_device else {}

    def around() -> Any:
        return torch.autograd.graph.save_on_cpu(**pinned) if name == "save_on_cpu" else contextlib.nullcontext()

    with enter() as tide:
        for _ in range(2):  # observe and warm up: the arena, the allocator, the windows
            bench.step(around)
        answer = bench.measure(around, tide)
        if bench.truth is not None and not answer["is_equal"]:
            print(f"{name}: loss or gradients differ from plain", file=sys.stderr, flush=True)
    return answer


def summary(steps: list[dict[str, Any]], plain: list[dict[str, Any]]) -> dict[str, Any]:
    ratios = [ours["seconds"] / theirs["seconds"] for ours, theirs in zip(steps, plain, strict=False)]
    numbers = {key: statistics.median(step[key] for step in steps) for key in steps[0] if key != "is_equal"}
    spread = {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}
    return numbers | {"ratio": spread, "is_equal": all(step["is_equal"] for step in steps)}


def table(result: dict[str, Any]) -> str:
    lines = [f"{'variant':<42}{'s/step':>9}{'ratio (min-max)':>22}{'peak GiB':>10}{'stall s':>9}  equal"]
    for name, row in result["rows"].items():
        spread = "{median:.3f} ({min:.2f}-{max:.2f})".format(**row["ratio"])
        peak = f"{row['peak_gib']:.2f}" if "peak_gib" in row else "-"
        stall = f"{row['stall_seconds']:.4f}" if "stall_seconds" in row else "-"
        equal = "yes" if row["is_equal"] else "NO"
        lines.append(f"{name:<42}{row['seconds']:>9.4f}{spread:>22}{peak:>10}{stall:>9}  {equal}")
    lines += [f"{name:<42}{error}" for name, error in result["errors"].items()]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    parser.add_argument("--device", default=str(accelerator) if accelerator else None)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, help="default: what the device can do, at most 4096")
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--sequence", type=int, help="default: as many tokens as it is wide")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.device is None:
        print("benchmarks.gpu: no accelerator on this machine; nothing was measured", file=sys.stderr)
        return 0
    fill_sizes(args)
    module = torch.get_device_module(args.device)
    name = module.get_device_name() if hasattr(module, "get_device_name") else args.device
    if args.out is None and args.device != "cpu":
        args.out = Path("benchmarks/results") / name.lower().replace(" ", "-") / "first_table.json"
    shape = {key: getattr(args, key) for key in ("layers", "hidden", "vocab", "batch", "sequence")}

    def keep(result: dict[str, Any]) -> None:
        document = {
            "question": "first_table",
            "hardware": name,
            "command": "python -m benchmarks.gpu " + " ".join(sys.argv[1:]),
            "shape": shape,
            "versions": {"torch": torch.__version__, "python": sys.version.split()[0]},
            **result,
        }
        if args.out is not None:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(document, indent=2) + "\n")

    print(f"{len(PLANS) + 3} variants x {args.rounds} rounds of {shape}", file=sys.stderr, flush=True)
    result = run(args, keep)
    print(table(result))
    return 0 if all(row["is_equal"] for row in result["rows"].values()) else 1


def fill_sizes(args: argparse.Namespace) -> None:
    """A width and a number of tokens that suit the device, where none were given."""
    if args.hidden is None:
        device = torch.device(args.device)
        is_host = device.type == "cpu"
        args.hidden = 256 if is_host else sizes_of(device).width(layers=args.layers, seconds=_STEP_SECONDS, most=4096)
    args.sequence = args.sequence or args.hidden


if __name__ == "__main__":
    sys.exit(main())
