"""What adapters share: the arguments that say what lowtide is to do, the handle while it does it, figures for loggers.

Why the order matters: lowtide acts on the module whose `forward` the trainer calls, and the optimizer must be the one
that steps. So an adapter attaches when training begins, after PEFT, wrapping, compiling and preparing. It detaches when
training ends, so that evaluation, saving and a second run have the plain model. If training ends with an error, no
trainer calls its callbacks: call `remove()` then. Attaching again detaches first.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import lowtide
from lowtide.config.memory import check_unit, load_memory
from lowtide.core.budget import parse_budget
from lowtide.core.log import Listener
from lowtide.mindformers.follow import sections_in
from lowtide.runtime.autopilot.plan_model import merged_config

if TYPE_CHECKING:
    import torch


class Attached:
    """lowtide on one model, from `attach` to `remove`."""

    def __init__(
        self,
        where: str,
        *,
        budget: int | str | None = None,
        memory: Mapping[str, Any] | str | os.PathLike[str] | Any = None,
        engine: Any = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """`where`: the name that the user wrote, for messages. `budget` and `memory` are those of `lowtide.optimize`
        and `lowtide.apply`. `say` gets a line when a plan is made; absent, it is printed to stderr.

        Raises ConfigError for a wish that asks for nothing, or for what cannot be."""
        if budget is None and memory is None:
            raise lowtide.ConfigError(
                f"{where}: nothing to do; write budget='20GiB', or memory= with rules or the path of a YAML file"
            )
        if budget is not None and isinstance(memory, lowtide.Plan):
            raise lowtide.ConfigError(f"{where}: memory is a plan, which has its budget; leave budget out")
        if budget is not None:
            try:  # now, and not when training begins
                check_unit(f"{where}: budget", parse_budget(budget))
            except ValueError as error:
                raise lowtide.ConfigError(str(error) if where in str(error) else f"{where}: budget: {error}") from None
        self.where = where
        self.budget = budget
        self.memory = memory
        self._engine = engine
        self.tell: Callable[[str], Any] = say or (lambda line: sys.stderr.write(line + "\n"))
        """Says a line to the user."""
        self.tide: Any = None
        """The handle in force, or the last one; None before `attach`."""
        self._step_began: float | None = None
        self._took: list[float] = []
        """Seconds of the steps since the last log."""
        self._hear_no_more: Callable[[], Any] = lambda: None
        """Ends what hears lowtide's lines, on the rank that tells them."""

    def attach(self, model: torch.nn.Module, optimizer: Any, *, speaks: bool, needs: str = "") -> None:
        """Act on `model` from now on; `speaks`: this rank tells the user what happens. Raises what `optimize` does.

        What acted on the model before is taken off: a notebook cell that runs again has lost its handle.
        `needs`: what of the trainer needs all gradients when backward is over. ConfigError where these are updated and
        freed in backward.
        """
        self.remove()
        if needs and self._frees_gradients:
            raise lowtide.ConfigError(
                f"{self.where}: memory updates each parameter in backward and frees its gradient, and {needs} "
                "needs all gradients after that; leave out weights, and write optimizer: auto"
            )
        if lowtide.current(model) is not None:
            lowtide.remove(model)
            if speaks:
                self.tell("lowtide: another plan was on this model; it is taken off, and this one begins")
        how: dict[str, Any] = {"optimizer": optimizer, "engine": self._engine}
        if speaks:
            # Also with this object: nobody has to call `remove` after a training that ended with an error.
            self._hear_no_more = weakref.finalize(self, Listener(self.tell).close)
        self._step_began = None
        self._took.clear()
        try:
            if self.budget is not None:
                self.tide = lowtide.optimize(model, budget=self.budget, memory=self.memory, **how)
            else:
                self.tide = lowtide.apply(model, self.memory, **how)
        except BaseException:
            self._hear_no_more()
            raise

    @property
    def _frees_gradients(self) -> bool:
        """Whether `memory` asks for updates in backward, so that nothing can be done to all gradients after it."""
        memory = self.memory
        if isinstance(memory, lowtide.Plan):
            return memory.optimizer is not None and memory.optimizer.overlap == "in_backward"
        if memory is None or sections_in(memory) is not None:
            return False
        config = load_memory(memory) if self.budget is None else merged_config(memory, self.budget)
        return config.optimizer == "in_backward" or config.weights != "keep"

    def remove(self) -> None:
        """Make the model plain again. Idempotent; `tide` stays readable."""
        if self.tide is not None:
            self.tide.remove()
        self._hear_no_more()

    @property
    def stats(self) -> Any:
        """`Tide.stats` now, or of the run that ended; None before `attach`."""
        return self.tide.stats if self.tide is not None else None

    def step_begins(self) -> None:
        """A training step begins, by the host's clock."""
        self._step_began = time.perf_counter()

    def step_ends(self) -> None:
        """It ended: all of its micro-batches, and the optimizer's step."""
        if self._step_began is not None:
            self._took.append(time.perf_counter() - self._step_began)
            self._step_began = None

    def scalars(self) -> dict[str, float]:
        """Figures for a logger, by name with unit; none before `attach`. Starts a new mean of step times."""
        stats = self.stats
        if stats is None:
            return {}
        figures = {f"lowtide/{name}": float(getattr(stats, name)) for name in SCALARS}
        predicted = self.tide.plan.predicted if self.tide.plan is not None else None
        if predicted is not None:
            figures["lowtide/predicted_peak_bytes"] = float(predicted.peak_bytes)
            figures["lowtide/predicted_micro_batch_seconds"] = predicted.step_seconds
        if self._took:
            figures["lowtide/step_seconds"] = statistics.fmean(self._took)
            self._took.clear()
        return figures


SCALARS = (
    "peak_device_bytes",
    "kept_bytes",
    "swapped_bytes",
    "recomputed_bytes",
    "stall_seconds",
    "num_divergences",
)
"""The figures of `Tide.stats` that an adapter logs: the highest peak so far, and totals since training began or the
plan changed. `scalars` adds the predicted peak, the predicted time of forward and backward of one micro-batch, and the
mean time of the steps since the last log by the host's clock, with all micro-batches and the optimizer's step."""


def shown(name: str) -> Any:
    """For the class of an adapter, which has its `Attached` as `attached`: a property that shows one of it."""
    return property(lambda adapter: getattr(adapter.attached, name), doc=f"`{name}` of `Attached`.")
