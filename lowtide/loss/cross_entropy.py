"""Cross entropy over rows of logits, a slice of rows at a time, with the bits of `torch.nn.functional.cross_entropy`.

Why: for a large vocabulary the loss is the largest thing in a step. With N rows, V words and bf16 logits, plain PyTorch
holds the fp32 log-probabilities from forward to backward (4 N V bytes), and in the backward pass two fp32 gradients of
that size beside them (12 N V). Here the logits stay, and beside them one gradient of their dtype and a few slices in
fp32 (4 N V): for Llama-3-8B with 16,384 tokens, 8 GiB instead of 24.

What is cut: only what works row by row, which is the upcast, the log-softmax, and the gradient of both. What is not:
- the sum over rows. The log-probability of each row's target goes into one vector, and torch's own `nll_loss` is called
  on it once: the same kernel adds the same numbers in the same order.
- the head, the matmul before the loss. The model's own matmul makes its gradients from one whole gradient; products of
  slices, added up, would round in another way.

Why slices are multiples of 64 rows: kernels of CUDA shift their work on a row by its address modulo 16 bytes, so a row
must lie as it does in the whole. `self_test.py` asks the machine at hand whether that is enough.

Cost: the log-softmax is computed once more in the backward pass, one pass over the logits: by its bytes 0.7 % of a step
of Llama-3-8B.
Not covered: weights of classes, targets that are probabilities, more dimensions than rows and words, double backward;
the gradient written over the logits, which would save 2 N V more (docs/decisions/0025-the-sliced-loss.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from lowtide.errors import ConfigError
from lowtide.tensors.private import log_softmax_backward
from lowtide.units import MIB

ROWS_STEP = 64
"""Slices start at multiples of this many rows."""
_IGNORED = -100
_LEAST_BYTES = 4 * MIB
_MOST_BYTES = 64 * MIB
"""Of a slice in the dtype of its log-probabilities. About four slices are alive at once, so they should be small; each
is a dozen kernels, so not too small."""
_SLICES = 16
"""Between these limits, so many slices make the whole."""
_FEWEST_SLICES = 4
"""With fewer, those that are alive at once are as large as what they save."""


@dataclass(frozen=True, slots=True)
class _Slicing:
    dtype: torch.dtype
    """Of the log-probabilities."""
    num_rows: int
    has_total: bool
    """Whether the sum of a row's log-probabilities is asked for too."""


def sliced_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    upcast: bool = False,
    slice_rows: int | None = None,
) -> torch.Tensor:
    """`torch.nn.functional.cross_entropy(logits, target, ...)`, the loss and the gradient of `logits` to the bit.

    logits: `[rows, words]`, floating point. target: `[rows]`, int64, word numbers or `ignore_index`.
    `upcast`: `cross_entropy(logits.float(), ...)` without the copy. Under autocast, which does so itself, it is on.
    `slice_rows`: rows at a time, a multiple of 64; absent, chosen by `rows_of_slice`.
    Raises `ConfigError` for shapes and types that it does not cover.
    """
    check(logits, target, reduction, slice_rows)
    if torch.is_autocast_enabled(logits.device.type):
        upcast = True
    dtype = torch.float32 if upcast and logits.dtype.itemsize < 4 else logits.dtype
    num_rows = slice_rows or rows_of_slice(logits.shape[0], logits.shape[1], dtype)
    is_ignored = target == ignore_index
    words = target.masked_fill(is_ignored, 0)
    picked, total = _OfRows.apply(logits, words, _Slicing(dtype, num_rows, has_total=bool(label_smoothing)))
    # What follows is on vectors of rows, by the operators that the whole would use. Each row has one word left, 0.
    only_word = torch.zeros_like(target).masked_fill(is_ignored, _IGNORED)
    loss = F.nll_loss(picked[:, None], only_word, ignore_index=_IGNORED, reduction=reduction)
    if not label_smoothing:
        return loss
    smooth = (-total).masked_fill(is_ignored, 0.0)
    if reduction == "mean":
        smooth = smooth.sum() / is_ignored.logical_not().sum()
    elif reduction == "sum":
        smooth = smooth.sum()
    return (1 - label_smoothing) * loss + smooth * (label_smoothing / logits.shape[1])


def rows_of_slice(num_rows: int, num_words: int, dtype: torch.dtype) -> int:
    """How many of `num_rows` to take at a time: a sixteenth, within 4 and 64 MiB; a multiple of 64."""
    row_bytes = max(1, num_words * dtype.itemsize)
    slice_bytes = min(max(num_rows * row_bytes // _SLICES, _LEAST_BYTES), _MOST_BYTES)
    return max(1, slice_bytes // row_bytes // ROWS_STEP) * ROWS_STEP


def saves_memory(num_rows: int, num_words: int, dtype: torch.dtype) -> bool:
    """Whether slices take less memory than the whole, in a loss whose log-probabilities have this dtype."""
    return num_rows >= _FEWEST_SLICES * rows_of_slice(num_rows, num_words, dtype)


def check(logits: torch.Tensor, target: torch.Tensor, reduction: str, slice_rows: int | None = None) -> None:
    """Raises `ConfigError` for what `sliced_cross_entropy` does not cover."""
    if logits.dim() != 2 or target.dim() != 1 or logits.shape[0] != target.shape[0]:
        raise ConfigError(
            "lowtide.cross_entropy: needs logits of shape [rows, words] and targets of shape [rows], not "
            f"{list(logits.shape)} and {list(target.shape)}; use logits.view(-1, words) and target.view(-1)"
        )
    if not logits.is_floating_point() or target.dtype != torch.int64:
        raise ConfigError(
            "lowtide.cross_entropy: needs floating-point logits and int64 targets, not "
            f"{name_of(logits.dtype)} and {name_of(target.dtype)}; targets that are probabilities are not covered"
        )
    if reduction not in ("mean", "sum", "none"):
        raise ConfigError(f"lowtide.cross_entropy: reduction must be mean, sum or none, not {reduction!r}")
    if slice_rows is not None and (slice_rows < 1 or slice_rows % ROWS_STEP):
        raise ConfigError(f"lowtide.cross_entropy: slice_rows must be a multiple of {ROWS_STEP}, not {slice_rows}")


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class _OfRows(torch.autograd.Function):
    """Of each row: the log-probability of its word, and if asked the sum of those of all words."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, words: torch.Tensor, slicing: _Slicing
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        ctx.save_for_backward(logits, words)
        ctx.slicing = slicing
        picked = logits.new_empty(len(logits), dtype=slicing.dtype)
        total = torch.empty_like(picked) if slicing.has_total else None
        for part in _slices(len(logits), slicing):
            log_probs = torch.log_softmax(logits[part].to(slicing.dtype), 1)
            picked[part] = log_probs.gather(1, words[part, None])[:, 0]
            if total is not None:
                total[part] = log_probs.sum(1)
        return picked, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_picked: torch.Tensor, of_total: torch.Tensor | None) -> tuple[torch.Tensor, None, None]:
        logits, words = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        for part in _slices(len(logits), ctx.slicing):
            log_probs = torch.log_softmax(logits[part].to(ctx.slicing.dtype), 1)
            of_log_probs = torch.zeros_like(log_probs).scatter_(1, words[part, None], of_picked[part, None])
            if of_total is not None:
                of_log_probs += of_total[part, None]
            gradient[part] = log_softmax_backward(of_log_probs, log_probs, 1, ctx.slicing.dtype)
        return gradient, None, None


def _slices(num_rows: int, slicing: _Slicing) -> list[slice]:
    return [slice(start, start + slicing.num_rows) for start in range(0, num_rows, slicing.num_rows)]
