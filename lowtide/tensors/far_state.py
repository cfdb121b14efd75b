"""State that only the observed step looks for: what code names, and what can be remembered of odd objects.

What: records with `restore()` as in remembered.py (bytes that can be written in place, numpy arrays of objects, names
that a class or a module got, caches of functions); the names that a function's code holds; and `position` of what moves
on and cannot be wound back, so that it can at least be said.

Cost: one shallow copy each. Not covered: the walk to them (snapshot.py).
"""

from __future__ import annotations

import functools
import io
import itertools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from lowtide.tensors.remembered import Name

_POSITION_DEPTH = 4


def names_in(code: types.CodeType) -> set[str]:
    """Globals and attributes that a function names, with those of the functions and comprehensions inside of it.

    Short strings are names too: `setattr(module, "count", 1)`.
    """
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= names_in(constant)
        elif isinstance(constant, str) and constant.isidentifier():
            names.add(constant)
    return names


class Bytes:
    """A `bytearray`, an `array.array`, or another object whose memory can be written to."""

    __slots__ = ("name", "then", "value")

    def __init__(self, value: Any, name: Name) -> None:
        self.value = value
        self.name = name
        self.then = _bytes_of(value)

    def restore(self) -> None:
        value, then = self.value, self.then
        if _bytes_of(value) == then:
            return
        if isinstance(value, bytearray):
            value[:] = then
        elif hasattr(value, "frombytes"):  # an array.array, whose length may be another
            del value[:]
            value.frombytes(then)
        else:
            memoryview(value).cast("B")[:] = then


def _bytes_of(value: Any) -> bytes:
    with memoryview(value) as view:
        return view.tobytes()


class ObjectArray:
    """A numpy array of Python objects."""

    __slots__ = ("array", "name", "then")

    def __init__(self, array: Any, name: Name) -> None:
        self.array = array
        self.name = name
        self.then = array.copy()

    def restore(self) -> None:
        pairs = zip(self.array.flat, self.then.flat, strict=True)
        if self.array.shape == self.then.shape and any(now is not then for now, then in pairs):
            self.array[...] = self.then


class NewNames:
    """Names that a class, or the globals that a function names, have not got; those that come are taken away again."""

    __slots__ = ("_delete", "_found", "name")

    def __init__(self, delete: Callable[[str], None], found: Callable[[], list[str]], name: Name) -> None:
        self._delete = delete
        self._found = found
        self.name = name

    @classmethod
    def of_globals(cls, namespace: dict[str, Any], names: set[str], name: Name) -> NewNames:
        absent = names - namespace.keys()
        return cls(namespace.__delitem__, lambda: [key for key in absent if key in namespace], name)

    @classmethod
    def of_class(cls, owner: type, name: Name) -> NewNames:
        there = frozenset(vars(owner))
        found = lambda: [key for key in vars(owner) if key not in there and not key.startswith("__")]  # noqa: E731
        return cls(functools.partial(delattr, owner), found, name)

    def restore(self) -> None:
        for key in self._found():
            self._delete(key)


class CachedCalls:
    """A function under `functools.lru_cache`. Emptied if it was empty; else it keeps what it has learned."""

    __slots__ = ("_function", "name", "then")

    def __init__(self, function: Any, name: Name) -> None:
        self._function = function
        self.name = name
        self.then = function.cache_info()

    def restore(self) -> None:
        if not self.then.currsize and self._function.cache_info() != self.then:
            self._function.cache_clear()


class Position:
    """Something that moves on by itself and that nobody can wind back: an iterator, a file that is written."""

    __slots__ = ("name", "then", "value")

    def __init__(self, value: Any, name: Name) -> None:
        self.value = value
        self.name = name
        self.then = _position(value)

    @property
    def kind(self) -> str:
        """Of what class it is."""
        return f"{type(self.value).__module__}.{type(self.value).__qualname__}"

    def has_moved(self) -> bool:
        return bool(_position(self.value) != self.then)


class ReadPosition:
    """Where a file is read."""

    __slots__ = ("file", "name", "then")

    def __init__(self, file: io.IOBase, name: Name) -> None:
        self.file = file
        self.name = name
        self.then = file.tell()

    def restore(self) -> None:
        if not self.file.closed and self.file.tell() != self.then:
            self.file.seek(self.then)


class Contents:
    """A file in memory."""

    __slots__ = ("file", "name", "then")

    def __init__(self, file: io.BytesIO | io.StringIO, name: Name) -> None:
        self.file = file
        self.name = name
        self.then = (file.getvalue(), file.tell())

    def restore(self) -> None:
        if self.file.closed or (self.file.getvalue(), self.file.tell()) == self.then:
            return
        value, position = self.then
        self.file.seek(0)
        self.file.truncate()
        self.file.write(value)  # type: ignore[arg-type]
        self.file.seek(position)


def record_of_file(file: Any, name: Name) -> Any:
    """The record of an open file; None for one that tells no position."""
    if isinstance(file, io.BytesIO | io.StringIO):
        return None if file.closed else Contents(file, name)
    try:
        if file.seekable() and not file.writable():
            return ReadPosition(file, name)
        file.tell()
    except (OSError, ValueError):
        return None
    return Position(file, name)


def _position(value: Any, depth: int = 0) -> Any:
    """Something that compares equal as long as an iterator stands where it stood."""
    if isinstance(value, types.GeneratorType):
        frame = value.gi_frame
        return None if frame is None else (frame.f_lasti, {key: id(local) for key, local in frame.f_locals.items()})
    if isinstance(value, io.IOBase):
        return -1 if value.closed else value.tell()
    if isinstance(value, itertools.count | itertools.repeat):
        return repr(value)
    if isinstance(value, tuple) and depth:
        return tuple(_position(part, depth) for part in value)
    if isinstance(value, int | str | bytes | type(None)):
        return value
    if not isinstance(value, Iterator) or depth > _POSITION_DEPTH:
        return id(value)
    own = getattr(value, "__dict__", None)
    if own:  # torch's, of a loader of batches
        return tuple(part for part in own.values() if type(part) in (int, bool))
    try:
        return _position(value.__reduce__(), depth + 1)
    except TypeError:
        return id(value)


def is_library(module: str | None, foreign: frozenset[str]) -> bool:
    """Whether code of this module is Python's, numpy's or one of `foreign`: nothing of a forward's state is in it."""
    package = (module or "").partition(".")[0]
    return package in foreign or package in sys.stdlib_module_names or package == "numpy"
