"""What a device can do, in a handful of numbers, and how long an operator takes on it by roofline.

What: `load_hardware("h200")`, or the path of a file of one's own. The files, devices/*.toml, are flat: one number a
line, and with each number where it comes from: 'measured: how', 'vendor: which document', or 'assumed: from what'.
Rates are what programs reach, so most of them are assumed shares of a vendor's peak until somebody measures.
Roofline: Williams, Waterman, Patterson, CACM 2009: an operator takes the longer of its arithmetic and its traffic.

Not covered: kernels that reach less than the stated shares; measured profiles replace all of this.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from lowtide.config.source import MOST_YAML_BYTES, read_text
from lowtide.errors import ConfigError, did_you_mean
from lowtide.timeline.sourced import Form, read_numbers
from lowtide.timeline.step import Link

_DEVICE = Form(
    keys=(
        "memory_bytes",
        "flops_per_second.float32",
        "attention_share",
        "memory_bytes_per_second",
        "launch_seconds",
        "link.out_bytes_per_second",
        "link.in_bytes_per_second",
        "link.latency_seconds",
        "link.compute_share",
    ),
    optional=(
        "flops_per_second.bfloat16",
        "flops_per_second.float16",
        "flops_per_second.float64",
        "flops_per_second.float8",
    ),
    tables=("link", "flops_per_second"),
    may_be_zero=("link.latency_seconds", "link.compute_share"),
    sizes=("memory_bytes",),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One device of one rank. All rates are what programs reach, not what is printed on the box."""

    name: str
    memory_bytes: int
    flops_per_second: Mapping[str, float]
    """Of large matrix products, by dtype (`float8`, `bfloat16`, `float16`, `float32`)."""
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
    numbers, sources = read_numbers(text, where, _DEVICE)
    flops = {key.partition(".")[2]: value for key, value in numbers.items() if key.startswith("flops_per_second.")}
    return Hardware(
        name=name,
        memory_bytes=int(numbers["memory_bytes"]),
        flops_per_second=flops,
        attention_share=numbers["attention_share"],
        memory_bytes_per_second=numbers["memory_bytes_per_second"],
        launch_seconds=numbers["launch_seconds"],
        link=Link(**{key.partition(".")[2]: value for key, value in numbers.items() if key.startswith("link.")}),
        sources=sources,
    )
