"""Two real ranks on this machine: a gloo group of two processes that run the same functions one after the other."""

from __future__ import annotations

import contextlib
import datetime
import importlib
import multiprocessing
import os
import traceback
from pathlib import Path
from typing import Any

Job = tuple[str, dict[str, Any]]
"""Name of a function of the module, and keyword arguments beside `rank`. It gives back what can be pickled."""


def run(module: str, jobs: list[Job], folder: Path, seconds: float = 120) -> list[tuple[Any, Any]]:
    """What each job gave on rank 0 and on rank 1. Whatever happens, no process outlives this call."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    ranks = [context.Process(target=_rank, args=(r, str(folder), module, jobs, answers), daemon=True) for r in (0, 1)]
    collected: dict[tuple[int, int], Any] = {}
    try:
        for process in ranks:
            process.start()
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

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["XDG_CACHE_HOME"] = folder
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
