"""Question h for real: a slice of the published setting on one device, its memory capped and its link throttled.

What: what one of eight tensor-parallel ranks has of a GPT (12 of 96 heads, 6144 of 49152 columns of the MLP, hidden
12288, sequences of 8192), forward and backward, in a process that may take 64 GB and copies at 25 GB/s each way. Full
recompute (torch's own checkpointing of every layer) stands beside lowtide on the same slice. Of the state, weights and
gradients are real; what a mixed-precision optimizer has beyond them is a buffer of that size.

Methods: plain without the cap (the ceiling, if the device is large enough), full recompute, lowtide at 25 GB/s, lowtide
on the link as it is. One after another, each with a model of its own; the first steps are not timed.

Cost: about two minutes on a GPU. Not covered: the collectives of tensor parallelism (none run, on either side),
sequence parallelism (norms work on all tokens here), embedding and head. With a throttled link the result is an
emulation.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from benchmarks.record import Record, hardware
from benchmarks.rows import Row, run
from lowtide.units import parse_bytes

TITLE = "What does a plan gain over full recompute in the published setting of adaptive memory optimization?"

METHODS = ("full recompute", "lowtide, throttled link", "lowtide", "plain, no cap")
_WARM_STEPS = 5  # a recorded step, two corrections, and one more
_SHAPE = ("layers", "hidden", "heads", "head_size", "ffn", "sequence", "micro_batch", "dtype")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of the run on a device; the timeline does not read them."""
    group = parser.add_argument_group("with --device")
    group.add_argument("--rounds", type=int, default=5)
    group.add_argument("--cap", default="64GB", help="what the process may take of the device")
    group.add_argument("--reserved", default="4GB", help="of the cap, left to fragmentation and libraries")
    group.add_argument("--link", type=float, default=25e9, help="bytes per second, each way")
    group.add_argument("--state", type=int, default=18, help="bytes a parameter of weights, gradients and optimizer")
    group.add_argument("--layers", type=int, default=8)
    group.add_argument("--hidden", type=int, default=12288)
    group.add_argument("--heads", type=int, default=12, help="of this rank")
    group.add_argument("--head-size", type=int, default=128)
    group.add_argument("--ffn", type=int, default=6144, help="of this rank")
    group.add_argument("--sequence", type=int, default=8192)
    group.add_argument("--micro-batch", type=int, default=4)
    group.add_argument("--dtype", default="bfloat16")
    group.add_argument("--min-bytes", type=int, default=2**20)


def main(args: argparse.Namespace, command: str) -> int:
    record = Record(
        question="published_setting",
        title=TITLE,
        kind="emulated",
        command=command,
        settings={key: getattr(args, key) for key in (*_SHAPE, "rounds", "cap", "reserved")}
        | {"link_bytes_per_second": args.link, "state_bytes_per_parameter": args.state},
        rows=[],
        notes=[
            "Emulated: the link is slowed down by copying padding beside each activation, and memory is capped in the "
            "process. Gains are over full recompute in the same process limits; collectives of tensor parallelism do "
            "not run, on either side.",
            "`plain, no cap` is the ceiling: no plan can be faster. `link /s` is what the link reached with both "
            "directions busy, before it was throttled.",
        ],
        hardware=hardware(args.device),
    )  # fmt: skip
    return run(record, [{"method": method} for method in METHODS], lambda piece: measure(piece, args), args)


def measure(piece: Mapping[str, Any], args: argparse.Namespace) -> Row:
    """One method, on a model of its own."""
    import torch

    device = torch.device(args.device)
    has_cap = piece["method"] != "plain, no cap"
    with _capped(device, parse_bytes(args.cap) if has_cap else None):
        return _measure(str(piece["method"]), device, args)


def _measure(method: str, device: Any, args: argparse.Namespace) -> Row:
    from benchmarks.steps import checksum, peak_bytes_of, timed

    model, hidden = make_slice(args, device)
    seconds: list[float] = []
    losses: list[Any] = []

    def step() -> None:
        # Gradients stay, as with accumulation: else the peak of a small budget is theirs alone.
        model.zero_grad(set_to_none=False)
        loss = model(hidden)
        loss.backward()
        losses[:] = [loss.detach()]

    with _in_force(method, model, device, args) as (facts, tide):
        for _ in range(_WARM_STEPS):
            step()
        if tide is not None:
            tide.reset_stats()
        for _ in range(args.rounds):
            seconds.append(timed(step, device))
        row = facts()
        row |= {
            "seconds_median": statistics.median(seconds),
            "seconds_min": min(seconds),
            "seconds_max": max(seconds),
            "peak_bytes": peak_bytes_of(step, model, tide.tide if tide is not None else None),
        }
    return row | {"loss_and_gradients": checksum(losses[0], model)}


def make_slice(args: argparse.Namespace, device: Any) -> tuple[Any, Any]:
    """The layers of one rank with their state, and their input: (micro_batch, sequence, hidden)."""
    import torch

    from benchmarks.gpt_slice import GptSlice

    torch.manual_seed(0)
    with torch.device(device):
        model = GptSlice(args.layers, args.hidden, args.heads, args.head_size, args.ffn).to(getattr(torch, args.dtype))
        hidden = torch.randn(args.micro_batch, args.sequence, args.hidden, dtype=getattr(torch, args.dtype))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    real_bytes = sum(2 * p.numel() * p.element_size() for p in model.parameters())
    state_bytes = args.state * sum(p.numel() for p in model.parameters())
    rest = torch.empty(max(state_bytes - real_bytes, 0), dtype=torch.uint8, device=device)
    model.register_buffer("optimizer_state", rest, persistent=False)
    return model.train(), hidden


@contextlib.contextmanager
def _in_force(
    method: str, model: Any, device: Any, args: argparse.Namespace
) -> Iterator[tuple[Callable[[], Row], Any]]:
    """The method on the model: what it has to say after the steps, and the tide if there is one."""
    import lowtide
    from benchmarks.throttle import ThrottledEngine

    if not method.startswith("lowtide"):
        model.is_checkpointed = method == "full recompute"
        yield dict, None
        return
    engine: Any = _engine(device)
    real = engine.probe_bandwidth(64 * 2**20)
    if method == "lowtide, throttled link":
        engine = ThrottledEngine(engine, args.link, device)
    budget = parse_bytes(args.cap) - parse_bytes(args.reserved)
    tide = lowtide.optimize(model, budget=budget, memory={"min_bytes": args.min_bytes}, engine=engine)
    try:
        yield lambda: _facts(tide, args.rounds, real), tide
    finally:
        tide.remove()
        engine.close()


def _facts(tide: Any, rounds: int, real: Any) -> Row:
    assert tide.plan is not None and tide.plan.predicted is not None
    return {
        "swapped_bytes": tide.stats.swapped_bytes // rounds,
        "recomputed_bytes": tide.stats.recomputed_bytes // rounds,
        "stall_seconds": tide.stats.stall_seconds / rounds,
        "predicted_seconds": tide.plan.predicted.step_seconds,
        "predicted_peak_bytes": tide.plan.predicted.peak_bytes,
        "link_bytes_per_second": min(real.out_bytes_per_second, real.in_bytes_per_second),
    }


def _engine(device: Any) -> Any:
    if device.type == "cpu":
        from lowtide.engines.host import HostEngine

        return HostEngine()
    from lowtide.engines.accelerator import AcceleratorEngine

    return AcceleratorEngine(device)


@contextlib.contextmanager
def _capped(device: Any, cap_bytes: int | None) -> Iterator[None]:
    """Inside, the allocator of an accelerator gives out no more than `cap_bytes`; afterwards it holds nothing."""
    import torch

    if device.type == "cpu":
        yield
        return
    module = torch.get_device_module(device.type)
    gc.collect()  # what a method that failed has left behind
    module.empty_cache()
    total = module.get_device_properties(device).total_memory
    module.set_per_process_memory_fraction(1.0 if cap_bytes is None else min(1.0, cap_bytes / total))
    try:
        yield
    finally:
        gc.collect()
        module.empty_cache()
        module.set_per_process_memory_fraction(1.0)


def with_gains(rows: list[Row]) -> list[Row]:
    """For the report: each method's gain over full recompute, and whether its results are those of full recompute."""
    base = next((row for row in rows if row["method"] == "full recompute" and not row.get("error")), None)
    if base is None:
        return rows
    return [
        row
        if row.get("error")
        else {
            **{key: value for key, value in row.items() if key != "loss_and_gradients"},
            "gain_percent": 100 * (base["seconds_median"] / row["seconds_median"] - 1),
            "is_equal": row["loss_and_gradients"] == base["loss_and_gradients"],
        }
        for row in rows
    ]
