"""The operators of one observed step, as a graph of values on storages.

What: the recorder (profiling/step_recorder.py) writes one `OpCall` for each operator that ran and one `Storage` for
each block of bytes that it saw; the recipe builder (build.py) reads them. Nothing here holds a tensor: a `Value` says
how a tensor viewed a storage, and at which version. So the graph of a step costs no device memory.

`index_limit` says below what the indices are that a max-pool, a sort or a maximum over one dimension gives out: places
in the plane or the dimension that it looked at. It follows from the operator's definition and not from values, so int64
indices may be stored in fewer bytes without a look at them (tensors/codecs.py), on an accelerator too.

Not covered: what the numbers were; limits of indices that something wrote to after they were made, of masked or shifted
ones, and of those that came with the batch (token ids): they may be others in the next step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

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
    dim = call.argument("dim") if name in _OVER_ONE else None
    return source.size[dim] if isinstance(dim, int) else None


def _source(call: OpCall) -> Value | None:
    source = call.args[0] if call.args else None
    return source if isinstance(source, Value) else None


@dataclass(slots=True)
class Storage:
    """One block of bytes, from its first sight to its death. Addresses are reused; indices are not."""

    index: int
    nbytes: int
    dtype: torch.dtype
    """Of the first tensor seen on it."""
    name: str
    """`model.layers.3.mlp.mul`; unique within the step. Of parameters and buffers: their dotted name."""
    kind: str
    """'made' by an operator, 'parameter', 'buffer', 'input' (there before the step), 'replaced' (a buffer when the
    step began, whose name means another tensor since), 'unknown' (first seen as an argument: something made it that
    the dispatch mode did not see)."""
    producer: OpCall | None = None
    born: int = -1
    """Index of the operator that made it; -1 if it was there before the step."""
    dies: int | None = None
    """Index of the first operator that ran after its memory was freed; None while it lives."""
    num_writes: int = 0
    """In-place writes after it was made."""
    is_parameter_cast: bool = False
    """A cast or copy of parameters only: not an activation."""
    is_gathered: bool = False
    """A parameter that FSDP2 gathers for a while: the storage is empty at other times."""


@dataclass(slots=True, frozen=True)
class Value:
    """A tensor, without the tensor."""

    storage: Storage = field(repr=False)
    version: int
    """`storage.num_writes` when it was seen."""
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    is_plain: bool = True
    """False for conjugate or negative views and for tensor subclasses: those take no part in recipes."""


@dataclass(slots=True)
class OpCall:
    """One operator that ran. In `args` and `kwargs` every tensor is replaced by its `Value`."""

    index: int
    func: Any
    """A `torch._ops.OpOverload`."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[Value | None, ...]
    """The flattened outputs; None for what is no tensor."""
    name: str
    seconds: float
    is_collective: bool
    temporary_bytes: int = 0
    """What it held while it ran, beyond what it was given and gave out; 0 where nobody counts."""

    def argument(self, name: str) -> Any:
        """The argument that the operator's schema calls `name`, or its default; None if the schema has none."""
        for place, argument in enumerate(schema_of(self.func).arguments):
            if argument.name == name:
                return self.kwargs.get(name, self.args[place] if place < len(self.args) else argument.default_value)
        return None
