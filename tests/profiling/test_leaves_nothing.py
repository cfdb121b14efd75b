"""Wherever a forward keeps state, the training that follows a step that lowtide looked at is plain training to the bit.

One table of places where state may live, and each way in which lowtide looks at a step: observed by `optimize`,
`lowtide.observe`, traced by `lowtide.plan`. What nobody can wind back is named in a warning.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import contextvars
import ctypes
import enum
import functools
import io
import itertools
import queue
import threading
import types
import warnings
import weakref
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
import torch.utils.flop_counter
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

import lowtide
from tests.support import held_state
from tests.support.grid import one_of
from tests.support.virtual_engine import virtual

SPACE = types.SimpleNamespace(n=0)
LOCAL = threading.local()
VARIABLE: contextvars.ContextVar[int] = contextvars.ContextVar("VARIABLE")
LISTED: contextvars.ContextVar[list[int]] = contextvars.ContextVar("LISTED")
BYTES = bytearray(1)
LOG: list[Any] = []
WEAK: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
FEATURES: dict[str, Any] = {}
NORM = nn.BatchNorm1d(8)
TEACHERS: list[nn.Module] = []
COUNT = 0


class _Locked:
    def __init__(self) -> None:
        self.lock, self.n = threading.Lock(), 0


class _SlottedLock:
    __slots__ = ("lock", "n")

    def __init__(self) -> None:
        self.lock, self.n = threading.RLock(), 0


class _Local(threading.local):
    n = 0


class _Mode(enum.Enum):
    FAST = "fast"
    ITEMS = [0]  # noqa: RUF012


class _Named:
    counts: dict[str, int] = {}  # noqa: RUF012

    @property
    def next(self) -> int:
        self.counts["n"] = self.counts.get("n", 0) + 1
        return self.counts["n"]

    def __call__(self) -> int:
        return self.next

    @staticmethod
    def bump() -> int:
        return _global_count()


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        LOG.append(1)
        return x * len(LOG)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * (1 + _global_count())


def _global_count() -> int:
    global COUNT  # noqa: PLW0603
    COUNT += 1
    return COUNT


def _twice_removed() -> int:
    return [_global_count() for _ in range(1)][0]  # noqa: RUF015


@functools.lru_cache
def _table(n: int) -> Tensor:
    LOG.append(n)
    return torch.arange(8.0) * len(LOG)


class Layer(nn.Module):
    """A linear layer whose output depends on how often a place has been moved on."""

    def __init__(self, move: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.move = move
        self.count = 0
        self.held: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        moved = self.move(self, y)
        return moved if isinstance(moved, Tensor) and moved.shape == y.shape else y * (1 + 0.1 * moved)


def _added(holder: Any, name: str = "n") -> int:
    setattr(holder, name, getattr(holder, name, 0) + 1)
    return int(getattr(holder, name))


def _at(container: Any, key: Any) -> float:
    container[key] = container[key] + 1
    return float(container[key])


def _counted(m: Layer, name: str) -> int:
    m.count += 1
    return len(getattr(m, name, ())) + m.count


def _variable(m: Layer, y: Tensor) -> int:
    VARIABLE.set(VARIABLE.get(0) + 1)
    return VARIABLE.get()


def _listed(m: Layer, y: Tensor) -> int:
    LISTED.get().append(1)
    return len(LISTED.get())


def _local_import(m: Layer, y: Tensor) -> int:
    from tests.support import held_state as other

    other.COUNT += 1
    return other.COUNT


def _late_names(m: Layer, y: Tensor) -> int:
    held_state.LATE = getattr(held_state, "LATE", 0) + 1  # type: ignore[attr-defined]
    _Named.late = getattr(_Named, "late", 0) + 1  # type: ignore[attr-defined]
    return int(held_state.LATE + _Named.late)  # type: ignore[attr-defined]


def _late_global(m: Layer, y: Tensor) -> int:
    global LATE  # noqa: PLW0603
    LATE = globals().get("LATE", 0) + 1
    return int(LATE)


def _keeps(m: Layer, y: Tensor) -> Tensor:
    before = FEATURES.get("last", torch.zeros(8))
    FEATURES["last"] = y.detach()
    return y + before.mean()


def _object_array(m: Layer, y: Tensor) -> int:
    m.held[0].append(1)
    m.held[1] = m.held[1] + 1
    return len(m.held[0]) + int(m.held[1])


def _in_place(m: Layer, y: Tensor) -> Tensor:
    m.held.loc.add_(0.1)
    return y * m.held.loc


def _replaced(m: Layer, y: Tensor) -> Tensor:
    m.held.component_distribution.loc = m.held.component_distribution.loc + 0.1
    return y * m.held.component_distribution.loc.sum()


def _weak_values(m: Layer, y: Tensor) -> int:
    one = _Named()
    m.held[1].append(one)
    m.held[0][len(m.held[1])] = one
    return len(m.held[0])


def _weak_set(m: Layer, y: Tensor) -> int:
    m.held[1].append(_Named())
    m.held[0].add(m.held[1][-1])
    return len(m.held[0])


def _in_memory(m: Layer, y: Tensor) -> int:
    m.held.write(b"x")
    return len(m.held.getvalue())


def _enumerated(m: Layer, y: Tensor) -> int:
    _Mode.ITEMS.value.append(1)
    return len(_Mode.ITEMS.value) + _added(_Mode.FAST)


def _by_key(m: Layer, y: Tensor) -> int:
    WEAK[m] = WEAK.get(m, 0) + 1
    return WEAK[m]


PLACES: dict[str, tuple[Callable[[Any, Tensor], Any], Callable[[], Any] | None]] = {
    # name: (how it moves, what the layer holds)
    "namespace": (lambda m, y: _added(m.held), types.SimpleNamespace),
    "namespace in a dictionary": (lambda m, y: _added(m.held["a"][0]), lambda: {"a": [types.SimpleNamespace()]}),
    "global namespace": (lambda m, y: _added(SPACE), None),
    "thread-local": (lambda m, y: _added(m.held), threading.local),
    "global thread-local": (lambda m, y: _added(LOCAL), None),
    "thread-local of one's own": (lambda m, y: _added(m.held), _Local),
    "context variable": (_variable, None),
    "list in a context variable": (_listed, None),
    "context variable in an attribute": (lambda m, y: (m.held.get().append(1), len(m.held.get()))[1], lambda: LISTED),
    "bytearray": (lambda m, y: _at(m.held, 0), lambda: bytearray(2)),
    "bytearray that grows": (lambda m, y: (m.held.append(1), len(m.held))[1], bytearray),
    "global bytearray": (lambda m, y: _at(BYTES, 0), None),
    "array.array": (lambda m, y: (m.held.append(1.5), sum(m.held))[1], lambda: array("d", [1.0])),
    "ctypes": (lambda m, y: _at(m.held, 1), lambda: (ctypes.c_double * 2)(1.0, 2.0)),
    "memoryview": (lambda m, y: _at(m.held, 0), lambda: memoryview(bytearray(2))),
    "object array": (_object_array, lambda: np.array([[], 0], dtype=object)),
    "square object array": (lambda m, y: _at(m.held, (0, 1)), lambda: np.zeros((2, 2), dtype=object)),
    "namespaces in an object array": (
        lambda m, y: _added(m.held[0]),
        lambda: np.array([types.SimpleNamespace()], dtype=object),
    ),
    "weak keys": (_by_key, None),
    "weak values": (_weak_values, lambda: (weakref.WeakValueDictionary(), [])),
    "weak set": (_weak_set, lambda: (weakref.WeakSet(), [])),
    "weak reference": (lambda m, y: _added(m.held[1]()), lambda: (one := _Named(), weakref.ref(one))),
    "object with a lock": (lambda m, y: _added(m.held), _Locked),
    "object with a lock in slots": (lambda m, y: _added(m.held), _SlottedLock),
    "lock in a namespace": (lambda m, y: _added(m.held), lambda: types.SimpleNamespace(lock=threading.Lock(), n=0)),
    "members of an enumeration": (_enumerated, None),
    "member in an attribute": (lambda m, y: _added(m.held), lambda: _Mode.FAST),
    "member in a list": (lambda m, y: _added(m.held[0]), lambda: [_Mode.ITEMS]),
    "imported module": (lambda m, y: _added(held_state, "COUNT"), None),
    "list of an imported module": (lambda m, y: (held_state.ITEMS.append(1), len(held_state.ITEMS))[1], None),
    "function of an imported module": (lambda m, y: held_state.bump(), None),
    "module that is imported inside": (_local_import, None),
    "class of an imported module": (lambda m, y: (held_state.Tally(), held_state.Tally.total)[1], None),
    "names that come": (_late_names, None),
    "global that comes": (_late_global, None),
    "distribution in place": (_in_place, lambda: torch.distributions.Normal(torch.ones(8), torch.ones(8))),
    "distribution's attribute": (
        _replaced,
        lambda: torch.distributions.MixtureSameFamily(
            torch.distributions.Categorical(torch.ones(2)),
            torch.distributions.Normal(torch.ones(2), torch.ones(2)),
        ),
    ),
    "distribution in a dictionary": (
        lambda m, y: m.held["d"].concentration0.mul_(1.1).sum(),
        lambda: {"d": torch.distributions.Beta(torch.ones(2), torch.ones(2))},
    ),
    "global batch norm": (lambda m, y: NORM(y) + NORM.running_mean, None),
    "module in a global list": (lambda m, y: _added(TEACHERS[0], "count"), None),
    "batch norm in a tuple": (lambda m, y: m.held[0](y) + m.held[0].running_mean, lambda: (nn.BatchNorm1d(8),)),
    "function behind functions": (lambda m, y: _twice_removed(), None),
    "property": (lambda m, y: m.held.next, _Named),
    "call": (lambda m, y: m.held(), _Named),
    "static method": (lambda m, y: _Named.bump(), None),
    "autograd function": (lambda m, y: _Scaled.apply(y), None),
    "method of a list": (lambda m, y: (m.held(1), len(LOG))[1], lambda: LOG.append),
    "partial": (lambda m, y: (m.held(), len(LOG))[1], lambda: functools.partial(LOG.append, 1)),
    "feature extractor": (_keeps, None),
    "file in memory": (_in_memory, io.BytesIO),
    "function with a cache": (lambda m, y: _table(1)[:8] * y, None),
    "UserDict": (lambda m, y: _at(m.held, "n"), lambda: collections.UserDict(n=0)),
    "ChainMap": (lambda m, y: _at(m.held, "n"), lambda: collections.ChainMap({"n": 0})),
    "argparse": (lambda m, y: _added(m.held), argparse.Namespace),
}
WAYS = ("optimize", "observe", "plan")


def _reset() -> None:
    global COUNT
    COUNT, SPACE.n, BYTES[0] = 0, 0, 0
    for container in (LOG, FEATURES, WEAK, vars(LOCAL), _Named.counts, TEACHERS):
        container.clear()  # type: ignore[attr-defined]
    for name in ("LATE", "late"):
        globals().pop(name, None)
        if hasattr(_Named, name):
            delattr(_Named, name)
    _Mode.ITEMS.value[:] = [0]
    for member in _Mode:
        vars(member).pop("n", None)
    held_state.reset()
    NORM.reset_running_stats()
    TEACHERS.append(nn.Identity())
    _table.cache_clear()
    VARIABLE.set(0)
    LISTED.set([])


def _loss(y: Tensor) -> Tensor:
    return y.square().mean()


def _look(way: str, model: nn.Module, batch: Tensor) -> Any:
    if way == "optimize":
        return lowtide.optimize(model, budget="1GiB", engine=virtual(1))
    if way == "observe":
        lowtide.observe(model, (batch,), loss=_loss)
    if way == "plan":
        lowtide.plan(model, (batch,), loss=_loss, budget="1GiB", hardware="cpu")
    return None


def _train(build: Callable[[], nn.Module], way: str) -> list[Any]:
    _reset()
    torch.manual_seed(0)
    model, batch = build(), torch.randn(4, 8)
    tide = _look(way, model, batch)
    found: list[Any] = []
    for _ in range(2):
        loss = _loss(model(batch))
        loss.backward()
        found += [loss.item(), *(p.grad.tolist() for p in model.parameters()), COUNT, len(LOG), torch.rand(1).item()]
    if tide is not None:
        tide.remove()
    return found


@pytest.mark.parametrize("place", one_of(2, PLACES))
def test_training_goes_on_as_if_nobody_had_looked(place: str) -> None:
    move, make = PLACES[place]

    def build() -> nn.Module:
        layers = [Layer(move) for _ in range(2)]
        for layer in layers:
            layer.held = None if make is None else make()
        return nn.Sequential(*layers)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = _train(build, "")
        for way in WAYS:
            assert _train(build, way) == plain, way


def _advance(m: Layer, y: Tensor) -> int:
    next(m.held)
    return 0


SAID: dict[str, tuple[Callable[[Any, Tensor], Any], Callable[[], Any], str]] = {
    "itertools": (_advance, itertools.count, "'0.held' (itertools.count) and 1 more"),
    "generator": (_advance, lambda: (n for n in range(9)), "'0.held' (builtins.generator) and 1 more"),
    "list": (_advance, lambda: iter([1, 2, 3, 4, 5, 6]), "'0.held' (builtins.list_iterator) and 1 more"),
    "chained": (_advance, lambda: itertools.chain(range(3), iter([1, 2, 3])), "'0.held' (itertools.chain) and 1 more"),
    "enumerated": (_advance, lambda: enumerate("abcdef"), "'0.held' (builtins.enumerate) and 1 more"),
    "loader": (
        _advance,
        lambda: iter(torch.utils.data.DataLoader(torch.ones(9, 1))),
        "'0.held' (torch.utils.data.dataloader._SingleProcessDataLoaderIter) and 1 more",
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", SAID)
def test_what_cannot_be_wound_back_is_named(kind: str, way: str) -> None:
    move, make, name = SAID[kind]

    def build() -> nn.Module:
        layers = [Layer(move) for _ in range(2)]
        for layer in layers:
            layer.held = make()
        return nn.Sequential(*layers)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _train(build, way)
    assert [str(warning.message) for warning in caught] == [
        f"lowtide: the step that lowtide looked at moved {name} on, which cannot be wound back, so training "
        "goes on from there; keep the position as a number if that matters."
    ]


@pytest.mark.parametrize("kind", ["queue", "cache"])
def test_tensors_without_bytes_that_stay_are_named(kind: str) -> None:
    held: queue.Queue[Tensor] = queue.Queue()  # which another thread may be reading

    @functools.lru_cache
    def ones(n: int) -> Tensor:
        return torch.ones(n)

    ones(5)
    move = (lambda m, y: y * ones(8)) if kind == "cache" else (lambda m, y: held.put(y.detach()) or 0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _look("plan", nn.Sequential(Layer(move)), torch.randn(4, 8))
    where = "a functools._lru_cache_wrapper" if kind == "cache" else "a collections.deque"
    assert [str(w.message) for w in caught] == [
        f"lowtide: the traced step left tensors without bytes in {where}, which lowtide cannot put back; empty it "
        "before you train."
    ]


def test_a_file_is_read_from_where_it_was(tmp_path: Any) -> None:
    path = tmp_path / "numbers"
    path.write_text("1\n2\n3\n4\n5\n6\n")

    def build() -> nn.Module:
        layer = Layer(lambda m, y: int(m.held.readline()))
        layer.held = files.enter_context(path.open())
        return nn.Sequential(layer)

    with contextlib.ExitStack() as files, warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = _train(build, "")
        for way in WAYS:
            assert _train(build, way) == plain, way


@pytest.mark.parametrize("way", WAYS)
def test_hooks_of_all_modules_and_modes_have_seen_nothing(way: str) -> None:
    seen: list[str] = []
    model, batch = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(4, 8)
    hook = register_module_forward_hook(lambda module, _, __: seen.append(type(module).__name__))
    try:
        with torch.utils.flop_counter.FlopCounterMode(display=False) as flops:
            tide = _look(way, model, batch)
            model(batch)
        assert seen == ["Linear", "Tanh", "Sequential"]
        assert flops.get_total_flops() == 2 * 4 * 8 * 8
    finally:
        hook.remove()
        if tide is not None:
            tide.remove()
