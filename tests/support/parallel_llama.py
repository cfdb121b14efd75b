"""A small Llama cut for tensor and sequence parallelism by hand: plain parameters, functional collectives, two ranks.

A layer gathers the sequence before the projections and scatters sums after them, as Megatron does. Its names are those
of a Hugging Face Llama. `sequence_dim` 0 has the sequence first: what a gather gives out is then the very tensor that
the projections save. With 1 it is put in order first.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.nn import functional as F

NUM_RANKS = 2
TOKENS, BATCH, WIDTH, INNER, NUM_HEADS, NUM_WORDS = 16, 2, 32, 64, 4, 32

warnings.filterwarnings("ignore", category=FutureWarning, module=__name__)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class _GatherInPlace(torch.autograd.Function):
    """The same collective with the older interface, which writes into a tensor that it is given."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(x.shape[0] * NUM_RANKS, *x.shape[1:])
        dist.all_gather_into_tensor(out, x)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        out = grad.new_empty(grad.shape[0] // NUM_RANKS, *grad.shape[1:])
        dist.reduce_scatter_tensor(out, grad.contiguous())
        return out


class _GatherByFunction(torch.autograd.Function):
    """An autograd function of one's own around a functional collective."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return functional.all_gather_tensor(x, 0, dist.group.WORLD)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return functional.reduce_scatter_tensor(grad, "sum", 0, dist.group.WORLD)


class Ways:
    """How a model talks to the other rank."""

    def __init__(self, kind: str, sequence_dim: int) -> None:
        self.kind = kind
        self.sequence_dim = sequence_dim

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "in place":
            return _GatherInPlace.apply(x)
        if self.kind == "function":
            return _GatherByFunction.apply(x)
        return functional.all_gather_tensor_autograd(x, self.sequence_dim, dist.group.WORLD)

    def scatter(self, x: torch.Tensor) -> torch.Tensor:
        return functional.reduce_scatter_tensor_autograd(x, "sum", self.sequence_dim, dist.group.WORLD)


class Attention(nn.Module):
    def __init__(self, ways: Ways) -> None:
        super().__init__()
        self.ways = ways
        part = WIDTH // NUM_RANKS
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, part, bias=False) for _ in range(3))
        self.o_proj = nn.Linear(part, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.ways.gather(x)
        heads = [self._heads(proj(x)) for proj in (self.q_proj, self.k_proj, self.v_proj)]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        dims = (2, 0, 1, 3) if self.ways.sequence_dim == 0 else (0, 2, 1, 3)
        return self.ways.scatter(self.o_proj(mixed.permute(dims).flatten(2)))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        x = x.unflatten(-1, (NUM_HEADS // NUM_RANKS, -1))
        return x.permute(1, 2, 0, 3) if self.ways.sequence_dim == 0 else x.permute(0, 2, 1, 3)


class Mlp(nn.Module):
    def __init__(self, ways: Ways) -> None:
        super().__init__()
        self.ways = ways
        part = INNER // NUM_RANKS
        self.gate_proj, self.up_proj = (nn.Linear(WIDTH, part, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(part, WIDTH, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.ways.gather(x)
        return self.ways.scatter(self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)))


class Layer(nn.Module):
    def __init__(self, ways: Ways) -> None:
        super().__init__()
        self.input_layernorm = Norm()
        self.self_attn = Attention(ways)
        self.post_attention_layernorm = Norm()
        self.mlp = Mlp(ways)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Model(nn.Module):
    """`forward(tokens)`: the loss of this rank's share of the sequence."""

    def __init__(self, kind: str = "autograd", sequence_dim: int = 0, num_layers: int = 3) -> None:
        super().__init__()
        self.ways = Ways(kind, sequence_dim)
        self.embed_tokens = nn.Embedding(NUM_WORDS, WIDTH)
        self.layers = nn.ModuleList([Layer(self.ways) for _ in range(num_layers)])
        self.norm = Norm()
        self.lm_head = nn.Linear(WIDTH, NUM_WORDS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        dim = self.ways.sequence_dim
        mine = tokens.chunk(NUM_RANKS, dim)[dist.get_rank()]
        x = self.embed_tokens(mine)
        for layer in self.layers:
            x = layer(x)
        scores = self.lm_head(self.norm(x))
        return F.cross_entropy(scores.flatten(0, -2), mine.flatten())


def build(rank: int, **how: Any) -> Model:
    """This rank's part. What is not cut is the same on both."""
    torch.manual_seed(0)
    model = Model(**how)
    torch.manual_seed(100 + rank)
    for name, parameter in model.named_parameters():
        if "_proj" in name:
            nn.init.normal_(parameter, std=0.2)
    return model


def step(model: nn.Module, seed: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Loss and gradients of one step."""
    shape = (TOKENS, BATCH) if model.ways.sequence_dim == 0 else (BATCH, TOKENS)
    tokens = torch.randint(0, NUM_WORDS, shape, generator=torch.Generator().manual_seed(seed))
    loss = model(tokens)
    loss.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    return loss.detach(), gradients
