"""A link slower than the one that is there: an engine that copies more than it is asked to.

What: `ThrottledEngine` is an `Engine` around another one. Before each copy it has the same lane copy as many bytes of
padding as make the two take what the copy alone would take on a link of the wanted rate. The rate of the real link is
measured with both directions busy.
Why: a setting published for 25 GB/s is to be compared on a device with 50 GB/s. Copies that take longer are the same
thing to the runtime; nothing of the library is changed for it.
Cost: two scratch buffers of up to 64 MiB on the device and on the next tier, for each direction; the padding takes
bandwidth of the device's memory that a slower link would not take. What is measured with it is an emulation.
Not covered: latency, a link that both directions share, rates above the real one (then nothing is padded, and
`is_slower` is False).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lowtide.core.plan import Plan
from lowtide.engines.base import Engine, Event, Lane, Slot
from lowtide.timeline.step import Link

_PAD_BYTES = tuple(64 * 2**20 >> shift for shift in range(0, 16, 2))
"""64 MiB, 16 MiB, ... 4 KiB: sizes of which a padding is composed."""
_PROBE_BYTES = 64 * 2**20


class ThrottledEngine:
    """`inner` at no more than `bytes_per_second` each way. See the module's text."""

    def __init__(self, inner: Engine, bytes_per_second: float, device: torch.device) -> None:
        self.inner = inner
        # A name of its own: links are remembered by it.
        self.name = f"{inner.name}, at most {bytes_per_second / 1e9:g} GB/s"
        self.device_type = inner.device_type
        self.device = inner.device
        self.caps = inner.caps
        self.tiers = inner.tiers
        self.leftovers = inner.leftovers
        self.bytes_per_second = bytes_per_second
        self.real = inner.probe_bandwidth(_PROBE_BYTES)
        self._owed = {Lane.OUT: 0.0, Lane.IN: 0.0}
        self._shares = {
            Lane.OUT: max(0.0, self.real.out_bytes_per_second / bytes_per_second - 1.0),
            Lane.IN: max(0.0, self.real.in_bytes_per_second / bytes_per_second - 1.0),
        }
        self._pads = {lane: self._scratch(device) if share else [] for lane, share in self._shares.items()}

    @property
    def is_slower(self) -> bool:
        """Whether the real link is faster than what is wanted, in both directions."""
        return all(self._shares.values())

    def _scratch(self, device: torch.device) -> list[tuple[Slot, torch.UntypedStorage]]:
        """Of each size a slot and a buffer, largest first."""
        made = []
        for nbytes in _PAD_BYTES:
            buffer = self.inner.new_buffer(nbytes, device)
            slot = self.inner.allocate(nbytes, self.tiers[0])
            self.inner.wait(Lane.OUT, self.inner.record(Lane.COMPUTE))
            self.inner.copy_out(buffer, slot)  # a slot can be read once it was written
            made.append((slot, buffer))
        self.inner.wait(Lane.COMPUTE, self.inner.record(Lane.OUT))
        return made

    def _pad(self, lane: Lane, nbytes: int) -> None:
        self._owed[lane] += nbytes * self._shares[lane]
        for slot, buffer in self._pads[lane]:
            while self._owed[lane] >= slot.nbytes:
                if lane is Lane.OUT:
                    self.inner.copy_out(buffer, slot)
                else:
                    self.inner.copy_in(slot, buffer)
                self._owed[lane] -= slot.nbytes

    # -- the engine ------------------------------------------------------------------------------------------------

    def copy_out(self, source: torch.UntypedStorage, slot: Slot) -> None:
        # Padding goes first, so that the copy is the lane's last work: events and failures are the copy's.
        self._pad(Lane.OUT, source.nbytes())
        self.inner.copy_out(source, slot)

    def copy_in(self, slot: Slot, target: torch.UntypedStorage) -> None:
        self._pad(Lane.IN, target.nbytes())
        self.inner.copy_in(slot, target)

    def probe_bandwidth(self, nbytes: int) -> Link:
        """The real link's, and never more than what is wanted."""
        real = self.inner.probe_bandwidth(nbytes)
        return Link(
            out_bytes_per_second=min(real.out_bytes_per_second, self.bytes_per_second),
            in_bytes_per_second=min(real.in_bytes_per_second, self.bytes_per_second),
        )

    def allocate(self, nbytes: int, tier: str) -> Slot:
        return self.inner.allocate(nbytes, tier)

    def allocate_visible(self, nbytes: int, tier: str) -> tuple[Slot, torch.Tensor]:
        return self.inner.allocate_visible(nbytes, tier)

    def part_of(self, slot: Slot, start_bytes: int, nbytes: int) -> Slot:
        return self.inner.part_of(slot, start_bytes, nbytes)

    def free(self, slot: Slot) -> None:
        self.inner.free(slot)

    def new_buffer(self, nbytes: int, device: torch.device) -> torch.UntypedStorage:
        return self.inner.new_buffer(nbytes, device)

    def compute_stream(self) -> Any:
        return self.inner.compute_stream()

    def record(self, lane: Lane) -> Event:
        return self.inner.record(lane)

    def wait(self, lane: Lane, event: Event) -> float:
        return self.inner.wait(lane, event)

    def query(self, event: Event) -> bool:
        return self.inner.query(event)

    def failure(self, event: Event) -> BaseException | None:
        return self.inner.failure(event)

    def cancel(self, event: Event) -> bool:
        return self.inner.cancel(event)

    def memory_in_use(self) -> Mapping[str, int]:
        scratch = sum(slot.nbytes for pads in self._pads.values() for slot, _ in pads)
        in_use: dict[str, Any] = dict(self.inner.memory_in_use())
        in_use[self.tiers[0]] = in_use.get(self.tiers[0], 0) - scratch
        return in_use

    def mark_time(self) -> Event | None:
        return self.inner.mark_time()

    def seconds_between(self, start: Event, end: Event) -> float | None:
        return self.inner.seconds_between(start, end)

    def is_capturing(self) -> bool:
        return self.inner.is_capturing()

    def device_bytes(self) -> int | None:
        return self.inner.device_bytes()

    def device_peak_bytes(self) -> int | None:
        return self.inner.device_peak_bytes()

    def reset_device_peak(self) -> None:
        self.inner.reset_device_peak()

    def stall_seconds(self) -> float:
        return self.inner.stall_seconds()

    def another(self, plan: Plan) -> Engine:
        """One without the padding: what is measured is the link of activations."""
        return self.inner.another(plan)

    def close(self) -> None:
        self.inner.close()
