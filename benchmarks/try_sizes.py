"""The child of question (b): one method, tried at one size after the other in one process.

What: orders are `ready`, `first` (one step at the shape as it is) and `find` (the largest size within the budget).
A model whose shape does not depend on the size is kept; batches are drawn anew, and the method is put in force anew,
because plans and pools of the last size must not help or hurt the next.
Cost: a build, a warm-up and a measured step per size. Not covered: see largest.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks import methods, subjects, worker
from benchmarks import peaks as peaks_module
from benchmarks.children import CannotRunError, one_line, say
from benchmarks.largest import find_largest


def start(arguments: Mapping[str, Any]) -> dict[str, Callable[[], dict[str, Any]]]:
    """Orders. `arguments`: those of `worker.start`, and measure, unit (of sizes), most (size), seconds (for all)."""
    trial = _Trial(arguments)
    return {"ready": trial.ready, "first": trial.first, "find": trial.find}


class _Trial:
    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self._arguments = arguments
        self._method = methods.METHODS[arguments["method"]]
        self._package = methods.version_of(self._method)
        self._deadline = time.monotonic() + arguments["seconds"]
        self._error: str | None = None
        self._steps: dict[int, dict[str, Any]] = {}
        worker.set_up_process(arguments)

    def ready(self) -> dict[str, Any]:
        return {"package": self._package}

    def first(self) -> dict[str, Any]:
        size = self._arguments["shape"][self._arguments["measure"]]
        return {"size": size, **self._try(size, checks=True), "num_tries": 1}

    def find(self) -> dict[str, Any]:
        arguments = self._arguments
        unit = arguments["unit"]
        units, peaks = find_largest(
            lambda count: self._peak(count * unit),
            budget_bytes=arguments["budget_bytes"],
            start=max(arguments["shape"][arguments["measure"]] // unit, 1),
            most=arguments["most"] // unit,
        )
        if units == 0:
            raise CannotRunError(self._error or "no size fits the budget")
        is_bounded = self._error is not None and self._error.startswith("out of time")
        found = self._try(units * unit, checks=True)
        return {"size": units * unit, **found, "num_tries": len(peaks), "is_cut_short": is_bounded,
                "is_at_the_end": units * unit == arguments["most"]}  # fmt: skip

    def _peak(self, size: int) -> int | None:
        if time.monotonic() > self._deadline:
            self._error = "out of time before the largest size was found"
            return None
        try:
            peak: int | None = int(self._try(size)["peak_bytes"])
        except Exception as error:  # out of memory, no plan fits, ...: it does not train at this size
            self._error = one_line(error)
            peak = None
        say(f"    {self._method.name}: {size} needs {peak or self._error}, budget {self._arguments['budget_bytes']}")
        return peak

    def _try(self, size: int, *, checks: bool = False) -> dict[str, Any]:
        arguments = self._arguments
        shape = {**arguments["shape"], arguments["measure"]: size}
        subject = subjects.build(arguments["model"], shape, device=arguments["device"], dtype=arguments["dtype"])
        if arguments.get("optimizer") == "adamw":
            subject.add_optimizer()
        reference = None
        if checks:
            try:
                reference = worker.take_gradients(subject, subject.step())
            except RuntimeError:  # plain runs out of memory: nothing to compare with
                reference = None
        worker.release_memory()
        running = self._method.prepare(subject, arguments["setting"], arguments["budget_bytes"])
        try:
            for _ in range(min(running.warm_up_steps, 2)):
                subject.step()
            answer: dict[str, Any] = {"peak_bytes": peaks_module.peak_bytes(subject, running)}
            if checks:
                subject.synchronize()
                started = time.perf_counter()
                loss = subject.step()
                subject.synchronize()
                answer["seconds"] = time.perf_counter() - started
                answer |= worker.compare(reference, worker.take_gradients(subject, loss))
                answer |= {key: value for key, value in running.facts().items() if key in ("loss", "state_bytes_moved")}
            return answer
        finally:
            running.close()
            del subject
            worker.release_memory()
