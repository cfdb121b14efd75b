"""Saved tensors that wrap others: a handle around the handle of the plain tensor inside.

Why: the fate is that of the bytes, which are inside (this rank's part of a distributed tensor, what a collective gave
out), while autograd wants back what it saved, and counts in-place writes on the wrapper alone.

Cost: some 30 us a distributed tensor and 50 us a result of a collective, forward and backward. Not covered: wrappers
that were written into before they were saved; those stay as plain autograd has them (runtime/hooks.py).
"""

from __future__ import annotations

from typing import Any

import torch

from lowtide.catalog.wrappers import hollow, shell_of
from lowtide.runtime.handle import modified_error


class Wrapped:
    """A saved wrapper whose bytes another handle gives back."""

    __slots__ = ("is_view", "local", "output_nr", "producer", "shell", "size", "version", "witness")

    def __init__(self, tensor: torch.Tensor, local: Any) -> None:
        self.local = local
        self.shell = shell_of(tensor)
        self.producer = type(tensor.grad_fn)
        self.output_nr = tensor.output_nr
        self.is_view = tensor._is_view()
        self.size = tensor.size()
        self.version = tensor._version
        self.witness = hollow(tensor)

    def open(self) -> torch.Tensor:
        """What was saved. Raises RuntimeError if it was modified in place since."""
        if self.witness._version != self.version:
            like = torch.empty(0, dtype=self.witness.dtype, device=self.witness.device)
            raise modified_error(like, self.size, self.witness._version, self.version, self)
        local = self.local.open()
        return local if self.shell is None else self.shell.around(local)
