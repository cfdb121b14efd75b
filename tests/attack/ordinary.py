"""Ordinary blocks: what models are made of, with nothing in them that should surprise a system that moves activations.

Each entry of `BLOCKS` builds a module from its own `Random`; its forward takes `(x, now)` with x of samples x tokens x
width, and returns the same shape.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.attack.now import WIDTH

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "relu_": lambda: nn.ReLU(inplace=True),
    "gelu": nn.GELU,
    "tanh_gelu": lambda: nn.GELU(approximate="tanh"),
    "silu": nn.SiLU,
    "silu_": lambda: nn.SiLU(inplace=True),
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "elu": nn.ELU,
    "selu": nn.SELU,
    "celu": nn.CELU,
    "leaky": nn.LeakyReLU,
    "mish": nn.Mish,
    "softplus": nn.Softplus,
    "hardswish": nn.Hardswish,
    "hardtanh": nn.Hardtanh,
    "logsigmoid": nn.LogSigmoid,
    "prelu": nn.PReLU,
    "rrelu": nn.RReLU,
    "softshrink": lambda: nn.Softshrink(0.1),
    "softmax": lambda: nn.Softmax(-1),
}


class Pointwise(nn.Module):
    """Linear, activation, linear; the plainest block there is."""

    def __init__(self, r: Random) -> None:
        super().__init__()
        hidden = r.choice((WIDTH, 2 * WIDTH))
        self.up, self.down = nn.Linear(WIDTH, hidden, bias=r.random() < 0.7), nn.Linear(hidden, WIDTH)
        self.act = ACTIVATIONS[r.choice(sorted(ACTIVATIONS))]()

    def forward(self, x: Tensor, now: Any) -> Tensor:
        return self.down(self.act(self.up(x)))


class Gated(nn.Module):
    """A gated block, as in Llama."""

    def __init__(self, r: Random) -> None:
        super().__init__()
        self.norm = r.choice((nn.LayerNorm, nn.RMSNorm))(WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.act = ACTIVATIONS[r.choice(("silu", "gelu", "relu", "sigmoid"))]()

    def forward(self, x: Tensor, now: Any) -> Tensor:
        h = self.norm(x)
        return self.down(self.act(self.gate(h)) * self.up(h))


class Normed(nn.Module):
    """A norm of any kind, batch statistics among them, and a linear."""

    def __init__(self, r: Random) -> None:
        super().__init__()
        kinds = {
            "layer": lambda: nn.LayerNorm(WIDTH, elementwise_affine=r.random() < 0.7),
            "rms": lambda: nn.RMSNorm(WIDTH),
            "group": lambda: nn.GroupNorm(4, WIDTH),
            "batch": lambda: nn.BatchNorm1d(WIDTH, momentum=r.choice((0.1, None))),
            "instance": lambda: nn.InstanceNorm1d(WIDTH, affine=True, track_running_stats=r.random() < 0.5),
        }
        self.kind = r.choice(sorted(kinds))
        self.norm, self.out = kinds[self.kind](), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, now: Any) -> Tensor:
        turned = self.kind in ("group", "batch", "instance")
        h = self.norm(x.transpose(1, 2)).transpose(1, 2) if turned else self.norm(x)
        return self.out(h)


class OwnNorm(nn.Module):
    """A norm written out, in fp32 as language models do."""

    def __init__(self, r: Random) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, now: Any) -> Tensor:
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.out(self.weight * h.to(x.dtype))


class Conv(nn.Module):
    """Convolution over tokens, batch norm, activation in place."""

    def __init__(self, r: Random) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=r.choice((1, 4)))
        self.norm, self.act = nn.BatchNorm1d(WIDTH), nn.ReLU(inplace=True)
        self.out = nn.Conv1d(WIDTH, WIDTH, 1)

    def forward(self, x: Tensor, now: Any) -> Tensor:
        return self.out(self.act(self.norm(self.conv(x.transpose(1, 2))))).transpose(1, 2)


class Pooled(nn.Module):
    """Convolution in two dimensions, max-pooling with indices, and back up."""

    def __init__(self, r: Random) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.up = nn.ConvTranspose2d(4, 1, 2, stride=2)
        self.mode = r.choice(("max", "avg"))

    def forward(self, x: Tensor, now: Any) -> Tensor:
        h = F.silu(self.conv(x.unsqueeze(1)))
        h = F.max_pool2d(h, 2) if self.mode == "max" else F.avg_pool2d(h, 2)
        return self.up(h).squeeze(1)


class Attention(nn.Module):
    """Attention, written out or fused, causal or with a mask."""

    def __init__(self, r: Random) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.kind, self.dropout = r.choice(("eager", "causal", "fused", "masked")), r.choice((0.0, 0.0, 0.1))

    def forward(self, x: Tensor, now: Any) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        rate = self.dropout if self.training else 0.0
        if self.kind == "eager":
            weights = F.dropout((q @ k.transpose(-1, -2) * 8**-0.5).softmax(-1), rate)
            h = weights @ v
        else:
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril() if self.kind == "masked" else None
            h = F.scaled_dot_product_attention(q, k, v, mask, rate, is_causal=self.kind == "causal")
        return self.out(h.transpose(1, 2).flatten(2))


class Stock(nn.Module):
    """torch's own large blocks."""

    def __init__(self, r: Random) -> None:
        super().__init__()
        self.kind = r.choice(("encoder", "heads"))
        self.part: nn.Module = (
            nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=r.choice((0.0, 0.1)), batch_first=True)
            if self.kind == "encoder"
            else nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        )

    def forward(self, x: Tensor, now: Any) -> Tensor:
        return self.part(x) if self.kind == "encoder" else self.part(x, x, x, need_weights=False)[0]


class Cells(nn.Module):
    """A recurrent cell, token by token."""

    def __init__(self, r: Random) -> None:
        super().__init__()
        self.cell = r.choice((nn.GRUCell, nn.RNNCell, nn.LSTMCell))(WIDTH, WIDTH)

    def forward(self, x: Tensor, now: Any) -> Tensor:
        h, outputs = None, []
        for token in x.unbind(1):
            h = self.cell(token, h)
            outputs.append(h[0] if isinstance(h, tuple) else h)
        return torch.stack(outputs, 1)


class Recurrent(nn.Module):
    """torch's recurrent layers, several directions and layers among them."""

    def __init__(self, r: Random) -> None:
        super().__init__()
        both = r.random() < 0.5
        self.rnn = r.choice((nn.GRU, nn.LSTM, nn.RNN))(
            WIDTH, WIDTH // (2 if both else 1), num_layers=r.choice((1, 2)), bidirectional=both, batch_first=True
        )

    def forward(self, x: Tensor, now: Any) -> Tensor:
        return self.rnn(x)[0]


class Routed(nn.Module):
    """A mixture of experts: each token goes where its router says, so shapes follow the data."""

    def __init__(self, r: Random) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, now: Any) -> Tensor:
        flat = x.reshape(-1, WIDTH)
        weights, chosen = self.router(flat).softmax(-1).max(-1)
        result = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero().squeeze(-1)
            if rows.numel():
                result = result.index_add(0, rows, F.silu(expert(flat[rows])) * weights[rows, None])
        return result.view_as(x)


class Tied(nn.Module):
    """One weight used forth and back."""

    def __init__(self, r: Random) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor, now: Any) -> Tensor:
        return F.linear(torch.tanh(self.up(x)), self.up.weight.t(), self.bias)


class Views(nn.Module):
    """Views and slices that are saved."""

    def __init__(self, r: Random) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, now: Any) -> Tensor:
        left, right = self.a(x).split(WIDTH, -1)
        rows = torch.cat((left[:, 1:], left[:, :1]), 1)
        first, *_ = right.unbind(1)
        return self.b(
            rows.sigmoid() * right + first.unsqueeze(1).expand_as(right) * left.as_strided(x.shape, left.stride())
        )


class InPlace(nn.Module):
    """Writes in place wherever autograd allows it."""

    def __init__(self, r: Random) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, now: Any) -> Tensor:
        h = self.a(x)
        h.mul_(0.5).add_(x).relu_()
        h = h + 0.0
        h[:, 0].mul_(2.0)
        return self.b(h)


class Dropouts(nn.Module):
    """Noise of several kinds."""

    def __init__(self, r: Random) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.drop = r.choice((nn.Dropout, nn.AlphaDropout, nn.FeatureAlphaDropout, nn.Dropout1d))(0.3)
        self.has_noise = r.random() < 0.5

    def forward(self, x: Tensor, now: Any) -> Tensor:
        h = self.drop(F.gelu(self.a(x)))
        return h + 0.1 * torch.randn_like(h) if self.has_noise and self.training else h


class Reparametrized(nn.Module):
    """A weight that is made from others in each forward."""

    def __init__(self, r: Random) -> None:
        super().__init__()
        linear, p = nn.Linear(WIDTH, WIDTH), nn.utils.parametrizations
        ways = {
            "spectral": lambda: p.spectral_norm(linear),
            "weight": lambda: p.weight_norm(linear),
            "orthogonal": lambda: p.orthogonal(linear),
            "old_spectral": lambda: nn.utils.spectral_norm(linear),
        }
        self.linear = ways[r.choice(sorted(ways))]()

    def forward(self, x: Tensor, now: Any) -> Tensor:
        return torch.tanh(self.linear(x))


class Checkpointed(nn.Module):
    """A part that checkpoints itself, in torch's newer or older way."""

    def __init__(self, r: Random) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH))
        self.is_old = r.random() < 0.2

    def forward(self, x: Tensor, now: Any) -> Tensor:
        return checkpoint(self.part, x, use_reentrant=self.is_old)


class Spectrum(nn.Module):
    """Complex numbers."""

    def __init__(self, r: Random) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex64) * 0.3)

    def forward(self, x: Tensor, now: Any) -> Tensor:
        h = torch.fft.rfft(x, dim=-1, norm="ortho") * self.weight
        return torch.fft.irfft(h, n=WIDTH, dim=-1, norm="ortho") + h.abs().mean(-1, keepdim=True)


class Looked(nn.Module):
    """Tables, gathers and scatters."""

    def __init__(self, r: Random) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(8, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, now: Any) -> Tensor:
        rows = (x.detach().mean(-1) * 4).long().remainder(8)
        order = x.sum(-1).argsort(-1)
        h = x.gather(1, order.unsqueeze(-1).expand_as(x)) * self.table(rows).sigmoid()
        return self.out(torch.zeros_like(h).scatter_add(1, order.unsqueeze(-1).expand_as(h), h))


class Reduced(nn.Module):
    """Reductions, sorts and products that save indices or results."""

    def __init__(self, r: Random) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.kind = r.choice(("topk", "logsumexp", "cumprod", "cdist", "std", "einsum", "norm"))

    def forward(self, x: Tensor, now: Any) -> Tensor:
        h = self.a(x)
        if self.kind == "topk":
            return x + h.topk(4, -1).values.mean(-1, keepdim=True)
        if self.kind == "logsumexp":
            return h - h.logsumexp(-1, keepdim=True)
        if self.kind == "cumprod":
            return h.tanh().cumprod(1)
        if self.kind == "cdist":
            # torch has no bfloat16 for few rows.
            return torch.cdist(h.float(), x.float()).to(h.dtype).softmax(-1) @ h
        if self.kind == "std":
            return (h - h.mean(-1, keepdim=True)) / (h.std(-1, keepdim=True) + 0.1)
        if self.kind == "einsum":
            return torch.einsum("btd,bsd,bse->bte", h, x, h) * 0.1
        return h / h.norm(dim=-1, keepdim=True).clamp_min(0.1)


class Casts(nn.Module):
    """Lower precision inside, by autocast or by hand."""

    def __init__(self, r: Random) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.kind = r.choice(("autocast", "double", "half"))

    def forward(self, x: Tensor, now: Any) -> Tensor:
        if self.kind == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                return F.silu(self.b(torch.tanh(self.a(x)))).to(x.dtype)
        dtype = torch.float64 if self.kind == "double" else torch.bfloat16
        return self.b(torch.tanh(self.a(x)).to(dtype).exp().to(x.dtype))


class Nested(nn.Module):
    """Blocks inside of blocks, one of them called twice."""

    def __init__(self, r: Random) -> None:
        super().__init__()
        self.twice, self.once = Pointwise(r), Gated(r)

    def forward(self, x: Tensor, now: Any) -> Tensor:
        return self.once(self.twice(x, now), now) + self.twice(x, now)


class Wide(nn.Module):
    """Two weights of the least size whose optimizer's state a plan moves (16,384 elements)."""

    def __init__(self, r: Random) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 1024), nn.Linear(1024, WIDTH)

    def forward(self, x: Tensor, now: Any) -> Tensor:
        return self.down(self.up(x).tanh())


class Heads(nn.Module):
    """Attention as in Llama: a norm, and fewer heads of keys and values than of queries."""

    def __init__(self, r: Random) -> None:
        super().__init__()
        self.norm, self.num_keys, self.causal = nn.RMSNorm(WIDTH), r.choice((1, 2, 4)), r.random() < 0.7
        self.q, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.kv = nn.Linear(WIDTH, 2 * self.num_keys * WIDTH // 4)

    def forward(self, x: Tensor, now: Any) -> Tensor:
        h = self.norm(x)
        k, v = (each.unflatten(-1, (self.num_keys, -1)).transpose(-3, -2) for each in self.kv(h).chunk(2, -1))
        q = self.q(h).unflatten(-1, (4, -1)).transpose(-3, -2)
        h = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=self.num_keys < 4)
        return self.out(h.transpose(-3, -2).flatten(-2))


class Placed(nn.Module):
    """Counts places from the start of whatever it is given."""

    def __init__(self, r: Random) -> None:
        super().__init__()
        self.out, self.scale = nn.Linear(WIDTH, WIDTH), r.choice((1e-3, 0.1, 1.0))

    def forward(self, x: Tensor, now: Any) -> Tensor:
        places = torch.arange(x.shape[-2], dtype=x.dtype)[:, None]
        return self.out(x) * (places * self.scale).cos()


class Lent(nn.Module):
    """Reads a weight that is nobody's parameter."""

    def __init__(self, r: Random) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, WIDTH)
        self.lent = [nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))]

    def forward(self, x: Tensor, now: Any) -> Tensor:
        return self.out(x * self.lent[0].to(x.dtype))


class Adapted(nn.Module):
    """A frozen product, and two thin ones beside it; the last may be a row of zeros, as adapters begin."""

    def __init__(self, r: Random) -> None:
        super().__init__()
        self.base, self.up = nn.Linear(WIDTH, WIDTH).requires_grad_(False), nn.Linear(3, WIDTH, bias=False)
        self.down, self.drop = nn.Linear(WIDTH, 3, bias=r.random() < 0.3), nn.Dropout(r.choice((0.0, 0.0, 0.2)))
        if r.random() < 0.3:
            nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor, now: Any) -> Tensor:
        return self.base(x) + self.up(self.down(self.drop(x)))


class Mixed(nn.Module):
    """Each row weighs products of its own, and may leave one out that no row of a block wants."""

    def __init__(self, r: Random) -> None:
        super().__init__()
        self.router, self.parts = nn.Linear(WIDTH, 3), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.leaves_out = r.random() < 0.5

    def forward(self, x: Tensor, now: Any) -> Tensor:
        weights = self.router(x).softmax(-1)
        wanted = [part for part in range(3) if not self.leaves_out or bool((weights[..., part] > 0.45).any())]
        return sum((self.parts[part](x) * weights[..., part, None] for part in wanted), x)  # type: ignore[return-value]


class Talking(nn.Module):
    """Rows talk to each other, in one of many ways."""

    def __init__(self, r: Random) -> None:
        super().__init__()
        self.out, self.norm, self.conv = (
            nn.Linear(WIDTH, WIDTH),
            nn.BatchNorm1d(WIDTH),
            nn.Conv1d(WIDTH, WIDTH, 3, 1, 1),
        )
        self.way = r.choice(("softmax", "cumsum", "norm", "conv", "mean", "roll", "far"))

    def forward(self, x: Tensor, now: Any) -> Tensor:
        h, by_channels = self.out(x), x.transpose(-1, -2)
        ways = {
            "softmax": lambda: h.softmax(-2),
            "cumsum": lambda: h.cumsum(-2),
            "norm": lambda: h + self.norm(by_channels).transpose(-1, -2),
            "conv": lambda: h + self.conv(by_channels).transpose(-1, -2),
            "mean": lambda: h - x.mean(-2, keepdim=True),
            "roll": lambda: h + x.roll(1, -2),
            "far": lambda: h + x.roll(19, -2),
        }
        return ways[self.way]()


class Counting(nn.Module):
    """Something moves with each run."""

    def __init__(self, r: Random) -> None:
        super().__init__()
        self.out, self.way, self.runs = nn.Linear(WIDTH, WIDTH), r.choice(("buffer", "number", "mean")), 0
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.seen: Tensor

    def forward(self, x: Tensor, now: Any) -> Tensor:
        if self.way == "number":
            self.runs += 1
        else:
            with torch.no_grad():
                self.seen.add_(1 if self.way == "buffer" else x.flatten(0, -2).mean(0))
        return self.out(x) * (1 + 1e-3 * (self.runs if self.way == "number" else self.seen.to(x.dtype)))


ROW_WISE: dict[str, Callable[[Random], nn.Module]] = {
    "heads": Heads,
    "placed": Placed,
    "lent": Lent,
    "adapted": Adapted,
    "mixed": Mixed,
    "talking": Talking,
    "counting": Counting,
}
"""Only in draws with layers in blocks of rows."""
WIDE: dict[str, Callable[[Random], nn.Module]] = {"wide": Wide}
"""Only in draws whose plans move state."""

BLOCKS: dict[str, Callable[[Random], nn.Module]] = {
    "pointwise": Pointwise,
    "gated": Gated,
    "normed": Normed,
    "own_norm": OwnNorm,
    "conv": Conv,
    "pooled": Pooled,
    "attention": Attention,
    "stock": Stock,
    "cells": Cells,
    "recurrent": Recurrent,
    "routed": Routed,
    "tied": Tied,
    "views": Views,
    "in_place": InPlace,
    "dropouts": Dropouts,
    "reparametrized": Reparametrized,
    "checkpointed": Checkpointed,
    "spectrum": Spectrum,
    "looked": Looked,
    "reduced": Reduced,
    "casts": Casts,
    "nested": Nested,
}
