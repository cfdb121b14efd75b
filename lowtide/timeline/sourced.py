"""Flat TOML files of numbers that each say where they come from, for devices and for clusters.

What: `read_sourced` finds one by its name or path, and `read_numbers` checks it whole: every key known and there, every
entry `{ value = ..., source = ... }`, every source 'measured: how', 'vendor: which document', 'published: where' or
'assumed: from what'.
"""

from __future__ import annotations

import math
import os
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from lowtide.config.source import MOST_YAML_BYTES, read_text
from lowtide.errors import ConfigError, did_you_mean
from lowtide.units import parse_bytes

_FORM = '{ value = 1.0, source = "measured: how" }'


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What a kind of file has in it."""

    keys: tuple[str, ...]
    optional: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()
    """Keys that hold more keys: `link` for `link.latency_seconds`; one level each."""
    may_be_zero: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ()
    """Keys whose value may be written as a size: `80GB`."""
    sources: tuple[str, ...] = ("measured: ", "vendor: ", "published: ", "assumed: ")


def read_numbers(text: str, where: str, form: Form) -> tuple[dict[str, float], dict[str, str]]:
    """The numbers of a file and their sources, by key. `where` starts each message.

    Raises `ConfigError`: not TOML, or any mistake in a key, a number or a source.
    """
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"{where}: not valid TOML: {error}; lowtide/timeline/devices/h200.toml shows the form"
        ) from None
    except (RecursionError, ValueError):  # tables without end; an integer of more than 4,300 digits
        raise ConfigError(
            f"{where}: not valid TOML: nested too deep, or a number of too many digits; write it anew"
        ) from None
    entries = _flatten(document, "", form.tables)
    known = (*form.keys, *form.optional)
    for key in entries:
        if key not in known:
            raise ConfigError(f"{where}: unknown key '{key}'{did_you_mean(key, known)}")
    for key in form.keys:
        if key not in entries:
            raise ConfigError(f"{where}: missing key '{key}'; write {key} = {_FORM}")
    numbers = {key: _number(where, key, entry, form) for key, entry in entries.items()}
    return numbers, {key: entry["source"] for key, entry in entries.items()}


def known_names(folder: str) -> tuple[str, ...]:
    """The files that lowtide has in this folder of `timeline/`, in alphabetical order, without their ending."""
    names = (entry.name for entry in _folder(folder).iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml")))


def read_sourced(name_or_path: str | os.PathLike[str], folder: str, kind: str) -> tuple[str, str, str]:
    """The text of one of these files, or of one of the user's own, whose path ends in .toml; where it is, for messages;
    and its name. In a name case does not count, nor do blanks, hyphens and underscores: `RTX 4090` is `rtx4090`.

    `kind`: what the files describe, `hardware: unknown device`. Raises `ConfigError`: name unknown, file missing.
    """
    name = os.fspath(name_or_path)
    if name.endswith(".toml"):
        return read_text(name, most_bytes=MOST_YAML_BYTES), name, Path(name).stem
    known = "".join(letter for letter in name.casefold() if letter not in " -_")
    names = known_names(folder)
    if known not in names:
        raise ConfigError(
            f"{kind} '{name}'{did_you_mean(name.lower(), names)} (known: {', '.join(names)}; a file of your own is "
            "given by its path, which ends in .toml)"
        )
    return (_folder(folder) / f"{known}.toml").read_text(encoding="utf-8"), f"{known}.toml", known


def _folder(name: str) -> Any:
    return resources.files("lowtide.timeline") / name


def _flatten(table: Mapping[str, Any], prefix: str, tables: Collection[str]) -> dict[str, Any]:
    """`link.latency_seconds` -> what was written there."""
    entries: dict[str, Any] = {}
    for key, value in table.items():
        if prefix + key in tables and isinstance(value, dict):
            entries |= _flatten(value, f"{prefix}{key}.", tables)
        else:
            entries[prefix + key] = value
    return entries


def _number(where: str, key: str, entry: Any, form: Form) -> float:
    if not isinstance(entry, dict) or set(entry) != {"value", "source"}:
        raise ConfigError(f"{where}: {key}: expected {_FORM}")
    source, value = entry["source"], entry["value"]
    if not isinstance(source, str) or not source.startswith(form.sources):
        *some, last = (f"'{start}'" for start in form.sources)
        raise ConfigError(f"{where}: {key}: a source starts with {', '.join(some)} or {last}, unlike {source!r}")
    if key in form.sizes and isinstance(value, str):
        try:
            value = parse_bytes(value)
        except ValueError as error:
            raise ConfigError(f"{where}: {key}: {error}") from None
    may_be_zero = key in form.may_be_zero
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or value < 0 or (value == 0 and not may_be_zero):
        wanted = "a number, zero or more" if may_be_zero else "a number greater than zero"
        raise ConfigError(f"{where}: {key}: expected {wanted}, not {value!r}")
    return float(value)
