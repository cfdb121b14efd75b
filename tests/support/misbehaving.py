"""Workers for the tests of benchmarks/children.py that do what a child must not do."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any


def start(arguments: Mapping[str, Any]) -> dict[str, Callable[[], dict[str, Any]]]:
    """Orders that answer, raise, hang or kill their process; `fails_at_once` raises here."""
    if arguments.get("fails_at_once"):
        raise ValueError("first line\nsecond line")
    return {"ready": lambda: {"process": os.getpid()}, "step": lambda: {"seconds": 0.5}, "raise": _raise, "hang": _hang,
            "die": _die}  # fmt: skip


def _raise() -> dict[str, Any]:
    raise RuntimeError("it broke")


def _hang() -> dict[str, Any]:
    time.sleep(60)
    return {}


def _die() -> dict[str, Any]:
    os.kill(os.getpid(), signal.SIGKILL)
    return {}
