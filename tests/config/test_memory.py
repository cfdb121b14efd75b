"""The memory section: keys, what is refused in this version, and the rules it turns into."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from lowtide.config.memory import MemoryConfig, SwapRule, load_memory
from lowtide.core.budget import DeviceMemory
from lowtide.core.fate import Fate, Tier
from lowtide.errors import ConfigError


@pytest.fixture
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


SECTION = """\
recompute: [layers.0-15, mul]
swap:
  - layers.16-31
  - {match: sdpa, prefetch: 2, tier: disk}
keep: [layers.31]
host_budget: 96GiB
disk_budget: 1TB
disk_path: /scratch
optimizer: auto
min_bytes: 64KiB
layers: [model.layers.0, model.layers.1]
"""


def test_every_key(in_tmp: Path) -> None:
    Path("memory.yaml").write_text(SECTION)
    config = load_memory("memory.yaml")
    assert config == MemoryConfig(
        recompute=("layers.0-15", "mul"),
        swap=(SwapRule(match="layers.16-31"), SwapRule(match="sdpa", prefetch=2, tier="disk")),
        keep=("layers.31",),
        host_budget=96 << 30,
        disk_budget=10**12,
        disk_path=Path("/scratch"),
        optimizer="auto",
        min_bytes=64 << 10,
        layers=("model.layers.0", "model.layers.1"),
    )
    assert [(rule.fate, rule.pattern.text, rule.prefetch, rule.tier, rule.where) for rule in config.rules().rules] == [
        (Fate.RECOMPUTE, "layers.0-15", None, None, "memory.yaml:1:13"),
        (Fate.RECOMPUTE, "mul", None, None, "memory.yaml:1:26"),
        (Fate.SWAP, "layers.16-31", None, None, "memory.yaml:3:5"),
        (Fate.SWAP, "sdpa", 2, Tier.DISK, "memory.yaml:4:5"),
        (Fate.KEEP, "layers.31", None, None, "memory.yaml:5:8"),
    ]


def test_the_memory_section_of_a_run_file(in_tmp: Path) -> None:
    Path("run.yaml").write_text("model: {hidden: 8}\nmemory:\n  recompute: all\n")
    (rule,) = load_memory(Path("run.yaml")).rules().rules
    assert (rule.fate, rule.pattern.text, rule.where) == (Fate.RECOMPUTE, "*", "run.yaml:3:14")


def test_nothing_asked_is_nothing_done() -> None:
    config = load_memory({})
    assert config == MemoryConfig()
    assert config.min_bytes is None and config.least_bytes == 1 << 20
    assert config.rules().does_nothing


def test_what_leaves_the_budget_to_the_device_sets_the_solver_free_too() -> None:
    for written in ({"budget": "90%"}, {"budget": "AUTO"}, {"budget": " 12.5 % "}):
        config = load_memory(written)
        assert config.has_budget and config.recomputes_freely and config.swaps_freely
        assert config.slices_loss == {"may": True, "must": False, "rows": None, "layer_rows": None, "row_wise": ()}
    assert load_memory({"budget": " 12.5 % "}).budget == Fraction(25, 2)


def test_bytes_ask_no_device() -> None:
    def unknown() -> DeviceMemory:
        raise AssertionError("nobody has to know")

    config = load_memory({"budget": "1GiB"})
    assert config.settled(unknown) == (config, 1 << 30, "")


def test_shares_become_bytes_on_a_device(in_tmp: Path) -> None:
    memory = DeviceMemory(total_bytes=80 << 30, free_bytes=80 << 30, where="of h100")
    Path("memory.yaml").write_text("budget: 90%\nkeep: [layers.0]\n")  # plain text: a share is no number for YAML
    config, budget_bytes, line = load_memory("memory.yaml").settled(lambda: memory)
    assert budget_bytes == config.budget == 72 << 30
    assert config.keep == ("layers.0",)
    assert line == "budget 90% = 72.0 GiB: of 80.0 GiB of h100"
    config, _, line = load_memory({"budget": "auto"}).settled(lambda: memory)
    assert config.budget == 76 << 30
    assert line == "budget auto = 76.0 GiB: 80.0 GiB of h100 less 4.0 GiB (5 %) for what no plan counts"


def test_all() -> None:
    rules = load_memory({"swap": "all", "keep": ["norm"]}).rules()
    assert rules.decide("layers.0.mlp.mul").reason == "swap '*' (memory.swap)"
    assert rules.decide("layers.0.norm.mul").reason == "keep 'norm' (memory.keep[0])"


def test_a_budget_sets_the_solver_free() -> None:
    config = load_memory({"budget": "20GiB"})
    assert (config.budget, config.recomputes_freely, config.swaps_freely) == (20 << 30, True, True)
    config = load_memory({"budget": "20GiB", "recompute": "none", "swap": ["layers.0"]})
    assert (config.recomputes_freely, config.swaps_freely) == (False, False)
    assert not load_memory({}).recomputes_freely


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"budget": 0}, "memory.budget: must be more than 0 bytes; write e.g. budget: 20GiB, or leave it out"),
        (
            {"budget": "0%"},
            "memory.budget: '0%' is not a share of a device; write more than 0% and at most 100%, such as 90%",
        ),
        (
            {"budget": "101%"},
            "memory.budget: '101%' is not a share of a device; write more than 0% and at most 100%, such as 90%",
        ),
        ({"budget": "-5%"}, "memory.budget: '-5%' is not a share; write a number from 1 to 100 and a %, such as 90%"),
        (
            {"budget": "most"},
            "memory.budget: 'most' is not a size; write a number and a unit, such as 20GiB, 512MiB or 20GB",
        ),
        (
            {"host_budget": "90%"},
            "memory.host_budget: '90%' is not a size; write a number and a unit, such as 20GiB, 512MiB or 20GB",
        ),
        ({"recompute": "auto"}, "memory.recompute: auto needs a budget to plan for; write e.g. budget: 20GiB"),
        ({"swap": "auto"}, "memory.swap: auto needs a budget to plan for; write e.g. budget: 20GiB"),
        ({"optimizer": "host"}, "memory.optimizer: expected keep, swap, auto or in_backward, not 'host'"),
        (
            {"optimizer": {"state": "swap", "overlap": "deferred"}},
            "memory.optimizer: expected keep, swap, auto or in_backward, not a mapping",
        ),
        ({"layers": []}, "memory.layers: names no layer; remove it to have the layers found, or list their names"),
        ({"budgett": 1}, "memory.budgett: unknown key; did you mean 'budget'?"),
        ({"swap": [{"match": "a", "prefech": 1}]}, "memory.swap[0].prefech: unknown key; did you mean 'prefetch'?"),
        ({"swap": [{"match": "a", "prefetch": -1}]}, "memory.swap[0].prefetch: must be 0 or more, not -1"),
        (
            {"swap": [{"match": "a", "tier": "dsk"}]},
            "memory.swap[0].tier: expected host, disk or null, not 'dsk'; did you mean 'disk'?",
        ),
        ({"recompute": "layers.0-15"}, "memory.recompute: expected auto, none, all, a list or null, not 'layers.0-15'; "
         "write ['layers.0-15']"),
        ({"recompute": ["a", "b..c"]},
         "memory.recompute[1]: pattern 'b..c': nothing between two dots; write '*' for any one name"),
    ],
)  # fmt: skip
def test_mistakes(mapping: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_memory(mapping)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("memroy: {swap: all}\n", "run.yaml:1:1: unknown section 'memroy'; did you mean 'memory'?"),
        ("train: {steps: 1}\nmemmory: {}\n", "run.yaml:2:1: unknown section 'memmory'; did you mean 'memory'?"),
        ("model: {path: x}\n", "run.yaml:1:1: missing section 'memory'; write 'memory:' and its keys below it: budget, "
         "host_budget, disk_budget, disk_path, recompute, swap, keep, optimizer, weights, loss, rows, row_wise, "
         "min_bytes, check, strict, layers"),
        ("budgett: 1GiB\n", "run.yaml:1:1: unknown key 'budgett'; did you mean 'budget'?"),
        ("[a]\n", "run.yaml:1:1: expected a mapping, not a list; write 'key: value', with these keys: budget, "
         "host_budget, disk_budget, disk_path, recompute, swap, keep, optimizer, weights, loss, rows, row_wise, "
         "min_bytes, check, strict, layers"),
    ],
)  # fmt: skip
def test_a_file_without_the_section(in_tmp: Path, text: str, message: str) -> None:
    Path("run.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_memory("run.yaml")
    assert str(caught.value) == message


def test_mistakes_in_a_file_have_their_line(in_tmp: Path) -> None:
    Path("run.yaml").write_text("memory:\n  budget: 0GiB\n")
    with pytest.raises(ConfigError) as caught:
        load_memory("run.yaml")
    assert str(caught.value) == (
        "run.yaml:2:11: 'memory.budget' must be more than 0 bytes; write e.g. budget: 20GiB, or leave it out"
    )
    Path("memory.yaml").write_text("swap:\n  - match: layers.15-0\n")
    with pytest.raises(ConfigError) as caught:
        load_memory("memory.yaml")
    assert str(caught.value) == ("memory.yaml:2:5: pattern 'layers.15-0': the range '15-0' is backwards; write 0-15")


def test_something_else() -> None:
    with pytest.raises(ConfigError) as caught:
        load_memory(3)  # type: ignore[arg-type]
    assert str(caught.value) == "memory: expected a plan, a mapping or the path of a YAML file, not 3"
