"""Models of published runs: what their programs run, operator by operator, as far as it matters for time and bytes.

What: `TitanLlama` is a Llama as torchtitan wrote it in 2024: rotation of queries and keys as a product of complex
numbers in float32, keys and values repeated for grouped queries before attention, the loss over float32 logits.
Others are taken from transformers (published_forecast.py). Written from the public description, with fake weights only.
Not covered: values; nothing here is ever trained.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class TitanLlama(nn.Module):
    """tokens and labels `[batch, sequence]` -> loss. All sizes in elements; parameters in bfloat16."""

    def __init__(self, *, layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, vocab: int, seq: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList(_Block(hidden, ffn, heads, kv_heads) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden)
        self.head = nn.Linear(hidden, vocab, bias=False)
        self.to(torch.bfloat16)
        angles = torch.zeros(seq, hidden // heads // 2)
        self.register_buffer("rotation", torch.polar(torch.ones_like(angles), angles), persistent=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, self.rotation)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))


class _Block(nn.Module):
    def __init__(self, hidden: int, ffn: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        width = hidden // heads
        self.heads, self.kv_heads, self.width = heads, kv_heads, width
        self.norm1, self.norm2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.wq = nn.Linear(hidden, heads * width, bias=False)
        self.wk = nn.Linear(hidden, kv_heads * width, bias=False)
        self.wv = nn.Linear(hidden, kv_heads * width, bias=False)
        self.wo = nn.Linear(heads * width, hidden, bias=False)
        self.w1 = nn.Linear(hidden, ffn, bias=False)
        self.w2 = nn.Linear(ffn, hidden, bias=False)
        self.w3 = nn.Linear(hidden, ffn, bias=False)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        h = self.norm1(x)
        batch, seq, _ = h.shape
        q = _rotated(self.wq(h).view(batch, seq, self.heads, self.width), rotation)
        k = _rotated(self.wk(h).view(batch, seq, self.kv_heads, self.width), rotation)
        v = self.wv(h).view(batch, seq, self.kv_heads, self.width)
        repeats = self.heads // self.kv_heads
        k, v = _repeated(k, repeats), _repeated(v, repeats)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.wo(out.transpose(1, 2).contiguous().view(batch, seq, -1))
        h = self.norm2(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


def _rotated(x: Tensor, rotation: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rotation[: x.shape[1], None, :]).flatten(3).type_as(x)


def _repeated(x: Tensor, repeats: int) -> Tensor:
    if repeats == 1:
        return x
    batch, seq, heads, width = x.shape
    return x[:, :, :, None, :].expand(batch, seq, heads, repeats, width).reshape(batch, seq, heads * repeats, width)
