"""State in places that nobody looks at: a second run is right, or refused before its gradients are used."""

from __future__ import annotations

import contextlib
import contextvars
import enum
import os
import random
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from lowtide.errors import RecomputeRefusedError
from lowtide.runtime.recompute.flow import Flow
from tests.support import zoo
from tests.support.virtual_engine import virtual

WIDTH = 16
LAYERS = ["layers.0", "layers.1"]
LAYER = {"recompute": "all", "min_bytes": 0, "layers": LAYERS}
Step = Callable[[], Any]
"""Moves a state, and returns a number or a tensor of it."""


class _Colour(enum.Enum):
    RED = 1


class _Slotted:
    __slots__ = ("n",)

    def __init__(self) -> None:
        self.n = 0


def _attribute(holder: Any, name: str = "n") -> Step:
    setattr(holder, name, 0)

    def step() -> int:
        setattr(holder, name, getattr(holder, name) + 1)
        return int(getattr(holder, name))

    return step


def _item(holder: Any, key: Any, get: Callable[[Any], int] = int, put: Callable[[int], Any] = int) -> Step:
    def step() -> int:
        holder[key] = put(get(holder[key]) + 1)
        return get(holder[key])

    return step


def _locked() -> Step:
    class Locked:
        def __init__(self) -> None:
            self.lock = threading.Lock()

    return _attribute(Locked())


def _context() -> Step:
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("state", default=0)

    def step() -> int:
        variable.set(variable.get() + 1)
        return variable.get()

    return step


def _weak_dictionary() -> Step:
    held = _Colour.RED
    table: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary({held: 0})
    return _item(table, held)


def _objects() -> Step:
    return _item(np.array([0], dtype=object), 0)


def _generator_object() -> Step:
    def numbers() -> Iterator[int]:
        yield from range(1, 1000)

    found = numbers()
    hidden = types.SimpleNamespace(next=found.__next__)
    return lambda: hidden.next()  # noqa: PLW0108  by its name, so that nobody reaches the generator


def _distribution() -> Step:
    prior = torch.distributions.Normal(torch.zeros(WIDTH), torch.ones(WIDTH))

    def step() -> Tensor:
        prior.loc.add_(1.0)
        return prior.loc.clone()

    return step


class _Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)


_NORM = _Normed()


def _global_module() -> Step:
    _NORM.norm.reset_running_stats()

    def step() -> Tensor:
        with torch.no_grad():
            _NORM.norm(torch.ones(4, WIDTH))
        return _NORM.norm.running_mean.clone()

    return step


def _closure() -> Step:
    number = 0

    def step() -> int:
        nonlocal number
        number += 1
        return number

    return step


def _teacher() -> Step:
    teacher = [nn.Linear(WIDTH, WIDTH)]
    with torch.no_grad():
        teacher[0].weight.zero_()

    def step() -> Tensor:
        with torch.no_grad():
            teacher[0].bias.fill_(0.0)
            teacher[0].weight.add_(0.01)
            return teacher[0](torch.ones(WIDTH))

    return step


def _view_by_data() -> Step:
    table = torch.zeros(WIDTH)

    def step() -> Tensor:
        table.data.add_(1.0)
        return table.clone()

    return step


def _function_attribute() -> Step:
    def holder() -> None:
        pass

    return _attribute(holder)


def _default_argument() -> Step:
    def step(seen: list[int] = []) -> int:  # noqa: B006  the test is about it
        seen.append(1)
        return len(seen)

    return lambda: step()  # noqa: PLW0108  as it stands in a module


def _hidden_function() -> Step:
    def inner() -> Step:
        return _closure()

    held = types.SimpleNamespace(step=inner())
    return lambda: held.step()  # noqa: PLW0108  by its name


KINDS: dict[str, Callable[[], Step]] = {
    "namespace": lambda: _attribute(types.SimpleNamespace()),
    "thread_local": lambda: _attribute(threading.local()),
    "context_variable": _context,
    "bytearray": lambda: _item(bytearray(1), 0),
    "object_array": _objects,
    "array": lambda: _item(np.zeros(1), 0),
    "weak_dictionary": _weak_dictionary,
    "locked": _locked,
    "enum_member": lambda: _attribute(_Colour.RED, "count"),
    "imported_module": lambda: _attribute(zoo, "_count_of_a_test"),
    "distribution": _distribution,
    "global_module": _global_module,
    "closure": _closure,
    "generator_object": _generator_object,
    "teacher": _teacher,
    "data": _view_by_data,
    "function_attribute": _function_attribute,
    "default_argument": _default_argument,
    "hidden_function": _hidden_function,
    "slots": lambda: _attribute(_Slotted()),
    "memory": lambda: _item(memoryview(bytearray(1)), 0),
}


class Early(nn.Module):
    """Reads its state before it saves something."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.step = step

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.sigmoid(self.a(x)) * (1 + 0.1 * self.step()))


class Late(Early):
    """Moves its state at the beginning, and reads it after the last tensor that it saves."""

    def forward(self, x: Tensor) -> Tensor:
        number = self.step()
        return torch.tanh(torch.sigmoid(self.a(x))) + 0.1 * number


def train(block: type[Early], kind: str, memory: dict | None) -> list[Tensor]:
    step = KINDS[kind]()
    torch.manual_seed(0)
    model = zoo.Stack(block(step), block(step))
    tide = None if memory is None else lowtide.apply(model, memory, engine=virtual(1))
    found = []
    try:
        for number in range(3):
            x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number))
            loss = model(x).square().mean()
            loss.backward()
            found += [loss.detach().clone(), *(p.grad.clone() for p in model.parameters())]
            model.zero_grad()
    finally:
        if tide is not None:
            tide.remove()
    return found


@pytest.mark.parametrize("block", [Early, Late])
@pytest.mark.parametrize("kind", KINDS)
def test_a_second_run_is_right_or_refused(kind: str, block: type[Early]) -> None:
    want = train(block, kind, None)
    with contextlib.suppress(RecomputeRefusedError):
        assert all(map(zoo.same_bits, train(block, kind, LAYER), want))


def test_what_common_modules_move_is_right() -> None:
    """Not refused: the walk, or the operators of the first run, have shown it."""
    for kind in (
        "closure",
        "context_variable",
        "distribution",
        "global_module",
        "slots",
        "array",
        "data",
        "default_argument",
    ):
        for block in (Early, Late):
            assert all(map(zoo.same_bits, train(block, kind, LAYER), train(block, kind, None))), kind


class _Differentiates(nn.Module):
    """A layer that needs its own gradient in its forward, so that it runs again before that is over."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.log, self.place = nn.Linear(WIDTH, WIDTH), [0], types.SimpleNamespace(n=0)

    def forward(self, x: Tensor) -> Tensor:
        self.log.append(len(self.log))
        self.place.n += 1
        point = x.detach().requires_grad_()
        energy = F.dropout(torch.tanh(self.up(point)), 0.5).pow(2).sum() * self.place.n
        return x + torch.autograd.grad(energy, point, create_graph=True)[0] * len(self.log) + torch.rand(())


def test_what_a_forward_has_moved_before_it_differentiates_is_moved_once() -> None:
    def steps(memory: dict[str, Any] | None) -> tuple[list[Any], list[Tensor]]:
        torch.manual_seed(0)
        model = zoo.Stack(_Differentiates(), _Differentiates())
        log = model.layers[0].log
        model.layers[1].log = log  # one list for both
        with contextlib.nullcontext() if memory is None else lowtide.apply(model, memory, engine=virtual(0)):
            for _ in range(3):
                model(torch.ones(4, WIDTH)).sum().backward()
        moved = [log, *(layer.place.n for layer in model.layers), torch.rand(())]
        return moved, [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    (moved, gradients), (plain_moved, plain_gradients) = steps(LAYER), steps(None)
    assert moved == plain_moved
    assert all(zoo.same_bits(*pair) for pair in zip(gradients, plain_gradients, strict=True))


def test_a_refusal_names_the_module_and_the_tensor_and_the_module_is_kept_from_then_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = "NUMBER_OF_A_TEST"
    monkeypatch.setenv(place, "0")

    def step() -> int:
        os.environ[place] = str(int(os.environ[place]) + 1)
        return int(os.environ[place])

    torch.manual_seed(0)
    model = zoo.Stack(Early(step), Early(step))
    x = torch.randn(8, WIDTH)
    with lowtide.apply(model, LAYER, engine=virtual(1)) as tide:
        for layer in (1, 0):
            with pytest.raises(RecomputeRefusedError) as caught:
                model(x).square().mean().backward()
            number = layer + 3
            assert str(caught.value) == (
                f"lowtide: the recomputed 'layers.{layer}' (Early) gave other values when it was run again for its "
                f"backward pass: the first tensor that differs is number {number} of the {number} that it saves, of "
                "shape [8, 16], made by TanhBackward0. It reads something that changed since its forward: keep or swap "
                "it. It is not run again from the next step on."
            )
        assert sorted(tide.refused_layers) == LAYERS
        model.zero_grad()
        before = os.environ[place]
        loss = model(x).square().mean()
        loss.backward()
        got = [p.grad.clone() for p in model.parameters()]
    os.environ[place] = before
    model.zero_grad()
    model(x).square().mean().backward()
    assert all(map(zoo.same_bits, got, [p.grad for p in model.parameters()]))


@pytest.mark.parametrize("is_early", [True, False])
def test_a_global_hook_between_forward_and_backward(is_early: bool) -> None:
    def gradients(memory: dict | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = zoo.Stack(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        )
        tide = None if memory is None else lowtide.apply(model, memory, engine=virtual(1))
        register = nn.modules.module.register_module_forward_hook
        hook = register(lambda module, _args, out: out * 1.5 if isinstance(module, nn.Linear) else None)
        if not is_early:
            hook.remove()
        loss = model(torch.ones(2, WIDTH)).square().mean()
        if is_early:
            hook.remove()
        else:
            hook = register(lambda module, _args, out: out * 1.5 if isinstance(module, nn.Linear) else None)
        loss.backward()
        hook.remove()
        if tide is not None:
            tide.remove()
        return [p.grad for p in model.parameters()]

    assert all(map(zoo.same_bits, gradients(LAYER), gradients(None)))


@pytest.mark.parametrize("has_effect", [False, True])
@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_a_module_that_begins_to_draw_later(draw: Callable[[], float], has_effect: bool) -> None:
    """Layers dropped after a warm-up: what is drawn and decides nothing moves the generator once, as without a plan."""
    state = types.SimpleNamespace(is_warm=False)

    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.sigmoid(self.a(x))
            number = draw() if state.is_warm else 0.0
            return torch.tanh(h * (1 + number)) if has_effect else torch.tanh(h)

    def train(memory: dict | None) -> list[Any]:
        state.is_warm = False
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        model, x, found = zoo.Stack(Drops(), Drops()), torch.randn(8, WIDTH), []
        with contextlib.nullcontext() if memory is None else lowtide.apply(model, memory, engine=virtual(1)):
            for number in range(8):
                state.is_warm = number > 5
                model.zero_grad()
                loss = model(x).square().mean()
                with contextlib.suppress(*(() if memory is None or not has_effect else (RecomputeRefusedError,))):
                    loss.backward()
                    found.append([p.grad.clone() for p in model.parameters()])
                found.append([torch.tensor(random.getstate()[1]), torch.tensor(np.random.get_state()[2])])
        return found

    got, want = train(LAYER), train(None)
    if has_effect:
        assert len(got) == len(want) - 2  # refused, and in the last two steps the state is what it would be
        got, want = [got[-2], got[-1]], [want[-3], want[-1]]
    assert all(all(map(zoo.same_bits, one, other)) for one, other in zip(got, want, strict=True))


def test_a_state_that_begins_to_move_later_is_refused_within_some_steps() -> None:
    """Used only after the last save, and in a place that nobody looks at: every 64th second run goes to its end."""
    state = types.SimpleNamespace(n=0, moves=False)

    def step() -> int:
        state.n += state.moves
        return state.n

    torch.manual_seed(0)
    model = zoo.Stack(Late(step), nn.Linear(WIDTH, WIDTH))
    x = torch.randn(2, WIDTH)
    with lowtide.apply(model, {**LAYER, "layers": ["layers.0"]}, engine=virtual(1)), warnings.catch_warnings():
        model(x).square().mean().backward()
        state.moves = True
        with pytest.raises(RecomputeRefusedError, match="of what it gives, tensor 1 differs"):  # noqa: PT012
            for _ in range(64):
                model(x).square().mean().backward()


def test_the_frontier_is_what_no_later_tensor_comes_from() -> None:
    """Dropout saves a mask as large as its input and reads nothing of it; a threshold keeps little of what it reads."""
    weight = torch.randn(WIDTH, WIDTH)

    def frontier(forward: Callable[[Tensor], Tensor]) -> list[int]:
        x = torch.randn(4, WIDTH, requires_grad=True)
        flow = Flow([x], is_sharded=False)

        def pack(tensor: Tensor) -> Tensor:
            flow.save(tensor)
            return tensor.detach()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), flow:
            forward(x)
        return flow.frontier

    assert frontier(lambda x: x.tanh().exp().sin()) == [1]
    # Saved: the weight, the sigmoid, the weight, what dropout reads, and its mask.
    assert frontier(lambda x: (x @ weight).sigmoid() + F.dropout((x @ weight).tanh(), 0.5)) == [1, 3, 4]
    assert frontier(lambda x: torch.where(x.tanh() > 0, x, 0.0) * 2) == [0, 1]
    halves = frontier(lambda x: torch.stack([half.sin() for half in (x * 2).chunk(2, -1)]))
    assert halves == [0, 1]
