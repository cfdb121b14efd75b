"""Question f, for a pipeline: does a whole step of DualPipeV hide what its schedule allows?

    python -m benchmarks.overlap_pipeline [--rounds 5] [--segment 0.04]

Compute and links are emulated (emulated_moe.py). One process is one rank, with two stages of one MoE layer each; the
peers of its exchanges are made up, and each rank has a link of its own. Activations and gradients between stages really
travel over gloo. Three runs in turns, as in overlap.py: without exchanges, in series, overlapped. Measured beside what
the schedule's clock predicts, with pairs as the replay prices them (`overlap_figures.predict_step`), and beside the
ceiling: the share of chunk passes that have a partner.
Why beside overlap.py: what a schedule makes of pairs is decided by its warm-up, its cool-down and its bubble.

Cost: fifteen minutes. This is an emulation: none of these figures is a network's.
Not covered: weight gradients that take another time than the gradients of inputs.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.overlap import on_processes
from benchmarks.overlap_figures import (
    ChunkTimes,
    Link,
    hidden_share,
    hidden_share_by_phase,
    pair_ceiling,
    phases_of_dualpipev,
    predict_step,
    seconds_of,
    step_seconds,
)
from benchmarks.record import Record
from benchmarks.rows import Row, command_of, parser, run
from lowtide.pipeline.overlap import BACKWARD, FORWARD
from lowtide.pipeline.schedule import Schedule

TITLE = "How much of the all-to-all does a whole step of DualPipeV hide?"
SIZES = ((2, 8), (2, 16), (4, 8))
"""Ranks, micro-batches."""
EXCHANGE_SHARE = 0.8
"""Of one exchange, of the forward of attention or experts."""
NOTES = (
    "EMULATED: compute sleeps and each rank's link is a deadline; the executor, autograd and the messages between "
    "stages are real. No network was measured.",
    "`hidden` is R_e2e from the fastest round of each run, and the least and the most of any round. `pair ceiling` is "
    "the mean over ranks of the share of chunk passes with a partner. `ceiling`: the first micro-batch hides nothing.",
    "Weight gradients are half of a backward. `kept`: those of so many chunks may stay for later waits. `parts`: of "
    "the experts, each with exchanges of its own. A shared expert takes a ninth of the time of all. What the host "
    "takes for the experts (their forward in series, less its sleep) is predicted for each part and the shared expert.",
)
MODES = ("without", "serial", "overlapped")


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to overlap."""

    most_kept: int | None = None
    """Of WeightGradients."""
    num_parts: int = 1
    """Of the experts."""
    shared_share: float = 0.0
    """Of the time of the experts: shared ones."""


_PARTS: dict[str, Any] = {"num_parts": 2, "shared_share": 1 / 9}
"""DeepSeek-V3 has one shared expert beside eight."""
SETTINGS: Mapping[str, Setting] = {
    "pairs": Setting(),
    "weight gradients, 2 kept": Setting(2),
    "two parts": Setting(num_parts=2),
    "two parts, a shared expert": Setting(**_PARTS),
    "two parts, a shared expert, 2 kept": Setting(2, **_PARTS),
    "two parts, a shared expert, 4 kept": Setting(4, **_PARTS),
}
CEILINGS = {(2, 8): 0.88, (2, 16): 0.94, (4, 8): 0.80}
"""Of the sizes, without parts and shared experts: 4 x ranks exchanges of the first micro-batch in a row, in a step on
the clock that hides all others."""
_ROWS = 64


def on_rank(
    rank: int, num_ranks: int, exchange_seconds: float, args: Mapping[str, Any]
) -> dict[tuple[str, str], list[Row]]:
    """All rounds of this rank, by setting and mode; setting "": without and in series, as the schedule puts off. The
    first round only warms up and is left out."""
    import torch
    import torch.distributed as dist
    from torch import nn

    from benchmarks.emulated_moe import WIDTH, DeadlineLink, Layer, Stamps, start_here
    from lowtide.pipeline import Overlap, Pipeline, WeightGradients

    torch.set_num_threads(1)
    torch.manual_seed(0)
    schedule = _schedule(num_ranks, args)
    has_ends = schedule.num_stages - 1 in schedule.stages_of(rank)
    batch = [torch.randn(_ROWS, WIDTH, requires_grad=True) for _ in range(args["micro_batches"])]

    class Timed:
        """A transport that knows how long this rank waited for other stages."""

        def __init__(self, inner: Any) -> None:
            self.inner, self.waited_seconds = inner, 0.0

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def read(self, result: Any) -> Any:
            began = time.perf_counter()
            try:
                return self.inner.read(result)
            finally:
                self.waited_seconds += time.perf_counter() - began

    def step_of(mode: str, setting: Setting, *, puts_off: bool) -> Callable[[], Row]:
        stages = {
            stage: Layer(1, args["segment"], num_parts=setting.num_parts, shared_share=setting.shared_share)
            for stage in schedule.stages_of(rank)
        }
        link = Link(latency_seconds=exchange_seconds / setting.num_parts, bytes_per_second=float("inf"))
        stamps, deadline = Stamps(), DeadlineLink(link, 1)
        weights = WeightGradients(most_kept=setting.most_kept) if puts_off else None
        overlap = Overlap(start=start_here if mode == "without" else deadline.start, log=stamps.append,
                          weight_gradients=weights)  # fmt: skip
        run_pair = overlap.run_pair if mode == "overlapped" else _in_series(overlap.run_pair)
        loss = nn.functional.mse_loss if has_ends else None
        own = _schedule(num_ranks, args)
        pipeline = Pipeline(own, stages, loss=loss, run_pair=run_pair, weight_gradients=weights, tied=())
        timed: Any = Timed(pipeline.transport)
        pipeline.transport = timed

        def step() -> Row:
            dist.barrier()
            timed.waited_seconds = 0.0
            began = time.perf_counter()
            stamps.events.clear()
            pipeline.step(batch if has_ends else None, [each.detach() for each in batch] if has_ends else None)
            dist.barrier()
            seconds = time.perf_counter() - began
            took = seconds_of(stamps.events, began)
            return {"seconds": seconds, "took": took, "stage_wait_seconds": timed.waited_seconds}

        return step

    steps = {("pairs", mode): step_of(mode, SETTINGS["pairs"], puts_off=False) for mode in MODES[:2]}
    steps |= {("", mode): step_of(mode, SETTINGS["pairs"], puts_off=True) for mode in MODES[:2]}
    for name, setting in SETTINGS.items():
        steps[name, "overlapped"] = step_of("overlapped", setting, puts_off=setting.most_kept is not None)
    rounds: dict[tuple[str, str], list[Row]] = {way: [] for way in steps}
    for number in range(args["rounds"] + 1):
        for way, step in steps.items():
            found = step()
            if number:
                rounds[way].append(found)
    return rounds


def _schedule(num_ranks: int, args: Mapping[str, Any]) -> Schedule:
    from lowtide.pipeline.generators import make_schedule

    return make_schedule("dualpipev", num_ranks=num_ranks, num_micro_batches=args["micro_batches"])


def _in_series(run_pair: Callable[..., None]) -> Callable[..., None]:
    def run(forward: Callable[[], None] | None, backward: Callable[[], None] | None) -> None:
        for halves in ((forward, None), (None, backward)):
            if any(halves):
                run_pair(*halves)

    return run


def row_of(
    setting: str,
    rounds: Mapping[tuple[str, str], list[Row]],
    num_ranks: int,
    exchange_seconds: float,
    args: Mapping[str, Any],
) -> Row:
    """What was measured of a setting beside what was predicted."""
    how = SETTINGS[setting]
    baseline = "pairs" if how.most_kept is None else ""
    own = {mode: rounds[setting if mode == "overlapped" else baseline, mode] for mode in MODES}
    seconds = {mode: [each["seconds"] for each in own[mode]] for mode in MODES}
    fastest = {f"{mode}_seconds": min(values) for mode, values in seconds.items()}
    shares = [
        hidden_share(without_seconds=w, serial_seconds=s, overlapped_seconds=o)
        for w, s, o in zip(*(seconds[mode] for mode in MODES), strict=True)
    ]
    whole, inputs = (_stretches_of(rounds[which, "serial"]) for which in ("pairs", ""))
    weights = [each - other for each, other in zip(whole[BACKWARD], inputs[BACKWARD], strict=True)]
    some = 0.1 * max(weights)  # less is what two measurements of one stretch differ by
    times = ChunkTimes(
        forward_seconds=whole[FORWARD],
        backward_seconds=whole[BACKWARD],
        weight_seconds=tuple(0.0 if how.most_kept is None or each < some else each for each in weights),
        exchange_seconds=exchange_seconds,
        host_seconds=max(0.0, whole[FORWARD][1] - args["segment"]),
    )
    plain = predict_step(_schedule(num_ranks, args), times)
    times = dataclasses.replace(times, num_parts=how.num_parts, shared_share=how.shared_share)
    predicted = step_seconds(_schedule(num_ranks, args), times, overlaps=True, most_kept=how.most_kept)
    share = dataclasses.replace(plain, overlapped_seconds=predicted).hidden_share
    ceilings = pair_ceiling(num_ranks, args["micro_batches"])
    measured = hidden_share(**fastest)
    return {
        "hidden_share_median": measured,
        "hidden_share_min": min(shares),
        "hidden_share_max": max(shares),
        "predicted_hidden_share": share,
        "off_by_points": 100 * (measured - share),
        "pair_ceiling_share": sum(ceilings) / len(ceilings),
        "ceiling_share": CEILINGS.get((num_ranks, args["micro_batches"])) if how.num_parts == 1 else None,
        **fastest,
        "predicted_seconds": predicted,
        **_apart(
            min(own["overlapped"], key=lambda each: each["seconds"]), num_ranks, exchange_seconds / how.num_parts, args
        ),
        "speed_up": fastest["serial_seconds"] / fastest["overlapped_seconds"],
        "largest_speed_up": fastest["serial_seconds"] / fastest["without_seconds"],
    }


def _apart(row: Row, num_ranks: int, exchange_seconds: float, args: Mapping[str, Any]) -> Row:
    """Of rank 0: waits for other stages and for rows apart, and what share of the exchanges each phase hides."""
    shares = hidden_share_by_phase(
        phases_of_dualpipev(num_ranks, args["micro_batches"], 0), row["took"], exchange_seconds
    )
    waited = sum(seconds for event, seconds in row["took"] if event.kind == "wait")
    return {
        "stage_wait_seconds": row["stage_wait_seconds"],
        "exchange_wait_seconds": waited,
        **{f"phase_{phase}_hidden_share": share for phase, share in shares.items()},
    }


def _stretches_of(serial: list[Row]) -> dict[str, tuple[float, ...]]:
    """The stretches of a chunk as they took in series, the shortest of each. Those with an odd number are empty."""
    found: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    for each in serial:
        for event, seconds in each["took"]:
            if event.kind == "segment" and event.number % 2 == 0:
                # A chunk's first stretch may have a wait for another rank in it; the shortest has none.
                found[event.half, event.number // 2].append(seconds)
    num = max(number for _, number in found) + 1
    return {half: tuple(min(found[half, number]) for number in range(num)) for half in (FORWARD, BACKWARD)}


def main(argv: Sequence[str]) -> int:
    options = parser("overlap_pipeline", __doc__)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--segment", type=float, default=0.04, help="seconds of attention or experts, forward")
    args = options.parse_args(argv)
    exchange = EXCHANGE_SHARE * args.segment

    def measure(piece: Mapping[str, Any]) -> list[Row]:
        given = {"micro_batches": piece["micro_batches"], "segment": args.segment, "rounds": args.rounds}
        rounds = on_processes(on_rank, piece["ranks"], exchange, given)
        return [{"setting": each, **row_of(each, rounds, piece["ranks"], exchange, given)} for each in SETTINGS]

    record = Record(
        question="overlap_pipeline",
        title=TITLE,
        kind="emulated",
        command=command_of("overlap_pipeline", argv),
        settings={"exchange_share": EXCHANGE_SHARE, "segment_seconds": args.segment, "rounds": args.rounds},
        rows=[],
        notes=list(NOTES),
    )  # fmt: skip
    pieces = [{"ranks": num_ranks, "micro_batches": num} for num_ranks, num in SIZES]
    return run(record, pieces, measure, args)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
