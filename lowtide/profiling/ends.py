"""Where an observed step ends: graphs that were there before are cut off, and left to the backward they wait for.

What: an input may hang on a graph of the user's (an embedding outside of the model, its own parameters even, a hidden
state of the last call). The observed backward pass would run that graph and free it. So each tensor that has one is
exchanged, for the time of the step, for one of the same bytes whose gradient goes nowhere.

Why a function of autograd and not a detached leaf: what the model writes to in place must not be a leaf, or a view.
Cost: one node for each such tensor. Not covered: tensors in sets, and where the walk of a snapshot does not come;
tensors of subclasses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lowtide.tensors.kinds import is_plain
from lowtide.tensors.snapshot import Snapshot


class Ends:
    """The graphs that were cut off."""

    def __init__(self, before: Snapshot, like: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        """Exchanges tensors in what `before` has found, until it is restored. `like` makes what has the bytes of a
        tensor in the step; absent: itself."""
        self.tensors: list[torch.Tensor] = []
        """Leaves to ask gradients for, so that a backward pass comes as far as these graphs."""
        self._like = like
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        before.exchange(self.cut)

    def cut(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor without its graph; itself where it has none."""
        if tensor.grad_fn is None or not is_plain(tensor):
            return tensor
        if id(tensor) not in self._made:
            end = torch.empty(0, requires_grad=True)
            self.tensors.append(end)
            with torch.enable_grad():
                self._made[id(tensor)] = (
                    tensor,
                    _Cut.apply(end, [tensor if self._like is None else self._like(tensor)]),
                )
        return self._made[id(tensor)][1]


class _Cut(torch.autograd.Function):
    """Gives out the bytes of a tensor, and takes its gradient."""

    @staticmethod
    def forward(ctx: Any, end: torch.Tensor, held: list[torch.Tensor]) -> torch.Tensor:
        return held[0].data

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[None, None]:
        return None, None
