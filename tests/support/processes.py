"""Processes that begin with torch, transformers and lowtide loaded: `fork` starts some, `program` runs one to its end.

All of a test process are forked from one that has loaded them and done nothing else. A process that must load them
itself takes 4 seconds of a core before it begins. What needs one from its very start, environment included, starts one.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

_FORKS = multiprocessing.get_context("forkserver")
_LOADED = (
    *("torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.pipelining", "scipy.optimize"),
    "transformers.models.llama.modeling_llama",  # one that is not installed is passed over
    # Not the autopilot: a fixed plan must not load it (runtime/autopilot/test_objects_alive.py).
    *("lowtide.runtime.session.apply", "lowtide.planner.plan_profile", "lowtide.pipeline.execute"),
    *("lowtide.mindformers.follow", "lowtide.cli.run_file", "pytest"),
)
GARBAGE_THRESHOLDS = (30_000, 50, 50)
"""For `gc.set_threshold`. With Python's own numbers (700, 10, 10) a tenth of the suite's time goes into looking for
garbage. Tests that ask what is left collect it themselves."""
Process = multiprocessing.context.ForkServerProcess
End = tuple[int | None, str, str]
"""Exit status, none if it had to be ended here, and what was said, on stdout and on stderr."""


def queue() -> Any:
    """For what such processes say."""
    return _FORKS.Queue()


def begin() -> None:
    """The process that the others are forked from is there. The benchmarks have a list of their own, for theirs."""
    _FORKS.set_forkserver_preload(list(_LOADED))
    forkserver.ensure_running()


def fork(function: Callable[..., None], each: list[tuple[Any, ...]]) -> list[Process]:
    """A process for each tuple of arguments, in the folder and with the environment of this one."""
    begin()
    processes = [_FORKS.Process(target=_call, args=(dict(os.environ), function, *args), daemon=True) for args in each]
    for process in processes:
        process.start()
    return processes


def _call(environment: dict[str, str], function: Callable[..., None], *args: Any) -> None:
    gc.freeze()
    gc.set_threshold(*GARBAGE_THRESHOLDS)
    os.environ.clear()
    os.environ.update(environment)
    import torch

    torch.set_num_threads(1)
    function(*args)


def start(code: str, folder: Path, *words: str, name: str = "", **environment: str) -> Process:
    """A program in `folder`; `finish` tells what it said."""
    return fork(_program, [(code, str(folder), words, name, environment)])[0]


def _program(code: str, folder: str, words: tuple[str, ...], name: str, environment: dict[str, str]) -> None:
    os.chdir(folder)
    os.environ.update(environment)
    for number, stream in ((1, "out"), (2, "err")):
        with Path(f"{stream}{name}").open("wb") as file:
            os.dup2(file.fileno(), number)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
    sys.argv = ["-c", *words]
    exec(compile(code, "<program>", "exec"), {"__name__": "__main__"})


def finish(process: Process, folder: Path, seconds: float, name: str = "") -> End:
    """How it ended. It does not outlive this call."""
    process.join(seconds)
    status = process.exitcode
    process.kill()
    process.join()
    return status, (folder / f"out{name}").read_text(), (folder / f"err{name}").read_text()


def program(code: str, folder: Path, *words: str, seconds: float = 120, **environment: str) -> End:
    """Runs one to its end."""
    return finish(start(code, folder, *words, **environment), folder, seconds)
