"""A lock that finalizers can look at before they take it."""

from __future__ import annotations

import threading


class Lock:
    """A re-entrant lock that can say whether anyone holds it."""

    __slots__ = ("_lock", "depth")

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.depth = 0

    def __enter__(self) -> None:
        self._lock.acquire()
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1
        self._lock.release()
