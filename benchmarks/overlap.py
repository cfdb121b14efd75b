"""Question f: how much of the all-to-all does the overlap engine hide, and is that what was predicted?

    python -m benchmarks.overlap [--rounds 5] [--micro-batches 8] [--layers 2] [--segment 0.04]

Two ranks of gloo train an MoE model whose compute and link are emulated (emulated_moe.py): attention and experts take
40 ms each, twice that in backward, and an exchange takes a share of that. One stage (PP = 1), so M - 1 of M
micro-batches have a partner. For each share, plain and with swap and recompute, three runs in turns, round by round:
without exchanges, in series, overlapped.

Measured: R_e2e, the headline; R_wait and R_trace of the overlapped run; R of its pairs alone (steady). Predicted:
segments as they took in series, exchanges by the link's formula, in the order that the engine really took, on a clock
(`overlap_figures.replay`). Ceiling: the share of passes that have a partner. Of each pair's time the least of all
rounds is taken, since a busy machine can only add to what a sleep takes.

Cost: ten minutes. This is an emulation: durations are made up, and none of these figures is a network's.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.overlap_figures import Link, hidden_share, replay, seconds_of, traced_share
from benchmarks.record import Record
from benchmarks.rows import Row, command_of, parser, run
from lowtide.pipeline.overlap import Event

TITLE = "How much of the all-to-all does the overlap engine hide?"
SHARES = (0.5, 0.8, 1.2)
"""Of one exchange, of the forward of attention or experts."""
SETTINGS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "swap and recompute": {"recompute": ["layers.*.attention"], "swap": ["layers.*"], "min_bytes": 0},
}
NUM_TOKENS = 512
_LATENCY_SHARE = 0.25
_TIME_LIMIT_SECONDS = 900
NOTES = (
    "EMULATED: compute sleeps and the link is a deadline; rows, autograd, swap and recompute are real. What the engine "
    "does with a given ratio of exchange to compute is measured, no network.",
    "`hidden` is R_e2e = 1 - (overlapped - without) / (serial - without), from the fastest round of each pair, and "
    "the least and the most of any round; `predicted` is the replay's. `steady` is 1 - waits / link in pairs "
    "only. `ceiling` is the share of passes with a partner.",
)


def run_step(
    mode: str, num_ranks: int, link: Link, args: Mapping[str, Any], memory: dict[str, Any] | None
) -> Callable[[], Row]:
    """A function that runs one step of one way, and says what it took. Every call is a new step of the same model."""
    import torch

    import lowtide
    from benchmarks.emulated_moe import WIDTH, DeadlineLink, Model, Stamps, start_here
    from lowtide.pipeline import Overlap

    torch.manual_seed(0)
    model = Model(args["layers"], num_ranks, args["segment"])
    # As if an embedding came before: the first layer has a whole backward.
    batches = [torch.randn(NUM_TOKENS, WIDTH, requires_grad=True) for _ in range(args["micro_batches"])]
    tide = None if memory is None else lowtide.apply(model, memory, engine="host")

    def step() -> Row:
        stamps, deadline = Stamps(), DeadlineLink(link, num_ranks)
        overlap = Overlap(start=start_here if mode == "without" else deadline.start, log=stamps.append)
        began = stamps.began = time.perf_counter()
        if mode == "overlapped":
            overlap.run(model, batches)
        else:
            for batch in batches:
                made: list[Any] = []
                overlap.run_pair(lambda made=made, batch=batch: made.append(model(batch)), None)
                overlap.run_pair(None, made[0].backward)
        seconds = time.perf_counter() - began
        took = seconds_of(stamps.events, began)
        moved = {"copied_bytes": 0, "recomputed_bytes": 0}
        if tide is not None:
            moved = {"copied_bytes": tide.stats.copied_out_bytes, "recomputed_bytes": tide.stats.recomputed_bytes}
            tide.reset_stats()
        return {**moved, "seconds": seconds, "took": took, "link": deadline.spans, "stamps": stamps.events}

    return step


def on_rank(rank: int, num_ranks: int, share: float, args: Mapping[str, Any]) -> dict[tuple[str, str], list[Row]]:
    """All ways of one piece, in turns; the first round only warms up."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    seconds = share * args["segment"]
    nbytes = NUM_TOKENS * 64 * 4
    latency = _LATENCY_SHARE * seconds
    link = Link(latency_seconds=latency, bytes_per_second=nbytes / (seconds - latency))
    ways = {
        (setting, mode): run_step(mode, num_ranks, link, args, memory)
        for setting, memory in SETTINGS.items()
        for mode in ("without", "serial", "overlapped")
    }
    rounds: dict[tuple[str, str], list[Row]] = {way: [] for way in ways}
    for number in range(args["rounds"] + 1):
        for way, step in ways.items():
            if num_ranks > 1:
                dist.barrier()
            found = step()
            if number:
                rounds[way].append(found)
    return rounds


def row_of(setting: str, rounds: Mapping[tuple[str, str], Sequence[Row]], share: float, args: Mapping[str, Any]) -> Row:
    """What one setting's rounds on one rank say."""
    exchange = share * args["segment"]
    serial, overlapped = rounds[setting, "serial"], rounds[setting, "overlapped"]
    profiled: dict[tuple[str, int], list[float]] = defaultdict(list)
    for each in serial:
        for event, seconds in each["took"]:
            if event.kind == "segment":
                profiled[event.half, event.number].append(seconds)
    segments = {key: min(values) for key, values in profiled.items()}
    log = [event for event, _ in overlapped[0]["took"]]
    played = replay(log, lambda event: segments[event.half, event.number], lambda _: exchange)
    seconds = {
        mode: [each["seconds"] for each in rounds[setting, mode]] for mode in ("without", "serial", "overlapped")
    }
    shares = [
        hidden_share(without_seconds=w, serial_seconds=s, overlapped_seconds=o)
        for w, s, o in zip(seconds["without"], seconds["serial"], seconds["overlapped"], strict=True)
    ]
    fastest = {f"{mode}_seconds": fastest_of(rounds[setting, mode]) for mode in seconds}
    measured = hidden_share(**fastest)
    return {
        "hidden_share_median": measured,
        "hidden_share_min": min(shares),
        "hidden_share_max": max(shares),
        "predicted_hidden_share": played.hidden_share,
        "off_by_points": 100 * (measured - played.hidden_share),
        "ceiling_share": 1 - 1 / args["micro_batches"],
        "steady_share": _not_waited_for(overlapped, exchange, is_steady=True),
        "not_waited_share": _not_waited_for(overlapped, exchange),
        "traced_share": max(traced_share(each["link"], _computing(each)) for each in overlapped),
        **fastest,
        "predicted_seconds": played.step_seconds,
        "speed_up": fastest["serial_seconds"] / fastest["overlapped_seconds"],
        "largest_speed_up": fastest["serial_seconds"] / fastest["without_seconds"],
        "copied_bytes": overlapped[-1]["copied_bytes"],
        "recomputed_bytes": overlapped[-1]["recomputed_bytes"],
    }


def fastest_of(
    rounds: Sequence[Row], kinds: Sequence[str] = ("segment", "issue", "wait"), *, is_steady: bool = False
) -> float:
    """What events of these kinds took in a step, each pair as in the round in which it took least. `is_steady`: without
    the first and the last pair, which have one half."""
    pairs: dict[int, list[float]] = defaultdict(lambda: [0.0] * len(rounds))
    for number, each in enumerate(rounds):
        for event, seconds in each["took"]:
            pairs[event.pair][number] += seconds if event.kind in kinds else 0
    return sum(min(values) for pair, values in pairs.items() if not is_steady or 0 < pair < max(pairs))


def _not_waited_for(rounds: Sequence[Row], exchange_seconds: float, *, is_steady: bool = False) -> float:
    events = [event for event, _ in rounds[0]["took"] if event.kind == "issue"]
    last = max(event.pair for event in events)
    num = sum(not is_steady or 0 < event.pair < last for event in events)
    return 1 - fastest_of(rounds, ("wait",), is_steady=is_steady) / (exchange_seconds * num)


def _computing(step: Row) -> list[tuple[float, float]]:
    ends: Sequence[tuple[float, Event]] = [(now, event) for now, event in step["stamps"] if event.kind != "counts"]
    return [
        (now - seconds, now)
        for (now, event), (_, seconds) in zip(ends, step["took"], strict=True)
        if event.kind == "segment"
    ]


def measure(piece: Mapping[str, Any], args: argparse.Namespace) -> list[Row]:
    """Both settings of one share of exchange, on two processes."""
    options = {name: getattr(args, name) for name in ("layers", "micro_batches", "segment", "rounds")}
    share = float(piece["exchange_share"])
    rounds = on_processes(on_rank, 2, share, options)
    return [{"setting": setting, **row_of(setting, rounds, share, options)} for setting in SETTINGS]


def on_processes(function: Callable[..., Any], num_ranks: int, number: float, options: Mapping[str, Any]) -> Any:
    """What `function(rank, num_ranks, number, options)` gives on rank 0 of a group of gloo."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        given = (num_ranks, number, options)
        ranks = [
            context.Process(target=_process, args=(rank, folder, function, given, answers)) for rank in range(num_ranks)
        ]
        with contextlib.ExitStack() as stack:
            for process in ranks:
                process.start()
                stack.callback(process.kill)
            found = [answers.get(timeout=_TIME_LIMIT_SECONDS) for _ in ranks]
            for process in ranks:
                process.join()
    return next(each for rank, each in found if rank == 0)


def _process(rank: int, folder: str, function: Callable[..., Any], given: tuple[Any, ...], answers: Any) -> None:
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=given[0])
    answers.put((rank, function(rank, *given)))
    dist.barrier()
    dist.destroy_process_group()


def main(argv: Sequence[str]) -> int:
    options = parser("overlap", __doc__)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--micro-batches", type=int, default=8)
    options.add_argument("--layers", type=int, default=2)
    options.add_argument("--segment", type=float, default=0.04, help="seconds of attention or experts, forward")
    args = options.parse_args(argv)
    record = Record(
        question="overlap",
        title=TITLE,
        kind="emulated",
        command=command_of("overlap", argv),
        settings={"ranks": 2, "micro_batches": args.micro_batches, "layers": args.layers,
                  "segment_seconds": args.segment, "rounds": args.rounds},
        rows=[],
        notes=list(NOTES),
    )  # fmt: skip
    return run(record, [{"exchange_share": share} for share in SHARES], lambda piece: measure(piece, args), args)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
