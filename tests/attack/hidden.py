"""Blocks with state in places where nobody looks, and blocks whose graphs have a life of their own.

Each was once a class of silent fault: a second run of the block, or its run in an observed step, found another world
than the first one. A new one is a subclass of `Moving` with two methods, or a block; `BLOCKS` lists them by name, and
classes.py says under which plans they are drawn.
"""

from __future__ import annotations

import contextvars
import enum
import sys
import threading
import types
import weakref
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.attack.now import WIDTH


class Moving(nn.Module):
    """A number that moves on in each call: before what is saved last, or where only the next step shows it."""

    def __init__(self, r: Random) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.is_late = r.random() < 0.4
        self.begin()

    def begin(self) -> None:
        """The state as it is before the first call."""
        raise NotImplementedError

    def move(self) -> Any:
        """The next number."""
        raise NotImplementedError

    def forward(self, x: Tensor, now: Any) -> Tensor:
        number = self.move()
        h = torch.sigmoid(self.a(x))
        if self.is_late:
            return self.b(h) + 0.1 * number
        return self.b(torch.tanh(h * (1 + 0.1 * number)))


class Namespace(Moving):
    def begin(self) -> None:
        self.state = types.SimpleNamespace(n=0)

    def move(self) -> int:
        self.state.n += 1
        return self.state.n


class ThreadLocal(Namespace):
    def begin(self) -> None:
        self.state = threading.local()
        self.state.n = 0


class Locked(Namespace):
    """An object that can be neither copied nor pickled."""

    def begin(self) -> None:
        self.state = _WithLock()


class _WithLock:
    def __init__(self) -> None:
        self.n, self.lock = 0, threading.Lock()


class EnumMember(Namespace):
    def begin(self) -> None:
        self.state = enum.Enum("Phase", ["TRAIN"]).TRAIN
        self.state.n = 0


class ImportedModule(Moving):
    """An attribute of a module that was imported, as configurations of whole programs are."""

    def begin(self) -> None:
        sys.modules["settings_of_a_program"] = types.ModuleType("settings_of_a_program")
        sys.modules["settings_of_a_program"].n = 0  # type: ignore[attr-defined]

    def move(self) -> int:
        settings: Any = __import__("settings_of_a_program")
        settings.n += 1
        return settings.n


class ContextVariable(Moving):
    def begin(self) -> None:
        self.state = contextvars.ContextVar("n", default=0)

    def move(self) -> int:
        self.state.set(self.state.get() + 1)
        return self.state.get()


class Bytes(Moving):
    def begin(self) -> None:
        self.state = bytearray(4)

    def move(self) -> int:
        self.state[0] += 1
        return self.state[0]


class ObjectArray(Moving):
    def begin(self) -> None:
        self.state = np.array([0, "text"], dtype=object)

    def move(self) -> int:
        self.state[0] += 1
        return self.state[0]


class WeakDictionary(Moving):
    def begin(self) -> None:
        self.state: Any = weakref.WeakKeyDictionary({self.a: 0})

    def move(self) -> int:
        self.state[self.a] += 1
        return self.state[self.a]


class NotedOnWeight(Moving):
    """An attribute of a parameter, which the first call makes."""

    def begin(self) -> None:
        pass

    def move(self) -> int:
        weight: Any = self.a.weight
        weight.num_calls = getattr(weight, "num_calls", 0) + 1
        return weight.num_calls


class OwnBackward(nn.Module):
    """Trains a part by a loss of its own, as layers do that learn by themselves."""

    def __init__(self, r: Random) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, now: Any) -> Tensor:
        h = torch.tanh(self.a(x.detach()))
        h.float().square().mean().backward()
        return self.b(h.detach() + x)


class FilledByHook(Moving):
    """A list that a forward hook fills, of which the forward reads the length."""

    def begin(self) -> None:
        self.log: list[Tensor] = []
        self.a.register_forward_hook(lambda module, args, output: self.log.append(output.detach().mean()))

    def move(self) -> int:
        return len(self.log) + 1


class InPlaceDistribution(Moving):
    """A running prior: a distribution whose parameters are written in place."""

    def begin(self) -> None:
        self.prior = torch.distributions.Normal(torch.zeros(WIDTH), torch.ones(WIDTH))

    def forward(self, x: Tensor, now: Any) -> Tensor:
        h = torch.sigmoid(self.a(x))
        out = torch.tanh(h * (1 + self.prior.loc))
        with torch.no_grad():
            self.prior.loc.lerp_(h.float().mean((0, 1)), 0.5)
        return self.b(out)


class _Global:
    norm: nn.BatchNorm1d
    counter: nn.Module


class GlobalNorm(nn.Module):
    """A norm with batch statistics that no module holds, but a global."""

    def __init__(self, r: Random) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        _Global.norm = nn.BatchNorm1d(WIDTH, affine=False)

    def forward(self, x: Tensor, now: Any) -> Tensor:
        h = _Global.norm(torch.tanh(self.a(x)).transpose(1, 2)).transpose(1, 2)
        return h * (1 + _Global.norm.running_mean.detach().clone())


class GlobalModule(Moving):
    """A buffer of a module that no module holds."""

    def begin(self) -> None:
        _Global.counter = nn.Module()
        _Global.counter.register_buffer("n", torch.zeros(()))

    def move(self) -> Tensor:
        _Global.counter.n += 1
        return _Global.counter.n.clone()


class Teacher(nn.Module):
    """A module in a list: reached, but not registered."""

    def __init__(self, r: Random) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.teacher = [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)]

    def forward(self, x: Tensor, now: Any) -> Tensor:
        linear, norm = self.teacher
        h = norm(torch.tanh(linear(x)).transpose(1, 2)).transpose(1, 2)
        return torch.sigmoid(self.a(x)) * h * (1 + norm.running_mean.clone())


class Leaves(nn.Module):
    """Makes leaves in its forward, whose gradients stay until the next one."""

    def __init__(self, r: Random) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, now: Any) -> Tensor:
        h = torch.tanh(self.a(x))
        self.leaf = h.detach().requires_grad_()
        return self.b(self.leaf) + self.b(h)


class Rounds(nn.Module):
    """Runs as often as a list, a dictionary, a set or a closure says."""

    def __init__(self, r: Random) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        kind: Any = r.choice((list, dict.fromkeys, set))
        told = kind([0])
        self.told = (lambda: told) if r.random() < 0.25 else told

    def one_more(self) -> None:
        told: Any = self.told() if callable(self.told) else self.told
        grow = {list: "append", set: "add", dict: "setdefault"}[type(told)]
        getattr(told, grow)(len(told))

    def forward(self, x: Tensor, now: Any) -> Tensor:
        for _ in self.told() if callable(self.told) else self.told:
            x = torch.tanh(self.a(x))
        return x


class CheckpointInside(nn.Module):
    """A checkpoint in a checkpoint, of torch's newer or older kind each."""

    def __init__(self, r: Random) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.is_outer_old, self.is_inner_old = r.random() < 0.5, r.random() < 0.5

    def _inner(self, x: Tensor) -> Tensor:
        return torch.sin(self.b(torch.tanh(x)))

    def _outer(self, x: Tensor) -> Tensor:
        h = checkpoint(self._inner, F.silu(self.a(x)), use_reentrant=self.is_inner_old)
        return torch.sigmoid(self.c(F.dropout(h, 0.2)))

    def forward(self, x: Tensor, now: Any) -> Tensor:
        made = checkpoint(self._outer, x, use_reentrant=self.is_outer_old)
        assert isinstance(made, Tensor)
        return made


CONTEXTS: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
"""What blocks checkpoint themselves with: a `context_fn` of lowtide's, where a rig put one."""


class SelectiveCells(nn.Module):
    """Recurrent cells, whose chunks have version counters of their own, under selective checkpointing."""

    def __init__(self, r: Random) -> None:
        super().__init__()
        self.is_lstm = r.random() < 0.5
        self.cell: Any = (nn.LSTMCell if self.is_lstm else nn.GRUCell)(WIDTH, WIDTH)

    def _steps(self, x: Tensor) -> Tensor:
        h, c, outputs = x.new_zeros(len(x), WIDTH), x.new_zeros(len(x), WIDTH), []
        for token in x.unbind(1):
            if self.is_lstm:
                h, c = self.cell(token, (h, c))
            else:
                h = self.cell(token, h)
            outputs.append(h)
        return torch.stack(outputs, 1)

    def forward(self, x: Tensor, now: Any) -> Tensor:
        if self not in CONTEXTS:
            return self._steps(x)
        made = checkpoint(self._steps, x, use_reentrant=False, context_fn=CONTEXTS[self])
        assert isinstance(made, Tensor)
        return made


BLOCKS: dict[str, Callable[[Random], nn.Module]] = {
    "namespace": Namespace,
    "thread_local": ThreadLocal,
    "context_variable": ContextVariable,
    "bytes": Bytes,
    "object_array": ObjectArray,
    "weak_dictionary": WeakDictionary,
    "locked_object": Locked,
    "enum_member": EnumMember,
    "imported_module": ImportedModule,
    "in_place_distribution": InPlaceDistribution,
    "global_module": GlobalModule,
    "global_norm": GlobalNorm,
    "filled_by_hook": FilledByHook,
    "noted_on_weight": NotedOnWeight,
    "own_backward": OwnBackward,
    "teacher": Teacher,
    "leaves": Leaves,
    "rounds": Rounds,
    "checkpoint_inside": CheckpointInside,
    "selective_cells": SelectiveCells,
}
