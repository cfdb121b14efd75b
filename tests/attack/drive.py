"""Thousands of draws: in processes of their own, so that a draw that kills its process, or never ends, is only one more
verdict. Used by `python -m tests.attack`.
"""

from __future__ import annotations

import itertools
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.attack.draw import WRONG, Draw, Verdict, drawn_from, judge

_PER_PROCESS = 200
_SECONDS_A_DRAW = 120


KINDS_OF_DRAWS: dict[str, Callable[[Draw], bool]] = {
    "": lambda draw: True,
    "rows": lambda draw: bool(draw.rows),
    "weights": lambda draw: draw.state.startswith("weights"),
}
"""Draws with declared sums, and those whose weights come and go."""


@dataclass
class Tally:
    """What came of the draws so far."""

    first: int
    asked: int
    found: dict[int, tuple[Draw, Verdict]] = field(default_factory=dict)
    seconds: float = 0.0
    only: str = ""
    """Only draws of one kind of `KINDS_OF_DRAWS`; the seeds of others are passed over."""

    def add(self, seed: int, verdict: Verdict) -> None:
        self.found[seed] = (drawn_from(seed), verdict)

    @property
    def wrong(self) -> list[tuple[Draw, Verdict]]:
        """In the order of seeds."""
        return [pair for _, pair in sorted(self.found.items()) if pair[1].is_wrong]

    def seeds(self) -> Iterator[int]:
        """Those that may be asked for, without an end."""
        is_wanted = KINDS_OF_DRAWS[self.only]
        return (seed for seed in itertools.count(self.first) if is_wanted(drawn_from(seed)))

    @property
    def next_seed(self) -> int:
        """Where to go on: the first seed without a verdict."""
        return next(seed for seed in self.seeds() if seed not in self.found)

    def counts(self) -> Counter[str]:
        return Counter(verdict.kind for _, verdict in self.found.values())

    def table(self) -> str:
        """Verdicts by plan."""
        plans = sorted({draw.plan for draw, _ in self.found.values()})
        pairs = Counter((draw.plan, verdict.kind) for draw, verdict in self.found.values())
        kinds = list(self.counts())
        kinds.sort(key=lambda kind: (kind in WRONG, kind))
        lines = [f"{'plan':<10}" + "".join(f"{kind:>16}" for kind in kinds)]
        for plan in plans:
            lines.append(f"{plan:<10}" + "".join(f"{pairs[plan, kind]:>16}" for kind in kinds))
        lines.append(f"{'all':<10}" + "".join(f"{self.counts()[kind]:>16}" for kind in kinds))
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """The same for programs."""
        return {
            "first_seed": self.first,
            "num_draws": len(self.found),
            "next_seed": self.next_seed,
            "seconds": round(self.seconds, 1),
            "verdicts": dict(self.counts()),
            "wrong": [
                {"seed": draw.seed, "verdict": v.kind, "detail": v.detail, "draw": json.loads(draw.to_text())}
                for draw, v in self.wrong
            ],
        }


def work(seeds: list[int]) -> None:
    """The worker: judge these seeds, one line of JSON each."""
    import torch

    torch.set_num_threads(1)
    for seed in seeds:
        print(json.dumps({"start": seed}), flush=True)
        verdict = judge(drawn_from(seed))
        print(json.dumps({"seed": seed, "kind": verdict.kind, "detail": verdict.detail}), flush=True)


class _Worker:
    """One process, and the seeds that it has yet to judge."""

    def __init__(self, seeds: list[int], command: list[str], lines: queue.Queue) -> None:
        self.seeds = deque(seeds)
        self.current: int | None = None
        self.since = time.monotonic()
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # an interruption is the driver's to hear
        )
        self._thread = threading.Thread(target=self._read, args=(lines,), daemon=True)
        self._thread.start()

    def _read(self, lines: queue.Queue) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                lines.put((self, json.loads(line)))
        lines.put((self, None))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def _command(seeds: list[int]) -> list[str]:
    return [sys.executable, "-m", "tests.attack", "--worker", ",".join(map(str, seeds))]


def run(
    tally: Tally,
    *,
    num_jobs: int,
    say: Callable[[Draw, Verdict], None],
    command: Callable[[list[int]], list[str]] = _command,
) -> None:
    """Judge the draws that `tally` asks for; `say` hears each verdict. Leaves no process, however it ends.

    `command` is what a process for some seeds runs. Raises RuntimeError if one ends before its first draw.
    """
    lines: queue.Queue = queue.Queue()
    chunks = _chunks(itertools.islice(tally.seeds(), tally.asked))
    workers: set[_Worker] = set()
    start = time.monotonic()

    def begin(seeds: list[int] | None) -> None:
        if not seeds:
            return
        # Ctrl-C between the start of a process and its place in the list would leave it behind.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            workers.add(_Worker(seeds, command(seeds), lines))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def end(worker: _Worker, verdict: Verdict | None) -> None:
        worker.kill()
        workers.discard(worker)
        if verdict is not None:
            if worker.current is None:
                raise RuntimeError(f"attack: {verdict.detail} before its first draw")
            note(worker.seeds.popleft(), verdict)
        begin(list(worker.seeds) or next(chunks, None))

    def note(seed: int, verdict: Verdict) -> None:
        tally.add(seed, verdict)
        tally.seconds = time.monotonic() - start
        say(*tally.found[seed])

    try:
        for _ in range(num_jobs):
            begin(next(chunks, None))
        while workers:
            for worker in [w for w in workers if time.monotonic() - w.since > _SECONDS_A_DRAW]:
                end(worker, Verdict("no end", f"did not end within {_SECONDS_A_DRAW} s"))
            try:
                worker, message = lines.get(timeout=1)
            except queue.Empty:
                continue
            if worker not in workers:
                continue
            worker.since = time.monotonic()
            if message is None:
                status = worker.process.wait()
                end(worker, Verdict("killed", f"the process ended with status {status}") if worker.seeds else None)
            elif "start" in message:
                worker.current = message["start"]
            else:
                assert worker.seeds.popleft() == message["seed"]
                note(message["seed"], Verdict(message["kind"], message["detail"]))
    finally:
        for worker in list(workers):
            worker.kill()


def _chunks(seeds: Iterator[int]) -> Iterator[list[int]]:
    while chunk := list(itertools.islice(seeds, _PER_PROCESS)):
        yield chunk
