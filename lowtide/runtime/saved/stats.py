"""What a tide did, in numbers.

`Counters` is the runtime's own mutable tally; `Stats` is the frozen snapshot that users see. `Ledger` follows the
bytes of activations that lowtide holds on the device.

Cost: integer additions, and a weak reference for each owner of bytes. Not covered: temporaries inside a running
operator, and activations that a second run makes but its region does not save; on an accelerator the allocator's own
peak is reported instead.
"""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass, fields
from types import SimpleNamespace

from lowtide.engines.base import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Totals since `apply` or the last `reset_stats()`. Bytes are of unique storages, each counted once per graph."""

    saved_bytes: int
    """Activation bytes that plain autograd would have kept: kept + swapped + recomputed + narrowed, without retained
    inputs."""
    kept_bytes: int
    """Bytes that stayed on the device (by plan, by size, or because no tier had room)."""
    swapped_bytes: int
    """Bytes sent to a slower tier."""
    recomputed_bytes: int
    """Bytes dropped, to be recomputed in the backward pass."""
    function_bytes: int
    """Bytes that `autograd.Function`s of recomputed modules keep on `ctx`, where lowtide cannot take them off. They are
    not among the saved ones."""
    narrowed_bytes: int
    """Bytes that exact codecs made unnecessary: what was stored smaller, less the smaller forms, which are kept or
    swapped."""
    retained_input_bytes: int
    """Bytes held only because recipes, or layers that run again, start from them. They are among the kept, swapped or
    recomputed bytes, too."""
    copied_out_bytes: int
    """Bytes really copied away from the device."""
    copied_in_bytes: int
    """Bytes really copied back. Less than copied out where backward found the bytes still on the device."""
    aliased_bytes: int
    """Swapped bytes that something else (a cache, a returned output) kept on the device: swapping freed nothing."""
    peak_device_bytes: int
    """Peak on the device: the allocator's own on an accelerator, else model state plus the ledger of activations, which
    has no temporaries (`tide.audit()` has them)."""
    stall_seconds: float
    """Time that compute waited for copies."""
    num_divergences: int
    """Saved tensors that were not the ones the plan had seen at that place."""
    num_unknown: int
    """Sites that a solved plan does not know, in the forward passes that were observed. They are kept."""
    num_kept_for_lack_of_room: int
    """Sites that should have been swapped, but every tier was full or the write failed."""
    num_forwards: int
    """Forward passes that ran under lowtide's hooks."""
    num_skipped_calls: int
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

    @classmethod
    def nothing(cls) -> Stats:
        """Of a model that has not run yet."""
        return cls(**{field.name: 0 for field in fields(cls)})


class Share(weakref.ref):
    """The bytes of one owner in the ledger, for as long as the owner lives."""

    __slots__ = ("nbytes",)
    nbytes: int


class Ledger:
    """Activation bytes on the device now, and their peak. Units: bytes.

    Bytes belong to owners: handles, sources, copies. When an owner dies, its weak reference is appended to a queue: the
    callback is `deque.append`, C code that neither another thread nor a Ctrl-C can interrupt. (In a finalizer written
    in Python, Python swallows a Ctrl-C, and the rest of it never runs.) The next call subtracts the owner's bytes.

    Cost: a weak reference and two dictionary entries an owner; not yet measured on a quiet machine.
    """

    __slots__ = ("_dead", "_note_death", "_now_bytes", "_shares", "peak_bytes")

    def __init__(self) -> None:
        self._now_bytes = 0
        self.peak_bytes = 0
        """The largest `now_bytes` since `restart_peak`."""
        # A weak reference must be alive itself, or its callback is not called.
        self._shares: dict[int, Share] = {}
        self._dead: deque[Share] = deque()
        self._note_death = self._dead.append

    @property
    def now_bytes(self) -> int:
        """Bytes of all owners that are alive."""
        if self._dead:
            self._settle()
        return self._now_bytes

    def hold(self, owner: object, nbytes: int) -> Share:
        """Count `nbytes` until `owner` dies."""
        share = Share(owner, self._note_death)
        share.nbytes = 0
        self._shares[id(share)] = share
        self.change(share, nbytes)
        return share

    def change(self, share: Share, nbytes: int) -> None:
        """From now on the owner of `share` has `nbytes`."""
        if self._dead:
            self._settle()
        # Nothing comes between these two: Python looks for other threads and signals at calls and jumps only.
        now_bytes = self._now_bytes = self._now_bytes + nbytes - share.nbytes
        share.nbytes = nbytes
        self.peak_bytes = max(self.peak_bytes, now_bytes)

    def restart_peak(self) -> None:
        """Start a new peak from what is there now."""
        self.peak_bytes = self.now_bytes

    def _settle(self) -> None:
        """Subtract the bytes of dead owners, each once, also if it is interrupted or another thread does it too."""
        while self._dead:
            try:
                share = self._dead[0]
                self._now_bytes -= share.nbytes
                share.nbytes = 0
                self._shares.pop(id(share), None)
                self._dead.remove(share)
            except (IndexError, ValueError):
                continue  # another thread was faster


_COMPUTED = frozenset({"saved_bytes", "peak_device_bytes", "num_unknown", "host_bytes", "disk_bytes"})
COUNTED = tuple(field.name for field in fields(Stats) if field.name not in _COMPUTED)
"""Fields of `Stats` that are counted where it happens."""


class Counters(SimpleNamespace):
    """The tally behind `Stats`: an attribute for each name in `COUNTED`."""

    def __init__(self, **counted: float) -> None:
        super().__init__(**dict.fromkeys(COUNTED, 0) | counted)

    def totals(self, engine: Engine, *, peak_bytes: int, since_seconds: float = 0.0, num_unknown: int = 0) -> Stats:
        """What users see. `since_seconds`: the stalls of the engine when this tally began."""
        in_use = engine.memory_in_use()
        counted = dict(vars(self))
        counted["stall_seconds"] += engine.stall_seconds() - since_seconds
        without_plan = self.kept_bytes + self.swapped_bytes + self.recomputed_bytes + self.narrowed_bytes
        return Stats(
            **counted,
            saved_bytes=without_plan - self.retained_input_bytes,
            peak_device_bytes=peak_bytes,
            num_unknown=num_unknown,
            host_bytes=in_use.get("host", 0),
            disk_bytes=in_use.get("disk", 0),
        )

    def reset(self) -> None:
        vars(self).update(dict.fromkeys(COUNTED, 0))
