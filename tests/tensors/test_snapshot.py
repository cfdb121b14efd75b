"""Snapshots: whatever a forward can change is put back, the same objects stay the same, and what moved is named."""

from __future__ import annotations

import copy
import functools
import random
import re
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from lowtide.tensors.snapshot import Snapshot, take
from tests.support.what_moved import changed

SEEN: list[int] = []
COUNT = 0


@dataclass
class Tally:
    number: int = 0
    seen: list[int] = field(default_factory=list)


class Slotted:
    __slots__ = ("late", "number")

    def __init__(self) -> None:
        self.number = 0


class Cache(dict):
    def __init__(self) -> None:
        super().__init__()
        self.hits = 0


class State(nn.Module):
    shared: dict[str, int] = {}  # noqa: RUF012
    total = 0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("small", torch.zeros(3))
        self.register_buffer("large", torch.zeros(2**19))
        self.number = 0
        self.ratio = 0.5
        self.items: list[Any] = [1, [2, 3]]
        self.alias = self.items
        self.table = {"x": {"y": [1]}}
        self.ordered = OrderedDict(a=1, b=2)
        self.counts = defaultdict(int)
        self.words = Counter("aab")
        self.recent = deque([1, 2], maxlen=2)
        self.names = {"a"}
        self.tally = Tally()
        self.slotted = Slotted()
        self.cache = Cache()
        self.pair = (Tally(), [1])
        self.hidden = torch.zeros(4)
        self.states = [torch.zeros(2)]
        self.array = np.zeros(3)
        self.torch_generator = torch.Generator().manual_seed(1)
        self.python_generator = random.Random(1)
        self.numpy_generator = np.random.default_rng(1)
        self.numpy_state = np.random.RandomState(1)
        self.call = functools.partial(self.tally.seen.append)
        self.spare = [nn.Linear(2, 2)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        global COUNT  # noqa: PLW0603
        COUNT += 1
        SEEN.append(1)
        self.shared["x"] = self.shared.get("x", 0) + 1
        type(self).total += 1
        return x


def _set(name: str, value: Any) -> Callable[[State], Any]:
    return lambda m: setattr(m, name, value)


def _rebind_parameter(m: State) -> None:
    m.linear.weight = nn.Parameter(torch.ones(4, 4))


def _assign_data(m: State) -> None:
    m.linear.weight.data = torch.ones(4, 4)


CHANGES: dict[str, tuple[Callable[[State], Any], list[str]]] = {
    "number": (_set("number", 1), ["number"]),
    "minus zero": (_set("ratio", -0.0), ["ratio"]),
    "new name": (_set("late", 1), ["late"]),
    "lost name": (lambda m: delattr(m, "number"), ["number"]),
    "list": (lambda m: m.items.append(1), ["items"]),
    "nested list": (lambda m: m.items[1].append(1), ["items[1]"]),
    "nested dictionary": (lambda m: m.table["x"]["y"].append(1), ["table['x']['y']"]),
    "new key": (lambda m: m.table.update(z=1), ["table['z']"]),
    "order": (lambda m: m.ordered.move_to_end("a"), ["ordered"]),
    "defaultdict": (lambda m: m.counts["x"], ["counts['x']"]),
    "counter": (lambda m: m.words.update("b"), ["words['b']"]),
    "deque": (lambda m: m.recent.append(3), ["recent"]),
    "set": (lambda m: m.names.add("b"), ["names"]),
    "dataclass": (_set("tally", Tally(5)), ["tally"]),
    "object": (lambda m: setattr(m.tally, "number", 2), ["tally.number"]),
    "object in a tuple": (lambda m: setattr(m.pair[0], "number", 2), ["pair[0].number"]),
    "partial": (lambda m: m.call(3), ["tally.seen"]),
    "slots": (lambda m: setattr(m.slotted, "number", 2), ["slotted.number"]),
    "new slot": (lambda m: setattr(m.slotted, "late", 2), ["slotted.late"]),
    "attribute of a container": (lambda m: setattr(m.cache, "hits", 1), ["cache.hits"]),
    "hidden state": (_set("hidden", torch.ones(4)), ["hidden"]),
    "hidden state in place": (lambda m: m.hidden.add_(1), ["hidden"]),
    "hidden state by numpy": (lambda m: m.hidden.numpy().__setitem__(0, 1), ["hidden"]),
    "tensor in a list": (lambda m: m.states[0].add_(1), ["states[0]"]),
    "array": (lambda m: m.array.__setitem__(0, 1), ["array"]),
    "buffer": (lambda m: m.small.add_(1), ["small"]),
    "buffer replaced": (_set("small", torch.ones(3)), ["small"]),
    "new buffer": (lambda m: m.register_buffer("later", None), ["later"]),
    "requires_grad": (lambda m: m.linear.bias.requires_grad_(False), ["linear.bias"]),
    "training": (lambda m: m.linear.eval(), ["linear.training"]),
    "parameter replaced": (_rebind_parameter, ["linear.weight"]),
    "data": (_assign_data, ["linear.weight"]),
    "module replaced": (_set("linear", nn.Identity()), ["linear"]),
    "hook": (lambda m: m.linear.register_forward_hook(print), ["linear._forward_hooks[0]"]),
    "hook of a parameter": (lambda m: m.linear.weight.register_hook(print), []),
    "module in a list": (lambda m: m.spare[0].eval(), ["spare[0].training"]),
    "torch.Generator": (lambda m: torch.rand(1, generator=m.torch_generator), ["torch_generator"]),
    "random.Random": (lambda m: m.python_generator.random(), ["python_generator"]),
    "numpy Generator": (lambda m: m.numpy_generator.random(), ["numpy_generator"]),
    "numpy RandomState": (lambda m: m.numpy_state.rand(), ["numpy_state"]),
    "torch": (lambda _: torch.rand(1), ["torch's random state"]),
    "random": (lambda _: random.random(), ["Python's random state"]),
    "numpy": (lambda _: np.random.rand(), ["numpy's random state"]),
    "forward": (
        lambda m: m(torch.ones(1)),
        ["tests.tensors.test_snapshot.COUNT", "tests.tensors.test_snapshot.SEEN", "State.shared['x']", "State.total"],
    ),
}


def _facts(model: State) -> tuple:
    """Everything that the model is, in a form that can be compared, with generators as what they would draw next."""
    tensors = {name: value.tolist() for name, value in model.state_dict().items() if value.numel() < 2**10}
    twin = copy.deepcopy({key: value for key, value in vars(model).items() if "generator" not in key})
    drawn = (
        torch.rand(1, generator=torch.Generator().set_state(model.torch_generator.get_state())).item(),
        copy.deepcopy(model.python_generator).random(),
        copy.deepcopy(model.numpy_generator).random(),
        twin.pop("numpy_state").rand(),
    )
    hooks = [(len(m._forward_hooks), m.training) for m in (*model.modules(), *model.spare)]
    weights = [(p.requires_grad, p._version, p._backward_hooks or None) for p in model.parameters()]
    shown = {
        key: repr(value) for key, value in twin.items() if key not in ("slotted", "call", "_buffers", "_parameters")
    }
    slots = [getattr(model.slotted, name, None) for name in Slotted.__slots__]
    state = (torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state(legacy=False)))
    versions = [model.small._version, model.hidden._version]
    own = (
        list(vars(model)),
        list(model._buffers),
        list(model.ordered),
        model.cache.hits,
        SEEN[:],
        COUNT,
        dict(State.shared),
        State.total,
    )
    return tensors, shown, drawn, hooks, weights, slots, state, versions, own


@pytest.mark.parametrize("name", CHANGES)
def test_each_change_is_named_and_put_back(name: str) -> None:
    change, names = CHANGES[name]
    model = State()
    before, objects = _facts(model), {key: id(value) for key, value in vars(model).items()}
    snapshot = take(model, code=True)
    assert changed(snapshot) == []
    change(model)
    # A hook has the number that torch gives it, which counts all hooks of the process.
    assert sorted(re.sub(r"_hooks\[\d+\]", "_hooks[0]", found) for found in changed(snapshot)) == sorted(names)
    if name != "hook of a parameter":
        assert _facts(model) != before
    snapshot.restore()
    assert changed(snapshot) == []
    assert _facts(model) == before
    assert {key: id(value) for key, value in vars(model).items()} == objects
    assert model.alias is model.items
    change(model)
    snapshot.restore()  # as often as it is needed
    assert _facts(model) == before
    assert not model.linear.weight._backward_hooks


def test_a_replacement_that_is_equal_is_no_change() -> None:
    model = State()
    snapshot = take(model)
    model.ratio, model.number = float("0.5"), int("0")
    model.items[0] = int("1")
    assert changed(snapshot) == []


def test_closures_and_owners_of_hooks_are_reached() -> None:
    seen: list[int] = []
    number, tally, model = 0, Tally(), nn.Linear(2, 2)

    def count(*_: Any) -> None:
        nonlocal number
        number += 1
        seen.append(number)

    model.register_forward_hook(count)
    model.register_forward_hook(lambda *_: tally.seen.append(1))
    snapshot = take(model)
    model(torch.ones(2))
    assert (number, seen, tally.seen) == (1, [1], [1])
    assert len(changed(snapshot)) == 3
    snapshot.restore()
    assert (number, seen, tally.seen) == (0, [], [])


def test_bytes_that_are_too_many_to_copy_come_back_where_the_write_is_announced() -> None:
    model = State()
    snapshot = take(model)
    model.large.add_(1)
    assert snapshot.lost() == ["large"]
    snapshot.restore()
    assert model.large[0] == 1
    assert changed(snapshot) == ["large"]
    snapshot = take(model)
    for tensor in (model.large, model.linear.weight):
        snapshot.about_to_write(tensor.untyped_storage())
        tensor.data.add_(1)
        snapshot.about_to_write(tensor.untyped_storage())  # the first time counts
        with torch.no_grad():
            tensor.add_(1)
    weight = model.linear.weight.clone()
    assert snapshot.lost() == []
    snapshot.restore()
    assert bool((model.large == 1).all())
    assert torch.allclose(model.linear.weight, weight - 2)
    assert changed(snapshot) == []


def test_large_tensors_are_copied_until_they_were_seen_not_to_change() -> None:
    model, steady = State(), WeakTensorKeyDictionary()

    def step(writes: bool) -> Snapshot:
        snapshot = take(model, steady=steady)
        if writes:
            model.large.add_(1)
        return snapshot

    first = step(writes=True)
    assert first.lost() == []
    first.restore()
    assert model.large[0] == 0
    step(writes=False).note_steady()
    trusted = step(writes=True)
    assert trusted.lost() == ["large"]
    trusted.note_steady()
    assert step(writes=True).lost() == []


def test_a_graph_that_is_alive_does_not_notice() -> None:
    model = nn.BatchNorm1d(2)
    weight = torch.ones(2, requires_grad=True)
    model.scale = torch.ones(2)
    loss = (weight * model.scale).sum()  # saves `scale`
    snapshot = take(model)
    model.scale.add_(1)
    snapshot.restore()
    loss.backward()
    assert weight.grad.tolist() == [1, 1]


def test_what_belongs_to_others_is_left_alone() -> None:
    model = nn.Linear(2, 2)
    model.optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model.lock_owner = Locked()
    snapshot = take(model)
    model.optimizer.param_groups[0]["lr"] = 2.0
    model.lock_owner.items.append(1)
    snapshot.restore()
    assert model.optimizer.param_groups[0]["lr"] == 2.0
    assert model.lock_owner.items == [1]


class Locked:
    """As a queue that another thread fills."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.items: list[int] = []


def test_there_is_an_end_to_it() -> None:
    model = nn.Linear(2, 2)
    model.many = [[[number]] for number in range(60_000)]
    assert not take(model).is_whole
    assert take(nn.Linear(2, 2)).is_whole
