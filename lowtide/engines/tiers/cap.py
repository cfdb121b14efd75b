"""How many bytes of a tier may be reserved: by one engine, or by several that share what a user allows.

What: `Cap` counts what is taken. Why: one plan may have two engines, one for activations and one for the optimizer's
state, and a budget of the host is meant for both.
Cost: a lock for each slab or file range. Not covered: engines that know nothing of each other.
"""

from __future__ import annotations

import threading


class Cap:
    """See the module's text. `most_bytes`: None = as many as there are. Thread-safe."""

    def __init__(self, most_bytes: int | None) -> None:
        assert most_bytes is None or most_bytes >= 0
        self.most_bytes = most_bytes
        self.taken_bytes = 0
        self._lock = threading.Lock()

    @property
    def room_bytes(self) -> int | None:
        """What may be taken beyond what is."""
        return None if self.most_bytes is None else max(0, self.most_bytes - self.taken_bytes)

    def take(self, nbytes: int) -> bool:
        """Whether there was room for `nbytes`, which are taken then."""
        with self._lock:
            if self.most_bytes is not None and self.taken_bytes + nbytes > self.most_bytes:
                return False
            self.taken_bytes += nbytes
            return True

    def give(self, nbytes: int) -> None:
        """Give back what was taken."""
        with self._lock:
            self.taken_bytes -= nbytes
            assert self.taken_bytes >= 0
