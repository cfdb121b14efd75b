"""Two real ranks on this machine: `run` has two processes of a gloo group run the same functions one after the other,
`start` the same program."""

from __future__ import annotations

import contextlib
import datetime
import functools
import importlib
import json
import os
import random
import socket
import traceback
from pathlib import Path
from typing import Any

from tests.support import processes
from tests.support.processes import Process

Job = tuple[str, dict[str, Any]]
"""Name of a function of the module, and keyword arguments beside `rank`. It gives back what can be pickled."""


def run(
    module: str,
    jobs: list[Job],
    folder: Path,
    seconds: float = 240,
    *,
    num_ranks: int = 2,
    killed: frozenset[int] = frozenset(),
) -> list[tuple[Any, ...]]:
    """What each job gave, by rank; `killed` ranks end themselves, and give None. No process outlives this call."""
    answers = processes.queue()
    collected: dict[tuple[int, int], Any] = {}
    what = {"num_ranks": num_ranks, "folder": str(folder), "module": module, "jobs": jobs, "answers": answers}
    ranks = processes.fork(functools.partial(_rank, **what), [(rank,) for rank in range(num_ranks)])
    try:
        while len(collected) < (num_ranks - len(killed)) * len(jobs):
            rank, number, answer, error = answers.get(timeout=seconds)
            assert error is None, f"rank {rank}, {jobs[number]}:\n{error}"
            collected[rank, number] = answer
        return [tuple(collected.get((rank, number)) for rank in range(num_ranks)) for number in range(len(jobs))]
    finally:
        for process in ranks:
            process.join(5)
            process.kill()


def _rank(rank: int, *, num_ranks: int, folder: str, module: str, jobs: list[Job], answers: Any) -> None:
    import torch

    os.environ["XDG_CACHE_HOME"] = folder
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store, timeout = f"file://{folder}/store", datetime.timedelta(seconds=120)
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=num_ranks, timeout=timeout)
    functions = importlib.import_module(module)
    for number, (name, arguments) in enumerate(jobs):
        try:
            answers.put((rank, number, getattr(functions, name)(rank=rank, **arguments), None))
        except BaseException:
            answers.put((rank, number, None, traceback.format_exc()))
            raise
    with contextlib.suppress(RuntimeError):
        torch.distributed.destroy_process_group()


def start(code: str, folder: Path, num_ranks: int = 2) -> list[Process]:
    """A program, once for each rank, in `folder`, with the environment that torch.distributed reads; `finish` tells
    what it said. `MORE_PORTS` has six ports for groups that follow one another."""
    port, *more_ports = map(str, _free_ports(7))
    group = {
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "MORE_PORTS": " ".join(more_ports),
    }
    return [
        processes.start(code, folder, name=str(rank), RANK=str(rank), LOCAL_RANK=str(rank), **group)
        for rank in range(num_ranks)
    ]


def _free_ports(number: int) -> list[int]:
    """Below those that a system gives out by itself: the ranks' own connections would take one before its turn."""
    found: list[int] = []
    with contextlib.ExitStack() as stack:
        for port in random.SystemRandom().sample(range(10_000, 30_000), 200):
            each = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                each.bind(("127.0.0.1", port))
                found.append(port)
            if len(found) == number:
                return found
    raise AssertionError("no free ports")


def finish(ranks: list[Process], folder: Path, seconds: float = 120) -> list[processes.End]:
    """How each ended. No process outlives this call."""
    return [processes.finish(process, folder, seconds, str(rank)) for rank, process in enumerate(ranks)]


def answers(code: str, folder: Path, seconds: float = 240) -> list[Any]:
    """The JSON in the last line that each of the two printed; both must end well."""
    ends = finish(start(code, folder), folder, seconds)
    assert [status for status, _, _ in ends] == [0, 0], ends
    return [json.loads(out.splitlines()[-1]) for _, out, _ in ends]
