"""Times of a traced step as compiled code would have them: rows of element-wise operators run as one kernel.

What: `of_layers` and `of_all` go to `trace(price=...)`. A row reads what comes from outside and writes what somebody
needs later; the first operator of it has the time of all. What is saved is that of the eager step.
Not covered: what a compiler recomputes in backward.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from lowtide.core.profile import layer_of
from lowtide.profiling.fake.roofline import extent_bytes, inputs_of, is_attention, op_bytes, op_flops, op_seconds
from lowtide.recipes.graph import OpCall, Value
from lowtide.timeline.hardware import Hardware


def _fused_seconds(calls: Sequence[OpCall], layers: Sequence[str], hardware: Hardware, *, outside: bool) -> list[float]:
    """Seconds of each call if a compiler had fused what stands between products: the first of a row has the time of
    all. Rows end where a layer does, since blocks are compiled one by one. `outside`: what is in no layer is compiled
    too. Complex numbers stay eager: torch's compiler makes no code for them."""
    seconds = [0.0] * len(calls)
    last_reads: dict[int, int] = {}
    for number, call in enumerate(calls):
        last_reads |= {value.storage.index: number for value in inputs_of(call)}
    row: list[int] = []

    def close() -> None:
        if row:
            nbytes = _row_bytes([calls[number] for number in row], row[-1], last_reads)
            seconds[row[0]] = hardware.op_seconds(0.0, nbytes, "float32", is_fused=True)
            row.clear()

    layer = None
    for number, call in enumerate(calls):
        if not op_bytes(call):
            continue
        if (home := layer_of(call.name, layers)) != layer:
            close()
            layer = home
        if (
            is_attention(call)
            or op_flops(call)
            or _is_lookup(call)
            or _is_complex(call)
            or (layer is None and not outside)
        ):
            close()
            seconds[number] = op_seconds(call, hardware)
        else:
            row.append(number)
    close()
    return seconds


def _row_bytes(calls: Sequence[OpCall], end: int, last_reads: Mapping[int, int]) -> int:
    """Bytes that a row of fused operators reads and writes; `end` is the number of its last call."""
    made: set[int] = set()
    moved: dict[int, int] = {}
    for call in calls:
        for value in inputs_of(call):
            index = value.storage.index
            if index not in made:
                moved[index] = max(moved.get(index, 0), extent_bytes(value))
        made |= {value.storage.index for value in call.outputs if isinstance(value, Value)}
    written: dict[int, int] = {}
    for call in calls:
        for output in call.outputs:
            # What nobody reads later is a result, such as a gradient.
            if output is not None and last_reads.get(output.storage.index, end + 1) > end:
                written[output.storage.index] = max(written.get(output.storage.index, 0), extent_bytes(output))
    return sum(moved.values()) + sum(written.values())


def _is_complex(call: OpCall) -> bool:
    return any(value.dtype.is_complex for value in (*inputs_of(call), *call.outputs) if value is not None)


def _is_lookup(call: OpCall) -> bool:
    """It takes rows by number, or adds them up by number."""
    return call.func.overloadpacket.__name__.startswith(("embedding", "index", "gather", "scatter"))


of_layers = functools.partial(_fused_seconds, outside=False)
"""Each layer is compiled by itself, and nothing else is."""
of_all = functools.partial(_fused_seconds, outside=True)
"""All of the step is compiled."""
