"""What one step held on the device over time, as it was counted after each operator.

What: `MeasuredCurve` stands beside the curve that a plan predicts. `tide.audit()` records it; a report draws it.
Not covered: who owned the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """One layer in a forward and backward pass. Seconds."""

    name: str
    begins: float
    """Its forward pass."""
    ends: float
    """Its backward pass: what comes before the layer is next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCurve:
    """Bytes on the device after each operator of one forward and backward pass."""

    seconds: tuple[float, ...]
    """When each operator was over, since the first one was. Counting makes steps longer: compare shares, not times."""
    nbytes: tuple[int, ...]
    num_forward: int
    """Number of samples of the forward pass and the loss; the rest are of the backward pass. Both are at least 1."""
    layers: tuple[LayerTimes, ...] = ()
    """Layers that were called once, in order: they say which part of the curve belongs to which layer."""
