"""Saved tensors that wrap others: a handle around the handle of the plain tensor inside.

Why: a fate is about bytes, and these are inside (this rank's part of a distributed tensor, the result of a collective).
But autograd expects the wrapper back, and counts in-place writes only on the wrapper.

Cost: some 30 us a distributed tensor and 50 us a result of a collective, forward and backward. Not covered: wrappers
that were written into before they were saved; those are left to plain autograd (runtime/hooks/forward_pass.py).
"""

from __future__ import annotations

from typing import Any

import torch

from lowtide.tensors.private import version_of
from lowtide.tensors.view import Origin, modified_error
from lowtide.tensors.wrappers import hollow, shell_of


class Wrapped:
    """A saved wrapper. Another handle gives back the plain tensor inside."""

    __slots__ = ("alias", "local", "origin", "shell", "size", "version")

    def __init__(self, tensor: torch.Tensor, local: Any) -> None:
        self.local = local
        self.shell = shell_of(tensor)
        self.origin = Origin.of(tensor)
        self.size = tensor.size()
        self.version = version_of(tensor)
        self.alias = hollow(tensor)

    def open(self) -> torch.Tensor:
        """What was saved. Raises RuntimeError if it was modified in place since."""
        if version_of(self.alias) != self.version:
            like = torch.empty(0, dtype=self.alias.dtype, device=self.alias.device)
            raise modified_error(like, self.size, version_of(self.alias), self.version, self.origin)
        local = self.local.open()
        return local if self.shell is None else self.shell.around(local)
