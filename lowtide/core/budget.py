"""What a person writes as a budget, and the bytes that it comes to on a device.

What: `20GiB` is bytes. `90%` is that share of the memory that the device has. `auto` is what the device has for this
rank now, less a headroom. `parse_budget` reads them; `settle` does the arithmetic on a `DeviceMemory` and says it in
one line.

Why a headroom: a driver's context, workspaces of libraries, and free blocks that do not fit are in no plan.
Why plain numbers: a budget that was planned for is bytes. What was written is not stored, so that a plan means the same
on every device. Cost: none.

Not covered: who else takes memory of the device later; how much a device has (engines/choose.py, hardware
files).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from lowtide.errors import ConfigError
from lowtide.units import format_bytes, parse_bytes

HEADROOM = Fraction(1, 20)
"""The share of the device's memory that `auto` leaves free."""

_SHARE = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*%", re.ASCII)
_MOST_CHARACTERS = 40


Budget = int | Fraction | Literal["auto"]
"""Bytes, a share of what the device has in percent (above 0, at most 100), or what it has for this rank."""


def parse_budget(value: int | str) -> Budget:
    """A size as `parse_bytes` reads it, `90%` or `auto`. Raises `ValueError` that says what a budget looks like."""
    if not isinstance(value, str) or len(value) > _MOST_CHARACTERS:
        return parse_bytes(value)
    text = value.strip()
    if text.casefold() == "auto":
        return "auto"
    match = _SHARE.fullmatch(text)
    if match is None:
        if "%" in text:
            raise ValueError(f"{text!r} is not a share; write a number from 1 to 100 and a %, such as 90%")
        return parse_bytes(text)
    percent = Fraction(match["number"])
    if not 0 < percent <= 100:
        raise ValueError(f"{text!r} is not a share of a device; write more than 0% and at most 100%, such as 90%")
    return percent


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """The memory of a device as one rank sees it."""

    total_bytes: int
    """Memory of the device; a share such as 90% is a share of it."""
    free_bytes: int
    """The part that this rank can use now: free memory and what it holds already."""
    where: str
    """`of a h100`, `of main memory (cgroup /job)`."""


def settle(budget: Budget, memory: DeviceMemory) -> tuple[int, str]:
    """The bytes of a budget on this device, and one line with the arithmetic, such as
    `budget auto = 70.8 GiB: 74.5 GiB of a h100 less 3.7 GiB (5 %) for what no plan counts`; none for plain bytes.

    Raises `ConfigError` where nothing is left.
    """
    if isinstance(budget, int):
        return budget, ""
    total, free = memory.total_bytes, min(memory.free_bytes, memory.total_bytes)
    taken = f"; {format_bytes(total - free)} of it is taken by others" if total - free > total // 100 else ""
    if isinstance(budget, Fraction):
        nbytes, share = int(total * budget / 100), f"budget {float(budget):g}%"
        if nbytes <= 0:
            raise ConfigError(f"{share}: that is less than a byte {memory.where}; write a size such as 20GiB")
        return nbytes, f"{share} = {format_bytes(nbytes)}: of {format_bytes(total)} {memory.where}{taken}"
    headroom = int(total * HEADROOM)
    left = free - headroom
    if left <= 0:
        raise ConfigError(
            f"budget auto: {format_bytes(free)} {memory.where} is free, and {format_bytes(headroom)} stays free of any "
            "plan; end what takes the rest, or write a size such as 20GiB"
        )
    others = f", {format_bytes(total - free)} taken by others," if taken else ""
    return left, (
        f"budget auto = {format_bytes(left)}: {format_bytes(total)} {memory.where}{others} less "
        f"{format_bytes(headroom)} (5 %) for what no plan counts"
    )
