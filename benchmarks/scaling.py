"""Question i: DeepSeek-V3 from 1 to 16,384 devices, as `lowtide plan` plans a cluster.

    python -m benchmarks.scaling [--hardware h100] [--devices 256 2048]

For each number of devices the fastest layout is looked for (examples/deepseek_v3_2048.yaml), and for 2,048 of them the
published one is planned as it is given (examples/deepseek_v3_published.yaml). The batch is the same whatever the
devices (strong scaling): 15,360 sequences of 4,096 tokens. Nothing runs; what a prediction rests on, `lowtide plan`
prints.

Cost: 10 to 30 s a number of devices. Not covered: what docs/cluster.md says that a plan for a cluster leaves out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.record import Record, versions
from benchmarks.rows import Row, command_of, parser, run

EXAMPLES = Path(__file__).parents[1] / "examples"
FILES = {"fastest": EXAMPLES / "deepseek_v3_2048.yaml", "published": EXAMPLES / "deepseek_v3_published.yaml"}
PUBLISHED_DEVICES = 2048
PUBLISHED_TOKENS_PER_SECOND = 1543
"""Of one H800: 180,000 device hours for 10^12 tokens."""
PAPER = "DeepSeek-V3 Technical Report, arXiv 2412.19437"
DEVICES = (1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


def run_layout(devices: int, which: str, hardware: str) -> Row:
    """The row of one number of devices."""
    from lowtide.cli.plan_cluster import make_question
    from lowtide.cli.run_file import load_run
    from lowtide.cluster.report import tokens_per_second
    from lowtide.cluster.search import plan_cluster
    from lowtide.errors import ConfigError

    options = argparse.Namespace(hardware=hardware, cluster=None, devices=devices, budget=None, optimizer=None)
    question = make_question(load_run(FILES[which]), options)
    try:
        found = plan_cluster(question, num_shown=1)
    except ConfigError as error:
        return {"outcome": str(error).partition("; take")[0]}
    plan, parts = found.best, found.best.seconds
    saved = sum(rank.saved_bytes for rank in plan.ranks)
    tokens = tokens_per_second(plan, question)
    row: Row = {
        "layout": str(plan.layout),
        "outcome": "fits",
        "num_micro_batches": plan.num_micro_batches * plan.layout.copies,
        "state_bytes": max(rank.task.state_bytes for rank in plan.ranks),
        "peak_bytes": plan.peak_bytes,
        "kept_share": sum(rank.kept_bytes for rank in plan.ranks) / saved,
        "swapped_share": sum(rank.swapped_bytes for rank in plan.ranks) / saved,
        "gain_over_full_recompute_percent": 100 * plan.gain,
        "step_seconds": plan.step_seconds,
        "tokens_per_second": tokens / devices,
    }
    if which == "published":
        row["published_tokens_per_second"] = PUBLISHED_TOKENS_PER_SECOND
        row["published_step_seconds"] = tokens * plan.step_seconds / devices / PUBLISHED_TOKENS_PER_SECOND
    return row | {
        "compute_seconds": parts.compute,
        "recompute_seconds": parts.recompute + parts.stall,
        "collective_seconds": parts.collective,
        "exposed_all_to_all_seconds": parts.exchange,
        "all_to_all_seconds": plan.exchange_seconds,
        "bubble_seconds": parts.bubble,
        "gradients_seconds": parts.gradients + parts.optimizer,
    }


def main(argv: Sequence[str]) -> int:
    from lowtide.timeline.hardware import load_hardware

    options = parser("scaling", __doc__, device="timeline")
    options.add_argument("--hardware", default="h100")
    options.add_argument("--devices", type=int, nargs="+", default=list(DEVICES))
    args = options.parse_args(argv)
    device = load_hardware(args.hardware)
    record = Record(
        question="scaling",
        title="How does DeepSeek-V3 scale from 1 to 16,384 devices?",
        kind="computed",
        command=command_of("scaling", argv),
        settings={"hardware": args.hardware, "cluster": "h800", "tokens": 4096, "sequences": 15360, "micro_batch": 1,
                  "dtype": "float8"},
        rows=[],
        notes=[
            "Nothing ran. Each row is what `lowtide plan examples/deepseek_v3_2048.yaml --devices N` says; the command "
            "prints every rate that this rests on, with its source. Most are assumed.",
            "Published for 2,048 H800: 180,000 device hours for 10^12 tokens, which is "
            f"{PUBLISHED_TOKENS_PER_SECOND:,} tokens a second and device, 19.9 s for these sequences ({PAPER}, section "
            "1). Its layout is PP 16 with DualPipe, EP 64, ZeRO-1, no tensor parallelism; memory in use is not "
            "printed there, and a device has 80 GB.",
            "Left out: multi-token prediction, uneven routing, what small products lose, failures.",
        ],
        hardware={"folder": "timeline", "name": f"{args.hardware.upper()}, {device.memory_bytes / 1e9:.0f} GB, "
                  "by roofline"},
        versions={key: value for key, value in versions().items() if key in ("python", "lowtide", "numpy", "scipy")},
    )  # fmt: skip
    pieces: list[dict[str, Any]] = []
    for devices in args.devices:
        pieces.append({"num_devices": devices, "which": "fastest"})
        if devices == PUBLISHED_DEVICES:
            pieces.append({"num_devices": devices, "which": "published"})

    def measure(piece: Mapping[str, Any]) -> Row:
        return run_layout(piece["num_devices"], piece["which"], args.hardware)

    return run(record, pieces, measure, args)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
