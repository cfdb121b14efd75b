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
must lie as it does in the whole. `same_bits` asks the machine at hand whether that is enough.

Why it is safe: the backward pass reads the logits again, where the plain loss has its own copy of what it needs. So a
write to the logits between loss and backward is refused by name, and so is a second derivative, which would have to go
through both passes. Autocast around the backward pass changes nothing.

Why all slices use the same few buffers: fresh memory costs a page fault for each page, and the gradient of a slice is
written where it belongs (docs/decisions/0087-one-set-of-buffers-for-all-slices.md).

Cost: the log-softmax is computed once more in the backward pass, one pass over the logits. On a CPU 0.4 to 1.25 of the
processor time of the plain loss, which makes large tensors that this one does not make.
Not covered: weights of classes, label smoothing and z-loss (sums over the words of a row, which an accelerator cuts by
how many rows there are), targets that are probabilities, more dimensions than rows and words, double backward; writes
to the logits through `.data`, which no version counts; the gradient written over the logits, which would save 2 N V
more (docs/decisions/0025-the-sliced-loss.md).
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from lowtide.errors import ConfigError
from lowtide.loss.blocks import declared_blocks, slices
from lowtide.tensors.kinds import is_plain
from lowtide.tensors.private import (
    are_transforms_active,
    is_forward_mode,
    log_softmax_backward,
    log_softmax_backward_into,
)
from lowtide.tensors.view import same_bytes
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


@dataclass(frozen=True, slots=True)
class Slicing:
    """How rows are taken."""

    dtype: torch.dtype
    """Of the log-probabilities."""
    num_rows: int
    """At a time."""
    is_block: bool = False
    """The logits are those of a block, which nobody else reads: their gradient is written over them."""

    def parts(self, logits: torch.Tensor) -> Iterable[slice]:
        return (declared_blocks if self.is_block else slices)(len(logits), self.num_rows, logits)


def sliced_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    upcast: bool = False,
    slice_rows: int | None = None,
) -> torch.Tensor:
    """`torch.nn.functional.cross_entropy(logits, target, ...)`, the loss and the gradient of `logits` to the bit.

    logits: `[rows, words]`, floating point. target: `[rows]`, int64, word numbers or `ignore_index`.
    `upcast`: `cross_entropy(logits.float(), ...)` without the copy. Under autocast, which does so itself, it is on.
    `slice_rows`: rows at a time, a multiple of 64; absent, chosen by `rows_of_slice`.
    Raises `ConfigError` for shapes and types that it does not cover, and IndexError as torch does for a target that is
    no word (on the CPU; elsewhere the device says so).
    """
    check(logits, target, reduction, slice_rows)
    words, is_ignored = words_of(target, ignore_index, logits.shape[1])
    picked = picked_of(logits, words, upcast=upcast, slice_rows=slice_rows)
    return loss_of_rows(picked, is_ignored, reduction)


def picked_of(
    logits: torch.Tensor, words: torch.Tensor, *, upcast: bool, slice_rows: int | None = None, is_block: bool = False
) -> torch.Tensor:
    """The log-probability of each row's word. `is_block`: of `Slicing`."""
    if torch.is_autocast_enabled(logits.device.type):
        upcast = True
    dtype = torch.float32 if upcast and logits.dtype.itemsize < 4 else logits.dtype
    num_rows = slice_rows or rows_of_slice(logits.shape[0], logits.shape[1], dtype)
    picked: torch.Tensor = _OfRows.apply(logits, words, Slicing(dtype, num_rows, is_block))
    return picked


def words_of(target: torch.Tensor, ignore_index: int, num_words: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The word of each row, any of a row that is ignored; and which are. Raises IndexError as torch does for a number
    of no word; elsewhere than on the CPU, the device does."""
    is_ignored = target == ignore_index
    words = target.masked_fill(is_ignored, 0)
    if words.device.type == "cpu" and is_plain(words):
        out = (words < 0) | (words >= num_words)
        if out.any():
            raise IndexError(f"Target {int(words[out][0])} is out of bounds.")
    return words, is_ignored


def loss_of_rows(picked: torch.Tensor, is_ignored: torch.Tensor, reduction: str) -> torch.Tensor:
    """The loss from the log-probability of each row's word, by the operator that the whole would use."""
    only_word = torch.zeros_like(is_ignored, dtype=torch.int64).masked_fill(is_ignored, _IGNORED)  # each row has one, 0
    return F.nll_loss(picked[:, None], only_word, ignore_index=_IGNORED, reduction=reduction)


def whole_cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, *, ignore_index: int, reduction: str, z_loss: float = 0.0, **more: Any
) -> torch.Tensor:
    """torch's own loss of the whole. `more`: what else that takes. `z_loss`: so many times the square of the logarithm
    of each row's sum of exponentials is added, which a z-loss keeps small (Chowdhery et al., PaLM, 2022, section 5),
    over the rows that are not ignored."""
    loss = F.cross_entropy(logits, target, ignore_index=ignore_index, reduction=reduction, **more)
    if not z_loss:
        return loss
    is_ignored = target == ignore_index
    squares = torch.logsumexp(logits, 1).square().masked_fill(is_ignored, 0.0)
    if reduction == "mean":
        squares = squares.sum() / is_ignored.logical_not().sum()
    return loss + z_loss * (squares.sum() if reduction == "sum" else squares)


def rows_of_slice(num_rows: int, num_words: int, dtype: torch.dtype) -> int:
    """How many of `num_rows` to take at a time: a sixteenth, within 4 and 64 MiB; a multiple of 64."""
    row_bytes = max(1, num_words * dtype.itemsize)
    slice_bytes = min(max(num_rows * row_bytes // _SLICES, _LEAST_BYTES), _MOST_BYTES)
    return max(1, slice_bytes // row_bytes // ROWS_STEP) * ROWS_STEP


def saves_memory(num_rows: int, num_words: int, dtype: torch.dtype) -> bool:
    """Whether slices take less memory than the whole, in a loss whose log-probabilities have this dtype."""
    return num_rows >= _FEWEST_SLICES * rows_of_slice(num_rows, num_words, dtype)


def is_ordinary(logits: torch.Tensor, labels: torch.Tensor) -> bool:
    """Whether both are tensors of torch's own, and no transform looks on."""
    return is_plain(logits) and is_plain(labels) and not (are_transforms_active() or is_forward_mode())


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
    """Of each row: the log-probability of its word."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, words: torch.Tensor, slicing: Slicing) -> torch.Tensor:
        picked = logits.new_empty(len(logits), dtype=slicing.dtype)
        with without_autocast(logits.device.type):
            fill(picked, logits, words, slicing)
        ctx.save_for_backward(logits, words)
        ctx.slicing = slicing
        return picked

    @staticmethod
    def backward(ctx: Any, of_picked: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        try:
            logits, words = ctx.saved_tensors
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            raise RuntimeError(
                "lowtide: the logits were written to between the loss and its backward pass, where a loss in slices "
                "reads them again; write to a copy of them (logits.clone()), or write loss: plain (memory.loss)"
            ) from error
        given = (logits, words, of_picked)
        with torch.no_grad(), without_autocast(logits.device.type):
            gradient = _made(
                lambda: gradient_of(*given, ctx.slicing), lambda: _gradients_of_slices(*given, ctx.slicing)
            )
        if torch.is_grad_enabled():
            gradient = _OnlyOnce.apply(gradient, logits, of_picked)
        return gradient, None, None


def fill(picked: torch.Tensor, logits: torch.Tensor, words: torch.Tensor, slicing: Slicing) -> None:
    """Write the log-probability of each row's word to `picked`."""
    buffers = Buffers(logits, slicing)
    for part in slicing.parts(logits):
        numbers = buffers.upcast(logits[part])
        log_probs = torch.log_softmax(numbers, 1, out=buffers.log_probs[: len(numbers)])
        torch.gather(log_probs, 1, words[part, None], out=picked[part, None])


def _made(whole: Callable[[], torch.Tensor], slices: Callable[[], Iterator[torch.Tensor]]) -> torch.Tensor:
    try:
        return whole()
    except RuntimeError as error:
        if not str(error).startswith("vmap: "):
            raise
        # Several gradients at once (`is_grads_batched`) cannot be written into one tensor.
        return torch.cat(list(slices()))


def gradient_of(logits: torch.Tensor, words: torch.Tensor, of_picked: torch.Tensor, slicing: Slicing) -> torch.Tensor:
    """Of the logits, from that of what `fill` gave, in the layout of plain autograd's: a log-softmax gives one in rows,
    whatever the layout of the logits."""
    gradient = logits if slicing.is_block else torch.empty_like(logits, memory_format=torch.contiguous_format)
    buffers = Buffers(logits, slicing)
    of_log_probs = torch.zeros_like(buffers.log_probs)
    for part in slicing.parts(logits):
        numbers = buffers.upcast(logits[part])
        log_probs = torch.log_softmax(numbers, 1, out=buffers.log_probs[: len(numbers)])
        outer, mine = of_log_probs[: len(numbers)], words[part, None]
        outer.scatter_(1, mine, of_picked[part, None])
        made = buffers.for_gradient(gradient[part])
        log_softmax_backward_into(outer, log_probs, 1, slicing.dtype, out=made)
        if made.dtype != gradient.dtype:
            gradient[part] = made
        outer.scatter_(1, mine, 0.0)  # zeros again for the next slice
    return gradient


def _gradients_of_slices(
    logits: torch.Tensor, words: torch.Tensor, of_picked: torch.Tensor, slicing: Slicing
) -> Iterator[torch.Tensor]:
    """The same by functions alone."""
    for part in slicing.parts(logits):
        log_probs = torch.log_softmax(logits[part].to(slicing.dtype), 1)
        outer = torch.zeros_like(log_probs).scatter(1, words[part, None], of_picked[part, None])
        yield log_softmax_backward(outer, log_probs, 1, slicing.dtype).to(logits.dtype)


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


@contextlib.contextmanager
def without_autocast(device_type: str) -> Iterator[None]:
    """Inside, kernels run in the dtype that they are given, also in a backward pass under autocast."""
    if not torch.is_autocast_enabled(device_type):
        yield  # leaving autocast would drop the copies that it has of weights
        return
    with torch.autocast(device_type, enabled=False):
        yield


# -- whether this machine keeps the bits -------------------------------------------------------------------------------


Loss = Callable[..., torch.Tensor]
"""A loss of logits `[2, 48, words]` and targets `[2, 48]`."""
_TRIED_SHAPE = (2, 48)


def keeps_bits(
    what: str,
    sliced: Loss,
    plain: Loss,
    hows: Sequence[dict[str, Any]],
    *place: Any,  # of `same_bits`
) -> bool:
    """Whether the sliced loss has the bits of the plain one, called in each of these ways, for so many words on this
    machine; a warning says of `what` that it has not."""
    if all(same_bits(partial(sliced, **how), partial(plain, **how), *place) for how in hows):
        return True
    device, dtype, words = place
    warnings.warn(
        f"lowtide: {what} stays plain: in slices it has other bits here (torch {torch.__version__}, {device}, "
        f"{name_of(dtype)}, {words} words)",
        stacklevel=4,
    )
    return False


def same_bits(sliced: Loss, plain: Loss, device: torch.device, dtype: torch.dtype, num_words: int) -> bool:
    """Whether both give the same loss and the same gradient of logits of this dtype on this device.

    That a kernel computes each row by itself, whatever rows are beside it, is so in every version that was read, and
    promised in none. So both losses run on 96 rows (slices of 64 and 32), with and without ignored targets. In a thread
    of its own: autocast, hooks of saved tensors, dispatch modes and whether gradients are on belong to a thread, and
    this must neither see those of the caller nor be seen by them. Not covered: kernels that a library chooses by the
    number of rows only where there are many.
    """
    with ThreadPoolExecutor(max_workers=1) as own_thread:
        return own_thread.submit(_compare, sliced, plain, device, dtype, num_words).result()


def _compare(sliced: Loss, plain: Loss, device: torch.device, dtype: torch.dtype, num_words: int) -> bool:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(*_TRIED_SHAPE, num_words, generator=generator).mul_(4).to(device=device, dtype=dtype)
    targets = torch.randint(num_words, _TRIED_SHAPE, generator=generator)
    some = targets.masked_fill(torch.rand(_TRIED_SHAPE, generator=generator) < 0.3, _IGNORED)
    runs = ((_run(sliced, numbers, each), _run(plain, numbers, each)) for each in (targets.to(device), some.to(device)))
    return all(same_bytes(*both) for pair in runs for both in zip(*pair, strict=True))


def _run(loss: Loss, numbers: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logits = numbers.clone().requires_grad_()
    value = loss(logits, targets)
    (gradient,) = torch.autograd.grad(value, logits)
    return value.detach(), gradient
