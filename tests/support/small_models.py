"""Small models whose recipes are known by heart, and plans for them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lowtide.core.fate import Fate
from lowtide.core.plan import Plan
from lowtide.core.profile import Profile
from lowtide.profiling.observe_step import observe
from tests.support import zoo
from tests.support.solved import plan_with

WIDTH = 16


class Gated(nn.Module):
    """down(silu(gate(x)) * up(x)): the product and the silu can be made again from gate and up."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.after: Callable[[Tensor], None] = lambda product: None

    def forward(self, x: Tensor) -> Tensor:
        product = torch.nn.functional.silu(self.gate(x)) * self.up(x)
        output = self.down(product)
        self.after(product)
        return x + output


class Residual(nn.Module):
    """Three layers whose output is added to their input; the loss comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:  # (N, 16) -> scalar
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x.square().mean()


class Normed(nn.Module):
    """A norm whose input nobody saves in the dtype that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.before: Callable[[Tensor], None] = lambda x: None

    def forward(self, x: Tensor) -> Tensor:
        self.before(x)
        wide = x.to(torch.float64)
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def stack(*layers: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    model = zoo.Stack(*layers)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def rows(num_rows: int = 8, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, WIDTH, generator=torch.Generator().manual_seed(seed))


def small_loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def profiled(model: nn.Module, x: Tensor | None = None) -> Profile:
    batch = rows() if x is None else x
    layers = tuple(f"layers.{i}" for i in range(len(model.layers)))
    return observe(model, lambda: small_loss(model, batch), layers=layers)


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(small_loss(model, x), list(model.parameters())))


def assert_plain(model: nn.Module, x: Tensor, got: list[Tensor]) -> None:
    want = gradients(model, x)
    assert all(zoo.same_bits(*pair) for pair in zip(got, want, strict=True))


ALL_MADE = {"layers.0.silu": Fate.RECOMPUTE, "layers.0.mul": Fate.RECOMPUTE}


def only_made(profile: Profile, **fates: Fate) -> Plan:
    """Every saved site that can be made again is; retained inputs that this needs are kept, or get another fate by
    name."""
    chosen = {node.name: Fate.RECOMPUTE for node in profile.sites if node.recipe is not None}
    needed = {name for node in profile.sites if node.recipe is not None for name in node.recipe.nodes}
    retained_inputs = {node.name for node in profile.nodes if node.retained_input is not None}
    return plan_with(profile, {**dict.fromkeys(needed & retained_inputs, Fate.KEEP), **chosen, **fates})
