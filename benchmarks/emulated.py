"""EMULATED, not measured: does the accelerator engine do in virtual time what the timeline says?

    python -m benchmarks.emulated [--plans 12] [--only llama ...]

The engine, its streams, events and stall meter, the arena and the scheduler run as they do on a GPU, on a stand-in
device in main memory (tests/standin) whose clock gives each operator the longer of its arithmetic and its traffic, and
each copy its share of the link. The numbers of an H200 on PCIe 5 and of an RTX 4090 on PCIe 4
(lowtide/timeline/devices) are scaled down to small models: rates of products by the width, launches and latencies by
the bytes of a layer, so that compute, traffic and copies stand to each other as they do in a layer of width 4096 over
8192 tokens.

Each model is observed on that device. Then come random plans, a third of them each: the solver's for a random budget;
random fates, one a layer; random fates of single storages, scheduled for a random budget. Compared are the timeline's
step time and stalls with those that the device's events show in the third planned step, and the peaks. The same run
gives the same numbers on any machine, but for the solver's time limit. Loss and gradients are compared to the bit.

Cost: some five minutes on two cores. Needs a C++ compiler (tests/standin/device.py says what is missing). Not covered:
whether operators take these times on a GPU, the host's own pace, a link that both directions share.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.agreement import kendall_tau
from benchmarks.predicted import MODELS, Subject, draw_plan
from benchmarks.record import Record
from benchmarks.rows import Row, command_of, parser, run

if TYPE_CHECKING:
    import lowtide
    from lowtide.timeline.hardware import Hardware
    from lowtide.timeline.step import Link

DEVICES = ("h200", "rtx4090")
_WIDTH, _TOKENS = 4096, 8192
"""Of the layer whose proportions the small models have."""
_SIZES = {"hidden": 64, "layers": 4, "sequence": 64, "batch": 2, "dtype": "bfloat16", "min_bytes": 2048}


def shrunk(hardware: Hardware, *, width: int, tokens: int) -> Hardware:
    """A device on which a layer of this width over so many tokens has the proportions that the layer of width 4096 has
    on `hardware`: operations a byte shrink with the width, and what does not depend on sizes with the bytes."""
    size = (width / _WIDTH) * (tokens / _TOKENS)
    link = dataclasses.replace(hardware.link, latency_seconds=hardware.link.latency_seconds * size)
    flops = {dtype: rate * width / _WIDTH for dtype, rate in hardware.flops_per_second.items()}
    return dataclasses.replace(
        hardware, flops_per_second=flops, launch_seconds=hardware.launch_seconds * size, link=link, multiprocessors=0
    )


def set_clock(hardware: Hardware, dtype: str) -> None:
    """From here on the stand-in takes the times of this device."""
    from tests.standin import device

    device.play("clock")
    device.set_speeds(
        out=hardware.link.out_bytes_per_second,
        into=hardware.link.in_bytes_per_second,
        memory=hardware.eager_bytes_per_second,
        flops=hardware.flops_per_second[dtype],
        launch=hardware.launch_seconds,
        latency=hardware.link.latency_seconds,
        share=hardware.link.compute_share,
    )


class Emulated:
    """A model on the stand-in at the pace of one device, and what was observed of a step."""

    def __init__(self, name: str, hardware: Hardware, *, seed: int = 0, **sizes: Any) -> None:
        chosen = {**_SIZES, **sizes}
        small = shrunk(hardware, width=chosen["hidden"], tokens=chosen["batch"] * chosen["sequence"])
        set_clock(small, chosen["dtype"])
        self.link = small.link
        self.name = name
        self.seed = seed
        self.subject = Subject(name, argparse.Namespace(**chosen, device="standin", seed=seed))

    def plan(self, draw: int) -> tuple[lowtide.Plan, str]:
        """A random plan, and how it came about."""
        seed = f"{self.seed} {self.name} {draw}"
        if draw % 3 < 2:
            return draw_plan(self.subject, self.link, seed, is_by_budget=draw % 3 == 0)
        return scattered_plan(self.subject, self.link, seed)

    def row(self, plan: lowtide.Plan) -> Row:
        """What the plan says beside what the device's events show."""
        import lowtide

        subject, said = self.subject, plan.predicted
        assert said is not None
        with lowtide.apply(subject.planned, plan) as tide:
            for _ in range(2):  # the first planned step is recorded
                subject.step(subject.planned)
            seconds, stall_seconds = self._timed(tide)
            is_equal = subject.is_equal()
            peak_bytes = subject.peak_bytes(tide)
        return {
            "predicted_seconds": said.step_seconds,
            "emulated_seconds": seconds,
            "error_percent": 100 * (said.step_seconds / seconds - 1),
            "plain_seconds": said.plain_seconds,
            "predicted_stall_seconds": said.stall_seconds,
            "stall_seconds": stall_seconds,
            "predicted_peak_bytes": said.peak_bytes,
            "peak_bytes": peak_bytes,
            "budget_bytes": plan.budget_bytes,
            "is_equal": is_equal,
        }

    def _timed(self, tide: Any) -> tuple[float, float]:
        """Seconds of a planned step on the device's clock, and those for which it waited for copies."""
        import torch

        model = self.subject.planned
        model.zero_grad(set_to_none=True)
        tide.settle()
        torch.accelerator.synchronize()
        tide.reset_stats()
        start = tide.engine.mark_time()
        self.subject.loss(model).backward()
        end = tide.engine.mark_time()
        torch.accelerator.synchronize()
        return tide.engine.seconds_between(start, end), tide.stats.stall_seconds


def scattered_plan(subject: Subject, link: Link, seed: str) -> tuple[lowtide.Plan, str]:
    """Random fates of single storages, scheduled by the timeline for a random budget."""
    from lowtide.config.memory import load_memory
    from lowtide.core.fate import Fate
    from lowtide.planner.by_rules import problem_of
    from lowtide.planner.plan_profile import plan_profile
    from lowtide.planner.problem import decisions
    from lowtide.timeline.events import run as play
    from lowtide.timeline.memory import plain_curve

    draw = random.Random(seed)
    memory: dict[str, Any] = {"budget": 1, "min_bytes": subject.min_bytes}
    problem = problem_of(subject.profile, load_memory(memory))
    plain_bytes = int(plain_curve(problem.step).max())
    share_kept, share_swapped = draw.random(), draw.random()
    fates = []
    for item in problem.step.items:
        wanted = Fate.SWAP if draw.random() < share_swapped else Fate.RECOMPUTE
        wanted = Fate.KEEP if draw.random() < share_kept else wanted
        fates.append(wanted if wanted in item.fates else Fate.KEEP)
    # The least that these fates can reach with all the waiting in the world is a budget that can be kept.
    least_bytes = play(problem.step, fates, link, budget_bytes=0).peak_bytes
    budget_bytes = least_bytes + int((plain_bytes - least_bytes) * draw.random())
    timeline = play(problem.step, fates, link, budget_bytes=budget_bytes)
    # For everything but the sites.
    base = plan_profile(subject.profile, load_memory(memory | {"budget": 2 * plain_bytes}), link=link)
    assert base.predicted is not None
    reasons = dict.fromkeys(range(len(fates)), "random")
    predicted = dataclasses.replace(
        base.predicted,
        step_seconds=timeline.step_seconds,
        stall_seconds=timeline.stall_seconds,
        peak_bytes=timeline.peak_bytes,
    )
    sites = decisions(problem, fates, timeline.evict_by, timeline.prefetch_at, reasons)
    plan = dataclasses.replace(base, sites=sites, predicted=predicted, budget_bytes=budget_bytes)
    return plan, f"storages {share_kept:.0%} kept, of the rest {share_swapped:.0%} swapped"


def summary(rows: Sequence[Mapping[str, Any]]) -> list[Row]:
    """One row for each model and device: how far off the timeline is, and whether it orders plans as the engine."""
    good = [row for row in rows if not row.get("error")]
    groups = dict.fromkeys((row["model"], row["device"]) for row in good)
    return [_summary_of([row for row in good if (row["model"], row["device"]) == group], *group) for group in groups]


def _summary_of(rows: Sequence[Mapping[str, Any]], model: str, device: str) -> Row:
    times = [abs(row["error_percent"]) for row in rows]
    stalls = [
        100 * abs(row["predicted_stall_seconds"] - row["stall_seconds"]) / row["emulated_seconds"] for row in rows
    ]
    peaks = [100 * (row["peak_bytes"] / row["predicted_peak_bytes"] - 1) for row in rows]
    said, emulated = ([row[key] for row in rows] for key in ("predicted_seconds", "emulated_seconds"))
    return {
        "model": model,
        "device": device,
        "num_plans": len(rows),
        "time_error_median_percent": statistics.median(times),
        "time_error_worst_percent": max(times),
        "tau": kendall_tau(said, emulated),
        "stall_error_worst_percent": max(stalls),
        "peak_beyond_predicted_percent": max(peaks),
        "num_over_budget": sum(row["peak_bytes"] > row["budget_bytes"] for row in rows),
        "is_equal": all(row["is_equal"] for row in rows),
    }


def main(argv: Sequence[str]) -> int:
    from lowtide.timeline.hardware import load_hardware
    from tests.standin import device

    options = parser("emulated", __doc__)
    options.add_argument("--plans", type=int, default=12, help="of each model on each device")
    options.add_argument("--seed", type=int, default=0)
    args = options.parse_args(argv)
    if (missing := device.why_not()) is not None:
        print(f"benchmarks.emulated: {missing}", file=sys.stderr)
        return 2
    device.load()
    record = Record(
        question="emulated",
        title="EMULATED, not measured: does the accelerator engine do what the timeline says?",
        kind="emulated",
        command=command_of("emulated", argv),
        settings={**_SIZES, "plans": args.plans, "seed": args.seed},
        rows=[],
        notes=[
            "No GPU was measured. The accelerator engine ran on a device in main memory whose clock has the rates of "
            "the device named, scaled to small models; the times are those of its events, in virtual seconds.",
        ],
    )
    pieces = [
        {"model": model, "device": name, "draw": draw}
        for model in MODELS
        for name in DEVICES
        for draw in range(args.plans)
    ]
    subjects: dict[tuple[str, str], Emulated] = {}

    def measure(piece: Mapping[str, Any]) -> Row:
        key = piece["model"], piece["device"]
        if key not in subjects:
            subjects.clear()
            gc.collect()  # what it had on the device would count as this one's
            subjects[key] = Emulated(key[0], load_hardware(key[1]), seed=args.seed)
        plan, how = subjects[key].plan(piece["draw"])
        return {"plan": how, **subjects[key].row(plan)}

    return run(record, pieces, measure, args)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
