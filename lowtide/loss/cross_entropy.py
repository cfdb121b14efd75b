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

Why it is safe: the backward pass reads the logits again, where the plain loss has its own copy of what it needs. So a
write to the logits between loss and backward is refused by name, and so is a second derivative, which would have to go
through both passes. Autocast around the backward pass changes nothing.

Why all slices use the same few buffers: fresh memory costs a page fault for each page, and the gradient of a slice is
written where it belongs (docs/decisions/0087-one-set-of-buffers-for-all-slices.md).

Cost: the log-softmax is computed once more in the backward pass, one pass over the logits. On a CPU 0.4 to 1.25 of the
processor time of the plain loss, which makes large tensors that this one does not make.
Not covered: weights of classes, targets that are probabilities, more dimensions than rows and words, double backward;
writes to the logits through `.data`, which no version counts; the gradient written over the logits, which would save
2 N V more (docs/decisions/0025-the-sliced-loss.md).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from lowtide.errors import ConfigError
from lowtide.tensors.kinds import is_plain
from lowtide.tensors.private import log_softmax_backward, log_softmax_backward_into
from lowtide.units import MIB

ROWS_STEP = 64
"""Slices start at multiples of this many rows."""
_IGNORED = -100
_LEAST_BYTES = 4 * MIB
_MOST_BYTES = 64 * MIB
"""Of a slice in the dtype of its log-probabilities. Two or three slices are alive at once, so they should be small;
each is a dozen kernels, so not too small."""
_SLICES = 16
"""Between these limits, so many slices make the whole."""
_FEWEST_SLICES = 4
"""With fewer, those that are alive at once are as large as what they save."""


Rows = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
"""Of each row: the log-probability of its word, and if asked the sum of those of all words, and the logarithm of the
sum of exponentials."""


@dataclass(frozen=True, slots=True)
class Slicing:
    dtype: torch.dtype
    """Of the log-probabilities."""
    num_rows: int
    has_total: bool
    """Whether the sum of a row's log-probabilities is asked for too."""
    has_log_sum: bool
    """Whether the logarithm of a row's sum of exponentials is."""


def sliced_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    upcast: bool = False,
    slice_rows: int | None = None,
) -> torch.Tensor:
    """`torch.nn.functional.cross_entropy(logits, target, ...)`, the loss and the gradient of `logits` to the bit.

    logits: `[rows, words]`, floating point. target: `[rows]`, int64, word numbers or `ignore_index`.
    `z_loss`: so many times the `square_of_log_sums` is added, as `whole_cross_entropy` does.
    `upcast`: `cross_entropy(logits.float(), ...)` without the copy. Under autocast, which does so itself, it is on.
    `slice_rows`: rows at a time, a multiple of 64; absent, chosen by `rows_of_slice`.
    Raises `ConfigError` for shapes and types that it does not cover, and IndexError as torch does for a target that is
    no word (on the CPU; elsewhere the device says so).
    """
    check(logits, target, reduction, slice_rows)
    check_factors(label_smoothing, z_loss)
    if torch.is_autocast_enabled(logits.device.type):
        upcast = True
    dtype = torch.float32 if upcast and logits.dtype.itemsize < 4 else logits.dtype
    num_rows = slice_rows or rows_of_slice(logits.shape[0], logits.shape[1], dtype)
    is_ignored = target == ignore_index
    words = target.masked_fill(is_ignored, 0)
    check_names(words, logits.shape[1])
    is_cast = dtype != logits.dtype
    slicing = Slicing(dtype, num_rows, has_total=bool(label_smoothing), has_log_sum=bool(z_loss) and is_cast)
    picked, total, log_sum = _OfRows.apply(logits, words, slicing)
    if z_loss and not is_cast:
        # Autograd adds up the gradients of all that reads the same logits in its own order, and what reads them after
        # this loss comes before both of its parts. An upcast copy is read by these two alone.
        log_sum = _LogSum.apply(logits, num_rows)
    return loss_of_rows(
        (picked, total, log_sum),
        is_ignored,
        num_words=logits.shape[1],
        reduction=reduction,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
    )


def loss_of_rows(
    made: Rows, is_ignored: torch.Tensor, *, num_words: int, reduction: str, label_smoothing: float, z_loss: float
) -> torch.Tensor:
    """The loss from what there is of each row, by the operators that the whole would use: all on vectors of rows."""
    picked, total, log_sum = made
    only_word = torch.zeros_like(is_ignored, dtype=torch.int64).masked_fill(is_ignored, _IGNORED)  # each row has one, 0
    loss = F.nll_loss(picked[:, None], only_word, ignore_index=_IGNORED, reduction=reduction)
    if label_smoothing:
        assert total is not None
        smooth = _reduced((-total).masked_fill(is_ignored, 0.0), is_ignored, reduction)
        loss = (1 - label_smoothing) * loss + smooth * (label_smoothing / num_words)
    if not z_loss:
        return loss
    assert log_sum is not None
    return loss + z_loss * square_of_log_sums(log_sum, is_ignored, reduction)


def whole_cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, *, ignore_index: int, reduction: str, z_loss: float = 0.0, **more: Any
) -> torch.Tensor:
    """What `sliced_cross_entropy` is to the bit, of the whole. `more`: what else torch's own takes."""
    loss = F.cross_entropy(logits, target, ignore_index=ignore_index, reduction=reduction, **more)
    if not z_loss:
        return loss
    return loss + z_loss * square_of_log_sums(torch.logsumexp(logits, 1), target == ignore_index, reduction)


def square_of_log_sums(log_sum: torch.Tensor, is_ignored: torch.Tensor, reduction: str) -> torch.Tensor:
    """The square of the logarithm of each row's sum of exponentials, which a z-loss keeps small (Chowdhery et al.,
    PaLM, 2022, section 5), over the rows that are not ignored."""
    return _reduced(log_sum.square().masked_fill(is_ignored, 0.0), is_ignored, reduction)


def _reduced(rows: torch.Tensor, is_ignored: torch.Tensor, reduction: str) -> torch.Tensor:
    if reduction == "mean":
        return rows.sum() / is_ignored.logical_not().sum()
    return rows.sum() if reduction == "sum" else rows


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


def check_factors(label_smoothing: float, z_loss: float) -> None:
    """Raises `ConfigError` for factors that are none."""
    if not 0 <= label_smoothing <= 1:
        raise ConfigError(f"lowtide.cross_entropy: label_smoothing must be between 0 and 1, not {label_smoothing}")
    if not 0 <= z_loss < float("inf"):
        raise ConfigError(f"lowtide.cross_entropy: z_loss must be 0 or more, not {z_loss}")


def check_names(words: torch.Tensor, num_words: int) -> None:
    """Raises IndexError as torch does for a number of no word. Elsewhere than on the CPU, the device does."""
    if words.device.type != "cpu" or not is_plain(words):
        return
    out = (words < 0) | (words >= num_words)
    if out.any():
        raise IndexError(f"Target {int(words[out][0])} is out of bounds.")


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class _OfRows(torch.autograd.Function):
    """Of each row: the log-probability of its word, and if asked the sum of those of all words, and the logarithm of
    the sum of exponentials."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, words: torch.Tensor, slicing: Slicing
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        picked = logits.new_empty(len(logits), dtype=slicing.dtype)
        total = torch.empty_like(picked) if slicing.has_total else None
        log_sum = torch.empty_like(picked) if slicing.has_log_sum else None
        with without_autocast(logits.device.type):
            fill((picked, total, log_sum), logits, words, slicing)
        ctx.save_for_backward(logits, words, *([] if log_sum is None else [log_sum]))
        ctx.slicing = slicing
        return picked, total, log_sum

    @staticmethod
    def backward(
        ctx: Any, of_picked: torch.Tensor, of_total: torch.Tensor | None, of_log_sum: torch.Tensor | None
    ) -> tuple[torch.Tensor, None, None]:
        logits, words, *log_sum = saved_of(ctx)
        given = GivenRows(logits, words, log_sum[0] if log_sum else None, of_picked, of_total, of_log_sum)
        with torch.no_grad(), without_autocast(logits.device.type):
            gradient = _made(lambda: gradient_of(given, ctx.slicing), lambda: _gradients_of_slices(given, ctx.slicing))
        return draw_once(gradient, logits, of_picked, of_total, of_log_sum), None, None


def fill(made: Rows, logits: torch.Tensor, words: torch.Tensor, slicing: Slicing) -> None:
    """Write into `made` what `Rows` says, of each row."""
    picked, total, log_sum = made
    buffers = Buffers(logits, slicing)
    for part in slices(len(logits), slicing.num_rows):
        numbers = buffers.upcast(logits[part])
        log_probs = torch.log_softmax(numbers, 1, out=buffers.log_probs[: len(numbers)])
        torch.gather(log_probs, 1, words[part, None], out=picked[part, None])
        if total is not None:
            torch.sum(log_probs, 1, out=total[part])
        if log_sum is not None:
            torch.logsumexp(numbers, 1, out=log_sum[part])


def _made(whole: Callable[[], torch.Tensor], slices: Callable[[], Iterator[torch.Tensor]]) -> torch.Tensor:
    try:
        return whole()
    except RuntimeError as error:
        if not str(error).startswith("vmap: "):
            raise
        # Several gradients at once (`is_grads_batched`) cannot be written into one tensor.
        return torch.cat(list(slices()))


class _LogSum(torch.autograd.Function):
    """Of each row: the logarithm of the sum of exponentials. As a part of its own, for logits that are not cast."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, num_rows: int) -> torch.Tensor:
        log_sum = logits.new_empty(len(logits))
        for part in slices(len(logits), num_rows):
            torch.logsumexp(logits[part], 1, out=log_sum[part])
        ctx.save_for_backward(logits, log_sum)
        ctx.num_rows = num_rows
        return log_sum

    @staticmethod
    def backward(ctx: Any, of_log_sum: torch.Tensor) -> tuple[torch.Tensor, None]:
        logits, log_sum = saved_of(ctx)
        parts = slices(len(logits), ctx.num_rows)

        def whole() -> torch.Tensor:
            gradient = torch.empty_like(logits)
            for part in parts:
                above = torch.sub(logits[part], log_sum[part, None], out=gradient[part]).exp_()
                torch.mul(of_log_sum[part, None], above, out=above)
            return gradient

        def of_slices() -> Iterator[torch.Tensor]:
            return (of_log_sum[part, None] * (logits[part] - log_sum[part, None]).exp() for part in parts)

        with torch.no_grad(), without_autocast(logits.device.type):
            gradient = _made(whole, of_slices)
        return draw_once(gradient, logits, of_log_sum), None


@dataclass(frozen=True, slots=True)
class GivenRows:
    """What the backward pass starts from: what was saved, and the gradients of the outputs."""

    logits: torch.Tensor
    words: torch.Tensor
    log_sum: torch.Tensor | None
    of_picked: torch.Tensor
    of_total: torch.Tensor | None
    of_log_sum: torch.Tensor | None


def gradient_of(given: GivenRows, slicing: Slicing, *, picked: torch.Tensor | None = None) -> torch.Tensor:
    """Of the logits, in the layout of plain autograd's: a log-softmax gives one in rows, whatever the layout of the
    logits; a logsumexp one in theirs, and of a sum the first summand decides. `picked`: write the log-probability of
    each row's word there once more, and the gradient over the logits."""
    logits, of_total = given.logits, given.of_total
    layout = torch.contiguous_format if given.log_sum is None else torch.preserve_format
    gradient = logits if picked is not None else torch.empty_like(logits, memory_format=layout)
    buffers = Buffers(logits, slicing)
    of_log_probs = torch.zeros_like(buffers.log_probs)
    for part in slices(len(logits), slicing.num_rows):
        numbers = buffers.upcast(logits[part])
        log_probs = torch.log_softmax(numbers, 1, out=buffers.log_probs[: len(numbers)])
        if picked is not None:
            torch.gather(log_probs, 1, given.words[part, None], out=picked[part, None])
        more = None
        if given.of_log_sum is not None and given.log_sum is not None:
            more = (numbers - given.log_sum[part, None]).exp_()
            torch.mul(given.of_log_sum[part, None], more, out=more)
        outer, words = of_log_probs[: len(numbers)], given.words[part, None]
        outer.scatter_(1, words, given.of_picked[part, None])
        if of_total is not None:
            outer.add_(of_total[part, None])
        made = buffers.for_gradient(gradient[part])
        log_softmax_backward_into(outer, log_probs, 1, slicing.dtype, out=made)
        if more is not None:
            torch.add(more, made, out=made)  # autograd has the later node's first
            del more
        if made.dtype != gradient.dtype:
            gradient[part] = made
        # Zeros again for the next slice: in as few places as there is something else.
        outer.zero_() if of_total is not None else outer.scatter_(1, words, 0.0)
    return gradient


def _gradients_of_slices(given: GivenRows, slicing: Slicing) -> Iterator[torch.Tensor]:
    """The same by functions alone."""
    for part in slices(len(given.logits), slicing.num_rows):
        numbers = given.logits[part].to(slicing.dtype)
        log_probs = torch.log_softmax(numbers, 1)
        outer = torch.zeros_like(log_probs).scatter(1, given.words[part, None], given.of_picked[part, None])
        if given.of_total is not None:
            outer = outer + given.of_total[part, None]
        made = log_softmax_backward(outer, log_probs, 1, slicing.dtype)
        if given.of_log_sum is not None and given.log_sum is not None:
            above = numbers - given.log_sum[part, None]
            made = given.of_log_sum[part, None] * above.exp() + made
        yield made.to(given.logits.dtype)


class Buffers:
    """Memory for one slice, which all slices use in turn."""

    def __init__(self, logits: torch.Tensor, slicing: Slicing) -> None:
        shape = (min(slicing.num_rows, len(logits)), logits.shape[1])
        self.log_probs = logits.new_empty(shape, dtype=slicing.dtype)
        self._wide = None if logits.dtype == slicing.dtype else torch.empty_like(self.log_probs)

    def upcast(self, rows: torch.Tensor) -> torch.Tensor:
        """`rows` in the dtype of the log-probabilities."""
        return rows if self._wide is None else self._wide[: len(rows)].copy_(rows)

    def for_gradient(self, of_rows: torch.Tensor) -> torch.Tensor:
        """Where to make the gradient in the dtype of the log-probabilities: in its place, or over the upcast rows,
        which nobody needs by then."""
        return of_rows if self._wide is None else self._wide[: len(of_rows)]


class _OnlyOnce(torch.autograd.Function):
    """A gradient that cannot be differentiated again. torch's `once_differentiable` leaves a second derivative out
    where it is asked for by `torch.autograd.grad`, without a word."""

    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor, *made_from: torch.Tensor | None) -> torch.Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(
            "lowtide: a second derivative of a loss in slices is not covered; write loss: plain (memory.loss), or call "
            "torch.nn.functional.cross_entropy in place of lowtide.cross_entropy"
        )


def draw_once(gradient: torch.Tensor, *made_from: torch.Tensor | None) -> torch.Tensor:
    """`gradient`, which raises RuntimeError if a second derivative goes through it to what it was `made_from`."""
    if not torch.is_grad_enabled():
        return gradient
    result: torch.Tensor = _OnlyOnce.apply(gradient, *made_from)
    return result


def saved_of(ctx: Any) -> tuple[torch.Tensor, ...]:
    """What the forward pass saved. Raises RuntimeError, in words of ours, where the logits were written to since."""
    try:
        saved: tuple[torch.Tensor, ...] = ctx.saved_tensors
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        raise RuntimeError(
            "lowtide: the logits were written to between the loss and its backward pass, where a loss in slices reads "
            "them again; write to a copy of them (logits.clone()), or write loss: plain (memory.loss)"
        ) from error
    return saved


@contextlib.contextmanager
def without_autocast(device_type: str) -> Iterator[None]:
    """Inside, kernels run in the dtype that they are given, also in a backward pass under autocast."""
    if not torch.is_autocast_enabled(device_type):
        yield  # leaving autocast would drop the copies that it has of weights
        return
    with torch.autocast(device_type, enabled=False):
        yield


def slices(num_rows: int, at_a_time: int) -> list[slice]:
    return [slice(start, start + at_a_time) for start in range(0, num_rows, at_a_time)]
