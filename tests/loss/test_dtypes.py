"""In every dtype, in and out of autocast, a loss in slices has the dtype and the bits of torch's."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.loss.cross_entropy import sliced_cross_entropy


def _run(loss: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype, *, is_autocast: bool) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(150, 11, generator=generator, dtype=torch.float64)).to(dtype).requires_grad_()
    target = torch.randint(0, 11, (150,), generator=generator)
    with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        made = loss(logits, target)
    made.backward()
    assert logits.grad is not None
    return made.detach(), logits.grad


def test_dtypes() -> None:
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    for dtype, is_autocast in itertools.product(dtypes, (False, True)):
        wanted = _run(F.cross_entropy, dtype, is_autocast=is_autocast)
        got = _run(lambda x, y: sliced_cross_entropy(x, y, slice_rows=64), dtype, is_autocast=is_autocast)
        assert got[0].dtype == wanted[0].dtype, (dtype, is_autocast)
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True)), (dtype, is_autocast)
