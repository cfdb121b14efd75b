"""Tensors that wrap others: what a functional collective gives out, and distributed tensors.

What: torch has two wrappers whose bytes are ordinary tensors inside. `AsyncCollectiveTensor` is the result of a
functional collective that may still be under way: a read waits first. `DTensor` is this rank's part of a
tensor that lies on several ranks. Both are taken apart here by torch's own protocol (`__tensor_flatten__`), and put
together again from other tensors with the same bytes.
Why these two and no other: their inner tensors say all that they are. A nested tensor also carries numbers that are
bound to the identity of its offsets, and a quantized one may have a dispatch of its own.

Dispatch modes let both go by (`is_desugared`): torch then breaks an operator on a wrapper down into operators on the
plain tensors inside, and those come back to the mode. So everything on record is local.

Cost: two comparisons of strings for a tensor that is not plain; none for one that is. Not covered: subclasses of
`DTensor`, and every other subclass of `Tensor`: they stay as plain autograd has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from lowtide.tensors.private import PENDING_COLLECTIVE

_DISTRIBUTED = ("torch.distributed.tensor", "DTensor")


def is_pending(tensor: torch.Tensor) -> bool:
    """Whether this is the result of a functional collective, which must be waited for."""
    kind = type(tensor)
    return (kind.__module__, kind.__name__) == PENDING_COLLECTIVE


def is_distributed(tensor: torch.Tensor) -> bool:
    """Whether this is a distributed tensor: the part of one rank, and where the others are."""
    kind = type(tensor)
    return (kind.__module__, kind.__name__) == _DISTRIBUTED


def is_desugared(types: Iterable[type]) -> bool:
    """Whether an operator on tensors of these types breaks down into operators on plain ones."""
    return any((kind.__module__, kind.__name__) in (PENDING_COLLECTIVE, _DISTRIBUTED) for kind in types)


def inside(tensor: Any) -> torch.Tensor:
    """The plain tensor that carries the bytes; the tensor itself if it is no wrapper. Does not wait for them."""
    if type(tensor) is torch.Tensor:
        return tensor
    while is_pending(tensor) or is_distributed(tensor):
        tensor = getattr(tensor, tensor.__tensor_flatten__()[0][0])
    return tensor


def arrived(tensor: Any) -> torch.Tensor:
    """The plain tensor inside, once its bytes are there: for the stream that is current, as torch waits."""
    if type(tensor) is torch.Tensor:
        return tensor
    while True:
        if is_pending(tensor):
            tensor.trigger_wait()
        elif not is_distributed(tensor):
            return tensor
        tensor = getattr(tensor, tensor.__tensor_flatten__()[0][0])


def guise_of(tensor: torch.Tensor) -> tuple[Any, dict[str, Any]]:
    """The class of a tensor, if only `__torch_function__` knows it (`as_subclass`), and the attributes."""
    kind = type(tensor)
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return None, {}
    return None if issubclass(kind, nn.Parameter) else kind, dict(vars(tensor))


def in_guise(tensor: torch.Tensor, guise: tuple[Any, dict[str, Any]]) -> torch.Tensor:
    """A fresh tensor with that class and these attributes."""
    kind, attributes = guise
    if kind is not None and type(tensor) is not kind:
        tensor = tensor.as_subclass(kind)
    if attributes:
        vars(tensor).update(attributes)
    return tensor


Shell = Callable[[torch.Tensor], torch.Tensor]
"""Gives the distributed tensor whose local part it is given."""


def hollow(tensor: Any) -> torch.Tensor:
    """A wrapper that shares `tensor`'s version counter and none of its memory.

    Only the wrapper's counter knows of in-place writes: below it, where they happen, torch does not count.
    """
    alias = tensor.detach()
    setattr(alias, tensor.__tensor_flatten__()[0][0], torch.empty(0, dtype=tensor.dtype, device=tensor.device))
    return alias


def shell_of(tensor: Any) -> Shell | None:
    """What puts around the plain tensor inside what `tensor` has, without its bytes; None if that one will do.

    The result of a collective will do without its wrapper once it has arrived: torch's operators would unwrap it.
    """
    if not is_distributed(tensor):
        return None
    (name, *others), context = tensor.__tensor_flatten__()
    beside = {other: getattr(tensor, other) for other in others}
    make, size, stride = type(tensor).__tensor_unflatten__, tensor.size(), tensor.stride()
    return lambda local: make({name: local, **beside}, context, size, stride)
