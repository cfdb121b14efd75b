"""An ordinary model with experts on several ranks, its batches, and its plain training step."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.pipeline import all_to_all, start_all_to_all

WIDTH, HEADS, EXPERTS, TOP_K, VOCABULARY = 16, 2, 4, 2, 32


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 3 * WIDTH)
        self.outer = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inner(x).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.dropout(self.outer(heads.transpose(1, 2).flatten(2)))


class Router(nn.Module):
    """Top-k. The last expert gets no token: its logit is always the lowest."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Linear(WIDTH, EXPERTS)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.weight(x)
        lowest = torch.zeros(EXPERTS)
        lowest[-1] = -1e4
        return torch.topk(torch.softmax(logits + lowest, -1), TOP_K)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x)))


class Experts(nn.Module):
    """This rank's share, each with the rows that were sent to it."""

    def __init__(self, num: int) -> None:
        super().__init__()
        self.each = nn.ModuleList(Expert() for _ in range(num))

    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:
        return torch.cat([expert(part) for expert, part in zip(self.each, rows.split(counts))])


class Block(nn.Module):
    """Norm, attention, residual, norm, router, dispatch, experts, combine, shared expert, residual.

    `hides`: the shared expert stands between the start of an exchange and its wait.
    """

    def __init__(self, num_ranks: int, *, hides: bool) -> None:
        super().__init__()
        self.norm, self.norm_moe = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.router, self.shared = Attention(), Router(), Expert()
        self.experts = Experts(EXPERTS // num_ranks)
        self.num_ranks = num_ranks
        self.hides = hides

    def forward(self, x: Tensor) -> Tensor:
        h = x + self.attention(self.norm(x))
        tokens = self.norm_moe(h).flatten(0, 1)
        share, chosen = self.router(tokens)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=EXPERTS)
        each = EXPERTS // self.num_ranks
        theirs = all_to_all(counts, [each] * self.num_ranks, [each] * self.num_ranks).view(self.num_ranks, each)
        sent, got = counts.view(self.num_ranks, each).sum(1).tolist(), theirs.sum(1).tolist()
        rows = tokens[order // TOP_K]
        if self.hides:
            pending = start_all_to_all(rows, got, sent)
            shared = self.shared(tokens)
            here = pending.wait()
        else:
            shared = self.shared(tokens)
            here = all_to_all(rows, got, sent)
        # From the order of ranks to that of experts, and back.
        by_expert = torch.arange(self.num_ranks * each).view(self.num_ranks, each).t().flatten()
        ends = theirs.flatten().cumsum(0)
        place = torch.cat([torch.arange(int(ends[i] - theirs.flatten()[i]), int(ends[i])) for i in by_expert])
        made = self.experts(here[place], theirs.sum(0).tolist())
        back = all_to_all(torch.zeros_like(made).index_copy(0, place, made), sent, got)
        mixed = torch.zeros(len(order), WIDTH).index_copy(0, order, back) * share.flatten()[:, None]
        return h + (mixed.view(-1, TOP_K, WIDTH).sum(1) + shared).view_as(h)


class Model(nn.Module):
    def __init__(self, num_ranks: int, num_layers: int = 2, *, hides: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(num_ranks, hides=hides) for _ in range(num_layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def make(rank: int, num_ranks: int = 2, **arguments: Any) -> Model:
    """Experts differ between ranks, the rest is the same."""
    torch.manual_seed(0)
    model = Model(num_ranks, **arguments)
    torch.manual_seed(100 + rank)
    for layer in model.layers:
        layer.experts = Experts(EXPERTS // num_ranks)
    return model


def batches(rank: int, num: int = 4) -> list[Tensor]:
    """Of different lengths: no two exchanges have the same splits."""
    made = torch.Generator().manual_seed(7 + rank)
    return [torch.randint(VOCABULARY, (2, 5 + 2 * i), generator=made) for i in range(num)]


def plain(model: nn.Module, micro_batches: list[Tensor]) -> list[Tensor]:
    losses = []
    for batch in micro_batches:
        loss = model(batch)
        loss.backward()
        losses.append(loss.detach())
    return losses


def result(model: nn.Module, losses: list[Tensor]) -> dict[str, Tensor]:
    """Losses and gradients by name; gradients are taken off the model."""
    found = {f"loss {i}": loss for i, loss in enumerate(losses)}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[name] = parameter.grad
            parameter.grad = None
    return found
