"""JSON text that people may have edited: a mistake is named with its line and column, or with the path of the value.

What: `parse_json` reads a text. `build` makes a frozen dataclass of the document, by the types that its fields declare:
`str`, `int`, `float`, `bool`, enums, `Literal`, nested dataclasses, `tuple[T, ...]`, `dict[str, Any]`,
`Any`, and unions with None. A value of another type is refused, not converted; numbers are finite.
Not covered: what values mean together (`Profile` checks that itself); files that people write by hand (config/).
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import math
import types
import typing
from collections.abc import Callable
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from lowtide.errors import ConfigError, FieldError

T = TypeVar("T")
_MOST_SHOWN = 40
OLD_NAME = "old name"
"""Key of a field's metadata: the name that the field had in files of earlier versions, which are still read."""
LEAST = "least"
"""The same: the least number that the field may have, where that is not 0 and numbers are amounts."""
_NAMES = {str: "text", int: "a whole number", float: "a number", bool: "true or false", dict: "an object"}


def parse_json(text: str, what: str, fix: str = "") -> Any:
    """The document of a JSON text. Raises `ConfigError` that starts with `what` (`plan`) and ends with `fix`."""
    if not isinstance(text, str):
        raise ConfigError(f"{what}: expected its JSON text, not {type(text).__name__}{fix}")
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{what}:{error.lineno}:{error.colno}: not valid JSON: {error.msg}{fix}") from None
    except RecursionError:
        raise ConfigError(f"{what}: not valid JSON: nested too deep{fix}") from None
    except ValueError:
        raise ConfigError(f"{what}: not valid JSON: a number of too many digits{fix}") from None


def build(want: type[T], document: Any, most: int | None = None) -> T:
    """A value of type `want` from what `dataclasses.asdict` made of it, after JSON. Fields with a default may be left
    out. A class with a method `from_plain` is built by it. `most`: numbers are amounts, from 0 up to this.

    Raises `FieldError` with the path of the first value that does not fit.
    """
    return typing.cast(T, _reader(typing.cast(Any, want), most)(document))


_Read = Callable[[Any], Any]


@functools.cache
def _reader(want: Any, most: int | None, least: int = 0) -> _Read:
    origin, members = get_origin(want), get_args(want)
    if want is Any:
        return lambda value: value
    if origin in (Union, types.UnionType):
        inner = [member for member in members if member is not type(None)]
        assert len(inner) == 1 and len(members) == 2, f"unsupported field type {want}"
        read = _reader(inner[0], most, least)
        return lambda value: None if value is None else read(value)
    if origin is Literal:
        return _one_of({choice: choice for choice in members})
    if origin is tuple:
        assert members[-1] is Ellipsis, f"unsupported field type {want}"
        return _rows(_reader(members[0], most))
    if hasattr(want, "from_plain"):
        return typing.cast(_Read, want.from_plain)
    if dataclasses.is_dataclass(want):
        return _fields(typing.cast(Any, want), most)
    if isinstance(want, type) and issubclass(want, enum.Enum):
        return _one_of({member.value: member for member in want})
    read = _scalar(origin or want)
    return read if most is None or want not in (int, float) else _amount(read, least, most)


def _scalar(want: Any) -> _Read:
    allowed = (int, float) if want is float else (want,)

    def read(value: Any) -> Any:
        if type(value) not in allowed or (want is float and not math.isfinite(value)):
            raise FieldError((), f"expected {_NAMES[want]}, not {_shown(value)}")
        return value

    return read


def _amount(read_one: _Read, least: int, most: int) -> _Read:
    def read(value: Any) -> Any:
        if not least <= read_one(value) <= most:
            raise FieldError((), f"expected a number from {least} to {most:.0e}, not {value}")
        return value

    return read


def _one_of(choices: dict[Any, Any]) -> _Read:
    *some, last = choices

    def read(value: Any) -> Any:
        if not isinstance(value, str) or value not in choices:
            raise FieldError((), f"expected {', '.join(some)} or {last}, not {_shown(value)}")
        return choices[value]

    return read


def _rows(read_one: _Read) -> _Read:
    def read(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple):
            raise FieldError((), f"expected a list, not {_shown(value)}")
        made: list[Any] = []
        try:
            for item in value:
                made.append(read_one(item))
        except FieldError as mistake:
            raise mistake.below(len(made)) from None
        return tuple(made)

    return read


def _fields(cls: Any, most: int | None) -> _Read:
    hints = typing.get_type_hints(cls)
    readers = {
        field.name: _reader(hints[field.name], most, field.metadata.get(LEAST, 0)) for field in dataclasses.fields(cls)
    }
    missing = dataclasses.MISSING
    needed = [
        field.name for field in dataclasses.fields(cls) if field.default is missing and field.default_factory is missing
    ]

    older = {field.metadata[OLD_NAME]: field.name for field in dataclasses.fields(cls) if OLD_NAME in field.metadata}
    left: frozenset[str] = getattr(cls, "LEFT_FIELDS", frozenset())

    def read(value: Any) -> Any:
        if not isinstance(value, dict):
            raise FieldError((), f"expected an object, not {_shown(value)}")
        written = {older.get(name, name): name for name in value if name not in left}
        for name in needed:
            if name not in written:
                raise FieldError((), f"missing key {name!r}")
        made = {}
        for field, key in written.items():
            if field not in readers:
                raise FieldError((), f"unknown key {key!r}")
            try:
                made[field] = readers[field](value[key])
            except FieldError as mistake:
                raise mistake.below(key) from None
        return cls(**made)

    return read


def _shown(value: Any) -> str:
    if isinstance(value, dict | list | tuple):
        return "an object" if isinstance(value, dict) else "a list"
    text = {None: "null", True: "true", False: "false"}.get(value) if value is None or isinstance(value, bool) else None
    text = text or repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
