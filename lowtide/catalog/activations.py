"""What counts as an activation: the questions that the observed step asks of a tensor, and the runtime asks again.

Cost: a few attribute reads a tensor. Not covered: where the tensor goes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from lowtide.catalog.trace import is_plain

# A cast or a view of a parameter is a few nodes away from its accumulator, never more.
_MAX_STEPS_TO_PARAMETER = 4
_VIEWS_AND_CASTS = (
    "TBackward",
    "ToCopyBackward",
    "TransposeBackward",
    "ViewBackward",
    "PermuteBackward",
)


def is_plain_or_fake(tensor: torch.Tensor) -> bool:
    """A dense, strided tensor with a storage (a fake one's has a size and no bytes), of no other subclass."""
    if is_plain(tensor):
        return True
    # Only ever imported by those who made fake tensors: importing it here would cost everybody 0.2 s.
    kind = type(tensor)
    is_fake = kind.__name__ == "FakeTensor" and kind.__module__ == "torch._subclasses.fake_tensor"
    return is_fake and tensor.layout is torch.strided


def leads_to_parameter(tensor: torch.Tensor) -> bool:
    """Whether autograd's own record says that `tensor` is a view or a cast of a parameter."""
    node = tensor.grad_fn
    for _ in range(_MAX_STEPS_TO_PARAMETER):
        if node is None:
            return False
        variable = getattr(node, "variable", None)
        if variable is not None:
            return isinstance(variable, nn.Parameter)
        if not node.name().startswith(_VIEWS_AND_CASTS):
            return False
        node = node.next_functions[0][0] if node.next_functions else None
    return False


def describe(args: tuple, kwargs: dict[str, Any]) -> str:
    """`input_ids=int64[2, 8], labels=int64[2, 8]`: the tensors of a call, as one line."""
    parts = [("", value) for value in args] + list(kwargs.items())
    words = []
    for key, value in parts:
        for leaf in tree_leaves(value):
            if isinstance(leaf, torch.Tensor):
                dtype = str(leaf.dtype).removeprefix("torch.")
                words.append(f"{key}{'=' if key else ''}{dtype}{list(leaf.shape)}")
    return ", ".join(words)
