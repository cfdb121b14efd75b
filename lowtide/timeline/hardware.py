"""What a device can do, in a handful of numbers, and how long an operator takes on it by roofline.

What: `load_hardware("h200")`, or the path of a file of one's own. The files, devices/*.toml, are flat: one number a
line, and with each number where it comes from: 'measured: how', 'vendor: which document', or 'assumed: from what'.
Rates are what programs reach, so most of them are assumed shares of a vendor's peak until somebody measures.
Roofline: Williams, Waterman, Patterson, CACM 2009: an operator takes the longer of its arithmetic and its traffic.

Not covered: kernels that reach less than the stated shares; measured profiles replace all of this.
"""

from __future__ import annotations

import math
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from lowtide.config.source import MOST_YAML_BYTES, read_text
from lowtide.errors import ConfigError, did_you_mean
from lowtide.timeline.step import Link
from lowtide.units import parse_bytes

_KEYS = (
    "memory_bytes",
    "flops_per_second.float32",
    "attention_share",
    "memory_bytes_per_second",
    "launch_seconds",
    "link.out_bytes_per_second",
    "link.in_bytes_per_second",
    "link.latency_seconds",
    "link.compute_share",
)
_OPTIONAL_KEYS = ("flops_per_second.bfloat16", "flops_per_second.float16", "flops_per_second.float64")
_MAY_BE_ZERO = ("link.latency_seconds", "link.compute_share")
_FORM = '{ value = 1.0, source = "measured: how" }'
_SOURCES = ("measured: ", "vendor: ", "assumed: ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One device of one rank. All rates are what programs reach, not what is printed on the box."""

    name: str
    memory_bytes: int
    flops_per_second: Mapping[str, float]
    """Of large matrix products, by dtype (`bfloat16`, `float16`, `float32`)."""
    attention_share: float
    """Fused attention reaches this share of the above."""
    memory_bytes_per_second: float
    launch_seconds: float
    """The least that any operator takes."""
    link: Link
    sources: Mapping[str, str] = field(default_factory=dict)
    """Key of the file (`link.latency_seconds`) -> 'measured: ...', 'vendor: ...' or 'assumed: ...'."""

    def op_seconds(self, flops: float, nbytes: float, dtype: str, *, is_attention: bool = False) -> float:
        """Roofline time of one operator with `flops` floating point operations that moves `nbytes`."""
        rate = self.flops_per_second.get(dtype, self.flops_per_second["float32"])
        if is_attention:
            rate *= self.attention_share
        return max(flops / rate, nbytes / self.memory_bytes_per_second, self.launch_seconds)


def hardware_names() -> tuple[str, ...]:
    """The devices that lowtide knows, in alphabetical order."""
    return tuple(sorted(entry.name.removesuffix(".toml") for entry in _devices().iterdir() if _is_toml(entry.name)))


def load_hardware(name_or_path: str | os.PathLike[str]) -> Hardware:
    """The device of that name, or of a TOML file of the same form as the ones in `timeline/devices`.

    Raises `ConfigError`: name unknown, file missing, not TOML, or any mistake in a key, a number or a source.
    """
    name = os.fspath(name_or_path)
    if _is_toml(name):
        return _parse(read_text(name, most_bytes=MOST_YAML_BYTES), name, Path(name).stem)
    names = hardware_names()
    if name not in names:
        raise ConfigError(
            f"hardware: unknown device '{name}'{did_you_mean(name, names)} (known: {', '.join(names)}; a file of your "
            "own is given by its path, which ends in .toml)"
        )
    return _parse((_devices() / f"{name}.toml").read_text(encoding="utf-8"), f"{name}.toml", name)


def _devices() -> Any:
    return resources.files("lowtide.timeline") / "devices"


def _is_toml(name: str) -> bool:
    return name.endswith(".toml")


def _parse(text: str, where: str, name: str) -> Hardware:
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where}: not valid TOML: {error}") from None
    except (RecursionError, ValueError):  # tables without end; an integer of more than 4,300 digits
        raise ConfigError(f"{where}: not valid TOML: nested too deep, or a number of too many digits") from None
    entries = _flatten(document, "")
    known = (*_KEYS, *_OPTIONAL_KEYS)
    for key in entries:
        if key not in known:
            raise ConfigError(f"{where}: unknown key '{key}'{did_you_mean(key, known)}")
    for key in _KEYS:
        if key not in entries:
            raise ConfigError(f"{where}: missing key '{key}'; write {key} = {_FORM}")
    numbers = {key: _number(where, key, entry) for key, entry in entries.items()}
    flops = {key.partition(".")[2]: value for key, value in numbers.items() if key.startswith("flops_per_second.")}
    return Hardware(
        name=name,
        memory_bytes=int(numbers["memory_bytes"]),
        flops_per_second=flops,
        attention_share=numbers["attention_share"],
        memory_bytes_per_second=numbers["memory_bytes_per_second"],
        launch_seconds=numbers["launch_seconds"],
        link=Link(**{key.partition(".")[2]: value for key, value in numbers.items() if key.startswith("link.")}),
        sources={key: entry["source"] for key, entry in entries.items()},
    )


def _flatten(table: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """`link.latency_seconds` -> what was written there."""
    entries: dict[str, Any] = {}
    for key, value in table.items():
        if not prefix and key in ("link", "flops_per_second") and isinstance(value, dict):
            entries |= _flatten(value, f"{key}.")
        else:
            entries[prefix + key] = value
    return entries


def _number(where: str, key: str, entry: Any) -> float:
    if not isinstance(entry, dict) or set(entry) != {"value", "source"}:
        raise ConfigError(f"{where}: {key}: expected {_FORM}")
    source, value = entry["source"], entry["value"]
    if not isinstance(source, str) or not source.startswith(_SOURCES):
        raise ConfigError(
            f"{where}: {key}: a source starts with 'measured: ', 'vendor: ' or 'assumed: ', unlike {source!r}"
        )
    if key == "memory_bytes" and isinstance(value, str):
        try:
            value = parse_bytes(value)
        except ValueError as error:
            raise ConfigError(f"{where}: {key}: {error}") from None
    may_be_zero = key in _MAY_BE_ZERO
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or value < 0 or (value == 0 and not may_be_zero):
        wanted = "a number, zero or more" if may_be_zero else "a number greater than zero"
        raise ConfigError(f"{where}: {key}: expected {wanted}, not {value!r}")
    return float(value)
