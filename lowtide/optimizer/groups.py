"""The user's `param_groups` around a step in parts, and hooks that do not keep their owner alive.

`GroupSnapshot` copies the group dictionaries when a step begins. `subset` gives copies with some of the parameters for
one part of the step, `collect` notes what the optimizer changed in them, `commit` writes that to the user's own. Why:
optimizers count steps in their groups, or keep a scratch list there. If every part of a step saw what the part before
it had changed, a step in twenty parts would count as twenty. Each part sees what a whole step would see, and parts must
agree on what it changed.
Tensors keep their identity (a learning rate that is a tensor is read by kernels and schedulers alike): what was changed
in place is noted and taken back before the next part, found by its version, so nothing is read back from a device
unless an optimizer does this.

`OwnedHook` calls a function with its owner as long as that lives; after that it takes itself off, where it may. Why:
parameters and modules outlive optimizers. A hook that holds its owner would keep a dropped optimizer, its state and the
engine with its memory for as long as the model lives.

Cost: a shallow copy of each group a part; below a microsecond a call of a hook. Not covered: attributes of the
optimizer itself (requests.py); owners that only the hook holds.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from lowtide.tensors.private import version_of
from lowtide.tensors.view import same_bytes


class OwnedHook:
    """See the module's text. `call(owner, *arguments)` must not hold the owner. `goes`: it takes itself off; not among
    hooks over which torch walks in Python (those of optimizers, of modules), whose walk that would break."""

    def __init__(self, owner: object, call: Callable[..., None], *, goes: bool = True) -> None:
        self._goes = goes
        self._owner = weakref.ref(owner)
        self._call = call
        self._handle: Any = None

    def put_on(self, register: Callable[..., Any], **options: Any) -> Any:
        """What `register(hook)` returns, which takes the hook off."""
        self._handle = register(self, **options)
        return self._handle

    def __call__(self, *arguments: Any) -> None:
        owner = self._owner()
        if owner is not None:
            self._call(owner, *arguments)
        elif self._goes and self._handle is not None:
            self._handle.remove()

    def __deepcopy__(self, memo: dict) -> OwnedHook:
        """A copied module has the same hook, as with a function."""
        return self

    def __reduce__(self) -> tuple:
        """A module that was pickled has a hook that does nothing."""
        return (functools.partial, (_do_nothing,))


def _do_nothing(*_: Any) -> None:
    """A hook without an owner."""


_CONTAINERS = (list, dict, set)
_CAN_CHANGE = (*_CONTAINERS, torch.Tensor)
_MEMBERS = ("params", "param_names")
_ABSENT = object()

Chosen = tuple[int, list[torch.Tensor]]
"""The number of a group, and some of its parameters."""
Changes = dict[tuple[str, bool], Any]
"""What a part of a step has left, by key; True: in the tensor that was there, by writing to it."""


class GroupSnapshot:
    """See the module's text."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        self._groups = groups
        self._values = [{key: value for key, value in group.items() if key not in _MEMBERS} for group in groups]
        self._frozen = [
            {key: _frozen(v) for key, v in values.items() if isinstance(v, _CAN_CHANGE)} for values in self._values
        ]
        self._names = [_names_of(group) for group in groups]
        self._versions = [_versions(values) for values in self._values]
        self._changes: list[Changes | None] = [None] * len(groups)

    def subset(self, chosen: Iterable[Chosen]) -> list[dict[str, Any]]:
        """Groups for one part of the step."""
        return [self._part(number, parameters) for number, parameters in chosen]

    def _part(self, number: int, parameters: list[torch.Tensor]) -> dict[str, Any]:
        part: dict[str, Any] = {"params": parameters}
        for key, value in self._values[number].items():
            part[key] = copy.deepcopy(self._frozen[number][key]) if isinstance(value, _CONTAINERS) else value
        names = self._names[number]
        if names is not None:
            part["param_names"] = [names[parameter] for parameter in parameters]
        return part

    def collect(self, chosen: Iterable[Chosen], parts: list[dict[str, Any]]) -> None:
        """Note what the optimizer changed in groups that `subset` gave out. RuntimeError where two parts disagree."""
        for (number, _), part in zip(chosen, parts, strict=True):
            changes = self._changes_in(number, part)
            earlier = self._changes[number]
            if earlier is None:
                self._changes[number] = changes
            elif not same_value(earlier, changes):
                odd = next(key for key in {**earlier, **changes} if not same_value(earlier.get(key), changes.get(key)))
                raise RuntimeError(
                    f"param_groups[{number}]['{odd[0]}'] was changed in different ways in two parts of one step: this "
                    "optimizer cannot be stepped in parts; call handle.detach()"
                )

    def take_back(self) -> None:
        """Undo what a part that failed changed in place."""
        for number in range(len(self._values)):
            self._restore_tensors(number)

    def commit(self) -> None:
        """Write to the user's own groups what all parts agreed on."""
        for number, changes in enumerate(self._changes):
            group = self._groups[number]
            for (key, is_in_place), value in (changes or {}).items():
                if value is _ABSENT:
                    del group[key]
                elif is_in_place:
                    group[key].copy_(value)
                else:
                    group[key] = value

    def changed(self) -> str:
        """What somebody has changed in the groups since, by name; empty if nothing."""
        if len(self._groups) != len(self._values):
            return "param_groups"
        for number, (group, values) in enumerate(zip(self._groups, self._values, strict=True)):
            for key in sorted((group.keys() | values.keys()) - set(_MEMBERS), key=str):
                if self._is_other(number, key, values.get(key, _ABSENT), group.get(key, _ABSENT)):
                    return f"param_groups[{number}]['{key}']"
        return ""

    def _is_other(self, number: int, key: str, then: Any, now: Any) -> bool:
        if now is then and key in self._versions[number]:
            if version_of(now) != self._versions[number][key]:
                return True
            if now.device.type != "cpu":
                return False  # the host would wait for its bytes, to see a write through `.data`
        return not same_value(self._frozen[number].get(key, then), now)

    def _changes_in(self, number: int, part: dict[str, Any]) -> Changes:
        before = self._values[number]
        changes: Changes = {}
        for key in before.keys() | (part.keys() - set(_MEMBERS)):
            then, now = before.get(key, _ABSENT), part.get(key, _ABSENT)
            if self._is_other(number, key, then, now):
                changes[key, now is then] = now.detach().clone() if now is then else now
        self._restore_tensors(number)
        return changes

    def _restore_tensors(self, number: int) -> None:
        versions = self._versions[number]
        for key, version in versions.items():
            tensor = self._values[number][key]
            if version_of(tensor) != version:
                with torch.no_grad():
                    tensor.copy_(self._frozen[number][key])
                versions[key] = version_of(tensor)


def _frozen(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def _versions(values: dict[str, Any]) -> dict[str, int]:
    return {key: version_of(value) for key, value in values.items() if isinstance(value, torch.Tensor)}


def _names_of(group: dict[str, Any]) -> dict[torch.Tensor, Any] | None:
    names = group.get("param_names")
    return None if names is None else dict(zip(group["params"], names, strict=True))


def same_value(one: Any, other: Any) -> bool:
    """Equal, with tensors compared by their bytes."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and same_bytes(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_value(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same_value, one, other))
    return one is other or bool(one == other)
