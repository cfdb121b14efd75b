"""Does this machine keep the bits of a loss when its rows are taken in slices? PlanRequest once, on numbers of its own.

Why: that a kernel computes each row by itself, whatever rows are beside it, is so in every version that was read, and
promised in none. So the sliced loss and the plain one are both run on 96 rows (slices of 64 and 32), with and without
ignored targets, and must agree to the bit: the loss and the gradient.
Why in a thread of its own: autocast, hooks of saved tensors, dispatch modes and whether gradients are on belong to a
thread, and this must neither see those of the caller nor be seen by them. Its random numbers are its own too.

Cost: some five tensors of 96 rows for a moment, once for a device, dtype and number of words.
Not covered: kernels that a library chooses by the number of rows only where there are many.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""A loss of logits `[2, 48, words]` and targets `[2, 48]`."""
IGNORED = -100
_SHAPE = (2, 48)


def same_bits(sliced: Loss, plain: Loss, device: torch.device, dtype: torch.dtype, num_words: int) -> bool:
    """Whether both give the same loss and the same gradient of logits of this dtype on this device."""
    with ThreadPoolExecutor(max_workers=1) as own_thread:
        return own_thread.submit(_compare, sliced, plain, device, dtype, num_words).result()


def _compare(sliced: Loss, plain: Loss, device: torch.device, dtype: torch.dtype, num_words: int) -> bool:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(*_SHAPE, num_words, generator=generator).mul_(4).to(device=device, dtype=dtype)
    targets = torch.randint(num_words, _SHAPE, generator=generator)
    some = targets.masked_fill(torch.rand(_SHAPE, generator=generator) < 0.3, IGNORED)
    return all(
        _same(_run(sliced, numbers, each.to(device)), _run(plain, numbers, each.to(device))) for each in (targets, some)
    )


def _run(loss: Loss, numbers: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logits = numbers.clone().requires_grad_()
    value = loss(logits, targets)
    (gradient,) = torch.autograd.grad(value, logits)
    return value.detach(), gradient


def _same(one: tuple[torch.Tensor, ...], other: tuple[torch.Tensor, ...]) -> bool:
    return all(
        a.dtype == b.dtype and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
        for a, b in zip(one, other, strict=True)
    )
