"""Below what the indices are that an operator gives out, by its definition and not by their values.

What: `index_limit` of a storage that a max-pool, a sort or a maximum over one dimension made: places in the plane or
the dimension that it looked at. So int64 indices may be stored in fewer bytes without a look at them
(tensors/codecs.py), on an accelerator too.

Cost: a dictionary. Not covered: indices that something wrote to after they were made, masked or shifted ones, and those
that came with the batch (token ids): nothing says what these may be in the next step.
"""

from __future__ import annotations

import math
from typing import Any

from lowtide.recipes.graph import Call, Storage, Value
from lowtide.tensors.private import schema_of

_PLANES = {
    "max_pool2d_with_indices": 2,
    "max_pool3d_with_indices": 3,
    "adaptive_max_pool2d": 2,
    "adaptive_max_pool3d": 3,
    "fractional_max_pool2d": 2,
    "fractional_max_pool3d": 3,
}
"""How many of the last dimensions a place is counted in."""
_OVER_ONE = frozenset({"sort", "topk", "kthvalue", "mode", "median", "nanmedian", "max", "min", "cummax", "cummin"})
"""Those whose second result is a place in the dimension `dim`."""


def index_limit(storage: Storage) -> int | None:
    """One more than the largest index that the operator which made a storage can give; None where it gives others."""
    call = storage.producer
    if call is None or storage.num_writes or len(call.outputs) < 2:
        return None
    indices, source = call.outputs[1], _source(call)
    if indices is None or indices.storage is not storage or source is None or not source.size:
        return None
    name = call.func.overloadpacket.__name__
    if name in _PLANES:
        return math.prod(source.size[-_PLANES[name] :])
    dim = _argument(call, "dim") if name in _OVER_ONE else None
    return source.size[dim] if isinstance(dim, int) else None


def _source(call: Call) -> Value | None:
    source = call.args[0] if call.args else None
    return source if isinstance(source, Value) else None


def _argument(call: Call, name: str) -> Any:
    for place, argument in enumerate(schema_of(call.func).arguments):
        if argument.name == name:
            return call.kwargs.get(name, call.args[place] if place < len(call.args) else argument.default_value)
    return None
