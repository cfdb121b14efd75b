"""Flat TOML files of numbers that each say where they come from, for devices and for clusters.

What: `read_numbers` checks such a file whole: every key known and there, every entry `{ value = ..., source = ... }`,
every source 'measured: how', 'vendor: which document', 'published: where' or 'assumed: from what'.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

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
        raise ConfigError(f"{where}: not valid TOML: {error}") from None
    except (RecursionError, ValueError):  # tables without end; an integer of more than 4,300 digits
        raise ConfigError(f"{where}: not valid TOML: nested too deep, or a number of too many digits") from None
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


def known_name(name: str, names: Collection[str]) -> str | None:
    """The one of `names` that a person means by `RTX 4090` or `rtx-4090`: case, blanks, hyphens and underscores do not
    count. None where there is none."""
    bare = "".join(letter for letter in name.casefold() if letter not in " -_")
    return bare if bare in names else None


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
