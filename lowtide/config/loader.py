"""Settings into frozen dataclasses, strictly: every mistake is one line that says where, what, and how to fix it.

What: `load_tree` and `load_mapping` build any frozen dataclass by the types that its fields declare: `bool`, `int`,
`float`, `str`, `Path`, `Literal`, sizes (`ByteSize`), nested dataclasses, `tuple[T, ...]`,
`dict[str, T]`, `Any`, and unions of these.
Why: types come from the declaration, not from the look of the text, so `1e-4` is a number where a number is declared
and `no` is text where text is declared; only `true` and `false` are booleans.

Conventions a dataclass may use:
- a field annotated `Locations` is not a key; it is filled with the place of every key below this dataclass;
- `SHORTHAND: ClassVar[str] = "match"` lets a scalar stand for the mapping `{match: scalar}`;
- `REST: ClassVar[str] = "fields"` has that field take all keys that are no fields, as they are;
- a field with the metadata `NO_KEY` is not a key.

Messages. In a file: `run.yaml:2:3: unknown key 'memory.budgett'; did you mean 'budget'?`. In a mapping the dotted path
is the place: `memory.budgett: unknown key; did you mean 'budget'?`.

Not covered: writing files, environment variables, defaults that depend on other fields (use `__post_init__`, which may
raise `FieldError`).
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin

from lowtide.config.source import (
    MOST_DIGITS,
    RawEntry,
    RawValue,
    join_path,
    nearest,
    read_mapping,
    shown,
    too_many_digits,
)
from lowtide.core.budget import Budget, parse_budget
from lowtide.errors import ConfigError, FieldError, did_you_mean
from lowtide.units import parse_bytes

T = TypeVar("T")

MOST_CHARACTERS = 4_096
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,60}")
"""Text that needs no quotes in a list."""
_INT = re.compile(r"[-+]?[0-9]+(?:_[0-9]+)*", re.ASCII)
_FLOAT = re.compile(r"[-+]?(?:[0-9]+(?:_[0-9]+)*\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?", re.ASCII)

NO_KEY = {"is_key": False}
"""Metadata of a field that no file may set."""
ByteSize = Annotated[int, parse_bytes]
"""An `int` field that is written as a size."""
BudgetSize = Annotated[Budget, parse_budget]
"""A field that is written as a size, as a share of what the device has, or as `auto`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Locations:
    """Where each value below one dataclass was written: relative dotted path -> `run.yaml:4:9`."""

    prefix: str = ""
    """Dotted path of the dataclass itself."""
    places: Mapping[str, str] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    """Where the keys of the dataclass itself stand."""

    def of(self, path: str) -> str:
        """The place of `swap[0].match`, or of the nearest thing around it; the full dotted path if it was not read."""
        if around := nearest(path, self.places):
            return self.places[around]
        if not path:
            return self.places.get("", self.prefix)
        return join_path(self.prefix, path)


def load_tree(root: RawValue, cls: type[T], *, section: str | None = None) -> T:
    """Build `cls` from the tree of a YAML file, or from one top-level section of it (the others are not looked at).

    Raises `ConfigError`: section missing; any mistake in a key or value.
    """
    if section is None:
        return typing.cast(T, _SettingsBuilder(in_file=True).build(root, cls, ""))
    if root.kind != "mapping":
        raise ConfigError(
            f"{root.place}: expected a mapping with the section '{section}', not {root.describe()}; write "
            f"'{section}:' and its keys below it"
        )
    for entry in root.entries:
        if entry.key == section:
            return typing.cast(T, _SettingsBuilder(in_file=True).build(entry.node, cls, section))
    for entry in root.entries:
        if hint := did_you_mean(entry.key, (section,)):
            raise ConfigError(f"{entry.place}: unknown section '{entry.key}'{hint}")
    keys = ", ".join(_keys(cls))
    raise ConfigError(f"{root.place}: missing section '{section}'; write '{section}:' and its keys below it: {keys}")


def load_mapping(mapping: Mapping[str, Any], cls: type[T], *, where: str = "memory") -> T:
    """Build `cls` from a Python mapping; `where` is the dotted path that messages start with.

    Raises `ConfigError` for any mistake in a key or value.
    """
    return typing.cast(T, _SettingsBuilder(in_file=False).build(read_mapping(mapping, where), cls, where))


@dataclass(frozen=True, slots=True, kw_only=True)
class _SettingsBuilder:
    """One load. `in_file` decides only how messages name the key."""

    in_file: bool

    def build(self, node: RawValue, want: Any, path: str) -> Any:
        if want is Any:
            return self._free_form(node, path)
        if (parse := _parser_of(want)) is not None:
            return self._amount(node, want, path, parse)
        origin = get_origin(want)
        if origin is Annotated:
            return self.build(node, get_args(want)[0], path)
        if origin in (Union, types.UnionType):
            return self._union(node, want, path)
        if origin is Literal:
            return self._literal(node, want, path)
        if origin is tuple:
            return self._tuple(node, want, path)
        if origin is dict or origin is Mapping:
            return self._dict(node, want, path)
        if dataclasses.is_dataclass(want):
            return self._dataclass(node, want, path)
        return self._scalar(node, want, path)

    # ---- messages

    def _fail(self, place: str, path: str, what: str, link: str, rest: str) -> NoReturn:
        """In a file `place: what link 'path' rest`; in a mapping the place is the path: `path: what rest`."""
        name = f"{link}'{path}'" if self.in_file and path else ""
        raise ConfigError(f"{place}: {what}{name}{rest}" if place else f"{what}{rest}") from None

    def _wrong(self, node: RawValue, want: Any, path: str) -> NoReturn:
        choices = _choices(want)
        if too_many_digits(node) is not None:
            rest = f", not {node.describe()}; the most is {MOST_DIGITS}"
            self._fail(node.place, path, f"expected {_join_or(_describe(want))}", " for ", rest)
        is_word = node.kind == "scalar" and not node.is_null and node.value not in choices
        hint = (did_you_mean(str(node.value), choices) if is_word else "") or _fix(node, want)
        self._fail(node.place, path, f"expected {_join_or(_describe(want))}", " for ", f", not {node.describe()}{hint}")

    # ---- scalars

    def _scalar(self, node: RawValue, want: Any, path: str) -> Any:
        if node.kind != "scalar" or (node.is_null and want is not type(None)):
            self._wrong(node, want, path)
        value = node.value
        if want is type(None) and node.is_null:
            return None
        if want is bool and (isinstance(value, bool) or (node.is_text and value in ("true", "false"))):
            return value is True or value == "true"
        if want in (int, float) and _is_number(node, want):
            return want(value)
        if want is str and isinstance(value, str):
            self._check_text(value, node, path)
            return value
        if want is Path and isinstance(value, str | os.PathLike):
            self._check_text(os.fspath(value), node, path)
            expanded = Path(os.path.expanduser(value))  # noqa: PTH111 -- Path.expanduser raises for `~nobody`
            if expanded.parts[:1] and expanded.parts[0].startswith("~"):
                self._fail(
                    node.place, path, f"there is no user '{expanded.parts[0][1:]}'", " for ", "; write the path out"
                )
            return expanded
        assert want in (bool, int, float, str, Path, type(None)), f"{path}: unsupported field type {want}"
        self._wrong(node, want, path)

    def _check_text(self, value: str, node: RawValue, path: str) -> None:
        """No name, pattern or path has a line break or a NUL byte in it, or is as long as a page."""
        if len(value) > MOST_CHARACTERS:
            self._fail(
                node.place, path, f"expected at most {MOST_CHARACTERS:,} characters", " for ", f", not {len(value):,}"
            )
        if not value.isprintable():
            self._fail(node.place, path, "expected text without control characters", " for ", f", not {shown(value)}")

    def _amount(self, node: RawValue, want: Any, path: str, parse: Callable[[int | str], Budget]) -> Budget:
        value = node.value
        if node.kind != "scalar" or node.is_null or not isinstance(value, int | str) or too_many_digits(node):
            self._wrong(node, want, path)
        try:
            return parse(value)
        except ValueError as error:
            prefix = f"'{path}': " if self.in_file else ""
            raise ConfigError(f"{node.place}: {prefix}{error}") from None

    def _literal(self, node: RawValue, want: Any, path: str) -> Any:
        for choice in get_args(want):
            if node.kind != "scalar":
                break
            if type(node.value) is type(choice) and node.value == choice:
                return choice
            if node.is_text and not isinstance(choice, str) and node.value == str(choice).lower():
                return choice
        self._wrong(node, want, path)

    def _free_form(self, node: RawValue, path: str) -> Any:
        """`Any`: YAML 1.2 core rules for plain text; Python values as they are."""
        if node.kind == "list":
            return [self._free_form(item, join_path(path, index)) for index, item in enumerate(node.items)]
        if node.kind == "mapping":
            return {entry.key: self._free_form(entry.node, join_path(path, entry.key)) for entry in node.entries}
        if node.is_null:
            return None
        if not node.is_text:
            return node.value
        if node.value in ("true", "false"):
            return node.value == "true"
        if too_many_digits(node) is not None:
            self._wrong(node, int, path)
        kind = next((kind for kind in (int, float) if _is_number(node, kind)), str)
        return kind(str(node.value))

    # ---- collections

    def _union(self, node: RawValue, want: Any, path: str) -> Any:
        members = get_args(want)
        if node.is_null and type(None) in members:
            return None
        takers = [member for member in members if node.kind in _kinds(member) and member is not type(None)]
        if node.is_null or not takers:
            self._wrong(node, want, path)
        if isinstance(node.value, str) and (str in takers or Path in takers):
            self._check_text(node.value, node, path)
        is_path = takers == [Path] and isinstance(node.value, str)
        if is_path or (len(takers) == 1 and (node.kind != "scalar" or _parser_of(takers[0]))):
            return self.build(node, takers[0], path)  # its own message is more exact than the union's
        for member in takers:
            try:
                return self.build(node, member, path)
            except ConfigError:
                continue
        self._wrong(node, want, path)

    def _tuple(self, node: RawValue, want: Any, path: str) -> tuple[Any, ...]:
        if node.kind != "list":
            self._wrong(node, want, path)
        member = get_args(want)[0]
        return tuple(self.build(item, member, join_path(path, index)) for index, item in enumerate(node.items))

    def _dict(self, node: RawValue, want: Any, path: str) -> dict[str, Any]:
        if node.kind != "mapping":
            self._wrong(node, want, path)
        value_type = get_args(want)[1]
        return {entry.key: self.build(entry.node, value_type, join_path(path, entry.key)) for entry in node.entries}

    def _dataclass(self, node: RawValue, cls: Any, path: str) -> Any:
        shorthand = getattr(cls, "SHORTHAND", None)
        if node.kind == "scalar" and not node.is_null and shorthand:
            node = RawValue(
                kind="mapping", place=node.place, entries=(RawEntry(key=shorthand, place=node.place, node=node),)
            )
        if node.kind != "mapping":
            self._wrong(node, cls, path)
        types_by_name, keys, rest = _field_types(cls), _keys(cls), getattr(cls, "REST", None)
        values: dict[str, Any] = {rest: {}} if rest else {}
        for entry in node.entries:
            below = join_path(path, entry.key)
            if rest and entry.key not in keys:
                values[rest][entry.key] = self._free_form(entry.node, below)
                continue
            if entry.key not in keys:
                hint = did_you_mean(entry.key, keys) or f"; known keys: {', '.join(keys)}"
                hint = f"; leave '{path}' out, and write what is below it" if entry.key == path else hint
                self._fail(entry.place, below, "unknown key", " ", hint)
            values[entry.key] = self.build(entry.node, types_by_name[entry.key], below)
        self._check_required(node, cls, values, path)
        for name, want in types_by_name.items():
            if want is Locations:
                places = {entry.key: entry.place for entry in node.entries}
                values[name] = Locations(prefix=path, places=_places(node), keys=places)
        try:
            return cls(**values)
        except FieldError as error:
            entries = {entry.key: entry for entry in node.entries}
            name = str(error.path[0])
            place = entries[name].node.place if name in entries else node.place
            below = join_path(path, name)
            raise ConfigError(
                f"{place}: '{below}' {error.message}" if self.in_file else f"{below}: {error.message}"
            ) from None

    def _check_required(self, node: RawValue, cls: Any, values: Mapping[str, Any], path: str) -> None:
        types_by_name = _field_types(cls)
        for item in dataclasses.fields(cls):
            has_default = item.default is not dataclasses.MISSING or item.default_factory is not dataclasses.MISSING
            if item.name in values or has_default or types_by_name[item.name] is Locations:
                continue
            below = join_path(path, item.name)
            place = node.place if self.in_file else below
            expected = _join_or(_describe(types_by_name[item.name]))
            self._fail(place, below, "missing key", " ", f"; expected {expected}")


def _parser_of(want: Any) -> Callable[[int | str], Budget] | None:
    """The parser of a type that is written as an amount of bytes; None for any other type."""
    return next((mark for mark in getattr(want, "__metadata__", ()) if mark in (parse_bytes, parse_budget)), None)


@functools.cache
def _field_types(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls, include_extras=True)
    known = (item for item in dataclasses.fields(typing.cast(Any, cls)) if item.init and item.metadata != NO_KEY)
    return {item.name: hints[item.name] for item in known}


def _keys(cls: Any) -> list[str]:
    """The keys that the mapping of a dataclass may have."""
    rest = getattr(cls, "REST", None)
    return [name for name, want in _field_types(cls).items() if want is not Locations and name != rest]


def _fix(node: RawValue, want: Any) -> str:
    """What to write where a mapping or a list is expected, as the end of a message; empty where the message says it."""
    members = get_args(want) if get_origin(want) in (Union, types.UnionType) else (want,)
    for member in members:
        if dataclasses.is_dataclass(member):
            return f"; write 'key: value', with these keys: {', '.join(_keys(member))}"
        if get_origin(member) in (dict, Mapping):
            return "; write 'key: value'"
    if isinstance(node.value, bool):
        word = "all" if node.value else "none"
        return f"; write {word}" if any(word in get_args(member) for member in members) else ""
    if not isinstance(node.value, str) or not any(get_origin(member) is tuple for member in members):
        return ""
    is_plain = node.is_text and _PLAIN.fullmatch(node.value) is not None
    return f"; write [{node.value if is_plain else shown(node.value)}]"


def _places(node: RawValue) -> dict[str, str]:
    """Relative dotted path -> place, for a mapping node and everything below it."""
    places = {"": node.place}

    def visit(inner: RawValue, path: str) -> None:
        for entry in inner.entries:
            places[join_path(path, entry.key)] = entry.node.place
            visit(entry.node, join_path(path, entry.key))
        for index, item in enumerate(inner.items):
            places[join_path(path, index)] = item.place
            visit(item, join_path(path, index))

    visit(node, "")
    return places


def _is_number(node: RawValue, kind: type[int] | type[float]) -> bool:
    if too_many_digits(node) is not None:
        return False
    if node.is_text:
        return (_INT if kind is int else _FLOAT).fullmatch(str(node.value)) is not None
    return isinstance(node.value, int | kind) and not isinstance(node.value, bool)


def _kinds(want: Any) -> tuple[str, ...]:
    """The kinds of node that a type can be built from."""
    if want is Any:
        return ("scalar", "list", "mapping")
    origin = get_origin(want)
    if origin is tuple:
        return ("list",)
    if origin is dict or origin is Mapping:
        return ("mapping",)
    if dataclasses.is_dataclass(want):
        return ("mapping", "scalar") if getattr(want, "SHORTHAND", None) else ("mapping",)
    return ("scalar",)


def _choices(want: Any) -> list[str]:
    """Words that a wrong scalar may have meant."""
    origin = get_origin(want)
    if origin in (Union, types.UnionType):
        return [choice for member in get_args(want) for choice in _choices(member)]
    if origin is Literal:
        return [str(choice) for choice in get_args(want)]
    if want is bool:
        return ["true", "false"]
    return []


_NAMES: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    str: "text",
    Path: "a path",
    type(None): "null",
}


def _describe(want: Any) -> list[str]:
    """What a type looks like to the person who writes the file."""
    choices = _choices(want)
    origin = get_origin(want)
    parse = _parser_of(want)
    if parse is not None:
        return (
            ["a size such as 20GiB"]
            if parse is parse_bytes
            else ["a size such as 20GiB", "a share such as 90%", "auto"]
        )
    if origin is Annotated:
        return _describe(get_args(want)[0])
    if origin in (Union, types.UnionType):
        return [text for member in get_args(want) for text in _describe(member)]
    if choices:
        return choices
    if origin is tuple:
        return ["a list"]
    if origin is dict or origin is Mapping or dataclasses.is_dataclass(want):
        return ["a mapping"]
    return [_NAMES.get(want, "a value")]


def _join_or(words: Sequence[str]) -> str:
    if len(words) == 1:
        return words[0]
    return f"{', '.join(words[:-1])} or {words[-1]}"
