"""What an operator costs: floating point operations, bytes moved, and seconds on a device that is not there.

What: flops from torch's own registry (torch.utils.flop_counter) where it has a formula, and from ours for what it
lacks: the fused attention of the host, grouped products. Everything else costs its bytes alone. Bytes are inputs plus
outputs; views move nothing. Seconds by `Hardware` (roofline).

Attention with a causal mask counts half: that is what kernels execute. The kernel is the one that torch's
`scaled_dot_product_attention` takes by default: FlashAttention-2 in 16 bits without a mask of numbers, else the
memory-efficient one (`attention_kernel`).
`fused_seconds` prices a whole step as compiled code: rows of element-wise operators run as one kernel, which reads what
comes from outside and writes what somebody needs later.

Cost: a few microseconds an operator. Not covered: operators of other libraries (bytes only), and what a kernel reads
twice.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lowtide.profiling.build_profile import layer_of
from lowtide.recipes.graph import Call, Value
from lowtide.tensors.private import schema_of, tree_leaves, tree_map_only
from lowtide.timeline.hardware import Hardware

_SELECTS = frozenset({"gather", "scatter_", "scatter_add_"})
"""They read or write the elements of their first argument that the third one names, and no others."""
_VIEWS = frozenset({"view", "_unsafe_view", "reshape", "t", "transpose", "alias", "detach", "lift_fresh"})


def op_seconds(call: Call, hardware: Hardware) -> float:
    """Roofline time of one call; 0 for views."""
    nbytes = op_bytes(call)
    if not nbytes:
        return 0.0
    flops = op_flops(call)
    if is_attention(call):
        return hardware.attention_seconds(
            flops,
            nbytes,
            _dtype(call),
            tokens=_num_keys(call),
            kernel=attention_kernel(call),
            is_backward=call.func.overloadpacket.__name__.endswith("backward"),
        )
    return hardware.op_seconds(flops / _tile_share(call, hardware), nbytes, _dtype(call))


def _tile_share(call: Call, hardware: Hardware) -> float:
    """Of a product of two matrices, how full its tiles and the last wave of them are; 1 for everything else."""
    if call.func.overloadpacket.__name__ not in {"mm", "addmm"} or not call.outputs or call.outputs[0] is None:
        return 1.0
    return hardware.tile_share(*call.outputs[0].size)


def fused_seconds(
    calls: Sequence[Call], layers: Sequence[str], hardware: Hardware, *, outside: bool = True
) -> list[float]:
    """Seconds of each call if a compiler had fused what stands between products: the first of a row has the time of
    all. Rows end where a layer does, since blocks are compiled one by one. `outside`: what is in no layer is compiled
    too. Complex numbers stay eager: torch's compiler makes no code for them."""
    seconds = [0.0] * len(calls)
    last_reads: dict[int, int] = {}
    for number, call in enumerate(calls):
        last_reads |= {value.storage.index: number for value in _inputs(call)}
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


def _row_bytes(calls: Sequence[Call], end: int, last_reads: Mapping[int, int]) -> int:
    """Bytes that a row of fused operators reads and writes; `end` is the number of its last call."""
    made: set[int] = set()
    moved: dict[int, int] = {}
    for call in calls:
        for value in _inputs(call):
            index = value.storage.index
            if index not in made:
                moved[index] = max(moved.get(index, 0), _extent_bytes(value))
        made |= {value.storage.index for value in call.outputs if isinstance(value, Value)}
    written: dict[int, int] = {}
    for call in calls:
        for output in call.outputs:
            # What nobody reads later is a result, such as a gradient.
            if output is not None and last_reads.get(output.storage.index, end + 1) > end:
                written[output.storage.index] = max(written.get(output.storage.index, 0), _extent_bytes(output))
    return sum(moved.values()) + sum(written.values())


def _inputs(call: Call) -> list[Value]:
    return [value for value in tree_leaves((call.args, call.kwargs)) if isinstance(value, Value)]


def _is_complex(call: Call) -> bool:
    return any(value.dtype.is_complex for value in (*_inputs(call), *call.outputs) if value is not None)


def _is_lookup(call: Call) -> bool:
    """It takes rows by number, or adds them up by number."""
    return call.func.overloadpacket.__name__.startswith(("embedding", "index", "gather", "scatter"))


def op_bytes(call: Call) -> int:
    """Bytes that the operator reads and writes: its inputs and outputs, each at most once; 0 for views."""
    if _is_view(call.func):
        return 0
    seen: dict[tuple, int] = {}
    for value in (*tree_leaves((call.args, call.kwargs)), *call.outputs):
        if isinstance(value, Value):
            seen[_place(value)] = _extent_bytes(value)
    if call.func.overloadpacket.__name__ in _SELECTS:
        table, _, index = call.args[:3]
        seen[_place(table)] = min(seen[_place(table)], math.prod(index.size) * table.dtype.itemsize)
    return sum(seen.values())


def _place(value: Value) -> tuple:
    return value.storage.index, value.offset, value.size, value.stride, value.dtype


def _extent_bytes(value: Value) -> int:
    """Of the elements that differ: what is expanded is read once."""
    if not value.stride or not all(value.size):
        return 0
    return math.prod(size for size, stride in zip(value.size, value.stride) if stride) * value.dtype.itemsize


def op_flops(call: Call) -> float:
    """Floating point operations of the products in the call; 0 for what only moves bytes."""
    packet = call.func.overloadpacket
    formula = _own_formulas().get(str(packet)) or _registry().get(packet)
    if formula is None:
        return 0.0
    args, kwargs = tree_map_only(Value, lambda value: value.size, (call.args, call.kwargs))
    outputs = tuple(value.size if value is not None else None for value in call.outputs)
    out = outputs[0] if len(outputs) == 1 else outputs
    flops = float(formula(*args, **kwargs, out_val=out))
    return flops / 2 if is_attention(call) and _is_causal(call) else flops


def is_attention(call: Call) -> bool:
    """A fused attention kernel, forward or backward."""
    name = call.func.overloadpacket.__name__
    return name.startswith(("_scaled_dot_product", "_flash_attention", "_efficient_attention", "planning_attention"))


def attention_kernel(call: Call) -> str:
    """The kernel that an accelerator's `scaled_dot_product_attention` takes for this call by default."""
    is_masked = any(
        argument.name in {"attn_mask", "attn_bias"} and isinstance(_argument(call, position, argument.name), Value)
        for position, argument in enumerate(schema_of(call.func).arguments)
    )
    return "efficient" if is_masked or _dtype(call) == "float32" else "flash"


def _argument(call: Call, position: int, name: str) -> Any:
    return call.args[position] if position < len(call.args) else call.kwargs.get(name)


def _num_keys(call: Call) -> int:
    """Of each query: `key` is what the schema calls it."""
    for position, argument in enumerate(schema_of(call.func).arguments):
        if argument.name in {"key", "k"} and isinstance(key := _argument(call, position, argument.name), Value):
            return key.size[-2]
    return _inputs(call)[0].size[-2]


def _dtype(call: Call) -> str:
    """The dtype whose rate counts: that of the first floating input."""
    for value in tree_leaves((call.args, call.kwargs)):
        if isinstance(value, Value) and value.dtype.is_floating_point:
            return str(value.dtype).removeprefix("torch.")
    return "float32"


@functools.lru_cache(maxsize=4096)
def _is_view(func: Any) -> bool:
    if func.is_view or func.overloadpacket.__name__ in _VIEWS:
        return True
    returns = schema_of(func).returns
    return bool(returns) and not schema_of(func).is_mutable and all(r.alias_info is not None for r in returns)


def _is_causal(call: Call) -> bool:
    for position, argument in enumerate(schema_of(call.func).arguments):
        if argument.name == "is_causal":
            if position < len(call.args):
                return bool(call.args[position])
            return bool(call.kwargs.get("is_causal", argument.default_value))
    return call.func.overloadpacket.__name__.startswith("planning_attention")


@functools.lru_cache(maxsize=1)
def _registry() -> Mapping[Any, Callable]:
    from torch.utils.flop_counter import flop_registry

    return flop_registry


@functools.lru_cache(maxsize=1)
def _own_formulas() -> Mapping[str, Callable]:
    return {
        "aten._scaled_dot_product_flash_attention_for_cpu": _attention,
        "aten._scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
        "aten._scaled_dot_product_fused_attention_overrideable": _attention,
        "aten._scaled_dot_product_fused_attention_overrideable_backward": _attention_backward,
        "lowtide.planning_attention": _attention,
        "lowtide.planning_attention_backward": _attention_backward,
        "aten._grouped_mm": _grouped,
        "transformers.grouped_mm_fallback": _grouped,
    }


def _attention(query: tuple, key: tuple, value: tuple, *args: Any, **kwargs: Any) -> int:
    """Scores and their product with the values. Queries may outnumber keys in heads (grouped queries)."""
    batch, heads, num_queries, width = query
    num_keys, value_width = key[-2], value[-1]
    return 2 * batch * heads * num_queries * num_keys * (width + value_width)


def _attention_backward(grad_out: tuple, query: tuple, key: tuple, value: tuple, *args: Any, **kwargs: Any) -> int:
    """Scores again, then the gradients of values, probabilities, queries and keys."""
    batch, heads, num_queries, width = query
    num_keys, value_width = key[-2], value[-1]
    return 2 * batch * heads * num_queries * num_keys * (3 * width + 2 * value_width)


def _grouped(left: tuple, right: tuple, *args: Any, **kwargs: Any) -> int:
    """Rows belong to groups: the product of all rows with one matrix each. Without groups on the left's rows, the
    columns of the left are split (the weights' gradient)."""
    if len(left) == 2 and len(right) == 2:
        return 2 * left[0] * left[1] * right[1]
    if len(left) == 2:
        return 2 * left[0] * left[1] * right[-1]
    return 2 * math.prod(left) * right[-1]
