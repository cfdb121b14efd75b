"""One stage on one micro-batch: its forward, and its backward from what is left of it.

What: `with_places` keeps of a forward its leaves and the *places* of its outputs in autograd's graph. `backward` starts
from the places, with the gradients that came, and gives those of the leaves.
Why places: a backward does not need an output tensor. Once it is sent or handed over, its memory is free, unless the
stage itself saved it.
Not covered: double backward across stages.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lowtide.errors import ConfigError

Tensors = tuple[torch.Tensor | None, ...]
_NOTHING: Mapping[str, Any] = types.MappingProxyType({})


@dataclass(frozen=True, slots=True)
class LiveChunk:
    """What stays of a forward until its backward. The activations hang on the places."""

    leaves: Tensors
    """What came from the stage before."""
    places: tuple[GradientEdge | None, ...]
    """Of the outputs, in their order; None where no gradient flows."""


def call(module: Callable[..., Any], batch: Any, keywords: Mapping[str, Any] = _NOTHING) -> Any:
    """On an entry of the batch: a tensor, a tuple of inputs, or a mapping by keyword."""
    if isinstance(batch, Mapping):
        return module(**batch, **keywords)
    return module(*batch, **keywords) if isinstance(batch, tuple | list) else module(batch, **keywords)


def as_tuple(output: Any) -> tuple[Any, ...]:
    """What a stage gives, as what it passes on."""
    return tuple(output) if isinstance(output, tuple | list) else (output,)


def with_places(leaves: Tensors, output: Any, stage: int) -> tuple[LiveChunk, Tensors]:
    """What a forward leaves, and its outputs as leaves for the stage after, which share their memory."""
    outputs = as_tuple(output)
    places = []
    following: list[torch.Tensor | None] = []
    for each in outputs:
        if not (each is None or isinstance(each, torch.Tensor)):
            raise ConfigError(
                f"pipeline: stage {stage} gave a {type(each).__name__}; what one stage passes on to the next is a "
                "tensor or a tuple of tensors"
            )
        has_gradient = each is not None and each.requires_grad
        places.append(get_gradient_edge(each) if each is not None and has_gradient else None)
        following.append(None if each is None else each.detach().requires_grad_(has_gradient))
    return LiveChunk(leaves, tuple(places)), tuple(following)


def backward(chunk: LiveChunk, gradients: Sequence[torch.Tensor | None]) -> Tensors:
    """The gradients of the leaves. Those of the weights are added up by autograd."""
    roots = [
        (place, given) for place, given in zip(chunk.places, gradients, strict=True) if place and given is not None
    ]
    if roots:
        torch.autograd.backward([place for place, _ in roots], [given for _, given in roots])
    found = []
    for leaf in chunk.leaves:
        found.append(None if leaf is None else leaf.grad)
        if leaf is not None:
            leaf.grad = None
    return tuple(found)
