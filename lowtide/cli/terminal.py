"""How wide the terminal is that stdout goes to.

Why: a table that is wider than the terminal is broken in the middle of words, and its columns are lost. Where stdout is
a pipe or a file, there is no width: each row stays one line, for `grep` and for other programs.
Not covered: a terminal whose width changes while a command prints.
"""

from __future__ import annotations

import shutil
import sys

_LEAST = 40
"""A narrower terminal is taken for this wide: no table can be read in it."""


def width_of_stdout() -> int | None:
    """Characters of a line (`COLUMNS` where it is set, as everywhere); None where stdout is no terminal."""
    return max(shutil.get_terminal_size().columns, _LEAST) if sys.stdout.isatty() else None
