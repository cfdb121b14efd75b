"""The pieces of details.py that are about copies: how large, beside what, from which host memory.

Cost: seconds each. Not covered: links that several devices share.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.rows import Row
from benchmarks.steps import synchronize
from lowtide.engines.base import Engine, Lane, Slot

SIZES = tuple(64 * 2**10 << shift for shift in range(0, 11, 2))
"""64 KiB, 256 KiB, ... 64 MiB."""
_IDLE_SECONDS = 0.5
_COPY_BYTES = 16 * 2**20


def make_engine(device: torch.device) -> Engine:
    """The engine that a model on `device` gets."""
    if device.type == "cpu":
        from lowtide.engines.host import HostEngine

        return HostEngine()
    from lowtide.engines.accelerator import AcceleratorEngine

    return AcceleratorEngine(device)


# -- copy_size ---------------------------------------------------------------------------------------------------------


def copy_size(args: argparse.Namespace) -> list[Row]:
    """Rates by the size of a copy; a slot of its own for each, as activations have."""
    device = torch.device(args.device)
    engine = make_engine(device)
    try:
        return [_rates(engine, device, size, args.total_mib * 2**20) for size in SIZES]
    finally:
        engine.close()


def _rates(engine: Engine, device: torch.device, size: int, total_bytes: int) -> Row:
    count = max(total_bytes // size, 1)
    slots = [engine.allocate(size, engine.tiers[0]) for _ in range(2 * count)]
    source, target = _buffer(engine, size, device), _buffer(engine, size, device)
    row: Row = {"size_bytes": size}
    try:
        _seconds(engine, source, slots[count:], target, ())  # to be read later, and a warm-up
        row["out_bytes_per_second"] = count * size / _seconds(engine, source, slots[:count], target, ())
        row["in_bytes_per_second"] = count * size / _seconds(engine, source, (), target, slots[count:])
        both = _seconds(engine, source, slots[:count], target, slots[count:])
        row["both_bytes_per_second"] = 2 * count * size / both
    finally:
        for slot in slots:
            engine.free(slot)
    return row


def _buffer(engine: Engine, nbytes: int, device: torch.device) -> torch.UntypedStorage:
    buffer = engine.new_buffer(nbytes, device)
    torch.empty(0, dtype=torch.uint8, device=device).set_(buffer).fill_(1)
    return buffer


def _seconds(
    engine: Engine,
    source: torch.UntypedStorage,
    outgoing: Sequence[Slot],
    target: torch.UntypedStorage,
    incoming: Sequence[Slot],
) -> float:
    device = torch.device(engine.device_type)
    synchronize(device)
    started = time.perf_counter()
    for index in range(max(len(outgoing), len(incoming))):
        if index < len(outgoing):
            engine.copy_out(source, outgoing[index])
        if index < len(incoming):
            engine.copy_in(incoming[index], target)
    finish(engine)
    return time.perf_counter() - started


def finish(engine: Engine) -> None:
    """Return when all copies are done."""
    for lane in (Lane.OUT, Lane.IN):
        engine.wait(Lane.COMPUTE, engine.record(lane))
    synchronize(torch.device(engine.device_type))


# -- matmul_while_copying ----------------------------------------------------------------------------------------------


def matmul_while_copying(args: argparse.Namespace) -> list[Row]:
    """Matrix products per second with nothing beside them, with copies out, in, and both."""
    device = torch.device(args.device)
    engine = make_engine(device)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    a = torch.ones(args.matrix, args.matrix, device=device, dtype=dtype)
    product = torch.empty_like(a)
    size = min(_COPY_BYTES, args.total_mib * 2**20)
    slots = [engine.allocate(size, engine.tiers[0]) for _ in range(2)]
    source, target = _buffer(engine, size, device), _buffer(engine, size, device)
    engine.copy_out(source, slots[1])
    finish(engine)

    def multiply() -> None:
        torch.mm(a, a, out=product)
        synchronize(device)

    def rate(lanes: Sequence[Lane]) -> tuple[float, float]:
        """Products, and bytes of all lanes, a second."""
        count = args.total_mib * 2**20 // size
        for _ in range(count if lanes else 0):
            if Lane.OUT in lanes:
                engine.copy_out(source, slots[0])
            if Lane.IN in lanes:
                engine.copy_in(slots[1], target)
        events = [engine.record(lane) for lane in lanes]
        products, started = 0, time.perf_counter()
        while _is_going(engine, events, started):
            multiply()
            products += 1
        seconds = time.perf_counter() - started
        finish(engine)
        return products / seconds, len(lanes) * count * size / (time.perf_counter() - started)

    rows: list[Row] = []
    try:
        multiply()
        for name, lanes in (("nothing beside", ()), ("copies out", (Lane.OUT,)), ("copies in", (Lane.IN,)),
                            ("both", (Lane.OUT, Lane.IN))):  # fmt: skip
            found = [rate(lanes) for _ in range(max(args.rounds // 2, 1))]
            products = statistics.median(one for one, _ in found)
            row = {"setting": name, "flops_per_second": products * 2 * args.matrix**3}
            rows.append(row | ({"bytes_per_second": statistics.median(moved for _, moved in found)} if lanes else {}))
    finally:
        for slot in slots:
            engine.free(slot)
        engine.close()
    idle = rows[0]["flops_per_second"]
    return [{**row, "slower_percent": 100 * (1 - row["flops_per_second"] / idle)} for row in rows]


def _is_going(engine: Engine, events: Sequence[Any], started: float) -> bool:
    """While all lanes copy; without any, for a fixed time."""
    if not events:
        return time.perf_counter() - started < _IDLE_SECONDS
    return not any(engine.query(event) for event in events)


# -- pinned_memory -----------------------------------------------------------------------------------------------------


def pinned_memory(args: argparse.Namespace) -> list[Row]:
    """Host memory for the activations of a step, at first and again: lowtide's arena, and torch's own allocator."""
    device = torch.device(args.device)
    if device.type == "cpu":
        raise ValueError("pinned memory needs an accelerator")
    from lowtide.engines.device_ops import TorchDevice

    return pinned_rows(activation_sizes(args), TorchDevice(device).new_slab, _torch_pinned)


def _torch_pinned(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)


def activation_sizes(args: argparse.Namespace) -> list[int]:
    """Bytes of the larger activations of a Llama in bf16, layer by layer."""
    unit = 2 * args.sequence * args.hidden
    return [*([unit] * 6), *([unit * 8 // 3] * 3)] * args.layers


def pinned_rows(
    sizes: Sequence[int], new_slab: Callable[[int], torch.Tensor], new_pinned: Callable[[int], torch.Tensor]
) -> list[Row]:
    """Two rows: seconds to get all of `sizes` at first and again, and bytes asked for and pinned."""
    from lowtide.engines.tiers.arena import Arena

    slab_bytes: list[int] = []

    def counted(nbytes: int) -> torch.Tensor:
        slab_bytes.append(nbytes)
        return new_slab(nbytes)

    arena = Arena(4 * sum(sizes), counted)

    def from_arena() -> float:
        started = time.perf_counter()
        blocks = [arena.allocate(size) for size in sizes]
        seconds = time.perf_counter() - started
        for block in blocks:
            arena.free(block)
        return seconds

    def from_torch() -> float:
        started = time.perf_counter()
        tensors = [new_pinned(size) for size in sizes]
        seconds = time.perf_counter() - started
        tensors.clear()
        return seconds

    asked = sum(sizes)
    rows = []
    for name, get in (("arena", from_arena), ("torch, caching", from_torch)):
        rows.append({"setting": name, "first_seconds": get(), "again_seconds": get(), "asked_bytes": asked})
    rows[0]["pinned_bytes"] = sum(slab_bytes)
    # torch rounds each request up to a power of two; its own counter is not there in every version.
    rows[1]["pinned_bytes"] = sum(1 << (size - 1).bit_length() for size in sizes)
    return rows
