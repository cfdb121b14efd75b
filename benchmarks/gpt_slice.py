"""What one tensor-parallel rank has of a GPT: its heads, its columns of the MLP, the whole hidden size.

Cost: none of its own. Not covered: the collectives between ranks, embedding and head.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Layer(nn.Module):
    """(batch, sequence, hidden) -> the same. `heads` and `ffn` are the rank's share."""

    def __init__(self, hidden: int, heads: int, head_size: int, ffn: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * heads * head_size, bias=False)
        self.projection = nn.Linear(heads * head_size, hidden, bias=False)
        self.norm2 = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, sequence, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(seen.transpose(1, 2).reshape(batch, sequence, -1))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GptSlice(nn.Module):
    """A stack of layers whose loss is the mean square of its output. `is_checkpointed`: every layer is recomputed."""

    def __init__(self, num_layers: int, hidden: int, heads: int, head_size: int, ffn: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(hidden, heads, head_size, ffn) for _ in range(num_layers))
        self.is_checkpointed = False

    def forward(self, x: Tensor) -> Tensor:
        # Each rank's layers get their input from outside: it takes part in backward.
        x = x.detach().requires_grad_()
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.is_checkpointed else layer(x)
        return x.pow(2).mean()
