"""The experts of one block, a share of them on each rank: rows go to the experts that a router chose, and come back.

What: `SplitExperts` stands where a block of `transformers` has its experts, and is called like them. Each pair of a
token and a chosen expert is a row. Rows are sorted by expert, and so by rank. The ranks tell each other how many rows
each expert gets (one small collective), exchange the rows (`exchange.start_all_to_all`), run their experts and send the
rows back. No row is dropped or padded. A rank, or an expert, may get none: its gradients are then zeros, not absent.
What hides exchanges without a partner: of `num_parts` parts of a rank's experts each has exchanges of its own, so that
rows of one travel while another one computes; and shared experts, which read no rows, run before the first wait.
Backward does the same in reverse.
Why these orders: a sum of floats depends on its order. Rows of one expert stand by rank, and within a rank as the block
of `transformers` has them; what a token gets from its experts, and what these give to its gradient, is added in the
block's order. So on one rank every bit is that of the block. On several, one matrix product has the rows of all ranks.
In a pipeline the weight gradients of experts can be put off (weight_gradients.py).

Cost: two exchanges of (tokens x experts per token) rows each way; a copy of these rows before and after each, and with
parts one more each way; one wait of the host for the counts. Not covered: a token that goes to several experts of one
rank is sent once for each; counts that stay on the device; double backward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from lowtide.pipeline.exchange import all_to_all, start_all_to_all
from lowtide.pipeline.weight_gradients import grouped_linear, is_put_off, linear

WEIGHTS = ("gate_up_proj", "down_proj")
"""The parameters of a block's experts; the first dimension counts the experts."""


class SplitExperts(nn.Module):
    """Of `num_experts` experts those of this rank, and the way to all others."""

    def __init__(self, experts: Any, *, group: Any, is_grouped: bool, num_parts: int) -> None:
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
        self.num_parts = num_parts

    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        shared: nn.Module | None = None,
        for_shared: torch.Tensor | None = None,
    ) -> Any:
        """(T, H), (T, K), (T, K) to (T, H), as the block's own experts. With experts of the same block that all tokens
        go to, and their input: that, and what they give."""
        token, pair, place, parts = self._route(top_k_index)
        rows = _Moved.apply(hidden_states, token, place, self.is_grouped)
        of_parts = (rows,) if self.num_parts == 1 else rows.split([sum(part.num_sent) for part in parts])
        under_way = deque(
            start_all_to_all(own, part.num_received, part.num_sent, group=self.group)
            for own, part in zip(of_parts, parts, strict=True)
        )
        del rows, of_parts
        from_shared = None if shared is None else shared(for_shared)
        coming_back = []
        weights = map(self._of_parts, (self.gate_up_proj, self.down_proj))
        for part, gate_up, down in zip(parts, *weights, strict=True):
            rows = _Moved.apply(under_way.popleft().wait(), part.by_expert, part.by_rank)
            rows = _Moved.apply(self._run(rows, part.num_rows, gate_up, down), part.by_rank, part.by_expert)
            coming_back.append(start_all_to_all(rows, part.num_sent, part.num_received, group=self.group))
        rows = coming_back[0].wait() if self.num_parts == 1 else torch.cat([each.wait() for each in coming_back])
        del coming_back
        rows = rows * top_k_weights.reshape(-1)[pair].unsqueeze(-1)
        if self.is_grouped:
            rows = _Moved.apply(rows, _inverse(pair), pair)
            routed = rows.view(*top_k_index.shape, rows.shape[-1]).sum(dim=1).to(hidden_states.dtype)
        else:
            routed = _Moved.apply(rows.to(hidden_states.dtype), place, token)
        return routed if shared is None else (routed, from_shared)

    @torch.no_grad()
    def _route(self, top_k_index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[_Part]]:
        """Of each row to send its token, and its pair: token * K + place among the token's experts; (T, K): the rows of
        each token, in the order of its experts' numbers; the parts, of which each has rows that stand together."""
        num_tokens, top_k = top_k_index.shape
        num_here = len(self.gate_up_proj)
        if self.is_grouped:  # rows of an expert in the order that a sort happens to give them
            expert, pair = torch.sort(top_k_index.reshape(-1))
        else:  # by rank among the token's experts, and then by token
            expert, turned = torch.sort(top_k_index.t().reshape(-1), stable=True)
            pair = turned % max(num_tokens, 1) * top_k + turned // max(num_tokens, 1)
        sent = torch.bincount(expert, minlength=self.num_experts)
        one_each = [num_here] * (self.num_experts // num_here)
        received = all_to_all(sent, one_each, one_each, group=self.group)
        if self.num_parts > 1:
            by_part = torch.sort(expert % num_here // (num_here // self.num_parts), stable=True)[1]
            expert, pair = expert[by_part], pair[by_part]
        token = pair // top_k
        by_token = torch.sort(token * self.num_experts + expert, stable=True)[1]
        parts = _parts_of(*(each.view(len(one_each), self.num_parts, -1) for each in (sent, received)))
        return token, pair, by_token.view(num_tokens, top_k), list(parts)

    def _of_parts(self, weight: torch.Tensor) -> Sequence[Any]:
        """The experts of each part. A weight is cut once, so that its gradient is put together once."""
        num_each = len(weight) // self.num_parts
        if self.is_grouped and _has_grouped_product(weight.device):
            return (weight,) if self.num_parts == 1 else weight.split(num_each)
        experts = weight.unbind()
        return [experts[first : first + num_each] for first in range(0, len(experts), num_each)]

    def _run(self, rows: torch.Tensor, num_rows: torch.Tensor, gate_up: Any, down: Any) -> torch.Tensor:
        """All rows through the experts of a part, of which each has the next `num_rows` rows."""
        if self.is_grouped and _has_grouped_product(rows.device):
            ends = num_rows.cumsum(0, dtype=torch.int32)
            rows = rows.to(gate_up.dtype)  # autocast does not know the product
            rows = self._gated(grouped_linear(rows, gate_up.transpose(-2, -1), ends))
            return grouped_linear(rows.to(down.dtype), down.transpose(-2, -1), ends)
        product = linear if is_put_off() else functional.linear  # which takes half of the host's time
        experts = zip(rows.split(num_rows.tolist()), gate_up, down, strict=True)
        # Also an expert without rows has its turn: so its weights have a gradient, which is zeros.
        return torch.cat([product(self._gated(product(own, up)), its_down) for own, up, its_down in experts])

    def _gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate) * up


@dataclass(frozen=True, slots=True)
class _Part:
    """A share of the experts of every rank: its rows stand together."""

    num_sent: list[int]
    """Rows to each rank."""
    num_received: list[int]
    by_expert: torch.Tensor
    """Received rows, by expert and then by rank."""
    by_rank: torch.Tensor
    """Its inverse."""
    num_rows: torch.Tensor
    """Rows of each expert of this rank."""


def _parts_of(sent: torch.Tensor, received: torch.Tensor) -> Iterator[_Part]:
    """sent, received: rows by rank, part, and expert of the part."""
    num_ranks, _, num_experts = received.shape
    here = torch.arange(num_experts, device=received.device).repeat(num_ranks)
    sizes = torch.stack([sent, received]).sum(3).permute(2, 0, 1).tolist()
    for (num_sent, num_received), own in zip(sizes, received.unbind(1), strict=True):
        by_expert = torch.sort(here.repeat_interleave(own.reshape(-1), output_size=sum(num_received)), stable=True)[1]
        yield _Part(num_sent, num_received, by_expert, _inverse(by_expert), own.sum(0))


class _Moved(torch.autograd.Function):
    """Rows `there`, whose gradients are taken from `back`. Plain indexing would add its gradient up row by row, as if a
    row could come twice. Gradients of a token are added in the order of its experts' numbers if `is_rising`, else the
    other way round, in which autograd goes through a loop over experts."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, there: torch.Tensor, back: torch.Tensor, is_rising: bool = True
    ) -> torch.Tensor:
        ctx.save_for_backward(back)
        ctx.is_rising = is_rising
        return _rows_at(rows, there)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (back,) = ctx.saved_tensors
        return _rows_at(gradient, back, is_rising=ctx.is_rising), None, None, None


def _rows_at(rows: torch.Tensor, places: torch.Tensor, *, is_rising: bool = True) -> torch.Tensor:
    """The row at each of these places; where each token has several (T, K), their sum, in the order of its experts'
    numbers or the other way round."""
    if places.dim() == 1:
        return rows.index_select(0, places)
    columns = places.unbind(1)
    total = rows.new_zeros(len(places), rows.shape[1])
    for column in columns if is_rising else reversed(columns):
        total += rows.index_select(0, column)
    return total


def _inverse(order: torch.Tensor) -> torch.Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return inverse


def _has_grouped_product(device: torch.device) -> bool:
    """Where `transformers` uses it too."""
    return device.type == "cpu" or (device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0))
