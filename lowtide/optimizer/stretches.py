"""A parameter that is too large for a bucket, cut into stretches of its elements: whether that may be, and where.

What: `ends_of` says where the stretches end, `is_cut_now` whether this step may be taken in them.
Why: a step has three buckets on the device. Were a bucket never smaller than the state of the largest parameter, the
embedding of a large vocabulary alone would take gigabytes of each.
Elements are taken in order of memory, so rows and columns do not matter, and a stretch is a plain one-dimensional view.
Stretches are multiples of 65,536 elements (`CUT_ELEMENTS`), so that torch's kernels find the vectors and chunks that
the whole parameter would have.

Stepped whole, in a bucket as large as it must be: parameters of other optimizers than torch's elementwise ones;
parameters with gaps in memory; gradients or state that lie in memory in another order than the parameter; half
precision on a CPU with several threads (see `is_alike_in_stretches`); distributed tensors where neither `foreach` nor
`fused` was chosen, since torch chooses by the class of a tensor.
Cost: microseconds a large parameter and step.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from lowtide.optimizer.buckets import is_dense, stretch_for
from lowtide.tensors.optimizers import CUT_ELEMENTS, is_alike_in_stretches
from lowtide.tensors.wrappers import inside, is_distributed


def in_order(tensor: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """Elements [start, end) of a dense tensor, in order of memory: a view."""
    return tensor.as_strided((end - start,), (1,), int(tensor.storage_offset()) + start)


def ends_of(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, bytes_per_element: float, bucket_bytes: int
) -> list[int]:
    """Where the stretches of a parameter with so much state end; none if it fits into a bucket, or is stepped whole."""
    local = inside(parameter.detach())
    length = stretch_for(local.numel(), bytes_per_element, bucket_bytes)
    if length is None or not _lie_alike(local) or not _may_be_cut(optimizer, parameter):
        return []
    return [*range(length, local.numel(), length), local.numel()]


def ends_in(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, state: Iterable[torch.Tensor], bucket_bytes: int
) -> list[int]:
    """As `ends_of`, for state that is there."""
    tensors = [inside(tensor) for tensor in state]
    if not _lie_alike(inside(parameter.detach()), *tensors):
        return []
    return ends_of(optimizer, parameter, sum(tensor.element_size() for tensor in tensors), bucket_bytes)


def halves(ends: list[int]) -> list[int]:
    """Where stretches end that are half as long as those that end here, as far as they can be cut."""
    found = []
    for start, end in zip([0, *ends], ends, strict=False):
        middle = start + -(-(end - start) // (2 * CUT_ELEMENTS)) * CUT_ELEMENTS
        found += [middle, end] if middle < end else [end]
    return found


def is_cut_now(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> bool:
    """Whether this step may be taken in stretches: the gradient lies in memory as the parameter does."""
    gradient = parameter.grad
    if gradient is None or gradient.layout != torch.strided or is_distributed(gradient) != is_distributed(parameter):
        return False
    if is_distributed(parameter) and gradient.placements != parameter.placements:  # type: ignore[attr-defined]
        return False
    return _lie_alike(inside(parameter.detach()), inside(gradient.detach())) and _may_be_cut(optimizer, parameter)


def _lie_alike(parameter: torch.Tensor, *others: torch.Tensor) -> bool:
    """Whether they are plain, without gaps, and an element of each stands where it stands in the parameter."""
    return is_dense(parameter) and all(
        type(tensor) is torch.Tensor and (tensor.size(), tensor.stride()) == (parameter.size(), parameter.stride())
        for tensor in (parameter, *others)
    )


def _may_be_cut(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> bool:
    group = next(g for g in optimizer.param_groups if any(parameter is other for other in g["params"]))
    if is_distributed(parameter) and group.get("foreach") is None and not group.get("fused"):
        return False
    is_accelerator = parameter.device.type != "cpu"
    return is_alike_in_stretches(optimizer, group, parameter.dtype, is_accelerator=is_accelerator)
