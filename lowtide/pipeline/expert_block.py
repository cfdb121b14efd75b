"""The experts of one block, a share of them on each rank: rows go to the experts that a router chose, and come back.

What: `SplitExperts` stands where a block of `transformers` has its experts, and is called like them. Each pair of a
token and a chosen expert is a row. Rows are sorted by expert, and so by rank. The ranks tell each other how many rows
each expert gets (one small collective), exchange the rows (`exchange.all_to_all`), run their experts and send the rows
back. No row is dropped or padded. A rank, or an expert, may get none: its gradients are then zeros, not absent.
Why these orders: a sum of floats depends on its order. Rows of one expert stand by rank, and within a rank as the block
of `transformers` has them; what a token gets from its experts, and what these give to its gradient, is added in the
block's order. So on one rank every bit is that of the block. On several, one matrix product has the rows of all ranks.
In a pipeline the weight gradients of experts can be put off (weight_gradients.py).

Cost: two exchanges of (tokens x experts per token) rows each way; a copy of these rows before and after each; one wait
of the host for the counts. Not covered: a token that goes to several experts of one rank is sent once for each; counts
that stay on the device; double backward.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from lowtide.pipeline.exchange import all_to_all
from lowtide.pipeline.weight_gradients import grouped_linear, is_put_off, linear

WEIGHTS = ("gate_up_proj", "down_proj")
"""The parameters of a block's experts; the first dimension counts the experts."""


class SplitExperts(nn.Module):
    """Of `num_experts` experts those of this rank, and the way to all others."""

    def __init__(self, experts: Any, *, group: Any, is_grouped: bool) -> None:
        """`experts`: the block's own, whose parameters hold this rank's share already.

        `is_grouped`: one grouped product and the sums that go with it, as `transformers` has them under "grouped_mm";
        else a product for each expert, as under "eager".
        """
        super().__init__()
        self.num_experts: int = experts.num_experts
        self.gate_up_proj: nn.Parameter = experts.gate_up_proj
        self.down_proj: nn.Parameter = experts.down_proj
        self.act_fn = experts.act_fn
        self.is_grouped = is_grouped
        self.group = group

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """(T, H), (T, K), (T, K) to (T, H), as the block's own experts."""
        routing = self._route(top_k_index)
        rows = _Spread.apply(hidden_states, routing.token, routing.place, self.is_grouped)
        rows, weights = all_to_all(
            rows, routing.num_received, routing.num_sent, group=self.group, carry=(top_k_weights,)
        )
        rows = self._run(_Arrange.apply(rows, routing.by_expert, routing.by_rank), routing.num_rows)
        rows = _Arrange.apply(rows, routing.by_rank, routing.by_expert)
        rows, weights = all_to_all(rows, routing.num_sent, routing.num_received, group=self.group, carry=(weights,))
        rows = rows * weights.reshape(-1)[routing.pair].unsqueeze(-1)
        if self.is_grouped:
            rows = _Arrange.apply(rows, routing.by_pair, routing.pair)
            return rows.view(*top_k_index.shape, rows.shape[-1]).sum(dim=1).to(hidden_states.dtype)
        return _Collect.apply(rows.to(hidden_states.dtype), routing.token, routing.place)

    @torch.no_grad()
    def _route(self, top_k_index: torch.Tensor) -> _Routing:
        num_tokens, top_k = top_k_index.shape
        if self.is_grouped:  # rows of an expert in the order that a sort happens to give them
            expert, pair = torch.sort(top_k_index.reshape(-1))
        else:  # by rank among the token's experts, and then by token
            expert, turned = torch.sort(top_k_index.t().reshape(-1), stable=True)
            pair = turned % max(num_tokens, 1) * top_k + turned // max(num_tokens, 1)
        token = pair // top_k
        num_here = len(self.gate_up_proj)
        sent = torch.bincount(expert, minlength=self.num_experts)
        one_each = [num_here] * (self.num_experts // num_here)
        received = all_to_all(sent, one_each, one_each, group=self.group).view(-1, num_here)
        sent = sent.view(-1, num_here)
        num_sent, num_received = torch.stack([sent.sum(1), received.sum(1)]).tolist()
        here = torch.arange(num_here, device=expert.device).repeat(len(received))
        by_expert = torch.sort(here.repeat_interleave(received.view(-1), output_size=sum(num_received)), stable=True)[1]
        return _Routing(
            token=token,
            pair=pair,
            by_pair=_inverse(pair),
            place=torch.sort(token, stable=True)[1].view(num_tokens, top_k),
            num_sent=num_sent,
            num_received=num_received,
            by_expert=by_expert,
            by_rank=_inverse(by_expert),
            num_rows=received.sum(0),
        )

    def _run(self, rows: torch.Tensor, num_rows: torch.Tensor) -> torch.Tensor:
        """All rows through the experts of this rank, of which each has the next `num_rows` rows."""
        if self.is_grouped and _has_grouped_product(rows.device):
            ends = num_rows.cumsum(0, dtype=torch.int32)
            rows = rows.to(self.gate_up_proj.dtype)  # autocast does not know the product
            rows = self._gated(grouped_linear(rows, self.gate_up_proj.transpose(-2, -1), ends))
            return grouped_linear(rows.to(self.down_proj.dtype), self.down_proj.transpose(-2, -1), ends)
        product = linear if is_put_off() else functional.linear  # which takes half of the host's time
        experts = zip(rows.split(num_rows.tolist()), self.gate_up_proj.unbind(), self.down_proj.unbind(), strict=True)
        # Also an expert without rows has its turn: so its weights have a gradient, which is zeros.
        parts = [product(self._gated(product(own, up)), down) for own, up, down in experts]
        return torch.cat(parts)

    def _gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate) * up


@dataclass(frozen=True, slots=True, kw_only=True)
class _Routing:
    """Where rows stand. A pair is numbered token * K + place among the token's experts."""

    token: torch.Tensor
    """Of each row to send."""
    pair: torch.Tensor
    """Of each row to send."""
    by_pair: torch.Tensor
    """Row of each pair."""
    place: torch.Tensor
    """(T, K): the rows of each token, in the order of its experts' numbers."""
    num_sent: list[int]
    """Rows to each rank."""
    num_received: list[int]
    by_expert: torch.Tensor
    """Received rows, by expert and then by rank."""
    by_rank: torch.Tensor
    """Its inverse."""
    num_rows: torch.Tensor
    """Rows of each expert of this rank."""


class _Spread(torch.autograd.Function):
    """The row of its token for each pair. Gradients of a token's rows are added in the order of its experts' numbers if
    `is_rising`, else the other way round, in which autograd goes through a loop over experts."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, token: torch.Tensor, place: torch.Tensor, is_rising: bool) -> torch.Tensor:
        ctx.save_for_backward(place)
        ctx.is_rising = is_rising
        return x.index_select(0, token)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (place,) = ctx.saved_tensors
        columns = place.unbind(1)
        return _sum_in_order(gradient, columns if ctx.is_rising else reversed(columns), len(place)), None, None, None


class _Collect(torch.autograd.Function):
    """The sum of its rows for each token, in the order of its experts' numbers."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, token: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(token)
        return _sum_in_order(rows, place.unbind(1), len(place))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (token,) = ctx.saved_tensors
        return gradient.index_select(0, token), None, None


class _Arrange(torch.autograd.Function):
    """Rows in another order. Plain indexing would add its gradient up row by row, as if a row could come twice."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return gradient.index_select(0, inverse), None, None


def _sum_in_order(rows: torch.Tensor, columns: Iterable[torch.Tensor], num_tokens: int) -> torch.Tensor:
    total = rows.new_zeros(num_tokens, rows.shape[1])
    for column in columns:
        total += rows.index_select(0, column)
    return total


def _inverse(order: torch.Tensor) -> torch.Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return inverse


def _has_grouped_product(device: torch.device) -> bool:
    """Where `transformers` uses it too."""
    return device.type == "cpu" or (device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0))
