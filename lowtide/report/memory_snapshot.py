"""A step as a memory snapshot: the pickle that PyTorch's viewer (pytorch.org/memory_viz) opens, from a plan alone.

What: `snapshot` writes the predicted step of a plan, or of several, as `torch.cuda.memory._snapshot()` would have
recorded it: an `alloc` and a `free` for each activation when it comes and goes, with its name and fate in place of a
stack. Model state, gradients and temporaries, of which only sums are known, are blocks that are stacked: what comes
last goes first. No device and no run is needed. Format: `torch/cuda/memory.py` of torch 2.13.
Exact: after the events of each tick, the allocated bytes are those of the plan's curve; in between they are never more.
Addresses are made up (the smallest hole that fits), so what the viewer says of fragmentation means nothing.
Cost: some microseconds and 100 bytes an event. Not covered: what really ran; torch records that itself on CUDA.
"""

from __future__ import annotations

import pickle
from bisect import insort
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from lowtide.report.played_step import OWNERS, Played

PROTOCOL = 4
"""The viewer reads 2 to 4."""
_BASE = 1 << 40
_UNNAMED = "state, gradients, temporaries: sum"
_WORDS = ("optimizer state, while here", "kept", "swapped, while here", "recomputed, while here")
Frames = list[dict[str, Any]]


def snapshot(steps: Sequence[Played]) -> dict[str, Any]:
    """The document. Each step is a device of its own: rank 0 is device 0."""
    devices = [_Device(number, played) for number, played in enumerate(steps)]
    return {"segments": [device.segment() for device in devices], "device_traces": [d.trace() for d in devices]}


def to_bytes(document: dict[str, Any]) -> bytes:
    """As the file that the viewer opens, and `pickle.load`."""
    return pickle.dumps(document, protocol=PROTOCOL)


class _Device:
    """One step, on addresses of its own."""

    def __init__(self, number: int, played: Played) -> None:
        self._number = number
        self._room = _Room()
        self._events: list[dict[str, Any]] = []
        self._live: dict[int, tuple[int, Frames]] = {}
        """Address -> bytes and their owner."""
        self._unnamed: list[tuple[int, int]] = []
        """Addresses and bytes of what has no name, the newest last."""
        self._play(played)

    def trace(self) -> list[dict[str, Any]]:
        first = {"action": "segment_alloc", "addr": _BASE, "size": self._room.end, "stream": 0, "frames": []}
        # The viewer adds this category by itself where it is missing, and some versions of it fail there.
        return [{**first, "time_us": 0, "category": "unknown"}, *self._events]

    def segment(self) -> dict[str, Any]:
        """What is on the device when the step is over."""
        blocks: list[dict[str, Any]] = []
        at = 0
        for address, (nbytes, frames) in sorted(self._live.items()):
            if address > at:
                blocks.append(_block(at, address - at, "inactive", []))
            blocks.append(_block(address, nbytes, "active_allocated", frames))
            at = address + nbytes
        if at < self._room.end:
            blocks.append(_block(at, self._room.end - at, "inactive", []))
        allocated = sum(nbytes for nbytes, _ in self._live.values())
        return {
            "device": self._number,
            "address": _BASE,
            "total_size": self._room.end,
            "allocated_size": allocated,
            "active_size": allocated,
            "requested_size": allocated,
            "stream": 0,
            "segment_type": "large",
            "segment_pool_id": (0, 0),
            "is_expandable": False,
            "frames": [],
            "blocks": blocks,
        }

    def _play(self, played: Played) -> None:
        coming, going = defaultdict(list), defaultdict(list)
        named = [0] * (len(played.starts) + 1)
        for number, block in enumerate(played.blocks):
            coming[block.start].append(number)
            going[block.end].append(number)
            for tick in range(block.start, block.end) if block.owner == 0 else ():
                named[tick] += block.nbytes
        others = _others(played, named)
        address_of: dict[int, int] = {}
        for tick, start in enumerate((*played.starts, played.step_seconds)):
            for number in going[tick]:
                self._free(address_of.pop(number), start)
            if tick == len(played.starts):
                break
            self._level(others[tick], start, _frames(_UNNAMED, tick, played.curve.num_forward_ticks))
            for number in coming[tick]:
                block = played.blocks[number]
                frames = _frames(block.name, tick, played.curve.num_forward_ticks, _WORDS[block.owner])
                address_of[number] = self._alloc(block.nbytes, start, frames, OWNERS[block.owner])

    def _level(self, wanted: int, start: float, frames: Frames) -> None:
        """Bring what has no name to so many bytes."""
        have = sum(nbytes for _, nbytes in self._unnamed)
        while have > wanted:
            address, nbytes = self._unnamed.pop()
            self._free(address, start)
            have -= nbytes
        if wanted > have:
            address = self._alloc(wanted - have, start, frames, OWNERS[0])
            self._unnamed.append((address, wanted - have))

    def _alloc(self, nbytes: int, start: float, frames: Frames, category: str) -> int:
        address = self._room.take(nbytes)
        self._live[address] = (nbytes, frames)
        self._note("alloc", address, start, category=category)
        return address

    def _free(self, address: int, start: float) -> None:
        for action in ("free_requested", "free_completed"):
            self._note(action, address, start)
        nbytes, _ = self._live.pop(address)
        self._room.give_back(address, nbytes)

    def _note(self, action: str, address: int, start: float, **more: str) -> None:
        nbytes, frames = self._live[address]
        self._events.append(
            {
                "action": action,
                "addr": _BASE + address,
                "size": nbytes,
                "stream": 0,
                "frames": frames,
                "time_us": round(start * 1e6),
                **more,
            }
        )


class _Room:
    """Addresses from 0 up: the smallest hole that fits, or the end."""

    def __init__(self) -> None:
        self.end = 0
        self._holes: list[tuple[int, int]] = []
        """(start, bytes), by start; no two touch."""

    def take(self, nbytes: int) -> int:
        fitting = [hole for hole in self._holes if hole[1] >= nbytes]
        if not fitting:
            self.end += nbytes
            return self.end - nbytes
        start, size = hole = min(fitting, key=lambda hole: (hole[1], hole[0]))
        self._holes.remove(hole)
        if size > nbytes:
            insort(self._holes, (start + nbytes, size - nbytes))
        return start

    def give_back(self, start: int, nbytes: int) -> None:
        for hole in [hole for hole in self._holes if hole[0] + hole[1] == start or start + nbytes == hole[0]]:
            self._holes.remove(hole)
            start, nbytes = min(start, hole[0]), nbytes + hole[1]
        insort(self._holes, (start, nbytes))


def _others(played: Played, named: Sequence[int]) -> list[int]:
    """In each tick, bytes that are in no block: state, gradients, temporaries, and what recipes need while they run."""
    recomputed = [0] * (len(played.starts) + 1)
    for block in played.blocks:
        if block.owner == len(OWNERS) - 1:
            recomputed[block.start] += block.nbytes
            recomputed[block.end] -= block.nbytes
    others, made = [], 0
    for tick, state in enumerate(played.bytes_by_owner[0]):
        made += recomputed[tick]
        others.append(state - named[tick] + played.bytes_by_owner[-1][tick] - made)
    assert min(others, default=0) >= 0
    return others


def _frames(name: str, tick: int, num_forward_ticks: int, what: str = "") -> Frames:
    """Lines in place of a stack: the operator that was running, the owner of the bytes, and what the plan does."""
    is_forward = tick < num_forward_ticks
    file = "forward" if is_forward else "backward"
    line = tick if is_forward else tick - num_forward_ticks
    return [{"filename": file, "line": line, "name": each} for each in (name, what) if each]


def _block(address: int, nbytes: int, state: str, frames: Frames) -> dict[str, Any]:
    return {
        "address": _BASE + address,
        "size": nbytes,
        "requested_size": nbytes,
        "state": state,
        "frames": frames,
    }
