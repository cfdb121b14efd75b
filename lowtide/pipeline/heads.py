"""The head of a message between two ranks: whose result follows, of how many tensors of which shapes, and what both
ends must have in common in this step.

What: 64 integers of 8 bytes. `write` makes them from tensors, `read` gives back `Blank`s, to be allocated and filled.
Why: gloo takes a message that is shorter than the buffer without a word, so two stages that disagree on a shape would
train on what was in memory. With a head shapes may change from one micro-batch to the next, and a message in the wrong
place is named instead of read.
Not covered: more tensors than 64 integers describe (8 of 4 dimensions); strides: a tensor arrives contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lowtide.errors import ConfigError
from lowtide.pipeline.schedule import Kind, Result

VERSION = 2
NUM_WORDS = 64
_MARK = 0x6C6F77746964  # says that this is a head at all, and not a tensor that stands in its place
_KINDS = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
_ABSENT = -1
_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
"""Their places are part of the version."""


@dataclass(frozen=True, slots=True)
class Blank:
    """A tensor that is to come."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class Head:
    """What a rank says before it sends tensors."""

    result: Result
    divide_by: float
    """What the sender divides gradients by."""
    blanks: tuple[Blank | None, ...]
    """None: there is no tensor, as with the gradient of an output that nobody used."""


class HeadError(ValueError):
    """These integers are not a head, or that of another version."""


def write(result: Result, tensors: Sequence[torch.Tensor | None], divide_by: float) -> torch.Tensor:
    """Raises ConfigError for what a head cannot describe."""
    bits = torch.tensor(divide_by, dtype=torch.float64).view(torch.int64).item()
    words = [_MARK, VERSION, _KINDS.index(result.kind), result.stage, result.micro_batch, bits, len(tensors)]
    for tensor in tensors:
        if tensor is None:
            words.append(_ABSENT)
        elif tensor.dtype not in _DTYPES:
            raise ConfigError(f"pipeline: stage {result.stage} passes on a tensor of {tensor.dtype}; cast it before")
        else:
            words += [_DTYPES.index(tensor.dtype), int(tensor.requires_grad), tensor.dim(), *tensor.shape]
    if len(words) > NUM_WORDS:
        raise ConfigError(
            f"pipeline: stage {result.stage} passes on {len(tensors)} tensors, which need a head of {len(words)} "
            f"integers; there are {NUM_WORDS}. Pass on fewer, for instance stacked"
        )
    head = torch.zeros(NUM_WORDS, dtype=torch.int64)
    head[: len(words)] = torch.tensor(words)
    return head


def read(head: torch.Tensor) -> Head:
    """Raises HeadError."""
    mark, version, kind, stage, micro_batch, bits, num_tensors, *words = head.tolist()
    if mark != _MARK:
        raise HeadError("what came is not the head of a message")
    if version != VERSION:
        raise HeadError(f"the head is of version {version}, and this rank reads {VERSION}")
    blanks: list[Blank | None] = []
    at = 0
    for _ in range(num_tensors):
        if words[at] == _ABSENT:
            blanks.append(None)
            at += 1
            continue
        dtype, requires_grad, num_dimensions = words[at : at + 3]
        at += 3 + num_dimensions
        blanks.append(Blank(tuple(words[at - num_dimensions : at]), _DTYPES[dtype], bool(requires_grad)))
    divide_by = torch.tensor(bits).view(torch.float64).item()
    return Head(Result(_KINDS[kind], stage, micro_batch), divide_by, tuple(blanks))
