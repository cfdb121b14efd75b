"""Blocks that do something else in every step: another number, another row, another frozen weight.

Shapes, operators and trained parameters stay what they were, so nothing that autograd shows of itself tells the steps
apart; only the values do, sometimes in one element only.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.attack.now import TOKENS, WIDTH, numbers


def _few(h: Tensor, n: Any) -> Tensor:
    """True at the few positions of this step."""
    mask = torch.zeros(h.shape[1] * WIDTH, dtype=torch.bool)
    mask[[place % mask.numel() for place in n.few]] = True
    return mask.view(h.shape[1:])


def _rope(h: Tensor, n: Any) -> Tensor:
    angle = torch.outer(torch.arange(h.shape[1]) + n.offset, torch.arange(WIDTH // 2) / WIDTH)
    left, right = h.chunk(2, -1)
    return torch.cat((left * angle.cos() - right * angle.sin(), left * angle.sin() + right * angle.cos()), -1)


NUMBERS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "temperature": lambda h, n: h / n.temperature,
    "residual": lambda h, n: h * (1 + n.residual),
    "added": lambda h, n: torch.add(h, torch.ones(()), alpha=n.slope),
    "roll": lambda h, n: h.roll(n.roll, 1),
    "slope": lambda h, n: F.leaky_relu(h, n.slope),
    "threshold": lambda h, n: F.threshold(h, n.threshold, 0.0),
    "where": lambda h, n: torch.where(h > n.threshold, h, h * 0.5),
    "offset": lambda h, n: torch.cat((h[:, n.offset :], h[:, : n.offset]), 1),
    "narrow": lambda h, n: h + h.narrow(-1, n.offset, 1),
    "strided": lambda h, n: h + h.as_strided((1, 1, WIDTH), (1, 1, 1), n.offset * WIDTH),
    "softmax": lambda h, n: h.softmax(n.axis),
    "cumsum": lambda h, n: h.cumsum(n.axis),
    "flip": lambda h, n: h.flip(n.axis),
    "eps": lambda h, n: F.layer_norm(h, (WIDTH,), eps=n.eps),
    "clamp": lambda h, n: h.clamp(-n.bound, n.bound),
    "power": lambda h, n: (h.abs() + 0.1).pow(n.exponent),
    "base": lambda h, n: torch.pow(n.exponent, h),
    "few": lambda h, n: h.masked_fill(_few(h, n), 0.0),
    "few_rows": lambda h, n: h.index_select(1, torch.tensor([(i + n.roll) % h.shape[1] for i in range(h.shape[1])])),
    "tril": lambda h, n: h.tril(n.offset),
    "lerp": lambda h, n: h.lerp(h.flip(1), n.residual),
    "celu": lambda h, n: F.celu(h, n.temperature),
    "softplus": lambda h, n: F.softplus(h, n.temperature),
    "hardtanh": lambda h, n: F.hardtanh(h, -n.bound, n.bound),
    "gelu": lambda h, n: F.gelu(h, approximate="tanh" if n.is_odd else "none"),
    "dropout": lambda h, n: F.dropout(h, n.rate),
    "positions": _rope,
    "constant": lambda h, n: h + torch.full((WIDTH,), n.residual),
    "tensor": lambda h, n: h * torch.tensor(n.temperature),
    "rounded": lambda h, n: h + (h.detach() * n.temperature).round(),
    "addcmul": lambda h, n: torch.addcmul(h, h, h, value=n.slope),
    "addmm": lambda h, n: torch.baddbmm(h, h @ h.transpose(1, 2), h, alpha=n.slope),
    "bernoulli": lambda h, n: h * torch.bernoulli(torch.full_like(h, n.rate)),
    "branch": lambda h, n: h.sigmoid() if n.is_odd else h.sin(),
    "gradient_branch": lambda h, n: h.detach() if n.is_odd else h,
    "data_branch": lambda h, n: h.sin() if h.mean() > n.threshold else h.cos(),
    "early_exit": lambda h, n: h if n.is_odd else h.tanh().exp(),
}


NUMBERS_OF_FEW = ("threshold", "where", "few", "rounded")
"""Those that change a few elements from step to step, most of the time."""


class Numbered(nn.Module):
    """A function of a number of this step, between what autograd saves."""

    reads_numbers = True
    kinds = tuple(sorted(NUMBERS))

    def __init__(self, r: Random) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.before, self.after = (r.choice((torch.tanh, F.silu, torch.sigmoid, torch.sin)) for _ in range(2))
        self.kind = r.choice(self.kinds)

    def forward(self, x: Tensor, now: Any) -> Tensor:
        h = NUMBERS[self.kind](self.before(self.a(x)), numbers(self, now))
        return self.b(self.after(h))


class FewNumbered(Numbered):
    """The same with numbers that change little."""

    kinds = NUMBERS_OF_FEW


class Experts(nn.Module):
    """A frozen weight, chosen in each step."""

    reads_numbers = True

    def __init__(self, r: Random) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        if r.random() < 0.8:
            self.experts.requires_grad_(False)

    def forward(self, x: Tensor, now: Any) -> Tensor:
        h = self.experts[numbers(self, now).choice](torch.tanh(self.a(x)))
        return self.b(F.silu(h))


class Rows(nn.Module):
    """A row of a table that no gradient reaches, chosen in each step. Rows may differ in a few elements only."""

    reads_numbers = True

    def __init__(self, r: Random) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.kind, self.is_sparse = r.choice(("buffer", "frozen", "plain", "list", "embedding")), r.random() < 0.5
        table = torch.randn(4, TOKENS, WIDTH)
        if self.is_sparse:
            table = table[:1].repeat(4, 1, 1)
            for row in range(1, 4):
                table[row].view(-1)[r.randrange(WIDTH * TOKENS)] += 1.0
        if self.kind == "buffer":
            self.register_buffer("table", table, persistent=r.random() < 0.5)
        elif self.kind == "frozen":
            self.table = nn.Parameter(table, requires_grad=False)
        elif self.kind == "embedding":
            self.table = nn.Embedding.from_pretrained(table.flatten(1))
        else:
            self.table = list(table.unbind(0)) if self.kind == "list" else table
        self.is_used = r.choice(("product", "sum", "mask"))

    def forward(self, x: Tensor, now: Any) -> Tensor:
        choice = numbers(self, now).choice
        row = self.table(torch.tensor(choice)).view(TOKENS, WIDTH) if self.kind == "embedding" else self.table[choice]
        row = row[: x.shape[1]]
        h = F.silu(self.a(x))
        if self.is_used == "product":
            h = h * row
        elif self.is_used == "sum":
            h = h + row
        else:
            h = h.masked_fill(row > 0.3, 0.0)
        return self.b(torch.sigmoid(h))


class Adapters(nn.Module):
    """A frozen base and one small trained adapter a task."""

    reads_numbers = True

    def __init__(self, r: Random) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.ModuleDict({str(i): nn.Linear(WIDTH, 4, bias=False) for i in range(4)})
        self.up = nn.ModuleDict({str(i): nn.Linear(4, WIDTH, bias=False) for i in range(4)})
        self.scales = {str(i): 0.5 + i for i in range(4)}

    def forward(self, x: Tensor, now: Any) -> Tensor:
        key = str(numbers(self, now).choice)
        return F.silu(self.base(x) + self.scales[key] * self.up[key](self.down[key](x)))


class Replaced(nn.Module):
    """A buffer that is another tensor, or has other values, in each step."""

    reads_numbers = True

    def __init__(self, r: Random) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))
        self.is_written = r.random() < 0.5

    def forward(self, x: Tensor, now: Any) -> Tensor:
        n = numbers(self, now)
        value = torch.linspace(0.5, n.temperature, WIDTH)
        if self.is_written:
            with torch.no_grad():
                self.scale.copy_(value)
            # Not the buffer itself: plain autograd would notice the next write to it.
            return self.b(F.silu(self.a(x) + self.scale))
        self.scale = value
        return self.b(F.silu(self.a(x) * self.scale))


class Prompts(nn.Module):
    """A prompt, of a table of prompts, put before the tokens."""

    reads_numbers = True

    def __init__(self, r: Random) -> None:
        super().__init__()
        self.prompts = nn.Parameter(torch.randn(4, 2, WIDTH), requires_grad=r.random() < 0.3)
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, now: Any) -> Tensor:
        prompt = self.prompts[numbers(self, now).choice].expand(x.shape[0], -1, -1)
        h = torch.tanh(self.a(torch.cat((prompt, x), 1)))
        return self.b(h.sigmoid())[:, 2:]


BLOCKS: dict[str, Callable[[Random], nn.Module]] = {
    "numbered": Numbered,
    "few_numbered": FewNumbered,
    "experts": Experts,
    "rows": Rows,
    "adapters": Adapters,
    "replaced": Replaced,
    "prompts": Prompts,
}
