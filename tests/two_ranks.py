"""Two real ranks on this machine: `run` has two processes of a gloo group run the same functions one after the other,
`start` the same program.

The ranks of all tests of a process are forked from one that has loaded torch and transformers and done nothing else:
a rank that must load them itself takes 4 seconds of a core before it begins.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import importlib
import json
import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

Job = tuple[str, dict[str, Any]]
"""Name of a function of the module, and keyword arguments beside `rank`. It gives back what can be pickled."""
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    [
        *("torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.pipelining", "scipy.optimize"),
        "transformers.models.llama.modeling_llama",  # one that is not installed is passed over
    ]
)
Process = multiprocessing.context.ForkServerProcess


def fork(function: Callable[..., None], each: list[tuple[Any, ...]]) -> list[Process]:
    """A process for each tuple of arguments, in the folder and with the environment of this one."""
    processes = [_FORKS.Process(target=_call, args=(dict(os.environ), function, *args), daemon=True) for args in each]
    for process in processes:
        process.start()
    return processes


def _call(environment: dict[str, str], function: Callable[..., None], *args: Any) -> None:
    os.environ.clear()
    os.environ.update(environment)
    gc.freeze()
    import torch

    torch.set_num_threads(1)
    function(*args)


def queue() -> Any:
    """For what such processes say."""
    return _FORKS.Queue()


def run(module: str, jobs: list[Job], folder: Path, seconds: float = 120) -> list[tuple[Any, Any]]:
    """What each job gave on rank 0 and on rank 1. Whatever happens, no process outlives this call."""
    answers = queue()
    collected: dict[tuple[int, int], Any] = {}
    ranks = fork(_rank, [(rank, str(folder), module, jobs, answers) for rank in (0, 1)])
    try:
        while len(collected) < 2 * len(jobs):
            rank, number, answer, error = answers.get(timeout=seconds)
            assert error is None, f"rank {rank}, {jobs[number]}:\n{error}"
            collected[rank, number] = answer
        return [(collected[0, number], collected[1, number]) for number in range(len(jobs))]
    finally:
        for process in ranks:
            process.join(5)
            process.kill()


def _rank(rank: int, folder: str, module: str, jobs: list[Job], answers: Any) -> None:
    import torch

    os.environ["XDG_CACHE_HOME"] = folder
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60)
    )
    functions = importlib.import_module(module)
    for number, (name, arguments) in enumerate(jobs):
        try:
            answers.put((rank, number, getattr(functions, name)(rank=rank, **arguments), None))
        except BaseException:
            answers.put((rank, number, None, traceback.format_exc()))
            raise
    with contextlib.suppress(RuntimeError):
        torch.distributed.destroy_process_group()


def start(code: str, folder: Path) -> list[Process]:
    """A program, twice, in `folder`, with the environment that torch.distributed reads; `finish` tells what it said.
    `MORE_PORTS` has six ports for groups that follow one another."""
    with contextlib.ExitStack() as stack:
        # All are asked for before the first is given back, so they differ.
        sockets = [stack.enter_context(socket.socket()) for _ in range(7)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        port, *more_ports = [str(each.getsockname()[1]) for each in sockets]
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "MORE_PORTS": " ".join(more_ports)}
    return fork(_program, [(rank, str(folder), group, code) for rank in (0, 1)])


def _program(rank: int, folder: str, group: dict[str, str], code: str) -> None:
    os.chdir(folder)
    os.environ.update(group, RANK=str(rank), LOCAL_RANK=str(rank), OMP_NUM_THREADS="1")
    for number, name in ((1, "out"), (2, "err")):
        with Path(f"{name}{rank}").open("wb") as file:
            os.dup2(file.fileno(), number)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
    exec(compile(code, "<program>", "exec"), {"__name__": "__main__"})


def finish(ranks: list[Process], folder: Path, seconds: float = 120) -> list[tuple[int | None, str, str]]:
    """Exit status, none if it had to be ended here, and what was said, on stdout and on stderr, of each.
    No process outlives this call."""
    ends: list[tuple[int | None, str, str]] = []
    for rank, process in enumerate(ranks):
        process.join(seconds)
        status = process.exitcode
        process.kill()
        process.join()
        said = [(folder / f"{name}{rank}").read_text() for name in ("out", "err")]
        ends.append((status, said[0], said[1]))
    return ends


def answers(code: str, folder: Path, seconds: float = 240) -> list[Any]:
    """The JSON in the last line that each of the two printed; both must end well."""
    ends = finish(start(code, folder), folder, seconds)
    assert [status for status, _, _ in ends] == [0, 0], ends
    return [json.loads(out.splitlines()[-1]) for _, out, _ in ends]
