"""Fused attention as an accelerator would run it, for steps that are traced without one.

Why: on the host, torch falls back to plain products and a softmax when the head dimensions of keys and values differ
(multi-head latent attention: 192 and 128) or when attention drops out. An accelerator has fused kernels for both, which
save queries, keys, values, output and one number a row; a trace of the fallback would overstate them by gigabytes.

What: inside `fused_attention()`, such calls of `scaled_dot_product_attention` go to an operator of our own that has
shapes and no kernel: a planning operator, for fake tensors only.

Cost: a torch function mode, 1 us a call. Not covered: attention that the model writes out itself (`eager`): that is
what an accelerator would run, too.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


def fused_attention() -> contextlib.AbstractContextManager:
    """Inside, attention that the host would not fuse is fused, in shapes."""
    return _Fused(_operator())


class _Fused(TorchFunctionMode):
    def __init__(self, operator: Any) -> None:
        super().__init__()
        self._operator = operator

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        return self._attend(*args, **kwargs)

    def _attend(  # noqa: PLR0917 (the signature is torch's)
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **kwargs: Any,
    ) -> Tensor:
        if query.dim() != 4 or (query.shape[-1] == value.shape[-1] and dropout_p == 0.0):
            return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **kwargs)
        return self._operator(query, key, value, attn_mask, dropout_p, is_causal)[0]


@functools.lru_cache(maxsize=1)
def _operator() -> Any:
    """Registered on first use: who never plans never sees it."""

    @torch.library.custom_op("lowtide::planning_attention", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
    def attend(  # noqa: PLR0917
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float, is_causal: bool
    ) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("a planning operator has shapes, not values")

    @attend.register_fake
    def _(  # noqa: PLR0917
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float, is_causal: bool
    ) -> tuple[Tensor, Tensor]:
        batch, heads, tokens, _ = query.shape
        # Kernels write one row of all heads after the other: what follows needs no copy.
        output = query.new_empty((batch, tokens, heads, value.shape[-1])).transpose(1, 2)
        return output, query.new_empty((batch, heads, tokens), dtype=torch.float32)

    @torch.library.custom_op("lowtide::planning_attention_backward", mutates_args=())
    def attend_backward(  # noqa: PLR0917
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        logsumexp: Tensor,
        attn_mask: Tensor | None,
        dropout_p: float,
        is_causal: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        raise NotImplementedError("a planning operator has shapes, not values")

    @attend_backward.register_fake
    def _(  # noqa: PLR0917
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        logsumexp: Tensor,
        attn_mask: Tensor | None,
        dropout_p: float,
        is_causal: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)

    def setup(ctx: Any, inputs: tuple, output: tuple) -> None:
        query, key, value, mask, ctx.dropout_p, ctx.is_causal = inputs
        ctx.save_for_backward(query, key, value, *output, mask)

    def backward(ctx: Any, grad: Tensor, grad_logsumexp: Tensor | None) -> tuple:
        query, key, value, output, logsumexp, mask = ctx.saved_tensors
        grads = attend_backward(grad, query, key, value, output, logsumexp, mask, ctx.dropout_p, ctx.is_causal)
        return (*grads, None, None, None)

    attend.register_autograd(backward, setup_context=setup)
    return attend
