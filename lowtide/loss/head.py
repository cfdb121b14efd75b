"""The head and the loss together, in blocks of a declared number of rows, so that logits never exist whole.

Why: the last things in a step that grow with tokens times words are the logits and their gradient. Llama-3-8B has 250
KiB of each for a token in bf16: 31 GiB of either at 131,072 tokens. Here one block of logits exists at a time.

Which sum: a sliced loss (cross_entropy.py) leaves the head whole, because the gradient of its weight is a sum over
rows, and a sum that is taken in parts rounds in another way. Here that sum is taken in parts, so it is declared:
- rows 0 to R-1 are the first block, R to 2R-1 the second, and so on; the last one has what is left;
- logits and the gradient of the hidden states are made block by block, by the matmul that the head would call;
- each block has its product for the weight (and its sum for the bias) in the dtype in which the head computes. They are
  added up in order, in fp32 or wider, and rounded once, to the dtype of the weight;
- the loss itself is one sum over all rows, as in the sliced loss.
The bits depend on R and on the batch, on nothing else: no budget, plan, tier or engine is asked (contract 20). With one
block they are plain PyTorch's.

How: forward makes each block of logits and keeps one number a row. Backward makes it again, writes its gradient over
it, and uses that up before the next block. What is made again is compared: the log-probability of each row's word,
which depends on all its logits, must have the bits that it had in the forward pass, or no gradient is given.

Cost: the head's matmul once more, 4 for 3; one wait for the device. Memory: one block of logits, the slices of the row
by row part, and of the weight's gradient an fp32 sum and one block's product beside it.
Not covered, and refused by name: a head that is no plain `torch.nn.Linear`, sharded weights, logits spread over ranks,
weights of classes, label smoothing, z-loss, second derivatives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lowtide.errors import ConfigError
from lowtide.loss.blocks import DeclaredSum, compare_again, declared_blocks
from lowtide.loss.cross_entropy import (
    Buffers,
    Slicing,
    check_names,
    draw_once,
    fill,
    gradient_of,
    loss_of_rows,
    name_of,
    rows_of_slice,
    without_autocast,
)
from lowtide.tensors.private import FakeTensor, tanh_backward_into
from lowtide.tensors.wrappers import is_distributed

Step = tuple[str, torch.Tensor | None]
"""What a model does to its logits between head and loss: the name of the node in autograd's graph, and its number."""


@dataclass(frozen=True, slots=True)
class _BlockSettings:
    rows: int
    dtype: torch.dtype
    """In which the head computes."""
    slicing: Slicing
    steps: tuple[Step, ...]


def head_cross_entropy(
    hidden: torch.Tensor,
    head: nn.Linear,
    target: torch.Tensor,
    *,
    rows: int,
    ignore_index: int = -100,
    reduction: str = "mean",
    upcast: bool = False,
    steps: tuple[Step, ...] = (),
    slice_rows: int | None = None,
) -> torch.Tensor:
    """`sliced_cross_entropy(head(hidden), target, ...)`, in blocks of `rows`.

    hidden: `[rows, width]`, floating point. target: `[rows]`, int64. `steps`: see `Step`, done to each block of logits.
    `slice_rows`: of the part that works row by row, absent: chosen; it changes no bit. Raises `ConfigError` for what is
    not covered.
    """
    weight, bias = head.weight, head.bias
    is_autocast = torch.is_autocast_enabled(hidden.device.type)
    dtype = torch.get_autocast_dtype(hidden.device.type) if is_autocast else hidden.dtype
    if not is_autocast and hidden.dtype != weight.dtype:
        raise ConfigError(
            f"lowtide.cross_entropy: hidden states are {name_of(hidden.dtype)} and the head's weight is "
            f"{name_of(weight.dtype)}; cast one of them, or use autocast"
        )
    wide = torch.float32 if (upcast or is_autocast) and dtype.itemsize < 4 else dtype
    num_words = weight.shape[0]
    num_rows = slice_rows or rows_of_slice(min(rows, len(hidden)), num_words, wide)
    slicing = Slicing(wide, num_rows)
    is_ignored = target == ignore_index
    words = target.masked_fill(is_ignored, 0)
    check_names(words, num_words)
    picked = _HeadOfRows.apply(hidden, weight, bias, words, _BlockSettings(rows, dtype, slicing, steps))
    return loss_of_rows(picked, is_ignored, reduction)


def why_not_in_blocks(head: Any) -> str:
    """Why this head cannot be taken in blocks; empty where it can."""
    if type(head) is not nn.Linear:
        return f"the head is {type(head).__name__}, not a plain torch.nn.Linear"
    if "forward" in vars(head):
        return "somebody has replaced the forward of its head"
    if any(is_distributed(parameter) for parameter in head.parameters()):
        return "the head's weight is spread over ranks"
    return ""


class _HeadOfRows(torch.autograd.Function):
    """As `_OfRows` of cross_entropy.py, of the logits that the head makes of `hidden`."""

    @staticmethod
    def forward(  # noqa: PLR0917 (a function of autograd has no keywords)
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        words: torch.Tensor,
        how: _BlockSettings,
    ) -> torch.Tensor:
        ctx.how = how
        picked = hidden.new_empty(len(hidden), dtype=how.slicing.dtype)
        with without_autocast(hidden.device.type):
            logits_of = _Logits(hidden, weight, bias, how)
            for part in declared_blocks(len(hidden), how.rows, hidden):
                logits = logits_of.make(part)
                if isinstance(logits, FakeTensor):
                    _trace_rows(logits, how.slicing, is_backward=False)
                else:
                    fill(picked[part], logits, words[part], how.slicing)
        ctx.save_for_backward(hidden, weight, bias, words, picked)
        return picked

    @staticmethod
    def backward(ctx: Any, of_picked: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, words, picked = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        how: _BlockSettings = ctx.how
        of_hidden = torch.empty_like(hidden) if needs_hidden else None
        of_weight, of_bias = DeclaredSum(weight.dtype), DeclaredSum(weight.dtype)
        again = torch.empty_like(picked)
        with torch.no_grad(), without_autocast(hidden.device.type):
            logits_of = _Logits(hidden, weight, bias, how)
            for part in declared_blocks(len(hidden), how.rows, hidden):
                logits = logits_of.make(part, keeps=True)
                if isinstance(logits, FakeTensor):
                    _trace_rows(logits, how.slicing, is_backward=True)
                else:
                    # Over the logits.
                    gradient_of(logits, words[part], of_picked[part], how.slicing, picked=again[part])
                over = logits_of.back(logits)
                if of_hidden is not None and of_hidden.dtype == over.dtype:
                    torch.mm(over, logits_of.weight, out=of_hidden[part])
                elif of_hidden is not None:
                    of_hidden[part] = over.mm(logits_of.weight)
                if needs_weight:
                    of_weight.add(over.t().mm(logits_of.input(part)))
                if needs_bias:
                    of_bias.add(over.sum(0))
            compare_again(picked, again, "the head", "write loss: sliced (memory.loss)")
        made = (of_hidden, of_weight.result(), of_bias.result())
        sources = (hidden, weight, bias, of_picked)
        return (*(None if each is None else draw_once(each, *sources) for each in made), None, None)


def _trace_rows(logits: torch.Tensor, slicing: Slicing, *, is_backward: bool) -> None:
    """What the row by row part of a block takes, where a step is traced without a device: its buffers, and passes over
    the logits for as many bytes as it moves. Traced slice by slice, a million tokens would take minutes."""
    wide, narrow = slicing.dtype.itemsize, logits.element_size()
    cast = 0 if slicing.dtype == logits.dtype else wide + narrow
    moved = cast + 2 * wide  # a log-softmax
    held: list[Any] = [Buffers(logits, slicing)]
    if is_backward:
        held.append(torch.zeros_like(held[0].log_probs))
        moved += 3 * wide + cast
    for _ in range(moved // narrow):
        logits.amax(1)
    del held


class _Logits:
    """Makes the logits of one block after the other in the same memory."""

    def __init__(
        self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, how: _BlockSettings
    ) -> None:
        self._hidden = hidden
        self._how = how
        self.weight = weight.to(how.dtype)
        self._bias = None if bias is None else bias.to(how.dtype)
        self._memory = hidden.new_empty((min(how.rows, len(hidden)), len(weight)), dtype=how.dtype)
        self._kept: list[torch.Tensor] = []

    def input(self, part: slice) -> torch.Tensor:
        """What the head reads."""
        return self._hidden[part].to(self._how.dtype)

    def make(self, part: slice, *, keeps: bool = False) -> torch.Tensor:
        """`keeps` what `back` needs."""
        given = self.input(part)
        logits = self._memory[: len(given)]
        if self._bias is None:
            torch.mm(given, self.weight.t(), out=logits)
        else:
            torch.addmm(self._bias, given, self.weight.t(), out=logits)
        for name, number in self._how.steps:
            FORWARD[name](logits, number)
            if keeps and name == TANH:
                self._kept.append(logits.clone())
        return logits

    def back(self, gradient: torch.Tensor) -> torch.Tensor:
        """From the gradient of what `make` gave to that of the head's output, in the same memory."""
        for name, number in reversed(self._how.steps):
            if name == TANH:
                tanh_backward_into(gradient, self._kept.pop(), grad_input=gradient)
            else:
                FORWARD[name](gradient, number)  # what is linear is its own derivative
        return gradient


TANH = "TanhBackward0"
FORWARD: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "DivBackward0": lambda logits, number: logits.div_(number),
    "MulBackward0": lambda logits, number: logits.mul_(number),
    TANH: lambda logits, _: logits.tanh_(),
}
"""By the name of a node, what it does, in place."""
