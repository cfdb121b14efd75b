"""Two real ranks on this machine, of a gloo group: `run` has them run the same functions one after the other, `start`
the same program."""

from __future__ import annotations

import contextlib
import datetime
import importlib
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
Job = tuple[str, dict[str, Any]]
"""Name of a function of the module, and keyword arguments beside `rank`. It gives back what can be pickled."""


def run(
    module: str,
    jobs: list[Job],
    folder: Path,
    seconds: float = 120,
    *,
    num_ranks: int = 2,
    killed: frozenset[int] = frozenset(),
) -> list[tuple[Any, ...]]:
    """What each job gave, by rank; `killed` ranks end themselves, and give None. No process outlives this call."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    what = {"num_ranks": num_ranks, "folder": str(folder), "module": module, "jobs": jobs, "answers": answers}
    ranks = [context.Process(target=_rank, args=(rank,), kwargs=what, daemon=True) for rank in range(num_ranks)]
    collected: dict[tuple[int, int], Any] = {}
    try:
        for process in ranks:
            process.start()
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

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["XDG_CACHE_HOME"] = folder
    store, timeout = f"file://{folder}/store", datetime.timedelta(seconds=60)
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


def start(words: list[str], folder: Path = ROOT) -> list[subprocess.Popen[str]]:
    """Python with these words, twice, in `folder`. `MORE_PORTS` has six ports for groups that follow one another."""
    with contextlib.ExitStack() as stack:
        # All are asked for before the first is given back, so they differ.
        sockets = [stack.enter_context(socket.socket()) for _ in range(7)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        port, *more_ports = [str(each.getsockname()[1]) for each in sockets]
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "MORE_PORTS": " ".join(more_ports)}
    group |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [sys.executable, *words],
            env=os.environ | group | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]


def finish(ranks: list[subprocess.Popen[str]], seconds: float = 120) -> list[tuple[int, str, str]]:
    """Exit status and what was said, on stdout and on stderr, of each. No process outlives this call."""
    try:
        return [(rank.returncode, *said) for rank in ranks for said in [rank.communicate(timeout=seconds)]]
    finally:
        for rank in ranks:
            rank.kill()


def answers(words: list[str], folder: Path = ROOT, seconds: float = 240) -> list[Any]:
    """The JSON in the last line that each of the two printed; both must end well."""
    ends = finish(start(words, folder), seconds)
    assert [status for status, _, _ in ends] == [0, 0], ends
    return [json.loads(out.splitlines()[-1]) for _, out, _ in ends]
