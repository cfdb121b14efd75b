"""What a plan was made for, beside the shapes of a batch: the state of the model, compared before each forward pass.

What: `ModelState.look` reads flat lists that were made once (submodules, parameters, hooks, settings) and gives the
number of the state that it finds: the same number for an equal state. A state is

- which submodules there are. Where that changes, all lists are made anew, and no older state comes back;
- of each parameter, whether it is trained, and its dtype;
- the code of forward and backward hooks of modules. A hook that is put on anew for each step is the same hook;
- settings: what modules have under a public name that is a flag, a number, a word or a frozen set of them (`training`,
  `p`), and the fields of their `config`;
- the switches of scaled dot product attention (`torch.nn.attention.sdpa_kernel`);
- how often a step has saved other tensors than planned with all of this as it was (autopilot.py counts).

Why numbers may be left out: a counter that the forward pass moves is no reason for another plan, nor is a number that
the loop moves where an observed step has shown that it changes nothing (`ignore`).
Cost: some tens of microseconds for a model of a hundred modules, twice a forward pass.
Not covered: what a model reads elsewhere (lists, dictionaries, closures, globals), before a step has shown it; the
wrappers of `torch.distributed`, whose own settings move all the time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import nn

from lowtide.tensors.fsdp import fsdp_modules
from lowtide.tensors.modes import attention_kernels
from lowtide.tensors.private import BACKWARD_HOOKS, FORWARD_HOOKS, own_modules, own_parameters

_PLAIN = frozenset((bool, int, float, str, type(None), frozenset))
_NUMBERS = (int, float)
_WRAPPERS = ("torch.nn.parallel", "torch.distributed")


class ModelState:
    """The states of one model, by number."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.num_structures = 0
        """How often submodules were added, replaced or removed."""
        self.num_uncompared_changes = 0
        """How often steps have shown another state, in something that is not compared."""
        self.why = ""
        """In which way the last state is another one than that before it, in words."""
        self._num_states = 0
        self._ignored: set[tuple[int, str]] = set()
        """Settings that decide nothing: whose, and which."""
        self._number_of: dict[tuple, int] = {}
        self._read()
        self._now = self._read_state()
        self._number = self._note()

    @property
    def trained(self) -> list[torch.Tensor]:
        """Parameters that get gradients now. What plays one under `torch.func.functional_call` may be no leaf."""
        held = chain.from_iterable(map(dict.values, self._own))
        return [p for p in held if p is not None and p.requires_grad and p.is_leaf]

    def look(self) -> int:
        """The number of the state that the model is in."""
        below = [*chain.from_iterable(map(dict.values, self._children))]
        if len(below) != len(self._below) or not all(map(is_, below, self._below)):
            self._read()
            self.num_structures += 1
        now = self._read_state()
        if now != self._now:
            self.why = self._difference(self._now, now)
            self._now = now
            self._number = self._note()
        return self._number

    def leave_out_moved(self) -> None:
        """A forward pass is over: what it has moved of the settings is the model's own business."""
        settings, before = self._settings(), self._now[3]
        if settings != before and len(settings) == len(before):
            self._leave_out([i for i, (new, old) in enumerate(zip(settings, before, strict=True)) if new != old])

    def ignore(self, one: int, other: int) -> None:
        """Steps in these two states save the same: the numbers in which their settings differ decide nothing."""
        states = {number: key[3] for key, number in self._number_of.items()}
        if one in states and other in states:
            pairs = enumerate(zip(states[one], states[other], strict=True))
            self._leave_out([i for i, (a, b) in pairs if a != b and type(a) in _NUMBERS and type(b) in _NUMBERS])

    # -- how it works ----------------------------------------------------------------------------------------------

    def _read(self) -> None:
        """Make the flat lists."""
        modules = [module for module in self._model.modules() if isinstance(own_modules(module), dict)]
        self._children = [own_modules(module) for module in modules]
        self._below = [*chain.from_iterable(map(dict.values, self._children))]
        self._own = [own_parameters(module) for module in modules]
        # FSDP2 puts other tensors in the place of its parameters while it has them gathered.
        self._parameters = [] if fsdp_modules(self._model) else self._own
        self._hooks = [vars(module)[name] for module in modules for name in (*FORWARD_HOOKS, *BACKWARD_HOOKS)]
        self._places: tuple[list[dict[str, Any]], list[str]] = ([], [])
        """Of settings: who has each, and its name."""
        seen: set[int] = set()
        for module in modules:
            if not type(module).__module__.startswith(_WRAPPERS):
                self._add_settings(vars(module), lambda name: not name.startswith("_"))
            config = vars(module).get("config")
            if hasattr(config, "__dict__") and id(config) not in seen:
                seen.add(id(config))
                self._add_settings(vars(config), lambda name: True)
        self._number_of.clear()

    def _add_settings(self, owner: dict[str, Any], wants: Callable[[str], bool]) -> None:
        names = [name for name, value in owner.items() if type(value) in _PLAIN and wants(name)]
        names = [name for name in names if (id(owner), name) not in self._ignored]
        self._places[0].extend([owner] * len(names))
        self._places[1].extend(names)

    def _read_state(self) -> tuple[Any, ...]:
        parameters = chain.from_iterable(map(dict.values, self._parameters))
        trained = tuple([(p.requires_grad, p.dtype) for p in parameters if p is not None])
        hooks = tuple([(number, *codes) for number, own in enumerate(self._hooks) if own and (codes := _codes(own))])
        return self.num_structures, trained, hooks, self._settings(), attention_kernels(), self.num_uncompared_changes

    def _settings(self) -> tuple[Any, ...]:
        found = tuple(map(dict.get, *self._places))
        # A forward may have put something else there, such as a tensor, which cannot be compared.
        return found if _PLAIN.issuperset(map(type, found)) else tuple(map(_plain, found))

    def _note(self) -> int:
        """The number of the state that was just read; a new one if it is new."""
        if self._now not in self._number_of:
            self._num_states += 1
            self._number_of[self._now] = self._num_states
        return self._number_of[self._now]

    def _leave_out(self, places: Iterable[int]) -> None:
        """These settings decide nothing from now on. The state stays the one that it is."""
        left_out = set(places)
        if not left_out:
            return
        owners, names = self._places
        self._ignored |= {(id(owners[i]), names[i]) for i in left_out}
        stays = [i for i in range(len(names)) if i not in left_out]
        self._places = [owners[i] for i in stays], [names[i] for i in stays]
        self._now = _with_settings(self._now, stays)
        self._number_of = {_with_settings(key, stays): number for key, number in self._number_of.items()}
        self._number_of[self._now] = self._number

    def _difference(self, before: tuple[Any, ...], now: tuple[Any, ...]) -> str:
        if now[0] != before[0]:
            return "other submodules"
        if now[1] != before[1]:
            return f"{sum(t for t, _ in now[1])} parameters are trained, not {sum(t for t, _ in before[1])}"
        if now[2] != before[2]:
            return "other hooks"
        if now[4] != before[4]:
            return "another attention backend"
        if now[5] != before[5]:
            return "it saves other tensors than before"
        pairs = zip(self._places[1], before[3], now[3], strict=True)
        return next(f"{name} is {new}, not {old}" for name, old, new in pairs if old != new)


def _with_settings(state: tuple[Any, ...], places: list[int]) -> tuple[Any, ...]:
    """The same with the settings at these places alone."""
    return (*state[:3], tuple([state[3][place] for place in places]), *state[4:])


def _plain(value: Any) -> Any:
    """What decides of a setting. Nothing for an iterator: a step that was observed for it would move it on."""
    if type(value) in _PLAIN:
        return value
    return None if hasattr(type(value), "__next__") else type(value)


def _codes(hooks: dict[int, Any]) -> list[Any]:
    """Of hooks, the same for one that is made anew by the same code. lowtide's own (an audit's) are none."""
    inner = [hook.func if isinstance(hook, functools.partial) else hook for hook in hooks.values()]
    foreign = [hook for hook in inner if not str(getattr(hook, "__module__", "")).startswith("lowtide.")]
    return [getattr(getattr(hook, "__func__", hook), "__code__", type(hook)) for hook in foreign]
