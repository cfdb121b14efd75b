"""What operators take on the clock of the tests: the roofline of a small machine that does not exist."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map

from lowtide.profiling.fake.roofline import op_seconds
from lowtide.recipes.graph import OpCall, Storage, Value
from lowtide.timeline.hardware import Hardware
from lowtide.timeline.step import Link

LINK = Link(out_bytes_per_second=2e9, in_bytes_per_second=2e9, latency_seconds=1e-6)
HARDWARE = Hardware(
    name="cpu of the test",
    memory_bytes=1 << 30,
    flops_per_second={"float32": 2e10, "bfloat16": 4e10},
    attention={"flash": (2e10, 2e10)},
    ramp_tokens=0.0,
    memory_bytes_per_second=4e9,
    eager_bytes_per_second=4e9,
    launch_seconds=1e-6,
    link=LINK,
)


def seconds_of(func: Any, args: tuple, out: object) -> float:
    """What the trace assumes for the same operator. Handing out a view of what is there (`set_`) takes no time."""
    if func.overloadpacket is torch.ops.aten.set_:
        return 0.0
    call = OpCall(
        index=0, func=func, args=tree_map(as_value, args), kwargs={}, outputs=outputs_of(out), name="", seconds=0.0,
        is_collective=False,
    )  # fmt: skip
    return op_seconds(call, HARDWARE)


def as_value(leaf: object) -> object:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    storage = Storage(index=leaf.untyped_storage()._cdata, nbytes=leaf.untyped_storage().nbytes(), dtype=leaf.dtype,
                      name="", kind="made")  # fmt: skip
    return Value(storage, 0, tuple(leaf.shape), leaf.stride(), leaf.storage_offset(), leaf.dtype, leaf.device)


def outputs_of(out: object) -> tuple:
    leaves = out if isinstance(out, list | tuple) else [out]
    return tuple(as_value(leaf) if isinstance(leaf, torch.Tensor) else None for leaf in leaves)
