"""What one rank of a pipeline did in a step, and when: computing, waiting, sending, receiving; and its memory.

What: `StepLog` is given to a `Pipeline`, which notes each action in it when it is over. `spans` gives them as events of
the lanes 'forward', 'backward' (or its two parts, 'input gradient' and 'weight gradient'), 'pair', 'wait', 'send' and
'receive'. Times are seconds on this rank's clock; `shifted` puts them on that of all ranks, which meet once a step.
How: on the CPU the host's clock. On a device what computes is timed by events of its stream, which are read after the
step; waits and messages are the host's.
Cost: two looks at a clock for each action, one at the memory; not yet measured on a GPU. Not covered: what runs when
inside of an action, and of a pair whose halves take turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from lowtide.pipeline.schedule import AnyAction, Kind, Pair
from lowtide.timeline.events import Event

LANES = ("forward", "backward", "input gradient", "weight gradient", "pair", "wait", "send", "receive")
_LANE_OF = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "input gradient",
    Kind.BACKWARD_WEIGHT: "weight gradient",
}
Mark = Any
"""A moment: seconds of the host's clock, or an event of the device."""


class StepLog:
    """The last step of one rank."""

    def __init__(self, device: torch.device, memory_bytes: Callable[[], int | None] = lambda: None) -> None:
        """memory_bytes: what is on the device now, or None where nobody knows; asked after each action."""
        self._device = device
        self._memory_bytes = memory_bytes
        self.clear()

    def clear(self) -> None:
        """A step begins."""
        self._noted: list[tuple[str, str, Mark, Mark]] = []
        self._memory: list[tuple[float, int]] = []
        self._origin = self.mark()
        self._origin_seconds = time.perf_counter()

    def mark(self) -> Mark:
        """Now, for what computes."""
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def computed(self, action: AnyAction, start: Mark) -> None:
        """`action` began at `start` and is over, as far as the host can see."""
        lane = "pair" if isinstance(action, Pair) else _LANE_OF[action.kind]
        self._noted.append((lane, str(action), start, self.mark()))
        found = self._memory_bytes()
        if found is not None:
            self._memory.append((time.perf_counter(), found))

    def passed(self, lane: str, name: str, start: float, end: float) -> None:
        """A wait or a message, by the host's clock. Called by several threads."""
        self._noted.append((lane, name, start, end))

    def spans(self) -> list[Event]:
        """By start. Waits for the device."""
        found = [
            Event(lane=lane, name=name, start=self._seconds(start), end=self._seconds(end))
            for lane, name, start, end in list(self._noted)
        ]
        return sorted(found, key=lambda event: (event.start, event.end))

    def memory(self) -> list[tuple[float, int]]:
        """Seconds and bytes, after each action."""
        return list(self._memory)

    def _seconds(self, mark: Mark) -> float:
        if isinstance(mark, float):
            return mark
        mark.synchronize()
        return self._origin_seconds + self._origin.elapsed_time(mark) / 1e3


def shifted(
    spans: list[Event], memory: list[tuple[float, int]], origin: float
) -> tuple[list[Event], list[tuple[float, int]]]:
    """The same on a clock that shows 0 at `origin`."""
    return (
        [Event(lane=e.lane, name=e.name, start=e.start - origin, end=e.end - origin) for e in spans],
        [(seconds - origin, found) for seconds, found in memory],
    )
