"""Memory that runs out where a test says."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Failing(TorchDispatchMode):
    """Raises in place of the n-th operator, once (or in place of all from there on); else only counts them."""

    def __init__(self, at: int = -1, *, for_ever: bool = False) -> None:
        super().__init__()
        self.at = at
        self.for_ever = for_ever
        self.num_ops = 0
        self.num_raised = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        number = self.num_ops
        self.num_ops += 1
        if number == self.at or (self.for_ever and number > self.at >= 0):
            self.num_raised += 1
            raise torch.OutOfMemoryError(f"made up, at {func}")
        return func(*args, **(kwargs or {}))
