"""Cross entropy of logits whose words are spread over ranks, a slice of rows at a time, with the bits of the whole.

What: rank r has the logits of some words for all rows: a DTensor that is sharded over its last dimension, or a plain
part beside the process group. The loss, and the gradient of each part, are those of `torch.nn.functional.cross_entropy`
under torch's `loss_parallel`, to the bit.

How: two all-reduces of vectors over the rows, where torch has three. The first takes the maximum of two vectors: of
each rank's largest logit, and of the target's logit, which one rank has and for which the others say minus infinity. A
maximum is exact in any order. The second adds the sums of exponentials up: the same numbers in a message of the same
shape as torch's, because the order of an addition over more than two ranks may depend on where in a message a number
stands. A single all-reduce of both would have to scale each rank's sum by its own maximum: other bits. The backward
pass needs no exchange.

Why it is safe: all between is row by row, in torch's own formulas (torch/distributed/tensor/parallel/loss.py). The sum
over a row's words is the one kernel that might be cut in another way where there are fewer rows: `self_test.py` asks.
Where it says no, and on other devices than the CPU, where nobody has asked, this rank takes all rows at once: the same
bits, more memory. So ranks need not agree. That their parts make one vocabulary travels with the first message, and
all ranks refuse together where they do not.

Cost: as cross_entropy.py; 2 numbers a rank in the first message, which are looked at, so the device is waited for.
Not covered: label smoothing, z-loss and weights of classes, which torch's own does not have or defines in another way;
meshes of several dimensions (give the local part and the group); double backward.
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from lowtide.errors import ConfigError
from lowtide.loss.cross_entropy import (
    ROWS_STEP,
    check,
    check_names,
    draw_once,
    name_of,
    rows_of_slice,
    saved_of,
    saves_memory,
    slices,
    without_autocast,
)
from lowtide.loss.self_test import same_bits
from lowtide.tensors.private import FakeTensor
from lowtide.tensors.ranks import ALONE
from lowtide.tensors.wrappers import is_distributed

NONE = float("-inf")


@dataclass(frozen=True)
class VocabularyPart:
    """The words that a rank has: from `first_word` on, as many as its logits have columns."""

    group: Any
    """A process group; `ALONE` where one rank has all words."""
    first_word: int


def parallel_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    part: VocabularyPart,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    upcast: bool = False,
    slice_rows: int | None = None,
) -> torch.Tensor:
    """The loss over the whole vocabulary, on every rank of `part.group`. Collective.

    logits: `[rows, words of this rank]`, floating point. target: `[rows]`, int64, the same on all ranks; numbers of
    words of the whole vocabulary, or `ignore_index`. `upcast`: as of `logits.float()`; under autocast it is on.
    `slice_rows`: rows at a time, a multiple of 64; absent, chosen. Raises `ConfigError` for shapes and types that it
    does not cover and, on all ranks, for parts that make no vocabulary; IndexError on the CPU for a target that is no
    word.
    """
    check(logits, target, reduction, slice_rows)
    upcast = upcast or torch.is_autocast_enabled(logits.device.type)
    dtype = torch.float32 if upcast and logits.dtype.itemsize < 4 else logits.dtype
    is_counted = target != ignore_index
    words = torch.where(is_counted, target, 0)
    loss = _PartOfRows.apply(logits, words, _How(part, dtype, slice_rows or _rows_at_a_time(logits, dtype)))
    loss = torch.where(is_counted, loss, 0)
    if reduction == "none":
        return loss
    total = loss.sum()
    return total / is_counted.sum().to(dtype) if reduction == "mean" else total


def dtensor_cross_entropy(logits: Any, target: Any, **how: Any) -> torch.Tensor:
    """`parallel_cross_entropy` of a DTensor `[rows, words]`; a replicated DTensor, as torch's own."""
    from torch.distributed.tensor import DTensor, Replicate

    part = part_of_dtensor(logits)
    if is_distributed(target):
        target = target.to_local()
    loss = parallel_cross_entropy(logits.to_local(), target, part, **how)
    made: torch.Tensor = DTensor.from_local(loss, logits.device_mesh, [Replicate()], run_check=False)
    return made


def part_of_dtensor(logits: Any) -> VocabularyPart:
    """Where the local part of a DTensor `[rows, words]` stands. ConfigError where it is sharded in another way."""
    if not are_words_spread(logits):
        raise ConfigError(
            f"lowtide.cross_entropy: a DTensor must be sharded over its words on a mesh of one dimension, not "
            f"{tuple(logits.placements)} on {logits.device_mesh.ndim}; give its local part, and group="
        )
    ranks, rank = logits.device_mesh.size(), logits.device_mesh.get_local_rank()
    words_a_rank = -(-logits.shape[-1] // ranks)  # as torch.chunk cuts
    return VocabularyPart(logits.device_mesh.get_group(), min(rank * words_a_rank, logits.shape[-1]))


def are_words_spread(logits: Any) -> bool:
    """Whether a DTensor is sharded over its last dimension, on a mesh of one dimension."""
    from torch.distributed.tensor import Shard

    return bool(logits.device_mesh.ndim == 1 and logits.placements == (Shard(logits.ndim - 1),))


def _rows_at_a_time(logits: torch.Tensor, dtype: torch.dtype) -> int:
    num_rows, num_words = logits.shape
    whole = max(1, num_rows)
    if torch.compiler.is_compiling() or not saves_memory(num_rows, num_words, dtype):
        return whole
    if not isinstance(logits, FakeTensor) and not _keeps_bits(logits.device, logits.dtype, num_words, dtype):
        return whole
    return rows_of_slice(num_rows, num_words, dtype)


@functools.cache
def _keeps_bits(device: torch.device, logits_dtype: torch.dtype, num_words: int, dtype: torch.dtype) -> bool:
    def loss(slice_rows: int) -> Any:
        def of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            how = _How(VocabularyPart(ALONE, 0), dtype, slice_rows)
            return _PartOfRows.apply(logits.view(-1, num_words), labels.view(-1).clamp(min=0), how).sum()

        return of

    if device.type == "cpu" and same_bits(loss(ROWS_STEP), loss(ROWS_STEP * 100), device, logits_dtype, num_words):
        return True
    warnings.warn(
        "lowtide: cross_entropy over ranks takes all rows at once: in slices it is not known to have the same bits "
        f"here (torch {torch.__version__}, {device}, {name_of(logits_dtype)}, {num_words} words)",
        stacklevel=4,
    )
    return False


@dataclass(frozen=True)
class _How:
    part: VocabularyPart
    dtype: torch.dtype
    """Of the log-probabilities."""
    num_rows: int
    """At a time."""


class _PartOfRows(torch.autograd.Function):
    """Of each row: minus the log-probability of its word."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, words: torch.Tensor, how: _How) -> torch.Tensor:
        num_rows, num_words = logits.shape
        ctx.how, part, dtype = how, how.part, how.dtype
        accurate = torch.float32 if dtype.itemsize < 4 else dtype
        own = words - part.first_word
        is_elsewhere = (own < 0) | (own >= num_words)
        own = own.masked_fill(is_elsewhere, 0)
        most = torch.full((2, num_rows), NONE, dtype=accurate, device=logits.device)
        with without_autocast(logits.device.type):
            for rows in slices(num_rows if num_words else 0, how.num_rows):
                values = logits[rows].to(dtype).to(accurate)
                most[0, rows] = torch.amax(values, 1)
                most[1, rows] = values.gather(1, own[rows, None])[:, 0]
            most[1].masked_fill_(is_elsewhere, NONE)
            end = _all_reduce_most(most, part, num_words)
            check_names(words, end)
            largest, target = most[0, :, None], most[1, :, None]
            sum_exp = torch.zeros_like(largest, memory_format=torch.contiguous_format)
            for rows in slices(num_rows if num_words else 0, how.num_rows):
                above = logits[rows].to(dtype).to(accurate) - largest[rows]
                sum_exp[rows] = torch.sum(torch.exp(above), 1, keepdim=True)
            if part.group is not ALONE:
                dist.all_reduce(sum_exp, dist.ReduceOp.SUM, group=part.group)
            log_sum = torch.log(sum_exp)
        ctx.save_for_backward(logits, own, is_elsewhere, largest, log_sum)
        picked = ((target - largest) - log_sum).to(dtype)
        return -picked[:, 0]

    @staticmethod
    def backward(ctx: Any, of_rows: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, own, is_elsewhere, largest, log_sum = saved_of(ctx)
        how: _How = ctx.how
        dtype = how.dtype
        with torch.no_grad(), without_autocast(logits.device.type):
            gradient = torch.empty_like(logits)
            for rows in slices(len(logits) if logits.shape[1] else 0, how.num_rows):
                # In place, on tensors of its own: elsewhere than on the CPU these are all rows.
                above = (logits[rows].to(dtype).to(largest.dtype) - largest[rows]).sub_(log_sum[rows])
                probs = above.to(dtype).exp_()
                made = torch.zeros_like(probs)
                made.scatter_(1, own[rows, None], is_elsewhere[rows, None].to(dtype) - 1.0)
                gradient[rows] = made.add_(probs).mul_(of_rows[rows, None])
                del above, probs, made
        return draw_once(gradient, logits, of_rows), None, None


def _all_reduce_most(most: torch.Tensor, part: VocabularyPart, num_words: int) -> int:
    """The maximum over ranks, in place; and how many words they have together. Raises ConfigError on all ranks where
    their parts do not make one vocabulary."""
    if part.group is ALONE:
        return num_words
    ranks, rank = dist.get_world_size(part.group), dist.get_rank(part.group)
    places = most.new_full((ranks, 2), NONE)
    places[rank, 0], places[rank, 1] = part.first_word, part.first_word + num_words
    message = torch.cat([most.view(-1), places.view(-1)])
    dist.all_reduce(message, dist.ReduceOp.MAX, group=part.group)
    most.copy_(message[: most.numel()].view_as(most))
    said = [(int(first), int(end)) for first, end in message[most.numel() :].view(ranks, 2).tolist()]
    if [first for first, _ in said] != [0, *(end for _, end in said[:-1])]:
        listed = ", ".join(f"{first}-{end - 1}" for first, end in said)
        raise ConfigError(
            f"lowtide.cross_entropy: the parts of the ranks make no vocabulary: by rank, words {listed}; give each "
            "rank's first_word"
        )
    return said[-1][1]
