"""The hardware files: all load, every number has a source, and mistakes are told in one line."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import pytest

from lowtide.errors import ConfigError
from lowtide.timeline.hardware import known_names, load_cluster, load_hardware

KNOWN = (
    "a100", "a6000", "ascend910b", "ascend910c", "b200", "cpu", "gh200", "h100", "h200", "l40s", "mi300x", "rtx4090",
    "rtx5090",
)  # fmt: skip
GOOD = """
memory_bytes = { value = "24GiB", source = "vendor: sheet" }
flops_per_second.float32 = { value = 2e12, source = "measured: a matmul" }
attention.flash.forward = { value = 1e12, source = "assumed: half" }
attention.flash.backward = { value = 8e11, source = "published: a paper" }
attention.ramp_tokens = { value = 0, source = "assumed: none" }
memory_bytes_per_second = { value = 1e12, source = "measured: a copy" }
eager_bytes_per_second = { value = 6e11, source = "measured: a sum" }
launch_seconds = { value = 1e-6, source = "measured: an add" }
[link]
out_bytes_per_second = { value = 5e9, source = "measured: a copy out" }
in_bytes_per_second = { value = 6e9, source = "measured: a copy in" }
latency_seconds = { value = 0, source = "assumed: none" }
compute_share = { value = 0.0, source = "assumed: none" }
"""


def paths_of(table: dict, prefix: str = "") -> Iterator[str]:
    for key, entry in table.items():
        if set(entry) == {"value", "source"}:
            yield prefix + key
        else:
            yield from paths_of(entry, f"{prefix}{key}.")


def test_names() -> None:
    assert known_names("devices") == KNOWN


@pytest.mark.parametrize("name", KNOWN)
def test_every_number_has_a_source(name: str) -> None:
    hardware = load_hardware(name)
    text = (resources.files("lowtide.timeline") / "devices" / f"{name}.toml").read_text(encoding="utf-8")
    numbers = tomllib.loads(text)
    assert set(hardware.sources) == set(paths_of(numbers))
    starts = ("measured: ", "vendor: ", "published: ", "assumed: ")
    assert all(source.startswith(starts) for source in hardware.sources.values())
    assert hardware.name == name


@pytest.mark.parametrize("name", KNOWN)
def test_numbers_are_of_the_right_size(name: str) -> None:
    """No unit was mixed up: a device lies within what devices are."""
    hardware = load_hardware(name)
    assert 16e9 <= hardware.memory_bytes <= 300e9
    assert set(hardware.flops_per_second) - {"float8"} == {"bfloat16", "float16", "float32"}
    assert 1e9 <= min(hardware.flops_per_second.values()) <= max(hardware.flops_per_second.values()) <= 3e15
    for forward, backward in hardware.attention.values():
        assert 0.15 <= backward / hardware.flops_per_second["bfloat16"] <= 1.0
        assert backward <= forward
    assert 1e10 <= hardware.eager_bytes_per_second <= hardware.memory_bytes_per_second <= 1e13
    assert hardware.multiprocessors in (0, *range(64, 200))
    assert 1e-6 <= hardware.launch_seconds <= 1e-4
    link = hardware.link
    assert 1e9 <= link.out_bytes_per_second <= link.in_bytes_per_second <= 1e12
    assert 0 < link.latency_seconds <= 1e-3
    assert 0 < link.compute_share <= 0.5


def test_roofline() -> None:
    h200 = load_hardware("h200")
    assert h200.op_seconds(7.945e14, 1, "bfloat16") == 1.0
    assert h200.op_seconds(1, 4e12, "bfloat16") == h200.op_seconds(0, 4e12, "bfloat16", is_fused=True) == 1.0
    assert h200.op_seconds(0, 2.98e12, "bfloat16") == 1.0
    assert h200.op_seconds(1, 1, "bfloat16") == 5e-6
    assert h200.op_seconds(5e13, 1, "complex64") == 1.0  # what is not known takes the rate of float32


def test_attention() -> None:
    h100 = load_hardware("h100")
    for kernel, (forward, backward) in {
        "flash": (340e12, 325e12), "cudnn": (545e12, 530e12), "flash3": (625e12, 570e12), "efficient": (340e12, 325e12),
    }.items():  # fmt: skip
        long = {"dtype": "bfloat16", "tokens": 1e12, "kernel": kernel}
        assert h100.attention_seconds(forward, 1, **long) == pytest.approx(1.0)
        assert h100.attention_seconds(backward, 1, is_backward=True, **long) == pytest.approx(1.0)
    # Half of the rate over as many tokens as the ramp has.
    assert h100.attention_seconds(340e12, 1, "bfloat16", tokens=230) == pytest.approx(2.0)
    assert h100.attention_seconds(340e12, 1, "float32", tokens=1e12) == pytest.approx(794.5 / 50)
    cpu = load_hardware("cpu")
    assert cpu.attention_seconds(669e9, 1, "float32", tokens=64) == pytest.approx(4.0)


def test_published_rates_of_attention_are_met() -> None:
    """FlashAttention-2 on an H100: the published rates over 2k to 16k tokens, within 3 %; of 512, within a quarter."""
    h100 = load_hardware("h100")
    for tokens, forward, backward, share in (
        (512, 191, 214, 0.25), (2048, 298, 291, 0.03), (4096, 319, 310, 0.03), (8192, 333, 318, 0.03),
        (16384, 335, 322, 0.03),
    ):  # fmt: skip
        for rate, is_backward in ((forward, False), (backward, True)):
            seconds = h100.attention_seconds(rate * 1e12, 1, "bfloat16", tokens=tokens, is_backward=is_backward)
            assert seconds == pytest.approx(1.0, rel=share)


def test_half_a_kernel_is_a_mistake(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    line = 'attention.cudnn.forward = { value = 1e12, source = "assumed: half" }\n'
    path.write_text(GOOD.replace("[link]", f"{line}[link]"), encoding="utf-8")
    assert error_of(path) == f"{path}: missing key 'attention.cudnn.backward'; a kernel has a rate for each pass"


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
    assert error_of(3) == "hardware: expected a name such as 'h200', or the path of a TOML file, not 3"
    assert error_of("toaster") == f"hardware: unknown device 'toaster' {known}"
    assert error_of("H201") == f"hardware: unknown device 'H201'; did you mean 'h200'? {known}"


@pytest.mark.parametrize("given", ["H200", "h200", "H-200", "H 200", "h_200"])
def test_case_blanks_and_hyphens_do_not_count_in_a_name(given: str) -> None:
    assert load_hardware(given) == load_hardware("h200")
    assert load_hardware(given).name == "h200"


def test_a_cluster_is_named_as_freely() -> None:
    assert load_cluster("H-800") == load_cluster("h800")


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
         "launch_seconds: a source starts with 'measured: ', 'vendor: ', 'published: ' or 'assumed: ', "
         "unlike 'a guess'"),
        ("value = 1e-6", "value = 0", "launch_seconds: expected a number greater than zero, not 0"),
        ("value = 1e-6", "value = true", "launch_seconds: expected a number greater than zero, not True"),
        ("value = 1e-6", "value = inf", "launch_seconds: expected a number greater than zero, not inf"),
        ("value = 5e9", 'value = "5GB"', "link.out_bytes_per_second: expected a number greater than zero, not '5GB'"),
        ("value = 0.0", "value = -1", "link.compute_share: expected a number, zero or more, not -1"),
        ('"24GiB"', '"24GiP"',
         "memory_bytes: '24GiP' is not a size; write a number and a unit, such as 20GiB, 512MiB or 20GB"),
        ("[link]\n", "[link\n",
         "not valid TOML: Expected ']' at the end of a table declaration (at line 10, column 6); "
         "lowtide/timeline/devices/h200.toml shows the form"),
    ],
)  # fmt: skip
def test_mistakes(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "mine.toml"
    assert old in GOOD
    path.write_text(GOOD.replace(old, new, 1), encoding="utf-8")
    assert error_of(path) == f"{path}: {message}"
