"""What adapters share: the arguments that say what lowtide is to do, and the handle while it does it.

Why the order matters: lowtide acts on the module whose `forward` the trainer calls, and the optimizer must be the one
that steps. So an adapter attaches when training begins, after PEFT, wrapping, compiling and preparing are done; and it
lets go when training ends, so that evaluation, saving and a second run meet the plain model. Where training ends
with an error no trainer says so: `remove()` is there for that, and attaching again lets go first.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import lowtide

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a user asked of an adapter. `budget` and `memory` are those of `lowtide.optimize` and `lowtide.apply`."""

    budget: int | str | None = None
    memory: Mapping[str, Any] | str | os.PathLike[str] | Any = None
    engine: Any = None
    say: Callable[[str], None] | None = None
    """Gets a line when a plan is made. Absent: it is printed to stderr."""

    def checked(self, where: str) -> Wish:
        """This wish. Raises ConfigError where it asks for nothing; `where` is the name that the user wrote."""
        if self.budget is None and self.memory is None:
            raise lowtide.ConfigError(
                f"{where}: nothing to do; write budget='20GiB', or memory= with rules or the path of a YAML file"
            )
        if self.budget is not None and isinstance(self.memory, lowtide.Plan):
            raise lowtide.ConfigError(f"{where}: memory is a plan, which has its budget; leave budget out")
        return self


class Attached:
    """lowtide on one model, from `attach` to `remove`."""

    def __init__(self, wish: Wish) -> None:
        self.wish = wish
        self.tide: Any = None
        """The handle in force, or the last one; None before `attach`."""

    def attach(self, model: torch.nn.Module, optimizer: Any, *, speaks: bool) -> None:
        """Act on `model` from now on; `speaks`: this rank tells the user what happens. Raises what `optimize` does."""
        self.remove()
        wish = self.wish
        how: dict[str, Any] = {"optimizer": optimizer, "engine": wish.engine, "say": self.tell if speaks else None}
        if wish.budget is not None:
            self.tide = lowtide.optimize(model, budget=wish.budget, memory=wish.memory, **how)
        else:
            self.tide = lowtide.apply(model, wish.memory, **how)

    def remove(self) -> None:
        """Make the model plain again. Idempotent; `tide` stays readable."""
        if self.tide is not None:
            self.tide.remove()

    def tell(self, line: str) -> None:
        """Say a line to the user."""
        if self.wish.say is not None:
            self.wish.say(line)
        else:
            sys.stderr.write(line + "\n")

    @property
    def stats(self) -> Any:
        """`Tide.stats` now, or of the run that ended; None before `attach`."""
        return self.tide.stats if self.tide is not None else None

    def scalars(self) -> dict[str, float]:
        """Figures for a logger, by name with unit; none before `attach`, zeros before the first planned step."""
        stats = self.stats
        return {} if stats is None else {f"lowtide/{name}": float(getattr(stats, name)) for name in SCALARS}


SCALARS = (
    "peak_device_bytes",
    "kept_bytes",
    "swapped_bytes",
    "recomputed_bytes",
    "stall_seconds",
    "num_divergences",
)
"""Of `Tide.stats`. Peak: the highest so far; all others: totals since training began or the plan changed."""


def wish_of(where: str, **given: Any) -> Wish:
    """The wish in an adapter's arguments, checked."""
    return dataclasses.replace(Wish(), **given).checked(where)
