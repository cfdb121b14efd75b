"""Sizes and durations: text to numbers and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.units import GIB, MIB, format_bytes, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("20GiB", 20 * GIB),
        ("20GB", 20_000_000_000),
        ("512 MiB", 512 * MIB),
        (" 1.5gib ", 3 * GIB // 2),
        ("1048576", MIB),
        ("1_048_576", MIB),
        ("64KiB", 65536),
        ("2TB", 2 * 10**12),
        ("12B", 12),
        ("20G", 20_000_000_000),
        ("20Gi", 20 * GIB),
        (".5GiB", GIB // 2),
        ("0.1GiB", 107374182),
        (4096, 4096),
        (0, 0),
    ],
)
def test_parse_bytes(text: int | str, size_bytes: int) -> None:
    assert parse_bytes(text) == size_bytes


@pytest.mark.parametrize(
    "text", ["20 GiBB", "20I", "GiB", ".", ".5", "5.GiB", "", "1.5", "-1GiB", "1e3MiB", "٣GiB", "1_GiB", True]
)
def test_parse_bytes_refuses(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size") as caught:
        parse_bytes(text)
    assert str(caught.value) == f"'{text}' is not a size; write a number and a unit, such as 20GiB, 512MiB or 20GB"


def test_parse_bytes_refuses_negative_numbers() -> None:
    with pytest.raises(ValueError, match=r"^-1 is not a size; a size is never negative$"):
        parse_bytes(-1)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (20 * GIB, "20.0 GiB"),
        (20_000_000_000, "18.6 GiB"),
        (GIB - 1, "1.0 GiB"),
        (1000 * MIB, "1000.0 MiB"),
        (512 * MIB, "512.0 MiB"),
        (MIB // 2, "0.5 MiB"),
        (4096, "0.004 MiB"),
        (1, "<0.001 MiB"),
        (0, "0 MiB"),
        (-3 * MIB, "-3.0 MiB"),
    ],
)
def test_format_bytes(size_bytes: int, text: str) -> None:
    assert format_bytes(size_bytes) == text


@given(st.integers(min_value=MIB, max_value=1 << 45))
def test_what_is_printed_can_be_read_back(size_bytes: int) -> None:
    assert abs(parse_bytes(format_bytes(size_bytes)) - size_bytes) <= size_bytes * 0.051


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (12e-6, "12 µs"),
        (8.1e-3, "8.1 ms"),
        (1.43, "1.43 s"),
        (200, "3 min 20 s"),
        (-0.5, "-500.0 ms"),
        (0.9999, "1.00 s"),
        (119.9, "2 min 0 s"),
    ],
)
def test_format_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
