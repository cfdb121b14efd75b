"""`torch.func` inside a layer, under every plan."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import lowtide
from tests.support import zoo
from tests.support.virtual_engine import virtual

WIDTH = 8
LAYERS = ["layers.0", "layers.1"]
PLANS = {
    "keep": {"keep": ["*"], "layers": LAYERS},
    "swap": {"swap": "all", "min_bytes": 0, "layers": LAYERS},
    "recompute": {"recompute": "all", "min_bytes": 0, "layers": LAYERS},
    "both": {"recompute": "all", "swap": "all", "min_bytes": 0, "layers": LAYERS},
    "leaf": {"recompute": ["layers.*.act", "layers.*.a"], "swap": "all", "min_bytes": 0, "layers": LAYERS},
}
every_plan = pytest.mark.parametrize("plan", PLANS)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.act, self.count = nn.Linear(WIDTH, WIDTH), nn.Tanh(), 0
        self.register_buffer("num_calls", torch.zeros(1))

    def begin(self, x: Tensor) -> Tensor:
        """Work, state and random numbers before the transform: they must not happen twice."""
        self.count += 1
        self.num_calls += 1
        return torch.nn.functional.dropout(self.a(x), 0.2) * self.count * random.random()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.begin(x))


class Grad(Layer):
    def forward(self, x: Tensor) -> Tensor:
        x = self.begin(x)
        return self.act(torch.func.grad(lambda z: self.act(z).pow(3).sum())(x) + x)


class Vjp(Layer):
    def forward(self, x: Tensor) -> Tensor:
        out, pull = torch.func.vjp(lambda z: self.act(self.a(z)), self.begin(x))
        return out + pull(out.cos())[0]


class Jvp(Layer):
    def forward(self, x: Tensor) -> Tensor:
        x = self.begin(x)
        return sum(torch.func.jvp(lambda z: self.act(self.a(z)), (x,), (torch.ones_like(x),)))


class Vmap(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return torch.func.vmap(lambda z: self.act(self.a(z)))(self.begin(x))


class PerSample(Layer):
    def forward(self, x: Tensor) -> Tensor:
        slopes = torch.func.vmap(torch.func.grad(lambda z: self.act(self.a(z)).sum()))
        return self.act(slopes(self.begin(x)) + x)


class Outside(nn.Module):
    """A model that uses it around its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, x: Tensor) -> Tensor:
        def energy(z: Tensor) -> Tensor:
            for layer in self.layers:
                z = layer.act(layer.a(z))
            return z.square().sum()

        return torch.func.grad(energy)(x)


def answer(make: Callable[[], nn.Module], memory: dict | None, num_calls: int = 3) -> list[Tensor]:
    torch.manual_seed(0)
    model = make()
    tide = None if memory is None else lowtide.apply(model, memory, engine=virtual(1))
    torch.manual_seed(1)
    random.seed(1)
    found = []
    for step in range(num_calls):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    if tide is not None:
        tide.remove()
    counts = torch.tensor([layer.count for layer in model.layers])
    return [*found, *model.buffers(), counts, torch.get_rng_state(), torch.tensor(random.random())]


@every_plan
@pytest.mark.parametrize("layer", [Jvp, Vmap])
def test_forward_transforms_go_under_every_plan(plan: str, layer: type[nn.Module]) -> None:
    def make() -> nn.Module:
        return zoo.Stack(layer(), layer())

    assert all(map(zoo.same_bits, answer(make, PLANS[plan]), answer(make, None)))


@every_plan
@pytest.mark.parametrize("layer", [Grad, Vjp, PerSample])
def test_reverse_transforms_leave_their_layer_to_plain_autograd(plan: str, layer: type[nn.Module]) -> None:
    def make() -> nn.Module:
        return zoo.Stack(layer(), Layer())

    want = answer(make, None)
    with pytest.warns(
        UserWarning, match=r"^lowtide: 'layers.0' uses torch.func \(grad, vjp, jacrev or hessian\), around"
    ):
        got = answer(make, PLANS[plan])
    assert all(map(zoo.same_bits, got, want))


def test_around_the_layers_the_whole_model_is_left_to_plain_autograd() -> None:
    want = answer(Outside, None)
    with pytest.warns(UserWarning, match="^lowtide: the model uses torch.func"):
        got = answer(Outside, PLANS["both"])
    assert all(map(zoo.same_bits, got, want))


def test_a_layer_that_begins_later_is_refused_once() -> None:
    class Later(Grad):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if self.count else self.act(self.begin(x))

    torch.manual_seed(0)
    model = zoo.Stack(Later(), Later())
    x = torch.randn(4, WIDTH)
    with lowtide.apply(model, PLANS["swap"], engine=virtual(1)):
        model(x).sum().backward()
        for name in LAYERS:
            with pytest.raises(RuntimeError) as caught:
                model(x)
            assert str(caught.value) == (
                f"lowtide: '{name}' used torch.func (grad, vjp, jacrev or hessian) in this forward, but not in its "
                "first one, or only after it had written to its inputs or to a large buffer; PyTorch does not allow "
                f"saved-tensor hooks around it. Run this step again: what '{name}' saves is left to plain autograd "
                "from now on."
            )
        model(x).sum().backward()


class Gradient(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.func.grad(lambda y: self.a(y).sin().sum())(x)


def test_under_a_budget_a_layer_that_takes_gradients_by_torch_func_is_refused_by_name() -> None:
    model = nn.Sequential(Gradient(), Gradient())
    words = (
        "observe: Sequential uses torch.func (grad, vjp, jacrev or hessian) in its forward, around which PyTorch lets "
        "nobody watch what is saved; train it under rules (lowtide.apply), which leave such a layer alone"
    )
    with lowtide.optimize(model, budget="1GiB"), pytest.raises(lowtide.ConfigError) as refused:
        model(torch.ones(2, WIDTH))
    assert str(refused.value) == words
    with pytest.raises(lowtide.ConfigError) as refused:
        lowtide.plan(model, (torch.ones(2, WIDTH),), budget="1GiB", loss=torch.sum)
    assert str(refused.value) == words
