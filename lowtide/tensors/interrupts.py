"""To put something back, whatever interrupts it.

What: `to_the_end(undo)` calls a function that may be called again until it has come to its end. A Ctrl-C that fell
into it is raised then.
Why: Python raises KeyboardInterrupt between any two calls, in a `finally` too, and a half of what was to be put back
would be missing.
Cost: one call. Not covered: a Ctrl-C at the very entry of this function, or between its last lines.
"""

from __future__ import annotations

from collections.abc import Callable


def to_the_end(undo: Callable[[], None]) -> None:
    """`undo()`, to its end. Raises what it raises; a KeyboardInterrupt only after it."""
    late: KeyboardInterrupt | None = None
    is_over = False
    while not is_over:
        try:
            undo()
            is_over = True
        except KeyboardInterrupt as interrupt:
            late = interrupt
    if late is not None:
        raise late
