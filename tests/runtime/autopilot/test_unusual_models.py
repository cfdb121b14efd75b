"""Models and loops that an observed step has trouble with: each trains to the bits that it has without lowtide."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.parametrizations import weight_norm

import lowtide
from tests.support.virtual_engine import virtual

SMALL: dict[str, Any] = {"min_bytes": 0}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.dropout = nn.Linear(16, 16), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.inner(x).tanh())


class Net(nn.Module):
    def __init__(self, make: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def _floor(model: nn.Module, batch: Any) -> int:
    with (
        torch.random.fork_rng(devices=[]),
        lowtide.optimize(model, budget=1 << 10, memory=SMALL, engine=virtual(1), strict=True),
        pytest.raises(lowtide.BudgetError) as caught,
    ):
        model(batch)
    return caught.value.floor_bytes + 64


def _bits(model: nn.Module) -> list[Any]:
    found = [p.detach() if p.grad is None else p.grad for p in model.parameters()]
    return [each.tolist() for each in (*found, *model.buffers(), torch.get_rng_state())]


def _batches(number: int = 4) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(3)
    for _ in range(number):
        yield torch.randn(4, 16, generator=generator)


def test_weights_that_a_parametrization_remembers_are_those_of_each_step() -> None:
    """`cached()` around a step: what the observed step computed has a graph that its backward pass has freed."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = weight_norm(nn.Linear(16, 16))
            self.other = parametrizations.orthogonal(nn.Linear(16, 16))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.other(self.inner(self.inner(x).tanh()))

    def train(is_planned: bool) -> list[Any]:
        torch.manual_seed(0)
        model = Net(Twice)
        with parametrize.cached():
            budget = _floor(model, next(_batches()))
        tide = lowtide.optimize(model, budget=budget, memory=SMALL, engine=virtual(1)) if is_planned else None
        found = []
        for batch in _batches():
            with parametrize.cached():
                if is_planned:
                    weight = model.layers[0].inner.weight  # one that the loop has read before
                    model(batch).backward()
                    assert model.layers[0].inner.weight is weight
                else:
                    model(batch).backward()
            found += _bits(model)
            model.zero_grad()
        if tide is not None:
            tide.remove()
        return found

    assert train(True) == train(False)


class Growing:
    """A hook that counts its calls where no model leads."""

    num_calls = 0

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return gradient * self.num_calls


def test_hooks_on_parameters_run_once_a_step() -> None:
    """On several at once too, which torch refuses under `torch.autograd.grad`, as the observed step uses it."""

    def train(is_planned: bool) -> list[Any]:
        torch.manual_seed(0)
        model, seen = Net(), []
        one, other = model.layers[0].inner.weight, model.layers[2].inner.weight
        one.register_hook(lambda gradient: gradient * 2)
        torch.autograd.graph.register_multi_grad_hook(
            (one, other), lambda gradients: seen.append([gradient.sum().item() for gradient in gradients])
        )
        torch.autograd.graph.register_multi_grad_hook((one,), lambda gradient: seen.append(gradient.sum()), mode="any")
        one.register_hook(lambda gradient: gradient + 1)
        one.register_hook(Growing())
        budget = _floor(model, next(_batches()))
        tide = lowtide.optimize(model, budget=budget, memory=SMALL, engine=virtual(1)) if is_planned else None
        found = []
        for batch in _batches():
            model(batch).backward()
            found += _bits(model)
            model.zero_grad()
        if tide is not None:
            tide.remove()
        return [*found, seen]

    assert train(True) == train(False)


def test_a_model_that_calls_itself() -> None:
    class Tree(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.joint = nn.ModuleList(Block() for _ in range(2)), nn.Linear(32, 16)

        def forward(self, node: Any) -> Tensor:
            if isinstance(node, Tensor):
                return self.layers[0](node)
            return self.layers[1](self.joint(torch.cat([self(child) for child in node], -1)))

    def train(is_planned: bool) -> list[Any]:
        torch.manual_seed(0)
        model, leaves = Tree(), list(_batches(5))
        a, b, c, d, e = leaves
        trees: list[Any] = [(a, (b, c)), ((a, b), (c, (d, e))), e, (a, (b, c)), ((a, b), c)]
        budget = _floor(model, trees[0])
        tide = lowtide.optimize(model, budget=budget, memory=SMALL, engine=virtual(1)) if is_planned else None
        found = []
        for tree in trees:
            model.zero_grad()
            model(tree).square().mean().backward()
            found += _bits(model)
        if tide is not None:
            assert tide.stats.num_forwards > 0
            tide.remove()
        return found

    # The largest tree needs more than the floor of the first: each gets a plan of its own, above the budget if need be.
    assert train(True) == train(False)


def test_a_module_that_came_under_another_plan_since_is_named() -> None:
    shared, one, other = Block(), Net(), Net()
    one.layers.append(shared)
    other.layers.append(shared)
    with (
        lowtide.optimize(one, budget="1GiB", engine=virtual(1)) as first,
        lowtide.optimize(other, budget="1GiB", engine=virtual(1)) as second,
    ):
        batch = next(_batches())
        one(batch).backward()
        for _ in range(2):
            with pytest.raises(lowtide.ConfigError) as caught:
                other(batch)
            assert str(caught.value) == (
                "lowtide.optimize: its module 'layers.3' came under another lowtide plan since; call remove() on that "
                "one first"
            )
        first.remove()
        other(batch).backward()
        assert second.stats.num_forwards == 1


def test_two_models_under_budgets_of_their_own_are_named_once(recwarn: pytest.WarningsRecorder) -> None:
    models = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)]
    handles = [lowtide.optimize(model, budget="1MiB") for model in models]
    for _ in range(2):
        for model, handle in zip(models, handles, strict=True):
            model(torch.randn(4, 8)).sum().backward()
            if handle is handles[0]:
                handle.remove()
    said = [str(each.message) for each in recwarn if "in one process" in str(each.message)]
    assert len(said) == 1
    assert said[0].startswith(
        "lowtide.optimize: Sequential (1.0 MiB) and Sequential (1.0 MiB) are under budgets in one process, and each is "
        "planned for alone"
    )


def test_a_backward_pass_that_fails_does_so_where_it_does_without_lowtide() -> None:
    """At the first shape and at a new one: the loop hears of it from `backward()`, and its random state is that of a
    forward pass that was over."""

    def train(budget: str | None) -> list[Any]:
        torch.manual_seed(0)
        model, is_bad, found = Net(), [], []
        model.layers[1].inner.register_full_backward_hook(
            lambda *_: (_ for _ in ()).throw(RuntimeError("bad")) if is_bad else None
        )
        tide = None if budget is None else lowtide.optimize(model, budget=budget, memory=SMALL, engine=virtual(1))
        for num_rows, fails in ((4, True), (4, True), (4, False), (4, False), (9, True), (4, False), (9, False)):
            is_bad[:] = [1] if fails else []
            said = (
                "^lowtide: the backward pass of Net failed while it was observed, with RuntimeError: bad; so this step "
            )
            said += "runs without a plan, and the next one is observed again.$"
            with pytest.warns(UserWarning, match=said) if fails and tide else contextlib.nullcontext():
                loss = model(torch.randn(num_rows, 16))
            found.append(loss.item())
            with pytest.raises(RuntimeError, match=r"^bad") if fails else contextlib.nullcontext():
                loss.backward()
            found += _bits(model)
        if tide is not None:
            assert [event.why for event in tide.events] == ["first step", "new shape"]
            tide.remove()
        return found

    assert train("1GiB") == train(None)


def test_a_backward_pass_that_fails_only_while_it_is_observed_is_said() -> None:
    """The first time the loop goes on without a plan; the second time it is an error."""
    torch.manual_seed(0)
    model = Net()

    def hook(gradient: Tensor) -> None:
        if tide.phase.value == "observing":
            raise RuntimeError("not under autograd.grad")

    with lowtide.optimize(model, budget="1GiB", memory=SMALL, engine=virtual(1)) as tide:
        model.layers[0].inner.register_forward_hook(lambda module, args, output: output.register_hook(hook) and None)
        with pytest.warns(UserWarning, match=r"not under autograd\.grad; so this step runs without a plan"):
            model(next(_batches())).backward()
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"not under autograd\.grad"):
                model(next(_batches()))
