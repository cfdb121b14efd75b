"""The result of resolving the two sections: a plan for each layer, with its log lines, notes and warnings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lowtide.mindformers.schema.grid import Table
from lowtide.mindformers.schema.swap import Prefetch


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlan:
    """What happens to one layer. Names are relative to the layer; `<layer>` is the layer as a whole."""

    index: int
    stage: int
    chunk: int
    full_recompute: bool = False
    recompute_ops: list[str] = field(default_factory=list)
    """Empty where the whole layer is recomputed."""
    comm_recompute_ops: list[str] = field(default_factory=list)
    """Operators whose collectives are recomputed."""
    recompute_exclude_ops: list[str] = field(default_factory=list)
    """Operators that are kept although the layer, or a part around them, is recomputed."""
    comm_recompute_exclude_ops: list[str] = field(default_factory=list)
    swap_ops: dict[str, Prefetch] = field(default_factory=dict)
    """Part -> prefetch distance, in the order applied: a later part decides for what it shares with an earlier one."""
    swap_holes: dict[str, list[str]] = field(default_factory=dict)
    """Swapped part -> what in it is recomputed instead."""
    swap_stays: dict[str, str] = field(default_factory=dict)
    """Part of `swap_ops` -> the recomputed part that reads it: it is asked to be swapped, but stays on the device."""
    swap_lost: dict[str, str] = field(default_factory=dict)
    """Part -> why it is not swapped although a rule says so: it is recomputed."""
    why: dict[str, str] = field(default_factory=dict)
    """Recomputed or swapped part, or `<layer>` -> the rule that decides, and where it was written."""
    comm_why: dict[str, str] = field(default_factory=dict)
    """The same for the operators of `comm_recompute_ops`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    """Lists and dicts as JSON has them, so that it can be printed, dumped and compared."""

    num_layers_per_stage: Table
    """`[chunk][stage]`."""
    normalized: dict[str, Any]
    """Counts `[chunk][stage]`; with swap on, layer indices or `True`."""
    layers: list[LayerPlan]
    """Of the whole model, or of one stage of it."""
    log_lines: list[str]
    warnings: list[str]
    notes: list[str]
    """What has no effect here and why; nothing is wrong."""
    prefetch_unit: str = "operators"
    """What a prefetch distance counts: 'operators' of the backward pass, or 'layers'."""
    gathers_again: bool | None = None
    """Sharded parameters of recomputed layers are gathered again in backward; None: the file does not say."""
    slices_inputs: bool = False
    """Recomputed layers keep a slice of their inputs on each tensor-parallel rank."""
