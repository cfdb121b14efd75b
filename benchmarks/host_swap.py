"""What swap-everything costs and saves on a machine without an accelerator, beside plain, keep and recompute.

    python -m benchmarks.host_swap [--rounds 12] [--out FILE]

The model is an 8-layer Llama (hidden 768, float32), batch 4 x 512 byte tokens, forward and backward. Variants:

- plain: no lowtide; the same environment as the others (see `ENVIRONMENT`);
- plain, default malloc: no lowtide and nothing set, what a user has today;
- keep: lowtide with an empty plan, i.e. the price of its hooks;
- checkpoint: transformers' own activation checkpointing of every layer;
- recompute: lowtide, `recompute: all`;
- swap: lowtide, `swap: all` on the host engine.

Reported per variant: seconds a step, its ratio to plain round by round, the kernel's own peak of resident memory in a
step (VmHWM), how far it lies above rest (program, weights and gradients, measured before the first forward), which
share of plain's that takes away, and whether loss and gradients are plain's to the bit. A second share takes as its
measure the bytes of activations that are live after plain's forward: the C library never lets plain down to those.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.interleave import Variant, median, ratio, run_interleaved, serve
from benchmarks.record import Record, write

ENVIRONMENT = {"THP_MEM_ALLOC_ENABLE": "1"}
MIB = 2**20
NOTES = (
    "`plain_default` is plain with the C library's own thresholds, what a user has today; all others run with those "
    "that lowtide sets. `keep` is lowtide with an empty plan.",
    "Peak resident is the kernel's own (VmHWM); `above rest` is the part above program, weights and gradients. `saved "
    "of resident` is the share of plain's that a method takes away, `saved of live` the same against the bytes of live "
    "activations, which plain exceeds.",
)


def memory_kib(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1])
    raise RuntimeError(f"no {key} in /proc/self/status")


def make_step(args: argparse.Namespace) -> tuple[Any, dict]:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import lowtide
    from lowtide.engines.tiers.host_buffers import configure_malloc

    if args.mode != "plain_default":
        configure_malloc()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 8 // 3,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64,
        num_key_value_heads=args.hidden // 64,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    model.train()
    ids = torch.randint(0, 256, (args.batch, args.sequence))
    memory = {"keep": {}, "recompute": {"recompute": "all"}, "swap": {"swap": "all"}}.get(args.mode)
    if args.mode == "checkpoint":
        model.activation_checkpointing_enable()
    tide = lowtide.apply(model, memory, engine="host") if memory is not None else None

    def step() -> dict:
        model.zero_grad(set_to_none=False)
        if tide is not None:
            tide.reset_stats()
        Path("/proc/self/clear_refs").write_text("5")
        started, cpu = time.perf_counter(), time.process_time()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
        answer = {
            "seconds": seconds,
            "cpu_seconds": cpu,
            "peak_mib": memory_kib("VmHWM") / 1024,
            "loss": loss.item(),
        }
        if tide is not None:
            stats = tide.stats
            answer |= {
                "kept_mib": stats.kept_bytes / MIB,
                "swapped_mib": stats.swapped_bytes / MIB,
                "recomputed_mib": stats.recomputed_bytes / MIB,
                "copied_out_mib": stats.copied_out_bytes / MIB,
                "copied_in_mib": stats.copied_in_bytes / MIB,
                "stall_seconds": stats.stall_seconds,
            }
        digest = hashlib.sha256()
        if args.check:
            for parameter in model.parameters():
                digest.update(parameter.grad.numpy().tobytes())
            answer["gradients"] = digest.hexdigest()[:16]
        return answer

    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    rest_mib = memory_kib("VmRSS") / 1024
    step()
    return step, {"threads": torch.get_num_threads(), "torch": torch.__version__, "rest_mib": rest_mib}


def report(variants: list[Variant]) -> dict:
    plain = variants[0]
    activation_mib = (median(plain, "peak_mib") or 0) - plain.ready["rest_mib"]
    live_mib = max((median(v, "kept_mib") or 0) + (median(v, "swapped_mib") or 0) for v in variants if not v.error)
    rows = {}
    for variant in variants:
        if variant.error is not None:
            rows[variant.name] = {"error": variant.error}
            continue
        above = (median(variant, "peak_mib") or 0) - variant.ready["rest_mib"]
        rows[variant.name] = {
            "seconds": median(variant, "seconds"),
            "cpu_seconds": median(variant, "cpu_seconds"),
            "ratio": ratio(variant, plain),
            "peak_mib": median(variant, "peak_mib"),
            "above_rest_mib": above,
            "rest_mib": variant.ready["rest_mib"],
            "saved_share": 1 - above / activation_mib if activation_mib else None,
            "saved_share_of_live": 1 - above / live_mib if live_mib else None,
            "is_equal": all(a.get("gradients") == b.get("gradients") and a["loss"] == b["loss"]
                            for a, b in zip(variant.steps, plain.steps, strict=False)),
            **{key: median(variant, key) for key in variant.steps[-1] if key.endswith("_mib") and "copied" in key},
            "stall_seconds": median(variant, "stall_seconds"),
        }  # fmt: skip
    return rows


def table(rows: dict) -> str:
    heads = f"{'peak MiB':>10}{'above rest':>12}{'saved':>8}{'of live':>9}  equal"
    lines = [f"{'variant':<16}{'s/step':>8}{'ratio (min-max)':>22}{heads}"]
    for name, row in rows.items():
        if "error" in row:
            lines.append(f"{name:<16}{row['error']}")
            continue
        spread = "{median:.3f} ({min:.2f}-{max:.2f})".format(**row["ratio"])
        lines.append(
            f"{name:<16}{row['seconds']:>8.2f}{spread:>22}{row['peak_mib']:>10.0f}{row['above_rest_mib']:>12.0f}"
            f"{row['saved_share']:>8.0%}{row['saved_share_of_live'] or 0:>9.0%}  {'yes' if row['is_equal'] else 'NO'}"
        )
    return "\n".join(lines)


def _record(args: argparse.Namespace, variants: list[Variant], rows: dict) -> Record:
    shape = {key: getattr(args, key) for key in ("layers", "hidden", "batch", "sequence", "threads", "rounds")}
    return Record(
        question="host_swap",
        title="What does swapping everything cost and save on a machine without an accelerator?",
        kind="measured",
        command=f"python -m benchmarks.host_swap --rounds {args.rounds}",
        settings={**shape, "dtype": "float32", "rest_bytes": int(variants[0].ready["rest_mib"] * MIB)},
        rows=[_flat(name, row) for name, row in rows.items()],
        notes=list(NOTES),
    )


def _flat(name: str, row: dict) -> dict[str, Any]:
    if "error" in row:
        return {"method": name, "error": row["error"]}
    sizes = {"peak_resident_bytes": "peak_mib", "above_rest_bytes": "above_rest_mib", "copied_bytes": "copied_out_mib"}
    return {
        "method": name,
        **{f"ratio_{key}": value for key, value in row["ratio"].items()},
        **{key: int(row[old] * MIB) if row.get(old) is not None else None for key, old in sizes.items()},
        "saved_of_resident_share": row["saved_share"],
        "saved_of_live_share": row["saved_share_of_live"],
        "seconds_median": row["seconds"],
        "cpu_seconds": row["cpu_seconds"],
        "stall_seconds": row["stall_seconds"],
        "is_equal": row["is_equal"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--mode", default="plain", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--modes", default="plain,plain_default,keep,checkpoint,recompute,swap")
    parser.add_argument("--check", type=int, default=1, help="hash every gradient after every step (0 = do not)")
    parser.add_argument("--out", type=Path, help="write the record under this folder")
    args = parser.parse_args()
    if args.child:
        serve(lambda: make_step(args))
        return 0
    shape = [f"--{key}={getattr(args, key)}" for key in ("layers", "hidden", "batch", "sequence", "threads", "check")]
    variants = [
        Variant(mode, [f"--mode={mode}", *shape], {} if mode == "plain_default" else ENVIRONMENT)
        for mode in args.modes.split(",")
    ]
    run_interleaved("benchmarks.host_swap", variants, args.rounds)
    rows = report(variants)
    print(table(rows))
    if args.out is not None:
        write(_record(args, variants, rows), args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
