"""Bytes and times: the only place where text such as "20GiB" becomes a number, and a number becomes text.

Why: 20GB is 18.6 GiB, a 7 % trap. Both spellings are accepted with their SI meaning, also without the B, as Kubernetes
has it (20G is 20GB, 20Gi is 20GiB); everything is computed in bytes, and everything is printed in GiB or MiB.

Not covered: bits.
"""

from __future__ import annotations

import re
from fractions import Fraction

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
TIB = 1 << 40
MOST_BYTES = 1 << 60
"""1 EiB: no memory and no disk of one rank has as much, and sums of a few sizes still fit into 64 bits."""

_PREFIXES = {"ki": KIB, "mi": MIB, "gi": GIB, "ti": TIB, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BYTES_PER_UNIT = {"": 1, "b": 1, **_PREFIXES, **{f"{prefix}b": num_bytes for prefix, num_bytes in _PREFIXES.items()}}
_MOST_CHARACTERS = 40
_SIZE = re.compile(r"(?P<number>[0-9]+(?:_[0-9]+)*(?:\.[0-9]+)?|\.[0-9]+)\s*(?P<unit>[A-Za-z]*)", re.ASCII)


def parse_bytes(value: int | str) -> int:
    """Bytes from `20GiB`, `20GB`, `20G`, `.5 MiB` or a plain number of bytes. Fractions of a byte are dropped.

    Raises `ValueError` saying what a size looks like, or that it is more than `MOST_BYTES`.
    """
    if isinstance(value, bool):
        raise ValueError(_not_a_size(value))
    if isinstance(value, int):
        if value < 0:
            raise ValueError(f"{value} is not a size; a size is never negative")
        return _checked(value, value)
    if not isinstance(value, str):
        raise ValueError(_not_a_size(value))
    if len(value) > _MOST_CHARACTERS:
        raise ValueError(_not_a_size(f"{value[:_MOST_CHARACTERS]}..."))
    match = _SIZE.fullmatch(value.strip())
    if match is None:
        raise ValueError(_not_a_size(value))
    unit = match["unit"].lower()
    if unit not in _BYTES_PER_UNIT:
        raise ValueError(_not_a_size(value))
    if unit in ("", "b") and "." in match["number"]:
        raise ValueError(_not_a_size(value))
    return _checked(int(Fraction(match["number"].replace("_", "")) * _BYTES_PER_UNIT[unit]), value)


def _checked(num_bytes: int, written: int | str) -> int:
    if num_bytes > MOST_BYTES:
        text = written if num_bytes < 10**_MOST_CHARACTERS else "a number of so many digits"
        raise ValueError(f"{text} is too large; the largest size is 1048576TiB")
    return num_bytes


def format_bytes(num_bytes: int) -> str:
    """`20.0 GiB` or `512.0 MiB`; below 0.1 MiB three decimals (`0.004 MiB`), below what they can show `<0.001 MiB`."""
    sign, size_bytes = ("-", -num_bytes) if num_bytes < 0 else ("", num_bytes)
    if size_bytes >= GIB - MIB // 20:  # 1023.95 MiB and more would be printed as 1024.0 MiB
        return f"{sign}{size_bytes / GIB:.1f} GiB"
    if size_bytes >= MIB // 10:
        return f"{sign}{size_bytes / MIB:.1f} MiB"
    if size_bytes == 0:
        return "0 MiB"
    if size_bytes < MIB / 2000:
        return f"{sign}<0.001 MiB"
    return f"{sign}{size_bytes / MIB:.3f} MiB"


def printed_up(num_bytes: int) -> int:
    """Rounded up to what `format_bytes` prints, so that the printed size is enough."""
    unit = GIB if num_bytes >= GIB else MIB
    return -(-num_bytes * 10 // unit) * unit // 10


def format_seconds(seconds: float) -> str:
    """`12 µs`, `8.1 ms`, `1.43 s`, `3 min 20 s`."""
    sign, size_seconds = ("-", -seconds) if seconds < 0 else ("", seconds)
    if size_seconds == 0:
        return "0 s"
    if size_seconds < 0.9995e-3:
        return f"{sign}{size_seconds * 1e6:.0f} µs"
    if size_seconds < 0.9995:
        return f"{sign}{size_seconds * 1e3:.1f} ms"
    if size_seconds < 119.5:
        return f"{sign}{size_seconds:.2f} s"
    minutes, rest_seconds = divmod(round(size_seconds), 60)
    return f"{sign}{minutes} min {rest_seconds} s"


def _not_a_size(value: object) -> str:
    written = repr(str(value)) if isinstance(value, str | int) else f"a {type(value).__name__}"
    return f"{written} is not a size; write a number and a unit, such as 20GiB, 512MiB or 20GB"
