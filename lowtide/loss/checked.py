"""`lowtide.cross_entropy`: the sliced loss for a training loop of one's own, where this machine keeps its bits.

The first call for a device, dtype and number of words runs the self-test (self_test.py). Where it fails, this is
`torch.nn.functional.cross_entropy`, and a warning says so. It is that too with weights of classes, and where slices
would take more memory than they save (fewer than 256 rows, or less than 16 MiB of log-probabilities). Label smoothing
and z-loss sum over the words of a row; how an accelerator cuts such a sum depends on how many rows there are, so there
they stay plain, and a warning says so. Cost from the second call on: one look-up.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch

from lowtide.errors import ConfigError, wrong_argument
from lowtide.loss.cross_entropy import (
    ROWS_STEP,
    check,
    check_factors,
    name_of,
    saves_memory,
    sliced_cross_entropy,
    whole_cross_entropy,
)
from lowtide.loss.head import head_cross_entropy, why_not_in_blocks
from lowtide.loss.parallel import VocabularyPart, dtensor_cross_entropy, parallel_cross_entropy
from lowtide.loss.self_test import same_bits
from lowtide.tensors.kinds import is_plain
from lowtide.tensors.private import FakeTensor, are_transforms_active, is_forward_mode
from lowtide.tensors.ranks import check_group
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
    group: Any = None,
    first_word: int | None = None,
    head: torch.nn.Linear | None = None,
    rows: int | None = None,
) -> torch.Tensor:
    """`torch.nn.functional.cross_entropy(logits, labels, ...)` in slices of rows: the loss and the gradient of the
    logits are the same to the bit, in a third of the memory (loss/cross_entropy.py).

    logits: `[rows, words]`. labels: `[rows]`, int64. `upcast`: as `cross_entropy(logits.float(), ...)`, for logits in
    bf16 or fp16. `z_loss`: so many times the square of `torch.logsumexp(logits, 1)` is added, as the mean (or sum) over
    the rows that are not ignored. Raises `ConfigError` for other shapes, types and ranges. With a `weight` of classes
    the loss is torch's own; so it is where slices have other bits on this machine, and then a warning says so. There is
    no second derivative, and the logits must stay as they are until the backward pass; both raise RuntimeError.

    Where the words are spread over ranks, logits are a DTensor that is sharded over them, or this rank's part with the
    process `group`: `[rows, words of this rank]`, from `first_word` on (absent: all ranks have equally many). The loss
    is that of the whole vocabulary on every rank, to the bit that of torch's `loss_parallel`, with two all-reduces in
    place of three (loss/parallel.py). Collective.

    With `head` and `rows`, it is the loss of `head(logits)`: what is given is what the head reads, `[rows, width]`, and
    head and loss are taken in blocks of so many rows, so that logits never exist whole. The gradient of the head's
    weight is the sum of the blocks', in order; its bits depend on `rows` (loss/head.py).
    """
    for name, value in (("logits", logits), ("labels", labels), *([] if weight is None else [("weight", weight)])):
        if not isinstance(value, torch.Tensor):
            raise wrong_argument(_CALL, name, "a tensor", value)
    for name, number in (("label_smoothing", label_smoothing), ("z_loss", z_loss)):
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise wrong_argument(_CALL, name, "a number", number)
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise wrong_argument(_CALL, "ignore_index", "a whole number", ignore_index)
    check_group(group, _CALL)
    check(logits, labels, reduction)
    if head is not None or rows is not None:
        if group is not None or is_distributed(logits) or weight is not None:
            raise ConfigError(
                "lowtide.cross_entropy: a weight of classes and words that are spread over ranks are not covered in "
                "blocks of rows; leave head and rows out"
            )
        linear, num_rows = _blocks(head, rows)
        return head_cross_entropy(
            logits,
            linear,
            labels,
            rows=num_rows,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            upcast=upcast,
        )
    check_factors(label_smoothing, z_loss)
    if (first_word is not None and group is None) or (group is not None and is_distributed(logits)):
        raise ConfigError(
            "lowtide.cross_entropy: group and first_word say where the plain part of a rank belongs: first_word goes "
            "with group, and a DTensor knows both; leave them out"
        )
    if group is not None or is_distributed(logits):
        if weight is not None or label_smoothing or z_loss:
            raise ConfigError(
                "lowtide.cross_entropy: weight, label_smoothing and z_loss are not covered where the words are spread "
                "over ranks; leave them out, or gather the logits"
            )
        parallel: dict[str, Any] = {"ignore_index": ignore_index, "reduction": reduction, "upcast": upcast}
        if is_distributed(logits):
            return dtensor_cross_entropy(logits, labels, **parallel)
        if first_word is None:
            first_word = torch.distributed.get_rank(group) * logits.shape[1]
        return parallel_cross_entropy(logits, labels, VocabularyPart(group, first_word), **parallel)
    upcast = upcast or torch.is_autocast_enabled(logits.device.type)
    how: dict[str, Any] = {"reduction": reduction, "label_smoothing": label_smoothing, "z_loss": z_loss}
    asked = (upcast, label_smoothing > 0, z_loss > 0)
    if weight is not None or not _is_covered(logits, labels, asked):
        whole = logits.float() if upcast and logits.dtype.itemsize < 4 else logits
        return whole_cross_entropy(whole, labels, weight=weight, ignore_index=ignore_index, **how)
    return sliced_cross_entropy(logits, labels, ignore_index=ignore_index, upcast=upcast, **how)


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
    if reason := why_not_in_blocks(head):
        raise ConfigError(f"lowtide.cross_entropy: this cannot be taken in blocks of rows: {reason}")
    return head, rows


_Asked = tuple[bool, bool, bool]
"""Of a loss: whether logits are cast to fp32, whether labels are smoothed, whether there is a z-loss."""


def _is_covered(logits: torch.Tensor, labels: torch.Tensor, asked: _Asked) -> bool:
    if torch.compiler.is_compiling():
        return False  # a compiler that fuses the whole loss has other slices of its own
    num_rows, num_words = logits.shape
    if not saves_memory(num_rows, num_words, torch.float32 if asked[0] else logits.dtype):
        return False
    if isinstance(logits, FakeTensor):
        return True  # a trace without a device, which has no bits to compare
    if not is_plain(logits) or not is_plain(labels) or are_transforms_active() or is_forward_mode():
        return False
    return _keeps_bits(logits.device, logits.dtype, num_words, asked)


@functools.cache
def _keeps_bits(device: torch.device, dtype: torch.dtype, num_words: int, asked: _Asked) -> bool:
    upcast, is_smooth, has_z_loss = asked
    if (is_smooth or has_z_loss) and device.type != "cpu":
        warnings.warn(
            f"lowtide: cross_entropy stays plain: label_smoothing and z_loss sum over the words of a row, which is not "
            f"known to keep its bits in slices on {device.type}",
            stacklevel=3,
        )
        return False
    for reduction in ("mean", "sum"):
        how: dict[str, Any] = {"reduction": reduction, "label_smoothing": 0.1 * is_smooth, "z_loss": 1e-3 * has_z_loss}

        def sliced(logits: torch.Tensor, labels: torch.Tensor, how: Any = how) -> torch.Tensor:
            rows = logits.view(-1, num_words)
            return sliced_cross_entropy(rows, labels.view(-1), upcast=upcast, slice_rows=ROWS_STEP, **how)

        def plain(logits: torch.Tensor, labels: torch.Tensor, how: Any = how) -> torch.Tensor:
            rows = (logits.float() if upcast and dtype.itemsize < 4 else logits).view(-1, num_words)
            return whole_cross_entropy(rows, labels.view(-1), ignore_index=-100, **how)

        if not same_bits(sliced, plain, device, dtype, num_words):
            warnings.warn(
                f"lowtide: cross_entropy stays plain: in slices it has other bits here (torch {torch.__version__}, "
                f"{device}, {name_of(dtype)}, {num_words} words)",
                stacklevel=3,
            )
            return False
    return True
