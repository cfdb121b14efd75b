"""The observed step leaves nothing: training under `optimize`, with room for everything, is plain training to the bit.

Whatever a forward moves on (attributes, generators, caches, parameters, what it was given) has moved once, not twice.
"""

from __future__ import annotations

import copy
import gc
import itertools
import random
import time
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lowtide
from tests.support.virtual_engine import virtual

SEEN: list[float] = []


class Base(nn.Module):
    """A layer with a habit."""

    shared: dict[str, int] = {}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.number = 0
        self.hidden: Any = None
        self.items: dict[str, Any] = {"list": [], "by": {}}
        self.generator = torch.Generator().manual_seed(3)
        self.python = random.Random(3)
        self.numpy = np.random.default_rng(3)
        self.code = nn.Parameter(torch.ones(8), requires_grad=False)
        self.flags = torch.zeros(4)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("large", torch.zeros(2**18 + 8))
        self.norm = nn.BatchNorm1d(8)


def _count(m: Base, x: Tensor) -> Tensor:
    m.number += 1
    m.items["list"].append(m.number)
    m.items["by"][m.number] = len(m.items["by"])
    return m.linear(x) * (1 - 0.1 * m.number) + len(m.items["list"])


def _generators(m: Base, x: Tensor) -> Tensor:
    noise = torch.bernoulli(torch.full_like(x, 0.5), generator=m.generator)
    return m.linear(x) * noise * m.python.random() * m.numpy.random()


def _process(m: Base, x: Tensor) -> Tensor:
    return m.linear(torch.dropout(x, 0.5, True)) * random.random() * np.random.rand()


def _hidden(m: Base, x: Tensor) -> Tensor:
    h = torch.tanh(m.linear(x) + (0 if m.hidden is None else m.hidden))
    m.hidden = h.detach().mean(0)
    return h


def _writes(m: Base, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.mean.mul_(0.9).add_(x.mean(0))
        m.large[:8] += 1
        m.code.mul_(0.9)
        m.linear.weight.clamp_(-0.2, 0.2)
        m.linear.bias.data = m.linear.bias.data.clamp(-0.1, 0.1)
    m.flags.numpy()[0] += 1
    return m.norm(m.linear(x) * m.code + m.mean) * m.flags[0] + m.large[:8]


def _replaces(m: Base, x: Tensor) -> Tensor:
    m.mean = m.mean + 1
    if not hasattr(m, "late"):
        m.late = nn.Identity()
        m.register_buffer("later", torch.zeros(1))
    m.later += 1
    return m.linear(x) + m.mean + m.later


def _classes(m: Base, x: Tensor) -> Tensor:
    m.shared["n"] = m.shared.get("n", 0) + 1
    return m.linear(x) * m.shared["n"]


def _modes(m: Base, x: Tensor) -> Tensor:
    m.train(m.number % 2 == 0)
    m.number += 1
    m.code.requires_grad_(False)
    return m.norm(m.linear(x))


HABITS: dict[str, Callable[[Base, Tensor], Tensor]] = {
    "count": _count,
    "generators": _generators,
    "process": _process,
    "hidden": _hidden,
    "writes": _writes,
    "replaces": _replaces,
    "classes": _classes,
    "modes": _modes,
}


class Net(nn.Module):
    def __init__(self, habit: Callable[[Base, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Base() for _ in range(2))
        self.habit = habit

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.habit(layer, x)
        return x.square().mean()


def _state(model: Net, optimizer: torch.optim.Optimizer) -> list[Any]:
    found: list[Any] = [p.grad for p in model.parameters()] + [p.detach() for p in model.parameters()]
    found += [buffer for _, buffer in model.named_buffers()] + [torch.get_rng_state()]
    for layer in model.layers:
        found += [layer.number, layer.hidden, layer.items, layer.flags, layer.generator.get_state(), layer.training]
        found += [
            layer.python.getstate(),
            str(layer.numpy.bit_generator.state),
            sorted(vars(layer)),
            layer.norm.training,
        ]
    found += [random.getstate(), str(np.random.get_state()), dict(Base.shared), list(optimizer.state_dict()["state"])]
    return copy.deepcopy([_bytes_of(part) if isinstance(part, Tensor) else part for part in found])


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.detach().flatten().view(torch.uint8).numpy().tobytes()


def _train(habit: Callable[[Base, Tensor], Tensor], budget: str | None) -> list[Any]:
    torch.manual_seed(1)
    model = Net(habit)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    Base.shared.clear()
    torch.manual_seed(2)
    random.seed(2)
    np.random.seed(2)
    found = []
    tide = None if budget is None else lowtide.optimize(model, budget=budget, optimizer=optimizer, engine=virtual(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(3):
            optimizer.zero_grad()
            model(torch.randn(4 if step < 2 else 6, 8)).backward()  # two shapes, so two observed steps
            found += _state(model, optimizer)
            optimizer.step()
    if tide is not None:
        assert len([event for event in tide.events if event.why in ("first step", "new shape")]) == 2
        tide.remove()
    return found


@pytest.mark.parametrize("habit", HABITS)
def test_state_moves_on_once(habit: str) -> None:
    assert _train(HABITS[habit], "1GiB") == _train(HABITS[habit], None)


def test_globals_that_a_forward_names() -> None:
    class Global(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            SEEN.append(float(len(SEEN)))
            return self.linear(x).sum() * len(SEEN)

    SEEN.clear()
    model = Global()
    with lowtide.optimize(model, budget="1GiB", engine=virtual(1)), warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.ones(2, 8)).backward()
    assert SEEN == [0.0]


def test_hooks_of_the_model_run_once_and_those_inside_leave_nothing() -> None:
    def run(budget: str | None) -> tuple:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        seen: list[str] = []
        model.register_forward_pre_hook(lambda _, args: (seen.append("before"), (args[0] * 2,))[1])
        model.register_forward_hook(lambda *_: seen.append("after"))
        model.register_full_backward_hook(lambda *_: seen.append("backward"))
        model[1].register_forward_hook(lambda _, __, output: (seen.append("inside"), output + 1)[1])
        model[1].register_full_backward_hook(lambda *_: seen.append("inside backward"))
        if budget is not None:
            lowtide.optimize(model, budget=budget, engine=virtual(1))
        x = torch.randn(4, 8, requires_grad=True)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(x).sum().backward()
        assert x.grad is not None
        return seen, x.grad.tolist(), [p.grad.tolist() for p in model.parameters() if p.grad is not None]

    plain = run(None)
    assert plain[0] == ["before", "inside", "after", "inside backward", "backward"]
    assert run("1GiB") == plain


def test_what_the_model_is_given_is_as_it_was() -> None:
    class Greedy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, batch: dict[str, Any], cache: Any) -> Tensor:
            labels = batch.pop("labels")
            batch["inner"]["mask"].add_(1)
            batch["inner"]["more"].append(1)
            cache.past.append(batch["x"].clone())
            batch["x"].mul_(2)
            return (self.linear(batch["x"] * batch["inner"]["mask"]) - labels).square().sum() * len(cache.past)

    class Cache:
        def __init__(self) -> None:
            self.past: list[Tensor] = []

    def run(budget: str | None) -> list[Any]:
        torch.manual_seed(0)
        model, cache = Greedy(), Cache()
        batch: dict[str, Any] = {
            "x": torch.randn(4, 8), "labels": torch.randn(4, 8), "inner": {"mask": torch.ones(8), "more": []}
        }  # fmt: skip
        if budget is not None:
            lowtide.optimize(model, budget=budget, engine=virtual(1))
        loss = model(batch, cache)
        loss.backward()
        found = [loss, batch["x"], batch["inner"]["mask"], *cache.past, *(p.grad for p in model.parameters())]
        return [[part.tolist() for part in found], sorted(batch), batch["inner"]["more"]]

    assert run("1GiB") == run(None)


def test_settings_of_torch_are_as_they_were() -> None:
    class Sets(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.seen: list[Any] = []

        def forward(self, x: Tensor) -> Tensor:
            seen = (torch.get_default_dtype(), torch.backends.cudnn.benchmark, len(warnings.filters))
            SEEN.append(seen)  # type: ignore[arg-type]
            torch.set_default_dtype(torch.float64)
            torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark
            warnings.filterwarnings("ignore", message=f"nothing {len(warnings.filters)}")
            return self.linear(x).sum()

    before, benchmark = torch.get_default_dtype(), torch.backends.cudnn.benchmark
    SEEN.clear()
    seen: list[Any] = []
    model = Sets()
    model.linear.register_forward_pre_hook(lambda *_: seen.append(1))
    try:
        with warnings.catch_warnings(), lowtide.optimize(model, budget="1GiB", engine=virtual(1)):
            filters = len(warnings.filters)
            model(torch.ones(2, 8))
        assert SEEN == [(before, benchmark, filters)]  # noqa: SIM300
    finally:
        torch.set_default_dtype(before)
        torch.backends.cudnn.benchmark = benchmark


class _Drawn(nn.Module):
    """Reads from an iterator, which nobody can turn back."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.numbers = itertools.count(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sum() * next(self.numbers)


def test_state_that_cannot_be_put_back_is_said() -> None:
    model = _Drawn()
    with lowtide.optimize(model, budget="1GiB", engine=virtual(1)), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            model(torch.ones(2, 8)).backward()
    assert [str(warning.message) for warning in caught] == [
        "lowtide: the step that lowtide looked at moved 'numbers' (itertools.count) on, which cannot be wound back, so "
        "training goes on from there; keep the position as a number if that matters."
    ]


class _Foreign(nn.Module):
    """Reads what nobody can put back and nobody can see: a number of the interpreter's own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * (1 + 1e-3 * (time.perf_counter_ns() % 1000))


def test_the_first_module_that_gives_something_else_is_named() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(_Foreign(), nn.Tanh()), _Foreign())
    with lowtide.optimize(model, budget="1GiB", engine=virtual(1)), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            model(torch.ones(2, 8)).sum().backward()
    assert [str(warning.message) for warning in caught] == [
        "lowtide: from the same inputs, Sequential gave another output than in the observed step, first '1.0' "
        "(_Foreign): it reads state that lowtide cannot put back, or it does not repeat itself. The observed step has "
        "moved such state on by one step."
    ]
    assert not any(module._forward_hooks for module in model.modules())


def test_a_lazy_module_is_refused_by_name() -> None:
    model = nn.Sequential(nn.LazyLinear(4))
    with lowtide.optimize(model, budget="1GiB", engine=virtual(1)):
        with pytest.raises(lowtide.ConfigError) as caught:
            model(torch.ones(2, 8))
        assert str(caught.value) == (
            "observe: '0.weight' has no shape yet (a lazy module); run the model once, so that it is initialized as it "
            "would be without lowtide"
        )
    with pytest.raises(
        lowtide.ConfigError, match=r"^lowtide\.apply: '0\.weight' has no shape yet \(a lazy module\); run"
    ):
        lowtide.apply(model, {"swap": "all"})


def test_the_batch_of_the_first_step_is_let_go_without_a_collection() -> None:
    """Else it would be on the device beside the second one, where no plan counts it."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    x = torch.ones(4, 8)
    alive = weakref.ref(x)
    with lowtide.optimize(model, budget="1GiB", engine=virtual(0)):
        gc.collect()
        gc.disable()
        try:
            model(x).sum().backward()
            del x
            assert alive() is None
        finally:
            gc.enable()
