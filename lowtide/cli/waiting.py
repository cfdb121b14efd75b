"""What a person sees on stderr while something takes longer than a second; and how wide the terminal of stdout is.

What: `Waiting` shows what is going on and for how long: one line that renews itself on a terminal, plain lines in a log
(after 1 s, 10 s, 20 s, ...). Something that is over within a second shows nothing. stdout is never touched.
`width_of_stdout`: a table that is wider than the terminal loses its columns. Where stdout is a pipe or a file, there is
no width: each row stays one line, for `grep` and for other programs.
Cost: one sleeping thread. Not covered: how long it will take; a terminal whose width changes meanwhile.
"""

from __future__ import annotations

import shutil
import sys
import threading
import time

_LEAST = 40
"""A narrower terminal is taken for this wide: no table can be read in it."""


def width_of_stdout() -> int | None:
    """Characters of a line (`COLUMNS` where it is set, as everywhere); None where stdout is no terminal."""
    return max(shutil.get_terminal_size().columns, _LEAST) if sys.stdout.isatty() else None


_FIRST_SECONDS = 1.0
_TERMINAL_SECONDS = 0.5
_LOG_SECONDS = 10.0
_CLEAR = "\r\033[K"


class Waiting:
    """`with Waiting() as waiting: waiting.say("tracing one step"); ...`."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._lock = threading.Lock()
        self._what = ""
        self._start = time.monotonic()
        self._num_shown = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def say(self, what: str) -> None:
        """What is going on from now on."""
        with self._lock:
            if what == self._what:
                return
            self._clear()
            self._what, self._start, self._num_shown = what, time.monotonic(), 0

    def __enter__(self) -> Waiting:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        self._clear()

    def _watch(self) -> None:
        while not self._is_over.wait(0.1):
            with self._lock:
                self._show(time.monotonic() - self._start)

    def _show(self, seconds: float) -> None:
        every = _TERMINAL_SECONDS if self._is_terminal else _LOG_SECONDS
        due = _FIRST_SECONDS if not self._num_shown or self._is_terminal else 0.0
        if not self._what or seconds < due + self._num_shown * every:
            return
        self._num_shown += 1
        elapsed = f" ({seconds:.0f} s)" if self._num_shown > 1 else ""
        text = f"lowtide: {self._what} ...{elapsed}"
        sys.stderr.write(f"{_CLEAR}{text}" if self._is_terminal else f"{text}\n")
        sys.stderr.flush()

    def _clear(self) -> None:
        if self._is_terminal and self._num_shown:
            sys.stderr.write(_CLEAR)
            sys.stderr.flush()
