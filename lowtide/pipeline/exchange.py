"""`all_to_all`: the one call through which a block sends its tokens to the experts of other ranks, and gets them back.

What: rank r gives `input_splits[q]` rows to rank q and gets `output_splits[q]` rows from it, in the order of the ranks.
The backward sends the gradient of each row to where the row came from. An ordinary MoE block needs no more than this to
be overlapped with the backward of another micro-batch: the graph can be cut here.
`carry` names tensors that were made before the exchange and are read after it (the residual, router weights).
They come back beside the result; use what came back. Alone the call gives back the very same tensors.

Cost: one collective each way; nothing is copied but rows that are not contiguous.
Not covered: double backward; tensors whose rows are not their first dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import torch
import torch.distributed as dist


@overload
def all_to_all(
    x: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int], *, group: Any = None
) -> torch.Tensor: ...
@overload
def all_to_all(
    x: torch.Tensor,
    output_splits: Sequence[int],
    input_splits: Sequence[int],
    *,
    group: Any = None,
    carry: tuple[torch.Tensor, ...],
) -> tuple[torch.Tensor, ...]: ...
def all_to_all(
    x: torch.Tensor,
    output_splits: Sequence[int],
    input_splits: Sequence[int],
    *,
    group: Any = None,
    carry: tuple[torch.Tensor, ...] | None = None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """The rows that the ranks of `group` sent to this one, of shape `[sum(output_splits), *x.shape[1:]]`.

    x: `[sum(input_splits), ...]`. `group`: the expert-parallel ranks; absent, all ranks.
    With `carry` the result is `(rows, *carry)`.
    """
    rows = _AllToAll.apply(x, tuple(output_splits), tuple(input_splits), group)
    return rows if carry is None else (rows, *carry)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, output_splits: tuple[int, ...], input_splits: tuple[int, ...], group: Any
    ) -> torch.Tensor:
        ctx.splits = output_splits, input_splits
        ctx.group = group
        return _exchange(x, output_splits, input_splits, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        output_splits, input_splits = ctx.splits
        return _exchange(gradient, input_splits, output_splits, ctx.group), None, None, None


def _exchange(
    x: torch.Tensor, output_splits: tuple[int, ...], input_splits: tuple[int, ...], group: Any
) -> torch.Tensor:
    rows = x.new_empty(sum(output_splits), *x.shape[1:])
    dist.all_to_all_single(rows, x.contiguous(), list(output_splits), list(input_splits), group=group)
    return rows
