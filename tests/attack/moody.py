"""Blocks with a life of their own: attributes, generators, buffers, modes, functions that autograd knows little of.

A second run of such a block, or a run in an observed step, finds another world than the first one, and leaves another.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tests.attack.now import TOKENS, WIDTH, numbers


class PlannedFailure(Exception):
    """What a model raises because the draw says so."""


class _Block(nn.Module):
    def __init__(self, r: Random) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)


class Counter(_Block):
    """Counts its own calls, and scales by the count."""

    def __init__(self, r: Random) -> None:
        super().__init__(r)
        self.num_calls = 0

    def forward(self, x: Tensor, now: Any) -> Tensor:
        self.num_calls += 1
        return self.b(torch.sigmoid(self.a(x) * (1 + 0.1 * self.num_calls)))


class Hidden(_Block):
    """Carries a hidden state from call to call, in an attribute or in a list of its own."""

    def __init__(self, r: Random) -> None:
        super().__init__(r)
        self.state: Any = [None] if r.random() < 0.5 else None

    def forward(self, x: Tensor, now: Any) -> Tensor:
        old = self.state[0] if isinstance(self.state, list) else self.state
        h = torch.tanh(self.a(x) + (0 if old is None else old))
        new = h.detach().mean((0, 1))
        if isinstance(self.state, list):
            self.state[0] = new
        else:
            self.state = new
        return self.b(h)


class Growing(_Block):
    """Lists and dictionaries that grow: each call sees what earlier ones left."""

    def __init__(self, r: Random) -> None:
        super().__init__(r)
        self.means: list[float] = []
        self.seen = {"calls": 0, "deep": {"values": []}}

    def forward(self, x: Tensor, now: Any) -> Tensor:
        h = F.silu(self.a(x))
        self.means.append(round(float(h.detach().mean()), 4))
        self.seen["calls"] += 1
        self.seen["deep"]["values"].append(len(self.means))
        return self.b(torch.tanh(h + self.means[0] + 0.01 * len(self.seen["deep"]["values"])))


class Cached(_Block):
    """Makes a table at first use, and anew when it is too short."""

    def __init__(self, r: Random) -> None:
        super().__init__(r)
        self.table: Tensor | None = None
        self.num_made = 0

    def forward(self, x: Tensor, now: Any) -> Tensor:
        if self.table is None or len(self.table) < x.shape[1]:
            self.num_made += 1
            self.table = torch.linspace(0.5, 1.5, x.shape[1] * WIDTH).view(-1, WIDTH)
        return self.b(torch.sigmoid(self.a(x)) * self.table[: x.shape[1]])


class Remembering(_Block):
    """Keeps the last keys and attends to them as well, as models with a cache do."""

    def __init__(self, r: Random) -> None:
        super().__init__(r)
        self.cache: Tensor | None = None

    def forward(self, x: Tensor, now: Any) -> Tensor:
        h = self.a(x)
        keys = h if self.cache is None else torch.cat((self.cache, h.mean(0, keepdim=True)), 1).expand(len(h), -1, -1)
        self.cache = keys[:1, -4:].detach()
        return self.b((h @ keys.transpose(1, 2)).softmax(-1) @ keys)


class Written(_Block):
    """Writes a tensor attribute, or a buffer, in place: averages, counts."""

    def __init__(self, r: Random) -> None:
        super().__init__(r)
        mean = torch.zeros(WIDTH)
        self.kind = r.choice(("attribute", "buffer", "hidden_buffer"))
        if self.kind == "attribute":
            self.mean = mean
        else:
            self.register_buffer("mean", mean, persistent=self.kind == "buffer")

    def forward(self, x: Tensor, now: Any) -> Tensor:
        h = self.a(x)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(h.mean((0, 1)), alpha=0.1)
        return self.b(torch.sigmoid(h - self.mean))


class OwnGenerator(_Block):
    """Noise from generators of its own: torch's, numpy's, Python's."""

    def __init__(self, r: Random) -> None:
        super().__init__(r)
        self.kind = r.choice(("torch", "numpy", "python", "listed"))
        made = {
            "torch": lambda: torch.Generator().manual_seed(3),
            "numpy": lambda: np.random.default_rng(3),
            "python": lambda: random.Random(3),
            "listed": lambda: {"generators": [torch.Generator().manual_seed(5)]},
        }
        self.source: Any = made[self.kind]()

    def forward(self, x: Tensor, now: Any) -> Tensor:
        h = torch.tanh(self.a(x))
        if self.kind == "numpy":
            return self.b(F.silu(h * float(self.source.random())))
        if self.kind == "python":
            return self.b(F.silu(h * self.source.random()))
        generator = self.source["generators"][0] if self.kind == "listed" else self.source
        noise = torch.empty(x.shape[1], WIDTH).uniform_(0.5, 1.5, generator=generator)
        return self.b(F.silu(h * noise))


class GlobalNoise(_Block):
    """Draws from numpy's and Python's global generators: layer drop, masks."""

    def __init__(self, r: Random) -> None:
        super().__init__(r)
        self.kind = r.choice(("python", "numpy", "layerdrop", "spans"))

    def forward(self, x: Tensor, now: Any) -> Tensor:
        h = torch.sigmoid(self.a(x))
        if self.kind == "python":
            return self.b(F.silu(h * random.random()))
        if self.kind == "numpy":
            return self.b(F.silu(h * float(np.random.rand())))
        if self.kind == "layerdrop":
            return x if self.training and random.random() < 0.3 else self.b(h)
        mask = torch.from_numpy(np.random.rand(x.shape[0], x.shape[1]) < 0.2)
        return self.b(h.masked_fill(mask.unsqueeze(-1), 0.0))


class Modes(_Block):
    """Does other things in other modes: training, gradients, default dtype, autocast."""

    def __init__(self, r: Random) -> None:
        super().__init__(r)
        self.kind = r.choice(("training", "grad", "dtype", "autocast", "requires"))

    def forward(self, x: Tensor, now: Any) -> Tensor:
        h = self.a(x)
        is_on = {
            "training": lambda: self.training,
            "grad": torch.is_grad_enabled,
            "dtype": lambda: torch.get_default_dtype() is torch.float32,
            "autocast": lambda: torch.is_autocast_enabled("cpu"),
            "requires": lambda: self.a.weight.requires_grad,
        }[self.kind]()
        h = torch.tanh(h) if is_on else torch.sigmoid(h)
        if self.kind == "dtype":
            return self.b((h * torch.ones(WIDTH).exp()).to(self.b.weight.dtype))
        return self.b(h.exp())


class GradModeLeaf(nn.Module):
    """A module without children that looks at the grad mode: made again, it must find the one in which it ran."""

    def __init__(self, r: Random) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.2)

    def forward(self, x: Tensor, now: Any) -> Tensor:
        h = F.linear(x, self.weight)
        return torch.sigmoid(h) if torch.is_grad_enabled() else torch.tanh(h)


class Partly(_Block):
    """A part without gradients, a detached one, one made under inference mode."""

    def __init__(self, r: Random) -> None:
        super().__init__(r)
        with torch.inference_mode():
            self.constant = torch.linspace(0.5, 1.5, WIDTH)
        self.kind = r.choice(("no_grad", "detached", "inference", "enabled"))

    def forward(self, x: Tensor, now: Any) -> Tensor:
        h = F.silu(self.a(x))
        if self.kind == "no_grad":
            with torch.no_grad():
                scale = torch.sigmoid(self.b(h)).mean(-1, keepdim=True)
            return self.b(torch.tanh(h * scale))
        if self.kind == "detached":
            return self.b(torch.tanh(h) * h.detach().sigmoid())
        if self.kind == "inference":
            return self.b(torch.tanh(h + self.constant))
        with torch.no_grad(), torch.enable_grad():
            return self.b(torch.sigmoid(h))


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        result = torch.tanh(x * scale)
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        (result,) = ctx.saved_tensors
        return grad * (1 - result * result) * ctx.scale, None


class _Unsaved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.x = x.detach()  # past save_for_backward, as careless code does
        ctx.save_for_backward(weight)
        return x @ weight.t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple:
        (weight,) = ctx.saved_tensors
        return grad @ weight, grad.flatten(0, 1).t() @ ctx.x.flatten(0, 1)


class _InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        x.exp_()
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0]


class Custom(_Block):
    """autograd functions of its own. Not one that reads an attribute of a saved weight (`main_grad`): under any
    saved-tensor hooks that is another Python object (docs/contract.md)."""

    reads_numbers = True

    def __init__(self, r: Random) -> None:
        super().__init__(r)
        self.kind = r.choice(("scaled", "unsaved", "in_place"))

    def forward(self, x: Tensor, now: Any) -> Tensor:
        h = self.a(x)
        if self.kind == "scaled":
            return self.b(F.silu(_Scaled.apply(h, numbers(self, now).temperature)))
        if self.kind == "in_place":
            return self.b(torch.tanh(_InPlace.apply(h.tanh() * 0.5)))
        return _Unsaved.apply(torch.tanh(h), self.b.weight)


class Force(_Block):
    """Differentiates inside of its forward, as force fields do."""

    def forward(self, x: Tensor, now: Any) -> Tensor:
        point = x if x.requires_grad else x.detach().requires_grad_()
        energy = torch.tanh(self.a(point)).pow(2).sum()
        (force,) = torch.autograd.grad(energy, point, create_graph=True)
        return self.b(force)


class Functional(_Block):
    """torch.func inside of a layer."""

    def __init__(self, r: Random) -> None:
        super().__init__(r)
        self.kind = r.choice(("vmap", "jvp", "grad"))

    def forward(self, x: Tensor, now: Any) -> Tensor:
        h = self.a(x)
        if self.kind == "vmap":
            return self.b(torch.func.vmap(lambda row: torch.sigmoid(row) * row.sum())(h))
        if self.kind == "jvp":
            return self.b(torch.func.jvp(torch.sin, (h,), (torch.ones_like(h),))[1])
        return self.b(torch.func.grad(lambda t: torch.tanh(t).pow(2).sum())(h))


class Hooked(_Block):
    """Forward hooks and pre-hooks of its own, which change values."""

    def __init__(self, r: Random) -> None:
        super().__init__(r)
        self.act = nn.SiLU()
        self.act.register_forward_hook(lambda module, args, output: output * 0.5)
        self.b.register_forward_pre_hook(lambda module, args: (args[0] + 0.1,))
        self.a.register_full_backward_hook(lambda module, given, received: None)

    def forward(self, x: Tensor, now: Any) -> Tensor:
        return self.b(self.act(self.a(x)))


class Failing(_Block):
    """Raises in the middle, in the steps that say so."""

    reads_numbers = True

    def forward(self, x: Tensor, now: Any) -> Tensor:
        h = torch.tanh(self.a(x))
        if numbers(self, now).fails:
            raise PlannedFailure("planned failure in the middle of a forward")
        return self.b(h.exp())


class Sparse(_Block):
    """A product with a constant sparse matrix, as graph networks have."""

    def __init__(self, r: Random) -> None:
        super().__init__(r)
        dense = (torch.rand(TOKENS, TOKENS) < 0.4).float()
        self.register_buffer("graph", dense.to_sparse(), persistent=False)

    def forward(self, x: Tensor, now: Any) -> Tensor:
        if x.shape[1] != TOKENS:
            return self.b(torch.sigmoid(self.a(x)))
        flat = torch.tanh(self.a(x)).transpose(0, 1).reshape(TOKENS, -1)
        return self.b(torch.sparse.mm(self.graph, flat).view(TOKENS, -1, WIDTH).transpose(0, 1).sigmoid())


class PlainWeight(_Block):
    """Weights that are plain tensors in attributes, made from parameters when they are set."""

    def __init__(self, r: Random) -> None:
        super().__init__(r)
        self.weight = torch.randn(WIDTH, WIDTH) * 0.3
        self.has_graph = r.random() < 0.5

    def forward(self, x: Tensor, now: Any) -> Tensor:
        if self.has_graph:
            self.made = self.a.weight * 0.5
            return self.b(torch.sigmoid(F.linear(x, self.made)))
        return self.b(torch.sigmoid(F.linear(F.silu(self.a(x)), self.weight)))


BLOCKS: dict[str, Callable[[Random], nn.Module]] = {
    "counter": Counter,
    "hidden": Hidden,
    "growing": Growing,
    "cached": Cached,
    "remembering": Remembering,
    "written": Written,
    "own_generator": OwnGenerator,
    "global_noise": GlobalNoise,
    "modes": Modes,
    "grad_mode_leaf": GradModeLeaf,
    "partly": Partly,
    "custom": Custom,
    "force": Force,
    "functional": Functional,
    "hooked": Hooked,
    "failing": Failing,
    "sparse": Sparse,
    "plain_weight": PlainWeight,
}
