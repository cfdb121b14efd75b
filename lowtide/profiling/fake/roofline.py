"""What an operator costs: floating point operations, bytes moved, and seconds on a device that is not there.

What: flops from torch's own registry (torch.utils.flop_counter) where it has a formula, and from ours for what it
lacks: the fused attention of the host, grouped products. Everything else costs its bytes alone. Bytes are inputs plus
outputs; views move nothing. Seconds by `Hardware.op_seconds` (roofline).

Attention with a causal mask counts half: that is what kernels execute.

Cost: a few microseconds an operator. Not covered: operators of other libraries (bytes only), and what a kernel reads
twice.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

from lowtide.recipes.graph import Call, Value
from lowtide.tensors.private import schema_of, tree_leaves, tree_map_only
from lowtide.timeline.hardware import Hardware

_VIEWS = frozenset({"view", "_unsafe_view", "reshape", "t", "transpose", "alias", "detach", "lift_fresh"})


def op_seconds(call: Call, hardware: Hardware) -> float:
    """Roofline time of one call; 0 for views."""
    nbytes = op_bytes(call)
    if not nbytes:
        return 0.0
    flops = op_flops(call)
    return hardware.op_seconds(flops, nbytes, _dtype(call), is_attention=is_attention(call))


def op_bytes(call: Call) -> int:
    """Bytes that the operator reads and writes: its inputs and outputs, each at most once; 0 for views."""
    if _is_view(call.func):
        return 0
    seen: dict[tuple, int] = {}
    for value in (*tree_leaves((call.args, call.kwargs)), *call.outputs):
        if isinstance(value, Value):
            key = (value.storage.index, value.offset, value.size, value.stride, value.dtype)
            extent = math.prod(size for size, stride in zip(value.size, value.stride) if stride) if value.stride else 0
            seen[key] = (extent if all(value.size) else 0) * value.dtype.itemsize
    return sum(seen.values())


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
