"""The logger `lowtide`: one line at each observed step, one for each plan, one for each change that makes another.

What: lines are records of level INFO, as those of any library, so a program that configures `logging` has them.
`Listener` passes them on without that, as adapters and the reference trainer do.
Cost: none where no handler listens. Not covered: which of several models a line is about.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

LOG = logging.getLogger("lowtide")


class Listener(logging.Handler):
    """Passes each line on to `hear`, from `Listener(...)` to `close()`. Also a context manager."""

    def __init__(self, hear: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self._hear = hear
        self._level_before = LOG.level
        if not LOG.isEnabledFor(logging.INFO):
            LOG.setLevel(logging.INFO)
        LOG.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self._hear(record.getMessage())

    def close(self) -> None:
        """Listen no more. Idempotent."""
        if self in LOG.handlers:
            LOG.removeHandler(self)
            if not any(isinstance(each, Listener) for each in LOG.handlers):
                LOG.setLevel(self._level_before)
        super().close()

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
