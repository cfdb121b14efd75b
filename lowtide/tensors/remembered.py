"""What a snapshot remembers of one thing (snapshot.py): how it was, whether it still is, and how to put it back.

What: one small class for each kind of thing: dictionaries and attributes, lists and sets, slots, variables of closures,
globals, attributes of classes, random generators, numpy arrays, tensors. All have `restore()`, which writes to nothing
that did not change; those that hold others have `changed()`, which gives the names of what was replaced.

Cost: one shallow copy each; about 6 us for a small tensor. Not covered: what is reached from the thing remembered; the
walk finds it.
"""

from __future__ import annotations

import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from lowtide.tensors.kinds import can_be_cloned, is_plain
from lowtide.tensors.private import COMPILED_CALL, MODULE_TABLES, TENSOR_HOOKS, set_versions, storage_key, version_of
from lowtide.tensors.view import same_bytes, write

SMALL_BYTES = 2**20
"""Tensors up to this size are copied, and compared by value."""
PLAIN = frozenset(
    {int, float, complex, bool, str, bytes, type(None), type, range, slice, type(Ellipsis), torch.dtype, torch.device}
    | {torch.Size, torch.layout, torch.memory_format, types.ModuleType, types.BuiltinFunctionType, property}
)
"""Types of values that never change and hold nothing that does."""
# The dictionaries of a module whose names are the module's own.
TRANSPARENT = frozenset(MODULE_TABLES)
WRAPPED = ("forward", COMPILED_CALL)
"""Attributes of a module that lowtide puts wrappers in."""


class Name:
    """Where something was found; put into words only when it is asked for."""

    __slots__ = ("is_item", "key", "parent")

    def __init__(self, parent: Name | None, key: Any, is_item: bool = False) -> None:
        self.parent = parent
        self.key = key
        self.is_item = is_item

    def __str__(self) -> str:
        before = "" if self.parent is None else str(self.parent)
        if self.is_item:
            return f"{before}[{self.key!r}]"
        if self.key in TRANSPARENT or self.key == "":
            return before
        return f"{before}.{self.key}" if before else str(self.key)


class Attributes:
    """A dictionary, or the attributes of an object."""

    __slots__ = ("is_item", "is_module", "kind", "name", "then", "value")

    def __init__(self, value: dict, then: dict, name: Name, *, is_module: bool, is_item: bool) -> None:
        self.value = value
        # Not by methods of a subclass.
        self.kind = OrderedDict if isinstance(value, OrderedDict) else dict
        self.then = then
        self.name = name
        self.is_module = is_module
        self.is_item = is_item

    def _is_same(self) -> bool:
        now, then = self.value, self.then
        if len(now) != len(then):
            return False
        return all(
            key is other and value is was
            for (key, value), (other, was) in zip(self.kind.items(now), then.items(), strict=True)
        )

    def again(self) -> Attributes:
        """The same dictionary, as it is now."""
        now = dict(self.kind.items(self.value))
        return Attributes(self.value, now, self.name, is_module=self.is_module, is_item=self.is_item)

    def changed(self) -> Iterator[str]:
        if self._is_same():
            return
        now, then, missing = dict(self.kind.items(self.value)), self.then, self
        for key in {**then, **now}:
            if self.is_module and key in WRAPPED:
                continue
            if not _is_equal(now.get(key, missing), then.get(key, missing)):
                yield str(Name(self.name, key, self.is_item))
        if now.keys() == then.keys() and [*now] != [*then] and not self.is_module:
            yield str(self.name)  # another order

    def restore(self) -> None:
        if self._is_same():
            return
        value, then = self.value, self.then
        if self.is_module:
            # A wrapped forward is lowtide's own doing: the autopilot applies its plan inside a step.
            then = {key: was for key, was in then.items() if key not in WRAPPED}
            then |= {key: value[key] for key in WRAPPED if key in value}
        if [*self.kind.keys(value)] != [*then]:
            self.kind.clear(value)
        for key, was in then.items():
            self.kind.__setitem__(value, key, was)


class Empty:
    """Containers in attributes that had nothing in them; one record for all of them."""

    __slots__ = ("found",)

    def __init__(self) -> None:
        self.found: list[tuple[Any, Name, str]] = []

    def again(self) -> list[Attributes | Items]:
        """Those that have something in them now."""
        return [
            Attributes(value, dict(value), Name(name, key), is_module=False, is_item=key not in TRANSPARENT)
            if isinstance(value, dict)
            else Items(value, set(value) if isinstance(value, set) else list(value), Name(name, key))
            for value, name, key in self.found
            if value
        ]

    def restore(self) -> None:
        for value, _, _ in self.found:
            if value:
                value.clear()


class Items:
    """What is in a list, a deque or a set."""

    __slots__ = ("name", "then", "value")

    def __init__(self, value: Any, then: list | set, name: Name) -> None:
        self.value = value
        self.then = then
        self.name = name

    def _is_same(self) -> bool:
        now, then = self.value, self.then
        if len(now) != len(then):
            return False
        if isinstance(then, set):
            return {id(item) for item in now} == {id(item) for item in then}
        return all(item is was for item, was in zip(now, then, strict=True))

    def again(self) -> Items:
        """The same container, as it is now."""
        return Items(self.value, set(self.value) if isinstance(self.then, set) else list(self.value), self.name)

    def changed(self) -> Iterator[str]:
        if not self._is_same() and not _is_equal(tuple(self.value), tuple(self.then)):
            yield str(self.name)

    def restore(self) -> None:
        if self._is_same():
            return
        value, then = self.value, self.then
        if isinstance(value, list):
            list.__setitem__(value, slice(None), then)
        elif isinstance(value, deque):
            deque.clear(value)
            deque.extend(value, then)
        else:
            set.clear(value)
            set.update(value, then)


class Slots:
    """Attributes in `__slots__`."""

    __slots__ = ("name", "then", "value")

    def __init__(self, value: Any, then: dict[str, Any], name: Name) -> None:
        self.value = value
        self.then = then
        self.name = name

    def again(self) -> Slots:
        """The same object, as it is now."""
        return Slots(self.value, slots_of(self.value), self.name)

    def changed(self) -> Iterator[str]:
        now = slots_of(self.value)
        for key in {**self.then, **now}:
            if not _is_equal(now.get(key, self), self.then.get(key, self)):
                yield str(Name(self.name, key))

    def restore(self) -> None:
        now = slots_of(self.value)
        for key in now.keys() - self.then.keys():
            object.__delattr__(self.value, key)
        for key, was in self.then.items():
            if now.get(key, self) is not was:
                object.__setattr__(self.value, key, was)


class Cell:
    """A variable of an enclosing function."""

    __slots__ = ("cell", "name", "then")

    def __init__(self, cell: types.CellType, then: Any, name: Name) -> None:
        self.cell = cell
        self.then = then
        self.name = name

    def again(self) -> Cell:
        """The same variable, as it is now."""
        return Cell(self.cell, self.cell.cell_contents if is_filled(self.cell) else self.then, self.name)

    def changed(self) -> Iterator[str]:
        if not is_filled(self.cell) or not _is_equal(self.cell.cell_contents, self.then):
            yield str(self.name)

    def restore(self) -> None:
        if not is_filled(self.cell) or self.cell.cell_contents is not self.then:
            self.cell.cell_contents = self.then


class Global:
    """A global that a function names."""

    __slots__ = ("key", "name", "namespace", "then")

    def __init__(self, namespace: dict[str, Any], key: str, then: Any, name: Name) -> None:
        self.namespace = namespace
        self.key = key
        self.then = then
        self.name = name

    def again(self) -> Global:
        """The same global, as it is now."""
        return Global(self.namespace, self.key, self.namespace.get(self.key, self.then), self.name)

    def changed(self) -> Iterator[str]:
        if not _is_equal(self.namespace.get(self.key, self), self.then):
            yield str(self.name)

    def restore(self) -> None:
        if self.namespace.get(self.key, self) is not self.then:
            self.namespace[self.key] = self.then


class ClassAttribute:
    """An attribute of a class."""

    __slots__ = ("key", "name", "owner", "then")

    def __init__(self, owner: type, key: str, then: Any, name: Name) -> None:
        self.owner = owner
        self.key = key
        self.then = then
        self.name = name

    def again(self) -> ClassAttribute:
        """The same attribute, as it is now."""
        return ClassAttribute(self.owner, self.key, vars(self.owner).get(self.key, self.then), self.name)

    def changed(self) -> Iterator[str]:
        if not _is_equal(vars(self.owner).get(self.key, self), self.then):
            yield str(self.name)

    def restore(self) -> None:
        if vars(self.owner).get(self.key, self) is not self.then:
            setattr(self.owner, self.key, self.then)


class State:
    """A random generator."""

    __slots__ = ("_get", "_set", "name", "then")

    def __init__(self, get: Callable[[], Any], put: Callable[[Any], Any], name: Name | str) -> None:
        self._get = get
        self._set = put
        self.name = name
        self.then = get()

    def again(self) -> State:
        """The same generator, as it is now."""
        return State(self._get, self._set, self.name)

    def has_moved(self) -> bool:
        return not _is_same_state(self._get(), self.then)

    def restore(self) -> None:
        self._set(self.then)


class Array:
    """A numpy array."""

    __slots__ = ("array", "name", "then")

    def __init__(self, array: Any, name: Name) -> None:
        self.array = array
        self.then = array.copy()
        self.name = name

    def again(self) -> Array:
        """The same array, as it is now."""
        return Array(self.array, self.name)

    def has_moved(self) -> bool:
        return bool(self.array.tobytes() != self.then.tobytes())

    def restore(self) -> None:
        if self.array.shape == self.then.shape and self.array.tobytes() != self.then.tobytes():
            self.array[...] = self.then


class TensorState:
    """A parameter, a buffer or a tensor in an attribute."""

    __slots__ = ("_alias", "_copy", "_flags", "_hooks", "_is_small", "_version", "name", "tensor")

    def __init__(self, tensor: torch.Tensor, name: Name, steady: WeakTensorKeyDictionary | None) -> None:
        self.tensor = tensor
        self.name = name
        self._flags = tensor.requires_grad
        self._version = _version(tensor)
        self._hooks = [
            (key, hooks, None if hooks is None else dict(hooks))
            for key in TENSOR_HOOKS
            for hooks in (getattr(tensor, key, None),)
        ] if tensor.is_leaf else []  # fmt: skip
        self._copy: torch.Tensor | None = None
        self._alias: torch.Tensor | None = None
        self._is_small = True
        if not is_plain(tensor):
            return
        self._alias = tensor.detach()
        nbytes = tensor.numel() * tensor.element_size()
        self._is_small = nbytes <= SMALL_BYTES
        if not nbytes or isinstance(tensor, nn.Parameter) or not tensor.untyped_storage().nbytes():
            return
        if not can_be_cloned(tensor):
            return
        if self._is_small:
            self._copy = self._alias.clone()
        elif steady is not None and tensor not in steady:
            self._copy = self._alias.to("cpu", copy=True)

    def _is_moved(self) -> bool:
        """Whether `.data` was assigned to."""
        now, then = self.tensor, self._alias
        return then is not None and (
            storage_key(now.untyped_storage()) != storage_key(then.untyped_storage())
            or now.size() != then.size()
            or now.stride() != then.stride()
            or now.storage_offset() != then.storage_offset()
        )

    def is_lost(self, written: dict[int, Any]) -> bool:
        return (
            self._copy is None
            and self._alias is not None
            and _version(self.tensor) != self._version
            and storage_key(self._alias.untyped_storage()) not in written
        )

    def restore(self, written: dict[int, Any]) -> None:
        tensor, alias, copy = self.tensor, self._alias, self._copy
        if self._is_moved():
            tensor.data = alias  # type: ignore[assignment]
        may_differ = self._is_small or _version(tensor) != self._version
        if alias is not None and copy is not None and may_differ and not same_bytes(alias, copy):
            # Through `.data`: the bytes are those of the version that comes back, and a live graph may have saved it.
            write(alias.data, copy)
        if _version(tensor) != self._version and not self.is_lost(written):
            set_versions((tensor,), (self._version,))
        if tensor.is_leaf and tensor.requires_grad != self._flags:
            tensor.requires_grad_(self._flags)
        for key, hooks, then in self._hooks:
            if hooks is not None and dict(hooks) != then:
                hooks.clear()
                hooks.update(then)
            if getattr(tensor, key, None) is not hooks:
                setattr(tensor, key, hooks)

    def note_steady(self, steady: WeakTensorKeyDictionary) -> None:
        if not self._is_small and _version(self.tensor) == self._version:
            steady[self.tensor] = True
        elif self.tensor in steady:
            del steady[self.tensor]


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else version_of(tensor)


def _is_equal(now: Any, then: Any) -> bool:
    """Whether a value was replaced by an equal one, or not at all. What is no plain value must be the same object."""
    if now is then:
        return True
    if type(now) is not type(then):
        return False
    if isinstance(now, tuple):
        return len(now) == len(then) and all(_is_equal(one, other) for one, other in zip(now, then, strict=True))
    if isinstance(now, float):
        return now.hex() == then.hex()
    if isinstance(now, types.MethodType):
        return now == then
    return type(now) in PLAIN and bool(now == then)


def _is_same_state(now: Any, then: Any) -> bool:
    """Whether two states of a generator are equal."""
    if isinstance(now, torch.Tensor):
        return torch.equal(now, then)
    if isinstance(now, dict):
        return all(_is_same_state(value, then[key]) for key, value in now.items())
    if hasattr(now, "tobytes"):
        return bool(now.tobytes() == then.tobytes())
    return bool(now == then)


def slots_of(value: Any) -> dict[str, Any]:
    found = {}
    for owner in type(value).__mro__:
        slots = vars(owner).get("__slots__", ())
        for key in (slots,) if isinstance(slots, str) else slots:
            slot = vars(owner).get(key)
            if isinstance(slot, types.MemberDescriptorType):
                try:
                    found[key] = slot.__get__(value)
                except AttributeError:
                    continue
    return found


def is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False
