"""The hardware files: all load, every number has a source, and mistakes are told in one line."""

from __future__ import annotations

import tomllib
from importlib import resources
from pathlib import Path

import pytest

from lowtide.errors import ConfigError
from lowtide.timeline.hardware import hardware_names, load_hardware

KNOWN = ("ascend910b", "ascend910c", "b200", "cpu", "gh200", "h100", "h200", "rtx4090")
GOOD = """
memory_bytes = { value = "24GiB", source = "vendor: sheet" }
flops_per_second.float32 = { value = 2e12, source = "measured: a matmul" }
attention_share = { value = 0.5, source = "assumed: half" }
memory_bytes_per_second = { value = 1e12, source = "measured: a copy" }
launch_seconds = { value = 1e-6, source = "measured: an add" }
[link]
out_bytes_per_second = { value = 5e9, source = "measured: a copy out" }
in_bytes_per_second = { value = 6e9, source = "measured: a copy in" }
latency_seconds = { value = 0, source = "assumed: none" }
compute_share = { value = 0.0, source = "assumed: none" }
"""


def test_names() -> None:
    assert hardware_names() == KNOWN


@pytest.mark.parametrize("name", KNOWN)
def test_every_number_has_a_source(name: str) -> None:
    hardware = load_hardware(name)
    text = (resources.files("lowtide.timeline") / "devices" / f"{name}.toml").read_text(encoding="utf-8")
    numbers = tomllib.loads(text)
    keys = {key for key in numbers if key not in ("link", "flops_per_second")}
    keys |= {f"link.{key}" for key in numbers["link"]}
    keys |= {f"flops_per_second.{key}" for key in numbers["flops_per_second"]}
    assert set(hardware.sources) == keys
    assert all(source.startswith(("measured: ", "vendor: ", "assumed: ")) for source in hardware.sources.values())
    assert hardware.name == name


@pytest.mark.parametrize("name", KNOWN)
def test_numbers_are_of_the_right_size(name: str) -> None:
    """No unit was mixed up: a device lies within what devices are."""
    hardware = load_hardware(name)
    assert 16e9 <= hardware.memory_bytes <= 300e9
    assert set(hardware.flops_per_second) - {"float8"} == {"bfloat16", "float16", "float32"}
    assert 1e9 <= min(hardware.flops_per_second.values()) <= max(hardware.flops_per_second.values()) <= 3e15
    assert 0.4 <= hardware.attention_share <= 1.0
    assert 1e10 <= hardware.memory_bytes_per_second <= 1e13
    assert 1e-6 <= hardware.launch_seconds <= 1e-4
    link = hardware.link
    assert 1e9 <= link.out_bytes_per_second <= link.in_bytes_per_second <= 1e12
    assert 0 < link.latency_seconds <= 1e-3
    assert 0 < link.compute_share <= 0.5


def test_roofline() -> None:
    h200 = load_hardware("h200")
    assert h200.op_seconds(7e14, 1, "bfloat16") == 1.0
    assert h200.op_seconds(7e14, 1, "bfloat16", is_attention=True) == pytest.approx(1 / 0.75)
    assert h200.op_seconds(1, 4e12, "bfloat16") == 1.0
    assert h200.op_seconds(1, 1, "bfloat16") == 5e-6
    assert h200.op_seconds(5e13, 1, "complex64") == 1.0  # what is not known takes the rate of float32


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(GOOD, encoding="utf-8")
    for given in (path, str(path)):
        hardware = load_hardware(given)
        assert (hardware.name, hardware.memory_bytes) == ("mine", 24 << 30)
        assert hardware.flops_per_second == {"float32": 2e12}
        assert hardware.link.latency_seconds == 0.0
        assert hardware.sources["link.in_bytes_per_second"] == "measured: a copy in"


def error_of(given: object) -> str:
    with pytest.raises(ConfigError) as info:
        load_hardware(given)  # type: ignore[arg-type]
    return str(info.value)


def test_an_unknown_name() -> None:
    known = "(known: " + ", ".join(KNOWN) + "; a file of your own is given by its path, which ends in .toml)"
    assert error_of("h201") == f"hardware: unknown device 'h201'; did you mean 'h200'? {known}"
    assert error_of("toaster") == f"hardware: unknown device 'toaster' {known}"
    assert error_of("H200") == f"hardware: unknown device 'H200'; did you mean 'h200'? {known}"


def test_a_file_that_is_not_there() -> None:
    assert error_of("nowhere/x.toml") == "nowhere/x.toml: no such file; check the path"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("launch_seconds =", "launch_second =",
         "unknown key 'launch_second'; did you mean 'launch_seconds'?"),
        ("latency_seconds =", "latency =", "unknown key 'link.latency'; did you mean 'link.latency_seconds'?"),
        ("flops_per_second.float32", "flops_per_second.float65",
         "unknown key 'flops_per_second.float65'; did you mean 'flops_per_second.float64'?"),
        ('launch_seconds = { value = 1e-6, source = "measured: an add" }\n', "",
         "missing key 'launch_seconds'; write launch_seconds = { value = 1.0, source = \"measured: how\" }"),
        ('{ value = 1e-6, source = "measured: an add" }', "1e-6",
         "launch_seconds: expected { value = 1.0, source = \"measured: how\" }"),
        ('{ value = 1e-6, source = "measured: an add" }', "{ value = 1e-6 }",
         "launch_seconds: expected { value = 1.0, source = \"measured: how\" }"),
        ("measured: an add", "a guess",
         "launch_seconds: a source starts with 'measured: ', 'vendor: ' or 'assumed: ', unlike 'a guess'"),
        ("value = 1e-6", "value = 0", "launch_seconds: expected a number greater than zero, not 0"),
        ("value = 1e-6", "value = true", "launch_seconds: expected a number greater than zero, not True"),
        ("value = 1e-6", "value = inf", "launch_seconds: expected a number greater than zero, not inf"),
        ("value = 5e9", 'value = "5GB"', "link.out_bytes_per_second: expected a number greater than zero, not '5GB'"),
        ("value = 0.0", "value = -1", "link.compute_share: expected a number, zero or more, not -1"),
        ('"24GiB"', '"24GiP"',
         "memory_bytes: '24GiP' is not a size; write a number and a unit, such as 20GiB, 512MiB or 20GB"),
        ("[link]\n", "[link\n", "not valid TOML: Expected ']' at the end of a table declaration (at line 7, column 6)"),
    ],
)  # fmt: skip
def test_mistakes(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "mine.toml"
    assert old in GOOD
    path.write_text(GOOD.replace(old, new, 1), encoding="utf-8")
    assert error_of(path) == f"{path}: {message}"
