"""The accelerator engine with one mistake each: what the stand-in and its order proof must notice."""

from __future__ import annotations

import torch

from lowtide.engines.accelerator import AcceleratorEngine, Mark
from lowtide.engines.base import Lane, Slot
from lowtide.engines.device_ops import TorchDevice
from tests.standin import device

HERE = torch.device(device.NAME, 0)
MIB = 2**20


class Mutant(AcceleratorEngine):
    """No mistake. Notes which lane waited for which."""

    is_in_the_bytes = True
    """Whether late copies alone make a number wrong; else only the clocks show it, since computation is never late."""

    def __init__(self, ops: TorchDevice | None = None) -> None:
        super().__init__(HERE, 64 * MIB, ops=ops)
        self.waits: set[tuple[Lane, Lane]] = set()

    def wait(self, lane: Lane, event: Mark) -> float:
        self.waits.add((lane, event.lane))
        return super().wait(lane, event)


def _forgetful(waiting: Lane, awaited: Lane) -> type[Mutant]:
    class Forgetful(Mutant):
        def wait(self, lane: Lane, event: Mark) -> float:
            return 0.0 if (lane, event.lane) == (waiting, awaited) else super().wait(lane, event)

    Forgetful.__name__ = f"{waiting.value} forgets {awaited.value}"
    return Forgetful


class EarlyReuse(Mutant):
    """Says that a copy out is complete as soon as it was asked for: its source and its slot are reused."""

    def query(self, event: Mark) -> bool:
        return True


class WrongLane(Mutant):
    """Copies in run on the stream of the copies out, and the event is recorded on their own."""

    def copy_in(self, slot: Slot, target: torch.UntypedStorage) -> None:
        self._lanes[Lane.IN].stream, self._lanes[Lane.OUT].stream = (self._out, self._in)
        try:
            super().copy_in(slot, target)
        finally:
            self._lanes[Lane.IN].stream, self._lanes[Lane.OUT].stream = (self._in, self._out)

    def __init__(self) -> None:
        super().__init__()
        self._in, self._out = self._lanes[Lane.IN].stream, self._lanes[Lane.OUT].stream


class _OneStream(TorchDevice):
    """Takes for the compute stream one that nothing runs on."""

    def current_stream(self) -> torch.Stream:
        if not hasattr(self, "_taken"):
            self._taken = torch.Stream(self.device)
        return self._taken


class WrongStream(Mutant):
    """Orders its copies after a stream on which the model does not run."""

    def __init__(self) -> None:
        super().__init__(_OneStream(HERE))


class _AnyIndex:
    """Equal to every device of its type."""

    type, index = HERE.type, None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, torch.device) and other.type == self.type

    __hash__ = None  # type: ignore[assignment]


class WrongDevice(Mutant):
    """Has its lanes on the first device, and takes what both save."""

    is_in_the_bytes = False

    def __init__(self) -> None:
        super().__init__()
        self.device = _AnyIndex()  # type: ignore[assignment]


MUTANTS: list[type[Mutant]] = [
    _forgetful(Lane.OUT, Lane.COMPUTE),
    _forgetful(Lane.IN, Lane.COMPUTE),
    _forgetful(Lane.IN, Lane.OUT),
    _forgetful(Lane.COMPUTE, Lane.IN),
    _forgetful(Lane.COMPUTE, Lane.OUT),
    EarlyReuse,
    WrongLane,
    WrongStream,
    WrongDevice,
]
