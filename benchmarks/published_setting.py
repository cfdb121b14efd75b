"""Question h: the published setting of adaptive memory optimization, GPT slices on 64 GB Ascend 910B devices.

What: three configurations of a GPT with hidden size 12288 and sequences of 8192 (TP8 PP1, TP2 PP4, TP2 PP4 VPP2, 8
layers in all), for which MindSpeed's documentation gives the gain of its adaptive memory optimization over full
recompute: 13.68, 14.74 (printed as 14.17) and 14.65 %. Here the same slices are planned as `lowtide plan` plans a
cluster, from the run files in benchmarks/published/; the gain over full recompute stands beside the published one and
beside the ceiling, which is the gain when nothing is recomputed at all.

    python -m benchmarks.published_setting                  # on the timeline: any machine, seconds
    python -m benchmarks.published_setting --device cuda    # a slice of TP8 for real, see published_run.py

The first is arithmetic, not a measurement: rates are those of the hardware file, and communication is left out on both
sides. Not covered: the published system itself, which needs devices that are not here; its gain is quoted.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.published_run import TITLE
from benchmarks.record import Record, versions
from benchmarks.rows import Row, command_of, run
from benchmarks.rows import parser as make_parser

TIMELINE = "timeline"
HARDWARE = "ascend910b"
FOLDER = Path(__file__).parent / "published"


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the published table."""

    name: str
    file: str
    published_percent: float
    is_sequence_parallel: bool = True


_PUBLISHED = (
    Setting("TP8 PP1", "tp8_pp1.yaml", 13.68),
    Setting("TP2 PP4", "tp2_pp4.yaml", 14.74),
    Setting("TP2 PP4 VPP2", "tp2_pp4_vpp2.yaml", 14.65),
)
SETTINGS = (
    *_PUBLISHED,
    *(
        dataclasses.replace(setting, name=f"{setting.name}, no sequence parallel", is_sequence_parallel=False)
        for setting in _PUBLISHED
    ),
)


def run_setting(setting: Setting) -> Row:
    """Gain over full recompute of the ceiling and of lowtide's plan, percent."""
    from lowtide.cli.plan_cluster import make_question
    from lowtide.cli.run_file import load_run
    from lowtide.cluster.search import plan_cluster

    options = argparse.Namespace(hardware=HARDWARE, cluster=None, devices=None, budget=None, optimizer=None)
    question = make_question(load_run(FOLDER / setting.file), options)
    config = dataclasses.replace(question.config, sequence_parallel=setting.is_sequence_parallel)
    plan = plan_cluster(dataclasses.replace(question, config=config)).best
    return {
        "published_gain_percent": setting.published_percent,
        "planned_gain_percent": round(100 * plan.gain, 2),
        "ceiling_gain_percent": round(100 * plan.ceiling_gain, 2),
        "gap_percent": round(100 * plan.gap, 3),
        "full_recompute_seconds": round(plan.full_recompute_seconds, 4),
        "planned_seconds": round(plan.pipeline_seconds, 4),
        "ceiling_seconds": round(plan.ceiling_seconds, 4),
        "stage_peak_bytes": [rank.peak_bytes for rank in plan.ranks],
        "stage_swapped_bytes": [rank.swapped_bytes for rank in plan.ranks],
    }


def main(argv: Sequence[str]) -> int:
    from benchmarks import published_run

    options = make_parser("published_setting", __doc__, device=TIMELINE)
    published_run.add_arguments(options)
    args = options.parse_args(argv)
    command = command_of("published_setting", argv)
    if args.device != TIMELINE:
        return published_run.main(args, command)
    settings = {setting.name: setting for setting in SETTINGS}
    record = Record(
        question="published_setting",
        title=TITLE,
        kind="computed",
        command=command,
        settings={"hidden": 12288, "sequence": 8192, "layers": 8, "device_bytes": 64 * 10**9,
                  "reserved_bytes": 4 * 10**9, "state_bytes_per_parameter": 18},
        rows=[],
        notes=[
            "Nothing ran. This is what `lowtide plan` says of the run files in `benchmarks/published/`. Rates are "
            "those of the hardware file `ascend910b.toml`, where each has its source; most are assumed.",
            "All percentages are gains over full recompute, in forwards and backwards. The ceiling is the gain when "
            "nothing is recomputed and nothing is swapped; no plan can gain more.",
            "Communication is left out on both sides. The published gain compares 8 layers with 3 in its first row, as "
            "its documentation says.",
        ],
        hardware={"folder": TIMELINE, "name": "Ascend 910B, 64 GB, by roofline"},
        versions={key: value for key, value in versions().items() if key in ("python", "lowtide", "numpy", "scipy")},
    )  # fmt: skip
    pieces = [{"setting": name} for name in settings]
    return run(record, pieces, lambda piece: run_setting(settings[piece["setting"]]), args)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
