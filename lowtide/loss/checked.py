"""`lowtide.cross_entropy`: the sliced loss for a training loop of one's own, where this machine keeps its bits.

The first call for a device, dtype and number of words runs the self-test (self_test.py). Where it fails, this is
`torch.nn.functional.cross_entropy`, and a warning says so. It is that too where slices would take more memory than they
save (fewer than 256 rows, or less than 16 MiB of log-probabilities). Cost from then on: one look-up.
"""

from __future__ import annotations

import functools
import warnings

import torch
import torch.nn.functional as F

from lowtide.loss.cross_entropy import ROWS_STEP, check, name_of, saves_memory, sliced_cross_entropy
from lowtide.loss.self_test import same_bits
from lowtide.tensors.kinds import is_plain
from lowtide.tensors.private import FakeTensor, are_transforms_active


def cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    upcast: bool = False,
) -> torch.Tensor:
    """See `lowtide.cross_entropy`."""
    check(logits, labels, reduction)
    upcast = upcast or torch.is_autocast_enabled(logits.device.type)
    if not _is_covered(logits, labels, upcast, is_smooth=label_smoothing > 0):
        whole = logits.float() if upcast and logits.dtype.itemsize < 4 else logits
        return F.cross_entropy(
            whole, labels, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
        )
    return sliced_cross_entropy(
        logits,
        labels,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        upcast=upcast,
    )


def _is_covered(logits: torch.Tensor, labels: torch.Tensor, upcast: bool, *, is_smooth: bool) -> bool:
    if torch.compiler.is_compiling():
        return False  # a compiler that fuses the whole loss has other slices of its own
    num_rows, num_words = logits.shape
    if not saves_memory(num_rows, num_words, torch.float32 if upcast else logits.dtype):
        return False
    if isinstance(logits, FakeTensor):
        return True  # a trace without a device, which has no bits to compare
    if not is_plain(logits) or not is_plain(labels) or are_transforms_active():
        return False
    return _keeps_bits(logits.device, logits.dtype, num_words, upcast, is_smooth)


@functools.cache
def _keeps_bits(device: torch.device, dtype: torch.dtype, num_words: int, upcast: bool, is_smooth: bool) -> bool:
    smoothing = 0.1 if is_smooth else 0.0
    for reduction in ("mean", "sum"):

        def sliced(logits: torch.Tensor, labels: torch.Tensor, reduction: str = reduction) -> torch.Tensor:
            logits = logits.view(-1, num_words)
            return sliced_cross_entropy(
                logits,
                labels.view(-1),
                reduction=reduction,
                label_smoothing=smoothing,
                upcast=upcast,
                slice_rows=ROWS_STEP,
            )

        def plain(logits: torch.Tensor, labels: torch.Tensor, reduction: str = reduction) -> torch.Tensor:
            logits = logits.float() if upcast and dtype.itemsize < 4 else logits
            return F.cross_entropy(
                logits.view(-1, num_words), labels.view(-1), reduction=reduction, label_smoothing=smoothing
            )

        if not same_bits(sliced, plain, device, dtype, num_words):
            warnings.warn(
                f"lowtide: cross_entropy stays plain: in slices it has other bits here (torch {torch.__version__}, "
                f"{device}, {name_of(dtype)}, {num_words} words)",
                stacklevel=3,
            )
            return False
    return True
