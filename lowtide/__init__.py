"""lowtide: fit training into the memory you have, at the smallest cost in time, with the same gradients to the bit.

This module is the whole public surface. Importing it imports neither torch nor transformers: its functions import
what they need when they are called, so that `lowtide --help` and editors stay fast.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from lowtide.config.native import MemoryConfig
    from lowtide.errors import BudgetError, ConfigError
    from lowtide.planner.plan import Plan
    from lowtide.runtime.engines.base import Engine
    from lowtide.runtime.tide import Tide

__version__ = "0.1.0"

__all__ = ["BudgetError", "ConfigError", "Plan", "Tide", "__version__", "apply"]

_HOMES = {
    "BudgetError": "lowtide.errors",
    "ConfigError": "lowtide.errors",
    "Plan": "lowtide.planner.plan",
    "Tide": "lowtide.runtime.tide",
}


def apply(
    model: torch.nn.Module,
    memory: Plan | MemoryConfig | Mapping[str, Any] | str | os.PathLike[str],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    engine: Engine | str | None = None,
) -> Tide:
    """Make `model` train by a memory plan, until `tide.remove()` or the end of `with tide:`.

    `memory` is a `Plan`, a `MemoryConfig`, a mapping with the keys of the `memory` section, or the path of a YAML
    file. `engine` is an engine or the name of one; absent, it is chosen by the device of the model. Gradients
    are the same to the bit; `state_dict` does not change.
    Raises `ConfigError` for a mistake in `memory`, such as a pattern that matches nothing.
    """
    from lowtide.runtime.tide import apply as apply_plan

    return apply_plan(model, memory, optimizer=optimizer, engine=engine)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'lowtide' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
