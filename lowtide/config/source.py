"""Where settings come from: a YAML file or a Python mapping, both turned into one small tree that knows its places.

Why: PyYAML's constructors lose the line of every value and apply YAML 1.1 (`no` is False, `1e-4` is text, `12:30` is
750). Its *node tree* has both the marks and the untouched text, so types are decided by what the field declares
(loader.py), never by how a value looks.

Not covered: YAML tags (`!!python/...`) and merge keys (`<<`); both are refused with a message.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml

from lowtide.errors import ConfigError

_LOOKS_TYPED = re.compile(r"[-+.0-9][-+.0-9eE_]*|true|false")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One `key: value` of a mapping, in the order written."""

    key: str
    place: str
    """Where the key stands; for a Python mapping the dotted path."""
    node: Node


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One value before it has a type."""

    kind: Literal["scalar", "list", "mapping"]
    place: str
    """`run.yaml:4:9`, or the dotted path of a Python value."""
    is_text: bool = False
    """True for YAML scalars that are plain text: their type is still open."""
    value: object = None
    """Scalars only: the text (YAML) or the Python value."""
    items: tuple[Node, ...] = ()
    entries: tuple[Entry, ...] = ()

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
        if isinstance(self.value, str) and not self.is_text and _LOOKS_TYPED.fullmatch(self.value):
            return f"the text {self.value!r}"  # otherwise the message would read "expected a number, not '1'"
        return repr(self.value)


def join_path(parent: str, key: str | int) -> str:
    """`memory` + `swap` -> `memory.swap`; `memory.swap` + 0 -> `memory.swap[0]`."""
    if isinstance(key, int):
        return f"{parent}[{key}]"
    return f"{parent}.{key}" if parent else key


def read_yaml(path: str | os.PathLike[str]) -> Node:
    """The tree of a file. Raises `ConfigError` when it is missing, unreadable, not YAML or empty."""
    name = os.fspath(path)
    try:
        text = Path(name).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{name}: no such file; check the path") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{name}: this is not a text file; save it as UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read: {error.strerror}") from None
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
        raise ConfigError(f"{place}: not valid YAML: {error.problem or error.context}") from None
    except yaml.reader.ReaderError as error:
        raise ConfigError(f"{name}: not valid YAML: character {error.position + 1}: {error.reason}") from None
    if root is None:
        raise ConfigError(f"{name}:1:1: the file is empty")
    return _YamlReader(name).node(root, "")


def read_mapping(value: object, path: str) -> Node:
    """The tree of Python values (mappings, lists, tuples, scalars); places are dotted paths that start with `path`."""
    if isinstance(value, Mapping):
        entries = []
        for key, item in value.items():
            if not isinstance(key, str):
                raise ConfigError(f"{path}: expected text keys, not {key!r}")
            below = join_path(path, key)
            entries.append(Entry(key=key, place=below, node=read_mapping(item, below)))
        return Node(kind="mapping", place=path, entries=tuple(entries))
    if isinstance(value, list | tuple):
        items = tuple(read_mapping(item, join_path(path, index)) for index, item in enumerate(value))
        return Node(kind="list", place=path, items=items)
    return Node(kind="scalar", place=path, value=value)


class _YamlReader:
    """Turns PyYAML nodes into ours, and refuses what has no single meaning: duplicate keys, tags, merges, cycles."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._open: set[int] = set()

    def node(self, node: yaml.Node, path: str) -> Node:
        place = self._place(node)
        if id(node) in self._open:
            raise ConfigError(f"{place}: this alias contains itself; write the value out")
        if node.tag.startswith("!") or node.tag.startswith("tag:yaml.org,2002:python"):
            raise ConfigError(f"{place}: tags such as {node.tag!r} are not supported; remove it")
        if isinstance(node, yaml.ScalarNode):
            return Node(kind="scalar", place=place, value=node.value, is_text=node.style is None)
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.SequenceNode):
                items = tuple(self.node(item, join_path(path, index)) for index, item in enumerate(node.value))
                return Node(kind="list", place=place, items=items)
            return Node(kind="mapping", place=place, entries=self._entries(node, path))
        finally:
            self._open.discard(id(node))

    def _entries(self, node: yaml.Node, path: str) -> tuple[Entry, ...]:
        first_place: dict[str, str] = {}
        entries = []
        for key_node, value_node in node.value:
            place = self._place(key_node)
            if not isinstance(key_node, yaml.ScalarNode):
                raise ConfigError(f"{place}: expected a plain key, not a list or a mapping")
            key = key_node.value
            if key_node.tag == "tag:yaml.org,2002:merge":
                raise ConfigError(f"{place}: merge keys ('<<') are not supported; write the keys out")
            below = join_path(path, key)
            if key in first_place:
                raise ConfigError(f"{place}: duplicate key '{below}'; it is already set at {first_place[key]}")
            first_place[key] = place
            entries.append(Entry(key=key, place=place, node=self.node(value_node, below)))
        return tuple(entries)

    def _place(self, node: yaml.Node) -> str:
        return f"{self._name}:{node.start_mark.line + 1}:{node.start_mark.column + 1}"
