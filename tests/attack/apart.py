"""One draw in a process of its own: what kills it, or never ends, is a verdict as well.

Cost: a fork, some 20 ms; importing once what lowtide and torch import late. The calling process must not have run draws
itself: engines have threads, and those do not come along.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal

import scipy.optimize  # noqa: F401
import torch._dynamo
import torch._subclasses.fake_tensor  # noqa: F401

import lowtide.engines.host
import lowtide.mindformers.follow  # noqa: F401
from tests.attack.draw import Draw, Verdict, judge

_WALL_SECONDS = 1800
"""The limit for a draw that waits; one that computes uses up its processor time first."""


def judge_apart(draw: Draw, seconds: int = 60) -> Verdict:
    """`judge(draw)`, whatever it does to its process, within so many seconds of processor time.

    Wall-clock time would call a draw endless on a busy machine.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 10))
        _report(draw, writing)
    os.close(writing)
    try:
        is_ready, _, _ = select.select([reading], [], [], _WALL_SECONDS)
        text = b"".join(iter(lambda: os.read(reading, 65536), b"")) if is_ready else b""
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    if text:
        return Verdict(*json.loads(text))
    if not is_ready:
        return Verdict("no end", f"did not end within {_WALL_SECONDS} s")
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU:
        return Verdict("no end", f"did not end within {seconds} s of a processor")
    return Verdict("killed", f"the process ended with status {status}")


def _report(draw: Draw, writing: int) -> None:
    """In the child: never returns."""
    try:
        verdict = judge(draw)
        os.write(writing, json.dumps([verdict.kind, verdict.detail]).encode())
    finally:
        os._exit(0)
