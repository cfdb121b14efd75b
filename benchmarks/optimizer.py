"""Question e: what does it cost to have the optimizer's state elsewhere between steps?

    python -m benchmarks.optimizer [--device timeline | cpu] [--hardware h100 ...] [--tokens 16384] [--micro-batches 4]

Two answers, one after the other; `--device` asks for one of them.

By the timeline (nothing runs): Llama-2-7B in bf16, 65,536 tokens a step in four micro-batches, on one device of 80 or
141 GB with PCIe 5 to the host. For 4, 8 and 12 bytes of state a parameter (bf16 moments; fp32 moments; these and fp32
master weights), whole or a shard of eight, the exposed time of each mode (optimizer_modes.py) beside a plan for the
activations that has all of the state's memory; and what the planner makes of `optimizer: keep`, `swap` and `auto`.
`in_backward` has all tokens in one micro-batch. Over several ranks it is refused.

Measured on this machine's CPU: a small model's step with AdamW, plain, under `lowtide.swap_optimizer`, torchao's
`CPUOffloadOptimizer` and bitsandbytes' paged AdamW. What cannot run here is a row with its error.

Cost: five minutes. Not covered: host memory that is slower than the link, several devices on one host.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from benchmarks.optimizer_modes import StateTraffic, play_traffic
from benchmarks.record import Record, hardware, read, versions
from benchmarks.rows import Row, command_of, parser, run
from lowtide.core.decisions import OptimizerPlacement, Overlap
from lowtide.errors import BudgetError

if TYPE_CHECKING:
    import torch

    from lowtide.core.profile import Profile, StateBytes
    from lowtide.timeline.events import Timeline
    from lowtide.timeline.hardware import Hardware
    from lowtide.timeline.step import Step

TITLE = "What does it cost to have the optimizer's state elsewhere between steps?"
STATES = ((4, 1), (8, 1), (12, 1), (12, 8))
"""Bytes a parameter, and over how many ranks they are spread."""
KINDS = ("keep", "swap", "auto")
"""What the planner is asked for."""
HARDWARE = ("h100", "h200")
TARGET_PERCENT, HIDDEN_PERCENT = 2.0, 0.2
"""Of the step: what was aimed at, and what where backward can hide it."""
_USABLE_SHARE = 0.92
_LLAMA = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
          "num_key_value_heads": 32, "vocab_size": 32000, "use_cache": False}  # fmt: skip
_NUM_SLOTS = 3
_TIME_LIMIT_SECONDS = 60.0
_SEVERAL_RANKS = "refused: several ranks"
_STAYS = OptimizerPlacement(moved_bytes=0, reason="nobody asked")


# -- by the timeline ---------------------------------------------------------------------------------------------------


@functools.cache
def traced(num_layers: int, tokens: int, hardware_name: str) -> Profile:
    """One micro-batch of sequences of 4,096 tokens, AdamW with its moments in bf16."""
    import torch
    from transformers import LlamaConfig

    from benchmarks.traced import trace_config
    from lowtide.timeline.hardware import load_hardware

    return trace_config(
        LlamaConfig(**{**_LLAMA, "num_hidden_layers": num_layers}),
        tokens=min(tokens, 4096),
        samples=max(1, tokens // 4096),
        hardware=load_hardware(hardware_name),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, fused=True),
    )


def with_state(profile: Profile, bytes_per_parameter: int, shards: int) -> Profile:
    """The same step with another optimizer: the traced one has 4 bytes a parameter."""
    state = profile.state
    wanted = {
        name: getattr(state, name) * bytes_per_parameter // 4 // shards for name in ("optimizer", "optimizer_movable")
    }
    wanted["optimizer_unit"] = state.optimizer_unit * bytes_per_parameter // 4  # of a stretch, on each rank
    return dataclasses.replace(profile, state=dataclasses.replace(state, **wanted))


def planned(profile: Profile, kind: str, device: Hardware, budget: int, num_micro_batches: int) -> Row:
    """What `memory.optimizer` costs over everything kept."""
    from lowtide.config.memory import load_memory
    from lowtide.planner.plan_profile import plan_profile

    title = "state stays" if kind == "keep" else f"planner, {kind}"
    memory = load_memory({"budget": budget, "optimizer": kind})
    several: Any = {"has_gradients": num_micro_batches > 1, "num_micro_batches": num_micro_batches}
    try:
        plan = plan_profile(profile, memory, link=device.link, time_limit_seconds=_TIME_LIMIT_SECONDS, **several)
    except BudgetError as error:
        return {"title": title, "outcome": f"does not fit: needs {error.floor_bytes / 2**30:.1f} GiB"}
    said, placement = plan.predicted, plan.optimizer or _STAYS
    assert said is not None
    step_seconds = num_micro_batches * said.step_seconds
    return {
        "title": title,
        "peak_bytes": said.peak_bytes,
        "floor_bytes": said.floor_bytes,
        "step_seconds": step_seconds,
        "over_plain_percent": 100 * (step_seconds / (num_micro_batches * said.plain_seconds) - 1),
        "moved_bytes": placement.moved_bytes,
        **_felt(placement.exposed_seconds, placement.slowed_seconds, step_seconds),
    }  # fmt: skip


def modes(profile: Profile, device: Hardware, budget: int, num_micro_batches: int, whole: Profile | None) -> list[Row]:
    """Each mode, all of the state moved, beside the better of two plans for the activations that were made as if there
    were no state: with whatever fates, and without swap, which leaves the link to the state.

    `whole`: all tokens of a step in one micro-batch, which updates in backward need; None where there are several
    ranks, on which they are refused.
    """
    from lowtide.planner.in_backward import UpdatesInBackward
    from lowtide.planner.place_state import NUM_SLOTS, bucket_size

    state, bucket_bytes = profile.state, bucket_size(profile.state, device.link)
    without = dataclasses.replace(
        profile,
        state=dataclasses.replace(
            state,
            optimizer=state.optimizer - state.optimizer_movable,
            optimizer_temporaries=min(NUM_SLOTS * bucket_bytes, state.optimizer_movable),
        ),
    )
    several = [_Activations.planned(without, device, budget, num_micro_batches, swap) for swap in ("auto", "none")]
    in_one = None if whole is None else UpdatesInBackward.of(whole, bucket_bytes, NUM_SLOTS).here(whole)
    one = [_Activations.planned(in_one, device, budget, 1, swap) for swap in ("auto", "none") if in_one is not None]
    plain_seconds = num_micro_batches * sum(profile.op_seconds)
    rows = []
    for overlap in get_args(Overlap):
        is_refused = whole is None and overlap == "in_backward"
        plans = [plan for plan in (one if overlap == "in_backward" else several) if plan is not None and not is_refused]
        found = [plan.row(overlap, state, device, budget, plain_seconds) for plan in plans]
        why_none = _SEVERAL_RANKS if is_refused else "does not fit"
        best = min(found, key=lambda row: row["step_seconds"], default={"outcome": why_none})
        rows.append({"title": f"mode {overlap}", **best})
    return rows


@dataclass(frozen=True, slots=True)
class _Activations:
    """A plan for the activations of a step without the state that moves, and how it plays."""

    step: Step
    timeline: Timeline
    num_micro_batches: int
    swap: str

    @classmethod
    def planned(
        cls, profile: Profile, device: Hardware, budget: int, num_micro_batches: int, swap: str
    ) -> _Activations | None:
        """None where nothing fits."""
        from lowtide.config.memory import load_memory
        from lowtide.core.fate import Fate
        from lowtide.planner.by_rules import problem_of
        from lowtide.planner.plan_profile import plan_profile
        from lowtide.planner.smaller import fates_of
        from lowtide.timeline.events import run as play

        memory, has_gradients = load_memory({"budget": budget, "swap": swap}), num_micro_batches > 1
        limits: Any = {"time_limit_seconds": _TIME_LIMIT_SECONDS, "with_suggestions": False}
        try:
            plan = plan_profile(profile, memory, link=device.link, has_gradients=has_gradients, **limits)
        except BudgetError:
            return None
        layers = tuple(n for n in plan.layers if plan.rules.decide(n, is_site=False).fate is Fate.RECOMPUTE)
        step = problem_of(profile, memory, has_gradients=has_gradients, layers=layers).step
        fate_of = fates_of(plan.sites)
        fates = [fate_of.get(item.name, item.fates[0]) for item in step.items]
        timeline = play(step, fates, device.link, budget_bytes=budget, with_events=True)
        return cls(step, timeline, num_micro_batches, swap)

    def row(self, overlap: Overlap, state: StateBytes, device: Hardware, budget: int, plain_seconds: float) -> Row:
        """What a mode costs beside it."""
        from lowtide.planner.place_state import bucket_size

        traffic = StateTraffic(
            moved_bytes=state.optimizer_movable,
            bucket_bytes=bucket_size(state, device.link),
            num_slots=_NUM_SLOTS,
            overlap=overlap,
            earlier_bytes=state.gradients if self.num_micro_batches > 1 else 0,
        )
        cost = play_traffic(self.step, self.timeline, device.link, traffic, budget)
        step_seconds = self.num_micro_batches * self.timeline.step_seconds + cost.seconds
        return {
            "activations": "swapped and recomputed" if self.swap == "auto" else "recomputed",
            "own_micro_batches": self.num_micro_batches,
            "step_seconds": step_seconds,
            "over_plain_percent": 100 * (step_seconds / plain_seconds - 1),
            "moved_bytes": state.optimizer_movable,
            **_felt(cost.exposed_seconds, cost.slowed_seconds, step_seconds),
        }


def _felt(exposed: float, slowed: float, step_seconds: float) -> Row:
    percent = 100 * exposed / step_seconds
    outcome = next((f"at most {most} %" for most in (HIDDEN_PERCENT, TARGET_PERCENT) if percent <= most), None)
    return {
        "exposed_seconds": exposed,
        "exposed_percent": percent,
        "slowed_percent": 100 * slowed / step_seconds,
        "outcome": outcome or f"more than {TARGET_PERCENT} %",
    }


# -- measured ----------------------------------------------------------------------------------------------------------


def _plain(model: torch.nn.Module) -> tuple[Any, Callable[[], None]]:
    import torch

    return torch.optim.AdamW(model.parameters(), lr=1e-3), lambda: None


def _lowtide(model: torch.nn.Module) -> tuple[Any, Callable[[], None]]:
    import lowtide

    optimizer, _ = _plain(model)
    handle = lowtide.swap_optimizer(optimizer, model=model)  # type: ignore[attr-defined]
    return optimizer, handle.detach


def _torchao(model: torch.nn.Module) -> tuple[Any, Callable[[], None]]:
    import torch
    from torchao.optim import CPUOffloadOptimizer

    return CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3), lambda: None


def _bitsandbytes(model: torch.nn.Module) -> tuple[Any, Callable[[], None]]:
    from bitsandbytes.optim import PagedAdamW

    return PagedAdamW(model.parameters(), lr=1e-3), lambda: None


WAYS = {
    "plain AdamW": _plain,
    "lowtide.swap_optimizer": _lowtide,
    "torchao CPUOffloadOptimizer": _torchao,
    "bitsandbytes PagedAdamW": _bitsandbytes,
}


def measure(title: str, hidden: int, rounds: int, device_name: str) -> Row:
    """Steps of one way beside plain's, in turns, from equal weights."""
    import torch

    from benchmarks.steps import timed

    device = torch.device(device_name)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        *(layer for _ in range(4) for layer in (torch.nn.Linear(hidden, hidden), torch.nn.GELU()))
    ).to(device)
    other = copy.deepcopy(model)
    batch = torch.randn(256, hidden, device=device)
    plain, _ = _plain(model)
    try:
        optimizer, undo = WAYS[title](other)
        seconds = []
        for number in range(rounds + 1):
            pair = (timed(_step(model, plain, batch), device), timed(_step(other, optimizer, batch), device))
            seconds += [pair] if number else []  # the first steps make the state
        undo()
    except Exception as error:  # a package that is not here, or does not run here
        return {"error": f"{type(error).__name__}: {error}"}
    ratios = [own / beside for beside, own in seconds]
    return {
        "ratio_median": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "seconds_median": statistics.median(own for _, own in seconds),
        "is_equal": all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True)),
    }


def _step(model: torch.nn.Module, optimizer: Any, batch: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


# -- both --------------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
    options = parser("optimizer", __doc__, device="both")
    options.add_argument("--hardware", nargs="+", default=list(HARDWARE), help="whose memory, link and roofline")
    options.add_argument("--tokens", type=int, default=16384, help="of a micro-batch")
    options.add_argument("--micro-batches", type=int, default=4)
    options.add_argument("--layers", type=int, default=_LLAMA["num_hidden_layers"])
    options.add_argument("--hidden", type=int, default=1024, help="of the model that is measured")
    options.add_argument("--rounds", type=int, default=12)
    args = options.parse_args(argv)
    status = 0
    if args.device in ("both", "timeline"):
        status = max(status, _by_timeline(args, argv))
    if args.device != "timeline":
        status = max(status, _by_clock(args, argv))
    return status


def _by_timeline(args: argparse.Namespace, argv: Sequence[str]) -> int:
    from lowtide.timeline.hardware import load_hardware

    devices = {name: load_hardware(name) for name in args.hardware}
    budgets = {name: int(_USABLE_SHARE * device.memory_bytes) for name, device in devices.items()}
    what = "; ".join(
        f"`{name}.toml`, link {device.link.in_bytes_per_second / 1e9:.0f} GB/s each way, budget "
        f"{budgets[name] / 2**30:.1f} GiB, copies slow compute by {100 * device.link.compute_share:g} % of their time"
        for name, device in devices.items()
    )
    record = Record(
        question="optimizer",
        title=TITLE,
        kind="computed",
        command=command_of("optimizer", argv),
        settings={"hardware": args.hardware, "layers": args.layers, "micro_batch_tokens": args.tokens,
                  "micro_batches": args.micro_batches, "dtype": "bfloat16"},
        rows=[],
        notes=[
            "Nothing ran. *exposed* is how long compute waits for state, and its share of the step; *slowed* what "
            "compute loses beside the state's copies; *over plain* has both, and what the plan of the activations "
            "costs, over a step with everything kept.",
            f"Devices: {what}. Rates have their sources in the files, most are assumed. The budget is "
            f"{100 * _USABLE_SHARE:g} % of the device. The state of 8 and 12 bytes a parameter is the traced one, "
            "larger; `shards` divides it, and nothing else.",
            "The modes stand beside a plan that gives activations all of the state's memory, the better of with and "
            "without swap; the planner's rows weigh one against the other. `in_backward` takes all tokens in one "
            "micro-batch, since it is refused where gradients accumulate; its gradients go as they are used. Aimed at: "
            f"at most {TARGET_PERCENT:g} % exposed, and {HIDDEN_PERCENT:g} % where backward can hide it.",
        ],
        hardware={"folder": "timeline", "name": ", ".join(map(str.upper, devices)) + ", by roofline"},
        versions={key: value for key, value in versions().items() if key != "numpy"},
    )  # fmt: skip
    pieces = [
        {"hardware": name, "bytes_per_parameter": nbytes, "shards": shards}
        for name in devices
        for nbytes, shards in STATES
    ]

    def rows_of(piece: Mapping[str, Any]) -> list[Row]:
        device, budget = devices[piece["hardware"]], budgets[piece["hardware"]]
        profile = traced(args.layers, args.tokens, piece["hardware"])
        nbytes, shards = piece["bytes_per_parameter"], piece["shards"]
        own = with_state(profile, nbytes, shards)
        rows = [planned(own, kind, device, budget, args.micro_batches) for kind in KINDS]
        in_one = traced(args.layers, args.tokens * args.micro_batches, piece["hardware"]) if shards == 1 else None
        whole = None if in_one is None else with_state(in_one, nbytes, shards)
        return [*rows, *modes(own, device, budget, args.micro_batches, whole)]

    return run(record, pieces, rows_of, args)


def _by_clock(args: argparse.Namespace, argv: Sequence[str]) -> int:
    device = "cpu" if args.device == "both" else args.device
    record = Record(
        question="optimizer",
        title=TITLE,
        kind="measured",
        command=command_of("optimizer", argv),
        settings={"hidden": args.hidden, "layers": 4, "rounds": args.rounds, "dtype": "float32", "batch": 256},
        rows=[],
        notes=[
            "Four linear layers and their AdamW, forward, backward and step; ratios to plain's step of the same round. "
            "Packages that are not installed, or refuse this device, are rows with their error.",
        ],
        hardware=hardware(device),
    )
    pieces = [{"title": title} for title in WAYS]
    status = run(record, pieces, lambda piece: measure(piece["title"], args.hidden, args.rounds, device), args)
    written = read(args.out / record.hardware["folder"] / "optimizer.json")
    failed = {row["title"] for row in written.rows if row.get("error")}
    return 0 if status == 1 and failed <= set(list(WAYS)[1:]) else status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
