"""Child processes that wait for orders: one per variant, all alive together, so that noise falls on all of them alike.

What: a `Child` is a process of its own that prepares a worker and then answers orders ("step", "finish", ...) until it
is stopped. The parent asks the children of one model in turn (A B C A B C ...), and ratios are taken round by round: a
slow minute of a shared machine hits every variant. A process of its own keeps each variant's peak of resident memory,
its random state and its crash apart.
Why not `interleave.py`: here children are forked from a server that has imported torch and transformers already (a
start takes 0.1 s instead of 4), each order has a time limit, and a child that dies (also by a signal) is an answer like
any other.
Cost: one forkserver per run. Not covered: devices that were initialised before the fork; the server only imports.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

ENVIRONMENT = {"THP_MEM_ALLOC_ENABLE": "1", "TOKENIZERS_PARALLELISM": "false"}
_PRELOAD = (
    "torch",
    "torch._functorch.config",
    "transformers",
    "transformers.modeling_layers",
    "transformers.models.llama.modeling_llama",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "transformers.models.vit.modeling_vit",
    "transformers.models.t5.modeling_t5",
    "scipy.optimize",
    "lowtide.runtime.autopilot.autopilot",
    "benchmarks.worker",
)
_MOST_ERROR_CHARACTERS = 240


class CannotRunError(RuntimeError):
    """A method cannot run here; its text is the whole line of the row."""


def one_line(error: BaseException) -> str:
    """An error as a row of a table holds it: its type and its first line, cut to a readable length."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    kind = "" if isinstance(error, CannotRunError) else f"{type(error).__name__}: "
    text = f"{kind}{lines[0]}" if lines else type(error).__name__
    return text if len(text) <= _MOST_ERROR_CHARACTERS else text[: _MOST_ERROR_CHARACTERS - 3] + "..."


@dataclass(slots=True)
class Child:
    """One process. `worker` is `module:function`; it gets `arguments` and returns a mapping of orders to functions."""

    name: str
    worker: str
    arguments: Mapping[str, Any]
    ready: dict[str, Any] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    error: str | None = None
    _process: Any = None
    _pipe: Any = None

    def start(self, limit_seconds: float) -> None:
        """Fork, and wait until it has prepared itself. Afterwards there is `ready`, or `error`."""
        context = multiprocessing.get_context("forkserver")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(self.worker, dict(self.arguments), theirs), daemon=False)
        self._process.start()
        theirs.close()
        answer = self._receive(limit_seconds, "prepare")
        if answer is not None:
            self.ready = answer

    def ask(self, order: str, limit_seconds: float) -> dict[str, Any] | None:
        """The answer to one order; None once the child has an `error`."""
        if self.error is not None or self._pipe is None:
            return None
        try:
            self._pipe.send(order)
        except (BrokenPipeError, OSError):
            self.error = self._epitaph()
            return None
        return self._receive(limit_seconds, order)

    def stop(self) -> None:
        """End the process, kindly first. May be called twice."""
        if self._process is None:
            return
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()
        self._process = None

    def _receive(self, limit_seconds: float, order: str) -> dict[str, Any] | None:
        try:
            if not self._pipe.poll(limit_seconds):
                self.error = f"TimeoutError: '{order}' took more than {limit_seconds:.0f} s"
                self._process.kill()
                return None
            answer = self._pipe.recv()
        except (EOFError, OSError):
            self.error = self._epitaph()
            return None
        if "error" in answer:
            self.error = answer["error"]
            return None
        return answer

    def _epitaph(self) -> str:
        self._process.join(10)
        return f"the process ended with status {self._process.exitcode}"


def prepare_server() -> None:
    """Say what the server imports before it forks. Call once, before the first child."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(_PRELOAD))


def _serve(worker: str, arguments: dict[str, Any], pipe: Any) -> None:
    os.dup2(2, 1)  # what libraries print must not be taken for a result
    module, _, function = worker.partition(":")
    try:
        orders: Mapping[str, Callable[[], dict[str, Any]]] = getattr(importlib.import_module(module), function)(
            arguments
        )
        pipe.send(orders["ready"]())
        while True:
            pipe.send(orders[pipe.recv()]())
    except (EOFError, KeyboardInterrupt):
        return
    except BaseException as error:
        if os.environ.get("LOWTIDE_BENCH_TRACEBACK"):
            traceback.print_exc()
        pipe.send({"error": one_line(error)})


def run_rounds(children: Sequence[Child], num_rounds: int, limit_seconds: float) -> None:
    """Ask all for one step per round, in turn. Fills `steps`."""
    for index in range(num_rounds):
        for child in children:
            answer = child.ask("step", limit_seconds)
            if answer is not None:
                child.steps.append(answer)
        latest = ", ".join(f"{c.name} {c.steps[-1]['seconds']:.2f}" for c in children if c.steps and not c.error)
        say(f"  round {index + 1}/{num_rounds}, s: {latest}")


def ratios(child: Child, base: Child, offset: int = 0, key: str = "seconds") -> dict[str, float]:
    """`ratio_median`, `ratio_min`, `ratio_max` of `child / base` over rounds, the first left out as a warm-up.

    `offset` is the round of `base` in which `child` took its first step.
    """
    pairs = list(zip(child.steps, base.steps[offset:], strict=False))[1:]
    found = [ours[key] / theirs[key] for ours, theirs in pairs]
    if not found:
        return {}
    return {"ratio_median": statistics.median(found), "ratio_min": min(found), "ratio_max": max(found)}


def median_of(child: Child, key: str) -> float | None:
    """Over rounds, the first left out; None where no step has it."""
    values = [step[key] for step in child.steps[1:] if step.get(key) is not None]
    return statistics.median(values) if values else None


def say(line: str) -> None:
    """Progress, on the standard error."""
    print(f"[{time.strftime('%H:%M:%S')}] {line}", file=sys.stderr, flush=True)
