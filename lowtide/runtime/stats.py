"""What a tide did, in numbers.

`Counters` is the runtime's own mutable tally; `Stats` is the frozen snapshot that users see. `Ledger` follows the
bytes of activations that live on the device on lowtide's account.

Cost: integer additions. Not covered: temporaries inside a running operator, and activations made again during a
recompute beyond the bytes that its region saves; on an accelerator the allocator's own peak is reported instead.
"""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Totals since `apply` or the last `reset_stats()`. Bytes are of unique storages, each counted once per graph."""

    saved_bytes: int
    """Activation bytes that plain autograd would have kept: kept + swapped + recomputed, without anchors."""
    kept_bytes: int
    """Bytes that stayed on the device (by plan, by size, or because no tier had room)."""
    swapped_bytes: int
    """Bytes sent to a slower tier."""
    recomputed_bytes: int
    """Bytes dropped, to be made again in the backward pass."""
    anchor_bytes: int
    """Bytes held only because recipes start from them. They are among the kept, swapped or recomputed bytes, too."""
    copied_out_bytes: int
    """Bytes really copied away from the device."""
    copied_in_bytes: int
    """Bytes really copied back. Less than copied out where backward found the bytes still on the device."""
    aliased_bytes: int
    """Swapped bytes that someone else (a cache, a returned output) kept on the device anyway: no saving there."""
    peak_device_bytes: int
    """Peak on the device: the allocator's own on an accelerator; model state plus the ledger of activations else."""
    stall_seconds: float
    """Time that compute waited for copies."""
    num_divergences: int
    """Saved tensors that were not the ones the plan had seen at that place."""
    num_unplanned: int
    """Sites that a solved plan does not know, in the forward passes that were observed. They are kept."""
    num_kept_for_lack_of_room: int
    """Sites that should have been swapped, but every tier was full or the write failed."""
    num_forwards: int
    """Forward passes that ran under lowtide's hooks."""
    num_stepped_aside: int
    """Calls left alone because someone else's checkpoint region was already running around them."""
    num_spills: int
    """Kept sites that were sent away because live bytes came near the limit of `tide.set_limit`."""
    spilled_bytes: int
    """Their bytes; counted as swapped, not as kept."""
    num_over_limit: int
    """Times that live bytes stayed above that mark because nothing was left to spill."""
    num_retries: int
    """Micro-batches that `tide.step` ran again after an out-of-memory error."""
    host_bytes: int
    """Host bytes reserved now."""
    disk_bytes: int
    """Disk bytes reserved now."""


class Ledger:
    """Activation bytes on the device now, and their peak. Units: bytes."""

    __slots__ = ("now_bytes", "peak_bytes")

    def __init__(self) -> None:
        self.now_bytes = 0
        self.peak_bytes = 0

    def add(self, nbytes: int) -> None:
        self.now_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)

    def subtract(self, nbytes: int) -> None:
        self.now_bytes -= nbytes

    def restart_peak(self) -> None:
        self.peak_bytes = self.now_bytes


@dataclass(slots=True)
class Counters:
    """The tally behind `Stats`."""

    aliased_bytes: int = 0
    anchor_bytes: int = 0
    copied_in_bytes: int = 0
    copied_out_bytes: int = 0
    kept_bytes: int = 0
    recomputed_bytes: int = 0
    spilled_bytes: int = 0
    swapped_bytes: int = 0
    num_divergences: int = 0
    num_forwards: int = 0
    num_kept_for_lack_of_room: int = 0
    num_over_limit: int = 0
    num_retries: int = 0
    num_spills: int = 0
    num_stepped_aside: int = 0
    stall_seconds: float = 0.0

    def reset(self) -> None:
        for counter in fields(self):
            setattr(self, counter.name, counter.default)
