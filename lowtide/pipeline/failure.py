"""One text in the store of a job: which rank of a pipeline failed first, and where.

What: the rank that fails writes it; the others find it while they wait, and end with it. What is written first stays,
so that all ranks name the same cause, and none names a rank that ended only because another had.
Cost: one look into the store for each `POLL_SECONDS` that a rank waits.
Not covered: a rank that is killed writes nothing. The rank that waited for it sees its connection close, and writes.
"""

from __future__ import annotations

import contextlib
import time

import torch.distributed as dist

from lowtide.tensors.private import default_store

POLL_SECONDS = 0.2
_LINGER_SECONDS = 3.0
"""How long a failed rank stays for the others to read its note: the store may live in its process."""


class FailureNote:
    """Made by all ranks of a pipeline, with the same `place`."""

    def __init__(self, place: str, num_ranks: int) -> None:
        self._store: dist.Store = default_store()
        self._place = place
        self._num_ranks = num_ranks

    def read(self) -> str | None:
        """None: nobody has failed, as far as the store says."""
        try:
            if not self._store.check([self._place]):
                return None
            text: str = self._store.get(self._place).decode()
            self._store.add(f"{self._place}/readers", 1)
            return text
        except RuntimeError:
            return "the rank that holds the job's store is gone"

    def write(self, text: str) -> bool:
        """Whether it is the first one, and stays."""
        try:
            written: bytes = self._store.compare_set(self._place, "", text)
            return written == text.encode()
        except RuntimeError:
            return False  # the store died with its rank; the text is this rank's own last word all the same

    def settle(self, text: str) -> str:
        """The text that stays: this one if it is the first, so that ranks that notice at once tell the same."""
        try:
            kept: str = self._store.compare_set(self._place, "", text).decode()
            if kept != text:
                self._store.add(f"{self._place}/readers", 1)
            return kept
        except RuntimeError:
            return text

    def linger(self) -> None:
        """Stay until all others have read it, or for a moment. For the rank that wrote it."""
        end = time.monotonic() + _LINGER_SECONDS
        with contextlib.suppress(RuntimeError):
            while time.monotonic() < end and self._store.add(f"{self._place}/readers", 0) < self._num_ranks - 1:
                time.sleep(POLL_SECONDS / 4)
