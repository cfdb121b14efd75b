"""Leaving a run: signals that ask it to stop, and the error that ends it.

What: `StopRequest` turns the first SIGTERM or SIGINT into a note that the loop reads between two steps. The loop then
saves a checkpoint and leaves with status 143 (SIGTERM) or 130 (SIGINT), as a shell reports these signals, so that a
scheduler can tell "stopped, resumable" from "finished" (0), "failed" (1) and "wrong settings" (2).
Why: a signal in the middle of a step must not leave half a step behind.
Not covered: a step that never ends. A second Ctrl-C ends the process at once, without saving; a second SIGTERM changes
nothing, because schedulers and launchers send several.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Self

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class TrainingError(RuntimeError):
    """The run cannot go on (not the user's settings, not our bug). One message; exit status 1."""


class StopRequest:
    """While entered, notes the first of `SIGNALS` in `asked` instead of letting it end the process.

    Signal handlers belong to the main thread; entered from another one, this does nothing.
    """

    def __init__(self) -> None:
        self.asked: signal.Signals | None = None
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.asked is signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        if self.asked is None:
            self.asked = signal.Signals(number)
            # os.write, because print is not safe to call inside a signal handler
            os.write(
                2,
                f"lowtide: {self.asked.name}: finishing this step, then saving (Ctrl-C twice: end at once)\n".encode(),
            )


def exit_status(asked: signal.Signals) -> int:
    """143 for SIGTERM, 130 for SIGINT."""
    return 128 + asked
