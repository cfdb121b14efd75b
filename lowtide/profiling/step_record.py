"""What one observed step told, before anything is made of it: operators, storages, nodes, layers.

Plain records, written by step_recorder.py, extended by expand.py, read by build_profile.py. No tensor is held.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from lowtide.core.codec import Codec
from lowtide.core.recipe import RetainedInput
from lowtide.recipes.graph import Call, Storage
from lowtide.tensors.view import Shape


@dataclass(slots=True, kw_only=True)
class Node:
    """A storage that a plan may decide about, as it was first saved or caught."""

    storage: Storage
    name: str
    version: int
    saved: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    first_sequence: int = 0
    last_sequence: int = 0
    reads: list[int] = field(default_factory=list)
    release: int = 0
    retained_input: RetainedInput | None = None
    is_given: bool = False
    """On record only because a layer was given it: no recipe starts from it, and none makes it."""
    part: Shape | None = None
    """What of the storage the first saved tensor's version counter speaks for (activations.py)."""
    codec: Codec | None = None
    """The smallest form that holds its bytes."""
    gathered: frozenset[int] = frozenset()
    """Indices of the gathered parameters that were there whenever it was saved or read."""


@dataclass(slots=True, kw_only=True)
class Span:
    """One call of a layer: half-open ranges of forward operators and of autograd's sequence numbers."""

    name: str
    first_op: int
    end_op: int
    first_sequence: int
    end_sequence: int
    inputs: tuple[str, ...] = ()
    """Names of the nodes that the call was given: what a second run of the layer starts from."""
    why_not: str = ""
    """Why the call cannot be run again; empty if it can."""


@dataclass(slots=True, kw_only=True)
class Trace:
    """Everything that one step told. `calls` are the forward's; the columns have one entry for each operator."""

    calls: list[Call]
    op_names: list[str]
    op_seconds: list[float]
    op_sequences: list[int]
    """Of backward operators: number of the autograd node that was running; -1 in forward."""
    num_forward_ops: int
    storages: list[Storage]
    off_device: set[int]
    """Indices of storages that are not on the device that counts."""
    nodes: list[Node]
    """In order of saving."""
    never_read: list[tuple[int, int]]
    """Storages that no plan can move although they were observed as nodes (backward never opened them, or they are
    written in parts), and the operator before which autograd let go of each."""
    staying: dict[int, str]
    """Indices of storages that autograd saved and no plan can move, and why."""
    ambiguous: set[str]
    """Names of nodes that another storage has too: recipes may not start from them."""
    gradients: set[int]
    """Indices of the storages of the parameters' gradients."""
    hidden: list[Storage]
    spans: list[Span]
    start_sequence: int
    """Autograd's sequence number at the start of the model's forward."""
    temporary: list[tuple[int, int]] = field(default_factory=list)
    """(operator, bytes): what an operator, or a compiled part, holds inside of it at its worst moment beyond what it
    gives out."""
    gathered: list[tuple[int, int, int]] = field(default_factory=list)
    """(start, end, bytes): half-open ranges of operators in which a sharded parameter was there as a whole."""
