"""What a budget comes to on a device, and what makes no sense there."""

from __future__ import annotations

from fractions import Fraction

import pytest

from lowtide.core.budget import DeviceMemory, parse_budget, settle
from lowtide.errors import ConfigError
from lowtide.units import GIB


def has(total: int, free: int | None = None) -> DeviceMemory:
    return DeviceMemory(total_bytes=total, free_bytes=total if free is None else free, where="on cuda:0")


@pytest.mark.parametrize(
    ("written", "budget"),
    [
        ("20GiB", 20 * GIB), (7, 7), ("7", 7), ("auto", "auto"), ("Auto ", "auto"), ("90%", Fraction(90)),
        ("100%", Fraction(100)), (".5 %", Fraction(1, 2)),
        ("33.3%", Fraction(333, 10)),
    ],
)  # fmt: skip
def test_what_is_written(written: int | str, budget: object) -> None:
    assert parse_budget(written) == budget


@pytest.mark.parametrize(
    "written", ["0%", "0.0%", "100.1%", "1e3%", "%", "90%%", "9 0%", "half", "nan%", "9" * 5000 + "%"]
)
def test_what_is_no_budget(written: str) -> None:
    with pytest.raises(ValueError, match="is not a s"):
        parse_budget(written)


def test_shares_are_exact() -> None:
    assert settle(Fraction(333, 10), has(10**18))[0] == 333 * 10**15
    assert settle(Fraction(100), has(7))[0] == 7


def test_auto_leaves_a_headroom_and_what_others_have() -> None:
    assert settle("auto", has(100 * GIB)) == (
        95 * GIB,
        "budget auto = 95.0 GiB: 100.0 GiB on cuda:0 less 5.0 GiB (5 %) for what no plan counts",
    )
    assert settle("auto", has(100 * GIB, 60 * GIB)) == (
        55 * GIB,
        "budget auto = 55.0 GiB: 100.0 GiB on cuda:0, 40.0 GiB taken by others, less 5.0 GiB (5 %) for what no "
        "plan counts",
    )


def test_a_share_is_of_all_and_says_what_is_taken() -> None:
    assert settle(Fraction(90), has(100 * GIB, 60 * GIB)) == (
        90 * GIB,
        "budget 90% = 90.0 GiB: of 100.0 GiB on cuda:0; 40.0 GiB of it is taken by others",
    )


def test_nothing_left_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        settle("auto", has(100 * GIB, 4 * GIB))
    assert str(caught.value) == (
        "budget auto: 4.0 GiB on cuda:0 is free, and 5.0 GiB stays free of any plan; end what takes the rest, or write "
        "a size such as 20GiB"
    )
    with pytest.raises(ConfigError) as caught:
        settle(Fraction(1), has(10))
    assert str(caught.value) == "budget 1%: that is less than a byte on cuda:0; write a size such as 20GiB"


def test_what_a_process_has_beyond_the_device_does_not_count() -> None:
    """A free count and blocks of one's own are read one after the other: their sum may pass the whole."""
    assert settle("auto", has(100 * GIB, 101 * GIB))[0] == 95 * GIB
