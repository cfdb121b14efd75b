"""What an operator costs: floating point operations, bytes moved, and seconds on a device that is not there.

What: flops from torch's own registry (torch.utils.flop_counter) where it has a formula, and from ours for what it
lacks: the fused attention of the host, grouped products. Everything else costs its bytes alone. Bytes are inputs plus
outputs; views move nothing. Seconds by `Hardware` (roofline).

Attention with a causal mask counts half: that is what kernels execute. The kernel is the one that torch's
`scaled_dot_product_attention` takes by default: FlashAttention-2 in 16 bits without a mask of numbers, else the
memory-efficient one (`attention_kernel`).

`workspace_bytes`: what a kernel takes for itself while it runs, beside what it is given and gives. An estimate, of
attention's backward alone. FlashAttention-2 as torch calls it (aten, flash_attn/flash_api.cpp, `mha_bwd`) sums dQ in
fp32 over blocks of keys (`dq_accum`, rows rounded up to 128 and heads' widths to 32), has a number a row (`softmax_d`),
and with fewer heads of keys than of queries makes dK and dV for each head of queries (`dk_expanded`, `dv_expanded`).
The memory-efficient kernel sums dQ in fp32 as well (mem_eff_attention/kernel_backward.h, `kNeedsAccumGradQ`), so do
FlashAttention-3 (hopper/flash_api.cpp, `dq_accum`; dK and dV in fp32 there, for each head of keys) and cuDNN: no more
than this.

Cost: a few microseconds an operator. Not covered: operators of other libraries (bytes only), what a kernel reads twice,
and workspaces of other kernels.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

from torch.utils.flop_counter import flop_registry

from lowtide.recipes.graph import OpCall, Value
from lowtide.tensors.private import schema_of, tree_leaves, tree_map_only
from lowtide.timeline.hardware import Hardware

_SELECTS = frozenset({"gather", "scatter_", "scatter_add_"})
"""They read or write the elements of their first argument that the third one names, and no others."""
_ROWS_TILE, _WIDTH_TILE = 128, 32
"""Of FlashAttention-2's fp32 sum of dQ."""
_VIEWS = frozenset({"view", "_unsafe_view", "reshape", "t", "transpose", "alias", "detach", "lift_fresh"})


def op_seconds(call: OpCall, hardware: Hardware) -> float:
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


def _tile_share(call: OpCall, hardware: Hardware) -> float:
    """How full the tiles of a matrix product and the last wave of them are; 1 for everything else."""
    if call.func.overloadpacket.__name__ not in {"mm", "addmm"} or not call.outputs or call.outputs[0] is None:
        return 1.0
    return hardware.tile_share(*call.outputs[0].size)


def inputs_of(call: OpCall) -> list[Value]:
    """The tensors that a call was given."""
    return [value for value in tree_leaves((call.args, call.kwargs)) if isinstance(value, Value)]


def op_bytes(call: OpCall) -> int:
    """Bytes that the operator reads and writes: its inputs and outputs, each at most once; 0 for views."""
    if _is_view(call.func):
        return 0
    seen: dict[tuple, int] = {}
    for value in (*tree_leaves((call.args, call.kwargs)), *call.outputs):
        if isinstance(value, Value):
            seen[_place(value)] = extent_bytes(value)
    if call.func.overloadpacket.__name__ in _SELECTS:
        table, _, index = call.args[:3]
        seen[_place(table)] = min(seen[_place(table)], math.prod(index.size) * table.dtype.itemsize)
    return sum(seen.values())


def _place(value: Value) -> tuple:
    return value.storage.index, value.offset, value.size, value.stride, value.dtype


def extent_bytes(value: Value) -> int:
    """Bytes of the elements that differ: what is expanded is read once."""
    if not value.stride or not all(value.size):
        return 0
    return math.prod(size for size, stride in zip(value.size, value.stride) if stride) * value.dtype.itemsize


def op_flops(call: OpCall) -> float:
    """Floating point operations of the products in the call; 0 for what only moves bytes."""
    packet = call.func.overloadpacket
    formula = _OWN_FORMULAS.get(str(packet)) or flop_registry.get(packet)
    if formula is None:
        return 0.0
    args, kwargs = tree_map_only(Value, lambda value: value.size, (call.args, call.kwargs))
    outputs = tuple(value.size if value is not None else None for value in call.outputs)
    out = outputs[0] if len(outputs) == 1 else outputs
    flops = float(formula(*args, **kwargs, out_val=out))
    return flops / 2 if is_attention(call) and call.argument("is_causal") else flops


def is_attention(call: OpCall) -> bool:
    """A fused attention kernel, forward or backward."""
    name = call.func.overloadpacket.__name__
    return name.startswith(("_scaled_dot_product", "_flash_attention", "_efficient_attention", "planning_attention"))


def attention_kernel(call: OpCall) -> str:
    """The kernel that an accelerator's `scaled_dot_product_attention` takes for this call by default."""
    is_masked = any(isinstance(call.argument(name), Value) for name in ("attn_mask", "attn_bias"))
    return "efficient" if is_masked or _dtype(call) == "float32" else "flash"


def workspace_bytes(call: OpCall) -> int:
    """What the kernel of an accelerator takes for itself while it runs: see the module's text."""
    if not is_attention(call) or not call.func.overloadpacket.__name__.endswith("backward"):
        return 0
    query, key = call.argument("query"), call.argument("key")
    if not isinstance(query, Value) or not isinstance(key, Value):
        return 0
    batch, heads, rows, width = query.size
    rows, padded = -(-rows // _ROWS_TILE) * _ROWS_TILE, -(-width // _WIDTH_TILE) * _WIDTH_TILE
    nbytes = 4 * batch * heads * rows * (padded + 1)
    if attention_kernel(call) == "flash" and key.size[1] != heads:
        nbytes += 2 * batch * heads * key.size[2] * width * query.dtype.itemsize
    return nbytes


def _num_keys(call: OpCall) -> int:
    """The number of keys that each query looks at."""
    keys = (call.argument(name) for name in ("key", "k"))
    return next((key for key in keys if isinstance(key, Value)), inputs_of(call)[0]).size[-2]


def _dtype(call: OpCall) -> str:
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


_OWN_FORMULAS: Mapping[str, Callable] = {
    "aten._scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "aten._scaled_dot_product_fused_attention_overrideable": _attention,
    "aten._scaled_dot_product_fused_attention_overrideable_backward": _attention_backward,
    "lowtide.planning_attention": _attention,
    "lowtide.planning_attention_backward": _attention_backward,
    "aten._grouped_mm": _grouped,
    "transformers.grouped_mm_fallback": _grouped,
}
