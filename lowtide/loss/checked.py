"""`lowtide.cross_entropy`: the sliced loss for a training loop of one's own, where this machine keeps its bits.

The first call for a device, dtype and number of words runs the self-test (`same_bits`). Where it fails, this is
`torch.nn.functional.cross_entropy`, and a warning says so. It is that too with weights of classes, and where slices
would take more memory than they save (fewer than 256 rows, or less than 16 MiB of log-probabilities). With label
smoothing and z-loss it is plain too: they sum over the words of a row, and how an accelerator cuts such a sum depends
on how many rows there are. Cost from the second call on: one look-up.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from lowtide.errors import ConfigError, wrong_argument
from lowtide.loss.cross_entropy import (
    ROWS_STEP,
    check,
    is_ordinary,
    keeps_bits,
    saves_memory,
    sliced_cross_entropy,
    whole_cross_entropy,
)
from lowtide.loss.head import head_cross_entropy, why_not_in_blocks
from lowtide.tensors.private import FakeTensor, are_transforms_active, has_hooks, is_forward_mode
from lowtide.tensors.wrappers import is_distributed

_CALL = "lowtide.cross_entropy"


def cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    upcast: bool = False,
    head: torch.nn.Linear | None = None,
    rows: int | None = None,
) -> torch.Tensor:
    """`torch.nn.functional.cross_entropy(logits, labels, ...)` in slices of rows: the loss and the gradient of the
    logits are the same to the bit, in a third of the memory (loss/cross_entropy.py).

    logits: `[rows, words]`. labels: `[rows]`, int64. `upcast`: as `cross_entropy(logits.float(), ...)`, for logits in
    bf16 or fp16. `z_loss`: so many times the square of `torch.logsumexp(logits, 1)` is added, as the mean (or sum) over
    the rows that are not ignored. Raises `ConfigError` for other shapes, types and ranges.
    The loss is torch's own, in one piece, with a `weight` of classes, `label_smoothing` or `z_loss`, and of a DTensor;
    and, with a warning, where slices would have other bits on this machine. Sliced, it has no second derivative, and
    logits must stay as they are until the backward pass; both raise RuntimeError.

    With `head` and `rows` it is the loss of `head(x)`: give x, `[rows, width]`, in place of logits. Head and loss are
    taken in blocks of so many rows, so that logits never exist whole. The gradient of the head's weight is the sum of
    the blocks', in order; its bits depend on `rows` (loss/head.py).
    """
    for name, value in (("logits", logits), ("labels", labels), *([] if weight is None else [("weight", weight)])):
        if not isinstance(value, torch.Tensor):
            raise wrong_argument(_CALL, name, "a tensor", value)
    for name, number in (("label_smoothing", label_smoothing), ("z_loss", z_loss)):
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise wrong_argument(_CALL, name, "a number", number)
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise wrong_argument(_CALL, "ignore_index", "a whole number", ignore_index)
    check(logits, labels, reduction)
    if not 0 <= label_smoothing <= 1:
        raise ConfigError(f"lowtide.cross_entropy: label_smoothing must be between 0 and 1, not {label_smoothing}")
    if not 0 <= z_loss < float("inf"):
        raise ConfigError(f"lowtide.cross_entropy: z_loss must be 0 or more, not {z_loss}")
    is_whole = weight is not None or bool(label_smoothing) or bool(z_loss) or is_distributed(logits)
    if head is not None or rows is not None:
        if is_whole or are_transforms_active() or is_forward_mode():
            raise ConfigError(
                "lowtide.cross_entropy: a weight of classes, label_smoothing, z_loss, words that are spread over "
                "ranks, torch.func and forward-mode derivatives are not covered in blocks of rows; leave head and rows "
                "out"
            )
        linear, num_rows = _blocks(head, rows)
        in_blocks: dict[str, Any] = {"rows": num_rows, "ignore_index": ignore_index, "reduction": reduction}
        if len(logits):
            return head_cross_entropy(logits, linear, labels, upcast=upcast, **in_blocks)
        logits = linear(logits)  # no rows, no blocks
    upcast = upcast or torch.is_autocast_enabled(logits.device.type)
    how: dict[str, Any] = {"ignore_index": ignore_index, "reduction": reduction}
    if is_whole or not _is_covered(logits, labels, upcast):
        whole = logits.float() if upcast and logits.dtype.itemsize < 4 else logits
        how |= {"label_smoothing": label_smoothing, "z_loss": z_loss}
        return whole_cross_entropy(whole, labels, weight=weight, **how)
    return sliced_cross_entropy(logits, labels, upcast=upcast, **how)


def _blocks(head: torch.nn.Linear | None, rows: int | None) -> tuple[torch.nn.Linear, int]:
    """Both. Raises `ConfigError` where one is missing or not covered."""
    if head is None or rows is None:
        raise ConfigError(
            "lowtide.cross_entropy: head and rows go together: in blocks of rows the head's matmul is part of the "
            "loss; give both (and what the head reads in place of logits), or neither"
        )
    if isinstance(rows, bool) or not isinstance(rows, int):
        raise wrong_argument(_CALL, "rows", "a whole number", rows)
    if rows < 1:
        raise ConfigError(f"lowtide.cross_entropy: rows must be 1 or more, not {rows}")
    if reason := why_not_in_blocks(head) or ("the head has hooks, which would not run" if has_hooks(head) else ""):
        raise ConfigError(f"lowtide.cross_entropy: this cannot be taken in blocks of rows: {reason}")
    return head, rows


def _is_covered(logits: torch.Tensor, labels: torch.Tensor, upcast: bool) -> bool:
    if torch.compiler.is_compiling():
        return False  # a compiler that fuses the whole loss has other slices of its own
    num_rows, num_words = logits.shape
    if not saves_memory(num_rows, num_words, torch.float32 if upcast else logits.dtype):
        return False
    if isinstance(logits, FakeTensor):
        return True  # a trace without a device, which has no bits to compare
    return is_ordinary(logits, labels) and _keeps_bits(logits.device, logits.dtype, num_words, upcast)


@functools.cache
def _keeps_bits(device: torch.device, dtype: torch.dtype, num_words: int, upcast: bool) -> bool:
    def sliced(logits: torch.Tensor, labels: torch.Tensor, *, reduction: str) -> torch.Tensor:
        how: dict[str, Any] = {"reduction": reduction, "upcast": upcast, "slice_rows": ROWS_STEP}
        return sliced_cross_entropy(logits.view(-1, num_words), labels.view(-1), **how)

    def plain(logits: torch.Tensor, labels: torch.Tensor, *, reduction: str) -> torch.Tensor:
        rows = (logits.float() if upcast and dtype.itemsize < 4 else logits).view(-1, num_words)
        return whole_cross_entropy(rows, labels.view(-1), ignore_index=-100, reduction=reduction)

    hows = [{"reduction": "mean"}, {"reduction": "sum"}]
    return keeps_bits("cross_entropy", sliced, plain, hows, device, dtype, num_words)
