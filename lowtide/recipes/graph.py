"""The operators of one observed step, as a graph of values on storages.

What: the recorder (profiling/observe_step.py) writes one `Call` for each operator that ran and one `Storage` for each
block of bytes that it saw; the recipe builder (build.py) reads them. Nothing here holds a tensor: a `Value` says how
a tensor viewed a storage, and at which version. So the graph of a step costs no device memory.

Not covered: what the numbers were.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


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
    producer: Call | None = None
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
class Call:
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
    is_random: bool
    is_collective: bool
    temporary_bytes: int = 0
    """What it held while it ran, beyond what it was given and gave out; 0 where nobody counts."""
