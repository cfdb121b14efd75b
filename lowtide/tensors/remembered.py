"""What a snapshot remembers of one thing (snapshot.py): how it was, whether it still is, and how to put it back.

What: a `Record` is of a dictionary or of attributes (`Attributes`), a list or a set (`Items`), one value in its place
(`Held`), or what has a state as a whole (`State`); a `TensorState` is of a tensor. All have `restore()`, which writes
to nothing that did not change. `position_of` is of what moves on and cannot be wound back, so that it can at least be
said.

Cost: one shallow copy each; about 6 us for a small tensor. Not covered: what is reached from the thing remembered; the
walk finds it.
"""

from __future__ import annotations

import copy
import functools
import io
import itertools
import threading
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from lowtide.tensors.kinds import can_be_cloned, is_plain
from lowtide.tensors.private import COMPILED_CALL, MODULE_TABLES, TENSOR_HOOKS, set_versions, storage_key, version_of
from lowtide.tensors.view import same_bytes, version_alias, write

SMALL_BYTES = 2**20
"""Tensors up to this size are copied, and compared by value."""
PLAIN = frozenset(
    {int, float, complex, bool, str, bytes, type(None), type, range, slice, type(Ellipsis), torch.dtype, torch.device}
    | {torch.Size, torch.layout, torch.memory_format, types.ModuleType, types.BuiltinFunctionType, property}
)
"""Types of values that never change and hold nothing that does."""
_POSITION_DEPTH = 4
# The dictionaries of a module whose names are the module's own.
TRANSPARENT = frozenset(MODULE_TABLES)
NOTHING = object()
"""In the place of a value that is not there."""
WRAPPED = ("forward", COMPILED_CALL)
"""Attributes of a module that lowtide puts wrappers in."""


@dataclass(slots=True, eq=False)
class Name:
    """Where something was found; put into words only when it is asked for."""

    parent: Name | None
    key: Any
    is_item: bool = False

    def __str__(self) -> str:
        before = "" if self.parent is None else str(self.parent)
        if self.is_item:
            return f"{before}[{self.key!r}]"
        if self.key in TRANSPARENT or self.key == "":
            return before
        return f"{before}.{self.key}" if before else str(self.key)


class Record:
    """One place that may be written to: what was there, whether it still is, and how to put it back."""

    __slots__ = ("name", "then")

    def __init__(self, name: Name, then: Any) -> None:
        self.name = name
        self.then = then

    def now(self) -> Any:
        """What is there now."""
        raise NotImplementedError

    def put(self, then: Any) -> None:
        """Have `then` there."""
        raise NotImplementedError

    def is_same(self) -> bool:
        """Whether the very thing is there that was."""
        return self.now() is self.then

    def changed_name(self) -> Name:
        """Where in it something is not as it was."""
        return self.name

    def again(self) -> Self:
        """The same place, as it is now."""
        other = copy.copy(self)
        other.then = self.now()
        return other

    def restore(self) -> None:
        """Put back what was there. Writes nothing where that is there."""
        if not self.is_same():
            self.put(self.then)


class Attributes(Record):
    """A dictionary, or the attributes of an object."""

    __slots__ = ("is_item", "is_module", "kind", "value")

    def __init__(self, value: dict, then: dict, name: Name, *, is_module: bool, is_item: bool) -> None:
        super().__init__(name, then)
        self.value = value
        # Not by methods of a subclass.
        self.kind = OrderedDict if isinstance(value, OrderedDict) else dict
        self.is_module = is_module
        self.is_item = is_item

    def now(self) -> dict:
        return dict(self.kind.items(self.value))

    def is_same(self) -> bool:
        now, then = self.value, self.then
        if len(now) != len(then):
            return False
        return all(
            key is other and value is was
            for (key, value), (other, was) in zip(self.kind.items(now), then.items(), strict=True)
        )

    def changed_name(self) -> Name:
        now, then = self.now(), self.then
        keys = (key for key in {**then, **now} if now.get(key, NOTHING) is not then.get(key, NOTHING))
        return Name(self.name, next(keys, ""), self.is_item)

    def put(self, then: dict) -> None:
        if self.is_module:
            then = without_wrappers_of(then, self.value)
        fill(self.value, then)


def without_wrappers_of(then: dict, now: dict) -> dict:
    """What a module held `then`, with the wrappers that it has now: these are lowtide's own doing."""
    wrappers = {key: now[key] for key in WRAPPED if key in now}
    return {key: was for key, was in then.items() if key not in WRAPPED} | wrappers


def fill(value: dict, then: dict, *, in_order: bool = True) -> None:
    """Have a dictionary hold `then`, not by methods of a subclass."""
    kind = OrderedDict if isinstance(value, OrderedDict) else dict
    if kind.keys(value) != then.keys() or (in_order and [*kind.keys(value)] != [*then]):
        kind.clear(value)
    for key, was in then.items():
        kind.__setitem__(value, key, was)


class Items(Record):
    """What is in a list, a deque or a set."""

    __slots__ = ("value",)

    def __init__(self, value: Any, then: list | set, name: Name) -> None:
        super().__init__(name, then)
        self.value = value

    def now(self) -> list | set:
        return set(self.value) if isinstance(self.then, set) else list(self.value)

    def is_same(self) -> bool:
        now, then = self.value, self.then
        if len(now) != len(then):
            return False
        if isinstance(then, set):
            return {id(item) for item in now} == {id(item) for item in then}
        return all(item is was for item, was in zip(now, then, strict=True))

    def put(self, then: Any) -> None:
        value = self.value
        if isinstance(value, list):
            list.__setitem__(value, slice(None), then)
        elif isinstance(value, deque):
            deque.clear(value)
            deque.extend(value, then)
        else:
            set.clear(value)
            set.update(value, then)


def record_of_empty(value: Any, name: Name, key: str) -> Attributes | Items:
    """The record of a container in an attribute, `key` of what has the name `name`, that had nothing in it."""
    where = Name(name, key)
    if isinstance(value, dict):
        return Attributes(value, {}, where, is_module=False, is_item=key not in TRANSPARENT)
    return Items(value, set() if isinstance(value, set) else [], where)


class Held(Record):
    """One value in its place: a variable of an enclosing function, a global, an attribute of a class, a slot.

    `get()` gives `NOTHING` where there is none.
    """

    __slots__ = ("_get", "_put")

    def __init__(self, get: Callable[[], Any], put: Callable[[Any], Any], name: Name) -> None:
        super().__init__(name, get())
        self._get = get
        self._put = put

    def now(self) -> Any:
        return self._get()

    def put(self, then: Any) -> None:
        self._put(then)

    @classmethod
    def of_cell(cls, cell: types.CellType, name: Name) -> Held:
        """A variable of an enclosing function."""
        return cls(functools.partial(_in_cell, cell), functools.partial(_set_or_delete, cell, "cell_contents"), name)

    @classmethod
    def of_globals(cls, namespace: dict[str, Any], key: str, name: Name) -> Held:
        return cls(functools.partial(namespace.get, key, NOTHING), functools.partial(_put_item, namespace, key), name)

    @classmethod
    def of_class(cls, owner: type, key: str, name: Name) -> Held:
        """An attribute of a class."""
        return cls(lambda: vars(owner).get(key, NOTHING), functools.partial(_set_or_delete, owner, key), name)

    @classmethod
    def of_slot(cls, value: Any, key: str, slot: types.MemberDescriptorType, name: Name) -> Held:
        """An attribute in `__slots__`."""
        return cls(functools.partial(_in_slot, value, slot), functools.partial(_put_slot, value, key), name)


class State(Held):
    """Something whose state is read and written as a whole: a random generator, an array, bytes, a file; names that a
    class, or the globals that a function names, have not got."""

    __slots__ = ()

    def is_same(self) -> bool:
        return _is_same_state(self._get(), self.then)

    @classmethod
    def of_generator(cls, generator: Any, name: Name) -> State:
        """A random generator of torch, Python or numpy; Python's and numpy's modules are ones."""
        if hasattr(generator, "getstate"):
            return cls(generator.getstate, generator.setstate, name)
        if hasattr(generator, "get_state"):
            return cls(generator.get_state, generator.set_state, name)
        return cls(functools.partial(getattr, generator, "state"), functools.partial(setattr, generator, "state"), name)

    @classmethod
    def of_array(cls, array: Any, name: Name) -> State:
        """A numpy array; of one of objects, which objects they are."""
        return cls(array.copy, functools.partial(_write_array, array), name)

    @classmethod
    def of_bytes(cls, value: Any, name: Name) -> State:
        """A `bytearray`, an `array.array`, or another object whose memory can be written to."""
        return cls(functools.partial(_bytes_of, value), functools.partial(_write_bytes, value), name)

    @classmethod
    def of_thread(cls, value: threading.local, name: Name) -> State:
        """What the current thread has in a thread-local. Empty containers count as the same, since each thread makes
        its own. Nothing is put back here; the record of its attributes does that."""

        def found() -> list[tuple[str, Any]]:
            empty = [key for key, held in vars(value).items() if isinstance(held, dict | list | set) and not held]
            own = {key: held if type(held) in PLAIN else id(held) for key, held in vars(value).items()}
            return sorted({**own, **dict.fromkeys(empty)}.items(), key=lambda pair: pair[0])

        return cls(found, lambda _: None, name)

    @classmethod
    def of_cache(cls, function: Any, name: Name) -> State:
        """A function under `functools.lru_cache`. Emptied if it was empty; else it keeps what it has learned."""
        return cls(lambda: bool(function.cache_info().currsize), lambda then: then or function.cache_clear(), name)

    @classmethod
    def of_file(cls, file: io.IOBase, name: Name) -> State:
        """Where a file is read; of one in memory, what is in it too."""
        return cls(functools.partial(_state_of_file, file), functools.partial(_put_back_file, file), name)

    @classmethod
    def of_new_globals(cls, namespace: dict[str, Any], names: set[str], name: Name) -> State:
        """Which of the names that are not in `namespace` have come; they are taken away again."""
        absent = names - namespace.keys()
        found = lambda: [key for key in absent if key in namespace]  # noqa: E731
        return cls(found, lambda _: [namespace.pop(key) for key in found()], name)

    @classmethod
    def of_new_attributes(cls, owner: type, name: Name) -> State:
        """The same of the attributes of a class."""
        there = frozenset(vars(owner))
        found = lambda: [key for key in vars(owner) if key not in there and not key.startswith("__")]  # noqa: E731
        return cls(found, lambda _: [delattr(owner, key) for key in found()], name)  # type: ignore[func-returns-value]


class TensorState:
    """A parameter, a buffer or a tensor in an attribute."""

    __slots__ = ("_alias", "_comes", "_copy", "_flags", "_hooks", "_is_small", "_version", "name", "tensor")

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
        self._is_small, self._comes = True, False
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

    def let_go(self) -> None:
        """It is a weight that comes and goes: it is not held where it is."""
        self._comes, self._alias = True, version_alias(self.tensor)

    def _is_moved(self) -> bool:
        """Whether `.data` was assigned to."""
        now, then = self.tensor, self._alias
        return (
            then is not None
            and not self._comes
            and (
                storage_key(now.untyped_storage()) != storage_key(then.untyped_storage())
                or now.size() != then.size()
                or now.stride() != then.stride()
                or now.storage_offset() != then.storage_offset()
            )
        )

    def is_lost(self, written: dict[int, Any]) -> bool:
        return (
            self._copy is None
            and self._alias is not None
            and _version(self.tensor) != self._version
            and storage_key(self._alias.untyped_storage()) not in written
        )

    def is_written(self, *, by_value: bool) -> bool:
        """Whether its version has moved, or its `.data`; `by_value`: or the bytes of a small one."""
        if _version(self.tensor) != self._version or self._is_moved():
            return True
        alias, copy = self._alias, self._copy
        return by_value and self._is_small and alias is not None and copy is not None and not same_bytes(alias, copy)

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


def _is_same_state(now: Any, then: Any) -> bool:
    """Whether two states of something are equal."""
    if isinstance(now, torch.Tensor):
        return torch.equal(now, then)
    if isinstance(now, dict):
        return all(_is_same_state(value, then[key]) for key, value in now.items())
    if hasattr(now, "tobytes"):
        return now.shape == then.shape and bool(now.tobytes() == then.tobytes())
    if isinstance(now, tuple) and any(hasattr(part, "tobytes") for part in now):
        return all(_is_same_state(one, other) for one, other in zip(now, then, strict=True))
    return bool(now == then)


def slots_of(value: Any) -> dict[str, Any]:
    """The attributes in `__slots__` that are there."""
    found = ((key, _in_slot(value, slot)) for key, slot in members_of(type(value)).items())
    return {key: held for key, held in found if held is not NOTHING}


def members_of(kind: type) -> dict[str, types.MemberDescriptorType]:
    """What a class has in `__slots__`, whether an object of it has it or not."""
    found = {}
    for owner in kind.__mro__:
        slots = vars(owner).get("__slots__", ())
        for key in (slots,) if isinstance(slots, str) else slots:
            slot = vars(owner).get(key)
            if isinstance(slot, types.MemberDescriptorType):
                found[key] = slot
    return found


def _in_slot(value: Any, slot: types.MemberDescriptorType) -> Any:
    try:
        return slot.__get__(value)
    except AttributeError:
        return NOTHING


def _put_slot(value: Any, key: str, then: Any) -> None:
    if then is NOTHING:
        object.__delattr__(value, key)
    else:
        object.__setattr__(value, key, then)


def _in_cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return NOTHING


def is_filled(cell: types.CellType) -> bool:
    return _in_cell(cell) is not NOTHING


def _put_item(namespace: dict[str, Any], key: str, then: Any) -> None:
    if then is NOTHING:
        del namespace[key]
    else:
        namespace[key] = then


def _set_or_delete(owner: Any, key: str, then: Any) -> None:
    if then is NOTHING:
        delattr(owner, key)
    else:
        setattr(owner, key, then)


def _write_array(array: Any, then: Any) -> None:
    if array.shape == then.shape:
        array[...] = then


def _bytes_of(value: Any) -> bytes:
    with memoryview(value) as view:
        return view.tobytes()


def _write_bytes(value: Any, then: bytes) -> None:
    if isinstance(value, bytearray):
        value[:] = then
    elif hasattr(value, "frombytes"):  # an array.array, whose length may be another
        del value[:]
        value.frombytes(then)
    else:
        memoryview(value).cast("B")[:] = then


def _state_of_file(file: Any) -> tuple:
    if file.closed:
        return ()
    return (file.tell(), file.getvalue() if isinstance(file, io.BytesIO | io.StringIO) else None)


def _put_back_file(file: Any, then: tuple) -> None:
    if file.closed:
        return
    position, value = then
    if value is not None:
        file.seek(0)
        file.truncate()
        file.write(value)
    file.seek(position)


def is_read(file: Any) -> bool:
    """Whether an open file is read, or lies in memory: then it can be put back where it was."""
    return isinstance(file, io.BytesIO | io.StringIO) or (file.seekable() and not file.writable())


def position_of(value: Any, depth: int = 0) -> Any:
    """Something that compares equal as long as an iterator, or a file that is written, stands where it stood: what
    moves on by itself and cannot be wound back."""
    if isinstance(value, types.GeneratorType):
        frame = value.gi_frame
        return None if frame is None else (frame.f_lasti, {key: id(local) for key, local in frame.f_locals.items()})
    if isinstance(value, io.IOBase):
        return -1 if value.closed else value.tell()
    if isinstance(value, itertools.count | itertools.repeat):
        return repr(value)
    if isinstance(value, tuple) and depth:
        return tuple(position_of(part, depth) for part in value)
    if isinstance(value, int | str | bytes | type(None)):
        return value
    if not isinstance(value, Iterator) or depth > _POSITION_DEPTH:
        return id(value)
    own = getattr(value, "__dict__", None)
    if own:  # torch's, of a loader of batches
        return tuple(part for part in own.values() if type(part) in (int, bool))
    try:
        return position_of(value.__reduce__(), depth + 1)
    except TypeError:
        return id(value)
