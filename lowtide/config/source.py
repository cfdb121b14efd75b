"""Where settings come from: a YAML file or a Python mapping, both turned into one small tree that knows its places.

Why: PyYAML's constructors lose the line of every value and apply YAML 1.1 (`no` is False, `1e-4` is text, `12:30` is
750). Its *events* have both the marks and the untouched text, so types are decided by what the field declares
(loader.py), never by how a value looks.
Why there are limits: a file may be generated, or hostile. A file that is larger or deeper than any file of settings is
refused in one line, before it costs more than a second or a few megabytes. Limits are on size, nesting, number of
values (an alias counts for all that it stands for) and length of keys. Only regular files are read, so a pipe or a
device cannot hang the program.

Not covered: YAML tags (`!!python/...`) and merge keys (`<<`); both are refused with a message.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import yaml

from lowtide.errors import ConfigError
from lowtide.units import KIB

MOST_YAML_BYTES = 256 * KIB
MOST_VALUES = 10_000
MOST_DEPTH = 64
MOST_KEY_CHARACTERS = 1_000
MOST_DIGITS = 18
"""The most digits of an integer: every such number fits into 64 bits."""
_MOST_SHOWN = 80
_DIGITS = re.compile(r"[-+]?[0-9]+(?:_[0-9]+)*", re.ASCII)
_LOOKS_TYPED = re.compile(r"[-+.0-9][-+.0-9eE_]*|true|false")
_YAML_FIXES = (
    ("mapping values are not allowed", "put the value in quotes, or write one 'key: value' a line"),
    ("<stream end>", "close the bracket or the quote that is open there"),
    ("end of stream", "close the quote that is open there"),
    ("expected ',' or ']'", "write a comma between values and close the bracket"),
    ("expected ',' or '}'", "write a comma between values and close the bracket"),
    ("could not find expected ':'", "write a colon and a blank after each key: 'key: value'"),
    ("expected <block end>", "begin all keys of a section in one column, and close quotes"),
    ("<document start>", "begin all keys of a section in one column"),
    ("expected alphabetic or numeric character", "put text that begins with * or & in quotes: '*.mlp'"),
    ("cannot start any token", "indent with blanks, and put text that begins with @, % or ` in quotes"),
    ("unknown escape character", "write each \\ twice, or use single quotes"),
)
"""What the parser says -> what to do about it; the first that is in its message."""
_YAML_FIX = "look for an open quote or bracket and for uneven indentation there"


@dataclass(frozen=True, slots=True, kw_only=True)
class RawEntry:
    """One `key: value` of a mapping, in the order written."""

    key: str
    place: str
    """Where the key stands; for a Python mapping the dotted path."""
    node: RawValue


@dataclass(frozen=True, slots=True, kw_only=True)
class RawValue:
    """One value before it has a type."""

    kind: Literal["scalar", "list", "mapping"]
    place: str
    """`run.yaml:4:9`, or the dotted path of a Python value."""
    is_text: bool = False
    """True for YAML scalars that are plain text: their type is still open."""
    value: object = None
    """Scalars only: the text (YAML) or the Python value."""
    items: tuple[RawValue, ...] = ()
    entries: tuple[RawEntry, ...] = ()

    @property
    def is_null(self) -> bool:
        return self.kind == "scalar" and (self.value is None or (self.is_text and self.value in ("", "~", "null")))

    def describe(self) -> str:
        """What stands there, for `expected ..., not ...`."""
        if self.kind == "list":
            return "a list"
        if self.kind == "mapping":
            return "a mapping"
        if self.is_null:
            return "nothing"
        if (num_digits := too_many_digits(self)) is not None:
            return f"a number of {num_digits} digits"
        if isinstance(self.value, str) and not self.is_text and _LOOKS_TYPED.fullmatch(self.value):
            return f"the text {shown(self.value)}"  # otherwise the message would read "expected a number, not '1'"
        return shown(self.value)


def join_path(parent: str, key: str | int) -> str:
    """`memory` + `swap` -> `memory.swap`; `memory.swap` + 0 -> `memory.swap[0]`."""
    if isinstance(key, int):
        return f"{parent}[{key}]"
    return f"{parent}.{key}" if parent else key


def shown(value: object) -> str:
    """A value as messages show it: its `repr`, cut to some 80 characters."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of more than 4,300 digits; lists without end
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 20]}...{text[-17:]}"


def too_many_digits(node: RawValue) -> int | None:
    """How many digits an integer has that is larger than any setting; None for everything else."""
    value = node.value
    if isinstance(value, int) and abs(value) >= 10**MOST_DIGITS:
        return int(abs(value).bit_length() * 0.30103) + 1  # str() refuses numbers of more than 4,300 digits
    if isinstance(value, str) and node.is_text and len(value) > MOST_DIGITS and _DIGITS.fullmatch(value):
        num_digits = len(value.lstrip("+-").replace("_", "").lstrip("0"))
        return num_digits if num_digits > MOST_DIGITS else None
    return None


def read_text(path: str | os.PathLike[str], *, most_bytes: int, where: str = "") -> str:
    """The text of a regular file. Raises `ConfigError` that starts with `where` (`--profile: `) and names the file.

    Costs at most `most_bytes`, whatever the file is: a pipe or a device is refused without waiting for it.
    """
    name = os.fspath(path)
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            is_regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
            content = file.read(most_bytes + 1) if is_regular else b""
    except FileNotFoundError:
        raise ConfigError(f"{where}{name}: no such file; check the path") from None
    except OSError as error:
        if isinstance(error, IsADirectoryError):
            raise ConfigError(f"{where}{name}: this is a folder; give a file") from None
        if isinstance(error, PermissionError):
            raise ConfigError(f"{where}{name}: no permission to read it; chmod +r, or give another file") from None
        raise ConfigError(f"{where}{name}: cannot be read: {error.strerror}; check the path") from None
    except ValueError:  # a NUL byte, or half of a surrogate pair
        raise ConfigError(f"{where}{shown(name)} is not the name of a file; check the path") from None
    if not is_regular:
        raise ConfigError(f"{where}{name}: this is a pipe or a device; write its content to a file first")
    if len(content) > most_bytes:
        raise ConfigError(f"{where}{name}: larger than {most_bytes:,} bytes; this is another kind of file")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{where}{name}: this is not a text file; save it as UTF-8") from None


def read_yaml(path: str | os.PathLike[str]) -> RawValue:
    """The tree of a file. Raises `ConfigError` when it is missing, unreadable, not YAML, empty or past a limit."""
    name = os.fspath(path)
    text = read_text(path, most_bytes=MOST_YAML_BYTES)
    try:
        return _YamlReader(name, yaml.SafeLoader(text)).document()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
        problem = error.problem or error.context or ""
        fix = next((fix for part, fix in _YAML_FIXES if part in problem), _YAML_FIX)
        raise ConfigError(f"{place}: not valid YAML: {problem}; {fix}") from None
    except yaml.reader.ReaderError as error:
        raise ConfigError(
            f"{name}: not valid YAML: character {error.position + 1}: {error.reason}; remove it"
        ) from None
    except ConfigError:
        raise
    except (ValueError, OverflowError):  # PyYAML's own, for "\\U00110000" and for a %YAML version without end
        raise ConfigError(f"{name}: not valid YAML: a character or a version that does not exist; remove it") from None


def read_mapping(value: object, path: str, depth: int = 0) -> RawValue:
    """The tree of Python values (mappings, lists, tuples, scalars); places are dotted paths that start with `path`.

    Raises `ConfigError` for keys that are no text and for nesting without end.
    """
    if depth > MOST_DEPTH:
        raise ConfigError(f"{path}: nested more than {MOST_DEPTH} deep; no setting is")
    if isinstance(value, Mapping):
        entries = []
        for key, item in value.items():
            if not isinstance(key, str):
                raise ConfigError(f"{path}: expected text keys, not {shown(key)}; write the key in quotes")
            below = join_path(path, key)
            entries.append(RawEntry(key=key, place=below, node=read_mapping(item, below, depth + 1)))
        return RawValue(kind="mapping", place=path, entries=tuple(entries))
    if isinstance(value, list | tuple):
        items = (read_mapping(item, join_path(path, index), depth + 1) for index, item in enumerate(value))
        return RawValue(kind="list", place=path, items=tuple(items))
    return RawValue(kind="scalar", place=path, value=value)


class _YamlReader:
    """Turns PyYAML's events into a tree. Refuses what has no single meaning (duplicate keys, tags, merges, cycles) and
    what passes a limit (size, depth, number of values)."""

    def __init__(self, name: str, parser: yaml.SafeLoader) -> None:
        self._name = name
        self._parser = parser
        self._anchors: dict[str, tuple[str, RawValue | None, int, int]] = {}
        """What an alias stands for: its place, the value (None while it is still being read), and how many values and
        levels that has."""
        self._num_values = 0

    def document(self) -> RawValue:
        """The one document of the stream."""
        self._parser.get_event()  # the start of the stream
        if self._parser.check_event(yaml.StreamEndEvent):
            raise ConfigError(f"{self._name}:1:1: the file is empty; write its sections, as in examples/")
        self._parser.get_event()  # the start of the document
        root, _ = self._value("", 1)
        self._parser.get_event()  # the end of the document
        if not self._parser.check_event(yaml.StreamEndEvent):
            place = self._place(self._parser.get_event())
            raise ConfigError(
                f"{place}: not valid YAML: found a second document; remove the line '---' and one of them"
            )
        return root

    def _value(self, path: str, depth: int) -> tuple[RawValue, int]:
        """The next value, and how many levels it has."""
        event = self._parser.get_event()
        place = self._place(event)
        if isinstance(event, yaml.AliasEvent):
            return self._alias(event.anchor, place, depth)
        if event.tag is not None:
            raise ConfigError(f"{place}: tags such as {shown(event.tag)} are not supported; remove it")
        if depth > MOST_DEPTH:
            raise ConfigError(f"{place}: nested more than {MOST_DEPTH} deep; no setting is")
        self._count(1, place)
        before = self._num_values
        if event.anchor is not None:
            self._anchors[event.anchor] = place, None, 0, 0
        height = 1
        if isinstance(event, yaml.ScalarEvent):
            node = RawValue(kind="scalar", place=place, value=event.value, is_text=event.style is None)
        elif isinstance(event, yaml.SequenceStartEvent):
            items: list[RawValue] = []
            while not self._parser.check_event(yaml.SequenceEndEvent):
                item, below = self._value(join_path(path, len(items)), depth + 1)
                items.append(item)
                height = max(height, below + 1)
            self._parser.get_event()
            node = RawValue(kind="list", place=place, items=tuple(items))
        else:
            pairs = list(self._pairs(path, depth))
            height += max((below for _, below in pairs), default=0)
            node = RawValue(kind="mapping", place=place, entries=tuple(entry for entry, _ in pairs))
        if event.anchor is not None:
            self._anchors[event.anchor] = place, node, self._num_values - before + 1, height
        return node, height

    def _pairs(self, path: str, depth: int) -> Iterator[tuple[RawEntry, int]]:
        """The entries of a mapping, with the levels of each."""
        first_place: dict[str, str] = {}
        while not self._parser.check_event(yaml.MappingEndEvent):
            event = self._parser.get_event()
            place = self._place(event)
            if not isinstance(event, yaml.ScalarEvent):
                what = "an alias" if isinstance(event, yaml.AliasEvent) else "a list or a mapping"
                raise ConfigError(f"{place}: expected a plain key, not {what}; write 'key: value'")
            key = event.value
            if event.tag is not None:
                raise ConfigError(f"{place}: tags such as {shown(event.tag)} are not supported; remove it")
            if key == "<<" and event.style is None:
                raise ConfigError(f"{place}: merge keys ('<<') are not supported; write the keys out")
            if len(key) > MOST_KEY_CHARACTERS or not key.isprintable():
                raise ConfigError(f"{place}: expected a plain key, not {shown(key)}; write a short word")
            below = join_path(path, key)
            if key in first_place:
                raise ConfigError(
                    f"{place}: duplicate key '{below}'; it is already set at {first_place[key]}; remove one of them"
                )
            first_place[key] = place
            node, height = self._value(below, depth + 1)
            yield RawEntry(key=key, place=place, node=node), height
        self._parser.get_event()

    def _alias(self, name: str | None, place: str, depth: int) -> tuple[RawValue, int]:
        if (name or "") not in self._anchors:
            raise ConfigError(
                f"{place}: not valid YAML: found undefined alias {shown(name)}; put text that begins with * in quotes"
            )
        written_at, node, num_values, height = self._anchors[name or ""]
        if node is None:
            raise ConfigError(f"{written_at}: this alias contains itself; write the value out")
        if depth + height - 1 > MOST_DEPTH:
            raise ConfigError(f"{place}: nested more than {MOST_DEPTH} deep; no setting is")
        self._count(num_values, place)
        return node, height

    def _count(self, num_values: int, place: str) -> None:
        """An alias counts for all that it stands for: a few lines of aliases can stand for billions of values."""
        self._num_values += num_values
        if self._num_values > MOST_VALUES:
            raise ConfigError(f"{place}: the file has more than {MOST_VALUES:,} values; write fewer, such as ranges")

    def _place(self, event: yaml.Event) -> str:
        assert event.start_mark is not None, "every event of a text has a mark"
        return f"{self._name}:{event.start_mark.line + 1}:{event.start_mark.column + 1}"
